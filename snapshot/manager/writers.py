"""Writers of a plain root: managers without `near` that write to one root at once must not adopt each other's steps.

Each names itself in the metadata of its steps. Nothing is written elsewhere, and no clock is compared: a step is new if
it was not there when this manager began.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from snapshot.errors import OtherWriterError, SnapshotError
from snapshot.io.storage import FileStat
from snapshot.manager.step_metadata import NOTE, WRITER
from snapshot.manifest.document import ManifestHead
from snapshot.reports import RestoreReport
from snapshot.snapshot import Snapshot
from snapshot.tiers.timeline import KEY

MOST = 64
"""Ancestors of an attempt that its steps name, the last ones."""


class Writer(NamedTuple):
    """An attempt of a job: its writing until the next restore."""

    attempt: str
    host: str
    start: str
    ancestors: tuple[str, ...] = ()
    """The attempts whose steps it restored, directly or through another one."""


def writer_of(metadata: Mapping[str, Any]) -> Writer | None:
    """Return the writer of a step. None if an earlier version wrote it, or no manager, or one with near folders."""
    own = metadata.get(NOTE)
    match own.get(WRITER) if isinstance(own, dict) and KEY not in metadata else None:
        case {"attempt": str(attempt), "host": str(host), "start": str(start), "ancestors": [*names]}:
            return Writer(attempt, host, start, tuple(each for each in names if isinstance(each, str)))
    return None


class Writers:
    """This manager as a writer, and what it knows of the other ones. Only rank 0 looks for them."""

    def __init__(self) -> None:
        self._own = self._next(())
        self._mine = {self._own.attempt}
        self._known: set[tuple[int, str]] | None = None
        """The steps that were there when this manager began, with the tokens of their manifests."""
        self._conflict: OtherWriterError | None = None

    @staticmethod
    def _next(ancestors: tuple[str, ...]) -> Writer:
        start = datetime.now(UTC).isoformat(timespec="seconds")
        return Writer(secrets.token_hex(6), socket.gethostname(), start, ancestors[-MOST:])

    def note(self) -> dict[str, Any]:
        """Return the entry in the metadata of a step."""
        return self._own._asdict()

    def has_begun(self) -> bool:
        """Return True if the steps at the beginning are known."""
        return self._known is not None

    def begin(self, committed: Mapping[int, FileStat]) -> None:
        """Record the steps that are there at the beginning."""
        self._known = {(step, stat.token) for step, stat in committed.items()}

    def take_over_now(self, metadata: Mapping[str, Any]) -> None:
        """Continue the run with a restored step. The steps that are there at the next take belong to it."""
        self.take_over(metadata)
        self._known = None

    def take_over(self, metadata: Mapping[str, Any]) -> None:
        """Continue the run with a restored step, whose metadata is given. `begin` was called before."""
        before = writer_of(metadata)
        self._own = self._next((*before.ancestors, before.attempt) if before is not None else ())
        self._mine.add(self._own.attempt)
        self._conflict = None

    def expect_alone(self) -> None:
        """Raise OtherWriterError if another job was found, before the next take."""
        if self._conflict is not None:
            raise self._conflict

    def inspect(self, committed: Mapping[int, FileStat], heads: Mapping[int, ManifestHead | SnapshotError]) -> None:
        """Raise OtherWriterError if another job has committed a step since this manager began."""
        if self._known is None:
            self.begin(committed)
        assert self._known is not None
        for step, head in heads.items():
            if (step, committed[step].token) in self._known or not isinstance(head, ManifestHead):
                continue
            writer = writer_of(head.metadata)
            if writer is None or writer.attempt in self._mine:
                self._known.add((step, committed[step].token))
                continue
            did = "has taken this run over" if self._mine & set(writer.ancestors) else "writes to the same root"
            self._conflict = OtherWriterError(
                f"step-{step}: another job {did}: attempt {writer.attempt} on {writer.host}, started {writer.start}; "
                "nothing is removed or saved; stop one of them, or call restore_latest to continue from its steps"
            )
            raise self._conflict


class ManagedSnapshot(Snapshot):
    """A step of a manager, which the run continues with if it is restored."""

    on_restored: Callable[[Mapping[str, Any]], None] | None = None

    def restore(self, *arguments: Any, **given: Any) -> RestoreReport:
        """Restore the application's state, as `Snapshot.restore` does."""
        report = super().restore(*arguments, **given)
        if self.on_restored is not None:
            self.on_restored(self.metadata.metadata)
        return report
