"""What happened, as values that print well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshot.text import counted, entries_text, listed, size_text

MARKS = {"added": "+", "removed": "-", "changed": "~", "renamed": ">"}
"""The mark at the beginning of each line of a `Diff`, by kind of change."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entry that was not restored plainly."""

    kind: str
    """`missing`, `kept`, `removed`, `unexpected`, `renamed`, `changed`, `cast`, `resharded`, `replaced` or
    `skipped`."""
    path: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind:<10} {self.path}" + (f": {self.detail}" if self.detail else "")


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore did: how many entries, at what cost, and a line for each that is not plain."""

    restored: int
    """Entries that the application has now as they were saved."""
    bytes_read: int
    requests: int
    seconds: dict[str, float]
    """How the time was spent: open, plan, check, read, place, hand back."""
    lines: tuple[Line, ...] = ()

    def _of(self, kind: str) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.kind == kind)

    @property
    def missing(self) -> tuple[Line, ...]:
        """What the application has and the snapshot has not; it was left as it is."""
        return self._of("missing")

    @property
    def kept(self) -> tuple[Line, ...]:
        """Keys of a `StateDict`, options of an optimizer and fields of a dataclass that the snapshot lacks: they keep
        their value."""
        return self._of("kept")

    @property
    def removed(self) -> tuple[Line, ...]:
        """Keys of a `StateDict` that the snapshot lacks, and that `exact=True` has removed."""
        return self._of("removed")

    @property
    def renamed(self) -> tuple[Line, ...]:
        """Models whose names were matched without those of wrappers."""
        return self._of("renamed")

    @property
    def changed(self) -> tuple[Line, ...]:
        """What came back in another form: of another class, or with memory of its own where it was a view."""
        return self._of("changed")

    @property
    def unexpected(self) -> tuple[Line, ...]:
        """What the snapshot has and the application has not; it was left out."""
        return self._of("unexpected")

    @property
    def cast(self) -> tuple[Line, ...]:
        """What was restored in another dtype."""
        return self._of("cast")

    @property
    def resharded(self) -> tuple[Line, ...]:
        """What was saved in another layout than it has now."""
        return self._of("resharded")

    @property
    def replaced(self) -> tuple[Line, ...]:
        """What no longer fitted, and is a new object now."""
        return self._of("replaced")

    @property
    def skipped(self) -> tuple[Line, ...]:
        """What was left out, on request or since it has no place here."""
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
class VerifyReport:
    """What a verification found."""

    entries: int
    """Tensors, values and empty containers, as `SnapshotMetadata.entries` counts them."""
    bytes_read: int
    seconds: float
    faults: tuple[str, ...] = ()
    """A line per damaged or missing piece; none if all is well."""
    unverifiable: int = 0
    """Entries of which bytes carry neither a digest nor a checksum: only others' formats have such."""
    quick: bool = False
    """Whether only presence and sizes of the files were looked at."""
    files: int = 0
    bytes_before: int = 0
    """Bytes that the verification had looked at before it was interrupted, and that were not read again."""

    @property
    def ok(self) -> bool:
        """Whether no fault was found; see `unverifiable` and `quick` for what was not looked for."""
        return not self.faults

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        looked = counted(self.files, "file") if self.quick else size_text(self.bytes_read)
        before = f" (and {size_text(self.bytes_before)} before)" if self.bytes_before else ""
        head = f"{entries_text(self.entries)}, {looked}{before} in {self.seconds:.3f} s: "
        if self.ok:
            if self.quick:
                return head + "all files are there, and as long as they were; no byte was compared"
            if self.unverifiable:
                return (
                    head
                    + f"structure only, {entries_text(self.unverifiable)} can't be verified: "
                    + (
                        "without a digest, it could only be read"
                        if self.unverifiable == 1
                        else "without a digest, they could only be read"
                    )
                )
            return head + "every byte is what was written"
        return head + counted(len(self.faults), "fault") + listed(self.faults, 1000)


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion wrote."""

    format: str
    tensors: int
    nbytes: int
    """Bytes of the tensors."""
    left_out: tuple[str, ...] = ()
    """A line for each thing that was wanted, and that the format cannot hold."""
    files: tuple[str, ...] = ()
    """The files that were written, where they have names of their own."""
    seconds: float = 0.0
    changed: tuple[str, ...] = ()
    """A line for each thing that was written, and that comes back otherwise than it was."""

    def __str__(self) -> str:
        head = f"{counted(self.tensors, 'tensor')}, {size_text(self.nbytes)} to {self.format} in {self.seconds:.3f} s"
        lines = [("left out", self.left_out), ("changed", self.changed)]
        return head + "".join(f"; {len(found):,} {what}:{listed(found)}" for what, found in lines if found)


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy wrote."""

    format: str
    """`snapshot`, or whose format it is that was copied as it is."""
    entries: int
    """Tensors, values and empty containers, as `SnapshotMetadata.entries` counts them."""
    files: int
    nbytes: int
    """Bytes of the files."""
    checked: str
    """What the bytes were compared by on their way: `digests`, `checksums`, or only `sizes`."""
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = f", {size_text(self.nbytes / self.seconds)}/s" if self.seconds > 0 else ""
        kind = "" if self.format == "snapshot" else f" of {self.format}"
        files = counted(self.files, "file")
        head = f"{entries_text(self.entries)}, {files}{kind}, {size_text(self.nbytes)} in {self.seconds:.3f} s{rate}"
        return f"{head}; {_COMPARED[self.checked]}"


_COMPARED = {
    "digests": "every byte was compared with its digest",
    "checksums": "the checksums in its archives were compared",
    "sizes": "only sizes were compared",
}


@dataclass(slots=True)
class RestoreIssues:
    """Lines, and mismatches, as they are gathered."""

    lines: list[Line] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def add(self, kind: str, path: str, detail: str = "") -> None:
        self.lines.append(Line(kind, path, detail))


@dataclass(frozen=True, slots=True)
class Values:
    """By how much the elements of two tensors differ. A NaN is equal to a NaN here, and 0.0 to -0.0."""

    elements: int
    differing: int
    """How many of them differ."""
    largest: float
    """The largest absolute difference; of integers an exact int."""
    norm: float
    """The L2 norm of the difference."""
    relative: float
    """The same, relative to the norm of the first tensor; infinite where that is 0."""
    not_numbers: int = 0
    """How many of those that differ are a number on one side only: they count in none of the three above."""
    within: str = ""
    """The dtype that both were cast to, which may round, where only one of them is of integers."""

    def __str__(self) -> str:
        nan = f", {self.not_numbers:,} in being a number" if self.not_numbers else ""
        share = f" ({self.relative:.2%} of the first's)" if self.relative < 1e4 else ""
        return (
            f"{self.differing:,} of {self.elements:,} differ{nan}, at most by {self.largest:.6g}, "
            f"norm {self.norm:.6g}{share}{f', in {self.within}' if self.within else ''}"
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One entry that is not the same in both."""

    kind: str
    """`added`: only the second has it; `removed`: only the first; `changed`; or `renamed`: the same bytes under another
    name."""
    path: str
    """Its logical path; with a rank before it (`1/rng/torch`) where it belongs to one rank of several alone."""
    what: tuple[str, ...] = ()
    """What has changed: `kind`, `dtype`, `shape`, `bytes`, `value`, `ties`, `keys`, `length`, `order`, ..."""
    detail: str = ""
    before: str = ""
    """Of what was renamed, its name in the first."""
    values: Values | None = None
    """By how much, where that was asked for."""

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
    """What differs between two snapshots. As a list of changes is, it is true if there are any."""

    a: str
    b: str
    changes: tuple[Change, ...]
    """In the order of their paths."""
    equal: int
    """Entries that are the same in both."""
    entries_read: int = 0
    """Entries whose bytes had to be read; all others were compared by what the manifests say."""
    bytes_read: int = 0
    """Bytes of data files that were read, of both."""
    seconds: float = 0.0

    def _of(self, kind: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.kind == kind)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.changes

    @property
    def added(self) -> tuple[Change, ...]:
        """What only the second has."""
        return self._of("added")

    @property
    def removed(self) -> tuple[Change, ...]:
        """What only the first has."""
        return self._of("removed")

    @property
    def changed(self) -> tuple[Change, ...]:
        """What both have, and is not the same."""
        return self._of("changed")

    @property
    def renamed(self) -> tuple[Change, ...]:
        """What has the same bytes under another name, where there is but one such."""
        return self._of("renamed")

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.changes)

    @property
    def summary(self) -> str:
        """One line: how many of each kind, and how that was found out."""
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
