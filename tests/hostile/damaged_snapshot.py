"""A small snapshot whose every byte is damaged in turn, in memory or in a folder, and what a user sees of it."""

import contextlib

import numpy as np
import torch

from snapshot import RestoreOptions, Snapshot, SnapshotError, StateDict
from snapshot.manifest.document import METADATA
from snapshot.storages import memory


class Spy(StateDict):
    """Knows whether it was given anything."""

    given = False

    def load_state_dict(self, state):
        self.given = True
        super().load_state_dict(state)


def state():
    """About 16 KiB on storage: the manifest, a header, tensors of several dtypes, an array, long texts and bytes."""
    generator = torch.Generator().manual_seed(5)
    tensors = {f"t{i}": torch.randn(11 + i, generator=generator) for i in range(5)}
    return {
        "s": Spy(
            **tensors,
            half=torch.randn(100, generator=generator).half(),
            wide=torch.randn(20, 4, generator=generator, dtype=torch.float64),
            flags=torch.rand(64, generator=generator) < 0.5,
            array=np.arange(60, dtype=np.int16),
            some=[1, "x", 2.5, None],
            long="é" * 9_000,
        )
    }


def blank():
    """The application before a restore: all zeros."""
    live = state()
    for value in leaves(live):
        value[...] = 0
    live["s"].update(some=0, long="")
    return live


def leaves(live):
    """What a restore writes to in place."""
    return [value for value in live["s"].values() if isinstance(value, (torch.Tensor, np.ndarray))]


def written(live):
    """The names of what is no longer zero."""
    return {
        f"s/{name}"
        for name, value in live["s"].items()
        if isinstance(value, (torch.Tensor, np.ndarray)) and value.any()
    }


def is_as_saved(live):
    """Whether it is exactly what was saved."""
    ours, saved = live["s"], state()["s"]
    if ours.keys() != saved.keys():
        return False
    return all(
        np.array_equal(np.asarray(ours[name]), np.asarray(value)) and type(ours[name]) is type(value)
        for name, value in saved.items()
        if name != "some"
    ) and ours["some"] == saved["some"]  # fmt: skip


def take_to_memory(name):
    """A snapshot in memory whose bytes can be changed where they lie: path -> array."""
    Snapshot.take(f"memory://{name}", state(), overwrite=True)
    paths = [path for path in memory._tree.get().files if path.startswith(f"{name}/")]
    for path in paths:
        memory._tree.get().files[path] = memory._File(np.array(memory._tree.get().files[path].content))
    return {path.removeprefix(f"{name}/"): memory._tree.get().files[path].content for path in paths}


@contextlib.contextmanager
def flipped(array, *places, mask=None):
    """Some bytes are others for a while: one bit of each, or those of the mask."""
    for at in places:
        array[at] ^= mask or 1 << at % 8
    try:
        yield
    finally:
        for at in places:
            array[at] ^= mask or 1 << at % 8


def ranges(snapshot):
    """Everything in the data files that has a digest of its own: (file, begin, end, what faults call it)."""
    document = snapshot._manifest.open()
    found = {(location, 0, file.header): location for location, file in document.files.items() if file.header}
    for path, entry in document.manifest.items():
        stored = getattr(entry, "data", entry)
        if hasattr(stored, "byte_range"):
            found.setdefault((stored.location, *stored.byte_range), path)
            if stored.blocks:
                found.setdefault(tuple(stored.blocks), path)
    return [(*where, name) for where, name in found.items() if where[1] < where[2]]


def look(snapshot):
    """Verify and restore a damaged snapshot. `verify` finds it; a restore raises, and hands nothing over, or gives what
    was saved; what it wrote to is named, and `atomic=True` writes to nothing. Whether the restore met the damage."""
    with contextlib.suppress(SnapshotError):
        assert not snapshot.verify(), "verify did not see it"
    met = False
    for atomic in (False, True):
        live = blank()
        error = caught(snapshot.restore, live, options=RestoreOptions(atomic=atomic))
        if error is None:
            assert is_as_saved(live), "a wrong value came back"
            continue
        met = True
        assert not live["s"].given, "load_state_dict was called"
        assert live["s"]["some"] == 0
        assert live["s"]["long"] == ""
        touched = set(getattr(error, "touched", ()))
        assert written(live) <= touched, (written(live) - touched, error)
        assert not atomic or not touched
    return met


def caught(verb, *arguments, **options):
    """The error of ours that comes out, or None."""
    try:
        verb(*arguments, **options)
    except SnapshotError as error:
        return error
    return None


def files_of(folder):
    """The files of a snapshot: manifest first."""
    return [folder / METADATA, *sorted((folder / "data").iterdir())]
