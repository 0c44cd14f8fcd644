"""Tensors that a snapshot left out since they are in its base, and all ranges that a manifest's files hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.errors import CorruptSnapshotError, RestoreError, UnsupportedFormatError
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.session import Session
from snapshot.io.storage import Buffer, FileStat, ReadOnlyStorage, Storage
from snapshot.io.url import URL, Location
from snapshot.loading.open import Opened, open_checkpoint
from snapshot.loading.read_requests import ReadRequest, copy_into, is_packed, request_all, request_packed
from snapshot.manifest import entries as e
from snapshot.manifest.document import (
    BaseReference,
    Document,
    Files,
    ForeignFile,
    check_range,
    check_tensor,
    save_id_in,
)
from snapshot.manifest.entries import TensorEntry, stored_in
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.digest import RunningDigest, digest_bytes
from snapshot.tensors.geometry import Box, boxes_of_range, intersect
from snapshot.tensors.memory import BY_NAME, is_plain

# Stored ranges: all ranges that a manifest says its files hold, as requests that can be read and compared.

Place = tuple[str, int, int]
"""A file, and the begin and end of a range in it."""


def requests_of(
    manifests: Sequence[Mapping[str, Any]],
    files: Files,
    faults: list[str],
    bare: dict[str, list[Place]] | None = None,
) -> list[ReadRequest]:
    """Return a request for each stored range and each table of digests. Add unreadable entries to `faults`.

    `manifests`: a whole manifest, or a manifest and its parts. `bare`: collects the entries with ranges that have no
    digest.
    """
    requests: dict[Place, ReadRequest] = {}
    partial = len(manifests) > 1
    for manifest in manifests:
        for path, entry in manifest.items():
            try:
                _check_entry(path, entry, files, partial=partial)
            except CorruptSnapshotError as error:
                faults.append(str(error))
                continue
            for each in entry.stored():
                place = (each.location, *each.byte_range)
                if bare is not None and each.digest is None and each.location != INLINE:
                    bare.setdefault(path, []).append(place)
                requests.setdefault(place, _request_of(path, each))
                if each.blocks is not None and each.digest is not None:
                    requests.setdefault(each.blocks, _table_want(path, each.blocks, each.digest))
    for location, file in files.items():
        if file.packed is not None:
            table = e.ObjectEntry(file.packed.index[0], file.packed.index[1:], TABLE, "", file.packed.index_digest)
            requests.setdefault(file.packed.index, request_all(f"{location} (table of blocks)", table))
    return list(requests.values())


def _check_entry(path: str, entry: Any, files: Files, *, partial: bool) -> None:
    """Raise CorruptSnapshotError if an entry cannot be read. A foreign tensor may have a type that is only listed."""
    try:
        for _, held in entry.tensors():
            check_tensor(path, held, files, partial=partial, boxes=())
        if entry.is_object:
            check_range(path, entry, files)
    except UnsupportedFormatError:
        if not all(isinstance(files.get(each.location), ForeignFile) for each in entry.stored()):
            raise
    if entry.is_value:
        with suppress(UnsupportedFormatError):  # only this machine may lack the time zone
            entry.value()


def _request_of(path: str, stored: e.TensorEntry | e.ObjectEntry) -> ReadRequest:
    """Return a request for a whole stored range. A packed tensor is also compared with its entry."""
    if isinstance(stored, e.TensorEntry) and is_packed(stored):
        return request_packed(path, stored, lambda _: (), lambda _: [])
    return request_all(path, stored)


TABLE = "digests"
"""The serializer name of digest tables."""


def _table_want(path: str, blocks: Place, digest: str) -> ReadRequest:
    location, begin, end = blocks
    table = e.ObjectEntry(location, (begin, end), TABLE, "", digest)
    return ReadRequest(f"{path} (digests)", table, location, begin, end)


def find_uncovered(files: Files, requests: Iterable[ReadRequest]) -> list[str]:
    """Return a line for each part of a file that no entry, or more than one, covers."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        if request.begin < request.end:
            ranges[request.location].append((request.begin, request.end))
    faults = []
    for location, file in files.items():
        if isinstance(file, ForeignFile):  # it has more content than its entries
            continue
        position = file.header
        for begin, end in [*sorted(ranges[location]), (file.size, file.size)]:
            if begin != position:
                what = "belong to nothing" if begin > position else "belong to two things"
                low, high = sorted((begin, position))
                faults.append(f"{location}[{low}:{high}]: by the manifest, these bytes {what}")
            position = max(position, end)
    return faults


# Tensors that a snapshot left out since they are in its base: compared with the live ones, or read from the base.

COPIED = 1 << 20
"""Elements of a strided or accelerator tensor that are copied at once, to be compared."""


class LeftOut(NamedTuple):
    """A tensor, or the box of one, that a snapshot does not have."""

    path: str
    stored: TensorEntry
    piece: Box
    """The box that the base stores in one range."""
    target: torch.Tensor
    box: Box
    """The box that the target is."""
    live: bool

    def fault(self, base: BaseReference) -> str:
        """Return why the target does not have what the base has, or ''."""
        shared = intersect(self.piece, self.box)
        if shared != self.piece or not self.live or self.target.dtype != BY_NAME[self.stored.dtype]:
            return f"{self.path}: is not in this snapshot, but in its base, {base}; pass RestoreOptions(base=...)"
        part = self.target.detach()[self.piece.relative_to(self.box.offsets).slices()]
        if _digest_tensor(part) == self.stored.digest:
            return ""
        return (
            f"{self.path}: is not in this snapshot, since it had not changed from its base, {base}; the "
            "application has other values: restore the base first, or pass RestoreOptions(base=...)"
        )


def _digest_tensor(tensor: torch.Tensor) -> str:
    if is_plain(tensor):
        return digest_bytes(view_memory(tensor.data_ptr(), tensor.nbytes))
    running = RunningDigest()
    for begin in range(0, tensor.numel(), COPIED):
        for _, box in boxes_of_range(tuple(tensor.shape), begin, min(begin + COPIED, tensor.numel())):
            held = torch.empty(box.sizes, dtype=tensor.dtype)
            copy_into(held, tensor[box.slices()])
            running.update(view_memory(held.data_ptr(), held.nbytes))
    return running.finish()[0]


async def compare_left_out(opened: Opened, left_out: Sequence[LeftOut]) -> list[str]:
    """Compare the live tensors with the digests of what a snapshot left out. Return a line for each difference."""
    base = opened.document.base
    if base is None:
        return []

    async def compare(each: LeftOut) -> str:
        return await in_thread(each.fault, base)

    found = await gather_limited(left_out, compare, opened.settings.lane_count())
    return [line for line in found if line]


async def attach_base(opened: Opened, place: Location) -> tuple[Opened, str]:
    """Return a snapshot whose left-out files are read from its base, and the save id that the base has.

    A copy of the base is accepted, too: its files have the same contents under names with another save id.
    """
    document = opened.document
    wanted = document.base
    if wanted is None:
        return opened, document.save_id
    base = Session(place.url, place.options, seal=place.seal or opened.session.seal)
    try:
        if wanted.format:
            from snapshot.loading.base_folder import open_left_out  # few bases are no snapshots

            found, places = await open_left_out(base, document, wanted)
            theirs = {name: document.files[location] for location, name in places.items()}
        else:
            found = await open_checkpoint(base)
            places, theirs = _find_files(document, wanted, found.document, place.url), found.document.files
    except BaseException:
        await base.close()
        raise
    opened.session.keep(base)
    files = {
        location: msgspec.structs.replace(file, in_base=False) if location in places else file
        for location, file in document.files.items()
    }
    sizes = {each: (theirs[there].stored_size, theirs[there].size) for each, there in places.items()}
    folder = msgspec.structs.replace(wanted, url=str(place.url)) if wanted.format else None  # for errors
    whole = msgspec.structs.replace(document, files=files, base=folder)
    storage = _WithBase(opened.storage, found.storage, places, sizes)
    return replace(opened, document=whole, storage=storage), found.document.save_id


def _find_files(document: Document, wanted: BaseReference, held: Document, url: URL) -> dict[str, str]:
    """Return the names in the base of the files that a snapshot left out. Raise for another snapshot."""
    places = {
        location: location.replace(save_id_in(location), held.save_id, 1)
        for location, file in document.files.items()
        if file.in_base
    }
    sizes = [(document.files[location].size, location) for location in places]
    theirs = [(held.files[there].size if there in held.files else -1, location) for location, there in places.items()]
    same = not isinstance(held, ForeignDocument) and sizes == theirs
    if same and held.save_id != wanted.save_id:
        digests = {(each.location, each.byte_range): each.digest for each in stored_in(held.manifest)}
        left_out = (each for each in stored_in(document.manifest) if each.location in places)
        same = all(digests.get((places[each.location], each.byte_range)) == each.digest for each in left_out)
    if not same or any(held.files[there].in_base for there in places.values()):
        raise RestoreError(
            f"base must be {wanted.url} with the save id {wanted.save_id}, or a copy of it, got {url}, which does not "
            "have what this snapshot left out",
            sorted(places),
        )
    return places


class _WithBase(ReadOnlyStorage):
    """A snapshot's files, and those that it left out, from its base."""

    def __init__(
        self, inner: Storage, base: Storage, places: Mapping[str, str], sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        super().__init__(inner)
        self._base = base
        self._places = places
        """The files that are in the base, with their names there."""
        self._sizes = sizes
        """The sizes of these files: as they are stored, and decompressed, which is what the snapshot records."""
        ours, other = inner.capabilities, base.capabilities
        blocking, local = ours.blocking and other.blocking, ours.local and other.local
        self.capabilities = replace(self.capabilities, blocking=blocking, local=local)

    def _of(self, path: str) -> tuple[Storage, str]:
        return (self._base, self._places[path]) if path in self._places else (self.inner, path)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        storage, name = self._of(path)
        await storage.read_into(name, offset, buffers, token=token)

    async def stat(self, path: str) -> FileStat:
        storage, name = self._of(path)
        found = await storage.stat(name)
        stored, size = self._sizes.get(path, (found.size, found.size))
        return replace(found, size=size) if found.size == stored else found

    async def drop_caches(self, paths: Sequence[str]) -> None:
        for path in paths:
            storage, name = self._of(path)
            await storage.drop_caches([name])

    def switch_source(self, path: str) -> bool:
        storage, name = self._of(path)
        return storage.switch_source(name)

    def share_reads(self) -> None:
        self.inner.share_reads()
        self._base.share_reads()
