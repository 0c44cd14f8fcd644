"""Folders of checkpoints that have their names only while they are whole, for frameworks that list names."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass

from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.interop.handover import is_snapshot
from snapshot.io.system import sync_folder
from snapshot.save.transaction import DAY
from snapshot.snapshot import Snapshot

UNFINISHED = ".unfinished"
"""Folder beside the checkpoints, with those that are being saved or removed."""
_SAVED, _REMOVED = "saved-", "removed-"


@dataclass(frozen=True, slots=True)
class NewFolder:
    """A checkpoint that is saved under another name, and renamed when it is committed."""

    path: str
    aside: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> NewFolder | None:
        """Return the new folder; None for a URL, and for a path that exists, whose commit is atomic as it is.

        Remove what crashes have left of other folders: of removals, and of saves that began a day ago.
        """
        name = os.fspath(path)
        if "://" in name:
            return None
        whole = os.path.abspath(name)
        aside = _aside(whole, _SAVED)
        _clean(aside)
        return None if os.path.exists(whole) and not os.path.islink(whole) else cls(whole, aside)

    def name(self) -> None:
        """Give the committed checkpoint its name. Raise SnapshotError if that fails."""
        try:
            if os.path.islink(self.path):
                os.unlink(self.path)  # what it names is another checkpoint
            os.rename(self.aside, self.path)
            sync_folder(os.path.dirname(self.path))
        except OSError as error:
            raise SnapshotError(
                f"{self.path}: the checkpoint is committed, but {self.aside} cannot be renamed: {error}; rename it"
            ) from error
        _leave(self.aside)


def hide_folder(path: str) -> None:
    """Take a checkpoint its name, so that only its files are left to remove. Do nothing for a link, or a file."""
    whole = os.path.abspath(path)
    aside = _aside(whole, _REMOVED)
    if os.path.isdir(whole) and not os.path.islink(whole):
        shutil.rmtree(aside, ignore_errors=True)
        os.makedirs(os.path.dirname(aside), exist_ok=True)
        os.rename(whole, aside)


def remove_folder(path: str) -> None:
    """Remove a checkpoint. Files that do not belong to a snapshot stay, under its name."""
    hide_folder(path)
    aside = _aside(os.path.abspath(path), _REMOVED)
    if is_snapshot(aside):
        with suppress(SnapshotNotFoundError):  # another process does the same
            Snapshot(aside).delete()
        with suppress(OSError):
            os.rmdir(aside)
        if os.path.isdir(aside):
            os.rename(aside, path)
    else:
        shutil.rmtree(aside, ignore_errors=True)
    _leave(aside)


def _aside(path: str, kind: str) -> str:
    folder, name = os.path.split(path)
    return os.path.join(folder, UNFINISHED, kind + name)


def _clean(aside: str) -> None:
    folder, spared = os.path.split(aside)
    for each in os.listdir(folder) if os.path.isdir(folder) else ():
        path = os.path.join(folder, each)
        with suppress(FileNotFoundError):
            if each.startswith(_REMOVED) or (each != spared and time.time() - os.path.getmtime(path) > DAY):
                shutil.rmtree(path)
    _leave(aside)


def _leave(aside: str) -> None:
    """Remove the folder of unfinished checkpoints if it is empty."""
    with suppress(OSError):
        os.rmdir(os.path.dirname(aside))
