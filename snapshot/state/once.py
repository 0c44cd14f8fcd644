"""Values that one rank gives for all: not equal on all ranks, and nobody's own either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class FromOneRank:
    """A value, with all beneath it, that stands in the manifest once, for every rank that asks for its name.

    Only one rank may give it: no other may have a value under the same path.
    """

    value: Any
