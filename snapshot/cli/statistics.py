"""Statistics of a tensor that is read part by part: range, mean, deviation, non-finite values, histogram."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from snapshot.cli.screen import width, wrapped

BINS = 32
BARS = " ▁▂▃▄▅▆▇█"
PLAIN_BARS = " .:-=+*#@"
_SHORT = {"least": "min", "most": "max", "deviation": "std"}


@dataclass(frozen=True, slots=True)
class ValueStatistics:
    """Statistics of a tensor's values; `least` and the later fields count finite values only."""

    count: int
    nan: int
    infinite: int
    zero: int
    least: float | None
    most: float | None
    mean: float | None
    deviation: float | None
    """Standard deviation of the whole population."""
    histogram: tuple[int, ...]
    """Number of values in each of equal intervals between the least and the most."""
    magnitude: bool = False
    """True for complex numbers, whose absolute values are counted."""

    def as_json(self) -> dict[str, Any]:
        return {_SHORT.get(name, name): value for name, value in asdict(self).items()}

    def lines(self) -> list[str]:
        """Return lines for people."""
        of = " of absolute values" if self.magnitude else ""
        made = [f"  {'count':<10} {self.count:,}, {self.zero:,} zero, {self.nan:,} NaN, {self.infinite:,} infinite"]
        if self.least is not None and self.most is not None:
            spread = f"mean {self.mean:.6g}, std {self.deviation:.6g}{of}"
            made.append(f"  {'range':<10} {self.least:.6g} to {self.most:.6g}, {spread}")
            histogram, around = self.histogram, f"  {'histogram':<10} {self.least:.3g} || {self.most:.3g}"
            while len(around) + len(histogram) > (width() or math.inf) and len(histogram) > 4:
                histogram = tuple(map(sum, zip(histogram[::2], histogram[1::2], strict=True)))
            made.append(around.replace("||", f"|{_bars(histogram)}|"))
        return [wrapped(line, " " * 13) for line in made]


def _bars(histogram: tuple[int, ...]) -> str:
    try:
        BARS.encode(sys.stdout.encoding or "ascii")
        bars = BARS
    except UnicodeEncodeError:
        bars = PLAIN_BARS
    highest = max(histogram, default=0) or 1
    return "".join(bars[0 if not each else max(1, round(each / highest * (len(bars) - 1)))] for each in histogram)


def statistics(parts: Callable[[], Iterator[torch.Tensor]]) -> ValueStatistics:
    """Return the statistics of a tensor. `parts` is called twice: the histogram needs the range first."""
    count = nan = infinite = zero = finite = 0
    least, most, mean, squares = math.inf, -math.inf, 0.0, 0.0
    magnitude = False
    for part in parts():
        count += part.numel()
        magnitude = magnitude or part.is_complex()
        values = widened(part)
        zero += int((values == 0).sum())
        nan += int(values.isnan().sum())
        good = values[values.isfinite()]
        infinite += int(values.isinf().sum())
        if not good.numel():
            continue
        least, most = min(least, float(good.min())), max(most, float(good.max()))
        number, middle = good.numel(), float(good.mean())
        away = middle - mean  # Chan's formula keeps precision if the mean is far from 0
        squares += float(((good - middle) ** 2).sum()) + away * away * finite * number / (finite + number)
        mean += away * number / (finite + number)
        finite += number
    if not finite:
        return ValueStatistics(count, nan, infinite, zero, None, None, None, None, (), magnitude)
    bins = torch.zeros(BINS, dtype=torch.int64)
    for part in parts():
        values = widened(part)
        good = values[values.isfinite()]
        bins += _counts(good, least, most)
    return ValueStatistics(
        count, nan, infinite, zero, least, most, mean, math.sqrt(squares / finite), tuple(bins.tolist()), magnitude
    )


def _counts(values: torch.Tensor, least: float, most: float) -> torch.Tensor:
    if least == most:
        made = torch.zeros(BINS, dtype=torch.int64)
        made[BINS // 2] = values.numel()
        return made
    half = most / 2 - least / 2  # the full range may overflow a float
    places = ((values / 2 - least / 2) / half * BINS).to(torch.int64).clamp_(0, BINS - 1)
    return torch.bincount(places, minlength=BINS)


def countable(dtype: torch.dtype) -> bool:
    """Return True if torch can convert elements of a dtype to float64, so that there are statistics."""
    try:
        widened(torch.empty(1, dtype=dtype))
    except RuntimeError:
        return False
    return True


def widened(part: torch.Tensor) -> torch.Tensor:
    """Return the values in float64, flattened; absolute values of complex numbers."""
    part = part.detach().reshape(-1)
    if part.is_complex():
        return torch.view_as_complex(torch.view_as_real(part.resolve_conj()).to(torch.float64)).abs()
    if part.dtype not in _DIRECT:
        part = part.to(torch.float32)  # torch converts these short dtypes only this way
    return part.to(torch.float64)


_DIRECT = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint32,
    torch.uint64,
}
