"""Agreement of all ranks to act at the same call, without any rank waiting for another.

Waiting would deadlock with the collectives of training: a rank that waits here blocks the others there. Instead, every
rank counts its calls. Before a rank queries the store for a request, it publishes the number of the last call that it
may pass without another query. A rank that sees a request reads the numbers of all ranks, and proposes the first call
after the largest. The first proposal wins (compare-and-set), and every rank acts when it reaches that call.

No rank can be past that call: a rank that saw no request had published its number before the query, so before the
request existed. The proposer reads the numbers after that, and so finds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from snapshot.distributed.exchange import lost_store_error

T = TypeVar("T")
LOOK = 0.5
"""Approximate seconds between two queries of a rank. Groups of thousands wait longer, to spare their store."""
MOST = 64
"""Maximum calls without a query, so that a rank whose calls become slow notices within that many."""


class StepVote:
    """A repeated yes-or-no vote of all ranks, which must all call `ask` equally often.

    `store` has the interface of torch's stores; `prefix` must be unique to this vote.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._look = max(LOOK, world / 2000)
        self.calls = 0
        self._passed = 0
        """Last call that this rank may pass without a query, as published."""
        self._epoch = 0
        """Number of agreed actions so far."""
        self._at: int | None = None
        """Call at which to act next, once that is agreed."""
        self._wished = False
        self._acted: list[tuple[int, int]] = []
        """Past epochs and their calls. Their keys are deleted when no rank needs them any more."""
        self._block = 1
        self._last = time.monotonic()
        self._slowest = 0.0

    def ask(self, wish: bool) -> bool:
        """Return True if all ranks act at this call. `wish`: this rank wants them to act as soon as possible.

        Raises RankError if the group's store is unreachable.
        """
        self.calls += 1
        now = time.monotonic()
        self._slowest, self._last = max(self._slowest, now - self._last), now
        if self._at is None and (self.calls > self._passed or (wish and not self._wished)):
            self._guarded(lambda: self._talk(wish))
            self._last = time.monotonic()  # time spent in the store is not time of the calls
        if self._at is None or self.calls < self._at:
            return False
        self._acted.append((self._epoch, self._at))
        self._epoch, self._at, self._wished = self._epoch + 1, None, False
        self._passed = self.calls  # the published number covers only the epoch that ended
        return True

    def _talk(self, wish: bool) -> None:
        if self.calls > self._passed:
            self._publish(1 if wish else MOST)
        if wish and not self._wished:
            self._store.set(self._key("wish"), "1")
            self._wished = True
        if self._wished or self._store.check([self._key("wish")]):
            self._at = self._decided()

    def _publish(self, most: int) -> None:
        """Publish how far this rank runs without a query: until the next one is due, judged by its slowest call."""
        due = int(self._look / self._slowest) if self._slowest > 0 else MOST
        self._block = max(1, min(due, 2 * self._block, most)) if self.calls > 1 else 1
        self._slowest = 0.0
        self._passed = self.calls + self._block - 1
        self._store.set(self._name(self._rank), str(self._passed))

    def _decided(self) -> int:
        """Return the agreed call, which is this rank's proposal if that is the first."""
        key = self._key("at")
        if self._store.check([key]):
            return int(self._store.get(key))
        passed = self._all_passed()
        self._forget(min(passed))
        return int(self._store.compare_set(key, "", str(max(passed) + 1)))

    def _all_passed(self) -> list[int]:
        """Return the published numbers of all ranks; 0 for a rank without one, which has not passed any call either."""
        names = [self._name(rank) for rank in range(self._world)]
        if self._store.has_extended_api() and self._store.check(names):
            return [int(value) for value in self._store.multi_get(names)]
        return [int(self._store.get(name)) if self._store.check([name]) else 0 for name in names]

    def _forget(self, slowest: int) -> None:
        """Delete the keys of epochs that all ranks have left: a published number is at most `MOST` calls ahead."""
        while self._acted and self._acted[0][1] + MOST < slowest:
            epoch, _ = self._acted.pop(0)
            for name in ("wish", "at"):
                self._store.delete_key(f"{self._prefix}/{epoch}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._epoch}/{name}"

    def _name(self, rank: int) -> str:
        return f"{self._prefix}/passed/{rank}"

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call the store in a thread that can be abandoned: a store whose server is stopped never responds."""
        future: Future[None] = Future()

        def talk() -> None:
            try:
                work()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                future.set_exception(error)

        threading.Thread(target=talk, name="snapshot-io-store", daemon=True).start()
        try:
            future.result(self._timeout)
            return
        except NotYet:
            what = f"has not responded for {self._timeout:g} s"
        except RuntimeError as error:
            what = f"cannot be reached any more ({error})"
        raise lost_store_error(what)
