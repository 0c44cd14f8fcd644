"""Detection of another library's format at a path."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.formats import dcp, hugging_face, rank_files, torch_save
from snapshot.formats.dcp import NOTICE
from snapshot.formats.foreign import HEAD, ForeignDocument, ForeignStorage, is_absence, is_part, refuse_file
from snapshot.formats.zip_archive import SIGNATURE
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot_deepspeed import checkpoint as deepspeed
from snapshot_deepspeed import universal as deepspeed_universal
from snapshot_gguf import reader as gguf
from snapshot_megatron import legacy as megatron_legacy
from snapshot_orbax import checkpoint as orbax
from snapshot_torch_checkpointing import checkpoint as torch_checkpointing


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
    found = await _describe_folder(url, storage, beside, limit)
    if found is not None and found.place == storage.url:
        found.place = url
    return found or await _describe_file(url, beside, limit)


async def _describe_folder(
    url: URL, storage: Storage, beside: Callable[[URL], Storage], limit: int
) -> ForeignDocument | None:
    try:
        data = await storage.get(dcp.METADATA, limit=limit)
        if data != NOTICE:
            return await dcp.describe_checkpoint(storage, data)
    except StorageError as error:
        if not is_absence(storage, error):
            raise
    names = await list_names(storage)
    if torch_checkpointing.METADATA in names:
        return await torch_checkpointing.describe_folder(_without_links(storage), names, limit)
    if (found := await hugging_face.describe_folder(storage, limit)) is not None:
        return found
    if (tag := await deepspeed.read_tag(storage, names)) is not None:
        return await _describe_tag(url.join(tag), beside, limit)
    return await _describe_listed(storage, names, beside, limit)


async def _describe_listed(
    storage: Storage, names: Sequence[str], beside: Callable[[URL], Storage], limit: int
) -> ForeignDocument | None:
    """Return the checkpoint in a folder that is recognised by the names in it."""
    if (found := await _describe_ranks(storage, names, limit)) is not None:
        return found
    if (found := await orbax.describe_folder(storage, names, beside, limit)) is not None:
        return found
    return await gguf.describe_folder(storage, names, limit)


async def _describe_ranks(storage: Storage, names: Sequence[str], limit: int) -> ForeignDocument | None:
    """Return the checkpoint that ranks wrote with torch.save."""
    storage = _without_links(storage)
    if megatron_legacy.is_checkpoint(names):
        return await megatron_legacy.describe_folder(storage, names, limit)
    if not deepspeed.is_checkpoint(names):
        return await rank_files.describe_folder(storage, names, limit)
    if deepspeed_universal.FOLDER in names:
        return await deepspeed_universal.describe_folder(storage, names, limit)
    return await deepspeed.describe_folder(storage, names, limit)


def _without_links(storage: Storage) -> Storage:
    """Return a view of a folder that follows no link out of it: what a pickle holds has no digest."""
    return ForeignStorage(storage, b"", links=False)


async def _describe_tag(url: URL, beside: Callable[[URL], Storage], limit: int) -> ForeignDocument | None:
    """Return the checkpoint of DeepSpeed in the folder that a run's file names."""
    folder = beside(url)
    try:
        found = await _describe_ranks(folder, await list_names(folder), limit)
    finally:
        await folder.close()
    if found is not None:
        found.place = url
    return found


async def list_names(storage: Storage) -> list[str]:
    """Return the names in a folder; an empty list if the storage cannot list them."""
    try:
        return await storage.list(recursive=False) if storage.capabilities.list else []
    except StorageError:
        return []


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
    if head.startswith(gguf.SIGNATURE):
        return await gguf.describe_file(folder, name, size, limit)
    if head.startswith(SIGNATURE):
        return await torch_save.describe_file(folder, name, size, limit)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:  # before pickles: any byte may be a length
        return await hugging_face.describe_file(folder, name, size, limit)
    if head[:1] == b"{" and (found := await hugging_face.describe_index(folder, name, limit)) is not None:
        return found
    raise refuse_file(folder.url, name, head)
