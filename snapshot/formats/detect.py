"""Detection of another library's format at a path."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.mistakes import HEAD, is_part, refuse_file
from snapshot.formats.registry import SearchedFolder, describe_folder, find_by_head
from snapshot.io.storage import Storage
from snapshot.io.url import URL


async def find_checkpoint(
    url: URL,
    storage: Storage,
    beside: Callable[[URL], Storage],
    limit: int,
    reads: Callable[[ForeignDocument], Any],
) -> ForeignDocument | None:
    """Return the checkpoint of another library at a URL; None if there is none.

    Args:
        url: The folder or file to look up.
        storage: The storage of `url`, if it is a folder.
        beside: Function that opens another storage.
        limit: Maximum length of a description to read.
        reads: Function that returns the `Opened` of a document.
    """
    found = await describe_folder(SearchedFolder(url, storage, beside, limit, reads))
    if found is not None and found.place == storage.url:
        found.place = url
    return found or await _describe_file(url, beside, limit)


async def _describe_file(url: URL, beside: Callable[[URL], Storage], limit: int) -> ForeignDocument | None:
    above, _, name = url.location.rpartition("/")
    if not name or not (above or url.scheme == "file"):
        return None
    place = URL(url.scheme, above or "/", url.query)
    folder = beside(place)
    try:
        size = (await folder.stat(name)).size
        head = bytearray(min(HEAD, size))
        await folder.read_into(name, 0, [head])
        found = await _describe_by_head(folder, name, size, bytes(head), limit)
    except StorageNotFoundError:
        return None
    except StorageError as error:
        if error.errno not in (errno.EISDIR, errno.ENOTDIR, errno.ENOENT):
            raise
        return None
    finally:
        await folder.close()
    found.place = place
    return found


async def _describe_by_head(folder: Storage, name: str, size: int, head: bytes, limit: int) -> ForeignDocument:
    if is_part(name):
        raise refuse_file(folder.url, name, head)
    from snapshot.formats import hugging_face  # with torch, which a listing of a run's steps does not need

    found: ForeignDocument
    if (describe := find_by_head(head, own=True)) is not None:
        found = await describe(folder, name, size, limit)
        return found
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:  # before pickles: any byte may be a length
        return await hugging_face.describe_file(folder, name, size, limit)
    if head[:1] == b"{" and (index := await hugging_face.describe_index(folder, name, limit)) is not None:
        return index
    if (describe := find_by_head(head, own=False)) is not None:
        found = await describe(folder, name, size, limit)
        return found
    raise refuse_file(folder.url, name, head)
