"""A model and its optimizer under torch's parallelism-independent names, and the adapter of each stateful."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from snapshot.errors import SnapshotError
from snapshot.manifest.containers import Container
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.state.foreign_parts import describe_state, read_state
from snapshot.state.leaves import Leaf
from snapshot.state.optimizers import (
    OptimizerAdapter,
    StateOfParameters,
    add_live_options,
    describe_group_change,
    has_param_groups,
    keep_option_tensors,
    restore_dtypes,
)
from snapshot.state.rng import RNGState
from snapshot.state.sharded import Shards, shape_of_whole
from snapshot.state.stateful import ModuleAdapter, RestoreAdapter, RNGAdapter, StateDict, StateDictAdapter
from snapshot.tensors.memory import address_of_tensor

# A model and its optimizer under torch's parallelism-independent names.
#
# The names are those of `torch.distributed.checkpoint.state_dict`, so every parallelism can restore the state of
# another.


class ModelState:
    """A model, with its optimizer or several, as one stateful.

    Parameters and their optimizer state have the parameter's full name in the unwrapped model. Wrappers do not change
    it: `DistributedDataParallel`, FSDP, tensor parallelism or `torch.compile`. So a snapshot restores into another
    parallelism and another number of ranks.

    Args:
        model: The model.
        optimizer: Its optimizer, or several.
        options: A `torch.distributed.checkpoint.state_dict.StateDictOptions`; as it is by default, every rank gives its
            own shards, which is what a snapshot wants.

    >>> import torch
    >>> from snapshot import ModelState
    >>> model = torch.nn.Linear(2, 1)
    >>> state = ModelState(model, torch.optim.Adam(model.parameters()))
    >>> sorted(state.state_dict())
    ['model', 'optim']
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        options: Any = None,
    ) -> None:
        self.model = model
        if optimizer is None:
            self.optimizers: list[torch.optim.Optimizer] = []
        elif isinstance(optimizer, torch.optim.Optimizer):
            self.optimizers = [optimizer]
        else:
            self.optimizers = list(optimizer)
        self.options = options

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state under `model`, and the optimizers' under `optim`.

        A fresh optimizer has no state, and remains fresh.
        """
        return self._read_state_dict(self.options)

    def nested_state_dict(self) -> dict[str, Any]:
        """Return the state dict with the optimizers' state by parameter, even if the options request a flat one."""
        return self._read_state_dict(_nest_options(self.options))

    def _read_state_dict(self, options: Any) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if options is not None and options.full_state_dict and options.cpu_offload and _has_peers():
            raise SnapshotError(
                "ModelState: full_state_dict with cpu_offload leaves all ranks but 0 without a state; unset both, and "
                "every rank saves its own shards"
            )
        if not self.optimizers:
            return {"model": get_model_state_dict(self.model, options=options)}
        fresh = [not optimizer.state for optimizer in self.optimizers]
        try:
            model, optim = get_state_dict(self.model, self.optimizers, options=options)
            names = self._find_fresh_names(fresh, optim, options) if any(fresh) else set()
        finally:
            for optimizer, was_fresh in zip(self.optimizers, fresh, strict=True):
                if was_fresh:  # torch has taken a step of zeros with it, from which training would go on otherwise
                    optimizer.state.clear()
        return {"model": model, "optim": _drop_state(optim, names) if names else optim}

    def _find_fresh_names(self, fresh: list[bool], optim: Mapping[str, Any], options: Any) -> set[str]:
        """Return the parameters of fresh optimizers."""
        if "param_groups" not in optim:
            from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

            optim = get_optimizer_state_dict(self.model, self.optimizers, options=_nest_options(options))
        groups = [was for was, each in zip(fresh, self.optimizers, strict=True) for _ in each.param_groups]
        listed = zip(groups, optim["param_groups"], strict=False)
        return {name for was_fresh, group in listed if was_fresh for name in group["params"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of this parallelism, which `Snapshot.restore` has converted."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

        if not self.optimizers or "optim" not in state_dict:
            set_model_state_dict(self.model, state_dict["model"], options=self.options)
            return
        optim, options = state_dict["optim"], self.options
        if "param_groups" in optim:  # DCP drops what is empty, and torch would take the rest for flattened names
            optim, options = {"state": {}, **optim}, _nest_options(options)
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=state_dict["model"],
            optim_state_dict=optim,
            options=options,
        )


def _drop_state(optim: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Return an optimizer's state dict, nested or flat, without the state of some parameters."""
    if "param_groups" in optim:
        return {**optim, "state": {name: each for name, each in optim["state"].items() if name not in names}}
    flat = {name: name.partition(".")[2].rpartition(".")[0] for name in optim if name.startswith("state.")}
    return {name: each for name, each in optim.items() if flat.get(name) not in names}


def _nest_options(options: Any) -> Any:
    if options is None or not options.flatten_optimizer_state_dict:
        return options
    return dataclasses.replace(options, flatten_optimizer_state_dict=False)


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


# `ModelState` as a stateful: a model and its optimizers, restored together under the names of parameters.


class ModelStateAdapter(StateOfParameters):
    """A model and its optimizer under names that do not depend on their parallelism."""

    models = "/model"
    optimizer_at = "/optim"

    def __init__(self, key: str, stateful: ModelState) -> None:
        super().__init__(key, stateful)
        self.groups_known = True
        """True if the snapshot records parameter groups; a flat state does not."""
        prefix = f"{key}/model/"
        self.parameters = {path[len(prefix) :]: held for path, held in self.live.items() if path.startswith(prefix)}
        groups = self.state["optim"]["param_groups"] if stateful.optimizers else ()
        owners = [optimizer for optimizer in stateful.optimizers for _ in optimizer.param_groups]
        self.groups = [[encode_component(str(name)) for name in group["params"]] for group in groups]
        self.owners = {name: owner for names, owner in zip(self.groups, owners, strict=False) for name in names}

    def forget_groups(self) -> None:
        """Note that the names of the parameters changed: the groups of the saved optimizer are not known by them."""
        self.groups_known = False

    def read_state(self) -> Any:
        """Return the state by parameter, independent of the options."""
        return describe_state(self.key, self.stateful, self.stateful.nested_state_dict())

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        found: list[torch.optim.Optimizer] = self.stateful.optimizers
        return found

    def describe_mismatch(self, entries: Mapping[str, Any]) -> str | None:
        why = super().describe_mismatch(entries)
        if why is None and self._saved is not None and self.groups_known:
            other = describe_group_change(self._saved, self.groups)
            why = f"{self.base}: {other}" if other else None
        return why

    def find_other_shapes(self, entries: Mapping[str, Any], unfit: set[int]) -> dict[str, str]:
        for name, held in self.parameters.items():
            shape = getattr(entries.get(f"{self.key}/model/{name}"), "shape", None)
            if shape is not None and isinstance(held, torch.Tensor) and tuple(shape) != shape_of_whole(held):
                unfit = unfit | {address_of_tensor(held)}
        return super().find_other_shapes(entries, unfit)

    def list_model_names(self) -> list[str]:
        return [encode_component(name) for name in self.state["model"]]

    def find_adopted(self, entries: Mapping[str, Any], elsewhere: Mapping[str, Any]) -> list[str]:
        return [path for path in self.live if path not in entries and path in elsewhere]

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        if self.stateful.optimizers and f"{self.key}/optim" not in entries:
            return [f"{self.key}: the snapshot holds no optimizer's state as 'optim' under this key"]
        return []

    def find_missing(self, entries: Mapping[str, Any]) -> list[str]:
        """Return the model's missing names, which torch would compare only after tensors were written."""
        prefix = f"{self.key}/model/"
        return sorted(path for path in self.live if path.startswith(prefix) and path not in entries)

    def find_unexpected(self, entries: Mapping[str, Any]) -> list[str]:
        prefix = f"{self.key}/model/"
        leaves = (path for path, entry in entries.items() if not isinstance(entry, Container))
        return sorted(path for path in leaves if path.startswith(prefix) and path not in self.live)

    def drop_optimizer(self, entries: dict[str, Any]) -> bool:
        for path in [each for each in entries if each == self.base or each.startswith(f"{self.base}/")]:
            del entries[path]
        entries[self.key] = entries[self.key].without_children(
            name == "optim" for name in entries[self.key].components()
        )
        return False

    def load_state(self, state: Any, strict: bool) -> list[str]:
        model = {**self.state["model"], **state["model"]}
        optim = state.get("optim")
        if optim is None or not self.stateful.optimizers or "param_groups" not in optim:
            return super().load_state({**state, "model": model}, strict)
        saved = optim.get("state", {})
        optim = {**optim, **self._complete_state(optim)}
        with keep_option_tensors(self.optimizers, self.filled):
            super().load_state({**state, "model": model, "optim": optim}, strict)
        self._amend_optimizers(optim["state"], saved)
        return []

    def _complete_state(self, optim: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved state and groups, completed with live values where the snapshot has none.

        torch requires an entry for every parameter and option.
        """
        live = self.state["optim"]
        states = {**live["state"], **optim.get("state", {})}
        saved = {str(name): group for group in optim["param_groups"] for name in group["params"]}
        groups = []
        for group in live["param_groups"]:
            same = next((saved[name] for name in group["params"] if name in saved), group)
            groups.append({**add_live_options(same, group), "params": group["params"]})
        states = {name: states.get(name, {}) for group in live["param_groups"] for name in group["params"]}
        return {"state": states, "param_groups": groups}

    def _amend_optimizers(self, given: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Set the optimizers' state to the values that were read.

        torch casts the state, drops that of frozen parameters, and requires a state for each parameter.
        """
        live = {address_of_tensor(each): (each, owner) for owner in self.optimizers for each in _list_parameters(owner)}
        known = {name for group in self._saved.groups for name in group} if self._saved else set()
        for path, held in self.parameters.items():
            parameter, optimizer = live.get(address_of_tensor(held), (None, None))
            if parameter is None or optimizer is None:
                continue
            name = decode_component(path)
            state = optimizer.state.get(parameter)
            if path in known and path not in self.untouched and not saved.get(name):
                state = None  # the snapshot has the parameter, and no state of it
            elif not state:
                state = dict(saved[name]) if saved.get(name) and path not in self.untouched else None
            else:
                meant = given.get(name, {})
                state.update({what: restore_dtypes(now, meant[what]) for what, now in state.items() if what in meant})
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)


def _list_parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# The kind of each stateful object.

_ADAPTERS: tuple[tuple[type, type[RestoreAdapter]], ...] = (
    (RNGState, RNGAdapter),
    (torch.nn.Module, ModuleAdapter),
    (torch.optim.Optimizer, OptimizerAdapter),
    (ModelState, ModelStateAdapter),
    (StateDict, StateDictAdapter),
)


def find_adapter(stateful: Any) -> type[RestoreAdapter]:
    """Return the adapter of a stateful, without reading its state."""
    own: type[RestoreAdapter] | None = getattr(type(stateful), "__snapshot_kind__", None)
    return own or next((adapter for of, adapter in _ADAPTERS if isinstance(stateful, of)), RestoreAdapter)


def make_adapter(key: str, stateful: Any) -> RestoreAdapter:
    """Return a stateful in its adapter, with its current state."""
    adapter = find_adapter(stateful)
    if adapter is OptimizerAdapter:
        state = read_state(key, stateful)
        return (
            OptimizerAdapter(key, stateful, state)
            if has_param_groups(stateful, state)
            else RestoreAdapter(key, stateful, state)
        )
    return adapter(key, stateful)


# Tensors that only an optimizer's `step()` changes: they may be copied until the next step.
#
# Any tensor in doubt is excluded, since an error here would mix two moments in one snapshot.

ONE_ELEMENT = 16
"""The maximum element size. A state of one element is often a count, which other code may change."""
_MAX_NORM = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_address, _nbytes, _on_host = attrgetter("address"), attrgetter("nbytes"), attrgetter("is_cpu")
_WRAPPERS = frozenset(("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
"""Attributes in which modules hold the module that they wrap."""


def find_local_tensor(tensor: Any) -> Any:
    """Return the local tensor of a `DTensor`, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def count_changes(tensor: torch.Tensor) -> int:
    """Return the number of changes that torch has counted, of a `DTensor` and of its local tensor."""
    local = find_local_tensor(tensor)
    return int(tensor._version if local is tensor else tensor._version + local._version)


def find_storage_begin(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


def walk_modules(module: torch.nn.Module, *, unwrapped: bool) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each module and the prefix of its parameters' names. With `unwrapped`, wrappers have no part in names."""
    left: list[tuple[str, torch.nn.Module, tuple[int, ...]]] = [("", module, ())]
    while left:
        prefix, each, above = left.pop()
        yield prefix, each
        above = (*above, id(each))
        for name, child in each._modules.items():
            if child is not None and id(child) not in above:
                hidden = unwrapped and (
                    name in _WRAPPERS or (name == "module" and isinstance(each, DistributedDataParallel))
                )
                left.append((prefix if hidden else f"{prefix}{name}.", child, above))


def list_parameters(module: torch.nn.Module, *, unwrapped: bool) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all names of parameters."""
    for prefix, each in walk_modules(module, unwrapped=unwrapped):
        for name, parameter in each._parameters.items():
            if parameter is not None:
                yield prefix + name, parameter


class OverlapEligible:
    """The tensors that the optimizers of an app state own: parameters, and the state of each."""

    def __init__(self, app_state: Mapping[str, Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers whose steps can be awaited."""
        self._changing: list[torch.Tensor] = []
        """Memory that may change at any time, even if an optimizer owns it."""
        self._wrappers: dict[int, torch.Tensor] = {}
        """The `DTensor`s of the optimizers' states, by the storages of their local tensors."""
        self._parameters: dict[str, torch.Tensor] = {}
        """The parameters by the path of a module's state in the snapshot."""
        of_state: list[str] = []
        for key, stateful in app_state.items():
            named = isinstance(stateful, ModelState)
            below = f"{encode_component(key)}/"
            optimizers = stateful.optimizers if named else [stateful]
            if named or (isinstance(stateful, torch.optim.Optimizer) and hasattr(stateful, "param_groups")):
                usual = [self._accept_optimizer(each) for each in optimizers]
                of_state += [f"{below}optim/state/" if named else f"{below}state/"] if all(usual) else []
        self._of_state = tuple(of_state)
        held = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = {id(each) for group in held for each in group}
        for key, stateful in app_state.items():
            below = f"{encode_component(key)}/"
            if isinstance(stateful, ModelState):
                self._collect_parameters(f"{below}model/", stateful.model, stepped, unwrapped=True)
            elif isinstance(stateful, torch.nn.Module):
                self._collect_parameters(below, stateful, stepped, unwrapped=False)

    def _accept_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Record an optimizer whose steps can be awaited; return True if its state is in torch's usual place."""
        hooked = _is_hooked(optimizer)
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        for state in optimizer.state.values():
            values = state.values() if isinstance(state, Mapping) else [state]
            tensors += [each for each in values if isinstance(each, torch.Tensor)]
        if not hooked:
            self._changing += map(find_local_tensor, tensors)
            return False
        for each in tensors:
            local = find_local_tensor(each)
            if local is not each:
                self._wrappers[find_storage_begin(local)] = each
                if not local.is_contiguous():
                    self._changing.append(local)
        self.optimizers.append(optimizer)
        return _has_usual_state(optimizer)

    def _collect_parameters(self, below: str, module: torch.nn.Module, stepped: set[int], *, unwrapped: bool) -> None:
        """Record the parameters of a module that an optimizer steps; exclude those that a forward pass changes.

        With `unwrapped`, use their names without model wrappers.
        """
        for prefix, each in walk_modules(module, unwrapped=unwrapped):
            for name, parameter in each._parameters.items():
                if (
                    parameter is not None and id(parameter) in stepped and parameter.requires_grad
                ):  # others it is not the step that changes
                    self._parameters[below + encode_component(prefix + name)] = parameter
            if isinstance(each, _MAX_NORM) and each.max_norm is not None:
                self._changing.append(find_local_tensor(each.weight))

    def __bool__(self) -> bool:
        return bool(self.optimizers)

    def find_late(
        self, leaves: Sequence[Leaf], flat: Sequence[Leaf], shards: Mapping[str, Shards], ties: Mapping[str, str]
    ) -> tuple[bytes, list[torch.Tensor]]:
        """Return a byte for each leaf, 1 if it may be copied late, and the tensors to watch.

        The versions of these tensors reveal changes. `flat`, `shards` and `ties` are the whole state of the
        application: memory that also holds anything else is excluded.
        """
        mine = self._find_owners(leaves)
        if not any(owner is not None for owner in mine):
            return b"", []
        everything = mine if flat is leaves else self._find_owners(flat)
        others = [leaf for leaf, owner in zip(flat, everything, strict=True) if owner is None]
        if flat is not leaves:  # what has two names on some ranks only is a leaf of its own here
            others += [leaf for leaf, owner in zip(leaves, mine, strict=True) if owner is None]
        elsewhere = list(self._changing)
        for path, each in shards.items():
            elsewhere += [piece.tensor for piece in each.pieces if self._find_owner(path, piece.tensor) is None]
        shared = {
            owner for path, owner in ties.items() if not self._is_owned(path)
        }  # two names, and not both an owner's
        if shared:
            elsewhere += [leaf.tensor for leaf in flat if leaf.path in shared]
            elsewhere += [piece.tensor for path in shared & shards.keys() for piece in shards[path].pieces]
        spoilt = _find_overlaps(leaves, others, elsewhere)
        marks = bytes(owner is not None and not bad for owner, bad in zip(mine, spoilt, strict=True))
        return marks, list(compress(mine, marks))  # type: ignore[arg-type]  # there are owners where there are marks

    def _is_owned(self, path: str) -> bool:
        """Return True if a path is one that an optimizer's tensor would have."""
        return path.startswith(self._of_state) or path in self._parameters

    def _find_owners(self, leaves: Sequence[Leaf]) -> list[torch.Tensor | None]:
        """Return, for each leaf, the optimizer's tensor that it is, or is a part of."""
        of_state, parameters = self._of_state, self._parameters
        found: list[torch.Tensor | None] = []
        for leaf in leaves:
            owner = None
            if leaf.nbytes > ONE_ELEMENT and (leaf.wrap is None or leaf.whole is not None):
                if leaf.path.startswith(of_state):
                    owner = self._find_owner(leaf.path, leaf.tensor)
                elif (parameter := parameters.get(leaf.path)) is not None:
                    whole = (
                        leaf.whole is None
                        and leaf.plain
                        and parameter.data_ptr() == leaf.address
                        and parameter.nbytes == leaf.nbytes
                        and parameter.is_contiguous()
                    )
                    owner = parameter if whole else self._find_owner(leaf.path, leaf.tensor)
            found.append(owner)
        return found

    def _find_owner(self, path: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if path.startswith(self._of_state):
            return self._wrappers.get(find_storage_begin(tensor), tensor) if self._wrappers else tensor
        parameter = self._parameters.get(path)
        if parameter is None:
            return None
        here = find_local_tensor(parameter)
        begin, end = find_extent(here)
        first, last = find_extent(tensor)
        return (
            parameter
            if begin <= first and last <= end and find_storage_begin(here) == find_storage_begin(tensor)
            else None
        )


def find_extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the begin and end of a tensor's memory, including any gaps."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(last + 1) * tensor.element_size()


def _find_overlaps(leaves: Sequence[Leaf], others: Sequence[Leaf], elsewhere: Sequence[torch.Tensor]) -> list[bool]:
    """Return, for each leaf, True if its storage or its bytes are shared with something else.

    NumPy arrays over one memory are separate storages, so addresses are compared too.
    """
    bases = {*_find_storage_begins(others), *map(find_storage_begin, elsewhere)}
    spoilt = [base in bases for base in _find_storage_begins(leaves)]
    spans = np.concatenate([_find_extents(others), np.array([*map(find_extent, elsewhere)], np.int64).reshape(-1, 2)])
    spans = spans[spans[:, 0] < spans[:, 1]]
    if not len(spans):
        return spoilt
    spans = spans[np.argsort(spans[:, 0])]
    ends = np.maximum.accumulate(spans[:, 1])
    mine = _find_extents(leaves)
    before = np.searchsorted(spans[:, 0], mine[:, 1], side="left")  # the number of extents that begin before its end
    met = (before > 0) & (ends[np.maximum(before - 1, 0)] > mine[:, 0])
    return [base or meets for base, meets in zip(spoilt, met.tolist(), strict=True)]


def _find_storage_begins(leaves: Sequence[Leaf]) -> list[int]:
    """Return the storage addresses of leaves. Most leaves begin where their storage does."""
    offsets = map(torch.Tensor.storage_offset, [leaf.tensor for leaf in leaves])
    return [
        find_storage_begin(leaf.tensor) if offset else leaf.address
        for leaf, offset in zip(leaves, offsets, strict=True)
    ]


def _find_extents(leaves: Sequence[Leaf]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the memory extents of leaves. Most leaves have no gaps."""
    begins = np.fromiter(map(_address, leaves), np.int64, len(leaves))
    ends = begins + np.fromiter(map(_nbytes, leaves), np.int64, len(leaves))
    for index, leaf in enumerate(leaves):
        if not leaf.plain:
            begins[index], ends[index] = find_extent(leaf.tensor)
    return np.stack([begins, ends], axis=1)


def _is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if each step runs torch's hooks: a foreign optimizer or a captured graph may not run them."""
    for group in optimizer.param_groups:  # of those that do not say whether a graph may hold them, on a device any may
        if group.get("capturable", not all(map(_on_host, group["params"]))):
            return False
    return bool(getattr(optimizer.step, "hooked", False))


def _has_usual_state(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the state dict's `state` is the state of the parameters, and nothing else."""
    plain = type(optimizer).state_dict is torch.optim.Optimizer.state_dict and "state_dict" not in vars(optimizer)
    hooks = (*optimizer._optimizer_state_dict_pre_hooks, *optimizer._optimizer_state_dict_post_hooks)
    return plain and not hooks and all(isinstance(key, torch.Tensor) for key in optimizer.state)


# Frozen parameters: the leaves of a flattened state that no optimizer changes, by `requires_grad`.

_requires_grad = attrgetter("requires_grad")


def find_frozen(app_state: Mapping[str, Any], leaves: Sequence[Leaf]) -> bytes:
    """Return a byte for each leaf, 1 if it is a frozen parameter of a module, or a part of one; b"" if none is."""
    modules = _find_modules(app_state.values())
    held: list[torch.Tensor] = [each for module in modules for each in module._parameters.values() if each is not None]
    if all(map(_requires_grad, held)):
        return b""
    changing = [each for each in held if each.requires_grad]
    changing += [buffer for module in modules for buffer in module._buffers.values() if buffer is not None]
    spoilt = sorted((place[0], place[1]) for each in changing for place in _places_of(each))
    ends = list(accumulate((end for _, end in spoilt), max))
    frozen = {
        (begin, end, device)
        for each in held
        if not each.requires_grad
        for begin, end, device in _places_of(each)
        if not (met := bisect_left(spoilt, (end,))) or ends[met - 1] <= begin
    }
    addresses = {address for address, *_ in frozen}
    marks = bytearray(len(leaves))
    for number, leaf in enumerate(leaves):
        whole = leaf if leaf.whole is None else leaf.whole
        address = whole.address or whole.tensor.data_ptr()
        if address in addresses:
            marks[number] = (*find_extent(whole.tensor), whole.tensor.device) in frozen
    return bytes(marks)


def _places_of(tensor: Any) -> Iterator[tuple[int, int, torch.device]]:
    """Yield begin, end and device of a parameter's memory. A wrapper tensor has that of its inner tensors."""
    here = find_local_tensor(tensor)
    flatten = getattr(here, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _places_of(getattr(here, name))
        return
    try:
        begin, end = find_extent(here)
    except (RuntimeError, ValueError):  # it is sparse, or has no memory yet
        return
    if begin < end and begin:
        yield begin, end, here.device


def _find_modules(statefuls: Iterable[Any]) -> list[torch.nn.Module]:
    """Return all modules. This loop is several times faster than `modules()`."""
    models = (each.model if isinstance(each, ModelState) else each for each in statefuls)
    left: list[Any] = [each for each in models if isinstance(each, torch.nn.Module)]
    seen: set[int] = set()
    found: list[torch.nn.Module] = []
    for module in left:  # which grows
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            found.append(module)
            if children := module._modules:
                left += children.values()
    return found


def optimizers_of(stateful: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a stateful: itself, or those of a `ModelState`."""
    return _only_optimizers(stateful.optimizers if isinstance(stateful, ModelState) else [stateful])


def _only_optimizers(found: Any) -> list[torch.optim.Optimizer]:
    return [each for each in found if isinstance(each, torch.optim.Optimizer) and hasattr(each, "param_groups")]
