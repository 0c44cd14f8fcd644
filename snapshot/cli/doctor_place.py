"""What works at a place: each thing that a storage can do is tried once."""

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
    """Afterwards, folders that were not there are gone again."""
    missing = []
    folder = Path(url.location)
    while url.scheme == "file" and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    try:
        yield
    finally:
        with suppress(OSError):  # somebody else has put something there meanwhile
            for made in missing:
                made.rmdir()


async def try_abilities(url: URL, options: Mapping[str, Any], findings: Findings) -> bool:
    """Try each thing that a storage can do; whether it can be written to."""
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
    findings.note("write", "this storage is for reading only", ok=None)
    began = time.perf_counter()
    try:
        await storage.stat("snapshot-doctor")
    except StorageNotFoundError:
        findings.note("read", f"it answers ({(time.perf_counter() - began) * 1000:.1f} ms)")
    except SnapshotError as error:
        findings.note("read", str(error), ok=False)


async def _write(storage: Storage) -> str:
    await storage.put("small", b"x" * 1000)
    return "a small file was put"


async def _read(storage: Storage) -> str:
    part = bytearray(10)
    await storage.read_into("small", 100, [part])
    if await storage.get("small") != b"x" * 1000 or bytes(part) != b"x" * 10:
        raise SnapshotError("what was read is not what was written")
    return "it came back, whole and in part"


async def _list(storage: Storage) -> str | None:
    if not storage.capabilities.list:
        return None
    names = await storage.list()
    if names != ["small"]:
        raise SnapshotError(f"one file was written, and the listing says {names}")
    return "it is listed"


async def _condition(storage: Storage) -> str | None:
    if not storage.capabilities.conditional_put:
        return None
    try:
        await storage.put("small", b"y", expect=ABSENT)
    except StorageConflictError:
        return "of two writers one wins"
    raise SnapshotError(
        "a put that must not replace a file replaced it: two jobs could overwrite each other's snapshots"
    )


async def _delete(storage: Storage) -> str | None:
    if not storage.capabilities.delete:
        return None
    await storage.delete(["small"])
    try:
        await storage.stat("small")
    except StorageNotFoundError:
        return "it is gone"
    raise SnapshotError("a file was deleted, and is there still")


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
        findings.advice.append(f"{url} is memory ({kind}): nothing there survives a restart")
    if kind == "overlay":
        findings.advice.append(f"{url} is a container's own layer, which is gone with it: mount a volume for snapshots")


def _promises(storage: Storage, findings: Findings) -> None:
    can = storage.capabilities
    if not can.atomic_put:
        findings.advice.append(
            "a file may be seen half written there, so snapshots can be read from it but not taken to it"
        )
    elif not can.conditional_put:
        findings.advice.append("no condition can be set there: let only one job write to a path at a time")
    if not can.durable:
        findings.advice.append("nothing says that what was written there survives a loss of power")
