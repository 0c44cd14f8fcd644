"""Copies of checkpoints: a snapshot with a commit of its own, other libraries' checkpoints file by file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from snapshot.distributed.exchange import LEADER, Exchange
from snapshot.distributed.operation import Operation
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    StorageConflictError,
    StorageError,
    UnsupportedFormatError,
)
from snapshot.events import emit
from snapshot.formats import dcp_notice, hugging_face, registry, torch_save
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.hugging_face import SHARD
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.aio import in_thread, shielded
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import exists
from snapshot.io.url import URL, Location, select_server
from snapshot.loading.archive_checksums import expect_archive_checksums, find_archives
from snapshot.loading.open import (
    Opened,
    expect_files,
    load_parts,
    open_checkpoint,
    open_main,
    read_parts,
)
from snapshot.manifest.document import METADATA, NEWEST_FORMAT, Document, PackedFile, PartEntry, encode
from snapshot.manifest.entries import count_entries, stored_in
from snapshot.manifest.parts import EncodedPart, ManifestPart, encode_own_part
from snapshot.manifest.paths import signature_path
from snapshot.progress import Meter
from snapshot.reports import CopyReport
from snapshot.save.begin import Claim, claimed
from snapshot.save.commit import commit_together, expect_written, raise_fault_of_another_rank, while_all_go_on
from snapshot.save.transaction import committed_save_id
from snapshot.save.writer import write_small
from snapshot.tensors.digest import digest_range
from snapshot.transform.call import (
    expect_checksums,
    expect_common_place,
    expect_selected,
    open_sources,
    share_whole,
)
from snapshot.transform.sources import CopiedFile, checked_files, copy_files_through, stat_files
from snapshot.transform.staged_files import StagedFiles
from snapshot.transform.target import Selection, Target, expand_chosen_trees, write_as_snapshot

# Copies of other libraries' checkpoints: their own files, unchanged, with the index file last.

MEGATRON = "metadata.json"
"""The file that identifies Megatron-core's directories."""
_HIDING = {
    "safetensors": (hugging_face.NAMES[:2], r"model-\d{5}-of-\d{5}\.safetensors"),
    torch_save.FORMAT: (
        hugging_face.NAMES,
        r"model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin",
    ),
}
"""Files that would be opened instead of a copy in Hugging Face's layout, and a pattern of their further files."""


@dataclass
class _Layout:
    """The files of a checkpoint, and their destinations."""

    place: URL
    """The destination folder."""
    names: dict[str, str]
    """Data files -> their names at the destination."""
    markers: dict[str, bytes] = field(default_factory=dict)
    """Files that are written last, by their names at the destination."""
    gone: tuple[str, ...] = ()
    """Files that every checkpoint of this kind has."""
    others: tuple[str, ...] = ()
    """Files of other formats that would hide this checkpoint."""
    more: str = "$."
    """A pattern for further files of a replaced checkpoint."""
    held: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """Sizes and tokens of the data files."""


def copy_files(
    opened: Opened,
    url: URL,
    opener: Callable[[URL], Session],
    meter: Meter,
    *,
    overwrite: bool,
    verify: bool,
    exchange: Exchange,
) -> CopyReport:
    """Copy a checkpoint of another library, file by file. Each rank copies a share of the files."""
    document = opened.document
    assert isinstance(document, ForeignDocument)
    layout = run(_find_layout(opened, document, url))
    if opened.storage.url == layout.place and layout.names.keys() & {*layout.names.values(), *layout.markers}:
        raise ValueError(f"{url}: the destination is the source; copy to another path")
    stored = list(stored_in(document.manifest))
    target = opener(layout.place)
    try:
        files = [CopiedFile(location, *layout.held[location]) for location in layout.names]
        files.sort(key=lambda each: (-each.size, each.location))
        outputs = StagedFiles(
            target.storage,
            [(layout.names[each.location], each.size) for each in files],
            layout.gone,
            layout.others,
            layout.more,
            exchange=exchange,
        )
        own = [files[number] for number in outputs.share]
        if verify:
            locations = {each.location for each in own}
            expect_archive_checksums(opened, [each for each in stored if each.location in locations], whole=True)
        run(_write_files(opened, layout, target, meter, files=own, outputs=outputs, overwrite=overwrite))
    finally:
        run(target.close())
    checked = "checksums" if verify and find_archives(stored, document.files) else "sizes"
    nbytes = sum(each.size for each in files) + sum(map(len, layout.markers.values()))
    return CopyReport(
        document.format, count_entries(document.manifest), len(layout.names) + len(layout.markers), nbytes, checked
    )


async def _write_files(
    source: Opened,
    layout: _Layout,
    target: Session,
    meter: Meter,
    *,
    files: Sequence[CopiedFile],
    outputs: StagedFiles,
    overwrite: bool,
) -> None:
    """Copy this rank's files."""
    if not target.storage.capabilities.write:
        raise SnapshotError(f"{target.url}: this storage is read-only")
    await outputs.begin(overwrite=overwrite)
    nbytes = sum(each.size for each in files) + sum(map(len, layout.markers.values()))
    meter.begin(nbytes)
    emit("start", "copy", str(target.url), bytes=nbytes)
    try:
        await copy_files_through(
            source.storage,
            target,
            files,
            meter.wrote,
            lambda writer, plans: outputs.write(writer, plans, lambda: list(layout.markers.items())),
        )
    except SnapshotError as error:
        await _expect_unchanged(source, layout, error)
        raise
    meter.wrote(sum(map(len, layout.markers.values())))


async def _expect_unchanged(source: Opened, layout: _Layout, cause: SnapshotError) -> None:
    """Raise if the source was replaced meanwhile."""
    try:
        replaced = await stat_files(source.storage, layout.names) != layout.held
    except SnapshotError as error:
        replaced = isinstance(error, StorageConflictError)
    if replaced:
        raise SnapshotError(f"{source.url}: was replaced while it was copied; copy again ({cause})") from cause


async def _find_layout(opened: Opened, document: ForeignDocument, url: URL) -> _Layout:
    """Return the files to copy and their destinations.

    The index is read again and compared with the opened one. So all files are of one checkpoint, unless their tokens
    change.
    """
    storage = opened.storage
    locations = [location for location in document.stored_files if location != INLINE]
    folder = document.place == opened.url
    above, _, name = url.location.rpartition("/")
    beside = URL(url.scheme, above or "/", url.query)
    alone = opened.url.location.rpartition("/")[2]
    index = found = ""
    if not folder and locations == [alone]:
        if not name or not (above or url.scheme == "file"):
            raise ValueError(f"{url}: must be the name of a file, since {opened.url} is one file")
        made = _Layout(beside, {alone: name})
    elif document.format == "dcp":
        locations += [each for each in (MEGATRON,) if each not in locations and await exists(storage, each)]
        made = _Layout(
            url,
            {each: each for each in locations},
            {dcp_notice.METADATA: b""},
            (dcp_notice.METADATA,),
            (METADATA,),
            r"__\d+_\d+\.distcp",
        )
    elif (known := registry.find_format(document.format)) is not None and known.whole_folder:
        index = found = document.index
        every = [each for each in await storage.list() if each != index]
        made = _Layout(url, {each: each for each in every}, {index: b""}, (index,), (METADATA, dcp_notice.METADATA))
    elif document.format == "torchsnapshot":
        made = _Layout(url, {each: each for each in locations}, {METADATA: b""}, (), (METADATA, dcp_notice.METADATA))
    else:
        index = found = document.index
        if index and not folder and name.endswith(".json"):  # an index by its own name, to an index
            url, index = beside, name
        hiding, more = _HIDING.get(document.format, _HIDING["safetensors"])
        made = _Layout(
            url,
            {each: each for each in locations},
            {index: b""} if index else {},
            tuple(dict.fromkeys((*([index] if index else []), *hiding))),
            (METADATA, dcp_notice.METADATA),
            more,
        )
    await expect_files(opened, document.files.keys() & made.names.keys())
    made.held = await stat_files(storage, made.names)
    for marker in made.markers:
        there = found if marker == index else marker
        made.markers[marker] = await storage.get(there, limit=opened.settings.manifest_bytes)
        if digest_range(made.markers[marker]) != document.save_id:
            raise SnapshotError(f"{storage.url}: was replaced while it was inspected; copy again")
    return made


# Copies of checkpoints
#
# A whole snapshot is copied byte for byte. Its files get new names at the destination, as those of a take do. So the
# files of two copies, or of an interrupted copy, never collide.


def copy_checkpoint(operation: Operation, origin: Location, target: Target, choice: Selection) -> CopyReport:
    """Copy a checkpoint on any storages. Half of the memory is for reading it, and half for writing."""
    exchange, url = operation.exchange, target.place.url
    if target.to is not None:
        raise ValueError(f"to must be None for a copy, which keeps its format, got {target.to!r}; or convert it")
    if target.format_options is not None:
        raise ValueError(
            f"format_options must be None for a copy, which keeps its format, got {target.format_options!r}"
        )
    if target.files is not None:
        raise ValueError("files must be None for a copy, which keeps its files; convert to safetensors to add some")
    if target.shard_bytes != SHARD:
        raise ValueError(f"shard_bytes cannot be set for a copy, which keeps its files, got {target.shard_bytes}")
    expect_common_place(exchange, url)
    source, overwrite = operation.open(origin, divisor=2), target.overwrite
    opener = partial(target.open, operation)
    arguments = {"source": origin.url, **target.agreed(), **choice.arguments()}
    [opened] = open_sources(exchange, "copy", arguments, [source], open_main)
    document = opened.document
    if select_server(origin.options) == select_server(target.storage_options):
        _expect_apart(origin.url, url)
    if isinstance(document, ForeignDocument):
        if choice.select or choice.exclude or target.compression:
            raise UnsupportedFormatError(
                f"{origin.url}: is a checkpoint of {document.format}, which can only be copied whole; to select a "
                "part of it or to compress it, convert it (Snapshot.convert, or `snapshot convert`)"
            )
        report = copy_files(
            opened, url, opener, operation.meter, overwrite=overwrite, verify=choice.verify, exchange=exchange
        )
    elif choice.select or choice.exclude or target.compression:
        report = _copy_selection(operation, opened, choice, target)
    else:
        opened = opened.as_stored()
        with claimed(exchange, url, operation.meter, opener, overwrite=overwrite) as claim:
            claim.transaction.expect_free()
            report = run(_Copy(opened, claim, verify=choice.verify).make())
    signed = run(_is_signed(opened))
    return operation.done(replace(report, was_signed=signed), "copied", bytes=report.nbytes)


async def _is_signed(opened: Opened) -> bool:
    """Return True if the source has a signature, of any key. If that cannot be determined, return False."""
    if isinstance(opened.document, ForeignDocument):
        return False
    try:
        await opened.storage.stat(signature_path(opened.document.save_id))
    except StorageError:
        return False
    return True


def _expect_apart(origin: URL, url: URL) -> None:
    """Raise if a copy's destination is its source, or inside it."""
    if origin.scheme != url.scheme:
        return
    here, there = (
        os.path.realpath(each.location) if each.scheme == "file" else each.location.rstrip("/")
        for each in (origin, url)
    )
    if here == there:
        raise ValueError(f"{url}: the destination is the source; copy to another path")
    if there.startswith(f"{here}/"):
        raise ValueError(f"{url}: the destination is inside the source {origin}; copy to another path")


def _copy_selection(
    operation: Operation,
    opened: Opened,
    choice: Selection,
    target: Target,
) -> CopyReport:
    """Copy a selection of a snapshot as a new snapshot, since files also contain other entries."""
    run(load_parts(opened, list(opened.document.parts)))
    expand_chosen_trees(opened, choice)
    expect_selected(opened, choice.select, choice.exclude)
    if choice.verify:
        expect_checksums(operation.exchange, opened)
    write_as_snapshot(opened, choice, target, operation)
    with target.open(operation, operation.url) as made:
        written = run(open_checkpoint(made)).document
    nbytes = sum(file.stored_size for file in written.files.values())
    checked = "digests" if choice.verify else "sizes"
    return CopyReport("snapshot", count_entries(written.manifest), len(written.files), nbytes, checked)


class _Copied(msgspec.Struct, array_like=True):
    """A rank's report that its share of the files is stored."""

    nbytes: int


class _Copy:
    """A copy of one whole snapshot to another storage. Each rank copies a share of the files."""

    def __init__(self, opened: Opened, claim: Claim, *, verify: bool) -> None:
        self._source = opened
        self._document = opened.document
        self._transaction = claim.transaction
        self._exchange = claim.exchange
        self._target = claim.session
        self._meter = claim.meter
        self._verify = verify
        own = opened.document.own_files
        names = sorted(own)
        self._shares = share_whole(self._exchange, names, [own[name].stored_size for name in names])
        """The files that each rank copies."""

    async def make(self) -> CopyReport:
        """Copy the snapshot."""
        document, own = self._document, self._document.own_files
        parts = await read_parts(self._source, document.parts)
        share = self._shares[self._exchange.rank]
        await expect_files(self._source, set(share))
        held = await stat_files(self._source.storage, share)
        tokens = {location: token for location, (_, token) in held.items()}
        files = await in_thread(
            partial(checked_files, document, parts, tokens, url=self._source.url, verify=self._verify)
        )
        nbytes = sum(file.size for file in files)
        self._meter.begin(nbytes)
        emit("start", "copy", str(self._target.url), bytes=nbytes)
        await self._write(files, {each.location: part for each, part in zip(document.parts, parts, strict=True)})
        count = count_entries(document.manifest) + sum(count_entries(each.manifest) for each in parts)
        total = sum(file.stored_size for file in own.values())
        return CopyReport("snapshot", count, len(own), total, "digests" if self._verify else "sizes")

    async def _write(self, files: Sequence[CopiedFile], parts: Mapping[str, ManifestPart]) -> None:
        """Claim, write, commit and clean up, as a take does. If a step fails, delete everything."""
        transaction, exchange = self._transaction, self._exchange
        places = _new_paths(transaction.save_id, [*self._document.own_files, *parts])
        names = [places[each.location] for each in files]

        async def commit(_: list[_Copied]) -> bool:
            sizes = {location: file.stored_size for location, file in self._document.own_files.items()}
            written = [[(places[each], sizes[each]) for each in share] for share in self._shares]
            try:
                await expect_written(self._target.storage, written)
            except SnapshotError:
                await transaction.expect_claim()
                raise
            await transaction.commit(await self._write_manifest(transaction.save_id, places, parts))
            return True

        try:
            async with transaction:
                await transaction.claim()
                transaction.will_write(list(places.values()) if exchange.rank == LEADER else names)
                await self._write_files(files, names)
                if exchange.rank != LEADER:
                    await self._target.storage.settle()  # the leader's commit does it for the leader's files
                done = _Copied(sum(file.size for file in files))
                await commit_together(self._target.url, exchange, transaction, done=done, commit=commit, answer=bool)
        except BaseException as error:
            await raise_fault_of_another_rank(exchange, error)
            raise
        finally:
            await shielded(self._target.close())

    async def _write_files(self, files: Sequence[CopiedFile], names: Sequence[str]) -> None:
        """Write this rank's files. Over a network, retry once, since bytes may be damaged in transit only."""
        for again in (False, True):
            work = copy_files_through(
                self._source.storage,
                self._target,
                files,
                self._meter.wrote,
                lambda writer, plans: writer.write(plans, names),
            )
            try:
                await while_all_go_on(self._exchange, work)
                return
            except (CorruptSnapshotError, StorageError) as error:
                await self._expect_unchanged(error)
                if not isinstance(error, CorruptSnapshotError):
                    raise
                if again or self._source.storage.capabilities.local:
                    raise CorruptSnapshotError(
                        f"{self._source.url}: is damaged, and the copy was deleted: {error}", faults=error.faults
                    ) from error
                emit("retry", "copy", str(self._target.url), attempt=1, error=str(error), pause=0.0)
                await self._target.storage.delete(names)
                self._meter.wrote(-self._meter.now().done)

    async def _write_manifest(
        self, save_id: str, places: Mapping[str, str], parts: Mapping[str, ManifestPart]
    ) -> bytes:
        """Write the parts of the manifest, and return the manifest."""
        entries = []
        for kept, (location, part) in zip(self._document.parts, parts.items(), strict=True):
            moved = await in_thread(_encode_moved_part, part, places)
            await write_small(self._target.storage, places[location], [moved.data])
            entries.append(moved.describe(places[location], kept.ranks))
        return await in_thread(_encode_moved, self._document, save_id, places, entries)

    async def _expect_unchanged(self, cause: BaseException) -> None:
        """Raise if the source was replaced meanwhile: that is the cause, not damage."""
        try:
            now = await committed_save_id(self._source.storage)
        except SnapshotError:
            return
        if now != self._document.save_id:
            what = "was deleted" if now is None else "was replaced"
            raise SnapshotError(
                f"{self._source.url}: {what} while it was copied, and the copy was deleted; copy again ({cause})"
            ) from cause


def _new_paths(save_id: str, locations: Sequence[str]) -> dict[str, str]:
    """Return each file's name with the new save id; rank and number stay."""
    places = {each: f"data/{save_id}{each[each.index('-') :]}" for each in locations}
    if len(set(places.values())) < len(places):
        raise CorruptSnapshotError("the manifest must not name two files that differ only in their save id")
    return places


def _encode_moved(document: Document, save_id: str, places: Mapping[str, str], parts: list[PartEntry]) -> bytes:
    """Return a copy of the manifest with other file names. The bytes of the copied files are its own.

    What only the base has remains there.
    """
    files = {
        places.get(name, name): msgspec.structs.replace(file, origin=None, age=0, packed=_moved(file.packed, places))
        for name, file in document.files.items()
    }
    _replace_paths(document.manifest, places)
    newest = NEWEST_FORMAT if any(part.index is not None for part in parts) else document.format
    moved = msgspec.structs.replace(document, save_id=save_id, files=files, parts=parts, format=newest)
    data = encode(moved)
    _replace_paths(document.manifest, {there: here for here, there in places.items()})
    return data


def _moved(packed: PackedFile | None, places: Mapping[str, str]) -> PackedFile | None:
    """Return the description of a compressed file whose table has another name."""
    if packed is None:
        return None
    location, begin, end = packed.index
    return msgspec.structs.replace(packed, index=(places[location], begin, end))


def _encode_moved_part(part: ManifestPart, places: Mapping[str, str]) -> EncodedPart:
    _replace_paths(part.manifest, places)
    data = encode_own_part(part.manifest)
    _replace_paths(part.manifest, {there: here for here, there in places.items()})
    return data


def _replace_paths(manifest: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Replace the file names in entries. This is done in place, since there may be millions of entries."""
    for stored in stored_in(manifest):
        stored.location = places.get(stored.location, stored.location)
        if stored.blocks is not None:
            location, begin, end = stored.blocks
            stored.blocks = places.get(location, location), begin, end
