"""Rounds in which several meet at one place: what each has told, and what stands there when all is over."""

import contextlib
import random
import re
import time
from collections import Counter
from pathlib import Path

from snapshot import Snapshot, SnapshotError
from tests.faults.concurrent_jobs import READERS, VERBS, WRITERS

FOREIGN = ("notes.txt", "data/notes-0-0.bin.bak")


class Place:
    """One path, which a round leaves as it should be, or `judge` says what is wrong."""

    def __init__(self, url):
        self.url = url
        self.folder = Path(url.removeprefix("file://")) if url.startswith("file") else None

    def prepare(self, old):
        """An old snapshot, or none; and files that are nobody's business."""
        with contextlib.suppress(SnapshotError):
            Snapshot(self.url).delete()
        if self.folder is not None:
            (self.folder / "data").mkdir(parents=True, exist_ok=True)
            for name in FOREIGN:
                (self.folder / name).write_text("mine")
        if old is not None:
            VERBS["overwrite"](self.url, old)

    def stands(self):
        """The version of the snapshot that stands there, whole; None without one."""
        if not Snapshot(self.url).exists():
            return None
        report = Snapshot(self.url).verify()
        assert report.ok, f"what stands there does not verify: {report.faults}"
        found = set(VERBS["restore"](self.url, 0).values())
        assert len(found) == 1, f"a mixture stands there: {found}"
        return found.pop()

    def judge(self, old, told):
        """The end of a round: what stands, who says that he put it there, and that nothing else is left."""
        stands = self.stands()
        writers = [each for each in told if each["verb"] in WRITERS]
        done = [each["version"] for each in writers if each["ended"] == "done"]
        deleted = [each for each in told if each["verb"] == "delete" and each["ended"] == "done"]
        for each in writers:
            assert each["ended"] in ("done", "SnapshotExistsError"), each
            if each["ended"] != "done":
                assert re.search(r"overwrite=True|another take|cleaned", each["seen"]["text"]), each
        if not deleted:
            assert stands in (done or [old]), f"{stands} stands, and {done} say that they are done"
            if old is None and writers:
                assert done, "nobody has won"
                assert len(done) == 1 or any(each["verb"] != "take" for each in writers), f"{done} say that they won"
        else:
            assert stands in (None, *done), f"{stands} stands after a delete, and {done} say that they are done"
        for each in told:
            if each["verb"] == "delete":
                assert each["ended"] in ("done", "SnapshotNotFoundError"), each
            if each["verb"] in READERS:
                self._judge_reader(each, {old, *(one["version"] for one in writers)} - {None})
        try:
            self.judge_files(stands)
        except AssertionError:
            # What was replaced or deleted in the moment of its commit may leave files: they go with the next take.
            if not done or any(name.startswith(".take-") for name in self._files()):
                raise
            VERBS["overwrite"](self.url, 9)
            self.judge_files(9)

    def _judge_reader(self, told, known):
        seen = told["seen"]
        if told["ended"] != "done":
            assert told["ended"] in ("CorruptSnapshotError", "SnapshotNotFoundError", "StorageNotFoundError"), told
            if "handed" in seen:
                assert not seen["handed"], f"was handed what could not be read: {told}"
                assert set(seen["written"]) <= set(seen["told"]), f"written to, and not told: {told}"
                if told["verb"] == "restore atomically" and told["ended"] == "SnapshotNotFoundError":
                    assert not seen["written"], told
        elif told["verb"] == "verify":
            assert seen["ok"], f"what was replaced is called damaged: {told}"
        else:
            assert None not in seen.values(), f"a value that is a mixture: {told}"
            assert set(seen.values()) <= known, f"a value that nobody took: {told}"
            if told["verb"] != "read":  # object for object: each is whole
                assert len(set(seen.values())) == 1, f"a mixture: {told}"

    def _files(self):
        return {str(each.relative_to(self.folder)) for each in self.folder.rglob("*") if each.is_file()}

    def judge_files(self, stands):
        if self.folder is None:
            return
        found = self._files()
        assert set(FOREIGN) <= found, "what is not ours is gone"
        ours = found - set(FOREIGN)
        if stands is None:
            assert not ours, f"left, and nothing stands there: {ours}"
        else:
            mine = Snapshot(self.url).metadata.save_id
            left = {name for name in ours if name != ".snapshot_metadata" and mine not in name}
            assert not left, f"left beside what stands there: {left}"
            assert not {name for name in ours if name.startswith(".take-")}, ours


# Rounds

OLD = 5
PAIRS = [
    *(("take", other, None) for other in ("take", "overwrite", "delete")),
    *(("take", other, OLD) for other in ("take", "overwrite", "delete")),
    *(("overwrite", other, None) for other in ("take", "overwrite")),
    *(("overwrite", other, OLD) for other in ("take", "overwrite", "delete")),
    *(("overwrite in the background", other, OLD) for other in ("overwrite in the background", "overwrite", "delete")),
    *(("delete", other, OLD) for other in ("take", "overwrite", "delete", *READERS)),
    *((reader, writer, OLD) for reader in READERS for writer in ("overwrite", "delete")),
]
"""Who is held at each of its steps, who meanwhile runs to its end, and which snapshot stood there before."""


def _judged(place, old, told, what):
    """A line for what is wrong, or none."""
    try:
        place.judge(old, told)
    except AssertionError as error:
        return [f"{what}: {error}\n  {told}"]
    return []


def between(crowd, place, pairs, every=1):
    """For each pair one is held before a step, while the other runs to its end: at each step, or at every n-th."""
    rounds, faults = 0, []
    held, free = crowd[:2]
    for number, (one, other, old) in enumerate(pairs):
        nth = 1 + number % every
        while True:
            place.prepare(old)
            reached = held.hold(one, place.url, 1, nth)
            free.start(other, place.url, 2)
            second = free.result()
            held.release()
            told = [held.result(), second]
            if not reached:
                break
            rounds += 1
            faults += _judged(place, old, told, f"{one} of {old}, before its step {nth} {other}")
            nth += every
    return rounds, faults


def three(crowd, place, rounds, seed):
    """Two are held at steps of theirs while a third runs to its end; then they go on, in any order."""
    chance, faults = random.Random(seed), []
    for number in range(rounds):
        old = chance.choice([None, OLD])
        place.prepare(old)
        verbs = [chance.choice(WRITERS) for _ in range(2)]
        steps = [chance.randint(1, 11) for _ in range(2)]
        for worker, verb, version, nth in zip(crowd, verbs, (1, 2), steps, strict=False):
            worker.hold(verb, place.url, version, nth)
        verbs.append(chance.choice(["delete", "overwrite", "overwrite", *READERS]))
        crowd[2].start(verbs[2], place.url, 3)
        last = crowd[2].result()
        order = chance.sample([0, 1], 2)
        told = {}
        for each in order:
            crowd[each].release()
            if chance.random() < 0.7:
                told[each] = crowd[each].result()
        told |= {each: crowd[each].result() for each in order if each not in told}
        what = f"round {number} of seed {seed}: {verbs} at {old}, held at {steps}"
        faults += _judged(place, old, [told[0], told[1], last], what)
    return rounds, faults


def together(crowd, place, rounds, seed, seconds=None):
    """All at once, each a little later than another. How often which verb ended how; what was wrong."""
    chance, faults, ended = random.Random(seed), [], Counter()
    until = time.monotonic() + (seconds or 3600)
    for number in range(rounds):
        if time.monotonic() > until:
            break
        old = chance.choice([None, OLD, OLD])
        place.prepare(old)
        verbs = [chance.choice([*WRITERS, *WRITERS, "delete", *READERS]) for _ in range(chance.randint(2, len(crowd)))]
        pauses = [chance.choice([0, chance.random() * 0.01, chance.random() * 0.05]) for _ in verbs]
        for version, (worker, verb, pause) in enumerate(zip(crowd, verbs, pauses, strict=False), 1):
            worker.start(verb, place.url, version, None, None, pause)
        told = [worker.result() for worker, _ in zip(crowd, verbs, strict=False)]
        ended.update((each["verb"], each["ended"]) for each in told)
        faults += _judged(place, old, told, f"round {number} of seed {seed}: {verbs} at {old}")
    return ended, faults


def forked(worker, place, own):
    """What a process tells that forks while its snapshot is pending; the child takes its own, elsewhere or there."""
    worker.start("fork", place.url, own)
    told = worker.result()
    assert told["ended"] == "done", told
    return told["seen"]
