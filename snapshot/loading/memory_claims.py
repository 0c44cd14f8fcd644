"""Claims on stored bytes: new values must not take far more memory than the files have bytes."""

from __future__ import annotations

import math
from typing import Any

from snapshot.errors import CorruptSnapshotError
from snapshot.formats.foreign import is_packed
from snapshot.manifest import entries as e
from snapshot.manifest.validate import Files
from snapshot.tensors.dtypes import ITEMSIZE

ROOM = 1 << 30
MOST_TIMES = 4
"""New values from other libraries' files, which may be compressed, take at most ROOM plus a multiple of their size."""


class MemoryClaims:
    """The bytes that new values use, of all bytes in the files."""

    def __init__(self, files: Files) -> None:
        self._claimed: dict[tuple[str, tuple[int, int]], tuple[Any, ...]] = {}
        self._unclaimed = sum(file.size for file in files.values())
        """Bytes of the files that no new value uses yet."""
        self.room = ROOM + MOST_TIMES * self._unclaimed
        """Bytes that new values from packed tensors or views may still take."""

    def claim(self, path: str, stored: e.TensorEntry | e.ObjectEntry, *what: Any) -> None:
        """Raise if new values would take more memory than the files have bytes.

        A hostile manifest of a few bytes may name the same range many times, each time with another type.
        """
        place = stored.location, stored.byte_range
        if not stored.nbytes:
            return
        if isinstance(stored, e.TensorEntry) and is_packed(stored):
            self.room -= math.prod(stored.shape) * ITEMSIZE[stored.dtype]
            if self.room < 0:
                raise CorruptSnapshotError(
                    f"{path}: would take far more memory than its files have bytes; restore it into an existing tensor"
                )
            return
        if place not in self._claimed:
            self._claimed[place] = what
            self._unclaimed -= stored.nbytes
        if self._claimed[place] != what or self._unclaimed < 0:
            raise CorruptSnapshotError(f"{path}: its bytes also belong to other values")
