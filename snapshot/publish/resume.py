"""The base of a restarted publisher: a version in a local folder, where a subscriber has pulled it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from snapshot.aio import gather_limited, in_thread
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import log
from snapshot.formats.hugging_face import INDEX
from snapshot.formats.safetensors import read_header
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.maps.recipe import Target
from snapshot.publish.delta import TensorSums, sum_bytes
from snapshot.publish.image import HostImage
from snapshot.publish.local import LocalFolder
from snapshot.publish.publication import Base
from snapshot.publish.store import VersionStore
from snapshot.publish.version import LONGEST_INDEX, decode_index, version_of
from snapshot.runtime.session import Session
from snapshot.tensors.digest import digest_bytes
from snapshot.url import URL


async def load_base(
    url: URL,
    options: Mapping[str, Any],
    folder: Path,
    targets: Mapping[str, Target],
    *,
    names: Collection[str],
    files: Mapping[str, bytes],
) -> Base | None:
    """Return a pulled version as a base for these targets; None if it does not fit. The reason is logged.

    `names`: the tensors of all ranks. `files`: the small files of the new version. Without any, those of
    the base stay.
    """
    session = Session(url, options)
    local = Session(URL.parse(os.fspath(folder)), None, durable=False)
    try:
        version = version_of(folder.name)
        marker = LocalFolder(folder.parent, str(url)).marker(version) if version is not None else None
        if marker is None:
            raise SnapshotError(f"{folder}: not a version that was pulled from {url}")
        store = VersionStore(session.storage)
        index = await store.read(marker.version)
        if index.digest != marker.index:
            raise SnapshotError(f"{folder}: the store has another version {marker.version} now")
        deltas = len(await store.chain(index, lambda *_: False)) - 1
        here = decode_index(await local.storage.get(INDEX, limit=LONGEST_INDEX), 0, folder / INDEX)
        if set(names) != here.files.keys():
            raise SnapshotError(f"{folder}: has other tensors than the new version")
        given = {name: (len(data), digest_bytes(data)) for name, data in files.items()}
        if given and given != {name: tuple(found) for name, found in here.details.files.items()}:
            raise SnapshotError(f"{folder}: has other files beside the weights than the new version")
        image = HostImage(targets)
        sums = await _read_tensors(local, here.files, here.details.digests, image)
    except SnapshotError as error:
        log.warning("%s: the next version is complete: %s", url, error)
        return None
    finally:
        await local.close()
        await session.close()
    return Base(marker.version, index.digest, image, sums, deltas, image.nbytes)


async def _read_tensors(
    local: Session, files: Mapping[str, str], digests: Mapping[str, str], image: HostImage
) -> dict[str, TensorSums]:
    """Read and verify the tensors of an image."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in image.targets:
        by_file[files[name]].append(name)
    sums: dict[str, TensorSums] = {}
    for file, names in by_file.items():
        size = (await local.storage.stat(file)).size
        entries, _ = await read_header(local.storage, file, size, LONGEST_HEADER)

        async def read(name: str, file: str = file, entries: Mapping[str, Any] = entries) -> None:
            target, entry = image.targets[name], entries.get(name)
            if entry is None or (entry.dtype, tuple(entry.shape)) != (target.dtype, tuple(target.shape)):
                raise SnapshotError(f"{file}: {name} has another dtype or shape than the new version")
            data = image.bytes(name)
            await local.storage.read_into(file, entry.byte_range[0], [data])
            sums[name] = await in_thread(sum_bytes, data)
            if sums[name].digest != digests.get(name, sums[name].digest):
                raise CorruptSnapshotError(f"{file}: {name}: its digest must be {digests[name]}")

        await gather_limited(names, read, local.settings.thread_count())
    return sums
