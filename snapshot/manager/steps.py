"""The steps of a run, as a manager takes, restores and names them: under a plain root, or with near folders.

`SnapshotManager` chooses when it is created: `PlainSteps` here, or those of a plugin that knows `near=`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from snapshot import extensions
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError, StorageError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.io.url import URL
from snapshot.manager.free_space import SpaceWatch
from snapshot.manager.policies import KeepLatest, Policy, split_policy
from snapshot.manager.restore_latest import Candidates
from snapshot.manager.retention import Cleaner, Inspect
from snapshot.manager.root import Root
from snapshot.manager.step_metadata import Writers, add_writer
from snapshot.manager.takes import PendingTakes
from snapshot.manifest.document import ManifestHead
from snapshot.reports import RestoreReport, Saved, TakeReport
from snapshot.runs.timeline import RunLine
from snapshot.save.take import AppState
from snapshot.save.take_options import BaseArgument, TakeOptions
from snapshot.snapshot import PendingSnapshot, Snapshot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from snapshot.manager.exports import StepExport, StepExporter


MANIFEST = 64 << 20
"""Bytes that a manifest has at most, in all but very large jobs."""


class TakePlace(NamedTuple):
    """The place of a take."""

    path: str
    options: Mapping[str, Any] | None
    near: bool = False
    replaces: bool = False
    """True if a snapshot there is off the line of the run, and is replaced."""


@dataclass(frozen=True)
class Begun:
    """A take that all ranks have agreed on."""

    step: int
    place: TakePlace
    pending: PendingSnapshot | None
    """The asynchronous take that saved this state already."""
    options: TakeOptions
    metadata: Mapping[str, Any]
    overwrite: bool
    base: BaseArgument
    timeout: float | None
    saved: Saved = "whole"
    """What is saved of the state."""

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the take, besides its place and the state."""
        return {
            "storage_options": self.place.options,
            "overwrite": self.overwrite or self.place.replaces,
            "metadata": self.metadata,
            "base": self.base,
            "timeout": self.timeout,
            "options": self.options,
        }


class RunOptions(NamedTuple):
    """The options of a manager that its steps need."""

    root: Root
    keep: Policy | None
    pendings: PendingTakes
    pg: ProcessGroup | None
    allow_pickle: bool


class Steps(ABC):
    """The steps of a run. This class has what a plain root and near folders have in common."""

    local: Root
    """The root where takes are written first."""

    def __init__(self, given: RunOptions, inspect: Inspect | None = None) -> None:
        """`inspect`: called with the steps that a removal has found; if it raises, nothing is removed."""
        self.root, self.pg, self.allow_pickle = given.root, given.pg, given.allow_pickle
        self.until = math.inf
        """Monotonic time until which a job that stops may wait for its steps."""
        self.flushed = True
        """False if the last `flush` ended before the steps were in the root."""
        self.using: set[int] = set()
        """Steps that are being restored."""
        self.damaged: set[int] = set()
        """Steps of this library that `restore_latest` passed over."""
        self._keep = given.keep
        self._pendings = given.pendings
        self._leads = True
        self._inspect = inspect
        self.exporters: list[StepExporter] = []
        self.cleaner: Cleaner | None = None
        if given.keep is not None:
            self.expect_expiry()

    def expect_expiry(self) -> None:
        """Remove steps from the next commit on, if only those whose lifetime is over. Called before each such take."""
        if self.cleaner is None:
            self.cleaner = Cleaner(self.root, self._keep, self.is_spared, lambda: set(self.damaged), self._inspect)
            self.cleaner.removed = lambda steps: [each.removed(steps) for each in self.exporters]

    def is_spared(self, step: int, save_id: str) -> bool:
        """Return True for a step that is taken, restored or exported, or that a running take is based on."""
        pendings = self._pendings
        needed = pendings.needs(save_id) or any(each.needs(step) for each in self.exporters)
        return step in self.using or pendings.running(step) or needed

    # Take

    @abstractmethod
    def prepare(
        self, exchange: Exchange, step: int, metadata: dict[str, Any], *, replaces: bool
    ) -> tuple[dict[str, Any], str]:
        """Return the metadata of a take, and why it cannot be written where takes are written first, or ''.

        Each rank calls it. `replaces`: True if the take replaces a snapshot of the step.
        """

    @abstractmethod
    def check(self, step: int, fault: str, *, new: bool) -> None:
        """Raise SnapshotError if a step must not be taken. Called on the leader, once all ranks have prepared.

        `fault`: why a rank cannot write where takes are written first, or ''. `new`: True if the step must be new.
        """

    @abstractmethod
    def place_of(self, step: int, fault: str, verb: str) -> TakePlace:
        """Return the place of a take. `fault` as for `check`."""

    def take(self, begun: Begun, app_state: AppState) -> Snapshot:
        return Snapshot.take(begun.place.path, app_state, self.pg, **begun.arguments())

    def async_take(self, begun: Begun, app_state: AppState) -> PendingSnapshot:
        return Snapshot.async_take(begun.place.path, app_state, self.pg, **begun.arguments())

    def committed(self, begun: Begun, began: float, report: TakeReport | None) -> None:
        """Start the removals after a commit, of a take that began at a monotonic time. Called on the loop.

        So nothing here may block. `report`: that of this rank.
        """
        self.export(begun.step, leads=self._leads)
        if begun.options.durable and self._leads and self.cleaner is not None:
            self.cleaner.committed(begun.step, began, report.base if report else "")

    def restored(self, step: int) -> None:  # noqa: B027 - near folders have nothing to do
        """Go on with a step that all ranks have restored."""

    def open_exports(self, exports: Sequence[StepExport]) -> None:
        """Open what exports steps. Steps that it holds are looked at again when it has released them."""

        def look_again() -> None:
            if self.cleaner is not None:  # it may be made later
                self.cleaner.look_again()

        self.exporters = [each.open(self.root, look_again) for each in exports]

    def export(self, step: int, *, leads: bool) -> None:
        """Let the exports of rank 0 look at the steps, of which one was committed or restored. Return at once."""
        for each in self.exporters if leads else ():
            each.committed(step)

    @abstractmethod
    def flush(self) -> None:
        """Wait until the steps that were taken are in the root, while the job stops, but not beyond `until`."""

    def find_bases(self, step: int) -> list[int]:
        """Return the newest two committed steps that a take of `step` may share files with, the newest first.

        Damaged steps, and those that share physical files with them, are left out. Without an answer of the storage,
        there are none.
        """
        root = self.local
        try:
            committed = run(root.folders()).committed
            bad = set[str]().union(*(run(root.copies(each)) for each in self.damaged))
            found: list[int] = []
            for each in sorted(committed, reverse=True):
                if each != step and each not in self.damaged and not (bad and bad & run(root.copies(each))):
                    found.append(each)
                if len(found) == 2:
                    break
            return found
        except StorageError as error:
            log.warning("%s: nothing is shared with earlier steps: %s", root.url, error)
            return []

    def choose_base(self, steps: list[int]) -> str | list[str]:
        """Return the `base` of a take. A list of steps keeps two physical copies, unless only one step is kept."""
        urls = [self.local.step_url(step).reveal() for step in steps]
        single = self._keep is not None and all(each == KeepLatest(1) for each in split_policy(self._keep))
        try:
            single = single and not run(self.local.pinned(steps))
        except StorageError:
            single = False
        return urls[0] if urls and single else urls

    # Restore

    @abstractmethod
    def candidates(self, begin: Callable[[], Exchange], *, offline: bool, good: bool) -> Candidates:
        """Return the steps that a restore chooses from. `begin` begins a collective call."""

    # Query

    @abstractmethod
    def snapshot(self, step: int) -> Snapshot:
        """Return a step, from the nearest place that has it."""

    def path(self, step: int) -> str:
        """Return the path of a step in the root."""
        url = self.root.step_url(step)
        return url.location if url.scheme == "file" else url.reveal()

    def numbers(self) -> list[int]:
        return run(self.root.on_line(run(self.root.folders()).committed))

    @abstractmethod
    def where(self, step: int) -> dict[str, str | int]:
        """Return where a step is."""

    def pin(self, step: int) -> None:
        run(self.root.pin(step))

    def unpin(self, step: int) -> None:
        run(self.root.unpin(step))

    def pinned(self) -> set[int]:
        return run(self.root.pinned(run(self.root.folders()).committed))

    def outlives_host(self) -> bool:
        """Return True if a step that is not in the root yet is still there when this host is gone."""
        return False

    def upload_seconds(self, patience: float | None = None) -> float:
        """Return the mean time from a take until it is in the root, beyond the take itself. In a plain root it is 0.

        `patience`: seconds after which the time that was known last is returned.
        """
        return 0.0

    def close(self) -> None:
        if self.cleaner is not None:
            self.cleaner.close()


class HeldStep(Protocol):
    """A step as a host has it."""

    head: ManifestHead
    save_id: str

    def is_pinned(self) -> bool:
        """Return True if the step is protected from removal."""
        ...

    def whole_path(self) -> str:
        """Return the path of the step if all of its files are here, else ''."""
        ...


class RunKind(Protocol):
    """A plugin that keeps the steps of a run also elsewhere than in its root: the entry point `near`."""

    def open_steps(self, near: Any, given: RunOptions) -> Steps:
        """Return the steps of a manager, whose argument `near` has this value."""
        ...

    def list_steps(
        self, near: str, far: URL, heads: Mapping[int, object], line: RunLine
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Return where each step is, as rows for `snapshot ls`, and what the states in the rows mean.

        `heads`: the manifests in the root, or their errors.
        """
        ...

    def held_steps(self, near: str, far: URL) -> Mapping[int, HeldStep]:
        """Return the steps that this host has of a run."""
        ...


def find_kind(argument: str) -> RunKind:
    """Return the plugin that knows near folders. Raise `MissingExtraError` if it is not installed."""
    found: RunKind = extensions.require("snapshot.steps", "near", argument)
    return found


class ManagedSnapshot(Snapshot):
    """A step of a manager, which the run continues with if it is restored."""

    def __init__(
        self,
        path: str,
        pg: ProcessGroup | None,
        storage_options: Mapping[str, Any] | None,
        on_restored: Callable[[Mapping[str, Any]], None],
        *,
        allow_pickle: bool,
    ) -> None:
        """`on_restored`: called with the metadata of the step after a restore."""
        super().__init__(path, pg, storage_options, allow_pickle=allow_pickle)
        self._on_restored = on_restored

    def restore(self, *arguments: Any, **given: Any) -> RestoreReport:
        """Restore the application's state, as `Snapshot.restore` does."""
        report = super().restore(*arguments, **given)
        self._on_restored(self.metadata.metadata)
        return report


class PlainSteps(Steps):
    """The steps under a plain root. Managers that write to one root at once stop, and name each other."""

    def __init__(self, given: RunOptions) -> None:
        self._writers = Writers()
        self._space = SpaceWatch(given.root)
        super().__init__(given, self._writers.inspect)
        self.local = given.root

    def prepare(
        self, exchange: Exchange, step: int, metadata: dict[str, Any], *, replaces: bool
    ) -> tuple[dict[str, Any], str]:
        """Name this job in the metadata."""
        self._leads = exchange.rank == 0
        return add_writer(metadata, self._writers.note()), ""

    def committed(self, begun: Begun, began: float, report: TakeReport | None) -> None:
        """Also record the space that the step took: at most twice what this rank wrote, for each of the ranks."""
        if report is not None:
            self._space.took(begun.step, 2 * ranks_of(self.pg).world * report.written_bytes + MANIFEST)
        super().committed(begun, began, report)

    def restored(self, step: int) -> None:
        if ranks_of(self.pg).rank == 0:
            self._space.learn(step)

    def check(self, step: int, fault: str, *, new: bool) -> None:
        """Raise OtherWriterError if another job writes to the root. Without `keep`, nothing is listed."""
        self._space.look()
        if self.cleaner is not None:
            self._writers.expect_alone()
            with suppress(StorageError):  # the take reports it
                if not self._writers.has_begun():
                    self._writers.begin(run(self.root.folders()).committed)

    def place_of(self, step: int, fault: str, verb: str) -> TakePlace:
        """Return the folder of the step in the root."""
        return TakePlace(self.path(step), self.root.options)

    def flush(self) -> None:
        """Return at once: takes are written to the root."""

    def candidates(self, begin: Callable[[], Exchange], *, offline: bool, good: bool) -> Candidates:
        leads = ranks_of(self.pg).rank == 0
        if leads and self.cleaner is not None:
            with suppress(SnapshotError):  # the restore reports it
                self._writers.begin(run(self.root.folders()).committed)

        def take_over(step: int) -> None:
            if leads:
                self._writers.take_over(self.snapshot(step).metadata.metadata)

        return Candidates(self.root, self.snapshot, take_over)

    def snapshot(self, step: int) -> Snapshot:
        """Return a step. The run continues with it if it is restored."""
        return ManagedSnapshot(
            self.path(step), self.pg, self.root.options, self._writers.take_over_now, allow_pickle=self.allow_pickle
        )

    def where(self, step: int) -> dict[str, str | int]:
        """Return `whole` or `absent`."""
        return {"far": "whole" if step in run(self.root.folders()).committed else "absent"}
