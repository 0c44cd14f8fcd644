"""File systems of a chained URL, with their properties and replacements for unsafe calls."""

from __future__ import annotations

import contextlib
import errno
import inspect
import pkgutil
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fsspec.asyn import sync
from fsspec.core import _un_chain
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from snapshot.plugins.network.retry import RetryPolicy

# WebDAV by webdav4, with safe replacements for its rename, read and remove.


def move_file(fs: Any, source: str, path: str) -> None:
    """Rename a file in one step; webdav4's `mv` copies and removes it."""
    fs.client.move(source, path, overwrite=True)


def read_range(fs: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Read a range in one GET; webdav4's own read needs three requests, and does not quote the name."""
    headers = {"Accept-Encoding": "identity"}
    if start is not None and end is not None:
        headers["Range"] = f"bytes={start}-{end - 1}"
    with fs.client.http.stream("GET", fs.client.join_url(path), headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        at = start or 0 if answer.status_code == 206 else 0  # a server without ranges sends the whole file
        found = bytearray()
        for chunk in answer.iter_bytes():
            found += chunk[max((start or 0) - at, 0) :]
            at += len(chunk)
            if end is not None and at >= end:
                break
        return bytes(found if end is None else found[: end - (start or 0)])


def remove_file(fs: Any, path: str) -> None:
    """Remove a file, but never a folder: DELETE would remove its contents, too."""
    if fs.info(path)["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    fs.rm_file(path)


def remove_folder(fs: Any, path: str) -> None:
    """Remove an empty folder. Rename it first: DELETE would also remove a file that is added after the check."""
    if fs.ls(path, detail=False):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    folder, _, name = path.rpartition("/")
    aside = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
    fs.client.move(path, aside)  # from here on no process adds a file
    late = fs.ls(aside, detail=False)
    if late:
        fs.makedirs(path, exist_ok=True)
        for each in late:
            name = quote(each.rstrip("/").rpartition("/")[2])
            fs.client.move(f"{aside}/{name}", f"{path}/{name}")
    fs.rm_file(aside)


# Table of the properties of fsspec's file systems, which implement fsspec's contract in different ways.
#
# A file must appear in one step: by a rename, or when it is closed. File systems that are not in the table are read
# only.


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
        move=move_file,
        coarse=True,
        quoted=True,
        cat=read_range,
        remove=remove_file,
        remove_folder=remove_folder,
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


# File systems of a chained URL: parse the URL, check the options, connect and close.

_WRAPPERS = (CachingFileSystem, DirFileSystem)
"""File systems that wrap another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """One file system of a chained URL."""

    protocol: str
    cls: type[AbstractFileSystem]
    path: str
    """Prefix of the storage's paths."""
    options: Mapping[str, Any]


def parse_chain(text: str, options: Mapping[str, Any], retry_policy: RetryPolicy) -> list[Link]:
    """Return the file systems of a URL, the outermost first."""
    parts = text.split("::")
    links: list[Link] = []
    for part, (path, protocol, given) in reversed(list(zip(parts, _un_chain(text, _copied(options)), strict=True))):
        cls = get_filesystem_class(protocol)
        if issubclass(cls, _WRAPPERS) and not part.partition("://")[2]:  # a wrapper without a path
            path = links[-1].path if links and not issubclass(cls, DirFileSystem) else ""  # noqa: PLW2901
        links.append(Link(protocol, cls, path or "", {**traits_of(cls).defaults(retry_policy), **given}))
    return links[::-1]


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options, since fsspec changes them."""
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in options.items()}


def unknown_options(links: Sequence[Link], options: Mapping[str, Any]) -> list[str]:
    """Return the options that no file system accepts, as far as known."""
    own = {name: value for name, value in options.items() if name not in {link.protocol for link in links}}
    found = []
    for link in links:
        given = {**(options.get(link.protocol) or {}), **(own if link is links[0] else {})}
        accepted = _accepted(link.cls)
        if accepted is not None:
            found += [name for name in given if name not in accepted]
    return found


def _accepted(cls: type) -> set[str] | None:
    """Return the options of a class, or None if it passes them on to an unknown callable."""
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


def chain_traits(links: Sequence[Link]) -> Traits:
    """Return the traits of a chain: those of its outermost file system, except for `dir`."""
    return next((traits_of(link.cls) for link in links if not issubclass(link.cls, DirFileSystem)), Traits())


@dataclass(slots=True)
class ConnectedChain:
    """Connected file systems of a URL, used by the threads of one lane."""

    outer: Any
    """File system for reading whole files."""
    inner: Any
    """File system for all other calls: the same, or the one behind a cache, since a cache misses changes."""
    root: str
    ranged: bool
    """True if `cat_file` supports a range."""
    known: Traits
    folders: set[str] = field(default_factory=set)
    """Folders that were created."""

    def full(self, path: str) -> str:
        """Return the name of a file, quoted if the file system requires that."""
        full = self.plain(path)
        return quote(full) if self.known.quoted else full

    def cat(self, path: str, start: int | None = None, end: int | None = None, *, cached: bool = False) -> Any:
        """Return a file's bytes, or a range of them."""
        fs, full = self.outer if cached else self.inner, self.full(path)
        if self.known.cat is not None:
            return self.known.cat(fs, full, start, end)
        return fs.cat_file(full, start=start, end=end) if start is not None else fs.cat_file(full)

    def plain(self, path: str) -> str:
        """Return the name of a file."""
        return f"{self.root}/{path}".rstrip("/") if self.root else path

    def list_folder(self, path: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return names and infos of a folder's entries; none if the folder does not exist."""
        try:
            entries = self.inner.ls(self.full(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        named = [(entry["name"].strip("/"), entry) for entry in entries]
        itself = self.plain(path).strip("/")
        return [(name.rpartition("/")[2], entry) for name, entry in named if name != itself]

    def in_folder(self, path: str, action: Callable[[str], Any]) -> Any:
        """Call an action that creates a file, after creating its folder."""
        full = self.full(path)
        folder = full.rpartition("/")[0]
        if self.known.move is None or not folder:
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
        """Remove the empty folders above a file, up to the root, and the root."""
        while path:
            path = path.rpartition("/")[0]
            self.folders.discard(self.full(path))
            if not self.full(path).strip("/"):
                return
            self.known.remove_folder(self.inner, self.full(path))


def connect(links: Sequence[Link], known: Traits) -> ConnectedChain:
    """Connect the file systems, as `fsspec.core.url_to_fs` does, but without caches."""
    made: dict[str, Any] = {}
    for number, link in enumerate(reversed(links)):
        options = {**link.options, **made, "skip_instance_cache": True}
        made = {"target_options": options, "target_protocol": link.protocol, "fo": link.path}
        if number == len(links) - 1:
            outer = link.cls(**options)
    root = links[0].path.rstrip("/")
    for each in _nested(outer):
        if hasattr(each, "dircache"):
            each.dircache = DirCache(use_listings_cache=False)  # not every class has the option
    while isinstance(outer, DirFileSystem):
        root = f"{outer.path}/{root}".rstrip("/")
        outer = outer.fs
    inner = outer.fs if isinstance(outer, CachingFileSystem) else outer
    name = "_cat_file" if outer.async_impl else "cat_file"
    method = getattr(type(outer), name)
    arguments = inspect.signature(method).parameters
    ranged = known.cat is not None
    ranged |= outer is inner and {"start", "end"} <= set(arguments) and method is not AbstractFileSystem.cat_file
    return ConnectedChain(outer, inner, root, ranged, known)


def _nested(fs: Any) -> Iterator[Any]:
    while isinstance(fs, AbstractFileSystem):
        yield fs
        fs = vars(fs).get("fs")


def disconnect(chain: ConnectedChain) -> None:
    """Close the connections. Unknown file systems are closed when they are garbage-collected."""
    for each in _nested(chain.outer):
        with contextlib.suppress(Exception):  # a broken connection cannot be closed
            traits_of(type(each)).close(each)
