"""Folders below a root: those that were created, those to sync, and those that became empty."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from snapshot.plugins.file.descriptors import find_link
from snapshot.storage import check_path
from snapshot.system_calls import sync_folder

_TRIES = 3
"""Attempts to create a file in a folder that another take's clean-up removes while it is empty."""


class Folders:
    """State of one storage's folders, shared by its threads."""

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
        """Create a folder and its parents, and record them: they are removed if the take fails."""
        with self._lock:
            if self._root_was_there is None:
                self._root_was_there = os.path.isdir(self._root)
            missing = []
            while folder and not os.path.isdir(folder):
                missing.append(folder)
                if folder == os.path.dirname(folder):  # a drive that is not there
                    break
                folder = os.path.dirname(folder)
            for each in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                    self._made.append(each)
                    self._dirty.add(os.path.dirname(each))

    def open_new(self, full: str, attempt: Callable[[], int]) -> int:
        """Open a new file, after creating its folder. Retry if another take's clean-up removes the empty folder."""
        folder = os.path.dirname(full)
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(FileNotFoundError):
                    self.make(folder)
                    return attempt()
            self.make(folder)
            return attempt()
        except BaseException:
            self.remove_empty({folder})
            raise

    def remove_empty(self, folders: set[str]) -> None:
        """Remove empty folders: those below the root, and the root and its parents if this storage created them."""
        for left in sorted(folders, key=len, reverse=True):
            folder = left
            while folder.startswith(self._root) or folder in self._made:
                if folder == self._root and self._root_was_there:
                    break
                if len(folder) < len(self._root) and folder not in self._made:
                    break
                try:
                    os.rmdir(folder)
                except FileNotFoundError:  # the folder was never created, but a parent may have been
                    pass
                except OSError:
                    break
                if folder == os.path.dirname(folder):
                    break
                folder = os.path.dirname(folder)

    def mark_changed(self, folder: str) -> None:
        """Mark a folder that got a new name."""
        with self._lock:
            self._dirty.add(folder)

    def mark_finished(self, full: str) -> None:
        """Mark a file as finished: it must exist until the commit."""
        with self._lock:
            self._finished.add(full)

    def mark_removed(self, full: str) -> None:
        """Stop expecting a file."""
        with self._lock:
            self._finished.discard(full)

    def check_finished(self) -> None:
        """Raise FileNotFoundError if a finished file was removed by another process."""
        with self._lock:
            finished = sorted(self._finished)
        for full in finished:
            os.stat(full)

    def sync_changed(self) -> None:
        """Sync the folders that got new names since the last call.

        A failure is final, since the kernel reports a lost write only once.
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

    def sync_removed(self, folders: set[str]) -> None:
        """Sync folders that lost names; in place of a removed folder, its nearest existing parent."""
        nearest = set()
        for gone in folders:
            folder = gone
            while not os.path.isdir(folder) and folder != os.path.dirname(folder):
                folder = os.path.dirname(folder)
            nearest.add(folder)
        for folder in sorted(nearest):
            try:
                sync_folder(folder)
            except FileNotFoundError:  # it was removed meanwhile, by a process that syncs its parent
                pass
            except PermissionError:  # folders above the root may be unreadable
                if folder.startswith(self._root):
                    raise


def list_files(root: str, prefix: str, recursive: bool) -> list[str]:
    """Return the paths below a root that begin with a prefix. If not recursive, names of folders end in `/`."""
    base = prefix.rpartition("/")[0]
    if base:
        check_path(base)
    if find_link(root, base) is not None:
        return []
    found = []
    folders = [base]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(f"{root}/{folder}" if folder else root))
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            if os.path.isfile(root):  # a root that cannot be read is not empty
                raise
            continue
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if not path.startswith(prefix) and not (is_folder and recursive and prefix.startswith(path + "/")):
                continue
            if not is_folder:
                found.append(path)
            elif recursive:
                folders.append(path)
            else:
                found.append(path + "/")
    return sorted(found)
