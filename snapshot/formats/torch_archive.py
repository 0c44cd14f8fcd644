"""Archives in the format of torch.save, laid out before their bytes are known.

Checksums are known only after the bytes were written. So they follow the bytes, and are in the directory at the end.
"""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec
import torch

from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.strides import contiguous_strides

ALIGNMENT = 64
_LONG = 0xFFFFFFFF
_FLAGS = 0x808
"""Names are UTF-8, and checksums follow the data."""
_HEADER = struct.Struct("<4s5H3L2H")
_ITEM = struct.Struct("<4s6H3L5H2L")
_PADDING = 0x4246

Sum = Callable[[], int]
"""Function that returns the checksum of a member's bytes, once they are known."""


class ArchiveMember(msgspec.Struct):
    """Member to write: its bytes, or their number."""

    name: str
    size: int
    data: bytes | None = None
    header: int = 0
    sum: Sum | None = None


class Frame(msgspec.Struct):
    """Bytes between two storages: their number, and the function that creates them."""

    size: int
    make: Callable[[], bytes]


def _encode_header(name: bytes, size: int, at: int) -> bytes:
    long = size >= _LONG
    extra = struct.pack("<2H2Q", 1, 16, size, size) if long else b""
    begin = at + _HEADER.size + len(name) + len(extra)
    padding = -(begin + 4) % ALIGNMENT
    extra += struct.pack("<2H", _PADDING, padding) + b"Z" * padding
    shown = _LONG if long else 0
    return (
        _HEADER.pack(b"PK\3\4", 45 if long else 0, _FLAGS, 0, 0, 0, 0, shown, shown, len(name), len(extra))
        + name
        + extra
    )


def _encode_descriptor(member: ArchiveMember) -> bytes:
    """Return the bytes after a member's data."""
    assert member.sum is not None
    size = member.size
    return struct.pack("<4sL2Q" if size >= _LONG else "<4s3L", b"PK\7\10", member.sum(), size, size)


def _encode_directory(members: Sequence[ArchiveMember], begin: int) -> bytes:
    made = bytearray()
    for each in members:
        assert each.sum is not None
        extra = b""
        size, header = each.size, each.header
        if size >= _LONG or header >= _LONG:
            long = [each.size] * 2 * (size >= _LONG) + [each.header] * (header >= _LONG)
            extra = struct.pack(f"<2H{len(long)}Q", 1, 8 * len(long), *long)
            size, header = min(size, _LONG), min(header, _LONG)
        name = each.name.encode()
        need = 45 if extra else 0
        made += _ITEM.pack(
            b"PK\1\2", 0, need, _FLAGS, 0, 0, 0, each.sum(), size, size, len(name), len(extra), 0, 0, 0, 0, header
        )
        made += name + extra
    count, length = len(members), len(made)
    if count >= 0xFFFF or begin >= _LONG or length >= _LONG:
        made += struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, length, begin)
        made += struct.pack("<4sLQL", b"PK\6\7", 0, begin + length, 1)
        count, length, begin = min(count, 0xFFFF), min(length, _LONG), min(begin, _LONG)
    return bytes(made) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, length, begin, 0)


def lay_out_archive(members: Sequence[ArchiveMember], crc32: Callable[[bytes], int]) -> tuple[list[Frame | int], int]:
    """Return the frames of an archive in order, and the archive's length.

    Between the frames are the numbers of the members whose bytes are supplied elsewhere.
    """
    found: list[Frame | int] = []
    parts: list[bytes | Callable[[], bytes]] = []
    position = begin = 0

    def close() -> None:
        nonlocal parts, begin
        held = tuple(parts)

        def make() -> bytes:
            return b"".join(each if isinstance(each, bytes) else each() for each in held)

        found.append(Frame(position - begin, make))
        parts = []

    def append(part: bytes | Callable[[], bytes], size: int) -> None:
        nonlocal position
        parts.append(part)
        position += size

    for number, each in enumerate(members):
        each.header = position
        header = _encode_header(each.name.encode(), each.size, position)
        append(header, len(header))
        if each.data is not None:
            crc = crc32(each.data)
            each.sum = partial(int, crc)
            append(each.data, each.size)
        elif each.size:
            close()
            found.append(number)
            position += each.size
            begin = position
        assert each.sum is not None
        append(partial(_encode_descriptor, each), 24 if each.size >= _LONG else 16)
    where = position
    blank = [ArchiveMember(each.name, each.size, header=each.header, sum=int) for each in members]
    append(lambda: _encode_directory(members, where), len(_encode_directory(blank, where)))
    close()
    return found, position


def wrap_storages(name: str, content: bytes, storages: Sequence[ArchiveMember], identity: str) -> list[ArchiveMember]:
    """Return the members of a torch archive, including those of its storages."""
    first = [("data.pkl", content), (".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")]
    last = [("version", b"3\n"), (".data/serialization_id", identity.encode())]
    made = [ArchiveMember(f"{name}/{each}", len(data), data) for each, data in first]
    made += [msgspec.structs.replace(each, name=f"{name}/data/{each.name}") for each in storages]
    return made + [ArchiveMember(f"{name}/{each}", len(data), data) for each, data in last]


class AbsentTensor(msgspec.Struct):
    """A tensor in a pickled state whose bytes follow later, in the member `key`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    requires_grad: bool = False
    is_parameter: bool = False


class _Storage(msgspec.Struct):
    key: str
    dtype: str
    numel: int


class _Pickler(pickle.Pickler):
    """A pickler with the output of torch.save that does not need the tensors."""

    def __init__(self, file: Any, absent: Callable[[torch.Tensor], AbsentTensor | None]) -> None:
        super().__init__(file, protocol=2)
        self._absent = absent
        self.storages: dict[str, bytes] = {}
        """Storages of available tensors: those in objects, or of sparse layouts."""
        self._seen: dict[int, tuple[str, Any]] = {}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            kind, size = _find_storage_type(value.dtype)
            return ("storage", kind, value.key, "cpu", value.numel * (ITEMSIZE[value.dtype] // size))
        if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
            plain = value._untyped_storage if isinstance(value, torch.storage.TypedStorage) else value
            kind = getattr(torch, value._pickle_storage_type()) if plain is not value else torch.UntypedStorage  # type: ignore[union-attr]
            key, _ = self._seen.setdefault(plain.data_ptr() or id(plain), (f"o{len(self._seen)}", value))
            data = torch.empty(0, dtype=torch.uint8).set_(plain)
            self.storages[key] = bytes(data.numpy().tobytes())
            numel = value._size() if plain is not value else plain.nbytes()  # type: ignore[union-attr]
            return ("storage", kind, key, "cpu", numel)
        return None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and (stand := self._absent(value)) is not None:
            value = stand
        if not isinstance(value, AbsentTensor):
            return NotImplemented
        return _reduce_tensor(value)


def _find_storage_type(dtype: str) -> tuple[Any, int]:
    """Return torch's storage class for a dtype, and the size of its elements."""
    known = torch.storage._dtype_to_storage_type_map().get(BY_NAME[dtype])
    return (torch.UntypedStorage, 1) if known is None else (getattr(torch, known), ITEMSIZE[dtype])


def _reduce_tensor(value: AbsentTensor) -> Any:
    if value.is_parameter:
        data = msgspec.structs.replace(value, is_parameter=False, requires_grad=False)
        return torch._utils._rebuild_parameter, (data, value.requires_grad, collections.OrderedDict())
    order = value.order or tuple(range(len(value.shape)))
    steps = contiguous_strides(tuple(value.shape[axis] for axis in order))
    strides = tuple(steps[order.index(axis)] for axis in range(len(order)))
    numel = 1
    for size in value.shape:
        numel *= size
    storage = _Storage(value.key, value.dtype, numel)
    arguments: tuple[Any, ...] = (storage, 0, value.shape, strides, value.requires_grad, collections.OrderedDict())
    if _find_storage_type(value.dtype)[0] is torch.UntypedStorage:
        return torch._utils._rebuild_tensor_v3, (*arguments, BY_NAME[value.dtype])
    return torch._utils._rebuild_tensor_v2, arguments


def pickle_state(
    state: Any, absent: Callable[[torch.Tensor], AbsentTensor | None] = lambda _: None
) -> tuple[bytes, dict[str, bytes]]:
    """Return a state's pickle in the format of torch.save, and the storages of its available tensors.

    `absent` returns the replacement of a tensor, or None if the tensor itself is available.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, absent)
    pickler.dump(state)
    return file.getvalue(), pickler.storages


@lru_cache(maxsize=1024)
def pickle_tensor(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the pickle of one tensor in its own archive. Tensors of one shape have equal pickles."""
    return pickle_state(AbsentTensor("0", dtype, shape))[0]
