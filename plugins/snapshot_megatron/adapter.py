"""Megatron-core's sharded state dicts as one stateful."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from snapshot.distributed.group import ranks_of
from snapshot.errors import RestoreError, SnapshotError
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.state.flatten import MISSING, inflate_tree
from snapshot.state.leaves import FromOneRank
from snapshot.state.stateful import ReadBoxes, RestoreAdapter, find_names_beneath
from snapshot.tensors.geometry import Box
from snapshot.text import with_article
from snapshot_megatron.boxes import MegatronBoxes, is_main, is_of
from snapshot_megatron.distributed_optimizer import (
    GROUP,
    PARAM,
    STATE,
    OptimizerState,
    list_unmatched,
    load_optimizer,
    match_groups,
    read_optimizer,
)
from snapshot_megatron.optimizer_groups import STEP

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Decomposition of Megatron-core's sharded state dicts into tensor boxes, objects and common state, and the reverse.
#
# Reassembly returns what Megatron's own `load` would return. Nothing here imports Megatron: an application that has
# its objects has already imported it.

COMMON = "common_state"
"""Key of the state that is not sharded, next to the tensors and objects, as in Megatron's own directories."""
OPTIMIZER = "optimizer"
"""Key of an optimizer's groups in the common state."""
NOTHING: Any = object()
"""Placeholder if there is no common state."""


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """Output of a factory, in place of its tensor."""

    merge: Callable[[Any], Any]
    tree: Any


def built(value: Any) -> Any:
    """Return a copy of the containers in which factories have built their values. Only dicts and lists are searched."""
    if isinstance(value, dict):
        return {key: built(child) for key, child in value.items()}
    if isinstance(value, list):
        return [built(child) for child in value]
    if is_of(value, "ShardedTensorFactory"):
        return Built(value.merge_fn, built(value.build()))
    return value


class Parts:
    """Contents of a state dict, by kind, in order."""

    def __init__(self, tree: Any) -> None:
        self.tensors: dict[str, MegatronBoxes] = {}
        self.objects: dict[str, Any] = {}
        """Objects by unique key. Objects of several ranks share a key, but not the unique key."""
        self._add(tree)
        common = _common_of(tree)
        self.common: Any = {} if common is NOTHING else common
        taken = self.tensors.keys() & (self.objects.keys() | {COMMON}) or self.objects.keys() & {COMMON}
        if taken:
            raise SnapshotError(f"{sorted(taken)[0]}: several values have this name in one sharded state dict")

    def _add(self, tree: Any) -> None:
        if isinstance(tree, dict):
            for child in tree.values():
                self._add(child)
        elif isinstance(tree, list):
            for child in tree:
                self._add(child)
        elif isinstance(tree, Built):
            self._add(tree.tree)
        elif is_of(tree, "ShardedTensor"):
            self.tensors.setdefault(tree.key, MegatronBoxes(tree.key)).add(tree)
        elif is_of(tree, "ShardedObject"):
            held = self.objects.setdefault(tree.unique_key, tree)
            if not is_main(held.replica_id):
                self.objects[tree.unique_key] = tree
        elif is_of(tree, "ShardedBase"):
            raise SnapshotError(f"unknown kind of sharded value: {with_article(type(tree).__qualname__)}")


def _common_of(tree: Any) -> Any:
    """Return the state that is neither sharded nor local, without containers that become empty by that."""
    if isinstance(tree, dict):
        held = {key: _common_of(child) for key, child in tree.items()}
        kept = {key: child for key, child in held.items() if child is not NOTHING}
        return kept if kept or not tree else NOTHING
    if isinstance(tree, list):
        items = [_common_of(child) for child in tree]
        if tree and all(item is NOTHING for item in items):
            return NOTHING
        return [None if item is NOTHING else item for item in items]  # a placeholder for sharded values
    if isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject"):
        return NOTHING
    return tree


def filled_tree(tree: Any, common: Any, objects: dict[str, Any], path: str = "") -> Any:
    """Return the state dict that Megatron's `load` would return.

    It has the snapshot's common state, and this rank's tensors, objects and local values in their places. Common state
    that only the application has is left out.
    """
    if not _has_places(tree):
        return common
    if isinstance(tree, dict):
        held = {} if common is NOTHING else common
        if not isinstance(held, dict):
            raise _no_place(path, tree, held)
        children = {
            key: filled_tree(child, held.get(key, NOTHING), objects, f"{path}/{key}") for key, child in tree.items()
        }
        return {**held, **{key: child for key, child in children.items() if child is not NOTHING}}
    if isinstance(tree, list):
        held = [NOTHING] * len(tree) if common is NOTHING else common
        if not isinstance(held, list) or len(held) != len(tree):
            raise _no_place(path, tree, held)
        items = [filled_tree(child, held[i], objects, f"{path}/{i}") for i, child in enumerate(tree)]
        if any(item is NOTHING for item in items):
            raise _no_place(path, tree, [])
        return items
    if isinstance(tree, Built):
        return tree.merge(filled_tree(tree.tree, NOTHING, objects, path))
    return objects[tree.unique_key] if is_of(tree, "ShardedObject") else _held(tree)


def _held(leaf: Any) -> Any:
    return leaf.data if is_of(leaf, "ShardedTensor") else leaf.unwrap()


def _has_places(tree: Any) -> bool:
    """Return True if the tree contains a sharded or local value."""
    if isinstance(tree, dict):
        return any(map(_has_places, tree.values()))
    if isinstance(tree, list):
        return any(map(_has_places, tree))
    return isinstance(tree, Built) or is_of(tree, "ShardedBase") or is_of(tree, "LocalNonpersistentObject")


def _no_place(path: str, tree: Any, held: Any) -> RestoreError:
    length = f" of {len(held)}" if isinstance(held, list) else ""
    wanted = f"{type(tree).__name__} of {len(tree)}"
    return RestoreError(
        f"{COMMON}{path}: the snapshot has {with_article(type(held).__name__)}{length} here, but the sharded state "
        f"dict {with_article(wanted)} with tensors or objects in it",
        [f"{COMMON}{path}"],
    )


# Megatron-core's sharded state dicts as one stateful.
#
# Megatron describes each tensor's place in a global tensor and each object's position, and leaves the rest to rank 0.
# A snapshot needs no more than that. Nothing of Megatron is imported here, or called to plan or write.

ShardedStateDict = dict[str, Any]
_SHARD = "%2Fshard_"
"""Substring that only the paths of objects have."""


class _MegatronAdapter(RestoreAdapter):
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
        self._numbers: dict[str, Any] = {}
        """Entries of the numbers of groups."""
        self._with_groups = True
        """True if the groups are requested."""
        self.compares_values = stateful.live_optimizer is not None

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        """Return the paths of missing names that other ranks have; for an object, all of its paths."""
        if f"{self.key}/{COMMON}" not in entries and f"{self.key}/{COMMON}" not in elsewhere:
            self._gather_common(entries)
        live = self.stateful.live_optimizer
        wanted = [*self.live, *([] if live is None else map(self._find_path, live.groups))]
        missing = {path for path in wanted if path not in entries}
        if not missing:
            return []
        return sorted(path for path in elsewhere if "/".join(path.split("/", 2)[:2]) in missing)

    def _find_path(self, name: str) -> str:
        return f"{self.key}/{encode_component(name)}"

    def _gather_common(self, entries: Mapping[str, Any]) -> None:
        """Move the common state into one container.

        In Megatron's own directories it is stored next to the tensors and objects.
        """
        assert isinstance(entries, dict)
        top, paths = entries[self.key], find_names_beneath(self.key, entries) or []
        common = [path not in self.live and not entries[path].is_tensor and _SHARD not in path for path in paths]
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
        self._drop_steps(entries)
        found = [
            f"{path}: in the application, but not in the snapshot"
            for path in self.live
            if path not in entries and (path != common or self.state[COMMON])
        ]
        for path, held in self.live.items():
            entry = entries.get(path)
            stored_as_object = entry is not None and entry.is_object
            if stored_as_object or (self._theirs and path != common):  # this library stores no list as a pickle
                self._listed.add(decode_component(path.partition("/")[2]))
            if not isinstance(held, MegatronBoxes) or entry is None:
                continue
            if not entry.is_tensor:
                found.append(f"{path}: not a tensor in the snapshot")
                continue
            shape = tuple(entry.shape)
            if held.flexible and shape != held.shape and len(shape) == len(held.shape):
                self._stored[path] = shape
            self.live[path] = held.within(self._stored.get(path, held.shape))  # so `load_state` sees what was filled
        for name, key in self.stateful.find_weights().items():
            entry = entries.get(f"{self.key}/{encode_component(key)}")
            if entry is not None and entry.is_tensor and entry.dtype != "float32":
                found.append(
                    f"{self.key}/{encode_component(name)}: the weights are the main parameters here, and the snapshot "
                    f"has weights of {entry.dtype}"
                )
        self._add_groups(entries)
        return found

    def _add_groups(self, entries: Mapping[str, Any]) -> None:
        """Read the numbers of groups that the common state lacks. Those of a pickle are not known yet."""
        live, base = self.stateful.live_optimizer, f"{self.key}/{COMMON}/{OPTIMIZER}"
        if live is None:
            return
        self._numbers = {path: entries[path] for path in map(self._find_path, live.groups) if path in entries}
        leaves = {path: entry for path, entry in entries.items() if path.startswith(f"{base}/")}
        leaves = {path: entry for path, entry in leaves.items() if not entry.is_container}
        if base not in entries or not all(hasattr(entry, "value") for entry in leaves.values()):
            return
        common = inflate_tree(base, entries, {path: entry.value() for path, entry in leaves.items()})
        with suppress(RestoreError):  # which `find_wrong_values` reports
            for group in list_unmatched(live, common):
                for name in {name for run, name, _ in live.numbered if run.group is group}:
                    path = self._find_path(name)
                    self.live |= {path: live.groups[name]} if path in entries else {}

    def find_wrong_values(
        self, entries: Mapping[str, Any], skipped: Collection[str], values: Mapping[str, Any], read: ReadBoxes
    ) -> list[str]:
        """Compare the groups."""
        live, base = self.stateful.live_optimizer, f"{self.key}/{COMMON}"
        assert live is not None
        wrong: list[str] = []
        leaves = [path for path, entry in entries.items() if path.startswith(f"{base}/") and not entry.is_container]
        groups = [path for path in leaves if f"{path}/".startswith(f"{base}/{OPTIMIZER}/")] or leaves
        known = {*skipped, *(base + path[len(self.key) :] for path in skipped)}  # as they were named before
        # Without any of the optimizer's tensors, its groups and steps would be those of another optimizer.
        states = [path for path in entries if path.startswith(self._find_path(STATE))]
        alone = bool(states) and all(path in skipped for path in states)
        self._with_groups = bool(leaves) and known.isdisjoint(groups) and not alone
        if self._with_groups:

            def read_numbers(places: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
                named = [(self._find_path(name), box) for name, box in places]
                if not all(path in self._numbers for path, _ in named):
                    return []
                return [each.flatten() for each in read([(path, self._numbers[path], box) for path, box in named])]

            common = inflate_tree(f"{base}/{OPTIMIZER}", entries, values)
            try:
                live.chosen = match_groups(live, None if common is MISSING else common, read_numbers)
            except RestoreError as error:
                wrong.append(str(error))
        return wrong

    def _drop_steps(self, entries: Mapping[str, Any]) -> None:
        """Do without steps by name in Megatron's own directories. The groups have them, from which they come there."""
        for path in [path for path in self.live if path not in entries or self._theirs]:
            if decode_component(path.partition("/")[2]).startswith(f"{STATE}{STEP}."):
                del self.live[path]

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the tensors that the application lacks. Objects of other positions are skipped without an error."""
        assert isinstance(entries, dict)
        top = entries[self.key]
        unknown = {path for path in find_names_beneath(self.key, entries) or () if path not in self.live}
        groups = {path for path in unknown if path.startswith(self._find_path(GROUP))}
        if self._theirs:  # their steps come from the groups
            groups |= {path for path in unknown if path.startswith(self._find_path(f"{STATE}{STEP}."))}
        groups = groups if self.stateful.live_optimizer is not None else set()
        unknown -= groups
        if self.stateful.restores_weights_alone():
            main = self._find_path(f"{STATE}{PARAM}.")
            unknown = {path for path in unknown if not path.startswith(main)}
        objects = {path for path in unknown if path not in entries or not entries[path].is_tensor}
        if objects or groups:
            away = objects | groups
            for path in [path for path in entries if "/".join(path.split("/", 2)[:2]) in away]:
                del entries[path]
            entries[self.key] = top.without_children(f"{self.key}/{name}" in away for name in top.components())
            self._left = sorted(objects)
        return sorted(unknown - objects)

    def load_state(self, state: Any, strict: bool) -> list[str]:
        """Load the state. Elements of live tensors beyond a shorter stored tensor are set to zero."""
        filled = {name for name in state if state[name] is not self.state.get(name)}  # others were not requested
        with torch.no_grad():
            for path, shape in self._stored.items():
                if decode_component(path.partition("/")[2]) in filled:
                    self.live[path].clear_outside(shape)
        for name in self._listed & filled:
            state[name] = _only(state[name])
        self.stateful.load_filled(state, filled, with_groups=self._with_groups)
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
        optimizer: Megatron's distributed optimizer, or a chain of them. It must not be in the state dict: its main
            parameters, moments and steps are stored as `optimizer.state.<param, exp_avg, ...>.<key of the model>`. So
            they can be restored into any split. It may be new: a restore makes its state.
        pg: Process group of the participating ranks, if not all.

    Tensors are restored in place, into the `data` of each `ShardedTensor`; those without data get new host memory. Keys
    that are missing in the snapshot are an error, regardless of `strict`.

    With `optimizer`, no collective of Megatron is called, and no tensor is gathered or copied. With
    `overlap_param_gather`, save after `disable_forward_pre_hook(param_sync=True)`, as Megatron's own save does.

    >>> from snapshot import Snapshot
    >>> from snapshot_megatron.adapter import MegatronState
    >>> state = MegatronState({"iteration": 7})
    >>> snapshot = Snapshot.take("memory://docs/megatron", {"megatron": state})
    >>> report = snapshot.restore({"megatron": state})
    >>> state.loaded
    {'iteration': 7}
    """

    __snapshot_kind__ = _MegatronAdapter

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict | Callable[[], ShardedStateDict],
        load: Callable[[dict[str, Any]], object] | None = None,
        *,
        optimizer: Any = None,
        pg: ProcessGroup | None = None,
    ) -> None:
        self.loaded: dict[str, Any] | None = None
        """State dict of the last restore."""
        self._given = sharded_state_dict
        self._load = load
        self._optimizer = optimizer
        self._pg = pg
        self._tree: Any = None
        self._live: OptimizerState | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store: tensors and objects by key, and on rank 0 the common state."""
        tree, live = self._made(restoring=False)
        parts = Parts(tree)
        state: dict[str, Any] = dict(parts.tensors)
        state |= {name: FromOneRank(each.data) for name, each in parts.objects.items() if is_main(each.replica_id)}
        common = parts.common
        if live is not None:
            _add_optimizer(state, live)
            state = dict(sorted({**state, **live.groups}.items()))  # in the same order in each split
            common = {**common, OPTIMIZER: live.common}
        if ranks_of(self._pg).rank == 0:
            state[COMMON] = FromOneRank(common)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Insert the common state and the objects into this rank's state dict, next to the restored tensors."""
        self.load_filled(state_dict, set(state_dict))

    def load_filled(self, state: Mapping[str, Any], filled: set[str], *, with_groups: bool = True) -> None:
        """Do what `load_state_dict` does. `filled` has the names that were requested."""
        tree, live = self._made(restoring=True) if self._tree is None else (self._tree, self._live)
        self._tree = self._live = None
        common = state.get(COMMON, NOTHING)
        groups = None
        if live is not None and isinstance(common, dict) and OPTIMIZER in common:
            groups = common[OPTIMIZER] if COMMON in filled and with_groups else None
            common = {name: each for name, each in common.items() if name != OPTIMIZER}
        if live is not None:
            names = live.tensors.keys() | Parts(tree).tensors.keys()
            steps = f"{STATE}{STEP}."
            load_optimizer(
                live, groups, filled, all_filled=all(name in filled or name.startswith(steps) for name in names)
            )
        loaded = filled_tree(tree, common, dict(state))
        self.loaded = {} if loaded is NOTHING else loaded
        if self._load is not None:
            self._load(self.loaded)

    def _made(self, *, restoring: bool) -> tuple[Any, OptimizerState | None]:
        given = self._given() if callable(self._given) else self._given
        if not isinstance(given, dict):
            raise SnapshotError(
                f"MegatronState: sharded_state_dict must be a dict, got {with_article(type(given).__qualname__)}"
            )
        if self._optimizer is None:
            return built(given), None
        if OPTIMIZER in given:
            raise SnapshotError(
                f"MegatronState: sharded_state_dict must not have the key {OPTIMIZER!r} if `optimizer` is given"
            )
        live = read_optimizer(self._optimizer, given, restoring=restoring)
        return built(given), live

    @property
    def live_optimizer(self) -> OptimizerState | None:
        """Targets of the restore that is in progress; None if no optimizer was given."""
        return self._live

    def find_weights(self) -> dict[str, str]:
        """Return the names of main parameters that are the weights themselves, and the keys of those."""
        return {} if self._live is None else self._live.weights

    def restores_weights_alone(self) -> bool:
        """Return True if no main parameter is a tensor of its own here, as in float32."""
        live = self._live
        return live is not None and all(run.is_shared for run in live.runs)

    def find_places(self) -> dict[str, Any]:
        """Return the targets of a restore, with the live values."""
        self._tree, self._live = self._made(restoring=True)
        parts = Parts(self._tree)
        for boxes in parts.tensors.values():
            for part in boxes.parts:
                part.init_data("cpu")
        objects = {name: each.data for name, each in parts.objects.items()}
        places: dict[str, Any] = {**parts.tensors, **objects}
        if self._live is not None:
            _add_optimizer(places, self._live)
        return {**places, COMMON: parts.common}


def _add_optimizer(state: dict[str, Any], live: OptimizerState) -> None:
    taken = sorted(name for name in state if name in live.tensors or name.startswith(f"{STATE}{PARAM}."))
    if taken:
        raise SnapshotError(f"{taken[0]}: the sharded state dict and `optimizer` both have this name")
    state.update(live.tensors)
