"""Random sequences of changes, takes and deletes: a based snapshot equals a full one, bit for bit."""

import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import Snapshot, StateDict, TakeOptions

ROWS, COLUMNS = 40, 512
"""Each tensor has 80 KiB, so that its file is worth sharing."""
NAMES = "abcde"

change = st.tuples(st.just("change"), st.sampled_from(NAMES))
swap = st.tuples(st.just("swap"), st.sampled_from(NAMES))
drop = st.tuples(st.just("drop"), st.sampled_from(NAMES))
cast = st.tuples(st.just("cast"), st.sampled_from(NAMES))
take = st.tuples(st.just("take"), st.sampled_from(["none", "newest", "oldest", "two"]), st.booleans())
delete = st.tuples(st.just("delete"), st.integers(0, 9))
actions = st.lists(st.one_of(change, swap, drop, cast, take, take, take, delete), min_size=4, max_size=16)


def fresh(value):
    return torch.full((ROWS, COLUMNS), float(value))


class Run:
    """A state, the snapshots of it that exist, and what each one must hold."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.tensors = {name: fresh(number) for number, name in enumerate(NAMES)}
        self.kept = {}
        self.taken = 0

    def act(self, what, *more):
        getattr(self, what)(*more)

    def change(self, name):
        if name in self.tensors:
            self.tensors[name].flatten()[-1] += 1
        else:
            self.tensors[name] = fresh(7)

    def swap(self, name):
        """Another tensor with equal bytes, or of another name."""
        others = [each for each in self.tensors if each != name]
        if others:
            self.tensors[name] = self.tensors[others[0]].clone()

    def drop(self, name):
        if len(self.tensors) > 1:
            self.tensors.pop(name, None)

    def cast(self, name):
        """The same bytes as another dtype or shape."""
        if name in self.tensors:
            held = self.tensors[name]
            self.tensors[name] = held.view(torch.int32) if held.dtype is torch.float32 else held.view(COLUMNS, ROWS)

    def take(self, which, asynchronous):
        paths = sorted(self.kept)
        base = {"none": None, "newest": paths[-1:], "oldest": paths[:1], "two": paths[:-3:-1]}[which]
        if which in ("newest", "oldest"):
            base = base[0] if base else None
        path = self.folder / f"{self.taken:02}"
        self.taken += 1
        state = {"s": StateDict(**self.tensors)}
        if asynchronous:
            pending = Snapshot.async_take(path, state, base=base, options=TakeOptions(durable=False))
            for each in self.tensors.values():
                each.add_(1)  # which must not reach the snapshot
            pending.wait()
            for each in self.tensors.values():
                each.sub_(1)
        else:
            Snapshot.take(path, state, base=base, options=TakeOptions(durable=False))
        self.kept[path] = {name: each.clone() for name, each in self.tensors.items()}

    def delete(self, number):
        if self.kept:
            path = sorted(self.kept)[number % len(self.kept)]
            del self.kept[path]
            Snapshot(path).delete()

    def check(self):
        for path, values in self.kept.items():
            snapshot = Snapshot(path)
            report = snapshot.verify()
            assert report, report
            found = dict(snapshot.read_object("s"))
            assert found.keys() == values.keys()
            for name, value in values.items():
                assert found[name].dtype is value.dtype
                assert found[name].equal(value)
            names = {each.name for each in (path / "data").iterdir()}
            assert names == {each.partition("/")[2] for each in snapshot.metadata.files}


@settings(max_examples=60, deadline=None)
@given(actions)
def test_base_takes_after_random_changes_equal_full_takes(sequence):
    folder = tempfile.mkdtemp()
    try:
        run = Run(folder)
        run.act("take", "none", False)
        for each in sequence:
            run.act(*each)
        run.act("take", "newest", False)
        run.check()
        for number in (1, 0, 2, 0):
            run.act("delete", number)
        run.check()
    finally:
        shutil.rmtree(folder)
