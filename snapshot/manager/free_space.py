"""Warning before a take if a root in the file system has little space left."""

from __future__ import annotations

import shutil
from contextlib import suppress

from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.io.loop import run
from snapshot.manager.root import Root
from snapshot.text import size_text

SPARE = 1.05
"""Free space that a take needs, as a multiple of what the last step took."""


class SpaceWatch:
    """Compares the free space of a root with the bytes that its last step took. It never fails a take."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._folder = root.url.location if root.url.scheme == "file" else ""
        self._last: tuple[int, float] | None = None
        """The last step, and the free space from which on nobody has to look at what it took."""
        self._low = False

    def took(self, step: int, ample: float) -> None:
        """Record a committed step."""
        self._last = step, ample

    def learn(self, step: int) -> None:
        """Record the step that a run continues with, as it is on the storage."""
        if self._folder:
            with suppress(OSError, SnapshotError):
                self._last = step, run(self._root.new_bytes(step)) * SPARE

    def look(self) -> None:
        """Log a warning, and send an event, if space becomes too little. Called before a take, on the leader."""
        if self._last is None or not self._folder:
            return
        with suppress(OSError, SnapshotError):
            step, ample = self._last
            free = shutil.disk_usage(self._folder).free
            took = run(self._root.new_bytes(step)) if free < ample else 0
            low = free < took * SPARE
            if low and not self._low:
                emit("nearly_full", "take", str(self._root.url), step=step, free=free, took=took)
                log.warning(
                    "%s: nearly full: %s free, and step-%s took %s; the next take may fail: free some space, or keep "
                    "fewer steps",
                    self._root.url, size_text(free), step, size_text(took),
                )  # fmt: skip
            self._low = low
