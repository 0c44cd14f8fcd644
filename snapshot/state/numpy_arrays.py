"""NumPy arrays and scalars as tensors over the same memory, and back."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.tensors.addresses import view_memory
from snapshot.tensors.dtypes import BY_NAME

Array = np.ndarray[Any, Any]


_UTF_32: str = "utf-32-le" if sys.byteorder == "little" else "utf-32-be"
_UTF_32_SWAPPED = "utf-32-be" if sys.byteorder == "little" else "utf-32-le"
RECORD = "record"
"""Marks a dtype whose scalars are `np.record`, and not `np.void`: [RECORD, NumPy's text for it]."""


def describe_array(value: Array | np.generic) -> tuple[Any, tuple[int, ...], str, torch.Tensor] | None:
    """Return (NumPy's text for the dtype, shape, order, tensor over the bytes); None if a pickle is needed."""
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        return None
    dtype = value.dtype
    descr = _describe_dtype(dtype)
    if descr is None or (isinstance(value, np.generic) and type(value) is not dtype.type):
        return None
    if type(value) in _TEXTS:  # NumPy's arrays have no empty texts, and cut those that end in zeros
        raw = np.frombuffer(_TEXTS[type(value)](value), np.uint8)
        return descr, (), "C", wrap_array(raw)
    array: Array = np.asarray(value)
    order = "F" if array.ndim > 1 and array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    plain = np.ascontiguousarray(array).reshape(array.shape)
    return descr, tuple(array.shape), order, wrap_array(plain)


def _describe_dtype(dtype: np.dtype[Any]) -> Any:
    """Return NumPy's text for a dtype in JSON; None if it is incomplete."""
    if dtype.hasobject or dtype.metadata:
        return None
    try:
        descr = _to_json(np.lib.format.dtype_to_descr(dtype))
        again = np.lib.format.descr_to_dtype(_to_tuples(descr))
    except (TypeError, ValueError):
        return None
    if again != dtype:
        return None
    return [RECORD, descr] if dtype.type is np.record else descr


_TEXTS: dict[type, Callable[[Any], bytes]] = {
    np.bytes_: bytes,
    np.str_: lambda value: str.encode(value, _UTF_32, "surrogatepass"),  # `str(value)` cuts zeros off
}


def wrap_array(array: Array) -> torch.Tensor:
    """Return a tensor over a C-ordered array's memory, which it keeps alive.

    Its dtype is the array's if torch has it; otherwise the tensor holds bytes.
    """
    name = array.dtype.name
    dtype = BY_NAME.get(name) if array.dtype.isnative and array.dtype.kind in "biufc" else None
    if array.nbytes == 0:
        shape = array.shape if dtype is not None else (0,)
        return torch.empty(shape, dtype=dtype or torch.uint8, device="cpu")
    memory = view_memory(array.__array_interface__["data"][0], array.nbytes)
    tensor = torch.frombuffer(memory, dtype=dtype or torch.uint8)
    tensor = tensor.view(array.shape) if dtype is not None else tensor
    tensor._owner = array  # type: ignore[attr-defined]
    return tensor


def rebuild_array(
    path: str, tensor: torch.Tensor, dtype: Any, shape: tuple[int, ...], *, order: str, scalar: bool
) -> Any:
    """Return the array (or scalar) whose bytes are in a contiguous CPU tensor, over the same memory."""
    made = read_dtype(path, dtype)
    nbytes = tensor.numel() * tensor.element_size()
    if scalar and not shape and made.type in _TEXTS:
        return _rebuild_text(path, tensor, made, nbytes)
    expected = math.prod(shape) * made.itemsize
    if any(size < 0 for size in shape) or (scalar and shape):
        raise CorruptSnapshotError(f"{path}: invalid shape {list(shape)} of {'a scalar' if scalar else 'an array'}")
    if nbytes != expected:
        raise CorruptSnapshotError(f"{path}: an array {made}{list(shape)} must have {expected} bytes, got {nbytes}")
    try:
        if expected:
            array: Array = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(made).reshape(shape)
        else:  # without memory, for any shape: elements of some dtypes take no bytes
            array = np.ndarray(shape, made, b"" if made.itemsize == 0 else None)
    except Exception as error:  # NumPy raises many kinds of exceptions
        raise CorruptSnapshotError(f"{path}: cannot create an array {made}{list(shape)}: {error}") from error
    if order == "F":
        array = np.asfortranarray(array)
    return array[()] if scalar else array


def _rebuild_text(path: str, tensor: torch.Tensor, dtype: np.dtype[Any], nbytes: int) -> np.str_ | np.bytes_:
    """Return the text of exactly its number of characters. Earlier versions stored an empty one as a zero."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if not dtype.itemsize and nbytes == np.dtype(f"{dtype.kind}1").itemsize and not any(raw):
        raw = b""
    if len(raw) != dtype.itemsize:
        raise CorruptSnapshotError(f"{path}: a text {dtype} must have {dtype.itemsize} bytes, got {nbytes}")
    if dtype.kind == "S":
        return np.bytes_(raw)
    try:
        return np.str_(raw.decode(_UTF_32 if dtype.isnative else _UTF_32_SWAPPED, "surrogatepass"))
    except UnicodeDecodeError as error:
        raise CorruptSnapshotError(f"{path}: is not a text: {error}") from error


def read_dtype(path: str, descr: Any) -> np.dtype[Any]:
    """Return a dtype from NumPy's text for it."""
    record = isinstance(descr, list) and len(descr) == 2 and descr[0] == RECORD
    try:
        made = np.lib.format.descr_to_dtype(_to_tuples(descr[1] if record else descr))
        made = np.dtype((np.record, made)) if record else made
    except Exception as error:  # what it reads such texts with raises many kinds at nonsense
        raise CorruptSnapshotError(f"{path}: {str(descr)[:80]!r} is not a NumPy dtype") from error
    if made.hasobject:
        raise CorruptSnapshotError(f"{path}: an array of Python objects cannot be read from bytes")
    return made


def _to_json(descr: Any) -> Any:
    if isinstance(descr, (list, tuple)):
        return [_to_json(item) for item in descr]
    if type(descr) not in (str, int):
        raise TypeError(f"{descr!r} must be a text or a number")  # the title of a field may be anything
    return descr


def _to_tuples(descr: Any) -> Any:
    """Return a dtype's JSON text with the tuples that NumPy expects.

    A dtype is a text or a list of fields. A field is (name, dtype) or (name, dtype, shape), and its name may be
    (title, name).
    """
    if not isinstance(descr, list):
        return descr
    return [
        (tuple(name) if isinstance(name, list) else name, _to_tuples(dtype), *map(tuple, shape))
        for name, dtype, *shape in descr
    ]
