"""The part of a take that need not be written: shared files, and frozen parameters that are left out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    StorageError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.formats.foreign import ForeignDocument
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.io.url import Location, locate_source, select_server
from snapshot.loading.open import Opened, open_checkpoint
from snapshot.plan.layout import LATE, LEFT_OUT, STABLE, Extent, name_data_file, place_box
from snapshot.save.base_files import (
    ABSENT,
    CHECKED,
    Base,
    BaseFile,
    Comparer,
    Comparison,
    SignedFiles,
    add_use,
    count_uses,
    open_base,
    read_tables,
)
from snapshot.save.begin import Claim
from snapshot.save.rank_share import RankShare, Share
from snapshot.save.staging import Stager
from snapshot.save.take_options import TakeRequest, find_keys
from snapshot.save.writer import WrittenFile
from snapshot.state.changing import find_frozen
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import FileTree, digest_range
from snapshot.tensors.packed_files import PackedResult
from snapshot.text import counted, size_text

if TYPE_CHECKING:
    from snapshot.save.omission import Omitted

WORTH_SHARING = 64 << 10
"""Minimum bytes of unchanged tensors for files of their own, and of a file that is shared."""
KEPT = 8
"""Number of takes whose unchanged leaves are remembered."""

Ranges = Mapping[tuple[str, str], tuple[str | None, str]]
"""The digest and the physical file of each range of a snapshot, by the path of its leaf and its box."""
_equal: PerProcess[dict[str, frozenset[str]]] = PerProcess(dict)
"""The leaves of recent takes of this process, by save id, that were equal in the base of the take."""


@dataclass(frozen=True)
class Reuse:
    """What a take need not write, since earlier snapshots have it. By default, nothing."""

    compares: bool = False
    """True if the take compares its tensors with earlier snapshots, or later takes will."""
    groups: bytes = b""
    """The group of each leaf, for the planner."""
    files: Sequence[WrittenFile] = ()
    """Files that are shared with a base."""
    first_number: int = 0
    """The number of the first data file to write: lower numbers were given to files that are shared."""
    omitted: Omitted | None = None
    """Frozen parameters that only a base has."""
    newest: Ranges | None = None
    """The ranges of the newest base, if there is one."""
    notes: Sequence[str] = ()
    """Lines for the report."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shared files."""
        return sum(each.file.size for each in self.files)

    def groups_with(self, late: bytes) -> bytes:
        """Return the groups, with those of leaves that may be staged late."""
        if not any(late):
            return self.groups
        if not self.groups:
            return late.replace(b"\1", bytes([LATE]))
        pairs = zip(self.groups, late, strict=True)
        return bytes(group if group == LEFT_OUT else group | (LATE if mark else 0) for group, mark in pairs)


NO_REUSE = Reuse()
"""That of a snapshot that is written whole."""


def group_leaves(share: RankShare, frozen: bytes, newest: str | None) -> bytes:
    """Return the group of each leaf before the comparison: STABLE if it was equal last time or, if unknown, is frozen.

    `newest`: the save id of the newest base.
    """
    known = _equal.get().get(newest) if newest is not None else None
    marks = frozen if known is None else bytes(STABLE * (leaf.path in known) for leaf in share.leaves)
    stable = sum(leaf.nbytes for leaf, mark in zip(share.leaves, marks, strict=False) if mark)
    return marks if stable >= WORTH_SHARING else b""


def remember_unchanged(save_id: str, share: Share, reuse: Reuse, written: Sequence[WrittenFile]) -> None:
    """Remember which leaves are equal in the base, for the layout of the next take."""
    if not reuse.newest:
        return
    equal, changed = set[str](), set[str]()
    for each in written:
        for extent, digest in zip(each.file.extents, each.digests, strict=True):
            leaf = share.leaves[extent.leaf]
            held = reuse.newest.get(name_extent(leaf, extent))
            (equal if held is not None and held[0] == digest else changed).add(leaf.path)
    known = _equal.get()
    known[save_id] = frozenset(equal - changed)
    drop_oldest(known, KEPT)


def name_extent(leaf: Leaf, extent: Extent) -> tuple[str, str]:
    """Return the path of an extent's leaf, and its box or '': the key in `Base.copies`."""
    return leaf.path, "" if extent.box is None and leaf.origin is None else str(place_box(leaf, extent.box))


def index_paths(leaves: Sequence[Leaf], left_out: Collection[int]) -> dict[str, list[int]]:
    """Return the positions of the leaves of each path: boxes of a tensor have the same one."""
    index: defaultdict[str, list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if number not in left_out:
            index[leaf.path].append(number)
    return index


# Sharing: a take that is based on earlier snapshots shares their files whose tensors did not change.
#
# The digests of the live tensors decide, never their version counters. A file is shared as a whole or not at all, and
# its header names the same tensors in all snapshots.

AT_ONCE = 8
"""Files that are shared at once: on object stores, the server copies them."""
OLDEST = CHECKED
"""Maximum number of takes in a row that share a file of a single base. The next take writes an independent copy."""


class FileSharing:
    """Shares the files of a base whose tensors are unchanged."""

    def __init__(
        self,
        claim: Claim,
        share: RankShare,
        bases: Sequence[Base],
        comparer: Comparer,
        *,
        newest: Ranges,
        options: TakeRequest,
    ) -> None:
        self._claim = claim
        self._session = claim.session
        self._leaves = share.leaves
        self._bases = bases
        self._newest = newest
        self._comparer = comparer
        self._two_copies = options.two_copies
        self._signed = options.signer is not None
        self.names: list[str] = []
        """The names that were given to files, also to those that could not be shared."""
        self._trees: dict[str, FileTree] = {}
        """The hashes of the files that are shared, by their names here."""
        self._packed: dict[str, PackedResult | None] = {}
        """The tables of the compressed files among those that are shared."""

    async def run(self, left_out: Collection[int]) -> list[WrittenFile]:
        """Share the files whose tensors did not change, except the leaves `left_out`. Return the files."""
        base = self._source()
        if base is None or not base.shares or (self._signed and base.signed is None):
            return []
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
        return await self._share(self._whole_leaves([each for each in matches if self._may_share(each)]))

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
        self._comparer.notes.append("everything is written, since two physical copies need two earlier snapshots")
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
        for extent, digest in zip(match.plan.extents, match.digests, strict=True):
            held = self._newest.get(name_extent(self._leaves[extent.leaf], extent))
            if held is None or held[0] != digest or held[1] == match.held.origin:
                self._comparer.note(match.held, "written again, so that the newest snapshots have two physical copies")
                return False
        return True

    # Share

    async def _share(self, matches: Sequence[Comparison]) -> list[WrittenFile]:
        """Give each file a name in this take. A file that cannot be shared is written instead."""
        if not matches:
            return []
        transaction, rank = self._claim.transaction, self._claim.exchange.rank
        self.names = [
            name_data_file(transaction.save_id, rank, number, "safetensors") for number in range(len(matches))
        ]
        await transaction.begin_sharing(self.names)
        pairs = list(zip(matches, self.names, strict=True))
        done = await gather_limited(pairs, lambda each: self._share_one(*each), AT_ONCE)
        shared = [each for each, fine in zip(matches, done, strict=True) if fine]
        kept = self._whole_leaves(shared)
        files: list[WrittenFile] = []
        for match, name in pairs:
            if match in kept:
                add_use(match.held)
                packed, tree = self._packed[match.held.location], self._trees.get(name)
                files.append(WrittenFile(match.plan, name, match.digests, match.tables, match.held, packed, tree))
            elif match in shared:
                await self._delete(name)
        if files:
            nbytes = sum(each.file.size for each in files)
            emit("shared", self._claim.meter.verb, str(self._session.url), files=len(files), bytes=nbytes)
            log.debug("%s: shares %s in %s", self._session.url, size_text(nbytes), counted(len(files), "file"))
        return files

    async def _share_one(self, match: Comparison, name: str) -> bool:
        storage, held = self._session.storage, match.held
        try:
            self._packed[held.location] = await _read_packed(held)
            await storage.share(held.base.opened.storage.url.join(held.location), name, token=match.token)
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
    await held.base.opened.storage.read_into(location, begin, [table])
    if digest_range(table) != packed.index_digest:
        raise CorruptSnapshotError(f"{held.place}: its table of blocks is damaged")
    return PackedResult(packed.size, bytes(table), packed.digest)


# The bases of a take: opened, compared with the take's tensors, and shared where they are equal.


def find_reuse(claim: Claim, share: RankShare, options: TakeRequest) -> Reuse:
    """Compare the tensors of this rank with the bases, and share or omit what is equal.

    When this returns, nothing that it shares or omits is read from the live tensors again.
    """
    frozen = find_frozen(share.statefuls, share.leaves)
    notes: list[str] = []
    with ExitStack() as opened:
        bases, folder = _open_bases(claim, options, notes, opened)
        groups = group_leaves(share, frozen, bases[0].opened.document.save_id if bases else None)
        omitted: Omitted | None = None
        if bases or folder is not None:
            claim.transaction.expect_free()  # an existing snapshot is an error before anything is compared
        if folder is not None:
            from snapshot.save.folder_matches import find_in_folder  # few takes leave anything out

            omitted = find_in_folder(claim, share, frozen, folder, notes)
        if not bases:
            groups = _leave_out(groups, omitted.leaves if omitted is not None else (), len(share.leaves))
            return Reuse(compares=options.base is not None, groups=groups, omitted=omitted, notes=notes)
        newest = bases[0].copies()
        stager = Stager(share.leaves, copies=False)
        opened.callback(stager.forget)
        comparer = Comparer(claim, stager, notes, read_all=options.read_back_share == 1.0)
        if options.only and folder is None:
            from snapshot.save.omission import find_in_base

            omitted = find_in_base(claim, share, frozen, bases[0], comparer)
        sharing = FileSharing(claim, share, bases, comparer, newest=newest, options=options)
        files = run(sharing.run(omitted.leaves if omitted is not None else ()))
    reused = {extent.leaf for each in files for extent in each.file.extents}
    return Reuse(
        compares=True,
        groups=_leave_out(groups, reused | omitted.leaves if omitted is not None else reused, len(share.leaves)),
        files=files,
        first_number=len(sharing.names),
        omitted=omitted,
        newest=newest,
        notes=notes,
    )


def _leave_out(groups: bytes, numbers: Collection[int], count: int) -> bytes:
    """Return the groups of `count` leaves. The planner leaves out those with these numbers."""
    if not numbers:
        return groups
    marked = bytearray(groups or bytes(count))
    for number in numbers:
        marked[number] = LEFT_OUT
    return bytes(marked)


def _open_bases(
    claim: Claim, options: TakeRequest, notes: list[str], opened: ExitStack
) -> tuple[list[Base], Opened | None]:
    """Open the newest two bases. One that is not a snapshot of as many ranks is left out, with a note.

    A folder of weights among them is returned separately: it has what is left out, and shares no files.
    """
    session, exchange = claim.session, claim.exchange
    bases: list[Base] = []
    folder: Opened | None = None
    for source in options.bases[:2]:
        base = locate_source(source, Location(session.url, options.storage_options))
        url, theirs = base.url, base.options
        same = url.scheme == session.url.scheme and select_server(theirs) == select_server(options.storage_options)
        optional = find_keys("sign").optional_seal(options.signer) if options.signer is not None else None
        place = Session(url, theirs, seal=base.seal or optional)
        opened.callback(_close, place)
        try:
            found = run(open_checkpoint(place, exchange.rank))
            document = found.document
            if isinstance(document, ForeignDocument) and options.only:
                if url == session.url:
                    raise UnsupportedFormatError(f"this take makes a snapshot of the folder {url}")
                folder = folder or found
                continue
            if isinstance(document, ForeignDocument):
                raise UnsupportedFormatError(f"{url}: is a checkpoint of {document.format}, not a snapshot")
            if document.world_size != exchange.world:
                raise UnsupportedFormatError(
                    f"{url}: was taken by {document.world_size} ranks, and this take has {exchange.world}"
                )
        except ABSENT as error:
            notes.append(f"everything is written, since the base cannot be used: {error}")
            log.warning("%s: %s", session.url, notes[-1])
            continue
        shares = session.storage.capabilities.shares if same else ""
        bases.append(open_base(found, exchange.rank, shares=shares))
        if isinstance(found.stored, SignedFiles):
            bases[-1].signed = found.stored
        elif optional is not None:
            notes.append(f"no file is shared with the base, since this take's key does not sign it: {optional.fault}")
            log.warning("%s: %s", session.url, notes[-1])
    return bases, folder


def _close(session: Session) -> None:
    run(session.close())
