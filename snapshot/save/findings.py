"""What guards have found, as a snapshot's metadata has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Guards = Literal["suspect", "report", "refuse", "off"]
KEY = "snapshot.guards"
"""Key in a snapshot's metadata, with the findings that make it suspect."""
NOTED = "snapshot.findings"
"""Key in a snapshot's metadata, with all other findings."""
ACTING = ("nonfinite", "stale", "missing")
"""Guards from which a policy follows. All others only report."""


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """A sign that something is wrong."""

    guard: str
    text: str

    @property
    def acts(self) -> bool:
        """True if the option `guards` acts on it."""
        return self.guard in ACTING

    def __str__(self) -> str:
        return f"{self.guard}: {self.text}"


def suspicions(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the findings in a snapshot's metadata that make it suspect: empty unless it is."""
    return _texts_of(metadata, KEY)


def noted_findings(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the findings in a snapshot's metadata that do not make it suspect."""
    return _texts_of(metadata, NOTED)


def _texts_of(metadata: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = metadata.get(key)
    return tuple(map(str, found)) if isinstance(found, list) else ()
