"""Megatron-core's sharded state dicts as one stateful, so that they are saved and restored like everything else.

Megatron says of each tensor where it lies in a global one, of each object which position it has, and leaves the rest to
rank 0. That is all that a snapshot has to know of them: nothing of Megatron is imported here, called to plan, or asked
to write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.interop.megatron.tree import COMMON, NOTHING, MegatronBoxes, Parts, built, filled, is_main
from snapshot.manifest.entries import TENSORS, DictEntry, ObjectEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.state.leaves import FromOneRank
from snapshot.state.state_tree import MISSING
from snapshot.state.stateful_kinds import Kind
from snapshot.text import with_article

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ShardedStateDict = dict[str, Any]
_SHARD = "%2Fshard_"
"""What the path of an object has in it, and of nothing else."""


class _MegatronKind(Kind):
    """Tensors are filled in place, box by box, and must be there; objects are those of the positions that are asked
    for, whichever rank had them; the common state comes back as it was."""

    exact = True
    unfolds = False

    def __init__(self, key: str, stateful: MegatronState) -> None:
        self.key = key
        self.stateful = stateful
        self.state = stateful.find_places()
        names = {f"{key}/{encode_component(name)}": held for name, held in self.state.items()}
        self.compounds = {}
        self.live = {path: held if isinstance(held, MegatronBoxes) else MISSING for path, held in names.items()}
        self._stored: dict[str, tuple[int, ...]] = {}
        self._left: list[str] = []
        self._theirs = False
        """Whether it is laid out as Megatron's own directories are: in one of them, or in what one was converted to."""
        self._listed: set[str] = set()
        """Names of objects as Megatron stores them, each in a list of one."""

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        """Return what other ranks had of these names; of an object, all that it is made of."""
        if f"{self.key}/{COMMON}" not in entries and f"{self.key}/{COMMON}" not in elsewhere:
            self._gather_common(entries)
        missing = {path for path in self.live if path not in entries}
        if not missing:
            return []
        return sorted(path for path in elsewhere if "/".join(path.split("/", 2)[:2]) in missing)

    def _gather_common(self, entries: Mapping[str, Any]) -> None:
        """In Megatron's own directories the common state stands beside the tensors and objects, not in a container of
        its own: bring it into one."""
        assert isinstance(entries, dict)
        top = entries[self.key]
        names = top.components() if isinstance(top, DictEntry) else []
        paths = [f"{self.key}/{name}" for name in names]
        common = [
            path not in self.live and not isinstance(entries[path], TENSORS) and _SHARD not in path for path in paths
        ]
        if not any(common):
            return
        self._theirs = True
        new = f"{self.key}/{COMMON}"
        moved = {path for path, is_common in zip(paths, common, strict=True) if is_common}
        for path in [path for path in entries if "/".join(path.split("/", 2)[:2]) in moved]:
            entries[new + path[len(self.key) :]] = entries.pop(path)
        entries[new] = top.without_children(not is_common for is_common in common)
        rest = top.without_children(common)
        entries[self.key] = replace(rest, keys=[*rest.keys, COMMON])

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """Names that are not there; and tensors whose length may differ are cut to what is stored of them."""
        common = f"{self.key}/{COMMON}"
        found = [
            f"{path}: is in the application, not in the snapshot"
            for path in self.live
            if path not in entries and (path != common or self.state[COMMON])
        ]
        for path, held in self.live.items():
            entry = entries.get(path)
            if isinstance(entry, ObjectEntry) or (self._theirs and path != common):  # no list of ours is a pickle
                self._listed.add(decode_component(path.partition("/")[2]))
            if not isinstance(held, MegatronBoxes) or entry is None:
                continue
            if not isinstance(entry, TENSORS):
                found.append(f"{path}: the snapshot holds no tensor under this name")
            elif held.flexible and tuple(entry.shape) != held.shape and len(entry.shape) == len(held.shape):
                self._stored[path] = tuple(entry.shape)
                self.live[path] = held.within(self._stored[path])
        return found

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        """Tensors that have no place here. Objects of other positions are no mistake: they are left where they are."""
        assert isinstance(entries, dict)
        top = entries[self.key]
        names = {f"{self.key}/{name}" for name in top.components()} if isinstance(top, DictEntry) else set()
        unknown = {path for path in names if path not in self.live}
        objects = {path for path in unknown if not isinstance(entries.get(path), TENSORS)}
        if objects:
            for path in [path for path in entries if "/".join(path.split("/", 2)[:2]) in objects]:
                del entries[path]
            entries[self.key] = top.without_children(f"{self.key}/{name}" in objects for name in top.components())
            self._left = sorted(objects)
        return sorted(unknown - objects)

    def load_state(self, state: Any, strict: bool) -> list[str]:
        """Where what was stored is shorter than what is here, the rest is zero."""
        with torch.no_grad():
            for path, shape in self._stored.items():
                self.live[path].clear_outside(shape)
        for name in self._listed & state.keys():
            if state[name] is not self.state[name]:  # else it was not asked for, and is what was here
                state[name] = _only(state[name])
        self.stateful.load_state_dict(state)
        return self._left


def _only(held: Any) -> Any:
    """Return an object as Megatron stores it, among others of its position, which are equal."""
    return held[0] if type(held) is list and held else held


class MegatronState:
    """A sharded state dict of Megatron-core, as a stateful.

    Each `ShardedTensor` is stored under its key, as the global tensor that it is a part of, and can be restored into
    any other split of it; each `ShardedObject` under its unique key, by the rank that has its main replica; what is not
    wrapped is `common_state`, of which rank 0's is stored. `ShardedTensorFactory`s build what is stored, and merge what
    is restored; a `LocalNonpersistentObject` is not stored, and the one that is there is given back.

    Args:
        sharded_state_dict: The state dict, or a function that makes it: it is called for each take and each restore.
        load: Called by a restore with the state dict that Megatron's own `load` would return. It is to be found in
            `loaded`, too.
        pg: The process group of those who take part, if not all do.

    Tensors are restored in place, into the `data` of the `ShardedTensor`s; those without data get new memory on the
    host. Keys that the snapshot lacks are an error, whatever `strict` says.

    >>> from snapshot import Snapshot
    >>> from snapshot.interop.megatron import MegatronState
    >>> state = MegatronState({"iteration": 7})
    >>> snapshot = Snapshot.take("memory://docs/megatron", {"megatron": state})
    >>> report = snapshot.restore({"megatron": state})
    >>> state.loaded
    {'iteration': 7}
    """

    __snapshot_kind__ = _MegatronKind

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict | Callable[[], ShardedStateDict],
        load: Callable[[dict[str, Any]], object] | None = None,
        *,
        pg: ProcessGroup | None = None,
    ) -> None:
        self.loaded: dict[str, Any] | None = None
        """What the last restore brought."""
        self._given = sharded_state_dict
        self._load = load
        self._pg = pg
        self._tree: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is stored: tensors and objects by their keys, and on rank 0 the common state."""
        parts = Parts(self._made())
        state: dict[str, Any] = dict(parts.tensors)
        state |= {name: FromOneRank(each.data) for name, each in parts.objects.items() if is_main(each.replica_id)}
        if ranks_of(self._pg).rank == 0:
            state[COMMON] = FromOneRank(parts.common)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Put the common state and the objects into the places of this rank, among the tensors that are filled."""
        tree = self._made() if self._tree is None else self._tree
        self._tree = None
        loaded = filled(tree, state_dict.get(COMMON, NOTHING), dict(state_dict))
        self.loaded = {} if loaded is NOTHING else loaded
        if self._load is not None:
            self._load(self.loaded)

    def _made(self) -> Any:
        given = self._given() if callable(self._given) else self._given
        if not isinstance(given, dict):
            raise SnapshotError(
                f"MegatronState: a sharded state dict is a dict, and not {with_article(type(given).__qualname__)}"
            )
        return built(given)

    def find_places(self) -> dict[str, Any]:
        """Return what a restore is to fill, and what is there in the places of all else."""
        self._tree = self._made()
        parts = Parts(self._tree)
        for boxes in parts.tensors.values():
            for part in boxes.parts:
                part.init_data("cpu")
        objects = {name: each.data for name, each in parts.objects.items()}
        return {**parts.tensors, **objects, COMMON: parts.common}
