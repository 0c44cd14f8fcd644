"""System calls that macOS or Windows lack, state that is renewed after a fork, signals, and the garbage collector."""

from __future__ import annotations

import ctypes
import errno
import gc
import hashlib
import importlib
import mmap
import os
import platform
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from snapshot.errors import SnapshotError

# System calls that macOS or Windows lack, and the substitutes there.

PLATFORM = sys.platform
WINDOWS = PLATFORM == "win32"
"""Without syncs of folders, deletion of open files, and positional reads."""
VECTORED = all(hasattr(os, name) for name in ("preadv", "pwritev", "RWF_NOWAIT"))
"""True if this platform has the vectored calls for bulk data. Others use aiofiles: see storages/file."""


def find_module(name: str) -> Any:
    """Return a module of the standard library, or None if this platform has none."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


fcntl = find_module("fcntl")
msvcrt = find_module("msvcrt")
resource = find_module("resource")
termios = find_module("termios")

CLOEXEC: int = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOINHERIT", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that is opened: child processes do not inherit it, and Windows does not translate line ends."""
NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
MOST_BUFFERS: int = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in getattr(os, "sysconf_names", ()) else 16
"""Maximum buffers of a vectored call."""
NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
"""Errors of file systems without hard links."""
if WINDOWS:
    NO_LINKS.add(errno.EINVAL)
_UNSUPPORTED = (errno.EINVAL, errno.ENOTTY, errno.EOPNOTSUPP, errno.ENOTSUP)
_POLL = 0.02
TRIES = 50
"""Attempts on Windows to delete or rename a file that another process has open."""


class Libc(NamedTuple):
    """Functions of the C library that Python does not offer. Each is None if the platform has none."""

    madvise: Any
    sync_file_range: Any
    fallocate: Any
    mincore: Any
    syscall: Any
    renameat2: Any


_LINKS_LINKS = os.link in os.supports_follow_symlinks


def _open_libc() -> Libc:
    if not PLATFORM.startswith("linux"):  # the constants of their arguments are those of Linux
        return Libc(*[None] * len(Libc._fields))
    library = ctypes.CDLL(None, use_errno=True)
    return Libc(*(getattr(library, name, None) for name in Libc._fields))


libc = _open_libc()


def expect_linux(what: str) -> None:
    """Raise on another system."""
    if not PLATFORM.startswith("linux"):
        raise SnapshotError(f"{what}: needs Linux, got {PLATFORM}")


_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
"""The number of the system call `ioprio_set`, by machine."""


def lower_priority(nice: int, disk: int) -> None:
    """Let other processes go first on the CPU and on disks, as far as the system allows. `disk`: for `ioprio_set`."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        with suppress(AttributeError):
            libc.syscall(number, 1, 0, disk)


def find_signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return those signals that this platform has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def sync_file(descriptor: int) -> None:
    """Flush a file to disk. On macOS, `fsync` does not empty the disk's own cache; F_FULLFSYNC does."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:  # network file systems refuse it
            if error.errno not in _UNSUPPORTED:
                raise
    os.fsync(descriptor)


def sync_path(path: str) -> None:
    """Flush a file to disk that this process has not opened for writing, as Windows requires."""
    descriptor = os.open(path, (os.O_RDWR if WINDOWS else os.O_RDONLY) | CLOEXEC)
    try:
        sync_file(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: str) -> None:
    """Flush the names in a folder to disk, if the file system can. Windows cannot."""
    if WINDOWS:
        os.stat(folder)  # an error if it is missing, as elsewhere
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | CLOEXEC)
    try:
        sync_file(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # this file system cannot sync folders
            raise
    finally:
        os.close(descriptor)


def allocate(descriptor: int, nbytes: int) -> None:
    """Make a file `nbytes` long with all its disk space, so that writing to a mapping of it cannot fail."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    zeros = bytes(min(nbytes, 1 << 20))
    done = os.lseek(descriptor, 0, os.SEEK_SET)
    while done < nbytes:
        done += os.write(descriptor, memoryview(zeros)[: nbytes - done])


@contextmanager
def try_lock_folder(folder: str, patience: float) -> Iterator[bool]:
    """Lock a folder against other processes. Yield False if another process holds the lock for `patience` seconds.

    On a file system without locks, go on without one. Windows does not open folders, so a file in the folder for
    temporary files is locked in its place.
    """
    path = folder
    if fcntl is None:
        name = hashlib.sha256(os.path.normcase(os.path.realpath(folder)).encode()).hexdigest()[:32]
        path = os.path.join(tempfile.gettempdir(), f"snapshot-{name}.lock")
    descriptor = os.open(path, (os.O_RDONLY if fcntl else os.O_RDWR | os.O_CREAT) | CLOEXEC, 0o666)
    deadline = time.monotonic() + patience
    try:
        while not (locked := _try_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(_POLL)
        yield locked
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
    except OSError as error:  # or this file system has no locks
        return not isinstance(error, BlockingIOError if fcntl else PermissionError)
    return True


def link(source: str, target: str) -> None:
    """Create a hard link. A symbolic link is not followed, where the platform has a choice."""
    if _LINKS_LINKS:
        os.link(source, target, follow_symlinks=False)
    else:
        _patiently(lambda: os.link(source, target))


def replace_file(source: str, target: str) -> None:
    """Rename a file, over another one if there is one. Windows refuses that while a process reads one of them."""
    _patiently(lambda: os.replace(source, target))


def store_file(path: str, data: bytes, *, durable: bool = False) -> None:
    """Write a file aside, and rename it, so that a reader finds the old bytes or the new ones."""
    aside = f"{path}.{secrets.token_hex(4)}.tmp"
    try:
        with open(aside, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                sync_file(file.fileno())
        replace_file(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise


def remove_file(path: str) -> None:
    """Delete a file. Windows refuses that while a process has it open."""
    _patiently(lambda: os.unlink(path))


def _patiently(call: Callable[[], None]) -> None:
    for left in reversed(range(TRIES)):
        try:
            call()
            break
        except PermissionError:
            if not WINDOWS or not left:
                raise
            time.sleep(_POLL)


def map_memory(nbytes: int) -> mmap.mmap:
    """Return new memory, whole pages. A forked child gets a copy of it."""
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_processes() -> int:
    """Return the number of this job's processes on this host, as set by the launcher."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() else 1


# Process-wide state: created on first use, renewed in a forked child, and reset by tests.
#
# All mutable state of the library is held in a `PerProcess`, so that one hook handles forks and tests can reset it.
# Exceptions are values that a fork inherits unchanged: registered plugins and event handlers, counters, and caches of
# pure functions.

T = TypeVar("T")
_all: list[PerProcess[Any]] = []


class PerProcess(Generic[T]):
    """One value per process.

    Args:
        make: Creates the value, on first use.
        in_child: Called in a forked child with the parent's value, to release the parent's resources. Its result is the
            child's value; None creates a new one on first use.

    >>> numbers = PerProcess(list)
    >>> numbers.get().append(3)
    >>> numbers.get()
    [3]
    >>> numbers.reset()
    >>> numbers.made() is None
    True
    """

    def __init__(self, make: Callable[[], T], in_child: Callable[[T], T | None] | None = None) -> None:
        self._make = make
        self._in_child = in_child
        self._value: T | None = None
        self._lock = threading.RLock()
        _all.append(self)

    def get(self) -> T:
        """Return the value; create it if there is none."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._make()
        return value

    def made(self) -> T | None:
        """Return the value, or None if it does not exist yet."""
        return self._value

    def reset(self) -> None:
        """Discard the value: the next `get` creates a new one."""
        self._value = None

    def renew(self) -> None:
        """Give a forked child its own value."""
        self._lock = threading.RLock()  # a thread of the parent may have held the lock
        value, self._value = self._value, None
        if value is not None and self._in_child is not None:
            self._value = self._in_child(value)


def drop_oldest(kept: dict[Any, Any], most: int) -> None:
    """Drop the first items of a dictionary with more than `most`, which other threads may change at the same time.

    >>> numbers = {1: "a", 2: "b", 3: "c"}
    >>> drop_oldest(numbers, 2)
    >>> numbers
    {2: 'b', 3: 'c'}
    """
    if len(kept) > most:
        for key in list(kept)[:-most]:
            kept.pop(key, None)


def _after_fork() -> None:
    for each in _all:
        each.renew()


if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_after_fork)


# Signals that end a command after its clean-up.
#
# A signal becomes an exception, which unwinds the stack. Signals are held back between the creation of a process or
# folder and its registration for removal. Only the first signal counts, so that a second Ctrl-C does not interrupt
# the clean-up.

SIGNALS = find_signals("SIGINT", "SIGTERM", "SIGHUP")


class _State:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.held = 0
        self.pending: int | None = None
        self.struck = False

    def handle(self, number: int, _frame: object) -> None:
        if self.struck:
            return
        self.pending = number
        if not self.held:
            self.strike()

    def strike(self) -> None:
        number, self.pending = self.pending, None
        if number is None:
            return
        self.struck = True
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


_state = _State()


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """In this context, the first SIGINT, SIGTERM or SIGHUP unwinds the stack, and later ones are ignored."""
    if threading.current_thread() is not threading.main_thread():  # signal handlers exist in the main thread only
        yield
        return
    _state.reset()  # an earlier use may have received a signal
    before = {number: signal.signal(number, _state.handle) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Hold signals back in this context, and deliver them at its end."""
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    if not _state.held:
        _state.strike()


# A pause of garbage collection while many small objects are created.
#
# Ten thousand entries trigger a full collection. It takes longer than all other work on the entries, and finds no
# garbage.


class _Pauses:
    """The number of contexts inside `gc_paused`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_enabled = False

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._inside == 0 and self._was_enabled:
                gc.enable()

    def forked(self) -> None:
        """Enable collection in a forked child: the threads in a context do not exist there."""
        if self._inside and self._was_enabled:
            gc.enable()


_pauses = PerProcess(_Pauses, _Pauses.forked)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause automatic collection. Contexts may be nested, and entered by several threads."""
    _pauses.get().enter()
    try:
        yield
    finally:
        _pauses.get().leave()  # a forked child has its own


@contextmanager
def without_new_folders(folder: Path) -> Iterator[None]:
    """Remove a folder and its parents afterwards, as far as they did not exist before."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    finally:
        with suppress(OSError):  # another process has written to it meanwhile
            for made in missing:
                made.rmdir()


def file_system(path: Path) -> str:
    """Return the type of the file system at a path: that of the deepest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(point, kind) for point, kind in mounts if path.is_relative_to(point.encode().decode("unicode_escape"))]
    return max(above, key=lambda mount: len(mount[0]), default=("", "unknown"))[1]
