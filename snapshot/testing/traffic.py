"""Traffic of a proxy, for its user: the requests, the faults, and the limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack


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

    def __init__(  # noqa: PLR0917 - created in one place
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
