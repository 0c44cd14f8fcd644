"""URL scheme -> storage plugin: built-in ones by a table of names, third parties' through an entry point."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from snapshot.errors import MissingExtraError, SnapshotError, StorageError
from snapshot.storage import Context, Storage
from snapshot.url import URL

GROUP = "snapshot.storage"
"""The entry-point group that third parties' plugins register in: `scheme = "package.module:Class"`."""

_BUILT_IN = {
    "file": ("snapshot.plugins.file:FileStorage", None),
    "memory": ("snapshot.plugins.memory:MemoryStorage", None),
    "s3": ("snapshot.plugins.s3:S3Storage", "s3"),
    "gs": ("snapshot.plugins.gcs:GcsStorage", "gcs"),
    "gcs": ("snapshot.plugins.gcs:GcsStorage", "gcs"),
    "az": ("snapshot.plugins.azure:AzureStorage", "azure"),
    "abfs": ("snapshot.plugins.azure:AzureStorage", "azure"),
    "abfss": ("snapshot.plugins.azure:AzureStorage", "azure"),
    "http": ("snapshot.plugins.http:HttpStorage", "http"),
    "https": ("snapshot.plugins.http:HttpStorage", "http"),
    "fsspec+": ("snapshot.plugins.fsspec:FsspecStorage", "fsspec"),
}
"""Scheme -> (class, the extra that brings what it needs)."""
_BY_FSSPEC = {
    "sftp",
    "ssh",
    "webdav",
    "hf",
    "ftp",
    "smb",
    "zip",
    "tar",
    "dir",
    "local",
    "simplecache",
    "filecache",
    "blockcache",
    "github",
    "reference",
}
"""Schemes that the extra `fsspec` is known to bring; with it installed, it says itself which it knows."""

_registered: dict[str, type[Storage]] = {}


def register(scheme: str, plugin: type[Storage]) -> None:
    """Make `scheme://` URLs open with `plugin` in this process; it goes before built-in ones and entry points.

    A scheme that ends in `+` stands for all that begin with it: what wraps other storages is registered as `wrap+`, and
    opens `wrap+file://...` and `wrap+s3://...` alike.
    """
    _registered[scheme] = plugin


def unregister(scheme: str) -> None:
    """Take back what `register` did, so that the scheme means what it meant before it; no error if there is nothing."""
    _registered.pop(scheme, None)


def schemes() -> list[str]:
    """Every scheme that can be opened."""
    every = {*_BUILT_IN, *_registered, *(point.name for point in entry_points(group=GROUP))}
    return sorted(scheme for scheme in every if not scheme.endswith("+"))


def open_storage(url: URL, options: Mapping[str, Any] | None = None, context: Context | None = None) -> Storage:
    """Return the storage at `url`. Nothing is connected to, read or written yet."""
    return plugin_for(url)(url, options or {}, context or Context())


def plugin_for(url: URL) -> type[Storage]:
    """Return the plugin class for a URL's scheme: registered ones go first, then built-in ones, entry points, and
    fsspec.

    Entry points come late since looking for them reads the metadata of every installed package.
    """
    outermost, plus, _ = url.scheme.partition("+")
    for scheme in (url.scheme, outermost + plus):
        if scheme in _registered:
            return _registered[scheme]
    for scheme in (url.scheme, outermost + plus):
        if scheme in _BUILT_IN:
            return _built_in(scheme, url)
    for point in entry_points(group=GROUP, name=url.scheme):
        try:
            loaded = point.load()
        except ImportError as error:
            raise MissingExtraError(f"{url}: the plugin {point.value} cannot be imported: {error}") from error
        except AttributeError as error:
            raise StorageError(f"{url}: the entry point {point.name} = {point.value}: {error}") from error
        if not (isinstance(loaded, type) and issubclass(loaded, Storage)):
            raise StorageError(f"{url}: the entry point {point.name} = {point.value} names no subclass of Storage")
        return loaded
    if (found := _by_fsspec(url)) is not None:
        return found
    near = difflib.get_close_matches(url.scheme, schemes(), n=1, cutoff=0.5)  # as s4 is to s3
    hint = f"; did you mean {near[0]}://?" if near else ""
    raise StorageError(
        f"{url}: no storage plugin for the scheme {url.scheme!r}; known are {', '.join(schemes())}{hint}"
    )


def _built_in(scheme: str, url: URL) -> type[Storage]:
    target, extra = _BUILT_IN[scheme]
    module, _, name = target.partition(":")
    try:
        found: type[Storage] = getattr(importlib.import_module(module), name)
    except OSError as error:
        raise SnapshotError(f"{url}: its storage plugin cannot be loaded: {error}") from error
    except ImportError as error:
        if extra is None:
            raise
        raise MissingExtraError(
            f"{url}: {error}; pip install 'snapshot-torch[{extra}]' brings what {url.scheme}:// needs"
        ) from error
    return found


def _by_fsspec(url: URL) -> type[Storage] | None:
    """Return what is left is fsspec's, if it knows the scheme; it is imported only now."""
    try:
        known = importlib.import_module("snapshot.plugins.fsspec").known
    except ImportError:
        return _built_in("fsspec+", url) if url.scheme.partition("::")[0] in _BY_FSSPEC else None
    return _built_in("fsspec+", url) if known(url.scheme) else None
