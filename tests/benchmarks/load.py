"""`python -m tests.benchmarks load`: tensors of a checkpoint into new memory, by this library and by others.

`load_file` of safetensors maps the file, and reads nothing until a tensor is used. So it is also measured with each
page touched once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import snapshot
from snapshot import Target
from snapshot.bench.raw_io import StaysCached, drop, read_streams
from snapshot.bench.rounds import Workspace
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, options_from_environment
from snapshot.snapshot import Snapshot
from snapshot.text import size_text

Way = Callable[[], Any]
LANES = 2
CHUNK = 8 << 20


def model(scale: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of a language model in bfloat16: 1 GiB, times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    width = 2048
    rows = {"q": width, "k": 512, "v": 512, "o": width, "gate": 4 * width, "up": 4 * width, "down": 4 * width}
    made = {}
    for layer in range(max(1, round(8 * scale))):
        for name, count in rows.items():
            weight = torch.randn(count, width, generator=generator).bfloat16()
            made[f"model.layers.{layer}.{name}.weight"] = weight
        made[f"model.layers.{layer}.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    made["model.embed.weight"] = torch.randn(round(32000 * scale), width, generator=generator).bfloat16()
    return made


def small(scale: float) -> dict[str, torch.Tensor]:
    """Return many short tensors."""
    return {f"adapter.{number}": torch.full((32, 32), float(number)) for number in range(round(20_000 * scale))}


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """The lines of the tables."""
    for title, tensors in (("weights of a language model", model(scale)), ("short tensors", small(scale))):
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        yield f"\n{title}: {len(tensors):,} tensors, {size_text(nbytes)}"
        if where.local:
            yield from _local(where, tensors, nbytes, rounds)
        else:
            yield from _remote(where, tensors, nbytes, rounds)
        where.empty()


def _local(where: Workspace, tensors: dict[str, torch.Tensor], nbytes: int, rounds: int) -> Iterator[str]:
    folder = Path(where.text())
    file = folder / "model.safetensors"
    save_file(tensors, file)
    Snapshot(file).convert(folder / "snapshot")
    held = [memory.zero_() for memory in _new(tensors)]
    ways: dict[str, Way] = {
        "raw read into resident memory": lambda: read_streams(held, file, LANES),
        "raw read into new memory": lambda: read_streams(_new(tensors), file, LANES),
        "snapshot.load(safetensors)": lambda: snapshot.load(file),
        "snapshot.load(snapshot)": lambda: snapshot.load(folder / "snapshot"),
        "snapshot.load(snapshot, verify=False)": lambda: snapshot.load(folder / "snapshot", verify=False),
        "safetensors load_file (mapped)": lambda: load_file(file),
        "safetensors load_file, pages touched": lambda: _touch(load_file(file)),
        "safetensors load_file, copied": lambda: {name: each.clone() for name, each in load_file(file).items()},
        **_peers(file),
    }
    yield from _measure("warm", ways, nbytes, rounds, lambda: None)
    try:
        drop(folder)
    except StaysCached as error:
        yield f"  cold: left out: {error}"
        return
    yield from _measure("cold", ways, nbytes, max(1, rounds // 2), lambda: drop(folder))


def _new(tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors.values()]


def _touch(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()
    return tensors


def _peers(file: Path) -> dict[str, Way]:
    """Return the ways of other libraries that are installed, each into memory of its own."""
    ways: dict[str, Way] = {}
    if importlib.util.find_spec("fastsafetensors"):
        from fastsafetensors import fastsafe_open  # type: ignore[import-not-found, unused-ignore]

        def fast() -> Any:
            opened = fastsafe_open(filenames=[str(file)], nogds=True, device="cpu")  # its memory is the tensors'
            return opened, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no dict

        ways["fastsafetensors"] = fast
    if importlib.util.find_spec("runai_model_streamer"):
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found, unused-ignore]

        def streamed() -> Any:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(file))
                return dict(streamer.get_tensors())

        ways["run:ai model streamer"] = streamed
    return ways


def _remote(where: Workspace, tensors: dict[str, torch.Tensor], nbytes: int, rounds: int) -> Iterator[str]:
    url, options = where.text(), options_from_environment()
    Snapshot.take(f"{url}/snapshot", {"model": snapshot.StateDict(tensors)}, storage_options=options)
    taken, file = f"{url}/snapshot", f"{url}/model.safetensors"
    Snapshot(taken, storage_options=options).convert(Target(file, "safetensors", storage_options=options))
    ways: dict[str, Way] = {
        "raw ranges of the same client": lambda: _ranges(where.url, options),
        "snapshot.load(safetensors)": lambda: snapshot.load(Snapshot(file, storage_options=options)),
        "snapshot.load(snapshot)": lambda: snapshot.load(Snapshot(taken, storage_options=options)),
    }
    yield from _measure("object store", ways, nbytes, rounds, lambda: None)


def _ranges(url: URL, options: dict[str, Any]) -> list[bytearray]:
    """Read one file in ranges, with the storage alone."""
    session = Session(url, options)
    storage = session.storage

    async def read() -> list[bytearray]:
        size = (await storage.stat("model.safetensors")).size
        free = asyncio.Semaphore(storage.limits.parallel_parts)

        async def one(begin: int) -> bytearray:
            made = bytearray(min(CHUNK, size - begin))
            async with free:
                await storage.read_into("model.safetensors", begin, [made])
            return made

        return await asyncio.gather(*(one(begin) for begin in range(0, size, CHUNK)))

    try:
        return run(read())
    finally:
        run(session.close())


def _measure(state: str, ways: dict[str, Way], nbytes: int, rounds: int, before: Callable[[], object]) -> Iterator[str]:
    """Time each way in turn, and compare it with the first one."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            if name in failed:
                continue
            before()
            began = time.perf_counter()
            try:
                held = way()
            except Exception as error:  # noqa: BLE001 - another library's: the others are measured nevertheless
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            taken = time.perf_counter() - began
            del held
            if number:  # the first is not counted
                seconds[name].append(taken)
    raw = statistics.median(seconds[next(iter(ways))])
    for name, each in seconds.items():
        if name in failed:
            yield f"  {state} {name:<40} left out: {failed[name][:100]}"
            continue
        median = statistics.median(each)
        rate = f"{nbytes / median / 1e9:7.2f} GB/s {median / raw:6.2f} x raw"
        yield f"  {state} {name:<40} {median:8.3f} s  ({min(each):.3f} to {max(each):.3f}) {rate}"
