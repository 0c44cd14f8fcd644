"""A merge: open all checkpoints, match their tensors, and write their mix."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.operation import Operation, operation
from snapshot.errors import RestoreError
from snapshot.events import log
from snapshot.io.budget import MemoryBudget, Pool
from snapshot.io.loop import run
from snapshot.io.session import MemoryDefaults, Session
from snapshot.io.url import Location
from snapshot.loading.open import Opened, expect_files
from snapshot.loading.read_object import expand_trees
from snapshot.manifest import entries as e
from snapshot.manifest.document import find_locations
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.paths import decode_component
from snapshot.manifest.rank_view import make_rank_view, suggest_names
from snapshot.manifest.values import Entry
from snapshot.options import expect_options, with_options
from snapshot.progress import Meter
from snapshot.reports import ConvertReport
from snapshot.snapshot import Snapshot
from snapshot.state.leaves import Leaf
from snapshot.tensors import composite
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.text import counted, listed
from snapshot.transform.call import (
    chosen_of_ranks,
    expect_checksums,
    expect_matches,
    expect_sound,
    open_sources,
    selected_locations,
)
from snapshot.transform.convert import expect_writable, write_checkpoint
from snapshot.transform.diff_bytes import Pair, compare_pairs
from snapshot.transform.sources import CheckpointSource, LeafReads, reads_ranges
from snapshot.transform.target import Selection, Target
from snapshot_merge.mixing import InputRun, MixedSource, Piece
from snapshot_merge.options import OTHERS, MergeOptions

# Arithmetic of a merge: tensors of several checkpoints become one, element by element, in order of the checkpoints.

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


# Plan of a merge: the tensors of each checkpoint that belong together, and all reasons why they do not fit.


class MixedGroup(NamedTuple):
    """One tensor of the result: its entry in each checkpoint, and the dtype that they are added in."""

    name: str
    entries: tuple[e.AnyTensor, ...]
    wide: torch.dtype


@dataclass
class MergePlan:
    """The tensors to mix, and those that must be equal."""

    groups: dict[str, MixedGroup] = field(default_factory=dict)
    """The tensors to mix, by `key_of` their entry in the first checkpoint."""
    equal: list[list[Pair]] = field(default_factory=list)
    """For each further checkpoint, its tensors that must be equal to those of the first one."""
    tied: list[list[Pair]] = field(default_factory=list)
    """For each further checkpoint, its tensors that must be equal since the first one has one tensor for both."""

    def group(self, entry: Any) -> MixedGroup | None:
        """Return the tensors that are mixed for an entry of the first checkpoint, if any."""
        return self.groups.get(key_of(entry)) if isinstance(entry, e.AnyTensor) else None


def key_of(entry: e.AnyTensor) -> str:
    """Return a text that is equal for two entries of the same stored elements."""
    return repr((entry.places(), entry.dtype, entry.shape)) if math.prod(entry.shape) else ""


@dataclass(frozen=True)
class _Match:
    """One tensor of the first checkpoint under one of its names, and the tensors of the others for it."""

    name: str
    entry: e.AnyTensor
    others: tuple[e.AnyTensor, ...]


def plan_merge(sides: Sequence[Opened], choice: Selection) -> MergePlan:
    """Match the chosen tensors of the first checkpoint with those of the others, by name.

    A name is a path, or its components joined with dots, with or without the first one. Raise RestoreError with
    everything that does not fit.
    """
    others = sides[1:]
    misfits: list[str] = []
    plan = MergePlan(equal=[[] for _ in others], tied=[[] for _ in others])
    for key, alike in _match_names(sides, choice, misfits).items():
        _add_group(plan, key, alike[0], misfits)
        for twin in alike[1:]:
            _add_ties(plan, alike[0], twin, others, misfits)
    if misfits:
        raise RestoreError(f"{sides[0].session.url}: the sources do not fit:{listed(misfits)}", misfits)
    for number, side in enumerate(others):
        pairs = (*plan.equal[number], *plan.tied[number])
        mixed = {group.name: group.entries[number + 1] for group in plan.groups.values()}
        expect_sound({**mixed, **{pair.name: pair.b for pair in pairs}}, side.document)
    return plan


def _match_names(sides: Sequence[Opened], choice: Selection, misfits: list[str]) -> dict[str, list[_Match]]:
    """Return the matches of each tensor of the first checkpoint, one for each of its names."""
    first = sides[0].document
    expect_matches(first, choice.select, choice.exclude)
    known = [_Names(side) for side in sides[1:]]
    found: dict[str, list[_Match]] = {}
    tensors = 0
    for path, entry in chosen_of_ranks(first.manifest, choice.select, choice.exclude, None).items():
        for name, part in _tensors_of(path, entry):
            tensors += 1
            others = [match for names in known if (match := names.find(name, part, misfits)) is not None]
            if len(others) == len(known):
                found.setdefault(key_of(part) or name, []).append(_Match(name.partition("/")[2], part, tuple(others)))
    if not tensors:
        raise RestoreError(f"{sides[0].session.url}: has no tensors to merge")
    if not (choice.select or choice.exclude):
        for names in known:
            misfits += names.unused()
    return found


def _add_group(plan: MergePlan, key: str, match: _Match, misfits: list[str]) -> None:
    """Add a tensor to those that are mixed, or to those that must be equal."""
    entries = (match.entry, *match.others)
    dtypes = [BY_NAME[each.dtype] for each in entries]
    wide = None if "%[" in match.name else find_wide_dtype(dtypes)
    if wide is not None:
        if math.prod(match.entry.shape):
            plan.groups[key] = MixedGroup(match.name, entries, wide)
        return
    if len(set(dtypes)) > 1:
        misfits.append(f"{match.name}: its dtypes cannot be merged: {', '.join(each.dtype for each in entries)}")
        return
    for number, other in enumerate(match.others):
        plan.equal[number].append(Pair(match.name, match.entry, other, other.dtype))


def _add_ties(plan: MergePlan, match: _Match, twin: _Match, others: Sequence[Opened], misfits: list[str]) -> None:
    """Add the tensors of two names to those that must be equal, since the first checkpoint has one tensor for both."""
    for number, (one, two) in enumerate(zip(match.others, twin.others, strict=True)):
        if one.dtype != two.dtype:
            misfits.append(
                f"{twin.name}: is tied to {match.name} in the first source, but in {others[number].session.url} their "
                f"dtypes are {two.dtype} and {one.dtype}"
            )
        elif key_of(one) != key_of(two):
            plan.tied[number].append(Pair(f"{match.name} and {twin.name}", one, two, one.dtype))


def _tensors_of(path: str, entry: Entry) -> Iterator[tuple[str, e.AnyTensor]]:
    """Yield the tensors of an entry. The parts of a sparse or quantised tensor are named `path%[part]`."""
    if not isinstance(entry, e.NDArrayEntry) and entry.kind != composite.KIND:
        for suffix, tensor in entry.tensors():
            yield path + suffix, tensor


class _Names:
    """The tensors of one further checkpoint, by all of their names."""

    def __init__(self, side: Opened) -> None:
        document = side.document
        self._where = str(side.url)
        self._exact: dict[str, e.AnyTensor] = {}
        self._used: dict[str, str] = {}
        """Paths here -> paths in the first checkpoint."""
        for path, entry in document.manifest.items():
            self._exact.update(_tensors_of(path, entry))
        self._aliases: dict[str, set[str]] = {}
        self._shared: dict[str, e.AnyTensor] = {}
        for path, entry in make_rank_view(document.manifest, 0, document.world_size, 1).entries.items():
            self._shared.update(_tensors_of(path, entry))
        for path in self._shared:
            for name in spellings(path):
                self._aliases.setdefault(name, set()).add(path)

    def find(self, path: str, entry: e.AnyTensor, misfits: list[str]) -> e.AnyTensor | None:
        """Return the tensor for a path in the first checkpoint's manifest, or add to `misfits`."""
        number, _, logical = path.partition("/")
        found = None
        if number != "0":
            found = self._exact.get(path)
        if found is None:
            places = self._find_places(logical)
            if len(places) > 1:
                misfits.append(f"{logical}: may be {' or '.join(sorted(places))} in {self._where}")
                return None
            for place in places:
                known = self._used.setdefault(place, path)
                if known != path:
                    owner = known if known.endswith(f"/{logical}") else known.partition("/")[2]
                    misfits.append(f"{logical}: {place} in {self._where} is matched with {owner} already")
                    return None
                found = self._shared[place]
        if found is None:
            misfits.append(f"{logical}: is missing in {self._where}; {suggest_names(logical, self._shared)}")
        elif found.shape != entry.shape:
            misfits.append(f"{logical}: has shape {list(entry.shape)}, but {list(found.shape)} in {self._where}")
            return None
        return found

    def _find_places(self, logical: str) -> set[str]:
        """Return the paths here that may be meant: the same path, or those of a common spelling."""
        if logical in self._shared:
            return {logical}
        return next((found for name in spellings(logical) if (found := self._aliases.get(name))), set())

    def unused(self) -> list[str]:
        """Return a line for each tensor that the first checkpoint does not have."""
        return [f"{path}: is only in {self._where}" for path in self._shared if path not in self._used]


def _dotted(path: str) -> str:
    return ".".join(map(decode_component, path.split("/")))


def _dotted_below(path: str) -> str:
    return _dotted(path.partition("/")[2] or path)


def spellings(path: str) -> tuple[str, ...]:
    """Return the names of a tensor, in the order in which they are compared."""
    return path, _dotted(path), _dotted_below(path)


# The checkpoints as one source of parts.


class MergeSource(MixedSource):
    """The first checkpoint's leaves, with the values that the mix of all checkpoints gives."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        origins: Sequence[Any],
        how: LeafReads,
        *,
        sides: Sequence[Opened],
        plan: MergePlan,
        mix: Mix,
        scratch: MemoryBudget,
    ) -> None:
        """`scratch`: the memory for elements of all checkpoints. See `CheckpointSource` for the others."""
        first = sides[0]
        self._groups: list[MixedGroup | None] = [plan.group(origin) for origin in origins]
        self._mix = mix
        sources = []
        for number, side in enumerate(sides):
            own = [group.entries[number] if group is not None else None for group in self._groups]
            stored = [
                leaf if entry is None else msgspec.structs.replace(leaf, dtype=entry.dtype)
                for leaf, entry in zip(leaves, own, strict=True)
            ]
            sources.append(CheckpointSource(side, stored, own, replace(how, sums=None)))
        super().__init__(first, leaves, origins, how, sources=sources, scratch=scratch)

    def is_mixed(self, leaf: int) -> bool:
        return self._groups[leaf] is not None

    def inputs_of(self, piece: Piece) -> list[InputRun]:
        group = self._groups[piece.leaf]
        assert group is not None
        return [InputRun(piece.first, piece.count, ITEMSIZE[entry.dtype]) for entry in group.entries]

    def mix(self, piece: Piece, held: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        group = self._groups[piece.leaf]
        assert group is not None
        sources = [each.view(BY_NAME[entry.dtype]) for each, entry in zip(held, group.entries, strict=True)]
        self._mix.apply(sources, group.wide, target)


# A merge: open all checkpoints, match their tensors, and write their mix in the form of the first one.


def expect_mergeable(target: Target, origins: Sequence[Location]) -> None:
    """Raise if a merge cannot write a target."""
    expect_writable(target, [origin.url for origin in origins])
    if target.format == "gguf":
        raise ValueError(f"{target.place.url}: a merge cannot write GGUF; merge to safetensors, and convert that")


def open_origins(operation: Operation, origins: Sequence[Location]) -> list[Session]:
    """Open the sources of a merge. All read into one pool, of a quarter of the memory."""
    pools: list[Pool] = []

    def shared(limit: int) -> Pool:
        if not pools:
            pools.append(Pool(limit))
        return pools[0]

    return [operation.open(origin, divisor=4, memory=MemoryDefaults(pool=shared)) for origin in origins]


_NEARLY = 1e-6


def merge_checkpoints(
    operation: Operation, origins: Sequence[Location], target: Target, choice: Selection, *, mix: Mix, others: str
) -> ConvertReport:
    """Write the mix of checkpoints. Memory: a quarter for reading, a quarter for mixing, and half for writing."""
    exchange, url = operation.exchange, target.place.url
    if others not in OTHERS:
        raise ValueError(f"others must be one of {', '.join(map(repr, OTHERS))}, got {others!r}")
    expect_mergeable(target, origins)
    for origin in origins:
        if origin.url.scheme == url.scheme and url.location.startswith(f"{origin.url.location.rstrip('/')}/"):
            raise ValueError(f"{url}: the destination is inside the source {origin.url}; merge to another path")
    sessions = open_origins(operation, origins)
    arguments = {
        "sources": [origin.url for origin in origins],
        **target.agreed(),
        **choice.arguments(),
        "others": others,
        "mix": repr(mix),
    }
    sides = open_sources(exchange, "merge", arguments, sessions)
    for side in sides:
        expand_trees(side, side.document.manifest)
    plan = plan_merge(sides, choice)
    _expect_readable(sides, plan, choice, exchange)
    scratch = MemoryBudget(operation.part(4) or sessions[0].budget.total)
    changed = _compare(sides, plan, others, scratch, exchange)
    total = math.fsum(mix.factors)
    if abs(total - 1) > _NEARLY and mix.keep == mix.divisor == 1:
        log.warning("%s: the weights add up to %g, not 1; they are used as given", url, total)

    def make_source(opened: Opened, *leaves: Any) -> MergeSource:
        return MergeSource(*leaves, sides=sides, plan=plan, mix=mix, scratch=scratch)

    def splits(entry: AnyTensor) -> bool:
        group = plan.group(entry)
        return all(reads_ranges(each) for each in (group.entries if group is not None else [entry]))

    report = write_checkpoint(operation, sides[0], choice, target, make_source=make_source, splits=splits)
    report = replace(report, changed=(*report.changed, *changed))
    return operation.done(report, "merged", bytes=report.nbytes)


def _expect_readable(sides: Sequence[Opened], plan: MergePlan, choice: Selection, exchange: Exchange) -> None:
    """Raise unless all needed files exist, and match the checksums of other libraries' archives."""
    first = sides[0].document
    needed = [selected_locations(first, choice.select, choice.exclude)]
    for number in range(1, len(sides)):
        entries = {group.name: group.entries[number] for group in plan.groups.values()}
        entries |= {pair.name: pair.b for pair in (*plan.equal[number - 1], *plan.tied[number - 1])}
        needed.append(find_locations(entries, sides[number].document.files))
    for side, locations in zip(sides, needed, strict=True):
        run(expect_files(side, locations))
        if choice.verify:
            expect_checksums(exchange, side)


def _compare(
    sides: Sequence[Opened], plan: MergePlan, others: str, memory: MemoryBudget, exchange: Exchange
) -> tuple[str, ...]:
    """Compare the tensors that must be equal. Return a line for each that is taken from the first checkpoint."""
    differing: dict[str, list[str]] = {}
    torn: list[str] = []
    for number, side in enumerate(sides[1:]):
        equal, tied = plan.equal[number], plan.tied[number]
        if equal:
            run(compare_pairs(sides[0], side, equal, memory, Meter("compare", None), exchange=exchange))
        if tied:
            run(compare_pairs(side, side, tied, memory, Meter("compare", None), exchange=exchange))
        for pair in equal:
            if pair.differs:
                differing.setdefault(pair.name, []).append(str(side.url))
        torn += [
            f"{pair.name}: are one tensor in the first source, but differ in {side.url}"
            for pair in tied
            if pair.differs
        ]
    lines = [f"{name}: differs in {', '.join(where)}" for name, where in differing.items()]
    if others == "first" and not torn:
        return tuple(f"{line}; the first source's values are kept" for line in lines)
    if lines or torn:
        misfits = [*lines, *torn]
        error = RestoreError(
            f"{sides[0].session.url}: {counted(len(misfits), 'tensor')} cannot be averaged and must be equal in all "
            f"sources:{listed(misfits)}",
            misfits,
        )
        if lines and not torn:
            error.cure = "pass others='first' to keep the first source's values, or exclude them"
        raise error
    return ()


@with_options(MergeOptions)
def merge(
    sources: Sequence[str | os.PathLike[str] | Snapshot],
    target: str | os.PathLike[str] | Target,
    *,
    weights: Sequence[float] | None = None,
    ema: float | None = None,
    others: str = "equal",
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    options: MergeOptions | None = None,
) -> ConvertReport:
    """Merge checkpoints into one, within the memory budget: their average, a weighted sum, or a moving average.

    The sources may have different formats, storages, splits and shards. The result has the structure of the first
    one, with its values that are not tensors. Its tensors must exist in every source, with the same shapes. Paths
    match, and so do names that are joined with dots, with or without the first component. Without `select` and
    `exclude`, no source may have more tensors than the first one.

    Floating-point tensors are added in float32, or float64 if a source has float64, in the order of the sources. Each
    operation rounds once. The result is rounded to the dtype of the first source. NaN and infinity behave as in
    arithmetic on tensors. Complex tensors are treated alike.

    Args:
        sources: The checkpoints: paths of anything that `Snapshot` opens, or `Snapshot` objects. For `ema`, in order of
            time. Values that are not tensors are read from the first one, whose `allow_pickle` counts.
        target: The destination: a path whose suffix tells the format, or a `Target` with its format and options.
        weights: A finite factor for each source. They are used as given. A warning is logged unless their sum is 1.
            The default is the average: the sum, divided by the number of sources.
        ema: The decay of an exponential moving average: `average = ema * average + (1 - ema) * next`, beginning with
            the first source.
        others: `"equal"`: integer, bool, sparse and quantised tensors must be equal in all sources. `"first"`: those of
            the first source are kept, and the report lists the ones that differ.
        select: Globs over `<key>/<logical path>` of the first source to merge; all by default.
        exclude: Globs to leave out.
        options: The dtype, verification, memory, progress and ranks, as `MergeOptions`.

    Raises:
        RestoreError: The sources do not fit. `mismatches` lists every reason; nothing was written.
        SnapshotExistsError: The destination exists; nothing was written.
        CorruptSnapshotError: A source is damaged; nothing was committed.
        UnsupportedFormatError: The format cannot hold a tensor; nothing was written.

    >>> import torch
    >>> import snapshot, snapshot_merge
    >>> for number in (1, 2):
    ...     state = snapshot.StateDict(weight=torch.full((3,), float(number)))
    ...     taken = snapshot.Snapshot.take(f"memory://docs/run-{number}", {"model": state})
    >>> snapshot_merge.merge(["memory://docs/run-1", "memory://docs/run-2"], "memory://docs/soup").tensors
    1
    >>> snapshot.load("memory://docs/soup")
    {'weight': tensor([1.5000, 1.5000, 1.5000])}
    """
    options = options or MergeOptions()
    expect_options(options, MergeOptions)
    paths = [] if isinstance(sources, (str, os.PathLike)) or not isinstance(sources, Iterable) else list(sources)
    if len(paths) < 2 or not all(isinstance(each, (str, os.PathLike, Snapshot)) for each in paths):
        raise ValueError(f"sources must be paths of at least 2 checkpoints, or Snapshot objects, got {sources!r}")
    if weights is not None and ema is not None:
        raise ValueError("weights and ema exclude each other: pass one of them")
    count = len(paths)
    mix = Mix.average(count)
    if weights is not None:
        mix = Mix.weighted(weights, count)
    elif ema is not None:
        mix = Mix.moving_average(ema, count)
    origins, made = [Snapshot.of(each) for each in paths], Target.of(target)
    choice = Selection(select, exclude, None, options.dtype, options.verify, origins[0].allow_pickle)
    url = made.place.url
    with operation(
        "merge",
        url,
        pg=origins[0].pg,
        ranks=options.ranks,
        budget=options.memory_budget_bytes,
        progress=options.progress,
    ) as op:
        return merge_checkpoints(op, [each.location for each in origins], made, choice, mix=mix, others=others)
