"""The process of an uploader, started by a trainer or by hand: one for each folder of a run. And its metrics server.

The trainer creates the lock and the sockets, and the new process inherits them. So no second one can start, and the
sockets can be used at once, although the process needs some seconds to begin. Metrics are served if `SNAPSHOT_METRICS`
is an address in the trainer's environment: numbers and the names of verbs, without paths.
"""

from __future__ import annotations

import errno
import glob
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

import snapshot
from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import Event, Labels, Metrics, Readings, add_handler, as_prometheus, log, remove_handler
from snapshot.io.system import PerProcess, fcntl, lower_priority, resource, store_file
from snapshot.runs.timeline import Facts, FactsCopy
from snapshot.settings import Settings
from snapshot_tiers.control import (
    LOCK,
    LOG,
    SERVES,
    STARTS,
    ControlClient,
    ControlRequest,
    ControlServer,
    Host,
    Registration,
    Status,
    UploaderError,
    UploaderHungError,
    UploadState,
    kill_hung,
    listen,
    pid_in,
)
from snapshot_tiers.facts import copy_in, read_copies
from snapshot_tiers.near_steps import NearStep
from snapshot_tiers.peers import PeerServer
from snapshot_tiers.uploader import Act, Uploader

ADDRESS = ".metrics.address"
"""File with the address of the endpoint."""
EVERY = 1.0
"""Seconds between two writes of a rank's file, if no operation ends."""
ENDINGS = ("blocked", "staged", "committed", "restored", "failed")
PATIENCE = 10.0
LONGEST = 1 << 20
_written: PerProcess[dict[str, RankMetrics]] = PerProcess(dict)


class RankMetrics:
    """Writes the metrics of a trainer's process to a file beside the near steps."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._metrics = Metrics()
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        """Count an event, and write the file from time to time."""
        self._metrics(event)
        now = time.monotonic()
        if event.name in ENDINGS or now - self._last > EVERY:
            self._last = now
            try:
                store_file(self._path, msgspec.json.encode(self._metrics.read()))
            except OSError as error:  # a full disk must not disturb training
                log.debug("%s: %s", self._path, error)


def leave_metrics(folder: str, rank: int) -> None:
    """Let this process leave its metrics for the uploader of a folder, if there is an endpoint."""
    path = f"{folder}/.metrics-{rank}.json"
    written = _written.get()
    if Settings.current().metrics and path not in written:
        made = RankMetrics(path)
        if written.setdefault(path, made) is made:  # otherwise another thread was faster
            add_handler(made)


def _read_regular(path: str) -> bytes:
    """Return the content of a file. Raise OSError for anything else, which could block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(LONGEST)


class MetricsServer:
    """The endpoint of an uploader."""

    def __init__(self, uploader: Uploader, address: str) -> None:
        self._uploader = uploader
        self._metrics = Metrics()
        self._far: tuple[int, float] | None = None
        """The newest step that this process has seen in the far root, and when it was taken."""
        host, _, port = address.rpartition(":")
        handler = type("Handler", (_Handler,), {"endpoint": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        self._server = server((host.strip("[]") or "127.0.0.1", int(port)), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="snapshot-metrics", daemon=True).start()
        add_handler(self._metrics)
        add_handler(self._note_upload)
        with suppress(OSError), open(f"{uploader.folder.path}/{ADDRESS}", "w", encoding="ascii") as file:
            shown = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else self._server.server_address[0]
            file.write(f"{shown}:{self._server.server_address[1]}")

    @classmethod
    def start(cls, uploader: Uploader) -> MetricsServer | None:
        """Start the endpoint that the settings ask for. One that cannot listen is logged, and left out."""
        address = Settings.current().metrics
        if not address:
            return None
        try:
            return cls(uploader, address)
        except (OSError, ValueError, OverflowError) as error:
            log.warning("SNAPSHOT_METRICS=%s: no metrics are offered: %s", address, error)
            return None

    def text(self) -> str:
        now = time.time()
        processes: list[tuple[Labels, Readings]] = [((("process", "uploader"),), self._metrics.read())]
        for path in sorted(glob.glob(f"{glob.escape(self._uploader.folder.path)}/.metrics-*.json")):
            with suppress(OSError, OverflowError, CorruptSnapshotError):
                readings: Readings = decode_json(_read_regular(path), Readings, path)
                os.kill(readings.pid, 0)  # raises if this rank has ended
                rank = path.rpartition("-")[2].removesuffix(".json")
                processes.append(((("process", "trainer"), ("rank", rank)), readings))
        return as_prometheus(processes, self._gauges(now), now)

    def _note_upload(self, event: Event) -> None:
        """Remember a step in the far root. Its near files may be deleted soon."""
        if event.name == "uploaded":
            self._note_far(self._uploader.folder.steps(), int(event.fields["step"]))

    def _note_far(self, near: Mapping[int, NearStep], step: int) -> None:
        if step in near and (self._far is None or step > self._far[0]):
            self._far = step, _taken_at(near[step])

    def _gauges(self, now: float) -> dict[str, list[tuple[Labels, float]]]:
        states = self._uploader.status().steps
        near = self._uploader.folder.steps()
        counts = Counter(each.far for each in states.values())
        for step, each in states.items():
            if each.far == "whole":
                self._note_far(near, step)
        ages = {"near": _taken_at(near[max(near)])} if near else {}
        newest = {"near": max(near)} if near else {}
        if self._far is not None:
            newest["far"], ages["far"] = self._far
        elif near:  # what is in the far root is older, if anything is
            ages["far"] = _taken_at(near[min(near)])
        return {
            "steps": [((("state", state),), float(count)) for state, count in counts.items()],
            "upload_pending_bytes": [
                ((), float(sum(e.total - e.sent for e in states.values() if e.far in ("queued", "uploading"))))
            ],
            "newest_step": [((("tier", tier),), float(step)) for tier, step in newest.items()],
            "newest_step_age_seconds": [((("tier", tier),), max(0.0, now - taken)) for tier, taken in ages.items()],
        }

    def close(self) -> None:
        remove_handler(self._metrics)
        remove_handler(self._note_upload)
        self._server.shutdown()
        self._server.server_close()
        with suppress(OSError):
            os.unlink(f"{self._uploader.folder.path}/{ADDRESS}")


def _taken_at(near: NearStep) -> float:
    """Return the time when a step was taken."""
    with suppress(ValueError):
        return datetime.fromisoformat(near.head.created).timestamp()
    return time.time()


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    endpoint: MetricsServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.endpoint.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a scraper asks every few seconds."""


OFFERED = ".uploader.address"
"""File with the address on which an uploader offers files; empty if it offers none."""
LISTENED = ".uploader.listened"
"""File with the last address on which an uploader of the folder has offered files, which other hosts know."""
HANGS = 5.0
"""Seconds that an uploader may take to answer that it ends."""
LINGER = 3600.0
"""Seconds that an uploader without work stays, for restores from its host, after a trainer that did not say goodbye."""
LAST_WORDS = 2.0
"""Seconds that an uploader may take to end when it is asked to."""
LONGEST_LOG = 10 << 20
LOWEST = 19
"""The nice value of an uploader."""
_IDLE_CLASS = 3 << 13
"""The priority of a process whose disk access must wait for that of others, for `ioprio_set`."""


def lock_folder(folder: str) -> int | None:
    """Lock a folder of a run for an uploader. Return the lock's descriptor, or None if an uploader runs."""
    descriptor = os.open(f"{folder}/{LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def ensure_uploader(folder: str, address: str | None, seconds: float = STARTS) -> tuple[ControlClient, str]:
    """Connect to the uploader of a folder, and return the address on which it offers files to other hosts.

    Start one if there is none, or if the one that runs offers nothing although an address of this host is given.
    """
    end = time.monotonic() + seconds
    while True:
        lock = lock_folder(folder)
        if lock is not None:
            offered = _start(folder, lock, address)
            return ControlClient(folder, seconds), offered
        with suppress(UploaderError, OSError):
            client = ControlClient(folder, seconds)
            offered = _known_address(folder)
            if address is None or _is_reached_by_others(offered, address):
                return client, offered
            with closing(client):  # it was started for a job on one host, or without a network
                try:
                    client.ask(ControlRequest("stop"), min(seconds, HANGS))
                except UploaderHungError:
                    if (pid := pid_in(folder)) is not None:
                        kill_hung(folder, pid)
        if time.monotonic() > end:
            raise UploaderError(f"{folder}: its uploader neither answers nor ends")
        time.sleep(0.05)  # it is ending, or beginning


def _start(folder: str, lock: int, address: str | None) -> str:
    """Start an uploader as a detached process. Return the address on which it offers files."""
    peers = _listen_again(folder, address) if address is not None else None
    offered = "{}:{}".format(*peers.getsockname()[:2]) if peers is not None else ""
    with suppress(OSError):  # the folder may be full
        Path(f"{folder}/{OFFERED}").write_text(offered, "ascii")
        if offered:
            Path(f"{folder}/{LISTENED}").write_text(offered, "ascii")
    control = listen(folder)
    inherited = [lock, control.fileno(), *([peers.fileno()] if peers is not None else [])]
    log_path = f"{folder}/{LOG}"
    with suppress(OSError):
        if os.path.getsize(log_path) > LONGEST_LOG:
            os.replace(log_path, f"{log_path}.1")
    trees = dict.fromkeys(str(Path(file).parents[1]) for file in (snapshot.__file__, __file__))
    path = os.pathsep.join([*trees, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        with _log_of(log_path) as output:
            process = subprocess.Popen(  # noqa: S603 - this very program
                [sys.executable, "-m", "snapshot_tiers", folder, ",".join(map(str, inherited))],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=inherited,
                start_new_session=True,
                env=environment,
                cwd="/",
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(process.pid).encode(), 0)  # so that a trainer can replace it if it hangs
        threading.Thread(target=process.wait, name="snapshot-uploader", daemon=True).start()  # else it stays a zombie
    except RuntimeError as error:  # the interpreter exits
        raise UploaderError(f"{folder}: cannot start its uploader: {error}") from error
    finally:
        os.close(lock)
        control.close()
        if peers is not None:
            peers.close()
    return offered


def _log_of(path: str) -> BinaryIO:
    try:
        return open(path, "ab")
    except OSError:
        return open(os.devnull, "wb")


def _is_reached_by_others(offered: str, address: str) -> bool:
    """Return True if other hosts can reach what an uploader offers. `address`: one of this host, which they reach."""
    host = offered.rpartition(":")[0]
    return bool(host) and (not host.startswith("127.") or address.startswith("127.") or address == "localhost")


def _known_address(folder: str, name: str = OFFERED) -> str:
    try:
        return Path(f"{folder}/{name}").read_text("ascii")
    except OSError:
        return ""


def _listen_again(folder: str, address: str) -> socket.socket:
    """Listen on the port of the last uploader, which other hosts know, or on another one."""
    host, _, port = _known_address(folder, LISTENED).rpartition(":")
    if host == address and port.isdecimal():
        for _ in range(20):  # its last process may be ending
            with suppress(OSError):
                return _bound(address, int(port))
            time.sleep(0.05)
    return _bound(address, 0)


def _bound(address: str, port: int) -> socket.socket:
    """Listen on one address. Raise PermissionError if that means all addresses."""
    made = socket.create_server((address, port), backlog=256)
    if ip_address(made.getsockname()[0]).is_unspecified:
        made.close()
        raise PermissionError(errno.EPERM, "must be one address of this host, not all of them", address)
    return made


def expect_own_folder(folder: str) -> None:
    """Raise PermissionError if another user could change the files in a folder, or listen there."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "must be a folder of this user, which no other user can write to", folder)


def serve(folder: str, inherited: list[int], *, linger: float = LINGER) -> None:
    """Run an uploader until it has no work and no trainer."""
    lower_priority(LOWEST, _IDLE_CLASS)  # all other processes go first
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    control = socket.socket(fileno=inherited[1])
    peers = socket.socket(fileno=inherited[2]) if len(inherited) > 2 else None
    uploader = Uploader(folder)
    server = None
    if peers is not None:
        server = PeerServer(peers, folder, uploader.describe)
        uploader.address = server.address
        uploader.on_secret = server.accept_secret
    metrics = MetricsServer.start(uploader)
    os.pwrite(inherited[0], b"%d %b" % (os.getpid(), SERVES), 0)
    run_until_done(uploader, control, linger)
    if metrics is not None:
        metrics.close()
    if server is not None:
        server.close()
    os.close(inherited[0])


def run_until_done(uploader: Uploader, listening: socket.socket, linger: float) -> None:
    """Answer requests, upload steps and fetch replicas, until a trainer and work are both missing."""
    stopped = threading.Event()
    closed = False

    def handle(request: ControlRequest) -> Status:
        nonlocal closed
        if request.verb in ("register", "close"):
            closed = request.verb == "close"
        if request.verb == "stop":
            stop()
        return uploader.handle(request)

    def stop(*_: object) -> None:
        """End soon, also in the middle of an upload, which the next uploader continues."""
        stopped.set()
        uploader.wake.set()
        last = threading.Timer(LAST_WORDS, os._exit, (0,))
        last.daemon = True
        last.start()

    def pull() -> None:
        while not stopped.wait(uploader.pull_turn()):
            pass

    control = ControlServer(listening, handle)
    uploader.jobs = control.jobs
    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=pull, name="snapshot-replicas", daemon=True).start()
    while not stopped.is_set():
        if control.jobs() or not uploader.is_idle() or uploader.ends == float("inf"):
            uploader.ends = time.monotonic() + linger
        if closed or not os.path.isdir(uploader.folder.path):
            uploader.ends = 0.0
        action = uploader.upload_turn()
        if action.act == Act.END:
            break
        if action.act == Act.WAIT:
            uploader.wake.wait(action.seconds)
            uploader.wake.clear()
    log.info("the uploader of %s ends", uploader.folder.path)
    stopped.set()
    control.close()
    uploader.close()


WAITING = 20.0
"""Seconds to wait for the files of other hosts, whose uploads may run at the same time."""


def find_runs(near: str, far: str | None) -> dict[str, FactsCopy]:
    """Return the runs in a near folder, or the run itself if the folder is a run's: their facts, by the run's folder.

    `far` chooses the runs that were uploaded there. A single run may have been uploaded to another place. Raise
    PermissionError if another user can write to the folder.
    """
    near = os.path.abspath(os.path.expanduser(near))
    expect_own_folder(near)
    own = copy_in(near)
    found = {near: own} if own.far else {f"{near}/{each.run}": each for each in read_copies(near)}
    chosen = {folder: each for folder, each in found.items() if far is None or each.far == far}
    return chosen or (found if len(found) == 1 else {})


def upload_by_hand(
    folder: str, facts: Facts, far: str, options: Mapping[str, Any] | None, *, everything: bool, rate: float | None
) -> dict[int, UploadState]:
    """Upload the steps of a run. Return the state of each step that was wanted."""
    lock = lock_folder(folder)
    if lock is None:
        raise SnapshotError(f"{folder}: its uploader runs, and does the same")
    uploader = Uploader(folder)
    try:
        uploader.register(
            Registration(
                run=os.path.basename(folder),
                facts=facts,
                attempt="",
                by_hand=True,
                far=far,
                options=dict(options or {}),
                upload=1 if everything else "latest",
                replicas=0,
                hosts=[Host("", "", [0])],
                index=0,
                secret="",
                rate=rate,
            )
        )
        since = time.monotonic()
        while True:
            action = uploader.upload_turn()
            states = {step: each.far for step, each in uploader.status().steps.items()}
            open_ = {state for state in states.values() if state.is_open}
            if open_ and uploader.status().error:
                raise SnapshotError(uploader.status().error)
            if not open_ or (open_ == {UploadState.WAITING} and time.monotonic() - since > WAITING):
                return {step: state for step, state in states.items() if state != UploadState.KEPT}
            if UploadState.WAITING not in open_:
                since = time.monotonic()
            if action.act == Act.WAIT:
                time.sleep(action.seconds)
    finally:
        uploader.close()
        os.close(lock)
