"""Omission: frozen parameters that are equal in a base are left out of a take, which records where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from snapshot.manifest.document import BaseReference, FileEntry
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, FilePlan, Piece
from snapshot.save.base_files import Base, BaseFile, BaseRange, fit_leaf
from snapshot.save.comparison import Comparer, Comparison, add_use, read_tables
from snapshot.save.rank_share import RankShare
from snapshot.save.unchanged import Unchanged


async def omit_frozen(
    share: RankShare, frozen: bytes, base: Base, comparer: Comparer, unchanged: Unchanged
) -> set[int]:
    """Record the frozen parameters that are equal in the base. Return their positions.

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
    for number, pieces in found.items():
        for (_, start, length, box), each in pieces.items() if number not in changed else ():
            unchanged.omitted.append((Extent(number, 0, length, start, box), _as_stored(each.stored)))
            for location in {each.stored.location, *(each.stored.blocks or ())[:1]}:
                unchanged.base_files[location] = _in_base(base.document.files[location])
    for comparison in comparisons:
        add_use(comparison.held)
    if unchanged.base_files:
        unchanged.reference = base.reference or BaseReference(base.document.save_id, str(base.session.url))
    return found.keys() - changed


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
    return FileEntry(entry.size, entry.header, entry.header_digest, in_base=True)


def _as_stored(stored: TensorEntry) -> TensorEntry:
    """Return the place of a range, without the properties of the base's own entry."""
    return TensorEntry(stored.location, stored.byte_range, stored.dtype, stored.shape, stored.digest, stored.blocks)
