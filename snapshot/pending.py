"""Work in the background that threads wait for, such as a snapshot that is written."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar, Generic, Literal, Self, TypeVar

from snapshot.errors import CancelledError, SnapshotError
from snapshot.events import log
from snapshot.io.loop import LIBRARY, LoopFuture, finish_before_exit
from snapshot.progress import Meter, Progress
from snapshot.save.step_barrier import PendingCopy

T = TypeVar("T")
R = TypeVar("R")
WaitUploaded = Callable[[str, float | None], None]
"""Wait until a snapshot is in the far root, by its save id, at most for some seconds."""


class PendingWork(Generic[R]):
    """Work in the background. `R` is the type of its result. An error that no thread waits for is logged."""

    _noun: ClassVar[str]
    """The work, in error texts."""
    _success: ClassVar[str]
    """The participle for work that succeeded."""

    def __init__(self, path: str, work: LoopFuture[R]) -> None:
        self.path = path
        self.work = work
        self._awaited = False
        self._waiting: set[int] = set()
        self._pid = os.getpid()
        finish_before_exit(work)
        work.add_done_callback(self._log_failure)

    def done(self) -> bool:
        """Return True if it is committed or published, or has failed."""
        return self.work.done()

    def _result(self, timeout: float | None) -> R:
        """Wait for the result. Raise `TimeoutError` after `timeout` seconds, and `SnapshotError` if it failed."""
        self._waiting.add(threading.get_ident())
        try:
            return self.work.result(timeout)
        except concurrent.futures.CancelledError as error:
            raise CancelledError(f"{self.path}: the {self._noun} was cancelled, and its files were deleted") from error
        except SnapshotError:
            raise
        except Exception as error:  # from a plugin, or from the system
            if isinstance(error, TimeoutError) and not self.work.done():
                raise TimeoutError(f"{self.path}: not {self._success} after {timeout} s{self._so_far()}") from error
            raise SnapshotError(f"{self.path}: the {self._noun} failed: {type(error).__name__}: {error}") from error
        finally:
            self._awaited = self._awaited or self.work.done()
            self._waiting.discard(threading.get_ident())

    def _so_far(self) -> str:
        """Return the progress, for the text of a timeout."""
        return ""

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise SnapshotError(f"{self.path}: is written by process {self._pid}; a forked child cannot wait for it")

    def _log_failure(self, work: Future[R]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if error is not None and not (self._awaited or self._waiting):  # `wait()` raises it
            log.error("%s: the %s failed in the background: %s", self.path, self._noun, error)


class PendingTake(PendingWork[None], Generic[T]):
    """A take in the background. `T` is the type that `wait()` returns."""

    _noun = "take"
    _success = "committed"

    def __init__(
        self,
        path: str,
        work: LoopFuture[None],
        meter: Meter,
        snapshot: T,
        *,
        held: PendingCopy | None = None,
        save_id: str = "",
    ) -> None:
        self._meter = meter
        self._snapshot = snapshot
        self._held = held
        self.save_id = save_id
        self.uploaded: WaitUploaded | None = None
        """Waits for the upload of a snapshot that was taken near."""
        super().__init__(path, work)

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
        self._check_thread("wait()")
        self._result(timeout)
        if until == "far" and self.uploaded is not None:
            self.uploaded(self.save_id, None if deadline is None else max(0.0, deadline - time.monotonic()))
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

            try:
                threading.Thread(target=run, name="snapshot-callback", daemon=True).start()
            except RuntimeError:  # the interpreter exits
                run()

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

    def _so_far(self) -> str:
        return f" ({self.progress()})"

    def __repr__(self) -> str:
        if not self.done():
            state = str(self.progress())
        elif self.work.cancelled():
            state = "cancelled"
        else:
            state = f"failed: {self.work.exception()}" if self.work.exception() else "committed"
        return f"<{type(self).__name__} {self.path}: {state}>"
