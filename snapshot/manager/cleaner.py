"""Removing in the background: one thread at a time, which is told what was committed, and never fails a take."""

from __future__ import annotations

import threading
from collections.abc import Callable

from snapshot.events import emit, log
from snapshot.manager.cleaning import UnknownMetric, remove_steps, survey_steps
from snapshot.manager.policies import Policy
from snapshot.manager.root import Root
from snapshot.runtime.loop import run


class Cleaner:
    """Removes what a policy does not keep, after commits.

    `spared(step)`: whether a step is under way, or being read. `damaged()`: the steps that were found to be damaged.
    """

    def __init__(
        self, root: Root, policy: Policy, spared: Callable[[int], bool], damaged: Callable[[], set[int]]
    ) -> None:
        self._root = root
        self._policy = policy
        self._spared = spared
        self._damaged = damaged
        self._change = threading.Condition()
        self._wanted: int | None = None
        self._thread: threading.Thread | None = None
        self._said: set[str | int] = set()
        """What is not to be said again: steps that are damaged, and that a metric is unknown."""

    def committed(self, step: int) -> None:
        """Note a step that is committed and durable. Return at once."""
        with self._change:
            self._wanted = step if self._wanted is None else max(step, self._wanted)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="snapshot-cleaner", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the interpreter ends: `close` does it
                    self._thread = None

    def close(self) -> None:
        """Wait until all is done that was asked for."""
        with self._change:
            self._change.wait_for(lambda: self._thread is None)
        self._work()

    def _work(self) -> None:
        while True:
            with self._change:
                upto, self._wanted = self._wanted, None
                if upto is None:
                    self._thread = None
                    self._change.notify_all()
                    return
            try:
                self._clean(upto)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next pass tries again, and training goes on
                log.warning("%s: old snapshots could not be removed: %s", self._root.url, error)
                emit("failed", "prune", str(self._root.url), error=error)

    def _clean(self, upto: int) -> None:
        try:
            fates = run(survey_steps(self._root, self._policy, upto=upto, damaged=self._damaged()))
        except UnknownMetric as unknown:
            self._say("metric", str(unknown))
            return
        for fate in fates:
            if fate.what == "damaged":
                self._say(fate.step, f"{self._root.step_url(fate.step)}: stays, and counts for no policy: {fate.why}")
        for fate, error in run(remove_steps(self._root, fates, spared=self._spared)).failed:
            log.warning("%s could not be removed, which is tried again: %s", self._root.step_url(fate.step), error)

    def _say(self, about: str | int, what: str) -> None:
        """Say it once."""
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", what)
