"""Further names for finished files: a reflink, a hard link, or a copy by the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
from collections.abc import Callable
from functools import partial

from snapshot.errors import SnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.plugins.file.descriptors import file_token, open_regular
from snapshot.plugins.file.folders import Folders
from snapshot.storage import URL, in_thread, map_exceptions
from snapshot.system_calls import CLOEXEC, NOFOLLOW, WINDOWS, fcntl, link, sync_file, sync_path

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
