"""Validation of entries before a byte is read or a buffer is allocated.

Lengths, ranges and boxes must agree with each other. A hostile or damaged manifest is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.document import FileEntry, ForeignFile
from snapshot.manifest.entries import (
    TENSORS,
    AnyTensor,
    Compound,
    Container,
    FrozensetEntry,
    MappedTensorEntry,
    NDArrayEntry,
    ObjectEntry,
    SetEntry,
    SliceEntry,
    TensorEntry,
    TensorPartsEntry,
    TupleEntry,
)
from snapshot.manifest.rank_view import DEEPEST
from snapshot.manifest.values import Scalar
from snapshot.tensors.digest import SIZE, count_blocks
from snapshot.tensors.geometry import boxes_overlap, is_inside
from snapshot.tensors.memory import ITEMSIZE
from snapshot.text import counted

Files = Mapping[str, FileEntry]

_HASHABLE = (Scalar, TupleEntry, SliceEntry, FrozensetEntry, Compound, *TENSORS, TensorPartsEntry, ObjectEntry)


def check_tree(path: str, entries: Mapping[str, Any]) -> None:
    """Raise unless the entries at and below a path form one tree that matches the containers' children."""
    expected = 1
    for below, entry in entries.items():
        if isinstance(entry, Container):
            entry.check(below)
            expected += entry.width
            if below.count("/") > DEEPEST + 1:
                raise CorruptSnapshotError(f"{path}: nested more than {DEEPEST} deep")
        if not isinstance(entry, _HASHABLE):
            holder = entries.get(above := below.rpartition("/")[0])
            while isinstance(holder, (TupleEntry, SliceEntry)) and above:
                holder = entries.get(above := above.rpartition("/")[0])
            if isinstance(holder, (SetEntry, FrozensetEntry)):
                raise CorruptSnapshotError(f"{above}: a set cannot contain {below}")
    if path not in entries:
        raise CorruptSnapshotError(f"{path}: has no entry of its own")
    if expected != len(entries):
        raise CorruptSnapshotError(
            f"{path}: its containers must have {counted(expected, 'entry', 'entries')}, got {len(entries)}"
        )


def check_tensor(path: str, entry: AnyTensor, files: Files, *, partial: bool = False) -> None:
    """Raise unless all of a tensor can be read from the location of its entry.

    With `partial`, only the parts that the entry has are checked.
    """
    if type(entry) is TensorEntry:
        check_stored(path, entry, files)
        return
    _check_shape(path, entry)
    if isinstance(entry, MappedTensorEntry):
        for part in entry.parts:
            check_tensor(path, part.entry, files, partial=partial)
        return
    pieces = entry.pieces()
    for box, stored in pieces:
        if stored.dtype != entry.dtype or stored.shape != box.sizes or not is_inside(box, entry.shape):
            raise CorruptSnapshotError(
                f"{path}: the part at {list(box.offsets)} does not fit {entry.dtype}{list(entry.shape)}"
            )
        check_stored(path, stored, files)
    if sum(box.numel for box, _ in pieces) != math.prod(entry.shape) and not partial:
        raise CorruptSnapshotError(f"{path}: the parts do not fill {list(entry.shape)}")
    try:
        overlapping = boxes_overlap([box for box, _ in pieces])
    except ValueError as error:
        raise CorruptSnapshotError(f"{path}: {error}") from error
    if overlapping:
        raise CorruptSnapshotError(f"{path}: the parts overlap")
    _check_layout(path, entry)


def check_stored(path: str, entry: TensorEntry, files: Files) -> None:
    """Raise unless one range of a tensor can be read."""
    extra = entry.extra
    packed = entry.serializer != "raw" and isinstance(files.get(entry.location), ForeignFile)
    if not packed and (
        entry.serializer != "raw" or (extra and (extra.strides is not None or extra.storage_offset is not None))
    ):
        raise UnsupportedFormatError(f"{path}: unknown serializer ({entry.serializer})")
    itemsize = ITEMSIZE.get(entry.dtype)
    if itemsize is None:
        raise UnsupportedFormatError(f"{path}: unknown dtype {entry.dtype!r} in this version of torch")
    _check_shape(path, entry)
    begin, end = entry.byte_range
    lengths_differ = end - begin != math.prod(entry.shape) * itemsize and not packed
    if lengths_differ or (entry.shape and min(entry.shape) < 0):
        raise CorruptSnapshotError(
            f"{path}: the size of {entry.dtype}{list(entry.shape)} does not match its range of "
            f"{counted(end - begin, 'byte')}"
        )
    check_range(path, entry, files)
    if extra is not None:
        _check_layout(path, entry)


def _check_shape(path: str, entry: AnyTensor) -> None:
    """Raise for a shape that torch does not support, even if one of its sizes is 0."""
    if math.prod(max(1, size) for size in entry.shape) >= 1 << 60:
        raise CorruptSnapshotError(f"{path}: invalid shape {list(entry.shape)} of {entry.dtype}")


def check_range(path: str, entry: TensorEntry | ObjectEntry, files: Files) -> None:
    """Raise unless an entry's range and its digest table are inside files of this snapshot.

    Both must begin after the file's header.
    """
    begin, end = entry.byte_range
    file = files.get(entry.location)
    if file is None or not 0 <= file.header <= begin <= end <= file.size:
        raise _outside_error(path, entry.location, begin, end)
    count = count_blocks(end - begin)
    if count and entry.digest is not None:
        if entry.blocks is None:
            raise CorruptSnapshotError(f"{path}: the table of digests is missing")
        location, begin, end = entry.blocks
        table = files.get(location)
        if table is None or not 0 <= table.header <= begin <= end <= table.size or end - begin != count * SIZE:
            raise _outside_error(path, location, begin, end)


def _check_layout(path: str, entry: AnyTensor) -> None:
    order = None if entry.extra is None else entry.extra.stride_order
    if order is not None and sorted(order) != list(range(len(entry.shape))):
        raise CorruptSnapshotError(f"{path}: invalid order {order} of {counted(len(entry.shape), 'dimension')}")


def _outside_error(path: str, location: str, begin: int, end: int) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"{path}: the range {begin}-{end} is outside the data of {location[:200]}")


def find_locations(entries: Mapping[str, Any], files: Files) -> set[str]:
    """Return the known files of entries, which are checked before memory is allocated.

    Unknown files are reported later.
    """
    found = set()
    for entry in entries.values():
        if type(entry) is TensorEntry or type(entry) is ObjectEntry:
            found.add(entry.location)
        elif isinstance(entry, TENSORS):
            found |= {stored.location for _, stored in entry.pieces()}
        elif type(entry) is NDArrayEntry:
            found |= {stored.location for _, stored in entry.data.pieces()}
        elif type(entry) is TensorPartsEntry:
            found |= {stored.location for part in entry.parts.values() for _, stored in part.pieces()}
    return found & files.keys()
