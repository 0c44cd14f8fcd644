"""Restores of a run: the newest undamaged step, on all ranks, from the root and from near folders."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.io.loop import run
from snapshot.loading.choose import RestoreArguments, RestoreOptions
from snapshot.manager.advice import Measured
from snapshot.manager.cleaner import Cleaner
from snapshot.manager.fallback import Fallback
from snapshot.manager.pending_takes import PendingTakes
from snapshot.manager.root import Root
from snapshot.manager.schedule import Schedule
from snapshot.manager.tiers import ManagerTiers
from snapshot.manager.writers import Writers
from snapshot.reports import RestoreReport
from snapshot.snapshot import Snapshot
from snapshot.takes import AppState
from snapshot.tiers.join import FAR_PATIENCE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StepRestores:
    """Restores of a run. Base of `SnapshotManager`."""

    _root: Root
    _tiers: ManagerTiers | None
    _writers: Writers | None
    _cleaner: Cleaner | None
    _pendings: PendingTakes
    _cadence: Schedule
    _measured: Measured
    _using: set[int]
    _damaged: set[int]
    _report: RestoreReport | None
    _pg: ProcessGroup | None
    _allow_pickle: bool
    _timeout: float | None

    def _exchange(self, verb: str, timeout: float | None) -> Exchange:
        raise NotImplementedError

    def _snapshot(self, step: int) -> Snapshot:
        raise NotImplementedError

    def restore_latest(
        self, app_state: AppState, *, offline: bool = False, **given: Unpack[RestoreArguments]
    ) -> int | None:
        """Restore the newest undamaged step, the same one on all ranks. Return its number, or None if there is no step.

        A step with missing or short files, or with a wrong checksum, is passed over, with a log line and an event. A
        checksum can fail after live tensors were written to; the older step then overwrites them. A step that does not
        fit the application is an error, and so is a failing storage: neither means that a snapshot is damaged.

        Args:
            app_state: As for `Snapshot.restore`.
            offline: With `near`: if the far root cannot be read, restore the newest step that the hosts have. Without
                it, raise StorageError, since the far root may have a newer step, or say that near steps are abandoned.
            given: Other arguments of `Snapshot.restore`. With `atomic=True`, a damaged step changes no live tensor.

        Raises:
            RestoreError: A step does not fit the application. Or a live tensor that a damaged step wrote to is missing
                from the step that is restored instead.
            CorruptSnapshotError: All steps are damaged. The error names each step and its fault, and in `touched` the
                live tensors that were written to.
        """
        began = time.monotonic()
        options = RestoreOptions(**given)
        if options.timeout is None:
            options = replace(options, timeout=self._timeout)
        self._pendings.moved_on()
        begin = partial(self._exchange, "restore_latest", given.get("timeout"))
        root, snapshot_of = self._root, self._restored_from
        if self._tiers is not None:
            self._pendings.settle()  # they belong to the attempt that ends here
            with begin() as exchange:
                self._tiers.join(exchange, self._cleaner, needs_far=not offline)
                patience = min(FAR_PATIENCE, exchange.timeout)
                exchange.close()
            root = tiered = self._tiers.root(patience, offline=offline)
            snapshot_of = partial(tiered.snapshot_of, pg=self._pg, allow_pickle=self._allow_pickle)
        leads = ranks_of(self._pg).rank == 0
        if leads and self._writers is not None and self._cleaner is not None:
            with suppress(SnapshotError):  # the restore reports it
                self._writers.begin(run(self._root.folders()).committed)
        fallback = Fallback(root, snapshot_of, begin, self._using)
        try:
            step, damaged = fallback.restore(app_state, options)
        finally:
            self._report = root.add_sources(fallback.report)
        self._damaged = set(damaged)
        if step is not None:
            if leads and self._writers is not None:
                self._writers.take_over(self._snapshot(step).metadata.metadata)
            self._cadence.began(step)
            self._measured.restore = time.monotonic() - began
        return step

    def _restored_from(self, step: int, place: bytes) -> Snapshot:
        return self._snapshot(step)

    @property
    def report(self) -> RestoreReport | None:
        """Report of the last `restore_latest` on this rank."""
        return self._report
