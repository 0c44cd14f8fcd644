"""The parameters that optimizers change, and their moments, by their paths in the app state.

They are found once, and again if the objects of the app state change. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import IntEntry
from snapshot.save.samples import (
    Rotation,
)
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModelState, find_local_tensor, list_parameters
from snapshot.state.rng import RNGState
from snapshot.text import counted

MOST_NORMS = 64
"""Parameters whose norms a take measures."""
COUNTERS = frozenset(("step", "steps", "global_step", "epoch", "iteration", "iterations", "samples", "tokens"))
"""Names of plain ints that grow during training."""


class Member(NamedTuple):
    """A parameter of a group."""

    path: str
    state: str
    """The path of the optimizer's state for it."""
    position: int
    """Its position in the group."""


class Group(NamedTuple):
    """The parameters of one group of an optimizer."""

    name: str
    place: tuple[str, int, int]
    """The key of the stateful, the number of its optimizer, and the number of the group."""
    members: list[Member]


def optimizers_of(stateful: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a stateful: itself, or those of a `ModelState`."""
    found = stateful.optimizers if isinstance(stateful, ModelState) else [stateful]
    return [each for each in found if isinstance(each, torch.optim.Optimizer) and hasattr(each, "param_groups")]


class PathsOfParameters:
    """The paths of parameters in the app state. One that no module has is found by its memory."""

    def __init__(self, app_state: Mapping[str, Any], flat: FlatState) -> None:
        self._flat = flat
        self._stored = {leaf.entry for leaf in flat.leaves} | flat.shards.keys()
        self._by_id: dict[int, str] = {}
        self._by_address: dict[int, str] | None = None
        for key, stateful in app_state.items():
            module = stateful.model if isinstance(stateful, ModelState) else stateful
            if isinstance(module, torch.nn.Module):
                below = f"{encode_component(key)}/" + ("model/" if module is not stateful else "")
                for name, parameter in list_parameters(module, unwrapped=module is not stateful):
                    self._by_id.setdefault(id(parameter), below + encode_component(name))

    def list_trained(self) -> list[str]:
        """Return the paths of all parameters of modules."""
        return list(self._by_id.values())

    @property
    def any_module(self) -> bool:
        """True if the app state has a module with parameters."""
        return bool(self._by_id)

    def name(self, parameter: torch.Tensor) -> str | None:
        """Return the path of a parameter in its module, or None. Its state dict may use another name."""
        return self._by_id.get(id(parameter))

    def find(self, parameter: torch.Tensor) -> str | None:
        """Return the path under which a parameter is stored, or None."""
        found = self._by_id.get(id(parameter))
        if found is not None:
            found = self._flat.ties.get(found, found)
            if found in self._stored:
                return found
        if self._by_address is None:
            pieces = ((path, each.tensor) for path, shards in self._flat.shards.items() for each in shards.pieces)
            self._by_address = {tensor.data_ptr(): path for path, tensor in pieces}
            self._by_address |= {leaf.address: leaf.path for leaf in self._flat.leaves if leaf.nbytes}
        address = find_local_tensor(parameter).data_ptr()
        return self._by_address.get(address) if address else None


class Roles:
    """The values of an app state, as the guards need them: groups of parameters, leaves to sample, and counters."""

    def __init__(self, known: tuple[Any, ...], app_state: Mapping[str, Any], flat: FlatState, leaves: Sequence[Leaf]):
        self.known = known
        self.groups: list[Group] = []
        self.findings: list[tuple[str, str]] = []
        """The guard and the text of each sign that parameters are not saved."""
        self.strangers: list[tuple[str, tuple[str, int, int], str]] = []
        """Optimizers whose parameters were not found, with the beginning of the paths of their state."""
        paths = PathsOfParameters(app_state, flat)
        for key, stateful in app_state.items():
            for number, optimizer in enumerate(optimizers_of(stateful)):
                made = self._list_groups(optimizer, (key, number), paths, named=isinstance(stateful, ModelState))
                self.groups += made
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if held and not any(group.members for group in made):
                    self.strangers.append((key, made[0].place, f"{encode_component(key)}/"))
                    if paths.any_module:
                        text = f"{key}: none of its {counted(len(held), 'parameter')} is of a module in the app state"
                        holders = _find_holders(app_state, flat, dict)
                        acts = not holders and _is_twin(held, app_state)
                        self.findings.append(("missing" if acts else "elsewhere", text))
        members = [each for group in self.groups for each in group.members]
        parameters, states = {each.path for each in members}, {each.state for each in members}
        self.numbers = [
            number
            for number, leaf in enumerate(leaves)
            if members
            and (leaf.path in parameters or leaf.path.rpartition("/")[0] in states)
            and leaf.tensor.numel() > 1
        ]
        """The numbers of the leaves that are parameters of the groups, or their moments."""
        self.paths = {leaves[number].path for number in self.numbers}
        self.rotation = Rotation(leaves, self.numbers)
        numbers = {leaves[number].path: number for number in self.numbers}
        few = self.groups[:MOST_NORMS]
        most = max(1, MOST_NORMS // max(1, len(few)))
        self.measured: list[tuple[int, int]] = [
            (at, numbers[member.path])
            for at, group in enumerate(few)
            for member in group.members[:: -(-len(group.members) // most) or 1]
            if member.path in numbers
        ]
        """Parameters whose norms are measured: the positions of their groups, and the numbers of their leaves."""
        self.counters: list[str] = [
            path for path, entry in flat.entries.items() if type(entry) is IntEntry and _is_counter(path)
        ]
        """The paths of ints that grow during training."""
        names = {name for path in flat.entries for name in path.split("/")}
        others = _has_others(app_state)
        self.untrained: list[str] = []
        """The parameters of modules, if the app state has no optimizer and no object that could hold its state."""
        if not _find_holders(app_state, flat) and not self.groups and not self.strangers and not names & _OF_OPTIMIZERS:
            self.untrained = paths.list_trained()
        self.saves_moments = bool(names & _OF_OPTIMIZERS)
        """True if the app state has the state of an optimizer."""
        self.unscheduled = not others and not names & _OF_SCHEDULERS
        """True if the app state has no scheduler and no object that could hold its state."""

    def list_scheduled(self, optimizers: Sequence[tuple[Group, torch.optim.Optimizer]]) -> list[Group]:
        """Return the groups whose learning rate a scheduler sets, if none is in the app state."""
        if not self.unscheduled:
            return []
        return [group for group, each in optimizers if "initial_lr" in each.param_groups[group.place[2]]]

    @staticmethod
    def _list_groups(
        optimizer: torch.optim.Optimizer, place: tuple[str, int], paths: PathsOfParameters, *, named: bool
    ) -> list[Group]:
        """Return the groups. An optimizer's state has numbers, or in a `ModelState` the names of the parameters."""
        below = f"{encode_component(place[0])}/" + ("optim/state/" if named else "state/")
        made, count = [], 0
        for number, group in enumerate(optimizer.param_groups):
            members = []
            for position, parameter in enumerate(group["params"]):
                path = paths.find(parameter) if parameter.requires_grad else None
                name = paths.name(parameter) or path
                if path is not None and name is not None and (not named or name.count("/") > 1):
                    state = below + (name.split("/", 2)[2] if named else str(count))
                    members.append(Member(path, state, position))
                count += 1
            made.append(Group(f"{place[0]} group {number}", (*place, number), members))
        return made


_OF_OPTIMIZERS = frozenset(("param_groups", "exp_avg", "momentum_buffer"))
_OF_SCHEDULERS = frozenset(("last_epoch", "_last_lr", "_step_count"))
"""Names that the states of optimizers, and of schedulers, have."""


_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ModelState)
_KNOWN = (*_TRAINED, dict, torch.amp.GradScaler, torch.utils.data.DataLoader, torch.utils.data.Sampler, RNGState)


def _find_holders(app_state: Mapping[str, Any], flat: FlatState, *more: type) -> list[str]:
    """Return the keys of objects that may hold parameters or moments in a form of their own.

    `more`: known types that count here, too.
    """
    paths = [leaf.path for leaf in flat.leaves if leaf.tensor.is_floating_point() and leaf.tensor.numel() > 1]
    stored = {path.partition("/")[0] for path in (*paths, *flat.shards, *(blob.path for blob in flat.blobs))}
    return [
        key
        for key, each in app_state.items()
        if (not isinstance(each, _KNOWN) or isinstance(each, more)) and encode_component(key) in stored
    ]


def _has_others(app_state: Mapping[str, Any]) -> bool:
    """Return True if an app state has objects that may hold a schedule in a form of their own."""
    others = [each for each in app_state.values() if not isinstance(each, _KNOWN)]
    return any(hasattr(each, "parameters") or not type(each).__module__.startswith("snapshot.") for each in others)


def _is_twin(parameters: Sequence[torch.Tensor], app_state: Mapping[str, Any]) -> bool:
    """Return True if a module has parameters of the same shapes and dtypes: probably a copy of the trained one."""
    wanted = sorted((str(each.shape), str(each.dtype)) for each in parameters)
    modules = (each.model if isinstance(each, ModelState) else each for each in app_state.values())
    found = (each for each in modules if isinstance(each, torch.nn.Module))
    return any(sorted((str(p.shape), str(p.dtype)) for p in each.parameters()) == wanted for each in found)


def _is_counter(path: str) -> bool:
    return path.rpartition("/")[2] in COUNTERS


def key_of(app_state: Mapping[str, Any], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Return a key that changes with the objects of an app state."""
    held = [len(leaves), leaves[0].path if leaves else "", leaves[-1].path if leaves else ""]
    groups = [
        (
            id(group["params"][0]),
            id(group["params"][-1]),
            len(group["params"]),
            sum(each.requires_grad for each in group["params"]),
        )
        if group["params"]
        else ()
        for stateful in app_state.values()
        for optimizer in optimizers_of(stateful)
        for group in optimizer.param_groups
    ]
    return (*held, *((key, id(stateful)) for key, stateful in app_state.items()), *groups)
