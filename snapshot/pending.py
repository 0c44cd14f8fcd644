"""A snapshot that is written in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Literal, Self, TypeVar

from snapshot.errors import CancelledError, SnapshotError
from snapshot.events import log
from snapshot.io.loop import LIBRARY, LoopFuture, finish_before_exit
from snapshot.progress import Meter, Progress
from snapshot.save.background_take import PendingCopy

T = TypeVar("T")
WaitUploaded = Callable[[str, float | None], None]
"""Wait until a snapshot is in the far root, by its save id, at most for some seconds."""


class PendingTake(Generic[T]):
    """A take in the background. `T` is the type that `wait()` returns."""

    def __init__(
        self,
        path: str,
        work: LoopFuture[None],
        meter: Meter,
        snapshot: T,
        *,
        held: PendingCopy | None = None,
        save_id: str = "",
        uploaded: WaitUploaded | None = None,
    ) -> None:
        """Watch the take. `uploaded` waits for the upload of a snapshot that was taken near."""
        self.path = path
        self.work = work
        self._meter = meter
        self._snapshot = snapshot
        self._held = held
        self.save_id = save_id
        self._uploaded = uploaded
        self._awaited = False
        self._waiting: set[int] = set()
        self._pid = os.getpid()
        finish_before_exit(work)
        work.add_done_callback(self._log_failure)

    def done(self) -> bool:
        """Return True if it is committed, or has failed."""
        return self.work.done()

    def wait(self, until: float | Literal["near", "far"] | None = None, timeout: float | None = None) -> T:
        """Wait for the commit and return the snapshot. Raise `SnapshotError` on every rank if it failed.

        Raise `TimeoutError` after `timeout` seconds, which can also be the first argument. The take continues, and can
        be waited for again. With `"far"`, also wait until the uploader of a manager with `near` has committed the step
        in the far root.
        """
        if until is not None and not isinstance(until, str):
            until, timeout = None, until
        if until not in (None, "near", "far"):
            raise ValueError(f"until must be 'near', 'far' or a number of seconds, got {until!r}")
        deadline = None if timeout is None else time.monotonic() + timeout
        snapshot = self._wait(timeout)
        if until == "far" and self._uploaded is not None:
            self._uploaded(self.save_id, None if deadline is None else max(0.0, deadline - time.monotonic()))
        return snapshot

    def _wait(self, timeout: float | None) -> T:
        self._check_thread("wait()")
        self._waiting.add(threading.get_ident())
        try:
            self.work.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise CancelledError(f"{self.path}: the take was cancelled, and its files were deleted") from error
        except SnapshotError:
            raise
        except Exception as error:  # from a plugin, or from the system
            if isinstance(error, TimeoutError) and not self.work.done():
                raise TimeoutError(f"{self.path}: not committed after {timeout} s ({self.progress()})") from error
            raise SnapshotError(f"{self.path}: the take failed: {type(error).__name__}: {error}") from error
        finally:
            self._awaited = self._awaited or self.work.done()
            self._waiting.discard(threading.get_ident())
        return self._snapshot

    def staged(self) -> bool:
        """Return True if changes to the application's tensors no longer reach this snapshot.

        This is True once the call returned, unless it used `staging="overlapped"`.
        """
        return self._held is None or self._held.wait(0)

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the application may change all of its tensors, in any way.

        Raise `TimeoutError` after `timeout` seconds. A failure meanwhile is raised by `wait()`, since a failed take no
        longer needs the tensors.
        """
        if self._held is None:
            return
        self._check_thread("wait_staged()")
        if not self._held.wait(timeout):
            raise TimeoutError(f"{self.path}: not staged after {timeout} s ({self.progress()})")

    def progress(self) -> Progress:
        """Return the progress so far."""
        return self._meter.now()

    def add_done_callback(self, function: Callable[[Self], None]) -> None:
        """Call `function(pending)` in a library thread when the take is done, or at once if it is done already."""

        def call(_: Future[None]) -> None:
            def run() -> None:
                try:
                    function(self)
                except Exception:  # noqa: BLE001 - a callback's fault is never the snapshot's
                    log.exception("%s: a done callback failed", self.path)

            threading.Thread(target=run, name="snapshot-callback", daemon=True).start()

        self.work.add_done_callback(call)

    def cancel(self) -> bool:
        """Cancel the take and delete its files. Return False if it is done, or already being committed."""
        if self.work.done():
            return False
        self._check_process()
        self._awaited = True
        self.work.cancel()
        if threading.current_thread().name.startswith(LIBRARY):
            return True  # called from a progress callback, which runs in the take itself and cannot wait for its end
        with contextlib.suppress(Exception):
            self.work.result()
            return False
        return True

    def _check_thread(self, call: str) -> None:
        self._check_process()
        if threading.current_thread().name.startswith(LIBRARY) and not self.work.done():
            raise RuntimeError(f"{call} must not be called in a progress callback: it would wait for itself")

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise SnapshotError(f"{self.path}: is written by process {self._pid}; a forked child cannot wait for it")

    def _log_failure(self, work: Future[None]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if error is not None and not (self._awaited or self._waiting):  # `wait()` raises it
            log.error("%s: the take failed in the background: %s", self.path, error)

    def __repr__(self) -> str:
        if not self.done():
            state = str(self.progress())
        elif self.work.cancelled():
            state = "cancelled"
        else:
            state = f"failed: {self.work.exception()}" if self.work.exception() else "committed"
        return f"<{type(self).__name__} {self.path}: {state}>"
