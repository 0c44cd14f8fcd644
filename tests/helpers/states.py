"""Values of states: when they are equal, and how a byte of a stored one is damaged."""

import collections
import struct
from pathlib import Path

import numpy as np
import torch


def equal(a, b):  # noqa: PLR0911 - a line per kind
    """Return whether two values are equal in type and in every bit.

    Tensors also have the same dtype, shape, layout, device and `requires_grad`. A NaN is equal to a NaN of the
    same bits, and 0.0 is not equal to -0.0. Dictionaries have the same keys, of the same types and in the same order.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and a.layout == b.layout
            and a.device == b.device
            and a.requires_grad == b.requires_grad
            and bits(a) == bits(b)
        )
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(map(typed, a)) == list(map(typed, b)) and all(map(equal, a.values(), b.values()))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return equal(a.real, b.real) and equal(a.imag, b.imag)
    return a == b


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
        return tensor.int_repr().numpy().tobytes()
    plain = tensor
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    return plain.view(-1).view(torch.uint8).numpy().tobytes()


def flip(path, at=-1):
    """Flip a bit of the byte of a file at an offset, which counts from the end if it is negative."""
    path = Path(path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
