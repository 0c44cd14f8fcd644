"""Folders of a host that several processes of one user share. The last process that leaves a folder deletes it."""

from __future__ import annotations

import errno
import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path

from snapshot.io.system import CLOEXEC, fcntl

USERS = ".users"
"""The file that each process with the folder locks."""


class SharedFolder:
    """A folder that this process uses until it is closed, or ends. It needs a system with `fcntl`."""

    def __init__(self, path: Path) -> None:
        """Create the folder if it is not there. Raise OSError if another user may change it."""
        self.path = path
        self._close = weakref.finalize(self, _leave, path, _enter(path), os.getpid())

    def close(self) -> None:
        """Leave the folder, and delete it if no other process uses it."""
        self._close()


def _enter(path: Path) -> int:
    """Return the descriptor of a shared lock."""
    while True:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(errno.EPERM, "must be a folder that only this user can change", str(path))
        try:
            lock = os.open(path / USERS, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600)
        except FileNotFoundError:  # its last user has just deleted it
            continue
        kept = False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)  # some file systems have no locks
            with suppress(FileNotFoundError):
                kept = os.path.samestat(os.fstat(lock), os.stat(path / USERS))
            if kept:
                return lock
        finally:
            if not kept:
                os.close(lock)


def _leave(path: Path, lock: int, owner: int) -> None:
    """Unlock a folder, and delete it if no other process has it locked. A forked child leaves its parent's alone."""
    try:
        if os.getpid() != owner:  # it has the same lock as its parent
            return
        fcntl.flock(lock, fcntl.LOCK_UN)  # before the next line: two that leave at once must not see each other
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), os.stat(path / USERS)):
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # another process uses it
        pass
    finally:
        os.close(lock)


def delete_abandoned(parent: Path, prefix: str) -> None:
    """Delete this user's folders whose processes were all killed. Their names begin with a prefix."""
    with suppress(OSError):
        for folder in parent.glob(f"{prefix}*"):
            with suppress(OSError):
                _leave(folder, os.open(folder / USERS, os.O_RDWR | CLOEXEC), os.getpid())
