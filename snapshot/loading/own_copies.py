"""Values that each rank stored for itself, though they are equal on all ranks: a new rank can have them, too."""

from __future__ import annotations

from typing import Any

from snapshot.loading.live import Twin, have_equal_bytes
from snapshot.loading.open import Opened
from snapshot.manifest import entries as e
from snapshot.manifest.rank_view import MOST_RANKS
from snapshot.manifest.values import Scalar
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
        ones, others = _describe(first), _describe(other)
        if ones is None or others is None or ones[0] != others[0]:
            return False
        for one, another in zip(ones[1], others[1], strict=True):
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


_Stored = e.TensorEntry | e.ChunkedTensorEntry


def _describe(entry: Any) -> tuple[Any, list[_Stored]] | None:
    """Return all properties of an entry but its bytes, and the tensors that have those; None if they are not known."""
    if isinstance(entry, Scalar):
        return (type(entry), entry.identity), []
    if isinstance(entry, (e.TensorEntry, e.ChunkedTensorEntry)):
        return ("tensor", entry.dtype, tuple(entry.shape), entry.extra), [entry]
    if isinstance(entry, e.NDArrayEntry):
        return ("ndarray", entry.dtype, tuple(entry.shape), entry.order, entry.scalar, entry.data.dtype), [entry.data]
    if isinstance(entry, e.TensorPartsEntry):
        kinds = [(name, part.dtype, tuple(part.shape)) for name, part in entry.parts.items()]
        return ("parts", entry.kind, entry.params, kinds), list(entry.parts.values())
    if isinstance(entry, e.ObjectEntry) and entry.digest is not None:
        return ("object", entry.serializer, entry.obj_type, entry.nbytes, entry.digest), []
    return None
