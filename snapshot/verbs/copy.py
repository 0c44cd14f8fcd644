"""Copies of checkpoints: a snapshot with a commit of its own, other libraries' checkpoints file by file.

A whole snapshot is copied byte for byte. Its files get new names at the destination, as those of a take do. So the
files of two copies, or of an interrupted copy, never collide.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from snapshot.aio import in_thread, shielded
from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import CommitUnknown, CorruptSnapshotError, SnapshotError, StorageError, UnsupportedFormatError
from snapshot.events import emit
from snapshot.formats.foreign import ForeignDocument
from snapshot.loading.checksums import expect_archive_checksums
from snapshot.loading.open import expect_files, load_parts, open_document, open_main, read_parts
from snapshot.loading.stored_ranges import stored_in
from snapshot.manifest.counting import count_entries
from snapshot.manifest.document import Document, ManifestPart, PartEntry, encode
from snapshot.options import expect_positive
from snapshot.progress import Meter
from snapshot.reports import CopyReport
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.save.rendezvous import expect_at_path
from snapshot.save.transaction import Transaction
from snapshot.save.writer import write_small
from snapshot.storage_options import select_server
from snapshot.tensors.digest import digest_range
from snapshot.url import URL
from snapshot.verbs.copy_foreign import copy_files
from snapshot.verbs.copy_stream import CopiedFile, checked_files, copy_files_through, stat_files
from snapshot.verbs.select import selected_locations
from snapshot.verbs.to_snapshot import Selection, write_as_snapshot


def copy_checkpoint(
    origin: URL,
    options: Mapping[str, Any] | None,
    url: URL,
    target_options: Mapping[str, Any] | None,
    *,
    choice: Selection,
    meter: Meter,
    overwrite: bool,
    durable: bool,
    budget: int | None,
) -> CopyReport:
    """Copy the checkpoint at `origin` to `url`, on any storages."""
    expect_positive("memory_budget_bytes", budget)
    began = time.perf_counter()
    half = None if budget is None else max(1, budget // 2)
    source = Session(origin, options, budget=half)

    def opener(place: URL) -> Session:
        return Session(place, target_options, durable=durable, budget=half)

    try:
        document = run(open_main(source))
        if select_server(options) == select_server(target_options):
            _expect_apart(origin, url)
        if isinstance(document, ForeignDocument):
            if choice.select or choice.exclude:
                raise UnsupportedFormatError(
                    f"{origin}: is a checkpoint of {document.format}, which can only be copied whole; to select a "
                    "part of it, convert it (Snapshot.convert, or `snapshot convert`) with the same globs"
                )
            report = copy_files(source, document, url, opener, meter, overwrite=overwrite, verify=choice.verify)
        elif choice.select or choice.exclude:
            report = _copy_selection(source, document, choice, url, opener=opener, meter=meter, overwrite=overwrite)
        else:
            report = _copy_whole(source, document, opener(url), meter, overwrite=overwrite, verify=choice.verify)
    except BaseException as error:
        emit("failed", "copy", str(url), error=error)
        raise
    finally:
        run(source.close())
        meter.close()
    report = replace(report, seconds=time.perf_counter() - began)
    emit("copied", "copy", str(url), bytes=report.nbytes, seconds=round(report.seconds, 3))
    return report


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
    source: Session, document: Document, choice: Selection, url: URL, *, opener: Any, meter: Meter, overwrite: bool
) -> CopyReport:
    """Copy a selection of a snapshot as a new snapshot, since files also contain other entries."""
    run(load_parts(source, document, list(document.parts)))
    run(expect_files(source, document, selected_locations(document, choice.select, choice.exclude)))
    if choice.verify:
        expect_archive_checksums(source, stored_in(document.manifest), document.files)
    write_as_snapshot(
        source,
        document,
        choice,
        url,
        open_session=opener,
        meter=meter,
        overwrite=overwrite,
    )
    made = opener(url)
    try:
        written = run(open_document(made))
    finally:
        run(made.close())
    nbytes = sum(file.size for file in written.files.values())
    checked = "digests" if choice.verify else "sizes"
    return CopyReport("snapshot", count_entries(written.manifest), len(written.files), nbytes, checked)


def _copy_whole(
    source: Session, document: Document, target: Session, meter: Meter, *, overwrite: bool, verify: bool
) -> CopyReport:
    try:
        copy = _Copy(source, document, target, meter, verify=verify)
        return run(copy.make(overwrite=overwrite))
    finally:
        run(target.close())


class _Copy:
    """A copy of one whole snapshot to another storage."""

    def __init__(self, source: Session, document: Document, target: Session, meter: Meter, *, verify: bool) -> None:
        self._source = source
        self._document = document
        self._target = target
        self._meter = meter
        self._verify = verify

    async def make(self, *, overwrite: bool) -> CopyReport:
        """Copy the snapshot. Over a network, retry once, since bytes may be damaged in transit only."""
        document, url = self._document, str(self._target.url)
        expect = await expect_at_path(self._target, overwrite=overwrite)
        parts = await read_parts(self._source, document.parts)
        names = [each.location for each in document.parts]
        own = document.own_files
        await expect_files(self._source, document, set(own))
        held = await stat_files(self._source.storage, own)
        tokens = {location: token for location, (_, token) in held.items()}
        files = await in_thread(
            partial(checked_files, document, parts, tokens, url=self._source.url, verify=self._verify)
        )
        nbytes = sum(file.size for file in files)
        for again in (False, True):
            exchange = solo_exchange("copy")
            transaction = Transaction(self._target, exchange, secrets.token_hex(6))
            transaction.expect(expect)
            self._meter.wrote(-self._meter.now().done)
            self._meter.begin(nbytes)
            emit("start", "copy", url, bytes=nbytes)
            try:
                await self._write(transaction, files, dict(zip(names, parts, strict=True)))
                break
            except CommitUnknown:
                raise
            except (CorruptSnapshotError, StorageError) as error:
                await self._expect_unchanged(error)
                if not isinstance(error, CorruptSnapshotError):
                    raise
                if again or self._source.storage.capabilities.blocking:
                    raise CorruptSnapshotError(
                        f"{self._source.url}: is damaged, and the copy was deleted: {error}", faults=error.faults
                    ) from error
                emit("retry", "copy", url, attempt=1, error=str(error), pause=0.0)
        count = count_entries(document.manifest) + sum(count_entries(each.manifest) for each in parts)
        return CopyReport("snapshot", count, len(files), nbytes, "digests" if self._verify else "sizes")

    async def _write(
        self, transaction: Transaction, files: Sequence[CopiedFile], parts: Mapping[str, ManifestPart]
    ) -> None:
        """Claim, write, commit and clean up, as a take does. If a step fails, delete everything."""
        storage = self._target.storage
        places = _new_paths(transaction.save_id, [*self._document.own_files, *parts])
        names = [places[each.location] for each in files]
        async with transaction:
            await transaction.claim()
            transaction.will_write(list(places.values()))
            await copy_files_through(
                self._source,
                self._target,
                files,
                self._meter.wrote,
                lambda writer, plans, ahead: writer.write(plans, names, ahead),
            )
            entries = []
            for kept, (location, part) in zip(self._document.parts, parts.items(), strict=True):
                data = await in_thread(_encode_moved_part, part, places)
                await write_small(storage, places[location], [data])
                entries.append(PartEntry(places[location], len(data), digest_range(data), kept.ranks, kept.count))
            data = await in_thread(_encode_moved, self._document, transaction.save_id, places, entries)
            await shielded(transaction.commit(data))

    async def _expect_unchanged(self, cause: BaseException) -> None:
        """Raise if the source was replaced meanwhile: that is the cause, not damage."""
        try:
            now = await cleanup.committed_save_id(self._source.storage)
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
        places.get(name, name): msgspec.structs.replace(file, origin=None, age=0)
        for name, file in document.files.items()
    }
    _replace_paths(document.manifest, places)
    data = encode(msgspec.structs.replace(document, save_id=save_id, files=files, parts=parts))
    _replace_paths(document.manifest, {there: here for here, there in places.items()})
    return data


def _encode_moved_part(part: ManifestPart, places: Mapping[str, str]) -> bytes:
    _replace_paths(part.manifest, places)
    data = encode(part)
    _replace_paths(part.manifest, {there: here for here, there in places.items()})
    return data


def _replace_paths(manifest: Mapping[str, Any], places: Mapping[str, str]) -> None:
    """Replace the file names in entries. This is done in place, since there may be millions of entries."""
    for stored in stored_in(manifest):
        stored.location = places.get(stored.location, stored.location)
        if stored.blocks is not None:
            location, begin, end = stored.blocks
            stored.blocks = places.get(location, location), begin, end
