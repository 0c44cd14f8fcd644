"""Signatures: what hashing costs on one core, and what it adds to a take, a restore and a verification.

Every way is measured in each round, and raw writes and reads of the same bytes beside them.
"""

from __future__ import annotations

import hashlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import Snapshot, StateDict
from snapshot.bench.raw_io import read_streams, write_streams
from snapshot.signing.tree import LEAF, tree_of
from snapshot.tensors.digest import BLOCK, block_digest

GB = 10**9
NBYTES = GB
TENSORS = 40
LANES = 2


def compare(folder: Path, scale: float, rounds: int) -> Iterator[str]:
    """Measure everything, and yield the lines of a report."""
    yield from _core(rounds)
    for place in (Path("/dev/shm/sign-bench"), folder / "sign-bench"):
        try:
            yield from _places(place, int(NBYTES * scale), rounds)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _core(rounds: int) -> Iterator[str]:
    data = memoryview(bytearray(torch.randint(256, (64 << 20,), dtype=torch.uint8).numpy().tobytes()))
    blocks = [data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK)]
    ways: dict[str, Callable[[], object]] = {
        "SHA-256, one call": lambda: hashlib.sha256(data).digest(),
        f"SHA-256 tree, leaves of {LEAF >> 10} KiB": lambda: tree_of(data),
        "xxh3, blocks of 256 KiB": lambda: [block_digest(each) for each in blocks],
    }
    yield "  one core, 64 MiB   GB/s"
    for name, work in ways.items():
        best = min(_timed(work, time.thread_time) for _ in range(rounds + 1))
        yield f"  {name:<38}{len(data) / best / GB:>7.2f}"


def _places(place: Path, nbytes: int, rounds: int) -> Iterator[str]:
    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    tensors = [torch.randn(nbytes // TENSORS // 4) for _ in range(TENSORS)]
    app = {"s": StateDict(**{f"w{number}": each for number, each in enumerate(tensors)})}
    live = [torch.zeros_like(each) for each in tensors]
    into = {"s": StateDict(**{f"w{number}": each for number, each in enumerate(live)})}
    place.mkdir(parents=True)
    raw, plain, signed = place / "raw", place / "plain", place / "signed"
    (place / "one").write_bytes(b"".join(each.numpy().tobytes() for each in tensors))

    ways: dict[str, Callable[[], Any]] = {
        "raw write": lambda: (raw.mkdir(), write_streams(tensors, raw, False, LANES)),
        "take": lambda: Snapshot.take(plain, app, durable=False),
        "take(sign=)": lambda: Snapshot.take(signed, app, sign=key, durable=False),
        "raw read": lambda: read_streams(live, place / "one", LANES),
        "restore": lambda: Snapshot(plain).restore(into),
        "restore with a key": lambda: Snapshot(signed, key=public).restore(into),
        "verify": lambda: Snapshot(plain).verify(),
        "verify with a key": lambda: Snapshot(signed, key=public).verify(),
        "sign later": lambda: Snapshot(plain).sign(key),
        "async_take and wait": lambda: Snapshot.async_take(place / "a", app, durable=False).wait(),
        "async_take(sign=) and wait": lambda: Snapshot.async_take(place / "b", app, sign=key, durable=False).wait(),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, work in ways.items():
            took[name].append(_timed(work))
        for each in (raw, plain, signed, place / "a", place / "b"):
            shutil.rmtree(each)
    medians = {name: statistics.median(seconds[1:]) for name, seconds in took.items()}
    beside = dict.fromkeys(ways, "raw read") | dict.fromkeys(["raw write", "take"], "raw write")
    beside |= {"take(sign=)": "take", "restore with a key": "restore", "verify with a key": "verify"}
    beside |= {"async_take and wait": "raw write", "async_take(sign=) and wait": "async_take and wait"}
    yield f"  {nbytes / GB:.2f} GB in {place.parent}   median s, GB/s"
    for name, seconds in medians.items():
        ratio = seconds / medians[beside[name]]
        yield f"  {name:<38}{seconds:>7.3f} {nbytes / seconds / GB:>6.2f}  {ratio:>5.2f} x {beside[name]}"


def _timed(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began
