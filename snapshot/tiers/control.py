"""The control socket of an uploader: requests and answers as lines of JSON, for processes of the same user.

The socket is in the run's folder, which only its owner can open. A trainer keeps its connection open, so the uploader
knows when the trainer died.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import log
from snapshot.tiers.hosts import Host
from snapshot.tiers.timeline import Facts
from snapshot.tiers.upload_queue import UploadState

SOCKET, LOCK, LOG = ".uploader.sock", ".uploader.lock", ".uploader.log"
SERVES = b"serves"
"""Text that an uploader adds to its process number in the lock as soon as it answers requests."""
PATIENCE = 30.0
"""Seconds to wait for an answer. A new uploader needs some seconds to start."""


class UploaderError(SnapshotError):
    """The uploader of this host cannot be reached."""


class UploaderHungError(UploaderError):
    """The uploader of this host runs, and does not answer in time."""


class Registration(msgspec.Struct):
    """The message of a manager to the uploader of its host."""

    run: str
    facts: Facts
    attempt: str
    """The attempt of the trainer; empty before its first take."""
    far: str
    """The far root, with its secrets."""
    options: dict[str, Any]
    upload: str | int | None
    replicas: int
    hosts: list[Host]
    index: int
    """The position of this host."""
    secret: str
    rate: float | None = None
    """The maximum bytes per second of uploads."""
    compression: str | None = None
    """The compression of uploaded files."""
    by_hand: bool = False
    """True for an upload without a trainer."""

    def is_alone(self) -> bool:
        """Return True if no other host has files of the run's steps. An upload by hand does not know."""
        return len(self.hosts) == 1 and not self.by_hand


class StepStatus(msgspec.Struct):
    """A near step, as its uploader sees it."""

    save_id: str
    far: UploadState = UploadState.KEPT
    sent: int = 0
    total: int = 0
    error: str = ""
    seconds: float = 0.0
    """Duration of the upload, once it is whole."""
    files: dict[str, int] = {}
    """The data files that are here."""
    pulled: list[str] = []
    """The files among them that are replicas of other hosts' files."""
    replicated: bool = False
    """True if all files that this host must keep for others are here."""


class Status(msgspec.Struct):
    """An uploader's state."""

    run: str
    address: str
    pid: int
    steps: dict[int, StepStatus] = {}
    error: str = ""
    """The last failure to reach the far root, if it cannot be reached now."""
    number: int = 0
    """The number of the last published fact that it knows."""
    jobs: int = 0
    """The number of jobs with a trainer on this host."""


class Request(msgspec.Struct, omit_defaults=True):
    """A request: `register`, `status`, `ping`, `want`, `drop`, `close` or `stop`."""

    verb: str
    registration: Registration | None = None
    step: int = -1


def decode_status(data: bytes) -> Status:
    """Return the state that an uploader sent. Raise CorruptSnapshotError if it is not one."""
    status: Status = decode_json(data, Status, "not the state of an uploader, or of another version")
    return status


@contextlib.contextmanager
def short_path(folder: str, name: str) -> Iterator[str]:
    """Return a path of a file that is short enough for a socket, however long the folder's is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen(folder: str) -> socket.socket:
    """Create the control socket, for this user only."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{folder}/{SOCKET}")
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_path(folder, SOCKET) as path:
        made.bind(path)
    os.chmod(f"{folder}/{SOCKET}", 0o600)
    made.listen(64)
    return made


def _expect_same_user(connected: socket.socket) -> None:
    """Raise PermissionError if another user listens: it would get secrets."""
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    uid = int.from_bytes(found[4:8], sys.byteorder)
    if uid != os.geteuid():
        raise PermissionError(f"it belongs to user {uid}")


def pid_in(folder: str) -> int | None:
    """Return the process of a folder's uploader, if the lock names one that runs for this folder."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int(Path(f"{folder}/{LOCK}").read_text("ascii").split()[0])
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return pid if b"upload" in words and os.fsencode(folder) in words else None
    return None


def has_served(folder: str, pid: int) -> bool:
    """Return True if the process of a folder's uploader has begun to answer requests."""
    with contextlib.suppress(OSError):
        return Path(f"{folder}/{LOCK}").read_bytes().split() == [str(pid).encode(), SERVES]
    return False


class ControlClient:
    """A connection to the uploader of this host."""

    def __init__(self, folder: str, seconds: float = PATIENCE) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(seconds)
        try:
            with short_path(folder, SOCKET) as path:
                self._socket.connect(path)
            _expect_same_user(self._socket)
        except TimeoutError as error:
            self._socket.close()
            raise UploaderHungError(f"{folder}: its uploader did not answer within {seconds:g} s") from error
        except OSError as error:
            self._socket.close()
            raise UploaderError(f"{folder}: its uploader cannot be reached: {error}") from error
        self._lines = self._socket.makefile("rb")

    def ask(self, request: Request, seconds: float = PATIENCE) -> Status:
        """Send a request, and return the uploader's state. Raise UploaderHungError after some seconds."""
        with self._lock:
            try:
                self._socket.settimeout(seconds)
                self._socket.sendall(msgspec.json.encode(request) + b"\n")
                line = self._lines.readline()
            except TimeoutError as error:
                raise UploaderHungError(f"{self._folder}: its uploader did not answer within {seconds:g} s") from error
            except (OSError, ValueError) as error:
                raise UploaderError(f"{self._folder}: its uploader does not answer: {error}") from error
        if not line:
            raise UploaderError(f"{self._folder}: its uploader has ended")
        try:
            return decode_status(line)
        except CorruptSnapshotError as error:
            raise UploaderError(f"{self._folder}: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(OSError):
            self._lines.close()
            self._socket.close()


class ControlServer:
    """Answers requests on the control socket. `handle` returns the state after a request."""

    def __init__(self, listening: socket.socket, handle: Callable[[Request], Status]) -> None:
        self._listening = listening
        self._handle = handle
        self._lock = threading.Lock()
        self._registered: Counter[str] = Counter()
        """Connections of trainers, by the secrets of their jobs."""
        self._closed = False
        threading.Thread(target=self._accept, name="snapshot-control", daemon=True).start()

    def jobs(self) -> set[str]:
        """Return the secrets of the jobs with a trainer that is connected."""
        with self._lock:
            return set(+self._registered)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=(connection,), name="snapshot-control", daemon=True).start()
            except (OSError, RuntimeError):  # too many files or threads: later there may be fewer
                time.sleep(0.1)

    def _serve(self, connection: socket.socket) -> None:
        job = ""
        try:
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    request: Request = decode_json(line, Request, "not a request")
                    if request.verb == "register" and request.registration is not None and not job:
                        job = request.registration.secret
                        self._count(job, 1)
                    if request.verb == "close" and job:
                        self._count(job, -1)
                        job = ""
                    connection.sendall(msgspec.json.encode(self._handle(request)) + b"\n")
        except (OSError, CorruptSnapshotError) as error:
            log.debug("a control connection ended: %s", error)
        finally:
            if job:
                self._count(job, -1)

    def _count(self, job: str, change: int) -> None:
        with self._lock:
            self._registered[job] += change

    def close(self) -> None:
        """Stop listening."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
