"""Snapshots of several ranks, compared and copied by one process."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import Snapshot, StateDict


def _save(path, dim, change):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(64.0).view(8, 8)
    whole[5, 3] += change
    state = StateDict(w=distribute_tensor(whole, mesh, [Shard(dim)]), big=torch.ones(2000), step=3)
    Snapshot.take(path, {"s": state, "own": StateDict(position=rank, seen=[rank])}, replicated=["s/big"])


def test_diff_ignores_other_world_sizes_and_shards(two, four, folder):
    two.run(_save, f"{folder}/two", 0, 0)
    two.run(_save, f"{folder}/again", 0, 0)
    two.run(_save, f"{folder}/columns", 1, 0)
    two.run(_save, f"{folder}/changed", 1, 1)
    four.run(_save, f"{folder}/four", 0, 0)
    Snapshot.take(f"{folder}/one", {"s": StateDict(w=torch.arange(64.0).view(8, 8), big=torch.ones(2000), step=3)})
    same = Snapshot.diff(f"{folder}/two", f"{folder}/again")
    assert (same.same, same.entries_read) == (True, 0)
    cut = Snapshot.diff(f"{folder}/two", f"{folder}/columns")
    assert (cut.same, cut.entries_read) == (True, 1)
    changed = Snapshot.diff(f"{folder}/two", f"{folder}/changed", values=True)
    assert [(each.path, each.values.differing) for each in changed] == [("s/w", 1)]
    more = Snapshot.diff(f"{folder}/two", f"{folder}/four")
    assert {each.path: each.kind for each in more} == {
        f"{rank}/own/{name}": "added" for rank in (2, 3) for name in ("position", "seen/0")
    }
    model = Snapshot.diff(f"{folder}/one", f"{folder}/four", select=["s"])
    assert (model.same, model.entries_read) == (True, 1)
    own = Snapshot.diff(f"{folder}/one", f"{folder}/two")
    assert {each.path for each in own.added} == {
        f"{rank}/own/{name}" for rank in (0, 1) for name in ("position", "seen/0")
    }


def test_copy_by_one_process_has_the_files_of_all_ranks(two, folder):
    two.run(_save, f"{folder}/two", 0, 0)
    report = Snapshot(f"{folder}/two").copy(f"{folder}/copy")
    copy = Snapshot(f"{folder}/copy")
    assert copy.verify()
    assert copy.metadata.world_size == 2
    assert report.files == len(copy.metadata.files) >= 2
    assert Snapshot.diff(f"{folder}/two", copy).same
    assert two.run(_load, f"{folder}/copy") == [(rank, [rank]) for rank in range(2)]


def _load(path):
    state = {"own": StateDict()}
    Snapshot(path).restore(state)
    return state["own"]["position"], state["own"]["seen"]


def _partly(path, who):
    rank = dist.get_rank()
    state = {"y": 1, "x": torch.arange(4.0)}
    Snapshot.take(path, {"s": StateDict(state if rank in who else {"y": 1})})


def test_diff_reports_an_object_missing_on_one_rank(two, folder):
    two.run(_partly, f"{folder}/both", (0, 1))
    two.run(_partly, f"{folder}/first", (0,))
    two.run(_partly, f"{folder}/second", (1,))
    for name, rank in (("first", 1), ("second", 0)):
        lost = Snapshot.diff(f"{folder}/both", f"{folder}/{name}")
        assert [each.path for each in lost.removed] == [f"{rank}/s/x"]
        found = Snapshot.diff(f"{folder}/{name}", f"{folder}/both")
        assert [each.path for each in found.added] == [f"{rank}/s/x"]
    assert Snapshot.diff(f"{folder}/both", f"{folder}/both").same
