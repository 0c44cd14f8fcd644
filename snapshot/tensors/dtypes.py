"""Names of dtypes, in this library's manifest and in safetensors headers."""

from __future__ import annotations

import torch

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
