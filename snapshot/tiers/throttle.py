"""A storage that is read at a limited rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from snapshot.formats.foreign import ReadOnlyStorage
from snapshot.io.aio import in_thread
from snapshot.io.storage import Buffer, Storage


class Throttled(ReadOnlyStorage):
    """Another storage, for reading only, at no more than `rate` bytes per second."""

    def __init__(self, inner: Storage, rate: float) -> None:
        super().__init__(inner, b"", links=True)
        self._rate = rate
        self._lock = threading.Lock()
        self._free = time.monotonic()

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read when the bytes before have had their time."""
        nbytes = sum(memoryview(each).nbytes for each in buffers)
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate
            pause = self._free - nbytes / self._rate - time.monotonic()
        if pause > 0:
            await in_thread(time.sleep, pause)
        await super().read_into(path, offset, buffers, token=token)
