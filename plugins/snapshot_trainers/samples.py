"""Whether a run has trained on each sample once, by the sums of samples in the states of its data loaders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from snapshot.cli.locate import snapshots_below
from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.interop.weight_digests import FOLDER
from snapshot.io.loop import run as on_loop
from snapshot.io.url import URL
from snapshot.manager.root import Root
from snapshot.reports import Report
from snapshot.snapshot import Snapshot
from snapshot.text import counted
from snapshot_trainers.ledger import Sum, find_difference, hash_ids, hash_range
from snapshot_trainers.sampler_states import write_generator

_PLACE = "/order/past"
"""The end of the path of a loader's past epochs in a manifest. What precedes it is the path of its state."""
_TORCH, _TORCHDATA = "torch.utils.data.", "torchdata.stateful_dataloader.sampler."


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What was seen in one epoch of one data loader."""

    loader: str
    """Its name in the app state."""
    epoch: int
    samples: int
    """How many samples were seen, but those that evened out the last batches."""
    expected: int | None
    """How many should have been; None for an epoch that goes on, and for one that nothing is known to compare with."""
    evened_out: int
    """How many were seen once more to even out the last batches."""
    lost: tuple[Any, ...] | None
    """The samples that were not seen; None if there are several, whose sum does not tell which."""
    twice: tuple[Any, ...] | None
    """The samples that were seen twice; None likewise."""
    first: str | None
    """The first step in which the samples differ from those expected; None if they do not."""

    @property
    def ok(self) -> bool:
        """True if nothing differs from what is expected."""
        return self.first is None

    def __str__(self) -> str:
        told = f"{self.loader}: epoch {self.epoch}: {self.samples:,}"
        if self.first is None:
            if self.expected is None:
                return (
                    f"{told} samples so far" if self.lost is None else f"{told} samples, with nothing to compare with"
                )
            evened = f", evened out: {self.evened_out:,}" if self.evened_out else ""
            return f"{told} of {self.expected:,}, 0 lost, 0 twice{evened}"
        if self.expected is None:
            return f"{told} samples so far, and they are not those of its order; first in {self.first}"
        if self.lost is None or self.twice is None:
            return f"{told} of {self.expected:,}, and not each of them once; first in {self.first}"
        names = [
            f"{len(ids)} {word}" + (f" ({', '.join(map(str, ids))})" if ids else "")
            for ids, word in ((self.lost, "lost"), (self.twice, "twice"))
        ]
        return f"{told} of {self.expected:,}, {', '.join(names)}; first in {self.first}"


@dataclass(frozen=True, slots=True)
class SamplesReport(Report):
    """Whether a run has seen each sample once: a line for each epoch of each data loader."""

    steps: tuple[str, ...]
    """The names of the steps that were read."""
    epochs: tuple[EpochReport, ...]

    @property
    def ok(self) -> bool:
        """True if no epoch differs from what is expected."""
        return all(each.ok for each in self.epochs)

    @property
    def summary(self) -> str:
        read = f"{counted(len(self.epochs), 'epoch')} in {counted(len(self.steps), 'step')}"
        bad = sum(not each.ok for each in self.epochs)
        if bad:
            return f"{read}, {bad} with other samples than expected"
        return f"{read}, no sample lost, none twice"

    @property
    def details(self) -> tuple[str, ...]:
        return tuple(map(str, self.epochs))


def check_samples(
    run: str,
    count: int | None = None,
    *,
    ids: Iterable[Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> SamplesReport:
    """Compare the samples that a run has seen with those that it should have seen, each of them once.

    Args:
        run: The folder of the steps, or one snapshot.
        count: The number of samples of an epoch, whose ids are 0 to `count - 1`.
        ids: The ids of the samples of an epoch, if they are others. Without `count` and `ids`, the finished epochs are
            compared with each other.
        storage_options: Options of the storage.
    """
    whole = _expected_ids(count, ids)
    found: dict[str, list[tuple[str, _Seen]]] = {}
    steps = _open_steps(run, storage_options)
    for step, snapshot in steps:
        for name, paths in _find_loaders(snapshot).items():
            found.setdefault(name, []).append((step, _Seen.read(snapshot, paths)))
    if not found:
        raise SnapshotError(f"{run}: has no state of a LoaderState of a DataLoader in {counted(len(steps), 'step')}")
    lines = [each for name, seen in sorted(found.items()) for each in _compare(name, seen, whole)]
    return SamplesReport(tuple(step for step, _ in steps), tuple(lines))


def report_on(states: Sequence[Mapping[str, Any]], count: int | None, ids: Iterable[Any] | None) -> SamplesReport:
    """Return the report of the states that the `LoaderState` of each rank has now."""
    replicas = {each["replica"]: each["order"] for each in states}
    lines = _compare("loader", [("now", _Seen.of(list(replicas.values())))], _expected_ids(count, ids))
    return SamplesReport(("now",), tuple(lines))


def _expected_ids(count: int | None, ids: Iterable[Any] | None) -> Sequence[Any] | None:
    if count is not None and ids is not None:
        raise ValueError("pass count or ids, not both")
    if count is not None and count < 0:
        raise ValueError(f"count must not be negative, got {count}")
    return range(count) if count is not None else None if ids is None else list(ids)


def _open_steps(run: str, options: Mapping[str, Any] | None) -> list[tuple[str, Snapshot]]:
    """Return the snapshots of a run with their names, oldest first."""
    given = dict(options or {})
    alone = Snapshot(run, storage_options=given)
    if alone.exists():
        return [(run.rstrip("/").rpartition("/")[2], alone)]
    root = Root(URL.parse(run), given)
    names = [f"step-{step}" for step in on_loop(root.on_line(on_loop(root.folders()).committed))]
    found = []
    for name in names or snapshots_below(root.url, given):
        snapshot = Snapshot(root.url.join(name).reveal(), storage_options=given)
        if not names:  # a checkpoint of Hugging Face's Trainer has its snapshot within
            inner = Snapshot(root.url.join(f"{name}/{FOLDER}").reveal(), storage_options=given)
            snapshot = inner if inner.exists() else snapshot
        found.append((name, snapshot))
    if not found:
        raise SnapshotNotFoundError(f"{root.url}: has no steps")
    return found


def _find_loaders(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return the names of the data loaders in a snapshot -> the path of the state of each rank."""
    found: dict[str, list[str]] = {}
    for path in snapshot.get_manifest():
        if path.endswith(_PLACE):
            state = path.removesuffix(_PLACE)
            found.setdefault(state.partition("/")[2], []).append(state)
    return found


@dataclass
class _Seen:
    """What all replicas of one data loader had seen when a step was taken."""

    past: list[Sum]
    evened: dict[int, int]
    running: Sum | None
    """The samples of the epoch that was going on; None between two epochs."""
    order: Any
    """The order of that epoch, as an array of ids; None if it cannot be repeated here."""

    @classmethod
    def of(cls, states: Sequence[Mapping[str, Any]], order: Any = None) -> _Seen:
        """Add the states of all replicas."""
        pasts = [Sum.decode_all(each["past"]) for each in states]
        past = [sum((each[number] for each in pasts), Sum()) for number in range(min(map(len, pasts)))]
        evened: Counter[int] = Counter()
        for each in states:
            for number, record in each["evened"].items():
                evened[int(number)] += Sum.decode(record).samples
        running = None
        if not any(each["between"] for each in states):
            running = sum((Sum.decode(each[name]) for each in states for name in ("before", "seen")), Sum())
        return cls(past, dict(evened), running, order)

    @classmethod
    def read(cls, snapshot: Snapshot, paths: Sequence[str]) -> _Seen:
        """Read the states of all ranks, and add them."""
        path, replicas = paths[0], dict[int, str]()
        names = ("past", "evened", "between", "before", "seen")
        try:
            for path in paths:  # ranks that read the same data have the same replica
                replicas.setdefault(snapshot.read_object(f"{path}/replica"), f"{path}/order")
            states = []
            for path in replicas.values():
                states.append({name: snapshot.read_object(f"{path}/{name}") for name in names})
            path = next(iter(replicas.values()))
            between = any(each["between"] for each in states)
            return cls.of(states, None if between else _repeat_order(snapshot, path, len(replicas)))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:
            raise SnapshotError(f"{snapshot.path}: {path}: not the state of a data loader: {error!r}") from error

    def is_wrong(self) -> bool:
        """Return True if the running epoch has seen others than the first samples of its order."""
        if self.running is None or self.order is None or self.running.samples > len(self.order):
            return False
        return hash_ids(self.order[: self.running.samples].tolist()) != self.running


def _repeat_order(snapshot: Snapshot, path: str, replicas: int) -> Any:
    """Return the order of an epoch of all replicas, from what its sampler held; None for samplers not known here."""
    shape, start = snapshot.read_object(f"{path}/shape"), snapshot.read_object(f"{path}/start")
    name, length = shape["samplers"][-1], shape["length"]
    if start is None or start["replacement"] or shape["by"] != "samples" or length is None:
        return None
    held = start["iter"]
    if start["lazy"]:
        held = {**start["next"], "samplers": start["next"]["samplers"] or held["samplers"]}
    sampler, generator = held["samplers"][-1], torch.Generator()
    if name == f"{_TORCH}distributed.DistributedSampler":
        if not shape["shuffle"]:
            return np.arange(length)
        generator.manual_seed(shape["seed"] + sampler["epoch"])
    elif replicas > 1 and "prepared" not in shape:
        return None  # each has an order of its own
    elif name == f"{_TORCH}sampler.SequentialSampler":
        return np.arange(length)
    elif name == "accelerate.data_loader.SeedableRandomSampler":
        generator.manual_seed(sampler["epoch"] + sampler["initial_seed"])
    elif name in (f"{_TORCH}sampler.RandomSampler", f"{_TORCHDATA}RandomSampler"):
        if "generator" in sampler:
            write_generator(generator, sampler["generator"])
        else:
            generator.set_state(held["globals"]["torch"])
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()))
    else:
        return None
    return torch.randperm(length, generator=generator).numpy()


def _compare(loader: str, found: Sequence[tuple[str, _Seen]], whole: Sequence[Any] | None) -> list[EpochReport]:
    """Return a line for each epoch of a data loader, by the newest step that has it."""
    _, newest = found[-1]
    expected = None
    if whole is not None:
        expected = hash_range(len(whole)) if isinstance(whole, range) else hash_ids(whole)
    elif len(newest.past) > 1:
        expected = Counter(newest.past).most_common(1)[0][0]
    lines = []
    for number, seen in enumerate(newest.past):
        evened = newest.evened.get(number, 0)
        first = None
        lost: tuple[Any, ...] | None = ()
        twice: tuple[Any, ...] | None = ()
        if expected is not None and seen != expected:
            first = _first_wrong(found, number, expected)
            lost, twice = find_difference(seen, expected, whole) if whole is not None else (None, None)
        count = None if expected is None else expected.samples
        lines.append(EpochReport(loader, number, seen.samples, count, evened, lost, twice, first))
    if newest.running is not None:
        number = len(newest.past)
        first = _first_wrong(found, number, None)
        lines.append(EpochReport(loader, number, newest.running.samples, None, 0, None, None, first))
    return lines


def _first_wrong(found: Sequence[tuple[str, _Seen]], number: int, expected: Sum | None) -> str | None:
    """Return the name of the first step in which an epoch differs: within it from its order, or at its end."""
    for step, seen in found:
        if len(seen.past) == number and seen.is_wrong():
            return step
        if len(seen.past) > number and expected is not None and seen.past[number] != expected:
            return step
    return None
