"""Table of the properties of fsspec's file systems, which implement fsspec's contract in different ways.

A file must appear in one step: by a rename, or when it is closed. File systems that are not in the table are read only.
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
    """Properties of a class of file systems."""

    move: Callable[[Any, str, str], None] | None = None
    """Function that renames a file in one step, over an existing one. If set, files get a temporary name, and folders
    are created before their files, and removed after them."""
    seen_when_closed: bool = False
    """True if a file is invisible until it is closed, and durable then. It is written under its final name."""
    coarse: bool = False
    """True if times have whole seconds only, so that a token needs the content as well."""
    quoted: bool = False
    """True if names must be quoted as in a URL."""
    cat: Callable[[Any, str, int | None, int | None], bytes] | None = None
    """Function that reads a range, if `cat_file` does not do that well."""
    remove: Callable[[Any, str], None] = lambda fs, path: fs.rm_file(path)
    remove_folder: Callable[[Any, str], None] = lambda fs, path: fs.rmdir(path)
    """Function that removes a folder if it is empty."""
    close: Callable[[Any], None] = lambda fs: None
    defaults: Callable[[RetryPolicy], Mapping[str, Any]] = lambda policy: {}
    """Default options."""
    takes: Sequence[str] | None = None
    """Callables whose parameters are options, too; None if unknown."""

    @property
    def writes(self) -> bool:
        """True if a file can appear in one step."""
        return self.move is not None or self.seen_when_closed


def _move_in_memory(fs: Any, source: str, path: str) -> None:
    fs.cp_file(source, path)  # `mv` would expand `*` and `[` in names
    fs.rm_file(source)


def _remove_folder_by_ssh(fs: Any, path: str) -> None:
    sync(fs.loop, fs._rmdir, path)  # `rmdir` of the base class does nothing


def _close_ssh(fs: Any) -> None:
    sync(fs.loop, fs._pool.close, timeout=2)
    sync(fs.loop, fs._stack.aclose, timeout=2)


def _ssh_defaults(policy: RetryPolicy) -> Mapping[str, Any]:
    seconds = policy.timeout  # ends abandoned calls
    return {
        "connect_timeout": seconds,
        "login_timeout": seconds,
        "keepalive_interval": max(seconds / 2, 1),
        "known_hosts": (),  # those of ~/.ssh: by default sshfs trusts any host
    }


def _close_zip(fs: Any) -> None:
    fs.close()
    fs.of.close()  # `close` leaves the archive's file open


def _move(fs: Any, source: str, path: str) -> None:
    fs.mv(source, path)


_OBJECT_STORE = Traits(seen_when_closed=True)
_KNOWN: Mapping[str, Traits] = {
    "fsspec.implementations.memory.MemoryFileSystem": Traits(move=_move_in_memory, takes=()),
    "fsspec.implementations.local.LocalFileSystem": Traits(move=_move, takes=()),
    "webdav4.fsspec.WebdavFileSystem": Traits(
        move=webdav.move_file,
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
    """Return the traits of a class, or of its nearest base class."""
    for base in cls.__mro__:
        known = _KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    return Traits()
