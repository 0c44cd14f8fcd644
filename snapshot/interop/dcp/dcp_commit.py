"""End of a DCP save: the results of all ranks are merged into one manifest, which is committed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from snapshot.aio import gather_limited
from snapshot.decoding import decode_json
from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageNotFoundError
from snapshot.events import warn
from snapshot.interop.dcp.names import DcpNames, Unkept, containers, flat_paths, nested_paths, record_names, taken_apart
from snapshot.manifest import document as d
from snapshot.manifest import entries as e
from snapshot.manifest.document import FileEntry, ManifestPart
from snapshot.manifest.merge import merge
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.commit import RankDone, commit_with_ranks, own_part_path
from snapshot.save.manifest_builder import RankManifest, encode_own_part, shard_checksums
from snapshot.save.take_options import encode_metadata
from snapshot.save.transaction import Transaction
from snapshot.save.writer import write_small
from snapshot.tensors.digest import digest_range

VERB = "dcp.save"
AT_ONCE = 16


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
            await _expect_theirs(session, told[1:])
            part = encode_own_part(described)
            if part:
                await write_small(session.storage, own_part_path(transaction.save_id, 0), [part])
            own_part = (len(part), digest_range(part), len(described.own))
            done = RankDone((0, ""), own_part, shard_checksums(described))
            await commit_with_ranks(session, solo_exchange(VERB), transaction, described, done)
        return sum(file.size for file in files.values())

    return run(commit())


async def _expect_theirs(session: Session, others: Sequence[WrittenItems]) -> None:
    """Raise if another rank's files are not visible here: the snapshot would be unusable."""

    async def look(item: tuple[str, int]) -> None:
        location, size = item
        try:
            found = (await session.storage.stat(location)).size
        except StorageNotFoundError as error:
            raise SnapshotError(
                f"{error}: another rank wrote it, but the coordinator does not see it; all ranks must share one storage"
            ) from error
        if found != size:
            raise CorruptSnapshotError(f"{session.url.join(location)}: has {found:,} of {size:,} bytes")

    files = {location: file.size for each in others for location, file in each.files.items()}
    await gather_limited(files.items(), look, AT_ONCE)


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
        if isinstance(entry, e.ShardedTensorEntry):
            entry = _simplify(entry, several=len(told) > 1)
            if isinstance(entry, e.ShardedTensorEntry) and _missing(entry):
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


def _missing(entry: e.ShardedTensorEntry) -> bool:
    """Return True if no rank wrote some elements of the tensor."""
    return sum(math.prod(shard.sizes) for shard in entry.shards) != math.prod(entry.shape)


def _simplify(entry: e.ShardedTensorEntry, *, several: bool) -> Any:
    """Return the simplest equivalent entry for a tensor in one range, or with one rank only."""
    shards = entry.shards
    if len(shards) == 1 and shards[0].sizes == entry.shape:
        return shards[0].tensor
    if not several and shards and not _missing(entry):
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
    return f"{kind} {entry.dtype}{list(entry.shape)}" if isinstance(entry, e.TENSORS) else kind
