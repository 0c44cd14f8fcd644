"""Parts of a large manifest: the entries of one rank in a file of their own, with an index of it.

A long part is cut into segments: runs of entries in the order of their paths. The index has the first path, the range
and the digest of each. So one entry is found with two short reads, and each of them is verified.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.document import BaseReference, FileEntry, PartEntry, decode_canonical, encode, newer_format
from snapshot.manifest.entries import AnyEntry, TensorEntry
from snapshot.tensors.digest import digest_range
from snapshot.text import counted

INDEXED = 4 << 20
"""Bytes of a part above which it has an index."""
SEGMENT = 256 << 10
"""Maximum bytes of a segment with more than one entry."""

_encoder = msgspec.json.Encoder()
_HEAD = b'{"manifest":{'


class IndexSegment(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """A range of a part's file: some entries, without the braces around them."""

    first: str
    """The path of its first entry."""
    begin: int
    end: int
    digest: str


class PartIndex(msgspec.Struct, forbid_unknown_fields=True):
    """The index of a part."""

    numbers: list[str]
    """The ranks with which its paths begin."""
    segments: list[IndexSegment]

    def find(self, names: Sequence[str]) -> list[IndexSegment]:
        """Return the segments that may have the entries of these names, under any rank, or entries below them."""
        firsts = [each.first for each in self.segments]
        found: set[int] = set()
        for path in (f"{number}/{name}" for number in self.numbers for name in names):
            found.add(bisect_right(firsts, path) - 1)
            found.update(range(bisect_right(firsts, f"{path}/") - 1, bisect_left(firsts, f"{path}0")))
        return [self.segments[at] for at in sorted(found - {-1})]


class ManifestPart(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A part of a manifest as stored, without its digest.

    Each rank sends its part to the leader, which merges them. In a large manifest, each rank's own entries remain in a
    separate part.
    """

    manifest: dict[str, AnyEntry]
    """The rank's own entries, and the shards that it wrote."""
    shared: dict[str, AnyEntry] = {}
    """Entries written by the rank that are equal on all ranks."""
    files: dict[str, FileEntry] = {}
    base: BaseReference | None = None
    """The base that has some of these files."""
    index: PartIndex | None = None


class NumberedEntries(Mapping[str, Any]):
    """Entries by their paths without a rank, read with the number of one rank: without a second copy of all names."""

    def __init__(self, number: int, entries: Mapping[str, Any]) -> None:
        self.entries = entries
        self.prefix = f"{number}/"

    def __getitem__(self, path: str) -> Any:
        if not path.startswith(self.prefix):
            raise KeyError(path)
        return self.entries[path[len(self.prefix) :]]

    def __iter__(self) -> Iterator[str]:
        return map(self.prefix.__add__, self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def items(self) -> Any:
        return zip(self, self.entries.values(), strict=True)

    def values(self) -> Any:
        return self.entries.values()


class EncodedPart(msgspec.Struct, array_like=True):
    """The bytes of a rank's own part, and what the manifest says of them."""

    data: bytes | bytearray
    count: int
    index: tuple[int, int, str] | None = None

    def describe(self, location: str, ranks: list[int]) -> PartEntry:
        """Return the part's entry in the manifest."""
        return PartEntry(location, len(self.data), digest_range(self.data), ranks, self.count, self.index)


def encode_own_part(manifest: Mapping[str, Any]) -> EncodedPart:
    """Encode a rank's own entries. A long part has an index."""
    entries, prefix = manifest, ""
    if isinstance(manifest, NumberedEntries):  # a prefix does not change the order
        entries, prefix = manifest.entries, manifest.prefix
    names = sorted(entries)
    some = names[:: max(1, len(names) // 256)]
    sizes = sorted(len(_encoder.encode(entries[name])) + len(prefix) + len(name) for name in some)
    size = sizes[len(sizes) // 2] if sizes else 0  # a single entry, of a container, may have megabytes
    if len(names) * size <= 4 * INDEXED:  # otherwise a second copy would take memory for nothing
        data = encode(ManifestPart(dict(manifest.items())))
        if len(data) <= INDEXED:
            return EncodedPart(data, len(manifest))
    at_once = max(1, SEGMENT // (2 * max(1, size)))
    made = bytearray(_HEAD)  # grows in place, since there may be hundreds of megabytes
    segments: list[IndexSegment] = []
    for at in range(0, len(names), at_once):
        _add_segments(made, segments, entries, names[at : at + at_once], prefix)
    made += b'},"index":'
    begin = len(made)
    _encoder.encode_into(PartIndex([prefix[:-1]] if prefix else _numbers_of(names), segments), made, begin)
    place = begin, len(made), digest_range(memoryview(made)[begin:])
    made += b',"digest":"%s"}' % digest_range(made).encode()
    return EncodedPart(made, len(manifest), place)


def _add_segments(
    made: bytearray, segments: list[IndexSegment], entries: Mapping[str, Any], names: Sequence[str], prefix: str
) -> None:
    """Append entries as one segment, or as several if it would be too long."""
    before = len(made)
    start = before if segments else before - 1  # the brace takes the place of the comma between segments
    _encoder.encode_into({prefix + name: entries[name] for name in names}, made, start)
    del made[-1]
    if len(made) - start - 1 <= SEGMENT or len(names) == 1:
        if segments:
            made[start] = ord(",")
        digest = digest_range(memoryview(made)[start + 1 :])
        segments.append(IndexSegment(prefix + names[0], start + 1, len(made), digest))
        return
    del made[before:]
    half = len(names) // 2
    _add_segments(made, segments, entries, names[:half], prefix)
    _add_segments(made, segments, entries, names[half:], prefix)


def _numbers_of(names: Iterable[str]) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})


def decode_part(data: bytes, part: PartEntry, where: object) -> ManifestPart:
    """Check and decode a part of a manifest."""
    if digest_range(data) != part.digest:
        raise CorruptSnapshotError(f"{where}: digest must be {part.digest}, got {digest_range(data)}")
    if part.index is not None:
        decoded = _decode_segments(data, part, where)
    else:
        decoded = decode_canonical(data, ManifestPart, where)
        if decoded.index is not None:
            raise CorruptSnapshotError(f"{where}: {_WRONG_INDEX}")
    if part.count >= 0 and len(decoded.manifest) != part.count:
        raise CorruptSnapshotError(
            f"{where}: must have {counted(part.count, 'entry', 'entries')}, got {len(decoded.manifest)}"
        )
    return decoded


_WRONG_INDEX = "its index must describe its entries, and be where the manifest says"


def _decode_segments(data: bytes, part: PartEntry, where: object) -> ManifestPart:
    """Decode a part by its index, which must agree with the entries: all readers of the part must find the same.

    Each segment is decoded alone. So a long part takes little memory in addition to its entries, which share equal
    names and shapes.
    """
    assert part.index is not None
    begin, end, _ = part.index
    view = memoryview(data)
    index = decode_index(data[begin:end], part, where)
    entries: dict[str, Any] = {}
    known: dict[Any, Any] = {}
    position, last = len(_HEAD), ""
    good = data.startswith(_HEAD) and bool(index.segments) and data[begin:end] == _encoder.encode(index)
    for each in index.segments if good else ():
        try:
            found = decode_segment(data[each.begin : each.end], each, where)
        except CorruptSnapshotError as error:  # the part has its right digest
            if isinstance(error.__cause__, msgspec.ValidationError):
                raise newer_format(error) from error
            raise CorruptSnapshotError(f"{where}: {_WRONG_INDEX}: {error}") from error
        good = each.begin == position and each.first > last and data[each.end : each.end + 1] in (b",", b"}")
        if not good:
            break
        for entry in found.values():
            if type(entry) is TensorEntry:
                entry.location = known.setdefault(entry.location, entry.location)
                entry.dtype = known.setdefault(entry.dtype, entry.dtype)
                entry.shape = known.setdefault(entry.shape, entry.shape)
        entries.update(found)
        position, last = each.end + 1, next(reversed(found))
    good = good and data[position - 1 : begin] == b'},"index":' and index.numbers == _numbers_of(entries)
    if not good or view[end:] != b',"digest":"%s"}' % digest_range(view[:end]).encode():
        raise CorruptSnapshotError(f"{where}: {_WRONG_INDEX}")
    return ManifestPart(entries, index=index)


def decode_index(data: bytes | bytearray, part: PartEntry, where: object) -> PartIndex:
    """Check and decode the index of a part."""
    assert part.index is not None
    if digest_range(data) != part.index[2]:
        raise CorruptSnapshotError(f"{where}: index: digest must be {part.index[2]}, got {digest_range(data)}")
    found: PartIndex = decode_json(bytes(data), PartIndex, where)
    for each in found.segments:
        if not len(_HEAD) <= each.begin < each.end <= part.index[0]:
            raise CorruptSnapshotError(f"{where}: a segment {each.begin}-{each.end} must be before the index")
    return found


def decode_segment(data: bytes | bytearray, segment: IndexSegment, where: object) -> dict[str, Any]:
    """Check and decode the entries of a segment."""
    if digest_range(data) != segment.digest:
        raise CorruptSnapshotError(
            f"{where}: segment {segment.begin}-{segment.end}: digest must be {segment.digest}, got {digest_range(data)}"
        )
    found: dict[str, Any] = decode_json(b"{%s}" % data, dict[str, AnyEntry], where)
    names = list(found)
    if _encoder.encode(found)[1:-1] != data or names != sorted(names) or names[:1] != [segment.first]:
        raise CorruptSnapshotError(f"{where}: segment {segment.begin}-{segment.end}: not in the canonical form")
    return found
