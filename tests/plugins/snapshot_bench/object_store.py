"""Uploads and downloads of this library, compared with the bare clients in the same run.

Without a URL, the store is on loopback. It discards uploads and serves downloads from memory, so that the library is
measured and not a server.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from snapshot import RestoreOptions, Snapshot, StateDict
from snapshot.io.registry import open_storage
from snapshot.io.url import URL
from snapshot_bench.child import reset_peak, status
from snapshot_bench.results import align_columns
from snapshot_bench.workloads import random_tensors
from tests.helpers.arguments import for_take
from tests.plugins.snapshot_bench.harness import draw_rows, time_rows

MiB = 1 << 20
PART = 16 * MiB
AT_ONCE = 16
BUDGETS = (64 * MiB, 256 * MiB)
ENGINES = ("s3fs", "obstore")
Range = tuple[str, int, int]


@contextmanager
def _loopback(*arguments: str) -> Iterator[dict[str, Any]]:
    """Start a store in its own process. Yield the options that reach it."""
    command = [sys.executable, "-m", "tests.plugins.snapshot_bench.fake_s3", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        yield {"key": "bench", "secret": "bench", "endpoint_url": url, "client_kwargs": {"region_name": "us-east-1"}}
    finally:
        process.communicate()


async def _upload(driver: Any, key: str, parts: list[memoryview]) -> None:
    from snapshot.io.bodies import RequestBody

    upload, at_once, done = await driver.begin(key, 0), asyncio.Semaphore(AT_ONCE), {}

    async def send(number: int, part: memoryview) -> None:
        async with at_once:
            done[number] = await driver.part(key, upload, number, 0, RequestBody([part]), last=False)

    await asyncio.gather(*(send(number, part) for number, part in enumerate(parts, 1)))
    await driver.complete(key, upload, dict(sorted(done.items())))


async def _download(driver: Any, ranges: list[Range], engine: str) -> None:
    """Download ranges of objects and discard them, by the client alone."""
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
    """Download whole objects, by obstore alone."""
    await asyncio.gather(*(_one(driver, key) for key in {key: None for key, _, _ in ranges}))


async def _one(driver: Any, key: str) -> None:
    await (await driver.store.get_async(key)).bytes_async()


class _Bench:
    """A state, the store for uploads, and the store for downloads."""

    def __init__(self, url: str, sink: Mapping[str, Any], source: Mapping[str, Any], scale: float) -> None:
        self.sink, self.source = sink, source
        self.url = url
        tensors = random_tensors(4, (max(1, int(scale * (64 << 20))),))
        self.state = {"large": StateDict(tensors)}
        views = [memoryview(each.numpy()).cast("B") for each in tensors.values()]
        self.parts = [view[at : at + PART] for view in views for at in range(0, len(view), PART)]
        self.nbytes = sum(map(len, views))
        self.made = [f"{url}/taken"]
        Snapshot.take(self.made[0], self.state, storage_options=dict(source))

    def bare(
        self, options: Mapping[str, Any], engine: str, work: Callable[[Any, list[Range]], Awaitable[None]]
    ) -> float:
        """Return the seconds of work of a client alone, once it is connected."""

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
        """Return the seconds of a take. With `waits=False`, it is an `async_take`, whose budget limits staging."""
        given = {"storage_options": dict(self.sink), "memory_budget_bytes": budget}
        url = f"{self.url}/ours-{secrets.token_hex(4)}"
        began = time.perf_counter()
        if waits:
            Snapshot.take(url, self.state, **for_take(**given))  # type: ignore[arg-type]
        else:
            Snapshot.async_take(url, self.state, **for_take(**given)).wait()  # type: ignore[arg-type]
        took = time.perf_counter() - began
        if self.sink is self.source:
            Snapshot(url, storage_options=dict(self.sink)).delete()
        return took

    def restore(self, engine: str, budget: int | None = None, *, verify: bool = True) -> float:
        began = time.perf_counter()
        snapshot = Snapshot(self.made[0], storage_options={**self.source, "engine": engine})
        snapshot.restore(self.state, options=RestoreOptions(verify=verify, memory_budget_bytes=budget))
        return time.perf_counter() - began

    def key(self) -> str:
        """Return a key for an object of a bare client."""
        return f"{URL.parse(self.url).location.partition('/')[2]}/bare-{secrets.token_hex(4)}"


def _rows(bench: _Bench) -> dict[str, list[tuple[str, Callable[[], float]]]]:
    """Return the rows in groups. The others of a group are compared with its first row."""
    groups: dict[str, list[tuple[str, Callable[[], float]]]] = {}

    def upload() -> float:
        return bench.bare(bench.sink, "s3fs", lambda driver, _: _upload(driver, bench.key(), bench.parts))

    groups["upload"] = [("the client alone", upload), ("take", bench.take)]
    for engine in ENGINES:
        download = partial(_download, engine=engine)
        groups[f"download, {engine}"] = [
            ("the client alone, ranges", partial(bench.bare, bench.source, engine, download)),
            ("restore", partial(bench.restore, engine)),
            ("restore, not verified", partial(bench.restore, engine, verify=False)),
        ]
    groups["download, obstore"].append(
        ("the client alone, whole objects", partial(bench.bare, bench.source, "obstore", _whole))
    )
    return groups


def _peaks(bench: _Bench) -> Iterator[str]:
    """Yield the growth of memory, with budgets below the size of the state."""
    works: dict[str, Callable[[int], float]] = {
        "take": bench.take,
        "async_take": lambda budget: bench.take(budget, waits=False),
        **{f"restore, {engine}": partial(bench.restore, engine) for engine in ENGINES},
    }
    lines = [("growth of memory, MiB", *(f"budget {budget >> 20} MiB" for budget in BUDGETS))]
    for name, work in works.items():
        found = []
        for budget in BUDGETS:
            before = reset_peak()
            work(budget)
            peak = status("VmHWM")
            found.append("-" if before is None or peak is None else f"{(peak - before) / MiB:.0f}")
        lines.append((name, *found))
    yield from align_columns(lines)


def compare(url: str | None, options: Mapping[str, Any], scale: float, rounds: int) -> Iterator[str]:
    if url is not None:
        yield from _measured(_Bench(f"{url.rstrip('/')}/{secrets.token_hex(4)}", options, options, scale), rounds)
        return
    with _loopback("--discard") as sink, _loopback() as source:
        yield from _measured(_Bench("s3://bench", sink, source, scale), rounds)


def _measured(bench: _Bench, rounds: int) -> Iterator[str]:
    yield f"{bench.nbytes / MiB:.0f} MiB in 4 tensors, {rounds} rounds"
    groups = _rows(bench)
    peaks = list(_peaks(bench))  # first, as a warm-up
    rows = {f"{group}: {name}": work for group, named in groups.items() for name, work in named}
    seconds = time_rows(rows, rounds)
    for group, named in groups.items():
        yield group
        taken = {name: seconds[f"{group}: {name}"] for name, _ in named}
        yield from draw_rows(taken, bench.nbytes, beside=named[0][0])
    yield from peaks
