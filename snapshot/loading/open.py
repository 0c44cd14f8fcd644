"""Opening a checkpoint: its manifest, the manifest's parts, and checks of its files."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from snapshot.distributed.exchange import Exchange, Hello, agreed_url, expect_same_keys, expect_same_verb
from snapshot.distributed.known_replication import KnownReplication, replication_memory
from snapshot.errors import (
    CorruptSnapshotError,
    SignatureError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.formats.derived import Derivation, DerivedStorage, Located, Places, ReadPlaces
from snapshot.formats.foreign import (
    LINKLESS,
    Condition,
    ForeignDocument,
    ForeignStorage,
    UnknownFormatError,
    is_absence,
)
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.system import gc_paused
from snapshot.io.url import URL
from snapshot.manifest.document import (
    METADATA,
    NEWEST_FORMAT,
    Document,
    FileEntry,
    ForeignFile,
    PartEntry,
    decode_document,
    find_save_id,
    merge,
)
from snapshot.manifest.entries import TensorEntry, needs_third_format
from snapshot.manifest.parts import ManifestPart, decode_index, decode_part, decode_segment
from snapshot.manifest.rank_view import has_path, is_rank
from snapshot.settings import Settings

T = TypeVar("T")


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint: what is in it, and the storages that its bytes are read from."""

    session: Session
    document: Document
    stored: Storage
    """Its files as they are stored. Their bytes are verified if there is a key."""
    storage: Storage
    """Its files, with derived ones: compressed files as if they were not, and weights for quantised ones."""
    places: Places = field(default_factory=dict)

    @property
    def url(self) -> URL:
        """The place of the checkpoint."""
        return self.session.url

    @property
    def budget(self) -> MemoryBudget:
        """The memory of the operation."""
        return self.session.budget

    @property
    def settings(self) -> Settings:
        """The settings of the operation."""
        return self.session.settings

    def with_document(self, document: Document) -> Opened:
        """Return the checkpoint with another view of what is in it."""
        return replace(self, document=document)

    def as_stored(self) -> Opened:
        """Return the checkpoint, with compressed files as they are stored."""
        return replace(self, storage=self.stored)

    async def locate(self, tensors: Sequence[tuple[str, TensorEntry]], read: ReadPlaces) -> list[Located]:
        """Return where the elements of long packed tensors are, given by names and entries."""
        from snapshot.formats.packed_tensors import locate_tensors  # only other libraries' files have such tensors

        return await locate_tensors(tensors, self.places, read)


# The manifest and its parts.

AT_ONCE = 16
"""The maximum number of concurrent requests."""
LARGEST_UNSEEN = 1 << 30
"""Maximum bytes of a single file whose size is checked by the response that brings its bytes."""
AGAIN = 10
"""Attempts for a signed snapshot that other takes keep replacing."""


async def open_checkpoint(session: Session, rank: int | None = None) -> Opened:
    """Open a checkpoint with all parts of its manifest, or with the parts that one rank needs first."""
    opened = await open_main(session)
    document = opened.document
    first = rank if rank is None or rank < document.world_size else 0
    await load_parts(opened, [part for part in document.parts if first is None or first in part.ranks])
    return opened


async def open_main(session: Session) -> Opened:
    """Open a checkpoint without the parts of its manifest in separate files."""
    document: Document | None = None
    try:
        document = await session.read_twice(METADATA, partial(_decode_manifest, session))
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        absence = error
    if document is None:  # outside of the handler: a missing manifest is not the cause of what is raised here
        document = await _open_foreign(session, absence)
    return add_layers(session, document)


async def _open_foreign(session: Session, absence: StorageError) -> ForeignDocument:
    """Open the checkpoint of another library. `absence`: why there is no manifest."""
    if session.seal is not None and not session.seal.optional:  # other formats have no signatures
        raise SnapshotNotFoundError(
            f"{session.url}: no snapshot of this library found ({METADATA} is missing), and with a key, no other "
            "format is read"
        )
    with gc_paused():
        found = await find_foreign(session)
    if found is not None:
        return found
    if not isinstance(absence, StorageNotFoundError):
        raise absence
    from snapshot.formats.mistakes import refuse_folder  # only an error needs it

    raise await refuse_folder(session.storage, session.open_beside)


async def find_foreign(session: Session) -> ForeignDocument | None:
    """Return the checkpoint of another library that is here; None if there is none that its readers know."""
    from snapshot.formats.detect import find_checkpoint  # with the readers of all formats, which are rarely needed

    limit, reads = session.settings.manifest_bytes, partial(add_layers, session)
    return await find_checkpoint(session.url, session.storage, session.open_beside, limit, reads)


async def checkpoint_exists(session: Session) -> bool:
    """Return True if a checkpoint exists here that can be opened."""
    try:
        await session.storage.stat(METADATA)
    except StorageError as error:
        if not is_absence(session.storage, error):
            raise
        if session.seal is not None:
            return False
        try:
            found = await find_foreign(session)
        except (CorruptSnapshotError, UnsupportedFormatError, UnsafeObjectError):
            return False  # it cannot be opened
        if found is None and not isinstance(error, StorageNotFoundError):
            raise
        return found is not None
    return True


async def is_foreign(session: Session) -> bool:
    """Return True if another library's checkpoint is here, without a manifest."""
    try:
        return await find_foreign(session) is not None
    except (CorruptSnapshotError, UnknownFormatError):
        return False
    except (UnsupportedFormatError, UnsafeObjectError):
        return True


async def read_manifest(session: Session) -> bytes:
    """Return the bytes of the manifest, which are not decoded. The session's seal has verified them."""
    limit, seal = session.settings.manifest_bytes, session.seal
    data = await session.storage.get(METADATA, limit=limit)
    if seal is None:
        return data
    if session.storage.host:
        raise ValueError(f"{session.url}: key must be None for near steps, which are not signed; use the uploaded step")
    for left in reversed(range(AGAIN)):
        try:
            save_id = find_save_id(data)
            if save_id is None:
                raise SignatureError(f"{session.url}: is not a snapshot of this library, so it has no signature")
            await seal.check_manifest(session.storage, save_id, data, limit)
            break
        except SignatureError:
            now = await session.storage.get(METADATA, limit=limit)
            if now == data or not left:
                raise
            data = now  # another take has replaced the snapshot, and its signature
    return data


async def _decode_manifest(session: Session) -> Document:
    data = await session.read_once_on_host(METADATA, partial(read_manifest, session))
    if data.lstrip()[:1] != b"{" or b'"format"' not in data[:256]:
        from snapshot.formats import torchsnapshot

        found = await torchsnapshot.describe_snapshot(session.storage, data)
        found.place = session.url
        return found
    return decode_document(data, session.storage.url.join(METADATA))


def add_layers(session: Session, document: Document) -> Opened:
    """Return a checkpoint whose files are read through layers: the lowest verifies, the highest derives."""
    stored = session.storage
    if isinstance(document, ForeignDocument):
        if document.place != session.url:
            stored = session.open_beside(document.place)
        stored = ForeignStorage(stored, document.inline, links=document.format not in LINKLESS)
    if session.seal is not None:
        sizes = {location: file.stored_size for location, file in document.own_files.items()}
        sizes |= {part.location: part.size for part in document.parts}
        stored = session.seal.wrap(stored, document.save_id, sizes) or stored
    derivations = document.derivations if isinstance(document, ForeignDocument) else {}
    return Opened(session, document, stored, derive_files(session, stored, document.own_files, derivations))


def derive_files(
    session: Session,
    stored: Storage,
    files: Mapping[str, FileEntry],
    derivations: Mapping[str, Derivation] | None = None,
) -> Storage:
    """Return a storage that reads compressed files as if they were not, and also has files of other derivations."""
    found = dict(derivations or {})
    if any(file.packed is not None for file in files.values()):
        from snapshot.loading.decompression import unpacking  # with the codec, which few snapshots need

        found |= unpacking(files)
    return DerivedStorage(stored, found, files, session.packed_memory) if found else stored


async def load_parts(opened: Opened, parts: Sequence[PartEntry]) -> None:
    """Read parts of a manifest and add their entries, each part only once."""
    document = opened.document
    for part, held in zip(parts, await read_parts(opened, parts), strict=True):
        if document.format != NEWEST_FORMAT and needs_third_format(held.manifest.values()):
            raise CorruptSnapshotError(f"{opened.url}: {part.location}: format must be {NEWEST_FORMAT} for its entries")
        merge(document.manifest, held.manifest, part.location)
        document.parts.remove(part)


async def read_parts(opened: Opened, parts: Sequence[PartEntry]) -> list[ManifestPart]:
    """Return the contents of manifest parts."""
    session = opened.session

    async def read(part: PartEntry) -> ManifestPart:
        return await session.read_twice(part.location, lambda: _read_part(opened, part))

    first = session.choose_first(len(parts))
    found = await gather_limited([*parts[first:], *parts[:first]], read, AT_ONCE)
    return [*found[len(parts) - first :], *found[: len(parts) - first]]


async def _read_part(opened: Opened, part: PartEntry) -> ManifestPart:
    fetch = partial(opened.storage.get, part.location, limit=opened.settings.manifest_bytes)
    try:
        data = await opened.session.read_once_on_host(part.location, fetch)
        return decode_part(data, part, opened.storage.url.join(part.location))
    except StorageNotFoundError as error:
        raise CorruptSnapshotError(f"{error}: a part of the manifest is missing") from error


FEW = 16
"""Times that single paths of a long manifest are looked for, before all of it is read."""
MOST_SEGMENTS = 64
"""Maximum number of segments that are read for one name. For more, all of the manifest is read."""


class KnownManifest:
    """The manifest of one snapshot. It is read once, since a snapshot never changes; `restore` reads it again."""

    def __init__(self, new_session: Callable[[int | None], Session]) -> None:
        self._new_session = new_session
        self._document: Document | None = None
        self._times = 0
        """Times that a single path was looked for without reading all of the manifest."""

    def forget(self) -> None:
        """Read the manifest again when it is needed."""
        self._document = None

    def open(self) -> Document:
        """Return the manifest."""
        if self._document is None:
            with self._new_session(None) as session:
                self._document = run(open_checkpoint(session)).document
        return self._document

    def _open_for(self, path: str) -> Document:
        """Return the manifest, or the entries at a path alone if that is quicker."""
        if self._document is not None:
            return self._document
        self._times += 1
        with self._new_session(None) as session:
            document, whole = run(open_for_path(session, path, self._times))
        self._document = document if whole else None
        return document

    def read(self, budget: int | None, read: Callable[[Opened], T], path: str | None = None) -> T:
        """Read with the known manifest, or with the new one if the snapshot was replaced since.

        `path`: the only path that is read.
        """
        known = self.open() if path is None else self._open_for(path)
        with self._new_session(budget) as session:
            try:
                return read(add_layers(session, known))
            except CorruptSnapshotError as error:
                damage = error
        with self._new_session(budget) as session:
            opened = run(open_checkpoint(session))
            self._document = opened.document
            if opened.document.save_id == known.save_id:
                raise damage
            return read(opened)


async def open_for_path(session: Session, path: str, times: int) -> tuple[Document, bool]:
    """Return the manifest and True, or with the entries at a path alone and False.

    Of a long manifest, the entries are found by the indexes of its parts. `times`: how often the caller looked for a
    path; after a few times, all of the manifest is read.
    """
    opened = await open_main(session)
    document = opened.document
    whole = is_rank(path, document.world_size)  # all of a rank, or a key that is a number
    if not whole and times <= FEW and any(part.index is not None for part in document.parts):
        found = await find_entries(opened, path)
        if found is not None and has_path(found.manifest, found.world_size, path):
            return found, False
    await load_parts(opened, list(document.parts))
    return document, True


async def find_entries(opened: Opened, path: str) -> Document | None:
    """Return a document with the entries at a path and below it, on all ranks, from a manifest without its parts.

    Only the indexes of long parts are read, and the segments that may have the entries. Return None if that would be
    too many segments.
    """
    document = opened.document
    number, _, rest = path.partition("/")
    names = [path, rest] if rest and is_rank(number, document.world_size) else [path]
    left = MOST_SEGMENTS

    async def look(part: PartEntry) -> dict[str, Any]:
        nonlocal left
        where = opened.storage.url.join(part.location)
        if part.index is None:
            [whole] = await read_parts(opened, [part])
            found: dict[str, Any] = dict(whole.manifest)
        else:
            begin, end, _ = part.index
            index = await _read_range(opened, part, begin, end, lambda data: decode_index(data, part, where))
            segments = index.find(names)
            left -= len(segments)
            found = {}
            for each in segments if left >= 0 else ():
                decode = partial(decode_segment, segment=each, where=where)
                found |= await _read_range(opened, part, each.begin, each.end, decode)
        return choose(found)

    below = tuple(f"{name}/" for name in names)

    def choose(found: Mapping[str, Any]) -> dict[str, Any]:
        logical = ((held, held.partition("/")[2]) for held in found)
        return {held: found[held] for held, name in logical if name in names or name.startswith(below)}

    manifest = choose(document.manifest)
    for part, found in zip(document.parts, await gather_limited(document.parts, look, AT_ONCE), strict=True):
        merge(manifest, found, part.location)
    return msgspec.structs.replace(document, manifest=manifest, parts=[]) if left >= 0 else None


async def _read_range(opened: Opened, part: PartEntry, begin: int, end: int, decode: Callable[[bytearray], T]) -> T:
    async def read() -> T:
        if not 0 <= begin < end <= part.size <= opened.settings.manifest_bytes:
            raise CorruptSnapshotError(f"{opened.url}: {part.location}: a range {begin}-{end} is outside of it")
        data = bytearray(end - begin)
        try:
            await opened.storage.read_into(part.location, begin, [data])
        except StorageNotFoundError as error:
            raise CorruptSnapshotError(f"{error}: a part of the manifest is missing") from error
        return await in_thread(decode, data)

    return await opened.session.read_twice(part.location, read)


async def expect_files(opened: Opened, locations: set[str], *, reads: bool = False, conditions: bool = True) -> None:
    """Raise unless every file exists and has its expected size, and may be used.

    If the caller `reads` them next, a single one may be checked by its first response, which saves a request. Without
    `conditions`, the caller calls `expect_conditions` for those that it reads.
    """
    document = opened.document
    if document.base is not None and any(document.files[each].in_base for each in locations):
        raise SnapshotError(
            f"{opened.url}: has only what differs from {document.base}; to restore all of it, pass "
            "RestoreOptions(base=...); objects that did not change are in the base"
        )
    if reads and len(locations) == 1 and not isinstance(document, ForeignDocument):
        [only] = locations
        size = document.files[only].stored_size
        if size <= LARGEST_UNSEEN and opened.storage.expect_size(only, size):
            return
    faults = list(dict.fromkeys((await missing_files(opened, locations)).values()))
    if faults:
        raise CorruptSnapshotError(f"{opened.url}: {'; '.join(faults)}", faults=faults)
    if conditions:
        await expect_conditions(opened, locations)


async def expect_conditions(opened: Opened, locations: Iterable[str]) -> None:
    """Raise if another library's files must not be used, as far as a look at some of their bytes shows."""
    faults: list[str] = []
    for each in find_conditions(opened.document, locations):
        faults += await each.find_faults(opened, whole=False)
    if faults:
        raise CorruptSnapshotError(f"{opened.url}: {'; '.join(faults)}", faults=faults)


def find_conditions(document: Document, locations: Iterable[str]) -> list[Condition]:
    """Return what must hold before these files are used."""
    if not isinstance(document, ForeignDocument) or not document.conditions:
        return []
    found = {id(each): each for location in locations if (each := document.conditions.get(location)) is not None}
    return list(found.values())


async def missing_files(opened: Opened, locations: set[str], *more: int) -> dict[str, str]:
    """Return a line for each file that is missing, is not a regular file, or has an unexpected size.

    `more`: further errno values that count as such a fault. Any other storage error is raised.
    """
    damage = {errno.EISDIR, errno.ENOTDIR, errno.ELOOP, *more}

    async def fault(location: str) -> str | None:
        file = opened.document.files[location]
        expected = file.stored_size
        try:
            found = (await opened.storage.stat(location)).size
        except StorageNotFoundError:
            return f"{location} is missing"
        except CorruptSnapshotError as error:  # its signed hashes cannot be read
            return str(error)
        except StorageError as error:
            if error.errno not in damage:
                raise
            return str(error)
        if found > expected and isinstance(file, ForeignFile) and not file.exact:
            return None
        return None if found == expected else f"{location} must have {expected:,} bytes, got {found:,}"

    ordered = sorted(locations)
    found = await gather_limited(ordered, fault, AT_ONCE)
    return {location: line for location, line in zip(ordered, found, strict=True) if line}


# The beginning of a restore: all ranks open the same snapshot, even if it is replaced meanwhile.


class FoundSnapshot(msgspec.Struct, array_like=True):
    """The snapshot that the leader found."""

    path: str
    save_id: str
    share: str
    """A random name, with which the ranks of a host find each other's reads."""


def open_restore(
    exchange: Exchange, url: URL, verb: str, open_session: Callable[[URL], Session], *, keys: Sequence[str] = ()
) -> Opened:
    """Agree on a snapshot with the other ranks, and open it. All ranks must have the same `keys`."""
    held: list[Opened] = []

    def at(place: URL, handed_on: str = "") -> Opened:
        session = open_session(place)
        try:
            session.hand_on_reads(handed_on)
            return run(open_checkpoint(session, None if exchange.alone else exchange.rank))
        except BaseException:
            run(session.close())
            raise

    if exchange.alone:
        return at(url)

    def lead(hellos: list[Hello]) -> FoundSnapshot:
        expect_same_verb(hellos)
        expect_same_keys("key", [hello.keys for hello in hellos])
        share = secrets.token_hex(16)
        held.append(at(url, share))
        return FoundSnapshot(hellos[0].path, held[0].document.save_id, share)

    try:
        answer = exchange.agree(Hello(verb, url.reveal(), keys=list(keys)), lead, Hello, FoundSnapshot)
    except BaseException:
        for each in held:
            run(each.session.close())
        raise
    url = agreed_url(url, answer.path)
    for share in (answer.share, ""):
        opened = held.pop() if held else at(url, share)
        if opened.document.save_id == answer.save_id:
            return opened
        run(opened.session.close())
    raise SnapshotError(f"{url}: was replaced while the ranks opened it; restore again")


def remember_plan(exchange: Exchange, document: Document) -> None:
    """Keep the agreed plan of a restored snapshot, so that the next take can reuse it."""
    if exchange.alone or document.world_size != exchange.world:
        return
    paths = frozenset(path.partition("/")[2] for path, entry in document.manifest.items() if entry.replicated)
    replication_memory(exchange.ranks).keep_restored(KnownReplication(document.structure, paths))
