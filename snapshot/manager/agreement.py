"""All ranks act at the same call, with no rank ever waiting for another one.

A wait would deadlock with the collectives of training: a rank that waits here keeps the others waiting there. So ranks
tell, ahead of time, how far they will go without looking. Every rank counts its calls. Before it looks for a wish it
publishes up to which call it may pass without looking again. Who sees the wish reads all of these, and proposes the
first call that lies beyond them; of several proposals the first wins (compare-and-set), and every rank acts when it
comes to that call.

That no rank is past it already: a rank that saw no wish had published before it looked, so before the wish was there;
whoever proposes reads after that, and finds the number.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from typing import Any, TypeVar

from snapshot.errors import RankError

T = TypeVar("T")
LOOK = 0.5
"""About so many seconds lie between two looks of a rank; more in groups of thousands, for their store's sake."""
MOST = 64
"""A rank passes at most so many calls without a look: if they grow slow, it notices within as many."""


class StepVote:
    """One question that all ranks ask again and again: is it now? They must all ask equally often.

    `store` has the calls of torch's stores, `prefix` is for this question alone.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._look = max(LOOK, world / 2000)
        self.calls = 0
        self._passed = 0
        """Up to which call this rank may go without a look, as published."""
        self._epoch = 0
        """How many times it was agreed to act."""
        self._at: int | None = None
        """The call at which to act next, once that is known."""
        self._wished = False
        self._acted: list[tuple[int, int]] = []
        """Epochs that are over, and their calls: their keys go when no rank needs them any more."""
        self._block = 1
        self._last = time.monotonic()
        self._slowest = 0.0

    def ask(self, wish: bool) -> bool:
        """Whether all act at this call. `wish`: this rank wants them to, as soon as can be.

        Raises RankError if the group's store is gone.
        """
        self.calls += 1
        now = time.monotonic()
        self._slowest, self._last = max(self._slowest, now - self._last), now
        if self._at is None and (self.calls > self._passed or (wish and not self._wished)):
            self._guarded(lambda: self._talk(wish))
            self._last = time.monotonic()  # what the store takes is not the calls' own time
        if self._at is None or self.calls < self._at:
            return False
        self._acted.append((self._epoch, self._at))
        self._epoch, self._at, self._wished = self._epoch + 1, None, False
        self._passed = self.calls  # it was published before a look for the wish of this time, not for the next
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
        """Say how far this rank goes without a look: as far as it comes until the next is due, by its slowest call."""
        due = int(self._look / self._slowest) if self._slowest > 0 else MOST
        self._block = max(1, min(due, 2 * self._block, most)) if self.calls > 1 else 1
        self._slowest = 0.0
        self._passed = self.calls + self._block - 1
        self._store.set(self._name(self._rank), str(self._passed))

    def _decided(self) -> int:
        """Return the call that was agreed on; this rank's proposal, if it is the first."""
        key = self._key("at")
        if self._store.check([key]):
            return int(self._store.get(key))
        passed = self._all_passed()
        self._forget(min(passed))
        return int(self._store.compare_set(key, "", str(max(passed) + 1)))

    def _all_passed(self) -> list[int]:
        """Return what all ranks have published; 0 of one that has not: it has not passed any call, either."""
        names = [self._name(rank) for rank in range(self._world)]
        if self._store.has_extended_api() and self._store.check(names):
            return [int(value) for value in self._store.multi_get(names)]
        return [int(self._store.get(name)) if self._store.check([name]) else 0 for name in names]

    def _forget(self, slowest: int) -> None:
        """Remove the keys of epochs that all ranks have left: what they published is at most so far ahead of them."""
        while self._acted and self._acted[0][1] + MOST < slowest:
            epoch, _ = self._acted.pop(0)
            for name in ("wish", "at"):
                self._store.delete_key(f"{self._prefix}/{epoch}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._epoch}/{name}"

    def _name(self, rank: int) -> str:
        return f"{self._prefix}/passed/{rank}"

    def _guarded(self, work: Callable[[], None]) -> None:
        """Talk to the store in a thread that can be left behind: a store whose server is stopped answers nothing."""
        future: Future[None] = Future()

        def talk() -> None:
            try:
                work()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                future.set_exception(error)

        threading.Thread(target=talk, name="snapshot-io-store", daemon=True).start()
        try:
            future.result(self._timeout)
            return
        except NotYet:
            what = f"answers nothing for {self._timeout:g} s"
        except RuntimeError as error:
            what = f"cannot be reached any more ({error})"
        raise RankError(
            f"rank 0: the store of the process group {what}: the process that serves it, most likely this rank, is "
            "stopped or gone",
            rank=0,
        )
