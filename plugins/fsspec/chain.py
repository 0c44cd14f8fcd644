"""The file systems that a URL names: parsed, checked against their options, made, and closed."""

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
"""Those that take their files from another one."""


@dataclass(frozen=True, slots=True)
class Link:
    """One file system of a chained URL."""

    protocol: str
    cls: type[AbstractFileSystem]
    path: str
    """What lies in front of our paths there."""
    options: Mapping[str, Any]


def parse_chain(text: str, options: Mapping[str, Any], retry_policy: RetryPolicy) -> list[Link]:
    """The file systems that a URL names, the outermost first."""
    parts = text.split("::")
    links: list[Link] = []
    for part, (path, protocol, given) in reversed(list(zip(parts, _un_chain(text, _copied(options)), strict=True))):
        cls = get_filesystem_class(protocol)
        if issubclass(cls, _WRAPPERS) and not part.partition("://")[2]:  # a wrapper without a path of its own
            path = links[-1].path if links and not issubclass(cls, DirFileSystem) else ""  # noqa: PLW2901
        links.append(Link(protocol, cls, path or "", {**traits_of(cls).defaults(retry_policy), **given}))
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


def chain_traits(links: Sequence[Link]) -> Traits:
    """What is known of a chain: a folder of another is as that is."""
    return next((traits_of(link.cls) for link in links if not issubclass(link.cls, DirFileSystem)), Traits())


@dataclass(slots=True)
class ConnectedChain:
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

    def list_folder(self, path: str) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """What is in a folder: names, and what is said of them; nothing if there is none."""
        try:
            entries = self.inner.ls(self.full(path), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        named = [(entry["name"].strip("/"), entry) for entry in entries]
        itself = self.plain(path).strip("/")
        return [(name.rpartition("/")[2], entry) for name, entry in named if name != itself]

    def in_folder(self, path: str, action: Callable[[str], Any]) -> Any:
        """Do something that makes a file, which needs its folder."""
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
        """Remove the folders that a file was in, if they are empty, up to the root, and the root."""
        while path:
            path = path.rpartition("/")[0]
            self.folders.discard(self.full(path))
            if not self.full(path).strip("/"):
                return
            self.known.remove_folder(self.inner, self.full(path))


def connect(links: Sequence[Link], known: Traits) -> ConnectedChain:
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
    return ConnectedChain(outer, inner, root, ranged, known)


def _nested(fs: Any) -> Iterator[Any]:
    while isinstance(fs, AbstractFileSystem):
        yield fs
        fs = vars(fs).get("fs")


def disconnect(chain: ConnectedChain) -> None:
    """Close the connections, where it is known how; others are when the objects are gone."""
    for each in _nested(chain.outer):
        with contextlib.suppress(Exception):  # one that is broken cannot be closed, either
            traits_of(type(each)).close(each)
