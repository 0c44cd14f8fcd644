"""Questions about the steps of a run: which there are, which is the best, and which are pinned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapshot.errors import CorruptSnapshotError, SnapshotNotFoundError, StorageError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.manager.pending_takes import PendingTakes
from snapshot.manager.policies import KeepBest, Policy, parts
from snapshot.manager.root import Root, taken_of
from snapshot.manager.step_metadata import checked_step, noted_metrics
from snapshot.manager.tiers import ManagerTiers
from snapshot.manager.writers import ManagedSnapshot, Writers
from snapshot.manifest.document import ManifestHead
from snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StepQueries:
    """The steps of a run, for reading. Base of `SnapshotManager`."""

    _root: Root
    _tiers: ManagerTiers | None
    _writers: Writers | None
    _keep: Policy | None
    _pg: ProcessGroup | None
    _pendings: PendingTakes
    _allow_pickle: bool

    def steps(self) -> list[int]:
        """Return the committed steps that this process sees now, ascending."""
        near = self._tiers.near_steps() if self._tiers is not None else set[int]()
        try:
            return sorted(near | set(run(self._root.on_line(run(self._root.folders()).committed))))
        except StorageError as error:
            if not near:
                raise
            log.warning("%s: cannot be reached, so these are the near steps: %s", self._root.url, error)
            return sorted(near)

    def latest(self, verify: bool = False) -> int | None:
        """Return the newest committed step, or None if there is none.

        With `verify`, read every byte, and pass over (and log) snapshots that fail verification.
        """
        for step in reversed(self.steps()):
            if not verify:
                return step
            try:
                report = self._snapshot(step).verify()
                fault = "" if report else str(report)
            except (CorruptSnapshotError, SnapshotNotFoundError) as error:
                fault = str(error)
            if not fault:
                return step
            log.warning("%s: passed over: verification failed: %s", self._root.step_url(step), fault)
        return None

    def best(self, metric: str | None = None, mode: str = "min") -> int | None:
        """Return the best step by a metric, or by the first `KeepBest` of the policy.

        Return None if no step has the metric.
        """
        if metric is not None:
            policy = KeepBest(metric, 1, mode)
        else:
            found = [each for each in parts(self._keep) if isinstance(each, KeepBest)] if self._keep else []
            if not found:
                raise ValueError(
                    "best: `keep` has no KeepBest; pass a metric, such as best('loss') or best('f1', 'max')"
                )
            policy = found[0]
        committed = run(self._root.folders()).committed
        on = set(run(self._root.on_line(committed)))
        heads = {step: head for step, head in run(self._root.heads(committed)).items() if step in on}
        for step, head in heads.items():
            if not isinstance(head, ManifestHead):
                log.warning("%s: passed over: %s", self._root.step_url(step), head)
        ranked = policy.ranked([taken_of(step, head) for step, head in heads.items() if isinstance(head, ManifestHead)])
        return ranked[0] if ranked else None

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics of a step."""
        return noted_metrics(self._snapshot(checked_step(step)).metadata.metadata)

    def snapshot(self, step: int) -> Snapshot:
        """Return the snapshot of a step, which need not exist."""
        number = checked_step(step)
        if not self._pendings.is_latest(number):
            self._pendings.moved_on()  # after a restore the state is that of this step
        if self._writers is None:
            return self._snapshot(number)
        made = ManagedSnapshot(self._path(number), self._pg, self._root.options, allow_pickle=self._allow_pickle)
        made.on_restored = self._writers.take_over
        return made

    def _snapshot(self, step: int) -> Snapshot:
        tiers = self._tiers
        if tiers is not None and tiers.is_whole_here(step):
            return Snapshot(tiers.near.step_url(step).reveal(), self._pg, allow_pickle=self._allow_pickle)
        return Snapshot(self._path(step), self._pg, self._root.options, allow_pickle=self._allow_pickle)

    def _path(self, step: int) -> str:
        url = self._root.step_url(step)
        return url.location if url.scheme == "file" else url.reveal()

    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is, for a manager with `near`, as far as the uploaders of the hosts answer.

        `near` is `whole`, `partial` or `absent`, over all hosts. `replicas` is the number of further hosts that have
        each near file. `far` is `whole`, `absent`, or the state of the upload: `uploading 41 %`, `queued`,
        `waiting` (for files of other hosts), `kept near`, `dropped`, `outdated` or `damaged`.
        """
        number = checked_step(step)
        if self._tiers is None:
            return {"far": "whole" if number in run(self._root.folders()).committed else "absent"}
        return self._tiers.joined.where(number)

    def pin(self, step: int) -> None:
        """Keep a step regardless of policies, also in other and later processes, until `unpin`."""
        number = checked_step(step)
        near = self._tiers is not None and self._tiers.pin(number)
        try:
            run(self._root.pin(number))
        except SnapshotNotFoundError:
            if not near:  # else the uploader pins it, too
                raise

    def unpin(self, step: int) -> None:
        """Let the policy decide about a step again."""
        number = checked_step(step)
        if self._tiers is not None:
            self._tiers.unpin(number)
        run(self._root.unpin(number))

    def pinned(self) -> list[int]:
        """Return the pinned steps, ascending."""
        near = self._tiers.pinned() if self._tiers is not None else set[int]()
        return sorted(near | run(self._root.pinned(run(self._root.folders()).committed)))
