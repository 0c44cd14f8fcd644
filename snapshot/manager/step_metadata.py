"""Entry of the manager in a snapshot's metadata: the step, its metrics, and the job that wrote it.

Managers without `near` that write to one root at once must not adopt each other's steps. Each names itself in the
metadata of its steps. Nothing is written elsewhere, and no clock is compared: a step is new if it was not there when
this manager began.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from snapshot.errors import OtherWriterError, SnapshotError
from snapshot.io.storage import FileStat
from snapshot.manifest.document import ManifestHead
from snapshot.runs.timeline import KEY
from snapshot.text import Duration, seconds_of, with_article

NOTE = "snapshot.manager"
"""Key in a snapshot's metadata."""
WRITER = "writer"
"""Key in the entry: the job that took the step."""
EXPIRES = "expires"
"""Key in the entry: the time when the step's lifetime is over."""


def checked_step(step: Any) -> int:
    """Return the step as an int; raise TypeError or ValueError if invalid."""
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        got = repr(step)
        if isinstance(step, Mapping):
            got = f"{with_article(type(step).__name__)}; the step comes first: take(step, app_state)"
        raise TypeError(f"step must be an integer, got {got}")
    number = int(step.__index__())
    if not 0 <= number < 10**18:
        raise ValueError(f"step must be at least 0 and less than 10**18, got {number}")
    return number


def checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return metrics as floats: numbers, or tensors and arrays of one element. Raise TypeError for other values."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"metrics must map names to numbers, got {with_article(type(metrics).__name__)}")
    return {_name(name): _number(name, value) for name, value in metrics.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a metric's name must be a non-empty str, got {name!r}")
    return name


def _number(name: str, value: Any) -> float:
    given = value
    if hasattr(value, "item") and hasattr(value, "shape"):  # a tensor, an array, or a NumPy scalar
        if math.prod(value.shape) != 1:
            raise TypeError(f"metrics[{name!r}] must be one number, got shape {tuple(value.shape)}")
        try:
            value = value.item()
        except (RuntimeError, NotImplementedError) as error:  # a meta tensor has no value
            raise TypeError(f"metrics[{name!r}]: {error}") from error
    if isinstance(value, (bool, str, bytes, complex)) or not hasattr(value, "__float__"):
        raise TypeError(f"metrics[{name!r}] must be a number, got {given!r}")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"metrics[{name!r}] does not fit into a float: {error}") from error


def add_note(
    step: int, metrics: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None, lifetime: Duration | None = None
) -> dict[str, Any]:
    """Return a snapshot's metadata: the user's plus the manager's. NaN and infinity are stored by name.

    Raise TypeError or ValueError for wrong values.
    """
    given = dict(metadata or {})
    if NOTE in given:
        raise ValueError(f"metadata must not have the key {NOTE!r}: it is reserved for the manager")
    stored = {name: value if math.isfinite(value) else repr(value) for name, value in checked_metrics(metrics).items()}
    note: dict[str, Any] = {"step": step, "metrics": stored}
    return {**given, NOTE: note if lifetime is None else {**note, EXPIRES: _end_of(lifetime)}}


def _end_of(lifetime: Duration) -> str:
    """Return the time after a lifetime that begins now. Raise ValueError or TypeError if it is not a duration."""
    seconds = seconds_of(lifetime, "lifetime")
    try:
        return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="seconds")
    except OverflowError:
        raise ValueError(f"lifetime must end before the year 10000, got {lifetime!r}") from None


def add_writer(metadata: Mapping[str, Any], writer: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata with the manager's entry, which names the writer, too."""
    return {**metadata, NOTE: {**metadata[NOTE], WRITER: dict(writer)}}


def noted_step(metadata: Mapping[str, Any]) -> int | None:
    """Return the step number in a snapshot's metadata; None if no manager took it."""
    own = metadata.get(NOTE)
    step = own.get("step") if isinstance(own, dict) else None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def noted_metrics(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics in a snapshot's metadata. Skip values that are not numbers: another program wrote them."""
    own = metadata.get(NOTE)
    stored = own.get("metrics") if isinstance(own, dict) else None
    found = {}
    for name, value in stored.items() if isinstance(stored, dict) else ():
        if value in ("nan", "inf", "-inf") or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            found[name] = float(value)
    return found


def noted_expiry(metadata: Mapping[str, Any]) -> float | None:
    """Return the time when a snapshot's lifetime is over, in seconds since the epoch; None if it has no lifetime."""
    own = metadata.get(NOTE)
    try:
        return datetime.fromisoformat(own[EXPIRES]).timestamp() if isinstance(own, dict) and EXPIRES in own else None
    except (TypeError, ValueError, OverflowError):  # another program wrote it
        return None


MOST = 64
"""Ancestors of an attempt that its steps name, the last ones."""


class StepWriter(NamedTuple):
    """An attempt of a job: its writing until the next restore."""

    attempt: str
    host: str
    start: str
    ancestors: tuple[str, ...] = ()
    """The attempts whose steps it restored, directly or through another one."""


def writer_of(metadata: Mapping[str, Any]) -> StepWriter | None:
    """Return the writer of a step. None if an earlier version wrote it, or no manager, or one with near folders."""
    own = metadata.get(NOTE)
    match own.get(WRITER) if isinstance(own, dict) and KEY not in metadata else None:
        case {"attempt": str(attempt), "host": str(host), "start": str(start), "ancestors": [*names]}:
            return StepWriter(attempt, host, start, tuple(each for each in names if isinstance(each, str)))
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
    def _next(ancestors: tuple[str, ...]) -> StepWriter:
        start = datetime.now(UTC).isoformat(timespec="seconds")
        return StepWriter(secrets.token_hex(6), socket.gethostname(), start, ancestors[-MOST:])

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
