"""Costs and gains of near folders: takes and steps beside those without tiers, restores beside the raw transfer of the
same bytes, and the census of many hosts."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from snapshot import Near, Snapshot, SnapshotManager, StateDict
from snapshot.io.url import URL
from snapshot.tiers.control import Host
from snapshot.tiers.near_steps import HostView, NearFolder, StepView, take_census
from snapshot.tiers.peers import PeerServer, Place, StepSources
from snapshot.tiers.timeline import Attempt, Facts, Line

MEMORY = "/dev/shm"
GiB = 1 << 30
HOSTS = 1024


def compare(folder: Path, scale: float, rounds: int) -> Iterator[str]:
    """Measure everything, and yield the lines of a report."""
    nbytes = int(GiB * scale)
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        yield from _takes(Path(memory), folder, nbytes, rounds)
        yield from _steps(Path(memory), folder, nbytes)
        yield from _restores(Path(memory), folder, nbytes, rounds)
    yield _census()


def _state(nbytes: int) -> dict[str, StateDict]:
    each = max(1, nbytes // 16 // 4)
    return {"s": StateDict({f"t{at}": torch.randn(each) for at in range(16)})}


def _line(what: str, ours: Sequence[float], theirs: Sequence[float], unit: str = "x") -> str:
    minimum, median = min(ours) / min(theirs), statistics.median(ours) / statistics.median(theirs)
    return f"{what:<58} {min(ours):8.4f} s  {min(theirs):8.4f} s  {minimum:5.2f} {unit} (median {median:.2f})"


def _takes(memory: Path, folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    state = _state(nbytes)
    yield f"{'':<58} {'tiers':>10}  {'without':>10}"
    with (
        SnapshotManager(memory / "plain", signals=()) as plain,
        SnapshotManager(folder / "far", near=Near(memory / "near", upload=None, grace=0), signals=()) as tiers,
    ):
        blocked: dict[SnapshotManager, list[float]] = {plain: [], tiers: []}
        done: dict[SnapshotManager, list[float]] = {plain: [], tiers: []}
        for turn in range(rounds + 1):
            for manager in (plain, tiers) if turn % 2 else (tiers, plain):
                began = time.perf_counter()
                pending = manager.async_take(turn, state)
                returned = time.perf_counter()
                pending.wait()
                if turn:
                    blocked[manager].append(returned - began)
                    done[manager].append(time.perf_counter() - began)
                for step in range(turn):
                    shutil.rmtree(memory / "plain" / f"step-{step}", ignore_errors=True)
        yield _line("an async_take blocks for", blocked[tiers], blocked[plain])
        yield _line("and is committed after", done[tiers], done[plain])


def _steps(memory: Path, folder: Path, nbytes: int) -> Iterator[str]:
    """Train while a step is uploaded, and while nothing happens, in turns."""
    torch.set_num_threads(1)
    left = torch.randn(512, 512)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            left @ left
        return time.perf_counter() - began

    with SnapshotManager(folder / "far-steps", near=Near(memory / "near-steps", grace=0), signals=()) as manager:
        quiet, busy = [], []
        state = _state(nbytes)
        for turn in range(3):
            end = time.monotonic() + 2
            while time.monotonic() < end:
                quiet.append(step())
            pending = manager.async_take(turn, state)
            pending.wait()
            far = threading.Thread(target=lambda pending=pending: pending.wait("far"))
            far.start()
            while far.is_alive():
                busy.append(step())
    yield _line("a training step (median decides) while a step is uploaded", busy, quiet)


def _restores(memory: Path, folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    state, far = _state(nbytes), folder / "far-restore"
    with SnapshotManager(far, near=Near(memory / "near-restore", grace=0, upload=None), signals=()) as manager:
        manager.take(1, state)
    [run] = [path for path in (memory / "near-restore").iterdir() if path.is_dir()]
    files = sorted((run / "step-1/data").iterdir(), key=lambda path: -path.stat().st_size)
    whole = sum(path.stat().st_size for path in files)
    live = _state(nbytes)
    near: list[float] = []
    raw: list[float] = []
    peer: list[float] = []
    loop: list[float] = []
    buffers = [bytearray(path.stat().st_size) for path in files]
    with _Server(str(run)) as server:
        for turn in range(rounds + 1):
            times = [
                _timed(lambda: _read_raw(files, buffers)),
                _timed(lambda: _restore_near(far, memory / "near-restore", live)),
                _timed(lambda: _receive_raw(server.raw, buffers)),
                _timed(lambda: _restore_peer(run, server.address, memory, live)),
            ]
            for found, seconds in zip((raw, near, loop, peer), times, strict=True):
                if turn:
                    found.append(seconds)
    yield f"{'':<58} {'restore':>10}  {'raw':>10}   ({whole / GiB:.2f} GiB)"
    yield _line("from memory, beside a raw read with digests", near, raw, f"x, {min(raw) / min(near):.0%}")
    yield _line("from another host, beside raw TCP on loopback", peer, loop, f"x, {min(loop) / min(peer):.0%}")


def _timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _restore_near(far: Path, near: Path, live: Any) -> None:
    [run] = [path for path in near.iterdir() if path.is_dir()]
    Snapshot(URL("near", str(run / "step-1")).reveal()).restore(live)


def _restore_peer(run: Path, address: str, memory: Path, live: Any) -> None:
    [step] = NearFolder(str(run)).steps().values()
    place = Place(step.save_id, [1], [[1]] * len(step.head.sizes()), far=False)
    hosts = [Host("a", "a", [0]), Host("b", "b", [1], address)]
    own = memory / "own" / "step-1"
    own.mkdir(parents=True, exist_ok=True)
    sources = StepSources(1, place, str(own), hosts, 0, secret="secret", far=URL("file", str(memory)), options={})
    try:
        Snapshot(URL("near", str(own)).reveal(), storage_options={"sources": sources}).restore(live)
    finally:
        sources.close()
    assert sources.counts["peer"] > 0


def _read_raw(files: Sequence[Path], buffers: Sequence[bytearray]) -> None:
    """Read files in pieces, and digest each, on all cores."""
    pieces = [
        (path, memoryview(buffer)[at : at + (4 << 20)], at)
        for path, buffer in zip(files, buffers, strict=True)
        for at in range(0, len(buffer), 4 << 20)
    ]

    def read(piece: tuple[Path, memoryview, int]) -> None:
        path, view, at = piece
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.preadv(descriptor, [view], at)
        finally:
            os.close(descriptor)
        xxhash.xxh3_128(view).digest()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(read, pieces))


class _Server:
    """A process that serves a folder as an uploader does, and its data files as a raw stream."""

    def __init__(self, folder: str) -> None:
        here, there = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(folder, there), daemon=True)
        self._process.start()
        self.address, self.raw = here.recv()

    def __enter__(self) -> _Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(folder: str, told: Any) -> None:
    server = PeerServer(socket.create_server(("127.0.0.1", 0)), folder, lambda: b"{}")
    server.secrets.append("secret")
    raw = socket.create_server(("127.0.0.1", 0), backlog=16)
    told.send((server.address, raw.getsockname()[1]))
    files = sorted((Path(folder) / "step-1/data").iterdir(), key=lambda path: -path.stat().st_size)

    def send(connection: socket.socket) -> None:
        with connection:
            number = int.from_bytes(connection.recv(8), "little")
            with open(files[number], "rb") as file:
                connection.sendfile(file)

    while True:
        threading.Thread(target=send, args=(raw.accept()[0],), daemon=True).start()


def _receive_raw(port: int, buffers: Sequence[bytearray]) -> None:
    def receive(number: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(number.to_bytes(8, "little"))
            view = memoryview(buffers[number])
            while view:
                view = view[connection.recv_into(view) :]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(receive, range(len(buffers))))


def _census() -> str:
    line = Line(Facts(1, (Attempt("one", "run", 1),)))
    sizes = {f"data/0123456789ab-{rank}-{n}.safetensors": 1 << 30 for rank in range(8 * HOSTS) for n in range(2)}
    names = list(sizes)
    views = []
    for host in range(HOSTS):
        own = names[host * 16 : host * 16 + 16]
        partner = names[(host + 512) % HOSTS * 16 :][:16]
        held = dict.fromkeys((*own, *partner), 1 << 30)
        steps = [StepView(step, "0123456789ab", ("run", 1, "one", step, False), held) for step in (100, 200)]
        views.append(HostView(f"host-{host}", steps))
    began = time.perf_counter()
    found = take_census([_again(each) for each in views], line, lambda _: sizes)
    seconds = time.perf_counter() - began
    assert [each.replicas for each in found] == [1, 1]
    return f"the census of {HOSTS:,} hosts with 2 steps of {len(sizes):,} files, decoded and counted: {seconds:.2f} s"


def _again(view: HostView) -> HostView:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(view), type=HostView)
