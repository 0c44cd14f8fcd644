"""Stored ranges: all ranges that a manifest says its files hold, as requests that can be read and compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats.foreign import is_packed
from snapshot.formats.unpickling import INLINE
from snapshot.loading.requests import ReadRequest, request_all
from snapshot.manifest import entries as e
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.scalars import Scalar
from snapshot.manifest.validate import Files, check_range, check_tensor

Place = tuple[str, int, int]
"""A file, and the begin and end of a range in it."""


def tensors_of(entry: e.Entry) -> list[e.AnyTensor]:
    """Return the tensors of an entry: itself, or its parts."""
    if isinstance(entry, e.TENSORS):
        return [entry]
    if isinstance(entry, e.NDArrayEntry):
        return [entry.data]
    if isinstance(entry, e.TensorPartsEntry):
        return list(entry.parts.values())
    return []


def stored_of(entry: e.Entry) -> list[e.TensorEntry | e.ObjectEntry]:
    """Return the stored ranges of an entry."""
    if isinstance(entry, e.ObjectEntry):
        return [entry]
    return [piece for tensor in tensors_of(entry) for _, piece in tensor.pieces()]


def stored_in(manifest: Mapping[str, Any]) -> Iterator[e.TensorEntry | e.ObjectEntry]:
    """Yield all stored ranges; a range with several names is repeated."""
    for entry in manifest.values():
        yield from stored_of(entry)


def requests_of(
    manifests: Sequence[Mapping[str, Any]],
    files: Files,
    faults: list[str],
    bare: dict[str, list[Place]] | None = None,
) -> list[ReadRequest]:
    """Return a request for each stored range and each table of digests. Add unreadable entries to `faults`.

    `manifests`: a whole manifest, or a manifest and its parts. `bare`: collects the entries with ranges that have no
    digest.
    """
    requests: dict[Place, ReadRequest] = {}
    partial = len(manifests) > 1
    for manifest in manifests:
        for path, entry in manifest.items():
            try:
                for held in tensors_of(entry):
                    check_tensor(path, held, files, partial=partial)
                if isinstance(entry, e.ObjectEntry):
                    check_range(path, entry, files)
                elif isinstance(entry, Scalar):
                    with suppress(UnsupportedFormatError):  # only this machine may lack the time zone
                        entry.value()
            except CorruptSnapshotError as error:
                faults.append(str(error))
                continue
            for each in stored_of(entry):
                place = (each.location, *each.byte_range)
                if bare is not None and each.digest is None and each.location != INLINE:
                    bare.setdefault(path, []).append(place)
                requests.setdefault(place, _request_of(path, each))
                if each.blocks is not None and each.digest is not None:
                    requests.setdefault(each.blocks, _table_want(path, each.blocks, each.digest))
    for location, file in files.items():
        if file.packed is not None:
            table = e.ObjectEntry(file.packed.index[0], file.packed.index[1:], TABLE, "", file.packed.index_digest)
            requests.setdefault(file.packed.index, request_all(f"{location} (table of blocks)", table))
    return list(requests.values())


def _request_of(path: str, stored: e.TensorEntry | e.ObjectEntry) -> ReadRequest:
    """Return a request for a whole stored range. A packed tensor is also compared with its entry."""
    request = request_all(path, stored)
    if isinstance(stored, e.TensorEntry) and is_packed(stored):
        request.opens = lambda layout: []
    return request


TABLE = "digests"
"""The serializer name of digest tables."""


def _table_want(path: str, blocks: Place, digest: str) -> ReadRequest:
    location, begin, end = blocks
    table = e.ObjectEntry(location, (begin, end), TABLE, "", digest)
    return ReadRequest(f"{path} (digests)", table, location, begin, end)


def find_uncovered(files: Files, requests: Iterable[ReadRequest]) -> list[str]:
    """Return a line for each part of a file that no entry, or more than one, covers."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for request in requests:
        if request.begin < request.end:
            ranges[request.location].append((request.begin, request.end))
    faults = []
    for location, file in files.items():
        if isinstance(file, ForeignFile):  # it has more content than its entries
            continue
        position = file.header
        for begin, end in [*sorted(ranges[location]), (file.size, file.size)]:
            if begin != position:
                what = "belong to nothing" if begin > position else "belong to two things"
                low, high = sorted((begin, position))
                faults.append(f"{location}[{low}:{high}]: by the manifest, these bytes {what}")
            position = max(position, end)
    return faults
