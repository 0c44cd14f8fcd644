"""Atomic writes: under a temporary name and renamed, if the file system renames in one step."""

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
    """Return the name under which a file is written."""
    if client.known.move is None:
        return path
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}.{name}.{secrets.token_hex(8)}.tmp"


async def write_small(client: FsspecClient, path: str, aside: str, data: bytes) -> None:
    """Write a short file in one call, with retries."""
    async with client.context.memory.count(len(data)):
        await client.send_request(
            "put", path, lambda chain: chain.in_folder(aside, lambda full: chain.inner.pipe_file(full, data))
        )


async def rename_whole(client: FsspecClient, path: str, aside: str, size: int) -> None:
    """Rename a finished file."""
    move, mounted = client.known.move, await client.mount()

    async def once(attempt: Attempt) -> None:
        def work(chain: ConnectedChain) -> None:
            if move is None or path == aside:
                return
            try:
                move(chain.inner, chain.full(aside), chain.full(path))
            except Exception:
                # an attempt without a response may have renamed it: then the temporary name does not exist
                if not attempt.uncertain or chain.inner.exists(chain.full(aside)):
                    raise
                if chain.inner.info(chain.full(path)).get("size") != size:
                    raise

        await client.call(mounted.lane(), path, work, attempt)

    await retry_request("rename", client.url.join(path), client.retry_policy, once)


async def remove_unfinished(client: FsspecClient, path: str, aside: str) -> None:
    """Remove an unfinished file and its folders, without an error if that fails."""
    if aside == path:
        return
    try:
        await remove_file(client, "abort", aside, within=min(10.0, client.retry_policy.deadline))
    except StorageError:
        return  # `sweep` will find it


async def remove_file(client: FsspecClient, name: str, path: str, within: float | None = None) -> None:
    """Remove a file and the folders that become empty; no error if it does not exist."""
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
