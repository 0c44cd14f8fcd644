"""Local and mounted file systems: vectored system calls in threads, O_DIRECT where it pays, renames as commits."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageError
from snapshot.plugins.file import direct_io
from snapshot.plugins.file.descriptors import (
    OpenFile,
    after,
    drop_cache,
    fill,
    length_of,
    link_below,
    locked,
    read_all,
    token_of,
    vectored,
)
from snapshot.plugins.file.folders import Folders
from snapshot.plugins.file.local_writer import LocalFileWriter
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
    in_thread,
    map_exceptions,
)

T = TypeVar("T")
MiB = 1 << 20
Paths = list[str]
_BUFFERED = Limits(preferred_part=8 * MiB, parallel_parts=4, parts_per_file=1, merge_gap=64 << 10)
"""One write a file: the kernel lets a second one spin until the first is done."""
_DIRECT = Limits(
    preferred_part=8 * MiB, parallel_parts=4, parallel_files=1, multiple=direct_io.PAGE, alignment=direct_io.PAGE,
    merge_gap=64 << 10
)  # fmt: skip


class FileStorage(Storage):
    """`file:///folder` or a plain path. No `storage_options`.

    Durable files are written around the page cache where the file system allows it (`SNAPSHOT_DIRECT_IO`), and synced;
    so are the folders that name them. Long reads of what is not in the page cache go around it, too.
    """

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        if options:
            raise ValueError(f"{url}: files take no storage_options, and got {', '.join(map(repr, options))}")
        self._root = url.location
        self._lock = threading.Lock()
        self._readers: dict[str, OpenFile] = {}
        self._opened: list[OpenFile] = []
        self._folders = Folders(self._root, durable=context.durable)

    capabilities = Capabilities(guarded_commit=True, renames=True, blocking=True)

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """Aligned parts into one file where they go around the page cache, else whatever comes, into several."""
        if self.context.direct_io == "never" or not (self.context.durable or self.context.direct_io == "always"):
            return _BUFFERED
        return _DIRECT if direct_io.pays(self._root, always=self.context.direct_io == "always") else _BUFFERED

    def _path(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    async def _do(self, path: str, function: Callable[..., T], *arguments: Any) -> T:
        with map_exceptions(self.url.join(path)):
            return await in_thread(function, *arguments)

    def _refuse_links(self, path: str) -> None:
        link = link_below(self._root, path.rpartition("/")[0])
        if link is not None:
            raise StorageError(
                f"{self.url.join(path)}: {link} is a symbolic link, and files are not changed through it"
            )

    # Bulk files

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file under its own name; only a manifest makes it part of a snapshot."""
        return await self._do(path, self._create, path, size)

    def _create(self, path: str, size: int) -> FileWriter:
        full = self._path(path)
        self._refuse_links(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        is_direct = self.limits.alignment > 1 and size >= MiB

        def attempt() -> int:
            nonlocal is_direct
            descriptor = direct_io.open_direct(full, flags) if is_direct else None
            is_direct = descriptor is not None
            return os.open(full, flags, 0o666) if descriptor is None else descriptor

        descriptor = self._folders.open_new(full, attempt)
        self._folders.changed(os.path.dirname(full))
        return LocalFileWriter(
            self.url.join(path),
            full,
            descriptor,
            size,
            self._folders,
            around_cache=is_direct,
            durable=self.context.durable,
        )

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers with `preadv`; what is not in the page cache is read around it, if it is long."""
        url = self.url.join(path)
        total = sum(map(length_of, buffers))
        with map_exceptions(url):
            got = await in_thread(self._read, path, offset, buffers, total, token, url)
            if got is None:
                async with self.context.memory.borrow(direct_io.CHUNK) as bounce:
                    got = await in_thread(direct_io.read, self._reader(path).around, offset, buffers, total, bounce)
                if got < total:  # the file's end; or it was cut short, and goes on through the page cache
                    got = await in_thread(self._read_rest, path, offset, buffers, total, got)
        if got < total:
            raise CorruptSnapshotError(
                f"{url}: ends at {offset + got}, and bytes {offset}-{offset + total} were wanted"
            )

    def _read(
        self, path: str, offset: int, buffers: Sequence[Buffer], total: int, token: str | None, url: URL
    ) -> int | None:
        """How many bytes there were; None where the read is to go around the page cache."""
        reader = self._reader(path)
        if token is not None and token != token_of(os.fstat(reader.descriptor)):
            raise StorageConflictError(f"{url}: was replaced while it was read")
        if total >= direct_io.WORTH and reader.goes_around(offset):
            return None
        return vectored(os.preadv, reader.descriptor, buffers, offset, total) - offset

    def _read_rest(self, path: str, offset: int, buffers: Sequence[Buffer], total: int, got: int) -> int:
        rest = after(buffers, got)
        return vectored(os.preadv, self._reader(path).descriptor, rest, offset + got, total - got) - offset

    def _reader(self, path: str) -> OpenFile:
        """The open file; opened anew if another stands under its name now (the old one may still be read by a
        thread)."""
        full = self._path(path)
        stands = os.stat(full)
        with self._lock:
            reader = self._readers.get(path)
            if reader is None or reader.identity != (stands.st_dev, stands.st_ino):
                reader = self._readers[path] = OpenFile(full, self.context.direct_io)
                self._opened.append(reader)
            return reader

    # Small files

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        """Written aside and renamed, or (`ABSENT`) linked, which fails where something is. An empty file is `ABSENT` or
        whole at once, and needs no other name that an interruption could leave behind."""
        return await self._do(path, self._put, path, data, expect)

    def _put(self, path: str, data: bytes, expect: Expect) -> str:
        full = self._path(path)
        folder = os.path.dirname(full)
        self._refuse_links(path)
        at_once = expect is ABSENT and not data
        made = full if at_once else f"{full}.{secrets.token_hex(6)}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = self._folders.open_new(full, lambda: os.open(made, flags, 0o666))
        except FileExistsError:
            raise StorageConflictError(f"{self.url.join(path)}: is there already") from None
        try:
            try:
                fill(descriptor, data, durable=self.context.durable)
            finally:
                os.close(descriptor)
            if not at_once:
                return self._publish(made, path, expect)
            self._folders.changed(folder)
            return self._stamp(made)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            self._folders.prune({folder})
            raise

    def _stamp(self, full: str) -> str:
        """A finished file's token; a kernel's own clock may tick too seldom to tell two files apart."""
        now = time.time_ns()
        os.utime(full, ns=(now, now))
        return token_of(os.stat(full))

    def _publish(self, aside: str, path: str, expect: Expect) -> str:
        """Give a finished file its name, if what stands there now is what was expected."""
        full = self._path(path)
        folder = os.path.dirname(full)
        token = self._stamp(aside)
        self._folders.changed(folder)
        if expect is ABSENT:
            try:
                os.link(aside, full, follow_symlinks=False)
            except FileExistsError:
                if token != self._token_at(full):  # else it is a network's first answer that was lost
                    raise StorageConflictError(f"{self.url.join(path)}: is there already") from None
                self._forget(aside)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
                    raise
                self._replace(aside, full, path, expect)  # a file system without links
            else:
                self._forget(aside)
        else:
            self._replace(aside, full, path, expect)
        return token

    def _replace(self, aside: str, full: str, path: str, expect: Expect) -> None:
        """Rename under a lock of the folder: renames alone compare nothing."""
        with locked(os.path.dirname(full)):
            if expect is not ANYTHING:
                stands = self._token_at(full)
                if stands != (None if expect is ABSENT else expect):
                    found = "is gone" if stands is None else "is there already" if expect is ABSENT else "was replaced"
                    raise StorageConflictError(f"{self.url.join(path)}: {found}")
            token = self._token_at(aside)
            try:
                os.rename(aside, full)
            except FileNotFoundError:
                if token is None or token != self._token_at(full):  # else, again, an answer was lost
                    raise

    def _forget(self, aside: str) -> None:
        """A file has its name: it is there, even if the other one cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(aside)

    def _token_at(self, full: str) -> str | None:
        try:
            return token_of(os.stat(full))
        except FileNotFoundError:
            return None

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        """The claim becomes the file: if somebody cleaned it away, there is nothing to rename."""
        return await self._do(path, self._commit, claim, path, data, expect)

    def _commit(self, claim: str, path: str, data: bytes, expect: Expect) -> str:
        aside = self._path(claim)
        self._refuse_links(claim)
        self._refuse_links(path)
        try:
            descriptor = os.open(aside, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise StorageConflictError(f"{self.url.join(claim)}: was cleaned away by another take or delete") from None
        try:
            fill(descriptor, data, durable=self.context.durable)
        finally:
            os.close(descriptor)
        try:
            self._folders.sync()
            self._folders.expect()
            token = self._publish(aside, path, expect)
        except FileNotFoundError as error:
            raise StorageConflictError(f"{error.filename}: was cleaned away by another take or delete") from None
        try:
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it since
                self._folders.sync()
        except OSError as error:
            raised = StorageError(f"{self.url.join(path)}: {error.strerror}")
            raised.errno, raised.uncertain = error.errno, True
            raise raised from error
        return token

    async def rename(self, source: str, path: str) -> None:
        """A rename, which `settle` makes durable."""
        self._refuse_links(source)
        await self._do(path, self._rename, self._path(source), self._path(path))

    def _rename(self, source: str, full: str) -> None:
        self._folders.make(os.path.dirname(full))
        os.rename(source, full)
        self._folders.gone(source)
        self._folders.finished(full)
        for each in {os.path.dirname(source), os.path.dirname(full)}:
            self._folders.changed(each)

    async def settle(self) -> None:
        """Sync the folders in which files were made."""
        await self._do("", self._folders.sync)
        await self._do("", self._folders.expect)

    async def drop_caches(self, paths: Sequence[str]) -> None:
        """Write files to the disk and drop them from the page cache, so that they are read from the disk."""
        for path in paths:
            await self._do(path, drop_cache, self._path(path))

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """A regular file's content, and no more of it than the limit."""
        return await self._do(path, self._get, path, limit)

    def _get(self, path: str, limit: int | None) -> bytes:
        data = read_all(self._path(path), limit)
        if limit is not None and len(data) > limit:
            raise StorageError(f"{self.url.join(path)}: has more than the {limit:,} bytes that are allowed")
        return data

    async def stat(self, path: str) -> FileStat:
        """Size, time, and a token of inode, size and time."""
        found = await self._do(path, os.stat, self._path(path))
        if not stat.S_ISREG(found.st_mode):
            error = StorageError(f"{self.url.join(path)}: is not a file")
            error.errno = errno.EISDIR
            raise error
        return FileStat(found.st_size, found.st_mtime, token_of(found))

    async def list(self, prefix: str = "", *, recursive: bool = True) -> Paths:
        """Walks the folder that the prefix names; links are listed, not followed."""
        return await self._do(prefix, self._list, prefix, recursive)

    def _list(self, prefix: str, recursive: bool) -> Paths:
        base = prefix.rpartition("/")[0]
        if base:
            check_path(base)
        if link_below(self._root, base) is not None:
            return []
        found: Paths = []
        folders = [base]
        while folders:
            folder = folders.pop()
            try:
                entries = list(os.scandir(f"{self._root}/{folder}" if folder else self._root))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                is_folder = entry.is_dir(follow_symlinks=False)
                if not path.startswith(prefix) and not (is_folder and recursive and prefix.startswith(path + "/")):
                    continue
                if not is_folder:
                    found.append(path)
                elif recursive:
                    folders.append(path)
                else:
                    found.append(path + "/")
        return sorted(found)

    async def delete(self, paths: Sequence[str]) -> None:
        """Unlinks them, all that can be, and removes the folders that this leaves empty."""
        with map_exceptions(self.url.join(paths[0] if len(paths) == 1 else "")):
            await in_thread(self._delete, paths)

    def _delete(self, paths: Sequence[str]) -> None:
        for path in {path.rpartition("/")[0]: path for path in map(check_path, paths)}.values():
            self._refuse_links(path)
        folders = set()
        first: OSError | None = None
        for path in paths:
            full = self._path(path)
            self._folders.gone(full)
            try:
                os.unlink(full)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                first = first or error
            folders.add(os.path.dirname(full))
        self._folders.prune(folders)
        if first is not None:
            raise first
        if self.context.durable:
            self._folders.sync_without(folders)

    async def close(self) -> None:
        """Close what was opened for reading."""
        with self._lock:
            self._readers, opened, self._opened = {}, self._opened, []
        for reader in opened:
            reader.close()
