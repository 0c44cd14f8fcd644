"""A state with all that torchsnapshot saves."""

import collections

import torch

from tests.helpers.foreign_states import DTYPES, of_dtype

KNOWN = [
    dtype for dtype in DTYPES if (dtype.itemsize > 1 and "uint" not in str(dtype)) or dtype in (torch.int8, torch.uint8)
] + [torch.bool]
"""What torchsnapshot can hold, of those."""


def everything():
    """An entry of each type, and keys that are hard to write down."""
    torch.manual_seed(0)
    return {
        "dtypes": {str(dtype): of_dtype(dtype, 4, 4) for dtype in KNOWN},
        "ordered": collections.OrderedDict(b=1, a=torch.ones(2)),
        "list": [1, [2, torch.zeros(2)], {"x": 3}, *range(12)],
        "empty": {"dict": {}, "list": [], "nested": [[], {}]},
        "keys": {1: "one", "a/b": "slash", "50%": "percent", "%2F": "escape", "é ü": "u", 2: {"x": torch.ones(1)}},
        "ints": [1, -5, 1 << 80],
        "floats": [1.5, float("inf"), -0.0, 1e-310],
        "bytes": b"\0\xff",
        "flags": [True, False],
        "text": "é\nx",
        "tuple": (1, (2.5, "x")),
        "none": None,
        "set": {1, 2},
        "big": torch.arange(5000.0).view(100, 50),
        "scalar": torch.tensor(2.0),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "view": torch.arange(100.0)[10:20],
    }
