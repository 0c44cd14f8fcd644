"""Numbers, sizes and lists as text."""

from __future__ import annotations

from collections.abc import Sequence


def size_text(nbytes: float) -> str:
    """Format a number of bytes for people.

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
    """Format a number with its noun.

    >>> counted(1, "file"), counted(2000, "file"), counted(0, "entry", "entries")
    ('1 file', '2,000 files', '0 entries')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """Return a noun, or the name of a class, with "a" or "an".

    >>> with_article("int"), with_article("OrderedDict"), with_article("UUID"), with_article("float")
    ('an int', 'an OrderedDict', 'a UUID', 'a float')
    """
    like_a_vowel = noun[:1].lower() in tuple("aeio") or (noun[:2].lower() == "un" and noun[:3].lower() != "uni")
    return f"{'an' if like_a_vowel else 'a'} {noun}"


def entries_text(number: int) -> str:
    """Format a number of entries."""
    return counted(number, "entry", "entries")


def listed(items: Sequence[str], most: int = 20) -> str:
    """Format items as indented lines, at most `most` of them."""
    more = f"\n  … and {len(items) - most} more" if len(items) > most else ""
    return "".join(f"\n  {item}" for item in items[:most]) + more
