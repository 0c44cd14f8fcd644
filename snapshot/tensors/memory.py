"""Tensors as bytes: names of dtypes, layouts in memory, and views."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from snapshot.io.system import libc

# Names of dtypes, in this library's manifest and in safetensors headers.

_UNSTORABLE = {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
"""Dtypes of quantised tensors, which are stored in parts: their integers are plain tensors."""

BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and str(value).removeprefix("torch.") not in _UNSTORABLE
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in BY_NAME.items()}
ITEMSIZE: dict[str, int] = {name: dtype.itemsize for name, dtype in BY_NAME.items()}


def is_castable(dtype: torch.dtype) -> bool:
    """Return True for floating-point dtypes that torch can cast to."""
    return dtype.is_floating_point and "float4" not in str(dtype)


SAFETENSORS: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""This library's name -> safetensors' name, for dtypes that all its releases read; others are stored as bytes."""


# Tensors' memory.


def find_local_tensor(tensor: Any) -> Any:
    """Return the local tensor of a `DTensor`, or the tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def address_of_tensor(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, or a unique number for a tensor without memory.

    For a sharded tensor it is this rank's part, and for a wrapped one its first inner tensor.
    """
    local = find_local_tensor(tensor)
    while is_traceable_wrapper_subclass(local):
        local = getattr(local, local.__tensor_flatten__()[0][0])
    try:
        return int(local.data_ptr()) or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


_HUGE_PAGES = 14
_HUGE_PAGE = 2 << 20


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Let the kernel back the memory of a new host tensor with huge pages, if it is long.

    Each page is allocated and zeroed in a page fault when it is first written. With small pages, these faults take
    more than twice as long as the read that fills them.
    """
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if begin < end and libc.madvise is not None:  # a refusal is not an error: the pages are small then
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _HUGE_PAGES)


def is_flat(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory holds its elements in C order, without gaps or lazy operations."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's elements are contiguous in host memory, as they are on storage."""
    return tensor.is_cpu and is_flat(tensor)


# Views into a storage, and the test if a view is a box in a tensor of C order.
#
# All counts are in elements. Nearly every saved view is one: a slice, a transposition, or both.

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Return the strides of C order.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(max(1, size) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def measure_span(shape: Shape, strides: Shape) -> int:
    """Return the distance from a view's first element to its end, in elements of storage.

    >>> measure_span((2, 3), (10, 2))
    15
    """
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


class EnclosingTensor(NamedTuple):
    """A tensor of C order with the same first element as a view, which is a box of it."""

    order: Shape
    """The view's dimensions by decreasing stride: its permutation."""
    sizes: Shape
    """Shape of the enclosing tensor. It has one more dimension than the view if the view's last stride exceeds 1."""

    @property
    def padded(self) -> bool:
        """True if there is one more dimension, in which the view has only the first element."""
        return len(self.sizes) > len(self.order)


def find_enclosing_tensor(shape: Shape, strides: Shape) -> EnclosingTensor | None:
    """Return the tensor that a view is a box of; None if its elements overlap or interleave.

    >>> find_enclosing_tensor((3, 2), (1, 10))
    EnclosingTensor(order=(1, 0), sizes=(2, 10))
    >>> find_enclosing_tensor((2, 3), (10, 2))
    EnclosingTensor(order=(0, 1), sizes=(2, 5, 2))
    >>> find_enclosing_tensor((4, 4), (0, 1)) is None
    True
    """
    order = tuple(sorted(range(len(shape)), key=lambda axis: (shape[axis] != 1, -strides[axis], axis)))
    sizes: list[int] = []
    step = 0
    for axis in order:
        size, stride = shape[axis], strides[axis]
        if size == 1:
            sizes.append(1)
            continue
        if stride <= 0:
            return None
        if step:  # the previous stride must be a multiple of this one
            count, rest = divmod(step, stride)
            if rest or count < size:
                return None
            size = count
        sizes.append(size)
        step = stride
    if step > 1:
        sizes.append(step)
    return EnclosingTensor(order, tuple(sizes))
