"""Files of torch.save: their tensors, read in place, and archives laid out before their bytes are known."""

from __future__ import annotations

import collections
import io
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import torch

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import zip_archive
from snapshot.formats.foreign import ForeignDocument, make_document
from snapshot.formats.mistakes import refuse_zip
from snapshot.formats.pickled_objects import INLINE, is_refused, locate_object
from snapshot.formats.safe_pickle import PickleLimits, evaluate_pickle, expect_stored
from snapshot.formats.to_entries import RebuiltTensor, make_container, make_entries, make_tensor_entry, rebuild_tensor
from snapshot.formats.zip_archive import MoreBytesNeeded, ZipArchive, open_archive, read_range
from snapshot.io.storage import Storage
from snapshot.manifest.containers import Container
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides
from snapshot.text import counted

# Archives in the format of torch.save, laid out before their bytes are known.
#
# Checksums are known only after the bytes were written. So they follow the bytes, and are in the directory at the
# end.

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
    """Return the members of a torch archive, including those of its storages, in the order of the pickle.

    If the archive has a version, torch may compute where a storage is, from the sizes of those that came before it in
    the pickle. So an archive in which storages may be elsewhere has no version.
    """
    version = [(".format_version", b"1")] if _are_computable(storages) else []
    first = [("data.pkl", content), *version, (".storage_alignment", b"64"), ("byteorder", b"little")]
    last = [("version", b"3\n"), (".data/serialization_id", identity.encode())]
    made = [ArchiveMember(f"{name}/{each}", len(data), data) for each, data in first]
    made += [msgspec.structs.replace(each, name=f"{name}/data/{each.name}") for each in storages]
    return made + [ArchiveMember(f"{name}/{each}", len(data), data) for each, data in last]


def _are_computable(storages: Sequence[ArchiveMember]) -> bool:
    """Return True if torch knows the headers of all storages: they are numbered, not empty, and begin below 4 GiB."""
    names = [str(number) for number in range(len(storages))]
    sizes = [each.size for each in storages]
    return [each.name for each in storages] == names and all(sizes) and sum(sizes) + 1024 * len(sizes) < _LONG


class LaterTensor(msgspec.Struct):
    """A stored tensor in a state that is to be pickled."""

    path: str
    entry: Any


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

    def __init__(self, file: Any, absent: Callable[[Any], AbsentTensor | None]) -> None:
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
        if isinstance(value, (torch.Tensor, LaterTensor)) and (stand := self._absent(value)) is not None:
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
    state: Any, absent: Callable[[Any], AbsentTensor | None] = lambda _: None
) -> tuple[bytes, dict[str, bytes]]:
    """Return a state's pickle in the format of torch.save, and the storages of its available tensors.

    `absent` returns the replacement of a tensor or a LaterTensor, or None if the tensor itself is available. It is
    called in the order of the pickle.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, absent)
    pickler.dump(state)
    return file.getvalue(), pickler.storages


# Files of torch.save (since torch 1.6): an archive with one pickle, and a member for each storage.

FORMAT = "torch.save"
VALUE = "value"
"""Name of a saved value that is not a container."""
ONE_RANK = "this file has only the boxes of one rank; read one of them, or open the folder with the files of all ranks"


async def describe_file(storage: Storage, name: str, size: int, limit: int) -> ForeignDocument:
    """Return the checkpoint in a file of torch.save."""
    saved = await TorchFile.open(storage, name, size, limit)
    made = make_container(saved.value)
    inline = bytearray()
    root: Container | None = None
    if made is None:
        entries = saved.describe_items({VALUE: saved.value}, inline, depth=1, routed=False)
    else:
        root = made[0]
        entries = saved.describe_items(dict(zip(root.components(), made[1], strict=True)), inline)
    token = f"{(await storage.stat(name)).token} {size}".encode() + saved.content
    lacks = any(not entry.is_whole() for entry in entries.values())
    document = make_document(
        FORMAT,
        "",
        storage.url,
        token,
        manifest=entries,
        files={name: ForeignFile(size, lacks=ONE_RANK if lacks else "")},
    )
    document.root = root
    document.set_inline(bytes(inline) or b"\0")
    return document


class TorchFile:
    """A file of torch.save whose pickle was read. The bytes of its tensors were not."""

    def __init__(
        self, archive: ZipArchive, where: object, name: str, content: bytes, length: int, *, swapped: bool
    ) -> None:
        self._archive = archive
        self._where = where
        self.name = name
        """Name of the file."""
        self._swapped = swapped
        self.content = content
        """The pickle."""
        self.size = 0
        """Length of the file."""
        self.token = ""
        """Token of the file, if it was looked up."""
        self.length = length
        """Length that limits are based on: see `expect_stored`."""
        self.value = evaluate_pickle(content, where, PickleLimits.of(length))
        """The saved value, with stand-ins for tensors and objects."""

    @staticmethod
    async def open(storage: Storage, name: str, size: int, limit: int) -> TorchFile:
        """Open a file, by reading its directory and its pickle."""
        where = storage.url.join(name)
        try:
            archive = await open_archive(storage, name, size, limit)
            archive.expect_distinct()
            if "constants.pkl" in archive.named:
                raise UnsupportedFormatError(
                    f"{where}: a TorchScript program, for torch.jit.load only; save its state_dict()"
                )
            if "data.pkl" not in archive.named:
                raise ValueError("data.pkl is missing")
            content, length = await _read_member(storage, name, archive, "data.pkl", limit)
            order, _ = await _read_member(storage, name, archive, "byteorder", 16)
        except ValueError as error:
            if isinstance(error, CorruptSnapshotError):
                raise
            await _expect_torch(storage, name, size, limit)
            raise CorruptSnapshotError(f"{where}: not a torch archive: {error}") from error
        made = TorchFile(archive, where, name, content, length, swapped=order == b"big")
        made.size = size
        return made

    def locate(self, node: Any) -> TensorEntry | None:
        """Return the entry of a single tensor among the values; None for another value."""
        found = rebuild_tensor(node)
        entry = None if found is None else self._make_entry("", found)
        return entry if isinstance(entry, TensorEntry) else None

    def sums(self) -> dict[int, tuple[int, int]]:
        """Return the checksum and the size of each member, by the begin of its header."""
        return {each.header: (each.crc, each.size) for each in self._archive.members}

    def describe_items(
        self, items: Mapping[str, Any], inline: bytearray, *, depth: int = 2, routed: bool = True
    ) -> dict[str, Any]:
        """Return the entries of values in it, by their path components. Bytes of arrays are added to `inline`.

        With `routed`, the components are the values' places in the file.
        """
        below = {f"0/{component}": value for component, value in items.items()}
        entries = make_entries(below, self._where, self._make_entry, self.length, inline=inline, depth=depth)
        for path, entry in entries.items():
            if is_refused(entry):
                locate_object(entry, self.name, path.partition("/")[2] if routed else "")
        return entries

    def _make_entry(self, path: str, found: RebuiltTensor) -> Any:
        """Return the entry of a tensor: the member of its storage, and its layout in it."""
        entry = make_tensor_entry(found, self._archive)
        if not isinstance(entry, TensorEntry) or entry.location == INLINE:
            return entry
        member = self._archive.named[f"data/{found.storage}"]
        if member.method not in (zip_archive.STORED, zip_archive.DEFLATED):
            raise UnsupportedFormatError(
                f"{self.name}: {member.name[:100]}: unknown compression method {member.method}"
            )
        packed = "deflate+" * (member.method == zip_archive.DEFLATED) + "swapped+" * self._swapped + found.bits
        entry.location, entry.byte_range = self.name, (member.header, self._archive.ends[member.header])
        entry.serializer = f"{packed}zip"
        return entry


async def _read_member(storage: Storage, file: str, archive: ZipArchive, name: str, limit: int) -> tuple[bytes, int]:
    """Return a short member's content, and the length that limits are based on: see `expect_stored`.

    The content of a missing member is empty.
    """
    member = archive.named.get(name)
    if member is None:
        return b"", 0
    if max(member.size, member.packed) > limit:
        raise ValueError(f"member {name}: too long ({counted(member.size, 'byte')})")
    length = expect_stored(member.size, member.packed, f"member {name}")
    end = min(archive.ends[member.header], member.header + zip_archive.LONGEST_HEADER + member.packed)
    data = await read_range(storage, file, member.header, end)
    try:
        return archive.read(member, data, member.header), length
    except MoreBytesNeeded as error:
        raise ValueError(f"member {name}: another member begins in it") from error


async def _expect_torch(storage: Storage, name: str, size: int, limit: int) -> None:
    """Raise an error that names the format if an archive that cannot be read is of another kind.

    The name of its first member, which torch.save writes, is also in the member itself.
    """
    head = await read_range(storage, name, 0, min(size, zip_archive.LONGEST_HEADER))
    names = [zip_archive.read_name(head)]
    with suppress(ValueError):
        names += [each.name for each in (await open_archive(storage, name, size, limit)).members]
    if not any(each.partition("/")[2] == "data.pkl" for each in names):
        raise refuse_zip(storage.url, name, names)
