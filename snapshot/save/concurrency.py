"""What the asynchronous takes of a process share while they are under way: so many places, and one budget."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from snapshot.errors import SnapshotBusyError
from snapshot.options import MiB, Settings
from snapshot.per_process import PerProcess
from snapshot.runtime.arena import arena
from snapshot.runtime.budget import Pool
from snapshot.runtime.host_memory import available_memory
from snapshot.runtime.latch import Latch
from snapshot.text import counted


class TakeSlot:
    """The place of one take, from its call until it is committed or has failed."""

    def __init__(self, take_slots: TakeSlots) -> None:
        self._in_flight = take_slots

    def pool(self, limit: int) -> Pool:
        """Return what all takes under way may hold together: the newest one says how much."""
        return self._in_flight.pool(limit)

    def leave_after(self, work: Future[Any]) -> None:
        """Keep it until the work is done."""
        work.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        """Make room for the next one. Once only: later calls do nothing."""
        self._in_flight.left(self)


class TakeSlots:
    """All places: how many takes are in flight."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[TakeSlot] = set()
        self._waiting: list[Latch] = []
        self._pool = Pool(0)

    @contextmanager
    def take(self, when_busy: str) -> Iterator[TakeSlot]:
        """Take a slot, which is given back if what is done inside fails; `when_busy` says what to do if there is
        none."""
        most = Settings.current().pending
        place = TakeSlot(self)
        try:
            while (gate := self._enter(place, most)) is not None:
                if when_busy == "raise":
                    raise SnapshotBusyError(
                        f"{counted(most, 'snapshot')} {'is' if most == 1 else 'are'} being written already: wait() for "
                        "one, take them less often, or let SNAPSHOT_PENDING allow more"
                    )
                gate.wait()
            yield place
        except BaseException:
            place.leave()
            raise

    def _enter(self, place: TakeSlot, most: int) -> Latch | None:
        """Take a place, or say where to wait for one."""
        with self._lock:
            if len(self._taken) < most:
                self._taken.add(place)
                return None
            self._waiting.append(Latch())
            return self._waiting[-1]

    def left(self, place: TakeSlot) -> None:
        """Free a slot, if it was taken."""
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
        """Half of what the host would have free if no take were under way, shared by the processes of a job."""
        free = available_memory() + arena().kept + self._pool.used
        return max(64 * MiB, free // 2 // Settings.processes())


_take_slots = PerProcess(TakeSlots)


def take_slots() -> TakeSlots:
    """Return the slots of this process."""
    return _take_slots.get()
