"""Frozen parameters: the leaves of a flattened state that no optimizer changes, by `requires_grad`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import torch

from snapshot.state.leaves import Leaf
from snapshot.state.model_state import ModelState
from snapshot.state.overlap_eligible import find_extent, find_local_tensor

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
