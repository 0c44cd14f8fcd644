"""Proxy between a client and an HTTP server that injects faults at chosen requests and bytes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from http import HTTPStatus
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack
from urllib.parse import urlsplit

from tests.helpers.wire import Body, Channel, Gone, Head

# Traffic of a proxy, for its user: the requests, the faults, and the limits.


@dataclass(frozen=True, slots=True)
class Passed:
    """A request and its result. A callable that chooses requests only sees the first three fields."""

    method: str
    path: str
    """Path as sent, with the query."""
    headers: Mapping[str, str]
    """Headers by name in lower case; repeated ones joined by commas."""
    status: int = 0
    """Status of the target's response, or of the proxy's; 0 if there was no response."""
    request_bytes: int = 0
    """Received bytes of the body, without chunk framing."""
    response_bytes: int = 0
    """Bytes of the body sent to the client, without chunk framing."""
    seconds: float = 0.0
    fault: str | None = None
    """The `repr` of the fault that chose it."""


Choice = str | Callable[[Passed], bool]
"""Requests by a glob over the path with its query (`*` crosses `/`), or by a callable."""


class Mishap(TypedDict, total=False):
    """A fault of a request: exactly one of these, with its options."""

    status: int
    """The proxy responds with this status. It reads and discards the request's body, and does not ask the target."""
    body: bytes
    """Body of the response, with `status`."""
    headers: Mapping[str, str]
    """Headers in addition to `Content-Length`, with `status`."""
    reset_before: bool
    """The connection is reset after the request's head. The target is not asked."""
    reset_upload_at: int
    """The connections of the client and the target are reset after this number of bytes of the request's body."""
    reset_at: int
    """The connection is reset after this number of bytes of the response's body; 0: after the head."""
    close_at: int
    """The connection is closed orderly after this number of bytes of the response's body."""
    hang_at: int
    """The response stalls after this number of bytes of its body, until the fault is released."""
    hang: bool
    """The request is read, but the target is not asked, and there is no response. On release the connection ends."""
    lose_answer: Literal[True, "hang"]
    """The target handles the request, but its response is lost: the connection is reset, or hangs until the fault is
    released."""
    flip: int
    """This bit of the body is flipped, modulo the length if that is known."""
    side: Literal["request", "response"]
    """Body to flip the bit in, with `flip`. Default: the response."""
    delay: float
    """Seconds to wait before the target is asked."""
    ignore_range: bool
    """The target is asked without the `Range` header."""
    truncate: int
    """The response is this number of bytes shorter, and so is its `Content-Length`, which it must have."""


_WITH = {"body": "status", "headers": "status", "side": "flip"}


class HTTPFault:
    """A fault of the `nth` matching request and of those after it: `times` in all, or all (None).

    Created by `FaultProxy.fault`. As a context it ends with the context, and must have happened: see `check()`.
    """

    def __init__(
        self,
        traffic: Traffic,
        method: str,
        path: Choice,
        nth: int,
        times: int | None,
        must_happen: bool,
        **mishap: Unpack[Mishap],
    ) -> None:
        given: dict[str, Any] = {
            name: value for name, value in mishap.items() if value is not None and value is not False
        }
        whats = given.keys() - _WITH.keys()
        if len(whats) != 1 or not given.keys() <= Mishap.__annotations__.keys():
            kinds = [name for name in Mishap.__annotations__ if name not in _WITH]
            raise ValueError(f"a fault must be exactly one of {', '.join(kinds)}, got {mishap}")
        self.what: str = whats.pop()
        self.value = given[self.what]
        if stray := [name for name, what in _WITH.items() if name in given and what != self.what]:
            raise ValueError(f"{', '.join(stray)} cannot be combined with {self.what}")
        self.body: bytes = given.get("body", b"")
        self.headers: Mapping[str, str] = given.get("headers", {})
        self.side: str = given.get("side", "response")
        if self.side not in ("request", "response"):
            raise ValueError(f"side must be 'request' or 'response', got {self.side!r}")
        self.method = method
        self.path = path
        self.nth = nth
        self.times = times
        self.must_happen = must_happen
        self.met = 0
        """Number of matching requests so far."""
        self.hits = 0
        """Number of requests that were hit. A chosen request may be too short for its fault."""
        self.over = asyncio.Event()
        self._chosen = 0
        self._reached = threading.Event()
        self._released = False
        self._traffic = traffic

    def chooses(self, request: Passed, taken: bool) -> bool:
        """Count a request, and return True if it is chosen, and no other fault has taken it."""
        if not matches(request, self.method, self.path):
            return False
        self.met += 1
        if taken or self._released or self.met < self.nth or self._chosen == self.times:
            return False
        self._chosen += 1
        return True

    def strike(self) -> None:
        """Count a hit, before its effect can be seen."""
        self.hits += 1
        self._reached.set()

    def wait_reached(self, timeout: float = 30.0) -> None:
        """Wait until the fault has happened; raise TimeoutError if it does not in time."""
        if not self._reached.wait(timeout):
            raise TimeoutError(f"{self} was not reached in {timeout} seconds")

    def release(self) -> None:
        """End or resume all requests that hang here, and choose no more."""
        self._released = True
        with suppress(RuntimeError):  # the proxy is closed, so nothing hangs
            self._traffic.loop.call_soon_threadsafe(self.over.set)

    def check(self) -> None:
        """Raise AssertionError if the fault never happened, unless `must_happen` is False."""
        if self.must_happen and not self.hits:
            raise AssertionError(f"{self} never happened: {self.met} requests matched, {self._chosen} were chosen")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._traffic.drop(self)
        self.release()
        if error is None:
            self.check()

    def __repr__(self) -> str:
        what = f"{self.what}={self.value!r}"
        return f"HTTPFault({self.method} {self.path!r}, nth={self.nth}, times={self.times}, {what}, {self.hits} hits)"


class Traffic:
    """Limits, faults and counters of a proxy, usable from any thread at any time."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.bandwidth: float | None = None
        """Bytes of bodies per second, both directions together; None for no limit."""
        self.concurrency: int | None = None
        """Maximum concurrent requests. Further ones get status 503, and count as `refused`."""
        self.latency = 0.0
        """Delay of each request in seconds."""
        self.under_way = 0
        """Number of current requests, without refused ones."""
        self.peak = 0
        """Maximum of `under_way`."""
        self.refused = 0
        self._requests: list[Passed] = []
        self._faults: list[HTTPFault] = []
        self._healed: list[HTTPFault] = []
        self._free_at = 0.0
        self._lock = threading.RLock()  # a callable that chooses may read the requests

    def fault(
        self,
        method: str = "*",
        path: Choice = "*",
        nth: int = 1,
        times: int | None = 1,
        *,
        must_happen: bool = True,
        **mishap: Unpack[Mishap],
    ) -> HTTPFault:
        """Inject a fault from now on: see `Mishap` and `HTTPFault`.

        A request that several faults would choose is taken by the first one; the others take the next request.
        """
        fault = HTTPFault(self, method, path, nth, times, must_happen, **mishap)
        with self._lock:
            self._faults.append(fault)
        return fault

    def drop(self, fault: HTTPFault) -> None:
        """Forget a fault: it chooses no more requests, and is not checked."""
        with self._lock:
            self._faults = [each for each in self._faults if each is not fault]

    def heal(self) -> None:
        """End all faults. Hanging requests hang until their fault is released."""
        with self._lock:
            self._healed += self._faults
            self._faults = []

    def check(self) -> None:
        """Raise AssertionError if a fault never happened, also after `heal()`: such a test would prove nothing."""
        with self._lock:
            faults = self._healed + self._faults
        for fault in faults:
            fault.check()

    @property
    def requests(self) -> list[Passed]:
        """All finished requests, in order of their end. A request is added before its response is complete."""
        with self._lock:
            return list(self._requests)

    def count(self, method: str = "*", path: Choice = "*") -> int:
        """Return the number of matching requests."""
        return sum(matches(each, method, path) for each in self.requests)

    def clear(self) -> None:
        """Forget the requests, the peak, and the number of refused ones."""
        with self._lock:
            self._requests.clear()
            self.peak = self.under_way
            self.refused = 0

    def enter(self) -> bool:
        """Count a new request. Return False if it is refused."""
        with self._lock:
            if self.concurrency is not None and self.under_way >= self.concurrency:
                self.refused += 1
                return False
            self.under_way += 1
            self.peak = max(self.peak, self.under_way)
            return True

    def leave(self, passed: Passed, entered: bool) -> None:
        """Record the end of a request."""
        with self._lock:
            self.under_way -= entered
            self._requests.append(passed)

    def choose(self, request: Passed) -> HTTPFault | None:
        """Return the fault that takes this request, if any."""
        chosen: HTTPFault | None = None
        with self._lock:
            for fault in self._faults:
                if fault.chooses(request, chosen is not None):
                    chosen = fault
        return chosen

    def portion(self) -> int | None:
        """Return the number of bytes to send at once, which depends on the bandwidth."""
        return None if self.bandwidth is None else max(1024, int(self.bandwidth / 50))

    async def pace(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes may pass. Always let other tasks run."""
        wait = 0.0
        if self.bandwidth is not None:
            now = time.monotonic()
            self._free_at = max(now - 0.05, self._free_at) + nbytes / self.bandwidth  # compensates for a late turn
            wait = max(0.0, self._free_at - now)
        await asyncio.sleep(wait)


def matches(request: Passed, method: str, path: Choice) -> bool:
    """Return True if a request matches the method (a glob) and the path."""
    if not fnmatchcase(request.method, method):
        return False
    return fnmatchcase(request.path, path) if isinstance(path, str) else path(request)


# One request through a proxy and its response: both are passed on unchanged, or with a fault.

GRACE = 1.0
"""Seconds that a client may go on sending a body after the response."""


@dataclass(slots=True)
class Way:
    """A body that is passed from one side to the other."""

    body: Body
    to: Channel | None
    """Receiver; None to discard the body."""
    mark: int | None = None
    """Offset of the byte before which the fault happens."""
    flip: int | None = None
    """Index of the bit to flip."""
    upto: int | None = None
    """Offset from which the rest is discarded."""
    passed: int = 0

    def spoil(self, data: memoryview) -> memoryview:
        """Return the next bytes, with the bit flipped if it is in them."""
        bit = self.flip
        if bit is None:
            return data
        if self.body.length:
            bit %= 8 * self.body.length
        at = bit // 8 - self.passed
        if not 0 <= at < len(data):
            return data
        self.flip = None
        spoilt = bytearray(data)
        spoilt[at] ^= 1 << bit % 8
        return memoryview(spoilt)


class HTTPExchange:
    """Passes on one request and its response. `ask` returns the connection to the target, and opens it if needed.

    Errors end the connections: `Gone` closes them orderly, any other `OSError` resets them.
    """

    def __init__(self, traffic: Traffic, client: Channel, head: Head, ask: Callable[[], Awaitable[Channel]]) -> None:
        self.traffic = traffic
        self.client = client
        self.head = head
        self.ask = ask
        self.fault: HTTPFault | None = None
        self.what = ""
        self.status = 0
        self.up: Way | None = None
        self.down: Way | None = None
        self.upload: asyncio.Task[None] | None = None
        self.continued = False
        self.entered = False
        self._noted = False
        self._request = Passed(head.start[0], head.start[1], head.headers)
        self._began = time.monotonic()

    async def run(self) -> bool:
        """Handle the request. Return True if another request may follow on the connection."""
        self.entered = self.traffic.enter()
        try:
            await asyncio.sleep(self.traffic.latency)
            if not self.entered:
                return await self._both_ways(self._reply(503))
            self.fault = self.traffic.choose(self._request)
            instead = None if self.fault is None else await self._before(self.fault)
            return await self._both_ways(instead) if instead is not None else await self._forward()
        finally:
            self._note()

    def _value(self, *whats: str) -> int | None:
        return self.fault.value if self.fault is not None and self.what in whats else None

    def _flip(self, side: str) -> int | None:
        return self._value("flip") if self.fault is not None and self.fault.side == side else None

    async def _before(self, fault: HTTPFault) -> Coroutine[None, None, bool] | None:
        """Apply a fault before the target is asked. Return the response in its place, if the target is not asked."""
        self.what = fault.what
        match fault.what:
            case "reset_before":
                self._strike()
                self._note()
                raise ConnectionResetError("reset_before")
            case "status":
                return self._reply(fault.value, fault.body, fault.headers)
            case "hang":
                return self._hang()
            case "delay":
                self._strike()
                await asyncio.sleep(fault.value)
            case "ignore_range" if "range" in self.head.headers:
                self._strike()
                self.head = self.head.changed("range", None)
        return None

    async def _forward(self) -> bool:
        try:
            target = await self.ask()
        except OSError as error:
            return await self._both_ways(self._reply(502, f"the target can't be reached: {error}\n".encode()))
        await target.send(self.head.raw)
        return await self._both_ways(self._answer(target), target)

    async def _both_ways(self, answer: Coroutine[None, None, bool], target: Channel | None = None) -> bool:
        """Pass on the request's body, and respond meanwhile. A client that disconnects ends the exchange."""
        self.upload = asyncio.create_task(self._upload(target))
        answering = asyncio.create_task(answer)
        leaving: asyncio.Task[None] | None = None
        try:
            await asyncio.wait({self.upload, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self.upload.result()
                leaving = asyncio.create_task(self.client.left())
                await asyncio.wait({leaving, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    leaving.result()
            stays = await answering
            if not self.upload.done() and (self.continued or "expect" not in self.head.headers):
                await asyncio.wait({self.upload}, timeout=GRACE)
            return stays and self.upload.done() and self.upload.exception() is None
        finally:
            tasks = [task for task in (self.upload, answering, leaving) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _upload(self, target: Channel | None) -> None:
        if target is None and "expect" in self.head.headers:
            await self.client.send(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.continued = True
        body = Body.of_request(self.client, self.head)
        self.up = Way(body, target, self._value("reset_upload_at"), self._flip("request"))
        if self.up.mark == 0:
            self._strike()
        await self._pass(self.up)

    async def _uploaded(self) -> None:
        if self.upload is not None:
            await self.upload

    async def _reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bool:
        """Respond in the target's place, after reading the request."""
        await self._uploaded()
        if self.what == "status":
            self._strike()
        self.status = status
        phrase = HTTPStatus(status).phrase if status in HTTPStatus.__members__.values() else ""
        lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
        if status not in (204, 304):
            lines.append(f"Content-Length: {len(body)}")
        sent = b"" if self._request.method == "HEAD" or status in (204, 304) else body
        self.down = Way(Body(self.client, len(sent)), self.client, passed=len(sent))
        self._note()
        await self.client.send("\r\n".join([*lines, "", ""]).encode("latin-1") + sent)
        return self.head.stays

    async def _hang(self) -> bool:
        await self._uploaded()
        self._strike()
        await self._released()
        raise Gone("released")

    async def _answer(self, target: Channel) -> bool:
        """Pass on the target's response."""
        while True:
            head = await target.read_head()
            if head is None:
                raise Gone("the target has left")
            if head.status >= 200:
                break
            self.continued = True
            await self.client.send(head.raw)
        if self.what == "reset_upload_at":
            await self._uploaded()  # a target may respond early, which must not spare the client
        body = Body.of_answer(target, head, self._request.method)
        if self.what == "lose_answer":
            await self._pass(Way(body, None))
            return await self._lose()
        self.status = head.status
        self.down = Way(body, self.client, self._value("reset_at", "close_at", "hang_at"), self._flip("response"))
        if (cut := self._value("truncate")) and body.length:
            self._strike()
            self.down.upto = max(0, body.length - cut)
            head = head.changed("Content-Length", str(self.down.upto))
        if self.down.mark == 0:
            self._strike()
        elif body.length == 0 or self.down.upto == 0:
            self._note()
        await self.client.send(head.raw)
        await self._pass(self.down)
        return self.head.stays and head.stays and not body.endless

    async def _lose(self) -> bool:
        self._strike()
        if self.fault is not None and self.fault.value == "hang":
            await self._released()
            raise Gone("released")
        self._note()
        raise ConnectionResetError("lose_answer")

    async def _pass(self, way: Way) -> None:
        """Pass a body on, piece by piece, with its faults."""
        if way.mark == 0:
            await self._at_mark(way)
        while (piece := await way.body.read()) is not None:
            data = piece.data
            if piece.payload:
                spoilt = way.spoil(data)
                if spoilt is not data:
                    self._strike()
                data = spoilt if way.upto is None else spoilt[: way.upto - way.passed]
                if way.mark is not None and way.passed + len(data) >= way.mark:
                    data = await self._upto_mark(way, data)
                way.passed += len(data)
            if way is self.down and (piece.last or way.passed == way.upto):
                self._note()  # now: a test may check as soon as the client has the last byte
            await self._send(way, data)

    async def _upto_mark(self, way: Way, data: memoryview) -> memoryview:
        """Send the bytes before the mark, apply the fault, and return the rest."""
        assert way.mark is not None
        before = way.mark - way.passed
        way.passed = way.mark
        self._strike()
        await self._send(way, data[:before])
        await self._at_mark(way)
        return data[before:]

    async def _at_mark(self, way: Way) -> None:
        way.mark = None
        if self.what == "hang_at":
            return await self._released()
        if way.to is not None:
            await way.to.flushed()
        self._note()
        raise Gone("close_at") if self.what == "close_at" else ConnectionResetError(self.what)

    async def _send(self, way: Way, data: memoryview) -> None:
        begin = 0
        while begin < len(data):
            part = data[begin : begin + (self.traffic.portion() or len(data))]
            begin += len(part)
            await self.traffic.pace(len(part))
            try:
                if way.to is not None:
                    await way.to.send(part)
            except ConnectionError:
                if way.to is self.client:
                    raise
                way.to = None  # the target accepts no more; its response may say why

    async def _released(self) -> None:
        if self.fault is not None:
            await self.fault.over.wait()

    def _strike(self) -> None:
        if self.fault is not None:
            self.fault.strike()

    def _note(self) -> None:
        """Record the request, once."""
        if self._noted:
            return
        self._noted = True
        passed = replace(
            self._request,
            status=self.status,
            request_bytes=self.up.passed if self.up else 0,
            response_bytes=self.down.passed if self.down else 0,
            seconds=time.monotonic() - self._began,
            fault=None if self.fault is None else repr(self.fault),
        )
        self.traffic.leave(passed, self.entered)


# Proxy between a client and an HTTP server that injects faults at chosen requests and bytes.
#
# A plugin for an object store must handle broken connections, lost responses and throttling, which no server produces
# on request. Everything without a fault passes unchanged, byte for byte. That includes the heads, since signatures
# cover them.


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
