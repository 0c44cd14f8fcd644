"""Several ranks with a manager each: they agree on steps, on what is damaged, on when to save and when to stop."""

import itertools
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import KeepLatest, RestoreOptions, Snapshot, SnapshotManager, StateDict
from snapshot import events as happening


def state(value=0):
    own = torch.full((1000,), float(value * 10 + dist.get_rank()))
    return {"s": StateDict(own=own, value=value)}


def manager_of(root, **options):
    return SnapshotManager(root, **{"signals": (), "timeout": 30, **options})


def outcome(work):
    """What work returned, or its exception as `(class, text)`."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - it is looked at
        return type(error).__name__, str(error)


def appears(path):
    """Wait until a rank has made a file."""
    end = time.monotonic() + 30
    while not os.path.exists(path):
        assert time.monotonic() < end, f"{path} never appeared"
        time.sleep(0.002)


def _takes_and_removes(root):
    told = []
    happening.add_handler(told.append)
    try:
        with manager_of(root, keep=KeepLatest(2)) as manager:
            for step in (10, 20, 30, 40):
                take = manager.take if step % 20 else manager.async_take
                take(step, state(step), metrics={"rank": dist.get_rank()})
            same = manager.take(40, state(40)).path  # what is being saved
            if dist.get_rank() == 1:
                manager.snapshot(30)  # who may restore it
            again = outcome(lambda: manager.take(40, state(41)).path)
        dist.barrier()
    finally:
        happening.remove_handler(told.append)
    return manager.steps(), manager.metrics(40), [event.name for event in told].count("pruned") > 0, same, again[0]


def test_manager_prune_runs_on_one_rank_and_metrics_are_those_of_rank_0(three, folder):
    found = three.run(_takes_and_removes, folder)
    assert [each[:3] for each in found] == [([30, 40], {"rank": 0.0}, rank == 0) for rank in range(3)]
    # it is this manager's own asynchronous take, which is waited for
    assert [each[3:] for each in found] == [(f"{folder}/step-40", "SnapshotExistsError")] * 3
    assert sorted(os.listdir(folder)) == ["step-30", "step-40"]


def _disagrees(root):
    manager = manager_of(root)
    rank = dist.get_rank()
    steps = outcome(lambda: manager.take(5 + (rank == 2), state()))
    metrics = outcome(lambda: manager.take(5, state(), metrics={"loss": "bad" if rank == 1 else 1}))
    manager.take(5, state())
    there = outcome(lambda: manager.take(5, state()))
    return steps, metrics, there, manager.steps()


def test_manager_take_with_different_steps_per_rank_raises_on_all(three, folder):
    for rank, (steps, metrics, there, left) in enumerate(three.run(_disagrees, folder)):
        assert steps[0] == "SnapshotError"
        assert "rank 1 5, rank 2 6" in steps[1]
        assert metrics[0] == ("TypeError" if rank == 1 else "RankError")
        assert "must be a number" in metrics[1]
        assert there[0] == "SnapshotExistsError"
        assert left == [5]


def _falls_back(root, atomic):
    manager = manager_of(root)
    for step in (10, 20, 30):
        manager.take(step, state(step))
    if dist.get_rank() == 0:
        entry = manager.snapshot(30).get_manifest()["1/s/own"]  # which rank 1 alone reads
        with open(f"{root}/step-30/{entry.location}", "r+b") as file:
            file.seek(entry.byte_range[0])
            file.write(b"\xff")
    dist.barrier()
    app = state()
    restored = manager.restore_latest(app, options=RestoreOptions(atomic=atomic))
    value = app["s"]["own"][0].item(), app["s"]["value"]
    own = "y" if dist.get_rank() == 2 else "own"
    misfit = outcome(lambda: manager.restore_latest({"s": StateDict(own=torch.zeros(1000), value=0), own: StateDict()}))
    for step in (10, 20):
        if dist.get_rank() == 0:
            Path(root, f"step-{step}", ".snapshot_metadata").write_bytes(b"")
    dist.barrier()
    none_left = outcome(lambda: manager.restore_latest(state(), options=RestoreOptions(atomic=atomic)))
    return restored, value, misfit, none_left


@pytest.mark.parametrize("atomic", [False, True])
def test_restore_latest_on_ranks_falls_back_to_the_same_step(three, folder, atomic):
    for rank, (restored, value, misfit, none_left) in enumerate(three.run(_falls_back, folder, atomic)):
        assert restored == 20
        assert value == (200 + rank, 20)
        assert misfit[0] in ("RestoreError", "RankError")  # which is no reason to try an older one
        assert "no such key" in misfit[1]
        assert none_left[0] == "CorruptSnapshotError"
        assert [f"step-{step}:" in none_left[1] for step in (30, 20, 10)] == [True] * 3
        assert ("tensors that were written: s/own" in none_left[1]) == (
            not atomic
        )  # also of ranks that read nothing wrong


def _asks(root, every, calls):
    rank = dist.get_rank()
    manager = manager_of(root, every=every)
    taken = []
    chance = random.Random(rank)
    for step in itertools.count(1):
        if step >= calls and len(taken) > 1:  # a busy machine needs longer for the first take
            break
        time.sleep(chance.random() / 500)
        if manager.should_take(step):
            manager.async_take(step, state(step))
            taken.append(step)
    manager.close()
    return taken


@pytest.mark.parametrize("every", [40, "0.1s", "continuous"])
def test_should_take_is_true_at_the_same_steps_on_all_ranks(three, folder, every):
    first, *others = three.run(_asks, folder, every, 300)
    assert others == [first] * 2
    assert len(first) > 1
    assert sorted(int(name.removeprefix("step-")) for name in os.listdir(folder)) == first


def _trains(root, mine):
    """A loop with a collective in each step, as training has them. Where it stopped, and what was called."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    total = torch.zeros(1)
    app = {"s": StateDict(total=total, step=0)}
    try:
        with manager_of(root, signals=(signal.SIGTERM,)) as manager:
            resumed = manager.restore_latest(app)
            for step in range((resumed or 0) + 1, 100_000):
                gradient = torch.ones(1)
                dist.all_reduce(gradient)
                total += gradient
                app["s"]["step"] = step
                if step == (resumed or 0) + 20:
                    Path(mine.format(dist.get_rank())).touch()
                if manager.should_stop():
                    manager.take(step, app)
                    break
            again = manager.should_stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    return resumed, step, total.item(), again, seen


@pytest.mark.parametrize("signalled", [(2,), (0, 1)])
def test_should_stop_after_a_signal_to_one_rank_stops_all_at_the_same_step(three, folder, signalled):
    for run in range(2):
        three.start(_trains, f"{folder}/run", f"{folder}/{run}-{{}}")
        for rank in signalled:
            appears(f"{folder}/{run}-{rank}")
            os.kill(three.pids[rank], signal.SIGTERM)
        found = three._values(three.finish(timeout=300))
        resumed, step, total, *_ = found[0]
        for rank, each in enumerate(found):
            assert each == (resumed, step, total, True, [signal.SIGTERM] if rank in signalled else [])
        assert total == 3 * step
        assert SnapshotManager(f"{folder}/run", signals=()).latest() == step
        assert Snapshot(f"{folder}/run/step-{step}").verify()
    assert resumed is not None


def _comes_at_its_own_pace(root):
    """No collective at all: ranks drift apart, and are still to stop at the same call."""
    rank = dist.get_rank()
    chance = random.Random(rank)
    pace = (0, 1e-4, 4e-3)[rank]
    with manager_of(root, signals=(signal.SIGTERM,)) as manager:
        calls = 1
        while not manager.should_stop():
            time.sleep(pace * chance.random())
            if rank == 2 and calls == 50:
                os.kill(os.getpid(), signal.SIGTERM)
            calls += 1
    return calls


def test_should_stop_on_ranks_of_different_speed_is_true_at_the_same_call(three, folder):
    first, *others = three.run(_comes_at_its_own_pace, folder)
    assert others == [first] * 2
    assert first > 50


def _waits_for_the_end(root):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with manager_of(root, signals=(signal.SIGTERM,)) as manager:
        Path(root, "ready").touch()
        while manager._signals.number is None:
            time.sleep(0.002)
        Path(root, "told").touch()
        while True:
            time.sleep(0.01)


def test_second_signal_ends_a_rank_at_once(three, folder):
    three.start(_waits_for_the_end, folder, ranks=[1])
    for mark in ("ready", "told"):
        appears(f"{folder}/{mark}")
        if mark == "told":
            time.sleep(1.1)  # what comes within a second is the same request
        os.kill(three.pids[1], signal.SIGTERM)
    [died] = three.finish(ranks=[1], timeout=300)
    assert died.signal == signal.SIGTERM
