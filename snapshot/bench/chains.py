"""Takes that are based on the takes before them, as an incremental run makes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Take(Protocol):
    """Function that takes a snapshot, with bases."""

    def __call__(self, where: str, *, base: str | Sequence[str]) -> None: ...


class Chain:
    """A row of takes. Each is based on the one before it, or on the two before it."""

    def __init__(self, take: Take, bases: int) -> None:
        self._take = take
        self._bases = bases
        self._places: list[str] = []

    @property
    def is_warm(self) -> bool:
        """True if the next take has all of its bases."""
        return len(self._places) >= self._bases

    def save(self, where: str) -> None:
        """Take the next snapshot. Without earlier ones, everything is written."""
        earlier = self._places[: -self._bases - 1 : -1]
        self._take(where, base=earlier[0] if earlier and self._bases == 1 else earlier)
        self._places.append(where)

    def cut(self) -> list[str]:
        """Return the places that no later take is based on, and forget them."""
        cut, self._places = self._places[: -self._bases], self._places[-self._bases :]
        return cut
