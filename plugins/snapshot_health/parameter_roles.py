"""The parameters that optimizers change, and their moments, by their paths in the app state.

They are found once, and again if the objects of the app state change. Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from snapshot.extensions import is_own
from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import IntEntry
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModelState, ModuleMap, only_optimizers
from snapshot.state.rng import RNGState
from snapshot.tensors.memory import find_local_tensor
from snapshot_health.samples import Rotation

_requires_grad = attrgetter("requires_grad")
MOST_NORMS = 64
"""Parameters whose norms a take measures."""
COUNTERS = frozenset(("step", "steps", "global_step", "epoch", "iteration", "iterations", "samples", "tokens"))
"""Names of plain ints that grow during training."""


class Member(NamedTuple):
    """A parameter of a group."""

    path: str
    """The path under which it is stored. Empty if the module's state dict has a copy of it under another name."""
    state: str
    """The path of the optimizer's state for it."""
    position: int
    """Its position in the group."""


class OptimizerGroup(NamedTuple):
    """The parameters of one group of an optimizer."""

    name: str
    place: tuple[str, int, int]
    """The key of the stateful, the number of its optimizer, and the number of the group."""
    members: list[Member]


class Stranger(NamedTuple):
    """An optimizer whose parameters are neither in a module of the app state nor stored."""

    key: str
    place: tuple[str, int, int]
    """The place of its first group."""
    below: str
    """The beginning of the paths of its state."""


def list_counts(statefuls: Sequence[ModuleMap]) -> list[list[float]]:
    """Return the numbers of steps that each optimizer of an app state has counted.

    These are the optimizers in the app state, and those in attributes of its other objects.
    """
    found = (optimizer for each in statefuls for optimizer in each.optimizers or _find_held(each.stateful))
    return [list(_read_counts(each)) for each in found]


def count_steps(counts: Sequence[Sequence[float]]) -> tuple[float, bool]:
    """Return the number of steps that all optimizers have counted, and True if each of them counts."""
    return sum(max(each, default=0.0) for each in counts), bool(counts) and all(counts)


MOST_COUNTS = 64
"""Stored numbers of steps that are compared with those of optimizers."""


def stores_live_steps(counts: Sequence[Sequence[float]], stored: Sequence[torch.Tensor]) -> bool:
    """Return True if one of the stored numbers of steps is that of an optimizer: then its state is not an old copy.

    The other optimizers may not be saved, or make no steps.
    """
    if not stored:
        return False
    live = set(itertools.chain.from_iterable(counts))
    if stored[0].item() in live:  # in most trainings; the others are looked at together
        return True
    alike: dict[Any, list[torch.Tensor]] = {}
    for each in stored:
        alike.setdefault((each.device, each.dtype, each.shape), []).append(each.detach())
    return any(not live.isdisjoint(torch.stack(held).double().view(-1).tolist()) for held in alike.values())


def _find_held(stateful: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers in attributes of an object that saves them in a form of its own."""
    if isinstance(stateful, _KNOWN):
        return []
    found: list[torch.optim.Optimizer] = []
    for each in getattr(stateful, "__dict__", {}).values():
        held = each.values() if isinstance(each, dict) else each
        found += only_optimizers(held if isinstance(each, (list, tuple, dict)) else [each])
    return found


def _read_counts(optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """Yield the numbers of steps in the state of the first and the last parameters of the groups."""
    for group in optimizer.param_groups:
        held = group["params"]
        states = [optimizer.state[each] for each in (*held[:1], *held[-1:]) if each in optimizer.state]
        for state in (group, *states):
            count = state.get("step") if isinstance(state, Mapping) else None
            if isinstance(count, (int, float)) or (isinstance(count, torch.Tensor) and count.numel() == 1):
                yield float(count)


class PathsOfParameters:
    """The paths of parameters in the app state. One that no module has is found by its memory."""

    def __init__(self, statefuls: Sequence[ModuleMap], flat: FlatState) -> None:
        self._flat = flat
        self._stored = {leaf.entry for leaf in flat.leaves} | flat.shards.keys()
        self._by_id: dict[int, str] = {}
        self._by_address: dict[int, str] | None = None
        self.of_modules: dict[str, list[torch.nn.Parameter]] = {}
        """The parameters of each module of the app state, by its key."""
        for each in statefuls:
            if each.model is None:
                continue
            held = self.of_modules[each.key] = []
            for name, parameter in each.parameters():
                self._by_id.setdefault(id(parameter), f"{each.model_path}/{encode_component(name)}")
                held.append(parameter)

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

    def __init__(
        self, known: tuple[Any, ...], statefuls: Sequence[ModuleMap], flat: FlatState, leaves: Sequence[Leaf]
    ) -> None:
        self.known = known
        self.groups: list[OptimizerGroup] = []
        self.strangers: list[Stranger] = []
        paths = PathsOfParameters(statefuls, flat)
        states: list[str] = []
        for each in statefuls:
            for number, optimizer in enumerate(each.optimizers):
                made = self._list_groups(each, number, paths)
                self.groups += made
                states += [f"{each.state_path}/", f"{each.state_path}."]
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if held and not any(paths.name(parameter) or paths.find(parameter) for parameter in held):
                    self.strangers.append(Stranger(each.key, made[0].place, f"{each.path}/"))
        self.any_module = paths.any_module
        self.unstored: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        """Trained parameters of modules whose state dict has copies under other names, and what they are called."""
        parameters = {each.path for group in self.groups for each in group.members if each.path}
        parameters |= self._find_trained(statefuls, paths)
        below_states = tuple(states)
        self.numbers = [
            number
            for number, leaf in enumerate(leaves)
            if (leaf.path in parameters or leaf.path.startswith(below_states)) and leaf.tensor.numel() > 1
        ]
        """The numbers of the leaves that are trained parameters, or moments of optimizers."""
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
        others = _has_others(statefuls)
        self.untrained: list[str] = []
        """The parameters of modules, if the app state has no optimizer and no object that could hold its state."""
        if not find_holders(statefuls, flat) and not self.groups and not self.strangers and not names & _OF_OPTIMIZERS:
            self.untrained = paths.list_trained()
        self.saves_moments = bool(names & _OF_OPTIMIZERS)
        """True if the app state has the state of an optimizer."""
        self.unscheduled = not others and not names & _OF_SCHEDULERS
        """True if the app state has no scheduler and no object that could hold its state."""

        self._step_numbers: list[int] = []
        self._searched = -1

    def find_stored_steps(self, flat: FlatState) -> list[torch.Tensor]:
        """Return stored numbers of steps, at most `MOST_COUNTS`. They are looked for once in states of one form."""
        leaves = flat.leaves
        if self._searched != len(leaves) or not all(_is_step(leaves[number]) for number in self._step_numbers):
            self._step_numbers, self._searched = find_steps(leaves), len(leaves)
        return [leaves[number].tensor for number in self._step_numbers]

    def _find_trained(self, statefuls: Sequence[ModuleMap], paths: PathsOfParameters) -> set[str]:
        """Return the paths of trained parameters that no group has, and record those that are not stored.

        If no optimizer of the app state has a parameter of a module, another one trains it: one that has copies of the
        parameters, or one that is not saved.
        """
        held = {
            id(parameter)
            for each in statefuls
            for optimizer in each.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        covered = {key for key, each in paths.of_modules.items() if any(id(parameter) in held for parameter in each)}
        alone = bool(self.strangers) or not covered
        found: set[str] = set()
        for key, parameters in paths.of_modules.items():
            for parameter in parameters:
                trained = id(parameter) in held if key in covered else alone
                if not trained or not parameter.requires_grad:
                    continue
                path = paths.find(parameter)
                if path is not None:
                    found.add(path)
                else:
                    self.unstored.append((paths.name(parameter) or key, weakref.ref(parameter)))
        return found

    def list_scheduled(
        self, optimizers: Sequence[tuple[OptimizerGroup, torch.optim.Optimizer]]
    ) -> list[OptimizerGroup]:
        """Return the groups whose learning rate a scheduler sets, if none is in the app state."""
        if not self.unscheduled:
            return []
        return [group for group, each in optimizers if "initial_lr" in each.param_groups[group.place[2]]]

    @staticmethod
    def _list_groups(of: ModuleMap, optimizer: int, paths: PathsOfParameters) -> list[OptimizerGroup]:
        """Return the groups. An optimizer's state has numbers, or in a `ModelState` the names of the parameters."""
        made, count = [], 0
        for number, group in enumerate(of.optimizers[optimizer].param_groups):
            members = []
            for position, parameter in enumerate(group["params"]):
                path = paths.find(parameter) if parameter.requires_grad else None
                name = paths.name(parameter) or path
                if parameter.requires_grad and name is not None and (not of.joined or name.count("/") > 1):
                    called = name.split("/", 2)[2] if of.joined else str(count)
                    members.append(Member(path or "", f"{of.state_path}/{called}", position))
                count += 1
            made.append(OptimizerGroup(f"{of.key} group {number}", (of.key, optimizer, number), members))
        return made


_OF_OPTIMIZERS = frozenset(("param_groups", "exp_avg", "momentum_buffer"))
_OF_SCHEDULERS = frozenset(("last_epoch", "_last_lr", "_step_count"))
"""Names that the states of optimizers, and of schedulers, have."""


_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ModelState)
_KNOWN = (*_TRAINED, dict, torch.amp.GradScaler, torch.utils.data.DataLoader, torch.utils.data.Sampler, RNGState)


def find_holders(statefuls: Sequence[ModuleMap], flat: FlatState, *more: type) -> list[str]:
    """Return the keys of objects that may hold parameters or moments in a form of their own.

    `more`: known types that count here, too.
    """
    paths = [leaf.path for leaf in flat.leaves if leaf.tensor.is_floating_point() and leaf.tensor.numel() > 1]
    stored = {path.partition("/")[0] for path in (*paths, *flat.shards, *(blob.path for blob in flat.blobs))}
    return [
        each.key
        for each in statefuls
        if (not isinstance(each.stateful, _KNOWN) or isinstance(each.stateful, more)) and each.path in stored
    ]


def _has_others(statefuls: Sequence[ModuleMap]) -> bool:
    """Return True if an app state has objects that may hold a schedule in a form of their own."""
    others = [each.stateful for each in statefuls if not isinstance(each.stateful, _KNOWN)]
    return any(hasattr(each, "parameters") or not is_own(type(each).__module__) for each in others)


def is_twin(parameters: Sequence[torch.Tensor], statefuls: Sequence[ModuleMap]) -> bool:
    """Return True if a module has parameters of the same shapes and dtypes: probably a copy of the trained one."""
    wanted = sorted((str(each.shape), str(each.dtype)) for each in parameters)
    return any(
        sorted((str(each.shape), str(each.dtype)) for each in of.model.parameters()) == wanted
        for of in statefuls
        if of.model is not None
    )


MOST_COMPARED = 16
"""Parameters of an optimizer that are compared with those of modules, to find out whether they are masters."""
COMPARED = 64
"""Elements of each that are compared."""


def has_masters(optimizer: torch.optim.Optimizer, statefuls: Sequence[ModuleMap]) -> bool:
    """Return True if an optimizer has masters of the modules' parameters: copies that it trains, with equal values.

    A copy of the same dtype on the same device is a master only if the optimizer has changed it. The order may differ,
    as with groups that have a weight decay of their own.
    """
    masters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_shape: dict[torch.Size, list[torch.Tensor]] = {}
    for of in statefuls:
        for each in of.model.parameters() if of.model is not None else ():
            if each.requires_grad:
                by_shape.setdefault(each.shape, []).append(each)
    if not masters or any(each.shape not in by_shape for each in masters):
        return False
    seen: Counter[torch.Size] = Counter()
    some, step = [], -(-len(masters) // MOST_COMPARED)
    for at, master in enumerate(masters):
        if at % step == 0:
            some.append((master, seen[master.shape]))
        seen[master.shape] += 1
    return all(_is_master(master, by_shape[master.shape], at, bool(optimizer.state)) for master, at in some)


def _is_master(master: torch.Tensor, parameters: Sequence[torch.Tensor], at: int, stepped: bool) -> bool:
    """Return True if one of the parameters of its shape has the values of a master: first, that at its position."""
    at %= len(parameters)
    return any(
        _has_equal_begin(find_local_tensor(master), find_local_tensor(each))
        for each in (*parameters[at:], *parameters[:at])
        if stepped or master.dtype != each.dtype or master.device != each.device
    )


def _has_equal_begin(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return True if the first elements are equal, but for rounding to the dtype of the parameter."""
    if master.shape != parameter.shape or not parameter.is_floating_point():
        return False
    a, b = (each.detach().reshape(-1)[:COMPARED].double().cpu() for each in (master, parameter))
    if master.dtype == parameter.dtype:
        return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    rounding = torch.finfo(parameter.dtype)
    return torch.allclose(a, b, rtol=rounding.eps, atol=rounding.smallest_normal, equal_nan=True)


def find_steps(leaves: Sequence[Leaf]) -> list[int]:
    """Return the positions of stored numbers of steps, at most `MOST_COUNTS`."""
    return [*itertools.islice((number for number, leaf in enumerate(leaves) if _is_step(leaf)), MOST_COUNTS)]


def _is_step(leaf: Leaf) -> bool:
    return leaf.path.endswith("/step") and leaf.tensor.numel() == 1


def _is_counter(path: str) -> bool:
    return path.rpartition("/")[2] in COUNTERS


def key_of(statefuls: Sequence[ModuleMap], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Return a key that changes with the objects of an app state."""
    held = [len(leaves), leaves[0].path if leaves else "", leaves[-1].path if leaves else ""]
    groups = [
        (
            id(group["params"][0]),
            id(group["params"][-1]),
            len(group["params"]),
            sum(map(_requires_grad, group["params"])),
        )
        if group["params"]
        else ()
        for each in statefuls
        for optimizer in each.optimizers
        for group in optimizer.param_groups
    ]
    modules = [id(next(each.model.parameters(), None)) for each in statefuls if each.model is not None]
    return (*held, *((each.key, id(each.stateful)) for each in statefuls), *groups, *modules)
