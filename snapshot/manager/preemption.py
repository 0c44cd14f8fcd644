"""What is saved before a job is killed: the most that fits into the time that is left.

A scheduler sends a signal some seconds before it kills a job, or tells the time of the kill. Rank 0 chooses for all
ranks, by the least time that is left on any of them and by what the last saves needed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from glob import escape
from typing import Any

import torch

from snapshot.events import emit, log
from snapshot.reports import SAVED, Saved
from snapshot.save.findings import PARTIAL
from snapshot.save.take import AppState
from snapshot.save.take_options import TakeOptions
from snapshot.settings import Settings
from snapshot.state.model_state import ModuleMap
from snapshot.text import Duration, duration_text, seconds_of

Source = Callable[[], float | datetime | None]
"""Returns when the job will be killed, in seconds since the epoch, or None while that is not known."""
RESERVE = 1.0
"""Seconds that a process needs to end after its last save."""
AHEAD = 60.0
"""Seconds before the time that a source tells, or twice the time of a save if that is more, in which the job stops."""
OVERDUE = 60.0
"""Seconds after a deadline from which on it does not count: the process is still there."""
PERIOD = 1.0
"""Seconds between two calls of a source. They run in a thread, since a source may ask a server that does not answer."""


class Deadline:
    """When this process will be killed, as far as it knows."""

    def __init__(self, given: Duration | Source | Sequence[Duration | Source] | None) -> None:
        """`given`: seconds from a stop signal to the kill, a source, or several of these."""
        several: list[Any] = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
        if not any(not callable(each) for each in several) and Settings.current().deadline:
            several.append(Settings.current().deadline)
        self._seconds = [seconds_of(each, "deadline") for each in several if not callable(each)]
        self.sources = [_Source(each) for each in several if callable(each)]
        self._done = threading.Event()
        self._threads: list[threading.Thread] = []

    def told(self) -> float | None:
        """Return the seconds until the time that a source tells; None if none tells one."""
        if self.sources and not self._threads and not self._done.is_set():
            for each in self.sources:  # one that does not answer delays no other
                work = partial(each.watch, self._done)
                self._threads.append(threading.Thread(target=work, name="snapshot-deadline", daemon=True))
                self._threads[-1].start()
            end = time.monotonic() + PERIOD
            for each in self.sources:  # the first call of a manager knows it, unless a source is slow
                each.asked.wait(max(0.0, end - time.monotonic()))
        times = [at for each in self.sources if (at := each.at) is not None]
        return min(times) - time.time() if times else None

    def left(self, signalled: float | None) -> float | None:
        """Return the seconds until the kill, None if unknown. `signalled`: monotonic time of a stop signal, if any."""
        found = [] if signalled is None else [signalled + each - time.monotonic() for each in self._seconds]
        told = self.told()
        times = [each for each in (*found, told) if each is not None and each > -OVERDUE]
        return min(times, default=None)

    def close(self) -> None:
        """Stop calling the sources. One that does not return is left alone."""
        self._done.set()


class _Source:
    """A source, and the time that it told last. One that fails is logged once, and asked again."""

    def __init__(self, ask: Source) -> None:
        self._ask = ask
        self._failed = False
        self.at: float | None = None
        self.asked = threading.Event()
        """Set after the first call."""

    def watch(self, done: threading.Event) -> None:
        """Ask until `done`."""
        while True:
            self.ask()
            self.asked.set()
            if done.wait(PERIOD):
                return

    def ask(self) -> None:
        try:
            found = self._ask()
            at = found.timestamp() if isinstance(found, datetime) else None if found is None else float(found)
            if at is not None and not math.isfinite(at):
                raise ValueError(f"the time must be finite seconds since the epoch, got {at}")
            self.at = at
        except Exception as error:  # noqa: BLE001 - training must not end by what tells when it ends
            if not self._failed:
                log.warning("deadline: %r failed: %s: %s", self._ask, type(error).__name__, error)
            self._failed = True


@dataclass(frozen=True)
class SaveCosts:
    """What a save needs, as rank 0 knows it."""

    take: float
    """Seconds of the slowest of the last saves; 0 if none was measured."""
    upload: float = 0.0
    """Seconds until such a save is in the far root, beyond those."""
    outlives: bool = False
    """True if a near step is still there when this host is gone."""

    @property
    def whole(self) -> float:
        return self.take + self.upload


def choose_save(left: float, costs: SaveCosts, share: Callable[[], float]) -> Saved:
    """Return what can be saved in the time that is left.

    `share`: the part of the bytes that is saved without the state of optimizers. It is asked for only if needed.

    >>> costs = SaveCosts(take=10, upload=20, outlives=True)
    >>> [choose_save(left, costs, lambda: 1 / 3) for left in (31, 30, 11, 10.9)]
    ['whole', 'near', 'near', 'none']
    >>> [choose_save(left, SaveCosts(take=30), lambda: 1 / 3) for left in (31, 30, 11, 10)]
    ['whole', 'parameters', 'parameters', 'none']
    """
    ready = left - RESERVE
    if costs.whole <= ready:
        return "whole"
    if costs.outlives and costs.take <= ready:
        return "near"
    return "parameters" if ready > 0 and costs.whole * share() <= ready else "none"


def parameter_share(app_state: AppState) -> float:
    """Return the part of the bytes of an app state that are not the state of optimizers; 1 if there is none to omit.

    What objects of the application have in their state is not counted, only modules, optimizers and dictionaries.
    """
    kept = omitted = 0
    for key, stateful in app_state.items():
        found = ModuleMap(key, stateful)
        kept += sum(each.nbytes for _, each in found.parameters()) + _nbytes(stateful)
        kept += sum(_nbytes(module._buffers) for _, module in found.modules)  # noqa: SLF001 - no walk for each module
        for optimizer in found.optimizers:
            states = [value for state in optimizer.state.values() for value in getattr(state, "values", list)()]
            omitted += sum(getattr(value, "nbytes", 0) for value in states)
    return kept / (kept + omitted) if omitted else 1.0


def _nbytes(value: Any) -> int:
    """Return the bytes of the tensors in a value."""
    if isinstance(value, (Mapping, list, tuple)):
        return sum(map(_nbytes, value.values() if isinstance(value, Mapping) else value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def without_optimizers(options: TakeOptions, app_state: AppState) -> TakeOptions:
    """Return the options of a take that leaves the state of optimizers out."""
    found = [ModuleMap(key, each) for key, each in app_state.items()]
    globs = [escape(each.path) + ("/optim" if each.joined else "") for each in found if each.optimizers]
    return replace(options, exclude=[*options.exclude, *globs])


class LastSave:
    """The end of a job: what was saved last, for the line that it logs when it ends."""

    def __init__(self) -> None:
        self.good: int | None = None
        """The last step that was committed whole, or restored."""
        self._text = ""
        self.failure = False
        """True if the last save failed."""
        self._tight = False
        """True if there was a deadline."""

    def chose(self, saved: Saved, path: str, step: int, left: float | None, needed: float) -> None:
        """Record what a take saves, or that it saves nothing, and send an event."""
        time_left = "" if left is None else f", {duration_text(max(0.0, left))} before the deadline"
        self.failure, self._tight = False, left is not None or saved != "whole"
        self._text = f"step {step}: {SAVED[saved]}{time_left}"
        emit("preempted", "take", path, step=step, saved=saved, left=left, needed=needed)
        if saved != "whole":
            why = f"a whole save needs {duration_text(needed)}"
            log.warning("%s: %s, since %s", path, self._text, why)

    def failed(self, step: object, error: BaseException) -> None:
        """Record that a save failed. If the job does not end, a later one takes its place."""
        self._text, self.failure = f"step {step} was not saved: {type(error).__name__}: {error}", True

    def log(self, url: object, running: int | None = None, *, far: bool = True) -> None:
        """Log the end of a job that was told to stop: what was saved, and the step that the next start goes on from.

        `running`: a step whose take is not over yet. `far`: False if an upload was not over when the time was.
        """
        good = "no step of this process is good" if self.good is None else f"the last good step is {self.good}"
        level = logging.WARNING if self._tight or self.failure else logging.INFO
        text = self._text or "nothing was saved since"
        text += "" if running is None else f"; step {running} is still being saved"
        text += "" if far else "; it is not in the root yet"
        log.log(level, "%s: stopped; %s; %s", url, text, good)


def partial_note(left: float | None) -> dict[str, Any]:
    """Return what marks a step without the state of optimizers in its metadata."""
    return {PARTIAL: f"parameters only: {duration_text(max(0.0, left or 0.0))} were left for the save"}


def limited_by(left: float | None, timeout: float | None) -> float | None:
    """Return the time after which a rank counts as dead: soon enough that the others end before they are killed."""
    if left is None:
        return timeout
    return min(max(left - RESERVE, RESERVE), math.inf if timeout is None else timeout)
