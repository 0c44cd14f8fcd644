"""Main parameters of a directory of Megatron-core, compared with the weights beside them.

An optimizer's main parameters are float32, and the weights are those in the dtype of the model. So each weight is its
main parameter, rounded. Megatron-core before 0.20 breaks that in `fully_reshardable` directories, if a bucket other
than the last one has padding at its end: main parameters and moments are shifted, some of their elements are lost, and
nothing says so. The weights are right.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.events import log
from snapshot.io.aio import in_thread
from snapshot.loading.open import Opened
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest.entries import AnyTensor, TensorEntry
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.geometry import Box, Shape, boxes_of_range, intersect, is_inside
from snapshot.tensors.memory import BY_NAME
from snapshot.text import counted

SAMPLED = 16
"""Elements of each layer and expert that are compared, beside the first and the last one."""
ROUNDED = ("bfloat16", "float16", "float32")
"""Dtypes of weights that main parameters are rounded to. Others are quantised, and prove nothing."""
AT_ONCE = 16 << 20
"""Bytes that are compared at once."""
MOST_SLICES = 1 << 16
"""Layers and experts in all pieces of a tensor that are told apart if its pieces do not tell them apart."""
_STACKED = re.compile(r"(?:^|\.)layers\.(?!\d)")
CAUSE = (
    "megatron-core before 0.20 writes such fully_reshardable directories if a bucket has padding at its end, and the "
    "moments are as wrong; the weights are right: leave out optimizer.state*, or use another directory"
)


class Pair(NamedTuple):
    """A main parameter and its weight, by the key of the weight."""

    key: str
    main: AnyTensor
    weight: AnyTensor


def are_rounded(main: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return True for each weight that is its main parameter, rounded to the dtype of the weight.

    Halfway between two values, both are right: optimizers that store what a rounding took away go away from zero.

    >>> are_rounded(torch.tensor([1.0, 1 + 2**-8, 1.1]), torch.tensor([1.0, 1 + 2**-7, 1.0], dtype=torch.bfloat16))
    tensor([ True,  True, False])
    """
    rounded = main.to(weights.dtype)
    equal = (rounded == weights) | (rounded.isnan() & weights.isnan())
    if weights.dtype != main.dtype:
        equal |= (main - weights.to(main.dtype)).abs() == (main - rounded.to(main.dtype)).abs()
    return equal


class MainParameters:
    """The condition of what an optimizer stores: its main parameters are those of the weights beside them."""

    def __init__(self, pairs: Sequence[Pair], without: Sequence[str], files: Mapping[str, Any], cause: str) -> None:
        """`without`: keys of main parameters that cannot be compared. `cause`: what a message says of a difference."""
        self._pairs = pairs
        self._without = without
        self._files = files
        self._cause = cause
        self._sampled: list[str] | None = None

    async def find_faults(self, opened: Opened, *, whole: bool) -> Sequence[str]:
        """Return why the optimizer's state must not be used; nothing if it may be.

        Of each layer and expert, some elements are compared; with `whole`, all of them.
        """
        if whole:
            return self._describe(*await self._compare(opened, self._compare_all), "")
        if self._sampled is None:
            read = partial(self._sample, opened)
            shared = await opened.session.read_once_on_host("main parameters of the optimizer", read)
            self._sampled = [line for line in shared.decode().split("\n") if line]
        return self._sampled

    async def agree(self, opened: Opened) -> bool:
        """Return True if the elements that are compared round to the weights, and prove anything."""
        differing, proven = await self._compare(opened, self._compare_samples)
        return not differing and proven > 0

    async def _sample(self, opened: Opened) -> bytes:
        differing, proven = await self._compare(opened, self._compare_samples)
        if self._without or not proven:
            lacks = f"the directory has no weights like those of {_name(self._without)}"
            log.warning(
                "%s: optimizer.state.*: cannot be checked: %s; directories that megatron-core before 0.20 wrote with "
                "fully_reshardable may have wrong main parameters and moments",
                opened.url,
                lacks if self._without else "all weights are constant",
            )
        return "\n".join(self._describe(differing, proven, ", by some of their elements")).encode(
            errors="backslashreplace"
        )

    async def _compare(self, opened: Opened, compare: Any) -> tuple[dict[str, list[str]], int]:
        """Return the slices that differ, by key, and the number of slices that agree and are not constant."""
        differing: dict[str, list[str]] = defaultdict(list)
        proven = 0
        async for key, where, agrees, is_constant in compare(opened):
            if not agrees:
                differing[key].append(where)
            elif not is_constant:
                proven += 1
        return differing, proven

    def _describe(self, differing: Mapping[str, Sequence[str]], proven: int, how: str) -> list[str]:
        if not differing:
            return []
        count = sum(map(len, differing.values()))
        every = counted(len(self._pairs), "main parameter")
        shown = [f"{key}{each}" for key, found in differing.items() for each in found]
        lines = [
            f"optimizer.state.param.{key}: does not round to its weight{' in ' if any(found) else ''}{_name(found, 8)}"
            for key, found in differing.items()
        ]
        return [
            f"optimizer.state.*: must not be used, since {len(differing)} of {every} "
            f"({count} of {count + proven} layers that are not constant) do not round to the weights beside them{how}: "
            f"{_name(shown)}; {self._cause}",
            *(lines if not how else ()),
        ]

    async def _compare_samples(self, opened: Opened) -> Any:
        batch: list[_Slice] = []
        nbytes = 0
        for each in self._slices():
            batch.append(each)
            nbytes += each.nbytes
            if nbytes >= AT_ONCE:
                for found in await self._read_batch(opened, batch):
                    yield found
                batch, nbytes = [], 0
        for found in await self._read_batch(opened, batch):
            yield found

    def _slices(self) -> Iterator[_Slice]:
        for pair in self._pairs:
            main, weight = group_by_slice(pair)
            for index, pieces in main.items():
                yield _Slice(pair, index, pieces, weight.get(index, []))

    async def _read_batch(self, opened: Opened, batch: Sequence[_Slice]) -> list[tuple[str, str, bool, bool]]:
        plan = ReadPlan(self._files)
        taken = [(each, each.request(plan)) for each in batch]
        await plan.fetch(opened)
        return await in_thread(lambda: [each.compare(*values) for each, values in taken])

    async def _compare_all(self, opened: Opened) -> Any:
        for pair in self._pairs:
            main, weight = group_by_slice(pair)
            for index, pieces in main.items():
                shape = pair.main.shape[len(index) :]
                wrong, ends = 0, set[float]()
                for box in _cut_slice(index, shape, AT_ONCE // 8):
                    plan = ReadPlan(self._files)
                    held = [_request(plan, pair.key, BY_NAME[pair.main.dtype], pieces, box)]
                    held += [_request(plan, pair.key, BY_NAME[pair.weight.dtype], weight.get(index, []), box)]
                    await plan.fetch(opened)
                    wrong += await in_thread(lambda a, b: int((~are_rounded(a, b)).sum()), *held)
                    ends |= {float(each) for each in held[1].aminmax()}
                yield pair.key, _place(index), not wrong, len(ends) == 1


class _Slice:
    """One layer or expert of a parameter, or all of it: what is drawn of it, and where that is stored."""

    def __init__(self, pair: Pair, index: Shape, main: Sequence[Any], weight: Sequence[Any]) -> None:
        self.pair, self.index = pair, index
        self._sides = [(pair.main.dtype, main), (pair.weight.dtype, weight)]
        shape = pair.main.shape[len(index) :]
        self._places = [(*index, *_position(flat, shape)) for flat in draw(pair.key, index, math.prod(shape))]
        self.nbytes = sum(min(stored.nbytes, BLOCK) for _, pieces in self._sides for _, stored in pieces)
        """An upper limit of the bytes to read."""

    def request(self, plan: ReadPlan) -> list[list[Any]]:
        """Add what is to be read. Return, for each side, where each element will be: a tensor and an index in it."""
        return [self._request_side(plan, BY_NAME[dtype], pieces) for dtype, pieces in self._sides]

    def _request_side(self, plan: ReadPlan, dtype: torch.dtype, pieces: Sequence[tuple[Box, TensorEntry]]) -> list[Any]:
        found: list[Any] = []
        whole: dict[int, torch.Tensor] = {}
        for place in self._places:
            one = Box(place, (1,) * len(place))
            number = next((n for n, (box, _) in enumerate(pieces) if _has(box, place)), -1)
            if number < 0:
                raise _lacking(self.pair.key, one)
            box, stored = pieces[number]
            if max(stored.nbytes, box.numel * dtype.itemsize) > BLOCK:
                held = torch.empty(one.sizes, dtype=dtype, device="cpu")
                plan.add_pieces(self.pair.key, self.pair.main, [pieces[number]], held, one, live=False)
                found.append((held, (0,) * len(place)))
                continue
            if number not in whole:  # a short archive is read as a whole in any case
                whole[number] = _request(plan, self.pair.key, dtype, [pieces[number]], box)
            found.append((whole[number], tuple(at - begin for at, begin in zip(place, box.offsets, strict=True))))
        return found

    def compare(self, main: Sequence[Any], weight: Sequence[Any]) -> tuple[str, str, bool, bool]:
        """Return the key, the index, True if the elements agree, and True if all weights are equal.

        Equal weights prove nothing, even if their main parameters differ a little, as those of norms do at first.
        """
        here, there = (torch.stack([tensor[at] for tensor, at in side]) for side in (main, weight))
        agrees = bool(are_rounded(here, there).all())
        return self.pair.key, _place(self.index), agrees, bool((there == there[0]).all())


def draw(key: str, index: Shape, count: int) -> list[int]:
    """Return the positions to compare in a flat slice of some elements: the first, the last, and drawn ones.

    They are the same in each call.

    >>> draw("a", (0,), 2), draw("a", (0,), 0), len(draw("a", (0,), 1000)) <= SAMPLED + 2
    ([0, 1], [], True)
    """
    numbers = random.Random(f"{key}{index}")  # noqa: S311 - the same places each time
    drawn = {numbers.randrange(count) for _ in range(SAMPLED)} if count else set()
    return sorted({0, count - 1, *drawn}) if count else []


def group_by_slice(pair: Pair) -> tuple[dict[Shape, list[Any]], dict[Shape, list[Any]]]:
    """Return the stored pieces of a main parameter and of its weight, by the indexes of the axes of layers and experts.

    These are the first axes that have a piece for each index, or that Megatron's names tell of.
    """
    shape = pair.main.shape
    sides = [each.pieces() for each in (pair.main, pair.weight)]
    leading = 0
    while leading < len(shape) - 1 and all(box.sizes[leading] == 1 for box, _ in itertools.chain(*sides)):
        leading += 1
    named = min(count_leading_axes(pair.key), len(shape) - 1)
    count = sum(math.prod(box.sizes[:named]) for box, _ in itertools.chain(*sides))
    if named > leading and count <= MOST_SLICES:
        leading = named
    found = []
    for pieces in sides:
        grouped: dict[Shape, list[Any]] = defaultdict(list)
        for box, stored in pieces:
            spans = [range(begin, begin + size) for begin, size in zip(box.offsets, box.sizes, strict=True)]
            for index in itertools.product(*spans[:leading]):
                grouped[index].append((box, stored))
        found.append(dict(sorted(grouped.items())))
    return found[0], found[1]


def count_leading_axes(key: str) -> int:
    """Return how many axes a tensor has for layers and experts, by its name.

    >>> [count_leading_axes(f"decoder.{name}") for name in ("layers.mlp.a", "layers.0.mlp.a", "layers.experts.a", "n")]
    [1, 0, 2, 0]
    """
    return len(_STACKED.findall(key)) + (".experts." in key)


def find_pairs(mains: Mapping[str, AnyTensor], weights: Mapping[str, AnyTensor]) -> tuple[list[Pair], list[str]]:
    """Return the main parameters that have a weight to compare with, and the keys of the others."""
    pairs, without = [], []
    for key, main in mains.items():
        weight = weights.get(key)
        if weight is None or weight.shape != main.shape or weight.dtype not in ROUNDED or main.dtype != "float32":
            without.append(key)
        elif not all(is_inside(box, each.shape) for each in (main, weight) for box, _ in each.pieces()):
            continue  # it is damaged, which reading it raises
        elif math.prod(main.shape):
            pairs.append(Pair(key, main, weight))
    return pairs, without


def _request(plan: ReadPlan, key: str, dtype: torch.dtype, pieces: Sequence[Any], box: Box) -> torch.Tensor:
    """Add requests for a box of a tensor. Return the memory that they fill."""
    near = [(piece, stored) for piece, stored in pieces if intersect(piece, box) is not None]
    if sum(common.numel for piece, _ in near if (common := intersect(piece, box))) != box.numel:
        raise _lacking(key, box)
    held = torch.empty(box.sizes, dtype=dtype, device="cpu")
    plan.add_pieces(key, near[0][1], near, held, box, live=False)
    return held


def _lacking(key: str, box: Box) -> Exception:
    return CorruptSnapshotError(f"{key}: the directory lacks [{box}] of it")


def _has(box: Box, place: Shape) -> bool:
    return all(begin <= at < begin + size for at, begin, size in zip(place, box.offsets, box.sizes, strict=True))


def _cut_slice(index: Shape, shape: Shape, most: int) -> Iterator[Box]:
    """Yield boxes of a slice with at most so many elements."""
    count = math.prod(shape)
    for begin in range(0, count, most):
        for _, box in boxes_of_range(shape, begin, min(begin + most, count)):
            yield Box((*index, *box.offsets), ((1,) * len(index) + box.sizes))


def _position(flat: int, shape: Shape) -> Shape:
    place = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        place.append(at)
    return tuple(reversed(place))


def _place(index: Shape) -> str:
    return "".join(f"[{each}]" for each in index)


def _name(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")
