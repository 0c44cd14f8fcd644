"""Sharing: a take that is based on earlier snapshots shares their files whose tensors did not change.

The digests of the live tensors decide, never their version counters. A file is shared as a whole or not at all, and its
header names the same tensors in all snapshots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

from snapshot.aio import gather_limited
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError
from snapshot.events import emit, log
from snapshot.plan.layout import name_data_file
from snapshot.save.base_files import Base, BaseFile
from snapshot.save.comparison import CHECKED, Comparer, Comparison, add_use, count_uses, read_tables
from snapshot.save.packing import PackedResult
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import TakeOpening
from snapshot.save.unchanged import WORTH_SHARING, Unchanged, index_paths, name_extent
from snapshot.save.writer import WrittenFile
from snapshot.signing.tree import FileTree
from snapshot.tensors.digest import digest_range
from snapshot.text import counted, size_text

AT_ONCE = 8
"""Files that are shared at once: on object stores, the server copies them."""
OLDEST = CHECKED
"""Maximum number of takes in a row that share a file of a single base. The next take writes an independent copy."""


class FileSharing:
    """Shares the files of a base whose tensors are unchanged."""

    def __init__(
        self,
        opening: TakeOpening,
        share: RankShare,
        bases: Sequence[Base],
        comparer: Comparer,
        unchanged: Unchanged,
        *,
        two_copies: bool,
        signed: bool = False,
    ) -> None:
        self._opening = opening
        self._session = opening.session
        self._leaves = share.leaves
        self._bases = bases
        self._comparer = comparer
        self._made = unchanged
        self._two_copies = two_copies
        self._signed = signed
        self._trees: dict[str, FileTree] = {}
        """The hashes of the files that are shared, by their names here."""
        self._packed: dict[str, PackedResult | None] = {}
        """The tables of the compressed files among those that are shared."""

    async def run(self, left_out: set[int]) -> None:
        """Share what did not change, except the leaves `left_out`."""
        base = self._source()
        if base is None or not base.shares or (self._signed and base.signed is None):
            return
        index = index_paths(self._leaves, left_out)
        candidates = list(self._candidates(base))
        tables = await read_tables(base, (each for held in candidates for each in held.ranges))
        comparisons = [
            Comparison(held, plan, held.ranges, tables)
            for held in candidates
            if not held.differs_at_once(self._leaves, index, tables)
            and (plan := held.plan(self._leaves, index)) is not None
        ]
        await self._comparer.compare(comparisons)
        matches = self._whole_leaves([each for each in comparisons if each.equal])
        await self._share(self._whole_leaves([each for each in matches if self._may_share(each)]))
        shared = {extent.leaf for each in self._made.files for extent in each.file.extents}
        self._made.leave_out(self._leaves, shared)

    def _candidates(self, base: Base) -> Iterator[BaseFile]:
        """Yield the files of a base that may be shared."""
        for held in base.files.values():
            if held.location in base.elsewhere or held.entry.size < WORTH_SHARING:
                continue
            if self._is_linked() and not self._two_copies and count_uses(held) >= OLDEST:
                self._comparer.note(held, f"written again, after {OLDEST} takes that shared it")
                add_use(held, again=False)
                continue
            yield held

    def _source(self) -> Base | None:
        """Return the base whose files may be shared.

        A link has one physical copy. For two copies, each take shares with the snapshot before the newest one.
        """
        which = 1 if self._two_copies and self._is_linked() else 0
        if len(self._bases) > which:
            return self._bases[which]
        self._made.notes.append("everything is written, since two physical copies need two earlier snapshots")
        return None

    def _is_linked(self) -> bool:
        return self._session.storage.capabilities.shares == "link"

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
        if not self._comparer.is_sound(match):
            return False
        if not (self._two_copies and self._is_linked()):
            return True
        newest = self._made.compared or {}
        for extent, digest in zip(match.plan.extents, match.digests, strict=True):
            held = newest.get(name_extent(self._leaves[extent.leaf], extent))
            if held is None or held[0] != digest or held[1] == match.held.origin:
                self._comparer.note(match.held, "written again, so that the newest snapshots have two physical copies")
                return False
        return True

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
            if match in kept:
                add_use(match.held)
                self._made.files.append(
                    WrittenFile(
                        match.plan,
                        name,
                        match.digests,
                        match.tables,
                        match.held,
                        self._packed[match.held.location],
                        self._trees.get(name),
                    )
                )
            elif match in shared:
                await self._delete(name)
        if kept:
            nbytes = self._made.nbytes
            emit("shared", self._opening.meter.verb, str(self._session.url), files=len(kept), bytes=nbytes)
            log.debug("%s: shares %s in %s", self._session.url, size_text(nbytes), counted(len(kept), "file"))

    async def _share_one(self, match: Comparison, name: str) -> bool:
        storage, held = self._session.storage, match.held
        try:
            self._packed[held.location] = await _read_packed(held)
            await storage.share(held.base.session.storage.url.join(held.location), name, token=match.token)
            size = (await storage.stat(name)).size
            if size != held.entry.stored_size:
                raise StorageError(
                    f"{storage.url.join(name)}: must have {held.entry.stored_size:,} bytes, got {size:,}"
                )
            if self._signed and held.base.signed is not None:
                # Not read: if its bytes were changed since they were signed, they do not match these hashes.
                self._trees[name] = await held.base.signed.tree(held.location)
        except SnapshotError as error:
            self._comparer.note(held, f"cannot be shared, so its tensors are written: {error}")
            await self._delete(name)
            return False
        return True

    async def _delete(self, name: str) -> None:
        """Delete a name that is not used, if possible: it only costs space."""
        with suppress(SnapshotError):
            await self._session.storage.delete([name])


async def _read_packed(held: BaseFile) -> PackedResult | None:
    """Return the description of a compressed file, with its table, which the base may not have for long."""
    packed = held.entry.packed
    if packed is None:
        return None
    location, begin, end = packed.index
    table = bytearray(end - begin)
    await held.base.session.storage.read_into(location, begin, [table])
    if digest_range(table) != packed.index_digest:
        raise CorruptSnapshotError(f"{held.place}: its table of blocks is damaged")
    return PackedResult(packed.size, bytes(table), packed.digest)
