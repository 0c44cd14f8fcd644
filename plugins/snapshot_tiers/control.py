"""The control of an uploader: its socket and requests, the hosts of a run, and the link to it of a trainer."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import emit, log
from snapshot.runs.timeline import Facts

ADDRESS = "SNAPSHOT_PEER_ADDRESS"
"""Environment variable: the address of this host in the job's network, on which it offers files to other hosts."""


Upload = str | int | None
"""`"latest"`, the distance of steps, or None."""


class UploadState(StrEnum):
    """The state of a near step on its way to the far root. `where`, `ls`, `ui` and metrics use these words."""

    KEPT = "kept near"
    """It is not wanted far."""
    QUEUED = "queued"
    """It is wanted far, and another step is sent first, or the far root cannot be reached."""
    UPLOADING = "uploading"
    WAITING = "waiting"
    """The files of this host were sent. Those of other hosts are missing."""
    WHOLE = "whole"
    DROPPED = "dropped"
    """A newer step is uploaded instead."""
    OUTDATED = "outdated"
    """It was removed from the far root, or a newer snapshot of the step is there."""
    DAMAGED = "damaged"
    """A file is damaged, and no other host has it undamaged."""
    UNDECIDED = "undecided"
    """The attempt that took it is not known to the far root."""
    FORKED = "forked"
    """Another attempt was published instead of the one that took it, or the root was rolled back. A person must choose.
    """
    DELETED = "deleted"
    """The far root does not have the run any more."""

    @property
    def is_open(self) -> bool:
        """True if there is work left."""
        return self in (UploadState.QUEUED, UploadState.UPLOADING, UploadState.WAITING)

    @property
    def is_stuck(self) -> bool:
        """True if a person, or a new fact, must change it."""
        return self in (UploadState.UNDECIDED, UploadState.FORKED, UploadState.DELETED)


def far_text(state: UploadState, sent: int, total: int) -> str:
    """Return the state of an upload as text, with the share of the bytes that were sent.

    >>> far_text(UploadState.UPLOADING, 41, 100)
    'uploading 41 %'
    """
    return f"{state} {min(100, 100 * sent // max(1, total))} %" if state == UploadState.UPLOADING else state.value


MEANINGS = {
    UploadState.QUEUED: "wanted far; another step is sent first, or the far root cannot be reached",
    UploadState.WAITING: "the files of this host were sent, and those of other hosts are missing",
    UploadState.DROPPED: "a newer step is uploaded instead of this one",
    UploadState.OUTDATED: "removed from the far root, or another snapshot of the step is there",
    UploadState.DAMAGED: "a file is damaged, and no other host has it undamaged",
    UploadState.UNDECIDED: "the far root does not know the attempt that took the step",
    UploadState.FORKED: "another attempt was published instead, or the root was rolled back: see `snapshot attempts`",
    UploadState.DELETED: "the run was deleted in the far root",
}
"""Explanations of the states that do not explain themselves, for people."""


class Host(msgspec.Struct, array_like=True):
    """A host of the job."""

    key: str
    """Identifies its near folder."""
    name: str
    ranks: list[int]
    address: str = ""
    """`address:port` of its uploader; empty if it offers nothing."""


def hosts_of(ranks: Sequence[tuple[str, str]]) -> list[Host]:
    """Return the hosts, in the order of their lowest ranks. `ranks`: key and name of the host of each rank.

    >>> [host.ranks for host in hosts_of([("a", "x"), ("b", "y"), ("a", "x")])]
    [[0, 2], [1]]
    """
    found: dict[str, Host] = {}
    for rank, (key, name) in enumerate(ranks):
        found.setdefault(key, Host(key, name, [])).ranks.append(rank)
    return list(found.values())


def partners(index: int, count: int, replicas: int) -> list[int]:
    """Return the hosts whose files host `index` of `count` keeps, too.

    Hosts that are far apart in the order of ranks form a clique, so that neighbours, which often fail together, are in
    different ones. Each host keeps the files of the `replicas` hosts before it in its clique.

    >>> [partners(index, 4, 1) for index in range(4)]
    [[2], [3], [0], [1]]
    >>> [partners(index, 3, 1) for index in range(3)]
    [[2], [0], [1]]
    """
    cliques = max(1, count // (replicas + 1))
    clique = [each for each in range(count) if each % cliques == index % cliques]
    at = clique.index(index)
    return [clique[at - back] for back in range(1, min(replicas, len(clique) - 1) + 1)]


def job_address() -> str:
    """Return this host's address in the job's network: the one that reaches the job's first host."""
    given = os.environ.get(ADDRESS)
    if given:
        if given in ("0.0.0.0", "::", ""):  # noqa: S104 - refused
            raise ValueError(f"{ADDRESS} must be one address of this host, got {given!r}, which means all of them")
        return given
    master = os.environ.get("MASTER_ADDR", "")
    if ":" in master:
        raise OSError(f"the job's network has IPv6 addresses ({master}); set {ADDRESS} to an IPv4 address of this host")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect((master or "127.0.0.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


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
    upload: Upload
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


class ControlRequest(msgspec.Struct, omit_defaults=True):
    """A request: `register`, `status`, `ping`, `want`, `drop`, `close` or `stop`."""

    verb: str
    registration: Registration | None = None
    step: int = -1


def decode_status(data: bytes) -> Status:
    """Return the state that an uploader sent. Raise CorruptSnapshotError if it is not one."""
    status: Status = decode_json(data, Status, "not the state of an uploader, or of another version")
    return status


@contextmanager
def short_path(folder: str, name: str) -> Iterator[str]:
    """Return a path of a file that is short enough for a socket, however long the folder's is."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen(folder: str) -> socket.socket:
    """Create the control socket, for this user only."""
    with suppress(FileNotFoundError):
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
    with suppress(OSError, ValueError, IndexError):
        pid = int(Path(f"{folder}/{LOCK}").read_text("ascii").split()[0])
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return pid if {b"snapshot_tiers", b"upload"} & {*words} and os.fsencode(folder) in words else None
    return None


def has_served(folder: str, pid: int) -> bool:
    """Return True if the process of a folder's uploader has begun to answer requests."""
    with suppress(OSError):
        return Path(f"{folder}/{LOCK}").read_bytes().split() == [str(pid).encode(), SERVES]
    return False


def kill_hung(folder: str, pid: int) -> None:
    """Kill the uploader of a folder, which hangs. The next one continues its work."""
    log.warning("%s: its uploader (process %d) hangs, and is replaced", folder, pid)
    emit("replaced", "upload", folder, pid=pid)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


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

    def ask(self, request: ControlRequest, seconds: float = PATIENCE) -> Status:
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
        with suppress(OSError):
            self._lines.close()
            self._socket.close()


class ControlServer:
    """Answers requests on the control socket. `handle` returns the state after a request."""

    def __init__(self, listening: socket.socket, handle: Callable[[ControlRequest], Status]) -> None:
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
                    request: ControlRequest = decode_json(line, ControlRequest, "not a request")
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
        self._closed = True
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


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
        self._end = math.inf
        """The time after which no request waits any more."""

    def ask(self, request: ControlRequest, seconds: float = ANSWERS) -> Status:
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

    def _ask(self, request: ControlRequest, seconds: float, end: float) -> Status:
        def left() -> float:
            return max(0.01, end - time.monotonic())

        if not self._asking.acquire(timeout=left()):
            raise self._hung_error(seconds)
        try:
            for again in (False, True):
                try:
                    if self._client is None:
                        self._client = self._connect(left())
                        self._client.ask(ControlRequest("register", self._registration()), left())
                    return self._client.ask(request, left())
                except (UploaderError, OSError) as error:
                    self._drop()
                    if isinstance(error, UploaderHungError):
                        raise self._hung_error(seconds) from error
                    if again:
                        raise UploaderError(str(error)) from error
        finally:
            self._asking.release()
            if self._closed.is_set() and self._asking.acquire(timeout=0):  # `close` may not have waited
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
                self._ask(ControlRequest("register", self._registration()), STARTS, time.monotonic() + STARTS)
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
                with closing(ControlClient(self._folder, PING)) as client:
                    client.ask(ControlRequest("ping"), PING)
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
            kill_hung(self._folder, pid)
            self.register()

    def _named(self) -> str:
        pid = pid_in(self._folder)
        return f" (process {pid})" if pid is not None else ""

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        """Report that this trainer has ended, and close the connection."""
        self._closed.set()
        self.await_registration()
        if self._asking.acquire(timeout=self._limited(ANSWERS)):
            self._say_goodbye(self._limited(ANSWERS))
            self._asking.release()

    def _say_goodbye(self, seconds: float) -> None:
        """Close the connection. Without the report, the uploader would stay for long, as after a crash."""
        if self._client is not None:
            with suppress(UploaderError):
                self._client.ask(ControlRequest("close"), seconds)
        self._drop()


def _age_of(pid: int) -> float:
    """Return the seconds since a process was started; 0 if it has ended."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text("ascii").split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
