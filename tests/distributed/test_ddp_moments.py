"""The optimizer's state of a model under DDP: stored once if it is equal, and restored on any number of ranks."""

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from snapshot import (
    ModelState,
    RestoreError,
    RestoreOptions,
    RNGState,
    Snapshot,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.distributed import known_replication
from snapshot.manifest import document
from snapshot.plan import layout
from tests.distributed.written_bytes import written
from tests.helpers.states import equal


def _train(form, steps=1, seed=0):
    """A model under DDP with its optimizers, after some steps: the app state, and the tensors that a restore must set.

    Parameters are frozen, in two groups, and have moments of more than a KiB, or less.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60), nn.Linear(60, 8))
    model[1].bias.requires_grad_(False)
    ddp = nn.parallel.DistributedDataParallel(model)
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1].parameters())}]
    first = torch.optim.AdamW(groups, amsgrad=True)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        ddp(torch.randn(8, 40) + dist.get_rank()).square().mean().backward()
        for each in (first, second):
            each.step()
            each.zero_grad()
    if form == "keys":
        app = {"model": ddp, "first": first, "second": second}
    elif form == "inner":  # without a sign of DDP
        app = {"model": model, "first": first, "second": second}
    else:
        flat = StateDictOptions(flatten_optimizer_state_dict=True) if form == "flat" else None
        app = {"train": ModelState(ddp, [first, second], flat)}
    return app, first, second, model


def _bits(first, second, model):
    states = [state for each in (first, second) for state in each.state.values()]
    held = [state[name] for state in states for name in sorted(state)]
    return [value.detach().clone() for value in (*model.parameters(), *held)]


def _save(path, form, how="take"):
    app, *live = _train(form)
    with SnapshotManager(path) as manager:
        if how == "take":
            manager.take(1, app)
        else:
            options = TakeOptions(worker="process") if how == "process" else TakeOptions(staging=how)
            manager.async_take(1, app, options=options).wait()
    return _bits(*live)


def _load(path, form, strict=True, exclude=()):
    app, *live = _train(form, seed=5)
    Snapshot(f"{path}/step-1").restore(app, strict=strict, options=RestoreOptions(exclude=exclude))
    return _bits(*live)


def _entries(path, step=1):
    return Snapshot(f"{path}/step-{step}").get_manifest()


@pytest.mark.parametrize("form", ["keys", "state", "flat"])
def test_ddp_optimizer_state_that_is_equal_is_stored_once_and_fits_any_world_size(two, four, folder, form):
    first, second = two.run(_save, folder, form)
    assert equal(first, second)
    assert [path for path in _entries(folder) if path.startswith("1/")] == []
    assert written(f"{folder}/step-1") < 1.3 * sum(each.nbytes for each in first)
    for strict in (True, False):
        assert all(equal(each, first) for each in four.run(_load, folder, form, strict))
    assert all(equal(each, first) for each in two.run(_load, folder, form))


@pytest.mark.parametrize("how", ["blocking", "overlapped", "process"])
def test_ddp_optimizer_state_that_is_equal_is_stored_once_by_async_take(two, folder, how):
    first, _ = two.run(_save, folder, "keys", how)
    assert [path for path in _entries(folder) if path.startswith("1/")] == []
    assert all(equal(each, first) for each in two.run(_load, folder, "keys"))


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def _flap(path, incremental):
    """Takes of moments that are absent at first, then equal, and differ in one byte in every other step."""
    rank, handler = dist.get_rank(), _Lines()
    logging.getLogger("snapshot").addHandler(handler)
    saved = []
    try:
        app, *live = _train("keys", steps=0)
        app["a"] = StateDict({f"v{at}": rank + at for at in range(100)})  # more than are looked at again
        with SnapshotManager(path, incremental=incremental) as manager:
            manager.take(1, app)
            ddp, first, second = app["model"], *live[:2]
            for step in range(2, 8):
                ddp(torch.randn(8, 40)).square().mean().backward()
                for each in (first, second):
                    each.step()
                    each.zero_grad()
                moment = first.state[live[2][1].weight]["exp_avg"]
                if step % 2:
                    moment[3, 7] = -1.0 - rank
                manager.take(step, app)
                saved.append(_bits(*live))
                moment[3, 7] = 1.0
    finally:
        logging.getLogger("snapshot").removeHandler(handler)
    for step, expected in enumerate(saved, 2):
        again, *restored = _train("keys", seed=9)
        again["a"] = StateDict()
        Snapshot(f"{path}/step-{step}").restore(again)
        assert equal(_bits(*restored), expected), step
    return [line for line in handler.lines if "differs between the ranks" in line]


@pytest.mark.parametrize("incremental", [False, True])
def test_ddp_optimizer_state_that_starts_to_differ_and_becomes_equal_again(two, folder, incremental):
    two.restart()
    first, second = two.run(_flap, folder, incremental)
    assert len(first) == 1
    assert first[0].startswith("first: its state differs between the ranks")
    assert second == []
    for step in range(2, 8):
        entries = _entries(folder, step)
        own = {path.split("/")[1] for path in entries if path.startswith("1/")} - {"a"}
        assert own == ({"first"} if step % 2 else set()), step
        if step % 2:  # a rank's own are kept together
            assert "1/first/state/0/exp_avg" in entries
        assert entries["0/second/state/0/momentum_buffer"].replicated or step == 2


def _exchanges(path):
    from snapshot.distributed.exchange import Exchange

    known_replication._memories.reset()
    counted, plain = [], Exchange.agree

    def counting(self, *args):
        counted[-1] += 1
        return plain(self, *args)

    app, *live = _train("keys")
    moment = live[0].state[live[2][0].weight]["exp_avg"]
    Exchange.agree = counting
    try:
        for step in range(4):
            counted.append(0)
            moment += 1.0
            Snapshot.take(f"{path}/step-{step}", app)
    finally:
        Exchange.agree = plain
    return counted


def test_ddp_optimizer_state_that_changes_needs_no_more_exchanges(two, folder):
    assert two.run(_exchanges, folder) == [[3, 3, 3, 3]] * 2


def _sharded_optimizer(path):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)
    ddp(torch.randn(8, 40)).sum().backward()
    optimizer.step()
    for state in optimizer.optim.state.values():
        state["exp_avg"].fill_(1.0)
        state["exp_avg_sq"].fill_(1.0)
    Snapshot.take(path, {"model": ddp, "optimizer": optimizer.optim})


@pytest.mark.filterwarnings("ignore")
def test_optimizer_state_of_different_parameters_per_rank_is_never_replicated(two, folder):
    two.run(_sharded_optimizer, f"{folder}/step-1")
    assert {f"{rank}/optimizer/state/0/exp_avg" for rank in range(2)} <= _entries(folder).keys()


def _stages(path):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(rank // 2)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(40, 40), process_group=groups[rank // 2])
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    app = {"model": ddp, "optimizer": optimizer}
    Snapshot.take(f"{path}/step-1", app)
    Snapshot.take(f"{path}/stage-{rank // 2}", app, pg=groups[rank // 2])


def test_optimizer_state_of_groups_with_separate_models_is_not_replicated(four, folder):
    four.run(_stages, folder)
    assert {f"{rank}/optimizer/state/0/momentum_buffer" for rank in range(4)} <= _entries(folder).keys()
    assert not any(path.startswith("1/") for path in Snapshot(f"{folder}/stage-1").get_manifest())


# Checkpoints with a copy of each rank, as earlier versions stored them


def test_ddp_optimizer_state_stored_per_rank_restores_on_more_and_fewer_ranks(two, four, folder):
    first, _ = two.run(_save, folder, "inner")
    assert {"1/model/0.weight", "1/first/state/0/exp_avg"} <= _entries(folder).keys()
    for strict in (True, False):
        assert all(equal(each, first) for each in four.run(_load, folder, "inner", strict))
    app, *live = _train_alone()
    Snapshot(f"{folder}/step-1").restore(app)
    assert equal(_bits(*live), first)


def _train_alone():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 60), nn.Linear(60, 8))
    model[1].bias.requires_grad_(False)
    groups = [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": list(model[1].parameters())}]
    first = torch.optim.AdamW(groups, amsgrad=True)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "first": first, "second": second}, first, second, model


def _one_differs(path):
    app, first, _, model = _train("inner")
    first.state[model[0].weight]["exp_avg"][2, 1] += dist.get_rank()
    Snapshot.take(f"{path}/step-1", app)


def test_ddp_optimizer_state_copies_that_differ_raise_and_the_error_names_a_remedy(two, four, folder):
    two.run(_one_differs, folder)
    for strict in (True, False):
        for error in four.outcomes(_load, folder, "inner", strict)[2:]:
            assert isinstance(error, RestoreError)
            assert "first/state/0/exp_avg: belongs to rank 0 alone" in str(error)
            assert "replicated=['first']" in str(error)
            assert "with TakeOptions(replicated=['first'])" in str(error)
            assert "exclude=['first']" in str(error)
    fresh = four.run(_load, folder, "inner", True, ["first"])
    assert all(equal(each, fresh[0]) for each in fresh)


def _split(path, take):
    """A tensor that one of the ranks splits."""
    big, usual = torch.arange(1e6), layout.LARGEST_FILE
    if take:
        layout.LARGEST_FILE = 1 << 20 if dist.get_rank() else usual
        try:
            Snapshot.take(f"{path}/step-1", {"s": StateDict(big=big, other=big + dist.get_rank())})
        finally:
            layout.LARGEST_FILE = usual
        return None
    live = StateDict(big=torch.zeros_like(big), other=torch.zeros_like(big))
    report = Snapshot(f"{path}/step-1").restore({"s": live}, strict=False)
    return live["big"].equal(big), [str(line) for line in report]


def test_ddp_optimizer_state_copies_in_different_boxes_are_compared_by_reading(two, four, folder):
    two.run(_split, folder, True)
    entries = _entries(folder)
    boxes = [[box for box, _ in entries[f"{rank}/s/big"].pieces()] for rank in range(2)]
    assert boxes[0] != boxes[1]
    skipped = ["skipped    s/other: belongs to rank 0 alone"]
    assert four.run(_split, folder, False) == [(True, [])] * 2 + [(True, skipped)] * 2


def _in_parts(path, take):
    usual, document.IN_ONE = document.IN_ONE, 10
    try:
        return (_save if take else _load)(path, "inner")
    finally:
        document.IN_ONE = usual


def test_ddp_optimizer_state_copies_in_a_manifest_of_several_parts(two, four, folder):
    first, _ = two.run(_in_parts, folder, True)
    assert list(Path(folder, "step-1", "data").glob("*-1.json"))
    assert all(equal(each, first) for each in four.run(_in_parts, folder, False))


def _damaged(path):
    app, *live = _train("inner", seed=5)
    with SnapshotManager(path) as manager:
        return manager.restore_latest(app), _bits(*live)


def test_ddp_optimizer_state_with_a_damaged_copy_is_not_restored_on_any_rank(two, four, folder):
    first, _ = two.run(_save, folder, "inner")
    two.run(_second, folder)
    stored = _entries(folder, 2)["0/first/state/0/exp_avg"]
    file = Path(folder, "step-2", stored.location)
    data = bytearray(file.read_bytes())
    data[stored.byte_range[0]] ^= 1
    file.write_bytes(data)
    for step, bits in four.run(_damaged, folder):
        assert step == 1
        assert equal(bits, first)


def _second(path):
    app, *_ = _train("inner", steps=2)
    Snapshot.take(f"{path}/step-2", app)


def _random(path, take):
    torch.manual_seed(0)
    app = {"rng": RNGState(), "s": StateDict(step=1)}
    if take:
        return Snapshot.take(f"{path}/step-1", app) and None
    return [str(line) for line in Snapshot(f"{path}/step-1").restore(app)]


def test_rng_state_that_is_equal_on_ranks_is_not_replicated(two, four, folder):
    two.run(_random, folder, True)
    skipped = ["skipped    rng: this rank did not exist when the snapshot was taken"]
    assert four.run(_random, folder, False) == [[], [], skipped, skipped]
