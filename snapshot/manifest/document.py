"""The manifest as a document: JSON with its own digest, its head, and the merge of the ranks' parts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any, Literal

import msgspec

from snapshot.decoding import UNREADABLE, decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError, UnsupportedFormatError
from snapshot.manifest.containers import FrozensetEntry, SetEntry, SliceEntry, TupleEntry
from snapshot.manifest.entries import AnyEntry, AnyTensor, ObjectEntry, TensorEntry, count_entries, needs_third_format
from snapshot.manifest.rank_view import DEEPEST
from snapshot.manifest.values import Entry
from snapshot.tensors.digest import SIZE, count_blocks, digest_range
from snapshot.tensors.dtypes import find_itemsize
from snapshot.tensors.geometry import Box, boxes_overlap, intersect, is_inside
from snapshot.tensors.packed_files import CODEC, MOST_TIMES, RECORD, longest_table
from snapshot.text import counted, listed

# Merging of the ranks' parts into one manifest.


def merge(into: dict[str, Any], entries: Mapping[str, Any], whose: object) -> None:
    """Add one rank's entries. Parts of a tensor are joined, and all other entries must have one owner."""
    for path, entry in entries.items():
        held = into.setdefault(path, entry)
        if held is not entry:
            ours, theirs = held.boxes, entry.boxes
            if ours is None or theirs is None or _tensor_header(held) != _tensor_header(entry):
                raise CorruptSnapshotError(f"{path}: described twice, by {whose} and by another part of the manifest")
            ours += theirs


def expect_whole_tensors(entries: Mapping[str, Any]) -> None:
    """Raise unless the parts of every tensor cover all its elements; sort the parts."""
    for path, entry in entries.items():
        boxes = entry.boxes
        if boxes is not None:
            boxes.sort(key=lambda box: box.offsets)
            found, expected = sum(math.prod(box.sizes) for box in boxes), math.prod(entry.shape)
            if found != expected:
                raise CorruptSnapshotError(f"{path}: all ranks together wrote {found:,} of {expected:,} elements")


def _tensor_header(entry: AnyTensor) -> tuple[Any, ...]:
    more = (getattr(entry, name, None) for name in ("replicated", "mesh", "placements"))
    return type(entry), entry.dtype, tuple(entry.shape), *more


# The manifest as a document: JSON with its own digest, in one canonical form.
#
# A document is refused if it does not encode to the bytes that it was decoded from. So duplicate keys, unknown fields
# and numbers out of range are detected without separate checks.

STATISTICS = ".stats"
"""The end of the names of files with statistics."""
METADATA = ".snapshot_metadata"
FORMAT = "snapshot/1"
PACKED_FORMAT = "snapshot/2"
"""The format if a file is compressed: earlier versions refuse it by its number."""
NEWEST_FORMAT = "snapshot/3"
"""The format if an entry has a type or a serializer that it added, or if the base is a folder of weights."""
OWN_FORMATS = (FORMAT, PACKED_FORMAT, NEWEST_FORMAT)
IN_ONE = 100_000
"""Number of entries from which each rank's own entries are in a separate part."""
LONGEST_HEADER = 100_000_000
"""Maximum header length in bytes that the safetensors library reads."""

_TAIL = re.compile(rb',"digest":"(xxh3:[0-9a-f]{32})"\}$')
_TAIL_LENGTH = len(',"digest":"xxh3:"}') + 32
_WEIGHTS = re.compile(r"(?:(?!\.{0,2}/)[^/\\\0]+/)*[^/\\\0]+\.safetensors", re.DOTALL)
"""Names of the files of a folder of weights: none leads out of the folder."""
_LOCATION = re.compile(r"data/[0-9a-z]+-[0-9]+(-[0-9]+\.(safetensors|bin|stats)|\.json)")


class PackedFile(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A file that is stored compressed. All other places in a manifest count its bytes as if it were not."""

    codec: str
    size: int
    """Bytes of the stored file."""
    index: tuple[str, int, int]
    """File, begin and end of the table that says where each block is."""
    index_digest: str
    digest: str
    """Digest of the stored bytes, by blocks."""


class FileEntry(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """A data file: its length, and the length of its header."""

    size: int
    """Bytes of the file; of a compressed one, those that it has decompressed."""
    header: int = 0
    header_digest: str | None = None
    content: str | None = None
    """Digest of the header's digest and of all tensors' digests, if the take compared them with earlier snapshots."""
    origin: str | None = None
    """The file of an earlier snapshot that has the same physical bytes, if they are shared with it."""
    age: int = 0
    """Number of takes since these bytes were written."""
    in_base: bool = False
    """True if the file is not in this snapshot, but in the one that it is based on."""
    packed: PackedFile | None = None
    """The stored form of a compressed file."""
    name: str = ""
    """The name of the file in its base, if the base is no snapshot but a folder of weights."""

    @property
    def stored_size(self) -> int:
        """Bytes of the file on the storage."""
        return self.size if self.packed is None else self.packed.size


class ForeignFile(FileEntry):
    """A file of another library, which no stored manifest names: its entries may be packed, or views."""

    exact: bool = True
    """True if the length is known; otherwise it is at least `size`."""
    archived: bool = False
    """True for an archive of torch.save. Its checksums cover all ranges in it."""
    lacks: str = ""
    """Reason why the checkpoint does not have all boxes of its sharded tensors; empty if it has."""


class DerivedFile(ForeignFile):
    """A file whose bytes are computed from those of other files. `size` counts them, and none of them is stored."""

    @property
    def stored_size(self) -> int:
        return 0


class PartEntry(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """A part of a large manifest, in a separate file: the own entries of some ranks."""

    location: str
    size: int
    digest: str
    ranks: list[int]
    count: int
    index: tuple[int, int, str] | None = None
    """Begin, end and digest of the index in the part's file, if it has one."""


class BaseReference(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """A snapshot that another one is based on. Its files are found by their names, which contain the save id."""

    save_id: str
    """Of a folder of weights, an id that follows from the names, sizes and headers of its files."""
    url: str
    """The place of the base at the time of the take, without secrets, for people."""
    format: Literal["", "safetensors"] = ""
    """The format of the base, if it is no snapshot but a folder of weights."""

    def __str__(self) -> str:
        return self.url if self.format else f"{self.url} (save id {self.save_id})"


class Document(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The manifest as stored, without its digest."""

    format: str
    version: str
    save_id: str
    world_size: int
    created: str
    structure: str
    metadata: msgspec.Raw
    files: dict[str, FileEntry]
    parts: list[PartEntry]
    manifest: dict[str, AnyEntry]
    base: BaseReference | None = None
    """The snapshot that has the files that are marked `in_base`."""

    @property
    def own_files(self) -> dict[str, FileEntry]:
        """The files that are in this snapshot."""
        if self.base is None:
            return self.files
        return {location: file for location, file in self.files.items() if not file.in_base}

    @property
    def stored_files(self) -> dict[str, FileEntry]:
        """The files that are stored here, without those that are derived from others."""
        return {place: file for place, file in self.own_files.items() if not isinstance(file, DerivedFile)}


_encoder = msgspec.json.Encoder()


def encode(document: msgspec.Struct) -> bytes:
    """Return the bytes of a document, or of a part of one, with the digest at the end."""
    body = _encoder.encode(document)[:-1]
    return b'%s,"digest":"%s"}' % (body, digest_range(body).encode())


def digest_in(encoded: bytes) -> str:
    """Return the digest at the end of what `encode` returned."""
    return encoded[-len('xxh3:"}') - 32 : -2].decode()


def copy_manifest(manifest: Mapping[str, AnyEntry]) -> dict[str, Entry]:
    """Return a deep copy by encoding and decoding, which is many times faster than copying objects."""
    try:
        encoded = _encoder.encode(manifest)
    except RecursionError as error:
        raise CorruptSnapshotError(f"the manifest is nested too deeply: {error}") from error
    return dict[str, Entry](decode_json(encoded, dict[str, AnyEntry], "the manifest"))


def decode_document(data: bytes, where: object) -> Document:
    """Check and decode a manifest; `where` names it in errors."""
    _check_format(data, where)
    document: Document = decode_canonical(data, Document, where)
    for location in [*document.files, *(part.location for part in document.parts)]:
        if not _LOCATION.fullmatch(location):
            raise CorruptSnapshotError(f"{where}: invalid name of a data file: {location[:200]!r}")
    if len({part.location for part in document.parts}) != len(document.parts):
        raise CorruptSnapshotError(f"{where}: lists a part of the manifest twice")
    for location, file in document.files.items():
        if not 0 <= file.header <= min(file.size, LONGEST_HEADER):
            raise CorruptSnapshotError(f"{where}: {location} must not have a header of {counted(file.header, 'byte')}")
        if file.packed is not None:
            _check_packed(location, file, file.packed, document.files, where)
        if file.in_base != (document.base is not None and save_id_in(location) == document.base.save_id):
            raise CorruptSnapshotError(f"{where}: {location} must be in the base if, and only if, it has its save id")
        named = file.in_base and document.base is not None and bool(document.base.format)
        if bool(file.name) != named or (named and not _WEIGHTS.fullmatch(file.name)):
            raise CorruptSnapshotError(f"{where}: {location} must not have the name {file.name[:200]!r} in the base")
        if bool(file.header) != bool(file.header_digest):
            raise CorruptSnapshotError(f"{where}: {location} must have a digest of its header, and only of a header")
    if document.base is not None and document.base.save_id == document.save_id:
        raise CorruptSnapshotError(f"{where}: a snapshot must not be its own base")
    indexed = any(part.index is not None for part in document.parts)
    lowest = NEWEST_FORMAT if indexed else format_of(document.files, document.manifest)
    if document.format != lowest and not (document.parts and document.format == NEWEST_FORMAT):
        raise CorruptSnapshotError(f"{where}: format must be {lowest}, got {document.format[:80]}")
    if document.world_size < 1:
        raise CorruptSnapshotError(f"{where}: world size must be at least 1, got {document.world_size}")
    return document


def format_of(files: Mapping[str, FileEntry], entries: Mapping[str, Any]) -> str:
    """Return the format of a manifest with these files and entries."""
    if needs_third_format(entries.values()) or any(
        location.endswith(STATISTICS) or file.name for location, file in files.items()
    ):
        return NEWEST_FORMAT
    return PACKED_FORMAT if any(file.packed is not None for file in files.values()) else FORMAT


def _check_packed(
    location: str, file: FileEntry, packed: PackedFile, files: Mapping[str, FileEntry], where: object
) -> None:
    """Raise unless a compressed file and its table may be what an entry says."""
    if packed.codec != CODEC:
        raise UnsupportedFormatError(
            f"{where}: {location}: unknown codec {packed.codec[:80]!r}; install a newer version of snapshot"
        )
    table, begin, end = packed.index
    held = files.get(table)
    if held is None or held.packed is not None or held.in_base or not held.header <= begin <= end <= held.size:
        raise CorruptSnapshotError(f"{where}: {location}: its table {begin}-{end} is outside the data of {table[:200]}")
    if file.in_base:
        raise CorruptSnapshotError(f"{where}: {location}: a file of the base must not be described as compressed")
    length = end - begin
    fits = 0 < file.size <= MOST_TIMES * packed.size and RECORD <= length <= longest_table(file.size)
    if not fits or length % RECORD:
        raise CorruptSnapshotError(
            f"{where}: {location}: {counted(file.size, 'byte')} cannot be stored in {packed.size:,}"
        )


def save_id_in(location: str) -> str:
    """Return the save id in the name of a data file."""
    return location.removeprefix("data/").partition("-")[0]


def _check_format(data: bytes, where: object) -> None:
    """Raise for a newer format before checking the digest: it may have a different one, or none."""
    found = re.match(rb'\s*\{\s*"format"\s*:\s*"snapshot/(\d{1,9})"', data)
    if found and f"snapshot/{int(found[1])}" not in OWN_FORMATS:
        raise UnsupportedFormatError(
            f"{where}: format must be {' or '.join(OWN_FORMATS)} for this version, got snapshot/{int(found[1])}; "
            "install a newer version of snapshot"
        )


def newer_format(error: Exception) -> UnsupportedFormatError:
    """Return the error for fields or types that this version does not know."""
    return UnsupportedFormatError(
        f"{error}: written by a newer version, or by hand; install a newer version of snapshot"
    )


def decode_canonical(data: bytes, kind: type[Any], where: object) -> Any:
    """Return a document, or a part of one. Raise if its digest differs, or if it is not in the canonical form."""
    tail = _TAIL.match(data, max(0, len(data) - _TAIL_LENGTH))
    if not tail:
        raise CorruptSnapshotError(f"{where}: not a manifest, or its end is missing ({counted(len(data), 'byte')})")
    body = memoryview(data)[: tail.start()]
    actual = digest_range(body)
    if actual.encode() != tail[1]:
        raise CorruptSnapshotError(f"{where}: digest must be {tail[1].decode()}, got {actual}")
    try:
        decoded = decode_json(b"%s}" % body, kind, where)
        canonical = _encoder.encode(decoded)
    except CorruptSnapshotError as error:
        if not isinstance(error.__cause__, msgspec.ValidationError):
            raise
        raise newer_format(error) from error
    except UNREADABLE as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    if memoryview(canonical)[:-1] != body:
        raise CorruptSnapshotError(f"{where}: not in the canonical form (duplicate keys, or edited by hand)")
    return decoded


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STRING = re.compile(rb'"[^"]*"?')
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def encode_metadata(metadata: Mapping[str, Any] | None) -> msgspec.Raw:
    """Encode the user's metadata for the manifest; raise `TypeError` if it is not a mapping that JSON can hold."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata must be a mapping, got {type(metadata).__name__}")
    try:
        json.dumps(dict(metadata or {}), allow_nan=False)  # JSON has no NaN, and msgspec would make it null
        encoded = msgspec.json.encode(dict(metadata or {}))
        if measure_nesting(encoded) > DEEPEST:
            raise ValueError(f"it must nest at most {DEEPEST} levels")
        return msgspec.Raw(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"metadata must be a mapping of JSON values: {error}") from error


def decode_metadata(metadata: msgspec.Raw) -> dict[str, Any]:
    """Return the metadata in a manifest. Raise CorruptSnapshotError if it is not a mapping, or nests too deep."""
    if measure_nesting(metadata) > DEEPEST:
        raise CorruptSnapshotError(f"the manifest's metadata must nest at most {DEEPEST} levels")
    found: dict[str, Any] = decode_json(metadata, dict[str, Any], "cannot read the manifest's metadata")
    return found


def measure_nesting(document: bytes | memoryview) -> int:
    """Return the depth of the brackets in a JSON document, without recursion.

    >>> measure_nesting(b'{"a":[[1],"[[[\\"]}')
    3
    """
    text = bytes(document)
    if b"\\" in text:
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = _STRING.sub(b"", text).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


# The head of a manifest: all of its fields but the entries, since there may be many.


class NotOurs(SnapshotError):
    """The file at a manifest's path was not written by this version of the library."""


class ManifestHead(msgspec.Struct):
    """All fields of a manifest but its entries, which are skipped, since there may be many."""

    format: str
    version: str
    save_id: str
    world_size: int
    created: str
    metadata: dict[str, Any]
    files: dict[str, FileEntry]
    parts: list[PartEntry]
    base: BaseReference | None = None

    @property
    def nbytes(self) -> int:
        """Size of the data files in bytes, counted as in `SnapshotMetadata.nbytes`."""
        return sum(each.stored_size for each in self.files.values() if not each.in_base)

    def sizes(self) -> dict[str, int]:
        """Return the size of each file that the snapshot has: data, and parts of the manifest."""
        sizes = {name: each.stored_size for name, each in self.files.items() if not each.in_base}
        return sizes | {each.location: each.size for each in self.parts}

    def physical_sizes(self) -> dict[str, int]:
        """Return `sizes` by physical files: a shared one has the name of the first file that had its bytes."""
        origins = {name: each.origin or name for name, each in self.files.items()}
        return {origins.get(name, name): size for name, size in self.sizes().items()}

    def copies(self) -> dict[str, str]:
        """Return the physical file of each content that an incremental take recorded."""
        return {each.content: each.origin or name for name, each in self.files.items() if each.content is not None}


OURS = re.compile(rb'\{"format":"snapshot/[123]","version":"[^"]{1,80}","save_id":"[0-9a-f]{12}",')
_SAVE_ID = re.compile(rb'\{"format":"snapshot/\d{1,9}","version":"[^"]{1,80}","save_id":"([0-9a-f]{12})",')


def find_save_id(data: bytes) -> str | None:
    """Return the save id in the first bytes of a manifest, which is not verified; None if it is not a manifest."""
    found = _SAVE_ID.match(data)
    return found[1].decode() if found else None


def decode_head(data: bytes, where: object) -> ManifestHead:
    """Return the head of a manifest.

    Raise NotOurs if the data does not begin like a manifest, and CorruptSnapshotError if its checksum is wrong.
    """
    if not OURS.match(data):
        raise NotOurs(f"{where}: not a manifest that this version of the library wrote")
    tail = _TAIL.match(data, max(0, len(data) - _TAIL_LENGTH))
    if tail is None or digest_range(memoryview(data)[: tail.start()]).encode() != tail[1]:
        raise CorruptSnapshotError(f"{where}: the manifest's checksum is wrong")
    head: ManifestHead = decode_json(data, ManifestHead, where)
    try:
        datetime.fromisoformat(head.created)
    except ValueError as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    return head


_ENTRIES = b',"manifest":{'
_BASE = re.compile(rb'"\},"digest":"xxh3:[0-9a-f]{32}"\}$')
"""The end of a manifest that has a base. Without one, its last entry ends with other bytes."""
_NO_BASE = re.compile(rb'[{}]\},"digest":"xxh3:[0-9a-f]{32}"\}$')


def decode_head_of_ends(beginning: bytes, end: bytes, where: object) -> ManifestHead | None:
    """Return the head of a manifest from its first and last bytes; None if they do not show all of it.

    These bytes have no digest of their own. So they must agree with each other about the base: `files` and the end
    name it.
    """
    if not OURS.match(beginning):
        raise NotOurs(f"{where}: not a manifest that this version of the library wrote")
    at = -1
    for _ in range(8):  # also the user's metadata may have these bytes, but not at the end of an object
        at = beginning.find(_ENTRIES, at + 1)
        if at < 0:
            return None
        try:
            head: ManifestHead = decode_json(beginning[:at] + b"}", ManifestHead, where)
            datetime.fromisoformat(head.created)
        except (CorruptSnapshotError, ValueError):
            continue
        bases = {save_id_in(name) for name, each in head.files.items() if each.in_base}
        if not bases:
            return head if _NO_BASE.search(end) else None
        start = end.rfind(b',"base":{')
        if start < 0 or not _BASE.search(end):
            return None
        head.base = decode_json(end[start + 8 : end.rindex(b',"digest":')], BaseReference, where)
        return head if bases == {head.base.save_id} else None
    return None


# Properties of a whole snapshot, for users.


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """Time, library version and user metadata of a snapshot."""

    format: str
    version: str
    """The library's version."""
    save_id: str
    """A new id for every take. The names of its data files begin with it."""
    world_size: int
    created: datetime
    structure: str
    """A digest of all names, shapes and dtypes: equal for snapshots of the same structure."""
    metadata: dict[str, Any]
    """The `metadata` argument of `take`."""
    entries: int
    """The number of tensors, values and empty containers of all ranks. Other containers are not counted."""
    nbytes: int
    """Total size of the data files."""
    files: dict[str, int]
    """Size of each data file, by name."""
    _document: Document = field(repr=False, compare=False)

    @property
    def compressed(self) -> bool:
        """True if a file is stored compressed."""
        return any(file.packed is not None for file in self._document.own_files.values())

    @property
    def manifest(self) -> dict[str, Entry]:
        """A copy of the manifest, as `Snapshot.get_manifest()` returns it."""
        return copy_manifest(self._document.manifest)

    @classmethod
    def of(cls, document: Document) -> SnapshotMetadata:
        """Create the metadata from a manifest's document."""
        metadata = decode_metadata(document.metadata)
        try:
            created = datetime.fromisoformat(document.created)
        except ValueError as error:
            raise CorruptSnapshotError(f"cannot read the manifest's date: {error}") from error
        return cls(
            document.format,
            document.version,
            document.save_id,
            document.world_size,
            created,
            document.structure,
            metadata,
            count_entries(document.manifest),
            sum(file.stored_size for file in document.own_files.values()),
            {location: file.stored_size for location, file in document.stored_files.items()},
            document,
        )


Files = Mapping[str, FileEntry]


def check_tree(path: str, entries: Mapping[str, Any]) -> None:
    """Raise unless the entries at and below a path form one tree that matches the containers' children."""
    expected = 1
    for below, entry in entries.items():
        if entry.is_container:
            entry.check(below)
            expected += entry.width
            if below.count("/") > DEEPEST + 1:
                raise CorruptSnapshotError(f"{path}: nested more than {DEEPEST} deep")
        if not entry.is_hashable:
            holder = entries.get(above := below.rpartition("/")[0])
            while isinstance(holder, (TupleEntry, SliceEntry)) and above:
                holder = entries.get(above := above.rpartition("/")[0])
            if isinstance(holder, (SetEntry, FrozensetEntry)):
                raise CorruptSnapshotError(f"{above}: a set cannot contain {below}")
    if path not in entries:
        raise CorruptSnapshotError(f"{path}: has no entry of its own")
    if expected != len(entries):
        raise CorruptSnapshotError(
            f"{path}: its containers must have {counted(expected, 'entry', 'entries')}, got {len(entries)}"
        )


def check_tensor(
    path: str, entry: AnyTensor, files: Files, *, partial: bool = False, boxes: Sequence[Box] | None = None
) -> None:
    """Raise unless all of a tensor can be read from the location of its entry.

    With `partial`, only the parts that the entry has are checked. With `boxes`, only these are read, so they are
    sufficient if the file is of one rank.
    """
    if type(entry) is TensorEntry:
        check_stored(path, entry, files)
        return
    check_shape(path, entry)
    if entry.is_mapped:
        for source in entry.sources():
            check_tensor(path, source, files, partial=partial)
        return
    pieces = entry.pieces()
    for box, stored in pieces:
        if stored.dtype != entry.dtype or stored.shape != box.sizes or not is_inside(box, entry.shape):
            raise CorruptSnapshotError(
                f"{path}: the part at {list(box.offsets)} does not fit {entry.dtype}{list(entry.shape)}"
            )
        check_stored(path, stored, files)
    if sum(box.numel for box, _ in pieces) != math.prod(entry.shape) and not partial:
        lacks = next((file.lacks for file in files.values() if isinstance(file, ForeignFile) and file.lacks), "")
        if not lacks:
            raise CorruptSnapshotError(f"{path}: the parts do not fill {list(entry.shape)}")
        if boxes is None or not all(_is_filled(box, pieces) for box in boxes):
            held = listed([str(box) for box, _ in pieces], 5) if pieces else " none"
            raise UnsupportedFormatError(f"{path}: {lacks}; of {entry.dtype}{list(entry.shape)}, there are:{held}")
    try:
        overlapping = boxes_overlap([box for box, _ in pieces])
    except ValueError as error:
        raise CorruptSnapshotError(f"{path}: {error}") from error
    if overlapping:
        raise CorruptSnapshotError(f"{path}: the parts overlap")
    _check_layout(path, entry)


def _is_filled(box: Box, pieces: Sequence[tuple[Box, Any]]) -> bool:
    return sum(shared.numel for piece, _ in pieces if (shared := intersect(piece, box))) == box.numel


def check_stored(path: str, entry: TensorEntry, files: Files) -> None:
    """Raise unless one range of a tensor can be read."""
    extra = entry.extra
    packed = entry.serializer != "raw" and isinstance(files.get(entry.location), ForeignFile)
    if not packed and (
        entry.serializer != "raw" or (extra and (extra.strides is not None or extra.storage_offset is not None))
    ):
        raise UnsupportedFormatError(f"{path}: unknown serializer ({entry.serializer})")
    itemsize = find_itemsize(entry.dtype)
    if itemsize is None and isinstance(files.get(entry.location), ForeignFile):
        raise UnsupportedFormatError(f"{path}: tensors of type {entry.dtype} are listed, but not read; exclude them")
    if itemsize is None:
        raise UnsupportedFormatError(f"{path}: unknown dtype {entry.dtype!r} in this version of torch")
    check_shape(path, entry)
    begin, end = entry.byte_range
    if end - begin != math.prod(entry.shape) * itemsize and not packed:
        raise CorruptSnapshotError(
            f"{path}: the size of {entry.dtype}{list(entry.shape)} does not match its range of "
            f"{counted(end - begin, 'byte')}"
        )
    check_range(path, entry, files)
    if extra is not None:
        _check_layout(path, entry)


def check_shape(path: str, entry: AnyTensor) -> None:
    """Raise for a shape that torch does not support, even if one of its sizes is 0."""
    shape = entry.shape
    elements = math.prod(shape) or math.prod(max(1, size) for size in shape)
    if elements >= 1 << 60 or min(shape, default=0) < 0:
        raise CorruptSnapshotError(f"{path}: invalid shape {list(entry.shape)} of {entry.dtype}")


def check_range(path: str, entry: TensorEntry | ObjectEntry, files: Files) -> None:
    """Raise unless an entry's range and its digest table are inside files of this snapshot.

    Both must begin after the file's header.
    """
    begin, end = entry.byte_range
    file = files.get(entry.location)
    if file is None or not 0 <= file.header <= begin <= end <= file.size:
        raise _outside_error(path, entry.location, begin, end)
    count = count_blocks(end - begin)
    if count and entry.digest is not None:
        if entry.blocks is None:
            raise CorruptSnapshotError(f"{path}: the table of digests is missing")
        location, begin, end = entry.blocks
        table = files.get(location)
        if table is None or not 0 <= table.header <= begin <= end <= table.size or end - begin != count * SIZE:
            raise _outside_error(path, location, begin, end)


def _check_layout(path: str, entry: AnyTensor) -> None:
    order = None if entry.extra is None else entry.extra.stride_order
    if order is not None and sorted(order) != list(range(len(entry.shape))):
        raise CorruptSnapshotError(f"{path}: invalid order {order} of {counted(len(entry.shape), 'dimension')}")


def _outside_error(path: str, location: str, begin: int, end: int) -> CorruptSnapshotError:
    return CorruptSnapshotError(f"{path}: the range {begin}-{end} is outside the data of {location[:200]}")


def find_locations(entries: Mapping[str, Any], files: Files) -> set[str]:
    """Return the known files of entries, which are checked before memory is allocated.

    Unknown files are reported later.
    """
    found = set()
    for entry in entries.values():
        if type(entry) is TensorEntry:  # nearly all are, so this has the fewest steps
            found.add(entry.location)
        else:
            found.update([stored.location for stored in entry.stored()])
    return found & files.keys()
