"""Comparison of two checkpoints: by their manifests if possible, otherwise by reading.

Names are compared without ranks, since a replicated or sharded tensor is the same on every rank. Entries of a single
rank are compared rank by rank.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.events import emit
from snapshot.loading.foreign_objects import expand_objects
from snapshot.loading.scatter import place_of
from snapshot.manifest import entries as e
from snapshot.manifest.counting import is_leaf
from snapshot.manifest.document import OWN_FORMATS, Document
from snapshot.manifest.rank_view import MOST_RANKS, is_rank
from snapshot.options import expect_positive
from snapshot.plan.globs import expect_globs, find_unmatched, matcher
from snapshot.plan.renaming import Rename
from snapshot.progress import Meter
from snapshot.reports import Change, Diff
from snapshot.runtime.budget import MemoryBudget
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.state.stateful_kinds import Kind
from snapshot.verbs.diff_bytes import Pair, Side, compare_pairs
from snapshot.verbs.diff_entries import NO_NUMBERS, EntryDifference, compare_entries, content_of, value_text
from snapshot.verbs.joint_call import expect_same_plan, open_sources
from snapshot.verbs.select import change_of

Rank = int | None
"""The owner of an entry: a rank, or None if ranks share it."""
TIED = (*OWN_FORMATS, "torch.save")
"""Formats that record which names belong to one tensor."""


class DiffNames:
    """A checkpoint's entries by name and rank."""

    def __init__(self, document: Document, manifest: Mapping[str, Any]) -> None:
        self.format = document.format
        self.world = document.world_size
        self.forms: dict[str, dict[Rank, Any]] = {}
        sharded: dict[str, list[str]] = defaultdict(list)
        for path, entry in manifest.items():
            number, _, logical = path.partition("/")
            if not is_rank(number, document.world_size):
                raise CorruptSnapshotError(f"{path[:200]!r} must belong to one of {document.world_size} ranks")
            if isinstance(entry, e.ShardedTensorEntry):
                sharded[logical].append(number)
                continue
            shared = document.world_size == 1 or entry.replicated
            self.forms.setdefault(logical, {})[None if shared else int(number)] = entry
        for logical, numbers in sharded.items():
            for number in numbers:  # pipeline stages may use one name for different tensors
                rank = None if len(numbers) == 1 else int(number)
                self.forms.setdefault(logical, {})[rank] = manifest[f"{number}/{logical}"]

    def rename(self, rename: Rename | None) -> None:
        """Rename the entries. Containers above renamed entries, which have no new name, are dropped."""
        if rename is None:
            return
        change = change_of(rename, self.forms)
        made: dict[str, dict[Rank, Any]] = {}
        for name, form in self.forms.items():
            new = change(name).strip("/")
            if not new:
                if not all(isinstance(entry, e.Container) for entry in form.values()):
                    raise RestoreError(
                        f"rename must not give {name!r} an empty name; only a container may have one", [name]
                    )
                continue
            if new in made:
                raise RestoreError(
                    f"rename must not give two entries the name {new!r}", [f"{name}: renamed to {new!r} as well"]
                )
            made[new] = form
        self.forms = made

    def at(self, name: str, rank: Rank) -> Any:
        """Return the entry of a rank under a name."""
        form = self.forms.get(name, {})
        return form.get(rank, form.get(None))

    def ties(self) -> dict[tuple[str, Rank], frozenset[str]]:
        """Return, for each name, all names that are tied to it."""
        held: dict[Any, list[tuple[str, Rank]]] = defaultdict(list)
        for name, form in self.forms.items():
            for rank, entry in form.items():
                if isinstance(entry, e.TENSORS) and entry.nbytes and (pieces := entry.pieces()):
                    first = pieces[0][1]
                    held[place_of(first), first.byte_range, entry.dtype, entry.shape].append((name, rank))
        return {
            each: frozenset(name for name, _ in group) - {each[0]}
            for group in held.values()
            if len(group) > 1
            for each in group
        }


@dataclass
class _DiffItem:
    """A name that both checkpoints have."""

    path: str
    found: EntryDifference
    pairs: list[Pair] = field(default_factory=list)


def compare_snapshots(
    openers: Sequence[Callable[[int | None], Session]],
    *,
    values: bool,
    select: Sequence[str],
    exclude: Sequence[str],
    rename: Rename | None,
    budget: int | None,
    meter: Meter,
    exchange: Exchange,
) -> Diff:
    """Compare the checkpoints at two locations. Half of the budget is for comparing, a quarter for reading each."""
    for name, globs in (("select", select), ("exclude", exclude)):
        expect_globs(name, globs)
    expect_positive("memory_budget_bytes", budget)
    opened: list[Session] = []
    try:
        for opener in openers:
            opened.append(opener(None if budget is None else max(1, budget // 4)))
        return find_differences(
            *opened,
            values=values,
            select=select,
            exclude=exclude,
            rename=rename,
            budget=budget,
            meter=meter,
            exchange=exchange,
        )
    finally:
        meter.close()
        for session in opened:
            run(session.close())


def find_differences(
    a: Session,
    b: Session,
    *,
    values: bool,
    select: Sequence[str],
    exclude: Sequence[str],
    rename: Rename | None,
    budget: int | None,
    meter: Meter,
    exchange: Exchange,
) -> Diff:
    """Compare two open checkpoints. The ranks of `exchange` share the reading."""
    began = time.perf_counter()
    arguments = {"a": a.url, "b": b.url, "values": values, "select": select, "exclude": exclude, "rename": rename}
    documents = open_sources(exchange, "diff", arguments, (a, b))
    sides = [Side(session, document) for session, document in zip((a, b), documents, strict=True)]
    here, there = (_read_names(side) for side in sides)
    here.rename(rename)
    chosen = _choose_items([*here.forms, *there.forms], select, exclude)
    removed, added, items = _match_items(here, there, chosen, values)
    changes = _find_renamed(removed, added)
    pairs = [pair for item in items for pair in item.pairs]
    nbytes = 0
    planned = [(pair.name, pair.dtype, pair.nbytes) for pair in pairs]
    expect_same_plan(exchange, [*planned, *(item.path for item in items), *removed, *added])
    if pairs:
        held = MemoryBudget(max(1, budget // 2) if budget is not None else min(a.budget.total, b.budget.total))
        nbytes = run(compare_pairs(sides[0], sides[1], pairs, held, meter, exchange=exchange))
    equal = 0
    for item in items:
        change = _make_change(item)
        if change is None:
            equal += item.found.counts
        else:
            changes.append(change)
    read = sum(bool(item.pairs) for item in items)
    seconds = time.perf_counter() - began
    ordered = sorted(changes, key=lambda change: change.path)
    found = Diff(str(a.url), str(b.url), tuple(ordered), equal, read, nbytes, seconds)
    emit("compared", "diff", str(b.url), bytes=nbytes, seconds=round(seconds, 3), changes=len(ordered))
    return found


def _read_names(side: Side) -> DiffNames:
    manifest = dict(side.document.manifest)
    expand_objects(side.session, side.document, manifest, lambda _: True, Kind)
    return DiffNames(side.document, manifest)


def _choose_items(names: Iterable[str], select: Sequence[str], exclude: Sequence[str]) -> Any:
    """Return a function that selects names. Raise for a glob that matches nothing in either checkpoint."""
    included, excluded = matcher(select or ["**"]), matcher(exclude)
    missing = find_unmatched([*select, *exclude], names) if select or exclude else []
    if missing:
        raise RestoreError(f"the glob {missing[0]!r} matches nothing in either", missing)
    return lambda name: included(name) and not excluded(name)


def _ranks(here: Mapping[Rank, Any], there: Mapping[Rank, Any], world: int) -> list[Rank]:
    """Return the ranks whose entries of one name are compared.

    An entry that one side shares is compared with each rank's entry of the other side. A rank that exists in both
    (there are `world`) and has no entry has lost it.
    """
    own = {rank for rank in (*here, *there) if rank is not None}
    shared = [None in each for each in (here, there)]
    if here and there and shared[0] != shared[1]:
        held = (here if shared[0] else there)[None]
        sharded = isinstance(held, e.ShardedTensorEntry)
        most = min(world, MOST_RANKS)
        own.update(rank for rank in range(most) if not sharded or held.is_held_by(rank))
    return [*[None] * (all(shared) or (any(shared) and not (here and there))), *sorted(own)]


def _match_items(
    here: DiffNames, there: DiffNames, chosen: Any, values: bool
) -> tuple[dict[str, Any], dict[str, Any], list[_DiffItem]]:
    """Return the entries of the first only, of the second only, and of both."""
    removed: dict[str, Any] = {}
    added: dict[str, Any] = {}
    items = []
    ties = here.ties(), there.ties()
    known = here.format in TIED and there.format in TIED
    world = min(here.world, there.world)
    for name in {**here.forms, **there.forms}:
        if not chosen(name):
            continue
        for rank in _ranks(here.forms.get(name, {}), there.forms.get(name, {}), world):
            path = name if rank is None else f"{rank}/{name}"
            a, b = here.at(name, rank), there.at(name, rank)
            if a is None or b is None:
                only, entry = (added, b) if a is None else (removed, a)
                if is_leaf(entry):
                    only[path] = entry
                continue
            item = _DiffItem(path, *compare_entries(path, a, b, values, same_format=here.format == there.format))
            if known:
                _compare_ties(item, name, rank, ties, here=here, there=there)
            items.append(item)
    return removed, added, items


def _compare_ties(item: _DiffItem, name: str, rank: Rank, ties: Any, *, here: DiffNames, there: DiffNames) -> None:
    """Compare the ties of a tensor in both checkpoints, among names that both have."""
    before, after = (
        {each for each in tied.get((name, rank), ()) if each in here.forms and each in there.forms} for tied in ties
    )
    if before != after:
        text = [f"tied to {', '.join(sorted(each)[:3])}" if each else "not tied" for each in (before, after)]
        item.found.add("ties", f"{text[0]} -> {text[1]}")


def _find_renamed(removed: dict[str, Any], added: dict[str, Any]) -> list[Change]:
    """Replace a removed and an added entry by a renamed one, if exactly one of each has the same bytes."""
    by_content: dict[Any, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for which, entries in enumerate((removed, added)):
        for path, entry in entries.items():
            content = content_of(entry)
            if content is not None:
                by_content[content][which].append(path)
    changes = []
    gone: set[str] = set()
    come: set[str] = set()
    for before, after in by_content.values():
        if len(before) == len(after) == 1:
            changes.append(Change("renamed", after[0], before=before[0]))
            gone.add(before[0])
            come.add(after[0])
    changes += [
        Change("removed", path, detail=value_text(entry)) for path, entry in removed.items() if path not in gone
    ]
    changes += [Change("added", path, detail=value_text(entry)) for path, entry in added.items() if path not in come]
    return changes


def _make_change(item: _DiffItem) -> Change | None:
    found = item.found
    if any(pair.differs and not pair.cast for pair in item.pairs) and "bytes" not in found.what:
        found.add("bytes", "")
    if not found.what:
        return None
    numbers = next((pair.numbers for pair in item.pairs if pair.numbers is not None), None)
    if numbers is not None and any(pair.differs for pair in item.pairs if pair.numbers is None):
        numbers, found.numberless = None, True  # a sparse tensor stores other elements
    if found.numberless and not {"bytes", "dtype", "kind"}.isdisjoint(found.what):
        found.details.append(NO_NUMBERS)
    return Change(
        "changed",
        item.path,
        tuple(found.what),
        "; ".join(filter(None, found.details)),
        values=None if numbers is None else numbers.values(),
    )
