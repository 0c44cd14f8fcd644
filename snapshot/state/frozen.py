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
    parameters = _find_parameters(app_state.values())
    frozen = {place for parameter in parameters for place in _places_of(parameter)}
    if not frozen:
        return b""
    addresses = {address for address, _ in frozen}
    marks = bytearray(len(leaves))
    for number, leaf in enumerate(leaves):
        whole = leaf if leaf.whole is None else leaf.whole
        address = whole.address or whole.tensor.data_ptr()
        marks[number] = address in addresses and (address, whole.tensor.device) in frozen
    return bytes(marks)


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


def _find_parameters(statefuls: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters that do not require gradients. This loop is several times faster than `parameters()`."""
    models = (each.model if isinstance(each, ModelState) else each for each in statefuls)
    modules: list[Any] = [each for each in models if isinstance(each, torch.nn.Module)]
    seen: set[int] = set()
    found: list[torch.Tensor] = []
    for module in modules:  # which grows
        if id(module) in seen or module is None:
            continue
        seen.add(id(module))
        if parameters := module._parameters:
            for parameter in parameters.values():
                if parameter is not None and not parameter.requires_grad:
                    found.append(parameter)
        if children := module._modules:
            modules += children.values()
    return found
