"""Other numbers of ranks on the way back, and what belongs to one rank alone."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import ModelState, RestoreError, RestoreOptions, RNGState, Snapshot, StateDict
from tests.helpers.arguments import for_restore


def _save(path, replicated):
    rank = dist.get_rank()
    torch.manual_seed(rank)
    state = StateDict(step=5, lr=[0.1, 0.2], small=torch.arange(4), big=torch.arange(1000.0), name="run")
    if replicated is None:
        state |= {"big": torch.arange(1000.0) + rank, "equal": torch.arange(1000.0)}
    mine = StateDict(position=rank, step=5)
    Snapshot.take(path, {"s": state, "mine": mine, "rng": RNGState()}, replicated=replicated)


def _load(path, keys):
    app = {"s": StateDict(), "mine": StateDict(), "rng": RNGState()}
    app = {key: app[key] for key in keys}
    report = Snapshot(path).restore(app, unused="ignore")
    return {key: dict(value) for key, value in app.items() if key != "rng"}, [str(line).split() for line in report]


def test_restore_on_more_ranks_gives_new_ranks_the_replicated_values(four, two, folder):
    two.run(_save, f"{folder}/s", ["s/big"])
    got = four.run(_load, f"{folder}/s", ["s", "mine", "rng"])
    for rank, (app, lines) in enumerate(got):
        assert app["s"]["step"] == 5
        assert app["s"]["lr"] == [0.1, 0.2]
        assert app["s"]["name"] == "run"
        assert app["s"]["small"].equal(torch.arange(4))
        assert app["s"]["big"].equal(torch.arange(1000.0))
        assert app["mine"].get("position") == (rank if rank < 2 else None)
        assert app["mine"]["step"] == 5
        skipped = [["skipped", "rng:"], ["skipped", "mine/position:"]] if rank >= 2 else []
        assert sorted(line[:2] for line in lines) == sorted(skipped)


def test_restore_on_fewer_ranks_reports_skipped_keys(four, two, folder):
    four.run(_save, f"{folder}/s", ["s/big"])
    (_, first), (app, second) = two.run(_load, f"{folder}/s", ["s", "mine"])
    assert app["mine"]["position"] == 1
    assert sorted(line[:2] for line in first) == [["skipped", "2/mine:"], ["skipped", "3/mine:"]]
    assert second == []


def test_restore_on_more_ranks_leaves_rank_specific_tensors_out_of_a_new_rank(four, two, folder):
    two.run(_save, f"{folder}/s", None)
    for rank, (app, lines) in enumerate(four.run(_load, f"{folder}/s", ["s"])):
        assert ("big" in app["s"]) == (rank < 2)
        assert app["s"]["equal"].equal(torch.arange(1000.0))
        assert [line[:2] for line in lines] == ([] if rank < 2 else [["skipped", "s/big:"]])


def _module(path, wrap, restore):
    torch.manual_seed(0 if not restore else dist.get_rank() + 3)
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    if wrap:
        model = nn.parallel.DistributedDataParallel(model)
    if restore:
        Snapshot(path).restore({"model": model})
    else:
        model(torch.randn(8, 40) + dist.get_rank())
        Snapshot.take(path, {"model": model})
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_ddp_module_is_replicated_without_replicated_globs(four, two, folder):
    saved = four.run(_module, f"{folder}/s", True, False)
    entries = Snapshot(f"{folder}/s").get_manifest()
    assert all(path.startswith("0/") for path in entries)
    restored = two.run(_module, f"{folder}/s", True, True)
    for name, value in saved[0].items():
        assert all(each[name].equal(value) for each in restored), name


def test_restore_of_a_module_not_replicated_raises_on_new_ranks(four, two, folder):
    two.run(_module, f"{folder}/s", False, False)
    outcomes = four.outcomes(_module, f"{folder}/s", False, True)
    for error in outcomes[2:]:
        assert isinstance(error, RestoreError)
        assert "belongs to rank 0 alone" in str(error)
    assert [type(error).__name__ for error in outcomes[:2]] == ["RankError"] * 2


def test_restore_of_a_one_rank_snapshot_on_several_ranks(two, folder):
    state = StateDict(x=torch.arange(3000), step=1)
    Snapshot.take(f"{folder}/s", {"s": state, "mine": StateDict(position=0)})
    for app, _ in two.run(_load, f"{folder}/s", ["s", "mine"]):
        assert app["s"]["x"].equal(torch.arange(3000))


def _layers(names, number):
    """Layers of which each parameter holds one number over and over: the first `number`, each other one more."""
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 6)) for name in names))
    with torch.no_grad():
        for at, parameter in enumerate(model.parameters()):
            parameter.fill_(number + at)
    return model


def _save_stages(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    stage = dist.get_rank() // 2
    model = _layers([("first", "second")[stage]], 10.0 * stage)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))["data"])
    Snapshot.take(path, {"state": ModelState(model)})


def _load_whole(path, options):
    model = _layers(["first", "second"], -9.0)
    report = Snapshot(path).restore({"state": ModelState(model)}, **for_restore(**options))
    found = {name: set(parameter.flatten().tolist()) for name, parameter in model.named_parameters()}
    return found, {str(line).split()[1] for line in report.skipped}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {}),
        ({"select": ["**.weight"]}, {"first.bias": -8, "second.bias": -6}),
        ({"exclude": ["**.weight"]}, {"first.weight": -9, "second.weight": -7}),
        (
            {"select": ["**/first.*", "**/second.bias"], "exclude": ["**/first.bias"]},
            {"first.bias": -8, "second.weight": -7},
        ),
        ({"exclude": ["state/model/first.*"]}, {"first.weight": -9, "first.bias": -8}),
        ({"select": ["state/model/second.*"]}, {"first.weight": -9, "first.bias": -8}),
    ],
)
def test_restore_of_objects_that_only_other_ranks_had(four, folder, options, left):
    four.run(_save_stages, f"{folder}/s")
    expected = {"first.weight": 0, "first.bias": 1, "second.weight": 10, "second.bias": 11, **left}
    for found, skipped in four.run(_load_whole, f"{folder}/s", options):
        assert found == {name: {number} for name, number in expected.items()}
        assert skipped == {f"state/model/{name}:" for name in left}


def _once(path, once, restore):
    torch.manual_seed(1)
    state = StateDict(
        **{f"w{i}": torch.randn(300_000) for i in range(5)},
        odd=torch.randn(1000, 100).t(),
        own=torch.full((50,), dist.get_rank()),
        half=torch.ones(3, dtype=torch.bfloat16),
    )
    if not restore:
        Snapshot.take(path, {"s": state}, replicated=["s/w*", "s/odd", "s/half"])
        return None
    expected = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.zero_()
    report = Snapshot(path).restore({"s": state}, options=RestoreOptions(read_once=once))
    for name, value in expected.items():
        assert state[name].equal(value), name
    return report.bytes_read


@pytest.mark.parametrize("once", [True, False])
def test_read_once_reads_what_all_ranks_want_once(four, folder, once):
    four.run(_once, f"{folder}/s", None, False)
    read = four.run(_once, f"{folder}/s", once, True)
    one = 5 * 300_000 * 4 + 400_000
    assert sum(read) < 1.01 * one + 10_000 if once else sum(read) > 4 * one


def _load_into_keys(path, options):
    live = StateDict(position=-1, step=0, new="kept")
    report = Snapshot(path).restore({"mine": live}, **for_restore(unused="ignore", **options))
    return dict(live), sorted(str(line).split(":")[0] for line in report)


def test_restore_into_a_key_of_another_rank_is_never_kept_silently(four, two, folder):
    two.run(_save, f"{folder}/s", ["s/big"])
    outcomes = four.outcomes(_load_into_keys, f"{folder}/s", {})
    for error in outcomes[2:]:
        assert isinstance(error, RestoreError)
        assert "mine/position: belongs to rank 0 alone" in str(error)
    for rank, (live, lines) in enumerate(four.run(_load_into_keys, f"{folder}/s", {"strict": False})):
        assert live == {"position": rank if rank < 2 else -1, "step": 5, "new": "kept"}
        gone = ["skipped    mine/position"] if rank >= 2 else []
        assert lines == ["kept       mine/new", *gone]


def _pair(path, take, cast):
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Linear(4, 4).to(torch.float32 if take else torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if take:
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return Snapshot.take(path, {"net": net, "optim": optimizer}, replicated=["**"]) and None
    Snapshot(path).restore({"net": net, "optim": optimizer}, options=RestoreOptions(cast=cast))
    optimizer.zero_grad()
    net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return rank, {str(value.dtype) for state in optimizer.state.values() for value in state.values()}


def test_restore_casts_an_optimizer_on_all_ranks(four, two, folder):
    two.run(_pair, f"{folder}/s", True, "error")
    assert all(isinstance(each, RestoreError) for each in four.outcomes(_pair, f"{folder}/s", False, "error"))
    for rank, (number, dtypes) in enumerate(four.run(_pair, f"{folder}/s", False, "same_kind")):
        assert number == rank
        assert dtypes == {"torch.bfloat16", "torch.float32"}  # the steps' counts


def _lacking(path, what):
    live = {"s": StateDict(step=0), "ema": StateDict(w=1)} if what == "key" else {"net": nn.Linear(2, 2)}
    report = Snapshot(path).restore(live, strict=False, unused="ignore")
    return [str(line).split(":")[0] for line in report]


def test_restore_of_a_key_missing_in_the_snapshot_is_left_alone_on_all_ranks(two, folder):
    two.run(_save, f"{folder}/s", None)
    assert two.run(_lacking, f"{folder}/s", "key") == [["missing    ema"]] * 2
    for error in two.outcomes(_lacking, f"{folder}/s", "nothing"):
        assert isinstance(error, RestoreError)
        assert "the snapshot has nothing that the application requests" in str(error)


def _wrapped(path, take):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0 if take else 1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    expected = {name: value.detach().clone() for name, value in net.state_dict().items()}
    if take:
        wrapped = nn.parallel.DistributedDataParallel(nn.DataParallel(net))
        return Snapshot.take(path, {"net": wrapped}) and expected
    fully_shard(net)
    report = Snapshot(path).restore({"net": net})
    return {name: value.full_tensor() for name, value in net.state_dict().items()}, [
        str(line) for line in report.renamed
    ]


def test_restore_of_a_ddp_model_into_a_sharded_one(four, two, folder):
    expected = two.run(_wrapped, f"{folder}/s", True)[0]
    for found, lines in four.run(_wrapped, f"{folder}/s", False):
        assert lines == ["renamed    net: names matched without 'module.'"]
        assert all(found[name].equal(value) for name, value in expected.items())


def _own_keys(path, take, strict):
    rank = dist.get_rank()
    if take:
        return Snapshot.take(path, {"p": StateDict(a=1, **({"only1": 2} if rank else {}))}) and None
    live = StateDict(a=9, only1=5)
    report = Snapshot(path).restore({"p": live}, strict=strict)
    return dict(live), [str(line) for line in report]


def test_restore_of_a_key_that_only_another_rank_had_raises(two, folder):
    two.run(_own_keys, f"{folder}/s", True, True)
    error, _ = two.outcomes(_own_keys, f"{folder}/s", False, True)
    assert "p/only1: belongs to rank 1 alone" in str(error)
    (first, lines), (second, none) = two.run(_own_keys, f"{folder}/s", False, False)
    assert first == {"a": 1, "only1": 5}
    assert second == {"a": 1, "only1": 2}
    assert lines == ["skipped    p/only1: belongs to rank 1 alone; left unchanged"]
    assert none == []
