"""Values of states: when they are equal, and how a byte of a stored one is damaged."""

import collections
import dataclasses
import io
import struct
import uuid
from datetime import datetime, time, timezone
from decimal import Decimal
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


def find_difference(a, b, path="", ordered=True):  # noqa: PLR0911 - a line per kind
    """Return the place where two values differ, with what differs there. It is empty if they are equal."""
    if type(a) is not type(b):
        return f"{path}: {type(a)} and {type(b)}"
    if isinstance(a, torch.Tensor) and not hasattr(a, "__tensor_flatten__"):
        for what in ("dtype", "shape", "layout", "device", "requires_grad"):
            if getattr(a, what) != getattr(b, what):
                return f"{path}: {what} {getattr(a, what)} and {getattr(b, what)}"
        return "" if bits(a) == bits(b) else f"{path}: {a} and {b}"
    parts = parts_of(a)
    if parts is not a:
        return find_difference(parts, parts_of(b), path, ordered)
    if isinstance(a, dict):
        order = list if ordered else set
        if order(map(typed, a)) != order(map(typed, b)):
            return f"{path}: keys {list(a)} and {list(b)}"
        return _first(find_difference(a[key], b[key], f"{path}/{key}", ordered) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b):
            return f"{path}: {len(a)} and {len(b)} elements"
        return _first(
            find_difference(x, y, f"{path}/{at}", ordered) for at, (x, y) in enumerate(zip(a, b, strict=True))
        )
    return "" if a == b else f"{path}: {a!r} and {b!r}"


def parts_of(value):  # noqa: PLR0911, PLR0912 - a line per kind
    """Return what a value is compared by, of plain kinds, or the value itself if `==` sees all of it."""
    if isinstance(value, torch.Tensor):
        names, context = value.__tensor_flatten__()
        return [context, {name: getattr(value, name) for name in names}]
    if isinstance(value, (np.str_, np.bytes_)):
        return list(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.dtype.type, value.dtype.str, value.shape, _bytes_of_array(value)
    if isinstance(value, float):
        return struct.pack("d", value)
    if isinstance(value, complex):
        return value.real, value.imag
    if isinstance(value, torch.Generator):
        return value.device, value.get_state()
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, slice):
        return value.start, value.stop, value.step
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (datetime, time)):
        return repr(value)
    if isinstance(value, uuid.UUID):
        return value.int, value.is_safe
    if isinstance(value, timezone):
        return value.__getinitargs__()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if type(value).__eq__ is object.__eq__ and hasattr(value, "__dict__"):
        return vars(value)
    return value


def _bytes_of_array(value):
    """Return the bytes of a value. Those of a scalar long double that are not part of its number are arbitrary."""
    data = np.asarray(value).tobytes()
    if isinstance(value, np.generic) and value.dtype.type in (np.longdouble, np.clongdouble):
        return [data[at : at + 10] for at in range(0, len(data), np.dtype(np.longdouble).itemsize)]
    return data


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
