"""Verification: every byte of a snapshot against what was written."""

from __future__ import annotations

import time

from snapshot.engine.loop import run
from snapshot.engine.operation import Operation
from snapshot.engine.reader import Reader, Want, want_all
from snapshot.errors import CorruptSnapshotError
from snapshot.events import Meter
from snapshot.manifest import entries as e
from snapshot.manifest.check import check_range, check_tensor
from snapshot.manifest.document import Document
from snapshot.manifest.scalars import Scalar
from snapshot.report import VerifyReport
from snapshot.tensors.digest import of_range


def verify_files(operation: Operation, meter: Meter) -> VerifyReport:
    """Read everything; faults are listed, not raised, but for a manifest that cannot be read at all."""
    began = time.perf_counter()
    document = run(operation.open())
    missing = run(operation.missing_files(document, set(document.files)))
    faults, gone = list(missing.values()), set(missing)
    faults += run(_headers(operation, document, gone))
    wants, unverifiable = _wants(document, faults)
    wants = [want for want in wants if want.location not in gone]
    meter.begin(sum(want.end - want.begin for want in wants))
    reader = Reader(operation.storage, operation.budget, verify=True, wanted_part=operation.settings.part_bytes)
    try:
        run(reader.read(wants, meter.wrote))
    except CorruptSnapshotError as error:
        faults += error.faults or [str(error)]
    faults += reader.result.faults
    return VerifyReport(
        len(document.manifest),
        reader.result.bytes_read,
        time.perf_counter() - began,
        tuple(dict.fromkeys(faults)),
        unverifiable,
    )


async def _headers(operation: Operation, document: Document, gone: set[str]) -> list[str]:
    faults = []
    for location, file in document.files.items():
        if file.header_digest is None or location in gone:
            continue
        header = bytearray(file.header)
        await operation.storage.read_into(location, 0, [header])
        if of_range(header) != file.header_digest:
            faults.append(f"{location}[0:{file.header}] is {of_range(header)}, and {file.header_digest} was written")
    return faults


def _wants(document: Document, faults: list[str]) -> tuple[list[Want], int]:
    """A want for each stored range, and for each table of digests; entries that cannot be read become faults."""
    wants: dict[tuple[str, int, int], Want] = {}
    unverifiable = 0
    for path, entry in document.manifest.items():
        stored: list[e.TensorEntry | e.ObjectEntry] = []
        try:
            for held in _tensors(entry):
                check_tensor(path, held, document.files)
                stored += [piece for _, piece in held.pieces()]
            if isinstance(entry, e.ObjectEntry):
                check_range(path, entry, document.files)
                stored.append(entry)
            elif isinstance(entry, Scalar):
                entry.value()
        except CorruptSnapshotError as error:
            faults.append(str(error))
            continue
        for each in stored:
            unverifiable += each.digest is None
            wants.setdefault((each.location, *each.byte_range), want_all(path, each))
            if each.blocks is not None and each.digest is not None:
                location, begin, end = each.blocks
                table = e.ObjectEntry(location, (begin, end), "digests", "", each.digest)
                wants.setdefault((location, begin, end), _table_want(path, table))
    return list(wants.values()), unverifiable


def _table_want(path: str, table: e.ObjectEntry) -> Want:
    begin, end = table.byte_range
    return Want(f"{path} (digests)", table, table.location, begin, end)


def _tensors(entry: object) -> list[e.AnyTensor]:
    if isinstance(entry, e.TENSORS):
        return [entry]
    if isinstance(entry, e.NDArrayEntry):
        return [entry.data]
    if isinstance(entry, e.TensorPartsEntry):
        return list(entry.parts.values())
    return []
