"""Patterns of tensor names, whose placeholders stand for layers, experts and everything else that is numbered.

`NamePattern` stays in this module, since pickles in snapshots name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(\.\.\.)?\}")


class NamePattern(NamedTuple):
    """A name with placeholders: `{i}` stands for one component, `{rest...}` for several."""

    text: str
    placeholders: tuple[str, ...]
    regex: re.Pattern[str]
    ends: tuple[str, str]
    """The text before the first placeholder, and after the last one."""

    @staticmethod
    def compile(text: str) -> NamePattern:
        """Compile a pattern.

        >>> NamePattern.compile("layers.{i}.weight").match("layers.3.weight")
        {'i': '3'}
        """
        parts, found, position = [], [], 0
        for each in _PLACEHOLDER.finditer(text):
            parts.append(_literal(text, position, each.start()))
            name, several = each.groups()
            if name in found:
                parts.append(f"(?P={name})")
            else:
                parts.append(f"(?P<{name}>{'.+' if several else '[^.]+'})")
                found.append(name)
            position = each.end()
        parts.append(_literal(text, position, len(text)))
        ends = (text.partition("{")[0], text.rpartition("}")[2])
        return NamePattern(text, tuple(found), re.compile("".join(parts), re.DOTALL), ends)

    def match(self, name: str) -> dict[str, str] | None:
        """Return the values of the placeholders, or None if the name does not match."""
        if not (name.startswith(self.ends[0]) and name.endswith(self.ends[1])):
            return None
        found = self.regex.fullmatch(name)
        return None if found is None else found.groupdict()

    def fill(self, values: Mapping[str, str]) -> str:
        """Return the name with these values."""
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.text)


def _literal(text: str, begin: int, end: int) -> str:
    part = text[begin:end]
    if "{" in part or "}" in part:
        raise ValueError(f"{text!r}: a placeholder must be a name in braces, such as {{i}} or {{rest...}}")
    return re.escape(part)


def split_names(text: str) -> list[str]:
    """Split names that are separated by commas."""
    names = [each.strip() for each in text.split(",")]
    if not all(names):
        raise ValueError(f"{text!r}: an empty name; names must be separated by single commas")
    return names
