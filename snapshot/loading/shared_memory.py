"""Live tensors that share memory: whether a restore would write different bytes to the same place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from snapshot.loading.read_plan import LiveTarget, ReadPlan
from snapshot.loading.read_requests import ReadRequest, place_of
from snapshot.tensors.geometry import intersect
from snapshot.tensors.memory import BY_NAME, is_flat

MOST_PAIRS = 1 << 20
"""Pairs of interleaved tensors that are compared in one restore."""
MOST_WORK = 1 << 16
"""Candidates that NumPy examines to decide whether two strided tensors share an element."""
MANY = 32
"""Tensors in one range of memory whose bytes are marked, instead of comparing all pairs."""
MOST_MARKED = 1 << 28
"""Bytes of memory that are marked at once, to find one that two tensors have."""


def find_shared_memory(read_plan: ReadPlan) -> list[str]:
    """Return an error for each live tensor that would get the bytes of another one in some of its elements.

    Two tensors may share all of their memory if the snapshot has the same bytes for both. Tensors that interleave
    without a common element are accepted. A pair that cannot be decided is an error, too.
    """
    names = {each.name for each in read_plan.targets}
    on_host = [each for each in read_plan.requests if each.live and each.address and each.name not in names]
    places: defaultdict[torch.device | None, list[LiveTarget | ReadRequest]] = defaultdict(list)
    places[None] += on_host
    for target in read_plan.targets:
        places[None if target.tensor.is_cpu else target.tensor.device].append(target)
    lines: dict[str, None] = {}
    left = MOST_PAIRS
    for places_of_device in places.values():
        for cluster in _find_clusters(places_of_device):
            left = _compare_all(cluster, lines, left)
    return list(lines)


def _find_clusters(places: Sequence[LiveTarget | ReadRequest]) -> list[list[LiveTarget | ReadRequest]]:
    """Return the groups of places whose ranges of memory overlap, each group in the order of its addresses."""
    count = len(places)
    addresses = (each.address if type(each) is ReadRequest else _begin_of(each) for each in places)
    spans = (each.end - each.begin if type(each) is ReadRequest else _span_of(each) for each in places)
    begins = np.fromiter(addresses, np.uint64, count)
    ends = begins + np.fromiter(spans, np.uint64, count)
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order]) if places else ends
    joined = begins[order][1:] < reach[:-1]
    clusters: list[list[LiveTarget | ReadRequest]] = []
    last = -1
    for i in np.flatnonzero(joined).tolist():
        if i != last:
            clusters.append([places[order[i]]])
        clusters[-1].append(places[order[i + 1]])
        last = i + 1
    return clusters


def _compare_all(cluster: Sequence[LiveTarget | ReadRequest], lines: dict[str, None], left: int) -> int:
    """Add an error for each place that conflicts with an earlier one. Return the number of pairs that may follow."""
    distinct = {view.key: view for view in map(_view_of, reversed(cluster))}  # the first name is kept
    if len(distinct) > MANY and _are_disjoint(list(distinct.values())):
        return left
    known: dict[Hashable, bool | None] = {}
    before: list[_View] = []
    for view in reversed(distinct.values()):
        before = [each for each in before if each.end > view.begin]
        for each in before:
            if each.name == view.name:  # one tensor that is filled in several ways
                continue
            left -= 1
            shared = None if left < 0 else each.dense and view.dense
            if shared is False:
                pair = each.geometry, view.geometry, view.begin - each.begin
                if pair not in known:
                    known[pair] = _share_elements(each, view)
                shared = known[pair]
            if shared is not False:
                lines[_describe(each, view, shared)] = None
                break
        before.append(view)
    return left


def _describe(first: _View, second: _View, shared: bool | None) -> str:
    if shared is None:
        return (
            f"{first.name} and {second.name}: cannot tell if these strided tensors share memory in the application: "
            "that would take too long; copy one of them first: tensor.clone()"
        )
    return f"{first.name} and {second.name}: share memory in the application, but have separate bytes in the snapshot"


class _View(NamedTuple):
    """The memory that one stored tensor is written to. Strides are in bytes."""

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    key: Hashable
    """Equal for places that get the same bytes at the same addresses."""

    @property
    def dense(self) -> bool:
        return not self.shape

    @property
    def geometry(self) -> Hashable:
        return self.shape, self.strides, self.itemsize


def _view_of(place: LiveTarget | ReadRequest) -> _View:
    begin, span = _begin_of(place), _span_of(place)
    if isinstance(place, ReadRequest):
        source = place.stored.digest or (place.location, place.begin)
        return _View(place.name, begin, begin + span, (), (), span, (begin, span, source))
    tensor = place.tensor
    if span == tensor.nbytes:
        return _View(place.name, begin, begin + span, (), (), span, _key_of(place))
    axes = [(n, step * tensor.itemsize) for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]
    shape, strides = zip(*axes, strict=True)
    return _View(place.name, begin, begin + span, shape, strides, tensor.itemsize, _key_of(place))


def _key_of(target: LiveTarget) -> Hashable:
    tensor, begin = target.tensor, target.tensor.data_ptr()
    if target.pieces is None:
        source: list[Any] = [target.source]
    else:
        pieces = [(piece, stored) for piece, stored in target.pieces if intersect(piece, target.box) is not None]
        if len(pieces) == 1 and pieces[0][0] == target.box:
            stored = pieces[0][1]
            if is_flat(tensor) and BY_NAME[stored.dtype] == tensor.dtype:  # the bytes decide, not the shape
                return begin, tensor.nbytes, stored.digest or place_of(stored)
        source = [(piece, stored.dtype, stored.digest or place_of(stored)) for piece, stored in pieces]
    steps = tuple(step for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    return begin, target.box, *source, tensor.dtype, steps, tensor.is_conj(), tensor.is_neg()


def _begin_of(place: LiveTarget | ReadRequest) -> int:
    return place.address if isinstance(place, ReadRequest) else place.tensor.data_ptr()


def _span_of(place: LiveTarget | ReadRequest) -> int:
    if isinstance(place, ReadRequest):
        return place.end - place.begin
    tensor = place.tensor
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.itemsize


class _Memory:
    """The memory of a view, for NumPy, which reads only these numbers."""

    def __init__(self, view: _View) -> None:
        self.__array_interface__ = {
            "data": (view.begin, True),
            "shape": view.shape,
            "strides": view.strides,
            "typestr": f"|V{view.itemsize}",
            "version": 3,
        }


def _share_elements(first: _View, second: _View) -> bool | None:
    """Return True if two views have a byte in common; None if that would take too long, or too much memory."""
    one, other = (np.asarray(_Memory(_splice(each))) for each in (first, second))
    work: Any = MOST_WORK  # NumPy's types know only two constants
    try:
        return np.shares_memory(one, other, max_work=work)
    except (np.exceptions.TooHardError, OverflowError):
        disjoint = _are_disjoint([first, second])
        return None if disjoint is None else not disjoint


def _are_disjoint(views: Sequence[_View]) -> bool | None:
    """Return True if no byte is in two views, by marks of all their bytes; None if these are too many."""
    begin, end = min(view.begin for view in views), max(view.end for view in views)
    if end - begin > MOST_MARKED:
        return None
    marks = np.zeros(end - begin, bool)
    for view in views:
        part = _splice(view)
        place: Any = np.ndarray(part.shape, bool, marks, view.begin - begin, part.strides)
        if place.any():
            return False
        place[...] = True
    return True


def _splice(view: _View) -> _View:
    """Return the view as bytes: NumPy's items are limited in length."""
    return view._replace(shape=(*view.shape, view.itemsize), strides=(*view.strides, 1), itemsize=1)
