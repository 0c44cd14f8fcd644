"""Verification: every byte of a snapshot against what was written."""

from __future__ import annotations

import errno
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from snapshot.engine.operation import Operation
from snapshot.engine.reader import Reader
from snapshot.engine.wants import Want, want_all
from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.events import Meter
from snapshot.formats import checksums
from snapshot.formats.foreign import INLINE, is_packed
from snapshot.manifest import entries as e
from snapshot.manifest.check import check_range, check_tensor, check_tree
from snapshot.manifest.document import Document, FileEntry, ForeignFile
from snapshot.manifest.scalars import Scalar
from snapshot.manifest.view import by_key, is_rank, rank_view
from snapshot.report import VerifyReport
from snapshot.storage import in_thread
from snapshot.tensors.digest import of_range


async def verify_files(operation: Operation, meter: Meter) -> VerifyReport:
    """Read everything; faults are listed, not raised, but for a manifest that cannot be read at all.

    What another take replaces meanwhile loses its files: then what stands there now is looked at instead.
    """
    document = await operation.open()
    for _ in range(AGAIN):
        report = await _verify(operation, document, meter)
        if report.ok:
            break
        now = await operation.open()
        if now.save_id == document.save_id:
            break
        document = now
    return report


AGAIN = 10
"""How often a snapshot is looked at that others keep replacing."""
MOST_VIEWS = 2_000_000
"""Entries that are looked at to see each rank's tree; of very many ranks only the first."""


def _tree_faults(document: Document) -> list[str]:
    """What no restore would accept of the containers, rank by rank."""
    world = document.world_size
    own: dict[str, dict[str, Any]] = defaultdict(dict)
    shared = {}
    for path, entry in document.manifest.items():
        if world == 1 or getattr(entry, "replicated", False) or isinstance(entry, e.ShardedTensorEntry):
            shared[path] = entry
        else:
            own[path.partition("/")[0]][path] = entry
    faults = [f"{len(own[number])} entries of no rank: {number[:80]!r}" for number in own if not is_rank(number, world)]
    for rank in range(min(world, max(1, MOST_VIEWS // max(1, len(shared))))):
        try:
            view = rank_view({**shared, **own.get(str(rank), {})}, rank, world, world)
            for key, entries in by_key(view.entries).items():
                check_tree(key, entries)
        except CorruptSnapshotError as error:
            faults.append(str(error))
    return faults


async def _verify(operation: Operation, document: Document, meter: Meter) -> VerifyReport:
    began = time.perf_counter()
    missing = await operation.missing_files(document, set(document.files), errno.EIO)
    faults = list(missing.values())
    wants, bare = _wants(document, faults)
    faults += _uncovered(document, wants) + await in_thread(_tree_faults, document)
    wants = [want for want in wants if want.location not in missing]
    sums = checksums.archives((want.stored for want in wants), document.files)
    headers = {location: file for location, file in document.files.items() if file.header and location not in missing}
    nbytes = sum(file.header for file in headers.values())
    summed = sum(end - begin for _, begin, end in set(sums.values()))
    meter.begin(nbytes + summed + sum(want.end - want.begin for want in wants))
    for location, file in headers.items():
        faults += await _header_faults(operation, location, file)
        meter.wrote(file.header)
    found, read = await _data_faults(operation, wants, meter.wrote)
    faults += found
    found, without = await _sum_faults(operation, sums.values(), meter.wrote)
    faults += found
    unverifiable = sum(place not in sums or sums[place] in without for place in bare)
    seconds = time.perf_counter() - began
    return VerifyReport(
        len(document.manifest), nbytes + max(read, summed), seconds, tuple(dict.fromkeys(faults)), unverifiable
    )  # fmt: skip


async def _header_faults(operation: Operation, location: str, file: FileEntry) -> list[str]:
    header = bytearray(file.header)
    try:
        await operation.storage.read_into(location, 0, [header])
    except (CorruptSnapshotError, StorageError) as error:
        return _damage(error)
    actual = of_range(header)
    if actual == file.header_digest:
        return []
    return [f"{location}[0:{file.header}] is {actual}, and {file.header_digest} was written"]


async def _data_faults(
    operation: Operation, wants: Sequence[Want], progress: Callable[[int], None]
) -> tuple[list[str], int]:
    """What does not verify, and how many bytes were read. A file that cannot be read does not keep the others from
    being looked at."""
    reader = Reader(operation.storage, operation.budget, verify=True, wanted_part=operation.settings.part_bytes)
    try:
        await reader.read(wants, progress)
    except (CorruptSnapshotError, StorageError) as error:
        damage = _damage(error)
        files = sorted({want.location for want in wants})
        if len(files) == 1:
            return damage + reader.result.faults, reader.result.bytes_read
        faults, nbytes = [], 0
        for each in files:
            found, read = await _data_faults(operation, [want for want in wants if want.location == each], _unseen)
            faults += found
            nbytes += read
        return faults, nbytes
    return reader.result.faults, reader.result.bytes_read


def _damage(error: CorruptSnapshotError | StorageError) -> list[str]:
    """What an error says about the bytes; raises what says nothing about them, such as a server that is away."""
    if isinstance(error, StorageError) and error.errno not in (errno.EIO, errno.ENOENT):
        raise error
    return list(getattr(error, "faults", ())) or [str(error)]


def _unseen(nbytes: int) -> None:
    """Nobody is told: these bytes were counted already."""


def _uncovered(document: Document, wants: Iterable[Want]) -> list[str]:
    """A line for each part of a file that has no digest, or two: what is written fills its files, and nothing twice."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for want in wants:
        if want.begin < want.end:
            ranges[want.location].append((want.begin, want.end))
    faults = []
    for location, file in document.files.items():
        if isinstance(file, ForeignFile):  # there is more in it than our entries say
            continue
        position = file.header
        for begin, end in [*sorted(ranges[location]), (file.size, file.size)]:
            if begin != position:
                what = "belong to nothing" if begin > position else "belong to two things"
                low, high = sorted((begin, position))
                faults.append(f"{location}[{low}:{high}]: the manifest says that these bytes {what}")
            position = max(position, end)
    return faults


async def _sum_faults(
    operation: Operation, archives: Iterable[checksums.Range], progress: Callable[[int], None]
) -> tuple[list[str], set[checksums.Range]]:
    """What does not have the checksum that others' archives carry, and the archives that carry none."""
    try:
        return await checksums.faults(operation.storage, operation.budget, archives, progress)
    except (CorruptSnapshotError, StorageError) as error:
        return _damage(error), set()


def _wants(document: Document, faults: list[str]) -> tuple[list[Want], list[checksums.Range]]:
    """A want for each stored range, and for each table of digests; entries that cannot be read become faults."""
    wants: dict[tuple[str, int, int], Want] = {}
    unverifiable: list[checksums.Range] = []
    """Ranges without a digest, one for each entry that names it."""
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
            place = (each.location, *each.byte_range)
            if each.digest is None and each.location != INLINE:
                unverifiable.append(place)
            wants.setdefault(place, _want(path, each))
            if each.blocks is not None and each.digest is not None:
                location, begin, end = each.blocks
                table = e.ObjectEntry(location, (begin, end), "digests", "", each.digest)
                wants.setdefault((location, begin, end), _table_want(path, table))
    return list(wants.values()), unverifiable


def _want(path: str, stored: e.TensorEntry | e.ObjectEntry) -> Want:
    """All of a stored range; of a packed tensor it is looked at whether it is the one that its entry says."""
    want = want_all(path, stored)
    if isinstance(stored, e.TensorEntry) and is_packed(stored):
        want.opens = lambda layout: []
    return want


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
