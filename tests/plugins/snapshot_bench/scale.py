"""Growth: CPU seconds by the number of tensors, requests by the number of ranks, and a model of large jobs from both.

The requests of ranks on this machine are counted. Those of thousands of ranks follow from the library's own functions,
which say which parts of a manifest a rank needs.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from snapshot import Snapshot, StateDict, Target
from snapshot.manifest import document
from snapshot.manifest.entries import DTensorEntry, Mesh
from snapshot.plan.layout import choose_part_size
from snapshot.tensors.geometry import Box
from snapshot.testing import recording
from snapshot_bench.rounds import Workspace
from snapshot_objectstore.s3 import LIMITS
from tests.plugins.snapshot_bench.harness import folder_of, start_ranks
from tests.plugins.snapshot_bench.planning_scale import ENTRIES

SIZES = (1_000, 10_000, 100_000)
"""Numbers of tensors."""
WORLDS = (2, 4, 8)
"""Ranks that run here."""
LARGE = (1_024, 4_096)
"""Saved ranks whose parts are counted without running them."""

# Numbers of tensors. Each operation runs in a forked child, so that none uses what another one keeps.


class Cost(NamedTuple):
    """The CPU seconds of one operation, and its memory above the state."""

    seconds: float
    nbytes: int


def _state(count: int) -> dict[str, Any]:
    whole = torch.arange(16 * count, dtype=torch.float32)
    return {"s": StateDict({f"layer.{number}.weight": each for number, each in enumerate(whole.view(count, 16))})}


def _copies(count: int) -> dict[str, Any]:
    return {"s": StateDict({name: each.clone() for name, each in _state(count)["s"].items()})}


def _operations(folder: Path, count: int) -> dict[str, Callable[[], object]]:
    here, other, middle = folder / f"{count}", folder / f"{count}-other", f"0/s/layer.{count // 2}.weight"
    state = _copies(count)
    return {
        "take": lambda: Snapshot.take(folder / f"{count}-new", state),
        "restore": lambda: Snapshot(here).restore(state),
        "read_object": lambda: Snapshot(here).read_object(middle),
        "get_manifest": lambda: Snapshot(here).get_manifest(),
        "verify": lambda: Snapshot(here).verify(),
        "copy": lambda: Snapshot(here).copy(folder / f"{count}-copy"),
        "diff": lambda: Snapshot.diff(here, other),
        "convert": lambda: Snapshot(here).convert(Target(folder / f"{count}.safetensors")),
    }


def _measure(work: Callable[[], object]) -> Cost:
    here, there = multiprocessing.Pipe(duplex=False)
    child = os.fork()
    if not child:
        try:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            began = time.process_time()
            work()
            seconds = time.process_time() - began
            there.send((seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    if not here.poll():
        raise RuntimeError("an operation failed in its child")
    return Cost(*here.recv())


def fit_exponent(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the exponent of a power of the sizes that is nearest to the seconds: 1 if they are proportional.

    >>> fit_exponent([1000, 10000], [0.1, 1.0])
    1.0
    """
    x, y = [[math.log(max(each, 1e-9)) for each in held] for held in (sizes, seconds)]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / sum((a - mx) ** 2 for a in x)
    return round(slope, 2)


def compare_sizes(where: Workspace, sizes: Sequence[int]) -> Iterator[str]:
    """Yield a table of the CPU seconds of each operation."""
    folder = folder_of(where)
    costs: dict[str, list[Cost]] = {}
    for count in sizes:
        Snapshot.take(folder / f"{count}", _copies(count))
        Snapshot.take(folder / f"{count}-other", _copies(count))
        for name, work in _operations(folder, count).items():
            costs.setdefault(name, []).append(_measure(work))
    head = " | ".join(f"{count:,}" for count in sizes)
    yield f"| CPU seconds | {head} | exponent | us a tensor | MB above the state |"
    yield f"|---|{'---|' * len(sizes)}---|---|---|"
    for name, found in costs.items():
        seconds = [each.seconds for each in found]
        each = seconds[-1] / sizes[-1] * 1e6
        cells = [f"{value:.3f}" for value in seconds]
        exponent = fit_exponent(sizes[-2:], seconds[-2:])
        yield f"| `{name}` | {' | '.join(cells)} | {exponent} | {each:.1f} | {found[-1].nbytes / 1e6:.0f} |"


# Ranks on this machine.


def _mesh(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def _sharded(shape: tuple[int, ...], dim: int = 0) -> dict[str, Any]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    placements = [*[Replicate()] * (len(shape) - 1), Shard(dim)]
    mesh, size = _mesh(shape), 16 * dist.get_world_size()
    names = (f"w{number}" for number in range(20))
    return {"s": StateDict({name: distribute_tensor(torch.ones(size, size), mesh, placements) for name in names})}


def _requests(path: str, shape: tuple[int, ...], verb: str) -> Counter[str]:
    document.IN_ONE = 10  # so that each rank has a part of the manifest, as in a large job
    state = _sharded(shape, 1 if verb == "reshard" else 0)
    with recording() as log:
        place = f"recording+file://{path}"
        if verb == "take":
            Snapshot.take(place, state)
        else:
            Snapshot(place).restore(state)
    return Counter(each.name for each in log.of())


def compare_worlds(where: Workspace, worlds: Sequence[int]) -> Iterator[str]:
    """Yield a table of the requests of all ranks together."""
    yield "| ranks | call | of all ranks | of one rank, at most | kinds |"
    yield "|---|---|---|---|---|"
    folder = folder_of(where)
    for world in worlds:
        layouts = {"FSDP": (world,), "HSDP": (2, world // 2)} if world > 2 else {"FSDP": (world,)}
        with start_ranks(world) as ranks:
            for name, shape in layouts.items():
                for verb in ("take", "restore", "reshard"):
                    found = ranks.run(_requests, str(folder / f"{name}-{world}"), shape, verb)
                    total = sum(found, Counter())
                    most = max(sum(each.values()) for each in found)
                    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(total.items()))
                    yield f"| {world} | {verb}, {name} | {sum(total.values())} | {most} | {kinds} |"


# Thousands of ranks: the parts that a rank reads, by the entries' meshes and placements.


class Layout(NamedTuple):
    """How ranks hold a tensor."""

    name: str
    shape: tuple[int, ...]
    placements: list[str]


def count_parts(saved: Layout, box: Box, shape: tuple[int, ...]) -> tuple[int, float]:
    """Return the number of parts that have a box, and the seconds to find them."""
    steps = [math.prod(saved.shape[at + 1 :]) for at in range(len(saved.shape))]
    entry = DTensorEntry("float32", shape, [], Mesh(0, saved.shape, tuple(steps)), saved.placements)
    began = time.perf_counter()
    found = entry.find_holders(box)
    return len(found), time.perf_counter() - began


def _layouts(world: int) -> list[Layout]:
    return [
        Layout("FSDP", (world,), ["S(0)"]),
        Layout("HSDP, 2 replicas", (2, world // 2), ["R", "S(0)"]),
        Layout("HSDP, 8 replicas", (8, world // 8), ["R", "S(0)"]),
    ]


def compare_layouts(worlds: Sequence[int]) -> Iterator[str]:
    """Yield a table of the parts that a rank of a restore reads."""
    yield "| saved ranks | saved as | the same layout | half of the ranks | twice the ranks | columns | us for a box |"
    yield "|---|---|---|---|---|---|---|"
    for world in worlds:
        shape = (4 * world, 4 * world)
        for saved in _layouts(world):
            rows = shape[0] // saved.shape[-1]
            boxes = [
                Box((rows, 0), (rows, shape[1])),
                Box((2 * rows, 0), (2 * rows, shape[1])),
                Box((rows, 0), (rows // 2, shape[1])),
                Box((0, rows), (shape[0], rows)),
            ]
            found = [count_parts(saved, box, shape) for box in boxes]
            cells = " | ".join(f"{count:,}" for count, _ in found)
            yield f"| {world:,} | {saved.name} | {cells} | {found[0][1] * 1e6:.0f} |"


# A model of large jobs.

PUTS, GETS = 3_500, 5_500
"""Requests a second for a prefix of a bucket, as S3 documents them."""
RATE = 25e9
"""Bytes a second of a host."""
HOST = 8
"""Ranks of a host."""
PAUSE = 0.03
"""Seconds of a request."""
FILES, BUDGET = 4, 8 << 30
"""Files of a rank, and its memory budget in bytes."""


def model(ranks: int, nbytes: float, tensors: int, replicas: int, us: dict[str, float]) -> dict[str, float]:
    """Return the seconds of a job, from costs in microseconds for a tensor."""
    share = nbytes / ranks
    part = choose_part_size(LIMITS, BUDGET, int(share) // FILES)
    own = max(1, replicas)
    return {
        "save: data over the hosts' links": share * HOST / RATE,
        "save: PUTs of data": ranks * math.ceil(share / part) / PUTS,
        "save: plan of a rank": tensors * us["take"] / 1e6,
        "save: PUTs of manifest parts and tables": ranks * 2 / PUTS,
        "restore: GETs of the manifest": (ranks / HOST + ranks * own) / GETS,
        "restore: decoding on a rank": (1 + own) * tensors * us["get_manifest"] / 1e6,
        "restore: GETs of data": ranks * math.ceil(share / part) / GETS,
        "restore: data over the hosts' links": share * HOST / RATE,
        "restore_latest: the leader's search": 3 * PAUSE,
    }


def compare_models(us: dict[str, float]) -> Iterator[str]:
    """Yield a table of the model for some jobs."""
    jobs = {
        "1,024 ranks, 10 TB": (1_024, 10e12, 1_000, 1),
        "10,000 ranks, 100 TB": (10_000, 100e12, 1_000, 1),
        "10,000 ranks, 100 TB, 10 replicas": (10_000, 100e12, 1_000, 10),
        "10,000 ranks, 100 TB, 10,000 tensors": (10_000, 100e12, 10_000, 1),
    }
    found = {name: model(*job, us) for name, job in jobs.items()}
    yield f"| seconds | {' | '.join(found)} |"
    yield f"|---|{'---|' * len(found)}"
    for line in next(iter(found.values())):
        yield f"| {line} | {' | '.join(f'{each[line]:,.2f}' for each in found.values())} |"


def compare(where: Workspace, sizes: Sequence[int], worlds: Sequence[int]) -> Iterator[str]:
    us: dict[str, float] = {}
    for line in compare_sizes(where, sizes):
        yield line
        cells = [cell.strip() for cell in line.split("|")]
        if cells[1].startswith("`"):
            us[cells[1].strip("`")] = float(cells[-3])
    yield ""
    yield from compare_worlds(where, worlds)
    yield ""
    yield f"Parts of the manifest that a rank reads, of {ENTRIES:,} tensors that are split by rows:"
    yield ""
    yield from compare_layouts(LARGE)
    yield ""
    yield from compare_models(us)
