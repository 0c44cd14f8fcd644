"""What differs between two snapshots, as a value that prints well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from snapshot.reports import entries_text, listed, size_text

MARKS = {"added": "+", "removed": "-", "changed": "~", "renamed": ">"}
"""What stands before a line of each kind."""


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
