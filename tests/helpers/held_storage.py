"""A storage that another process can import, and that is held there: its writes wait until they are let go.

Files beside the root tell what happens: `.reached` appears when a write waits, `.go` lets all of them go on.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from snapshot.events import emit
from snapshot.io import registry
from snapshot.io.storage import Capabilities, FileWriter
from snapshot.storages.file.file_storage import FileStorage


class HeldStorage(FileStorage):
    """Files, whose every write behind the first part of a file is held, and told as if it were tried again."""

    capabilities = Capabilities(guarded_commit=True)

    async def create(self, path, size):
        return _Writer(self, await super().create(path, size))


class _Writer(FileWriter):
    def __init__(self, storage, inner):
        self._storage = storage
        self._inner = inner

    async def write(self, offset, buffers):
        if offset:
            root = self._storage.url.location
            emit("retry", "write", str(self._storage.url), attempt=1, error="held", pause=0.5)
            Path(f"{root}.reached").touch()
            while not Path(f"{root}.go").exists():
                await asyncio.sleep(0.01)
        await self._inner.write(offset, buffers)

    async def finish(self):
        await self._inner.finish()

    async def abort(self):
        await self._inner.abort()


class Held:
    """A folder in a storage that is held."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"held://{root}"

    def wait_reached(self) -> None:
        """Wait until a write waits."""
        until(Path(f"{self.root}.reached").exists)

    def release(self) -> None:
        """Let all go on."""
        Path(f"{self.root}.go").touch()

    def files(self) -> list[str]:
        """What is there."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file())


@contextlib.contextmanager
def held(root: Path) -> Iterator[Held]:
    """A held folder, as long as the context lasts."""
    registry.register("held", HeldStorage)
    try:
        yield Held(root)
    finally:
        registry.unregister("held")


def until(condition, seconds=60.0):
    """Wait for what another process does, which no event tells."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not after {seconds} seconds"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not only its remains."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
