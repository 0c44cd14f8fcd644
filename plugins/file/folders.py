"""Folders below a root, further names for finished files, and the writer of one file."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.aio import in_thread
from snapshot.io.storage import Buffer, FileWriter, check_path, map_exceptions
from snapshot.io.system import (
    CLOEXEC,
    NOFOLLOW,
    WINDOWS,
    fcntl,
    link,
    remove_file,
    sync_file,
    sync_folder,
    sync_path,
    write_at,
)
from snapshot.io.url import URL
from snapshot.plugins.file import files
from snapshot.plugins.file.files import buffer_length, file_token, find_link, open_regular, transfer_vectored

# Folders below a root: those that were created, those to sync, and those that became empty.

_TRIES = 3
"""Attempts to create a file in a folder that another take's clean-up removes while it is empty."""


class Folders:
    """State of one storage's folders, shared by its threads."""

    def __init__(self, root: str, *, durable: bool) -> None:
        self._root = root
        self._durable = durable
        self._lock = threading.Lock()
        self._made: list[str] = []
        self._dirty: set[str] = set()
        self._finished: set[str] = set()
        self._root_was_there: bool | None = None
        self._failed: OSError | None = None

    def make(self, folder: str) -> None:
        """Create a folder and its parents, and record them: they are removed if the take fails."""
        with self._lock:
            if self._root_was_there is None:
                self._root_was_there = os.path.isdir(self._root)
            missing = []
            while folder and not os.path.isdir(folder):
                missing.append(folder)
                if folder == os.path.dirname(folder):  # a drive that is not there
                    break
                folder = os.path.dirname(folder)
            for each in reversed(missing):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each)
                    self._made.append(each)
                    self._dirty.add(os.path.dirname(each))

    def open_new(self, full: str, attempt: Callable[[], int]) -> int:
        """Open a new file, after creating its folder. Retry if another take's clean-up removes the empty folder."""
        folder = os.path.dirname(full)
        try:
            for _ in range(_TRIES):
                with contextlib.suppress(FileNotFoundError):
                    self.make(folder)
                    return attempt()
            self.make(folder)
            return attempt()
        except BaseException:
            self.remove_empty({folder})
            raise

    def remove_empty(self, folders: set[str]) -> None:
        """Remove empty folders: those below the root, and the root and its parents if this storage created them."""
        for left in sorted(folders, key=len, reverse=True):
            folder = left
            while folder.startswith(self._root) or folder in self._made:
                if folder == self._root and self._root_was_there:
                    break
                if len(folder) < len(self._root) and folder not in self._made:
                    break
                try:
                    os.rmdir(folder)
                except FileNotFoundError:  # the folder was never created, but a parent may have been
                    pass
                except OSError:
                    break
                if folder == os.path.dirname(folder):
                    break
                folder = os.path.dirname(folder)

    def mark_changed(self, folder: str) -> None:
        """Mark a folder that got a new name."""
        with self._lock:
            self._dirty.add(folder)

    def mark_finished(self, full: str) -> None:
        """Mark a file as finished: it must exist until the commit."""
        with self._lock:
            self._finished.add(full)

    def mark_removed(self, full: str) -> None:
        """Stop expecting a file."""
        with self._lock:
            self._finished.discard(full)

    def check_finished(self) -> None:
        """Raise FileNotFoundError if a finished file was removed by another process."""
        with self._lock:
            finished = sorted(self._finished)
        for full in finished:
            os.stat(full)

    def sync_changed(self) -> None:
        """Sync the folders that got new names since the last call.

        A failure is final, since the kernel reports a lost write only once.
        """
        if self._failed is not None:
            raise self._failed
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        try:
            if self._durable:
                for folder in sorted(dirty):
                    sync_folder(folder)
        except OSError as error:
            self._failed = error
            raise

    def sync_removed(self, folders: set[str]) -> None:
        """Sync folders that lost names; in place of a removed folder, its nearest existing parent."""
        nearest = set()
        for gone in folders:
            folder = gone
            while not os.path.isdir(folder) and folder != os.path.dirname(folder):
                folder = os.path.dirname(folder)
            nearest.add(folder)
        for folder in sorted(nearest):
            try:
                sync_folder(folder)
            except FileNotFoundError:  # it was removed meanwhile, by a process that syncs its parent
                pass
            except PermissionError:  # folders above the root may be unreadable
                if folder.startswith(self._root):
                    raise


def list_files(root: str, prefix: str, recursive: bool) -> list[str]:
    """Return the paths below a root that begin with a prefix. If not recursive, names of folders end in `/`."""
    base = prefix.rpartition("/")[0]
    if base:
        check_path(base)
    if find_link(root, base) is not None:
        return []
    found = []
    folders = [base]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(f"{root}/{folder}" if folder else root))
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            if os.path.isfile(root):  # a root that cannot be read is not empty
                raise
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


# Further names for finished files: a reflink, a hard link, or a copy by the kernel.

FICLONE = 0x40049409
"""The ioctl of Linux that creates a reflink: a file of its own, whose blocks are shared until one of them changes."""
_CHUNK = 256 << 20


async def share_file(source: URL, url: URL, full: str, token: str | None, folders: Folders, *, durable: bool) -> None:
    """Give a file the further name `full`, and make it read-only, since several snapshots may rely on its bytes."""
    added: list[str] = []
    try:
        with map_exceptions(url):
            await in_thread(lambda: added.append(_share(source, url, full, token, folders, durable=durable)))
    except asyncio.CancelledError:
        if added:
            await in_thread(_discard, full, folders)
        raise


def _share(source: URL, url: URL, full: str, token: str | None, folders: Folders, *, durable: bool) -> str:
    with map_exceptions(source):
        if not NOFOLLOW and os.path.islink(source.location):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        origin = open_regular(source.location, NOFOLLOW)
    try:
        before = os.fstat(origin)
        if token is not None and token != file_token(before):
            raise StorageConflictError(f"{source}: was replaced")
        try:
            made = folders.open_new(full, partial(_add_name, origin, source.location, full))
        except FileExistsError:
            raise StorageConflictError(f"{url}: already exists") from None
        try:
            if file_token(os.fstat(origin)) != file_token(before) or os.fstat(made).st_size != before.st_size:
                raise StorageConflictError(f"{source}: changed while it was shared")
            if not WINDOWS:  # which deletes no read-only files
                with contextlib.suppress(OSError):  # only the owner may
                    os.fchmod(made, stat.S_IMODE(before.st_mode & os.fstat(made).st_mode) & 0o555)
            if durable:  # the source may have been written without
                sync_file(made) if made != origin else sync_path(full)
        except BaseException:
            _discard(full, folders)
            raise
        finally:
            if made != origin:
                os.close(made)
    finally:
        os.close(origin)
    folders.mark_changed(os.path.dirname(full))
    folders.mark_finished(full)
    return full


def _discard(full: str, folders: Folders) -> None:
    """Remove a name, and the folders that become empty."""
    folders.mark_removed(full)
    with contextlib.suppress(OSError):
        os.unlink(full)
    folders.remove_empty({os.path.dirname(full)})


def _add_name(origin: int, source: str, full: str) -> int:
    """Add a name by the first method that works. Return a descriptor of the file, which may be `origin` itself."""
    if os.path.lexists(full):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), full)
    refusals: dict[str, OSError] = {}
    for method in (_reflink, _link, _copy):
        try:
            return method(origin, source, full)
        except (SnapshotError, FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            refusals[method.__name__[1:]] = error
    told = ", ".join(f"{name}: {error.strerror}" for name, error in refusals.items())
    raise OSError(refusals["link"].errno, f"the file system cannot share {source} ({told})")


def _reflink(origin: int, source: str, full: str) -> int:
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _fill_new(full, lambda made: fcntl.ioctl(made, FICLONE, origin))


def _link(origin: int, source: str, full: str) -> int:
    try:
        link(source, full)
    except OSError as error:
        if not _is_name_of(full, origin):  # else the link succeeded, and its response was lost
            if isinstance(error, FileNotFoundError) and not os.path.lexists(source):
                raise StorageNotFoundError(f"{source}: {error.strerror}") from error
            raise
    if not _is_name_of(full, origin):
        os.unlink(full)
        raise StorageConflictError(f"{source}: was replaced")
    return origin


def _copy(origin: int, source: str, full: str) -> int:
    """Copy in the kernel, which network file systems do on their server."""
    return _fill_new(full, partial(_copy_range, origin))


def _copy_range(origin: int, made: int) -> None:
    copy = getattr(os, "copy_file_range", None)
    if copy is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    done, size = 0, os.fstat(origin).st_size
    while done < size:
        step = copy(origin, made, min(size - done, _CHUNK), done, done)
        if step == 0:
            raise OSError(errno.EIO, f"{done} of {size} bytes were copied")
        done += step


def _fill_new(full: str, fill: Callable[[int], object]) -> int:
    """Create a file and fill it. Nothing remains after an error."""
    made = os.open(full, os.O_RDWR | os.O_CREAT | os.O_EXCL | CLOEXEC | NOFOLLOW, 0o666)
    try:
        fill(made)
    except BaseException:
        os.close(made)
        with contextlib.suppress(OSError):
            os.unlink(full)
        raise
    return made


def _is_name_of(full: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(full), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Writer of one file, under its final name, with O_DIRECT if that is faster.

MiB = 1 << 20


class LocalFileWriter(FileWriter):
    """Writer of parts at any offset, through an open descriptor."""

    def __init__(
        self, url: URL, full: str, descriptor: int, size: int, folders: Folders, *, around_cache: bool, durable: bool
    ) -> None:
        self._url = url
        self._full = full
        self._descriptor = descriptor
        self._size = size
        self._folders = folders
        self._around_cache = around_cache
        self._durable = durable
        self._closed = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        with map_exceptions(self._url):
            await in_thread(self._write, offset, buffers)

    def _write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if self._closed:
            raise ValueError("the file is already finished or aborted")
        total = sum(map(buffer_length, buffers))
        if offset < 0 or offset + total > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{offset + total} do not fit a file of {self._size}")
        whole = total % files.PAGE == 0 or offset + total == self._size
        if self._around_cache and whole and files.write_aligned(self._descriptor, offset, buffers, total):
            return
        if self._around_cache:
            files.stop_direct(self._descriptor)
            self._around_cache = False
        end = transfer_vectored(write_at, self._descriptor, buffers, offset, total)
        if end < offset + total:
            raise OSError(errno.EIO, f"write failed: {end - offset} of {total} bytes at offset {offset} were written")
        if self._durable and total >= MiB:
            files.start_writeback(self._descriptor, offset, end - offset)

    async def finish(self) -> None:
        with map_exceptions(self._url):
            await in_thread(self._finish)

    def _finish(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        if self._durable:
            sync_file(self._descriptor)
        self._close()
        self._folders.mark_finished(self._full)

    async def abort(self) -> None:
        with map_exceptions(self._url):
            await in_thread(self._abort)

    def _abort(self) -> None:
        with contextlib.suppress(OSError):  # the bytes are discarded anyway
            self._close()
        self._folders.mark_removed(self._full)
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._full)
        self._folders.remove_empty({os.path.dirname(self._full)})

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)
