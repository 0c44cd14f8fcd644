"""Folders of DeepSpeed: that of a run, whose file names the newest tag, and that of a tag."""

from __future__ import annotations

from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.registry import SearchedFolder, describe_folder
from snapshot_deepspeed import checkpoint, universal

RANKS = 50
"""Order from which formats are asked about the folder of a tag: those of files that ranks wrote."""


async def describe_run(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the newest checkpoint of a run."""
    tag = await checkpoint.read_tag(folder.storage, await folder.names())
    if tag is None:
        return None
    url = folder.url.join(tag)
    storage = folder.beside(url)
    try:
        found = await describe_folder(SearchedFolder(url, storage, folder.beside, folder.limit), RANKS)
    finally:
        await storage.close()
    if found is not None:
        found.place = url
    return found


async def describe_tag(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint of a tag, as DeepSpeed writes it or as its universal one."""
    names = await folder.names()
    if not checkpoint.is_checkpoint(names):
        return None
    describe = universal.describe_folder if universal.FOLDER in names else checkpoint.describe_folder
    return await describe(folder.linkless, names, folder.limit)
