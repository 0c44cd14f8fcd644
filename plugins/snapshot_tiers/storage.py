"""Folders that each host of a job has for itself, and finished files of another host of the job."""

from __future__ import annotations

import http.client
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.io.aio import in_thread
from snapshot.io.storage import (
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
from snapshot.io.url import URL
from snapshot.storages.file.file_storage import FileStorage
from snapshot_tiers.requests import SIGNATURE, host_of, is_signed, sign

# Finished files of another host of the job: ranges over HTTP, signed with the run's secret.

T = TypeVar("T")
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
        def read(answer: http.client.HTTPResponse) -> bytes:
            if limit is not None and (answer.length or 0) > limit:
                raise StorageError(f"{self.url.join(path)}: larger than the limit of {limit:,} bytes")
            found = answer.read()
            if not is_signed(answer.headers[SIGNATURE], self._secret, "answer", self._target(path), found):
                raise StorageError(f"{self.url.join(path)}: the answer is not signed with the secret of this run")
            return found

        return self._request(path, "", read)

    async def stat(self, path: str) -> FileStat:
        size = await in_thread(self._request, path, "", lambda answer: int(answer.headers["Content-Length"]), "HEAD")
        return FileStat(size, 0.0, "")

    def _target(self, path: str) -> str:
        return f"{self._folder}/{check_path(path)}"

    def _request(self, path: str, wanted: str, use: Callable[[http.client.HTTPResponse], T], method: str = "GET") -> T:
        """Send a request, and return what `use` makes of the answer.

        An idle connection is used if there is one. That may have ended: then a new one.
        """
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
                found = use(answer)
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
            return found

    async def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for each in idle:
            each.close()

    # Writing

    def _refuse(self) -> StorageError:
        return StorageError(f"{self.url}: another host's files can only be read")

    async def create(self, path: str, size: int) -> FileWriter:
        raise self._refuse()

    async def put(self, path: str, data: bytes, *, expect: Expect = "") -> str:
        raise self._refuse()

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Refuse: a host describes its files in its status."""
        raise self._refuse()

    async def delete(self, paths: Sequence[str]) -> None:
        raise self._refuse()


# Folders that each host of a job has for itself: on a local disk, or in memory (tmpfs).
#
# Each rank writes to its host's folder. Reads prefer that folder; files that it lacks, or that are damaged in it, are
# read from other hosts and from the storage that all hosts share.

REMOTE_PART = 16 << 20
_SAVE_ID = re.compile(rb'"save_id":"([0-9a-z]+)"')


class Sources(Protocol):
    """The places of a snapshot's files: an option of this storage."""

    save_id: str
    """The snapshot to read: another one may be at the same path on some hosts."""

    remote: bool
    """True if most files are not on this host."""

    def places(self, path: str) -> Sequence[Storage | None]:
        """Return the storages that have a file, the nearest first; None stands for this host's folder.

        All of them wait only in threads: see `Capabilities.blocking`.
        """
        ...

    def size(self, path: str) -> int | None:
        """Return the size that a file must have, if it is known."""
        ...

    def passed(self, path: str, place: Storage | None, error: str) -> None:
        """Record that a file cannot be read from a place, or is damaged there."""
        ...

    def count(self, place: Storage | None, nbytes: int) -> None:
        """Count bytes that were read from a place."""
        ...


class NearStorage(FileStorage):
    """Files of this host in a folder: `near:///folder/step-1`. A manager with `near=` uses it.

    Options:
        sources: Places of the files that are read, by order; without it, only this host's folder.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        unknown = sorted(set(options) - {"sources"})
        if unknown:
            raise ValueError(f"{url}: the only storage option of near:// is 'sources', got {unknown[0]!r}")
        super().__init__(url, {}, replace(context, file_io="auto"))  # its readers wait in threads only
        self.options = dict(options)
        self._sources: Sources | None = options.get("sources")
        self._position: defaultdict[str, int] = defaultdict(int)
        """The number of places of each file that were passed over."""
        self._unread: dict[str, str] = {}
        """The files that another host has and could not deliver, each with the reason."""
        self._switching = threading.Lock()

    @cached_property
    def host(self) -> str:  # type: ignore[override]
        """Identify the folder that has the steps, by its file system and the running system."""
        above = os.path.dirname(self.url.location)
        with map_exceptions(self.url):
            return host_of(above)

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """Longer reads if most files are on other hosts, since each of them is a request."""
        limits = super().limits
        return replace(limits, hot_part=REMOTE_PART) if self._sources is not None and self._sources.remote else limits

    def _place(self, path: str) -> tuple[int, Storage | None]:
        assert self._sources is not None
        places = self._sources.places(path)
        position = self._position[path]
        if position >= len(places):
            raise StorageNotFoundError(f"{self.url.join(path)}: no host has it, nor the storage that all hosts share")
        return position, places[position]

    def _leave(self, path: str, position: int, error: SnapshotError | str) -> bool:
        """Go on to the next place of a file, unless another thread has done so. Return False if there is none.

        Raise StorageError if there is none, and another host may have good bytes: the file is not damaged then.
        """
        assert self._sources is not None
        places = self._sources.places(path)
        with self._switching:
            if self._position[path] == position:
                is_silent = isinstance(error, StorageError) and not isinstance(error, StorageNotFoundError)
                if is_silent and places[position] is not None:
                    self._unread[path] = str(error)
                if position + 1 >= len(places):
                    if path in self._unread:
                        raise StorageError(f"{self.url.join(path)}: {self._unread[path]}")
                    return False
                self._position[path] = position + 1
                self._sources.passed(path, places[position], str(error))
        return True

    def switch_source(self, path: str) -> bool:
        """Read a file from the next place that has it."""
        return self._sources is not None and self._leave(path, self._position[path], "its digest is wrong")

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read from the nearest place that answers with all bytes."""
        if self._sources is None:
            await super().read_into(path, offset, buffers, token=token)
            return
        while True:
            position, place = self._place(path)
            try:
                if place is None:
                    await super().read_into(path, offset, buffers)
                else:
                    await place.read_into(path, offset, buffers)
            except (StorageError, CorruptSnapshotError) as error:
                if not self._leave(path, position, error):
                    raise
                continue
            self._sources.count(place, sum(memoryview(each).nbytes for each in buffers))
            return

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return a small file from the nearest place that has it; a manifest only of the right snapshot."""
        if self._sources is None:
            return await super().get(path, limit=limit)
        while True:
            position, place = self._place(path)
            try:
                data = await (super().get(path, limit=limit) if place is None else place.get(path, limit=limit))
                if path.startswith("data/") or _save_id_in(data) == self._sources.save_id:
                    return data
                fault: SnapshotError | str = "belongs to another snapshot"
            except (StorageError, CorruptSnapshotError) as error:
                fault = error
            if not self._leave(path, position, fault):
                raise StorageNotFoundError(f"{self.url.join(path)}: {fault}")

    async def stat(self, path: str) -> FileStat:
        """Return the size that a file must have, if another place than this host's folder will be read."""
        if self._sources is None:
            return await super().stat(path)
        while True:
            position, place = self._place(path)
            size = self._sources.size(path)
            try:
                if place is None:
                    return await super().stat(path)
                return FileStat(size, 0.0, "") if size is not None else await place.stat(path)
            except StorageError as error:
                if not self._leave(path, position, error):
                    raise


def _save_id_in(manifest: bytes) -> str:
    found = _SAVE_ID.search(manifest[:1000])
    return found[1].decode() if found else ""
