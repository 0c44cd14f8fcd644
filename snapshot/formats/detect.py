"""Detection of another library's format at a path."""

from __future__ import annotations

import errno
from collections.abc import Callable

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError, UnsupportedFormatError
from snapshot.formats import dcp, safetensors, torch_save
from snapshot.formats.foreign import ForeignDocument, is_absence
from snapshot.formats.notice import NOTICE
from snapshot.storage import Storage
from snapshot.url import URL

HEAD = 16
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First bytes of torch.save's files before torch 1.6."""


class UnknownFormatError(CorruptSnapshotError):
    """A file is not a checkpoint of any known format."""


async def find_checkpoint(
    url: URL, storage: Storage, beside: Callable[[URL], Storage], limit: int
) -> ForeignDocument | None:
    """Return the checkpoint of another library at a URL; None if there is none.

    Args:
        url: The folder or file to look up.
        storage: The storage of `url`, if it is a folder.
        beside: Function that opens another storage.
        limit: Maximum length of a description to read.
    """
    found = await _describe_folder(storage, limit)
    if found is not None:
        found.place = url
    return found or await _describe_file(url, beside, limit)


async def _describe_folder(storage: Storage, limit: int) -> ForeignDocument | None:
    try:
        data = await storage.get(dcp.METADATA, limit=limit)
        if data != NOTICE:
            return await dcp.describe_checkpoint(storage, data)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
    return await safetensors.describe_folder(storage, limit)


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
    where = folder.url.join(name)
    if head.startswith(b"PK\3\4"):
        return await torch_save.describe_file(folder, name, size, limit)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:  # before pickles: any byte may be a length
        return await safetensors.describe_file(folder, name, size, limit)
    if head.startswith(_LEGACY) or head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
        raise UnsupportedFormatError(
            f"{where}: a bare pickle, as written by torch.save before torch 1.6 or with "
            "_use_new_zipfile_serialization=False: reading it would run its code; if you trust it, convert it: "
            "torch.save(torch.load(file, weights_only=True), new_file)"
        )
    if head[:2] in (b"\x1f\x8b", b"BZ") or head.startswith(b"\xfd7zXZ"):
        raise UnsupportedFormatError(f"{where}: compressed as a whole, so no part of it can be read; unpack it")
    if head[:1] == b"{" and (found := await safetensors.describe_index(folder, name, limit)) is not None:
        return found
    if await _is_tar(folder, name, size):
        raise UnsupportedFormatError(
            f"{where}: a tar file, as written by the first versions of torch.save; read it with an old torch"
        )
    raise UnknownFormatError(f"{where}: not a checkpoint of any known format")


async def _is_tar(folder: Storage, name: str, size: int) -> bool:
    if size < 512:
        return False
    magic = bytearray(5)
    await folder.read_into(name, 257, [magic])
    return magic == b"ustar"
