"""Checkpoint folders of Hugging Face's Trainer: which are complete, and which are deleted."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress

from snapshot.decoding import decode_json_of_python
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError
from snapshot.events import log
from snapshot.interop.weight_digests import FOLDER, NOTICES, STATE, STATE_DIGEST, compare_weights
from snapshot.io.system import sync_folder, sync_path
from snapshot.io.url import URL
from snapshot.snapshot import Snapshot
from snapshot.text import listed

MARK = "weights-incomplete"
"""File in a checkpoint folder until all of it is written, and flushed to disk."""
_ASIDE = "old-"
"""Beginning of the name of a checkpoint's folder while it is saved again."""
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_")
"""Beginnings of the names of optimizers' files that the Trainer writes without the mixin."""
NOTICE = (
    b"\x80\x02cSnapshotTrainerMixin of the library snapshot has saved this checkpoint: resume it with a Trainer "
    b"that has the mixin\nNotice\n."
)
"""A pickle of a class that does not exist. Loading it raises an error with this text; no code runs."""
_CHECKPOINT = re.compile(rf"({_ASIDE})?checkpoint-([0-9]+)")


def find_last(output_dir: str, *, weights: bool = True, damaged: set[str] | None = None) -> str | None:
    """Return the last checkpoint that is complete and undamaged. A crash leaves one that lacks a part.

    All bytes with digests are read. Without `weights`, those of the weights and of the Trainer's state are not.

    `damaged`: the damaged ones that were passed over are added to it.
    """
    for checkpoint in list_checkpoints(output_dir):
        if not is_complete(checkpoint):
            log.warning("%s: is not complete, and is passed over", checkpoint)
            continue
        if snapshot_in(checkpoint) is None and not has_optimizer(checkpoint):
            log.warning("%s: has no state of an optimizer and a scheduler, and is passed over", checkpoint)
            continue
        faults = find_damage(checkpoint, weights=weights)
        if not faults:
            return checkpoint
        log.warning("%s: is damaged, and is passed over:%s", checkpoint, listed(faults, 10))
        if damaged is not None:
            damaged.add(checkpoint)
    return None


def has_optimizer(checkpoint: str) -> bool:
    """Return True if the Trainer itself has written an optimizer's state and a scheduler's. It loads none alone."""
    own = {name for name in os.listdir(checkpoint) if not _is_notice(os.path.join(checkpoint, name))}
    return NOTICES[1] in own and any(name.startswith(_OPTIMIZERS) for name in own)


def put_notices(checkpoint: str) -> None:
    """Write files that make the Trainer alone, without the mixin, raise an error that names the mixin."""
    for name in NOTICES:
        with open(os.path.join(checkpoint, name), "wb") as file:
            file.write(NOTICE)


def _is_notice(path: str) -> bool:
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(NOTICE) + 1) == NOTICE


def find_damage(checkpoint: str, *, weights: bool = True) -> Sequence[str]:
    """Return a line for each damaged or changed part of a checkpoint's snapshot, weights and settings."""
    torn = [name for name in sorted(os.listdir(checkpoint)) if name.endswith(".json") and _is_torn(checkpoint, name)]
    if torn:
        return [f"{name}: is not JSON, or cannot be read" for name in torn]
    snapshot = snapshot_in(checkpoint)
    if snapshot is None:
        return ()
    try:
        faults = list(snapshot.verify().faults)
        if weights:
            faults += compare_weights(URL.parse(checkpoint), None, snapshot.metadata.metadata).faults
    except SnapshotError as error:  # its manifest is damaged, for example
        return (str(error),)
    return faults


def _is_torn(checkpoint: str, name: str) -> bool:
    path = os.path.join(checkpoint, name)
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as file:
            decode_json_of_python(file.read(), name)
    except (CorruptSnapshotError, OSError):
        return True
    return False


def list_checkpoints(output_dir: str) -> list[str]:
    """Return the folders of checkpoints, the last one first. The old one follows one that is saved again."""
    listed = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    found = [match for match in map(_CHECKPOINT.fullmatch, listed) if match]
    found.sort(key=lambda match: (int(match[2]), match[1] is None), reverse=True)
    return [os.path.join(output_dir, match[0]) for match in found]


def is_complete(checkpoint: str) -> bool:
    """Return True if a checkpoint has its weights, its state, and the commit of a snapshot that was begun."""
    begun = os.path.isdir(os.path.join(checkpoint, FOLDER)) and snapshot_in(checkpoint) is None
    return os.path.isfile(os.path.join(checkpoint, STATE)) and not begun and not _is_marked(checkpoint)


def snapshot_in(checkpoint: str) -> Snapshot | None:
    """Return the snapshot in a checkpoint folder; None if the Trainer alone wrote it."""
    snapshot = Snapshot(os.path.join(checkpoint, FOLDER))
    return snapshot if snapshot.exists() else None


def set_aside(checkpoint: str) -> None:
    """Keep a complete checkpoint under another name until it is saved again, which may fail.

    Another checkpoint stays incomplete: a failure must not mix its old and new parts.
    """
    if is_complete(checkpoint):
        _remove(_aside(checkpoint))
        os.rename(checkpoint, _aside(checkpoint))
        return
    if os.path.islink(checkpoint):  # what it points to is missing, or not complete
        os.remove(checkpoint)
        return
    for name in (STATE, STATE_DIGEST):
        with suppress(FileNotFoundError):
            os.remove(os.path.join(checkpoint, name))
    snapshot = snapshot_in(checkpoint)
    if snapshot is not None:
        snapshot.delete()
    unmark_weights(checkpoint)


def put_back(output_dir: str, *, weights: bool = True) -> None:
    """Give the checkpoints back their names that a crash has left aside, unless they were saved again to the end.

    One that was saved again is read first: the old one is the better one if it is damaged.
    """
    for aside in list_checkpoints(output_dir):
        folder, name = os.path.split(aside)
        checkpoint = os.path.join(folder, name.removeprefix(_ASIDE))
        if aside == checkpoint or not is_complete(aside):
            continue
        if is_complete(checkpoint):
            if not find_damage(checkpoint, weights=weights):
                _remove(aside)
                continue
            if find_damage(aside, weights=weights):
                continue  # none is better
        _remove(checkpoint)
        with suppress(FileNotFoundError):  # another process does the same
            os.rename(aside, checkpoint)


def present_name(checkpoint: str) -> str:
    """Return the name of a checkpoint after `put_back`, which may have given it another one."""
    folder, name = os.path.split(os.path.normpath(checkpoint))
    usual = os.path.join(folder, name.removeprefix(_ASIDE))
    return checkpoint if os.path.isdir(checkpoint) else usual


def _remove(checkpoint: str) -> None:
    """Remove a checkpoint, or a link to one, as far as possible."""
    if os.path.islink(checkpoint):
        with suppress(OSError):
            os.remove(checkpoint)
    else:
        shutil.rmtree(checkpoint, ignore_errors=True)


def _aside(checkpoint: str) -> str:
    folder, name = os.path.split(checkpoint)
    return os.path.join(folder, _ASIDE + name)


def mark_weights(checkpoint: str) -> None:
    """Mark a new checkpoint as one that is not written to the end."""
    os.makedirs(checkpoint, exist_ok=True)
    with open(os.path.join(checkpoint, MARK), "w"):
        pass


def unmark_weights(checkpoint: str, *, durable: bool = False) -> None:
    """Remove the mark: all is written. `durable`: return when the removal is on disk."""
    with suppress(FileNotFoundError):
        os.remove(os.path.join(checkpoint, MARK))
    if durable:
        sync_folder(checkpoint)


def sync_files(checkpoint: str) -> None:
    """Flush the files of a checkpoint to disk, except those of its snapshot, which are flushed by their save."""
    for folder, folders, files in os.walk(checkpoint):
        folders[:] = [each for each in folders if each != FOLDER]
        for each in files:
            with suppress(FileNotFoundError):  # the Trainer's own mark is removed meanwhile
                sync_path(os.path.join(folder, each))
        sync_folder(folder)
    sync_folder(os.path.dirname(checkpoint) or ".")


def check_weights(checkpoint: str) -> None:
    """Raise if the weights of a checkpoint are not written, or not all."""
    if _is_marked(checkpoint):
        raise SnapshotNotFoundError(
            f"{checkpoint}: its weights were not written to the end; resume from an earlier checkpoint"
        )


def expect_weights(checkpoint: str) -> None:
    """Raise if the weights or the state of a checkpoint are not those that were saved. Older ones have no digests."""
    snapshot = snapshot_in(checkpoint)
    faults = compare_weights(URL.parse(checkpoint), None, snapshot.metadata.metadata).faults if snapshot else ()
    if faults:
        raise CorruptSnapshotError(
            f"{checkpoint}: its weights or its state are damaged, or were changed after the save; resume from another "
            f"checkpoint; if they were changed on purpose, set snapshot_verify_weights = False:{listed(faults, 10)}"
        )


def delete_old(new: str, limit: int, best: str | None, damaged: Collection[str] = ()) -> None:
    """Delete old checkpoints, as the Trainer does. The last `limit` complete ones are kept, the best one among them.

    Without a limit, only the one is deleted that has been saved again.

    The order is that of their times, and `new` is the last one: a run may begin at an earlier step again. Incomplete
    ones, and those that are known as damaged, are deleted if the new one is complete.
    """
    if not is_complete(new):
        return
    _remove(_aside(new))
    if limit < 1:
        return
    folder, name = os.path.split(new)
    listed = [each for each in list_checkpoints(folder) if os.path.basename(each) != name]
    complete = [each for each in listed if each not in damaged and is_complete(each)]
    complete.sort(key=_time_of, reverse=True)
    named_best = best and os.path.join(folder, os.path.basename(os.path.normpath(best)))
    kept = [each for each in complete if each == named_best]
    kept += [each for each in complete if each not in kept][: max(0, limit - 1 - len(kept))]
    for each in listed:
        if each not in kept:
            _remove(each)


def _time_of(checkpoint: str) -> float:
    return os.path.getmtime(os.path.join(checkpoint, STATE))


def _is_marked(checkpoint: str) -> bool:
    return os.path.exists(os.path.join(checkpoint, MARK))
