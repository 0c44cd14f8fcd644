"""What counts as the same on all ranks, how it is found out in few exchanges, and how the work is shared."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import RestoreError, Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.errors import SuspectStateError
from tests.distributed.written_bytes import written


def _globs(path):
    rank = dist.get_rank()
    same = torch.ones(4000)
    state = StateDict(a=same, b=same.clone(), c=torch.ones(1000 + rank), d={"e/f": same.clone()}, only=same.clone())
    if rank == 1:
        del state["only"]
    globs = ["s/a", "s/c", "s/only", "s/d/**"] + (["s/b"] if rank == 0 else [])
    Snapshot.take(path, {"s": state}, replicated=globs)
    for value in (state["a"], state["b"], state["d"]["e/f"]):
        value.zero_()
    Snapshot(path).restore({"s": state})
    assert all(value.eq(1).all() for value in (state["a"], state["b"], state["c"], state["d"]["e/f"]))
    return "only" in state


def test_replicated_globs_count_only_if_all_ranks_gave_them_and_hold_equal_values(two, folder):
    assert two.run(_globs, f"{folder}/s") == [True, False]
    entries = Snapshot(f"{folder}/s").get_manifest()
    assert entries["0/s/a"].replicated
    assert "1/s/a" not in entries
    assert entries["0/s/d/e%2Ff"].replicated
    assert {"0/s/b", "1/s/b", "0/s/c", "1/s/c", "0/s/only"} <= entries.keys()
    first, second = two.warnings
    assert any("'s/b' is ignored, since not all ranks gave it" in text for text in first)
    for texts in (first, second):
        assert any("s/c" in text and "same dtype and shape" in text for text in texts), texts
    assert any("s/only" in text for text in first)


def _differs(path, tensor, check):
    rank = dist.get_rank()
    value = torch.full((5000,), float(rank)) if tensor else rank
    Snapshot.take(
        path, {"s": StateDict(same=1, x=value)}, replicated=["s/**"], options=TakeOptions(check_replicated=check)
    )


def test_replicated_inline_values_that_differ_raise_and_are_named(two, folder):
    for error in two.outcomes(_differs, f"{folder}/s", False, False):
        assert isinstance(error, SnapshotError)
        assert "s/x" in str(error)
    assert not Path(folder, "s", ".snapshot_metadata").exists()
    assert not list(Path(folder, "s").glob(".take*"))


def test_check_replicated_finds_tensors_that_differ(two, folder):
    two.run(_differs, f"{folder}/lucky", True, False)
    for error in two.outcomes(_differs, f"{folder}/s", True, True):
        assert isinstance(error, SnapshotError)
        assert "s/x: rank 1 and rank 0 have different values" in str(error)


def _ignored(path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 60), nn.BatchNorm1d(600), nn.Linear(60, 50))
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight"])
    model = nn.parallel.DistributedDataParallel(model)
    with torch.no_grad():
        model.module[2].weight.fill_(dist.get_rank())
        model.module[1].running_mean.fill_(dist.get_rank())
    Snapshot.take(path, {"model": model})
    return sorted(Snapshot(path).get_manifest())


def test_ddp_module_replicates_all_but_ignored_parameters(two, folder):
    entries = two.run(_ignored, f"{folder}/s")[0]
    assert [path for path in entries if path.startswith("1/")] == ["1/model/module.2.weight"]
    # buffers are copied from the first rank before each forward pass, so its are the ones that count
    assert Snapshot(f"{folder}/s").read_object("0/model/module.1.running_mean").eq(0).all()
    assert Snapshot(f"{folder}/s").read_object("1/model/module.2.weight").eq(1).all()
    assert Snapshot(f"{folder}/s").read_object("1/model/module.0.bias").shape == (60,)


def _stage_groups(path):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(40, 40), process_group=groups[rank // 2])
    Snapshot.take(path, {"model": model})
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    Snapshot(path).restore({"model": model})
    for name, value in model.state_dict().items():
        assert value.equal(kept[name])


def test_ddp_groups_of_pipeline_stages_with_equal_names_are_kept_apart(four, folder):
    four.run(_stage_groups, f"{folder}/s")


def _balance(path, sizes):
    state = StateDict(**{f"w{i}": torch.zeros(size) for i, size in enumerate(sizes)})
    own = torch.zeros(1000 * dist.get_rank())
    plan = Snapshot.plan({"s": state, "own": StateDict(x=own)}, replicated=["s/**"], path=path)
    Snapshot.take(path, {"s": state, "own": StateDict(x=own)}, replicated=["s/**"], options=TakeOptions(plan=plan))
    return plan.bytes_per_rank


@pytest.mark.parametrize("sizes", [[4_000_000], [500_000, 90_000, 90_000, 30_000, 30_000] + [300] * 30, [70_000] * 9])
def test_replicated_work_is_balanced_and_a_huge_tensor_is_split(four, folder, sizes):
    loads = four.run(_balance, f"{folder}/s", sizes)
    assert all(each == loads[0] for each in loads)
    data = Path(folder, "s", "data")
    real = [sum(f.stat().st_size for f in data.glob(f"*-{rank}-*.safetensors")) for rank in range(4)]
    assert max(real) <= 1.1 * sum(real) / 4 + 8192
    assert sum(loads[0]) == sum(sizes) * 4 + 4 * 1000 * 6
    assert written(f"{folder}/s") < sum(loads[0]) + 20_000


def _tied(path, glob):
    embedding = torch.arange(30_000.0).view(300, 100)
    state = StateDict(a=embedding, b=embedding, c=embedding.t())
    Snapshot.take(path, {"s": state}, replicated=glob)
    live = StateDict(a=torch.zeros(300, 100), b=torch.zeros(300, 100), c=torch.zeros(100, 300))
    Snapshot(path).restore({"s": live})
    assert live["a"].equal(embedding)
    assert live["b"].equal(embedding)
    assert live["c"].equal(embedding.t())


@pytest.mark.parametrize(("glob", "times"), [(["s/**"], 2), (["s/a"], 5), (["s/b"], 5)])
def test_tied_weights_are_written_once_if_both_names_are_replicated(two, folder, glob, times):
    two.run(_tied, f"{folder}/s", glob)
    assert 120_000 * times <= written(f"{folder}/s") < 120_000 * times + 10_000


def _tied_long(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    long = torch.arange(1 << 20, dtype=torch.float32)
    cut = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    Snapshot.take(path, {"s": StateDict(a=long, b=long, c=cut, d=cut)}, replicated=["s/a", "s/b"])
    live = StateDict(a=torch.zeros(1 << 20), b=torch.zeros(1 << 20), c=torch.zeros(8), d=torch.zeros(8))
    Snapshot(path).restore({"s": live})
    assert live["a"].equal(long)
    assert live["b"].equal(long)
    assert live["c"].equal(torch.arange(8.0))
    assert live["d"].equal(torch.arange(8.0))


def test_tied_weights_that_are_split_or_sharded_are_written_once(two, folder):
    two.run(_tied_long, f"{folder}/s")
    assert written(f"{folder}/s") < (4 << 20) + 10_000


def _exchanges(path, change):
    from snapshot.distributed.exchange import Exchange

    rank, counted = dist.get_rank(), []
    plain = Exchange.agree

    def counting(self, *args):
        counted[-1] += 1
        return plain(self, *args)

    Exchange.agree = counting
    try:
        for step in range(4):
            counted.append(0)
            state = StateDict(
                w=torch.full((3000,), float(step)), step=step, mine=rank * step, stage={f"x{rank}": torch.zeros(9)}
            )
            if change and step == 3:
                state["new"] = torch.zeros(10)
            Snapshot.take(f"{path}-{step}", {"s": state}, replicated=["s/w"])
        counted.append(0)
        Snapshot(f"{path}-2").restore({"s": state})
    finally:
        Exchange.agree = plain
    return counted


def test_take_repeated_needs_two_exchanges_before_writing(four, folder):
    for counted in four.run(_exchanges, f"{folder}/s", False):
        # hello, records, (details, records,) and the commit
        assert counted == [5, 5, 3, 3, 4]
    assert Snapshot(f"{folder}/s-3").read_object("3/s/mine") == 9
    assert Snapshot(f"{folder}/s-3").read_object("2/s/step") == 3


def _restarted(path, restore):
    from snapshot.distributed import known_replication
    from snapshot.distributed.exchange import Exchange

    known_replication._memories.reset()
    state = StateDict(w=torch.ones(3000), step=3, mine=dist.get_rank())
    if restore:
        Snapshot(path).restore({"s": state})
    counted = 0
    plain = Exchange.agree

    def counting(self, *args):
        nonlocal counted
        counted += 1
        return plain(self, *args)

    Exchange.agree = counting
    try:
        Snapshot.take(path, {"s": state}, replicated=["s/w"], overwrite=True)
    finally:
        Exchange.agree = plain
    return counted


def test_take_after_a_restore_reuses_the_plan_of_the_snapshot(two, folder):
    assert two.run(_restarted, f"{folder}/s", False) == [5, 5]
    assert two.run(_restarted, f"{folder}/s", True) == [3, 3]


def _cut(path, ranks):
    from snapshot import Sharded
    from snapshot.manifest import document

    rank, world = dist.get_rank(), dist.get_world_size()
    usual, document.IN_ONE = document.IN_ONE, 10
    try:
        whole = torch.arange(24.0).view(12, 2)
        each = 12 // world
        mine = slice(rank * each, rank * each + each)
        state = {f"x{i}": torch.full((3,), float(rank + i)) for i in range(9)} if rank < ranks else {}
        state["w"] = Sharded(whole[mine].clone(), (12, 2), (rank * each, 0))
        state["all"] = torch.ones(2000)
        if world == ranks:
            Snapshot.take(path, {"s": StateDict(state)}, replicated=["s/all"])
        live = StateDict(w=Sharded(torch.zeros(each, 2), (12, 2), (rank * each, 0)))
        if world == ranks:
            live.update({name: torch.zeros_like(value) for name, value in state.items() if name != "w"})
        Snapshot(path).restore({"s": live})
        assert live["w"].tensor.equal(whole[mine])
        assert all(live[f"x{i}"].eq(rank + i).all() for i in range(9) if world == ranks)
    finally:
        document.IN_ONE = usual


def test_manifest_parts_of_each_rank_stay_separate(four, two, folder):
    four.run(_cut, f"{folder}/s", 4)
    names = {path.name.partition("-")[2] for path in Path(folder, "s", "data").glob("*.json")}
    assert names == {"0.json", "1.json", "2.json", "3.json"}
    two.run(_cut, f"{folder}/s", 4)
    assert Snapshot(f"{folder}/s").read_object("0/s/w").equal(torch.arange(24.0).view(12, 2))
    assert Snapshot(f"{folder}/s").verify()
    entries = Snapshot(f"{folder}/s").get_manifest()
    assert "3/s/x8" in entries


def _trees(path):
    rank = dist.get_rank()
    equal, own = list(range(2000)), [rank] * 2000
    Snapshot.take(path, {"s": StateDict(equal=equal, own=own)})
    state = StateDict(equal=[], own=[])
    Snapshot(path).restore({"s": state})
    return state == {"equal": equal, "own": own}


def test_replicated_trees_of_plain_values_are_stored_once(two, folder):
    assert two.run(_trees, f"{folder}/t") == [True, True]
    entries = Snapshot(f"{folder}/t").get_manifest()
    assert entries["0/s/equal"].replicated
    assert "1/s/equal" not in entries
    assert not entries["0/s/own"].replicated
    assert Snapshot(f"{folder}/t").read_object("1/s/own/7") == 1
    assert Snapshot(f"{folder}/t").read_object("s/equal/7") == 7
    assert Snapshot(f"{folder}/t").read_object("1/s/equal/7") == 7
    with pytest.raises(RestoreError, match="rank"):
        Snapshot(f"{folder}/t").read_object("s/own/7")
    alone = StateDict(equal=[], own=[])
    Snapshot(f"{folder}/t").restore({"s": alone})
    assert alone == {"equal": list(range(2000)), "own": [0] * 2000}


def _partly_replicated(path):
    rows = {f"{i}": {"same": i, "own": dist.get_rank()} for i in range(1000)}
    Snapshot.take(path, {"s": StateDict(rows=rows)}, replicated=["s/rows/*/same"])


def test_replicated_glob_for_some_values_of_a_tree(two, folder):
    two.run(_partly_replicated, f"{folder}/p")
    entries = Snapshot(f"{folder}/p").get_manifest()
    assert entries["0/s/rows/7/same"].replicated
    assert not entries["1/s/rows/7/own"].replicated


def _broken_on_one(path, guards):
    """What a take with NaN on rank 1 alone ends with, on this rank."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if dist.get_rank() == 1:
        with torch.no_grad():
            model.weight.fill_(float("nan"))
    try:
        report = Snapshot.take(path, {"m": model, "o": optimizer}, options=TakeOptions(guards=guards)).report
    except SuspectStateError as error:
        return str(error)
    return [str(each) for each in report.findings]


def test_guard_on_one_rank_marks_the_snapshot_for_all(two, folder):
    first, second = two.run(_broken_on_one, f"{folder}/s", "suspect")
    assert first == []
    assert "NaN or infinity in m/weight" in second[0]
    assert Snapshot(f"{folder}/s").metadata.metadata["snapshot.guards"] == second
    assert all("m/weight" in each for each in two.run(_broken_on_one, f"{folder}/r", "refuse"))
    assert not Path(folder, "r", ".snapshot_metadata").exists()


def _drifted(path, change):
    rank = dist.get_rank()
    state = StateDict({f"w{i}": torch.full((300,), float(i)) for i in range(40)})
    if rank == 1 and change:
        state["w7"].add_(1.0)
    return [str(each) for each in Snapshot.take(path, {"s": state}, replicated=["s/**"]).report.findings]


def test_guard_drift_of_replicas_is_reported_by_the_leader(two, folder):
    assert two.run(_drifted, f"{folder}/step-1", False) == [[], []]
    first, second = two.run(_drifted, f"{folder}/step-2", True)
    assert second == []
    assert "drift: replicas of rank 1 differ from those of rank 0, among " in first[0]
    assert "s/w7" in first[0] or "more" in first[0]
