"""Results of operations, as values that print well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, overload

from snapshot.text import counted, entries_text, listed, rate_text, size_text

MARKS = {"added": "+", "removed": "-", "changed": "~", "renamed": ">"}
"""The mark at the beginning of each line of a `Diff`, by kind of change."""

Saved = Literal["whole", "near", "parameters", "none"]
SAVED: dict[Saved, str] = {
    "whole": "saved whole",
    "near": "saved in the near folders only",
    "parameters": "saved without the state of optimizers",
    "none": "not saved",
}
T = TypeVar("T", "Line", "Change")


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an operation. As text, it is a summary, then a line for each detail."""

    _most_details: ClassVar = 1000
    """Maximum number of details in the text."""

    @property
    def summary(self) -> str:
        """One line: the counts, the bytes and the seconds."""
        raise NotImplementedError

    @property
    def details(self) -> Sequence[object]:
        """The lines below the summary."""
        return ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain values, for programs."""
        return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(self).items()}

    def __str__(self) -> str:
        return self.summary + listed(self.details, self._most_details)

    def _repr_html_(self) -> str:
        """Return the report for a notebook."""
        from snapshot.report_html import report_html  # only notebooks need it

        shown, rest = self.details[: self._most_details], len(self.details) - self._most_details
        rows = [each.row if isinstance(each, (Line, Change)) else str(each) for each in shown]
        return report_html(self.summary, [*rows, *([f"... {rest:,} more"] if rest > 0 else [])])


class OfKind(Generic[T]):
    """The lines of a report whose kind is the name of this attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._kind = name

    @overload
    def __get__(self, report: None, owner: type) -> Self: ...
    @overload
    def __get__(self, report: Iterable[T], owner: type) -> tuple[T, ...]: ...
    def __get__(self, report: Iterable[T] | None, owner: type) -> Self | tuple[T, ...]:
        return self if report is None else tuple(line for line in report if line.kind == self._kind)


@dataclass(frozen=True, slots=True)
class Line:
    """An entry that was not restored exactly as saved."""

    kind: str
    """`missing`, `kept`, `removed`, `unexpected`, `unused`, `renamed`, `changed`, `cast`, `resharded`, `replaced` or
    `skipped`."""
    path: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.path}" + (f": {self.detail}" if self.detail else "")

    @property
    def row(self) -> tuple[str, str, str]:
        """The line as a row of a table: its kind, its path and its detail."""
        return self.kind, self.path, self.detail


@dataclass(frozen=True, slots=True)
class RestoreReport(Report):
    """The result of a restore: entry count, cost, and a line for each entry that was not restored exactly."""

    restored: int
    """Number of entries that were restored exactly as saved."""
    bytes_read: int
    requests: int
    seconds: dict[str, float]
    """Seconds per phase: open, plan, check, read, place, hand back."""
    lines: tuple[Line, ...] = ()
    sources: dict[str, int] = field(default_factory=dict)
    """Bytes that were read from each tier, for a manager with `near`: `near`, `peer` and `far`."""

    _most_details = 50

    missing = OfKind[Line]()
    """Entries of the application that the snapshot lacks; they were left unchanged."""
    kept = OfKind[Line]()
    """Keys of a `StateDict`, options of an optimizer and fields of a dataclass that the snapshot lacks.

    They keep their values.
    """
    removed = OfKind[Line]()
    """Keys of a `StateDict` that the snapshot lacks, and that `exact=True` removed."""
    renamed = OfKind[Line]()
    """Models that were matched after their wrappers' prefixes were removed."""
    changed = OfKind[Line]()
    """Entries that were restored in another form: another class, or memory of their own instead of a view."""
    unexpected = OfKind[Line]()
    """Entries of the snapshot that the application lacks; they were left out."""
    unused = OfKind[Line]()
    """Keys of the snapshot that the app state lacks; nothing of them was restored."""
    cast = OfKind[Line]()
    """Entries that were restored with another dtype."""
    resharded = OfKind[Line]()
    """Entries that were saved with another sharding or layout."""
    replaced = OfKind[Line]()
    """Entries that did not fit the live object, and were restored as a new object."""
    skipped = OfKind[Line]()
    """Entries that were left out, on request or because nothing in the application matches them."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    @property
    def summary(self) -> str:
        spent = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items() if value >= 0.0005)
        head = f"restored {entries_text(self.restored)}, {rate_text(self.bytes_read, self.total_seconds)}"
        return head + (f" ({spent})" if spent else "")

    @property
    def details(self) -> tuple[Line, ...]:
        return self.lines


@dataclass(frozen=True, slots=True)
class TakeReport(Report):
    """The result of a take on this rank: what was written, and what is shared with an earlier snapshot."""

    written_bytes: int
    """Bytes of the data files that were written."""
    shared_bytes: int = 0
    """Bytes of the data files that are shared with a base."""
    shared_files: int = 0
    omitted_bytes: int = 0
    """Bytes of the frozen parameters that only the base has."""
    base: str = ""
    """The save id of the snapshot that has them, or the id of the folder of weights."""
    notes: tuple[str, ...] = ()
    """A line for each base or file that could not be used, or was damaged, and for what a folder of weights lacks."""
    findings: Sequence[object] = ()
    """The findings of the guards on this rank. Those of a pending take are complete when `wait()` has returned."""
    saved: Saved = "whole"
    """What a manager has saved of the state.

    Less than `"whole"` if its deadline was near: in the `"near"` folders only, `"parameters"` (without the state of
    optimizers), or `"none"`.
    """

    @property
    def summary(self) -> str:
        shared = f", shares {size_text(self.shared_bytes)} in {counted(self.shared_files, 'file')}"
        omitted = f", left out {size_text(self.omitted_bytes)}"
        head = f"wrote {size_text(self.written_bytes)}"
        less = "" if self.saved == "whole" else f", {SAVED[self.saved]}"
        return head + (shared if self.shared_bytes else "") + (omitted if self.omitted_bytes else "") + less

    @property
    def details(self) -> tuple[str, ...]:
        return (*self.notes, *map(str, self.findings))

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "findings": list(map(str, self.findings))}


@dataclass(frozen=True, slots=True)
class BisectReport(Report):
    """The result of a bisection: the first bad step of a run."""

    step: int | None
    """The first bad step; None if the last one is good."""
    last_good: int | None
    """The step before it; None if the oldest one is bad already."""
    faults: tuple[str, ...]
    """A line for each bad tensor of that step. If none is bad, a line for each that was not judged."""
    examined: tuple[int, ...]
    """The steps that were examined."""
    bytes_read: int

    @property
    def summary(self) -> str:
        read = f"{counted(len(self.examined), 'step')} examined, {size_text(self.bytes_read)} read"
        if self.step is None:
            return f"step-{self.last_good} is good; {read}"
        if self.last_good is None:
            return f"step-{self.step} is bad, and is the oldest one; {read}"
        return f"step-{self.step} is the first bad one, step-{self.last_good} is good; {read}"

    @property
    def details(self) -> tuple[str, ...]:
        return self.faults


@dataclass(frozen=True, slots=True)
class VerifyReport(Report):
    """The result of a verification."""

    entries: int
    """Number of tensors, values and empty containers, as `SnapshotMetadata.entries` counts them."""
    bytes_read: int
    seconds: float
    faults: tuple[str, ...] = ()
    """A line per damaged or missing piece; empty if all is well."""
    unverifiable: int = 0
    """Number of entries without a digest or checksum. Only other libraries' checkpoints have such entries."""
    quick: bool = False
    """True if only the presence and sizes of files were checked."""
    files: int = 0
    bytes_before: int = 0
    """Bytes that were verified before an interruption, and were not read again."""
    in_base: int = 0
    """Number of entries that only the base has. They were not verified; verify the base for them."""
    signer: str = ""
    """The public key whose signature covers the manifest, and every byte that was read. Empty without a key."""

    @property
    def ok(self) -> bool:
        """True if no fault was found; `unverifiable` and `quick` show the limits of the check."""
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    @property
    def summary(self) -> str:
        looked = counted(self.files, "file") if self.quick else size_text(self.bytes_read)
        before = f" (and {size_text(self.bytes_before)} before)" if self.bytes_before else ""
        left = f"{self.in_base:,} of them left to the base, " if self.in_base else ""
        return f"{entries_text(self.entries)}, {left}{looked}{before} in {self.seconds:.3f} s: {self._result()}"

    @property
    def details(self) -> tuple[str, ...]:
        return self.faults

    def _result(self) -> str:
        if self.faults:
            return counted(len(self.faults), "fault")
        if self.quick:
            signed = f"; the manifest is signed by {self.signer}" if self.signer else ""
            return f"all files exist and have their size; no byte was compared{signed}"
        if self.unverifiable:
            they = "it" if self.unverifiable == 1 else "they"
            return (
                f"structure only, {entries_text(self.unverifiable)} cannot be verified: without a digest, {they} could "
                f"only be read{f'; all files are signed by {self.signer}' if self.signer else ''}"
            )
        return "every byte matches its digest" + (f", and is signed by {self.signer}" if self.signer else "")

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **Report.as_json(self)}


@dataclass(frozen=True, slots=True)
class ConvertReport(Report):
    """The result of a conversion."""

    format: str
    tensors: int
    nbytes: int
    """Bytes of the files with tensors."""
    left_out: tuple[str, ...] = ()
    """A line for each selected entry that the format cannot hold."""
    files: tuple[str, ...] = ()
    """The files that were written, if they have names of their own."""
    seconds: float = 0.0
    changed: tuple[str, ...] = ()
    """A line for each entry that loads differently from how it was saved."""

    @property
    def summary(self) -> str:
        return f"{counted(self.tensors, 'tensor')}, {size_text(self.nbytes)} to {self.format} in {self.seconds:.3f} s"

    @property
    def details(self) -> tuple[str, ...]:
        return (*self.left_out, *self.changed)

    def __str__(self) -> str:
        lines = [("left out", self.left_out), ("changed", self.changed)]
        return self.summary + "".join(f"; {len(found):,} {what}:{listed(found)}" for what, found in lines if found)


@dataclass(frozen=True, slots=True)
class CopyReport(Report):
    """The result of a copy."""

    format: str
    """`snapshot`, or the name of the other library's format."""
    entries: int
    """Number of tensors, values and empty containers, as `SnapshotMetadata.entries` counts them."""
    files: int
    nbytes: int
    """Bytes of the files."""
    checked: str
    """The check during the copy: `digests`, `checksums`, or only `sizes`."""
    seconds: float = 0.0
    was_signed: bool = False
    """True if the source has a signature. The copy has none, since its files have other names: sign it again."""

    @property
    def summary(self) -> str:
        kind = "" if self.format == "snapshot" else f" of {self.format}"
        files = counted(self.files, "file")
        signed = "; the source is signed, the copy is not" if self.was_signed else ""
        head = f"{entries_text(self.entries)}, {files}{kind}, {rate_text(self.nbytes, self.seconds)}"
        return f"{head}; {_COMPARED[self.checked]}{signed}"


_COMPARED = {
    "digests": "every byte was compared with its digest",
    "checksums": "the checksums in its archives were compared",
    "sizes": "only sizes were compared",
}


@dataclass(slots=True)
class RestoreIssues:
    """Report lines and mismatches, collected during a restore."""

    lines: list[Line] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    names: bool = False
    """True if a mismatch is about a name."""

    def add(self, kind: str, path: str, detail: str = "") -> None:
        self.lines.append(Line(kind, path, detail))

    def add_wrong_name(self, mismatch: str) -> None:
        self.mismatches.append(mismatch)
        self.names = True


@dataclass(frozen=True, slots=True)
class Values:
    """Differences between the elements of two tensors. NaN equals NaN, and 0.0 equals -0.0."""

    elements: int
    differing: int
    """Number of elements that differ."""
    largest: float
    """The largest absolute difference; an exact int for integers."""
    norm: float
    """The L2 norm of the difference."""
    relative: float
    """The L2 norm of the difference, relative to the norm of the first tensor; infinite if that norm is 0."""
    not_numbers: int = 0
    """Number of elements that are NaN on one side only. The three values above do not include them."""
    within: str = ""
    """The common dtype for the comparison if only one tensor is of integers; the cast may round."""

    def __str__(self) -> str:
        nan = f", {self.not_numbers:,} NaN on one side" if self.not_numbers else ""
        share = f" ({self.relative:.2%} of the first's)" if self.relative < 1e4 else ""
        return (
            f"{self.differing:,} of {self.elements:,} differ{nan}, at most by {self.largest:.6g}, "
            f"norm {self.norm:.6g}{share}{f', in {self.within}' if self.within else ''}"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """An entry that differs between the two snapshots."""

    kind: str
    """`added` (only in the second), `removed` (only in the first), `changed`, or `renamed` (same bytes, new name)."""
    path: str
    """Its logical path, preceded by a rank (`1/rng/torch`) if it belongs to a single rank of several."""
    what: tuple[str, ...] = ()
    """The changed properties: `kind`, `dtype`, `shape`, `bytes`, `value`, `ties`, `keys`, `length`, `order`, ..."""
    detail: str = ""
    before: str = ""
    """The name in the first snapshot, if it was renamed."""
    values: Values | None = None
    """The size of the difference, if requested."""

    def __str__(self) -> str:
        kind, name, more = self.row
        return f"{MARKS[kind]} {name}" + (f": {more}" if more else "")

    @property
    def row(self) -> tuple[str, str, str]:
        """The change as a row of a table: its kind, its path and a text."""
        if self.kind == "renamed":
            return self.kind, f"{self.before} -> {self.path}", ""
        said = self.detail or ("" if self.values else ", ".join(self.what))
        more = "; ".join(filter(None, (said, str(self.values or ""))))
        if self.values and not self.values.differing and "bytes" in self.what:
            more += " (only bytes differ)"
        return self.kind, self.path, more


@dataclass(frozen=True, slots=True)
class Diff(Report):
    """The differences between two snapshots. Truthy if there are any."""

    a: str
    b: str
    changes: tuple[Change, ...]
    """The changes, sorted by path."""
    equal: int
    """Number of entries that are equal in both."""
    entries_read: int = 0
    """Number of entries whose bytes were read; all others were compared by their manifest entries."""
    bytes_read: int = 0
    """Bytes of data files that were read from both."""
    seconds: float = 0.0

    _most_details = 200

    added = OfKind[Change]()
    """Entries that only the second snapshot has."""
    removed = OfKind[Change]()
    """Entries that only the first snapshot has."""
    changed = OfKind[Change]()
    """Entries that both have, with differences."""
    renamed = OfKind[Change]()
    """Entries with the same bytes under another name, if the match is unique."""

    @property
    def same(self) -> bool:
        """True if there are no differences."""
        return not self.changes

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    @property
    def summary(self) -> str:
        if self.same:
            head = f"the same: {entries_text(self.equal)}"
        else:
            counts = "".join(f"{number:,} {kind}, " for kind, number in self.counts.items() if number)
            head = f"{counts}{self.equal:,} the same"
        if self.entries_read:
            return f"{head}; {entries_text(self.entries_read)} had to be read: {size_text(self.bytes_read)}"
        return f"{head}; by the manifests alone, no data was read"

    @property
    def counts(self) -> dict[str, int]:
        """The number of changes of each kind."""
        return {kind: sum(change.kind == kind for change in self.changes) for kind in MARKS}

    @property
    def details(self) -> tuple[Change, ...]:
        return self.changes

    def as_json(self) -> dict[str, Any]:
        return {**Report.as_json(self), "same": self.same, **self.counts}
