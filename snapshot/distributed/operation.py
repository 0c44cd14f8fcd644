"""The frame of every verb on checkpoints: its ranks, progress, memory and storages, which all end with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from snapshot.distributed.exchange import Exchange, call_of
from snapshot.events import emit
from snapshot.io.loop import at_work
from snapshot.io.session import NO_DEFAULTS, MemoryDefaults, Session
from snapshot.io.url import URL, Location
from snapshot.progress import Meter, ProgressArgument
from snapshot.settings import expect_positive

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

R = TypeVar("R")


class Operation:
    """One call of a verb, until its context ends."""

    def __init__(self, verb: str, url: URL, exchange: Exchange, meter: Meter, budget: int | None) -> None:
        self.verb = verb
        self.url = url
        self.exchange = exchange
        self.meter = meter
        self.budget = budget
        self._sessions = ExitStack()
        self._began = time.perf_counter()

    def open(
        self,
        place: Location,
        *,
        divisor: int = 1,
        durable: bool = True,
        memory: MemoryDefaults = NO_DEFAULTS,
    ) -> Session:
        """Open a storage until the operation ends. It may use the memory budget, divided by `divisor`."""
        return self._sessions.enter_context(
            Session(
                place.url,
                place.options,
                durable=durable,
                budget=self.part(divisor),
                memory=memory,
                seal=place.seal,
            )
        )

    def part(self, divisor: int) -> int | None:
        """Return the memory budget, divided by `divisor`. None if the caller gave none."""
        return None if self.budget is None else max(1, self.budget // divisor)

    @property
    def seconds(self) -> float:
        """The seconds since the operation began."""
        return time.perf_counter() - self._began

    def emit(self, name: str, **fields: Any) -> None:
        """Emit an event of this operation."""
        emit(name, self.verb, str(self.url), **fields)

    def done(self, report: R, event: str, **fields: Any) -> R:
        """Return a report with its duration, and emit the event."""
        made: R = replace(report, seconds=self.seconds)  # type: ignore[type-var]
        self.emit(event, **fields, seconds=round(self.seconds, 3))
        return made

    def close(self) -> None:
        """Close the storages, and end the progress display."""
        try:
            self._sessions.close()
        finally:
            self.meter.close()


@contextmanager
def operation(
    verb: str,
    url: URL,
    *,
    pg: ProcessGroup | None = None,
    ranks: bool = False,
    budget: int | None = None,
    progress: ProgressArgument = None,
    timeout: float | None = None,
) -> Iterator[Operation]:
    """Run a verb: on all ranks of `pg` if `ranks`, otherwise in this process alone.

    An error that leaves it is sent to the other ranks, and emitted as `failed`.
    """
    with at_work(), call_of(verb, pg, ranks=ranks, timeout=timeout) as exchange:
        made = Operation(verb, url, exchange, Meter(verb, progress), budget)
        try:
            expect_positive("memory_budget_bytes", budget)
            yield made
        except BaseException as error:
            made.emit("failed", error=error)
            raise
        finally:
            made.close()
