"""Snapshots in a SQLite database, `sqlite:///folder/name.db/run/step-1`: a complete storage plugin.

A file is a row, its bytes are rows of parts. A transaction provides each guarantee of the contract.
"""

import asyncio
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

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
    map_exceptions,
)

T = TypeVar("T")
SCHEMA = [
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, token TEXT, size INTEGER, mtime REAL)",
    "CREATE TABLE IF NOT EXISTS parts (token TEXT, start INTEGER, data BLOB, began REAL, PRIMARY KEY (token, start))",
]


class SqliteStorage(Storage):
    """`sqlite:///folder/name.db/prefix`. `storage_options`: `timeout`, seconds to wait for another writer (30)."""

    # The guarantees. The conformance tests check each, and that all others raise.
    capabilities = Capabilities(durable=True, guarded_commit=True)
    # The preferred parts: short ones, because SQLite holds a part in memory as well.
    limits = Limits(largest_part=1 << 20, preferred_part=1 << 20, parallel_parts=4, parallel_files=1)

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        if unknown := options.keys() - {"timeout"}:  # a misspelt option must not be ignored
            raise ValueError(f"{url}: unknown storage_options {', '.join(map(repr, sorted(unknown)))}")
        file, dot, prefix = url.location.partition(".db")
        if not dot or url.query:
            raise ValueError(f"{url}: names no database, as in sqlite:///folder/name.db/run/step-1")
        self._file = file + dot
        self._root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        # A connection belongs to one thread. The thread is created here, the connection on first use.
        self._thread = ThreadPoolExecutor(1, "sqlite")
        self._connection: sqlite3.Connection | None = None

    async def run(self, path: str, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run work in one transaction in a thread. Its errors become `StorageError`s with the URL."""

        def transaction() -> T:
            if self._connection is None:
                timeout = float(self.options.get("timeout", 30))
                self._connection = sqlite3.connect(self._file, timeout=timeout, isolation_level=None)
                self._connection.execute("PRAGMA synchronous = FULL")
            self._connection.execute("BEGIN IMMEDIATE")  # waits for its turn; two readers that upgrade would conflict
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
                await asyncio.wait([future])  # the thread still uses the caller's buffers
                raise

    def find(self, connection: sqlite3.Connection, path: str) -> FileStat:
        """Return the row of a file."""
        row = connection.execute("SELECT size, mtime, token FROM files WHERE path = ?", [self.key(path)]).fetchone()
        if row is None:
            raise StorageNotFoundError(f"{self.url.join(path)}: there is no such file")
        return FileStat(*row)

    def key(self, path: str) -> str:
        """Return the name of a path in the database. `check_path` refuses paths outside of the root."""
        return self._root + check_path(path)

    # Bulk data

    async def create(self, path: str, size: int) -> FileWriter:
        """Create a file. Its parts get a token that no file has yet, so they are invisible before `finish`."""
        return SqliteWriter(self, path, self.key(path), size)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Copy from the parts that overlap the range."""
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
        """Compare and replace in one transaction."""
        return await self.run(path, lambda connection: self.replace(connection, path, bytes(data), expect))

    def replace(self, connection: sqlite3.Connection, path: str, data: bytes, expect: Expect) -> str:
        """Replace the content of a file if its token is the expected one."""
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
        """Let the file have the parts with this token."""
        connection.execute("DELETE FROM parts WHERE token = (SELECT token FROM files WHERE path = ?)", [key])
        connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", [key, token, size, time.time()])

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """Put the file only if the claim exists, as `guarded_commit` guarantees."""

        def work(connection: sqlite3.Connection) -> str:
            self.find(connection, claim)
            token = self.replace(connection, path, bytes(data), expect)
            self.remove(connection, [claim])
            return token

        return await self.run(path, work)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return the content. A file that is too long is refused before it is read."""
        size = (await self.stat(path)).size
        if limit is not None and size > limit:
            raise StorageError(f"{self.url.join(path)}: has {size:,} bytes, more than the {limit:,} allowed")
        data = bytearray(size)
        await self.read_into(path, 0, [data])
        return bytes(data)

    async def stat(self, path: str) -> FileStat:
        """Return size, time and token."""
        return await self.run(path, lambda connection: self.find(connection, path))

    # Names

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """List the files. There are no folders, only common prefixes of paths."""
        if folder := prefix.rpartition("/")[0]:
            check_path(folder)
        start = self._root + prefix
        rows = await self.run(prefix, lambda connection: connection.execute("SELECT path FROM files").fetchall())
        rests = {path[len(start) :] for (path,) in rows if path.startswith(start)}
        if not recursive:
            rests = {name + slash for name, slash, _ in (rest.partition("/") for rest in rests)}
        return sorted(prefix + rest for rest in rests)

    async def delete(self, paths: Sequence[str]) -> None:
        """Delete all of the files or none."""
        for path in paths:
            check_path(path)
        await self.run("", lambda connection: self.remove(connection, paths))

    def remove(self, connection: sqlite3.Connection, paths: Sequence[str]) -> None:
        """Delete files and their parts."""
        for path in paths:
            connection.execute(
                "DELETE FROM parts WHERE token = (SELECT token FROM files WHERE path = ?)", [self.key(path)]
            )
            connection.execute("DELETE FROM files WHERE path = ?", [self.key(path)])

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        """Delete old parts of unfinished files, which a killed process left."""

        def work(connection: sqlite3.Connection) -> list[str]:
            # the SQL text is constant; values of the user are parameters
            old = "token NOT IN (SELECT token FROM files) AND began < ?"
            before = [time.time() - older_than]
            found = connection.execute(f"SELECT DISTINCT token FROM parts WHERE {old}", before).fetchall()  # noqa: S608 - constant
            connection.execute(f"DELETE FROM parts WHERE {old}", before)  # noqa: S608 - constant
            return sorted(token for (token,) in found)

        return await self.run(prefix, work)

    async def close(self) -> None:
        """Close the connection in its own thread."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await asyncio.get_running_loop().run_in_executor(self._thread, connection.close)
        self._thread.shutdown(wait=False)


class SqliteWriter(FileWriter):
    """Writes parts with a new token; `finish` assigns them to the file."""

    def __init__(self, storage: SqliteStorage, path: str, key: str, size: int) -> None:
        self._storage = storage
        self._path = path
        self._key = key
        self._size = size
        self._token = uuid.uuid4().hex

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Insert a row."""
        data = b"".join(buffers)
        if offset < 0 or offset + len(data) > self._size:
            raise StorageError(f"{self._storage.url.join(self._path)}: the bytes do not fit a file of {self._size}")
        row = [self._token, offset, data, time.time()]
        await self._storage.run(self._path, lambda c: c.execute("INSERT INTO parts VALUES (?, ?, ?, ?)", row))

    async def finish(self) -> None:
        """Make the file visible, if it is complete."""

        def work(connection: sqlite3.Connection) -> None:
            total = "SELECT coalesce(sum(length(data)), 0) FROM parts WHERE token = ?"
            (written,) = connection.execute(total, [self._token]).fetchone()
            if written != self._size:
                raise StorageError(f"{self._storage.url.join(self._path)}: {written} of {self._size} bytes came")
            self._storage.show(connection, self._key, self._token, self._size)

        await self._storage.run(self._path, work)

    async def abort(self) -> None:
        """Delete the parts."""
        unused = "DELETE FROM parts WHERE token = ? AND token NOT IN (SELECT token FROM files)"
        await self._storage.run(self._path, lambda c: c.execute(unused, [self._token]))
