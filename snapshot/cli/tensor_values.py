"""Values of tensors on the screen, with their statistics. This needs torch, unlike the rest of `snapshot show`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._tensor_str import PRINT_OPTS

from snapshot.cli.screen import bar, repr_text, width, wrapped
from snapshot.progress import Progress
from snapshot.snapshot import Snapshot
from snapshot.tensors.geometry import split_shape, whole_box
from snapshot.tensors.memory import ITEMSIZE

# Statistics of a tensor that is read part by part: range, mean, deviation, non-finite values, histogram.

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


AT_ONCE = 32 << 20
"""Bytes of a tensor that are read at once."""
SHOWN = 64
"""Number of values shown if no box was requested."""
NONE = "  no statistics for this dtype"
LONGEST = 10_000
"""Maximum length of a text in characters."""
Box = list[slice | int]


def show_tensor(
    snapshot: Snapshot, path: str, entry: Any, told: dict[str, Any], arguments: argparse.Namespace
) -> list[str]:
    """Return the lines for a tensor, or for a value made of tensors, and add what they say to `told`."""
    if entry.is_tensor:
        shape = tuple(entry.shape)
        if not shape and arguments.box:
            raise ValueError(f"{path}: a tensor without dimensions has no box")
        box = _within(path, arguments.box, shape) if arguments.box is not None else _corner(shape)
        try:
            values = snapshot.read_object(path, box=box if shape else None)
        except IndexError as error:
            raise ValueError(str(error)) from error
        lines = []
        if not arguments.no_stats:
            told["statistics"] = None
            lines = _statistics(snapshot, path, entry, told) if countable(values.dtype) else [NONE]
        as_bits = ""
        if not _printable(values.dtype):
            values = values.view(torch.uint16 if values.itemsize == 2 else torch.uint8)
            as_bits = f", as {str(values.dtype).removeprefix('torch.')}"
        text = f"values{_box_text(box) if shape else ''}{as_bits}:\n{_values(values)}"
        told["values"] = values.tolist() if arguments.box is not None else None
        return [*lines, text]
    if arguments.box is not None:
        raise ValueError(f"{path}: only a plain tensor has a box")
    value = snapshot.read_object(path)
    dense = _plain(value)
    lines = []
    if dense is not None and not arguments.no_stats:
        found = statistics(lambda: iter([dense]))
        told["statistics"] = found.as_json()
        lines = found.lines()
    return [*lines, f"values:\n{_fitted(value)}"]


def _statistics(snapshot: Snapshot, path: str, entry: Any, told: dict[str, Any]) -> list[str]:
    """Read the tensor part by part, and only once if there is one part."""
    size = ITEMSIZE.get(entry.dtype, 1)
    shape = tuple(entry.shape)
    boxes = split_shape(shape, max(1, AT_ONCE // size)) if math.prod(shape) else [whole_box(shape)]
    kept: list[torch.Tensor] = []
    total = math.prod(shape) * size * (1 if len(boxes) == 1 else 2)
    with bar("show") as shown:
        done = 0

        def parts() -> Any:
            nonlocal done
            for box in boxes:
                part = kept[0] if kept else snapshot.read_object(path, box=box.slices() if box.sizes else None)
                if len(boxes) == 1 and not kept:
                    kept.append(part)
                done += part.numel() * size
                shown(Progress(min(done, total), total))
                yield part

        found: ValueStatistics = statistics(parts)
    told["statistics"] = found.as_json()
    return found.lines()


def _plain(value: Any) -> torch.Tensor | None:
    """Return the values of a tensor that is not plain, or of an array; None if they are not numbers."""
    if not isinstance(value, torch.Tensor):
        try:
            return torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):  # texts, dates, structures
            return None
    if value.is_quantized:
        try:
            return value.dequantize()
        except RuntimeError:  # the quantizer is not supported by this torch
            return None
    if value.layout == torch.strided:
        return value
    return value._values() if value.layout == torch.sparse_coo else value.values()


def _printable(dtype: torch.dtype) -> bool:
    """Return True if torch can print elements of a dtype, and convert them to a list."""
    try:
        held = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
        repr(held)
        held.tolist()
    except RuntimeError:
        return False
    return True


def _values(values: Any) -> str:
    text = _fitted(values)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _fitted(values: Any) -> str:
    """Return a value's repr in lines that fit the terminal. Torch's lines may exceed the width that it is given."""
    most, before = width(), PRINT_OPTS.linewidth
    text = repr_text(values)
    try:
        for share in (8, 6, 4, 2, 1):
            if most is None or max(map(len, text.splitlines()), default=0) <= most:
                break
            PRINT_OPTS.linewidth = most * share // 8
            text = repr_text(values)
    finally:
        PRINT_OPTS.linewidth = before
    return text


def _within(path: str, box: Box, shape: tuple[int, ...]) -> Box:
    """Return the part of a box within the tensor, with offsets from 0. Raise ValueError if it is empty."""
    made: Box = []
    for part, size in zip(box, shape, strict=False):
        if isinstance(part, int):
            made.append(part)
            continue
        low, high, _ = part.indices(size)
        if low >= high and size:
            raise ValueError(f"{path}: the box {_box_text(box)} is empty within shape {list(shape)}")
        made.append(slice(low, high))
    return [*made, *box[len(shape) :]]  # surplus dimensions are refused by the read


def _corner(shape: tuple[int, ...]) -> Box:
    """Return the box of the first values: some of the last two dimensions, one of each other."""
    made: Box = []
    for axis, size in enumerate(shape):
        behind = len(shape) - axis
        most = 8 if behind <= 2 else 1
        made.append(slice(0, min(size, SHOWN if len(shape) == 1 else most)))
    return made


def _box_text(box: Box) -> str:
    def text(each: slice | int) -> str:
        if isinstance(each, int):
            return str(each)
        return f"{'' if each.start is None else each.start}:{'' if each.stop is None else each.stop}"

    return f"[{', '.join(map(text, box))}]"
