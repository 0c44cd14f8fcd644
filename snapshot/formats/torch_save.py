"""Files of torch.save (since torch 1.6): an archive with one pickle, and a member for each storage."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import safe_pickle, zip_directory
from snapshot.formats.foreign import ForeignDocument, make_document
from snapshot.formats.pickle_scan import expect_stored
from snapshot.formats.to_entries import EntryTree, RebuiltTensor, make_container, make_extra
from snapshot.formats.unpickling import INLINE, is_refused, locate_object, make_refused_entry
from snapshot.formats.unread import refuse_zip
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import Container, Extra, TensorEntry
from snapshot.storage import Storage
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.strides import measure_span
from snapshot.text import counted

TAIL = 64 << 10
"""Length of the first read, at the end: it has the whole directory of most files."""
FORMAT = "torch.save"
VALUE = "value"
"""Name of a saved value that is not a container."""


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
    return make_document(
        FORMAT,
        "",
        storage.url,
        token,
        manifest=entries,
        files={name: ForeignFile(size)},
        root=root,
        inline=bytes(inline) or b"\0",
    )


class TorchFile:
    """A file of torch.save whose pickle was read. The bytes of its tensors were not."""

    def __init__(self, archive: _Archive, where: object, content: bytes, length: int, *, swapped: bool) -> None:
        self._archive = archive
        self._where = where
        self._swapped = swapped
        self.content = content
        """The pickle."""
        self.length = length
        """Length that limits are based on: see `expect_stored`."""
        self.value = safe_pickle.load_pickle(content, where, length)
        """The saved value, with stand-ins for tensors and objects."""

    @staticmethod
    async def open(storage: Storage, name: str, size: int, limit: int) -> TorchFile:
        """Open a file, by reading its directory and its pickle."""
        where = storage.url.join(name)
        try:
            archive = await _Archive.open(storage, name, size, limit)
            content, length = await archive.read_member("data.pkl", limit)
            order = (await archive.read_member("byteorder", 16))[0] if "byteorder" in archive.members else b"little"
        except ValueError as error:
            if isinstance(error, CorruptSnapshotError):
                raise
            await _expect_torch(storage, name, size, limit)
            raise CorruptSnapshotError(f"{where}: not a torch archive: {error}") from error
        return TorchFile(archive, where, content, length, swapped=order == b"big")

    def describe_items(
        self, items: Mapping[str, Any], inline: bytearray, *, depth: int = 2, routed: bool = True
    ) -> dict[str, Any]:
        """Return the entries of values in it, by their path components. Bytes of arrays are added to `inline`.

        With `routed`, the components are the values' places in the file.
        """
        tree = EntryTree(
            self._where, lambda path, found: self._archive.make_entry(found, swapped=self._swapped), self.length
        )
        tree.inline = inline
        for component, value in items.items():
            tree.add(f"0/{component}", value, depth)
        for path, entry in tree.entries.items():
            if is_refused(entry):
                locate_object(entry, self._archive.name, path.partition("/")[2] if routed else "")
        return tree.entries


class _Archive:
    """A torch archive, by its directory."""

    def __init__(self, storage: Storage, name: str, begin: int, members: list[zip_directory.ZipMember]) -> None:
        self._storage = storage
        self.name = name
        """Name of the file."""
        self.members = {each.name.partition("/")[2]: each for each in members}
        if len(self.members) < len(members):
            raise ValueError("two members have the same name")
        if "constants.pkl" in self.members:
            raise UnsupportedFormatError(
                f"{storage.url.join(name)}: a TorchScript program, for torch.jit.load only; save its state_dict()"
            )
        if "data.pkl" not in self.members:
            raise ValueError("data.pkl is missing")
        places = sorted([each.header for each in members] + [begin])
        self._ends = dict(pairwise(places))
        """Latest end of each member: the begin of the next one."""

    @staticmethod
    async def open(storage: Storage, name: str, size: int, limit: int) -> _Archive:
        """Open an archive, by reading only its directory."""
        return _Archive(storage, name, *await _read_directory(storage, name, size, limit))

    async def read_member(self, name: str, limit: int) -> tuple[bytes, int]:
        """Return a short member's content, and the length that limits are based on: see `expect_stored`."""
        member = self.members[name]
        if (
            member.method not in (zip_directory.STORED, zip_directory.DEFLATED)
            or max(member.size, member.packed) > limit
        ):
            raise ValueError(f"member {name}: unknown compression, or too long ({counted(member.size, 'byte')})")
        length = expect_stored(member.size, member.packed, f"member {name}")
        end = min(self._ends[member.header], member.header + zip_directory.LONGEST_HEADER + member.packed)
        data = await _read_range(self._storage, self.name, member.header, end)
        at = zip_directory.find_data_begin(data)
        content = data[at : at + member.packed]
        if member.method == zip_directory.DEFLATED:
            content = zip_directory.inflate_member(content, member.size)
        if len(content) != member.size:
            raise ValueError(
                f"member {name} must have {counted(member.size, 'byte')} by the directory, got {len(content):,}"
            )
        if member.crc and zlib.crc32(content) != member.crc:
            raise ValueError(f"member {name} is damaged: wrong checksum")
        return content, length

    def make_entry(self, found: RebuiltTensor, *, swapped: bool) -> Any:
        """Return the entry of a tensor: the member of its storage, and its layout in it."""
        itemsize = ITEMSIZE.get(found.dtype)
        if itemsize is None:
            return make_refused_entry(f"tensor of {found.dtype}")
        member = self.members.get(f"data/{found.storage}")
        if member is None:
            if math.prod(found.shape):
                raise ValueError(f"the storage data/{found.storage[:100]} is missing")
            return TensorEntry(INLINE, (0, 0), found.dtype, found.shape, extra=make_extra(found, view=False))
        reach = (found.offset + measure_span(found.shape, found.strides)) * itemsize
        if math.prod(found.shape) and reach > member.size:
            raise ValueError(f"the tensor ends at byte {reach:,}, but its storage has {counted(member.size, 'byte')}")
        if not math.prod(found.shape):
            return TensorEntry(INLINE, (0, 0), found.dtype, found.shape, extra=make_extra(found, view=False))
        if member.method not in (zip_directory.STORED, zip_directory.DEFLATED):
            raise UnsupportedFormatError(
                f"{self.name}: data/{found.storage[:100]}: unknown compression method {member.method}"
            )
        packed = "deflate+" * (member.method == zip_directory.DEFLATED) + "swapped+" * swapped + found.bits
        place = member.header, self._ends[member.header]
        extra: Extra | None = make_extra(found)
        return TensorEntry(self.name, place, found.dtype, found.shape, serializer=f"{packed}zip", extra=extra)


async def _read_directory(
    storage: Storage, name: str, size: int, limit: int
) -> tuple[int, list[zip_directory.ZipMember]]:
    """Return the begin of an archive's directory, and the members in it."""
    tail = await _read_range(storage, name, max(0, size - TAIL), size)
    begin, end = zip_directory.find_directory(tail, size)
    if end - begin > limit:
        raise ValueError(f"the directory of {counted(end - begin, 'byte')} exceeds the limit of {limit:,}")
    low = size - len(tail)
    directory = tail[begin - low : end - low] if begin >= low else await _read_range(storage, name, begin, end)
    return begin, zip_directory.read_members(directory, begin)


async def _expect_torch(storage: Storage, name: str, size: int, limit: int) -> None:
    """Raise an error that names the format if an archive that cannot be read is of another kind.

    The name of its first member, which torch.save writes, is also in the member itself.
    """
    head = await _read_range(storage, name, 0, min(size, zip_directory.LONGEST_HEADER))
    names = [zip_directory.read_name(head)]
    with suppress(ValueError):
        names += [each.name for each in (await _read_directory(storage, name, size, limit))[1]]
    if not any(each.partition("/")[2] == "data.pkl" for each in names):
        raise refuse_zip(storage.url, name, names)


async def _read_range(storage: Storage, name: str, begin: int, end: int) -> bytes:
    held = bytearray(end - begin)
    await storage.read_into(name, begin, [held])
    return bytes(held)
