"""Verification: compares every byte of a snapshot with its digest."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from snapshot.aio import in_thread
from snapshot.distributed.exchange import Exchange
from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.events import emit
from snapshot.formats import zip_checksums
from snapshot.formats.unpickling import INLINE
from snapshot.loading.open import missing_files
from snapshot.loading.reader import Reader
from snapshot.loading.requests import ReadRequest
from snapshot.loading.stored_ranges import TABLE, Place, find_uncovered, requests_of, stored_of
from snapshot.manifest import entries as e
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import Document
from snapshot.manifest.rank_view import group_by_key, is_rank, make_rank_view, split_by_rank
from snapshot.manifest.validate import check_tree
from snapshot.progress import Meter, unmetered
from snapshot.reports import VerifyReport
from snapshot.runtime.loop import in_own_thread, run
from snapshot.runtime.session import Session
from snapshot.save.joint_work import while_all_go_on
from snapshot.signing.seal import signer_of
from snapshot.tensors.digest import digest_range
from snapshot.text import counted
from snapshot.verbs.copy_stream import stat_files
from snapshot.verbs.joint_call import open_sources, tokens_of
from snapshot.verbs.stretches import Stretch, cut_stretches, locations_of, share_of
from snapshot.verbs.verify_journal import VerifyJournal

AGAIN = 10
"""Attempts for a snapshot that other saves keep replacing."""
MOST_VIEWS = 2_000_000
"""Maximum number of entries in the views of ranks that are checked. Beyond it, only the first ranks are checked."""
EMPTY_VIEW = 30
"""Entries that take as long as a view without entries."""


def verify_checkpoint(
    session: Session,
    meter: Meter,
    *,
    exchange: Exchange,
    quick: bool = False,
    resume: str | os.PathLike[str] | None = None,
) -> VerifyReport:
    """Read and verify everything, and close the session. Faults are listed, not raised, if the manifest is readable.

    Several ranks share the ranges, and all of them return the same report. See `verify_newest`.
    """
    try:
        if resume is not None and not exchange.alone:
            raise ValueError("resume must be None if ranks share the work, since a journal is of one process")
        report = verify_newest(session, meter, exchange=exchange, quick=quick, resume=resume)
    finally:
        run(session.close())
        meter.close()
    emit("verified", "verify", str(session.url), ok=report.ok, bytes=report.bytes_read)
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
    document = _open_now(session, exchange, quick)
    for _ in range(AGAIN):
        report = run(Verification(session, document, meter, exchange).run(quick, resume))
        if report.ok:
            break
        now = _open_now(session, exchange, quick)
        if now.save_id == document.save_id and tokens_of(now) == tokens_of(document):
            break
        document = now
    return report


def _open_now(session: Session, exchange: Exchange, quick: bool) -> Document:
    arguments = {"url": session.url, "quick": quick}
    [document] = open_sources(exchange, "verify", arguments, [session])
    return document


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

    def __init__(self, session: Session, document: Document, meter: Meter, exchange: Exchange) -> None:
        self._exchange = exchange
        self._session = session
        self._document = document
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
        sums = zip_checksums.find_archives((request.stored for request in requests), document.files)
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
            len(own.keys() - {INLINE}),
            before,
            _count_in_base(document),
            signer_of(self._session.seal),
        )

    @property
    def _nbytes(self) -> int:
        """Bytes that were read. An archive's checksums and its entries' digests may be of the same bytes."""
        return self._heads + max(self._read, self._summed)

    async def _missing_files(self) -> dict[str, str]:
        """Return a line for each file that is missing or has another size. Each rank looks for a share of the files."""
        exchange, session, document = self._exchange, self._session, self._document
        own = set(sorted(document.own_files)[exchange.rank :: exchange.world])
        found = await while_all_go_on(exchange, missing_files(session, document, own, errno.EIO))

        def lead(all_: list[dict[str, str]]) -> dict[str, str]:
            return dict(sorted((name, line) for each in all_ for name, line in each.items()))

        return await in_own_thread(exchange.agree, found, lead, dict[str, str], dict[str, str])

    async def _look_together(self, everything: Stretch) -> int:
        """Verify this rank's share, and collect the results of all ranks. Return the bytes that all of them read."""
        exchange = self._exchange
        stretch = everything if exchange.alone else share_of(exchange, everything)
        self._meter.begin(stretch.nbytes)
        before = len(self.faults)
        await while_all_go_on(exchange, self.look(stretch, self._meter.wrote))
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
        session, document = self._session, self._document
        known = sorted(each for each in document.files if each != INLINE and each in locations_of(everything))
        held = await stat_files(session.storage, known)
        verified = document.save_id + signer_of(session.seal)
        notes = await in_thread(VerifyJournal.open, resume, str(session.url), verified, held)
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
            await self._session.storage.read_into(request.location, request.begin, [held])
            self._heads += len(held)
            return digest_range(held)

        try:
            found = await actual()
            if found != request.stored.digest and not self._session.storage.capabilities.blocking:
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
        session = self._session
        reader = Reader(session.storage, session.budget, verify=True, wanted_part=session.settings.part_bytes)
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
        session = self._session
        self._summed += sum(end - begin for _, begin, end in archives)
        try:
            found, without = await zip_checksums.find_faults(session.storage, session.budget, archives, progress)
        except (CorruptSnapshotError, StorageError) as error:
            return _damage_text(error)
        self._without |= without
        return found


def _count_in_base(document: Document) -> int:
    """Return the number of entries whose bytes, or a part of them, only the base has."""
    held = document.files.keys() - document.own_files.keys()
    return sum(any(each.location in held for each in stored_of(entry)) for entry in document.manifest.values() if held)


def _held_by(missing: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str]:
    """Return a line for each missing or changed file, with its contents."""
    if not missing:
        return []
    held: dict[str, list[str]] = {location: [] for location in missing}
    for path, entry in manifest.items():
        files = {each.location for each in stored_of(entry)} | {
            each.blocks[0] for each in stored_of(entry) if each.blocks is not None
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
