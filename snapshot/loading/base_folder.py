"""A folder of weights as the base of a snapshot: its tensors, their digests, and whether it still has them.

Such files have no digests of their own. A take computes those of the ranges that it leaves out and records them. A
restore compares them before it writes to a live tensor, even with `verify=False`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple

from snapshot.errors import (
    CorruptSnapshotError,
    RestoreError,
    SnapshotNotFoundError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.formats.foreign import ForeignDocument
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.io.url import URL
from snapshot.loading.open import Opened, open_checkpoint
from snapshot.loading.read_requests import ReadRequest
from snapshot.loading.reader import ReadResult, fetch_requests
from snapshot.manifest.document import BaseReference, Document, FileEntry
from snapshot.manifest.entries import TensorEntry
from snapshot.manifest.paths import decode_component
from snapshot.plan.layout import name_data_file
from snapshot.progress import Meter
from snapshot.tensors.digest import RunningDigest, digest_range
from snapshot.text import listed

FORMAT: Literal["safetensors"] = "safetensors"
PIECE = 4 << 20
"""Bytes that are read at once."""
AT_ONCE = 16
"""Concurrent reads of a remote folder, and looks at its files."""
KEPT = 4096
"""Number of files whose digests are remembered."""

Place = tuple[str, int, int]
"""A file, and the begin and end of a range in it."""
Digest = tuple[str, bytes]
"""The digest of a range, and the table of its blocks."""
_known: PerProcess[dict[tuple[str, int, str], dict[tuple[int, int], Digest]]] = PerProcess(dict)
"""The digests of ranges that this process has read, by URL, size and token of the file.

A run that saves every 100 steps reads the folder for its first take only."""


class FolderFile(NamedTuple):
    """A file of a folder of weights."""

    name: str
    location: str
    """The name by which a manifest refers to it."""
    entry: FileEntry
    token: str


@dataclass(frozen=True)
class BaseFolder:
    """A folder of weights that was opened for a take."""

    opened: Opened
    reference: BaseReference
    files: Mapping[str, FolderFile]
    """The files by their names."""
    tensors: Sequence[tuple[str, TensorEntry]]
    """The tensors that are stored as they are, with their names, in the order of the files."""

    @property
    def url(self) -> URL:
        """The folder, also if the user named a file in it."""
        return self.opened.stored.url

    async def digest_ranges(self, places: Iterable[Place]) -> dict[Place, Digest]:
        """Return the digests of some ranges. Those that this process has read before are not read again."""
        known, found, missing = _known.get(), dict[Place, Digest](), list[Place]()
        for place in sorted(set(places)):
            held = known.get(self._key_of(place[0]), {}).get(place[1:])
            if held is None:
                missing.append(place)
            else:
                found[place] = held
        lanes = self.opened.settings.lane_count() if self.opened.storage.capabilities.local else AT_ONCE
        for run in await gather_limited(list(_runs_of(missing)), self._digest_run, lanes):
            found |= run
            for place, digest in run.items():
                if self.files[place[0]].token:
                    known.setdefault(self._key_of(place[0]), {})[place[1:]] = digest
        drop_oldest(known, KEPT)
        return found

    def _key_of(self, name: str) -> tuple[str, int, str]:
        file = self.files[name]
        return str(self.url.join(name)), file.entry.size, file.token

    async def _digest_run(self, run: Sequence[Place]) -> dict[Place, Digest]:
        """Read ranges that follow each other in one file, and return their digests."""
        running = {place: RunningDigest() for place in run}
        name, first, last = run[0][0], run[0][1], run[-1][2]

        def update(view: memoryview, begin: int) -> None:
            for (_, low, high), digest in running.items():
                if low < begin + len(view) and begin < high:
                    digest.update(view[max(0, low - begin) : high - begin])

        async with self.opened.budget.slot(arena_bytes(min(PIECE, last - first))) as slot:
            for begin in range(first, last, PIECE):
                view = slot.view[: min(PIECE, last - begin)]
                await self.opened.stored.read_into(name, begin, [view], token=self.files[name].token or None)
                await in_thread(update, view, begin)
        return {place: digest.finish() for place, digest in running.items()}


def _runs_of(places: Sequence[Place]) -> Iterable[Sequence[Place]]:
    """Split sorted ranges into runs of adjacent ones, of at most PIECE bytes or one range."""
    first = 0
    for index in range(1, len(places) + 1):
        if (
            index == len(places)
            or places[index][0] != places[first][0]
            or places[index][1] < places[index - 1][2]
            or places[index][2] - places[first][1] > PIECE
        ):
            yield places[first:index]
            first = index


async def read_folder(opened: Opened) -> BaseFolder:
    """Return the folder of weights that was opened. Raise UnsupportedFormatError for files of another format.

    Its id follows from the names, sizes and headers of the files. So it is the same on all ranks, and that of a copy.
    """
    document = opened.document
    if not isinstance(document, ForeignDocument) or document.format != FORMAT:
        raise UnsupportedFormatError(
            f"{opened.url}: must be a snapshot, or a folder of safetensors files, got a checkpoint of {document.format}"
        )
    tensors: list[tuple[str, TensorEntry]] = []
    headers: dict[str, int] = {}
    for path, entry in document.manifest.items():
        for stored in entry.stored():
            headers[stored.location] = min(headers.get(stored.location, stored.byte_range[0]), stored.byte_range[0])
        if type(entry) is TensorEntry and entry.serializer == "raw" and entry.extra is None:
            tensors.append((decode_component(path.removeprefix("0/")), entry))

    async def look(name: str) -> tuple[str, FileEntry, str]:
        stat = await opened.stored.stat(name)
        header = bytearray(headers[name])
        await opened.stored.read_into(name, 0, [header], token=stat.token or None)
        entry = FileEntry(stat.size, len(header), digest_range(header), in_base=True, name=name)
        return name, entry, stat.token

    names = sorted(name for name in headers if name.endswith(f".{FORMAT}"))
    found = await gather_limited(names, look, AT_ONCE)
    told = repr([(name, entry.size, entry.header_digest) for name, entry, _ in found])
    save_id = digest_range(told.encode())[5:17]
    files = {
        name: FolderFile(name, name_data_file(save_id, 0, number, FORMAT), entry, token)
        for number, (name, entry, token) in enumerate(found)
    }
    held = [(name, entry) for name, entry in tensors if entry.location in files]
    held.sort(key=lambda each: (each[1].location, each[1].byte_range))
    return BaseFolder(opened, BaseReference(save_id, str(opened.url), FORMAT), files, held)


async def has_files(session: Session, files: Collection[FileEntry], tokens: Mapping[str, str]) -> bool:
    """Return True if the folder of a session still has these files, as far as sizes, headers and tokens show."""
    try:
        return not await _find_changes((await open_checkpoint(session)).stored, files, tokens)
    except (SnapshotNotFoundError, CorruptSnapshotError, UnsupportedFormatError):
        return False


async def _find_changes(
    storage: Storage, files: Collection[FileEntry], tokens: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return a line for each file that a folder lacks now, or that has another size, header or token."""

    async def look(file: FileEntry) -> str:
        try:
            stat = await storage.stat(file.name)
            if stat.size != file.size:
                return f"{file.name} must have {file.size:,} bytes, got {stat.size:,}"
            if stat.token != tokens.get(file.name, stat.token):
                return f"{file.name} was written again"
            header = bytearray(file.header)
            await storage.read_into(file.name, 0, [header])
        except StorageNotFoundError:
            return f"{file.name} is missing"
        found = digest_range(header)
        return "" if found == file.header_digest else f"{file.name}: digest of the header must be {file.header_digest}"

    return [line for line in await gather_limited(files, look, AT_ONCE) if line]


async def open_left_out(session: Session, document: Document, wanted: BaseReference) -> tuple[Opened, dict[str, str]]:
    """Open the folder of weights of a snapshot, as it is stored.

    Also return the names of the files that the snapshot left out, by their locations. Raise RestoreError if the folder
    has changed: the snapshot is not damaged.
    """
    left_out = {location: file for location, file in document.files.items() if file.in_base}
    try:
        found = await open_checkpoint(session)
        if isinstance(found.document, ForeignDocument):
            faults = await _find_changes(found.stored, left_out.values())
        else:
            faults = [f"{session.url} is a snapshot"]
    except (SnapshotNotFoundError, CorruptSnapshotError, UnsupportedFormatError) as error:
        faults = [str(error)]
    if faults:
        raise RestoreError(
            f"base must be {wanted} as it was at the take, or a copy of it, got {session.url}, which does not have "
            f"what this snapshot left out:{listed(faults)}",
            faults,
        )
    return found.as_stored(), {location: file.name for location, file in left_out.items()}


def expect_unchanged(opened: Opened, requests: Sequence[ReadRequest], meter: Meter) -> ReadResult:
    """Read ranges of a folder without placing them. Raise RestoreError if any differs from its digest."""
    if lacking := [f"{each.name}: has no digest" for each in requests if each.stored.digest is None]:
        raise CorruptSnapshotError(
            f"{opened.url}: the manifest must have digests of what is in {opened.document.base}:{listed(lacking)}",
            faults=lacking,
        )
    try:
        return fetch_requests(opened, [each.as_dry() for each in requests], True, meter)
    except CorruptSnapshotError as error:
        base, faults = opened.document.base, list(error.faults)
        for location in {each.location for each in requests}:
            faults = [line.replace(location, opened.document.files[location].name) for line in faults]
        raise RestoreError(
            f"{opened.url}: {base} has other values than at the take, and nothing was touched:{listed(faults)}",
            faults,
        ) from error
