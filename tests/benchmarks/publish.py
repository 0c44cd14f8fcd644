"""Deltas of weights: the stages of encoding and applying on one core, and a publish and a pull beside raw copies.

One percent of the elements of a bfloat16 model change, at random places. `last bit`: as an optimizer's step changes
them. `any bits`: to random values, of which 1.5 % of the bytes cannot be compressed away.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from snapshot import Publisher, Subscriber
from snapshot.publish.build import DeltaDecoder, DeltaEncoder, EncodedDelta, checksum_text, sum_bytes
from snapshot.tensors.digest import BLOCK, block_digest
from snapshot.tensors.split_zstd import load_zstd

GB = 10**9
SHARE = 0.01
TENSORS = 32


def compare(folder: Path, scale: float, rounds: int) -> Iterator[str]:
    """Measure everything, and yield the lines of a report."""
    nbytes = int(GB * scale) // (2 * TENSORS) * 2 * TENSORS
    for kind in ("last bit", "any bits"):
        yield from _stages(kind, min(nbytes, GB // 4), rounds)
    yield from _whole(folder, nbytes, rounds)


def _change(flat: np.ndarray[Any, Any], kind: str, seed: int) -> None:
    """Change one percent of the elements of an array of 16-bit words."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(flat), int(len(flat) * SHARE), replace=False, shuffle=False)
    change = rng.integers(1, 1 << 16, len(chosen), np.uint16) if kind == "any bits" else np.uint16(1)
    flat[chosen] ^= change


def _rate(nbytes: int, rounds: int, work: Callable[[], object]) -> tuple[float, float]:
    """The best and the median bytes per second of this thread's own time."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return nbytes / min(seconds[1:]) / GB, nbytes / statistics.median(seconds[1:]) / GB


def _stages(kind: str, nbytes: int, rounds: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, nbytes // 2, np.uint16)
    new = base.copy()
    _change(new, kind, 1)
    old, made = base.view(np.uint8), new.view(np.uint8)
    sums, encoder, decoder = sum_bytes(old), DeltaEncoder(), DeltaDecoder()
    found = encoder.encode(made, old, sums)
    out = np.empty(BLOCK, np.uint8)
    view, target = memoryview(old), memoryview(np.empty_like(made))
    blocks = range(0, nbytes, BLOCK)
    bare = load_zstd().ZstdDecompressor()

    def xor() -> None:
        for at in blocks:
            np.bitwise_xor(made[at : at + BLOCK], old[at : at + BLOCK], out=out[: min(BLOCK, nbytes - at)])

    def digest() -> None:
        for at in blocks:
            block_digest(made[at : at + BLOCK])

    def decompress() -> None:
        with bare.stream_reader(bytes(found.compressed), read_size=BLOCK) as stream:
            while stream.readinto(memoryview(out)):
                pass

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = view[offset : offset + len(buffer)]

    def write(offset: int, buffer: memoryview) -> None:
        target[offset : offset + len(buffer)] = buffer

    def apply() -> None:
        decoder.apply(
            nbytes,
            read,
            [found.compressed],
            write,
            checksum=checksum_text(found.checksum),
            digest=found.sums.digest,
        )

    def encode() -> EncodedDelta:
        return encoder.encode(made, old, sums)

    yield f"1 % of the elements changed, {kind}: {nbytes / GB:.2f} GB, one core, best (median) of the thread's time"
    stages: dict[str, Callable[[], object]] = {
        "XOR": xor,
        "adler32 (zlib)": lambda: zlib.adler32(made),
        "xxh3 of blocks": digest,
        "decompress": decompress,
        "encode: all stages": encode,
        "unchanged tensor": lambda: encoder.encode(old, old, sums),
        "apply: all stages, in memory": apply,
    }
    for name, work in stages.items():
        best, median = _rate(nbytes, rounds, work)
        yield f"  {name:<40} {best:7.2f} GB/s  ({median:.2f})"
    yield f"  {'bytes of the delta':<40} {100 * len(found.compressed) / nbytes:7.2f} %"


def _whole(folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    store, local = folder / "store", folder / "local"
    torch.manual_seed(0)
    words = np.random.default_rng(0).integers(0, 1 << 14, nbytes // 2, np.uint16)
    state = {
        f"layers.{number}.weight": torch.from_numpy(part).view(torch.bfloat16)
        for number, part in enumerate(np.split(words, TENSORS))
    }
    times: dict[str, list[float]] = {}
    wire = []

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        times.setdefault(name, []).append(time.perf_counter() - began)
        return result

    publisher = Publisher(store, memory_budget_bytes=1 << 62)
    subscriber = Subscriber(store, local)
    for turn in range(rounds + 1):
        pending = timed("publish() returns", lambda turn=turn: publisher.publish(turn, state))
        version = timed("and is published after", pending.wait).version
        shards = list((store / f"weight_v{version:06d}").iterdir())
        pulled = timed("pull: apply, verify, link", subscriber.pull)
        if not turn:
            first = {name: found[0] for name, found in times.items()}
            times.clear()
        else:
            wire.append(sum(each.stat().st_size for each in shards))
            timed("copy of the files (cp)", lambda pulled=pulled: _copy(pulled, folder / "copy"))
        _change(words, "last bit", turn + 2)
    yield f"a model of {nbytes / GB:.2f} GB on {os.cpu_count()} cores, {SHARE:.0%} of the elements changed (last bit)"
    for name, seconds in times.items():
        yield _line(name, nbytes, seconds)
    yield "the first version, which is complete"
    for name, seconds in first.items():
        yield _line(name, nbytes, [seconds])
    yield f"  {'bytes in the store of a delta':<40} {100 * statistics.median(wire) / nbytes:7.2f} %"


def _line(name: str, nbytes: int, seconds: Sequence[float]) -> str:
    best, median = min(seconds), statistics.median(seconds)
    return f"  {name:<40} {nbytes / best / GB:7.2f} GB/s  ({nbytes / median / GB:.2f}; {median:.3f} s)"


def _copy(source: Path, target: Path) -> None:
    """Copy files as their reader would: through memory, into new files."""
    target.mkdir(exist_ok=True)
    buffer = memoryview(bytearray(8 << 20))
    for each in source.iterdir():
        with open(each, "rb", buffering=0) as here, open(target / each.name, "wb", buffering=0) as there:
            while count := here.readinto(buffer):
                there.write(buffer[:count])
    shutil.rmtree(target)
