"""Tests of a storage: each operation is tried once."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snapshot.bench.workspace import file_system
from snapshot.cli.doctor_findings import Findings, existing_folder
from snapshot.errors import SnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.registry import open_storage
from snapshot.storage import ABSENT, Storage
from snapshot.text import size_text
from snapshot.url import URL


@contextmanager
def as_it_was(url: URL) -> Iterator[None]:
    """Remove the folders that did not exist before."""
    missing = []
    folder = Path(url.location)
    while url.scheme == "file" and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    try:
        yield
    finally:
        with suppress(OSError):  # another process has written to it meanwhile
            for made in missing:
                made.rmdir()


async def try_abilities(url: URL, options: Mapping[str, Any], findings: Findings) -> bool:
    """Try each operation of the storage. Return True if snapshots can be written to it."""
    below = url.join(f"snapshot-doctor-{secrets.token_hex(6)}")
    storage = open_storage(below, options)
    can = storage.capabilities
    _describe(url, findings)
    try:
        if not can.write:
            await _reading(storage, findings)
            return False
        for name, work in _TRIALS.items():
            began = time.perf_counter()
            try:
                told = await work(storage)
            except (SnapshotError, OSError) as error:
                findings.note(name, f"{error}", ok=False)
                if name == "write":
                    return False
                continue
            if told is not None:
                findings.note(name, f"{told} ({(time.perf_counter() - began) * 1000:.1f} ms)")
    finally:
        with suppress(SnapshotError):
            if can.delete and can.list:
                await storage.delete(await storage.list())
        await storage.close()
    _promises(storage, findings)
    return can.atomic_put


async def _reading(storage: Storage, findings: Findings) -> None:
    findings.note("write", "this storage is read-only", ok=None)
    began = time.perf_counter()
    try:
        await storage.stat("snapshot-doctor")
    except StorageNotFoundError:
        findings.note("read", f"it responds ({(time.perf_counter() - began) * 1000:.1f} ms)")
    except SnapshotError as error:
        findings.note("read", str(error), ok=False)


async def _write(storage: Storage) -> str:
    await storage.put("small", b"x" * 1000)
    return "a small file was written"


async def _read(storage: Storage) -> str:
    part = bytearray(10)
    await storage.read_into("small", 100, [part])
    if await storage.get("small") != b"x" * 1000 or bytes(part) != b"x" * 10:
        raise SnapshotError("the bytes read must equal the bytes written")
    return "it was read, as a whole and in part"


async def _list(storage: Storage) -> str | None:
    if not storage.capabilities.list:
        return None
    names = await storage.list()
    if names != ["small"]:
        raise SnapshotError(f"the listing must be ['small'], got {names}")
    return "it is listed"


async def _condition(storage: Storage) -> str | None:
    if not storage.capabilities.conditional_put:
        return None
    try:
        await storage.put("small", b"y", expect=ABSENT)
    except StorageConflictError:
        return "a conflicting write was refused"
    raise SnapshotError("a conditional put replaced an existing file: two jobs could overwrite each other's snapshots")


async def _delete(storage: Storage) -> str | None:
    if not storage.capabilities.delete:
        return None
    await storage.delete(["small"])
    try:
        await storage.stat("small")
    except StorageNotFoundError:
        return "it was deleted"
    raise SnapshotError("a deleted file still exists")


_TRIALS: dict[str, Callable[[Storage], Any]] = {
    "write": _write,
    "read": _read,
    "list": _list,
    "condition": _condition,
    "delete": _delete,
}


def _describe(url: URL, findings: Findings) -> None:
    if url.scheme != "file":
        findings.note("place", str(url), ok=None)
        return
    folder = existing_folder(url)
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    findings.note("place", f"{url}: {kind}, {size_text(free)} free", ok=None)
    if kind in ("tmpfs", "ramfs"):
        findings.advice.append(f"{url} is in memory ({kind}), so its files do not survive a restart")
    if kind == "overlay":
        findings.advice.append(f"{url} is a container's layer, and is deleted with it: mount a volume for snapshots")


def _promises(storage: Storage, findings: Findings) -> None:
    can = storage.capabilities
    if not can.atomic_put:
        findings.advice.append("writes are not atomic there, so snapshots can be read but not taken")
    elif not can.conditional_put:
        findings.advice.append("no conditional writes: let only one job write to a path at a time")
    if not can.durable:
        findings.advice.append("writes are not known to survive a power loss")
