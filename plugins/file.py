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
from snapshot.plugins import direct
from snapshot.plugins.descriptors import (
    Reader,
    fill,
    length_of,
    link_below,
    locked,
    read_all,
    sync_folder,
    token_of,
    vectored,
)
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
    preferred_part=8 * MiB, parallel_parts=4, parallel_files=1, multiple=direct.PAGE, alignment=direct.PAGE,
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
        self._readers: dict[str, Reader] = {}
        self._opened: list[Reader] = []
        self._made: list[str] = []
        self._dirty: set[str] = set()
        self._root_was_there: bool | None = None

    capabilities = Capabilities(guarded_commit=True, blocking=True)

    @property
    def limits(self) -> Limits:  # type: ignore[override]
        """Aligned parts into one file where they go around the page cache, else whatever comes, into several."""
        if self.context.direct_io == "never" or not (self.context.durable or self.context.direct_io == "always"):
            return _BUFFERED
        return _DIRECT if direct.pays(self._root, always=self.context.direct_io == "always") else _BUFFERED

    def _path(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"

    async def _do(self, path: str, function: Callable[..., T], *arguments: Any) -> T:
        with map_exceptions(self.url.join(path)):
            return await in_thread(function, *arguments)

    # Folders

    def _refuse_links(self, path: str) -> None:
        link = link_below(self._root, path.rpartition("/")[0])
        if link is not None:
            raise StorageError(
                f"{self.url.join(path)}: {link} is a symbolic link, and files are not changed through it"
            )

    def _make_folder(self, folder: str) -> None:
        """Make a folder and those above it, remembering which ones: they are removed again if all comes to nothing."""
        with self._lock:
            if self._root_was_there is None:
                self._root_was_there = os.path.isdir(self._root)
            missing = []
            while folder and not os.path.isdir(folder):
                missing.append(folder)
                folder = os.path.dirname(folder)
            for each in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                    self._made.append(each)
                    self._dirty.add(os.path.dirname(each))

    def _prune(self, folders: set[str]) -> None:
        """Remove folders that were left empty: those below the root, the root unless it was there before we wrote, and
        those above it that this storage made."""
        for left in sorted(folders, key=len, reverse=True):
            folder = left
            while folder.startswith(self._root) or folder in self._made:
                if folder == self._root and self._root_was_there:
                    break
                if len(folder) < len(self._root) and folder not in self._made:
                    break
                try:
                    os.rmdir(folder)
                except OSError:
                    break
                folder = os.path.dirname(folder)

    def _sync_folders(self) -> None:
        if not self.context.durable:
            return
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        for folder in sorted(dirty):
            sync_folder(folder)

    # Bulk files

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file under its own name; only a manifest makes it part of a snapshot."""
        return await self._do(path, self._create, path, size)

    def _create(self, path: str, size: int) -> FileWriter:
        full = self._path(path)
        folder = os.path.dirname(full)
        self._refuse_links(path)
        self._make_folder(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        aligned = self.limits.alignment > 1 and size >= MiB
        descriptor = direct.open_direct(full, flags) if aligned else None
        is_direct = descriptor is not None
        if descriptor is None:
            descriptor = os.open(full, flags, 0o666)
        self._dirty.add(folder)
        return _Writer(self, path, descriptor, size, is_direct)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers with `preadv`; what is not in the page cache is read around it, if it is long."""
        url = self.url.join(path)
        total = sum(map(length_of, buffers))
        with map_exceptions(url):
            got = await in_thread(self._read, path, offset, buffers, total, token, url)
            if got is None:
                async with self.context.memory.borrow(direct.CHUNK) as bounce:
                    got = await in_thread(direct.read, self._reader(path).around, offset, buffers, total, bounce)
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
        if total >= direct.WORTH and reader.goes_around(offset):
            return None
        return vectored(os.preadv, reader.descriptor, buffers, offset, total) - offset

    def _reader(self, path: str) -> Reader:
        """The open file; opened anew if another stands under its name now (the old one may still be read by a
        thread)."""
        full = self._path(path)
        stands = os.stat(full)
        with self._lock:
            reader = self._readers.get(path)
            if reader is None or reader.identity != (stands.st_dev, stands.st_ino):
                reader = self._readers[path] = Reader(full, self.context.direct_io)
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
        self._make_folder(folder)
        at_once = expect is ABSENT and not data
        made = full if at_once else f"{full}.{secrets.token_hex(6)}.tmp"
        try:
            try:
                descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                raise StorageConflictError(f"{self.url.join(path)}: is there already") from None
        except BaseException:
            self._prune({folder})
            raise
        try:
            try:
                fill(descriptor, data, durable=self.context.durable)
            finally:
                os.close(descriptor)
            if not at_once:
                return self._publish(made, path, expect)
            self._dirty.add(folder)
            return self._stamp(made)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(made)
            self._prune({folder})
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
        self._dirty.add(folder)
        if expect is ABSENT:
            try:
                os.link(aside, full, follow_symlinks=False)
            except FileExistsError:
                raise StorageConflictError(f"{self.url.join(path)}: is there already") from None
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES):
                    raise
                self._replace(aside, full, path, expect)  # a file system without links
            else:
                os.unlink(aside)
                return token
        else:
            self._replace(aside, full, path, expect)
        return token

    def _replace(self, aside: str, full: str, path: str, expect: Expect) -> None:
        """Rename under a lock of the folder: renames alone compare nothing."""
        with locked(os.path.dirname(full)):
            if expect is not ANYTHING:
                try:
                    stands: str | None = token_of(os.lstat(full))
                except FileNotFoundError:
                    stands = None
                if stands != (None if expect is ABSENT else expect):
                    found = "is gone" if stands is None else "is there already" if expect is ABSENT else "was replaced"
                    raise StorageConflictError(f"{self.url.join(path)}: {found}")
            os.rename(aside, full)

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
        self._sync_folders()
        try:
            token = self._publish(aside, path, expect)
        except FileNotFoundError:
            raise StorageConflictError(f"{self.url.join(claim)}: was cleaned away by another take or delete") from None
        self._sync_folders()
        return token

    async def settle(self) -> None:
        """Sync the folders in which files were made."""
        await self._do("", self._sync_folders)

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
            raise StorageError(f"{self.url.join(path)}: is not a file")
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
        """Unlinks them, and removes the folders that this leaves empty."""
        with map_exceptions(self.url.join(paths[0] if len(paths) == 1 else "")):
            await in_thread(self._delete, paths)

    def _delete(self, paths: Sequence[str]) -> None:
        for path in {path.rpartition("/")[0]: path for path in map(check_path, paths)}.values():
            self._refuse_links(path)
        folders = set()
        for path in paths:
            full = self._path(path)
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(full)
            folders.add(os.path.dirname(full))
        self._prune(folders)
        if self.context.durable:
            for folder in folders:
                if os.path.isdir(folder):
                    sync_folder(folder)

    async def close(self) -> None:
        """Close what was opened for reading."""
        with self._lock:
            self._readers, opened, self._opened = {}, self._opened, []
        for reader in opened:
            reader.close()


class _Writer(FileWriter):
    def __init__(self, storage: FileStorage, path: str, descriptor: int, size: int, is_direct: bool) -> None:
        self._storage = storage
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self._direct = is_direct
        self._closed = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        await self._storage._do(self._path, self._write, offset, buffers)

    def _write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if self._closed:
            raise ValueError("the file was finished or aborted already")
        total = sum(map(length_of, buffers))
        if offset < 0 or offset + total > self._size:
            raise StorageError(
                f"{self._storage.url.join(self._path)}: bytes {offset}-{offset + total} of a file of {self._size}"
            )
        whole = total % direct.PAGE == 0 or offset + total == self._size
        if self._direct and whole and direct.write(self._descriptor, offset, buffers, total):
            return
        if self._direct:
            self._direct = direct.leave(self._descriptor)
        end = vectored(os.pwritev, self._descriptor, buffers, offset, total)
        if self._storage.context.durable and total >= MiB:
            direct.start_writeback(self._descriptor, offset, end - offset)

    async def finish(self) -> None:
        await self._storage._do(self._path, self._finish)

    def _finish(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        if self._storage.context.durable:
            os.fsync(self._descriptor)
        self._close()

    async def abort(self) -> None:
        await self._storage._do(self._path, self._abort)

    def _abort(self) -> None:
        self._close()
        full = self._storage._path(self._path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(full)
        self._storage._prune({os.path.dirname(full)})

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)
