"""Local and mounted file systems: vectored calls in threads, O_DIRECT if it is faster, commits by rename.

Platforms without vectored calls read and write data files through `portable.py`. All else is the same there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError
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
    in_thread,
    map_exceptions,
)
from snapshot.io.system import CLOEXEC, NO_LINKS, NOFOLLOW, VECTORED, WINDOWS, link, remove_file, replace_file
from snapshot.storages.file import files
from snapshot.storages.file.files import (
    Folders,
    LocalFileWriter,
    OpenFile,
    buffer_length,
    expect_token,
    file_token,
    find_link,
    list_files,
    list_short_folder,
    lock_folder,
    read_regular,
    share_file,
    skip_bytes,
    transfer_vectored,
    write_all,
)
from snapshot.storages.file.page_cache import CachedFile, drop_cache, page_cache

T = TypeVar("T")
MiB = 1 << 20
_BUFFERED = Limits(parts_per_file=1)
"""Limits through the page cache. One write per file: the kernel lets a second one spin until the first is done."""
_DIRECT = Limits(multiple=files.PAGE, alignment=files.PAGE)

_UNSAFE = re.compile(
    r'[\\:*?"<>|\0-\37]|(^|/)(con|prn|aux|nul|con(in|out)\$|(com|lpt)[\d\xb9\xb2\xb3])(\.|/|$)|[. ](/|$)', re.IGNORECASE
)
"""Names that Windows refuses or reads in another way: `\\` separates folders there, and `NUL` is a device."""


class FileStorage(Storage):
    """Files below a folder: `file:///folder` or a plain path, without `storage_options`.

    Durable files are written with O_DIRECT if the file system allows it (`SNAPSHOT_DIRECT_IO`), or stay in the page
    cache if memory is ample. Files and their folders are synced. Long reads use O_DIRECT, too, unless the bytes are
    cached, or other ranks of the host read them.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        if options:
            raise ValueError(f"{url}: files have no storage_options, got {', '.join(map(repr, options))}")
        self._root = url.location
        self._lock = threading.Lock()
        self._readers: dict[str, OpenFile] = {}
        self._opened: list[OpenFile] = []
        self._folders = Folders(self._root, durable=context.durable)
        self._direct_io = context.direct_io
        self._take = object()
        """Stands for the take whose files may stay in the page cache."""
        self._portable = context.file_io == "portable" or not VECTORED
        if self._portable:
            self.capabilities = replace(self.capabilities, blocking=False)

    capabilities = Capabilities(shares="link", guarded_commit=True, renames=True, blocking=True, local=True)

    @cached_property
    def limits(self) -> Limits:  # type: ignore[override]
        """Aligned parts with O_DIRECT, else any. The number of files is the same, so it does not depend on memory."""
        lanes = self.context.lanes  # a copy of the page cache takes a core
        limits = _BUFFERED if self._cached or not self._around_cache else _DIRECT
        return replace(limits, parallel_parts=max(4, lanes), parallel_files=max(2, lanes // 2))

    @cached_property
    def _around_cache(self) -> bool:
        """True if durable files may be written with O_DIRECT."""
        always = self.context.direct_io == "always"
        wanted = self.context.direct_io != "never" and (self.context.durable or always)
        return wanted and not self._portable and files.is_worthwhile(self._root, always=always)

    @cached_property
    def _cached(self) -> bool:
        """True if they are written through the page cache all the same, and stay there, since memory is ample."""
        return self._around_cache and self.context.direct_io == "auto" and page_cache.get().is_ample()

    def _path(self, path: str) -> str:
        check_path(path)
        if WINDOWS and _UNSAFE.search(path):
            raise StorageError(f"{self.url.join(path)}: must be a file name that Windows allows")
        return f"{self._root}/{path}"

    async def _run(self, path: str, function: Callable[..., T], *arguments: Any) -> T:
        with map_exceptions(self.url.join(path)):
            return await in_thread(function, *arguments)

    def _refuse_links(self, path: str) -> None:
        link = find_link(self._root, path.rpartition("/")[0])
        if link is not None:
            raise StorageError(f"{self.url.join(path)}: {link} is a symbolic link; files are not changed through links")

    # Bulk files

    async def create(self, path: str, size: int) -> FileWriter:
        """Create a file under its final name; only a manifest makes it part of a snapshot."""
        return await self._run(path, self._create, path, size)

    def _create(self, path: str, size: int) -> FileWriter:
        full = self._path(path)
        self._refuse_links(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOEXEC | NOFOLLOW
        cached = CachedFile(full, self._take) if self._cached and size >= MiB else None
        is_direct = self._around_cache and cached is None and size >= MiB

        def attempt() -> int:
            nonlocal is_direct
            try:
                descriptor = files.open_direct(full, flags) if is_direct else None
                is_direct = descriptor is not None
                return os.open(full, flags, 0o666) if descriptor is None else descriptor
            except FileExistsError:
                if os.path.islink(full):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
                remove_file(full)  # never truncated, since other snapshots may share its bytes
                return attempt()

        descriptor = self._folders.open_new(full, attempt)
        self._folders.mark_changed(os.path.dirname(full))
        kind = LocalFileWriter
        if self._portable:
            from snapshot.storages.file.portable import PortableFileWriter as kind  # Linux needs no aiofiles
        return kind(
            self.url.join(path),
            full,
            descriptor,
            size,
            self._folders,
            around_cache=is_direct,
            durable=self.context.durable,
            cached=cached,
        )

    def share_reads(self) -> None:
        """Read through the page cache, unless the settings request O_DIRECT: the disk is then read once per host."""
        if self._direct_io == "auto":
            self._direct_io = "never"
            with self._lock:
                for reader in self._opened:
                    reader.stay_in_cache()

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers with `preadv`, or with O_DIRECT if the range is long and not cached."""
        url = self.url.join(path)
        total = sum(map(buffer_length, buffers))
        with map_exceptions(url):
            if self._portable:
                from snapshot.storages.file.portable import read_file  # Linux needs no aiofiles

                got = await read_file(url, self._path(path), offset, buffers, token)
            else:
                got = await self._read_vectored(path, offset, buffers, total, token)
        if got < total:
            raise CorruptSnapshotError(
                f"{url}: ends at byte {offset + got}, but bytes {offset}-{offset + total} were requested"
            )

    async def _read_vectored(
        self, path: str, offset: int, buffers: Sequence[Buffer], total: int, token: str | None
    ) -> int:
        got = await in_thread(self._read, path, offset, buffers, total, token)
        if got is None:
            async with self.context.memory.borrow(files.CHUNK) as bounce:
                around = self._reader(path).around
                got = await in_thread(files.read_bounced, around, offset, buffers, total, bounce)
            if got < total:  # end of the file, or a short read: continue through the page cache
                got = await in_thread(self._read_rest, path, offset, buffers, total, got)
        return got

    def _read(self, path: str, offset: int, buffers: Sequence[Buffer], total: int, token: str | None) -> int | None:
        """Read through the page cache; return the number of bytes, or None if O_DIRECT should be used."""
        reader = self._reader(path)
        if token is not None:
            expect_token(self.url.join(path), reader.descriptor, token)
        if total >= files.WORTH and reader.goes_around(offset):
            return None
        return transfer_vectored(os.preadv, reader.descriptor, buffers, offset, total) - offset

    def _read_rest(self, path: str, offset: int, buffers: Sequence[Buffer], total: int, got: int) -> int:
        rest = skip_bytes(buffers, got)
        return transfer_vectored(os.preadv, self._reader(path).descriptor, rest, offset + got, total - got) - offset

    def _reader(self, path: str) -> OpenFile:
        """Return the open file, reopened if it was replaced.

        The old one stays open, since a thread may still read it.
        """
        full = self._path(path)
        current = os.stat(full)
        with self._lock:
            reader = self._readers.get(path)
            if reader is None or reader.identity != (current.st_dev, current.st_ino):
                reader = self._readers[path] = OpenFile(full, self._direct_io)
                self._opened.append(reader)
            return reader

    # Small files

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Write a temporary file and rename it, or (`ABSENT`) link it, which fails if the name is taken.

        An empty file is created at once, so that an interruption leaves no temporary file.
        """
        return await self._run(path, self._put, path, data, expect)

    def _put(self, path: str, data: bytes, expect: Expect) -> str:
        full = self._path(path)
        folder = os.path.dirname(full)
        self._refuse_links(path)
        at_once = expect is ABSENT and not data
        made = full if at_once else f"{full}.{secrets.token_hex(6)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOEXEC
        try:
            descriptor = self._folders.open_new(full, lambda: os.open(made, flags, 0o666))
        except FileExistsError:
            raise StorageConflictError(f"{self.url.join(path)}: already exists") from None
        try:
            try:
                write_all(descriptor, data, durable=self.context.durable)
            finally:
                os.close(descriptor)
            if not at_once:
                return self._publish(made, path, expect)
            self._folders.mark_changed(folder)
            return self._set_time(made)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_file(made)
            self._folders.remove_empty({folder})
            raise

    def _set_time(self, full: str) -> str:
        """Set the time of a finished file, and return its token. The kernel's own clock may tick too slowly."""
        now = time.time_ns()
        os.utime(full, ns=(now, now))
        return file_token(os.stat(full))

    def _publish(self, aside: str, path: str, expect: Expect) -> str:
        """Rename a finished file to its name, if the file there now is as expected."""
        full = self._path(path)
        folder = os.path.dirname(full)
        token = self._set_time(aside)
        self._folders.mark_changed(folder)
        if expect is ABSENT:
            try:
                link(aside, full)
            except FileExistsError:
                if token != self._token_at(full):  # else the link succeeded, and its response was lost
                    raise StorageConflictError(f"{self.url.join(path)}: already exists") from None
                self._unlink_quietly(aside)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                self._replace(aside, full, path, expect)  # this file system has no links
            else:
                self._unlink_quietly(aside)
        else:
            self._replace(aside, full, path, expect)
        return token

    def _replace(self, aside: str, full: str, path: str, expect: Expect) -> None:
        """Compare and rename under the folder's lock, since a rename compares nothing."""
        with lock_folder(os.path.dirname(full)):
            if expect is not ANYTHING:
                current = self._token_at(full)
                if current != (None if expect is ABSENT else expect):
                    found = (
                        "is missing" if current is None else "already exists" if expect is ABSENT else "was replaced"
                    )
                    raise StorageConflictError(f"{self.url.join(path)}: {found}")
            token = self._token_at(aside)
            try:
                replace_file(aside, full)
            except FileNotFoundError:
                if token is None or token != self._token_at(full):  # else only its response was lost
                    raise

    def _unlink_quietly(self, aside: str) -> None:
        """Remove the temporary name, if possible: the file already has its final name."""
        with contextlib.suppress(OSError):
            remove_file(aside)

    def _token_at(self, full: str) -> str | None:
        try:
            return file_token(os.stat(full))
        except FileNotFoundError:
            return None

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """Write into the claim and rename it, which fails if the claim was removed meanwhile."""
        return await self._run(path, self._commit, claim, path, data, expect)

    def _commit(self, claim: str, path: str, data: bytes, expect: Expect) -> str:
        aside = self._path(claim)
        self._refuse_links(claim)
        self._refuse_links(path)
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_TRUNC | CLOEXEC | NOFOLLOW)
        except FileNotFoundError:
            raise StorageConflictError(f"{self.url.join(claim)}: removed by another save, or by `delete`") from None
        try:
            write_all(descriptor, data, durable=self.context.durable)
        finally:
            os.close(descriptor)
        try:
            self._folders.sync_changed()
            self._folders.check_finished()
            token = self._publish(aside, path, expect)
        except FileNotFoundError as error:
            raise StorageConflictError(f"{error.filename}: removed by another save, or by `delete`") from None
        try:
            with contextlib.suppress(FileNotFoundError):  # it was deleted since
                self._folders.sync_changed()
        except OSError as error:
            raised = StorageError(f"{self.url.join(path)}: {error.strerror}")
            raised.errno, raised.uncertain = error.errno, True
            raise raised from error
        return token

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        """Create a reflink or a hard link, or let the kernel copy, and make the file read-only."""
        full = self._path(path)
        await self._run(path, self._refuse_links, path)
        if source.scheme not in ("file", self.url.scheme):
            raise StorageError(f"{self.url.join(path)}: cannot share {source}, which is not in a file system")
        await share_file(source, self.url.join(path), full, token, self._folders, durable=self.context.durable)

    async def rename(self, source: str, path: str) -> None:
        """Rename a file; `settle` makes that durable."""
        self._refuse_links(source)
        await self._run(path, self._rename, self._path(source), self._path(path))

    def _rename(self, source: str, full: str) -> None:
        self._folders.make(os.path.dirname(full))
        replace_file(source, full)
        self._folders.mark_removed(source)
        self._folders.mark_finished(full)
        for each in {os.path.dirname(source), os.path.dirname(full)}:
            self._folders.mark_changed(each)

    async def settle(self) -> None:
        """Sync the folders that got new names."""
        await self._run("", self._folders.sync_changed)
        await self._run("", self._folders.check_finished)

    async def drop_caches(self, paths: Sequence[str]) -> None:
        """Flush files and drop them from the page cache, so that the next read is from disk."""
        for path in paths:
            await self._run(path, drop_cache, self._path(path))

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return the content of a regular file, and raise if it is longer than the limit."""
        return await self._run(path, self._get, path, limit)

    def _get(self, path: str, limit: int | None) -> bytes:
        data = read_regular(self._path(path), limit)
        if limit is not None and len(data) > limit:
            raise StorageError(f"{self.url.join(path)}: larger than the limit of {limit:,} bytes")
        return data

    async def stat(self, path: str) -> FileStat:
        """Return size, time, and a token of inode, size and time."""
        found = await self._run(path, os.stat, self._path(path))
        if not stat.S_ISREG(found.st_mode):
            error = StorageError(f"{self.url.join(path)}: not a file")
            error.errno = errno.EISDIR
            raise error
        return FileStat(found.st_size, found.st_mtime, file_token(found))

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        """Walk the folder in the prefix. Links are listed, but not followed."""
        if WINDOWS and _UNSAFE.search(prefix):
            return []
        return await self._run(prefix, list_files, self._root, prefix, recursive)

    async def list_root(self) -> Sequence[str] | None:
        """Read the folder; None if it has many entries or cannot be read."""
        return await in_thread(list_short_folder, self._root)

    async def delete(self, paths: Sequence[str]) -> None:
        """Unlink as many files as possible, and remove the folders that become empty."""
        with map_exceptions(self.url.join(paths[0] if len(paths) == 1 else "")):
            await in_thread(self._delete, paths)

    def _delete(self, paths: Sequence[str]) -> None:
        for path in {path.rpartition("/")[0]: path for path in map(check_path, paths)}.values():
            self._refuse_links(path)
        folders = set()
        first: OSError | None = None
        for path in paths:
            full = self._path(path)
            self._folders.mark_removed(full)
            try:
                remove_file(full)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                first = first or error
            folders.add(os.path.dirname(full))
        self._folders.remove_empty(folders)
        if first is not None:
            raise first
        if self.context.durable:
            self._folders.sync_removed(folders)

    async def close(self) -> None:
        """Close the files that were opened for reading."""
        with self._lock:
            self._readers, opened, self._opened = {}, self._opened, []
        for reader in opened:
            reader.close()
