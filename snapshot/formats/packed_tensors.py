"""Packed tensors of other libraries: members of archives, compressed chunks, and bytes in another order.

An entry's `serializer` names the packing: `torch_save` (a whole archive with one tensor), `zip` (a member of an
archive, with its header), or `array` (only elements). Transforms may precede it: `zstd+torch_save`, `deflate+zip`,
`swapped+conj+zip`, `zstd+array`.

A short range is read whole, and unpacked when it arrives. A long one is located before it is read: its elements are a
range of its file, or of a derived file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import msgspec
import torch

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import zip_archive
from snapshot.formats.decompressors import Decompressor, find_decompressor
from snapshot.formats.derived import Located, Places, ReadPlaces
from snapshot.formats.safe_pickle import evaluate_pickle
from snapshot.formats.to_entries import RebuiltTensor, rebuild_tensor
from snapshot.formats.zip_archive import MoreBytesNeeded, ZipArchive
from snapshot.io.aio import gather_limited, in_thread, inline
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.io.system import PerProcess
from snapshot.manifest.entries import PLAIN, Extra, ObjectEntry, TensorEntry
from snapshot.tensors.buffers import copy_memory
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides, measure_span
from snapshot.text import counted

HEAD = 4096
"""Bytes at both ends of a long archive that nearly always locate its one tensor."""
LONGEST_HEAD = 1 << 20
TRIES = 4
"""Maximum attempts to find an archive's directory, reading more bytes each time."""
MOST_ALIKE = 1024
PIECE = 1024
"""Bytes that are decompressed at once: they can expand a thousandfold or more."""
AT_ONCE = 1 << 20
"""Bytes per read of a range that must be read from its first byte on."""
SCANS = 4
"""Maximum number of archives that are decompressed at once."""
EXPANDED = 1 << 20
"""Maximum bytes of a compressed tensor that is unpacked in memory."""
MORE = 64 << 20
"""Bytes that a compressed archive may have in addition to its tensor's elements."""
ALIGNED = 16
"""No element is longer."""

# The layout of a packed tensor.


class PackedLayout(msgspec.Struct, gc=False, frozen=True):
    """Location of a tensor's storage, and the tensor's layout in it."""

    begin: int
    """Begin of the storage: in the file, or in the decompressed bytes."""
    nbytes: int
    strides: tuple[int, ...]
    offset: int
    swapped: bool = False
    """True if the bytes are in the other order."""
    conj: bool = False
    """True if the tensor is the complex conjugate of the stored values."""
    neg: bool = False
    """True if the tensor is the negative of the stored values."""

    @property
    def plain(self) -> bool:
        """True if the stored bytes are the tensor's."""
        return not (self.swapped or self.conj or self.neg)


def is_streamed(stored: TensorEntry | ObjectEntry) -> bool:
    """Return True if the bytes can be read only in order from the first one."""
    return "+" in stored.serializer and find_decompressor(_transform_of(stored)) is not None


def _transform_of(stored: TensorEntry | ObjectEntry) -> str:
    return stored.serializer.partition("+")[0]


def is_archived(stored: TensorEntry | ObjectEntry) -> bool:
    """Return True if the range is a whole archive."""
    return stored.serializer.endswith("torch_save")


def find_layout(path: str, stored: TensorEntry, head: Any, tail: Any) -> PackedLayout:
    """Return a tensor's layout from the first and last bytes of its range, after decompression.

    `head` begins with the range; for a member, its header is sufficient. Raises MoreBytesNeeded otherwise.
    """
    begin, end = stored.byte_range
    *transforms, kind = stored.serializer.split("+")
    begin = 0 if is_streamed(stored) else begin
    try:
        if kind in ("zip", "array"):
            extra = stored.extra or PLAIN
            strides = extra.strides or contiguous_strides(stored.shape)
            if kind == "array" and not is_streamed(stored):
                at, nbytes = 0, end - begin
            elif is_streamed(stored):
                at, nbytes = 0, measure_span(stored.shape, strides) + (extra.storage_offset or 0)
                nbytes *= ITEMSIZE[stored.dtype]
            else:
                at = zip_archive.find_data_begin(head)
                nbytes = end - begin - at
            turned = [each in transforms for each in ("swapped", "conj", "neg")]
            found = PackedLayout(begin + at, nbytes, strides, extra.storage_offset or 0, *turned)
        elif kind == "torch_save":
            length = len(tail) if "zstd" in transforms else end - begin
            at, nbytes, tensor, swapped = _find_cached(stored, head, tail, length)
            if stored.extra is not None and stored.extra.storage_offset is not None:
                tensor = _cut_flat(tensor, stored.extra.storage_offset, stored.shape)
            if tensor.dtype != stored.dtype or tensor.shape != stored.shape:
                raise ValueError(
                    f"must be {stored.dtype}{list(stored.shape)} by its entry, got {tensor.dtype}{list(tensor.shape)}"
                )
            found = PackedLayout(
                begin + at, nbytes, tensor.strides, tensor.offset, swapped, "conj" in tensor.bits, "neg" in tensor.bits
            )
        else:
            raise UnsupportedFormatError(f"{path}: unknown serializer ({kind})")
    except MoreBytesNeeded:
        raise
    except (ValueError, struct.error) as error:
        raise CorruptSnapshotError(f"{path}: {stored.location}[{begin}:{end}]: {error}") from error
    reach = (found.offset + measure_span(stored.shape, found.strides)) * ITEMSIZE[stored.dtype]
    if math.prod(stored.shape) and reach > found.nbytes:
        raise CorruptSnapshotError(
            f"{path}: the tensor ends at byte {reach:,}, but its storage has {counted(found.nbytes, 'byte')}"
        )
    return found


def _cut_flat(tensor: RebuiltTensor, begin: int, shape: tuple[int, ...]) -> RebuiltTensor:
    """Return a run of a contiguous tensor's elements, as a tensor of some shape."""
    if tensor.strides != contiguous_strides(tensor.shape) or begin + math.prod(shape) > math.prod(tensor.shape):
        raise ValueError(f"must have {math.prod(shape):,} elements from {begin:,} on, got {list(tensor.shape)}")
    return msgspec.structs.replace(tensor, shape=shape, strides=contiguous_strides(shape), offset=tensor.offset + begin)


Alike = dict[tuple[int, str, tuple[int, ...]], tuple[bytes, tuple[int, int, RebuiltTensor, bool]]]
_known_archives: PerProcess[Alike] = PerProcess(dict)
"""Cache of parsed archives by length, dtype and shape: the bytes before the tensor, and the result of parsing them.
Archives of one writer differ in nothing else."""


def _find_cached(stored: TensorEntry, head: Any, tail: Any, length: int) -> tuple[int, int, RebuiltTensor, bool]:
    """Return the result of `_find_in_archive`, cached for many similar archives."""
    key = length, stored.dtype, stored.shape
    known = _known_archives.get().get(key)
    if known is not None and head[: len(known[0])] == known[0]:
        return known[1]
    found = _find_in_archive(head, tail, length)
    if found[0]:
        if len(_known_archives.get()) >= MOST_ALIKE:
            _known_archives.get().clear()
        _known_archives.get()[key] = bytes(head[: found[0]]), found
    return found


def _find_in_archive(head: Any, tail: Any, length: int) -> tuple[int, int, RebuiltTensor, bool]:
    """Return (begin, length, tensor, swapped) of the storage in an archive with one tensor.

    `swapped` is True if the bytes are in the other byte order.
    """
    archive = ZipArchive.parse(tail, length)
    found = archive.named
    if "data.pkl" not in found or any(each.method != zip_archive.STORED for each in archive.members):
        raise ValueError("not a torch archive with one tensor")
    try:
        tensor = read_tensor(archive.read(found["data.pkl"], head))
        order = archive.read(found["byteorder"], head) if "byteorder" in found else b"little"
        storage = found.get(f"data/{tensor.storage}")
        if storage is None:
            if math.prod(tensor.shape):
                raise ValueError("the archive lacks the tensor's bytes")
            return 0, 0, tensor, False
        at, end = archive.locate(storage, head)
    except MoreBytesNeeded as short:
        raise MoreBytesNeeded(short.args[0] + HEAD, len(tail)) from short
    return at, end - at, tensor, order == b"big"


@lru_cache(maxsize=1024)
def read_tensor(content: bytes) -> RebuiltTensor:
    """Return the single tensor in a pickle. Tensors of one shape have equal pickles."""
    found = rebuild_tensor(evaluate_pickle(content, "the tensor"))
    if found is None:
        raise ValueError("the pickle must have one plain tensor")
    return found


def decode_object(path: str, stored: ObjectEntry, data: bytearray, most: int) -> bytearray:
    """Return at most `most` bytes of an object, after decompression."""
    if not is_streamed(stored):
        return data
    made = _decompress(path, stored, memoryview(data), most)
    if len(made) > most:
        raise CorruptSnapshotError(f"{path}: decompressed size is far larger than the stored size")
    return made


def _decompress(path: str, stored: TensorEntry | ObjectEntry, data: memoryview, most: int) -> bytearray:
    """Return the decompressed bytes of a range, or somewhat more than the first `most` of them."""
    decode, made = make_decoder(path, stored), bytearray()
    for at in range(0, len(data), PIECE):
        made += decode(bytes(data[at : at + PIECE]))
        if len(made) > most:
            break
    return made


def make_decoder(path: str, stored: TensorEntry | ObjectEntry) -> Callable[[bytes], bytes]:
    """Return a function that unpacks a range's bytes, given in short pieces from the first one."""
    codec = _transform_of(stored)
    make = find_decompressor(codec)
    if make is None:
        raise UnsupportedFormatError(f"{path}: is packed by {codec!r}, which no installed format unpacks")
    return make(path)


# Short tensors, unpacked in memory.


def is_short(stored: TensorEntry) -> bool:
    """Return True if a range is so short that it is read whole, and unpacked when it arrives."""
    if stored.nbytes > BLOCK:
        return False
    if not is_streamed(stored):
        return True
    extra = stored.extra or PLAIN
    if is_archived(stored):  # it may be a part of the tensor in the archive
        return extra.storage_offset is None and math.prod(stored.shape) * ITEMSIZE[stored.dtype] <= EXPANDED
    span = measure_span(stored.shape, extra.strides or contiguous_strides(stored.shape))
    return ((extra.storage_offset or 0) + span) * ITEMSIZE[stored.dtype] <= EXPANDED


def unpack(name: str, stored: TensorEntry, data: torch.Tensor, flat: torch.Tensor | None) -> torch.Tensor | None:
    """Return a short tensor, from all bytes of its range. If they are those of `flat`, copy them and return None."""
    begin, nbytes = stored.byte_range[0], math.prod(stored.shape) * ITEMSIZE[stored.dtype]
    view = data.numpy().data
    try:
        if not is_streamed(stored):
            layout = find_layout(name, stored, view, view)
        elif is_archived(stored):
            made = _decompress(name, stored, view, nbytes + MORE)
            if len(made) > nbytes + MORE:
                raise _expansion_error(name)
            whole = msgspec.structs.replace(stored, byte_range=(0, len(made)), serializer="torch_save")
            begin, layout = 0, find_layout(name, whole, made, made)
            data = torch.frombuffer(made, dtype=torch.uint8)
        else:
            begin, layout = 0, find_layout(name, stored, b"", b"")
            made = _decompress(name, stored, view, layout.begin + layout.nbytes - 1)
            data = torch.frombuffer(made or bytearray(1), dtype=torch.uint8)[: len(made)]
    except MoreBytesNeeded as short:
        raise CorruptSnapshotError(f"{name}: its archive refers to bytes beyond its end") from short
    at = layout.begin - begin + layout.offset * ITEMSIZE[stored.dtype]
    strides = None if layout.strides == contiguous_strides(stored.shape) else layout.strides
    if strides is not None:
        nbytes = measure_span(stored.shape, strides) * ITEMSIZE[stored.dtype]
    if data.numel() < at + nbytes:
        raise CorruptSnapshotError(f"{name}: its bytes end too early")
    if flat is not None and strides is None and layout.plain:  # most tensors: unpacked where they belong
        copy_memory(flat.data_ptr(), data.data_ptr() + at, nbytes)
        return None
    held = data[at : at + nbytes]
    if not layout.plain or held.storage_offset() % ALIGNED:
        held = held.clone()
    if not layout.plain:
        turn(held, stored.dtype, layout)
    elements = held.view(BY_NAME[stored.dtype])
    return elements.view(stored.shape) if strides is None else elements.as_strided(stored.shape, strides)


def _expansion_error(name: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"{name}: decompresses to far more bytes than it has elements")


def turn(held: torch.Tensor, dtype: str, layout: PackedLayout) -> None:
    """Change whole elements to native byte order, conjugated and negated as saved."""
    whole = ITEMSIZE[dtype]
    size = whole // (2 if BY_NAME[dtype].is_complex else 1)
    if layout.swapped and size > 1:
        held.copy_(held.clone().view(-1, size).flip(1).reshape(-1))
    if layout.neg:  # the last byte has the sign bit
        held.view(-1, size)[:, -1] ^= 0x80
    if layout.conj:
        held.view(-1, whole)[:, -1] ^= 0x80


# Long tensors, located before they are read.


async def locate_tensors(tensors: Sequence[tuple[str, TensorEntry]], known: Places, read: ReadPlaces) -> list[Located]:
    """Return where tensors are, given by names and entries. The layouts that were not `known` yet are added there.

    Only headers and directories are read, but all of a compressed archive, whose directory is at its end.
    """
    keys = [_key_of(stored) for _, stored in tensors]
    new = {key: each for key, each in zip(keys, tensors, strict=True) if key not in known}
    named = [each for each in new.values() if not is_streamed(each[1])]
    streamed = [each for each in new.values() if is_streamed(each[1])]
    layouts = await _find_layouts(named, read)

    async def scan(each: tuple[str, TensorEntry]) -> PackedLayout:
        if is_archived(each[1]):
            return await _scan(*each, read)
        return find_layout(*each, b"", b"")

    if inline():  # the caller reads in one thread, without a loop
        layouts += [await scan(each) for each in streamed]
    else:
        layouts += await gather_limited(streamed, scan, SCANS)
    known |= {_key_of(stored): layout for (_, stored), layout in zip([*named, *streamed], layouts, strict=True)}
    return [_place(name, stored, known[key]) for key, (name, stored) in zip(keys, tensors, strict=True)]


def _key_of(stored: TensorEntry) -> Hashable:
    return stored.location, stored.byte_range, stored.serializer, stored.dtype, stored.shape, repr(stored.extra)


_numbers = count(1)
"""Numbers of the derived files of this process."""


def _place(name: str, stored: TensorEntry, layout: PackedLayout) -> Located:
    """Return where a tensor with a known layout is: in its file, or in a derived one.

    Each derived file is read by one run, which continues where it was. So none is shared, and each has its own name:
    tensors of one range and one name may differ in the transforms of their bytes.
    """
    if layout.plain and not is_streamed(stored):
        return Located(place_elements(stored, layout, stored.location), None)
    begin, end = stored.byte_range
    location = f"{stored.location}[{begin}:{end}] ({name}, {next(_numbers)})"
    return Located(place_elements(stored, layout, location), Stream(name, stored, layout))


def place_elements(stored: TensorEntry, layout: PackedLayout, location: str) -> TensorEntry:
    """Return a tensor with the range of its elements: `raw`, or `array` if they are strided."""
    begin = layout.begin + layout.offset * ITEMSIZE[stored.dtype]
    if layout.strides == contiguous_strides(stored.shape):
        end = begin + math.prod(stored.shape) * ITEMSIZE[stored.dtype]
        return TensorEntry(location, (begin, end), stored.dtype, stored.shape)
    where, extra = (begin, layout.begin + layout.nbytes), Extra(strides=layout.strides)
    return TensorEntry(location, where, stored.dtype, stored.shape, serializer="array", extra=extra)


async def _find_layouts(tensors: Sequence[tuple[str, TensorEntry]], read: ReadPlaces) -> list[PackedLayout]:
    """Return the layouts of tensors from the ends of their ranges, all of which are read at once."""
    kinds = [0 if stored.serializer.endswith("array") else HEAD for _, stored in tensors]
    lengths = [(length, length * is_archived(stored)) for length, (_, stored) in zip(kinds, tensors, strict=True)]
    found = []
    for (name, stored), ends in zip(tensors, await _read_ends(tensors, lengths, read), strict=True):
        for _ in range(TRIES):
            try:
                found.append(find_layout(name, stored, *ends))
                break
            except MoreBytesNeeded as short:
                most = min(stored.nbytes, LONGEST_HEAD)
                more = (min(most, max(HEAD, short.args[0])), min(most, max(HEAD, short.args[1])))
                [ends] = await _read_ends([(name, stored)], [more], read)  # noqa: PLW2901 - the same, longer
        else:
            raise CorruptSnapshotError(f"{name}: not found in {stored.location}[{stored.byte_range[0]}:...]")
    return found


async def _read_ends(
    tensors: Sequence[tuple[str, TensorEntry]], lengths: Sequence[tuple[int, int]], read: ReadPlaces
) -> list[tuple[bytearray, bytearray]]:
    """Return the first and the last bytes of ranges."""
    ranges = []
    for (_, stored), (first, last) in zip(tensors, lengths, strict=True):
        begin, end = stored.byte_range
        ranges += [(stored.location, begin, min(begin + first, end)), (stored.location, max(begin, end - last), end)]
    held = await read(ranges)
    return list(zip(held[::2], held[1::2], strict=True))


async def _scan(name: str, stored: TensorEntry, read: ReadPlaces) -> PackedLayout:
    """Return the layout in a compressed archive, by decompressing all of it. Only its ends are kept."""
    decode, head, tail, length = make_decoder(name, stored), bytearray(), bytearray(), 0
    most = math.prod(stored.shape) * ITEMSIZE[stored.dtype] + MORE
    if stored.extra is not None and stored.extra.storage_offset is not None:
        most += MORE * stored.nbytes  # it is a part of the tensor in the archive

    def look(data: memoryview) -> None:
        nonlocal length
        for at in range(0, len(data), PIECE):
            made = decode(bytes(data[at : at + PIECE]))
            if len(head) < HEAD:
                head.extend(made[: HEAD - len(head)])
            tail.extend(made)
            del tail[:-HEAD]
            length += len(made)
            if length > most:
                raise _expansion_error(name)

    begin, end = stored.byte_range
    for at in range(begin, end, AT_ONCE):
        [piece] = await read([(stored.location, at, min(at + AT_ONCE, end))])
        await in_thread(look, memoryview(piece))
    whole = msgspec.structs.replace(stored, byte_range=(0, length), serializer="torch_save")
    try:
        return find_layout(name, whole, head, head if length <= HEAD else tail)
    except MoreBytesNeeded as short:
        raise CorruptSnapshotError(f"{name}: its archive is not one that torch writes") from short


# Derived files of long tensors whose stored bytes are not their own.


class Stream:
    """The derivation of a tensor's bytes from a range that is read from its first byte on.

    It is decompressed, or its elements are in another byte order, or conjugated. The place where a read ended is kept,
    since the next one usually begins there.
    """

    def __init__(self, name: str, stored: TensorEntry, layout: PackedLayout) -> None:
        self.sources = (stored.location,)
        self._name = name
        self._stored = stored
        self._layout = layout
        self._kept: list[_Cursor] = []
        """The place where the last read ended, unless a read has taken it."""

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Read from the kept place on, or from the first byte."""
        cursor = self._kept.pop() if self._kept else None
        if cursor is None or cursor.position > offset:
            cursor = self._begin()
        left, position, end = list(views), offset, self._stored.byte_range[1]
        async with memory.slot(AT_ONCE) as slot:
            while True:
                position = await in_thread(cursor.pour, left, position)
                if not left:
                    break
                if cursor.at == end:
                    raise CorruptSnapshotError(f"{self._name}: its bytes end too early")
                piece = slot.view[: min(AT_ONCE, end - cursor.at)]
                await storage.read_into(self.sources[0], cursor.at, [piece], token=token)
                cursor.add(piece)
            cursor.keep()
        self._kept[:] = [cursor]
        if not self._layout.plain:
            await in_thread(self._turn, views, offset)

    def forget(self) -> None:
        """Drop the place where the last read ended, with the memory that it needs."""
        self._kept.clear()

    def _begin(self) -> _Cursor:
        if is_streamed(self._stored):
            return _Cursor(make_decoder(self._name, self._stored), self._stored.byte_range[0], 0)
        return _Cursor(bytes, self._layout.begin, self._layout.begin)

    def _turn(self, views: Sequence[memoryview], offset: int) -> None:
        """Change the elements that are whole in each view. Readers ask for whole ones."""
        itemsize = ITEMSIZE[self._stored.dtype]
        for view in views:
            first = (self._layout.begin - offset) % itemsize
            count = max(0, len(view) - first) // itemsize * itemsize
            if count:
                turn(torch.frombuffer(view, dtype=torch.uint8)[first : first + count], self._stored.dtype, self._layout)
            offset += len(view)


class _Cursor:
    """A place in a compressed range: stored bytes up to `at` were read, and those before `position` decompressed."""

    def __init__(self, decode: Decompressor, at: int, position: int) -> None:
        self._decode = decode
        self.at = at
        self.position = position
        """Position of the first byte of `_made`."""
        self._made = memoryview(b"")
        """Decompressed bytes that no read has taken."""
        self._stored: memoryview = memoryview(b"")
        """Stored bytes that are not decompressed yet."""

    def add(self, stored: memoryview) -> None:
        """Add the next stored bytes. Earlier ones are used up."""
        self._stored = stored
        self.at += len(stored)

    def keep(self) -> None:
        """Copy the stored bytes that are left, since their memory is used for others."""
        self._stored = memoryview(bytes(self._stored))

    def pour(self, views: list[memoryview], at: int) -> int:
        """Fill views from position `at` on, and drop the full ones from the list.

        Return the position of the first byte that is missing.
        """
        while views:
            skipped = min(at - self.position, len(self._made))
            taken = min(len(self._made) - skipped, len(views[0]))
            if taken:
                views[0][:taken] = self._made[skipped : skipped + taken]
                views[0] = views[0][taken:]
                if not views[0]:
                    del views[0]
            self._made = self._made[skipped + taken :]
            self.position += skipped + taken
            at += taken
            if views and not self._made:
                if not self._stored:
                    return at
                self._made = memoryview(self._decode(bytes(self._stored[:PIECE])))
                self._stored = self._stored[PIECE:]
        return at
