"""Names in pickles: those that checkpoints need, those that run code, and all others, which are unknown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple


class Name(NamedTuple):
    """A class or function, as a pickle names it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


COMPUTED = "(computed)"
"""Stands for a module or a name that only running the pickle computes."""
_LINES = Path(__file__).with_name("names.txt").read_text().splitlines()
_KNOWN, _CODE = (
    re.compile("|".join(f"(?:{line.split(' ', 1)[1]})" for line in _LINES if line.startswith(rule)), re.DOTALL)
    for rule in ("known", "code")
)


def judge_name(name: Name, *, called: bool = False, allow: Sequence[str] = ()) -> str:
    """Return the rule for a name: `known`, `unknown`, or `code` if it runs code, or is unknown and called."""
    if _KNOWN.fullmatch(str(name)):
        return "known"
    if _CODE.fullmatch(str(name)):
        return "code"
    allowed = any(fnmatchcase(str(name), each) for each in allow)
    return "known" if allowed else "code" if called else "unknown"
