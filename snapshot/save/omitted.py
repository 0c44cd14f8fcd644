"""Omission: frozen parameters that are equal in a base are left out of a take, which records where they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from snapshot.aio import gather_limited, in_thread
from snapshot.manifest.document import BaseReference
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, Piece, plan_file
from snapshot.runtime.session import Session
from snapshot.save.base_files import Base, BaseRange, fit_leaf
from snapshot.save.rank_share import RankShare
from snapshot.save.staging import Stager
from snapshot.save.unchanged import Unchanged

COMPARED = 256 << 20
"""Bytes of tensors that one thread compares in a row."""


async def omit_frozen(
    session: Session, share: RankShare, frozen: bytes, base: Base, *, stager: Stager, unchanged: Unchanged
) -> set[int]:
    """Record the frozen parameters that are equal in the base. Return their positions."""
    document = base.document
    named: defaultdict[str, list[BaseRange]] = defaultdict(list)
    for file in base.files.values():
        if file.entry.in_base or document.base is None:  # all that is omitted is in one snapshot
            for each in file.ranges:
                for name in each.names:
                    named[name].append(each)

    async def compare(batch: dict[Piece, BaseRange]) -> set[int]:
        plan = plan_file(share.leaves, list(batch))
        digests = await in_thread(stager.digest_file, plan, session.budget)
        assert digests is not None
        held = {(number, start): each.stored.digest for (number, start, _, _), each in batch.items()}
        pairs = zip(plan.extents, digests.digests, strict=True)
        return {extent.leaf for extent, digest in pairs if held[extent.leaf, extent.start] != digest}

    def fitting() -> Iterator[tuple[int, dict[Piece, BaseRange]]]:
        for number, leaf in enumerate(share.leaves):
            if number < len(frozen) and frozen[number]:
                fits = ((fit_leaf(number, leaf, each), each) for each in named.get(leaf.path, ()))
                pieces = {piece: each for piece, each in fits if piece is not None}
                if pieces and sum(piece[2] for piece in pieces) == leaf.nbytes:
                    yield number, pieces

    found = dict(fitting())
    batches: list[dict[Piece, BaseRange]] = [{}]
    for pieces in found.values():
        if sum(piece[2] for piece in batches[-1]) >= COMPARED:
            batches.append({})
        batches[-1] |= pieces
    changed = set[int]().union(*await gather_limited(batches, compare, session.settings.lane_count()))
    for number, pieces in found.items():
        if number in changed:
            continue
        for (_, start, length, box), each in pieces.items():
            unchanged.omitted.append((Extent(number, 0, length, start, box), _as_stored(each.stored)))
            locations = [each.stored.location, *([each.stored.blocks[0]] if each.stored.blocks else [])]
            for location in locations:
                entry = document.files[location]
                unchanged.base_files[location] = type(entry)(
                    entry.size, entry.header, entry.header_digest, in_base=True
                )
    if unchanged.base_files:
        unchanged.reference = document.base or BaseReference(document.save_id, str(base.session.url))
    return found.keys() - changed


def _as_stored(stored: TensorEntry) -> TensorEntry:
    """Return where the base has a range, without the properties of its own entry."""
    return TensorEntry(stored.location, stored.byte_range, stored.dtype, stored.shape, stored.digest, stored.blocks)
