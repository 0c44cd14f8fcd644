"""Frozen parameters that are equal in a base: a take leaves them out and records where they are.

The base is a snapshot, or a folder of weights. A snapshot with such a base refers to the base of its own base.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from snapshot.errors import RestoreError, SnapshotError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, Location
from snapshot.loading.left_out import attach_base
from snapshot.manifest.document import BaseReference, FileEntry
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, FilePlan, Piece
from snapshot.save.base_files import (
    ABSENT,
    Base,
    BaseFile,
    BaseRange,
    Comparer,
    Comparison,
    add_use,
    fit_leaf,
    read_tables,
)
from snapshot.save.begin import Claim
from snapshot.save.rank_share import RankShare
from snapshot.save.transaction import committed_save_id


@dataclass(frozen=True)
class Omitted:
    """The frozen parameters that a take leaves out, and the snapshot or the folder of weights that has them."""

    base: BaseReference
    ranges: Sequence[tuple[Extent, TensorEntry]]
    """Extents of leaves, and where the base has them."""
    files: Mapping[str, FileEntry]
    """The files of the base that have them."""
    leaves: frozenset[int]
    """The positions of the leaves."""
    save_id: str
    """The save id that was found there. A copy of the base has another one than the base."""
    open: Callable[[], Session]
    """Opens the base."""
    tables: Mapping[int, bytes] = field(default_factory=dict)
    """Tables of digests that the take stores since the base, a folder of weights, has none: by position in `ranges`."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The tokens of the files of a folder of weights, by name."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters."""
        return sum(stored.nbytes for _, stored in self.ranges)

    async def expect_base(self) -> None:
        """Raise if the base was removed since the comparison: this snapshot would be incomplete."""
        session = self.open()
        try:
            if self.base.format:
                from snapshot.loading.base_folder import has_files  # few bases are no snapshots

                if await has_files(session, self.files.values(), self.tokens):
                    return
            elif await committed_save_id(session.storage) == self.save_id:
                return
        except SnapshotError as error:
            log.warning("%s: cannot be checked before the commit: %s", session.url, error)
            return
        finally:
            await session.close()
        raise SnapshotError(f"{session.url}: was removed or replaced during a take that is based on it")


def find_in_base(claim: Claim, share: RankShare, frozen: bytes, base: Base, comparer: Comparer) -> Omitted | None:
    """Find the frozen parameters that are equal in a snapshot, or in the base of it."""
    save_id = _find_lasting(claim, base, comparer.notes)
    if save_id is None:
        return None
    return run(_find_equal(share, frozen, base, comparer, place=partial(_open_lasting, base), save_id=save_id))


async def _find_equal(
    share: RankShare, frozen: bytes, base: Base, comparer: Comparer, *, place: Callable[[], Session], save_id: str
) -> Omitted | None:
    """Find the frozen parameters that are equal in the base.

    A part of the base's files is read from the disk, as before they are shared.
    """
    found = _find_pieces(share, frozen, base)
    tables = await read_tables(base, (each for pieces in found.values() for each in pieces.values()))
    by_file: defaultdict[str, list[tuple[Piece, BaseRange]]] = defaultdict(list)
    for number, pieces in list(found.items()):
        if all(each.stored.blocks is None or each.stored.blocks in tables for each in pieces.values()):
            for piece, each in pieces.items():
                by_file[each.stored.location].append((piece, each))
        else:
            del found[number]
    comparisons = [_compare_ranges(base.files[location], these, tables) for location, these in by_file.items()]
    await comparer.compare(comparisons)
    changed: set[int] = set()
    for comparison in comparisons:
        sound = comparison.equal and comparer.is_sound(comparison)
        changed |= comparison.changed if sound else {extent.leaf for extent in comparison.plan.extents}
    ranges: list[tuple[Extent, TensorEntry]] = []
    files: dict[str, FileEntry] = {}
    kept: dict[int, bytes] = {}
    for number, pieces in found.items():
        for (_, start, length, box), each in pieces.items() if number not in changed else ():
            blocks = each.stored.blocks
            if blocks is not None and base.elsewhere and blocks[0] not in base.elsewhere:
                kept[len(ranges)], blocks = tables[blocks], None  # it is in this base, which need not stay
            ranges.append((Extent(number, 0, length, start, box), _as_stored(each.stored)))
            for location in {each.stored.location, *(blocks or ())[:1]}:
                files[location] = _in_base(base.opened.document.files[location])
    for comparison in comparisons:
        add_use(comparison.held)
    if not ranges:
        return None
    reference = base.reference or BaseReference(base.opened.document.save_id, str(base.opened.url))
    return Omitted(reference, ranges, files, frozenset(found.keys() - changed), save_id, place, kept)


def _find_pieces(share: RankShare, frozen: bytes, base: Base) -> dict[int, dict[Piece, BaseRange]]:
    """Return the ranges of each frozen parameter that the base has whole."""
    named: defaultdict[str, list[BaseRange]] = defaultdict(list)
    for file in base.files.values():
        if base.reference is None or file.location in base.elsewhere:  # all that is omitted is in one snapshot
            for each in file.ranges:
                for name in each.names:
                    named[name].append(each)
    found: dict[int, dict[Piece, BaseRange]] = {}
    for number, leaf in enumerate(share.leaves):
        if number < len(frozen) and frozen[number] and leaf.nbytes:
            fits = ((fit_leaf(number, leaf, each), each) for each in named.get(leaf.path, ()))
            pieces = {piece: each for piece, each in fits if piece is not None}
            if sum(piece[2] for piece in pieces) == leaf.nbytes:
                found[number] = pieces
    return found


def _compare_ranges(
    held: BaseFile, these: list[tuple[Piece, BaseRange]], tables: Mapping[tuple[str, int, int], bytes]
) -> Comparison:
    these.sort(key=lambda each: each[1].stored.byte_range)
    extents = tuple(Extent(number, *each.stored.byte_range, start, box) for (number, start, _, box), each in these)
    return Comparison(held, FilePlan(b"", extents, held.entry.size), [each for _, each in these], tables)


def _in_base(entry: FileEntry) -> FileEntry:
    return FileEntry(entry.size, entry.header, entry.header_digest, in_base=True, name=entry.name)


def _as_stored(stored: TensorEntry) -> TensorEntry:
    """Return the place of a range, without the properties of the base's own entry."""
    return TensorEntry(stored.location, stored.byte_range, stored.dtype, stored.shape, stored.digest, stored.blocks)


def _find_lasting(claim: Claim, base: Base, notes: list[str]) -> str | None:
    """Return the save id of the snapshot that will have what is left out.

    Return None if it is not there, or if this take replaces it.
    """
    reference, session = base.reference, claim.session
    save_id = base.opened.document.save_id
    try:
        if reference is not None:
            base.opened, save_id = run(attach_base(base.opened, _place_of(base)))
        if run(committed_save_id(session.storage)) != save_id:
            return save_id
        why = f"this take replaces {session.url}"
    except (*ABSENT, RestoreError, ValueError) as error:
        why = str(error)
    notes.append(f"nothing is left out, since the base cannot be relied on: {why}")
    log.warning("%s: %s", session.url, notes[-1])
    return None


def _place_of(base: Base) -> Location:
    """Return the place of the snapshot that has what is left out."""
    url, options = base.opened.url, base.opened.session.options
    if base.reference is not None:
        url = URL.parse(base.reference.url)
        options = options if url.scheme == base.opened.url.scheme else None
    return Location(url, options)


def _open_lasting(base: Base) -> Session:
    place = _place_of(base)
    return Session(place.url, place.options)
