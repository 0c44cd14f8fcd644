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
    "file": ("snapshot.plugins.file.file_storage:FileStorage", None),
    "memory": ("snapshot.plugins.memory:MemoryStorage", None),
    "s3": ("snapshot.plugins.objectstore.s3:S3Storage", "s3"),
    "gs": ("snapshot.plugins.objectstore.gcs:GcsStorage", "gcs"),
    "gcs": ("snapshot.plugins.objectstore.gcs:GcsStorage", "gcs"),
    "az": ("snapshot.plugins.objectstore.azure:AzureStorage", "azure"),
    "abfs": ("snapshot.plugins.objectstore.azure:AzureStorage", "azure"),
    "abfss": ("snapshot.plugins.objectstore.azure:AzureStorage", "azure"),
    "http": ("snapshot.plugins.web:HttpStorage", "http"),
    "https": ("snapshot.plugins.web:HttpStorage", "http"),
    "fsspec+": ("snapshot.plugins.fsspec.fsspec_storage:FsspecStorage", None),
}
"""Scheme -> (class, the extra that brings what it needs, unless every installation has it)."""

_registered: dict[str, type[Storage]] = {}


def registered() -> Mapping[str, type[Storage]]:
    """Return the plugins that were registered in this process, by scheme."""
    return _registered


def register(scheme: str, plugin: type[Storage]) -> None:
    """Make `scheme://` URLs open with `plugin` in this process; it goes before built-in ones and entry points.

    A scheme that ends in `+` stands for all that begin with it: what wraps other storages is registered as `wrap+`, and
    opens `wrap+file://...` and `wrap+s3://...` alike.
    """
    _registered[scheme] = plugin


def unregister(scheme: str) -> None:
    """Undo `register`; no error if the scheme is not registered."""
    _registered.pop(scheme, None)


def schemes() -> list[str]:
    """Return every scheme with a plugin, besides those of fsspec."""
    every = {*_BUILT_IN, *_registered, *(point.name for point in entry_points(group=GROUP))}
    return sorted(scheme for scheme in every if not scheme.endswith("+"))


def open_storage(url: URL, options: Mapping[str, Any] | None = None, context: Context | None = None) -> Storage:
    """Return the storage at `url`, without connecting to it."""
    return plugin_for(url)(url, options or {}, context or Context())


def plugin_for(url: URL) -> type[Storage]:
    """Return the plugin class of a URL: a registered one, or else a built-in one, an entry point, or fsspec's.

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
    """Return fsspec's plugin if fsspec knows the scheme. Import fsspec only now."""
    knows_scheme = importlib.import_module("snapshot.plugins.fsspec.fsspec_storage").knows_scheme
    return _built_in("fsspec+", url) if knows_scheme(url.scheme) else None
