"""Time of a training's steps beside an export of a kept step, beside an upload, and beside an async take's write."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median, quantiles

import torch

from snapshot import SnapshotManager, StateDict, events
from snapshot.errors import SnapshotError
from snapshot.manifest.document import METADATA
from snapshot.text import size_text
from snapshot_bench.results import align_columns
from snapshot_bench.rounds import Workspace
from snapshot_bench.workloads import random_tensors
from snapshot_export import KeptExport
from snapshot_tiers import Near
from tests.plugins.snapshot_bench.harness import folder_of

WAYS = ("alone", "async take", "upload", "export")
TENSORS, ALONE = 64, 60
READING = """
How to read this: one thread trains, with steps of equal work. `median` and `p90` are of the steps that began while
the work of a row was under way, from the start of its process to its end; `x alone` compares the medians. `seconds`:
how long the work took, at the median. An export and an upload read what was saved before and write it once more; an
async take only writes. The rows alternate within each round."""


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """Yield the lines of a table."""
    folder = folder_of(where)
    nbytes = int(scale * (1 << 30))
    where.check_room(6 * nbytes, "steps")
    tensors = random_tensors(TENSORS, (max(1, nbytes // 4 // TENSORS),))
    state = {"model": StateDict(tensors)}
    torch.set_num_threads(1)
    square = torch.randn(512, 512)
    numbers = count(1)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    lasted: dict[str, list[float]] = {way: [] for way in WAYS}

    def train() -> float:
        began = time.perf_counter()
        for _ in range(12):
            square @ square
        return time.perf_counter() - began

    def beside(way: str, is_done: Callable[[], bool], counts: bool) -> None:
        began, found = time.perf_counter(), [train()]
        while not is_done():
            found.append(train())
        if counts:
            times[way] += found
            lasted[way].append(time.perf_counter() - began)

    exported: list[int] = []

    def note(event: events.Event) -> None:
        if event.name == "exported":
            exported.append(event.fields["step"])
        if event.name == "export_failed":
            raise SnapshotError(str(event.fields["error"]))

    def measure(way: str, counts: bool) -> None:
        os.sync()
        step, root = next(numbers), folder / f"{way.replace(' ', '-')}"
        if way == "alone":
            left = iter(range(ALONE - 1))
            beside(way, lambda: next(left, None) is None, counts)
        elif way == "async take":
            with SnapshotManager(root, signals=()) as manager:
                beside(way, manager.async_take(step, state).done, counts)
        elif way == "upload":
            near = Near(folder / "near", grace=60)
            with SnapshotManager(root, near=near, signals=()) as manager:
                manager.take(step, state)
                beside(way, (root / f"step-{step}" / METADATA).exists, counts)
        else:
            with SnapshotManager(root, exports=[KeptExport()], signals=()) as manager:
                manager.take(step, state)
                beside(way, lambda: step in exported, counts)
        for each in folder.iterdir():
            shutil.rmtree(each, ignore_errors=True)

    events.add_handler(note)
    try:
        for number in range(rounds + 1):  # the first round is not counted
            turn = number % len(WAYS)
            for way in WAYS[turn:] + WAYS[:turn]:
                measure(way, counts=number > 0)
    finally:
        events.remove_handler(note)
    yield f"\n{size_text(nbytes)} in {TENSORS} tensors, {rounds} rounds after the first"
    rows = [["", "steps", "median ms", "p90 ms", "x alone", "seconds"]]
    for way in WAYS:
        middle, ninth = median(times[way]), quantiles(times[way], n=10)[-1] if len(times[way]) > 1 else 0.0
        share = middle / median(times["alone"])
        cells = (f"{1e3 * middle:.1f}", f"{1e3 * ninth:.1f}", f"{share:.3f}", f"{median(lasted[way]):.2f}")
        rows.append([way, str(len(times[way])), *cells])
    yield from align_columns(rows)
    yield READING
