"""Results of operations, as values that print well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshot.text import counted, entries_text, listed, size_text

MARKS = {"added": "+", "removed": "-", "changed": "~", "renamed": ">"}
"""The mark at the beginning of each line of a `Diff`, by kind of change."""


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


@dataclass(frozen=True, slots=True)
class RestoreReport:
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

    def _of(self, kind: str) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == kind)

    @property
    def missing(self) -> tuple[Line, ...]:
        """Entries of the application that the snapshot lacks; they were left unchanged."""
        return self._of("missing")

    @property
    def kept(self) -> tuple[Line, ...]:
        """Keys of a `StateDict`, options of an optimizer and fields of a dataclass that the snapshot lacks.

        They keep their values.
        """
        return self._of("kept")

    @property
    def removed(self) -> tuple[Line, ...]:
        """Keys of a `StateDict` that the snapshot lacks, and that `exact=True` removed."""
        return self._of("removed")

    @property
    def renamed(self) -> tuple[Line, ...]:
        """Models that were matched after their wrappers' prefixes were removed."""
        return self._of("renamed")

    @property
    def changed(self) -> tuple[Line, ...]:
        """Entries that were restored in another form: another class, or memory of their own instead of a view."""
        return self._of("changed")

    @property
    def unexpected(self) -> tuple[Line, ...]:
        """Entries of the snapshot that the application lacks; they were left out."""
        return self._of("unexpected")

    @property
    def unused(self) -> tuple[Line, ...]:
        """Keys of the snapshot that the app state lacks; nothing of them was restored."""
        return self._of("unused")

    @property
    def cast(self) -> tuple[Line, ...]:
        """Entries that were restored with another dtype."""
        return self._of("cast")

    @property
    def resharded(self) -> tuple[Line, ...]:
        """Entries that were saved with another sharding or layout."""
        return self._of("resharded")

    @property
    def replaced(self) -> tuple[Line, ...]:
        """Entries that did not fit the live object, and were restored as a new object."""
        return self._of("replaced")

    @property
    def skipped(self) -> tuple[Line, ...]:
        """Entries that were left out, on request or because nothing in the application matches them."""
        return self._of("skipped")

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __str__(self) -> str:
        total = self.total_seconds
        rate = f", {size_text(self.bytes_read / total)}/s" if total > 0 else ""
        spent = ", ".join(f"{name} {value:.3f}" for name, value in self.seconds.items() if value >= 0.0005)
        head = f"restored {entries_text(self.restored)}, {size_text(self.bytes_read)} in {total:.3f} s{rate}"
        lines = [head + (f" ({spent})" if spent else "")]
        shown = self.lines if len(self.lines) <= 50 else self.lines[:50]
        lines += [f"  {line}" for line in shown]
        if len(shown) < len(self.lines):
            lines.append(f"  ... and {len(self.lines) - len(shown)} more")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class TakeReport:
    """The result of a take on this rank: what was written, and what is shared with an earlier snapshot."""

    written_bytes: int
    """Bytes of the data files that were written."""
    shared_bytes: int = 0
    """Bytes of the data files that are shared with a base."""
    shared_files: int = 0
    omitted_bytes: int = 0
    """Bytes of the frozen parameters that only the base has."""
    base: str = ""
    """The save id of the snapshot that has them."""
    notes: tuple[str, ...] = ()
    """A line for each base or file that could not be used, or was damaged."""

    def __str__(self) -> str:
        lines = [f"wrote {size_text(self.written_bytes)}"]
        if self.shared_bytes:
            lines[0] += f", shares {size_text(self.shared_bytes)} in {counted(self.shared_files, 'file')}"
        if self.omitted_bytes:
            lines[0] += f", left out {size_text(self.omitted_bytes)}"
        return "\n  ".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class VerifyReport:
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

    def __str__(self) -> str:
        looked = counted(self.files, "file") if self.quick else size_text(self.bytes_read)
        before = f" (and {size_text(self.bytes_before)} before)" if self.bytes_before else ""
        left = f"{self.in_base:,} of them left to the base, " if self.in_base else ""
        head = f"{entries_text(self.entries)}, {left}{looked}{before} in {self.seconds:.3f} s: "
        if self.ok:
            if self.quick:
                return head + "all files exist and have their size; no byte was compared" + self._signature_text()
            if self.unverifiable:
                return (
                    head
                    + f"structure only, {entries_text(self.unverifiable)} cannot be verified: "
                    + (
                        "without a digest, it could only be read"
                        if self.unverifiable == 1
                        else "without a digest, they could only be read"
                    )
                )
            return head + "every byte matches its digest" + self._signature_text()
        return head + counted(len(self.faults), "fault") + listed(self.faults, 1000)

    def _signature_text(self) -> str:
        if not self.signer:
            return ""
        return f"; the manifest is signed by {self.signer}" if self.quick else f", and is signed by {self.signer}"


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion."""

    format: str
    tensors: int
    nbytes: int
    """Bytes of the tensors."""
    left_out: tuple[str, ...] = ()
    """A line for each selected entry that the format cannot hold."""
    files: tuple[str, ...] = ()
    """The files that were written, if they have names of their own."""
    seconds: float = 0.0
    changed: tuple[str, ...] = ()
    """A line for each entry that loads differently from how it was saved."""

    def __str__(self) -> str:
        head = f"{counted(self.tensors, 'tensor')}, {size_text(self.nbytes)} to {self.format} in {self.seconds:.3f} s"
        lines = [("left out", self.left_out), ("changed", self.changed)]
        return head + "".join(f"; {len(found):,} {what}:{listed(found)}" for what, found in lines if found)


@dataclass(frozen=True, slots=True)
class CopyReport:
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

    def __str__(self) -> str:
        rate = f", {size_text(self.nbytes / self.seconds)}/s" if self.seconds > 0 else ""
        kind = "" if self.format == "snapshot" else f" of {self.format}"
        files = counted(self.files, "file")
        head = f"{entries_text(self.entries)}, {files}{kind}, {size_text(self.nbytes)} in {self.seconds:.3f} s{rate}"
        return f"{head}; {_COMPARED[self.checked]}" + (
            "; the source is signed, the copy is not" if self.was_signed else ""
        )


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
        if self.kind == "renamed":
            return f"{MARKS[self.kind]} {self.before} -> {self.path}"
        said = self.detail or ("" if self.values else ", ".join(self.what))
        more = "; ".join(filter(None, (said, str(self.values or ""))))
        if self.values and not self.values.differing and "bytes" in self.what:
            more += " (only bytes differ)"
        return f"{MARKS[self.kind]} {self.path}" + (f": {more}" if more else "")


@dataclass(frozen=True, slots=True)
class Diff:
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

    def _of(self, kind: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    @property
    def same(self) -> bool:
        """True if there are no differences."""
        return not self.changes

    @property
    def added(self) -> tuple[Change, ...]:
        """Entries that only the second snapshot has."""
        return self._of("added")

    @property
    def removed(self) -> tuple[Change, ...]:
        """Entries that only the first snapshot has."""
        return self._of("removed")

    @property
    def changed(self) -> tuple[Change, ...]:
        """Entries that both have, with differences."""
        return self._of("changed")

    @property
    def renamed(self) -> tuple[Change, ...]:
        """Entries with the same bytes under another name, if the match is unique."""
        return self._of("renamed")

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    @property
    def summary(self) -> str:
        """One line: the number of changes by kind, and the bytes that were read."""
        if self.same:
            head = f"the same: {entries_text(self.equal)}"
        else:
            counts = [f"{len(self._of(kind)):,} {kind}" for kind in MARKS if self._of(kind)]
            head = f"{', '.join(counts)}, {self.equal:,} the same"
        if self.entries_read:
            return f"{head}; {entries_text(self.entries_read)} had to be read: {size_text(self.bytes_read)}"
        return f"{head}; by the manifests alone, no data was read"

    def __str__(self) -> str:
        return self.summary + listed([str(change) for change in self.changes], 200)
