"""Files that one process of a host reads from a remote storage and hands on to the other ranks there.

Ranks of one host often need the same parts of a manifest. The first rank that needs a file reads it, and puts its bytes
into a folder that all of them see. Each rank verifies what it takes from there. The folder spares requests and no more:
without it, or if a rank dies, each rank reads for itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from snapshot.io.aio import in_thread
from snapshot.io.shared_folder import SharedFolder, delete_abandoned
from snapshot.io.system import CLOEXEC, fcntl

PREFIX = "snapshot-share-"
PATIENCE = 20.0
"""Maximum seconds that a rank waits for a file that another rank reads, before it reads the file itself."""
_PAUSE = 0.02
"""Maximum seconds between two looks for such a file."""


class HostShare:
    """A folder for the files of one operation."""

    def __init__(self, token: str, timeout: float = PATIENCE) -> None:
        """`token`: a random name of the operation that all its ranks know. `timeout`: that of a silent rank."""
        self._patience = min(PATIENCE, timeout)
        self._taken: set[str] = set()
        """The files that this process has asked for. It asks again only if their bytes were damaged."""
        self._shared: SharedFolder | None = None
        prefix = f"{PREFIX}{os.getuid()}-"
        with suppress(OSError):  # on a full disk, there is not even a folder for temporary files
            parent = Path(tempfile.gettempdir())
            delete_abandoned(parent, prefix)
            self._shared = SharedFolder(parent / f"{prefix}{token}")

    async def get(self, path: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
        """Return the bytes of a file: those that another process has read, or those that `read` returns."""
        if self._shared is None or path in self._taken:
            return await read()
        self._taken.add(path)
        folder = self._shared.path
        name = hashlib.sha256(path.encode("utf-8", "surrogatepass")).hexdigest()
        held, lock = folder / name, folder / f"{name}.lock"
        end, pause = time.monotonic() + self._patience, _PAUSE / 8
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
        """Stop using the folder."""
        if self._shared is not None:
            self._shared.close()
            self._shared = None


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
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have the file, too
        os.close(descriptor)
