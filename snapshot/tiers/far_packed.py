"""Uploads that are compressed on their way: what each host made of its files, and reads of them as if they were not.

The manifest of a near step knows nothing of it. Before a compressed file, its table and a note are put beside it. The
host that commits makes the far manifest from the notes, and removes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.formats.foreign import ReadOnlyStorage
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.session import Session
from snapshot.io.storage import Buffer, FileStat, Storage
from snapshot.loading.open import UnpackingStorage
from snapshot.manifest.document import METADATA, FileEntry, PackedFile, decode_head
from snapshot.save.compression import PackedResult, Packing
from snapshot.tensors.digest import digest_range
from snapshot.tensors.split_zstd import CODEC, PAGE, kind_of
from snapshot.text import size_text
from snapshot.transform.sources import CopiedFile

SHORTEST = 64 << 10
"""Minimum bytes of a file that is compressed."""
MEMORY = 64 << 20


class Note(msgspec.Struct, forbid_unknown_fields=True):
    """The stored form of a file that a host compressed."""

    size: int
    table: int
    """Bytes of its table."""
    table_digest: str
    digest: str

    @classmethod
    def of(cls, packed: PackedFile) -> Note:
        """Return the note about a file of a far manifest."""
        _, begin, end = packed.index
        return cls(packed.size, end - begin, packed.index_digest, packed.digest)

    def describe(self, location: str) -> PackedFile:
        """Return the description for the far manifest."""
        return PackedFile(CODEC, self.size, (table_of(location), 0, self.table), self.table_digest, self.digest)


def table_of(location: str) -> str:
    """Return the file with the table of a compressed file. No `.bin` file of a take has the number of another file."""
    return location.removesuffix(".safetensors") + ".bin"


def note_of(location: str) -> str:
    """Return the file that tells the committing host about a compressed file."""
    return location.removesuffix(".safetensors") + ".json"


class PackedUploads:
    """Compresses the files of one step on their way to the far root."""

    def __init__(self, near: Session, target: Session) -> None:
        self._near = near
        self._target = target
        self._memory: MemoryBudget | None = None
        self.made: dict[str, Note] = {}
        """The files that were compressed."""

    async def pack(self, file: CopiedFile) -> Packing | None:
        """Return the compression of a file; None for one that is sent as it is."""
        if not file.location.endswith(".safetensors") or file.size < SHORTEST or file.ranges[0].begin != 0:
            return None
        if not file.ranges[0].plain:  # the take compressed it
            return None
        header = file.ranges[0].end
        ranges = await self._ranges(file, header)
        if self._memory is None:
            self._memory = self._target.budget.set_aside(self._target.budget.total // 2)
        publish, folder = partial(self._publish, file.location), self._near.url.location
        if arena_bytes(PAGE + file.size) > self._memory.limit and not await in_thread(_has_room, folder, file.size):
            log.warning(
                "%s: has no room to compress %s (%s), so it is sent as it is",
                folder,
                file.location,
                size_text(file.size),
            )
            await publish(None)
            return None
        return Packing(self._memory, lambda _: (header, ranges), spill=folder, publish=publish)

    async def _publish(self, location: str, packed: PackedResult | None) -> None:
        """Put the table of a compressed file and a note about it. Delete those of a file that is sent as it is."""
        storage, places = self._target.storage, [note_of(location), table_of(location)]
        if packed is None:
            self.made.pop(location, None)
            await storage.delete(places)
            return
        note = Note(packed.size, len(packed.table), digest_range(packed.table), packed.digest)
        self.made[location] = note
        await storage.put(places[1], packed.table)
        await storage.put(places[0], msgspec.json.encode(note))

    async def _ranges(self, file: CopiedFile, header: int) -> Sequence[tuple[int, int]]:
        """Return the length and the kind of each tensor, by the file's header."""
        data = bytearray(header)
        await self._near.storage.read_into(file.location, 0, [data])
        if digest_range(data) != file.ranges[0].digest:
            raise CorruptSnapshotError(f"{file.location}: its header does not match its digest")
        held: dict[str, Any] = decode_json(bytes(data[8:]), dict[str, Any], file.location)
        items = sorted((item["data_offsets"], item["dtype"]) for name, item in held.items() if name != "__metadata__")
        return [(end - begin, kind_of(dtype)) for (begin, end), dtype in items]


def _has_room(folder: str, nbytes: int) -> bool:
    """Return True if a folder has room for a temporary file, and half as much for other files."""
    return shutil.disk_usage(folder).free > nbytes + nbytes // 2


async def read_notes(storage: Storage, save_id: str) -> dict[str, Note]:
    """Return the notes about compressed files of a save, by their files."""
    listed = await _list_notes(storage, save_id)
    found = await gather_limited(listed, lambda name: _read_note(storage, name))
    places = [name.removesuffix(".json") + ".safetensors" for name in listed]
    return {place: note for place, note in zip(places, found, strict=True) if note is not None}


async def _list_notes(storage: Storage, save_id: str) -> list[str]:
    """Return the names of a save's notes. A rank's part of a manifest has one number less."""
    prefix = f"data/{save_id}-"
    listed = [name for name in await storage.list("data/") if name.startswith(prefix)]
    return [name for name in listed if name.endswith(".json") and name.count("-") == 2]


async def _read_note(storage: Storage, name: str) -> Note | None:
    try:
        note: Note = decode_json(await storage.get(name, limit=1 << 16), Note, f"{storage.url.join(name)}: unreadable")
        return note
    except StorageNotFoundError:
        return None
    except CorruptSnapshotError as error:
        log.info("%s", error)
        return None


async def remove_notes(storage: Storage, save_id: str) -> None:
    """Remove the notes of a committed save, if possible: they only cost space."""
    with suppress(SnapshotError):
        await storage.delete(await _list_notes(storage, save_id))


def _is_of_an_uploader(name: str, file: FileEntry) -> bool:
    """Return True for a file that an uploader compressed. Those of a take are compressed in the near folder, too."""
    return file.packed is not None and file.packed.index[0] == table_of(name)


class FarStorage(ReadOnlyStorage):
    """A far step, whose files are seen as those of the near step: without what an uploader compressed."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, b"", links=True)
        self._packed: dict[str, FileEntry] | None = None
        self._unpacking: Storage = inner

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read a range. The far manifest says how the file is stored."""
        await self._open()
        await self._unpacking.read_into(path, offset, buffers, token=token)

    async def stat(self, path: str) -> FileStat:
        """Return the size that a file has decompressed, if it is whole."""
        found, packed = await super().stat(path), await self._open()
        if path in packed and found.size == packed[path].stored_size:
            return replace(found, size=packed[path].size)
        return found

    async def _open(self) -> Mapping[str, FileEntry]:
        """Return the compressed files. A step whose manifest is not there yet has none."""
        if self._packed is None:
            files: dict[str, FileEntry] = {}
            try:
                files = decode_head(await self.inner.get(METADATA), self.url).files
            except StorageNotFoundError:
                return {}
            except StorageError:
                raise
            except SnapshotError as error:
                log.info("%s: %s", self.url, error)
            packed = {name: file for name, file in files.items() if _is_of_an_uploader(name, file)}
            if packed:
                self._unpacking = UnpackingStorage(self.inner, packed, MemoryBudget(MEMORY))
            self._packed = packed
        return self._packed
