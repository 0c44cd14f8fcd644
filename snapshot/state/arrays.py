"""NumPy arrays and scalars as tensors over the same memory, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.tensors.dtypes import BY_NAME
from snapshot.tensors.memory import view

Array = np.ndarray[Any, Any]


def describe(value: Array | np.generic) -> tuple[Any, tuple[int, ...], str, torch.Tensor] | None:
    """(NumPy's text for the dtype, shape, order, a tensor over the bytes); None for what needs a pickle."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return None
    if value.dtype.hasobject or value.dtype.metadata:
        return None
    array: Array = np.asarray(value)
    order = "F" if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    plain = np.ascontiguousarray(array).reshape(array.shape)
    descr = np.lib.format.dtype_to_descr(value.dtype)
    if np.lib.format.descr_to_dtype(descr) != value.dtype:
        return None
    return _jsonable(descr), tuple(array.shape), order, tensor_over(plain)


def tensor_over(array: Array) -> torch.Tensor:
    """A tensor over a C-ordered array's memory, as NumPy's dtype where torch has it, else as bytes. Keeps it alive."""
    name = array.dtype.name
    dtype = BY_NAME.get(name) if array.dtype.isnative and array.dtype.kind in "biufc" else None
    if array.nbytes == 0:
        shape = array.shape if dtype is not None else (0,)
        return torch.empty(shape, dtype=dtype or torch.uint8, device="cpu")
    memory = view(array.__array_interface__["data"][0], array.nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype or torch.uint8)
    tensor = tensor.view(array.shape) if dtype is not None else tensor
    tensor._owner = array  # type: ignore[attr-defined]
    return tensor


def rebuild(path: str, tensor: torch.Tensor, dtype: Any, shape: tuple[int, ...], order: str, scalar: bool) -> Any:
    """The array (or scalar) whose bytes are in a contiguous CPU tensor, over the same memory."""
    made = numpy_dtype(path, dtype)
    nbytes = tensor.numel() * tensor.element_size()
    expected = math.prod(shape) * made.itemsize
    if any(size < 0 for size in shape) or nbytes != expected or (scalar and shape):
        raise CorruptSnapshotError(f"{path}: an array {made}{list(shape)} does not take {nbytes} bytes")
    try:
        if expected:
            array: Array = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(made).reshape(shape)
        else:  # over no memory, whatever the shape: elements of some dtypes take no bytes
            array = np.ndarray(shape, made, b"" if made.itemsize == 0 else None)
    except Exception as error:  # NumPy raises many kinds at what it cannot make
        raise CorruptSnapshotError(f"{path}: an array {made}{list(shape)} cannot be made: {error}") from error
    if order == "F":
        array = np.asfortranarray(array)
    return array[()] if scalar else array


def numpy_dtype(path: str, descr: Any) -> np.dtype[Any]:
    """A dtype from NumPy's text for it."""
    try:
        made = np.lib.format.descr_to_dtype(_tuples(descr))
    except Exception as error:  # what it reads such texts with raises many kinds at nonsense
        raise CorruptSnapshotError(f"{path}: {str(descr)[:80]!r} is no dtype of NumPy") from error
    if made.hasobject:
        raise CorruptSnapshotError(f"{path}: an array of Python objects cannot be read from bytes")
    return made


def _jsonable(descr: Any) -> Any:
    return [_jsonable(item) for item in descr] if isinstance(descr, (list, tuple)) else descr


def _tuples(descr: Any) -> Any:
    """JSON has no tuples. A dtype is a text, or a list of fields; a field is (name, dtype) or (name, dtype, shape)."""
    if not isinstance(descr, list):
        return descr
    return [(field[0], _tuples(field[1]), *map(tuple, field[2:])) for field in descr]
