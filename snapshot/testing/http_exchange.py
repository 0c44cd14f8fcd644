"""One request through a proxy and its response: both are passed on unchanged, or with a fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from snapshot.testing.traffic import HTTPFault, Passed, Traffic
from snapshot.testing.wire import Body, Channel, Gone, Head

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
