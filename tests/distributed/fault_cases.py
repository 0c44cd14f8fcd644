"""One rank of several dies, stops or is slow at a point of a verb: what all see of it, and what is left.

Cases are tried side by side, each with ranks of its own: what takes time is to wait for signs of life.
"""

import contextlib
import functools
import logging
import os
import re
import shutil
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from snapshot import CommitUnknown, RankError, Snapshot, SnapshotError, StateDict, TakeOptions
from tests.distributed import fault_points
from tests.helpers.rank_pool import Died, Pool

SHORT, PATIENT = 0.6, 4.0
"""Seconds without a sign of life, first and where that was too short."""
SOON = 10
"""Seconds in which a rank that lives is heard of, on a busy machine."""
PATIENCE = 40
"""Seconds after which ranks hang."""
AT_ONCE = 16
"""How many ranks are under way side by side."""
FOREIGN = {"notes.txt": "mine", "data/notes.safetensors": "mine", ".take-notes_": "mine"}
OLD = 3.0
SAVES = ("take", "async_take")
log = logging.getLogger("ranks")

FAILED, UNKNOWN, DONE = "failed", "unknown", "done"


@dataclass(frozen=True)
class Case:
    """One rank does something at a point."""

    world: int
    verb: str
    which: int
    point: str
    act: str
    store: str = "file"

    def __str__(self):
        return f"{self.verb} of {self.world} ({self.store}): rank {self.which} {self.act} at {self.point}"


@dataclass(frozen=True)
class Known:
    """What is known of a verb on so many ranks, from a run without faults."""

    met: tuple[tuple[str, ...], ...]
    """The points of each rank, in order."""

    def points(self, which):
        """Those that are the same in each run: who is the last to go tidies up for all."""
        met = self.met[which]
        return met[: met.index("store add over") + 1]

    def find(self, which, glob):
        """The first point of a rank that looks so; None where it has none."""
        return next((point for point in self.points(which) if fnmatchcase(point, glob.replace("[", "[[]"))), None)

    def outcome(self, case):
        """What the others are to see of it: until a rank has said its last, nothing can be done without it."""
        met = self.points(case.which)
        at = met.index(case.point)
        if case.which:
            last = max(at for at, point in enumerate(met) if fnmatchcase(point, f"store set */{case.which}"))
            return FAILED if at <= last else DONE
        if case.verb in SAVES:
            decided, committed = met.index("store compare_set decision"), met.index("storage commit .snapshot_metadata")
            return FAILED if at <= decided else UNKNOWN if at <= committed else DONE
        answered = max(at for at, point in enumerate(met) if fnmatchcase(point, "store set */answer"))
        return FAILED if at <= answered else DONE


def put_old(path):
    """A snapshot of one process, and files that are not ours."""
    Snapshot.take(path, {"s": StateDict(x=torch.full((1000,), OLD))}, options=TakeOptions(durable=False))
    for name, text in FOREIGN.items():
        Path(path, name).write_text(text)


@functools.cache
def known(world, verb, template):
    """Its points, and for the verbs that read, a snapshot of so many ranks at `<template>/<world>`."""
    path = f"{template}/{world}"
    if verb in SAVES:
        path = f"{template}/{world}-{verb}"
        put_old(path)
    elif not os.path.exists(path):
        with Pool(world) as pool:
            assert all(right for _, right, _ in pool.run(fault_points.act, "take", path))
    with Pool(world) as pool:
        told = pool.run(fault_points.act, verb, path)
    assert all(right for _, right, _ in told)
    return Known(tuple(tuple(met) for met, _, _ in told))


def attempt(cases, folder, template):
    """Try cases side by side, and judge each; a line for each that ended otherwise than it should.

    On a busy machine, ranks that live give no sign of it for a moment. So what failed is tried again with more
    patience, then alone, and has to end as it should then.
    """
    for tries, (timeout, at_once) in enumerate([(SHORT, AT_ONCE), (PATIENT, AT_ONCE), (PATIENT, 1)]):
        faults = []
        for number, batch in enumerate(_batches(cases, at_once)):
            faults += _side_by_side(batch, f"{folder}/{tries}-{number}", template, timeout)
        for _, text in faults:
            log.warning("failed with a timeout of %s s: %s", timeout, text)
        cases = [case for case, _ in faults]
    return [text for _, text in faults]


def _batches(cases, at_once):
    batch = []
    for case in cases:
        if batch and sum(each.world for each in batch) + case.world > at_once:
            yield batch
            batch = []
        batch.append(case)
    yield batch


def _side_by_side(cases, folder, template, timeout):
    faults = []
    with contextlib.ExitStack() as stack:
        tries = []
        for number, case in enumerate(cases):
            pool = stack.enter_context(Pool(case.world, store=case.store))
            tries.append(Try(case, pool, f"{folder}-{number}", template, timeout))
        for each in tries:
            each.begin()
        for each in tries:
            try:
                each.end()
                each.judge()
            except AssertionError as error:  # a hang is one, too
                text = f"{each.case}: {error}\n  outcomes: {each.outcomes}, seconds: {each.pool.seconds}"
                faults.append((each.case, text))
            shutil.rmtree(each.path, ignore_errors=True)
    return faults


class Try:
    """A case, on ranks of its own."""

    def __init__(self, case, pool, path, template, timeout):
        self.case, self.pool, self.path, self.timeout = case, pool, path, timeout
        self.known = known(case.world, case.verb, template)
        self.saves = case.verb in SAVES
        if self.saves:
            put_old(path)
        else:
            shutil.copytree(f"{template}/{case.world}", path)
        self.before = listed(path)
        self.outcomes = []

    def begin(self):
        """Let all ranks go. What is slow is so for longer than the timeout."""
        case, timeout = self.case, self.timeout
        self.pool.start(
            fault_points.act, case.verb, self.path, case.which, case.point, case.act, timeout, 1.6 * timeout
        )

    def end(self):
        """Wait for all who can end; then let a rank that was stopped go on, and wait for it, too."""
        case, pool = self.case, self.pool
        others = [rank for rank in range(case.world) if rank != case.which]
        found = pool.finish(4 * self.timeout + SOON, ranks=others)
        self.between = listed(self.path)
        if case.act == "stop":
            until = time.monotonic() + 20
            while not stopped(pool.pids[case.which]):  # the others may be done before it comes so far
                assert time.monotonic() < until, "never came to its point"
                time.sleep(0.01)
            pool.cont(case.which)
        [own] = pool.finish(PATIENCE, ranks=[case.which])
        self.outcomes = [own if rank == case.which else found.pop(0) for rank in range(case.world)]

    def judge(self):
        """The outcome of each rank, what stands there, and that the next take works and cleans."""
        case = self.case
        own = self.outcomes[case.which]
        others = [outcome for rank, outcome in enumerate(self.outcomes) if rank != case.which]
        wanted = DONE if case.act == "slow" else self.known.outcome(case)
        if case.store == "tcp" and case.which == 0 and wanted != DONE and case.act != "slow":
            # the store went with it: who has said his last cannot know what the leader made of it
            wanted = UNKNOWN if any(isinstance(outcome, CommitUnknown) for outcome in others) else FAILED
        if case.act == "die":
            assert isinstance(own, Died), "it did not die"
        self.judge_others(wanted, others)
        if case.act == "stop":
            if wanted == FAILED:
                late = (RankError, SnapshotError)["commit" in case.point]  # whose claim is gone is not told why
                assert isinstance(own, late), f"it went on, and ended so: {own!r}"
            elif wanted == UNKNOWN and any(isinstance(outcome, RankError) for outcome in others):
                assert isinstance(own, SnapshotError), f"others were sure that it would not commit: {own!r}"
            else:
                assert isinstance(own, tuple | CommitUnknown), f"it went on, and ended so: {own!r}"
        if case.act == "slow":
            assert isinstance(own, tuple), f"it was slow, and ended so: {own!r}"
        if self.saves:
            self.judge_saved(wanted, committed=isinstance(own, tuple))
        else:
            assert listed(self.path) == self.before, "a restore changed the files"
            assert Snapshot(self.path).verify().ok, "the snapshot does not verify"

    def judge_others(self, wanted, others):
        case = self.case
        for outcome in others:
            if wanted == DONE:
                assert isinstance(outcome, tuple), f"not done: {outcome!r}"
                assert outcome[1], "done, and the values are wrong"
            elif wanted == UNKNOWN:
                assert isinstance(outcome, CommitUnknown | RankError), f"not unknown: {outcome!r}"
                assert getattr(outcome, "rank", 0) == 0, f"names another: {outcome!r}"
            else:
                assert isinstance(outcome, RankError), f"not failed: {outcome!r}"
                assert outcome.rank == case.which, f"names another: {outcome!r}"
                assert f"rank {case.which}" in str(outcome), f"names none: {outcome!r}"
                if not self.saves and self.known.find(case.which, "load_state_dict"):
                    met = self.known.points(case.which)
                    if met.index(case.point) < met.index("load_state_dict") - 4:
                        assert not outcome.handed, "was handed what another rank could not read"

    def judge_saved(self, wanted, *, committed):
        """Old or new, and whole; what is left is ours to recognise, and the next take leaves nothing of it."""
        case, path = self.case, self.path
        found = listed(path)
        assert {name: found.get(name) for name in FOREIGN} == {name: self.before[name] for name in FOREIGN}, "foreign"
        if wanted == FAILED or (wanted == UNKNOWN and not committed):
            for name, stamp in self.before.items():
                assert found.get(name) == stamp, f"{name} of the old snapshot was changed"
            assert Snapshot(path).read_object("0/s/x").eq(OLD).all(), "the old snapshot has another value"
            new = sorted(found.keys() - self.before.keys())
            assert all(re.fullmatch(r"\.take-[0-9a-f]{12}|data/[0-9a-f]{12}-.*", name) for name in new), new
            if wanted == FAILED:
                theirs = [name for name in new if f"-{case.which}" not in name and not name.startswith(".take-")]
                assert not theirs, f"left by ranks that live: {theirs}"
            if wanted == FAILED and case.act == "stop" and found != self.between:
                assert not set(found) - set(self.between), f"written when all was over: {set(found)}"
        else:
            for rank in range(case.world):
                own = Snapshot(path).read_object(f"{rank}/s/own")
                assert own.eq(fault_points.VALUE + rank).all(), f"a wrong value of rank {rank}"
        assert Snapshot(path).verify().ok, "what stands there does not verify"
        Snapshot.take(path, {"s": StateDict(x=1)}, overwrite=True, options=TakeOptions(durable=False))
        assert sorted(listed(path)) == sorted([".snapshot_metadata", *FOREIGN]), f"not cleaned: {sorted(listed(path))}"


def listed(path):
    """Every file, with what changes when it is written."""
    return {
        str(each.relative_to(path)): (each.stat().st_ino, each.stat().st_size, each.stat().st_mtime_ns)
        for each in Path(path).rglob("*")
        if each.is_file()
    }


def stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
