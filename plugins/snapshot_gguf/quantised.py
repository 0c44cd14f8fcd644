"""Types of GGUF whose elements are in blocks. The `gguf` package, an extra, has the arithmetic of all but Q8_0."""

from __future__ import annotations

import importlib
import threading
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch

from snapshot.io.system import PerProcess

Q8_0 = 8


class BlockKind(NamedTuple):
    """A type of tensors."""

    name: str
    elements: int
    """Elements of a block."""
    nbytes: int
    """Bytes of a block."""


KINDS = {
    number: BlockKind(*each)
    for number, each in {
        2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), Q8_0: ("Q8_0", 32, 34),
        9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
        13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
        17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
        21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
        34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
        41: ("Q1_0", 128, 18),
    }.items()
}  # fmt: skip
"""The types by their numbers, those for results of a computation and the newest ones included."""
UNREAD = (9, 15)
"""Types of results of a computation, which no file has."""
_loading = PerProcess(threading.Lock)
"""Held while a type's arithmetic is looked up: its tables are made by the first call."""


def is_installed() -> bool:
    """Return True if the `gguf` package can be imported."""
    return find_spec("gguf") is not None


@cache
def is_read(number: int) -> bool:
    """Return True if the elements of a type can be computed. The type's own arithmetic tells, once in a process."""
    if number == Q8_0:
        return True
    return number in KINDS and number not in UNREAD and is_installed() and _arithmetic(number) is not None


def _arithmetic(number: int) -> Any:
    """Return the class of the `gguf` package for a type, None if this version of it has none."""
    with _loading.get():
        quants: Any = importlib.import_module("gguf.quants")
        try:
            kind = quants.GGMLQuantizationType(number)
            quants.dequantize(np.zeros((1, KINDS[number].nbytes), np.uint8), kind)
        except (ValueError, NotImplementedError, KeyError):
            return None
        return kind


def compute_elements(number: int, blocks: torch.Tensor) -> torch.Tensor:
    """Return the float32 elements of blocks, given as rows of bytes, with the bits that the package computes."""
    quants: Any = importlib.import_module("gguf.quants")
    with np.errstate(all="ignore"):  # a factor may be infinite or NaN
        found = quants.dequantize(blocks.numpy(), quants.GGMLQuantizationType(number))
    return torch.from_numpy(np.ascontiguousarray(found, np.float32))
