"""Values that each rank stored for itself, though they are equal on all ranks: a new rank can have them, too."""

from __future__ import annotations

from typing import Any

from snapshot.loading.live import Twin, have_equal_bytes
from snapshot.loading.open import Opened
from snapshot.manifest.rank_view import MOST_RANKS
from snapshot.tensors.memory import BY_NAME


class OwnCopies:
    """The copies that all ranks of a snapshot stored of the same values."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._known: dict[str, bool] = {}

    def are_equal(self, path: str) -> bool:
        """Return True if all ranks have the same bytes at a path without a rank.

        Digests in the manifest show it. If ranks split a tensor in other ways, its copies are read.
        """
        document = self._opened.document
        if document.world_size > MOST_RANKS:
            return False
        if path not in self._known:
            held = [document.manifest.get(f"{rank}/{path}") for rank in range(document.world_size)]
            if None in held and document.parts:
                return False  # it may be in a part that has not been read yet
            self._known[path] = all(
                self._has_equal(path, rank, held[0], each) for rank, each in enumerate(held) if rank
            )
        return self._known[path]

    def _has_equal(self, path: str, rank: int, first: Any, other: Any) -> bool:
        """Return True if the entry of a rank has the same bytes as that of rank 0."""
        if first is None or other is None or first.form is None or first.form != other.form:
            return False
        for (_, one), (_, another) in zip(first.tensors(), other.tensors(), strict=True):
            pieces, more = ([(box, stored.digest) for box, stored in each.pieces()] for each in (one, another))
            if all(digest is not None for _, digest in pieces) and pieces == more:
                continue
            if [box for box, _ in pieces] == [box for box, _ in more] and all(digest for _, digest in pieces + more):
                return False
            if one.dtype not in BY_NAME:
                return False
            twin = Twin(f"0/{path}", one, f"{rank}/{path}", another)
            if not have_equal_bytes(self._opened, twin, verify=True):
                return False
        return True
