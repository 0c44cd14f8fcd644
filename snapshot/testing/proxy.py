"""A proxy between a client and an HTTP server that lets things go wrong: at this request, at that byte, on purpose.

A plugin for an object store is only as good as what it does when connections break, answers get lost and servers ask
for less; and no server does so when a test asks for it. What is not to go wrong passes unchanged, byte for byte: the
heads too, since signatures cover them.
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
    """Passes on to `target` (`http://host:port`) what is sent to `url`; open from when it is made until `close()`.

    Use it as a context::

        with FaultProxy("http://127.0.0.1:9000") as proxy:
            fault = proxy.fault(method="GET", path="*/data/*", nth=2, reset_at=100_000)
            ...  # use proxy.url
            assert fault.hits == 1

    At the end of the context every fault must have happened: see `check()`. Bodies stream, and are never held whole.
    """

    def __init__(self, target: str) -> None:
        super().__init__()
        parts = urlsplit(target)
        if parts.scheme != "http" or parts.hostname is None or parts.path not in ("", "/"):
            raise ValueError(f"the target of a proxy is http://host:port, not {target!r}")
        self.target = target
        self.connections = 0
        """How many connections have been accepted so far."""
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
        """How many connections of clients are open."""
        return len(self._open)

    def check(self) -> None:
        """Raise `AssertionError` if a fault never happened, also one that was healed: such a test would show nothing.

        Raises what a callable that chooses requests has raised, too.
        """
        for error in self._errors:
            raise error
        super().check()

    def close(self) -> None:
        """End it, and all that hangs in it; connections that are open are reset."""
        with suppress(RuntimeError):  # it is closed already
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
                channel.close(reset=True)  # a task that was cancelled before it began has not done it

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
        """Serve a client's connection, with one to the target for it."""
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
            pass  # as it happened to one side, it happens to the other
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
