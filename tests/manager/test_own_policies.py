"""Policies of an application, which may read the snapshots that they decide about: with one rank, and with several."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from snapshot import KeepLatest, Snapshot, SnapshotManager, StateDict
from snapshot.manager.policies import Policy, Taken


@dataclass(frozen=True)
class KeepIf(Policy):
    """Keep what a function of the step says."""

    says: Callable[[int], Any]

    def keep(self, taken: Sequence[Taken], now: float) -> set[int]:
        return {each.step for each in taken if self.says(each.step)}


class Returning(Policy):
    """Return a value, whatever there is."""

    def __init__(self, value):
        self.value = value

    def keep(self, taken, now):
        return self.value


def state(step):
    return {"s": StateDict(x=torch.full((8,), float(step)), good=step % 20 == 0)}


def fill(manager, *steps, verb="take"):
    for step in steps:
        taken = getattr(manager, verb)(
            step, state(step), metrics={"loss": step % 20}, metadata={"good": step % 20 == 0}
        )
        if verb == "async_take":
            taken.wait()


def left_in(root):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(root) if name.startswith("step-"))


READS = {
    "the metadata of a path": lambda root, manager, step: Snapshot(f"{root}/step-{step}").metadata.metadata["good"],
    "an object of a path": lambda root, manager, step: Snapshot(f"{root}/step-{step}").read_object("0/s/good"),
    "a tensor of the manager": lambda root, manager, step: (manager.snapshot(step).read_object("s/x") % 20 == 0).all(),
    "metrics of the manager": lambda root, manager, step: manager.metrics(step)["loss"] == 0,
}


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_manager_keep_of_an_application_reads_the_snapshots(tmp_path, caplog, read, verb):
    with SnapshotManager(tmp_path, keep=KeepIf(lambda step: read(tmp_path, manager, step)), signals=()) as manager:
        fill(manager, 10, 20, 30, 40, 50, verb=verb)
    assert left_in(tmp_path) == [20, 40, 50]  # the newest always stays
    assert "failed" not in caplog.text


def test_manager_keep_of_an_application_is_combined_with_others(tmp_path):
    own = KeepIf(lambda step: Snapshot(tmp_path / f"step-{step}").metadata.metadata["good"])
    with SnapshotManager(tmp_path, keep=own | KeepLatest(2), signals=()) as manager:
        fill(manager, 10, 20, 30, 50, 70)
    assert left_in(tmp_path) == [20, 50, 70]


def test_manager_keep_that_reads_does_not_change_which_takes_are_the_same(tmp_path):
    """`manager.snapshot` in a policy restores nothing, so the step that was just saved is still the state."""
    done = threading.Event()

    def read(step):
        good = manager.snapshot(step).read_object("s/good")
        if step == 30:
            done.set()
        return good

    with SnapshotManager(tmp_path, keep=KeepIf(read), signals=()) as manager:
        fill(manager, 10, 20, 30, verb="async_take")
        assert done.wait(60)
        assert manager.take(30, state(30)).path == str(tmp_path / "step-30")
    assert left_in(tmp_path) == [20, 30]


def test_manager_keep_that_reads_works_at_the_exit_of_the_interpreter(tmp_path, warm):
    script = f"""
from snapshot import Snapshot, SnapshotManager, StateDict
from snapshot.manager.policies import Policy

class Good(Policy):
    def keep(self, taken, now):
        return {{each.step for each in taken if Snapshot(f"{tmp_path}/step-{{each.step}}").read_object("s/good")}}

manager = SnapshotManager({str(tmp_path)!r}, keep=Good())
for step in range(10, 60, 10):
    manager.async_take(step, {{"s": StateDict(good=step % 20 == 0)}})
"""
    assert warm.run(script) == ""
    assert left_in(tmp_path) == [20, 40, 50]


class Unreadable(Exception):
    """An error of an application's own."""


def refuse(step):
    raise Unreadable(f"no score for {step}")


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize(
    ("policy", "named"),
    [
        (KeepIf(refuse), ("KeepIf", "Unreadable", "no score for")),
        (KeepLatest(1) | KeepIf(refuse), ("KeepIf", "Unreadable", "no score for")),
        (KeepIf(lambda step: Snapshot("memory://nowhere").metadata), ("KeepIf", "memory://nowhere")),
        (Returning(None), ("Returning", "NoneType")),
        (Returning({"30"}), ("Returning", "TypeError", "str")),
    ],
    ids=["raises", "raises in a union", "reads what is not there", "returns None", "returns names"],
)
def test_manager_keep_that_fails_removes_nothing_and_fails_no_take(tmp_path, caplog, told, policy, named, verb):
    with SnapshotManager(tmp_path, keep=policy, signals=()) as manager:
        fill(manager, 10, 30, 50, verb=verb)
        assert manager.steps() == [10, 30, 50]
    assert left_in(tmp_path) == [10, 30, 50]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings
    assert all(word in warning for warning in warnings for word in (str(tmp_path), *named))
    assert {(each.name, each.verb) for each in told if each.name == "failed"} == {("failed", "prune")}


def test_manager_keep_that_failed_once_removes_after_the_next_take(tmp_path, caplog):
    def read(step):
        if not (tmp_path / "step-30").exists():
            raise Unreadable
        return step == 20

    with SnapshotManager(tmp_path, keep=KeepIf(read), signals=()) as manager:
        fill(manager, 10, 20)
    assert left_in(tmp_path) == [10, 20]
    with SnapshotManager(tmp_path, keep=KeepIf(read), signals=()) as manager:
        fill(manager, 30)
    assert left_in(tmp_path) == [20, 30]


@pytest.mark.parametrize("there", [{10, 999}, {torch.tensor(10), torch.tensor(7)}, [10, 10]])
def test_manager_keep_may_return_steps_that_do_not_exist(tmp_path, caplog, there):
    with SnapshotManager(tmp_path, keep=Returning(there), signals=()) as manager:
        fill(manager, 10, 20, 30)
    assert left_in(tmp_path) == [10, 30]
    assert "failed" not in caplog.text


def test_manager_keep_that_is_slow_delays_no_take_and_close_waits_for_it(tmp_path):
    began, go_on = threading.Event(), threading.Event()

    def slow(step):
        began.set()
        return go_on.wait(60) and step == 20

    with SnapshotManager(tmp_path, keep=KeepIf(slow), signals=()) as manager:
        manager.take(10, state(10))
        assert began.wait(60)
        fill(manager, 20)
        fill(manager, 30, verb="async_take")
        assert manager.steps() == [10, 20, 30]
        assert not go_on.is_set()
        go_on.set()
    assert left_in(tmp_path) == [20, 30]


def test_manager_keep_is_asked_once_if_nothing_is_damaged(tmp_path):
    """Two answers could differ: the second one would remove what nobody looked at."""
    asked = []

    class Once(Policy):
        def keep(self, taken, now):
            asked.append(sorted(each.step for each in taken))
            return {10} if len(asked) % 2 else {20}

    with SnapshotManager(tmp_path, keep=Once(), signals=()) as manager:
        manager.take(10, state(10))
        manager._steps.close()
        manager.take(20, state(20))
    assert asked == [[10], [10, 20]]


def _keeps_what_it_reads(root):
    ran = []

    def read(step):
        ran.append(step)
        return manager.snapshot(step).read_object("0/s/good") and Snapshot(f"{root}/step-{step}").metadata is not None

    with SnapshotManager(root, keep=KeepIf(read), signals=(), timeout=30) as manager:
        for verb in ("take", "async_take"):
            for step in (10, 20, 30) if verb == "take" else (40, 50):
                own = {"s": StateDict(x=torch.full((8,), float(dist.get_rank())), good=step % 20 == 0)}
                getattr(manager, verb)(step, own)
    dist.barrier()
    return bool(ran), manager.steps()


def test_manager_keep_that_reads_runs_on_one_rank(two, folder):
    assert two.run(_keeps_what_it_reads, folder) == [(True, [20, 40, 50]), (False, [20, 40, 50])]
    assert left_in(folder) == [20, 40, 50]
