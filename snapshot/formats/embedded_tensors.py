"""Location of a packed tensor's bytes: after headers, compressed, or in the other byte order.

An entry's `serializer` names the packing: `torch_save` (a whole archive with one tensor), `zip` (a member of an
archive, with its header), or either after transforms: `zstd+torch_save`, `deflate+zip`, `swapped+conj+zip`.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, MissingExtraError, UnsupportedFormatError
from snapshot.formats import safe_pickle, zip_directory
from snapshot.formats.to_entries import RebuiltTensor, rebuild_tensor
from snapshot.manifest.entries import PLAIN, ObjectEntry, TensorEntry
from snapshot.per_process import PerProcess
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.strides import contiguous_strides, measure_span
from snapshot.text import counted

HEAD = 4096
"""Bytes at both ends of a long archive that nearly always locate its one tensor."""
LONGEST_HEAD = 1 << 20
MOST_ALIKE = 1024
PIECE = 1024
"""Bytes that are decompressed at once: they can expand a thousandfold or more."""


class EmbeddedLayout(msgspec.Struct, gc=False, frozen=True):
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


class MoreBytesNeeded(Exception):
    """More bytes are needed: `args` are the lengths of the head and the tail."""


def is_streamed(stored: TensorEntry | ObjectEntry) -> bool:
    """Return True if the bytes can be read only in order from the first one."""
    return stored.serializer.startswith(("zstd+", "deflate+"))


def is_archived(stored: TensorEntry | ObjectEntry) -> bool:
    """Return True if the range is a whole archive."""
    return stored.serializer.endswith("torch_save")


def find_layout(path: str, stored: TensorEntry, head: Any, tail: Any) -> EmbeddedLayout:
    """Return a tensor's layout from the first and last bytes of its range, after decompression.

    `head` begins with the range; for a member, its header is sufficient. Raises MoreBytesNeeded otherwise.
    """
    begin, end = stored.byte_range
    *transforms, kind = stored.serializer.split("+")
    begin = 0 if is_streamed(stored) else begin
    try:
        if kind == "zip":
            extra = stored.extra or PLAIN
            strides = extra.strides or contiguous_strides(stored.shape)
            if "deflate" in transforms:
                at, nbytes = 0, measure_span(stored.shape, strides) + (extra.storage_offset or 0)
                nbytes *= ITEMSIZE[stored.dtype]
            else:
                at = zip_directory.find_data_begin(head)
                nbytes = end - begin - at
            turned = [each in transforms for each in ("swapped", "conj", "neg")]
            found = EmbeddedLayout(begin + at, nbytes, strides, extra.storage_offset or 0, *turned)
        elif kind == "torch_save":
            length = len(tail) if "zstd" in transforms else end - begin
            at, nbytes, tensor, swapped = _find_cached(stored, head, tail, length)
            if tensor.dtype != stored.dtype or tensor.shape != stored.shape:
                raise ValueError(
                    f"must be {stored.dtype}{list(stored.shape)} by its entry, got {tensor.dtype}{list(tensor.shape)}"
                )
            found = EmbeddedLayout(
                begin + at, nbytes, tensor.strides, tensor.offset, swapped, "conj" in tensor.bits, "neg" in tensor.bits
            )
        else:
            raise UnsupportedFormatError(f"{path}: unknown serializer ({kind})")
    except (ValueError, struct.error) as error:
        raise CorruptSnapshotError(f"{path}: {stored.location}[{begin}:{end}]: {error}") from error
    reach = (found.offset + measure_span(stored.shape, found.strides)) * ITEMSIZE[stored.dtype]
    if math.prod(stored.shape) and reach > found.nbytes:
        raise CorruptSnapshotError(
            f"{path}: the tensor ends at byte {reach:,}, but its storage has {counted(found.nbytes, 'byte')}"
        )
    return found


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
    begin, stop = zip_directory.find_directory(tail, length)
    if length - begin > len(tail):
        raise MoreBytesNeeded(len(head), length - begin)
    low = len(tail) - (length - begin)
    found = {
        each.name.partition("/")[2]: each for each in zip_directory.read_members(tail[low : low + stop - begin], begin)
    }
    if "data.pkl" not in found or any(each.method != zip_directory.STORED for each in found.values()):
        raise ValueError("not a torch archive with one tensor")
    content = _read_member(head, found["data.pkl"])
    tensor = read_tensor(content)
    order = bytes(_read_member(head, found["byteorder"])) if "byteorder" in found else b"little"
    storage = found.get(f"data/{tensor.storage}")
    if storage is None:
        if math.prod(tensor.shape):
            raise ValueError("the archive lacks the tensor's bytes")
        return 0, 0, tensor, False
    if storage.header + zip_directory.HEADER > len(head):
        raise MoreBytesNeeded(storage.header + HEAD, len(tail))
    at = storage.header + zip_directory.find_data_begin(head[storage.header :])
    if at + storage.size > begin:
        raise ValueError("the tensor's bytes are outside its archive")
    return at, storage.size, tensor, order == b"big"


def _read_member(head: Any, member: zip_directory.ZipMember) -> bytes:
    """Return a short member's bytes, which are in the head."""
    if member.header + zip_directory.HEADER > len(head):
        raise MoreBytesNeeded(member.header + member.size + HEAD, 0)
    at = member.header + zip_directory.find_data_begin(head[member.header :])
    if at + member.size > len(head):
        raise MoreBytesNeeded(at + member.size + HEAD, 0)
    return bytes(head[at : at + member.size])


@lru_cache(maxsize=1024)
def read_tensor(content: bytes) -> RebuiltTensor:
    """Return the single tensor in a pickle. Tensors of one shape have equal pickles."""
    found = rebuild_tensor(safe_pickle.load_pickle(content, "the tensor"))
    if found is None:
        raise ValueError("the pickle must have one plain tensor")
    return found


def decode_object(path: str, stored: ObjectEntry, data: bytearray, most: int) -> bytearray:
    """Return `most` bytes of an object, after decompression."""
    if not is_streamed(stored):
        return data
    decode, made = make_decoder(path, stored), bytearray()
    for at in range(0, len(data), PIECE):
        made += decode(bytes(data[at : at + PIECE]))
        if len(made) > most:
            raise CorruptSnapshotError(f"{path}: decompressed size is far larger than the stored size")
    return made


def make_decoder(path: str, stored: TensorEntry | ObjectEntry) -> Callable[[bytes], bytes]:
    """Return a function that unpacks a range's bytes, given in short pieces from the first one."""
    transform = stored.serializer.partition("+")[0]
    if transform == "deflate":
        return _Deflate(path)
    if transform == "zstd":
        return _Zstd(path)
    raise UnsupportedFormatError(f"{path}: unknown compression {transform!r}")


class _Deflate:
    """Decompressor of a deflated member, including its header."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._head = b""
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        self._begun = False

    def __call__(self, data: bytes) -> bytes:
        try:
            if not self._begun:
                self._head += data
                begin = (
                    zip_directory.find_data_begin(self._head)
                    if len(self._head) >= zip_directory.HEADER
                    else len(self._head) + 1
                )
                if begin > len(self._head):
                    return b""
                self._begun, data = True, self._head[begin:]
            return self._stream.decompress(data)
        except (ValueError, zlib.error) as error:
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error


class _Zstd:
    """Decompressor of consecutive zstd frames."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard  # slow import, and an optional dependency
        except ImportError as error:
            raise MissingExtraError(f"{path}: compressed with zstd; pip install 'snapshot-torch[zstd]'") from error
        self._path = path
        self._module = zstandard
        self._stream: Any = None

    def __call__(self, data: bytes) -> bytes:
        made = b""
        try:
            while data:
                if self._stream is None:
                    self._stream = self._module.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
                made += self._stream.decompress(data)
                data = b""
                if self._stream.eof:
                    data, self._stream = self._stream.unused_data, None
        except self._module.ZstdError as error:
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error
        return made
