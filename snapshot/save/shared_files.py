"""Sharing: a take that is based on earlier snapshots shares their files whose tensors did not change.

The digests of the live tensors decide, never their version counters. A file is shared as a whole or not at all, and its
header names the same tensors in all snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from snapshot.aio import gather_limited, in_thread
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError
from snapshot.events import emit, log
from snapshot.plan.layout import FilePlan, name_data_file
from snapshot.runtime.arena import arena, arena_bytes
from snapshot.save.base_files import Base, BaseFile
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import TakeOpening
from snapshot.save.staging import FileDigests, Stager
from snapshot.save.unchanged import WORTH_SHARING, Unchanged, index_paths, name_extent
from snapshot.save.writer import WrittenFile
from snapshot.tensors.digest import BLOCK, SIZE, digest_range, digest_table
from snapshot.text import counted, listed, size_text

CHECKED = 16
"""Each take reads one of this many parts of the shared bytes from the disk. So 16 takes read all of them."""
OLDEST = 8
"""Maximum number of takes in a row that share a file of a single base. The next take writes an independent copy."""
PART = 4 << 20
AT_ONCE = 8
"""Files that are shared at once: on object stores, the server copies them."""
Tables = Mapping[tuple[str, int, int], bytes]
"""Tables of digests, by file and range."""


@dataclass
class Match:
    """A base's file whose tensors are unchanged, and the same file with the take's leaves."""

    held: BaseFile
    plan: FilePlan
    digests: FileDigests
    token: str

    def blocks(self) -> list[tuple[int, int, str]]:
        """Return begin, end and digest of each block, by the digests of the live tensors."""
        found: list[tuple[int, int, str]] = []
        for index, extent in enumerate(self.plan.extents):
            table = self.digests.tables.get(index)
            if table is None:
                found += [(extent.begin, extent.end, self.digests.digests[index])] if extent.begin < extent.end else []
                continue
            digests = (table[at : at + SIZE].hex() for at in range(0, len(table), SIZE))
            found += [
                (begin, min(begin + BLOCK, extent.end), f"xxh3:{digest}")
                for begin, digest in zip(range(extent.begin, extent.end, BLOCK), digests, strict=True)
            ]
        return found


class FileSharing:
    """The comparison of a take with its bases, and the sharing of the files that did not change."""

    def __init__(
        self,
        opening: TakeOpening,
        share: RankShare,
        bases: Sequence[Base],
        stager: Stager,
        unchanged: Unchanged,
        *,
        two_copies: bool,
        read_all: bool,
    ) -> None:
        """`read_all`: read the files whole before they are shared, instead of a part of them."""
        self._opening = opening
        self._session = opening.session
        self._leaves = share.leaves
        self._bases = bases
        self._stager = stager
        self._made = unchanged
        self._two_copies = two_copies
        self._read_all = read_all

    async def run(self, left_out: set[int]) -> None:
        """Share what did not change, except the leaves `left_out`."""
        index = index_paths(self._leaves, left_out)
        candidates = [
            (held, plan)
            for held in self._candidates()
            if held.entry.size >= WORTH_SHARING and (plan := held.plan(self._leaves, index)) is not None
        ]
        tables = await read_tables(held for held, _ in candidates)
        await in_thread(self._stager.digest_ahead, [plan for _, plan in candidates], self._session.budget)
        lanes = self._session.settings.lane_count()
        found = await gather_limited(candidates, lambda each: self._compare(*each, tables), lanes)
        matches = self._whole_leaves([each for each in found if each is not None])
        matches = [each for each in matches if self._may_share(each)]
        sound = await gather_limited(matches, self._is_sound, lanes)
        await self._share(self._whole_leaves([each for each, fine in zip(matches, sound, strict=True) if fine]))
        self._made.leave_out(self._leaves, left_out | _leaves_of(each.file for each in self._made.files))

    def _candidates(self) -> Iterator[BaseFile]:
        """Yield the files that may be shared: those of the newest base, or for two copies those of the one before."""
        base = self._source()
        for held in base.files.values() if base is not None and base.shares else ():
            if held.entry.in_base:
                continue
            if self._is_linked() and not self._two_copies and held.entry.age >= OLDEST:
                self._made.notes.append(f"{held.location} of {base}: written anew, after {OLDEST} takes that shared it")
                continue
            yield held

    def _source(self) -> Base | None:
        """Return the base whose files may be shared.

        A link has one physical copy. For two copies, each take shares with the snapshot before the newest one.
        """
        which = 1 if self._two_copies and self._is_linked() else 0
        return self._bases[which] if len(self._bases) > which else None

    def _is_linked(self) -> bool:
        return self._session.storage.capabilities.shares == "link"

    # Compare

    async def _compare(self, held: BaseFile, plan: FilePlan, tables: Tables) -> Match | None:
        """Compare a file with the live tensors. Return None if they differ, or if the base's file is not there."""
        expected = [(each.stored.digest, _table_of(each.stored.blocks, tables)) for each in held.ranges]
        digests = await in_thread(self._stager.digest_file, plan, self._session.budget, expected)
        if digests is None:
            return None
        try:
            stat = await held.base.session.storage.stat(held.location)
        except StorageError as error:
            self._note(held, f"cannot be shared: {error}")
            return None
        if stat.size != held.entry.size:
            self._report_rot(held, [f"must have {held.entry.size:,} bytes, got {stat.size:,}"])
            return None
        return Match(held, plan, digests, stat.token)

    def _whole_leaves(self, matches: Sequence[Match]) -> list[Match]:
        """Return the files whose leaves are whole in them: a leaf is shared in all of its files, or in none."""
        while True:
            shared = Counter[int]()
            for each in matches:
                for extent in each.plan.extents:
                    shared[extent.leaf] += extent.end - extent.begin
            partial = {leaf for leaf, nbytes in shared.items() if nbytes != self._leaves[leaf].nbytes}
            kept = [each for each in matches if partial.isdisjoint(extent.leaf for extent in each.plan.extents)]
            if len(kept) == len(matches):
                return kept
            matches = kept

    def _may_share(self, match: Match) -> bool:
        """Return True unless this would leave the two newest snapshots with one physical copy."""
        if not (self._two_copies and self._is_linked()):
            return True
        newest = self._made.compared or {}
        for extent, digest in zip(match.plan.extents, match.digests.digests, strict=True):
            held = newest.get(name_extent(self._leaves[extent.leaf], extent))
            if held is None or held[0] != digest or held[1] == match.held.origin:
                self._note(match.held, "written anew, so that the newest snapshots have two physical copies")
                return False
        return True

    # Rot

    async def _is_sound(self, match: Match) -> bool:
        """Read a part of the file from the disk, another one in each take, and compare it with the live tensors."""
        storage, held = match.held.base.session.storage, match.held
        blocks = match.blocks()
        if not self._read_all:
            turn = held.entry.age % CHECKED
            blocks = blocks[turn * len(blocks) // CHECKED : (turn + 1) * len(blocks) // CHECKED]
            if not self._is_linked():  # the server copies, and checks what it copies
                return True
        faults: list[str] = []
        try:
            await storage.drop_caches([held.location])
            for run in _runs_of(blocks):
                faults += await self._read_back(match, run)
        except CorruptSnapshotError as error:
            faults.append(str(error))
        except StorageError as error:
            faults.append(f"cannot be read: {error}")
        if faults:
            self._report_rot(held, faults)
        return not faults

    async def _read_back(self, match: Match, blocks: Sequence[tuple[int, int, str]]) -> list[str]:
        begin, nbytes = blocks[0][0], blocks[-1][1] - blocks[0][0]
        budget = self._session.budget
        await budget.acquire(arena_bytes(nbytes))
        slot = arena().take(nbytes)
        try:
            await match.held.base.session.storage.read_into(match.held.location, begin, [slot.view[:nbytes]])

            def wrong() -> list[str]:
                found = ((low, high, digest_range(slot.view[low - begin : high - begin])) for low, high, _ in blocks)
                return [
                    f"bytes {low}-{high}: digest must be {digest}, got {got}"
                    for (low, high, got), (_, _, digest) in zip(found, blocks, strict=True)
                    if got != digest
                ]

            return await in_thread(wrong)
        finally:
            arena().give(slot)
            budget.release(slot.size)

    def _report_rot(self, held: BaseFile, faults: Sequence[str]) -> None:
        place = str(held.base.session.url.join(held.location))
        self._note(held, f"damaged, so its tensors are written anew: {'; '.join(faults[:3])}")
        log.error("%s: damaged; its tensors are written anew from memory:%s", place, listed(faults, 10))
        emit("rotten", self._opening.meter.verb, str(self._session.url), file=place, faults=list(faults))

    def _note(self, held: BaseFile, what: str) -> None:
        self._made.notes.append(f"{held.base.session.url.join(held.location)}: {what}")

    # Share

    async def _share(self, matches: Sequence[Match]) -> None:
        """Give each file a name in this take. A file that cannot be shared is written instead."""
        if not matches:
            return
        transaction, rank = self._opening.transaction(), self._opening.exchange.rank
        names = [name_data_file(transaction.save_id, rank, number, "safetensors") for number in range(len(matches))]
        self._made.used = len(names)
        await transaction.begin_sharing(names)
        pairs = list(zip(matches, names, strict=True))
        done = await gather_limited(pairs, lambda each: self._share_one(*each), AT_ONCE)
        shared = [each for each, fine in zip(matches, done, strict=True) if fine]
        kept = self._whole_leaves(shared)
        for match, name in pairs:
            if any(match is each for each in kept):
                digests = match.digests
                self._made.files.append(WrittenFile(match.plan, name, digests.digests, digests.tables, match.held))
            elif any(match is each for each in shared):
                await self._session.storage.delete([name])
        if kept:
            nbytes = self._made.nbytes
            emit("shared", self._opening.meter.verb, str(self._session.url), files=len(kept), bytes=nbytes)
            log.debug("%s: shares %s in %s", self._session.url, size_text(nbytes), counted(len(kept), "file"))

    async def _share_one(self, match: Match, name: str) -> bool:
        storage, held = self._session.storage, match.held
        try:
            await storage.share(held.base.session.storage.url.join(held.location), name, token=match.token)
            size = (await storage.stat(name)).size
            if size != held.entry.size:
                raise StorageError(f"{storage.url.join(name)}: must have {held.entry.size:,} bytes, got {size:,}")
        except SnapshotError as error:
            self._note(held, f"cannot be shared, so its tensors are written: {error}")
            await storage.delete([name])
            return False
        return True


def _leaves_of(plans: Iterable[FilePlan]) -> set[int]:
    return {extent.leaf for plan in plans for extent in plan.extents}


def _runs_of(blocks: Sequence[tuple[int, int, str]]) -> Iterator[Sequence[tuple[int, int, str]]]:
    """Split adjacent blocks into runs of at most PART bytes, or one block."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index][1] - blocks[first][0] > PART:
            yield blocks[first:index]
            first = index


def _table_of(place: tuple[str, int, int] | None, tables: Tables) -> bytes:
    return b"" if place is None else tables.get(place, b"")


async def read_tables(files: Iterable[BaseFile]) -> dict[tuple[str, int, int], bytes]:
    """Read the tables of digests that files need. A table that is damaged is left out: its tensor counts as changed."""
    places = [(held.base, each.stored) for held in files for each in held.ranges if each.stored.blocks is not None]
    tables: dict[tuple[str, int, int], bytes] = {}

    async def read(each: tuple[Base, list[tuple[tuple[str, int, int], str | None]]]) -> None:
        base, these = each
        location, begin, end = these[0][0][0], these[0][0][1], these[-1][0][2]
        data = bytearray(end - begin)
        try:
            await base.session.storage.read_into(location, begin, [data])
        except SnapshotError as error:
            log.warning("%s: cannot be read: %s", base.session.url.join(location), error)
            return
        for (_, low, high), digest in these:
            table = bytes(data[low - begin : high - begin])
            if digest_table(table) == digest:
                tables[location, low, high] = table

    runs: list[tuple[Base, list[tuple[tuple[str, int, int], str | None]]]] = []
    for base, stored in sorted(places, key=lambda each: (id(each[0]), each[1].blocks)):
        place = stored.blocks
        assert place is not None
        last = runs[-1][1][-1][0] if runs and runs[-1][0] is base else None
        if last is None or (last[0], last[2]) != place[:2]:
            runs.append((base, []))
        runs[-1][1].append((place, stored.digest))
    await gather_limited(runs, read)
    return tables
