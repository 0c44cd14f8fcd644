"""Megatron-core's sharded state dicts as one stateful.

Megatron describes each tensor's place in a global tensor and each object's position, and leaves the rest to rank 0. A
snapshot needs no more than that. Nothing of Megatron is imported here, or called to plan or write.
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
"""Substring that only the paths of objects have."""


class _MegatronKind(Kind):
    """Restore of a `MegatronState`.

    Tensors are filled in place, box by box, and must exist. Objects are those of the requested positions, from any
    rank. The common state is restored as stored.
    """

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
        """True for the layout of Megatron's own directories: in one of them, or converted from one."""
        self._listed: set[str] = set()
        """Names of objects that Megatron stored, each in a list of one."""

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        """Return the paths of missing names that other ranks have; for an object, all of its paths."""
        if f"{self.key}/{COMMON}" not in entries and f"{self.key}/{COMMON}" not in elsewhere:
            self._gather_common(entries)
        missing = {path for path in self.live if path not in entries}
        if not missing:
            return []
        return sorted(path for path in elsewhere if "/".join(path.split("/", 2)[:2]) in missing)

    def _gather_common(self, entries: Mapping[str, Any]) -> None:
        """Move the common state into one container.

        In Megatron's own directories it is stored next to the tensors and objects.
        """
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
        """Return the mismatches. Tensors whose length may differ are cut to the stored length."""
        common = f"{self.key}/{COMMON}"
        found = [
            f"{path}: in the application, but not in the snapshot"
            for path in self.live
            if path not in entries and (path != common or self.state[COMMON])
        ]
        for path, held in self.live.items():
            entry = entries.get(path)
            if isinstance(entry, ObjectEntry) or (
                self._theirs and path != common
            ):  # this library stores no list as a pickle
                self._listed.add(decode_component(path.partition("/")[2]))
            if not isinstance(held, MegatronBoxes) or entry is None:
                continue
            if not isinstance(entry, TENSORS):
                found.append(f"{path}: not a tensor in the snapshot")
            elif held.flexible and tuple(entry.shape) != held.shape and len(entry.shape) == len(held.shape):
                self._stored[path] = tuple(entry.shape)
                self.live[path] = held.within(self._stored[path])
        return found

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the tensors that the application lacks. Objects of other positions are skipped without an error."""
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
        """Load the state. Elements of live tensors beyond a shorter stored tensor are set to zero."""
        with torch.no_grad():
            for path, shape in self._stored.items():
                self.live[path].clear_outside(shape)
        for name in self._listed & state.keys():
            if state[name] is not self.state[name]:  # else it was not requested, and is the live object
                state[name] = _only(state[name])
        self.stateful.load_state_dict(state)
        return self._left


def _only(held: Any) -> Any:
    """Return an object without the list of equal objects that Megatron stores it in."""
    return held[0] if type(held) is list and held else held


class MegatronState:
    """Stateful for a sharded state dict of Megatron-core.

    Each `ShardedTensor` is stored under its key, as part of its global tensor, and can be restored into any other
    split. Each `ShardedObject` is stored under its unique key, by the rank with its main replica. Values that are not
    wrapped are stored as `common_state`, from rank 0. `ShardedTensorFactory` objects build the stored tensors and merge
    the restored ones. A `LocalNonpersistentObject` is not stored; a restore returns the live one.

    Args:
        sharded_state_dict: The state dict, or a function that creates it, called for each take and each restore.
        load: Function that a restore calls with the state dict that Megatron's own `load` would return. `loaded` has
            the same state dict.
        pg: Process group of the participating ranks, if not all.

    Tensors are restored in place, into the `data` of each `ShardedTensor`; those without data get new host memory. Keys
    that are missing in the snapshot are an error, regardless of `strict`.

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
        """State dict of the last restore."""
        self._given = sharded_state_dict
        self._load = load
        self._pg = pg
        self._tree: Any = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store: tensors and objects by key, and on rank 0 the common state."""
        parts = Parts(self._made())
        state: dict[str, Any] = dict(parts.tensors)
        state |= {name: FromOneRank(each.data) for name, each in parts.objects.items() if is_main(each.replica_id)}
        if ranks_of(self._pg).rank == 0:
            state[COMMON] = FromOneRank(parts.common)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Insert the common state and the objects into this rank's state dict, next to the restored tensors."""
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
                f"MegatronState: sharded_state_dict must be a dict, got {with_article(type(given).__qualname__)}"
            )
        return built(given)

    def find_places(self) -> dict[str, Any]:
        """Return the targets of a restore, with the live values."""
        self._tree = self._made()
        parts = Parts(self._tree)
        for boxes in parts.tensors.values():
            for part in boxes.parts:
                part.init_data("cpu")
        objects = {name: each.data for name, each in parts.objects.items()}
        return {**parts.tensors, **objects, COMMON: parts.common}
