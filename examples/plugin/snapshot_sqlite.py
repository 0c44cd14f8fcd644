"""Snapshots in a SQLite database, `sqlite:///folder/name.db/run/step-1`: a storage plugin, all of it.

A file is a row, its bytes are rows of parts. Every promise of the contract is kept by a transaction.
"""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.storage import (
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
    map_exceptions,
)

T = TypeVar("T")
SCHEMA = [
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, token TEXT, size INTEGER, mtime REAL)",
    "CREATE TABLE IF NOT EXISTS parts (token TEXT, start INTEGER, data BLOB, began REAL, PRIMARY KEY (token, start))",
]


class SqliteStorage(Storage):
    """`sqlite:///folder/name.db/prefix`. `storage_options`: `timeout`, seconds to wait for another writer (30)."""

    # What can be promised. The conformance kit tests all of it, and that the rest raises.
    capabilities = Capabilities(durable=True, guarded_commit=True)
    # What is wanted of parts: short ones, since a part is held in memory by SQLite as well.
    limits = Limits(largest_part=1 << 20, preferred_part=1 << 20, parallel_parts=4, parallel_files=1)

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        if unknown := options.keys() - {"timeout"}:  # a typing error must not be an option that does nothing
            raise ValueError(f"{url}: unknown storage_options {', '.join(map(repr, sorted(unknown)))}")
        file, dot, prefix = url.location.partition(".db")
        if not dot or url.query:
            raise ValueError(f"{url}: names no database, as in sqlite:///folder/name.db/run/step-1")
        self._file = file + dot
        self._root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        # One thread: a connection is of one thread only. Made here, connected on first use.
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._connection: sqlite3.Connection | None = None

    async def run(self, path: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do work in one transaction, off the event loop; its errors become ours, and name the URL."""

        def transaction() -> T:
            if self._connection is None:
                timeout = float(self.options.get("timeout", 30))
                self._connection = sqlite3.connect(self._file, timeout=timeout, isolation_level=None)
                self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("BEGIN IMMEDIATE")  # waits for its turn, where two that only read would clash
            try:
                for table in SCHEMA:
                    self._connection.execute(table)
                done = work(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            return done

        url = self.url.join(path)
        future = asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        with map_exceptions(url, {sqlite3.Error: StorageError}):
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                await asyncio.wait([future])  # the thread uses the caller's buffers: they must not be given back before
                raise

    def find(self, connection: sqlite3.Connection, path: str) -> FileStat:
        """The row of a file."""
        row = connection.execute("SELECT size, mtime, token FROM files WHERE path = ?", [self.key(path)]).fetchone()
        if row is None:
            raise StorageNotFoundError(f"{self.url.join(path)}: there is no such file")
        return FileStat(*row)

    def key(self, path: str) -> str:
        """What a path is called in the database: `check_path` refuses those that leave the root."""
        return self._root + check_path(path)

    # Bulk bytes

    async def create(self, path: str, size: int) -> FileWriter:
        """Parts are written under a token that no file has yet: so nothing is visible before `finish`."""
        return SqliteWriter(self, path, self.key(path), size)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Copied from the parts that touch the range."""
        views = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        end = offset + sum(map(len, views))

        def read(connection: sqlite3.Connection) -> None:
            file = self.find(connection, path)
            if token is not None and token != file.token:
                raise StorageConflictError(f"{self.url.join(path)}: was replaced while it was read")
            if end > file.size:
                raise CorruptSnapshotError(f"{self.url.join(path)}: ends at byte {file.size}, before {end}")
            rows = connection.execute(
                "SELECT start, data FROM parts WHERE token = ? AND start < ? AND start + length(data) > ? ORDER BY 1",
                [file.token, end, offset],
            )
            position, view, used = offset, 0, 0
            for start, data in rows:
                piece = memoryview(data)[max(position - start, 0) : end - start]
                while piece.nbytes:
                    length = min(piece.nbytes, views[view].nbytes - used)
                    views[view][used : used + length] = piece[:length]
                    piece, position, used = piece[length:], position + length, used + length
                    if used == views[view].nbytes:
                        view, used = view + 1, 0

        await self.run(path, read)

    # Small files

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Compared and replaced in one transaction."""
        return await self.run(path, lambda connection: self.replace(connection, path, bytes(data), expect))

    def replace(self, connection: sqlite3.Connection, path: str, data: bytes, expect: Expect) -> str:
        """Make `data` the content of a file, if what stands there is what is expected."""
        if expect is not ANYTHING:
            try:
                stands: Expect = self.find(connection, path).token
            except StorageNotFoundError:
                stands = ABSENT
            if stands != expect:
                raise StorageConflictError(f"{self.url.join(path)}: something else is there than was expected")
        token = uuid.uuid4().hex
        connection.execute("INSERT INTO parts VALUES (?, 0, ?, ?)", [token, data, time.time()])
        self.show(connection, self.key(path), token, len(data))
        return token

    def show(self, connection: sqlite3.Connection, key: str, token: str, size: int) -> None:
        """From now on the file is what was written under the token."""
        connection.execute("DELETE FROM parts WHERE token = (SELECT token FROM files WHERE path = ?)", [key])
        connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", [key, token, size, time.time()])

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """The claim becomes the file: that is what `guarded_commit` promises."""

        def work(connection: sqlite3.Connection) -> str:
            self.find(connection, claim)
            token = self.replace(connection, path, bytes(data), expect)
            self.remove(connection, [claim])
            return token

        return await self.run(path, work)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Refused before it is read, if it is too long."""
        size = (await self.stat(path)).size
        if limit is not None and size > limit:
            raise StorageError(f"{self.url.join(path)}: has {size:,} bytes, more than the {limit:,} allowed")
        data = bytearray(size)
        await self.read_into(path, 0, [data])
        return bytes(data)

    async def stat(self, path: str) -> FileStat:
        """Size, time and token."""
        return await self.run(path, lambda connection: self.find(connection, path))

    # Names

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """There are no folders: what is shown as one is what paths have in common."""
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        start = self._root + prefix
        rows = await self.run(prefix, lambda connection: connection.execute("SELECT path FROM files").fetchall())
        rests = {path[len(start) :] for (path,) in rows if path.startswith(start)}
        if not recursive:
            rests = {name + slash for name, slash, _ in (rest.partition("/") for rest in rests)}
        return sorted(prefix + rest for rest in rests)

    async def delete(self, paths: Sequence[str]) -> None:
        """All of them or none."""
        for path in paths:
            check_path(path)
        await self.run("", lambda connection: self.remove(connection, paths))

    def remove(self, connection: sqlite3.Connection, paths: Sequence[str]) -> None:
        """Files, and their bytes."""
        for path in paths:
            connection.execute(
                "DELETE FROM parts WHERE token = (SELECT token FROM files WHERE path = ?)", [self.key(path)]
            )
            connection.execute("DELETE FROM files WHERE path = ?", [self.key(path)])

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Parts of no file, which a killed process left; they do not say which file they were to be."""

        def work(connection: sqlite3.Connection) -> list[str]:
            # the text is this module's own, what users gave is passed beside it
            old = "token NOT IN (SELECT token FROM files) AND began < ?"
            before = [time.time() - older_than]
            found = connection.execute(f"SELECT DISTINCT token FROM parts WHERE {old}", before).fetchall()  # noqa: S608 - ours
            connection.execute(f"DELETE FROM parts WHERE {old}", before)  # noqa: S608 - ours
            return sorted(token for (token,) in found)

        return await self.run(prefix, work)

    async def close(self) -> None:
        """Close the connection, in the thread that it is of."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)


class SqliteWriter(FileWriter):
    """Parts under a token of their own; `finish` gives them to the file."""

    def __init__(self, storage: SqliteStorage, path: str, key: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._key = key
        self._size = size
        self._token = uuid.uuid4().hex

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """A row."""
        data = b"".join(buffers)
        if offset < 0 or offset + len(data) > self._size:
            raise StorageError(f"{self._storage.url.join(self._path)}: the bytes do not fit a file of {self._size}")
        row = [self._token, offset, data, time.time()]
        await self._storage.run(self._path, lambda c: c.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", row))

    async def finish(self) -> None:
        """Show the file, if all of it is there."""

        def work(connection: sqlite3.Connection) -> None:
            total = "SELECT coalesce(sum(length(data)), 0) FROM parts WHERE token = ?"
            (written,) = connection.execute(total, [self._token]).fetchone()
            if written != self._size:
                raise StorageError(f"{self._storage.url.join(self._path)}: {written} of {self._size} bytes came")
            self._storage.show(connection, self._key, self._token, self._size)

        await self._storage.run(self._path, work)

    async def abort(self) -> None:
        """Drop what no file has."""
        unused = "DELETE FROM parts WHERE token = ? AND token NOT IN (SELECT token FROM files)"
        await self._storage.run(self._path, lambda c: c.execute(unused, [self._token]))
