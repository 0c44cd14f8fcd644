"""Removal of old snapshots in the background, after commits, in at most one thread. It never fails a take."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from snapshot.errors import OtherWriterError, SnapshotError
from snapshot.events import emit, log
from snapshot.io.loop import run
from snapshot.manager.cleaning import Inspect, UnknownMetric, remove_steps, survey_steps
from snapshot.manager.policies import Policy
from snapshot.manager.root import Root


class Cleaner:
    """Background removal of the snapshots that a policy does not keep.

    `spared(step)`: True if the step is being taken or read. `damaged()`: the steps that were found damaged.
    """

    def __init__(
        self,
        root: Root,
        policy: Policy | None,
        spared: Callable[[int], bool],
        damaged: Callable[[], set[int]],
        inspect: Inspect | None = None,
    ) -> None:
        self._root = root
        self._policy = policy
        self._spared = spared
        self._damaged = damaged
        self._inspect = inspect
        self._change = threading.Condition()
        self._wanted: int | None = None
        """The step after which removals are to begin."""
        self._current: int | None = None
        """The step after which removals are running."""
        self._went_back: dict[int, float] = {}
        """Steps that were taken after a later one, and when: the removals of the later one spare them."""
        self._needed: set[str] = set()
        """Save ids of the snapshots that takes rely on which were committed since the running removals began."""
        self._thread: threading.Thread | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        """The steps of the last commits, and when their takes began."""
        self._said: set[str | int] = set()
        """Warnings that were logged already: the steps that are damaged, and `metric` for an unknown metric."""

    def committed(self, step: int, began: float, base: str = "") -> None:
        """Record a step that is committed and durable. Return at once.

        If a later step was taken since, its removals have spared this one, which was being written. If one was taken
        before, the application went back, and the removals of the later step must spare this one.

        Args:
            step: The step.
            began: The monotonic time when its take began.
            base: Save id of the snapshot that it relies on.
        """
        with self._change:
            upto = max([step, *(other for start, other in self._recent if start > began)])
            if not any(other is not None and other > step for other in (self._wanted, self._current)):
                spared = self._went_back.items()
                self._went_back = {other: start for other, start in spared if other > step or start > began}
            self._went_back |= {other: start for start, other in self._recent if other < step and start > began}
            if any(other > step and start < began for start, other in self._recent):
                self._went_back[step] = began
            if base:
                self._needed.add(base)
            self._recent.append((began, step))
            self._request(upto)

    def look_again(self, upto: int) -> None:
        """Request the removals of a step that was committed earlier."""
        with self._change:
            self._request(upto)

    def _request(self, upto: int) -> None:
        """Request removals. The caller has the lock."""
        self._wanted = upto if self._wanted is None else max(upto, self._wanted)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="snapshot-cleaner", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is exiting: `close` does the work
                self._thread = None

    def close(self) -> None:
        """Wait until all requested removals are done."""
        with self._change:
            self._change.wait_for(lambda: self._thread is None)
        self._work()

    def clean_now(self, upto: int) -> None:
        """Remove in this thread. Failures are logged."""
        try:
            self._clean(upto)
        except SnapshotError as error:
            log.warning("%s: failed to remove old snapshots: %s", self._root.url, error)

    def _work(self) -> None:
        while True:
            with self._change:
                upto = self._current = self._wanted
                self._wanted = None
                self._needed.clear()
                if upto is None:
                    self._thread = None
                    self._change.notify_all()
                    return
            try:
                self._clean(upto)
            except Exception as error:  # noqa: BLE001 - training must not fail; the next pass retries
                log.warning("%s: failed to remove old snapshots: %s", self._root.url, error)
                emit("failed", "prune", str(self._root.url), error=error)

    def _clean(self, upto: int) -> None:
        try:
            fates = run(
                survey_steps(
                    self._root,
                    self._policy,
                    upto=upto,
                    damaged=self._damaged(),
                    spared=self._is_spared,
                    inspect=self._inspect,
                )
            )
        except OtherWriterError as other:
            self._say("writer", f"{self._root.url}: {other}")
            return
        except UnknownMetric as unknown:
            self._say("metric", str(unknown))
            return
        for fate in fates:
            if fate.what == "damaged":
                self._say(fate.step, f"{self._root.step_url(fate.step)}: kept, and ignored by policies: {fate.why}")
        for fate, error in run(remove_steps(self._root, fates, spared=self._is_spared)).failed:
            log.warning("%s: removal failed, and is retried later: %s", self._root.step_url(fate.step), error)

    def _is_spared(self, step: int) -> bool:
        if step in self._went_back or self._spared(step):
            return True
        return bool(self._needed) and self._root.save_id(step) in self._needed

    def _say(self, about: str | int, what: str) -> None:
        """Log a warning, once for each `about`."""
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", what)
