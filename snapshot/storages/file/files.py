"""Files as descriptors: complete vectored calls, O_DIRECT for bulk bytes, folders, and the writer of one file."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.aio import in_thread
from snapshot.io.storage import Buffer, FileWriter, check_path, map_exceptions
from snapshot.io.system import (
    CLOEXEC,
    MOST_BUFFERS,
    NOFOLLOW,
    NONBLOCK,
    WINDOWS,
    fcntl,
    link,
    remove_file,
    sync_file,
    sync_folder,
    sync_path,
    try_lock_folder,
)
from snapshot.io.url import URL
from snapshot.storages.file.page_cache import CachedFile, start_writeback
from snapshot.tensors.buffers import copy_memory

# O_DIRECT for bulk bytes, if the file system allows it and it is faster.
#
# Writes are steadier, and leave the page cache to the training job where memory is not ample (`page_cache`). Cold reads
# are faster. File systems that are not local, or that refuse it, are used through the page cache, without a warning.

PAGE = 4096
WORTH = 1 << 20
"""Minimum bytes of a read that uses O_DIRECT."""
CHUNK = 8 << 20
_LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "f2fs"))
"""File systems on which O_DIRECT is used without a setting.

Network and parallel file systems (NFS, Lustre, GPFS, FUSE) read ahead and write behind in their own caches. Many accept
O_DIRECT, and are then slower, or split each request.
"""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


@lru_cache(maxsize=256)
def _known_file_system(device: int) -> str:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as lines:
        for line in lines:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    raise LookupError


def _file_system(device: int) -> str:
    """Return the type of the file system with a device number, from the kernel's table of mounts.

    A failure is not cached: it may be due to a lack of descriptors.
    """
    try:
        return _known_file_system(device)
    except (OSError, ValueError, LookupError):
        return ""


def is_worthwhile(folder: str, *, always: bool = False) -> bool:
    """Return True if durable writes below a folder should use O_DIRECT. The folder need not exist."""
    if not hasattr(os, "O_DIRECT"):
        return False
    while not os.path.exists(folder) and folder not in ("", "/"):
        folder = os.path.dirname(folder)
    try:
        kind = _file_system(os.stat(folder or "/").st_dev)
    except OSError:
        return False
    return always or kind in _LOCAL


def open_direct(full: str, flags: int, *, only_local: bool = False) -> int | None:
    """Open a file with O_DIRECT; return None if that is refused, or if only local file systems are wanted."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        descriptor = os.open(full, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno in _REFUSED:
            return None
        raise
    if only_local and _file_system(os.fstat(descriptor).st_dev) not in _LOCAL:
        os.close(descriptor)
        return None
    return descriptor


def stop_direct(descriptor: int) -> None:
    """Switch a descriptor back to the page cache."""
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def write_aligned(descriptor: int, offset: int, buffers: Sequence[Buffer], total: int) -> bool:
    """Write one aligned buffer. Return False if it is not aligned, or the file system refuses after all.

    Then nothing counts as written. The last page may extend past the end of the buffer; `finish` truncates it.
    """
    if len(buffers) != 1 or offset % PAGE:
        return False
    view = memoryview(buffers[0]).cast("B")
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    if address % PAGE:
        return False
    padded = -(-total // PAGE) * PAGE
    if padded != total:  # buffers are whole pages, so the tail of the last one can be written
        view = memoryview((ctypes.c_char * padded).from_address(address)).cast("B")
    done = 0
    while done < padded:
        try:
            step = os.pwritev(descriptor, [view[done:]], offset + done)
        except OSError as error:
            if error.errno in _REFUSED:
                return False
            raise
        done += step
        if (step % PAGE or step == 0) and done < padded:
            return False
    return True


def is_cold(descriptor: int, offset: int) -> bool:
    """Return True if the bytes at an offset are missing from the page cache, tested by a non-blocking read."""
    try:
        os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def read_bounced(descriptor: int, offset: int, buffers: Sequence[Buffer], total: int, bounce: memoryview) -> int:
    """Fill the buffers through an aligned bounce buffer; return the number of bytes read."""
    source = ctypes.addressof(ctypes.c_char.from_buffer(bounce))
    got = 0
    targets = iter(buffers)
    target, room = 0, 0
    while got < total:
        begin = (offset + got) // PAGE * PAGE
        skip = offset + got - begin
        length = min(CHUNK, -(-(skip + total - got) // PAGE) * PAGE)
        done = os.preadv(descriptor, [bounce[:length]], begin)
        have = min(done - skip, total - got)
        if have <= 0:
            break
        at = source + skip
        got += have
        while have:
            while not room:
                view = memoryview(next(targets)).cast("B")
                room = len(view)
                target = ctypes.addressof(ctypes.c_char.from_buffer(view)) if room else 0
            step = min(room, have)
            copy_memory(target, at, step)
            target, room, at, have = target + step, room - step, at + step, have - step
        if done < length:
            break
    return got


# Files as descriptors: complete vectored calls, open files, folders that are synced or locked.

_FOR_READING = os.O_RDONLY | CLOEXEC | NONBLOCK
"""O_NONBLOCK, since opening a FIFO without a writer would wait. Regular files ignore it."""
_is_junction: Callable[[str], bool] = getattr(os.path, "isjunction", lambda _: False)
LOCK_PATIENCE = 10.0
"""Seconds to wait for a folder's lock, which is held for one rename."""


class OpenFile:
    """A file that is open for reading: through the page cache and, from the first cold read on, with O_DIRECT."""

    def __init__(self, full: str, mode: str) -> None:
        self.descriptor = open_regular(full)
        self.around = -1  # the last field that `__del__` needs
        opened = os.fstat(self.descriptor)
        self.identity = _identity(opened)
        self._full = full
        self._mode = mode
        self._lock = threading.Lock()
        if mode == "never":
            self._read_ahead()

    def goes_around(self, offset: int) -> bool:
        """Return True if a long read at an offset should use O_DIRECT. Then `around` is open."""
        if self._mode == "never" or (self._mode != "always" and not is_cold(self.descriptor, offset)):
            return False
        with self._lock:
            if self.around < 0:
                try:
                    around = open_direct(self._full, _FOR_READING, only_local=self._mode != "always")
                except OSError as error:  # too many descriptors: use one
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        raise
                    return False
                if around is not None and _identity(os.fstat(around)) != self.identity:
                    os.close(around)  # the file was replaced
                    around = None
                if around is None:
                    self._mode = "never"
                    return False
                self.around = around
        return True

    def stay_in_cache(self) -> None:
        """Read through the page cache only."""
        self._mode = "never"
        self._read_ahead()

    def _read_ahead(self) -> None:
        """Let the kernel read further ahead: threads that take turns look to it like reads at random."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint
                os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Close the descriptors; errors do not matter after reading."""
        descriptors, self.descriptor, self.around = (self.descriptor, self.around), -1, -1
        for descriptor in descriptors:
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def __del__(self) -> None:
        """Close what an interruption between two calls has left open."""
        if hasattr(self, "around"):
            self.close()


def open_regular(full: str, flags: int = 0) -> int:
    """Open a file for reading; raise StorageError if it is not a regular file, which might never end."""
    if NONBLOCK or stat.S_ISREG(os.stat(full).st_mode):
        descriptor = os.open(full, _FOR_READING | flags)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    error = StorageError(f"{full}: not a regular file")
    error.errno = errno.EISDIR
    raise error


def read_regular(full: str, limit: int | None) -> bytes:
    """Return the content of a regular file, and at most one byte more than the limit."""
    with open(open_regular(full), "rb") as file:
        return file.read() if limit is None else file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)


def write_all(descriptor: int, data: bytes, *, durable: bool) -> None:
    """Write all of a small file."""
    view = memoryview(data)
    while view:
        done = os.write(descriptor, view)
        if done == 0:
            raise OSError(errno.EIO, f"write failed: 0 of {len(view)} bytes were written")
        view = view[done:]
    if durable:
        sync_file(descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def buffer_length(data: Buffer) -> int:
    """Return the size of a buffer in bytes, with a faster path for ctypes arrays."""
    return ctypes.sizeof(data) if isinstance(data, ctypes.Array) else memoryview(data).nbytes


def transfer_vectored(
    call: Callable[..., int], descriptor: int, buffers: Sequence[Buffer], offset: int, total: int
) -> int:
    """Repeat a vectored call until all bytes are moved or the file ends; return the offset reached.

    The kernel accepts at most 1024 buffers per call.
    """
    end = offset + total
    for first in range(0, len(buffers), MOST_BUFFERS):
        rest: Sequence[Buffer] = buffers[first : first + MOST_BUFFERS]
        while rest:
            done = call(descriptor, rest, offset)
            offset += done
            if offset >= end:
                return offset
            rest = skip_bytes(rest, done)
            if done == 0 and rest:
                return offset
    return offset


def skip_bytes(buffers: Sequence[Buffer], done: int) -> Sequence[Buffer]:
    """Return the buffers without their first `done` bytes."""
    for i, each in enumerate(buffers):
        length = buffer_length(each)
        if done < length:
            return [memoryview(each).cast("B")[done:], *buffers[i + 1 :]]
        done -= length
    return []


def find_link(root: str, folder: str) -> str | None:
    """Return the first symbolic link among the folders from a root down to `folder`, or None.

    A link may lead out of the root.
    """
    full = root
    for part in folder.split("/") if folder else ():
        full = f"{full}/{part}"
        if os.path.islink(full) or _is_junction(full):
            return full
    return None


@contextmanager
def lock_folder(folder: str) -> Iterator[None]:
    """Hold a folder's lock; raise StorageError if another process does not release it.

    On a file system without locks, go on without one.
    """
    with try_lock_folder(folder, LOCK_PATIENCE) as locked:
        if not locked:
            raise StorageError(f"{folder}: locked by another process for more than {LOCK_PATIENCE:g} seconds")
        yield


def file_token(found: os.stat_result) -> str:
    """Return a token that changes whenever a file's content does."""
    return f"{found.st_ino:x}-{found.st_size:x}-{found.st_mtime_ns:x}"


def expect_token(url: URL, descriptor: int, token: str) -> None:
    """Raise StorageConflictError if an open file does not have this token."""
    if token != file_token(os.fstat(descriptor)):
        raise StorageConflictError(f"{url}: replaced during the read")


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


SHORT = 1000
"""Maximum entries of a folder that is read instead of looking for single names."""


def list_short_folder(folder: str) -> list[str] | None:
    """Return the names in a folder, those of folders with a trailing `/`; None if it is long or cannot be read."""
    try:
        with os.scandir(folder) as entries:
            found = [f"{each.name}/" if each.is_dir() else each.name for each in islice(entries, SHORT + 1)]
    except FileNotFoundError:
        return []
    except OSError:
        return None
    return found if len(found) <= SHORT else None


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
        self,
        url: URL,
        full: str,
        descriptor: int,
        size: int,
        folders: Folders,
        *,
        around_cache: bool,
        durable: bool,
        cached: CachedFile | None = None,
    ) -> None:
        self._url = url
        self._full = full
        self._descriptor = descriptor
        self._size = size
        self._folders = folders
        self._around_cache = around_cache
        self._durable = durable
        self._cached = cached
        self._closed = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        with map_exceptions(self._url):
            await in_thread(self._write, offset, buffers)

    def _expect_room(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Return the number of bytes in the buffers, or raise if they cannot be written here."""
        if self._closed:
            raise ValueError("the file is already finished or aborted")
        total = sum(map(buffer_length, buffers))
        if offset < 0 or offset + total > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{offset + total} do not fit a file of {self._size}")
        return total

    def _write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        total = self._expect_room(offset, buffers)
        whole = total % PAGE == 0 or offset + total == self._size
        if self._around_cache and whole and write_aligned(self._descriptor, offset, buffers, total):
            return
        if self._around_cache:
            stop_direct(self._descriptor)
            self._around_cache = False
        end = transfer_vectored(os.pwritev, self._descriptor, buffers, offset, total)
        if end < offset + total:
            raise OSError(errno.EIO, f"write failed: {end - offset} of {total} bytes at offset {offset} were written")
        if self._cached is not None:
            self._cached.wrote(self._descriptor, offset, total)
        elif self._durable and total >= MiB:
            start_writeback(self._descriptor, offset, total)

    async def finish(self) -> None:
        with map_exceptions(self._url):
            await in_thread(self._finish)

    def _finish(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        if self._durable:
            sync_file(self._descriptor)
        if self._cached is not None:
            self._cached.synced(self._descriptor)
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

    def __del__(self) -> None:
        """Close what an interruption has left open, such as of a call that has just created the file."""
        with contextlib.suppress(AttributeError, OSError):  # half created
            self._close()
