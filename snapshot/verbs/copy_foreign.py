"""Checkpoints of other libraries are copied as they are: the very files that they consist of, and what makes them one
last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from snapshot.errors import SnapshotError, StorageNotFoundError
from snapshot.events import emit
from snapshot.formats import dcp, safetensors, zip_checksums
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.unpickling import INLINE
from snapshot.load.checksums import expect_archive_checksums
from snapshot.load.open import expect_files
from snapshot.load.stored_ranges import stored_in
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import METADATA
from snapshot.progress import Meter
from snapshot.reports import CopyReport
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.storage import Storage
from snapshot.tensors.digest import digest_range
from snapshot.url import URL
from snapshot.verbs.copy_stream import CopiedFile, copy_files_through, stat_files
from snapshot.verbs.staged_files import StagedFiles

MEGATRON = "metadata.json"
"""What Megatron-core's directories are told by."""
_INDEX = ".safetensors.index.json"


@dataclass
class _Layout:
    """The files that a checkpoint consists of, and where they go."""

    place: URL
    """The folder that they are copied to."""
    names: dict[str, str]
    """Data files -> their names there."""
    markers: dict[str, bytes] = field(default_factory=dict)
    """The files that come last, by their names there."""
    gone: tuple[str, ...] = ()
    """Those without which there is no checkpoint of this kind."""
    others: tuple[str, ...] = ()
    """Those of formats for which this one would not be seen."""
    more: str = "$."
    """A pattern of names that a checkpoint which is replaced may have had more of."""
    held: dict[str, tuple[int, str | None]] = field(default_factory=dict)
    """How long the data files are, and their tokens."""


def copy_files(
    source: Session,
    document: ForeignDocument,
    url: URL,
    opener: Callable[[URL], Session],
    meter: Meter,
    *,
    overwrite: bool,
    verify: bool,
) -> CopyReport:
    """Copy a checkpoint of another library, file by file."""
    layout = run(_find_layout(source, document, url))
    if source.storage.url == layout.place and layout.names.keys() & {*layout.names.values(), *layout.markers}:
        raise ValueError(f"{url}: is where it is copied from; copy to another place")
    checked = "sizes"
    if verify:
        stored = list(stored_in(document.manifest))
        expect_archive_checksums(source, stored, document.files)
        checked = "checksums" if zip_checksums.find_archives(stored, document.files) else "sizes"
    target = opener(layout.place)
    try:
        nbytes = run(_write_files(source, layout, target, meter, overwrite=overwrite))
    finally:
        run(target.close())
    return CopyReport(
        document.format, count_entries(document.manifest), len(layout.names) + len(layout.markers), nbytes, checked
    )


async def _write_files(source: Session, layout: _Layout, target: Session, meter: Meter, *, overwrite: bool) -> int:
    """Copy the files; how many bytes they have."""
    if not target.storage.capabilities.write:
        raise SnapshotError(f"{target.url}: this storage cannot be written to")
    files = [CopiedFile(location, *layout.held[location]) for location in layout.names]
    files.sort(key=lambda each: (-each.size, each.location))
    outputs = StagedFiles(
        target.storage, [layout.names[each.location] for each in files], layout.gone, layout.others, layout.more
    )
    await outputs.expect(overwrite=overwrite)
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
    return nbytes


async def _expect_unchanged(source: Session, layout: _Layout, cause: SnapshotError) -> None:
    """Say so where what was read was replaced meanwhile."""
    with suppress(SnapshotError):
        if await stat_files(source.storage, layout.names) == layout.held:
            return
        raised = SnapshotError(f"{source.url}: was replaced while it was copied; copy again ({cause})")
    raise raised from cause


async def _find_layout(source: Session, document: ForeignDocument, url: URL) -> _Layout:
    """Which files are copied, and where to. What describes them is read again, and is still what it was: so they are
    of one checkpoint, unless their tokens change."""
    storage = source.storage
    locations = [location for location in document.files if location != INLINE]
    folder = document.place == source.url
    above, _, name = url.location.rpartition("/")
    beside = URL(url.scheme, above or "/", url.query)
    opened = source.url.location.rpartition("/")[2]
    index = found = ""
    if not folder and locations == [opened]:
        if not name or not (above or url.scheme == "file"):
            raise ValueError(f"{url}: is no name of a file, and {source.url} is one file")
        made = _Layout(beside, {opened: name})
    elif document.format == "dcp":
        locations += [each for each in (MEGATRON,) if each not in locations and await _exists(storage, each)]
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
        index = found = await _index_of(storage) if folder else opened
        if not folder and name.endswith(".json"):  # an index by its own name, to an index
            url, index = beside, name
        made = _Layout(
            url,
            {each: each for each in locations},
            {index: b""} if index else {},
            tuple(dict.fromkeys((index or safetensors.INDEX, safetensors.INDEX, safetensors.ALONE))),
            (METADATA, dcp.METADATA),
            r"model-\d{5}-of-\d{5}\.safetensors",
        )
    await expect_files(source, document, document.files.keys() & made.names.keys())
    made.held = await stat_files(storage, made.names)
    for marker in made.markers:
        there = found if marker == index else marker
        made.markers[marker] = await storage.get(there, limit=source.settings.manifest_bytes)
        if digest_range(made.markers[marker]) != document.save_id:
            raise SnapshotError(f"{storage.url}: was replaced while it was looked at; copy again")
    return made


async def _index_of(storage: Storage) -> str:
    """Return the index of a folder's files of safetensors; nothing where one file stands alone."""
    if await _exists(storage, safetensors.INDEX):
        return safetensors.INDEX
    if await _exists(storage, safetensors.ALONE) or not storage.capabilities.list:
        return ""
    return next((each for each in await storage.list(recursive=False) if each.endswith(_INDEX)), "")


async def _exists(storage: Storage, name: str) -> bool:
    try:
        await storage.stat(name)
    except StorageNotFoundError:
        return False
    return True
