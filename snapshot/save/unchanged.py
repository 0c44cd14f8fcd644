"""The part of a take that need not be written: files that are shared with a base, and tensors that only a base has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.manifest.document import BaseReference, FileEntry
from snapshot.manifest.entries import TensorEntry
from snapshot.per_process import PerProcess, drop_oldest
from snapshot.plan.layout import LATE, LEFT_OUT, STABLE, Extent, place_box
from snapshot.runtime.session import Session
from snapshot.save.cleanup import committed_save_id
from snapshot.save.rank_share import RankShare
from snapshot.save.writer import WrittenFile
from snapshot.state.leaves import Leaf

WORTH_SHARING = 64 << 10
"""Minimum bytes of unchanged tensors for files of their own, and of a file that is shared."""
KEPT = 8
"""Number of takes whose unchanged leaves are remembered."""

_equal: PerProcess[dict[str, frozenset[str]]] = PerProcess(dict)
"""The leaves of recent takes of this process, by save id, that were equal in the base of the take."""


@dataclass
class Unchanged:
    """The part of a take that need not be written."""

    compares: bool = False
    """True if the take compares its tensors with earlier snapshots, or later takes will."""
    groups: bytes = b""
    """The group of each leaf, for the planner."""
    files: list[WrittenFile] = field(default_factory=list)
    """Files that are shared with a base."""
    omitted: list[tuple[Extent, TensorEntry]] = field(default_factory=list)
    """Extents of leaves that only the base has, and where it has them."""
    base_files: dict[str, FileEntry] = field(default_factory=dict)
    """The files of the base that have the omitted tensors."""
    reference: BaseReference | None = None
    """The base that has the omitted tensors."""
    compared: Mapping[tuple[str, str], tuple[str | None, str]] | None = None
    """The digest and the physical file of each range in the newest base, if there is one."""
    base_session: Callable[[], Session] | None = None
    """Opens the base that has the omitted tensors."""
    base_id: str | None = None
    """The save id that was found there."""
    used: int = 0
    """Numbers of data files that are used up."""
    notes: list[str] = field(default_factory=list)
    """Lines for the report."""

    @property
    def nbytes(self) -> int:
        """Bytes of the shared files."""
        return sum(each.file.size for each in self.files)

    async def expect_base(self) -> None:
        """Raise if the base that has the omitted tensors was removed: this snapshot would be incomplete."""
        if not self.base_files or self.base_session is None:
            return
        session = self.base_session()
        try:
            if await committed_save_id(session.storage) == self.base_id:
                return
        except SnapshotError as error:
            log.warning("%s: cannot be checked before the commit: %s", session.url, error)
            return
        finally:
            await session.close()
        raise SnapshotError(f"{session.url}: was removed or replaced during a take that is based on it")

    def leave_out(self, leaves: Sequence[Leaf], numbers: set[int]) -> None:
        """Keep the planner from planning some leaves."""
        if numbers:
            groups = bytearray(self.groups or bytes(len(leaves)))
            for number in numbers:
                groups[number] = LEFT_OUT
            self.groups = bytes(groups)

    def groups_with(self, late: bytes) -> bytes:
        """Return the groups, with those of leaves that may be staged late."""
        if not any(late):
            return self.groups
        if not self.groups:
            return late.replace(b"\1", bytes([LATE]))
        pairs = zip(self.groups, late, strict=True)
        return bytes(group if group == LEFT_OUT else group | (LATE if mark else 0) for group, mark in pairs)


def group_leaves(share: RankShare, frozen: bytes, newest: str | None) -> bytes:
    """Return the group of each leaf before the comparison: STABLE if it was equal last time or, if unknown, is frozen.

    `newest`: the save id of the newest base.
    """
    known = _equal.get().get(newest) if newest is not None else None
    marks = frozen if known is None else bytes(STABLE * (leaf.path in known) for leaf in share.leaves)
    stable = sum(leaf.nbytes for leaf, mark in zip(share.leaves, marks, strict=False) if mark)
    return marks if stable >= WORTH_SHARING else b""


def remember_unchanged(save_id: str, share: RankShare, unchanged: Unchanged, written: Sequence[WrittenFile]) -> None:
    """Remember which leaves are equal in the base, for the layout of the next take."""
    if not unchanged.compared:
        return
    equal, changed = set[str](), set[str]()
    for each in written:
        for extent, digest in zip(each.file.extents, each.digests, strict=True):
            leaf = share.leaves[extent.leaf]
            held = unchanged.compared.get(name_extent(leaf, extent))
            (equal if held is not None and held[0] == digest else changed).add(leaf.path)
    known = _equal.get()
    known[save_id] = frozenset(equal - changed)
    drop_oldest(known, KEPT)


def name_extent(leaf: Leaf, extent: Extent) -> tuple[str, str]:
    """Return the path of an extent's leaf, and its box or '': the key in `Base.copies`."""
    return leaf.path, "" if extent.box is None and leaf.origin is None else str(place_box(leaf, extent.box))


def index_paths(leaves: Sequence[Leaf], left_out: set[int]) -> dict[str, list[int]]:
    """Return the positions of the leaves of each path: boxes of a tensor have the same one."""
    index: defaultdict[str, list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if number not in left_out:
            index[leaf.path].append(number)
    return index
