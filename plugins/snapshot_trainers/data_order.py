"""The order of a torch `DataLoader`: its place in an epoch, and how the epoch goes on from there.

The order of an epoch follows from what the samplers hold when it begins. So that is saved, with how much the loop got.
A restore lets the samplers begin the epoch again, leaves out what was seen, and compares the sum of what it left out
with the saved one. So a sampler that cannot begin again in the same way is an error, and no list says which may.

A loader is changed in place: its class becomes a subclass of itself, which tells what is drawn and what the loop gets.
Of a loader that accelerate has prepared, the loader of torch within tells what is drawn, and the outer one what the
loop gets.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot_trainers.ledger import Ledger, Sum, hash_ids, hash_last, pack_ids
from snapshot_trainers.order_state import expect_whole
from snapshot_trainers.prepared import (
    batches_in_round,
    count_own,
    is_dispatched,
    is_plain,
    is_prepared,
    is_shard,
    place_of,
    share,
    skips,
)
from snapshot_trainers.sampler_states import (
    changed_globals,
    globals_kept,
    is_strided,
    order_of_all,
    read_counters,
    read_globals,
    read_samplers,
    walk_samplers,
    without_new_generators,
    write_globals,
    write_samplers,
)

State = Mapping[str, Any]
_ORDER = "_snapshot_order"
_MANY = 64
"""Batches that are counted together: to count each by itself would cost a loop of small ones much more."""
_NOTHING = Sum()


# One epoch


class _Epoch:
    """One pass of a loop over a loader. `each`: the batches that are drawn for one that the loop gets."""

    def __init__(self, number: int, each: int = 1) -> None:
        self.number = number
        self.each = each
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
        self.last: bytes | Sum = b""
        """The ids of the last of them."""
        self.own: int | None = None
        """How many samples this replica has of its own since then. More than those even out the last batch."""
        self.ledger = Ledger()
        """The samples in them."""
        self.before = _NOTHING
        """The samples that this replica counts of those before the ranks divided the epoch."""
        self.divided = _NOTHING
        """The samples of all replicas before that."""
        self.units = 0
        """The batches of all replicas before that."""
        self.batch_size: int | None = None
        """Samples of a batch of all, when the epoch began."""
        self.repeated = _NOTHING
        """The samples that this replica saw once more before that, to even out the last batches."""
        self.flight: deque[Any] = deque()
        """The ids of batches that are drawn, and that the loop has not got yet."""
        self.finished = False

    @classmethod
    def from_state(cls, state: State, each: int) -> _Epoch:
        """Return the epoch that a state is in the middle of."""
        epoch = cls(state["epoch"], each)
        epoch.resumes = True
        epoch.start, epoch.moved = state["start"], state["moved"]
        epoch.batches = epoch.counted = state["batches"]
        epoch.ledger = Ledger(Sum.decode(state["seen"]))
        epoch.before, epoch.divided = Sum.decode(state["before"]), Sum.decode(state["divided"])
        epoch.units, epoch.batch_size = state["units"], state["batch_size"]
        return epoch

    def count(self) -> Sum:
        """Return the sum of the samples in the batches that the loop got."""
        flight = self.flight
        got = [flight.popleft() for _ in range(min((self.batches - self.counted) * self.each, len(flight)))]
        if got:
            self.last = got[-1]
            try:
                self.ledger.add(b"".join(got))  # at once, which is quicker
            except TypeError:  # ids of a batch are no 64-bit numbers
                for each in got:
                    self.ledger.add(each)
        self.counted = self.batches
        return self.ledger.sum

    @property
    def evened(self) -> Sum:
        """The samples that this replica saw once more, since the last batches of an epoch are evened out."""
        seen = self.count()
        more = seen.samples - self.own if self.own is not None else 0
        return self.repeated + hash_last(self.last, more)

    def divide(self, seen: Sum, repeated: Sum) -> None:
        """Divide what is left anew, after samples that all have seen, and those that this replica saw once more."""
        self.before, self.repeated = self.before + self.count(), self.repeated + repeated
        self.divided += seen
        self.batches = self.counted = 0
        self.ledger = Ledger()

    @property
    def total(self) -> Sum:
        """All samples that this replica counts, but those that even out the last batches."""
        return self.before + self.count() - self.evened


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


def _track(loader: Any, order: DataOrder, within: Any) -> None:
    """Let a loader tell what it draws and what the loop gets. `within`: the loader of torch in a prepared one."""

    def index_sampler(self: Any) -> Any:
        return _Indices(_order_held(self), _kind_of(self)._index_sampler.__get__(self))  # noqa: SLF001

    def iterate(self: Any) -> Iterator[Any]:
        return _order_held(self).iterate(lambda: _kind_of(self).__iter__(self))

    def begin(self: Any) -> Iterator[Any]:
        return _order_held(self).begin_within(lambda: _kind_of(self).__iter__(self))

    drawn = {"_index_sampler": property(index_sampler)}
    if within is loader:
        _change_class(loader, order, {**drawn, "__iter__": iterate})
    else:
        _change_class(loader, order, {"__iter__": iterate})
        _change_class(within, order, {**drawn, "__iter__": begin})
        if hasattr(within, "state_dict"):  # accelerate has begun an epoch already, to have its state
            within._iterator, within._initial_iter_for_state_dict = None, False  # noqa: SLF001
    held = getattr(within, "_iterator", None)
    if held is not None:  # workers that persist read from what the loader had when they were started
        held._index_sampler = within._index_sampler  # noqa: SLF001 - nothing else names it


def _kind_of(value: Any) -> Any:
    """Return the class that an object had before it was tracked."""
    return type(value)._snapshot_kind  # noqa: SLF001 - `_change_class` set it


def _order_held(loader: Any) -> DataOrder:
    """Return the order of a loader whose class is tracked."""
    if not is_tracked(loader):
        raise SnapshotError(
            f"a {type(loader).__name__} was made anew from one that a LoaderState tracks, and is not tracked itself; "
            "make the LoaderState of the new one, or leave the loader to the callback of the framework that makes it"
        )
    return loader.__dict__[_ORDER]  # type: ignore[no-any-return]


def _change_class(value: Any, order: DataOrder, methods: Mapping[str, Any]) -> None:
    """Let the class of an object be a subclass of the one that it has, so `isinstance` stays true."""
    kind: Any = type(value)

    def reduce(self: Any, _: Any) -> Any:
        # Copies and pickles have the object's own class, and are not tracked.
        return object.__new__, (kind,), {name: value for name, value in vars(self).items() if name != _ORDER}

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    value.__dict__[_ORDER] = order
    # A prepared loader has `__class__` as a property, and says that it is one of torch.
    made = type(kind.__name__, (kind,), {**names, **methods, "__reduce_ex__": reduce, "_snapshot_kind": kind})
    object.__dict__["__class__"].__set__(value, made)


def _guard(batch_sampler: Any, order: DataOrder) -> None:
    """Let a batch sampler raise if another loader reads it while its own is to go on after a restore."""

    def iterate(self: Any) -> Iterator[Any]:
        if is_tracked(self):
            _order_held(self).expect_own_reader()
        return _kind_of(self).__iter__(self)  # type: ignore[no-any-return]

    _change_class(batch_sampler, order, {"__iter__": iterate})


def is_tracked(loader: Any) -> bool:
    """Return True if a loader has an order already."""
    return _ORDER in getattr(loader, "__dict__", {})


def order_of(loader: Any) -> DataOrder:
    """Return the order of a loader, which is tracked from now on."""
    known: DataOrder | None = loader.__dict__.get(_ORDER)
    return known if known is not None else DataOrder(loader)


class DataOrder:
    """The order of the samples of one `DataLoader`."""

    def __init__(self, loader: Any) -> None:
        self._prepared = is_prepared(loader)
        within: DataLoader[Any] = loader.base_dataloader if self._prepared else loader
        if not getattr(within, "in_order", True):
            raise ValueError(
                "a DataLoader with in_order=False gives batches in the order in which its workers finish, which "
                "nothing can repeat; pass in_order=True"
            )
        inner: Any = within._index_sampler  # noqa: SLF001 - what torch itself draws from
        if self._prepared and skips(loader, inner):
            raise ValueError("the loader must be the prepared one itself, got one that skip_first_batches made of it")
        # The loader holds this: with its workers, it must go when it is released.
        self._prepared_one, self._loader = weakref.ref(loader), weakref.ref(within)
        self._inner, self._kind = inner, type(inner)
        self._shard: Any = inner if is_shard(inner) else None
        self._streams = isinstance(within.dataset, IterableDataset)
        self._dispatched = is_dispatched(loader)
        self.place = place_of(loader, inner) if self._prepared else None
        """The number of this replica and of all, if accelerate shares the batches out."""
        self._round = batches_in_round(loader, inner) if self._prepared else 1
        self._source, self._by_sample = self._find_source(inner)
        self._first = read_counters(self.samplers)
        """The integers that the samplers held when they were made."""
        self._epoch = self._make_epoch(0)
        self._earlier: tuple[_Epoch, int] | None = None
        """The epoch before, and the batches that its loop had got when it ended."""
        self._read_by_others: int | None = None
        """The batches that the loop had got when something else than the loader began to read; None if nothing did."""
        self._past: list[Sum] = []
        self._evened: dict[int, Sum] = {}
        """Numbers of past epochs -> the samples that were seen once more to even out their last batches."""
        self._waiting: State | None = None
        """A state that was loaded, until the next epoch begins from it."""
        self._follows = False
        """True if a state was loaded from the end of an epoch, until the next one begins."""
        self._before: tuple[State, torch.Tensor | None] | None = None
        """The global random numbers and those of the loader before workers were started again."""
        self._reads = False
        self._globals: dict[str, Any] = {}
        _track(loader, self, within)
        if self._prepared and hasattr(inner, "__dict__") and not self._streams:
            _guard(inner, self)

    def _find_source(self, inner: Any) -> tuple[Any, bool]:
        """Return what gives the order of all ranks that accelerate serves, or of this one; True if it gives samples."""
        whole = inner if self._shard is None else inner.batch_sampler
        if is_plain(whole) if self._prepared else type(whole) is BatchSampler:
            return whole.sampler, True
        return whole, self._shard is None and inner is self.loader.sampler

    def _make_epoch(self, number: int) -> _Epoch:
        return _Epoch(number, self._round if self._dispatched else 1)

    @property
    def loader(self) -> Any:
        """The loader of torch."""
        return self._loader()

    @property
    def _outer(self) -> Any:
        """The loader that the application loops over: of accelerate, or that of torch."""
        return self._prepared_one()

    @property
    def _silent(self) -> bool:
        """True on a rank that gets all batches from another one."""
        return self._dispatched and self.place is not None and self.place[0] != 0

    # The loader's side

    def iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch, or go on with the one that was restored. `begin` makes the iterator of the loader."""
        resumed = self._waiting
        if resumed is None:
            self._close_epoch()
            if self._prepared:
                return _Counted(begin(), self._epoch)
            with self._workers_kept():
                return _Counted(begin(), self._epoch)
        self._epoch = epoch = _Epoch.from_state(resumed, self._epoch.each)
        self._earlier, self._read_by_others = None, None
        if resumed["after"] is not None:
            write_samplers(self.samplers, resumed["after"], self._first, everywhere=False)
            self._resumed()
            self._outer.iteration += 1
            return _Counted(iter(()), epoch)
        return _Counted(self._go_on(begin()) if self._prepared else self._resume(begin, epoch), epoch)

    def _resume(self, begin: Callable[[], Iterator[Any]], epoch: _Epoch) -> Iterator[Any]:
        """Return the iterator of torch for the rest of an epoch.

        The epoch has begun before: its start must not draw the numbers of the application again. A generator that the
        samplers share with the loader is set when they begin.
        """
        own = self.loader.generator
        shared = own is None or any(own is getattr(each, "generator", None) for each in self.samplers)
        state = None if own is None or shared else own.get_state()
        with globals_kept():
            inner = begin()
            if self._streams and not self._silent:
                self._drop(inner, epoch.batches * epoch.each)
        if state is not None:
            own.set_state(state)
        return inner

    def _go_on(self, drawn: Iterator[Any]) -> Iterator[Any]:
        """Yield the rest of an epoch from a prepared loader, which begins with the first batch."""
        outer = self._outer
        number, kinds = outer.iteration, getattr(outer, "rng_types", None)
        self._globals = read_globals()
        if kinds is not None:  # it would set the generators of all ranks to those of one, as when an epoch begins
            outer.rng_types = None
        try:
            first = list(islice(drawn, 1))
        finally:
            if kinds is not None:
                outer.rng_types = kinds
        yield from chain(first, drawn)
        outer.iteration = number + 1  # accelerate does not count an epoch of which nothing was left

    def begin_within(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch of the loader of torch in a prepared one."""
        epoch = self._epoch
        if not epoch.resumes:
            with self._workers_kept():
                return begin()
        inner = self._resume(begin, epoch)
        # The batch that comes next was drawn before, too, since a prepared loader reads one ahead.
        first = [] if self._silent else list(islice(inner, 1))
        self._resumed()
        write_globals(self._globals)
        outer = self._outer
        if epoch.divided.samples and outer.remainder >= 0:
            outer.remainder = (len(self.loader.dataset) - epoch.divided.samples) % outer.total_batch_size
        return chain(first, inner)

    @contextmanager
    def _workers_kept(self) -> Iterator[None]:
        """Let workers that persist start without a draw, after a restore: they drew their seed in an earlier epoch."""
        loader = self.loader
        if self._follows and loader.num_workers and loader.persistent_workers:
            self._before = read_globals(), None if loader.generator is None else loader.generator.get_state()
        self._follows = False
        try:
            yield
        finally:
            self._before = None

    def _close_epoch(self) -> None:
        """Note what the last epoch had, and begin another one."""
        last = self._epoch
        self._earlier, self._read_by_others = (last, last.batches), None
        if last.batches or last.finished or last.divided.samples:
            self._past, self._evened = self._with_last(last)
            self._epoch = self._make_epoch(last.number + 1)
        else:
            self._epoch = self._make_epoch(last.number)

    def _with_last(self, last: _Epoch) -> tuple[list[Sum], dict[int, Sum]]:
        """Return the sums of the past epochs, and of this one."""
        evened = last.evened
        more = {len(self._past): evened} if evened.samples else {}
        return [*self._past, last.total], {**self._evened, **more}

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

    def expect_own_reader(self) -> None:
        """Raise if something else than the loader reads its batches between a restore and the next epoch."""
        if self._reads:
            return
        self._read_by_others = self._epoch.batches
        if self._waiting is not None:
            raise SnapshotError(
                "the loader goes on after the batches that were seen by itself, and something else reads from its "
                "batch sampler, such as skip_first_batches; loop over the prepared loader, without it"
            )

    def _begin(self, sampler: Any) -> Iterator[Any]:
        self._reads = True
        try:
            return iter(sampler)
        finally:
            self._reads = False

    def end_epoch(self) -> None:
        """End the epoch here: the loop does not ask for what may be left of it."""
        self._epoch.finished = True

    def draw(self, inner: Any) -> Iterator[Any]:
        """Yield what the loader reads, and note it."""
        if self._before is not None:
            write_globals(self._before[0])
            if self._before[1] is not None:
                self.loader.generator.set_state(self._before[1])
        if self._streams or self._silent:
            return self._begin(inner)
        epoch = self._epoch
        epoch.own = self._count_own(epoch.divided.samples)
        if epoch.resumes:
            return self._note(epoch, lambda: self._begin_again(epoch, inner))
        epoch.batch_size = self._batch_size
        samplers = self.samplers
        at_iter, held = read_globals(), read_samplers(samplers, self._first)
        drawn = self._begin(inner)
        start = {"globals": changed_globals(at_iter, read_globals()), "samplers": held}
        return self._note(epoch, lambda: self._watch_first(epoch, drawn, start))

    def _watch_first(self, epoch: _Epoch, drawn: Iterator[Any], start: dict[str, Any]) -> Iterator[Any]:
        """Return all of an epoch. Note what the samplers hold before the first draw, when most of them begin."""
        samplers = self.samplers
        before, held = read_globals(), read_samplers(samplers, self._first)
        found = list(islice(drawn, 1))
        at_next = {"globals": changed_globals(before, read_globals()), "samplers": held}
        epoch.start = {
            "iter": start,
            "next": at_next if held != start["samplers"] else {**at_next, "samplers": None},
            "lazy": self._is_lazy,
            "replacement": bool(getattr(samplers[-1], "replacement", False)),
        }
        return chain(found, drawn)

    @staticmethod
    def _note(epoch: _Epoch, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield what `begin` returns when the loader reads the first batch, and note it."""
        flight, pack, note = epoch.flight, pack_ids, epoch.flight.append
        for each in begin():
            if len(flight) >= _MANY:
                epoch.count()
            note(pack(each if type(each) is list else _as_ids(each)))
            yield each

    def _begin_again(self, epoch: _Epoch, inner: Any) -> Iterator[Any]:
        """Yield the rest of an epoch, from samplers that begin it again and whose first samples are left out."""
        start, seen, source, shard = epoch.start, epoch.count(), self._source, self._shard
        if start is None:  # no sampler had begun
            self._resumed()
            yield from self._begin(inner)
            return
        size = self._batch_size
        with globals_kept(), without_new_generators(self.samplers, start["iter"]["samplers"]):
            self._set(epoch, start["iter"], start)
            if start["lazy"]:
                self._set(epoch, start["next"], start)
            drawn = self._begin(source)
            if not start["lazy"]:
                self._set(epoch, start["next"], start)
            drawn = chain(list(islice(drawn, 1)), drawn)  # most samplers draw their random numbers now
            if epoch.divided.samples:
                drawn = self._divide(epoch, drawn)
            if shard is None:
                one_by_one = self._by_sample and source is not inner
                count = seen.samples if one_by_one else epoch.batches * epoch.each
                rest = self._leave_out(epoch, drawn, count, seen, one_by_one=one_by_one)
            else:
                if size != epoch.batch_size:
                    self._divide_again(epoch, drawn, seen)
                rest = share(shard, drawn, size, self._kind)
                self._leave_out(epoch, rest, epoch.batches, epoch.count())
        epoch.batch_size = size
        self._resumed()
        if shard is not None or source is inner:
            yield from rest
            return
        while batch := list(islice(rest, inner.batch_size)):
            if len(batch) == inner.batch_size or not inner.drop_last:
                yield batch

    @property
    def _is_lazy(self) -> bool:
        """True if the sampler begins with the first batch, and not when the batch sampler that reads it does."""
        return self._shard is not None or (self._kind is BatchSampler and self._source is not self._inner)

    def _divide_again(self, epoch: _Epoch, drawn: Iterator[Any], seen: Sum) -> None:
        """Leave out what all ranks have seen of an epoch in batches of another size."""
        shard, size = self._shard, epoch.batch_size
        if epoch.batches and size is not None:
            prefix = list(islice(drawn, epoch.batches * size * self._round))
            self._leave_out(epoch, share(shard, iter(prefix), size, self._kind), epoch.batches, seen)
            own = count_own(len(prefix), size, shard)
            epoch.divide(hash_ids(prefix), hash_last(epoch.last, seen.samples - own))
        epoch.own = self._count_own(epoch.divided.samples)

    def _set(self, epoch: _Epoch, part: State, start: State) -> None:
        """Let the samplers hold what they held at one of the two moments at which an epoch begins."""
        saved = part["samplers"] if part["samplers"] is not None else start["iter"]["samplers"]
        write_samplers(self.samplers, saved, self._first, everywhere=epoch.moved)
        write_globals(part["globals"])

    def _leave_out(
        self,
        epoch: _Epoch,
        drawn: Iterator[Any],
        count: int,
        seen: Sum,
        *,
        one_by_one: bool = False,
        ended: bool = False,
    ) -> Iterator[Any]:
        """Draw what was seen, and expect it to be the same. Return the rest.

        `one_by_one`: samples are drawn, and not batches. `ended`: less may be there.
        """
        first = list(islice(drawn, min(count, 1)))
        held = read_globals()
        skipped = [*first, *islice(drawn, max(count - 1, 0))]
        if changed_globals(held, read_globals()):
            raise SnapshotError(
                f"{self._name}: draws from the global random numbers all through an epoch, so its order depends on "
                "what else draws from them; give it a generator of its own"
            )
        found = hash_ids(skipped if one_by_one else [one for each in skipped for one in _as_ids(each)])
        if ended and len(skipped) < count:
            epoch.repeated = seen - found if epoch.before.samples else _NOTHING
        elif len(skipped) != count or found != seen:
            raise SnapshotError(
                f"{self._name}: began the epoch again with {found.samples:,} samples that are not the {seen.samples:,} "
                "which were seen before; its order must follow from its own generators and counters, and from the "
                "global random numbers when the epoch begins"
            )
        if skipped and not ended:
            epoch.last = pack_ids(_as_ids(skipped[-1]))
        return drawn

    def _divide(self, epoch: _Epoch, drawn: Iterator[Any]) -> Iterator[Any]:
        """Return what is left of an epoch that other replicas began: for this replica, or for accelerate to share."""
        sampler, divided = self._source, epoch.divided
        if not isinstance(sampler, DistributedSampler) or self._prepared:
            count = divided.samples if self._by_sample else epoch.units
            return self._leave_out(epoch, drawn, count, divided, one_by_one=self._by_sample, ended=True)
        order = order_of_all(sampler)
        if divided.samples > len(order):
            epoch.repeated = divided - hash_ids(order) if epoch.before.samples else _NOTHING
        elif hash_ids(order[: divided.samples]) != divided:
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

    def _count_own(self, divided: int) -> int | None:
        """Return how many samples this replica reads of its own after those that were divided before."""
        if self._shard is not None and self._by_sample:
            length, size = _length_of(self._source), self._batch_size
            if length is None or size is None or not self._shard.even_batches:
                return None
            return count_own(max(length - divided, 0), size, self._shard)
        sampler = self.sampler
        if sampler is not None and is_strided(sampler) and not sampler.drop_last:
            return len(range(sampler.rank, max(len(sampler.dataset) - divided, 0), sampler.num_replicas))  # type: ignore[arg-type]
        return None

    @property
    def _batch_size(self) -> int | None:
        """Samples of a batch of all ranks that accelerate serves."""
        return self._shard.batch_sampler.batch_size if self._shard is not None and self._by_sample else None

    def _resumed(self) -> None:
        """Forget the state that was restored: the samplers have begun again."""
        self._epoch.resumes = False
        self._waiting = None

    @property
    def samplers(self) -> list[Any]:
        """The samplers of the loader, from that which it reads on. A share of accelerate is none of them."""
        return walk_samplers(self._inner if self._shard is None else self._shard.batch_sampler)

    @property
    def _name(self) -> str:
        """The classes of the samplers, for messages."""
        return "/".join(type(each).__name__ for each in self.samplers)

    @property
    def sampler(self) -> DistributedSampler[Any] | None:
        """The sampler that divides the samples between replicas."""
        if self._prepared:
            return None
        return next((each for each in self.samplers if isinstance(each, DistributedSampler)), None)

    # The state

    @property
    def batches(self) -> int:
        """The batches that the loop got in this epoch, since the ranks divided it."""
        return self._epoch.batches if self._waiting is None else int(self._waiting["batches"])

    def count_left(self) -> int | None:
        """Return how many batches a prepared loader has in the epoch that comes next; None if that is not known."""
        waiting, outer, shard, size = self._waiting, self._outer, self._shard, self._batch_size
        if self._streams:
            return None
        if waiting is None:
            return len(outer)
        divided, batches = Sum.decode(waiting["divided"]).samples, waiting["batches"]
        whole_batches = shard is not None or self._dispatched or not self._by_sample
        if not divided and waiting["batch_size"] == size and whole_batches:
            return len(outer) - int(batches)
        if not self._by_sample:
            return self._count_rounds(len(self._source) - waiting["units"], 1) - int(batches)
        length = len(self._source)
        if shard is None:
            divided += Sum.decode(waiting["seen"]).samples
            batches = 0
        elif batches and waiting["batch_size"] != size:
            divided += batches * waiting["batch_size"] * waiting["round"]
            batches = 0
        return self._count_rounds(length - divided, self._inner.batch_size) - int(batches)

    def _count_rounds(self, left: int, size: int) -> int:
        """Return how many batches this rank gets of what is left, in samples or in batches (`size` is 1)."""
        whole, left = size * self._round, max(left, 0)
        if self._inner.drop_last:
            return left // whole
        if self._shard is not None and not self._shard.even_batches:
            own = whole // self._shard.num_processes
            return left // whole + int(left % whole > self._shard.process_index * own)
        return -(-left // whole)

    @property
    def epochs(self) -> list[Sum]:
        """The samples of each epoch that has begun, but those that evened out its last batches."""
        return [*self._past, self._epoch.total]

    @property
    def evened(self) -> list[Sum]:
        """The samples of each epoch that were seen once more, since its last batches were evened out."""
        return [*(self._evened.get(number, _NOTHING) for number in range(len(self._past))), self._epoch.evened]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch."""
        if self._waiting is not None:
            return dict(self._waiting)
        epoch = self._epoch
        self._expect_known(epoch)
        between = epoch.finished or (epoch.start is None and not epoch.batches)
        past, evened = self._with_last(epoch) if epoch.finished else (self._past, self._evened)
        return {
            "shape": self._shape(),
            "epoch": epoch.number + epoch.finished,
            "between": between,
            "batches": 0 if between else epoch.batches,
            "seen": (_NOTHING if between else epoch.count()).encode(),
            "before": (_NOTHING if between else epoch.before).encode(),
            "divided": (_NOTHING if between else epoch.divided).encode(),
            "past": b"".join(each.encode() for each in past),
            "evened": {str(number): each.encode() for number, each in evened.items()},
            "units": 0 if between else epoch.units,
            "round": self._round,
            "batch_size": epoch.batch_size,
            "iteration": self._outer.iteration if self._prepared else None,
            "start": None if between else epoch.start,
            "after": read_samplers(self.samplers, self._first) if self._has_nothing_left(epoch) else None,
            "now": read_samplers(self.samplers, self._first) if between else None,
            "moved": epoch.moved and not between,
        }

    def _has_nothing_left(self, epoch: _Epoch) -> bool:
        """Return True in the last batch of a loader that accelerate dispatches, which cannot run an empty epoch."""
        return self._dispatched and bool(self._outer.end_of_dataloader) and epoch.batches > 0 and not epoch.finished

    def _expect_known(self, epoch: _Epoch) -> None:
        """Raise if the place is not known."""
        reason = None
        if epoch.batches and epoch.start is None and not (self._streams or self._silent):
            reason = "its iterator was made before the LoaderState: make it after the loader, and before any loop"
        elif self._read_by_others == epoch.batches:
            reason = (
                "its batches were read by something else than the loader, such as skip_first_batches: loop over the "
                "loader itself, or save when the next epoch has begun"
            )
        elif self._earlier is not None and self._earlier[0].batches != self._earlier[1]:
            reason = "two loops read it at once: use a second loader for the inner loop"
        if reason is not None:
            raise SnapshotError(f"the place of the loader is not known, since {reason}")

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
        if self._prepared:
            shape["prepared"] = "and dispatched" if self._dispatched else "by accelerate"
        if sampler is not None:
            shape |= {"shuffle": bool(sampler.shuffle), "seed": sampler.seed}
        return shape

    def expect_same(self, state: State) -> None:
        """Raise unless a state fits this loader."""
        expect_whole(state)
        now, saved = self._shape(), state["shape"]
        names = [*now, *(name for name in saved if name not in now)]
        changed = [
            f"{each} was {saved.get(each)}, now {now.get(each)}" for each in names if now.get(each) != saved.get(each)
        ]
        for held in (state["now"], state["after"], state["start"] and state["start"]["iter"]["samplers"]):
            if held is not None and len(held) != len(self.samplers):
                changed.append(f"samplers were {len(held)}, now {len(self.samplers)}")
        if state["batches"] and state["start"] is None and not (self._streams or self._dispatched):
            changed.append("the start of the epoch is not there")
        if state["between"] != (state["now"] is not None):
            changed.append("it is between two epochs and within one")
        if changed:
            raise ValueError(
                f"the loader has another order than the one that was saved: {'; '.join(changed)}; restore with what "
                "it had, or exclude the loader to begin a new epoch"
            )

    def load_state_dict(self, state: State) -> None:
        """Go on from a state when the next epoch begins."""
        self.expect_same(state)
        self._past = Sum.decode_all(state["past"])
        self._evened = {int(number): Sum.decode(each) for number, each in state["evened"].items()}
        self._epoch = self._make_epoch(state["epoch"])
        self._earlier, self._read_by_others = None, None
        if self._prepared:
            self._outer.iteration = state["iteration"]
        self._waiting = None if state["between"] else dict(state)
        self._follows = bool(state["between"] and state["epoch"])
        if state["now"] is not None:
            write_samplers(self.samplers, state["now"], self._first, everywhere=state["moved"])

    def reshard(self, states: Sequence[State], replica: int, replicas: int) -> dict[str, Any]:
        """Return the state of one of other replicas than those that saved these states."""
        first = states[0]
        for each in states:
            self.expect_same(each)
        places = sorted({(each["epoch"], each["batches"]) for each in states})
        if len(places) > 1:
            told = " and ".join(f"batch {batches} of epoch {epoch}" for epoch, batches in places[:3])
            raise ValueError(f"the replicas must be at the same batch, got {told}; save when all are at the same step")
        pasts = [Sum.decode_all(each["past"]) for each in states]
        if len(set(map(len, pasts))) > 1:
            raise ValueError("the replicas must have had the same number of epochs")
        merged = [sum(parts, _NOTHING) for parts in zip(*pasts, strict=True)]
        mine = replica == 0  # what all have seen is counted once
        evened = {
            number: sum((Sum.decode(each["evened"][number]) for each in states if number in each["evened"]), _NOTHING)
            for number in sorted({number for each in states for number in each["evened"]})
        }
        made = {
            **first,
            "moved": True,
            "past": b"".join((each if mine else _NOTHING).encode() for each in merged),
            "evened": {number: each.encode() for number, each in evened.items()} if mine else {},
        }
        if first["between"]:
            return made
        if self._dispatched:
            raise ValueError(
                f"the batches of {len(states)} ranks that accelerate dispatches cannot go on with {replicas}; restore "
                "with as many ranks, or prepare the loader with dispatch_batches=False"
            )
        shared = self._prepared or (isinstance(self._source, DistributedSampler) and is_strided(self._source))
        if self._streams or not shared:
            raise ValueError(
                f"{self._name}: each of {len(states)} replicas has an order of its own, which {replicas} cannot go on "
                "with; use a map-style dataset with a DistributedSampler, or restore with as many replicas, or exclude "
                "the loader to begin a new epoch"
                if not self._streams
                else f"an iterable dataset cannot be divided between {replicas} replicas instead of {len(states)}: use "
                "a StatefulDataLoader, and give the dataset a method reshard_state_dict(states, rank, world), or "
                f"restore with {len(states)}, or exclude the loader to begin a new epoch"
            )
        seen = sum((Sum.decode(each["seen"]) for each in states), _NOTHING)
        before = sum((Sum.decode(each["before"]) for each in states), _NOTHING)
        made["divided"] = (Sum.decode(first["divided"]) + seen).encode()
        made["before"] = (before + seen if mine else _NOTHING).encode()
        units = first["units"] + first["batches"] * first["round"]
        return {**made, "seen": _NOTHING.encode(), "batches": 0, "units": units}


def _as_ids(item: Any) -> list[Any]:
    """Return the ids of what a sampler gave: those of a batch, or one."""
    if isinstance(item, list):
        return item
    if isinstance(item, torch.Tensor | np.ndarray) and item.ndim:
        return item.reshape(-1).tolist()
    return [item]


def _length_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
