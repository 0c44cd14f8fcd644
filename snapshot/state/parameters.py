"""Parameters: which of them are frozen, and which tensors only an optimizer's `step()` changes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from snapshot.manifest.paths import encode_component
from snapshot.state.leaves import Leaf
from snapshot.state.model_state import ModelState
from snapshot.state.sharded import Shards

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


def find_storage_begin(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage."""
    return int(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size())


class OverlapEligible:
    """The tensors that the optimizers of an app state own: parameters, and the state of each."""

    def __init__(self, app_state: Mapping[str, Any]) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        """The optimizers whose steps can be awaited."""
        self._changing: list[torch.Tensor] = []
        """Memory that may change at any time, even if an optimizer owns it."""
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
        # `torch._foreach_*` changes a DTensor without counting it, so a change during the copy would stay unnoticed.
        self._changing += [
            find_local_tensor(each) for each in tensors if not hooked or find_local_tensor(each) is not each
        ]
        if not hooked:
            return False
        self.optimizers.append(optimizer)
        return _has_usual_state(optimizer)

    def _collect_parameters(self, below: str, module: torch.nn.Module, stepped: set[int], *, unwrapped: bool) -> None:
        """Record the parameters of a module that an optimizer steps; exclude those that a forward pass changes.

        With `unwrapped`, use their names without model wrappers.
        """
        parameters = self._parameters
        left: list[tuple[str, torch.nn.Module, tuple[int, ...]]] = [("", module, ())]
        while left:
            prefix, module, above = left.pop()
            above = (*above, id(module))
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None and id(parameter) in stepped and parameter.requires_grad
                ):  # others it is not the step that changes
                    parameters[below + encode_component(prefix + name)] = parameter
            if isinstance(module, _MAX_NORM) and module.max_norm is not None:
                self._changing.append(find_local_tensor(module.weight))
            for name, child in module._modules.items():
                if child is not None and id(child) not in above:
                    hidden = unwrapped and (
                        name in _WRAPPERS or (name == "module" and isinstance(module, DistributedDataParallel))
                    )
                    left.append((prefix if hidden else f"{prefix}{name}.", child, above))

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
                    owner = leaf.tensor
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
            return tensor
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
