"""Stages on one core, and whole operations with them: compression, signatures, and deltas of weights."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from snapshot import Snapshot, StateDict, TakeOptions
from snapshot.tensors.digest import BLOCK, LEAF, block_digest, tree_of
from snapshot.tensors.split_zstd import BlockCodec, kind_of, load_zstd, sum_stored
from snapshot.testing import tapped
from snapshot_bench.raw_io import read_streams, write_streams
from snapshot_bench.rounds import Workspace
from snapshot_bench.workloads import random_tensors
from snapshot_publish import Publisher, PublishOptions, Subscriber
from snapshot_publish.build import DeltaDecoder, DeltaEncoder, checksum_text, sum_bytes
from tests.plugins.snapshot_bench.harness import GB, Link, Seconds, Work, draw_rows, folder_of, time_rows, transfer

MEMORY = Path("/dev/shm")


def _blocks(data: memoryview) -> list[memoryview]:
    return [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]


def _time_stages(rows: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Time stages by this thread's own time."""
    return time_rows(rows, rounds, clock=time.thread_time)


# Compression: its ratio, its cost on one core, and takes over a slow link and to a fast disk. A small transformer is
# trained on the source of this library with AdamW, so that its numbers are those of real training.

LINK = 100e6
STEPS, WIDTH, LAYERS = 60, 192, 4
LENGTH, BATCH = 64, 8
SOURCE = Path(__file__).parents[3] / "snapshot"
WAYS: dict[str, Any] = {"not compressed": None, "zstd": "zstd", "auto": "auto"}


def compare_compression(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    state = _train()
    yield from _compress_blocks(state, rounds)
    app, nbytes = _app(state, scale)
    with tapped("link", Link(LINK)):
        yield f"  {nbytes / GB:.2f} GB over a link of {LINK / 1e6:.0f} MB/s"
        urls = {way: f"link+memory://bench/{way.replace(' ', '-')}" for way in WAYS if way != "auto"}
        rows: dict[str, Work] = {f"take, {way}": partial(_take, url, app, way) for way, url in urls.items()}
        rows |= {f"restore, {way}": partial(_restore, url, app) for way, url in urls.items()}
        for way, url in urls.items():
            _take(url.removeprefix("link+"), app, way)
        beside = {f"{verb}, zstd": f"{verb}, not compressed" for verb in ("take", "restore")}
        yield from draw_rows(time_rows(rows, min(rounds, 3)), nbytes, beside)
        for url in urls.values():
            Snapshot(url.removeprefix("link+")).delete()
    for place in (MEMORY / "compression-bench", folder_of(where) / "compression-bench"):
        yield f"  takes of {nbytes / GB:.2f} GB to {place.parent}"
        rows = {way: partial(_take, str(place / "taken"), app, way) for way in WAYS}
        try:
            seconds = time_rows(rows, rounds, after=lambda _, place=place: shutil.rmtree(place / "taken"))  # type: ignore[misc]
        finally:
            shutil.rmtree(place, ignore_errors=True)
        yield from draw_rows(seconds, nbytes, "not compressed")


def _take(url: str, app: dict[str, Any], way: str) -> None:
    Snapshot.take(url, app, overwrite=True, options=TakeOptions(compression=WAYS[way]))


def _restore(url: str, app: dict[str, Any]) -> None:
    Snapshot(url).restore(app)


def _train() -> dict[str, torch.Tensor]:
    """Return the state of mixed-precision AdamW after some steps, each kind of tensor as one."""
    torch.manual_seed(0)
    text = "\n".join(path.read_text() for path in sorted(SOURCE.rglob("*.py"))).encode()
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


def _app(state: dict[str, torch.Tensor], scale: float) -> tuple[dict[str, Any], int]:
    """Return an application of about a GB of such tensors, and its size."""
    nbytes = sum(each.nbytes for each in state.values())
    times = max(1, round(GB * scale / nbytes))
    held = {f"{name} {number}": each.clone() for number in range(times) for name, each in state.items()}
    return {"s": StateDict(held)}, times * nbytes


def _compress_blocks(state: dict[str, torch.Tensor], rounds: int) -> Iterator[str]:
    codec, out = BlockCodec(), memoryview(bytearray(BLOCK))
    total = less = 0
    for name, tensor in state.items():
        kind = kind_of(str(tensor.dtype).removeprefix("torch."))
        data = memoryview(tensor.view(torch.uint8).numpy())
        blocks = _blocks(data)
        stored = [bytes(out[: codec.encode(each, kind, out)]) for each in blocks]
        target = memoryview(np.empty(len(data), np.uint8))

        def compress(blocks: list[memoryview] = blocks, kind: int = kind) -> None:
            for each in blocks:
                block_digest(each)
                sum_stored(out[: codec.encode(each, kind, out)])

        def decompress(stored: list[bytes] = stored, kind: int = kind, target: memoryview = target) -> None:
            for each, piece in zip(stored, _blocks(target), strict=True):
                sum_stored(each)
                codec.decode(memoryview(each), kind, piece)
                block_digest(piece)

        seconds = _time_stages({"compress": compress, "decompress": decompress}, rounds)
        if bytes(target) != bytes(data):
            raise AssertionError(f"{name}: other bytes were decompressed")
        size = sum(map(len, stored))
        total, less = total + len(data), less + size
        yield f"  {name}: ratio {len(data) / size:.3f}, on one core with digests"
        yield from draw_rows(seconds, len(data))
    yield f"  mixed-precision AdamW, 14 B a parameter: ratio {total / less:.3f}"


# Signatures: the cost of hashing on one core, and what it adds to a take, a restore and a verification.

SIGNED = GB
TENSORS = 40
LANES = 2


def compare_signatures(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    data = memoryview(bytearray(torch.randint(256, (64 << 20,), dtype=torch.uint8).numpy().tobytes()))
    stages: dict[str, Work] = {
        "SHA-256, one call": lambda: hashlib.sha256(data).digest(),
        f"SHA-256 tree, leaves of {LEAF >> 10} KiB": lambda: tree_of(data),
        "xxh3, blocks of 256 KiB": lambda: [block_digest(each) for each in _blocks(data)],
    }
    yield "  one core, 64 MiB"
    yield from draw_rows(_time_stages(stages, rounds), len(data))
    for place in (MEMORY / "sign-bench", folder_of(where) / "sign-bench"):
        try:
            yield from _sign(place, int(SIGNED * scale), rounds)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _sign(place: Path, nbytes: int, rounds: int) -> Iterator[str]:
    key = Ed25519PrivateKey.generate()
    public = key.public_key()
    tensors = random_tensors(TENSORS, (nbytes // TENSORS // 4,))
    held, live = list(tensors.values()), [torch.zeros_like(each) for each in tensors.values()]
    app, into = {"s": StateDict(tensors)}, {"s": StateDict(dict(zip(tensors, live, strict=True)))}
    place.mkdir(parents=True)
    plain, signed, new, late = place / "plain", place / "signed", place / "new", place / "late"
    Snapshot.take(plain, app, options=TakeOptions(durable=False))
    Snapshot.take(signed, app, options=TakeOptions(sign=key, durable=False))
    (place / "one").write_bytes(b"".join(each.numpy().tobytes() for each in held))

    def write() -> None:
        new.mkdir()
        write_streams(held, new, False, LANES)

    rows: dict[str, Work] = {
        "raw write": write,
        "take": lambda: Snapshot.take(new, app, options=TakeOptions(durable=False)),
        "take(sign=)": lambda: Snapshot.take(new, app, options=TakeOptions(sign=key, durable=False)),
        "raw read": lambda: read_streams(live, place / "one", LANES),
        "restore": lambda: Snapshot(plain).restore(into),
        "restore with a key": lambda: Snapshot(signed, key=public).restore(into),
        "verify": lambda: Snapshot(plain).verify(),
        "verify with a key": lambda: Snapshot(signed, key=public).verify(),
        "sign later": lambda: Snapshot(late).sign(key),
        "async_take and wait": lambda: Snapshot.async_take(new, app, options=TakeOptions(durable=False)).wait(),
        "async_take(sign=) and wait": lambda: Snapshot.async_take(
            new, app, options=TakeOptions(sign=key, durable=False)
        ).wait(),
    }

    def prepare(name: str) -> None:
        if name == "sign later":
            Snapshot.take(late, app, options=TakeOptions(durable=False))

    def remove(_: str) -> None:
        for each in (new, late):
            shutil.rmtree(each, ignore_errors=True)

    seconds = time_rows(rows, rounds, before=prepare, after=remove)
    beside = dict.fromkeys(rows, "raw read") | dict.fromkeys(["raw write", "take", "async_take and wait"], "raw write")
    beside |= {"take(sign=)": "take", "restore with a key": "restore", "verify with a key": "verify"}
    beside["async_take(sign=) and wait"] = "async_take and wait"
    yield f"  {nbytes / GB:.2f} GB in {place.parent}"
    yield from draw_rows(seconds, nbytes, beside)


# Deltas of weights: the stages of encoding and applying on one core, and a publish and a pull beside raw copies.
#
# One percent of the elements of a bfloat16 model change, at random places. `last bit`: as an optimizer's step changes
# them. `any bits`: to random values, of which 1.5 % of the bytes cannot be compressed away.

SHARE = 0.01
LAYERS_OF_WEIGHTS = 32


def compare_deltas(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    nbytes = int(GB * scale) // (2 * LAYERS_OF_WEIGHTS) * 2 * LAYERS_OF_WEIGHTS
    for kind in ("last bit", "any bits"):
        yield from _encode_and_apply(kind, min(nbytes, GB // 4), rounds)
    yield from _publish(folder_of(where), nbytes, rounds)


def _change(flat: np.ndarray[Any, Any], kind: str, seed: int) -> None:
    """Change one percent of the elements of an array of 16-bit words."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(flat), int(len(flat) * SHARE), replace=False, shuffle=False)
    change = rng.integers(1, 1 << 16, len(chosen), np.uint16) if kind == "any bits" else np.uint16(1)
    flat[chosen] ^= change


def _encode_and_apply(kind: str, nbytes: int, rounds: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, nbytes // 2, np.uint16)
    new = base.copy()
    _change(new, kind, 1)
    old, made = base.view(np.uint8), new.view(np.uint8)
    sums, encoder, decoder = sum_bytes(old), DeltaEncoder(), DeltaDecoder()
    found = encoder.encode(made, old, sums)
    out = np.empty(BLOCK, np.uint8)
    view, target = memoryview(old), memoryview(np.empty_like(made))
    bare = load_zstd().ZstdDecompressor()

    def xor() -> None:
        for at in range(0, nbytes, BLOCK):
            np.bitwise_xor(made[at : at + BLOCK], old[at : at + BLOCK], out=out[: min(BLOCK, nbytes - at)])

    def decompress() -> None:
        with bare.stream_reader(bytes(found.compressed), read_size=BLOCK) as stream:
            while stream.readinto(memoryview(out)):
                pass

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = view[offset : offset + len(buffer)]

    def write(offset: int, buffer: memoryview) -> None:
        target[offset : offset + len(buffer)] = buffer

    def apply() -> None:
        checks = {"checksum": checksum_text(found.checksum), "digest": found.sums.digest}
        decoder.apply(nbytes, read, [found.compressed], write, **checks)

    yield f"1 % of the elements changed, {kind}: {nbytes / GB:.2f} GB, one core, the thread's time"
    stages: dict[str, Work] = {
        "XOR": xor,
        "adler32 (zlib)": lambda: zlib.adler32(made),
        "xxh3 of blocks": lambda: [block_digest(each) for each in _blocks(memoryview(made))],
        "decompress": decompress,
        "encode: all stages": lambda: encoder.encode(made, old, sums),
        "unchanged tensor": lambda: encoder.encode(old, old, sums),
        "apply: all stages, in memory": apply,
    }
    yield from draw_rows(_time_stages(stages, rounds), nbytes)
    yield f"  bytes of the delta: {100 * len(found.compressed) / nbytes:.2f} %"


def _publish(folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    store = folder / "store"
    words = np.random.default_rng(0).integers(0, 1 << 14, nbytes // 2, np.uint16)
    state = {
        f"layers.{number}.weight": torch.from_numpy(part).view(torch.bfloat16)
        for number, part in enumerate(np.split(words, LAYERS_OF_WEIGHTS))
    }
    publisher, subscriber = (
        Publisher(store, options=PublishOptions(memory_budget_bytes=1 << 62)),
        Subscriber(store, folder / "local"),
    )
    turns: list[dict[str, float]] = []
    wire = []
    for turn in range(rounds + 1):  # the steps of a version depend on each other, so they do not alternate
        times = [time.perf_counter()]
        pending = publisher.publish(turn, state)
        times.append(time.perf_counter())
        version = pending.wait().version
        times.append(time.perf_counter())
        wire.append(sum(each.stat().st_size for each in (store / f"weight_v{version:06d}").iterdir()))
        times.append(time.perf_counter())
        pulled = subscriber.pull()
        times.append(time.perf_counter())
        transfer(pulled.iterdir(), folder / "copy")
        times.append(time.perf_counter())
        shutil.rmtree(folder / "copy")
        publish, wait, _, pull, copy = (end - begin for begin, end in pairwise(times))
        turns.append({"publish() returns": publish, "and is published after": wait, "pull: apply, verify, link": pull})
        if turn:
            turns[-1]["copy of the files (cp)"] = copy
        _change(words, "last bit", turn + 2)
    deltas: Seconds = {name: [turn[name] for turn in turns[1:]] for name in turns[1]}
    yield f"a model of {nbytes / GB:.2f} GB on {os.cpu_count()} cores, {SHARE:.0%} of the elements changed (last bit)"
    yield from draw_rows(deltas, nbytes)
    yield "the first version, which is complete"
    yield from draw_rows({name: [seconds] for name, seconds in turns[0].items()}, nbytes)
    yield f"  bytes in the store of a delta: {100 * statistics.median(wire[1:]) / nbytes:.2f} %"
