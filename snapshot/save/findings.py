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
ENVIRONMENT = "snapshot.environment"
"""Key in a snapshot's metadata, with what its state was computed with."""
PARTIAL = "snapshot.partial"
"""Key in a snapshot's metadata, with the reason why the state is not whole."""
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
    """Return why a snapshot is suspect, from its metadata: findings, or that it is not whole. Empty unless it is."""
    partial = metadata.get(PARTIAL)
    return (*_texts_of(metadata, KEY), *([partial] if isinstance(partial, str) else []))


def noted_findings(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the findings in a snapshot's metadata that do not make it suspect."""
    return _texts_of(metadata, NOTED)


def _texts_of(metadata: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = metadata.get(key)
    return tuple(map(str, found)) if isinstance(found, list) else ()
