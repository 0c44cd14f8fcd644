"""Calls to the file systems of a URL: in threads, shared between storages, with errors that hide secrets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.plugins.fsspec.call_threads import Lane, Mount
from snapshot.plugins.fsspec.chain import (
    ConnectedChain,
    chain_traits,
    connect,
    disconnect,
    parse_chain,
    unknown_options,
)
from snapshot.plugins.fsspec.client_errors import LostError, all_words, redact, secrets_in, translate
from snapshot.plugins.network.retry import Attempt, RetryPolicy, TransientError, retry_request
from snapshot.storage import URL, Context

T = TypeVar("T")
CHUNK = 4 << 20
"""Maximum bytes that one call holds in addition to the caller's memory."""
THREADS = 8
"""Threads that wait for a file system with concurrent calls."""
PREFIX = "fsspec+"
_OURS = ("timeout", "deadline", "part_bytes")


class FsspecClient:
    """The file systems of one URL and its options, created on first use."""

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        self.url = url
        self.context = context
        self._options = options
        theirs = {name: value for name, value in options.items() if name not in _OURS}
        self.retry_policy = RetryPolicy(
            **{name: options[name] for name in ("timeout", "deadline") if options.get(name) is not None}
        )
        self.part_bytes = options.get("part_bytes") or 8 << 20
        if isinstance(self.part_bytes, bool) or not self.part_bytes >= 1:
            raise ValueError(f"part_bytes must be a number of bytes above 0, got {options['part_bytes']!r}")
        self.chunk = min(CHUNK, self.part_bytes)
        try:
            links = parse_chain(url.reveal().removeprefix(PREFIX), theirs, self.retry_policy)
        except ImportError as error:
            raise MissingExtraError(f"{url}: {error}") from error
        if unknown := unknown_options(links, theirs):
            raise ValueError(f"{url}: unknown storage_options {', '.join(map(repr, unknown))}")
        values = [*secrets_in(theirs), *url.location.rpartition("@")[0].split(":")[1:], url.query]
        self.secrets = [value for value in [*values, *secrets_in([link.options for link in links])] if len(value) > 3]
        self.known = chain_traits(links)
        self.concurrent = all(link.cls.async_impl for link in links)
        """True if calls run concurrently."""
        self._links = links
        self._mounted: Mount[ConnectedChain] | None = None
        self.ranges_proven = False
        """True once a response was certainly a range, and not the whole file."""

    async def mount(self) -> Mount[ConnectedChain]:
        """Return the file systems, shared by the storages of this URL and these options."""
        if self._mounted is None:
            clients = self.context.clients
            links, known = self._links, self.known
            mounted = Mount(lambda: connect(links, known), disconnect, THREADS if self.concurrent else 1)
            if clients is not None:

                async def make() -> tuple[Mount[ConnectedChain], Callable[[], Any]]:
                    return mounted, mounted.close

                mounted = await clients.get(self._key(), make)
            self._mounted = mounted
        return self._mounted

    def _key(self) -> tuple[str, ...]:
        options = json.dumps(self._options, sort_keys=True, default=lambda value: f"{type(value)} {id(value)}")
        return type(self).__qualname__, self.url.reveal(), options

    async def close(self) -> None:
        """Release the file systems; they are closed if no other storage uses them."""
        mounted, self._mounted = self._mounted, None
        if mounted is None:
            return
        if self.context.clients is not None:
            await self.context.clients.release(self._key())
        else:
            await mounted.close()

    async def call(
        self, lane: Lane[ConnectedChain], path: str, work: Callable[[ConnectedChain], T], attempt: Attempt | None = None
    ) -> T:
        """Make one call, and translate its errors. Never pass the caller's memory to `work`."""
        url = self.url.join(path)
        try:
            return await lane.call(work, attempt)
        except TransientError as error:
            raise TransientError(f"{url}: {error}", refused=error.refused) from error
        except SnapshotError:
            raise
        except Exception as error:  # noqa: BLE001 - every client has its own errors; each is translated
            text = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}".rstrip(": ")
            made = translate(error, f"{url}: {redact(str(text), self.secrets)}")
            if isinstance(made, LostError):
                lane.retire()  # some clients never reconnect
            words = all_words(error)
            raise made from (error if redact(words, self.secrets) == words else None)

    async def send_request(
        self, name: str, path: str, work: Callable[[ConnectedChain], T], within: float | None = None
    ) -> T:
        """Make a call, and retry it after transient faults."""
        mounted = await self.mount()

        async def once(attempt: Attempt) -> T:
            return await self.call(mounted.lane(), path, work, attempt)

        return await retry_request(name, self.url.join(path), self.retry_policy, once, within)

    async def stored_size(self, name: str, path: str, stored: str) -> int | None:
        """Return the size of a file under its temporary name; None if the file system does not report it."""
        size = await self.send_request(name, path, lambda chain: chain.inner.info(chain.full(stored)).get("size"))
        return None if size is None else int(size)
