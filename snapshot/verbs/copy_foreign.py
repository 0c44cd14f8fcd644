"""Copies of other libraries' checkpoints: their own files, unchanged, with the index file last."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from snapshot.distributed.exchange import Exchange
from snapshot.errors import SnapshotError, StorageConflictError
from snapshot.events import emit
from snapshot.formats import dcp, hugging_face, torch_save, zip_checksums
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.unpickling import INLINE
from snapshot.loading.checksums import expect_archive_checksums
from snapshot.loading.open import expect_files
from snapshot.loading.stored_ranges import stored_in
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import METADATA
from snapshot.progress import Meter
from snapshot.reports import CopyReport
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.tensors.digest import digest_range
from snapshot.url import URL
from snapshot.verbs.copy_stream import CopiedFile, copy_files_through, stat_files
from snapshot.verbs.staged_files import StagedFiles, exists

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
    source: Session,
    document: ForeignDocument,
    url: URL,
    opener: Callable[[URL], Session],
    meter: Meter,
    *,
    overwrite: bool,
    verify: bool,
    exchange: Exchange,
) -> CopyReport:
    """Copy a checkpoint of another library, file by file. Each rank copies a share of the files."""
    layout = run(_find_layout(source, document, url))
    if source.storage.url == layout.place and layout.names.keys() & {*layout.names.values(), *layout.markers}:
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
            expect_archive_checksums(source, [each for each in stored if each.location in locations], document.files)
        run(_write_files(source, layout, target, meter, files=own, outputs=outputs, overwrite=overwrite))
    finally:
        run(target.close())
    checked = "checksums" if verify and zip_checksums.find_archives(stored, document.files) else "sizes"
    nbytes = sum(each.size for each in files) + sum(map(len, layout.markers.values()))
    return CopyReport(
        document.format, count_entries(document.manifest), len(layout.names) + len(layout.markers), nbytes, checked
    )


async def _write_files(
    source: Session,
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
            source,
            target,
            files,
            meter.wrote,
            lambda writer, plans, ahead: outputs.write(writer, plans, lambda: list(layout.markers.items()), ahead),
        )
    except SnapshotError as error:
        await _expect_unchanged(source, layout, error)
        raise
    meter.wrote(sum(map(len, layout.markers.values())))


async def _expect_unchanged(source: Session, layout: _Layout, cause: SnapshotError) -> None:
    """Raise if the source was replaced meanwhile."""
    try:
        replaced = await stat_files(source.storage, layout.names) != layout.held
    except SnapshotError as error:
        replaced = isinstance(error, StorageConflictError)
    if replaced:
        raise SnapshotError(f"{source.url}: was replaced while it was copied; copy again ({cause})") from cause


async def _find_layout(source: Session, document: ForeignDocument, url: URL) -> _Layout:
    """Return the files to copy and their destinations.

    The index is read again and compared with the opened one. So all files are of one checkpoint, unless their tokens
    change.
    """
    storage = source.storage
    locations = [location for location in document.files if location != INLINE]
    folder = document.place == source.url
    above, _, name = url.location.rpartition("/")
    beside = URL(url.scheme, above or "/", url.query)
    opened = source.url.location.rpartition("/")[2]
    index = found = ""
    if not folder and locations == [opened]:
        if not name or not (above or url.scheme == "file"):
            raise ValueError(f"{url}: must be the name of a file, since {source.url} is one file")
        made = _Layout(beside, {opened: name})
    elif document.format == "dcp":
        locations += [each for each in (MEGATRON,) if each not in locations and await exists(storage, each)]
        made = _Layout(
            url,
            {each: each for each in locations},
            {dcp.METADATA: b""},
            (dcp.METADATA,),
            (METADATA,),
            r"__\d+_\d+\.distcp",
        )
    elif document.format == "torchsnapshot":
        made = _Layout(url, {each: each for each in locations}, {METADATA: b""}, (), (METADATA, dcp.METADATA))
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
            (METADATA, dcp.METADATA),
            more,
        )
    await expect_files(source, document, document.files.keys() & made.names.keys())
    made.held = await stat_files(storage, made.names)
    for marker in made.markers:
        there = found if marker == index else marker
        made.markers[marker] = await storage.get(there, limit=source.settings.manifest_bytes)
        if digest_range(made.markers[marker]) != document.save_id:
            raise SnapshotError(f"{storage.url}: was replaced while it was inspected; copy again")
    return made
