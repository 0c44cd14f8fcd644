"""DeepSpeed's flat groups: the parameters in them, and the partitions that ranks have of them."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.flat_ranges import cut_run, join_runs
from snapshot.formats.pickle_nodes import expect_dict, expect_list, expect_name
from snapshot.formats.pickled_objects import INLINE
from snapshot.formats.rank_files import find_raw_range
from snapshot.formats.torch_save import TorchFile
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.geometry import MOST_AXES, Shape

AT_ONCE = 16
WEIGHTS = "fp32"
"""Name of the parameters themselves among the states of the optimizer."""
_EXPERT = re.compile(r"(.*deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,6})(\..*)")

# Flat groups: which rank has which elements of a parameter.


class FlatSlice(NamedTuple):
    """Elements of a parameter in one rank's flat tensor."""

    rank: int
    begin: int
    """Position of the first one in the parameter."""
    at: int
    """Position of the first one in the flat tensor."""
    numel: int


class FlatGroup(msgspec.Struct):
    """A flat group: its parameters, and the partitions of all ranks."""

    number: int
    """Number of the group in the optimizer."""
    shapes: dict[str, Shape]
    """Shapes of the parameters, in their order in the group."""
    states: dict[str, list[TensorEntry]]
    """Partitions of the weights, and of each state of the optimizer, by rank."""
    scalars: dict[str, Any]
    """States that are one value for all parameters, as nodes."""
    paddings: list[int]
    """Number of elements after each parameter in the group."""
    count: int = 0
    """Number of parts of each parameter, if each is cut by itself, as ZeRO 3 does."""

    def find_slices(self, key: str) -> dict[str, list[FlatSlice]]:
        """Return the slices of each parameter in the partitions of a state."""
        return (_cut_parameters if self.count else _cut_group)(self, [each.shape[0] for each in self.states[key]])


def _cut_group(group: FlatGroup, lengths: Sequence[int]) -> dict[str, list[FlatSlice]]:
    """Return the slices if the whole group is cut. Only the last partition may end earlier."""
    ends = list(accumulate(lengths))
    made, place = {}, 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        numel = math.prod(shape)
        found: list[FlatSlice] = []
        for rank in range(bisect_right(ends, place), len(ends)):
            base = ends[rank] - lengths[rank]
            low, high = max(place, base), min(place + numel, ends[rank])
            if low < high:  # a rank that has only padding has an empty partition
                found.append(FlatSlice(rank, low - place, low - base, high - low))
            if ends[rank] >= place + numel:
                break
        made[name] = found
        place += numel + padding
    return made


def _cut_parameters(group: FlatGroup, lengths: Sequence[int]) -> dict[str, list[FlatSlice]]:
    """Return the slices if each parameter is cut by itself. The last part of each may be padded."""
    made, at = {}, 0
    for name, shape in group.shapes.items():
        made[name], step = cut_parameter(math.prod(shape), group.count, at)
        at += step
    if any(at > length for length in lengths):
        raise ValueError("a partition is too short for its parameters")
    return made


def cut_parameter(numel: int, count: int, at: int = 0) -> tuple[list[FlatSlice], int]:
    """Return the slices of a parameter that is cut into equal parts, and the length of a part.

    >>> [tuple(each) for each in cut_parameter(5, 2)[0]]
    [(0, 0, 0, 3), (1, 3, 0, 2)]
    """
    step = -(-numel // count)
    found = (FlatSlice(rank, rank * step, at, min(step, numel - rank * step)) for rank in range(count))
    return [each for each in found if each.numel > 0], step


Tensors = dict[str, dict[str, Any]]
"""Entries by the names of parameters, and of their states."""


class FlatPart:
    """The files of one model-parallel part: those of its model, and those of its optimizer by rank."""

    def __init__(
        self, storage: Storage, states: Sequence[TorchFile], zero: Sequence[TorchFile], spend: Callable[[int], None]
    ) -> None:
        """Read the values. `spend` counts parts of tensors, since a pickle can repeat its values."""
        self._storage = storage
        self.states = states
        self.zero = zero
        self._spend = spend
        self.head = expect_dict(states[0].value)
        """The state of the engine on the first rank."""

    def read_shapes(self) -> list[dict[str, Shape]]:
        """Return the shapes of the parameters of each group."""
        groups = []
        for given in expect_list(self.head.get("param_shapes") or []):
            self._spend(len(given))
            groups.append({expect_name(name): read_shape(shape) for name, shape in dict.items(expect_dict(given))})
        return groups

    async def read_groups(self) -> list[FlatGroup]:
        """Return the flat groups, with the partitions of all ranks."""
        if not self.zero:
            return []
        held = [expect_dict(expect_dict(each.value)["optimizer_state_dict"]) for each in self.zero]
        stage = _read_stage(held[0].get("zero_stage"))
        weights = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        inner = [read_inner(each)[0] for each in held]
        groups = []
        for number, shapes in enumerate(self.read_shapes()):
            count = _read_count(held[0], number, len(held)) if stage == 3 else 0
            states = {WEIGHTS: self._locate([expect_list(each[weights])[number] for each in held])}
            scalars = {}
            own = [expect_dict(each.get(number) or {}) for each in inner]
            for key in map(expect_name, own[0]):
                values = [each[key] for each in own]
                if _is_flat(self.zero[0].locate(values[0]), states[WEIGHTS][0]):
                    states[key] = self._locate(values)
                else:
                    scalars[key] = values[0]
            raw = {key: await self.find_raw(flats) for key, flats in states.items()}
            paddings = _read_paddings(held[0], number, len(shapes))
            group = FlatGroup(number, shapes, raw, scalars, paddings, count)
            groups += _split_experts(group, _read_partitions(held[0], number, len(held)) if stage < 3 else len(held))
        return groups

    def join_groups(self, groups: Sequence[FlatGroup]) -> Tensors:
        """Return the tensors of all parameters in the groups."""
        tensors: Tensors = {}
        for group in groups:
            for key, flats in group.states.items():
                for name, slices in group.find_slices(key).items():
                    tensors.setdefault(name, {})[key] = self._join(name, group.shapes[name], flats, slices)
        return tensors

    async def find_raw(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        """Return the entries with the ranges of their bytes."""
        return await gather_limited(entries, partial(find_raw_range, self._storage), AT_ONCE)

    def _locate(self, nodes: Sequence[Any]) -> list[TensorEntry]:
        """Return the flat tensors of all ranks."""
        made = []
        for file, node in zip(self.zero, nodes, strict=True):
            stored = file.locate(node)
            if stored is None or len(stored.shape) != 1:
                raise UnsupportedFormatError(
                    f"{self._storage.url.join(file.name)}: a flat group must be a tensor with one dimension, got "
                    f"{p.show_value(node) if stored is None else list(stored.shape)}"
                )
            made.append(stored)
        if len({each.dtype for each in made}) > 1:
            raise ValueError("the partitions of a group have several dtypes")
        return made

    def _join(self, name: str, shape: Shape, flats: Sequence[TensorEntry], slices: Sequence[FlatSlice]) -> Any:
        """Return the entry of a tensor from its slices."""
        held = sum(each.numel for each in slices)
        if held != math.prod(shape):
            raise ValueError(f"{name[:200]}: the partitions have {held:,} of {math.prod(shape):,} elements")
        self._spend(len(slices))
        runs = [(each.begin, cut_run(flats[each.rank], each.at, (each.numel,))) for each in slices]
        if not runs:
            return TensorEntry(INLINE, (0, 0), flats[0].dtype, shape)
        return join_runs(flats[0].dtype, shape, runs)

    async def read_frozen(self, is_whole: Callable[[str, Shape], bool]) -> dict[str, Any]:
        """Return the parameters that are not trained, unless the model has them whole."""
        shapes = self.head.get("frozen_param_shapes")
        made: dict[str, Any] = {}
        for name, given in dict.items(shapes) if isinstance(shapes, dict) else ():
            shape = read_shape(given)
            if is_whole(expect_name(name), shape):
                continue
            fragments = [
                expect_dict(expect_dict(each.value).get("frozen_param_fragments") or {}) for each in self.states
            ]
            found = [file.locate(each.get(name)) for file, each in zip(self.states, fragments, strict=True)]
            pieces = [each for each in found if each is not None]
            if len(pieces) < len(found) or len({each.dtype for each in pieces}) > 1:
                raise ValueError(f"{name[:200]}: a rank lacks its part")
            if len(pieces) == 1 and pieces[0].shape == shape:
                made[name] = pieces[0]
                continue
            slices, step = cut_parameter(math.prod(shape), len(pieces))
            if any(len(each.shape) != 1 or each.shape[0] < step for each in pieces):
                raise ValueError(f"{name[:200]}: a rank has another part than its own")
            made[name] = self._join(name, shape, await self.find_raw(pieces), slices)
        return made


def _split_experts(group: FlatGroup, partitions: int) -> list[FlatGroup]:
    """Return a group of experts as one for each rank of expert parallelism, under the numbers of all experts.

    Ranks at equal distances share the partitions of the same experts.
    """
    ranks = len(group.states[WEIGHTS])
    if partitions >= ranks:
        return [group]
    matched = [_EXPERT.fullmatch(name) for name in group.shapes]
    if ranks % partitions or not all(matched):
        raise UnsupportedFormatError(
            f"a group of parameters in DeepSpeed has {partitions} partitions on {ranks} ranks, and is not of experts"
        )
    local = 1 + max(int(each[2]) for each in matched if each)
    made = []
    for rank in range(ranks // partitions):
        names = [f"{each[1]}{rank * local + int(each[2])}{each[3]}" for each in matched if each]
        states = {key: flats[rank :: ranks // partitions] for key, flats in group.states.items()}
        shapes = dict(zip(names, group.shapes.values(), strict=True))
        made.append(msgspec.structs.replace(group, shapes=shapes, states=states))
    return made


# Values in the pickles.


def read_shape(value: Any) -> Shape:
    """Return the shape of a tensor; raise for any other value."""
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 1 << 60 for size in value):
        raise ValueError(f"a shape must be a tuple of ints, got {p.show_value(value)}")
    if len(value) > MOST_AXES:
        raise ValueError(f"a shape with {len(value)} dimensions")
    return tuple(value)


def plain_value(value: Any) -> Any:
    """Return the value of an enum, and the fields of a loss scaler; other values as they are."""
    if isinstance(value, p.StandIn) and value.name.startswith("deepspeed."):
        if value.name.endswith("Enum") and len(value.arguments) == 1:
            return value.arguments[0]
        if not value.arguments:
            return dict(p.read_fields(value))
    return value


def _read_stage(value: Any) -> int:
    stage = plain_value(value)
    if type(stage) is not int or not 1 <= stage <= 3:
        raise UnsupportedFormatError(f"a checkpoint of DeepSpeed must be of ZeRO 1 to 3, got {p.show_value(stage)}")
    return stage


def read_inner(held: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return the state of the inner optimizer by group, and its parameter groups."""
    found = held.get("base_optimizer_state", held.get("optimizer_state_dict"))
    if isinstance(found, list):  # an elastic checkpoint
        return dict(enumerate(found)), []
    inner = expect_dict(found or {})
    groups = inner.get("param_groups") or held.get("param_groups") or []
    return expect_dict(inner.get("state") or {}), expect_list(groups)


def _is_flat(stored: TensorEntry | None, weights: TensorEntry) -> bool:
    """Return True for a state with an element for each weight. The last rank's weights have no padding."""
    return stored is not None and len(stored.shape) == 1 and stored.shape[0] >= max(2, weights.shape[0])


def _read_paddings(held: Mapping[str, Any], number: int, count: int) -> list[int]:
    given = held.get("param_alignment_paddings")
    paddings = expect_list(expect_list(given)[number]) if given else [0] * count
    if len(paddings) != count or not all(type(each) is int and 0 <= each < 1 << 60 for each in paddings):
        raise ValueError("the paddings of a group do not match its parameters")
    return paddings


def _read_count(held: Mapping[str, Any], number: int, ranks: int) -> int:
    """Return the number of parts of each parameter of a group in ZeRO 3."""
    groups = held.get("ds_zero_partition_groups")
    own = expect_dict(groups[number]) if isinstance(groups, list) and number < len(groups) else {}
    count = own.get("partition_count", held.get("partition_count", ranks))
    if count != ranks:
        raise UnsupportedFormatError(
            f"a checkpoint of DeepSpeed whose parameters are cut into {p.show_value(count)} parts on {ranks} ranks "
            "is not read; convert it with ds_to_universal.py of DeepSpeed"
        )
    return ranks


def _read_partitions(held: Mapping[str, Any], number: int, ranks: int) -> int:
    """Return the number of partitions of a group in ZeRO 1 or 2: fewer than ranks for experts."""
    given = held.get("partition_count")
    count = given[number] if isinstance(given, list) and number < len(given) else ranks
    return count if type(count) is int and count > 0 else ranks
