"""States to be saved by others, and what it means that one is equal to another."""

import collections
import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Bytes that differ, as a tensor; of a bool, ones that it can have."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.arange(count, dtype=torch.int64).mul(7).remainder(2 if dtype is torch.bool else 120).to(torch.uint8)
    return raw.view(dtype).view(shape)


def state() -> dict[str, Any]:
    """Everything that a checkpoint of somebody's may hold, and torch's careful reader takes."""
    base = torch.arange(600 * 700, dtype=torch.float32).view(600, 700)
    tied = torch.randn(40, 3)
    return {
        "model": collections.OrderedDict((str(dtype), of_dtype(dtype, 3, 5)) for dtype in DTYPES),
        "views": {
            "transposed": base.t(),
            "rows": base[10:500],
            "columns": base[:, 3:200],
            "steps": base[::3, ::2],
            "turned": base[5:90, 7:300].t(),
            "one": base[3, 4],
            "expanded": torch.tensor([1.5, 2.5]).view(2, 1).expand(2, 6),
            "windows": torch.arange(10.0).as_strided((8, 3), (1, 1)),
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "small": torch.arange(12.0).view(3, 4).t()[1:3],
        },
        "tied": {"a": tied, "b": tied},
        "empty": {"tensor": torch.empty(0), "wide": torch.empty(3, 0, 2), "dict": {}, "list": [], "tuple": ()},
        "scalar": torch.tensor(2.5),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "frozen": torch.nn.Parameter(torch.randn(2), requires_grad=False),
        "long": torch.randn(300_000),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.99)}],
        },
        "values": [1, -(1 << 70), True, None, 2.5, float("nan"), "é\ud800", b"\0\xff", 1 + 2j],
        "torch": [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
        1: "an int for a key",
    }


def with_numpy() -> dict[str, Any]:
    """What only NumPy has: in every state of its random numbers."""
    return {
        "rng": ("MT19937", np.random.RandomState(3).get_state()[1], 624, 0, 0.0),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "scalar": np.float32(1.5),
        "empty": np.empty((0, 4), np.int16),
        "texts": np.array(["ab", "é"]),
    }


def repacked(path: Path, target: Path, method: int, *, swap: bool = False) -> None:
    """An archive of torch's with its members compressed, or with all elements (of four bytes) in the other order."""
    made = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w", method) as new:
        for member in old.infolist():
            data = old.read(member)
            if swap and "/data/" in member.filename:
                data = np.frombuffer(data, "<u4").astype(">u4").tobytes()
            if swap and member.filename.endswith("byteorder"):
                data = b"big"
            new.writestr(member.filename, data)
    target.write_bytes(made.getvalue())
