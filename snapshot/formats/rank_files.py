"""Folders in which each rank saved a file with torch.save: the files of all ranks are one checkpoint.

Trainers for reinforcement learning write such folders (`model_world_size_4_rank_0.pt`), and so do programs that save
FSDP's sharded state dicts themselves. The ranks' boxes form whole tensors. Values that are equal on all ranks are
shared, and others belong to their rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import zip_archive
from snapshot.formats.foreign import ForeignDocument, make_dict, make_document
from snapshot.formats.mistakes import HEAD, refuse_file
from snapshot.formats.packed_tensors import find_layout, place_elements
from snapshot.formats.pickled_objects import INLINE, is_refused, locate_object
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.to_entries import make_container
from snapshot.formats.torch_save import FORMAT, VALUE, TorchFile
from snapshot.formats.zip_archive import read_range
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.containers import Container
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import NDArrayEntry, ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import MOST_RANKS
from snapshot.manifest.values import Scalar
from snapshot.tensors.digest import digest_range
from snapshot.tensors.memory import contiguous_strides

_NAME = re.compile(
    r"(?!.*mp_rank_)(?P<item>.*?)[-_.]?(world_size_(?P<world>[0-9]{1,6})[-_])?"
    r"rank[-_]?(?P<rank>[0-9]{1,6})(?P<rest>[^0-9].*)?\.(?P<suffix>pt|pth|bin|ckpt)"
)
_SAVED = re.compile(r".*\.(pt|pth|bin|ckpt)")
AT_ONCE = 16
LACKS = "the files here do not have all boxes of it"


class RankFiles(NamedTuple):
    """Files of one item, such as the model."""

    key: str
    """Name of the item; empty if the folder has only one, and its name does not say which."""
    names: list[str]
    """File of each rank."""


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint of all ranks' files in a folder; None if there are none."""
    storage, names, limit = folder.linkless, await folder.names(), folder.limit
    items = find_items(storage.url, names)
    if not items:
        return None
    world = len(items[0].names)
    reader = _Reader(storage, limit)
    listed_files = [(item, name) for item in items for name in item.names]
    found = await gather_limited(listed_files, lambda each: reader.read(*each), AT_ONCE)
    manifest: dict[str, Any] = {}
    for number in range(len(items)):
        manifest |= RankMerge(found[number * world : (number + 1) * world], reader.inline).join()
    lacks = LACKS if any(not entry.is_whole() for entry in manifest.values()) else ""
    if items[0].key:
        root: Container | None = make_dict(item.key for item in items)
    else:
        root = found[0].root
    document = make_document(
        FORMAT,
        "",
        storage.url,
        b"\n".join(each.token for each in found),
        manifest=manifest,
        files={each.name: ForeignFile(each.size, lacks=lacks) for each in found},
        world_size=world,
    )
    document.root = root
    document.set_inline(bytes(reader.inline) or b"\0")
    return document


def find_items(where: object, names: Iterable[str]) -> list[RankFiles]:
    """Return the items that files of all ranks have, by the names in a folder."""
    groups: dict[tuple[str, ...], dict[int, str]] = {}
    others = False
    for name in names:
        if not (found := _NAME.fullmatch(name)):
            others = others or bool(_SAVED.fullmatch(name))
            continue
        key = ((found["item"] or "") + (found["rest"] or "")).strip("-_.")
        groups.setdefault((found["world"] or "", key, found["suffix"]), {})[int(found["rank"])] = name
    told = [group for group in groups if group[0]]
    if told:
        groups = {group: groups[group] for group in told}
    elif others:
        return []  # another file may be the checkpoint, and those of ranks belong to it
    worlds = {int(group[0]) if group[0] else max(ranks) + 1 for group, ranks in groups.items()}
    if len(worlds) > 1 or not all(0 < world <= MOST_RANKS for world in worlds):
        if told:
            raise UnsupportedFormatError(f"{where}: has files of {listed_worlds(worlds)} ranks; move each to a folder")
        return []
    made = []
    for (world, key, _), ranks in sorted(groups.items()):
        missing = [rank for rank in range(*worlds) if rank not in ranks]
        if missing and not world:
            return []
        if missing:
            raise CorruptSnapshotError(
                f"{where}: {_rank_name(ranks, missing[0])} is missing, and {len(missing) - 1} more"
                if len(missing) > 1
                else f"{where}: {_rank_name(ranks, missing[0])} is missing"
            )
        made.append(RankFiles(key, [ranks[rank] for rank in range(*worlds)]))
    if len({item.key for item in made}) < len(made):
        return []
    return [RankFiles("", made[0].names)] if len(made) == 1 and not told else made


def listed_worlds(worlds: Iterable[int]) -> str:
    """Return numbers of ranks as a text."""
    return " and ".join(map(str, sorted(worlds)[:5]))


def _rank_name(ranks: Mapping[int, str], rank: int) -> str:
    return re.sub(r"(rank[-_]?)[0-9]+", rf"\g<1>{rank}", next(iter(ranks.values())))


# Files of one rank, and what they have in common.


class RankFile(NamedTuple):
    """Entries of one rank's file."""

    name: str
    size: int
    token: bytes
    entries: dict[str, Any]
    """Entries by their paths without a rank."""
    sums: dict[int, tuple[int, int]]
    """Checksum and size of each archive member, by the begin of its header; the checksum is 0 if there is none."""
    root: Container | None


class TorchFiles:
    """Opens files of one checkpoint, and limits the length of all their pickles together."""

    def __init__(self, storage: Storage, limit: int) -> None:
        self.storage = storage
        self._limit = self._left = limit
        self.length = 0
        """Length of all pickles so far, as limits count it."""

    async def open(self, name: str) -> TorchFile:
        """Open a file by its name."""
        found = await self.storage.stat(name)
        try:
            saved = await TorchFile.open(self.storage, name, found.size, self._limit)
        except (CorruptSnapshotError, UnsupportedFormatError) as error:
            head = await read_range(self.storage, name, 0, min(HEAD, found.size))
            if not head.startswith(zip_archive.SIGNATURE):
                raise refuse_file(self.storage.url, name, head) from error
            raise
        saved.token = found.token
        self._left -= saved.length
        self.length += saved.length
        if self._left < 0:
            raise CorruptSnapshotError(
                f"{self.storage.url}: the pickles of its files exceed the limit of {self._limit:,} bytes"
            )
        return saved


async def find_raw_range(storage: Storage, entry: TensorEntry) -> TensorEntry:
    """Return the entry of a contiguous tensor in an archive with the range of its bytes, from its member's header.

    Many parts of one tensor then need one look. A compressed tensor, or one in the other byte order, remains packed.
    """
    if entry.serializer != "zip":
        return entry
    begin, end = entry.byte_range
    head = await read_range(storage, entry.location, begin, min(end, begin + zip_archive.HEADER))
    where = str(storage.url.join(entry.location))
    layout = find_layout(where, entry, head, b"")
    if layout.strides != contiguous_strides(entry.shape):
        raise CorruptSnapshotError(f"{where}: the tensor is not contiguous")
    return place_elements(entry, layout, entry.location)


class _Reader:
    """Reads the descriptions of all files."""

    def __init__(self, storage: Storage, limit: int) -> None:
        self._files = TorchFiles(storage, limit)
        self.inline = bytearray()

    async def read(self, item: RankFiles, name: str) -> RankFile:
        """Return one file's entries."""
        saved = await self._files.open(name)
        made = None if item.key else make_container(saved.value)
        if made is None:
            items: dict[str, Any] = {encode_component(item.key or VALUE): saved.value}
        else:
            items = dict(zip(made[0].components(), made[1], strict=True))
        entries = saved.describe_items(items, self.inline, depth=1 if made is None else 2, routed=False)
        for path, entry in entries.items():
            if is_refused(entry):
                locate_object(entry, name, path.split("/", 2 if made is None else 1)[-1] if path.count("/") > 1 else "")
        token = f"{name} {saved.token} {digest_range(saved.content)}".encode()
        own = {path.partition("/")[2]: entry for path, entry in entries.items()}
        return RankFile(name, saved.size, token, own, saved.sums(), made and made[0])


class RankMerge:
    """Joins the entries of all ranks."""

    def __init__(self, files: Sequence[RankFile], inline: bytearray, shared: Collection[str] = ()) -> None:
        """Join the files; `shared` has the paths of values that are known to be equal on all ranks."""
        self._files = files
        self._inline = inline
        self._shared = shared

    def join(self) -> dict[str, Any]:
        """Return the entries of all ranks, by their paths with a rank."""
        held: dict[str, list[tuple[int, Any]]] = {}
        for rank, file in enumerate(self._files):
            for path, entry in file.entries.items():
                held.setdefault(path, []).append((rank, entry))
        made: dict[str, Any] = {}
        for path, several in held.items():
            sharded: dict[bytes, tuple[int, list[Any]]] = {}
            plain = []
            for rank, entry in several:
                if entry.is_sharded:
                    sharded.setdefault(_header_of(entry), (rank, []))[1].append(entry)
                else:
                    plain.append((rank, entry))
            for rank, entries in sharded.values():
                made[f"{rank}/{path}"] = _join_boxes(entries)
            if len(plain) == len(self._files) and (path in self._shared or self._is_equal(plain)):
                made[f"0/{path}"] = msgspec.structs.replace(plain[0][1], replicated=True)
            else:
                made |= {f"{rank}/{path}": entry for rank, entry in plain}
        return made

    def _is_equal(self, several: Sequence[tuple[int, Any]]) -> bool:
        """Return True if all ranks have the same value. Tensors are compared by their checksums."""
        first = self._identify(*several[0])
        return first is not None and all(self._identify(*each) == first for each in several[1:])

    def _identify(self, rank: int, entry: Any) -> Any:
        """Return a value that is equal for equal entries; None for one that cannot be compared."""
        if isinstance(entry, TensorEntry):
            held = () if entry.location == INLINE else self._sum(rank, entry)
            form = (entry.dtype, entry.shape, entry.serializer, msgspec.json.encode(entry.extra))
            return None if held is None else (*form, held)
        if isinstance(entry, NDArrayEntry):
            [(_, stored)] = entry.data.pieces()
            kind = msgspec.json.encode([entry.dtype, entry.order, entry.shape, entry.scalar])
            return kind, bytes(self._inline[slice(*stored.byte_range)])
        return entry if isinstance(entry, (Container, Scalar)) else None

    def _sum(self, rank: int, entry: TensorEntry) -> tuple[int, int] | None:
        found = self._files[rank].sums.get(entry.byte_range[0], (0, 0))
        return found if found[0] else None


def _header_of(entry: ShardedTensorEntry) -> bytes:
    """Return a key of a rank's entry that is equal for the parts of one tensor."""
    return msgspec.json.encode(msgspec.structs.replace(entry, shards=[]))


def _join_boxes(entries: Sequence[ShardedTensorEntry]) -> ShardedTensorEntry:
    """Return one entry with the boxes of several. Of equal boxes, which are copies, it has the first."""
    boxes = {(shard.offsets, shard.sizes): shard for entry in reversed(entries) for shard in entry.shards}
    return msgspec.structs.replace(entries[0], shards=[boxes[each] for each in sorted(boxes)])
