"""Proxy between a client and an HTTP server that injects faults at chosen requests and bytes.

A plugin for an object store must handle broken connections, lost responses and throttling, which no server produces on
request. Everything without a fault passes unchanged, byte for byte. That includes the heads, since signatures cover
them.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from snapshot.testing.http_exchange import HTTPExchange
from snapshot.testing.traffic import Traffic
from snapshot.testing.wire import Channel, Gone


class FaultProxy(Traffic):
    """Forwards requests to `url` to `target` (`http://host:port`), from its creation until `close()`.

    Use it as a context::

        with FaultProxy("http://127.0.0.1:9000") as proxy:
            fault = proxy.fault(method="GET", path="*/data/*", nth=2, reset_at=100_000)
            ...  # use proxy.url
            assert fault.hits == 1

    At the end of the context every fault must have happened: see `check()`. Bodies stream, and are never stored whole.
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        parts = urlsplit(target)
        if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
            raise ValueError(f"target must be http://host:port, got {target!r}")
        self.target = target
        self.connections = 0
        """Number of connections accepted so far."""
        self._addresses = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: dict[asyncio.Task[None], Channel] = {}
        self._errors: list[BaseException] = []
        self._closing = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"FaultProxy {self.url}", daemon=True)
        self._thread.start()
        started.wait()

    @property
    def open_connections(self) -> int:
        """Number of open connections of clients."""
        return len(self._open)

    def check(self) -> None:
        """Raise AssertionError if a fault never happened, also after `heal()`: such a test would prove nothing.

        Also raises the errors of callables that choose requests.
        """
        for error in self._errors:
            raise error
        super().check()

    def close(self) -> None:
        """Stop the proxy with all pending requests. Open connections are reset."""
        with suppress(RuntimeError):  # already closed
            self.loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
        if error is None:
            self.check()

    def __repr__(self) -> str:
        counts = f"{len(self.requests)} requests, {self.under_way} under way, {self.open_connections} connections open"
        return f"FaultProxy({self.url} -> {self.target}, {counts})"

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner() as runner:
            self.loop = runner.get_loop()
            started.set()
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.loop.add_reader(self._listener, self._accept)
        try:
            await self._closing.wait()
        finally:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            tasks, channels = list(self._open), list(self._open.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for channel in channels:
                channel.close(reset=True)  # a task that was cancelled before its start did not close it

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        channel = Channel(accepted)
        task = asyncio.ensure_future(self._connection(channel))
        self._open[task] = channel
        self.connections += 1
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._open[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    async def _connection(self, client: Channel) -> None:
        """Serve a client's connection, with its own connection to the target."""
        target: Channel | None = None

        async def ask() -> Channel:
            nonlocal target
            if target is not None and target.ended():
                target.close()
                target = None
            if target is None:
                target = await self._connect()
            return target

        reset = True
        try:
            while (head := await client.read_head()) is not None and await HTTPExchange(self, client, head, ask).run():
                pass
            reset = False
        except Gone:
            reset = False
        except OSError:
            pass  # the error is passed on to the other side
        finally:
            if target is not None:
                target.close(reset=reset)
            if not reset:
                await client.finish()
            client.close(reset=reset)

    async def _connect(self) -> Channel:
        error: OSError | None = None
        for family, kind, protocol, _, address in self._addresses:
            connecting = socket.socket(family, kind, protocol)
            try:
                connecting.setblocking(False)
                await self.loop.sock_connect(connecting, address)
                return Channel(connecting)
            except OSError as refused:
                error = refused
                connecting.close()
            except BaseException:
                connecting.close()
                raise
        raise ConnectionError(f"{self.target} can't be reached") from error
