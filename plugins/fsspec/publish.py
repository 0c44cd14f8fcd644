"""How files come to their names: written aside and renamed, where the file system renames in one step."""

from __future__ import annotations

import re
import secrets

from snapshot.errors import StorageError, StorageNotFoundError
from snapshot.plugins.fsspec.chain import ConnectedChain
from snapshot.plugins.fsspec.client_errors import translate
from snapshot.plugins.fsspec.fsspec_client import FsspecClient
from snapshot.plugins.network.retry import Attempt, TransientError, retry_request

TEMPORARY = re.compile(r"(?:.*/)?\.[^/]+\.[0-9a-f]{16}\.tmp")


def temporary_name(client: FsspecClient, path: str) -> str:
    """Where a file is written, before it has its name."""
    if client.known.move is None:
        return path
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{secrets.token_hex(8)}.tmp"


async def write_small(client: FsspecClient, path: str, aside: str, data: bytes) -> None:
    """Write a short file, all at once; again if need be."""
    async with client.context.memory.count(len(data)):
        await client.send_request(
            "put", path, lambda chain: chain.in_folder(aside, lambda full: chain.inner.pipe_file(full, data))
        )


async def rename_whole(client: FsspecClient, path: str, aside: str, size: int) -> None:
    """Give a file that is whole its name."""
    move, mounted = client.known.move, await client.mount()

    async def once(attempt: Attempt) -> None:
        def work(chain: ConnectedChain) -> None:
            if move is None or path == aside:
                return
            try:
                move(chain.inner, chain.full(aside), chain.full(path))
            except Exception:
                # an attempt without an answer may have moved it: then it is gone from where it was
                if not attempt.uncertain or chain.inner.exists(chain.full(aside)):
                    raise
                if chain.inner.info(chain.full(path)).get("size") != size:
                    raise

        await client.call(mounted.lane(), path, work, attempt)

    await retry_request("rename", client.url.join(path), client.retry_policy, once)


async def remove_unfinished(client: FsspecClient, path: str, aside: str) -> None:
    """Remove what was not finished, and the folders that were made for it; no error if it cannot be."""
    if aside == path:
        return
    try:
        await remove_file(client, "abort", aside, within=min(10.0, client.retry_policy.deadline))
    except StorageError:
        return  # `sweep` will find it


async def remove_file(client: FsspecClient, name: str, path: str, within: float | None = None) -> None:
    """Remove a file, and the folders that this leaves empty; no error if it is gone."""
    known = client.known

    def work(chain: ConnectedChain) -> None:
        try:
            known.remove(chain.inner, chain.full(path))
        except Exception as error:
            if not isinstance(translate(error, ""), StorageNotFoundError):
                raise
        if known.move is not None:
            try:
                chain.remove_folders(path)
            except Exception as error:
                if isinstance(translate(error, ""), TransientError):
                    raise

    await client.send_request(name, path, work, within)
