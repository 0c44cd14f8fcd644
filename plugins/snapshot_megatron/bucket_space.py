"""The layout of Megatron-core's `dp_reshardable` directories, derived from what their metadata says.

Their optimizer is stored as buckets: flat tensors, in which the parameters of one rank of model parallelism follow each
other. No name is in them. But the rules are few, and the directory has the model's weights, usually in the order of
its modules, and in the boxes of the ranks. Parameters are laid out in reverse, each begins at a multiple of 64, and a
bucket ends where the next one begins. A job writes each parameter as parts of its own, so the ends of parts are the
ends of parameters. A layout is accepted only if all of them fit.

Nothing is read here. Whether the values are those of the weights is a condition of the read, and decides if several
layouts fit.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from snapshot.formats.flat_ranges import cut_run
from snapshot.manifest.entries import AnyTensor, Shard, ShardedTensorEntry, TensorEntry
from snapshot.tensors.geometry import Box, Shape, boxes_of_range, intersect, whole_box
from snapshot.text import counted
from snapshot_megatron.main_parameters import count_leading_axes
from snapshot_megatron.module_order import LAYER, list_orders

BUCKET = re.compile(
    r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.gbuf_idx_(\d{1,4})\."
    r"dtype_\(torch\.(\w+), torch\.(\w+)\)\.bucket_idx_(\d{1,6})\.(\w+)"
)
"""Name of a flat tensor: chain, group of ranks, buffer, dtypes of parameter and gradient, bucket, and kind of state."""
ALIGNED = 64
"""Elements, at a multiple of which each parameter begins."""
MOST_STEPS = 20_000_000
"""Parameters that are laid out in all attempts together. A model with 10,000 of them needs 100,000."""
MOST_LAYOUTS = 8
"""Layouts that fit, after which no more are looked for."""
EXPERTS = ".experts."


class LayoutError(ValueError):
    """Raised if no layout fits, or several do. The message says what did."""


class Place(NamedTuple):
    """A bucket of one group of data parallel ranks."""

    chain: int
    group: int
    dtype: str
    buffer: int
    bucket: int


@dataclass
class Bucket:
    """The flat tensors of a bucket, by kind of state, and where their parts end."""

    length: int
    ends: frozenset[int]
    states: dict[str, AnyTensor]


class Local(NamedTuple):
    """A parameter of one rank of model parallelism: boxes of a weight, one after the other on its first axis."""

    key: str
    lead: Shape
    """The layer and the expert, if the weight has axes for them."""
    shape: Shape
    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


class Run(NamedTuple):
    """A parameter in a bucket."""

    local: Local
    place: Place
    begin: int


def find_buckets(tensors: Mapping[str, AnyTensor]) -> dict[Place, Bucket]:
    """Return the buckets of a directory. Raise `LayoutError` if their tensors do not fit each other."""
    found: dict[Place, Bucket] = {}
    for name, entry in tensors.items():
        match = BUCKET.fullmatch(name)
        if match is None:
            continue
        chain, group, buffer, dtype, _, bucket, state = match.groups()
        place = Place(int(chain or 0), int(group), dtype, int(buffer), int(bucket))
        pieces = entry.pieces()
        if len(entry.shape) != 1 or any(len(box.sizes) != 1 for box, _ in pieces):
            raise LayoutError(f"{name} must have one dimension, got {list(entry.shape)}")
        ends = frozenset(end for box, _ in pieces for end in (box.offsets[0], box.offsets[0] + box.sizes[0]))
        made = found.setdefault(place, Bucket(entry.shape[0], ends, {}))
        if (entry.shape[0], ends) != (made.length, made.ends):
            raise LayoutError(f"{name} must have the same parts as the other states of its bucket")
        made.states[state] = entry
    return found


class Weight:
    """A tensor of the model, and how the ranks of tensor parallelism cut it."""

    def __init__(self, key: str, entry: AnyTensor) -> None:
        self.key, self.dtype, self.shape = key, entry.dtype, tuple(entry.shape)
        self.leading = count_leading_axes(key)
        if self.leading > len(self.shape):
            raise LayoutError(f"{key} must have axes for layers and experts, got {list(self.shape)}")
        grouped: dict[Shape, list[Box]] = defaultdict(list)
        for box, _ in entry.pieces():
            if any(size != 1 for size in box.sizes[: self.leading]):
                raise LayoutError(f"{key} must have a part for each layer and expert, got [{box}]")
            grouped[box.offsets[: self.leading]].append(Box(box.offsets[self.leading :], box.sizes[self.leading :]))
        self.rest = self.shape[self.leading :]
        self.rest_of_layer = self.shape[self.leading - (EXPERTS in key) :]
        """The shape in one layer. That of experts has an axis for them."""
        parts = {tuple(sorted(boxes, key=_offsets)) for boxes in grouped.values()}
        if len(grouped) != math.prod(self.shape[: self.leading]) or len(parts) != 1:
            raise LayoutError(f"{key} must have the same parts for each layer and expert")
        [self.parts] = parts
        self.axis = self._find_axis()

    def _find_axis(self) -> int:
        """Return the axis on which the parts follow each other."""
        for axis, size in enumerate(self.rest):
            others = [box.sizes[:axis] + box.sizes[axis + 1 :] for box in self.parts]
            ends = [box.offsets[axis] + box.sizes[axis] for box in self.parts]
            begins = [box.offsets[axis] for box in self.parts]
            whole = all(each == self.rest[:axis] + self.rest[axis + 1 :] for each in others)
            if whole and begins == [0, *ends[:-1]] and ends[-1] == size:
                return axis
        if not self.rest and len(self.parts) == 1:
            return 0
        raise LayoutError(f"{self.key} must be cut on one axis")

    def is_cut(self, ranks: int) -> bool:
        """Return True if so many ranks of tensor parallelism may have cut it, or all have the whole.

        A rank has several parts only of a gated layer, which is cut on the first axis.
        """
        parts = len(self.parts)
        return ranks == 1 or parts in (1, ranks) or (parts % ranks == 0 and self.axis == 0)

    def local(self, rank: int, ranks: int, index: Shape) -> Local:
        """Return what a rank has of one layer or expert. Each part of a gated layer is cut by itself."""
        if ranks == 1 or len(self.parts) == 1:
            return Local(self.key, index, self.rest, (whole_box(self.rest),))
        boxes = self.parts[rank::ranks]
        sizes = list(boxes[0].sizes)
        sizes[self.axis] = sum(box.sizes[self.axis] for box in boxes)
        return Local(self.key, index, tuple(sizes), boxes)


class Model:
    """The weights of a directory in the order of its modules: before the layers, the layers, after them."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        stacks: dict[str, int] = defaultdict(int)
        for each in weights:
            if (match := LAYER.match(each.key)) is not None:
                numbered = 1 + int(match[2]) if match[2] is not None else each.shape[0]
                stacks[match[1]] = max(stacks[match[1]], numbered)
        main = max(stacks, key=lambda name: stacks[name], default="")
        self.before: list[list[tuple[Weight, Shape]]] = []
        self.layers: list[list[tuple[Weight, Shape]]] = []
        self.after: list[list[tuple[Weight, Shape]]] = []
        self.is_tied = not any("output_layer" in each.key for each in weights)
        grouped: dict[str, list[Weight]] = {}
        for each in weights:
            match = LAYER.match(each.key)
            grouped.setdefault(match[1] if match else each.key, []).append(each)
        for name, those in grouped.items():
            if name in stacks:
                layers = _split_layers(those, stacks[name])
                if name == main:
                    self.layers = layers
                else:
                    (self.after if self.layers else self.before).extend(layers)
            else:
                (self.after if self.layers else self.before).append([(those[0], ())])
        self.embedding = next((each for each in weights if each.key.endswith("word_embeddings.weight")), None)


def _split_layers(weights: Sequence[Weight], count: int) -> list[list[tuple[Weight, Shape]]]:
    """Return the weights of each layer of a stack, with the layer if that is an axis."""
    total = sum(each.shape[0] if each.leading else 1 for each in weights)
    if count > total:
        raise LayoutError(f"{weights[0].key} and others must have {count:,} layers, got {total:,}")
    found: list[list[tuple[Weight, Shape]]] = [[] for _ in range(count)]
    for each in weights:
        match = LAYER.match(each.key)
        if match is not None and match[2] is not None:
            found[int(match[2])].append((each, ()))
        elif each.shape[0] != count:
            raise LayoutError(f"{each.key} must have {count:,} layers, got {each.shape[0]:,}")
        else:
            for layer in range(count):
                found[layer].append((each, (layer,)))
    return found


@dataclass(frozen=True)
class Split:
    """How the ranks split a model, as far as one optimizer of a chain shows it."""

    tensor: int
    expert: int
    order: str
    """In which the experts of a rank follow each other: by `expert`, by `name`, or by `module`."""


Buffers = Mapping[tuple[int, str], Sequence[Sequence[tuple[Place, Bucket]]]]


@dataclass
class _Search:
    """A search for layouts. It ends with an error if it takes too many steps."""

    buckets: Mapping[Place, Bucket]
    model: Model
    left: int = MOST_STEPS
    furthest: tuple[int, str] = (-1, "nothing was tried")
    dtypes: dict[str, str] = field(default_factory=dict)
    """Dtype of each weight."""
    _buffers: dict[int, Buffers] = field(default_factory=dict)

    def buffers(self, chain: int) -> Buffers:
        """Return the buckets of one optimizer of a chain, by group and dtype, for each buffer in order."""
        if chain not in self._buffers:
            grouped: dict[tuple[int, str], dict[int, list[tuple[Place, Bucket]]]] = {}
            for place in sorted(each for each in self.buckets if each.chain == chain):
                buffers = grouped.setdefault((place.group, place.dtype), {})
                buffers.setdefault(place.buffer, []).append((place, self.buckets[place]))
            self._buffers[chain] = {key: list(buffers.values()) for key, buffers in grouped.items()}
        return self._buffers[chain]

    def count(self, steps: int) -> None:
        """Count steps."""
        self.left -= steps
        if self.left < 0:
            raise LayoutError("too many layouts would have to be tried")

    def note(self, fitted: int, what: str) -> None:
        """Remember what fitted, if it is more than before."""
        self.furthest = max(self.furthest, (fitted, what), key=lambda each: each[0])


def derive_layouts(weights: Mapping[str, AnyTensor], buckets: Mapping[Place, Bucket]) -> list[list[Run]]:
    """Return where each parameter of each rank is in the buckets. Nearly always, there is only one such layout.

    Args:
        weights: The tensors of the model by key, as far as possible in the order of its modules.
        buckets: Those of `find_buckets`.

    Raises:
        LayoutError: No layout fits.
    """
    if not weights:
        raise LayoutError("the directory has no weights of the model, whose names and boxes are needed")
    dtypes = {place.dtype for place in buckets}
    found = [Weight(key, entry) for key, entry in weights.items() if entry.dtype in dtypes and 0 not in entry.shape]
    chains = sorted({place.chain for place in buckets})
    if len(chains) > 2:
        raise LayoutError(f"the optimizer must be a chain of one or two, got {len(chains)}")
    by_key = {each.key: each for each in found}
    layouts: list[list[Run]] = []
    left, furthest = MOST_STEPS, (-1, "nothing was tried")
    for order in list_orders(list(by_key)):
        search = _Search(buckets, Model([by_key[key] for key in order]), left, furthest)
        search.dtypes |= {each.key: each.dtype for each in found}
        for dense, experts in itertools.permutations(chains) if len(chains) == 2 else [(chains[0], None)]:
            for runs in _find_layouts(search, dense, experts):
                if not any(_is_same(runs, each) for each in layouts):
                    layouts.append(runs)
                if len(layouts) == MOST_LAYOUTS:
                    return layouts
        left, furthest = search.left, search.furthest
    if not layouts:
        raise LayoutError(f"no layout fits: {furthest[1]}")
    return layouts


def _is_same(here: Sequence[Run], there: Sequence[Run]) -> bool:
    return set(here) == set(there)


def _find_layouts(search: _Search, dense: int, experts: int | None) -> Iterator[list[Run]]:
    """Yield the layouts of a chain of optimizers, given the numbers of the one for experts and of the other."""
    groups = _count_groups(search.buckets, dense)
    for tensor in _divisors(groups):
        stages = groups // tensor
        of_both = experts is None
        inline: list[Split] = []
        for order in ("expert", "name", "module") if of_both and _has_experts(search.model) else ("expert",):
            inline += [Split(each, 1, order) for each in (dict.fromkeys((tensor, 1)) if of_both else (1,))]
        for split, tied in itertools.product(inline, (False, True)):
            if tied and (stages == 1 or not search.model.is_tied or search.model.embedding is None):
                continue
            kinds = (False, True) if of_both else (False,)
            attempt = _Attempt(search, dense, tensor, stages, split=split, tied=tied, kinds=kinds)
            for spans in attempt.find_spans():
                runs = attempt.runs(spans)
                if experts is None:
                    yield runs
                else:
                    yield from (runs + more for more in _find_experts(search, experts, stages, spans))


def _find_experts(search: _Search, chain: int, stages: int, spans: Sequence[range]) -> Iterator[list[Run]]:
    groups = _count_groups(search.buckets, chain)
    if groups % stages:
        search.note(1, f"{groups} groups of experts' ranks are no multiple of {stages} stages")
        return
    for tensor in _divisors(groups // stages):
        for order in ("expert", "name", "module"):
            split = Split(tensor, groups // stages // tensor, order)
            attempt = _Attempt(search, chain, groups // stages, stages, split=split, tied=False, kinds=(True,))
            if attempt.fits(spans):
                yield attempt.runs(spans)


class _Attempt:
    """One assumption of how the groups of an optimizer split the model."""

    def __init__(
        self, search: _Search, chain: int, ranks: int, stages: int, *, split: Split, tied: bool, kinds: Sequence[bool]
    ) -> None:
        """`ranks`: those of model parallelism in a stage. Group g is that of rank `g % ranks` of stage `g // ranks`.

        `kinds`: whether the optimizer has weights of experts, and others.
        """
        self._search, self._chain, self._ranks, self._stages = search, chain, ranks, stages
        self._split, self._tied, self._kinds = split, tied, kinds
        self._buffers = search.buffers(chain)
        self._chunks = max(map(len, self._buffers.values()))
        self._dtypes = sorted({dtype for _, dtype in self._buffers})
        self._sums: list[int] = []

    @property
    def name(self) -> str:
        """The assumption, for a message."""
        expert = f", {counted(self._split.expert, 'rank')} of experts" if self._kinds == (True,) else ""
        tensor = self._split.tensor if self._kinds == (True,) else self._ranks
        return f"with {counted(tensor, 'tensor-parallel rank')}{expert} and {counted(self._stages, 'stage')}"

    def find_spans(self) -> Iterator[list[range]]:
        """Yield which layers the parts of the pipeline have, in order, if these layers fit in all groups."""
        parts, layers = self._stages * self._chunks, len(self._search.model.layers)
        if not self._is_possible():
            return
        self._search.note(0, f"{self.name}, no part of the pipeline fits")
        spans: list[range] = []
        stack = [self._spans_of(0, 0, parts, layers)]
        while stack:
            span = next(stack[-1], None)
            del spans[len(stack) - 1 :]
            if span is None:
                stack.pop()
                continue
            spans.append(span)
            self._search.note(len(spans), f"{self.name}, {len(spans)} of {counted(parts, 'part')} of the pipeline fit")
            if len(spans) < parts:
                stack.append(self._spans_of(len(spans), span.stop, parts, layers))
            elif span.stop == layers:
                yield list(spans)

    def _is_possible(self) -> bool:
        model = self._search.model
        for weight, _ in itertools.chain(*model.before, *model.layers, *model.after):
            is_expert = EXPERTS in weight.key
            ranks = self._split.tensor if is_expert else self._ranks
            if is_expert in self._kinds and not weight.is_cut(ranks):
                self._search.note(
                    0, f"{self.name}, {weight.key} would have {ranks} parts, and it has {len(weight.parts)}"
                )
                return False
            if is_expert and weight.rest_of_layer[0] % self._split.expert:
                self._search.note(0, f"{self.name}, {weight.key} would have no whole share for each rank")
                return False
        return True

    def _spans_of(self, part: int, begin: int, parts: int, layers: int) -> Iterator[range]:
        """Yield the layers from `begin` on that a part may have. Those that follow are of other parts."""
        for end in [layers] if part == parts - 1 else range(begin, layers + 1):
            self._search.count(1)
            span = range(begin, end)
            if self._has_length(part, span) and self._fits_part(part, span):
                yield span

    def _has_length(self, part: int, span: range) -> bool:
        """Return False if the buckets of the first group have other lengths, as sums of these layers' show at once."""
        buckets = self._buckets_of(part % self._stages * self._ranks, part // self._stages)
        sizes = self._sum_sizes()
        padded = sizes[span.stop] - sizes[span.start]
        model = self._search.model
        ends = [model.before] if part == 0 else []
        ends += [model.after] if part == self._stages * self._chunks - 1 else []
        padded += sum(_pad(each.numel) for groups in ends for group in groups for each in self._locals(0, group))
        if self._is_tied_part(part) and model.embedding is not None:
            padded += _pad(model.embedding.local(0, self._ranks, ()).numel)
        total = sum(bucket.length for bucket in buckets)
        return padded - ALIGNED * len(buckets) < total <= padded

    def _buckets_of(self, group: int, chunk: int) -> list[Bucket]:
        found = []
        for dtype in self._dtypes:
            buffers = self._buffers.get((group, dtype), [])
            found += [bucket for _, bucket in buffers[chunk]] if chunk < len(buffers) else []
        return found

    def _sum_sizes(self) -> list[int]:
        """Return the padded elements of all layers before each one, on the first rank."""
        if not self._sums:
            layers = self._search.model.layers
            self._search.count(sum(map(len, layers)))
            sizes = (sum(_pad(each.numel) for each in self._locals(0, layer)) for layer in layers)
            self._sums = list(itertools.accumulate(sizes, initial=0))
        return self._sums

    def _is_tied_part(self, part: int) -> bool:
        return self._tied and part == self._stages * self._chunks - 1

    def _locals(self, rank: int, weights: Sequence[tuple[Weight, Shape]]) -> list[Local]:
        """Return the parameters that a rank has of some weights, in the order of its modules."""
        found: list[Local] = []
        for is_expert, run in itertools.groupby(weights, key=lambda each: EXPERTS in each[0].key):
            if is_expert not in self._kinds:
                continue
            if not is_expert:
                found += [weight.local(rank, self._ranks, index) for weight, index in run]
                continue
            found += self._local_experts(rank, list(run))
        return found

    def _local_experts(self, rank: int, weights: Sequence[tuple[Weight, Shape]]) -> list[Local]:
        split = self._split
        within = rank % split.tensor
        counts = {weight.rest_of_layer[0] for weight, _ in weights}
        if len(counts) != 1:
            raise LayoutError(f"{weights[0][0].key} must have as many experts as others of its layer")
        count = counts.pop()
        first = rank // split.tensor * (count // split.expert)
        own = range(first, first + count // split.expert)
        order: list[tuple[Weight, Shape, int]] = []
        if split.order == "expert":
            order = [(weight, index, expert) for expert in own for weight, index in weights]
        elif split.order == "name":
            order = [(weight, index, expert) for weight, index in weights for expert in own]
        else:
            for _, run in itertools.groupby(weights, key=lambda each: each[0].key.rpartition(".")[0]):
                those = list(run)
                order += [(weight, index, expert) for expert in own for weight, index in those]
        return [weight.local(within, split.tensor, (*index, expert)) for weight, index, expert in order]

    def _list_of(self, part: int, rank: int, span: range) -> list[Local]:
        """Return all parameters that a rank has in a part of the pipeline, in the order of its modules."""
        model = self._search.model
        found: list[Local] = []
        for group in model.before if part == 0 else ():
            found += self._locals(rank, group)
        for layer in span:
            found += self._locals(rank, model.layers[layer])
        for group in model.after if part == self._stages * self._chunks - 1 else ():
            found += self._locals(rank, group)
        if self._is_tied_part(part) and model.embedding is not None:
            found.append(model.embedding.local(rank, self._ranks, ()))
        return found

    def _fits_part(self, part: int, span: range) -> bool:
        return all(self._lay_out(part, rank, span) is not None for rank in range(self._ranks))

    def fits(self, spans: Sequence[range]) -> bool:
        """Return True if all parts fit, with known layers."""
        if not self._is_possible() or self._stages * self._chunks != len(spans):
            return False
        for part, span in enumerate(spans):
            if not self._fits_part(part, span):
                return False
            self._search.note(len(spans) + part, f"{self.name}, {part + 1} of {len(spans)} parts of the pipeline fit")
        return True

    def _lay_out(self, part: int, rank: int, span: range) -> list[Run] | None:
        """Return the runs of one group in one part of the pipeline; None if its buckets do not fit."""
        stage, chunk = part % self._stages, part // self._stages
        dtypes = self._search.dtypes
        locals_ = self._list_of(part, rank, span)
        self._search.count(len(locals_) + 1)
        found: list[Run] = []
        for dtype in self._dtypes:
            own = [each for each in locals_ if dtypes[each.key] == dtype and each.numel]
            buffers = self._buffers.get((stage * self._ranks + rank, dtype), [])
            if not own and not buffers:
                continue
            runs = lay_out(own, buffers[chunk]) if chunk < len(buffers) else None
            if runs is None:
                return None
            found += runs
        return found

    def runs(self, spans: Sequence[range]) -> list[Run]:
        """Return the runs of all groups, without the copies of what several ranks have."""
        found: dict[Local, Run] = {}
        for part, span in enumerate(spans):
            for rank in range(self._ranks):
                for each in self._lay_out(part, rank, span) or ():
                    found.setdefault(each.local, each)
        return list(found.values())


def lay_out(parameters: Sequence[Local], buckets: Sequence[tuple[Place, Bucket]]) -> list[Run] | None:
    """Return where parameters are in the buckets of a buffer; None if an end of a part or a length does not fit.

    They are given in the order of the modules.
    """
    runs: list[Run] = []
    number, cursor = 0, 0
    used: set[int] = set()
    for each in reversed(parameters):
        if number >= len(buckets):
            return None
        place, bucket = buckets[number]
        begin = _pad(cursor)
        cursor = begin + each.numel
        if begin not in bucket.ends or cursor not in bucket.ends:
            return None
        runs.append(Run(each, place, begin))
        used |= {begin, cursor}
        if bucket.length in (cursor, _pad(cursor)):  # nothing can begin in it any more
            if not _are_cuts(bucket, used):
                return None
            number, cursor, used = number + 1, 0, set()
    return runs if number == len(buckets) and not cursor else None


def _are_cuts(bucket: Bucket, used: set[int]) -> bool:
    """Return True if all other ends of parts are those of shares of data parallel ranks, which are equally long."""
    others = {end for end in bucket.ends - used if 0 < end < bucket.length}
    gaps = {_pad(end) for end in used}
    others -= gaps
    if not others:
        return True
    share = math.gcd(*others)
    return bucket.length // share <= len(bucket.ends) and all(
        end in bucket.ends for end in range(share, bucket.length, share)
    )


def make_entries(
    weights: Mapping[str, AnyTensor], buckets: Mapping[Place, Bucket], runs: Sequence[Run]
) -> dict[str, AnyTensor]:
    """Return the states of an optimizer as tensors of the model: `<kind of state>.<key of the weight>`."""
    pieces = {
        (place, state): sorted(entry.pieces(), key=lambda piece: piece[0].offsets)
        for place, bucket in buckets.items()
        for state, entry in bucket.states.items()
    }
    begins = {key: {box.offsets[0]: at for at, (box, _) in enumerate(held)} for key, held in pieces.items()}
    shards: dict[tuple[str, str], list[Shard]] = defaultdict(list)
    dtypes: dict[tuple[str, str], str] = {}
    for run in runs:
        for state, entry in buckets[run.place].states.items():
            dtypes[state, run.local.key] = entry.dtype
            held = pieces[run.place, state]
            at = begins[run.place, state].get(run.begin, len(held))
            if at == len(held):
                raise LayoutError(f"no part of {state} begins at {run.begin}, where {run.local.key} does")
            while at < len(held) and held[at][0].offsets[0] < run.begin + run.local.numel:
                box, stored = held[at]
                shards[state, run.local.key] += _cut_piece(run, box.offsets[0] - run.begin, stored)
                at += 1
    made: dict[str, AnyTensor] = {}
    for (state, key), found in shards.items():
        shape = tuple(weights[key].shape)
        if len(found) == 1 and found[0].sizes == shape:
            made[f"{state}.{key}"] = found[0].tensor
        else:
            made[f"{state}.{key}"] = ShardedTensorEntry(dtypes[state, key], shape, found)
    return made


def _cut_piece(run: Run, begin: int, stored: TensorEntry) -> Iterator[Shard]:
    """Yield the boxes of the weight that a stored run fills, from a flat position of the rank's parameter on."""
    local = run.local
    leading = (1,) * len(local.lead)
    for at, box in boxes_of_range(local.shape, begin, begin + stored.shape[0]):
        row = 0
        for part in local.boxes:
            inside = Box((row, *(0,) * (len(part.sizes) - 1)), part.sizes) if part.sizes else part
            row += part.sizes[0] if part.sizes else 0
            common = intersect(box, inside)
            if common is None:
                continue
            skipped = (common.offsets[0] - box.offsets[0]) * math.prod(box.sizes[1:]) if box.sizes else 0
            moved = common.relative_to(inside.offsets).moved_by(part.offsets)
            sizes = leading + common.sizes
            yield Shard((*local.lead, *moved.offsets), sizes, cut_run(stored, at - begin + skipped, sizes))


def _count_groups(buckets: Mapping[Place, Bucket], chain: int) -> int:
    groups = {place.group for place in buckets if place.chain == chain}
    if groups != set(range(len(groups))):
        raise LayoutError(f"the groups of data parallel ranks must be counted from 0, got {sorted(groups)[:8]}")
    return len(groups)


def _has_experts(model: Model) -> bool:
    return any(EXPERTS in weight.key for layer in model.layers for weight, _ in layer)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _pad(number: int) -> int:
    return -(-number // ALIGNED) * ALIGNED


def _offsets(box: Box) -> Shape:
    return box.offsets
