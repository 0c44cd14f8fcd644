"""What is at a path, and what came back from there, against what should be."""

import contextlib

import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError
from tests.soak.load_app import differs, untied


def look(slot):
    """Which snapshot there is, and whether it is whole."""
    here = Snapshot(slot.path)
    if not here.exists():
        return None, False
    try:
        save_id = here.metadata.save_id
    except SnapshotError:
        with contextlib.suppress(CorruptSnapshotError):
            assert not here.verify(), "its manifest cannot be read, and it verifies"
        return "unreadable", False
    return save_id, here.verify().ok


def foreign(slot):
    assert (slot.path / "keep.txt").read_text() == "not ours"
    assert (slot.path / "data" / "keep.bin").read_text() == "nor this"


def came_back(slot, live, before, options):
    assert slot.saved is not None, "nothing was saved here"
    chosen = {"extra"} if "select" in options else set(slot.saved) - ({"model"} if "exclude" in options else set())
    for key in slot.saved:
        now = live[key].state_dict()
        wanted = slot.saved[key] if key in chosen else before[key]
        if key in chosen and key in ("extra", "alike") and before[key].keys() - wanted.keys():
            wanted = {**before[key], **wanted}  # what the snapshot lacks is kept, in its place
        found = differs(wanted, now, key)
        assert not found, f"{slot.path}: {found}"
        if key in chosen and key in ("extra", "alike"):
            assert not untied(wanted, now) or before[key], f"{key}: no longer tied"


def untouched(live, before, error, options):
    """What a failed restore does not name as touched is as it was; nothing was handed over unless all was read."""
    told_of = notes(error)
    named = set(getattr(error, "touched", ()))
    for key in ("extra", "alike", "model"):
        now = live[key].state_dict()
        if getattr(live[key], "handed", 0):
            continue
        for name, was in before[key].items():
            if differs(was, now[name]):
                alike = [other for other in now if same_memory(now[name], now[other])]  # one of its names is told
                told = any(path in told_of or path in " ".join(named) for path in (f"{key}/{o}" for o in alike))
                assert told, f"{key}/{name} was touched, and not named: {error} {told_of} {named}"


def same_memory(a, b):
    return a is b or (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.data_ptr() == b.data_ptr())


def notes(error):
    return " ".join(getattr(error, "__notes__", ()))


def told_committed(error):
    return error is not None and "committed nevertheless" in f"{error} {notes(error)}"


def expected(path):
    """The files of the snapshot at a path, and those that are none of ours."""
    document = Snapshot(path)._manifest.open()
    return {".snapshot_metadata", "keep.txt", "data/keep.bin", *document.files, *(p.location for p in document.parts)}


def tensors(saved):
    rest = [saved]
    while rest:
        each = rest.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, (list, tuple)):
            rest += each
