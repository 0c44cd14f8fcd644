"""Verification: compares every byte of a snapshot with its digest."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from snapshot.decoding import decode_json
from snapshot.distributed.exchange import Exchange, solo_exchange
from snapshot.distributed.operation import Operation
from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.events import emit
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.aio import in_thread
from snapshot.io.loop import in_own_thread, run
from snapshot.io.session import Session, signer_of
from snapshot.io.system import sync_file
from snapshot.io.url import Location
from snapshot.loading.archive_checksums import find_archives, find_faults
from snapshot.loading.left_out import TABLE, Place, find_uncovered, requests_of
from snapshot.loading.open import Opened, derive_files, find_conditions, missing_files
from snapshot.loading.read_requests import ReadRequest
from snapshot.loading.reader import Reader
from snapshot.manifest import entries as e
from snapshot.manifest.document import FORMAT, Document, check_tree
from snapshot.manifest.entries import count_entries
from snapshot.manifest.rank_view import group_by_key, is_rank, make_rank_view, split_by_rank
from snapshot.progress import Meter, unmetered
from snapshot.reports import VerifyReport
from snapshot.save.commit import while_all_go_on
from snapshot.save.describe import RankManifest
from snapshot.tensors.digest import BLOCK, digest_range
from snapshot.text import counted, listed
from snapshot.transform.call import open_sources, share_runs, tokens_of
from snapshot.transform.sources import stat_files

# The journal of a verification: a local file, from which an interrupted verification continues.
#
# The first line names the verified snapshot; each further line names ranges that were verified. A line that a kill
# cut off, and all lines after a damaged one, are ignored. The journal belongs to specific files. If one of them was
# changed since, or its storage cannot tell, verification starts over.

Key = tuple[str, str, int, int]
"""A verified item: `range` or `sum`, a file, and the range in it."""
KIND = "snapshot verify"
DIGEST = "digest"
"""The digest at the end of each line, over the rest of it."""
PAUSE = 1.0
"""Seconds between two syncs. Ranges that a loss of power takes from the journal are verified again."""


class VerifyJournal:
    """The journal of one verification, open for appending."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._synced = time.monotonic()
        self.done: set[Key] = set()
        self.faults: list[str] = []
        """Faults that were found before."""
        self.without: set[Place] = set()
        """Archives without checksums."""
        self.before = 0
        """Bytes that were verified before."""

    @staticmethod
    def open(
        path: str | os.PathLike[str], url: str, save_id: str, held: Mapping[str, tuple[int, str | None]]
    ) -> VerifyJournal:
        """Open the journal at a path. Start an empty one if there is none, or if the snapshot has changed.

        Raise `ValueError` if the file is something else, or belongs to another snapshot. It is not overwritten.
        """
        place = Path(path)
        head = {
            KIND: 2,
            "url": url,
            "save_id": save_id,
            "files": digest_range(json.dumps(held, sort_keys=True).encode()),
        }
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "a+b")  # noqa: SIM115 - it stays open
        try:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            notes = VerifyJournal(place, file)
            if _read_journal(place, lines, url) == head and all(token for _, token in held.values()):
                kept = len(lines[0]) + notes._read(lines[1:])
                file.truncate(kept)
            else:
                file.truncate(0)
                notes._write(head)
        except BaseException:
            file.close()
            raise
        return notes

    def _read(self, lines: Sequence[bytes]) -> int:
        """Parse the lines. Return the number of bytes of valid lines."""
        kept = 0
        for line in lines:
            try:
                noted = _read_line(line)
                keys = [(kind, location, begin, end) for kind, location, begin, end in noted["done"]]
                faults, without = list(noted["faults"]), {(where, begin, end) for where, begin, end in noted["without"]}
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self.done.update(keys)
            self.faults += faults
            self.without |= without
            kept += len(line)
        self.before = sum(end - begin for _, _, begin, end in self.done)
        return kept

    def add(self, done: Sequence[Key], faults: Sequence[str], without: Iterable[Place]) -> None:
        """Record that these ranges were verified."""
        self._write({"done": done, "faults": list(faults), "without": sorted(without)})

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps({**line, DIGEST: digest_range(json.dumps(line).encode())}).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > PAUSE:
            sync_file(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close the journal."""
        with self._file:
            sync_file(self._file.fileno())

    def remove(self) -> None:
        """Delete the journal after a verification without faults."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def _read_line(line: bytes) -> dict[str, Any]:
    """Return the contents of a line. Raise `ValueError` if it does not match its digest."""
    noted: Any = decode_json(line, Any, "damaged")
    digest = noted.pop(DIGEST, None) if isinstance(noted, dict) else None
    if digest is None or digest != digest_range(json.dumps(noted).encode()):
        raise ValueError("damaged")
    return dict(noted)


def _read_journal(path: Path, lines: Sequence[bytes], url: str) -> Any:
    """Return the first line if it belongs to a verification of this URL, or None if there is none yet."""
    if not lines:
        return None
    start = json.dumps(KIND).encode()
    if not (lines[0].startswith(b"{" + start) or (b"{" + start).startswith(lines[0])):
        raise ValueError(f"{path}: must be the journal of a verification; choose another file")
    try:
        head = _read_line(lines[0])
    except ValueError:
        return None  # killed before its first line, or damaged
    if head.get("url") != url:
        raise ValueError(f"{path}: is the journal of {head.get('url')}; choose another file, or delete it")
    return head


# Ranges that a verification reads: cut into stretches, and shared by ranks.

FINEST = 4
"""Pieces per rank's share, if a range is cut."""
STRETCH = 64 << 20
"""Bytes that are verified between two journal lines: the maximum that is read again after an interruption."""


@dataclass
class Stretch:
    """Ranges that are verified between two journal lines."""

    plain: list[ReadRequest] = field(default_factory=list)
    """Headers and long tables, whose digest covers the bytes themselves."""
    requests: list[ReadRequest] = field(default_factory=list)
    sums: list[Place] = field(default_factory=list)
    """Other libraries' archives, which have checksums."""
    nbytes: int = 0

    def add(self, request: ReadRequest) -> None:
        """Add a range."""
        plain = request.stored.serializer == TABLE and (not request.name or request.end - request.begin > BLOCK)
        (self.plain if plain else self.requests).append(request)
        self.nbytes += request.end - request.begin

    def keys(self) -> list[Key]:
        """Return the journal keys of all ranges."""
        ranges = [("range", each.location, each.begin, each.end) for each in (*self.plain, *self.requests)]
        return [*ranges, *(("sum", *place) for place in self.sums)]


def share_of(exchange: Exchange, everything: Stretch) -> Stretch:
    """Return this rank's ranges: one run of the storage order. Only a range beyond a rank's fair share is cut."""
    requests = [*everything.plain, *everything.requests]
    longest = max(STRETCH, everything.nbytes // (FINEST * exchange.world) // BLOCK * BLOCK)
    cut = list(cut_requests(requests, longest))
    ranges = share_runs(exchange, cut, [each.end - each.begin for each in cut])
    sums = share_runs(exchange, everything.sums, [end - begin for _, begin, end in everything.sums])
    made = Stretch(sums=sums[exchange.rank])
    for request in ranges[exchange.rank]:
        made.add(request)
    made.nbytes += sum(end - begin for _, begin, end in made.sums)
    return made


def locations_of(stretch: Stretch) -> set[str]:
    """Return the files of a stretch."""
    return {each.location for each in (*stretch.plain, *stretch.requests)} | {place[0] for place in stretch.sums}


def cut_stretches(everything: Stretch, done: set[Key]) -> Iterator[Stretch]:
    """Yield the remaining ranges in stretches."""
    made = Stretch()
    for request in cut_requests((*everything.plain, *everything.requests)):
        if ("range", request.location, request.begin, request.end) in done:
            continue
        made.add(request)
        if made.nbytes >= STRETCH:
            yield made
            made = Stretch()
    for place in everything.sums:
        if ("sum", *place) not in done:
            made.sums.append(place)
            made.nbytes += place[2] - place[1]
            if made.nbytes >= STRETCH:
                yield made
                made = Stretch()
    yield made


def cut_requests(requests: Iterable[ReadRequest], length: int = 0) -> Iterator[ReadRequest]:
    """Yield requests in storage order. Long ones with block digests are split."""
    length = length or STRETCH
    for request in sorted(requests, key=lambda request: (request.location, request.begin)):
        if request.end - request.begin <= length or request.stored.blocks is None:
            yield request
            continue
        for begin in range(request.begin, request.end, length):
            end = min(begin + length, request.end)
            yield ReadRequest(request.name, request.stored, request.location, begin, end)


# Verification

AGAIN = 10
"""Attempts for a snapshot that other saves keep replacing."""
MOST_VIEWS = 2_000_000
"""Maximum number of entries in the views of ranks that are checked. Beyond it, only the first ranks are checked."""
EMPTY_VIEW = 30
"""Entries that take as long as a view without entries."""


def verify_checkpoint(
    operation: Operation, origin: Location, *, quick: bool = False, resume: str | os.PathLike[str] | None = None
) -> VerifyReport:
    """Read and verify everything. Faults are listed, not raised, if the manifest is readable.

    Several ranks share the ranges, and all of them return the same report. See `verify_newest`.
    """
    if resume is not None and not operation.exchange.alone:
        raise ValueError("resume must be None if ranks share the work, since a journal is of one process")
    verify_whole = getattr(origin.seal, "verify_whole", None)
    if verify_whole is not None:
        report: VerifyReport = verify_whole(operation, origin, quick=quick, resume=resume)
    else:
        session = operation.open(origin)
        report = verify_newest(session, operation.meter, exchange=operation.exchange, quick=quick, resume=resume)
    operation.emit("verified", ok=report.ok, bytes=report.bytes_read)
    return report


def verify_newest(
    session: Session,
    meter: Meter,
    *,
    exchange: Exchange,
    quick: bool = False,
    resume: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Verify what is there. If another take replaces it meanwhile, the new one is verified."""
    opened = _open_now(session, exchange, quick)
    for _ in range(AGAIN):
        report = run(Verification(opened, meter, exchange).run(quick, resume))
        if report.ok:
            break
        last, opened = opened.document, _open_now(session, exchange, quick)
        if opened.document.save_id == last.save_id and tokens_of(opened.document) == tokens_of(last):
            break
    return report


def _open_now(session: Session, exchange: Exchange, quick: bool) -> Opened:
    arguments = {"url": session.url, "quick": quick}
    [opened] = open_sources(exchange, "verify", arguments, [session])
    return opened


def _tree_faults(document: Document) -> list[str]:
    """Return errors in the containers, rank by rank, that every restore would raise."""
    world = document.world_size
    shared, own = split_by_rank(document.manifest, world)
    faults = [
        f"{counted(len(own[number]), 'entry', 'entries')} without a rank: {number[:80]!r}"
        for number in own
        if not is_rank(number, world)
    ]
    for rank in _ranks_to_view(own, len(shared), world):
        try:
            view = make_rank_view({**shared, **own.get(str(rank), {})}, rank, world, world)
            for key, entries in group_by_key(view.entries).items():
                check_tree(key, entries)
        except CorruptSnapshotError as error:
            faults.append(str(error))
    return faults


def _ranks_to_view(own: Mapping[str, Any], shared: int, world: int) -> Iterator[int]:
    """Yield the ranks whose views are checked: first those with entries of their own, as far as that takes little time.

    The number of ranks in a manifest may be wrong, and their views cost time even if they are empty.
    """
    have = sorted(int(number) for number in own if is_rank(number, world))
    left = MOST_VIEWS
    for rank in chain(have, (rank for rank in range(world) if str(rank) not in own)):
        yield rank
        left -= shared + len(own.get(str(rank), ())) + EMPTY_VIEW
        if left <= 0:
            return


class RankResult(msgspec.Struct, array_like=True):
    """The result of one rank's share of the ranges."""

    faults: list[str]
    read: tuple[int, int, int]
    """Bytes of headers, of data, and of archives with checksums."""
    without: list[Place]


class Verification:
    """The verification of one snapshot. Each rank verifies a share of it."""

    def __init__(self, opened: Opened, meter: Meter, exchange: Exchange) -> None:
        self._exchange = exchange
        self._opened = opened
        self._document = opened.document
        self._meter = meter
        self.faults: list[str] = []
        self._without: set[Place] = set()
        """Archives without checksums."""
        self._heads = self._read = self._summed = 0

    async def run(self, quick: bool, resume: str | os.PathLike[str] | None) -> VerifyReport:
        """Verify everything, or with `quick` only the presence and sizes of files."""
        began = time.perf_counter()
        document = self._document
        own = document.own_files
        missing = await self._missing_files()
        self.faults += _held_by(missing, document.manifest)
        bare: dict[str, list[Place]] = {}
        requests = requests_of([document.manifest], document.files, self.faults, bare)
        self.faults += find_uncovered(own, requests) + await in_thread(_tree_faults, document)
        requests = [request for request in requests if request.location in own and request.location not in missing]
        sums = find_archives((request.stored for request in requests), document.files)
        before = nbytes = 0
        if not quick:
            stretch = self.everything(requests, sums, missing)
            if resume is not None:
                before = await self._resumed(stretch, resume)
                nbytes = self._nbytes
            else:
                nbytes = await self._look_together(stretch)
        unverifiable = sum(
            any(place not in sums or sums[place] in self._without for place in places) for places in bare.values()
        )
        return VerifyReport(
            count_entries(document.manifest),
            nbytes,
            time.perf_counter() - began,
            tuple(dict.fromkeys(self.faults)),
            unverifiable,
            quick,
            len(document.stored_files.keys() - {INLINE}),
            before,
            _count_in_base(document),
            signer_of(self._opened.session.seal),
        )

    @property
    def _nbytes(self) -> int:
        """Bytes that were read. An archive's checksums and its entries' digests may be of the same bytes."""
        return self._heads + max(self._read, self._summed)

    async def _missing_files(self) -> dict[str, str]:
        """Return a line for each file that is missing or has another size. Each rank looks for a share of the files."""
        exchange = self._exchange
        own = set(sorted(self._document.own_files)[exchange.rank :: exchange.world])
        found = await while_all_go_on(exchange, missing_files(self._opened, own, errno.EIO))

        def lead(all_: list[dict[str, str]]) -> dict[str, str]:
            return dict(sorted((name, line) for each in all_ for name, line in each.items()))

        return await in_own_thread(exchange.agree, found, lead, dict[str, str], dict[str, str])

    async def _look_together(self, everything: Stretch) -> int:
        """Verify this rank's share, and collect the results of all ranks. Return the bytes that all of them read."""
        exchange = self._exchange
        stretch = everything if exchange.alone else share_of(exchange, everything)
        self._meter.begin(stretch.nbytes)
        before = len(self.faults)
        await while_all_go_on(exchange, self._look_at_share(stretch))
        read = (self._heads, self._read, self._summed)
        mine = RankResult(self.faults[before:], read, sorted(self._without))

        def lead(results: list[RankResult]) -> RankResult:
            faults = sorted({line for each in results for line in each.faults})
            without = sorted({place for each in results for place in each.without})
            heads, data, summed = (sum(each) for each in zip(*(each.read for each in results), strict=True))
            return RankResult(faults, (heads, data, summed), without)

        result: RankResult = await in_own_thread(exchange.agree, mine, lead, RankResult, RankResult)
        self.faults[before:] = result.faults
        self._without = set(result.without)
        self._heads, self._read, self._summed = result.read
        return self._nbytes

    async def _look_at_share(self, stretch: Stretch) -> None:
        """Verify this rank's stretch, and every so many of the conditions of files."""
        await self.look(stretch, self._meter.wrote)
        exchange = self._exchange
        await self._look_at_conditions(exchange.rank, exchange.world)

    async def _look_at_conditions(self, first: int = 0, step: int = 1) -> None:
        """Verify what must hold before files are used, unless they have faults that are found without it."""
        found = find_conditions(self._document, sorted(self._document.own_files))
        for each in found[first::step] if not self.faults else ():
            try:
                self.faults += await each.find_faults(self._opened, whole=True)
            except (CorruptSnapshotError, StorageError) as error:
                self.faults += _damage_text(error)

    def everything(
        self, requests: list[ReadRequest], sums: Mapping[Place, Place], missing: Mapping[str, str]
    ) -> Stretch:
        """Return all ranges to read: those of `requests`, and the headers of files."""
        plain = []
        for location, file in self._document.own_files.items():
            if file.header and location not in missing:
                held = e.ObjectEntry(location, (0, file.header), TABLE, "", file.header_digest)
                plain.append(ReadRequest("", held, location, 0, file.header))
        requests = [*plain, *requests]
        made = Stretch(sums=sorted(set(sums.values())))
        for request in requests:
            made.add(request)
        made.nbytes += sum(end - begin for _, begin, end in made.sums)
        return made

    async def _resumed(self, everything: Stretch, resume: str | os.PathLike[str]) -> int:
        """Continue an interrupted verification, and journal this one. Return the bytes that were verified before."""
        opened, document = self._opened, self._document
        known = sorted(each for each in document.files if each != INLINE and each in locations_of(everything))
        held = await stat_files(opened.storage, known)
        verified = document.save_id + signer_of(opened.session.seal)
        notes = await in_thread(VerifyJournal.open, resume, str(opened.url), verified, held)
        try:
            self.faults += notes.faults
            self._without |= notes.without
            self._meter.begin(everything.nbytes)
            self._meter.wrote(notes.before)
            for stretch in cut_stretches(everything, notes.done):
                if not stretch.nbytes:
                    continue
                met = len(self.faults)
                await self.look(stretch, self._meter.wrote)
                bare = self._without.intersection(stretch.sums)
                await in_thread(notes.add, stretch.keys(), self.faults[met:], bare)
            await self._look_at_conditions()
        finally:
            await in_thread(notes.close)
        if not self.faults:
            await in_thread(notes.remove)
        return notes.before

    async def look(self, stretch: Stretch, progress: Callable[[int], None]) -> None:
        """Verify a stretch."""
        for request in stretch.plain:
            self.faults += await self._plain_faults(request)
            progress(request.end - request.begin)
        found, read = await self._data_faults(stretch.requests, progress)
        self.faults += found
        self._read += read
        if stretch.sums:
            self.faults += await self._sum_faults(stretch.sums, progress)

    async def _plain_faults(self, request: ReadRequest) -> list[str]:
        """Return a fault if a header or long table does not match its digest."""
        where = f"{request.location}[{request.begin}:{request.end}]"
        name = f"{request.name}: " if request.name else ""
        held = bytearray(request.end - request.begin)

        async def actual() -> str:
            await self._opened.storage.read_into(request.location, request.begin, [held])
            self._heads += len(held)
            return digest_range(held)

        try:
            found = await actual()
            if found != request.stored.digest and not self._opened.storage.capabilities.local:
                found = await actual()
        except (CorruptSnapshotError, StorageError) as error:
            return [f"{name}{where}: {each}" for each in _damage_text(error)]
        if found == request.stored.digest:
            return []
        return [f"{name}{where}: digest must be {request.stored.digest}, got {found}"]

    async def _data_faults(
        self, requests: Sequence[ReadRequest], progress: Callable[[int], None]
    ) -> tuple[list[str], int]:
        """Return the faults of data ranges, and the number of bytes read.

        Ranges that cannot be read do not stop the others. They are narrowed down to their entries.
        """
        if not requests:
            return [], 0
        opened = self._opened
        reader = Reader(opened, verify=True)
        try:
            await reader.read(requests, progress)
        except (CorruptSnapshotError, StorageError) as error:
            damage = _damage_text(error)
            if len(requests) == 1:
                (request,) = requests
                where = f"{request.name}: {request.location}[{request.begin}:{request.end}]"
                lines = [line if request.name in line else f"{where}: {line}" for line in damage]
                return lines + reader.result.faults, reader.result.bytes_read
            files = sorted({request.location for request in requests})
            if len(files) > 1:
                halves = [[request for request in requests if request.location == each] for each in files]
            else:
                ordered = sorted(requests, key=lambda request: request.begin)
                halves = [ordered[: len(requests) // 2], ordered[len(requests) // 2 :]]
            faults, nbytes = [], 0
            for half in halves:
                found, read = await self._data_faults(half, unmetered)
                faults += found
                nbytes += read
            return faults, nbytes
        return reader.result.faults, reader.result.bytes_read

    async def _sum_faults(self, archives: Sequence[Place], progress: Callable[[int], None]) -> list[str]:
        """Return the faults of archives whose checksums do not match."""
        opened = self._opened
        self._summed += sum(end - begin for _, begin, end in archives)
        try:
            found, without = await find_faults(opened.storage, opened.budget, archives, progress)
        except (CorruptSnapshotError, StorageError) as error:
            return _damage_text(error)
        self._without |= without
        return found


def _count_in_base(document: Document) -> int:
    """Return the number of entries whose bytes, or a part of them, only the base has."""
    held = document.files.keys() - document.own_files.keys()
    return sum(any(each.location in held for each in entry.stored()) for entry in document.manifest.values() if held)


def _held_by(missing: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each missing or changed file, with its contents."""
    if not missing:
        return []
    held: dict[str, list[str]] = {location: [] for location in missing}
    for path, entry in manifest.items():
        files = {each.location for each in entry.stored()} | {
            each.blocks[0] for each in entry.stored() if each.blocks is not None
        }
        for location in files & held.keys():
            held[location].append(path)
    lines = []
    for location, line in missing.items():
        first, more = held[location][:1], len(held[location]) - 1
        what = f" (holds {first[0]}{f' and {more:,} more' if more else ''})" if first else ""
        lines.append(line + what)
    return lines


def _damage_text(error: CorruptSnapshotError | StorageError) -> list[str]:
    """Return an error's lines about damaged bytes. Raise other errors, such as an unreachable server."""
    if isinstance(error, StorageError) and error.errno not in (errno.EIO, errno.ENOENT):
        raise error
    return list(getattr(error, "faults", ())) or [str(error)]


# Signing of a committed snapshot: every byte is read once, compared with its digest, and hashed.


# Read-back verification of written bytes before the commit, to detect bits that flipped on the way to storage.

PIECE = 4 << 20
"""Bytes that are read together if only a sample is read."""


async def expect_read_back(session: Session, described: RankManifest, *, share: float, verb: str) -> None:
    """Read back a fraction of the bytes that this process wrote. Raise if any byte differs.

    Files that are shared with a base were read before they were shared.
    """
    files, manifest = described.files, {**described.shared, **described.own}
    written = {location: file for location, file in files.items() if not (file.in_base or file.age)}
    storage = session.storage
    await storage.drop_caches(list(written))
    document = Document(FORMAT, "", "", 1, "", "", msgspec.Raw(b"{}"), written, [], manifest)
    opened = Opened(session, document, storage, derive_files(session, storage, written))
    verification = Verification(opened, Meter(verb, None), solo_exchange(verb))
    requests = requests_of([manifest, {}], files, verification.faults)
    everything = verification.everything([each for each in requests if each.location in written], {}, {})
    chosen = everything if share == 1.0 else _sample(everything, share)
    await verification.look(chosen, lambda _: None)
    faults = list(dict.fromkeys(verification.faults))
    if faults:
        raise CorruptSnapshotError(
            f"{session.url}: {len(faults)} of the ranges that were read back do not match their digests, so nothing "
            f"was committed:{listed(faults)}",
            faults=faults,
        )
    emit("read_back", verb, str(session.url), bytes=chosen.nbytes)


def _sample(everything: Stretch, share: float) -> Stretch:
    """Choose random pieces: the given fraction of each file, and at least one."""
    pieces: dict[str, list[ReadRequest]] = defaultdict(list)
    for request in cut_requests((*everything.plain, *everything.requests), PIECE):
        pieces[request.location].append(request)
    made = Stretch()
    for held in pieces.values():
        for request in _choose_pieces(held, share):
            made.add(request)
    return made


def _choose_pieces(pieces: Sequence[ReadRequest], share: float) -> list[ReadRequest]:
    return random.SystemRandom().sample(pieces, max(1, round(share * len(pieces))))
