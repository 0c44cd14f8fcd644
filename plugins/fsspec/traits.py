"""What is known of fsspec's file systems, each of which keeps fsspec's contract in a way of its own.

A file must come to its name in one step: by a rename, or since it is seen only when it is closed. Of a file system that
is not in the table this is not known, and nothing is written to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsspec.asyn import sync

from snapshot.plugins.fsspec import webdav
from snapshot.plugins.network.retry import RetryPolicy


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a class of file systems."""

    move: Callable[[Any, str, str], None] | None = None
    """Renames a file in one step, over what is there: so files are written to a temporary name. Such file systems have
    real folders, to be made before their files, and removed after them."""
    seen_when_closed: bool = False
    """Files are seen, and durable, when they are closed, and not before: so they are written to their own name."""
    copies: bool = False
    """`cp_file` copies where the file is."""
    coarse: bool = False
    """Its times have seconds: two contents of one second and one length are told apart by looking at them."""
    quoted: bool = False
    """Names are given to it as they stand in a URL, and come back as they are."""
    cat: Callable[[Any, str, int | None, int | None], bytes] | None = None
    """Reads a range, where its own `cat_file` does that badly."""
    remove: Callable[[Any, str], None] = lambda fs, path: fs.rm_file(path)
    remove_folder: Callable[[Any, str], None] = lambda fs, path: fs.rmdir(path)
    """Removes a folder, if it is empty."""
    close: Callable[[Any], None] = lambda fs: None
    defaults: Callable[[RetryPolicy], Mapping[str, Any]] = lambda policy: {}
    """Options that it gets, unless the user says otherwise."""
    takes: Sequence[str] | None = None
    """Callables whose arguments are its options, too; None if it cannot be known what it takes."""

    @property
    def writes(self) -> bool:
        """Whether a file comes to its name in one step."""
        return self.move is not None or self.seen_when_closed


def _move_in_memory(fs: Any, source: str, path: str) -> None:
    fs.cp_file(source, path)  # its `mv` would take `*` and `[` in names for patterns
    fs.rm_file(source)


def _remove_folder_by_ssh(fs: Any, path: str) -> None:
    sync(fs.loop, fs._rmdir, path)  # its `rmdir` is the one of all file systems, which does nothing


def _close_ssh(fs: Any) -> None:
    sync(fs.loop, fs._pool.close, timeout=2)
    sync(fs.loop, fs._stack.aclose, timeout=2)


def _ssh_defaults(policy: RetryPolicy) -> Mapping[str, Any]:
    seconds = policy.timeout  # an attempt that is left behind ends by itself, some time
    return {
        "connect_timeout": seconds,
        "login_timeout": seconds,
        "keepalive_interval": max(seconds / 2, 1),
        "known_hosts": (),  # those of ~/.ssh: sshfs would trust any host that answers
    }


def _close_zip(fs: Any) -> None:
    fs.close()
    fs.of.close()  # its own `close` leaves the file open that the archive is in


def _move(fs: Any, source: str, path: str) -> None:
    fs.mv(source, path)


_OBJECT_STORE = Traits(seen_when_closed=True)
_KNOWN: Mapping[str, Traits] = {
    "fsspec.implementations.memory.MemoryFileSystem": Traits(move=_move_in_memory, copies=True, takes=()),
    "fsspec.implementations.local.LocalFileSystem": Traits(move=_move, takes=()),
    "webdav4.fsspec.WebdavFileSystem": Traits(
        move=webdav.move_file,
        copies=True,
        coarse=True,
        quoted=True,
        cat=webdav.read_range,
        remove=webdav.remove_file,
        remove_folder=webdav.remove_folder,
        close=lambda fs: fs.client.http.close(),
        defaults=lambda policy: {"retry": False, "timeout": policy.timeout},
        takes=("webdav4.client:Client", "httpx:Client"),
    ),
    "sshfs.spec.SSHFileSystem": Traits(
        move=_move,
        coarse=True,
        remove_folder=_remove_folder_by_ssh,
        close=_close_ssh,
        defaults=_ssh_defaults,
        takes=("asyncssh:connect", "asyncssh:SSHClientConnectionOptions.prepare"),
    ),
    "fsspec.implementations.sftp.SFTPFileSystem": Traits(move=_move, coarse=True, close=lambda fs: fs.client.close()),
    "fsspec.implementations.ftp.FTPFileSystem": Traits(move=_move, coarse=True),
    "s3fs.core.S3FileSystem": _OBJECT_STORE,
    "gcsfs.core.GCSFileSystem": _OBJECT_STORE,
    "adlfs.spec.AzureBlobFileSystem": _OBJECT_STORE,
    "ossfs.base.BaseOSSFileSystem": _OBJECT_STORE,
    "huggingface_hub.hf_file_system.HfFileSystem": _OBJECT_STORE,
    "fsspec.implementations.zip.ZipFileSystem": Traits(close=_close_zip, takes=()),
    "fsspec.implementations.cached.CachingFileSystem": Traits(takes=()),
    "fsspec.implementations.dirfs.DirFileSystem": Traits(takes=()),
}


def traits_of(cls: type) -> Traits:
    """Return what is known of a class, or of the nearest that it derives from."""
    for base in cls.__mro__:
        known = _KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    return Traits()
