"""The order of a torch `DataLoader`: its place in an epoch, and how the epoch goes on from there.

The order of an epoch follows from what the samplers hold when it begins. So that is saved, with how much the loop got.
A restore lets the samplers begin the epoch again, leaves out what was seen, and compares the sum of what it left out
with the saved one. So a sampler that cannot begin again in the same way is an error, and no list says which may.

A loader is changed in place: its class becomes a subclass of itself, which tells what is drawn and what the loop gets.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.state.rng import RNGState
from snapshot_trainers.ledger import RECORD, Ledger, Sum, hash_ids, pack_ids

State = Mapping[str, Any]
_ORDER = "_snapshot_order"
_EVERYWHERE = frozenset(("epoch", "seed", "initial_seed"))
"""Attributes of samplers that are the same on all ranks, with whatever number of them."""
_SETTINGS = frozenset(("batch_size", "num_replicas", "num_samples", "rank", "total_size"))
"""Attributes of samplers that the application gives, and that a restore leaves as they are."""
_MANY = 64
"""Batches that are counted together: to count each by itself would cost a loop of small ones much more."""
_NOTHING = Sum()


# What samplers hold: the random numbers of the process, their own generators, and their counters.


def _read_globals() -> dict[str, Any]:
    """Return the state of the global generators on the host, as an `RNGState` has it.

    Samplers draw from no others, and to ask every accelerator for its state would take its context.
    """
    version, words, normal = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "normal": normal},
    }


def _write_globals(held: State) -> None:
    """Set the state of some of the global generators."""
    RNGState().load_state_dict(dict(held))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _changed(before: State, after: State) -> dict[str, Any]:
    """Return those states of the global generators that something has drawn from since."""
    return {name: state for name, state in before.items() if not _is_equal(after[name], state)}


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if two states of a generator are equal: dicts, with arrays or tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(each, other[name]) for name, each in one.items())
    return bool(np.array_equal(one, other))


@contextmanager
def _globals_kept() -> Iterator[None]:
    """Put the global generators back at the end: the application goes on with the numbers it would have drawn."""
    held = _read_globals()
    try:
        yield
    finally:
        _write_globals(held)


def _read_generator(value: Any) -> Any:
    """Return the state of a generator as plain values; None for any other object."""
    if isinstance(value, torch.Generator):
        return {"torch": value.get_state().numpy().tobytes()} if value.device.type == "cpu" else None
    if isinstance(value, random.Random):
        version, numbers, kept = value.getstate()
        return {"python": [version, np.array(numbers, dtype=np.uint32).tobytes(), kept]}
    if isinstance(value, np.random.Generator):
        return {"numpy": copy.deepcopy(value.bit_generator.state)}
    if isinstance(value, np.random.RandomState):
        return {"numpy": copy.deepcopy(value.get_state(legacy=False))}
    return None


def _write_generator(value: Any, state: State) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(_as_tensor(state["torch"]))
    elif isinstance(value, random.Random):
        version, numbers, kept = state["python"]
        value.setstate((version, tuple(np.frombuffer(numbers, dtype=np.uint32).tolist()), kept))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state["numpy"]
    else:
        value.set_state(state["numpy"])


def walk_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and those that it draws from."""
    found: list[Any] = []
    left = [sampler]
    while left:
        each = left.pop(0)
        if each is None or any(each is known for known in found) or not hasattr(each, "__iter__"):
            continue
        found.append(each)
        left += [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
        if isinstance(each, DistributedSampler):
            left.append(getattr(each.dataset, "_sampler", None))  # Lightning's wrapper divides what a sampler gave
    return found


def _read_samplers(samplers: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the counters and generators of each sampler."""
    found = []
    for each in samplers:
        held: dict[str, Any] = {}
        for name, value in getattr(each, "__dict__", {}).items():
            if type(value) is int:
                held[name] = value
            elif (state := _read_generator(value)) is not None:
                held[name] = state
        found.append(held)
    return found


def _write_samplers(samplers: Sequence[Any], saved: Sequence[State], *, everywhere: bool) -> None:
    """Set the counters and generators of samplers. With `everywhere`, only what is the same on all ranks."""
    for each, held in zip(samplers, saved, strict=True):
        for name, state in held.items():
            value = getattr(each, name, None)
            if isinstance(state, Mapping):
                if value is not None:
                    _write_generator(value, state)
            elif value != state and (name in _EVERYWHERE or not (everywhere or name in _SETTINGS)):
                setattr(each, name, state)


# One epoch


class _Epoch:
    """One pass of a loop over a loader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.resumes = False
        """True if the samplers must begin again, and leave out what was seen."""
        self.start: dict[str, Any] | None = None
        """What the samplers held when it began; None before they did."""
        self.moved = False
        """True if other ranks began it."""
        self.batches = 0
        """Batches that the loop got since the ranks divided the epoch."""
        self.counted = 0
        """How many of them are in the ledger."""
        self.ledger = Ledger()
        """The samples in them."""
        self.before = _NOTHING
        """The samples that this replica counts of those before the ranks divided the epoch."""
        self.divided = _NOTHING
        """The samples of all replicas before that."""
        self.flight: deque[Any] = deque()
        """The ids of batches that are drawn, and that the loop has not got yet."""
        self.finished = False

    @classmethod
    def from_state(cls, state: State) -> _Epoch:
        """Return the epoch that a state is in the middle of."""
        epoch = cls(state["epoch"])
        epoch.resumes = True
        epoch.start, epoch.moved = state["start"], state["moved"]
        epoch.batches = epoch.counted = state["batches"]
        epoch.ledger = Ledger(Sum.decode(state["seen"]))
        epoch.before, epoch.divided = Sum.decode(state["before"]), Sum.decode(state["divided"])
        return epoch

    def count(self) -> Sum:
        """Return the sum of the samples in the batches that the loop got."""
        flight = self.flight
        for _ in range(min(self.batches - self.counted, len(flight))):
            self.ledger.add(flight.popleft())
        self.counted = self.batches
        return self.ledger.sum

    @property
    def total(self) -> Sum:
        """All samples that this replica counts."""
        return self.before + self.count()


class _Counted:
    """The iterator that a loop gets: it counts what the loop gets, and not what was fetched ahead."""

    def __init__(self, inner: Iterator[Any], epoch: _Epoch) -> None:
        self._inner = inner
        self._epoch = epoch
        self._draw = inner.__next__

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        try:
            batch = self._draw()
        except StopIteration:
            self._epoch.finished = True
            raise
        self._epoch.batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Indices:
    """What a loader draws its batches from: its own sampler or batch sampler, which tells what is drawn."""

    def __init__(self, order: DataOrder, inner: Any) -> None:
        self._order = order
        self._inner = inner

    def __iter__(self) -> Iterator[Any]:
        return self._order.draw(self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _track(loader: Any, order: DataOrder) -> None:
    """Let a loader tell what it draws and what the loop gets."""
    loader.__dict__[_ORDER] = order
    loader.__class__ = _make_tracked(type(loader))
    held = getattr(loader, "_iterator", None)
    if held is not None:  # workers that persist read from what the loader had when they were started
        held._index_sampler = loader._index_sampler  # noqa: SLF001 - nothing else names it


def _make_tracked(kind: Any) -> Any:
    """Return the class of a tracked loader: a subclass of the one that it has, so `isinstance` stays true."""

    def held_by(loader: Any) -> DataOrder:
        if not is_tracked(loader):
            raise SnapshotError(
                f"a {kind.__name__} was made anew from one that a LoaderState tracks, and is not tracked itself; make "
                "the LoaderState of the new one, or leave the loader to the callback of the framework that makes it"
            )
        return loader.__dict__[_ORDER]  # type: ignore[no-any-return]

    def index_sampler(self: Any) -> Any:
        return _Indices(held_by(self), super(made, self)._index_sampler)

    def iterate(self: Any) -> Iterator[Any]:
        return held_by(self).iterate(super(made, self).__iter__)

    def reduce(self: Any, _: Any) -> Any:
        # Copies and pickles have the loader's own class, and are not tracked.
        return object.__new__, (kind,), {name: value for name, value in vars(self).items() if name != _ORDER}

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {"_index_sampler": property(index_sampler), "__iter__": iterate, "__reduce_ex__": reduce}
    made: Any = type(kind.__name__, (kind,), {**names, **methods})
    return made


def order_of(loader: Any) -> DataOrder:
    """Return the order of a loader, which is tracked from now on."""
    known: DataOrder | None = loader.__dict__.get(_ORDER)
    return known if known is not None else DataOrder(loader)


def is_tracked(loader: Any) -> bool:
    """Return True if the order of a loader is tracked."""
    return _ORDER in getattr(loader, "__dict__", {})


class DataOrder:
    """The order of the samples of one `DataLoader`."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not getattr(loader, "in_order", True):
            raise ValueError(
                "a DataLoader with in_order=False gives batches in the order in which its workers finish, which "
                "nothing can repeat; pass in_order=True"
            )
        self._loader = weakref.ref(loader)  # the loader holds this: with its workers, it must go when it is released
        self._inner: Any = loader._index_sampler  # noqa: SLF001 - what torch itself draws from
        self._streams = isinstance(loader.dataset, IterableDataset)
        self._epoch = _Epoch(0)
        self._past: list[Sum] = []
        self._waiting: State | None = None
        """A state that was loaded, until the next epoch begins from it."""
        self._follows = False
        """True if a state was loaded from the end of an epoch, until the next one begins."""
        self._before: tuple[State, torch.Tensor | None] | None = None
        """The global random numbers and those of the loader before workers were started again."""
        _track(loader, self)

    @property
    def loader(self) -> Any:
        """The loader."""
        return self._loader()

    # The loader's side

    def iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch, or go on with the one that was restored. `begin` makes the iterator of torch."""
        resumed = self._waiting
        if resumed is None:
            self._close_epoch()
            with self._workers_kept():
                return _Counted(begin(), self._epoch)
        self._epoch = epoch = _Epoch.from_state(resumed)
        # An epoch that is resumed has begun before: its start must not draw the numbers of the application again. A
        # generator that the samplers share with the loader is set when they begin.
        own = self.loader.generator
        shared = own is None or any(own is getattr(each, "generator", None) for each in self.samplers)
        state = None if own is None or shared else own.get_state()
        with _globals_kept():
            inner = begin()
            if self._streams:
                self._drop(inner, epoch.batches)
        if state is not None:
            own.set_state(state)
        return _Counted(inner, epoch)

    @contextmanager
    def _workers_kept(self) -> Iterator[None]:
        """Let workers that persist start without a draw, after a restore: they drew their seed in an earlier epoch."""
        loader = self.loader
        if self._follows and loader.num_workers and loader.persistent_workers:
            self._before = _read_globals(), None if loader.generator is None else loader.generator.get_state()
        self._follows = False
        try:
            yield
        finally:
            self._before = None

    def _close_epoch(self) -> None:
        """Note what the last epoch had, and begin another one."""
        last = self._epoch
        if last.batches or last.finished or last.divided.samples:
            self._past.append(last.total)
            self._epoch = _Epoch(last.number + 1)
        else:
            self._epoch = _Epoch(last.number)

    def _drop(self, inner: Iterator[Any], count: int) -> None:
        """Read what was seen of an iterable dataset, since it has no order that could be made without reading."""
        if count:
            log.warning("the loader reads %d batches again, and drops them: its dataset is iterable", count)
        for number in range(count):
            try:
                next(inner)
            except StopIteration:
                raise SnapshotError(
                    f"the loader's dataset ended after {number} batches, and {count} were seen of it before"
                ) from None
        self._resumed()

    def end_epoch(self) -> None:
        """End the epoch here: the loop does not ask for what may be left of it."""
        self._epoch.finished = True

    def draw(self, inner: Any) -> Iterator[Any]:
        """Yield what the loader reads, and note it."""
        if self._before is not None:
            _write_globals(self._before[0])
            if self._before[1] is not None:
                self.loader.generator.set_state(self._before[1])
        if self._streams:
            return iter(inner)
        epoch = self._epoch
        if epoch.resumes:
            return self._note(epoch, self._begin_again(epoch, inner))
        samplers = self.samplers
        at_iter, held = _read_globals(), _read_samplers(samplers)
        drawn = iter(inner)
        start = {"globals": _changed(at_iter, _read_globals()), "samplers": held}
        return self._note(epoch, self._watch_first(epoch, drawn, start))

    def _watch_first(self, epoch: _Epoch, drawn: Iterator[Any], start: dict[str, Any]) -> Iterator[Any]:
        """Yield all of an epoch. Note what the samplers hold before the first draw, when most of them begin."""
        samplers = self.samplers
        before, held = _read_globals(), _read_samplers(samplers)
        found = list(islice(drawn, 1))
        at_next = {"globals": _changed(before, _read_globals()), "samplers": held}
        epoch.start = {"iter": start, "next": at_next if held != start["samplers"] else {**at_next, "samplers": None}}
        yield from found
        yield from drawn

    @staticmethod
    def _note(epoch: _Epoch, drawn: Iterator[Any]) -> Iterator[Any]:
        flight, pack = epoch.flight, pack_ids
        for each in drawn:
            if len(flight) >= _MANY:
                epoch.count()
            flight.append(pack(each if type(each) is list else _as_ids(each)))
            yield each

    def _begin_again(self, epoch: _Epoch, inner: Any) -> Iterator[Any]:
        """Yield the rest of an epoch, from samplers that begin it again and whose first samples are left out."""
        start, seen, source = epoch.start, epoch.count(), self._source
        if start is None:  # no sampler had begun
            self._resumed()
            yield from inner
            return
        with _globals_kept():
            if source is inner:
                self._set(epoch, start["iter"], start)
                drawn = iter(source)
                self._set(epoch, start["next"], start)
            else:  # a batch sampler of torch begins the sampler below it with its first batch
                self._set(epoch, start["next"], start)
                drawn = self._divide(source, epoch.divided) if epoch.divided.samples else iter(source)
            rest = self._leave_out(drawn, seen.samples if self._by_sample else epoch.batches, seen)
        self._resumed()
        if source is inner:
            yield from rest
            return
        while batch := list(islice(rest, inner.batch_size)):
            if len(batch) == inner.batch_size or not inner.drop_last:
                yield batch

    def _set(self, epoch: _Epoch, part: State, start: State) -> None:
        """Let the samplers hold what they held at one of the two moments at which an epoch begins."""
        saved = part["samplers"] if part["samplers"] is not None else start["iter"]["samplers"]
        _write_samplers(self.samplers, saved, everywhere=epoch.moved)
        _write_globals(part["globals"])

    def _leave_out(self, drawn: Iterator[Any], count: int, seen: Sum) -> Iterator[Any]:
        """Draw what was seen, and expect it to be the same. Return the rest."""
        first = list(islice(drawn, min(count, 1)))
        held = _read_globals()
        skipped = [*first, *islice(drawn, max(count - 1, 0))]
        if _changed(held, _read_globals()):
            raise SnapshotError(
                f"{self._name}: draws from the global random numbers all through an epoch, so its order depends on "
                "what else draws from them; give it a generator of its own"
            )
        found = hash_ids(skipped) if self._by_sample else hash_ids([one for each in skipped for one in _as_ids(each)])
        if len(skipped) != count or found != seen:
            raise SnapshotError(
                f"{self._name}: began the epoch again with {found.samples:,} samples that are not the {seen.samples:,} "
                "which were seen before; its order must follow from its own generators and counters, and from the "
                "global random numbers when the epoch begins"
            )
        return drawn

    def _divide(self, sampler: Any, divided: Sum) -> Iterator[Any]:
        """Return the part of this replica in what is left of an epoch that other replicas began."""
        order = _order_of_all(sampler)
        if divided.samples <= len(order) and hash_ids(order[: divided.samples]) != divided:
            raise SnapshotError(
                f"{self._name}: began the epoch again with other samples than before, so what is left is not known"
            )
        rest, replicas = order[divided.samples :], sampler.num_replicas
        if sampler.drop_last:
            rest = rest[: len(rest) // replicas * replicas]
        elif rest:
            lacking = -len(rest) % replicas
            rest += (order * -(-lacking // len(order)))[:lacking]  # evened out as torch does at the end of an epoch
        return iter(rest[sampler.rank :: replicas])

    def _resumed(self) -> None:
        """Forget the state that was restored: the samplers have begun again."""
        self._epoch.resumes = False
        self._waiting = None

    @property
    def samplers(self) -> list[Any]:
        """The samplers of the loader, from that which it reads on."""
        return walk_samplers(self._inner)

    @property
    def _name(self) -> str:
        """The classes of the samplers, for messages."""
        return "/".join(type(each).__name__ for each in self.samplers)

    @property
    def _by_sample(self) -> bool:
        """True if samples can be left out one by one: the batches are those of torch, or there are none."""
        return type(self._inner) is BatchSampler or self._inner is self.loader.sampler

    @property
    def _source(self) -> Any:
        """The sampler that gives samples one by one, or the batch sampler of another library."""
        return self._inner.sampler if type(self._inner) is BatchSampler else self._inner

    @property
    def sampler(self) -> DistributedSampler[Any] | None:
        """The sampler that divides the samples between replicas."""
        return next((each for each in self.samplers if isinstance(each, DistributedSampler)), None)

    # The state

    @property
    def epochs(self) -> list[Sum]:
        """The samples of each epoch that has begun."""
        return [*self._past, self._epoch.total]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch."""
        if self._waiting is not None:
            return dict(self._waiting)
        epoch = self._epoch
        between = epoch.finished or (epoch.start is None and not epoch.batches)
        past = [*self._past, epoch.total] if epoch.finished else self._past
        return {
            "shape": self._shape(),
            "epoch": epoch.number + epoch.finished,
            "between": between,
            "batches": 0 if between else epoch.batches,
            "seen": (_NOTHING if between else epoch.count()).encode(),
            "before": (_NOTHING if between else epoch.before).encode(),
            "divided": (_NOTHING if between else epoch.divided).encode(),
            "past": b"".join(each.encode() for each in past),
            "start": None if between else epoch.start,
            "now": _read_samplers(self.samplers) if between else None,
            "moved": epoch.moved and not between,
        }

    def _shape(self) -> dict[str, Any]:
        """Return what must be the same for the order to be."""
        loader, sampler = self.loader, self.sampler
        shape: dict[str, Any] = {
            "samplers": [f"{type(each).__module__}.{type(each).__qualname__}" for each in self.samplers],
            "by": "batches of the dataset" if self._streams else "samples" if self._by_sample else "batches",
            "length": None if self._streams else _length_of(loader.dataset),
        }
        if self._streams:
            shape |= {"batch size": loader.batch_size, "workers": loader.num_workers}
        if sampler is not None:
            shape |= {"shuffle": bool(sampler.shuffle), "seed": sampler.seed}
        return shape

    def expect_same(self, state: State) -> None:
        """Raise unless a state fits this loader."""
        now, saved = self._shape(), state["shape"]
        changed = [f"{name} was {saved.get(name)}, now {now.get(name)}" for name in now if now[name] != saved.get(name)]
        if changed:
            raise ValueError(
                f"the loader has another order than the one that was saved: {'; '.join(changed)}; restore with what "
                "it had, or exclude the loader to begin a new epoch"
            )

    def load_state_dict(self, state: State) -> None:
        """Go on from a state when the next epoch begins."""
        self.expect_same(state)
        past = state["past"]
        self._past = [Sum.decode(past[at : at + RECORD]) for at in range(0, len(past), RECORD)]
        self._epoch = _Epoch(state["epoch"])
        self._waiting = None if state["between"] else dict(state)
        self._follows = bool(state["between"] and state["epoch"])
        if state["now"] is not None:
            _write_samplers(self.samplers, state["now"], everywhere=state["moved"])

    def reshard(self, states: Sequence[State], replica: int, replicas: int) -> dict[str, Any]:
        """Return the state of one of other replicas than those that saved these states."""
        first = states[0]
        for each in states:
            self.expect_same(each)
        places = sorted({(each["epoch"], each["batches"]) for each in states})
        if len(places) > 1:
            told = " and ".join(f"batch {batches} of epoch {epoch}" for epoch, batches in places[:3])
            raise ValueError(f"the replicas must be at the same batch, got {told}; save when all are at the same step")
        past = [
            Sum.decode(part[at : at + RECORD]) for part in (each["past"] for each in states) for at in _records(part)
        ]
        numbers = len(first["past"]) // RECORD
        if any(len(each["past"]) != len(first["past"]) for each in states):
            raise ValueError("the replicas must have had the same number of epochs")
        merged = [_add(past[number::numbers]) for number in range(numbers)] if numbers else []
        mine = replica == 0  # what all have seen is counted once
        made = {**first, "moved": True, "past": b"".join((each if mine else _NOTHING).encode() for each in merged)}
        if first["between"]:
            return made
        if not (isinstance(self._source, DistributedSampler) and is_strided(self._source)):
            raise ValueError(
                f"{self._name}: each of {len(states)} replicas has an order of its own, which {replicas} cannot go on "
                "with; use a map-style dataset with a DistributedSampler, or restore with as many replicas, or exclude "
                "the loader to begin a new epoch"
                if not self._streams
                else f"an iterable dataset cannot be divided between {replicas} replicas instead of {len(states)}: use "
                "a StatefulDataLoader, and give the dataset a method reshard_state_dict(states, rank, world)"
            )
        seen = _add(Sum.decode(each["seen"]) for each in states)
        before = _add(Sum.decode(each["before"]) for each in states)
        made["divided"] = (Sum.decode(first["divided"]) + seen).encode()
        made["before"] = (before + seen if mine else _NOTHING).encode()
        return {**made, "seen": _NOTHING.encode(), "batches": 0}


def _as_ids(item: Any) -> list[Any]:
    """Return the ids of what a sampler gave: those of a batch, or one."""
    if isinstance(item, list):
        return item
    if isinstance(item, torch.Tensor | np.ndarray) and item.ndim:
        return item.reshape(-1).tolist()
    return [item]


def _records(data: bytes) -> range:
    return range(0, len(data), RECORD)


def _add(sums: Any) -> Sum:
    total = _NOTHING
    for each in sums:
        total += each
    return total


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def is_strided(sampler: DistributedSampler[Any]) -> bool:
    """Return True if replicas take turns in one order, as in the base class. A subclass may have another order."""
    owner = next(each for each in type(sampler).__mro__ if "__iter__" in vars(each))
    return owner is DistributedSampler or owner.__module__.startswith("torchdata.")


def _order_of_all(sampler: Any) -> list[Any]:
    """Return the order of an epoch that replicas divide: that of a single replica."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return list(DistributedSampler.__iter__(alone))
