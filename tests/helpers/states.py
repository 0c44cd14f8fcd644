"""Values of states: when they are equal, and how a byte of a stored one is damaged."""

import collections
import struct
from pathlib import Path

import numpy as np
import torch


def equal(a, b):
    """Return whether two values are equal in type and in every bit.

    Tensors also have the same dtype, shape, layout, device and `requires_grad`. A NaN is equal to a NaN of the
    same bits, and 0.0 is not equal to -0.0. Dictionaries have the same keys, of the same types and in the same order.
    """
    return not find_difference(a, b)


def expect_equal(a, b, path="", *, ordered=True):
    """Raise AssertionError unless two values are equal in type and in every bit, with the place where they differ.

    If not `ordered`, dictionaries may have their keys in different orders.
    """
    difference = find_difference(a, b, path, ordered)
    assert not difference, difference


def find_difference(a, b, path="", ordered=True):  # noqa: PLR0911, PLR0912 - a line per kind
    """Return the place where two values differ, with what differs there. It is empty if they are equal."""
    if type(a) is not type(b):
        return f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor):
        if hasattr(a, "__tensor_flatten__"):
            names, context = a.__tensor_flatten__()
            others, other = b.__tensor_flatten__()
            if list(names) != list(others) or find_difference(context, other):
                return f"{path}: {names}, {context} and {others}, {other}"
            return _first(
                find_difference(getattr(a, name), getattr(b, name), f"{path}.{name}", ordered) for name in names
            )
        for what in ("dtype", "shape", "layout", "device", "requires_grad"):
            if getattr(a, what) != getattr(b, what):
                return f"{path}: {what} {getattr(a, what)} and {getattr(b, what)}"
        return "" if bits(a) == bits(b) else f"{path}: {a} and {b}"
    if isinstance(a, (np.ndarray, np.generic)):
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    elif isinstance(a, dict):
        order = list if ordered else set
        if order(map(typed, a)) != order(map(typed, b)):
            return f"{path}: keys {list(a)} and {list(b)}"
        return _first(find_difference(a[key], b[key], f"{path}/{key}", ordered) for key in a)
    elif isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} elements"
        return _first(
            find_difference(x, y, f"{path}/{at}", ordered) for at, (x, y) in enumerate(zip(a, b, strict=True))
        )
    elif isinstance(a, float):
        same = struct.pack("d", a) == struct.pack("d", b)
    elif isinstance(a, complex):
        return find_difference((a.real, a.imag), (b.real, b.imag), path, ordered)
    elif type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return find_difference(vars(a), vars(b), path, ordered)
    else:
        same = a == b
    return "" if same else f"{path}: {a!r} and {b!r}"


def _first(differences):
    return next(filter(None, differences), "")


def typed(key):
    return type(key), key


def bits(tensor):
    """Return the bytes of a tensor's values. Of a sparse tensor, return those of its indices, too."""
    tensor = tensor.detach().cpu()
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced(), bits(tensor._indices()), bits(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return bits(tensor.crow_indices()), bits(tensor.col_indices()), bits(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return bits(tensor.ccol_indices()), bits(tensor.row_indices()), bits(tensor.values())
    assert tensor.layout is torch.strided, tensor.layout
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scales = tensor.q_scale(), tensor.q_zero_point()
        else:
            scales = (
                tensor.q_per_channel_axis(),
                *map(bits, (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())),
            )
        return tensor.qscheme(), scales, tensor.int_repr().numpy().tobytes()
    plain = tensor
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    # a single element is contiguous with any stride
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def flip(path, at=-1):
    """Flip a bit of the byte of a file at an offset, which counts from the end if it is negative."""
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
