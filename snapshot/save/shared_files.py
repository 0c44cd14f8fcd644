"""Sharing: a take that is based on earlier snapshots shares their files whose tensors did not change.

The digests of the live tensors decide, never their version counters. A file is shared as a whole or not at all, and its
header names the same tensors in all snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from snapshot.aio import gather_limited, in_thread
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError, StorageNotFoundError
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

CHECKED = 32
"""Each take reads one of this many parts of the shared bytes from the disk. So 32 takes read all of them."""
OLDEST = 8
"""Maximum number of takes in a row that share a file of a single base. The next take writes an independent copy."""
PART = 4 << 20
IN_FLIGHT = 3
"""Reads of one file at once."""
SLICE = 64 << 20
"""Bytes that one thread compares in a row."""
AT_ONCE = 8
"""Files that are shared at once: on object stores, the server copies them."""
Tables = Mapping[tuple[str, int, int], bytes]
"""Tables of digests, by file and range."""


class Comparison:
    """The comparison of a base's file with the live tensors, in slices for several threads."""

    def __init__(self, held: BaseFile, plan: FilePlan, tables: Tables) -> None:
        self.held = held
        self.plan = plan
        self.equal = True
        self.token = ""
        self.read: list[tuple[int, str]] = []
        """The begin of each block that was read from the disk, and its digest."""
        self.faults: list[str] = []
        """The differences between the file on the disk and the live tensors."""
        self.digests = [""] * len(plan.extents)
        self.tables: dict[int, bytes] = {}
        self.slices = list(self._cut(tables))

    def _cut(self, tables: Tables) -> Iterator[Slice]:
        extents, first = self.plan.extents, 0
        for last in range(1, len(extents) + 1):
            begin = extents[first].begin
            if last == len(extents) or extents[last].end - begin > SLICE:
                moved = [replace(each, begin=each.begin - begin, end=each.end - begin) for each in extents[first:last]]
                stored = [each.stored for each in self.held.ranges[first:last]]
                expected = [(each.digest, tables.get(each.blocks, b"") if each.blocks else b"") for each in stored]
                yield Slice(self, first, FilePlan(b"", tuple(moved), moved[-1].end), expected)
                first = last

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield begin and end of the header, and of each block."""
        yield 0, len(self.plan.header)
        for extent in self.plan.extents:
            for begin in range(extent.begin, extent.end, BLOCK):
                yield begin, min(begin + BLOCK, extent.end)

    def live(self) -> dict[int, str]:
        """Return the digest of the header, and of the live bytes of each block, by its begin."""
        found = {0: digest_range(self.plan.header)}
        for index, extent in enumerate(self.plan.extents):
            table = self.tables.get(index)
            if table is None:
                found[extent.begin] = self.digests[index] if extent.begin < extent.end else found.get(extent.begin, "")
            else:
                pairs = zip(range(extent.begin, extent.end, BLOCK), range(0, len(table), SIZE), strict=True)
                found |= {begin: f"xxh3:{table[at : at + SIZE].hex()}" for begin, at in pairs}
        return found

    def add(self, slice_: Slice, found: FileDigests) -> None:
        """Record the digests of a slice."""
        self.digests[slice_.first : slice_.first + len(found.digests)] = found.digests
        self.tables.update({slice_.first + index: table for index, table in found.tables.items()})


class Slice(NamedTuple):
    """Some extents of a file, as a file of their own without a header."""

    of: Comparison
    first: int
    plan: FilePlan
    expected: list[tuple[str | None, bytes]]


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
        candidates = list(self._candidates())
        tables = await read_tables(candidates)
        comparisons = [
            Comparison(held, plan, tables)
            for held in candidates
            if not held.differs_at_once(self._leaves, index, tables)
            and (plan := held.plan(self._leaves, index)) is not None
        ]
        slices = [each for comparison in comparisons for each in comparison.slices]
        await in_thread(self._stager.digest_ahead, [each.plan for each in slices], self._session.budget)
        lanes = self._session.settings.lane_count()
        compare = partial(gather_limited, slices, partial(in_thread, self._compare_slice), lanes)
        read = partial(gather_limited, comparisons, self._read_turn, lanes)
        await gather_limited((compare, read), lambda each: each())  # the disk is read meanwhile
        matches = self._whole_leaves([each for each in comparisons if each.equal])
        await self._share(self._whole_leaves([each for each in matches if self._may_share(each)]))
        self._made.leave_out(self._leaves, left_out | _leaves_of(each.file for each in self._made.files))

    def _candidates(self) -> Iterator[BaseFile]:
        """Yield the files that may be shared: those of the newest base, or for two copies those of the one before."""
        base = self._source()
        for held in base.files.values() if base is not None and base.shares else ():
            if held.entry.in_base or held.entry.size < WORTH_SHARING:
                continue
            if self._is_linked() and not self._two_copies and held.entry.age >= OLDEST:
                self._note(held, f"written again, after {OLDEST} takes that shared it")
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

    def _compare_slice(self, slice_: Slice) -> None:
        """Compare a slice with the live tensors, unless another slice of the file differs already."""
        if slice_.of.equal:
            found = self._stager.digest_file(slice_.plan, self._session.budget, slice_.expected)
            if found is None:
                slice_.of.equal = False
            else:
                slice_.of.add(slice_, found)

    def _whole_leaves(self, matches: Sequence[Comparison]) -> list[Comparison]:
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

    def _may_share(self, match: Comparison) -> bool:
        """Return True unless the file is damaged, or the two newest snapshots would have one physical copy."""
        if not self._is_sound(match):
            return False
        if not (self._two_copies and self._is_linked()):
            return True
        newest = self._made.compared or {}
        for extent, digest in zip(match.plan.extents, match.digests, strict=True):
            held = newest.get(name_extent(self._leaves[extent.leaf], extent))
            if held is None or held[0] != digest or held[1] == match.held.origin:
                self._note(match.held, "written again, so that the newest snapshots have two physical copies")
                return False
        return True

    # Rot

    async def _read_turn(self, compared: Comparison) -> None:
        """Read a part of the base's file from the disk, another one in each take."""
        storage, held = compared.held.base.session.storage, compared.held
        blocks = list(compared.places())
        if not self._read_all:
            turn = held.entry.age % CHECKED
            blocks = blocks[turn * len(blocks) // CHECKED : (turn + 1) * len(blocks) // CHECKED]
        try:
            stat = await storage.stat(held.location)
            if stat.size != held.entry.size:
                raise CorruptSnapshotError(f"must have {held.entry.size:,} bytes, got {stat.size:,}")
            compared.token = stat.token
            if not (self._is_linked() or self._read_all):  # the server copies, and checks what it copies
                return
            await storage.drop_caches([held.location])
            read = partial(self._read_back, compared)
            for found in await gather_limited(list(_runs_of(blocks)), read, IN_FLIGHT):
                compared.read += found
        except StorageNotFoundError as error:
            compared.equal = False
            self._note(held, f"cannot be shared: {error}")
        except (CorruptSnapshotError, StorageError) as error:
            compared.faults.append(str(error))

    async def _read_back(self, compared: Comparison, blocks: Sequence[tuple[int, int]]) -> list[tuple[int, str]]:
        """Return the begin of each block, and the digest of its bytes on the disk; [] if the file differs anyway."""
        if not compared.equal:
            return []
        held = compared.held
        begin, nbytes = blocks[0][0], blocks[-1][1] - blocks[0][0]
        budget = self._session.budget
        await budget.acquire(arena_bytes(nbytes))
        slot = arena().take(nbytes)
        try:
            await held.base.session.storage.read_into(held.location, begin, [slot.view[:nbytes]])

            def digests() -> list[tuple[int, str]]:
                return [(low, digest_range(slot.view[low - begin : high - begin])) for low, high in blocks]

            return await in_thread(digests)
        finally:
            arena().give(slot)
            budget.release(slot.size)

    def _is_sound(self, compared: Comparison) -> bool:
        """Return True if the bytes that were read from the disk are those of the live tensors."""
        live = compared.live() if compared.read else {}
        compared.faults += [
            f"block at byte {begin}: digest must be {live[begin]}, got {digest}"
            for begin, digest in compared.read
            if live[begin] != digest
        ]
        if compared.faults:
            self._report_rot(compared.held, compared.faults)
        return not compared.faults

    def _report_rot(self, held: BaseFile, faults: Sequence[str]) -> None:
        place = str(held.base.session.url.join(held.location))
        self._note(held, f"damaged, so its tensors are written again: {'; '.join(faults[:3])}")
        log.error("%s: damaged; its tensors are written again from memory:%s", place, listed(faults, 10))
        emit("rotten", self._opening.meter.verb, str(self._session.url), file=place, faults=list(faults))

    def _note(self, held: BaseFile, what: str) -> None:
        self._made.notes.append(f"{held.base.session.url.join(held.location)}: {what}")

    # Share

    async def _share(self, matches: Sequence[Comparison]) -> None:
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
                self._made.files.append(WrittenFile(match.plan, name, match.digests, match.tables, match.held))
            elif any(match is each for each in shared):
                await self._delete(name)
        if kept:
            nbytes = self._made.nbytes
            emit("shared", self._opening.meter.verb, str(self._session.url), files=len(kept), bytes=nbytes)
            log.debug("%s: shares %s in %s", self._session.url, size_text(nbytes), counted(len(kept), "file"))

    async def _share_one(self, match: Comparison, name: str) -> bool:
        storage, held = self._session.storage, match.held
        try:
            await storage.share(held.base.session.storage.url.join(held.location), name, token=match.token)
            size = (await storage.stat(name)).size
            if size != held.entry.size:
                raise StorageError(f"{storage.url.join(name)}: must have {held.entry.size:,} bytes, got {size:,}")
        except SnapshotError as error:
            self._note(held, f"cannot be shared, so its tensors are written: {error}")
            await self._delete(name)
            return False
        return True

    async def _delete(self, name: str) -> None:
        """Delete a name that is not used, if possible: it only costs space."""
        with suppress(SnapshotError):
            await self._session.storage.delete([name])


def _leaves_of(plans: Iterable[FilePlan]) -> set[int]:
    return {extent.leaf for plan in plans for extent in plan.extents}


def _runs_of(blocks: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Split adjacent blocks into runs of at most PART bytes, or one block."""
    first = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index][1] - blocks[first][0] > PART:
            yield blocks[first:index]
            first = index


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
