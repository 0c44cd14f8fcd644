"""`torch.distributed.checkpoint` on two real ranks: what lands is one snapshot, as with torch's own storage everything
comes back, in any layout; and a rank that fails leaves nothing."""

import multiprocessing
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import Shard as Shard_
from torch.distributed._shard.sharded_tensor import ShardMetadata, init_from_local_shards
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from snapshot import Snapshot, StateDict
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter
from tests.helpers.versions import ALONE
from tests.interop.dcp_states import Ours, Theirs, emptied, load, model, outcome, quiet, save, told

USAGES = []


def usage(function):
    USAGES.append(function)
    return function


def spread(tensor, *placements, mesh=(2,)):
    made = init_device_mesh("cpu", mesh, mesh_dim_names=("x", "y")[: len(mesh)])
    return distribute_tensor(tensor, made, placements or (Shard(0),))


def like(state):
    """The same layout, with zeros."""
    if isinstance(state, DTensor):
        return torch.zeros_like(state)
    return {key: like(each) for key, each in state.items()} if isinstance(state, dict) else emptied(state)


def sharded_model(seed=0, mesh=(2,)):
    made = model(seed)
    fully_shard(made, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=("x", "y")[: len(mesh)]))
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1 + seed)
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return made, optimizer


@usage
def dtensors(system, where):
    torch.manual_seed(0)
    state = {
        "rows": spread(torch.randn(7, 3)),
        "columns": spread(torch.randn(4, 5), Shard(1)),
        "one": spread(torch.ones(1, 4)),
        "copies": spread(torch.randn(3), Replicate()),
        "empty": spread(torch.ones(0, 3)),
        "b": spread(torch.ones(6).bfloat16()),
        "mesh": spread(torch.randn(4, 4), Replicate(), Shard(1), mesh=(1, 2)),
        "plain": torch.arange(3.0),
        "step": 4,
        "both": spread(torch.randn(4, 4), Replicate(), Shard(0), mesh=(2, 1)),
        "rank": dist.get_rank() * 0,
    }
    tied = state["rows"]
    save({**state, "tied": tied}, system.writer(where))
    return load(like({**state, "tied": tied}), system.reader(where))


@usage
def another_layout(system, where):
    full = torch.arange(35.0).view(7, 5)
    save({"w": spread(full), "v": full}, system.writer(where))
    return load(
        {"w": torch.zeros_like(spread(full, Shard(1))), "v": torch.zeros_like(spread(full))}, system.reader(where)
    )


@usage
def one_rank_reads_what_two_wrote(system, where):
    full = torch.arange(35.0).view(7, 5)
    save({"w": spread(full), "v": [full, full + 1, full + 2]}, system.writer(where))
    return load(
        {"w": torch.zeros(7, 5), "v": [torch.zeros(7, 5)] * 2 + [torch.zeros(7, 5)]}, system.reader(where), **ALONE
    )


@usage
def two_ranks_read_what_one_wrote(system, where):
    full = torch.arange(35.0).view(7, 5)
    if dist.get_rank() == 0:
        save({"w": full}, system.writer(where), **ALONE)
    dist.barrier()
    return load({"w": torch.zeros_like(spread(full))}, system.reader(where))


def fully_sharded(system, where, mesh=(2,)):
    made, optimizer = sharded_model(mesh=mesh)
    state, optim = get_state_dict(made, optimizer)
    save({"model": state, "optim": optim, "step": 3}, system.writer(where))
    other, fresh = sharded_model(1, mesh)
    state, optim = get_state_dict(other, fresh)
    both = {"model": state, "optim": optim, "step": 0}
    load(both, system.reader(where))
    set_state_dict(other, fresh, model_state_dict=both["model"], optim_state_dict=both["optim"])
    return {"model": other.state_dict(), "optim": fresh.state_dict(), "step": both["step"]}


@usage
def fsdp2(system, where):
    return fully_sharded(system, where)


@usage
def hsdp(system, where):
    return fully_sharded(system, where, (2, 1))


@usage
def sharded_tensors(system, where):
    rank = dist.get_rank()
    rows = ((0, 3), (3, 4))
    metadata = [ShardMetadata([begin, 0], [count, 5], f"rank:{at}/cpu") for at, (begin, count) in enumerate(rows)]

    def made(value):
        mine = [Shard_(torch.full((rows[rank][1], 5), float(value)), metadata[rank])]
        return init_from_local_shards(mine, 7, 5)

    save({"w": made(rank + 1), "step": 1}, system.writer(where))
    into = load({"w": made(9), "step": 0}, system.reader(where))
    whole = load({"w": torch.zeros(7, 5)}, system.reader(where))
    return [shard.tensor for shard in into["w"].local_shards()], into["step"], whole


@usage
def ranks_with_keys_of_their_own(system, where):
    rank = dist.get_rank()
    state = {"all": torch.ones(3), f"of {rank}": {"x": torch.full((2,), float(rank)), "n": rank}}
    save(state, system.writer(where))
    return load(emptied(state), system.reader(where))


@usage
def places_that_contradict_each_other(system, where):
    rank = dist.get_rank()
    state = {"a": {"b": torch.full((2,), 5.0)}} if rank else {"a": 3}
    save(state, system.writer(where))
    return load(emptied(state), system.reader(where))


@usage
def replicas_on_the_lowest_rank(system, where):
    state = {str(i): torch.full((100,), float(i)) for i in range(6)}
    save(state, system.writer(where), planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    return load(emptied(state), system.reader(where))


@usage
def plans_that_are_kept(system, where):
    kind = type(f"Kept{system.name}{where}", (DefaultSavePlanner,), {})  # torch keeps plans by the class's name
    found = []
    for step, (count, size) in enumerate(((3, 1), (3, 1), (3, 3000), (3, 3000), (4, 3000))):
        # what rank 0 has of its own decides who saves what both have: so rank 1's share changes, and not its own plan
        state = {} if dist.get_rank() else {"own": torch.ones(size)}
        state |= {"w": spread(torch.arange(5.0) + step), "t": {str(i): torch.full((4,), 1.0 + i) for i in range(count)}}
        state |= {"step": step}
        place = f"{where}/{system.name}-{step}"
        save(state, system.writer(where), planner=kind(enable_plan_caching=True), checkpoint_id=place)
        found.append(load(like(state), system.reader(where), checkpoint_id=place))
    return found


@usage
def no_collectives(system, where):
    rank = dist.get_rank()
    state = {"w": spread(torch.arange(35.0).view(7, 5)), "plain": torch.full((2,), float(rank)), "rank": rank}
    save(state, system.writer(where), use_collectives=False)
    return load(like(state), system.reader(where))


@usage
def a_missing_key(system, where):
    save({"w": spread(torch.ones(4))}, system.writer(where))
    more = {"new": torch.ones(1)} if dist.get_rank() else {}
    return load({"w": torch.zeros_like(spread(torch.ones(4))), **more}, system.reader(where))


@usage
def a_thread_that_saves(system, where):
    made, optimizer = sharded_model()
    state, optim = get_state_dict(made, optimizer)
    with quiet():
        pending = dcp.async_save({"model": state, "optim": optim, "step": 3}, storage_writer=system.writer(where))
        made[0].weight.data.to_local().zero_()  # what was staged is not to change any more
        pending.result()
    other, fresh = sharded_model(1)
    state, optim = get_state_dict(other, fresh)
    return load({"model": state, "optim": optim, "step": 0}, system.reader(where))


class Failing(DefaultSavePlanner):
    """Fails on one rank: where data are asked for, or before."""

    def __init__(self, rank, where):
        super().__init__()
        self.rank, self.where = rank, where

    def resolve_data(self, write_item):
        self._fail("write")
        return super().resolve_data(write_item)

    def finish_plan(self, new_plan):
        self._fail("plan")
        return super().finish_plan(new_plan)

    def _fail(self, where):
        if where == self.where and dist.get_rank() == self.rank:
            raise OSError("planned")


def work(number, folder):
    """What comes of a usage with torch's storage, and with ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = outcome(USAGES[number], Theirs(), folder)
        dist.barrier()
        ours = outcome(USAGES[number], Ours(), folder)
        if ours[0] == "raised" != theirs[0]:
            USAGES[number](Ours(), folder)
        dist.barrier()
    return theirs, ours


@pytest.mark.parametrize("number", range(len(USAGES)), ids=lambda number: USAGES[number].__name__)
def test_dcp_on_two_ranks_equals_torch_s_own_storage(number, two, folder):
    for theirs, ours in two.run(work, number, folder, timeout=300):
        assert ours == theirs
        if USAGES[number] is a_missing_key:
            assert ours == ("raised", [(1, "RuntimeError")])
        else:
            assert ours[0] == "returned"


def saved(folder, **options):
    save(
        {"w": spread(torch.arange(35.0).view(7, 5)), "v": torch.ones(3), "step": 1, "l": [torch.ones(1)]},
        SnapshotWriter(folder),
    )


def test_dcp_save_of_two_ranks_is_one_snapshot(two, folder):
    two.run(saved, folder)
    snapshot = Snapshot(folder)
    assert snapshot.verify()
    assert set(snapshot.get_manifest()) == {"0/w", "0/v", "0/step", "0/l", "0/l/0"}
    assert snapshot.get_manifest()["0/w"].shape == (7, 5)
    assert snapshot.metadata.metadata == {}  # the paths say it all
    assert torch.equal(snapshot.read_object("0/w"), torch.arange(35.0).view(7, 5))
    assert {name.rpartition("/")[2][12:15] for name in os.listdir(f"{folder}/data")} == {"-0-", "-1-"}
    state = load({"w": torch.zeros(7, 5), "step": 0}, SnapshotReader(folder), **ALONE)
    assert torch.equal(state["w"], torch.arange(35.0).view(7, 5))
    assert state["step"] == 1


def taken(folder):
    rank = dist.get_rank()
    state = {"w": spread(torch.arange(35.0).view(7, 5)), "own": torch.full((400,), float(rank)), "rank": rank}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(folder, {"model": StateDict(**state)})
    return told(load({"model": like(state)}, SnapshotReader(folder))) == told({"model": state})


def test_dcp_load_on_ranks_of_a_snapshot_taken_by_several(two, folder):
    assert two.run(taken, folder) == [True, True]


def failing(folder, rank, where):
    with pytest.raises(CheckpointException) as raised:
        save({"w": spread(torch.ones(7, 5)), "v": torch.ones(9)}, SnapshotWriter(folder), planner=Failing(rank, where))
    dist.barrier()
    return sorted(raised.value.failures)


def left(folder):
    return sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize("where", ["write", "plan"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("before", [False, True])
def test_dcp_save_failing_on_one_rank_keeps_the_old_snapshot(two, folder, rank, where, before):
    if before:
        two.run(saved, folder)
    held = left(folder)
    failed = two.run(failing, folder, rank, where)
    assert all(rank in each for each in failed)
    if where == "write":
        assert left(folder) == held
    two.run(saved, folder)
    assert Snapshot(folder).verify()
    assert not [name for name in left(folder) if name.startswith(".take")]
    ids = {name.rpartition("/")[2][:12] for name in left(folder) if name.startswith("data/")}
    assert ids == {Snapshot(folder).metadata.save_id}


def apart(folder):
    with pytest.raises(CheckpointException, match="coordinator"):
        save({"w": spread(torch.ones(7, 5))}, SnapshotWriter(f"{folder}/{dist.get_rank()}"))


def test_dcp_save_with_different_paths_per_rank_is_refused(two, folder):
    two.run(apart, folder)
    assert left(folder) == []


def shadow(folder):
    save({"a": torch.ones(2)}, SnapshotWriter(folder))
    with pytest.raises(Exception, match="of all ranks"):
        save({"a": torch.ones(2)}, SnapshotWriter(folder), use_collectives=False)


def test_dcp_save_of_one_rank_alone_is_not_hidden_by_values_of_all(two, folder):
    two.run(shadow, folder)


def in_process(folder):
    multiprocessing.current_process()._config["daemon"] = False  # else it may have no process of its own
    state = {"w": spread(torch.arange(35.0).view(7, 5)), "v": torch.ones(3), "step": 1}
    with quiet():
        writer = SnapshotWriter(folder)
        kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
        dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind).result()
        dcp.async_save({**state, "step": 2}, storage_writer=writer, async_checkpointer_type=kind).result()
    return load({**like(state)}, SnapshotReader(folder))["step"]


@pytest.mark.skipif(not hasattr(dcp.state_dict_saver, "AsyncCheckpointerType"), reason="this torch has no such type")
def test_dcp_async_save_in_a_process(two, folder):
    assert two.run(in_process, folder, timeout=300) == [2, 2]
    assert Snapshot(folder).verify()
    two.restart()  # each has a process of its own now


def switching(folder, order):
    """Save with the writer of torch and with this library's in turn, by planners that share their cached plans."""
    kind = type(f"Kept{order}", (DefaultSavePlanner,), {})  # torch keeps plans by the class's name
    systems = {"torch": Theirs(), "snapshot": Ours()}
    for step, name in enumerate(order.split()):
        place, state = f"{folder}/{step}", {"w": spread(torch.arange(35.0).view(7, 5) + step), "step": step}
        save(state, systems[name].writer(place), planner=kind(enable_plan_caching=True), checkpoint_id=place)
        found = load(like(state), systems[name].reader(place), checkpoint_id=place)
        assert found["w"].to_local().equal(state["w"].to_local())
        assert found["step"] == step


@pytest.mark.parametrize("order", ["torch snapshot torch snapshot snapshot", "snapshot torch snapshot torch torch"])
def test_dcp_snapshot_writer_alternates_with_torch_and_cached_plans(two, folder, order):
    two.run(switching, folder, order)
