"""`snapshot bench --store`: uploads and downloads of ours beside what the same clients do bare, in the same run.

Without a URL it measures against a store on loopback that throws away what it is given, and serves from memory what it
is asked for: so that it is our way that is measured, and no server's.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from snapshot import Snapshot, StateDict
from snapshot.bench.child import reset_peak, status
from snapshot.io.registry import open_storage
from snapshot.io.url import URL

MiB = 1 << 20
PART = 16 * MiB
AT_ONCE = 16
BUDGETS = (64 * MiB, 256 * MiB)
ENGINES = ("s3fs", "obstore")
Range = tuple[str, int, int]


@contextmanager
def _loopback(*arguments: str) -> Iterator[dict[str, Any]]:
    """A store in a process of its own; the options that reach it."""
    command = [sys.executable, "-m", "tests.benchmarks.fake_s3", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {"key": "bench", "secret": "bench", "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
    finally:
        process.communicate()


async def _upload(driver: Any, key: str, parts: list[memoryview]) -> None:
    """One object, by the client alone."""
    from snapshot.plugins.network.http import RequestBody  # a plugin's, and those are imported by who needs them

    upload, at_once, done = await driver.begin(key, 0), asyncio.Semaphore(AT_ONCE), {}

    async def send(number: int, part: memoryview) -> None:
        async with at_once:
            done[number] = await driver.part(key, upload, number, 0, RequestBody([part]), last=False)

    await asyncio.gather(*(send(number, part) for number, part in enumerate(parts, 1)))
    await driver.complete(key, upload, dict(sorted(done.items())))


async def _download(driver: Any, ranges: list[Range], engine: str) -> None:
    """Ranges of objects, thrown away as they arrive, by the client alone."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def receive(key: str, begin: int, end: int) -> None:
        async with at_once:
            if engine == "obstore":
                await driver.store.get_range_async(key, start=begin, end=end)
                return
            found = await driver._call("get_object", Key=key, Range=f"bytes={begin}-{end - 1}")
            while await found["Body"].raw_stream.content.readany():
                pass

    await asyncio.gather(*(receive(*each) for each in ranges))


async def _whole(driver: Any, ranges: list[Range]) -> None:
    """Whole objects, by obstore alone."""
    await asyncio.gather(*(_one(driver, key) for key in {key: None for key, _, _ in ranges}))


async def _one(driver: Any, key: str) -> None:
    await (await driver.store.get_async(key)).bytes_async()


class _Bench:
    """One payload, and the two stores that it goes to and comes from."""

    def __init__(self, url: str, sink: Mapping[str, Any], source: Mapping[str, Any], scale: float) -> None:
        self.sink, self.source = sink, source
        self.url = url
        self.state = {"large": StateDict({f"t{i}": torch.randn(max(1, int(scale * (64 << 20)))) for i in range(4)})}
        views = [memoryview(each.numpy()).cast("B") for each in self.state["large"].values()]
        self.parts = [view[at : at + PART] for view in views for at in range(0, len(view), PART)]
        self.nbytes = sum(map(len, views))
        self.made = [f"{url}/taken"]
        Snapshot.take(self.made[0], self.state, storage_options=dict(source))

    def bare(
        self, options: Mapping[str, Any], engine: str, work: Callable[[Any, list[Range]], Awaitable[None]]
    ) -> float:
        """How long a client takes alone, once it is connected, for what it is given."""

        async def run() -> float:
            storage: Any = open_storage(URL.parse(self.made[0]), {**options, "engine": engine})
            try:
                driver, ranges = await storage.driver(), []
                for path in await storage.list("data/") if options is self.source else ():
                    size = (await storage.stat(path)).size
                    ranges += [(storage.key(path), at, min(at + PART, size)) for at in range(0, size, PART)]
                began = time.perf_counter()
                await work(driver, ranges)
                return time.perf_counter() - began
            finally:
                await storage.close()

        return asyncio.run(run())

    def take(self, budget: int | None = None, *, waits: bool = True) -> float:
        """Ours; `waits=False`: by `async_take`, whose staging is bounded by the budget."""
        given = {"storage_options": dict(self.sink), "memory_budget_bytes": budget}
        url = f"{self.url}/ours-{secrets.token_hex(4)}"
        began = time.perf_counter()
        if waits:
            Snapshot.take(url, self.state, **given)  # type: ignore[arg-type]
        else:
            Snapshot.async_take(url, self.state, **given).wait()  # type: ignore[arg-type]
        took = time.perf_counter() - began
        if self.sink is self.source:
            Snapshot(url, storage_options=dict(self.sink)).delete()
        return took

    def restore(self, engine: str, budget: int | None = None, *, verify: bool = True) -> float:
        """Ours."""
        began = time.perf_counter()
        snapshot = Snapshot(self.made[0], storage_options={**self.source, "engine": engine})
        snapshot.restore(self.state, verify=verify, memory_budget_bytes=budget)
        return time.perf_counter() - began

    def key(self) -> str:
        """A key for an object of the client's own."""
        return f"{URL.parse(self.url).location.partition('/')[2]}/bare-{secrets.token_hex(4)}"


def _rows(bench: _Bench) -> dict[str, list[tuple[str, Callable[[], float]]]]:
    """What is measured: the first row of each group is what the others are compared with."""
    groups: dict[str, list[tuple[str, Callable[[], float]]]] = {}

    def upload() -> float:
        return bench.bare(bench.sink, "s3fs", lambda driver, _: _upload(driver, bench.key(), bench.parts))

    def download(engine: str) -> float:
        return bench.bare(bench.source, engine, lambda driver, ranges: _download(driver, ranges, engine))

    groups["upload"] = [("the client alone", upload), ("take", bench.take)]
    for engine in ENGINES:
        groups[f"download, {engine}"] = [
            ("the client alone, ranges", lambda e=engine: download(e)),  # type: ignore[misc]
            ("restore", lambda e=engine: bench.restore(e)),  # type: ignore[misc]
            ("restore, not verified", lambda e=engine: bench.restore(e, verify=False)),  # type: ignore[misc]
        ]
    groups["download, obstore"].append(
        ("the client alone, whole objects", lambda: bench.bare(bench.source, "obstore", _whole))
    )
    return groups


def _peaks(bench: _Bench) -> Iterator[str]:
    """How far memory rises above where it stood, at budgets that are smaller than what is moved."""
    yield f"{'memory above where it stood, MiB':<44}" + "".join(f"{budget >> 20:>8} MiB" for budget in BUDGETS)
    works: dict[str, Callable[[int], float]] = {
        "take": bench.take,
        "async_take": lambda budget: bench.take(budget, waits=False),
        **{f"restore, {engine}": lambda budget, e=engine: bench.restore(e, budget) for engine in ENGINES},  # type: ignore[misc]
    }
    for name, work in works.items():
        found = []
        for budget in BUDGETS:
            before = reset_peak()
            work(budget)
            peak = status("VmHWM")
            found.append("-" if before is None or peak is None else f"{(peak - before) / MiB:.0f}")
        yield f"  {name:<42}" + "".join(f"{each:>12}" for each in found)


def compare(url: str | None, options: Mapping[str, Any], scale: float, rounds: int) -> Iterator[str]:
    """Lines of a table: seconds (the fastest of the rounds, which are interleaved), MB/s, and the ratio."""
    if url is not None:
        yield from _measured(_Bench(f"{url.rstrip('/')}/{secrets.token_hex(4)}", options, options, scale), rounds)
        return
    with _loopback("--discard") as sink, _loopback() as source:
        yield from _measured(_Bench("s3://bench", sink, source, scale), rounds)


def _measured(bench: _Bench, rounds: int) -> Iterator[str]:
    yield f"{bench.nbytes / MiB:.0f} MiB in 4 tensors, {rounds} rounds, the fastest of each"
    groups = _rows(bench)
    peaks = list(_peaks(bench))  # first, as a warm-up
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for group, rows in groups.items():
            for name, work in rows:
                best[group, name] = min(best.get((group, name), 1e9), work())
    yield f"{'':<44}{'seconds':>12}{'MB/s':>12}{'ratio':>12}"
    for group, rows in groups.items():
        yield group
        first = best[group, rows[0][0]]
        for name, _ in rows:
            seconds = best[group, name]
            yield f"  {name:<42}{seconds:>12.2f}{bench.nbytes / seconds / 1e6:>12.0f}{seconds / first:>12.2f}"
    yield from peaks
