"""Storage plugins by URL scheme, and a cache of their clients."""

from __future__ import annotations

import asyncio
import difflib
import re
from collections.abc import Awaitable, Callable, Hashable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from snapshot import extensions
from snapshot.errors import MissingExtraError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.io.storage import Context, Storage
from snapshot.io.url import URL, expect_mapping

# Storage plugins by URL scheme: those of every installation, and entry points for others.

_PLACES = {
    "file": "snapshot.storages.file.file_storage:FileStorage",
    "memory": "snapshot.storages.memory:MemoryStorage",
}
_GROUP: extensions.Group = "snapshot.storages"
_BUILT_IN = {scheme: EntryPoint(scheme, place, _GROUP) for scheme, place in _PLACES.items()}

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")

FSSPEC = "fsspec+"
"""The plugin that is asked whether it knows any other scheme."""
_registered: dict[str, type[Storage]] = {}


def registered() -> Mapping[str, type[Storage]]:
    """Return the plugins that were registered in this process, by scheme."""
    return _registered


def register(scheme: str, plugin: type[Storage]) -> None:
    """Open `scheme://` URLs with `plugin` in this process. It takes precedence over entry points of other packages.

    Raise `ValueError` for a scheme of this library, which nothing replaces. A scheme that ends in `+` matches all
    schemes with that prefix. A plugin that wraps other storages is registered as `wrap+`, and opens both
    `wrap+file://...` and `wrap+s3://...`.
    """
    if not (isinstance(scheme, str) and _SCHEME.fullmatch(scheme)):
        raise ValueError(f"scheme must be letters, digits, '+', '-' and '.', and begin with a letter, got {scheme!r}")
    if any(_own(each) for each in _keys(scheme)):
        raise ValueError(f"scheme must be one that this library does not open itself, got {scheme!r}")
    if not (isinstance(plugin, type) and issubclass(plugin, Storage)):
        raise TypeError(f"plugin must be a subclass of Storage, got {plugin!r}")
    _registered[scheme] = plugin


def unregister(scheme: str) -> None:
    """Undo `register`. A scheme that is not registered is not an error."""
    _registered.pop(scheme, None)


def schemes() -> list[str]:
    """Return every scheme with a plugin, except those of fsspec."""
    every = {*_BUILT_IN, *_registered, *extensions.names(_GROUP)}
    return sorted(scheme for scheme in every if not scheme.endswith("+"))


def open_storage(url: URL, options: Mapping[str, Any] | None = None, context: Context | None = None) -> Storage:
    """Return the storage at `url`, without connecting to it."""
    return plugin_for(url)(url, expect_mapping(options), context or Context())


def plugin_for(url: URL) -> type[Storage]:
    """Return the plugin class for a URL: of this library, registered, from an entry point, or fsspec's.

    Entry points of other packages are searched last, since that reads the metadata of every installed package.
    """
    keys = _keys(url.scheme)
    for scheme in keys:
        if (point := _own(scheme)) is not None:
            return _load(point, url)
    for scheme in keys:
        if (plugin := _registered.get(scheme)) is not None:
            return plugin
    for scheme in keys:
        if (point := extensions.find(_GROUP, scheme)) is not None:
            return _load(point, url)
    other = extensions.find(_GROUP, FSSPEC)
    if other is not None and (last := _load(other, url)).knows_scheme(url.scheme):
        return last
    extensions.forget()  # it may have been installed since, as in a notebook
    if (late := extensions.find(_GROUP, url.scheme)) is not None:
        return _load(late, url)
    near = difflib.get_close_matches(url.scheme, schemes(), n=1, cutoff=0.5)  # such as s4 for s3
    hint = f"; did you mean {near[0]}://?" if near else ""
    if not extensions.own_points():
        hint += f"; {extensions.OWN} is not installed here, so its plugins are not known: pip install it"
    raise StorageError(
        f"{url}: no storage plugin for the scheme {url.scheme!r}; known schemes: {', '.join(schemes())}{hint}"
    )


def _keys(scheme: str) -> tuple[str, str]:
    """Return the names that a plugin for a scheme may have: `wrap+file` and `wrap+`."""
    outermost, plus, _ = scheme.partition("+")
    return scheme, outermost + plus


def _own(scheme: str) -> EntryPoint | None:
    return _BUILT_IN.get(scheme) or extensions.own_points().get((_GROUP, scheme))


def _load(point: EntryPoint, url: URL) -> type[Storage]:
    try:
        loaded = extensions.load(point, url)
    except MissingExtraError:
        raise
    except SnapshotError as error:
        raise StorageError(str(error)) from error.__cause__
    if not (isinstance(loaded, type) and issubclass(loaded, Storage)):
        raise StorageError(f"{url}: the entry point {point.name} = {point.value} must name a subclass of Storage")
    if lacking := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise StorageError(f"{url}: {point.value} of {extensions.owner_of(point)} lacks {', '.join(lacking)}")
    return loaded


# A cache of storage clients: connecting and finding credentials costs more than a small take.
#
# Clients live on the private loop. They are closed at exit, or after some time without use. A forked child starts
# without clients, since connections cannot be shared with the parent.

KEPT = 30.0
"""Seconds that an unused client is kept."""

Close = Callable[[], Awaitable[object]]


class _Client:
    def __init__(self, made: asyncio.Future[tuple[Any, Close]]) -> None:
        self.made = made
        self.users = 0
        self.timer: asyncio.TimerHandle | None = None


class SharedClients:
    """One client per key, shared by all users on one loop."""

    def __init__(self, kept: float = KEPT) -> None:
        self._kept = kept
        self._clients: dict[Hashable, _Client] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[tuple[Any, Close]]]) -> Any:
        """Return the client of this key; create it if there is none."""
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = _Client(asyncio.ensure_future(make()))
        client.users += 1
        if client.timer is not None:
            client.timer.cancel()
            client.timer = None
        try:
            made, _ = await asyncio.shield(client.made)
        except BaseException:
            client.users -= 1
            if client.made.done() and (client.made.cancelled() or client.made.exception() is not None):
                if self._clients.get(key) is client:
                    del self._clients[key]
            else:
                self._idle(key, client)
            raise
        return made

    async def release(self, key: Hashable) -> None:
        """Release one use of a client. An unused client is kept for a while."""
        client = self._clients.get(key)
        if client is not None:  # otherwise all were closed meanwhile
            client.users -= 1
            self._idle(key, client)

    def _idle(self, key: Hashable, client: _Client) -> None:
        if not client.users and client.timer is None:
            client.timer = asyncio.get_running_loop().call_later(self._kept, self._drop, key, client)

    def _drop(self, key: Hashable, client: _Client) -> None:
        if self._clients.get(key) is client:
            del self._clients[key]
        task = asyncio.ensure_future(self._shut(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _shut(self, client: _Client) -> None:
        try:
            _, close = await client.made
            await close()
        except Exception as error:  # noqa: BLE001 - nobody waits for it, and a new client will be made
            log.debug("cannot close a storage's client: %s", error)

    async def close(self) -> None:
        """Close all clients."""
        for key, client in list(self._clients.items()):
            if client.timer is not None:
                client.timer.cancel()
            self._drop(key, client)
        await asyncio.gather(*self._closing)

    def __repr__(self) -> str:
        return f"SharedClients({len(self._clients)} clients)"
