"""Several ranks on this machine: saves and restores of one replica, and verbs whose work the ranks share."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from snapshot import RestoreOptions, Snapshot, StateDict, TakeOptions, Target
from snapshot.cli.screen import say
from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import SnapshotError
from snapshot.io.host_memory import available_memory
from snapshot.io.url import options_from_environment
from snapshot.testing import tapped
from snapshot.text import size_text
from snapshot.transform.call import share_whole
from snapshot_bench.results import align_columns
from snapshot_bench.rounds import Workspace, alternate
from snapshot_bench.systems import Ours
from snapshot_bench.workloads import CASES, random_tensors
from snapshot_merge import MergeOptions, merge
from tests.plugins.snapshot_bench.harness import Link, folder_of, start_ranks, time_rows, transfer

# One replica. The ranks hold the same model, as in data parallelism. It must be written once, with the work shared by
# all ranks, and read once with `read_once`.

CASE = CASES["train"]
KEPT = "kept"
"""The snapshot that all restores read."""
_RANK = re.compile(r"data/[0-9a-z]+-([0-9]+)-")


@dataclass(frozen=True, slots=True)
class Result:
    """Measurements of one repetition on one rank."""

    seconds: float = 0.0
    read: int = 0
    """Bytes that it read from storage."""
    written: dict[int, int] | None = None
    """Bytes of the data files of each rank, from rank 0 of a take."""


@dataclass(frozen=True, slots=True)
class Job:
    """One repetition of a row."""

    verb: str
    path: str
    alone: bool = False
    """True if only rank 0 takes part."""
    once: bool = False
    check: bool = False


VERBS = {
    "take, one rank alone": Job("take", "alone", alone=True),
    "take, {world} ranks": Job("take", "together"),
    "restore, one rank alone": Job("restore", KEPT, alone=True),
    "restore, {world} ranks, read_once=True": Job("restore", KEPT, once=True),
    "restore, {world} ranks, read_once=False": Job("restore", KEPT),
}
_HELD: dict[str, Any] = {}
"""Parts that a rank keeps between jobs."""


def compare_replicas(where: Workspace, scale: float, rounds: int, world: int) -> Iterator[str]:
    if where.url.scheme == "memory":
        raise ValueError(f"{where.url}: is the memory of one process, and ranks need a storage that all of them see")
    model = CASE.nbytes(scale)
    where.check_room(3 * model, f"a model of {world} ranks")
    if available_memory() < 1.5 * world * model:
        raise ValueError(f"{world} ranks need {size_text(1.5 * world * model)} of memory; give a smaller --scale")
    best: dict[str, Result] = {}
    with start_ranks(world) as ranks:
        nbytes = ranks.run(_prepare, where.text(), scale)[0]
        ranks.run(_save_or_restore, Job("take", KEPT))

        def repeat(name: str, number: int) -> bool:
            say(f"round {number} of {rounds}: {name.format(world=world)} ...")
            job = VERBS[name]
            found = ranks.run(_save_or_restore, replace(job, check=not number))
            if job.verb == "take":
                Snapshot(f"{where.text()}/{job.path}", storage_options=options_from_environment()).delete()
            whole = Result(max(each.seconds for each in found), sum(each.read for each in found), found[0].written)
            if number and (name not in best or whole.seconds < best[name].seconds):
                best[name] = whole
            return True

        alternate(list(VERBS), rounds, repeat)
        say("")
    yield f"\n{world} ranks, each with the same model and optimizer of {size_text(nbytes)} (minimum of {rounds} rounds)"
    lines = [("", "seconds", "x alone", "bytes", "x model", "most/mean")]
    for name, job in VERBS.items():
        alone = next(best[each].seconds for each, other in VERBS.items() if other.verb == job.verb and other.alone)
        seconds, moved, written = best[name].seconds, best[name].read, best[name].written
        balance = ""
        if written is not None:
            moved = sum(written.values())
            balance = f"{max(written.values()) * (1 if job.alone else world) / moved:.3f}"
        numbers = (f"{seconds:.3f}", f"{seconds / alone:.2f}", size_text(moved), f"{moved / nbytes:.3f}", balance)
        lines.append((name.format(world=world), *numbers))
    yield from (line.rstrip() for line in align_columns(lines))
    yield "bytes: written to storage, or read from it, by all ranks; most/mean: of the bytes that each rank wrote"


def _prepare(where: str, scale: float) -> int:
    payload = CASE.make(scale)
    _HELD.update(where=where, payload=payload, app_state=Ours(payload).app_state, solo=dist.new_group([0]))
    return payload.nbytes()


def _save_or_restore(job: Job) -> Result:
    """Run one repetition. All ranks begin together, and only the verb is timed."""
    payload, app_state = _HELD["payload"], _HELD["app_state"]
    rank = dist.get_rank()
    takes_part = not (job.alone and rank)
    digest = payload.digest() if job.check else ""
    if job.check and job.verb == "restore" and takes_part:
        payload.wipe()
    dist.barrier()
    if not takes_part:
        return Result()
    path, group = f"{_HELD['where']}/{job.path}", _HELD["solo"] if job.alone else None
    options = options_from_environment()
    read, began = 0, time.perf_counter()
    if job.verb == "take":
        Snapshot.take(
            path, app_state, pg=group, replicated=["**"], storage_options=options, options=TakeOptions(durable=False)
        )
    else:
        read = Snapshot(path, group, options).restore(app_state, options=RestoreOptions(read_once=job.once)).bytes_read
    seconds = time.perf_counter() - began
    if job.check and payload.digest() != digest:
        raise SnapshotError("the restored state is not the saved one")
    return Result(seconds, read, _written(path) if job.verb == "take" and not rank else None)


def _written(path: str) -> dict[int, int]:
    """Return the bytes of the data files of each rank."""
    found: Counter[int] = Counter()
    for location, size in Snapshot(path, storage_options=options_from_environment()).metadata.files.items():
        of = _RANK.match(location)
        found[int(of[1]) if of else 0] += size
    return dict(found)


# Shared verbs. Each rank has one core, as on a small host of its own. As many processes do a raw copy or read. Each has
# whole files, of about the same number of bytes. With a link, each rank reads at a limited rate.

FILES = 8
FILE = 128 << 20
"""Bytes of each tensor. Each is in its own file."""
LINK = 200e6
"""Bytes per second that a rank reads over its link."""
RAW = {"cp": "raw copy", "convert": "raw copy", "merge": "raw copy", "verify": "raw read", "diff": "raw read"}
"""Verbs, and the raw work that each is compared with. A merge and a comparison read two sources."""
LINKED = {"cp, link": "cp", "verify, link": "verify"}
JOBS = ("raw copy", "raw read", *RAW, *LINKED)


def compare_shares(where: Workspace, scale: float, rounds: int, world: int) -> Iterator[str]:
    folder = folder_of(where)
    length = max(1, int(FILE * scale) // 4)
    nbytes = FILES * length * 4
    tensors = list(random_tensors(2 * FILES, (length,)).values())
    with start_ranks(FILES) as ranks:  # a rank for each file
        for name, own in (("a", tensors[:FILES]), ("b", tensors[FILES:])):
            _write_parts(folder, name, own)
            ranks.run(_share, f"gather {name}", str(folder))
    yield f"\n{FILES} files of {size_text(length * 4)}, durable"
    with start_ranks(1) as one, start_ranks(world) as several:
        for ranks in (one, several):
            ranks.run(_bind)
        rows = {
            f"{job} {count}": partial(ranks.run, _share, job, str(folder))
            for job in JOBS
            for count, ranks in ((1, one), (world, several))
        }
        seconds = time_rows(rows, rounds, after=lambda _: shutil.rmtree(folder / "made", ignore_errors=True))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    lines = [("", "1 rank s", f"{world} ranks s", "x as fast", "compared with", "1 rank", f"{world} ranks")]
    for job in JOBS:
        alone, together = medians[f"{job} 1"], medians[f"{job} {world}"]
        against, ratios = "", ("", "")
        if job in RAW:
            against = RAW[job]
            ratios = f"{alone / medians[f'{against} 1']:.2f}", f"{together / medians[f'{against} {world}']:.2f}"
        elif job in LINKED:
            against = "the link"
            ratios = f"{alone * LINK / nbytes:.2f}", f"{together * LINK * world / nbytes:.2f}"
        lines.append((job, f"{alone:.3f}", f"{together:.3f}", f"{alone / together:.2f}", against, *ratios))
    yield from (line.rstrip() for line in align_columns(lines))


def _write_parts(folder: Path, name: str, tensors: list[Any]) -> None:
    """Write safetensors files with an index. Ranks convert them to a snapshot in several files."""
    parts = folder / f"{name}-parts"
    parts.mkdir()
    for number, tensor in enumerate(tensors):
        Snapshot.take(folder / "one", {"m": StateDict({f"w{number}": tensor})}, options=TakeOptions(durable=False))
        file = Target(parts / f"{number}.safetensors", "safetensors", durable=False)
        Snapshot(folder / "one").convert(file)
        shutil.rmtree(folder / "one")
    index = {f"w{number}": f"{number}.safetensors" for number in range(FILES)}
    (parts / "model.safetensors.index.json").write_text(f'{{"weight_map": {index}}}'.replace("'", '"'))


def _bind() -> None:
    """Give the rank one core, and a link of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})
    _HELD["link"] = ExitStack()
    _HELD["link"].enter_context(tapped("linked", Link(LINK)))


def _share(job: str, folder: str) -> None:
    """Run this rank's share of a job."""
    root = Path(folder)
    a, b, made = root / "a", root / "b", root / "made"
    origin = f"linked+file://{a}" if job in LINKED else a
    job = LINKED.get(job, job)
    if job.startswith("gather"):
        name = job.partition(" ")[2]
        Snapshot(root / f"{name}-parts").convert(Target(root / name, durable=False), ranks=True)
    elif job.startswith("raw"):
        exchange = solo_exchange("raw")
        exchange.world = dist.get_world_size()
        files = sorted((a / "data").iterdir())
        own = share_whole(exchange, files, [file.stat().st_size for file in files])[dist.get_rank()]
        transfer(own, made if job == "raw copy" else None, durable=True)
    elif job == "cp":
        Snapshot(origin).copy(made, ranks=True)
    elif job == "verify":
        Snapshot(origin).verify(ranks=True)
    elif job == "convert":
        Snapshot(a).convert(made, ranks=True)
    elif job == "merge":
        merge([a, b], made, options=MergeOptions(ranks=True))
    elif job == "diff":
        Snapshot.diff(a, b, values=True, ranks=True)
