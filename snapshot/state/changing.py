"""Which tensors change, and when: only in an optimizer's `step()`, never, or at any time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from snapshot.manifest.paths import encode_component
from snapshot.state.leaves import Leaf
from snapshot.state.model_state import ModuleMap
from snapshot.state.sharded import Shards
from snapshot.tensors.memory import find_local_tensor

# Tensors that only an optimizer's `step()` changes: they may be copied until the next step.
#
# Any tensor in doubt is excluded, since an error here would mix two moments in one snapshot.

ONE_ELEMENT = 16
"""The maximum element size. A state of one element is often a count, which other code may change."""
_MAX_NORM = (torch.nn.Embedding, torch.nn.EmbeddingBag)
_address, _nbytes, _on_host = attrgetter("address"), attrgetter("nbytes"), attrgetter("is_cpu")


def count_changes(tensor: torch.Tensor) -> int:
    """Return the number of changes that torch has counted, of a `DTensor` and of its local tensor."""
    local = find_local_tensor(tensor)
    return int(tensor._version if local is tensor else tensor._version + local._version)


def find_storage_begin(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


class OverlapEligible:
    """The tensors that the optimizers of an app state own: parameters, and the state of each."""

    def __init__(self, statefuls: Sequence[ModuleMap]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers whose steps can be awaited."""
        self._changing: list[torch.Tensor] = []
        """Memory that may change at any time, even if an optimizer owns it."""
        self._wrappers: dict[int, torch.Tensor] = {}
        """The `DTensor`s of the optimizers' states, by the storages of their local tensors."""
        self._parameters: dict[str, torch.Tensor] = {}
        """The parameters by the path of a module's state in the snapshot."""
        of_state: list[str] = []
        for each in statefuls:
            usual = [self._accept_optimizer(optimizer) for optimizer in each.optimizers]
            of_state += [f"{each.state_path}/"] if usual and all(usual) else []
        self._of_state = tuple(of_state)
        held = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        stepped = {id(parameter) for group in held for parameter in group}
        for each in statefuls:
            self._collect_parameters(each, stepped)

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

    def _collect_parameters(self, of: ModuleMap, stepped: set[int]) -> None:
        """Record the parameters of a module that an optimizer steps; exclude those that a forward pass changes."""
        below = f"{of.model_path}/"
        for prefix, each in of.modules:
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


def find_frozen(statefuls: Sequence[ModuleMap], leaves: Sequence[Leaf]) -> bytes:
    """Return a byte for each leaf, 1 if it is a frozen parameter of a module, or a part of one; b"" if none is."""
    modules = {id(module): module for each in statefuls for _, module in each.modules}.values()
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
