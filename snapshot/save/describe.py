"""Descriptions of written files: they become entries, entries a rank's part, and all parts the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.document import (
    NEWEST_FORMAT,
    BaseReference,
    Document,
    FileEntry,
    PackedFile,
    PartEntry,
    encode,
    expect_whole_tensors,
    format_of,
    merge,
)
from snapshot.manifest.parts import ManifestPart
from snapshot.plan.consensus import digest_layout, sum_digests
from snapshot.plan.layout import Extent, place_box
from snapshot.save.rank_share import Share
from snapshot.save.reuse import NO_REUSE, Reuse
from snapshot.save.writer import WrittenFile
from snapshot.state.leaves import Blob, Leaf
from snapshot.tensors.digest import RunningDigest, digest_bytes, digest_range
from snapshot.tensors.packed_files import CODEC, PackedResult
from snapshot.text import VERSION, listed


@dataclass(frozen=True)
class RankManifest:
    """The manifest part of one rank."""

    own: Mapping[str, Any]
    """Entries of this rank alone, and the shards that it wrote."""
    shared: dict[str, Any]
    """Replicated entries that it wrote."""
    files: dict[str, FileEntry]
    chunks: list[bytes | bytearray]
    """Content of the `.bin` file that entries point into."""
    structure: str
    """A digest of all ranks' structures, or of the plan of a single rank."""
    metadata: msgspec.Raw
    """The user's metadata, from the leader."""
    world: int
    cut: bool
    """True if each rank's own entries stay in a separate part."""
    expected: frozenset[str]
    """Paths of the replicated entries."""
    base: BaseReference | None = None
    """The base that has some of its files."""


class _Binary:
    """Content of the `.bin` file that entries point into."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.chunks: list[bytes | bytearray] = []
        self.size = 0

    def append(self, data: bytes | bytearray) -> tuple[int, int]:
        """Append the data, and return its range in the file."""
        self.chunks.append(data)
        self.size += len(data)
        return self.size - len(data), self.size


def build_entries(
    share: Share,
    written: Sequence[WrittenFile],
    binary_path: str,
    *,
    structure: str,
    metadata: msgspec.Raw,
    reuse: Reuse = NO_REUSE,
) -> RankManifest:
    """Return one rank's entries, and the content of its `.bin` file.

    `written` are all files of this rank, including those that are shared with a base. The share releases its leaves: a
    leaf and its entry take much memory if there are millions, so each leaf is released when its entry is there.
    """
    entries = share.flat.entries
    binary = _Binary(binary_path)
    for blob in share.blobs:
        entries[blob.path] = _object_entry(blob, binary)
    # Leaves of one tensor that was cut for several files, or on several ranks, refer to the whole: by its identity.
    pieces: dict[int, list[e.Shard]] = {}
    leaves: list[Any] = share.take_leaves()

    def add(leaf: Leaf, extent: Extent, stored: e.TensorEntry) -> None:
        if extent.box is not None or leaf.whole is not None:
            box = place_box(leaf, extent.box)
            pieces.setdefault(id(leaf.whole or leaf), []).append(e.Shard(box.offsets, box.sizes, stored))
        elif leaf.wrap is not None:
            leaf.wrap(leaf.path, stored)
        else:
            if leaf.extra is not None:
                stored.extra = leaf.extra
            entries[leaf.path] = stored

    omitted = reuse.omitted
    if omitted is not None:
        for number, (extent, held) in enumerate(omitted.ranges):
            if table := omitted.tables.get(number):
                held.blocks = (binary.location, *binary.append(table))
            add(leaves[extent.leaf], extent, held)
    for each in written:
        where = each.location
        for index, (extent, digest) in enumerate(zip(each.file.extents, each.digests, strict=True)):
            leaf = leaves[extent.leaf]
            table = each.tables.get(index, b"")
            stored = e.TensorEntry(
                where,
                (extent.begin, extent.end),
                leaf.dtype,
                leaf.shape if extent.box is None else extent.box.sizes,
                digest,
                (binary.location, *binary.append(table)) if table else None,
            )
            add(leaf, extent, stored)
            if extent.box is None:  # it is in no other extent
                leaves[extent.leaf] = None if leaf.whole is None else leaf.whole
    if pieces:
        _add_chunked_entries([leaf for leaf in leaves if leaf is not None], pieces, entries)
    # Last, since only now all owners have their entries.
    for path, owner in share.flat.ties.items():
        entries[path] = _entry_of_tie(entries[owner])
    own, shared = share.entries(entries)
    files = {each.location: _file_entry(each, binary, compare=reuse.compares) for each in written}
    if omitted is not None:
        files |= omitted.files
    if binary.chunks:
        files[binary.location] = FileEntry(binary.size)
    return RankManifest(
        own,
        shared,
        files,
        binary.chunks,
        share.structure or structure,
        metadata,
        share.world,
        share.cut,
        share.replicated,
        omitted.base if omitted is not None else None,
    )


def describe_alone(data: bytes | bytearray) -> FileEntry:
    """Return the entry of a file that no entry points into: its digest covers all of it, as that of a header."""
    return FileEntry(len(data), len(data), digest_range(data))


def _file_entry(written: WrittenFile, binary: _Binary, *, compare: bool) -> FileEntry:
    header = digest_range(written.file.header)
    entry = FileEntry(written.file.size, len(written.file.header), header)
    if written.packed is not None:
        entry.packed = describe_packed(written.packed, binary.location, binary.append(written.packed.table))
    if compare:
        # What a later take compares with: equal for equal tensors, whatever the file is called and wherever it is.
        entry.content = digest_range("".join([header, *written.digests]).encode())
    if written.shared is not None:
        entry.age = written.shared.entry.age + 1
        entry.origin = written.shared.origin if written.shared.base.shares == "link" else None
    return entry


def describe_packed(packed: PackedResult, location: str, place: tuple[int, int]) -> PackedFile:
    """Return the description of a compressed file whose table is at a place in another file."""
    return PackedFile(CODEC, packed.size, (location, *place), digest_range(packed.table), packed.digest)


def _entry_of_tie(entry: Any) -> Any:
    """Return an entry for another name of the same tensor, with its own list of shards for the leader to extend."""
    if entry is None or entry.boxes is None:  # None: another rank writes it
        return entry
    return entry.with_boxes(list(entry.boxes))


def _object_entry(blob: Blob, binary: _Binary) -> e.ObjectEntry:
    data_range = binary.append(blob.data)
    table = _digest_table(blob.data)
    blocks = (binary.location, *binary.append(table)) if table else None
    digest = digest_range(table) if table else digest_bytes(blob.data)
    return e.ObjectEntry(binary.location, data_range, blob.serializer, blob.obj_type, digest, blocks)


def _add_chunked_entries(leaves: Sequence[Leaf], pieces: Mapping[int, list[e.Shard]], entries: dict[str, Any]) -> None:
    """Add the entries of tensors that were stored in several pieces."""
    for whole in {id(leaf.whole or leaf): leaf.whole or leaf for leaf in leaves}.values():
        shards = pieces.get(id(whole))
        if shards is None:
            continue
        shards.sort(key=lambda shard: shard.offsets)
        chunked = e.ChunkedTensorEntry(whole.dtype, whole.shape, shards)
        if whole.wrap is not None:
            whole.wrap(whole.path, chunked)
        else:
            chunked.extra = whole.extra
            entries[whole.path] = chunked


def _digest_table(data: bytes | bytearray) -> bytes:
    """Return the digests of a blob's blocks, or nothing if it has a single block."""
    running = RunningDigest()
    running.update(memoryview(data))
    return running.finish()[1]


def shard_checksums(described: RankManifest) -> tuple[bytes, bytes]:
    """Return this rank's terms of two checksums, which are equal over all ranks if every shard was written once.

    The first covers the elements that this rank wrote. The second covers all elements of the tensors whose first
    element this rank wrote.
    """
    have, expected = [], []
    for path, entry in described.own.items():
        if entry.is_sharded:
            # A digest times a number of elements: the sums are equal only if no element is missing or written twice.
            digest = digest_layout(path, "")
            have += [digest * math.prod(shard.sizes) for shard in entry.shards]
            if any(not any(shard.offsets) for shard in entry.shards):  # exactly one rank has the first element
                expected.append(digest * math.prod(entry.shape))
    return sum_digests(have), sum_digests(expected)


def encode_for_leader(described: RankManifest) -> bytes:
    """Encode the part that is merged into the manifest itself."""
    own = {} if described.cut else dict(described.own.items())
    return encode(ManifestPart(own, described.shared, described.files, described.base))


def build_document(
    described: RankManifest,
    save_id: str,
    parts: Sequence[PartEntry],
    others: Iterable[ManifestPart],
    *,
    newest: bool,
) -> Document:
    """Return the manifest, from the leader's entries and the parts of the other ranks.

    `newest`: an entry in a separate part needs the newest format.
    """
    manifest = {} if described.cut else dict(described.own.items())
    manifest.update(described.shared)
    files, base = dict(described.files), described.base
    for rank, part in enumerate(others, 1):
        merge(manifest, part.manifest, f"rank {rank}")
        merge(manifest, part.shared, f"rank {rank}")
        files.update(part.files)
        if part.base is not None and base is not None and part.base.save_id != base.save_id:
            raise SnapshotError(f"base: must be the same on all ranks, got {base.url} and {part.base.url}")
        base = base or part.base
    expect_whole_tensors(manifest)
    lost = [path for path in described.expected if f"0/{path}" not in manifest]
    if lost:
        raise CorruptSnapshotError(f"no rank wrote these replicated entries:{listed(sorted(lost))}")
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Document(
        NEWEST_FORMAT if newest and described.cut else format_of(files, manifest),
        VERSION,
        save_id,
        described.world,
        created,
        described.structure,
        described.metadata,
        files,
        list(parts) if described.cut else [],
        manifest,
        base,
    )
