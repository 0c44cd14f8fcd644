"""DCP's item names and a manifest's paths, and the commit of a DCP save."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from snapshot.decoding import decode_json
from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import warn
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.system import gc_paused
from snapshot.manifest import document as d
from snapshot.manifest import entries as e
from snapshot.manifest.containers import Compound, DictEntry, ListEntry, RecordEntry
from snapshot.manifest.document import FileEntry, encode_metadata, merge
from snapshot.manifest.parts import ManifestPart
from snapshot.manifest.paths import decode_component, decode_key, encode_component, encode_key, find_tagged_keys
from snapshot.manifest.rank_view import DEEPEST
from snapshot.manifest.values import Entry, Scalar
from snapshot.save.commit import RankDone, commit_with_ranks, expect_written, write_own_part
from snapshot.save.describe import RankManifest, shard_checksums
from snapshot.save.transaction import Transaction
from snapshot.state.flatten import Flattened, inflate_tree
from snapshot.tensors.digest import digest_range
from snapshot.tensors.geometry import Box

# DCP's item names and a manifest's paths: the mapping between entries and `torch.distributed.checkpoint` items.
#
# DCP has a flat dictionary of items and, in `planner_data`, the place of each in the nested state. An item's path in
# the manifest is that place. If the nesting can be derived from the paths, nothing else is recorded. So snapshots
# written by `Snapshot.take` have DCP names, too: those that `flatten_state_dict` would give the same state.

Keys = tuple[str | int, ...]
KEY = "torch.distributed.checkpoint"
"""Key of the record in the snapshot's metadata."""
_VALUE = "planner_data"


class Partial(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor with only some boxes saved, each as a tensor below the item's path."""

    dtype: str
    shape: tuple[int, ...]
    boxes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Path component -> offsets and sizes."""


class DcpRecord(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Information about DCP's names that the paths do not give. Strings are escaped like path components."""

    top: bool = False
    """True if each top-level entry is one item, even if it is a container."""
    items: dict[str, str] | None = None
    """Name -> path, if neither `top` nor the nesting gives it."""
    planner_data: dict[str, Any] | None = None
    """`{"keys": {name: path}}`, or `{"entries": ...}` for other plain values; None if there was none."""
    derived: bool = False
    """True if the planner's data can be derived from the nesting."""
    raw: list[str] = []
    """Items whose bytes were not written by torch, and are returned unchanged."""
    partial: dict[str, Partial] = {}


@dataclass
class DcpNames:
    """The items of a snapshot."""

    paths: dict[str, str]
    """Name -> path in the manifest, without the rank."""
    planner_data: Any
    raw: frozenset[str] = frozenset()
    partial: dict[str, Partial] = field(default_factory=dict)


def path_of(keys: Keys) -> str:
    """Return the manifest's path of an item at these keys."""
    return "/".join([encode_component(key) if type(key) is str else str(key) for key in keys])


def flat_paths(names: Iterable[str]) -> dict[str, str]:
    """Return each name mapped to a single path component."""
    return {name: encode_component(name) for name in names}


def nested_paths(names: Iterable[str], planner_data: Any) -> dict[str, str] | None:
    """Return name -> path from the saved nesting, or None if there is none or two items would have one path."""
    if not isinstance(planner_data, dict):
        return None
    paths: dict[str, str] = {}
    above: dict[Keys, str] = {(): ""}
    for name in names:
        keys = planner_data.get(name)
        if type(keys) is not tuple or not keys:
            return None
        parent = keys[:-1]
        if parent not in above and not _note(parent, above):
            return None
        last = keys[-1]
        if type(last) is str:  # most names need no escapes, and there are many of them
            text = last if last.isascii() and "/" not in last and "%" not in last else encode_component(last)
        elif _is_path((last,)):
            text = str(last)
        else:
            return None
        paths[name] = above[parent] + text
    places = set(paths.values())
    holders = {prefix[:-1] for keys, prefix in above.items() if keys}
    if len(places) < len(paths) or len(holders) < len(above) - 1 or not holders.isdisjoint(places):
        return None
    return paths


def _note(keys: Any, above: dict[Keys, str]) -> bool:
    """Add the containers above `keys` with their path prefixes. Return False if `keys` is not a valid path."""
    if not _is_path(keys):
        return False
    while keys not in above:
        above[keys] = path_of(keys) + "/"
        keys = keys[:-1]
    return True


def _is_path(keys: Any) -> TypeGuard[Keys]:
    return (
        type(keys) is tuple
        and 0 < len(keys) < DEEPEST
        and all(type(key) is str or (type(key) is int and key >= 0) for key in keys)
    )


def containers(every: Iterable[Keys]) -> dict[str, Entry]:
    """Return the container entries for items at these keys: lists if the numbers have no gap, else dicts."""
    children: dict[Keys, dict[str | int, None]] = {}
    for keys in every:
        at = keys
        while at:
            parent = at[:-1]
            known = parent in children
            children.setdefault(parent, {})[at[-1]] = None
            if known:
                break
            at = parent
    children.pop((), None)
    return {path_of(keys): _container(list(found)) for keys, found in sorted(children.items(), key=_depth)}


def _depth(item: tuple[Keys, Any]) -> int:
    return len(item[0])


def _container(keys: list[str | int]) -> Entry:
    if all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return ListEntry(len(keys))
    return DictEntry([encode_key(key) for key in keys], find_tagged_keys(keys) or None)  # type: ignore[misc]


def derive_names(entries: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Keys]]:
    """Return name -> path, and name -> keys, as DCP would flatten the entries.

    Paths have no rank. Dicts are flattened, and so are lists that contain a tensor or a dict. Two items with one name
    are both left out.
    """
    walk = _Walk(entries)
    for path, entry in entries.items():
        if "/" not in path:
            walk.visit((decode_component(path),), path, entry)
    for name in walk.twice:
        del walk.paths[name], walk.keys[name]
    return walk.paths, walk.keys


class _Walk:
    def __init__(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        self.paths: dict[str, str] = {}
        self.keys: dict[str, Keys] = {}
        self.twice: set[str] = set()

    def visit(self, keys: Keys, path: str, entry: Any) -> None:
        if isinstance(entry, DictEntry) and not isinstance(entry, Compound):
            for key, name in zip(entry.keys, entry.components(), strict=True):
                text = key if type(key) is str else str(decode_key(key))
                self._below((*keys, text), f"{path}/{name}")
        elif type(entry) is ListEntry and not self._terminal(path, entry):
            for index in range(entry.length):
                self._below((*keys, index), f"{path}/{index}")
        else:
            name = ".".join(map(str, keys))
            if name in self.paths:
                self.twice.add(name)
            self.paths[name] = path
            self.keys[name] = keys

    def _below(self, keys: Keys, path: str) -> None:
        entry = self._entries.get(path)
        if entry is not None:  # a rank's view may lack some
            self.visit(keys, path, entry)

    def _terminal(self, path: str, entry: ListEntry) -> bool:
        for index in range(entry.length):
            below = f"{path}/{index}"
            child = self._entries.get(below)
            if type(child) is RecordEntry:
                continue  # DCP does not flatten it
            if child is not None and (child.is_tensor or isinstance(child, (e.TensorPartsEntry, DictEntry))):
                return False
            if type(child) is ListEntry and not self._terminal(below, child):
                return False
        return True


def record_names(names: DcpNames, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata from which `recall_names` gets the same names; empty if the paths are enough."""
    paths, keys = derive_names(entries)
    derived = names.planner_data == keys and type(names.planner_data) is dict
    if derived and paths == names.paths and not names.raw and not names.partial:
        return {}
    made = DcpRecord(derived=derived, raw=sorted(map(encode_component, names.raw)))
    made.partial = {encode_component(name): each for name, each in names.partial.items()}
    if paths != names.paths:
        made.top = names.paths == {decode_component(path): path for path in entries if "/" not in path}
        made.items = None if made.top else {encode_component(name): path for name, path in names.paths.items()}
    if not derived:
        made.planner_data = _encoded(names.planner_data)
    return {KEY: msgspec.to_builtins(made)}


class Unkept(Exception):
    """Planner data contain values that are not plain."""


def _encoded(data: Any) -> dict[str, Any] | None:
    if data is None:
        return None
    if type(data) is dict and all(type(name) is str and _is_path(keys) for name, keys in data.items()):
        return {"keys": {encode_component(name): [_escaped(key) for key in keys] for name, keys in data.items()}}
    flat = Flattened(classes=False)
    flat.add(_VALUE, data)
    if flat.leaves or flat.blobs or flat.shards or flat.pickled:
        raise Unkept
    return {"entries": msgspec.to_builtins(flat.entries)}


def _escaped(key: str | int) -> str | int:
    return encode_component(key) if type(key) is str else key


def recall_names(metadata: msgspec.Raw, entries: Mapping[str, Any], where: object) -> DcpNames:
    """Return the items of a snapshot, from its entries (under paths without a rank) and the record of names."""
    try:
        told = decode_json(metadata, dict[str, msgspec.Raw], where) if len(metadata) else {}
        made: DcpRecord = decode_json(told[KEY], DcpRecord, where) if KEY in told else DcpRecord(derived=True)
        paths, keys = derive_names(entries)
        if made.top:
            paths = {decode_component(path): path for path in entries if "/" not in path}
        elif made.items is not None:
            paths = {decode_component(name): path for name, path in made.items.items()}
        partial = {decode_component(name): each for name, each in made.partial.items()}
        raw = frozenset(map(decode_component, made.raw))
        return DcpNames(paths, keys if made.derived else _decoded(made.planner_data), raw, partial)
    except (CorruptSnapshotError, msgspec.MsgspecError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptSnapshotError(f"{where}: the metadata under {KEY} cannot be decoded: {error}") from error


def _decoded(data: dict[str, Any] | None) -> Any:
    if data is None:
        return None
    if "keys" in data:
        return {decode_component(name): tuple(map(_unescaped, keys)) for name, keys in data["keys"].items()}
    entries: dict[str, Any] = decode_json(msgspec.json.encode(data["entries"]), dict[str, e.AnyEntry], KEY)
    values = {path: entry.value() for path, entry in entries.items() if isinstance(entry, Scalar)}
    return inflate_tree(_VALUE, entries, values)


def _unescaped(key: Any) -> Any:
    return decode_component(key) if type(key) is str else key


def partial_entry(path: str, partial: Partial, entries: Mapping[str, Any]) -> e.ShardedTensorEntry:
    """Return the entry of a partial tensor, assembled from the entries of its boxes."""
    shards = [e.Shard(offsets, sizes, entries[f"{path}/{name}"]) for name, (offsets, sizes) in partial.boxes.items()]
    return e.ShardedTensorEntry(partial.dtype, partial.shape, shards)


def taken_apart(path: str, entry: e.ShardedTensorEntry) -> tuple[Partial, dict[str, Entry]]:
    """Return the record of a partial tensor and the entries of its boxes: the inverse of `partial_entry`."""
    boxes, made = {}, {}
    for shard in entry.shards:
        name = str(Box(shard.offsets, shard.sizes)) or "all"
        boxes[name] = shard.offsets, shard.sizes
        made[f"{path}/{name}"] = shard.tensor
    return Partial(entry.dtype, tuple(entry.shape), boxes), {path: DictEntry(list(boxes)), **made}


# End of a DCP save: the results of all ranks are merged into one manifest, which is committed.

VERB = "dcp.save"


class WrittenItems:
    """Result of a rank for the coordinator: entries by item, and files. Pickled as JSON."""

    def __init__(self, part: ManifestPart | None = None, raw: Sequence[str] = ()) -> None:
        part = part or ManifestPart({})
        self.entries: dict[str, Any] = part.manifest
        """Entries by the item's name (as one path component), and the entries below it."""
        self.files: dict[str, FileEntry] = part.files
        self.raw: list[str] = list(raw)
        """Items whose bytes were not written by torch."""

    @property
    def nbytes(self) -> int:
        """Size of all files in bytes."""
        return sum(file.size for file in self.files.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return _read_told, (msgspec.json.encode(ManifestPart(self.entries, files=self.files)), self.raw)


def _read_told(data: bytes, raw: list[str]) -> WrittenItems:
    return WrittenItems(decode_json(data, ManifestPart, "the items of a rank"), raw)


def join_and_commit(
    session: Session, transaction: Transaction, metadata: Metadata, told: Sequence[WrittenItems]
) -> int:
    """Commit the results of all ranks, and return their size in bytes. Delete everything if that fails."""

    async def commit() -> int:
        async with transaction:
            with gc_paused():
                manifest, files, note = _join_parts(metadata, told)
                described = _describe(manifest, files, encode_metadata(note))
            shares = [[(location, file.size) for location, file in each.files.items()] for each in told]
            await expect_written(session.storage, shares)
            _, own_part = await write_own_part(session, transaction.save_id, 0, described)
            newest = own_part is not None and own_part.index is not None
            done = RankDone((0, ""), own_part, shard_checksums(described), newest=newest)
            await commit_with_ranks(session, solo_exchange(VERB), transaction, described, done)
        return sum(file.size for file in files.values())

    return run(commit())


def _join_parts(
    metadata: Metadata, told: Sequence[WrittenItems]
) -> tuple[dict[str, Any], dict[str, FileEntry], dict[str, Any]]:
    """Return the manifest, its files, and the record of DCP's names."""
    found: dict[str, Any] = dict(told[0].entries) if told else {}
    for rank, each in enumerate(told[1:], 1):
        merge(found, each.entries, f"rank {rank}")
    files = {location: file for each in told for location, file in each.files.items()}
    names = [decode_component(path) for path in found if "/" not in path]
    expected = set(metadata.state_dict_metadata)
    if set(names) != expected:
        lost = sorted(expected.symmetric_difference(names))[:5]
        raise SnapshotError(
            f"the items that the ranks wrote must be those of the plan; different items: {', '.join(lost)} ..."
        )
    order = metadata.planner_data if isinstance(metadata.planner_data, dict) else metadata.state_dict_metadata
    ordered = [name for name in order if name in expected]
    names = ordered if len(ordered) == len(names) else list(metadata.state_dict_metadata)
    nested = nested_paths(names, metadata.planner_data)
    paths = flat_paths(names) if nested is None else nested
    above = {} if nested is None else containers(metadata.planner_data[name] for name in names)
    manifest: dict[str, Any] = {}
    below = _paths_below(found)
    made = DcpNames(paths, metadata.planner_data, frozenset(name for each in told for name in each.raw))
    for name in names:
        head, path = encode_component(name), paths[name]
        if above and (parent := path.rpartition("/")[0]) and parent not in manifest:
            _open(parent, above, manifest)
        entry = found[head]
        if entry.is_sharded:
            entry = _simplify(entry, several=len(told) > 1)
            if not entry.is_whole():
                made.partial[name], parts = taken_apart(path, entry)
                manifest.update(parts)
                continue
        manifest[path] = entry
        for rest in below.get(head, ()):
            manifest[path + rest] = found[head + rest]
    try:
        note = record_names(made, manifest)
    except Unkept:
        warn(
            f"the planner's planner_data ({type(metadata.planner_data).__name__}) is not plain, so it is "
            "not stored; loading returns None instead"
        )
        made.planner_data = None
        note = record_names(made, manifest)
    return {f"0/{path}": entry for path, entry in manifest.items()}, files, note


def _open(path: str, containers: Mapping[str, Any], manifest: dict[str, Any]) -> None:
    """Insert a container's entry, after the entries of the containers above it."""
    holder = path.rpartition("/")[0]
    if holder and holder not in manifest:
        _open(holder, containers, manifest)
    manifest[path] = containers[path]


def _paths_below(found: Mapping[str, Any]) -> dict[str, list[str]]:
    below: dict[str, list[str]] = {}
    for path in found:
        head, slash, rest = path.partition("/")
        if slash:
            below.setdefault(head, []).append(slash + rest)
    return below


def _simplify(entry: e.ShardedTensorEntry, *, several: bool) -> Any:
    """Return the simplest equivalent entry for a tensor in one range, or with one rank only."""
    shards = entry.shards
    if len(shards) == 1 and shards[0].sizes == entry.shape:
        return shards[0].tensor
    if not several and shards and entry.is_whole():
        return e.ChunkedTensorEntry(entry.dtype, entry.shape, sorted(shards, key=lambda shard: shard.offsets))
    return entry


def _describe(manifest: dict[str, Any], files: dict[str, FileEntry], metadata: msgspec.Raw) -> RankManifest:
    """Describe everything as if one rank had written it."""
    lines = (f"{path}\0{_likeness(entry)}" for path, entry in sorted(manifest.items()))
    structure = digest_range("\n".join(lines).encode("utf-8", "surrogatepass"))
    return RankManifest(manifest, {}, files, [], structure, metadata, 1, len(manifest) > d.IN_ONE, frozenset())


def _likeness(entry: Any) -> str:
    """Return the part of an entry that the structure's digest covers."""
    kind = type(entry).__name__
    return f"{kind} {entry.dtype}{list(entry.shape)}" if entry.is_tensor else kind
