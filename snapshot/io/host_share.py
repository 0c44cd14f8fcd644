"""Files that one process of a host reads from a remote storage and hands on to the other ranks there.

Ranks of one host often need the same parts of a manifest. The first rank that needs a file reads it, and puts its bytes
into a folder that all of them see. Each rank verifies what it takes from there. The folder spares requests and no more:
without it, or if a rank dies, each rank reads for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from snapshot.io.aio import in_thread
from snapshot.io.system import CLOEXEC, fcntl

PREFIX = "snapshot-share-"
PATIENCE = 20.0
"""Seconds that a rank waits for a file that another rank reads, before it reads the file itself."""
_PAUSE = 0.02
"""Maximum seconds between two looks for such a file."""
_LEFT = 3600.0
"""Seconds after which the folder of dead processes is deleted."""
_USERS = "users"


class HostShare:
    """A folder for the files of one operation, deleted by the last process that uses it."""

    def __init__(self, token: str) -> None:
        """`token`: a random name of the operation that all its ranks know."""
        self._folder = Path(tempfile.gettempdir(), f"{PREFIX}{os.getuid()}-{token}")
        self._users = -1
        self._taken: set[str] = set()
        """The files that this process has asked for. It asks again only if their bytes were damaged."""
        _delete_abandoned(self._folder.parent)
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._is_ours():
                users = os.open(self._folder / _USERS, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600)
                try:
                    fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    self._users = users
                except OSError:  # it is being deleted
                    os.close(users)

    def _is_ours(self) -> bool:
        """Return True if no other user can put files into the folder."""
        found = self._folder.lstat()
        return not self._folder.is_symlink() and found.st_uid == os.getuid() and not found.st_mode & 0o077

    async def get(self, path: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the bytes of a file: those that another process has read, or those that `read` returns."""
        if self._users < 0 or path in self._taken:
            return await read()
        self._taken.add(path)
        name = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()
        held, lock = self._folder / name, self._folder / f"{name}.lock"
        end, pause = time.monotonic() + PATIENCE, _PAUSE / 8
        while time.monotonic() < end:
            try:
                return await in_thread(held.read_bytes)
            except FileNotFoundError:
                pass
            except OSError:
                break
            with _try_lock(lock) as locked:
                if locked and not held.exists():
                    data = await read()
                    await in_thread(self._put, held, data)
                    return data
            if locked is None:
                break
            await asyncio.sleep(0 if locked else pause)
            pause = min(2 * pause, _PAUSE)
        return await read()

    def _put(self, held: Path, data: bytes) -> None:
        """Hand on a file's bytes if there is space."""
        made = held.with_suffix(".new")
        try:
            made.write_bytes(data)
            made.rename(held)
        except OSError:
            with suppress(OSError):
                made.unlink()

    def close(self) -> None:
        """Stop using the folder. The last process deletes it."""
        if self._users >= 0:
            users, self._users = self._users, -1
            _delete_unused(self._folder, users)


@contextmanager
def _try_lock(path: Path) -> Iterator[bool | None]:
    """Lock a file. Yield False if another process has it, and None if it cannot be locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o600)
    except OSError:
        yield None
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked: bool | None = True
        except BlockingIOError:
            locked = False
        except OSError:
            locked = None
        yield locked
    finally:
        os.close(descriptor)


def _delete_unused(folder: Path, users: int) -> None:
    """Delete a folder unless another process uses it. Close its file of users."""
    try:
        fcntl.flock(users, fcntl.LOCK_UN)  # before the next line: two that leave together must not wait for each other
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(users)


def _delete_abandoned(parent: Path) -> None:
    """Delete this user's folders whose processes were all killed."""
    with suppress(OSError):
        for folder in parent.glob(f"{PREFIX}{os.getuid()}-*"):
            with suppress(OSError):
                if time.time() - folder.lstat().st_mtime > _LEFT:
                    _delete_unused(folder, os.open(folder / _USERS, os.O_RDWR | CLOEXEC))
