"""Limits on the asynchronous takes of a process: a number of slots, and one shared memory budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from snapshot.errors import SnapshotBusyError
from snapshot.io.aio import Latch
from snapshot.io.arena import arena
from snapshot.io.budget import Pool
from snapshot.io.host_memory import available_memory
from snapshot.io.system import PerProcess
from snapshot.settings import MiB, Settings
from snapshot.text import counted


class TakeSlot:
    """A slot of one take, from its call until it is committed or failed."""

    def __init__(self, take_slots: TakeSlots) -> None:
        self._in_flight = take_slots

    def pool(self, limit: int) -> Pool:
        """Return the memory pool that all pending takes share. The newest take sets its limit."""
        return self._in_flight.pool(limit)

    def leave_after(self, work: Future[Any]) -> None:
        """Hold the slot until the work is done."""
        work.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        """Release the slot. Later calls do nothing."""
        self._in_flight.left(self)


class TakeSlots:
    """All slots of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[TakeSlot] = set()
        self._waiting: list[Latch] = []
        self._pool = Pool(0)

    @contextmanager
    def take(self, when_busy: str) -> Iterator[TakeSlot]:
        """Take a slot, and release it if the body fails. `when_busy` decides whether to wait if none is free."""
        most = Settings.current().pending
        place = TakeSlot(self)
        try:
            while (gate := self._enter(place, most)) is not None:
                if when_busy == "raise":
                    raise SnapshotBusyError(
                        f"{counted(most, 'snapshot')} {'is' if most == 1 else 'are'} already pending; wait() for "
                        "one, save less often, or raise SNAPSHOT_PENDING"
                    )
                gate.wait()
            yield place
        except BaseException:
            place.leave()
            raise

    def _enter(self, place: TakeSlot, most: int) -> Latch | None:
        """Take a slot, or return a latch to wait for."""
        with self._lock:
            if len(self._taken) < most:
                self._taken.add(place)
                return None
            self._waiting.append(Latch())
            return self._waiting[-1]

    def left(self, place: TakeSlot) -> None:
        """Free a slot that was taken."""
        with self._lock:
            self._taken.discard(place)
            waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.open()

    def pool(self, limit: int) -> Pool:
        with self._lock:
            if len(self._taken) == 1:
                self._pool = Pool(limit)
            else:
                with self._pool.lock:
                    self._pool.resize(limit)
            return self._pool

    def usual_limit(self) -> int:
        """Return half of the host's free memory without pending takes, shared by the processes of a job."""
        free = available_memory() + arena().kept + self._pool.used
        return max(64 * MiB, free // 2 // Settings.processes())


_take_slots = PerProcess(TakeSlots)


def take_slots() -> TakeSlots:
    """Return the slots of this process."""
    return _take_slots.get()
