"""Messages that the ranks exchange before they write, and the leader's replies.

Each rank sends a small record of digests. If those agree, each rank can plan alone, since it knows the state of the
others. Only if they differ are details requested, once for each different rank.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from snapshot.errors import SnapshotError
from snapshot.manifest import document
from snapshot.tensors.digest import digest_range, split_digests
from snapshot.tensors.geometry import Box, boxes_overlap, is_inside
from snapshot.text import listed

FIRST = ""
"""The initial basis: everything that may be shared is shared."""
ASKED = "asked"
"""The basis after an exchange of details: the leader's reply."""
_MODULUS = 1 << 128


class RankRecord(msgspec.Struct, array_like=True):
    """Summary of a rank's state: 200 bytes, for any amount of data."""

    structure: str
    """Digest of its names, dtypes, shapes and layouts."""
    basis: str
    """Basis of sharing: FIRST, ASKED, or the structure of a known plan."""
    agreed: str
    """Digest of the items shared on that basis."""
    candidates: str
    """Digest of all items that may be shared."""
    have: bytes
    """Sum of the layouts' digests of its sharded tensors."""
    expected: bytes
    """Sum of the same digests over all holders, from the first holder of each tensor."""
    load: int
    """Bytes that only this rank can write."""
    entries: int
    boxes: bool
    """True if it has boxes without knowing the other holders."""
    left: bytes = b""
    """Digests of some items that were not shared on its basis, and may be now."""


class ConsensusReply(msgspec.Struct, array_like=True):
    """The leader's reply to the records."""

    structure: str
    """Digest of all ranks' structures."""
    settled: bool
    loads: list[int]
    """Bytes that only each rank can write; empty if nothing is settled."""
    cut: bool
    """True if each rank's own entries remain in a part of a large manifest."""
    speakers: list[int]
    """Ranks that send the items they could share: one of each kind."""
    boxes: bool
    """True if all ranks must send their boxes."""
    layouts: bool
    """True if layouts contradict each other, and all ranks must send their layouts."""


def compare_records(records: Sequence[RankRecord]) -> ConsensusReply:
    """Return the reply to all ranks' records."""
    structure = digest_range(b"".join(record.structure.encode() for record in records))
    first = records[0]
    known = first.basis in (FIRST, ASKED) or first.basis == structure
    shared = known and all(each.agreed == first.agreed and each.basis == first.basis for each in records)
    again = set.intersection(
        *(set(split_digests(record.left)) for record in records)
    )  # not shared before, and equal now
    layouts = add_sums(each.have for each in records) != add_sums(each.expected for each in records)
    boxes = any(record.boxes for record in records)
    settled = shared and not layouts and not boxes and not again
    seen: dict[str, int] = {}
    for rank, record in enumerate(records):
        seen.setdefault(record.candidates, rank)
    return ConsensusReply(
        structure,
        settled,
        [record.load for record in records] if settled else [],
        sum(record.entries for record in records) > document.IN_ONE,
        [] if settled else sorted(seen.values()),
        boxes or not settled,
        layouts,
    )


def digest_layout(path: str, layout: str) -> int:
    """Return a sharded tensor's term in the sums."""
    return int(digest_range(f"{path}\0{layout}".encode()).removeprefix("xxh3:"), 16)


def sum_digests(digests: Iterable[int]) -> bytes:
    """Return the sum of digests."""
    return (sum(digests) % _MODULUS).to_bytes(16, "little")


def add_sums(sums: Iterable[bytes]) -> bytes:
    """Return the sum over all ranks' sums."""
    return sum_digests(int.from_bytes(each, "little") for each in sums)


class ShardBoxes(msgspec.Struct, array_like=True):
    """Boxes of one tensor on a rank that does not know the other holders."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], int]]
    """Offsets, sizes, and the replica number."""


class CandidateDetails(msgspec.Struct, array_like=True):
    """A rank's response to a request for details."""

    items: bytes = b""
    """Concatenated digests of the items that it could share."""
    boxes: list[ShardBoxes] = msgspec.field(default_factory=list)
    layouts: dict[str, tuple[str, list[int]]] = msgspec.field(default_factory=dict)
    """Path -> layout and the ranks with parts of the tensor."""


class Settlement(msgspec.Struct, array_like=True):
    """The leader's reply to the details."""

    items: bytes
    """Digests of the items that all ranks have."""
    spare: list[tuple[int, str, int]]
    """(Rank, path, number of the box) that another rank writes."""


def settle_details(details: Sequence[CandidateDetails], speakers: Sequence[int]) -> Settlement:
    """Return the shared items and the writer of each box; raise if boxes or layouts contradict each other."""
    _check_layouts(details)
    common: set[bytes] | None = None
    for rank in speakers:
        found = set(split_digests(details[rank].items))
        common = found if common is None else common & found
    return Settlement(b"".join(sorted(common or ())), _find_spare_boxes(details))


def _check_layouts(details: Sequence[CandidateDetails]) -> None:
    seen: dict[tuple[str, tuple[int, ...]], dict[int, str]] = defaultdict(dict)
    for rank, each in enumerate(details):
        for path, (layout, holders) in each.layouts.items():
            seen[path, tuple(holders)][rank] = layout
    faults = []
    for (path, ranks), layouts in seen.items():
        absent = [rank for rank in ranks if rank not in layouts]
        if absent:
            faults.append(
                f"{path}: all ranks with a shard must have one layout; rank {min(layouts)} has a shard, and "
                f"rank {absent[0]} lacks the tensor, or has another layout"
            )
        elif len(set(layouts.values())) > 1:
            other = next(rank for rank in layouts if layouts[rank] != layouts[min(layouts)])
            faults.append(f"{path}: {layouts[min(layouts)]} on rank {min(layouts)}, {layouts[other]} on rank {other}")
    if faults:
        raise SnapshotError(f"all ranks must agree on the tensors that they share:{listed(faults)}")


def _find_spare_boxes(details: Sequence[CandidateDetails]) -> list[tuple[int, str, int]]:
    """Return the boxes with several holders that need no write; raise if boxes overlap or are missing."""
    held: dict[str, list[tuple[int, int, ShardBoxes]]] = defaultdict(list)
    for rank, each in enumerate(details):
        for tensor in each.boxes:
            held[tensor.path] += [(rank, number, tensor) for number in range(len(tensor.boxes))]
    spare: list[tuple[int, str, int]] = []
    faults: list[str] = []
    checked: dict[tuple[object, ...], str | None] = {}
    for path, found in held.items():
        first = found[0][2]
        writers: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
        for rank, number, tensor in found:
            if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
                faults.append(
                    f"{path}: {first.dtype}{list(first.shape)} on rank {found[0][0]}, "
                    f"{tensor.dtype}{list(tensor.shape)} on rank {rank}"
                )
                break
            offsets, sizes, replica = tensor.boxes[number]
            if replica:
                continue
            if writers.setdefault((offsets, sizes), (rank, number)) != (rank, number):
                spare.append((rank, path, number))
        else:
            boxes = tuple(sorted(writers))
            signature = first.shape, boxes
            if signature not in checked:
                checked[signature] = _describe_fault(first.shape, [Box(*box) for box in boxes])
            fault = checked[signature]
            faults += [f"{path}: {fault}"] if fault else []
    if faults:
        raise SnapshotError(f"the parts on all ranks must form whole tensors:{listed(faults)}")
    return spare


def _describe_fault(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    outside = [box for box in boxes if not is_inside(box, shape)]
    if outside:
        return f"the part [{outside[0]}] is outside shape {list(shape)}"
    if boxes_overlap(boxes):
        return "the parts overlap"
    filled = sum(box.numel for box in boxes)
    if filled != math.prod(shape):
        return (
            f"the parts with replica=0 have {filled:,} of {math.prod(shape):,} elements; "
            "if other parts have the rest, set replica=0 on those"
        )
    return None
