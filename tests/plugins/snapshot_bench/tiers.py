"""Costs and gains of near folders, compared with takes and steps without them, and with raw transfers of their bytes.

The census of many hosts is measured, too.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from snapshot import Snapshot, SnapshotManager, StateDict
from snapshot.io.url import URL
from snapshot.runs.timeline import Attempt, Facts, RunLine
from snapshot_bench.rounds import Workspace
from snapshot_bench.workloads import random_tensors
from snapshot_tiers import Near
from snapshot_tiers.control import Host
from snapshot_tiers.near_steps import HostView, NearFolder, StepView, take_census
from snapshot_tiers.peers import PeerPlace, PeerServer, StepSources
from tests.plugins.snapshot_bench.harness import Work, draw_rows, folder_of, time_rows

MEMORY = "/dev/shm"
GiB = 1 << 30
HOSTS = 1024


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder, nbytes = folder_of(where), int(GiB * scale)
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        yield from _takes(Path(memory), folder, nbytes, rounds)
        yield from _steps(Path(memory), folder, nbytes)
        yield from _restores(Path(memory), folder, nbytes, rounds)
    yield _census()


def _state(nbytes: int) -> dict[str, StateDict]:
    return {"s": StateDict(random_tensors(16, (max(1, nbytes // 16 // 4),)))}


def _takes(memory: Path, folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    state = _state(nbytes)
    with (
        SnapshotManager(memory / "plain", signals=()) as plain,
        SnapshotManager(folder / "far", near=Near(memory / "near", upload=None, grace=0), signals=()) as tiers,
    ):
        done: dict[str, list[float]] = {"committed, without tiers": [], "committed, with tiers": []}
        steps = count()

        def take(manager: SnapshotManager, committed: str) -> float:
            began = time.perf_counter()
            pending = manager.async_take(next(steps), state)
            returned = time.perf_counter()
            pending.wait()
            done[committed].append(time.perf_counter() - began)
            return returned - began

        def remove(_: str) -> None:
            for earlier in sorted((memory / "plain").glob("step-*"), key=os.path.getmtime)[:-1]:
                shutil.rmtree(earlier, ignore_errors=True)

        names = list(done)
        rows = {
            "blocked, without tiers": partial(take, plain, names[0]),
            "blocked, with tiers": partial(take, tiers, names[1]),
        }
        blocked = time_rows(rows, rounds, after=remove)
        yield "an async_take"
        yield from draw_rows(blocked, beside={"blocked, with tiers": "blocked, without tiers"})
        yield from draw_rows({name: taken[1:] for name, taken in done.items()}, beside={names[1]: names[0]})


def _steps(memory: Path, folder: Path, nbytes: int) -> Iterator[str]:
    """Yield the times of training steps with and without an upload, in turns."""
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
    yield "a training step"
    yield from draw_rows(
        {"alone": quiet, "while a step is uploaded": busy}, beside={"while a step is uploaded": "alone"}
    )


def _restores(memory: Path, folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    state, far = _state(nbytes), folder / "far-restore"
    with SnapshotManager(far, near=Near(memory / "near-restore", grace=0, upload=None), signals=()) as manager:
        manager.take(1, state)
    [run] = [path for path in (memory / "near-restore").iterdir() if path.is_dir()]
    files = sorted((run / "step-1/data").iterdir(), key=lambda path: -path.stat().st_size)
    buffers = [bytearray(path.stat().st_size) for path in files]
    whole = sum(map(len, buffers))
    live = _state(nbytes)
    with _Server(str(run)) as server:
        rows: dict[str, Work] = {
            "raw read with digests": lambda: _read_raw(files, buffers),
            "from memory": lambda: _restore_near(memory / "near-restore", live),
            "raw TCP on loopback": lambda: _receive_raw(server.raw, buffers),
            "from another host": lambda: _restore_peer(run, server.address, memory, live),
        }
        seconds = time_rows(rows, rounds)
    yield f"a restore of {whole / GiB:.2f} GiB"
    beside = {"from memory": "raw read with digests", "from another host": "raw TCP on loopback"}
    yield from draw_rows(seconds, whole, beside)


def _restore_near(near: Path, live: Any) -> None:
    [run] = [path for path in near.iterdir() if path.is_dir()]
    Snapshot(URL("near", str(run / "step-1")).reveal()).restore(live)


def _restore_peer(run: Path, address: str, memory: Path, live: Any) -> None:
    [step] = NearFolder(str(run)).steps().values()
    place = PeerPlace(step.save_id, [1], [[1]] * len(step.head.sizes()), far=False)
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
    """Read files in pieces, and compute the digest of each, on all cores."""
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
    """Process that serves a folder like an uploader, and its data files as raw streams."""

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
    line = RunLine(Facts(1, (Attempt("one", "run", 1),)))
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
    sent = [msgspec.msgpack.encode(each) for each in views]
    found = take_census([msgspec.msgpack.decode(each, type=HostView) for each in sent], line, lambda _: sizes)
    seconds = time.perf_counter() - began
    assert [each.replicas for each in found] == [1, 1]
    return f"the census of {HOSTS:,} hosts with 2 steps of {len(sizes):,} files, decoded and counted: {seconds:.2f} s"
