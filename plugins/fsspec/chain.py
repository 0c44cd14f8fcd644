"""File systems of a chained URL: parse the URL, check the options, connect and close."""

from __future__ import annotations

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from fsspec.core import _un_chain
from fsspec.dircache import DirCache
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import get_filesystem_class
from fsspec.spec import AbstractFileSystem

from snapshot.plugins.fsspec.traits import Traits, traits_of
from snapshot.plugins.network.retry import RetryPolicy

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
