"""Arithmetic of a merge: tensors of several checkpoints become one, element by element, in order of the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_STEP = 32 << 10
"""Elements that are mixed at once: they stay in a core's cache, and torch starts no threads for them."""


@dataclass(frozen=True)
class Mix:
    """A recurrence: the sum is multiplied by `keep`, and then the next tensor times its factor is added.

    Every product, sum and quotient is rounded on its own, so the result does not depend on how tensors are split.
    """

    factors: tuple[float, ...]
    keep: float = 1.0
    divisor: float = 1.0

    @staticmethod
    def average(count: int) -> Mix:
        """Return the mean of `count` tensors: their sum, divided by their number."""
        return Mix((1.0,) * count, divisor=float(count))

    @staticmethod
    def weighted(weights: Sequence[float], count: int) -> Mix:
        """Return the weighted sum. Raise ValueError unless there is a finite weight for each tensor."""
        given: list[Any] = list(weights) if isinstance(weights, (list, tuple)) else [weights]
        if len(given) != count or not all(_is_finite(each) for each in given):
            raise ValueError(f"weights must be {count} finite numbers, one for each source, got {weights!r}")
        return Mix(tuple(map(float, given)))

    @staticmethod
    def moving_average(decay: float, count: int) -> Mix:
        """Return the exponential moving average that begins with the first tensor."""
        if not (_is_finite(decay) and 0 <= decay <= 1):
            raise ValueError(f"ema must be a decay between 0 and 1, got {decay!r}")
        return Mix((1.0,) + (1.0 - decay,) * (count - 1), keep=float(decay))

    def apply(self, sources: Sequence[torch.Tensor], wide: torch.dtype, target: torch.Tensor) -> None:
        """Mix flat tensors in the dtype `wide`, and round once to the target's dtype."""
        total, term = torch.empty(2, min(_STEP, max(1, target.numel())), dtype=wide)
        for begin in range(0, target.numel(), _STEP):
            end = min(begin + _STEP, target.numel())
            held, next_term = total[: end - begin], term[: end - begin]
            held.copy_(sources[0][begin:end])
            if self.factors[0] != 1:
                held.mul_(self.factors[0])
            for source, factor in zip(sources[1:], self.factors[1:], strict=True):
                if self.keep != 1:
                    held.mul_(self.keep)
                next_term.copy_(source[begin:end])
                if factor != 1:
                    next_term.mul_(factor)
                held.add_(next_term)
            if self.divisor != 1:
                held.div_(self.divisor)
            target[begin:end].copy_(held)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def find_wide_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Return the dtype to add tensors in; None if they cannot be averaged.

    >>> find_wide_dtype([torch.bfloat16, torch.float32]), find_wide_dtype([torch.float32, torch.float64])
    (torch.float32, torch.float64)
    """
    if all(each.is_complex for each in dtypes):
        return torch.complex128 if torch.complex128 in dtypes else torch.complex64
    if all(each.is_floating_point for each in dtypes) and not any("float4" in str(each) for each in dtypes):
        return torch.float64 if torch.float64 in dtypes else torch.float32
    return None
