"""Compression: what it saves, what it costs on one core, and takes over a slow link and to a fast disk.

A small transformer is trained on this project's source with AdamW, so its numbers are those of real training. The link
is a storage in memory that lets a fixed number of bytes pass in a second.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from snapshot import Snapshot, StateDict
from snapshot.snapshot import Compression
from snapshot.tensors.digest import BLOCK, block_digest
from snapshot.tensors.split_zstd import BlockCodec, kind_of, sum_stored
from snapshot.testing.storages import Damage, Operation, Tap, tapped

GB = 10**9
LINK = 100e6
STEPS, WIDTH, LAYERS = 60, 192, 4
LENGTH, BATCH = 64, 8
ROOT = Path(__file__).parents[2]


def compare(folder: Path, scale: float, rounds: int) -> Iterator[str]:
    """Measure everything, and yield the lines of a report."""
    state = _trained()
    yield from _codec(state, rounds)
    for line in (_link(state, scale, rounds), _places(folder, state, scale, rounds)):
        yield from line


def _trained() -> dict[str, torch.Tensor]:
    """Return the state of mixed-precision AdamW after some steps, each kind of tensor as one."""
    torch.manual_seed(0)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "snapshot").rglob("*.py"))).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(256, WIDTH),
            "layers": nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False),
            "head": nn.Linear(WIDTH, 256),
        }
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    for _ in range(STEPS):
        begins = torch.randint(0, len(data) - LENGTH - 1, (BATCH,))
        batch = torch.stack([data[begin : begin + LENGTH + 1] for begin in begins.tolist()])
        hidden = model["layers"](model["embed"](batch[:, :-1]), mask=mask, is_causal=True)
        loss = nn.functional.cross_entropy(model["head"](hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    held = [optimizer.state[each] for each in model.parameters()]
    master = torch.cat([each.detach().flatten() for each in model.parameters()])
    return {
        "weights bf16": master.bfloat16(),
        "master fp32": master,
        "exp_avg fp32": torch.cat([each["exp_avg"].flatten() for each in held]),
        "exp_avg_sq fp32": torch.cat([each["exp_avg_sq"].flatten() for each in held]),
    }


def _best(nbytes: int, rounds: int, work: Callable[[], object]) -> float:
    """The best GB per second of this thread's own time."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return nbytes / min(seconds[1:]) / GB


def _codec(state: dict[str, torch.Tensor], rounds: int) -> Iterator[str]:
    yield "  one core, digests included              ratio   compress GB/s   decompress GB/s"
    codec, out = BlockCodec(), memoryview(bytearray(BLOCK))
    sizes: dict[str, tuple[int, int]] = {}
    for name, tensor in state.items():
        kind = kind_of(str(tensor.dtype).removeprefix("torch."))
        data = memoryview(tensor.view(torch.uint8).numpy())
        blocks = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
        stored = [bytes(out[: codec.encode(each, kind, out)]) for each in blocks]
        target = memoryview(np.empty(len(data), np.uint8))

        def compress(blocks: list[memoryview] = blocks, kind: int = kind) -> None:
            for each in blocks:
                block_digest(each)
                sum_stored(out[: codec.encode(each, kind, out)])

        def decompress(stored: list[bytes] = stored, kind: int = kind, target: memoryview = target) -> None:
            for number, each in enumerate(stored):
                piece = target[number * BLOCK : (number + 1) * BLOCK]
                sum_stored(each)
                codec.decode(memoryview(each), kind, piece)
                block_digest(piece)

        sizes[name] = len(data), sum(map(len, stored))
        rates = _best(len(data), rounds, compress), _best(len(data), rounds, decompress)
        if bytes(target) != bytes(data):
            raise AssertionError(f"{name}: other bytes came back")
        yield f"  {name:<38}{sizes[name][0] / sizes[name][1]:>7.3f}{rates[0]:>16.2f}{rates[1]:>18.2f}"
    total, less = (sum(each[number] for each in sizes.values()) for number in (0, 1))
    yield f"  {'mixed-precision AdamW, 14 B a parameter':<38}{total / less:>6.3f}"


def _app(state: dict[str, torch.Tensor], scale: float) -> tuple[dict[str, Any], int]:
    """Return an application of about a GB of such tensors."""
    times = max(1, round(GB * scale / sum(each.nbytes for each in state.values())))
    app = {
        "s": StateDict({f"{name} {number}": each.clone() for number in range(times) for name, each in state.items()})
    }
    return app, times * sum(each.nbytes for each in state.values())


class Link(Tap):
    """A link that lets a number of bytes pass in a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free = time.monotonic()

    async def before(self, operation: Operation) -> Damage | None:
        """Wait until the bytes before have passed, and these."""
        if operation.name in ("write", "read_into", "put", "commit"):
            self._free = max(self._free, time.monotonic()) + operation.nbytes / self.rate
            await asyncio.sleep(max(0.0, self._free - time.monotonic()))
        return None


def _timed(url: str, app: dict[str, Any], compression: Compression | None) -> float:
    began = time.perf_counter()
    Snapshot.take(url, app, compression=compression, overwrite=True)
    return time.perf_counter() - began


def _link(state: dict[str, torch.Tensor], scale: float, rounds: int) -> Iterator[str]:
    app, nbytes = _app(state, scale)
    yield f"  {nbytes / GB:.2f} GB over a link of {LINK / 1e6:.0f} MB/s      take s   restore s"
    took: dict[str, tuple[float, float]] = {}
    with tapped("link", Link(LINK)):
        for way in (None, "zstd"):
            url = f"link+memory://bench/{way}"
            takes, reads = [], []
            for _ in range(min(rounds, 3)):
                takes.append(_timed(url, app, way))  # type: ignore[arg-type]
                began = time.perf_counter()
                Snapshot(url).restore(app)
                reads.append(time.perf_counter() - began)
            took[str(way)] = statistics.median(takes), statistics.median(reads)
            yield f"  {way or 'not compressed':<38}{took[str(way)][0]:>7.2f}{took[str(way)][1]:>12.2f}"
            Snapshot(url.removeprefix("link+")).delete()
    faster = [raw / less for raw, less in zip(took["None"], took["zstd"], strict=True)]
    yield f"  {'times as fast':<38}{faster[0]:>7.2f}{faster[1]:>12.2f}"


def _places(folder: Path, state: dict[str, torch.Tensor], scale: float, rounds: int) -> Iterator[str]:
    app, nbytes = _app(state, scale)
    for place in (Path("/dev/shm/compression-bench"), folder / "compression-bench"):
        yield f"  takes of {nbytes / GB:.2f} GB to {place.parent}   median s"
        took: dict[str, list[float]] = {"None": [], "zstd": [], "auto": []}
        try:
            for _ in range(rounds + 1):
                for way, seconds in took.items():
                    given: Any = None if way == "None" else way
                    seconds.append(_timed(str(place / way), app, given))
                    shutil.rmtree(place / way)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        medians = {way: statistics.median(seconds[1:]) for way, seconds in took.items()}
        for way, seconds in medians.items():
            name = "not compressed" if way == "None" else way
            yield f"  {name:<38}{seconds:>7.3f}  {seconds / medians['None']:>5.2f} x"
