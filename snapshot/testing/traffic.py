"""What passes a proxy, for its user: what went through, what is to go wrong, and how much may pass."""

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
    """A request and what became of it. To a callable that chooses requests, only the first three are known."""

    method: str
    path: str
    """As it was sent, with the query."""
    headers: Mapping[str, str]
    """Names in lower case; several of one name joined by commas."""
    status: int = 0
    """As the target answered, or the proxy in its place; 0 if there was no answer."""
    request_bytes: int = 0
    """Of the body that arrived; without what frames its chunks."""
    response_bytes: int = 0
    """Of the body that was sent to the client; without what frames its chunks."""
    seconds: float = 0.0
    fault: str | None = None
    """The `repr` of the fault that had chosen it."""


Choice = str | Callable[[Passed], bool]
"""Requests by a glob over the path with its query (`*` crosses `/`), or by a callable."""


class Mishap(TypedDict, total=False):
    """What goes wrong with a request: exactly one of these, and what goes with it."""

    status: int
    """The proxy answers with this status. The request's body is read and thrown away; the target is not asked."""
    body: bytes
    """With `status`."""
    headers: Mapping[str, str]
    """With `status`: those beside `Content-Length`."""
    reset_before: bool
    """The connection is reset when the request's head is there. The target is not asked."""
    reset_upload_at: int
    """After so many bytes of the request's body both connections are reset, the client's and the target's."""
    reset_at: int
    """After so many bytes of the answer's body have reached the client, the connection is reset; 0: after the head."""
    close_at: int
    """The same, but it is ended in good order."""
    hang_at: int
    """The same, but it is held open, and nothing comes any more. It goes on when the fault is released."""
    hang: bool
    """The request is read, the target is not asked, and no answer comes. Released, the connection ends."""
    lose_answer: Literal[True, "hang"]
    """The target does what it was asked to, but of its answer no byte arrives: the connection is reset, or held open
    until the fault is released."""
    flip: int
    """This bit of the body is turned over; around the end, if the length is known."""
    side: Literal["request", "response"]
    """With `flip`: whose body it is. The answer's, if it is not said."""
    delay: float
    """So many seconds go by before the target is asked."""
    ignore_range: bool
    """The target is asked without the `Range` header."""
    truncate: int
    """The answer is so many bytes shorter, and says so: only of an answer with a `Content-Length`."""


_WITH = {"body": "status", "headers": "status", "side": "flip"}


class HTTPFault:
    """Lets one thing go wrong with the `nth` matching request and those after it: `times` in all, or all (None).

    Made by `FaultProxy.fault`. As a context it is over at the end, and must have happened, as `check()` has it.
    """

    def __init__(  # noqa: PLR0917 - made in one place
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
            raise ValueError(f"a fault is exactly one of {', '.join(kinds)}, not {mishap}")
        self.what: str = whats.pop()
        self.value = given[self.what]
        if stray := [name for name, what in _WITH.items() if name in given and what != self.what]:
            raise ValueError(f"{', '.join(stray)} says nothing about {self.what}")
        self.body: bytes = given.get("body", b"")
        self.headers: Mapping[str, str] = given.get("headers", {})
        self.side: str = given.get("side", "response")
        if self.side not in ("request", "response"):
            raise ValueError(f"a body is of the request or of the response, not of {self.side!r}")
        self.method = method
        self.path = path
        self.nth = nth
        self.times = times
        self.must_happen = must_happen
        self.met = 0
        """How many requests matched so far."""
        self.hits = 0
        """To how many it has happened: of those that it chose, one may have been too short for it."""
        self.over = asyncio.Event()
        self._chosen = 0
        self._reached = threading.Event()
        self._released = False
        self._traffic = traffic

    def chooses(self, request: Passed, taken: bool) -> bool:
        """Count a request, and say whether it is one of the chosen, if no other fault has taken it."""
        if not matches(request, self.method, self.path):
            return False
        self.met += 1
        if taken or self._released or self.met < self.nth or self._chosen == self.times:
            return False
        self._chosen += 1
        return True

    def strike(self) -> None:
        """Count a hit: before anyone else can see it."""
        self.hits += 1
        self._reached.set()

    def wait_reached(self, timeout: float = 30.0) -> None:
        """Wait until it has happened; a `TimeoutError` if it does not."""
        if not self._reached.wait(timeout):
            raise TimeoutError(f"{self} was not reached in {timeout} seconds")

    def release(self) -> None:
        """Let all end or go on that hang here, and choose none any more."""
        self._released = True
        with suppress(RuntimeError):  # the proxy is closed, and nothing hangs
            self._traffic.loop.call_soon_threadsafe(self.over.set)

    def check(self) -> None:
        """Raise `AssertionError` if it never happened, unless it was made with `must_happen=False`."""
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
    """The limits, the faults and the counters of a proxy; all of it from any thread, at any time."""

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.bandwidth: float | None = None
        """How many bytes of bodies pass in a second, both directions together; None: as many as may be."""
        self.concurrency: int | None = None
        """How many requests may be under way at once: more are answered with status 503, and counted as `refused`."""
        self.latency = 0.0
        """How many seconds go by before a request is looked at."""
        self.under_way = 0
        """How many requests are under way; those that were refused are not."""
        self.peak = 0
        """The most that were."""
        self.refused = 0
        self._requests: list[Passed] = []
        self._faults: list[HTTPFault] = []
        self._healed: list[HTTPFault] = []
        self._free_at = 0.0
        self._lock = threading.RLock()  # a callable that chooses may ask what has passed

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
        """Let something go wrong from now on: see `Mishap` and `HTTPFault`.

        A request that several faults would choose goes to the one that was made first; the others take the next.
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
        """Let nothing go wrong any more. What hangs goes on hanging, until its fault is released."""
        with self._lock:
            self._healed += self._faults
            self._faults = []

    def check(self) -> None:
        """Raise `AssertionError` if a fault never happened, also one that was healed: such a test would show
        nothing."""
        with self._lock:
            faults = self._healed + self._faults
        for fault in faults:
            fault.check()

    @property
    def requests(self) -> list[Passed]:
        """All that is over, in the order in which it ended: a request is here before its answer is whole."""
        with self._lock:
            return list(self._requests)

    def count(self, method: str = "*", path: Choice = "*") -> int:
        """How many of them match."""
        return sum(matches(each, method, path) for each in self.requests)

    def clear(self) -> None:
        """Forget what has passed, the peak, and how many were refused."""
        with self._lock:
            self._requests.clear()
            self.peak = self.under_way
            self.refused = 0

    def enter(self) -> bool:
        """Return a request comes: whether there is room for it."""
        with self._lock:
            if self.concurrency is not None and self.under_way >= self.concurrency:
                self.refused += 1
                return False
            self.under_way += 1
            self.peak = max(self.peak, self.under_way)
            return True

    def leave(self, passed: Passed, entered: bool) -> None:
        """End a request."""
        with self._lock:
            self.under_way -= entered
            self._requests.append(passed)

    def choose(self, request: Passed) -> HTTPFault | None:
        """Return the fault that takes this request, if any does."""
        chosen: HTTPFault | None = None
        with self._lock:
            for fault in self._faults:
                if fault.chooses(request, chosen is not None):
                    chosen = fault
        return chosen

    def portion(self) -> int | None:
        """How many bytes are to be sent at once: few, if the bandwidth is small."""
        return None if self.bandwidth is None else max(1024, int(self.bandwidth / 50))

    async def pace(self, nbytes: int) -> None:
        """Return when so many bytes may pass; and let others have a turn in any case."""
        wait = 0.0
        if self.bandwidth is not None:
            now = time.monotonic()
            self._free_at = max(now - 0.05, self._free_at) + nbytes / self.bandwidth  # a late turn is made up for
            wait = max(0.0, self._free_at - now)
        await asyncio.sleep(wait)


def matches(request: Passed, method: str, path: Choice) -> bool:
    """Whether a request is of this method (a glob) and path."""
    if not fnmatchcase(request.method, method):
        return False
    return fnmatchcase(request.path, path) if isinstance(path, str) else path(request)
