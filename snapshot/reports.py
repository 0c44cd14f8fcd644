"""What happened, as values that print well."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


def size_text(nbytes: float) -> str:
    """A number of bytes as a person writes it.

    >>> size_text(3 << 20), size_text(12)
    ('3.0 MiB', '12 B')
    """
    if nbytes < 1024:
        return f"{int(nbytes)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        nbytes /= 1024
        if nbytes < 1024 or unit == "TiB":
            break
    return f"{nbytes:.1f} {unit}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun.

    >>> counted(1, "file"), counted(2000, "file"), counted(0, "entry", "entries")
    ('1 file', '2,000 files', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """A noun, or the name of a class, with "a" or "an".

    >>> with_article("int"), with_article("OrderedDict"), with_article("UUID"), with_article("float")
    ('an int', 'an OrderedDict', 'a UUID', 'a float')
    """
    like_a_vowel = noun[:1].lower() in tuple("aeio") or (noun[:2].lower() == "un" and noun[:3].lower() != "uni")
    return f"{'an' if like_a_vowel else 'a'} {noun}"


def entries_text(number: int) -> str:
    """A number of entries."""
    return counted(number, "entry", "entries")


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


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a take or a restore has come."""

    done: int
    """Bytes that are where they belong."""
    total: int
    staged: int = 0
    """Bytes that no longer depend on the application's memory (of an asynchronous take)."""
    seconds: float = 0.0
    """Since the call."""
    rate: float = 0.0
    """Bytes a second, in the last two seconds; 0 when it is over."""

    @property
    def mean_rate(self) -> float:
        """Bytes a second, since the call."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    def __str__(self) -> str:
        share = self.done / self.total if self.total else 1.0
        rate = self.rate if self.done < self.total else self.mean_rate
        return f"{size_text(self.done)} of {size_text(self.total)} ({share:.0%}), {size_text(rate)}/s"


@dataclass(slots=True)
class RestoreIssues:
    """Lines, and mismatches, as they are gathered."""

    lines: list[Line] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def add(self, kind: str, path: str, detail: str = "") -> None:
        self.lines.append(Line(kind, path, detail))


def listed(items: Sequence[str], most: int = 20) -> str:
    """Items below each other, not more than a screen of them."""
    more = f"\n  … and {len(items) - most} more" if len(items) > most else ""
    return "".join(f"\n  {item}" for item in items[:most]) + more
