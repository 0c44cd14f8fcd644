"""Restore of the newest undamaged snapshot: all ranks try one, and if any finds it damaged, all try the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from snapshot.distributed.exchange import Exchange, expect_same_keys
from snapshot.errors import (
    CorruptSnapshotError,
    RankError,
    SignatureError,
    SnapshotNotFoundError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.formats.foreign import UnknownFormatError
from snapshot.io.loop import run
from snapshot.io.session import Key, Seal, signer_of
from snapshot.loading.reader import TOUCHED
from snapshot.loading.restore_options import RestoreOptions
from snapshot.manager.root import SUSPECT, Root, StepFolders
from snapshot.manager.step_metadata import noted_step
from snapshot.manifest.document import Document, SnapshotMetadata
from snapshot.options import expect_options
from snapshot.reports import RestoreReport
from snapshot.save.take import AppState
from snapshot.save.take_options import seal_with
from snapshot.snapshot import Snapshot

DAMAGE = (CorruptSnapshotError, SnapshotNotFoundError, StorageNotFoundError, UnknownFormatError)
"""Errors that mean that a snapshot is damaged. (One that is removed during a read loses its files.)"""
_KINDS = {kind.__name__ for kind in (*DAMAGE, SignatureError)}


class Tried(msgspec.Struct, array_like=True):
    """Result of a rank for the step that was tried; empty in the first round."""

    fault: str = ""
    view: bytes = b""
    """The steps of this rank's host, if each host has its own, as `Candidates.view` encodes them."""
    key: str = ""
    """The public key that must have signed the step."""


class ChosenStep(msgspec.Struct, array_like=True):
    """The leader's decision for the next round."""

    step: int | None
    """Step to try, or the restored step if there is an `end`; None if there is none."""
    passed: list[tuple[int, str, bool]]
    """Damaged steps: number, fault, and True if this library wrote the step and may replace it."""
    shares: int | None = None
    """A damaged step with which the step to try shares physical bytes, which are verified in any case."""
    place: bytes = b""
    """The places of the step's files, if they are not only in the root, as `Candidates.place` encodes them."""
    end: bytes | None = None
    """The end of the restore, on all ranks, as `Candidates.end` encodes it."""


def expect_step(step: int, document: Document) -> None:
    """Raise `CorruptSnapshotError` unless a manifest says that a manager took it as this step.

    The name of a folder is not signed, so another signed snapshot may have been put there.
    """
    noted = noted_step(SnapshotMetadata.of(document).metadata)
    if noted != step:
        got = "but no manager took it" if noted is None else f"got {noted}"
        raise CorruptSnapshotError(f"its signed step number must be {step}, {got}")


class Candidates:
    """The steps that a restore chooses from: here those of a plain root."""

    signable = True
    """True if steps can be signed."""

    def __init__(self, root: Root, snapshot: Callable[[int], Snapshot], restored: Callable[[int], None]) -> None:
        self.root = root
        self._snapshot = snapshot
        self._restored = restored

    def view(self) -> bytes:
        """Return what this host has, if each host has steps of its own, encoded for the leader."""
        return b""

    def see(self, views: Sequence[bytes]) -> None:
        """Take in what the hosts of all ranks have. Called on the leader, in each round."""

    def place(self, step: int) -> bytes:
        """Return where the files of a step are, if they are not only in the root, encoded for all ranks.

        Called on the leader.
        """
        return b""

    def expect_all_known(self) -> None:
        """Raise StorageError if there may be steps that could not be listed. Called if no step can be restored."""

    def snapshot(self, step: int, place: bytes) -> Snapshot:
        """Return a step as this rank reads it."""
        return self._snapshot(step)

    def end(self, step: int) -> bytes | None:
        """Return the end of a restore of a step, encoded for all ranks; None if another one must be chosen.

        Called on the leader.
        """
        return b""

    def ended(self, step: int, end: bytes) -> None:
        """Record that a step was restored on all ranks."""
        self._restored(step)

    def close(self, report: RestoreReport | None) -> RestoreReport | None:
        """Return the report of the restore, and release what the restore needed."""
        return report


class Fallback:
    """One restore of the newest undamaged snapshot.

    `begin` begins a collective call; `using` is updated with the steps that are being read.
    """

    def __init__(self, found: Candidates, begin: Callable[[], Exchange], using: set[int], *, good: bool = True) -> None:
        """Prepare it. `good`: suspect steps are passed over."""
        self._good = good
        self._found = found
        self._root = found.root
        self._begin = begin
        self._using = using
        self._candidates: list[tuple[int, str]] | None = None
        self._seen = StepFolders()
        """The folders that were looked at."""
        self._before: int | None = None
        """The oldest of these folders; None once all folders of the root were looked at."""
        self._tried: set[tuple[int, str]] = set()
        """Steps with the version tokens of their manifests: a replacement by another process is a new candidate."""
        self._passed: dict[int, tuple[str, bool]] = {}
        """Damaged steps. Only the leader uses this, `_candidates` and `_tried`."""
        self._copies: dict[int, set[str]] = {}
        """The physical files of the damaged steps."""
        self._token = ""
        """Version token of the current candidate, known to the leader only."""
        self._current: int | None = None
        """The step that was tried last."""
        self._touched: set[str] = set()
        """Names of live tensors that a damaged step was read into."""
        self._notes: list[str] = []
        self._seal: Seal | None = None
        self.report: RestoreReport | None = None
        """Report of the last restore that succeeded on this rank."""

    def restore(
        self, app_state: AppState, options: RestoreOptions, key: Key | None = None
    ) -> tuple[int | None, list[int]]:
        """Return the restored step or None, and the damaged steps of this library."""
        error: BaseException | None = None
        try:
            expect_options(options, RestoreOptions)
            options.check()
            self._seal = seal_with(key)
            if self._seal is not None and not self._found.signable:
                raise ValueError("key must be None for near steps, which are not signed; restore an uploaded step")
        except Exception as wrong:  # noqa: BLE001 - raised inside the exchange
            error = wrong
        mine = Tried(view=self._found.view(), key=signer_of(self._seal))
        try:
            while True:
                with self._begin() as exchange:
                    if error is not None:
                        raise error  # inside the exchange, so that the other ranks receive it
                    chosen = exchange.agree(mine, self._lead, Tried, ChosenStep)
                    exchange.close()
                self._now_at(chosen.step)
                if chosen.step is None:
                    break
                if chosen.end is not None:
                    self._found.ended(chosen.step, chosen.end)
                    break
                if chosen.shares is not None:
                    url = self._root.step_url(chosen.step)
                    log.warning("%s: shares files with the damaged step-%s, so they are verified", url, chosen.shares)
                    options = replace(options, verify=True)
                mine, error = self._try(chosen.step, chosen.place, app_state, options)
        finally:
            self._now_at(None)
        return self._outcome(chosen, exchange.rank)

    def _lead(self, tried: list[Tried]) -> ChosenStep:
        """Choose the next step on rank 0: the first candidate without a fault that shows before data is read."""
        if self._current is None:
            expect_same_keys("key", [[each.key] for each in tried])
        fault = next((each.fault for each in tried if each.fault), "")
        self._found.see([each.view for each in tried])
        if self._current is not None and not fault:
            end = self._found.end(self._current)
            if end is not None:
                self._passed.pop(self._current, None)
                return ChosenStep(self._current, self._told(), end=end)
            self._candidates = None  # another job has changed the line of the run meanwhile
            self._tried.clear()
        elif self._current is not None:
            self._pass_over(self._current, fault)
        while candidate := self._next():
            step = candidate[0]
            self._tried.add(candidate)
            self._now_at(step)
            self._token = candidate[1]
            fault = run(self._root.fault(step, self._seal, good=self._good)) or ""
            if not fault:
                return ChosenStep(step, self._told(), self._shares_with(step), self._found.place(step))
            self._pass_over(step, fault)
        self._found.expect_all_known()
        if not self._seen.committed:
            self._tell_of_none()
        return ChosenStep(None, self._told())

    def _next(self) -> tuple[int, str] | None:
        if self._candidates is None:
            self._candidates, self._seen = [], StepFolders()
            self._look(None)
        while True:
            while not self._candidates and self._before is not None:
                self._look(self._before)
            candidate = self._candidates.pop() if self._candidates else None
            newer = [step for step in self._seen.unreadable if candidate is None or step > candidate[0]]
            if newer:  # it may be newer than the candidate
                raise self._seen.unreadable[max(newer)]
            if candidate is None or run(self._root.counts(candidate[0], self._seen.committed[candidate[0]])):
                break
            log.info("%s: passed over: it is off the line of the run", self._root.step_url(candidate[0]))
        return candidate

    def _tell_of_none(self) -> None:
        """Log that the root has no step, and raise SnapshotNotFoundError if it is a step itself."""
        if some := ", ".join(f"step-{step}" for step in self._seen.others[-5:]):
            log.warning("%s: nothing to restore: there is no finished snapshot in %s", self._root.url, some)
        elif run(self._root.is_snapshot()):
            raise SnapshotNotFoundError(f"{self._root.url}: is a snapshot; pass the folder that it is in as the root")
        else:
            log.info("%s: nothing to restore: there are no steps, so this is a new run", self._root.url)

    def _look(self, before: int | None) -> None:
        """Look at the next newest folders, which become candidates."""
        found = run(self._root.newest(before))
        self._seen.committed |= found.committed
        self._seen.unreadable |= found.unreadable
        self._seen.others[:0] = found.others
        self._before = min([*found.committed, *found.others, *found.unreadable], default=None)
        self._candidates = sorted({(step, stat.token) for step, stat in found.committed.items()} - self._tried)

    def _pass_over(self, step: int, fault: str) -> None:
        """Record a damaged step. If it was removed or replaced meanwhile, list all steps again."""
        if run(self._root.token(step)) == self._token:
            suspect = fault.startswith(SUSPECT)
            self._passed[step] = fault, run(self._root.is_replaceable(step))
            self._copies[step] = set() if suspect else run(self._root.copies(step, self._seal))
        else:
            self._candidates = None

    def _shares_with(self, step: int) -> int | None:
        """Return a damaged step with files that are physically the same as those of a step."""
        if not any(self._copies.values()):
            return None
        copies = run(self._root.copies(step, self._seal))
        return next((each for each, theirs in self._copies.items() if theirs & copies), None)

    def _told(self) -> list[tuple[int, str, bool]]:
        return [(step, *told) for step, told in self._passed.items()]

    def _now_at(self, step: int | None) -> None:
        """Mark this step as in use, and the previous one as not in use."""
        if self._current is not None:
            self._using.discard(self._current)
        self._current = step
        if step is not None:
            self._using.add(step)

    def _try(
        self, step: int, place: bytes, app_state: AppState, options: RestoreOptions
    ) -> tuple[Tried, BaseException | None]:
        """Restore a step. Return this rank's result, and an error to raise if it does not concern the snapshot."""
        try:
            self.report = self._found.snapshot(step, place).restore_with(
                app_state,
                options,
                self._touched,
                accept=partial(expect_step, step) if self._seal is not None else None,
                seal=self._seal,
            )
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            if not isinstance(error, DAMAGE) and not (isinstance(error, RankError) and error.kind in _KINDS):
                return Tried(), error
            self._notes += getattr(error, "__notes__", ())
            fault = str(error).partition(TOUCHED)[0]  # the next step may restore those tensors
            return Tried(fault or type(error).__name__), None
        return Tried(), None

    def _outcome(self, chosen: ChosenStep, rank: int) -> tuple[int | None, list[int]]:
        """Log the steps that were passed over; raise CorruptSnapshotError if none is left."""
        lines = [f"step-{step}: {why}" for step, why, _ in chosen.passed]
        if chosen.step is None and lines:
            touched = sorted(self._touched)
            also = f"; live tensors that were written: {', '.join(touched)}" if touched else ""
            error = CorruptSnapshotError(
                f"{self._root.url}: no step can be restored: {'; '.join(lines)}{also}", faults=lines, touched=touched
            )
            for each in dict.fromkeys(self._notes):
                error.add_note(each)
            raise error
        if lines:
            passed = {step: why for step, why, _ in chosen.passed}
            emit("fell_back", "restore_latest", str(self._root.url), step=chosen.step, passed=passed)
            for step, why in passed.items() if rank == 0 else ():
                url = self._root.step_url(step)
                log.warning("%s: passed over, and step-%s was restored instead: %s", url, chosen.step, why)
        return chosen.step, [step for step, _, ours in chosen.passed if ours]
