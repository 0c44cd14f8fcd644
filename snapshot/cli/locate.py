"""Lookup of the snapshot at a URL that a user typed, with suggestions if there is none."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.open import checkpoint_exists, open_checkpoint
from snapshot.manifest.document import SnapshotMetadata
from snapshot.text import counted

T = TypeVar("T")
AT_ONCE = 16
SHOWN = 5
SOON = 15.0
"""Seconds without progress after which a lookup is abandoned."""
ENDINGS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".gguf", ".index.json")
"""Suffixes of files that may be checkpoints by themselves."""


def find_metadata(url: str, options: Mapping[str, Any] | None = None) -> SnapshotMetadata:
    """Return the metadata of the snapshot at a URL. If there is none, raise an error with what exists there."""
    place = URL.parse(url)
    options = suggest(place, options)
    with explain_missing(url, options):
        return read_metadata(place, options)


def read_metadata(url: URL, options: Mapping[str, Any] | None) -> SnapshotMetadata:
    """Return the metadata of the checkpoint at a URL. Unlike `Snapshot.metadata`, this does not import torch."""
    with Session(url, options) as session:
        return SnapshotMetadata.of(run(open_checkpoint(session)).document)


def suggest(url: URL, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options for interactive use: an unreachable server is given up soon."""
    made = {"deadline": SOON, **(options or {})}
    try:
        open_storage(url, made)  # this does not connect yet
    except (ValueError, SnapshotError):  # storages without a server have no deadline
        return dict(options or {})
    return made


@contextmanager
def explain_missing(url: str, options: Mapping[str, Any] | None) -> Iterator[None]:
    """Add to an error about a missing snapshot what exists there."""
    try:
        yield
    except SnapshotNotFoundError as error:
        place = URL.parse(url)
        raise SnapshotNotFoundError(f"{place}: there is no snapshot here{_instead(place, options)}") from error


def is_local_file(url: URL) -> bool:
    """Return True if a URL names a file of the file system, not a folder. Such a file cannot be listed."""
    return url.scheme == "file" and os.path.isfile(url.location)


def list_names(url: URL, options: Mapping[str, Any] | None) -> list[str]:
    """Return the names directly below a URL; folders end in `/`. Raise if the storage cannot list."""
    with Session(url, options) as session:
        return run(session.storage.list(recursive=False))


def snapshots_below(url: URL, options: Mapping[str, Any] | None, names: Sequence[str] | None = None) -> list[str]:
    """Return the names of all checkpoints directly below a URL, in numeric order."""
    names = list_names(url, options) if names is None else names
    candidates = [name.rstrip("/") for name in names if name.endswith(("/", *ENDINGS)) and name != "data/"]

    def is_checkpoint(name: str) -> bool:
        with suppress(SnapshotError, ValueError), Session(url.join(name), options) as session:
            return run(checkpoint_exists(session))
        return False

    found = [name for name, here in zip(candidates, work_concurrently(is_checkpoint, candidates), strict=True) if here]
    return sorted(found, key=in_order)


def work_concurrently(work: Callable[[str], T], names: Sequence[str]) -> list[T]:
    """Run `work` for several names concurrently, since it waits for a storage."""
    if not names:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(names))) as pool:
        return list(pool.map(work, names))


def in_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names that orders numbers in them by value."""
    return [
        (int(part), part) if part.isascii() and part.isdecimal() and len(part) < 4000 else (-1, part)
        for part in re.split(r"(\d+)", name)
    ]


def newest_first(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names that puts the largest numbers in them first: the newest step."""
    return [(-number, part) for number, part in in_order(name)]


def _instead(url: URL, options: Mapping[str, Any] | None) -> str:
    try:
        names = list_names(url, options)
        if _holds_save_files(url, options, names):
            return ": an interrupted or running take left files here; `snapshot rm` removes them"
        if below := snapshots_below(url, options, names):
            return f", but a folder of {counted(len(below), 'snapshot')}: {_few(below)}; name one of them"
        folders = [name.rstrip("/") for name in sorted(names, key=in_order) if name.endswith("/")][-AT_ONCE:]
        held = work_concurrently(lambda name: _holds_save_files(url.join(name), options), folders)
        if unfinished := [name for name, holds in zip(folders, held, strict=True) if holds]:
            return f", only interrupted or running takes: {_few(unfinished)}"
        if names:
            return f", nor a checkpoint of another library; found {_few(names)}"
        from snapshot.formats.mistakes import describe_parent  # only an error needs it

        with Session(url, options) as session:
            beside = run(describe_parent(url, session.open_beside))
        return f": {beside}" if beside else ""
    except (SnapshotError, ValueError):  # the storage cannot list
        return ""


def _holds_save_files(url: URL, options: Mapping[str, Any] | None, names: Sequence[str] | None = None) -> bool:
    """Return True if a take has left files directly at a URL."""
    from snapshot.save.transaction import save_id_of  # only an error needs it

    names = list_names(url, options) if names is None else names
    data = list_names(url.join("data"), options) if "data/" in names else []
    return any(save_id_of(name) for name in [*names, *(f"data/{name}" for name in data)])


def _few(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN:,} more" if len(names) > SHOWN else ""
    return ", ".join(names[-SHOWN:] if more else names) + more
