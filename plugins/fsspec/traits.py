"""What is known of fsspec's file systems, each of which keeps fsspec's contract in its own way: how a file comes to its
name in one step, what is durable, what they take. What is not known is not promised.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import pkgutil
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import fsspec
from fsspec.core import _un_chain
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from snapshot.plugins.attempts import RetryPolicy


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known of a class of file systems."""

    write: bool = True
    move: Callable[[Any, str, str], None] | None = None
    """Gives a file another name in one step, over what is there: so files are written to a temporary name."""
    whole: bool = False
    """What is written is seen when it is closed, and not before: so files are written to their own name."""
    durable: bool = False
    folders: bool = False
    """There are real folders, to be made before their files, and removed after them."""
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
    """Remove a folder, if it is empty."""
    close: Callable[[Any], None] = lambda fs: None
    defaults: Callable[[RetryPolicy], Mapping[str, Any]] = lambda patience: {}
    takes: Sequence[str] | None = None
    """Callables whose arguments are its options, too; None where nobody can say what it takes."""


def _move_in_memory(fs: Any, source: str, path: str) -> None:
    fs.cp_file(source, path)  # its `mv` would take `*` and `[` in names for patterns
    fs.rm_file(source)


def _move_by_webdav(fs: Any, source: str, path: str) -> None:
    fs.client.move(source, path, overwrite=True)  # its own `mv` copies a file, and removes it then


def _cat_by_webdav(fs: Any, path: str, start: int | None, end: int | None) -> bytes:
    """One GET, where its own files make three requests, and take a name for what stands in a URL."""
    headers = {"Accept-Encoding": "identity"}
    if start is not None and end is not None:
        headers["Range"] = f"bytes={start}-{end - 1}"
    with fs.client.http.stream("GET", fs.client.join_url(path), headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        at = start or 0 if answer.status_code == 206 else 0  # a server that knows no ranges sends all
        found = bytearray()
        for chunk in answer.iter_bytes():
            found += chunk[max((start or 0) - at, 0) :]
            at += len(chunk)
            if end is not None and at >= end:
                break
        return bytes(found if end is None else found[: end - (start or 0)])


def _remove_by_webdav(fs: Any, path: str) -> None:
    if fs.info(path)["type"] == "directory":  # DELETE would take all that is in it
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    fs.rm_file(path)


def _remove_folder_by_webdav(fs: Any, path: str) -> None:
    """DELETE takes all that is in a folder: what comes into it after one has looked must not be lost."""
    if fs.ls(path, detail=False):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    folder, _, name = path.rpartition("/")
    aside = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
    fs.client.move(path, aside)  # from here on nobody puts anything into it
    late = fs.ls(aside, detail=False)
    if late:
        fs.makedirs(path, exist_ok=True)
        for each in late:
            name = quote(each.rstrip("/").rpartition("/")[2])
            fs.client.move(f"{aside}/{name}", f"{path}/{name}")
    fs.rm_file(aside)


def _remove_folder_by_ssh(fs: Any, path: str) -> None:
    fsspec.asyn.sync(fs.loop, fs._rmdir, path)  # its `rmdir` is the one of all file systems, which does nothing


def _close_ssh(fs: Any) -> None:
    fsspec.asyn.sync(fs.loop, fs._pool.close, timeout=2)
    fsspec.asyn.sync(fs.loop, fs._stack.aclose, timeout=2)


def _close_zip(fs: Any) -> None:
    fs.close()
    fs.of.close()  # its own `close` leaves the file open that the archive is in


def _patience_of_webdav(patience: RetryPolicy) -> Mapping[str, Any]:
    return {"retry": False, "timeout": patience.timeout}


def _patience_of_ssh(patience: RetryPolicy) -> Mapping[str, Any]:
    seconds = patience.timeout  # an attempt that is left behind ends by itself, some time
    return {
        "connect_timeout": seconds,
        "login_timeout": seconds,
        "keepalive_interval": max(seconds / 2, 1),
        "known_hosts": (),  # those of ~/.ssh: sshfs would trust any host that answers
    }


def _mv(fs: Any, source: str, path: str) -> None:
    fs.mv(source, path)


_OBJECTS = Traits(whole=True, durable=True)
_READ_ONLY = Traits(write=False)
_KNOWN: Mapping[str, Traits] = {
    "fsspec.implementations.memory.MemoryFileSystem": Traits(
        move=_move_in_memory, folders=True, copies=True, takes=()
    ),
    "fsspec.implementations.local.LocalFileSystem": Traits(move=_mv, folders=True, takes=()),
    "webdav4.fsspec.WebdavFileSystem": Traits(
        move=_move_by_webdav, folders=True, copies=True, coarse=True, quoted=True, cat=_cat_by_webdav,
        remove=_remove_by_webdav, remove_folder=_remove_folder_by_webdav,
        close=lambda fs: fs.client.http.close(), defaults=_patience_of_webdav,
        takes=("webdav4.client:Client", "httpx:Client"),
    ),
    "sshfs.spec.SSHFileSystem": Traits(
        move=_mv, folders=True, coarse=True,
        remove_folder=_remove_folder_by_ssh, close=_close_ssh, defaults=_patience_of_ssh,
        takes=("asyncssh:connect", "asyncssh:SSHClientConnectionOptions.prepare"),
    ),
    "fsspec.implementations.sftp.SFTPFileSystem": Traits(
        move=_mv, folders=True, coarse=True, close=lambda fs: fs.client.close()
    ),
    "fsspec.implementations.ftp.FTPFileSystem": Traits(move=_mv, folders=True, coarse=True),
    "s3fs.core.S3FileSystem": _OBJECTS,
    "gcsfs.core.GCSFileSystem": _OBJECTS,
    "adlfs.spec.AzureBlobFileSystem": _OBJECTS,
    "ossfs.base.BaseOSSFileSystem": _OBJECTS,
    "huggingface_hub.hf_file_system.HfFileSystem": _OBJECTS,
    "fsspec.implementations.zip.ZipFileSystem": Traits(write=False, close=_close_zip, takes=()),
    "fsspec.implementations.cached.CachingFileSystem": Traits(write=False, takes=()),
    "fsspec.implementations.dirfs.DirFileSystem": Traits(takes=()),
    "fsspec.archive.AbstractArchiveFileSystem": _READ_ONLY,
    "fsspec.implementations.http.HTTPFileSystem": _READ_ONLY,
    "fsspec.implementations.http_sync.HTTPFileSystem": _READ_ONLY,
    "fsspec.implementations.reference.ReferenceFileSystem": _READ_ONLY,
    "fsspec.implementations.github.GithubFileSystem": _READ_ONLY,
    "fsspec.implementations.gist.GistFileSystem": _READ_ONLY,
    "fsspec.implementations.git.GitFileSystem": _READ_ONLY,
    "fsspec.implementations.data.DataFileSystem": _READ_ONLY,
}  # fmt: skip


def traits_of(cls: type) -> Traits:
    """What is known of a class, or of the nearest that it derives from."""
    for base in cls.__mro__:
        known = _KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if known is not None:
            return known
    return Traits()


@dataclass(frozen=True, slots=True)
class Link:
    """One file system of a chained URL."""

    protocol: str
    cls: type[AbstractFileSystem]
    path: str
    """What lies in front of our paths there."""
    options: Mapping[str, Any]


def chain(text: str, options: Mapping[str, Any], patience: RetryPolicy) -> list[Link]:
    """The file systems that a URL names, the outermost first."""
    parts = text.split("::")
    links: list[Link] = []
    for part, (path, protocol, given) in reversed(list(zip(parts, _un_chain(text, _copied(options)), strict=True))):
        cls = get_filesystem_class(protocol)
        if issubclass(cls, ChainedFileSystem) and not part.partition("://")[2]:  # a wrapper without a path of its own
            path = links[-1].path if links and not issubclass(cls, DirFileSystem) else ""  # noqa: PLW2901
        links.append(Link(protocol, cls, path or "", {**traits_of(cls).defaults(patience), **given}))
    return links[::-1]


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with dicts of our own: fsspec changes them."""
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in options.items()}


def unknown_options(links: Sequence[Link], options: Mapping[str, Any]) -> list[str]:
    """The options that none of the file systems takes, as far as that can be known of them."""
    own = {name: value for name, value in options.items() if name not in {link.protocol for link in links}}
    found = []
    for link in links:
        given = {**(options.get(link.protocol) or {}), **(own if link is links[0] else {})}
        accepted = _accepted(link.cls)
        if accepted is not None:
            found += [name for name in given if name not in accepted]
    return found


def _accepted(cls: type) -> set[str] | None:
    """The options that a class takes. None if some are passed on to where we cannot follow."""
    names = set(inspect.signature(AbstractFileSystem.__init__).parameters)
    names |= {"use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache", "protocol"}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            names.update(each.name for each in parameters if each.kind is not each.VAR_KEYWORD)
            if not any(each.kind is each.VAR_KEYWORD for each in parameters):
                return names
        if base is AbstractFileSystem:
            break
    takes = traits_of(cls).takes
    if takes is None:
        return None
    for text in takes:
        names.update(inspect.signature(pkgutil.resolve_name(text)).parameters)
    return names


def traits(links: Sequence[Link]) -> Traits:
    """What is known of a chain: a folder of another is as that is."""
    return next((traits_of(link.cls) for link in links if not issubclass(link.cls, DirFileSystem)), Traits())


@dataclass(slots=True)
class System:
    """The file systems of a URL, made; used by the threads of one lane."""

    outer: Any
    """Whole files are read here."""
    inner: Any
    """All else is asked here: the same, or behind a cache, which would not see what others have changed."""
    root: str
    ranged: bool
    """Whether its `cat_file` says that it takes a range."""
    known: Traits
    folders: set[str] = field(default_factory=set)
    """Those that have been made."""

    def full(self, path: str) -> str:
        """A file's name there, as it is asked for."""
        full = self.plain(path)
        return quote(full) if self.known.quoted else full

    def cat(self, path: str, start: int | None = None, end: int | None = None, *, cached: bool = False) -> Any:
        """A file's bytes, or a range of them."""
        fs, full = self.outer if cached else self.inner, self.full(path)
        if self.known.cat is not None:
            return self.known.cat(fs, full, start, end)
        return fs.cat_file(full, start=start, end=end) if start is not None else fs.cat_file(full)

    def plain(self, path: str) -> str:
        """A file's name there."""
        return f"{self.root}/{path}".rstrip("/") if self.root else path

    def in_folder(self, path: str, action: Callable[[str], Any]) -> Any:
        """Do something that makes a file, which needs its folder."""
        full = self.full(path)
        folder = full.rpartition("/")[0]
        if not self.known.folders or not folder:
            return action(full)
        if folder in self.folders:
            try:
                return action(full)
            except Exception as error:
                if not (isinstance(error, FileNotFoundError) or type(error).__name__ == "ResourceConflict"):
                    raise
        self.inner.makedirs(folder, exist_ok=True)
        self.folders.add(folder)
        return action(full)

    def remove_folders(self, path: str) -> None:
        """Remove the folders that a file was in, if they are empty, up to the root, and the root."""
        while path:
            path = path.rpartition("/")[0]
            self.folders.discard(self.full(path))
            if not self.full(path).strip("/"):
                return
            self.known.remove_folder(self.inner, self.full(path))


def connect(links: Sequence[Link], known: Traits) -> System:
    """Make the file systems, as `fsspec.core.url_to_fs` does, but without its caches."""
    made: dict[str, Any] = {}
    for number, link in enumerate(reversed(links)):
        options = {**link.options, **made, "skip_instance_cache": True}
        made = {"target_options": options, "target_protocol": link.protocol, "fo": link.path}
        if number == len(links) - 1:
            outer = link.cls(**options)
    root = links[0].path.rstrip("/")
    for each in _nested(outer):
        if hasattr(each, "dircache"):
            each.dircache = DirCache(use_listings_cache=False)  # not all of them take the option
    while isinstance(outer, DirFileSystem):
        root = f"{outer.path}/{root}".rstrip("/")
        outer = outer.fs
    inner = outer.fs if isinstance(outer, CachingFileSystem) else outer
    name = "_cat_file" if outer.async_impl else "cat_file"
    method = getattr(type(outer), name)
    arguments = inspect.signature(method).parameters
    ranged = known.cat is not None
    ranged |= outer is inner and {"start", "end"} <= set(arguments) and method is not AbstractFileSystem.cat_file
    return System(outer, inner, root, ranged, known)


def _nested(fs: Any) -> Iterator[Any]:
    while isinstance(fs, AbstractFileSystem):
        yield fs
        fs = vars(fs).get("fs")


def disconnect(system: System) -> None:
    """Close the connections, where it is known how; others are when the objects are gone."""
    for each in _nested(system.outer):
        with contextlib.suppress(Exception):  # one that is broken cannot be closed, either
            traits_of(type(each)).close(each)


def forget(handle: Any) -> None:
    """See to it that the garbage collector does not make a file whole that is given up. Asks nothing of a server."""
    if isinstance(handle, AbstractBufferedFile):
        handle.closed = True
    elif isinstance(handle, tempfile.SpooledTemporaryFile):
        tempfile.SpooledTemporaryFile.close(handle)  # webdav4's own would send it


def discard(handle: Any) -> None:
    """Let go of a file that is written, without making it whole."""
    with contextlib.suppress(Exception):
        handle.discard()
    if not isinstance(handle, AbstractBufferedFile):
        with contextlib.suppress(Exception):
            handle.close()
