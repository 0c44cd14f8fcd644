"""Files in the memory of this process: for tests, examples, and state that is passed on within a program.

A process has one tree of files: `memory://run/step-1` is below `memory://run`, and visible to all storages of the
process. Nothing survives the process. A forked child has its own copy.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.storage import (
    ABSENT,
    ANYTHING,
    URL,
    Buffer,
    Capabilities,
    Context,
    Expect,
    FileStat,
    FileWriter,
    Limits,
    Storage,
    check_path,
)
from snapshot.io.system import PerProcess

Bytes = npt.NDArray[np.uint8]
"""Content as an array: NumPy copies long ones with the GIL released, which slices of a bytearray do not."""
_LONG = 1 << 20
"""Minimum bytes of a copy that runs in a thread, so that the loop is not blocked."""
_tokens = count(1)


@dataclass(frozen=True, slots=True)
class _File:
    content: Bytes
    """Never changed once the file is in the tree, so that a read can continue while the file is replaced."""
    token: str = field(default_factory=lambda: f"{next(_tokens)}")
    mtime: float = field(default_factory=time.time)


class _Tree:
    """All files of this process."""

    def __init__(self) -> None:
        self.files: dict[str, _File] = {}
        self.lock = threading.Lock()
        """Held during lookups and changes of the tree, never during copies of bytes."""

    def forked(self) -> _Tree:
        """Keep the parent's files under a new lock: a thread of the parent may have held the old one."""
        self.lock = threading.Lock()
        return self


_tree = PerProcess(_Tree, _Tree.forked)


class MemoryStorage(Storage):
    """Files in memory: `memory://name` or `memory://name/below/it`, without `storage_options`."""

    capabilities = Capabilities(durable=False, shares="link", renames=True, guarded_commit=True)
    limits = Limits(parallel_files=1)

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        if options:
            raise ValueError(f"{url}: memory has no storage_options, got {', '.join(map(repr, options))}")
        if not url.location or url.query:
            raise ValueError(f"{url}: a memory URL must be a name without a query, as in memory://name")
        self._root = check_path(url.location)

    def _key(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    def _find(self, path: str) -> _File:
        with _tree.get().lock:
            found = _tree.get().files.get(self._key(path))
        if found is None:
            raise StorageNotFoundError(f"{self.url.join(path)}: no such file in memory")
        return found

    def _expect(self, path: str, expect: Expect) -> None:
        """Raise StorageConflictError unless the file at the path is as expected. The caller holds the lock."""
        current = _tree.get().files.get(self._key(path))
        if expect is ANYTHING or (current.token if current else ABSENT) == expect:
            return
        found = "is missing" if current is None else "already exists" if expect is ABSENT else "was replaced"
        raise StorageConflictError(f"{self.url.join(path)}: {found}")

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file that is invisible until it is finished."""
        return MemoryFileWriter(self.url.join(path), self._key(path), size)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Copy from the current content."""
        file, url = self._find(path), self.url.join(path)
        if token is not None and token != file.token:
            raise StorageConflictError(f"{url}: replaced during the read")
        targets = _arrays(buffers)
        end = offset + sum(map(len, targets))
        if offset < 0 or end > len(file.content):
            raise CorruptSnapshotError(
                f"{url}: ends at byte {len(file.content)}, but bytes {offset}-{end} were requested"
            )
        await _copy([(target, file.content[begin : begin + len(target)]) for begin, target in _placed(offset, targets)])

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Compare and replace the file under the lock."""
        made = _File(np.frombuffer(bytes(data), np.uint8))
        with _tree.get().lock:
            self._expect(path, expect)
            _tree.get().files[self._key(path)] = made
        return made.token

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return a copy of the content."""
        content = self._find(path).content
        if limit is not None and len(content) > limit:
            raise StorageError(f"{self.url.join(path)}: has {len(content):,} bytes, more than the {limit:,} allowed")
        return content.tobytes()

    async def stat(self, path: str) -> FileStat:
        """Return size, time, and a token that is unique to this content in this process."""
        file = self._find(path)
        return FileStat(len(file.content), file.mtime, file.token)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """List paths. There are no folders, only common prefixes of paths."""
        folder = prefix.rpartition("/")[0]
        if folder:
            check_path(folder)
        start = f"{self._root}/{prefix}"
        with _tree.get().lock:
            rests = {key[len(start) :] for key in _tree.get().files if key.startswith(start)}
        if not recursive:
            rests = {name + slash for name, slash, _ in (rest.partition("/") for rest in rests)}
        return sorted(prefix + rest for rest in rests)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete all files at once: another thread sees all of them, or none."""
        keys = [self._key(path) for path in paths]
        with _tree.get().lock:
            for key in keys:
                _tree.get().files.pop(key, None)

    async def rename(self, source: str, path: str) -> None:
        old, new = self._key(source), self._key(path)
        with _tree.get().lock:
            if old not in _tree.get().files:
                raise StorageNotFoundError(f"{self.url.join(source)}: no such file")
            _tree.get().files[new] = _tree.get().files.pop(old)

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """Replace the claim by the file in one step; raise StorageConflictError if the claim does not exist."""
        made = _File(np.frombuffer(bytes(data), np.uint8))
        key = self._key(path)
        with _tree.get().lock:
            if self._key(claim) not in _tree.get().files:
                raise StorageConflictError(f"{self.url.join(claim)}: removed by another take or delete")
            self._expect(path, expect)
            del _tree.get().files[self._key(claim)]
            _tree.get().files[key] = made
        return made.token

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        """Add a file with the same content, which never changes."""
        key, url = self._key(path), self.url.join(path)
        if source.scheme != self.url.scheme or source.query:
            raise StorageError(f"{url}: cannot share {source}, which is not in memory")
        with _tree.get().lock:
            files = _tree.get().files
            found = files.get(source.location)
            if found is None:
                raise StorageNotFoundError(f"{source}: no such file in memory")
            if token is not None and token != found.token:
                raise StorageConflictError(f"{source}: was replaced")
            if key in files:
                raise StorageConflictError(f"{url}: already exists")
            files[key] = _File(found.content)


class MemoryFileWriter(FileWriter):
    """Memory of a file during writing. `finish` adds it to the tree."""

    def __init__(self, url: URL, key: str, size: int) -> None:
        self._url = url
        self._key = key
        self._content: Bytes | None = np.empty(size, np.uint8)
        self._written: dict[int, int] = {}

    def _open(self) -> Bytes:
        if self._content is None:
            raise ValueError(f"{self._url}: already finished or aborted")
        return self._content

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Copy the buffers to their offset."""
        content, sources = self._open(), _arrays(buffers)
        total = sum(map(len, sources))
        if offset < 0 or offset + total > len(content):
            raise StorageError(f"{self._url}: bytes {offset}-{offset + total} do not fit a file of {len(content)}")
        await _copy([(content[begin : begin + len(source)], source) for begin, source in _placed(offset, sources)])
        self._written[offset] = max(total, self._written.get(offset, 0))

    async def finish(self) -> None:
        """Add the file to the tree; raise StorageError unless every byte was written."""
        content, reached = self._open(), 0
        for offset, total in sorted(self._written.items()):
            if offset > reached:
                break
            reached = max(reached, offset + total)
        if reached < len(content):
            raise StorageError(f"{self._url}: nothing was written at byte {reached} of {len(content)}")
        self._content = None
        with _tree.get().lock:
            _tree.get().files[self._key] = _File(content)

    async def abort(self) -> None:
        """Drop the memory. A finished file is not affected."""
        self._content = None


def _arrays(buffers: Sequence[Buffer]) -> list[Bytes]:
    return [np.frombuffer(buffer, np.uint8) for buffer in buffers if memoryview(buffer).nbytes]


def _placed(offset: int, arrays: Sequence[Bytes]) -> list[tuple[int, Bytes]]:
    placed = []
    for array in arrays:
        placed.append((offset, array))
        offset += len(array)
    return placed


async def _copy(pairs: Sequence[tuple[Bytes, Bytes]]) -> None:
    """Copy each second array into the first."""

    def copy() -> None:
        for target, source in pairs:
            target[:] = source

    if sum(len(source) for _, source in pairs) < _LONG:
        copy()
    else:
        await asyncio.get_running_loop().run_in_executor(None, copy)
