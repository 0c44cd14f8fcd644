"""A version that is published in the background."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from typing import NamedTuple

from snapshot.errors import CancelledError, SnapshotError
from snapshot.events import log
from snapshot.runtime.loop import LoopFuture, finish_before_exit
from snapshot.url import URL


class Published(NamedTuple):
    """A published version."""

    version: int
    step: int
    base: int | None
    """The version that it is a delta of; None for a complete version."""


class PendingPublish:
    """A version that is published in the background. `wait()` raises its error."""

    def __init__(self, url: URL, work: LoopFuture[Published]) -> None:
        self._url = url
        self._process = os.getpid()
        self._work = work
        self._waiting: set[int] = set()
        finish_before_exit(work)
        work.add_done_callback(self._log_failure)

    def begin(self) -> None:
        """Start the work."""
        self._work.begin()

    def done(self) -> bool:
        """Return True if the version is published, or has failed."""
        return self._work.done()

    def settle(self) -> None:
        """Wait until the work is over, however it ends."""
        self._work.settled()

    def wait(self, timeout: float | None = None) -> Published:
        """Wait until the version is published, and return its number. Raise `SnapshotError` on every rank if it failed.

        Raise `TimeoutError` after `timeout` seconds. The work continues, and can be waited for again.
        """
        if self._process != os.getpid() and not self.done():
            raise SnapshotError(f"{self._url}: a forked child cannot wait for a publication of its parent")
        self._waiting.add(threading.get_ident())
        try:
            return self._work.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise CancelledError(f"{self._url}: the publication was cancelled") from error
        except SnapshotError:
            raise
        except Exception as error:  # from a plugin, or from the system
            if isinstance(error, TimeoutError) and not self._work.done():
                raise TimeoutError(f"{self._url}: not published after {timeout} s") from error
            raise SnapshotError(f"{self._url}: the publication failed: {type(error).__name__}: {error}") from error
        finally:
            self._waiting.discard(threading.get_ident())

    def _log_failure(self, work: concurrent.futures.Future[Published]) -> None:
        """Log an error that no thread waits for."""
        if not work.cancelled() and (error := work.exception()) is not None and not self._waiting:
            log.error("%s: a publication failed: %s", self._url, error)

    def __repr__(self) -> str:
        if not self.done():
            return f"PendingPublish({str(self._url)!r}, running)"
        failed = self._work.cancelled() or self._work.exception() is not None
        return f"PendingPublish({str(self._url)!r}, {'failed' if failed else 'published'})"
