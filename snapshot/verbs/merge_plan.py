"""Plan of a merge: the tensors of each checkpoint that belong together, and all reasons why they do not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from snapshot.errors import RestoreError
from snapshot.manifest import entries as e
from snapshot.manifest.paths import decode_component
from snapshot.manifest.rank_view import make_rank_view, suggest_names
from snapshot.tensors import generators
from snapshot.tensors.dtypes import BY_NAME
from snapshot.text import listed
from snapshot.verbs.diff_bytes import Pair, Side
from snapshot.verbs.mixing import find_wide_dtype
from snapshot.verbs.select import chosen_of_ranks, expect_matches, expect_sound, places_of
from snapshot.verbs.to_snapshot import Selection


class Group(NamedTuple):
    """One tensor of the result: its entry in each checkpoint, and the dtype that they are added in."""

    name: str
    entries: tuple[e.AnyTensor, ...]
    wide: torch.dtype


@dataclass
class MergePlan:
    """The tensors to mix, and those that must be equal."""

    groups: dict[str, Group] = field(default_factory=dict)
    """The tensors to mix, by `key_of` their entry in the first checkpoint."""
    equal: list[list[Pair]] = field(default_factory=list)
    """For each further checkpoint, its tensors that must be equal to those of the first one."""
    tied: list[list[Pair]] = field(default_factory=list)
    """For each further checkpoint, its tensors that must be equal since the first one has one tensor for both."""

    def group(self, entry: Any) -> Group | None:
        """Return the tensors that are mixed for an entry of the first checkpoint, if any."""
        return self.groups.get(key_of(entry)) if isinstance(entry, e.TENSORS) else None


def key_of(entry: e.AnyTensor) -> str:
    """Return a text that is equal for two entries of the same stored elements."""
    return repr((places_of(entry), entry.dtype, entry.shape)) if math.prod(entry.shape) else ""


@dataclass(frozen=True)
class _Match:
    """One tensor of the first checkpoint under one of its names, and the tensors of the others for it."""

    name: str
    entry: e.AnyTensor
    others: tuple[e.AnyTensor, ...]


def plan_merge(sides: Sequence[Side], choice: Selection) -> MergePlan:
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


def _match_names(sides: Sequence[Side], choice: Selection, misfits: list[str]) -> dict[str, list[_Match]]:
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
            plan.groups[key] = Group(match.name, entries, wide)
        return
    if len(set(dtypes)) > 1:
        misfits.append(f"{match.name}: its dtypes cannot be merged: {', '.join(each.dtype for each in entries)}")
        return
    for number, other in enumerate(match.others):
        plan.equal[number].append(Pair(match.name, match.entry, other, other.dtype))


def _add_ties(plan: MergePlan, match: _Match, twin: _Match, others: Sequence[Side], misfits: list[str]) -> None:
    """Add the tensors of two names to those that must be equal, since the first checkpoint has one tensor for both."""
    for number, (one, two) in enumerate(zip(match.others, twin.others, strict=True)):
        if one.dtype != two.dtype:
            misfits.append(
                f"{twin.name}: is tied to {match.name} in the first source, but in {others[number].session.url} their "
                f"dtypes are {two.dtype} and {one.dtype}"
            )
        elif key_of(one) != key_of(two):
            plan.tied[number].append(Pair(f"{match.name} and {twin.name}", one, two, one.dtype))


def _tensors_of(path: str, entry: e.Entry) -> Iterator[tuple[str, e.AnyTensor]]:
    """Yield the tensors of an entry. The parts of a sparse or quantised tensor are named `path%[part]`."""
    if isinstance(entry, e.TENSORS):
        yield path, entry
    elif isinstance(entry, e.TensorPartsEntry) and entry.kind != generators.KIND:
        for name, part in entry.parts.items():
            yield f"{path}%[{name}]", part


class _Names:
    """The tensors of one further checkpoint, by all of their names."""

    def __init__(self, side: Side) -> None:
        document = side.document
        self._where = str(side.session.url)
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
            for name in _spellings(path):
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
        return next((found for name in _spellings(logical) if (found := self._aliases.get(name))), set())

    def unused(self) -> list[str]:
        """Return a line for each tensor that the first checkpoint does not have."""
        return [f"{path}: is only in {self._where}" for path in self._shared if path not in self._used]


def _dotted(path: str) -> str:
    return ".".join(map(decode_component, path.split("/")))


def _dotted_below(path: str) -> str:
    return _dotted(path.partition("/")[2] or path)


def _spellings(path: str) -> tuple[str, ...]:
    """Return the names of a tensor, in the order in which they are compared."""
    return path, _dotted(path), _dotted_below(path)
