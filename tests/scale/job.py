"""A job of many light ranks: forked processes, whose store is served by a process of its own.

A forked rank shares the pages of torch with all others, has no threads of torch, and holds kilobytes of state. So
hundreds of them fit on one machine. Their process group has the backend `fake`, whose collectives do nothing: this
library needs the store only. Libraries that need collectives get `gloo`, and fewer ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

assert fake_pg.FakeStore, "the import registers the backend"
HOST = "127.0.0.1"
MAPPED = f"::ffff:{HOST}"
"""The loopback address, as torch's sockets see it."""
NEW_MOUNTS, PRIVATE, BIND = 1 << 17, (1 << 18) | (1 << 14), 1 << 12
"""CLONE_NEWNS, MS_PRIVATE with MS_REC, and MS_BIND."""
LONGEST_TEXT = 1500
"""Maximum characters of an error in a report: a write of at most 4 KiB to a pipe is atomic."""
STORE_PATIENCE = 120.0
"""Seconds that a rank waits for a response of the store."""


@dataclass(frozen=True)
class Report:
    """A line from a rank."""

    rank: int
    name: str
    """The phase that ended, or `fault`: this rank is about to die or stop."""
    at: float
    """When: all processes of a machine have the same monotonic clock."""
    seconds: float = 0.0
    cpu: float = 0.0
    """CPU seconds of the process in this phase."""
    private: int = 0
    """Bytes of memory that no other process shares."""
    error: str = ""
    """The type of the exception that was raised."""
    text: str = ""
    culprit: int | None = None
    """The rank that the exception names in an attribute."""


class Rank:
    """One rank, in its own process."""

    def __init__(self, number: int, world: int, port: int, gates: list[tuple[int, int]], reports: int) -> None:
        self.number, self.world = number, world
        self._port = port
        self._gates = iter(gates)
        self._reports = reports

    def join(self, backend: str, timeout: float) -> None:
        """Enter the process group."""
        wait = datetime.timedelta(seconds=STORE_PATIENCE)
        store = dist.TCPStore(HOST, self._port, is_master=False, timeout=wait, wait_for_workers=False)
        dist.init_process_group(
            backend,
            store=store,
            rank=self.number,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=timeout),
        )

    def wait(self) -> None:
        """Wait until the job opens the next gate, so that all ranks begin together."""
        os.read(next(self._gates)[0], 1)

    def report(self, name: str, **values: object) -> None:
        """Send a line to the job."""
        line = json.dumps(asdict(Report(self.number, name, time.monotonic(), **values)))  # type: ignore[arg-type]
        os.write(self._reports, line.encode() + b"\n")

    def measure(self, name: str, call: Callable[[], object]) -> bool:
        """Wait for the gate, call, and report. Return False if the call raised."""
        self.wait()
        began, cpu = time.monotonic(), time.process_time()
        try:
            call()
        except Exception as error:  # noqa: BLE001 - it is reported
            values = {
                "error": type(error).__name__,
                "text": str(error)[:LONGEST_TEXT].encode("ascii", "replace").decode(),
                "culprit": getattr(error, "rank", None),
            }
        else:
            values = {}
        seconds, spent = time.monotonic() - began, time.process_time() - cpu
        self.report(name, seconds=seconds, cpu=spent, private=private_memory(), **values)
        return not values


def private_memory() -> int:
    """Return the bytes of this process that no other process shares."""
    with open("/proc/self/smaps_rollup") as lines:
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


class Job:
    """`world` forked ranks, each of which runs `work(rank)`. As a context, it kills all of them at its end."""

    def __init__(self, world: int, work: Callable[[Rank], None], folder: Path, *, gates: int) -> None:
        self.world = world
        self._work = work
        self._log = folder / "log"
        self._pids: dict[int, int] = {}
        self._store = 0
        self._gates = [os.pipe() for _ in range(gates)]
        self._to_open = iter(self._gates)
        self._reports, self._sink = os.pipe()
        self._partial = b""
        self._received: defaultdict[str, dict[int, Report]] = defaultdict(dict)

    def __enter__(self) -> Job:
        allow_descriptors(16 * self.world)
        try:
            port = self._serve()
            gc.collect()
            gc.freeze()  # a collection in a child would copy each page
            for number in range(self.world):
                self._pids[number] = self._fork(lambda number=number: self._run(number, port))
        except BaseException:
            self.__exit__()
            raise
        finally:
            gc.unfreeze()
        return self

    def __exit__(self, *_: object) -> None:
        for pid in (*self._pids.values(), self._store):
            with contextlib.suppress(ProcessLookupError):
                if pid:
                    os.kill(pid, signal.SIGKILL)
        for pid in (*self._pids.values(), self._store):
            with contextlib.suppress(ChildProcessError):
                if pid:
                    os.waitpid(pid, 0)
        for descriptor in (*(each for gate in self._gates for each in gate), self._reports, self._sink):
            os.close(descriptor)

    def _fork(self, body: Callable[[], None]) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the job
            log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(log, 1)
            os.dup2(log, 2)
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - the process ends here
            traceback.print_exc()
        finally:
            os._exit(code)

    def _serve(self) -> int:
        """Start the process of the store, and return its port."""
        ours, theirs = os.pipe()

        def serve() -> None:
            store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            os.write(theirs, str(store.port).encode() + b"\n")
            signal.pause()

        self._store = self._fork(serve)
        os.close(theirs)
        with os.fdopen(ours) as answer:
            return int(answer.readline())

    def _run(self, number: int, port: int) -> None:
        torch.set_num_threads(1)
        self._work(Rank(number, self.world, port, self._gates, self._sink))

    def open_gate(self) -> float:
        """Let all ranks begin the next phase; return when."""
        began = time.monotonic()
        os.write(next(self._to_open)[1], bytes(self.world))
        return began

    def reports(self, name: str, ranks: Iterable[int], patience: float) -> dict[int, Report]:
        """Return the reports of a phase from these ranks. Those that are missing after `patience` seconds are hung."""
        wanted = set(ranks)
        until = time.monotonic() + patience
        while not wanted <= self._received[name].keys() and (left := until - time.monotonic()) > 0:
            self._receive(left)
        return {rank: report for rank, report in self._received[name].items() if rank in wanted}

    def _receive(self, patience: float) -> None:
        if select.select([self._reports], [], [], patience)[0]:
            *lines, self._partial = (self._partial + os.read(self._reports, 1 << 16)).split(b"\n")
            for line in lines:
                report = Report(**json.loads(line))
                self._received[report.name][report.rank] = report

    def expect(self, name: str, patience: float) -> list[Report]:
        """Return the reports of all ranks, or raise with what they printed."""
        found = self.reports(name, range(self.world), patience)
        failed = [each for each in found.values() if each.error]
        if len(found) < self.world or failed:
            absent = sorted(set(range(self.world)) - set(found))
            printed = self._log.read_text(errors="replace")[-3000:] if self._log.exists() else ""
            raise RuntimeError(f"{name}: {failed[:2]} failed, {absent[:10]} did not respond\n{printed}")
        return [found[rank] for rank in range(self.world)]


def name_loopback() -> None:
    """Let this process and its children find a name for each loopback address, in a table of hosts of their own.

    torch asks for the name of both ends of each connection to a store. On hosts without such a name, a resolver that
    many processes ask at the same time may take ten seconds to find none. Only root can do this, and others need not.
    """
    with contextlib.suppress(OSError):
        socket.getnameinfo((MAPPED, 0, 0, 0), socket.NI_NAMEREQD)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w") as table:  # the mount keeps it
        table.write(Path("/etc/hosts").read_text() + f"\n{MAPPED} localhost\n::1 localhost\n")
        table.flush()
        if libc.unshare(NEW_MOUNTS) or libc.mount(None, b"/", None, PRIVATE, None):
            return
        libc.mount(table.name.encode(), b"/etc/hosts", None, BIND, None)


def allow_descriptors(count: int) -> None:
    """Raise the limit of open files, which the process of the store inherits: it has several for each rank."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise RuntimeError(f"{count} open files are needed, but the limit is {hard}; run with fewer ranks")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
