"""The library on another platform: `SNAPSHOT_TEST_PLATFORM=win32 python`, with this folder in PYTHONPATH.

Modules of the library import views of `os`, `signal`, `ctypes` and other modules, without what macOS or Windows lack.
All other modules, and so the tests, import the real ones. Child processes do the same.
"""

import builtins
import contextlib
import errno
import importlib
import importlib.abc
import importlib.util
import io
import os
import sys
import types

PLATFORM = os.environ.get("SNAPSHOT_TEST_PLATFORM", "")
GONE = {
    "darwin": {
        "os": "posix_fadvise posix_fallocate memfd_create copy_file_range sched_getaffinity fdatasync O_DIRECT "
        "RWF_NOWAIT MFD_CLOEXEC eventfd splice",
        "signal": "sigwaitinfo sigtimedwait",
        "mmap": "MADV_HUGEPAGE",
    },
    "win32": {
        "os": "posix_fadvise posix_fallocate memfd_create copy_file_range sched_getaffinity fdatasync O_DIRECT "
        "RWF_NOWAIT MFD_CLOEXEC eventfd splice preadv pwritev pread pwrite statvfs fchmod O_CLOEXEC O_NOFOLLOW "
        "O_DIRECTORY O_NONBLOCK register_at_fork sysconf sysconf_names geteuid getuid nice getpriority setpriority "
        "PRIO_PROCESS uname fork killpg setsid getpgid mkfifo chown",
        "signal": "SIGHUP SIGUSR1 SIGUSR2 SIGKILL SIGSTOP SIGPIPE pthread_sigmask sigwaitinfo sigtimedwait",
        "socket": "AF_UNIX socketpair SCM_RIGHTS SO_PEERCRED send_fds recv_fds",
        "mmap": "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MADV_HUGEPAGE PROT_READ PROT_WRITE",
        "fcntl": None,
        "resource": None,
        "termios": None,
        "pwd": None,
    },
}
"""Names that modules lack, and modules that a platform lacks."""
HIDDEN = ("/proc/", "/sys/", "/dev/shm")
FULL_SYNC = 51


class View(types.ModuleType):
    """A module without some of its names, and with substitutes of others."""

    def __init__(self, real, gone, substitutes):
        super().__init__(real.__name__)
        self.__dict__.update(substitutes, _real=real, _gone=frozenset(gone))

    def __getattr__(self, name):
        if name in self._gone:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on {PLATFORM}")
        return getattr(self._real, name)


class Disguised(importlib.abc.MetaPathFinder):
    """Shows one module of the library the name of the platform."""

    def find_spec(self, name, path=None, target=None):
        if name != "snapshot.io.system":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def disguised(module):
            before, sys.platform = sys.platform, PLATFORM
            try:
                run(module)
            finally:
                sys.platform = before

        spec.loader.exec_module = disguised
        return spec


def is_library(depth=2):
    return sys._getframe(depth).f_globals.get("__name__", "").split(".")[0] == "snapshot"


def show(views):
    """Let the library import the views."""
    real_import, real_by_name = builtins.__import__, importlib.import_module

    def import_(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002 - the names of __import__
        if not level and name in views and (globals or {}).get("__name__", "").split(".")[0] == "snapshot":
            return found(name)
        return real_import(name, globals, locals, fromlist, level)

    def by_name(name, package=None):
        return found(name) if name in views and is_library() else real_by_name(name, package)

    def found(name):
        if views[name] is None:
            raise ModuleNotFoundError(f"No module named {name!r} on {PLATFORM}", name=name)
        return views[name]

    builtins.__import__, importlib.import_module = import_, by_name


def hide_files():
    """Nothing is in /proc and /sys for the library."""
    real = io.open

    def opened(file, *arguments, **options):
        if isinstance(file, (str, os.PathLike)) and os.fspath(file).startswith(HIDDEN) and is_library():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), file)
        return real(file, *arguments, **options)

    builtins.open = opened


def windows_os():
    """Calls that Windows has, but with other rules."""

    def opened(path, flags, *arguments, **options):
        if os.path.isdir(path):  # Windows opens no folders
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return os.open(path, flags, *arguments, **options)

    def fsync(descriptor):
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.fsync(descriptor)

    def expect_closed(*paths):
        opened = set()
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                opened.add(os.readlink(f"/proc/self/fd/{each}"))
        with open("/proc/self/maps") as lines:
            opened |= {line.rstrip("\n").split(" ", 5)[-1].strip() for line in lines}
        for each in paths:
            if os.path.realpath(os.fspath(each)) in opened:
                raise PermissionError(errno.EACCES, "The file is used by another process", each)

    def unlink(path):
        expect_closed(path)
        os.unlink(path)

    def replace(source, target):
        expect_closed(source, target)
        os.replace(source, target)

    def rename(source, target):
        expect_closed(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        os.rename(source, target)

    return {
        "open": opened, "fsync": fsync, "unlink": unlink, "remove": unlink, "replace": replace, "rename": rename,
        "supports_follow_symlinks": os.supports_follow_symlinks - {os.link}, "O_NOINHERIT": os.O_CLOEXEC, "O_BINARY": 0,
    }  # fmt: skip


def windows_ctypes():
    import ctypes

    def load(name, *arguments, **options):
        if name is None:
            raise TypeError("argument 1 must be str, not None")
        return ctypes.CDLL(name, *arguments, **options)

    return {"CDLL": load, "PyDLL": load}


def windows_locks():
    """Locks of byte ranges, by those of this system."""
    import fcntl

    def locking(descriptor, mode, nbytes):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(errno.EACCES, "Permission denied") from error

    return {"LK_NBLCK": 2, "locking": locking}


def macos_fcntl():
    import fcntl

    def call(descriptor, command, *arguments):
        return os.fsync(descriptor) or 0 if command == FULL_SYNC else fcntl.fcntl(descriptor, command, *arguments)

    return {"fcntl": call, "F_FULLFSYNC": FULL_SYNC}


def disguise():
    substitutes = {"fcntl": macos_fcntl()} if PLATFORM == "darwin" else {"os": windows_os(), "ctypes": windows_ctypes()}
    views = dict.fromkeys((*GONE[PLATFORM], *substitutes))
    for name in views:
        gone = GONE[PLATFORM].get(name, "")
        if gone is not None:
            views[name] = View(importlib.import_module(name), gone.split(), substitutes.get(name, {}))
    if PLATFORM == "win32":
        views["msvcrt"] = View(types.ModuleType("msvcrt"), (), windows_locks())
    show(views)
    hide_files()
    sys.meta_path.insert(0, Disguised())


if PLATFORM:
    disguise()
