"""The folders of a root: which were made, which hold names that a loss of power takes back, which are left empty."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from snapshot.plugins.file.descriptors import sync_folder

_TRIES = 3
"""How often a folder is made anew that somebody else's cleaning removes before there is a file in it."""


class Folders:
    """What one storage knows of its root's folders. Used by several threads."""

    def __init__(self, root: str, *, durable: bool) -> None:
        self._root = root
        self._durable = durable
        self._lock = threading.Lock()
        self._made: list[str] = []
        self._dirty: set[str] = set()
        self._finished: set[str] = set()
        self._root_was_there: bool | None = None
        self._failed: OSError | None = None

    def make(self, folder: str) -> None:
        """Make a folder and those above it, remembering which ones: they are removed again if all comes to nothing."""
        with self._lock:
            if self._root_was_there is None:
                self._root_was_there = os.path.isdir(self._root)
            missing = []
            while folder and not os.path.isdir(folder):
                missing.append(folder)
                folder = os.path.dirname(folder)
            for each in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                    self._made.append(each)
                    self._dirty.add(os.path.dirname(each))

    def open_new(self, full: str, attempt: Callable[[], int]) -> int:
        """Open a new file in a folder that is made first. Another take's cleaning may remove the folder in between,
        as one that is empty: then it is made again."""
        folder = os.path.dirname(full)
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(FileNotFoundError):
                    self.make(folder)
                    return attempt()
            self.make(folder)
            return attempt()
        except BaseException:
            self.prune({folder})
            raise

    def prune(self, folders: set[str]) -> None:
        """Remove folders that were left empty: those below the root, the root unless it was there before we wrote, and
        those above it that this storage made."""
        for left in sorted(folders, key=len, reverse=True):
            folder = left
            while folder.startswith(self._root) or folder in self._made:
                if folder == self._root and self._root_was_there:
                    break
                if len(folder) < len(self._root) and folder not in self._made:
                    break
                try:
                    os.rmdir(folder)
                except FileNotFoundError:  # what could not be made, perhaps below something that could
                    pass
                except OSError:
                    break
                folder = os.path.dirname(folder)

    def changed(self, folder: str) -> None:
        """There is a new name in a folder."""
        with self._lock:
            self._dirty.add(folder)

    def finished(self, full: str) -> None:
        """A file is whole, and is expected to stay."""
        with self._lock:
            self._finished.add(full)

    def gone(self, full: str) -> None:
        """A file is not expected any more."""
        with self._lock:
            self._finished.discard(full)

    def expect(self) -> None:
        """Raise where a file that was finished is gone: somebody removes what is being written."""
        with self._lock:
            finished = sorted(self._finished)
        for full in finished:
            os.stat(full)

    def sync(self) -> None:
        """Make durable what names were made since the last time.

        What failed once counts as failed: the kernel reports what it lost once, and then forgets it.
        """
        if self._failed is not None:
            raise self._failed
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            if self._durable:
                for folder in sorted(dirty):
                    sync_folder(folder)
        except OSError as error:
            self._failed = error
            raise

    def sync_without(self, folders: set[str]) -> None:
        """Make durable that names are gone from folders; of a folder that is gone, too, in the nearest that stands."""
        nearest = set()
        for gone in folders:
            folder = gone
            while not os.path.isdir(folder) and folder != os.path.dirname(folder):
                folder = os.path.dirname(folder)
            nearest.add(folder)
        for folder in sorted(nearest):
            try:
                sync_folder(folder)
            except FileNotFoundError:  # whoever removed it meanwhile syncs that
                pass
            except PermissionError:  # above the root, we may have no right to look
                if folder.startswith(self._root):
                    raise
