"""Statistics of tensors: counts of NaN, infinity and zero, and the norm and range of what is finite."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator

import msgspec
import torch

from snapshot.decoding import decode_json

PIECE = 1 << 15
"""Elements that are examined at once on the host: they stay in a CPU cache, and one thread examines them."""
LONG_PIECE = 1 << 26
"""Elements that are examined at once on an accelerator."""


class TensorStatistics(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Statistics of the elements of a tensor. Of complex numbers, real and imaginary parts count separately."""

    count: int
    """The number of elements."""
    nan: int
    infinite: int
    zero: int
    norm: float
    """The Euclidean norm of the finite elements."""
    min: float | None
    """The least finite element; None if there is none."""
    max: float | None

    @property
    def bad(self) -> int:
        """The number of elements that are NaN or infinite."""
        return self.nan + self.infinite


ByPath = dict[str, list[TensorStatistics]]
"""The statistics of the parts of tensors, by the tensor's path."""


def encode_statistics(found: ByPath) -> bytes:
    """Return the content of a file with the statistics of a rank's tensors."""
    return msgspec.json.encode(found)


def decode_statistics(data: bytes, what: str) -> ByPath:
    """Return the statistics in a file. `what`: the start of the message of the error if the file is malformed."""
    found: ByPath = decode_json(data, ByPath, what)
    return found


def combine_statistics(parts: Iterable[TensorStatistics]) -> TensorStatistics:
    """Return the statistics of a tensor from those of its parts."""
    count = nan = infinite = zero = 0
    norm, least, most = 0.0, math.inf, -math.inf
    for each in parts:
        count, nan, infinite, zero = count + each.count, nan + each.nan, infinite + each.infinite, zero + each.zero
        norm = math.hypot(norm, each.norm)
        if each.min is not None and each.max is not None:
            least, most = min(least, each.min), max(most, each.max)
    return TensorStatistics(count, nan, infinite, zero, norm, *((None, None) if least > most else (least, most)))


def measure_tensor(tensor: torch.Tensor) -> TensorStatistics | None:
    """Return the statistics of a tensor; None if torch cannot convert its elements to real numbers."""
    tensor = tensor.detach()
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    host = tensor.device.type != "cuda"
    try:
        pieces = [_measure(piece.cpu()) if host else _measure_there(piece) for piece in _pieces(tensor, host=host)]
        return combine_statistics(each if isinstance(each, TensorStatistics) else _decode(each) for each in pieces)
    except (RuntimeError, TypeError, NotImplementedError):  # a dtype without conversions: torch raises any of them
        return None


def _pieces(tensor: torch.Tensor, *, host: bool) -> Iterator[torch.Tensor]:
    """Yield a tensor in short pieces. One that is not contiguous is cut by rows first."""
    most = PIECE if host else LONG_PIECE
    if tensor.numel() <= most or tensor.is_contiguous():
        flat = tensor.reshape(-1)
        yield from (flat[begin : begin + most] for begin in range(0, flat.numel(), most))
    else:
        for row in tensor.unbind(0):
            yield from _pieces(row, host=host)


def _measure(piece: torch.Tensor) -> TensorStatistics:
    exact = piece.dtype in (torch.float64, torch.int64, torch.int32, torch.uint64, torch.uint32)
    values = piece.to(torch.float64 if exact else torch.float32)
    least, most = (float(each) for each in torch.aminmax(values))
    norm = float(torch.linalg.vector_norm(values))  # `dot` would wake other threads
    if least == most == 0.0:
        return TensorStatistics(values.numel(), 0, 0, values.numel(), 0.0, 0.0, 0.0)
    if not 1e-15 < norm < 1e18:  # also NaN
        return _decode(_measure_there(values))
    zero = values.numel() - int(torch.count_nonzero(values))
    return TensorStatistics(values.numel(), 0, 0, zero, norm, least, most)


def _measure_there(piece: torch.Tensor) -> torch.Tensor:
    """Return the statistics of a piece as numbers in the memory of its device."""
    values = piece.to(torch.float64)
    finite = torch.isfinite(values)
    held = torch.where(finite, values, 0.0)
    scale = held.abs().amax().clamp(min=1e-300)  # squares of very large numbers are infinite
    numbers = [
        values.isnan().sum(),
        values.isinf().sum(),
        (values == 0).sum(),
        (held / scale).norm().mul(scale).clamp(max=sys.float_info.max),
        torch.where(finite, values, math.inf).amin(),
        torch.where(finite, values, -math.inf).amax(),
    ]
    return torch.stack([values.new_tensor(values.numel()), *(each.to(torch.float64) for each in numbers)])


def _decode(numbers: torch.Tensor) -> TensorStatistics:
    count, nan, infinite, zero, norm, least, most = numbers.tolist()
    extremes = (least, most) if least <= most else (None, None)
    return TensorStatistics(int(count), int(nan), int(infinite), int(zero), norm, *extremes)
