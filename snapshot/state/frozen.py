"""Frozen parameters: the leaves of a flattened state that no optimizer changes, by `requires_grad`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from snapshot.state.leaves import Leaf
from snapshot.state.model_state import ModelState
from snapshot.state.overlap_eligible import find_local_tensor


def find_frozen(app_state: Mapping[str, Any], leaves: Sequence[Leaf]) -> bytes:
    """Return a byte for each leaf, 1 if it is a frozen parameter of a module, or a part of one; b"" if none is."""
    frozen = {place for parameter in _frozen_parameters(app_state.values()) for place in _places_of(parameter)}
    if not frozen:
        return b""
    held = [(leaf if leaf.whole is None else leaf.whole).tensor for leaf in leaves]
    return bytes((tensor.data_ptr(), tensor.device) in frozen for tensor in held)


def _places_of(tensor: Any) -> Iterator[tuple[int, torch.device]]:
    """Yield the address and the device of a parameter's memory. A wrapper tensor has that of its inner tensors."""
    here = find_local_tensor(tensor)
    flatten = getattr(here, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from _places_of(getattr(here, name))
        return
    try:
        address = here.data_ptr()
    except (RuntimeError, ValueError):  # it is sparse, or has no memory yet
        return
    if address:
        yield address, here.device


def _frozen_parameters(statefuls: Iterable[Any]) -> Iterable[torch.Tensor]:
    """Yield the parameters that do not require gradients. A loop over the modules is faster than `parameters()`."""
    models = (each.model if isinstance(each, ModelState) else each for each in statefuls)
    left = [each for each in models if isinstance(each, torch.nn.Module)]
    seen: set[int] = set()
    while left:
        module = left.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.requires_grad:
                yield parameter
        left += [child for child in module._modules.values() if child is not None]
