"""The link of a trainer to the uploader of its host: requests with a time limit, and a watch for one that hangs."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.tiers.control import (
    ControlClient,
    Registration,
    Request,
    Status,
    UploaderError,
    UploaderHungError,
    has_served,
    pid_in,
)

ANSWERS = 5.0
"""Seconds after which an uploader that does not answer is reported."""
PERIOD, PING = 1.0, 4.0
"""Seconds between two questions of the watch, and until one counts as not answered."""
SILENT = 3
"""Questions without an answer after which a hung uploader is replaced: within 15 seconds."""
STARTS = 30.0
"""Seconds that a new uploader may need to start, in the background."""


class UploaderLink:
    """The connection to the uploader of a folder. `connect` starts one if there is none."""

    def __init__(
        self, folder: str, connect: Callable[[float], ControlClient], registration: Callable[[], Registration]
    ) -> None:
        self._folder = folder
        self._connect = connect
        self._registration = registration
        self._client: ControlClient | None = None
        self._asking = threading.Lock()
        self._registering: threading.Thread | None = None
        self._closed = threading.Event()
        self._is_left = False
        """True if `close` ended although a request waited for its answer."""
        self._end = math.inf
        """The time after which no request waits any more."""

    def ask(self, request: Request, seconds: float = ANSWERS) -> Status:
        """Send a request, and return the uploader's state. If the uploader died, start it again.

        Raise UploaderError after some seconds.
        """
        seconds = self._limited(seconds)
        end = time.monotonic() + seconds
        if self._registering is not None:
            self._registering.join(seconds)
        return self._ask(request, seconds, end)

    def limit(self, seconds: float) -> None:
        """Let all further requests together wait at most some seconds."""
        self._end = time.monotonic() + seconds

    def _limited(self, seconds: float) -> float:
        return max(0.01, min(seconds, self._end - time.monotonic()))

    def _ask(self, request: Request, seconds: float, end: float) -> Status:
        def left() -> float:
            return max(0.01, end - time.monotonic())

        if not self._asking.acquire(timeout=left()):
            raise self._hung_error(seconds)
        try:
            for again in (False, True):
                try:
                    if self._client is None:
                        self._client = self._connect(left())
                        self._client.ask(Request("register", self._registration()), left())
                    return self._client.ask(request, left())
                except (UploaderError, OSError) as error:
                    self._drop()
                    if isinstance(error, UploaderHungError):
                        raise self._hung_error(seconds) from error
                    if again:
                        raise UploaderError(str(error)) from error
        finally:
            if self._is_left:  # `close` did not wait for this thread
                self._say_goodbye(ANSWERS)
            self._asking.release()
        raise AssertionError

    def _hung_error(self, seconds: float) -> UploaderHungError:
        return UploaderHungError(f"{self._folder}: its uploader{self._named()} did not answer within {seconds:g} s")

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    def register(self) -> None:
        """Send the job to the uploader, in a thread: a new one needs a second to start."""

        def register() -> None:
            try:
                self._ask(Request("register", self._registration()), STARTS, time.monotonic() + STARTS)
            except SnapshotError as error:
                log.warning("%s", error)

        self._registering = threading.Thread(target=register, name="snapshot-register", daemon=True)
        self._registering.start()

    def await_registration(self) -> None:
        """Wait until the uploader knows the job. A hung one is not waited for."""
        if self._registering is not None:
            self._registering.join(self._limited(ANSWERS))

    # Watch

    def watch(self) -> None:
        """Replace the uploader if it hangs, as long as this trainer runs."""
        threading.Thread(target=self._watch, name="snapshot-watch", daemon=True).start()

    def _watch(self) -> None:
        silent, pid = 0, -1
        while not self._closed.wait(PERIOD):
            try:
                client = ControlClient(self._folder, PING)
                try:
                    client.ask(Request("ping"), PING)
                finally:
                    client.close()
                silent = 0
            except UploaderHungError:
                found = pid_in(self._folder) or -1
                silent, pid = (silent + 1 if found == pid else 1), found
                # a new process needs time to start
                self._on_silence(silent, pid, may_end=has_served(self._folder, pid) or _age_of(pid) > 2 * STARTS)
            except (UploaderError, OSError):  # it has ended: the next call starts it again
                silent = 0

    def _on_silence(self, silent: int, pid: int, *, may_end: bool) -> None:
        if silent == 1:
            log.warning("%s: its uploader%s does not answer", self._folder, self._named())
        elif silent >= SILENT and pid > 0 and may_end and not self._closed.is_set():
            log.warning("%s: its uploader%s hangs, and is replaced", self._folder, self._named())
            emit("replaced", "upload", self._folder, pid=pid)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self.register()

    def _named(self) -> str:
        pid = pid_in(self._folder)
        return f" (process {pid})" if pid is not None else ""

    def close(self) -> None:
        """Report that this trainer has ended, and close the connection."""
        self._closed.set()
        self.await_registration()
        is_free = self._asking.acquire(timeout=self._limited(ANSWERS))
        if not is_free:
            self._is_left = True
            is_free = self._asking.acquire(blocking=False)  # it may have ended just now
        if is_free:
            self._say_goodbye(self._limited(ANSWERS))
            self._asking.release()

    def _say_goodbye(self, seconds: float) -> None:
        """Close the connection. Without the report, the uploader would stay for long, as after a crash."""
        if self._client is not None:
            with suppress(UploaderError):
                self._client.ask(Request("close"), seconds)
        self._drop()


def _age_of(pid: int) -> float:
    """Return the seconds since a process was started; 0 if it has ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text("ascii").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
