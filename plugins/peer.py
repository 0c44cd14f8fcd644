"""Finished files of another host of the job: ranges over HTTP, signed with the run's secret."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.peer_requests import SIGNATURE, is_signed, sign
from snapshot.storage import (
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
    in_thread,
)

MiB = 1 << 20
PATIENCE = 20.0
"""Seconds without a byte after which another host counts as unreachable."""


class PeerStorage(Storage):
    """Files of another host: `peer://10.0.0.7:40123/step-1`. Its uploader offers them, for reading only.

    Options:
        secret: The secret of the run, which signs all requests.
        timeout: Seconds without a byte after which the host counts as unreachable; 20 by default.
    """

    capabilities = Capabilities(
        write=False,
        list=False,
        delete=False,
        atomic_put=False,
        conditional_put=False,
        durable=False,
        blocking=True,
    )
    limits = Limits(preferred_part=8 * MiB, parallel_parts=4, merge_gap=256 << 10)

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        unknown = sorted(set(options) - {"secret", "timeout"})
        if unknown:
            raise ValueError(f"{url}: the storage options of peer:// are 'secret' and 'timeout', got {unknown[0]!r}")
        self._patience = float(options.get("timeout", PATIENCE))
        self._secret = str(options.get("secret", ""))
        self._address, _, folder = url.location.partition("/")
        self._folder = f"/{folder}" if folder else ""
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    # Reading

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Receive a range directly into the buffers."""
        await in_thread(self._receive, path, offset, [memoryview(each).cast("B") for each in buffers])

    def _receive(self, path: str, offset: int, buffers: Sequence[memoryview]) -> None:
        total = sum(map(len, buffers))
        wanted = f"bytes={offset}-{offset + total - 1}" if total else ""

        def fill(answer: http.client.HTTPResponse) -> None:
            if total and answer.length != total:
                raise CorruptSnapshotError(
                    f"{self.url.join(path)}: ends before byte {offset + total}: {answer.length} bytes of {total}"
                )
            for each in buffers if total else ():
                got = 0
                while got < len(each):
                    count = answer.readinto(each[got:])
                    if not count:
                        raise ConnectionError("the connection ended in the middle of an answer")
                    got += count

        self._request(path, wanted, fill)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return a small file, whose answer is signed."""
        return await in_thread(self._get, path, limit)

    def _get(self, path: str, limit: int | None) -> bytes:
        found = b""

        def read(answer: http.client.HTTPResponse) -> None:
            nonlocal found
            if limit is not None and (answer.length or 0) > limit:
                raise StorageError(f"{self.url.join(path)}: larger than the limit of {limit:,} bytes")
            found = answer.read()
            if not is_signed(answer.headers[SIGNATURE], self._secret, "answer", self._target(path), found):
                raise StorageError(f"{self.url.join(path)}: the answer is not signed with the secret of this run")

        self._request(path, "", read)
        return found

    async def stat(self, path: str) -> FileStat:
        """Return the size of a file."""
        return FileStat(await in_thread(self._size, path), 0.0, "")

    def _size(self, path: str) -> int:
        size = 0

        def read(answer: http.client.HTTPResponse) -> None:
            nonlocal size
            size = int(answer.headers["Content-Length"])

        self._request(path, "", read, "HEAD")
        return size

    def _target(self, path: str) -> str:
        return f"{self._folder}/{check_path(path)}"

    def _request(self, path: str, wanted: str, use: Any, method: str = "GET") -> None:
        """Send a request, over an idle connection if there is one. That may have ended: then over a new one."""
        target, url = self._target(path), self.url.join(path)
        headers = {SIGNATURE: sign(self._secret, method, target, wanted)}
        if wanted:
            headers["Range"] = wanted
        while True:
            with self._lock:
                old = self._idle.pop() if self._idle else None
            connection = old or http.client.HTTPConnection(self._address, timeout=self._patience)
            try:
                connection.request(method, target, headers=headers)
                answer = connection.getresponse()
                if answer.status not in (200, 206):
                    reason = answer.read(1000).decode("utf-8", "replace").strip() or answer.reason
                    kind = StorageNotFoundError if answer.status == 404 else StorageError
                    raise kind(f"{url}: {reason}")
                use(answer)
            except SnapshotError:
                connection.close()
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                if old is None:
                    raise StorageError(f"{url}: {error or type(error).__name__}") from error
                continue
            except BaseException:
                connection.close()
                raise
            with self._lock:
                self._idle.append(connection)
            return

    async def close(self) -> None:
        """Close the connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    # Writing

    def _refuse(self) -> StorageError:
        return StorageError(f"{self.url}: another host's files can only be read")

    async def create(self, path: str, size: int) -> FileWriter:
        """Refuse."""
        raise self._refuse()

    async def put(self, path: str, data: bytes, *, expect: Expect = "") -> str:
        """Refuse."""
        raise self._refuse()

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Refuse: a host describes its files in its status."""
        raise self._refuse()

    async def delete(self, paths: Sequence[str]) -> None:
        """Refuse."""
        raise self._refuse()
