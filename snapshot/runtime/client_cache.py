"""A cache of storage clients: connecting and finding credentials costs more than a small take.

Clients live on the private loop. They are closed at exit, or after some time without use. A forked child starts without
clients, since connections cannot be shared with the parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

from snapshot.events import log

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
