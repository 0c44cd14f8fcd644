"""Aliasing checks: whether live tensors can be written in place, and which of them share memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from snapshot.io.session import Session
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest.document import FileEntry
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.paths import encode_component
from snapshot.state.stateful_kinds import Kind
from snapshot.tensors.geometry import boxes_of_range
from snapshot.tensors.memory import BY_NAME, address_of_tensor, view_memory


def find_shared_memory(read_plan: ReadPlan) -> list[str]:
    """Return an error for each pair of stored ranges that would be read into the same live memory."""
    found: list[tuple[str, str]] = []
    requests = [request for request in read_plan.requests if request.live and request.address]
    begins = np.fromiter((request.address for request in requests), np.uint64, len(requests))
    ends = begins + np.fromiter((request.end - request.begin for request in requests), np.uint64, len(requests))
    order = np.argsort(begins, kind="stable")
    reach = np.maximum.accumulate(ends[order]) if requests else ends
    for i in np.flatnonzero(begins[order][1:] < reach[:-1]):
        second = requests[int(order[i + 1])]
        first = next(requests[int(j)] for j in order[: i + 1] if ends[j] > begins[order[i + 1]])
        same = first.address == second.address and first.stored.nbytes == second.stored.nbytes
        if not (same and first.stored.digest is not None and first.stored.digest == second.stored.digest):
            found.append((first.name, second.name))
    left_out = [each for each in read_plan.left_out if each.live]
    targets = [*read_plan.targets, *(each.as_target() for each in left_out)]
    digests = {each.path: each.stored.digest for each in left_out if each.piece == each.box}
    spans = [
        (
            request.address,
            request.end - request.begin + request.address,
            request.name,
            (request.location, request.begin),
            True,
            request.stored.digest if request.end - request.begin == request.stored.nbytes else None,
        )
        for request in (requests if targets else ())
    ]
    for name, target, source in targets:
        if target.device.type == "cpu":
            begin = target.data_ptr()
            steps = sum((n - 1) * stride for n, stride in zip(target.shape, target.stride(), strict=True))
            end = begin + (steps + 1) * target.element_size()
            dense = end - begin == target.nbytes
            spans.append((begin, end, name, source, dense, digests.get(name)))
    reached: tuple[int, int, str, tuple[str, int], bool, str | None] | None = None
    for span in sorted(spans, key=lambda span: span[:5]):
        # two strided tensors may interleave without sharing elements
        close = reached and span[0] < reached[1] and (span[:2] == reached[:2] or reached[4] or span[4])
        alike = reached and span[:2] == reached[:2] and span[5] is not None and span[5] == reached[5]
        own = reached and span[2] == reached[2]  # a mapped tensor is filled in several ways
        if reached and close and span[3] != reached[3] and not alike and not own:
            found.append((reached[2], span[2]))
        reached = span if reached is None or span[1] > reached[1] else reached
    return [
        f"{first} and {second}: share memory in the application, but have separate bytes in the snapshot"
        for first, second in dict.fromkeys(found)
    ]


COMPARED = 1 << 23
"""Elements of two stored tensors that are compared at once."""
FEW = 256
"""Up to this number of live tensors, asking torch about each is faster than reading the process's memory map."""


def find_read_only_memory(read_plan: ReadPlan) -> list[str]:
    """Return an error for each live tensor in read-only memory, such as a file mapped for reading.

    Writing to such memory would kill the process.
    """
    spans = [(request.address, request.name) for request in read_plan.requests if request.live and request.address]
    spans += [(target.data_ptr(), name) for name, target, _ in read_plan.targets if target.device.type == "cpu"]
    if len(spans) <= FEW and all(map(_is_allocated, (read_plan.values.get(name) for _, name in spans))):
        return []
    try:
        with open("/proc/self/maps", "rb") as file:
            maps = file.read().splitlines()
    except OSError:  # not Linux
        return []
    ranges = [line.split(b" ", 2)[0].split(b"-") for line in maps if line.split(b" ", 2)[1][1:2] != b"w"]
    begins = np.array([int(begin, 16) for begin, _ in ranges], np.uint64)
    ends = np.array([int(end, 16) for _, end in ranges], np.uint64)
    addresses = np.array([address for address, _ in spans], np.uint64)
    found = np.searchsorted(begins, addresses, "right").astype(np.int64) - 1
    bad = (found >= 0) & (addresses < ends[found])
    return [
        f"{name}: its memory is read-only, such as a file mapped for reading; copy it first: tensor.clone()"
        for name in dict.fromkeys(spans[int(i)][1] for i in np.flatnonzero(bad))
    ]


def _is_allocated(value: object) -> bool:
    """Return True if torch allocated the tensor's memory, so that it is writable."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.untyped_storage().resizable()  # type: ignore[attr-defined]


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if a tensor can be written in place: strided, with memory, and without overlapping elements."""
    if tensor.layout is not torch.strided or tensor.is_quantized or (tensor.nbytes and not tensor.data_ptr()):
        return False
    if tensor.is_contiguous():
        return True
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def find_other_owner(
    kinds: Mapping[str, Kind], grouped: Mapping[str, Mapping[str, Any]], skipped: set[str]
) -> Callable[[Any], bool]:
    """Return a function that returns True if one of the statefuls restores the memory of a live tensor."""

    @functools.cache
    def addresses() -> set[int]:
        return {
            address_of_tensor(held)
            for key, entries in grouped.items()
            for path, held in kinds[key].live.items()
            if isinstance(held, torch.Tensor) and path in entries and path not in skipped
        }

    return lambda tensor: address_of_tensor(tensor) in addresses()


def find_tied(kind: Kind, names: Iterable[str], present: Iterable[str]) -> dict[str, str]:
    """Return each name whose live tensor is also that of a present name, with the first such name.

    Parameters without memory on this rank, such as empty shards, are the same one if the module says so.
    """
    names = list(names)
    if not names:
        return {}
    model = kind.stateful
    same = model.named_parameters(remove_duplicate=False) if isinstance(model, torch.nn.Module) else ()
    objects = {f"{kind.key}/{encode_component(name)}": id(each) for name, each in same}

    def identities(path: str) -> list[Any]:
        held = kind.live.get(path)
        found: list[Any] = [objects[path]] if path in objects else []
        if isinstance(held, torch.Tensor) and held.layout is torch.strided and not is_lazy(held):
            lazy = held.is_conj(), held.is_neg()
            found.append((address_of_tensor(held), held.dtype, held.shape, held.stride(), lazy))
        return found

    partners: dict[Any, str] = {}
    for path in present:
        for each in identities(path):
            partners.setdefault(each, path)
    known = {path: [partners[each] for each in identities(path) if each in partners] for path in names}
    return {path: found[0] for path, found in known.items() if found and found[0] != path}


class Twin(NamedTuple):
    """Two entries without digests for one live tensor, which can be restored if their bytes are equal."""

    path: str
    entry: AnyTensor
    partner: str
    other: AnyTensor


def compare_twins(session: Session, files: Mapping[str, FileEntry], twins: Iterable[Twin]) -> list[str]:
    """Return an error for each pair of entries with different bytes. The pairs are read part by part."""
    return [
        f"{each.partner} and {each.path}: share memory in the application, but differ in the snapshot; leave one out: "
        f"exclude=[{each.path!r}]"
        for each in twins
        if not _have_equal_bytes(session, files, each)
    ]


def _have_equal_bytes(session: Session, files: Mapping[str, FileEntry], twin: Twin) -> bool:
    count = math.prod(twin.entry.shape)
    for begin in range(0, count, COMPARED):
        for _, box in boxes_of_range(twin.entry.shape, begin, min(begin + COMPARED, count)):
            reads, parts = ReadPlan(files), []
            for path, entry in ((twin.path, twin.entry), (twin.partner, twin.other)):
                parts.append(torch.empty(box.sizes, dtype=BY_NAME[entry.dtype]))
                reads.into_box(path, entry, box, parts[-1])
            reads.execute(session, verify=False)
            one, other = (view_memory(part.data_ptr(), part.nbytes) for part in parts)
            if one != other:
                return False
    return True
