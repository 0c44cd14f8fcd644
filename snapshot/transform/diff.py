"""Comparison of two checkpoints: by their manifests if possible, otherwise by reading."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshot.distributed.operation import Operation
from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.formats.pickled_objects import is_refused
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.url import Location
from snapshot.loading.open import Opened
from snapshot.loading.read_object import expand_objects, expand_trees, is_tree
from snapshot.loading.read_requests import is_packed, place_of
from snapshot.manifest import entries as e
from snapshot.manifest.document import OWN_FORMATS, Document
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.rank_view import MOST_RANKS, is_rank
from snapshot.manifest.values import LONGEST_SUMMARY, Scalar
from snapshot.plan.names import Rename, expect_globs, find_unmatched, matcher
from snapshot.reports import Change, Diff
from snapshot.state.stateful import RestoreAdapter
from snapshot.tensors.memory import ITEMSIZE
from snapshot.transform.call import change_of, clean_extra, expect_same_plan, open_sources
from snapshot.transform.diff_bytes import Numbers, Pair, are_comparable, as_bytes, compare_pairs

# Comparison of two entries: the differences in the manifests, and the tensors that must be read.

NO_NUMBERS = "no numbers for this kind"
"""The message if the size of a difference was requested but is undefined."""


@dataclass
class EntryDifference:
    """The differences of an entry."""

    what: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    counts: int = 1
    """True if it counts as an entry, unlike containers with contents."""
    numberless: bool = False
    """True if the size of the difference was requested, but is undefined for this kind."""

    def add(self, what: str, detail: str) -> None:
        """Add a difference."""
        self.what.append(what)
        self.details.append(detail)


def compare_entries(
    path: str, a: Any, b: Any, values: bool, *, same_format: bool
) -> tuple[EntryDifference, list[Pair]]:
    """Return the differences of two entries, and the pairs of tensors that must be read to complete them."""
    found = EntryDifference(counts=int(is_leaf(b)))
    pairs: list[Pair] = []
    if type(a) is type(b) is e.TensorEntry and a.digest is not None and not values and _has_same_bytes(a, b):
        return found, pairs  # most entries, in a few steps
    if a.kind != b.kind:
        found.add("kind", f"{a.summarise()} -> {b.summarise()}")
    elif a.is_container:
        _compare_containers(found, a, b, same_format)
    elif a.is_value:
        if a.identity != b.identity:
            found.add("value", _compare_kinds(a, b))
    elif a.is_tensor:
        _compare_tensors(found, pairs, path, a, b=b, values=values)
    elif isinstance(a, e.NDArrayEntry):
        _compare_arrays(found, pairs, path, a, b=b, values=values)
    elif isinstance(a, e.TensorPartsEntry):
        _compare_parts(found, pairs, path, a, b=b, values=values)
    else:
        _compare_objects(found, pairs, path, a, b)
    return found, pairs


def _has_same_bytes(a: e.TensorEntry, b: e.TensorEntry) -> bool:
    """Return True if two tensors have the same dtype, shape and digest."""
    raw = a.serializer == b.serializer == "raw"
    return raw and (a.digest, a.dtype, a.shape, a.extra) == (b.digest, b.dtype, b.shape, b.extra)


def _compare_kinds(a: Scalar, b: Scalar) -> str:
    """Return two values as short text; for long values, the text around the first difference."""
    here, there = (each.readable or each.serialized_value for each in (a, b))
    if here == there:  # equal readable forms, but different stored values
        here, there = (each.serialized_value for each in (a, b))
    if max(len(here), len(there)) <= LONGEST_SUMMARY:
        return f"{a.kind} {here} -> {b.kind} {there}"
    alike = (x == y for x, y in zip(here, there, strict=False))
    first = next((i for i, same in enumerate(alike) if not same), min(len(here), len(there)))
    begin = max(0, first - LONGEST_SUMMARY // 3)
    texts = []
    for text in (here, there):
        end = begin + LONGEST_SUMMARY
        cut = f"{'...' * (begin > 0)}{text[begin:end]}{'...' * (end < len(text))}"
        texts.append(f"{cut} ({len(text):,} characters)")
    return f"{a.kind} {texts[0]} -> {texts[1]}, from character {first:,} on"


def _compare_containers(found: EntryDifference, a: Any, b: Any, same_format: bool) -> None:
    """Compare the properties of containers that their children do not show: order, length, key types and settings."""
    if a.is_keyed and b.is_keyed:
        here, there = (dict(zip(each.components(), each.keys, strict=True)) for each in (a, b))
        both = [name for name in here if name in there]
        if any(here[name] != there[name] for name in both):
            found.add("keys", "keys of other types")
        if both != [name for name in there if name in here]:
            found.add("order", "keys in another order")
    elif a.width != b.width:
        found.add("length", f"{a.width} -> {b.width} elements")
    long = ("context", *(("module_versions",) if same_format else ()))
    for name in ("maxlen", "factory", "obj_type", "dtype", "shape", "requires_grad", *long):
        before, after = getattr(a, name, None), getattr(b, name, None)
        if before != after:
            what = "class" if name == "obj_type" else name
            found.add(what, what if name in long else f"{what} {before} -> {after}")


def _compare_tensors(found: EntryDifference, pairs: list[Pair], path: str, a: Any, *, b: Any, values: bool) -> None:
    if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
        found.what += [name for name in ("dtype", "shape") if getattr(a, name) != getattr(b, name)]
        found.details.append(f"{a.summarise()} -> {b.summarise()}")
    here, there = (clean_extra(each) or e.PLAIN for each in (a, b))
    for name in ("stride_order", "subclass", "requires_grad"):
        before, after = getattr(here, name), getattr(there, name)
        if before != after:
            found.add(name, f"{name} {before} -> {after}")
    if tuple(a.shape) == tuple(b.shape):
        _compare_bytes(found, pairs, path, a, b=b, values=values)


def _compare_bytes(found: EntryDifference, pairs: list[Pair], path: str, a: Any, *, b: Any, values: bool) -> None:
    """Compare the bytes of two tensors of one shape by digests, or add them to the pairs to read."""
    differs = True if a.dtype != b.dtype else by_digests(a, b)
    if differs and a.dtype == b.dtype:
        found.add("bytes", "")
    if not math.prod(a.shape):
        return
    if a.dtype not in ITEMSIZE or b.dtype not in ITEMSIZE:  # a type that is listed, but not read
        if differs is None and a.nbytes == b.nbytes:
            pairs.append(Pair(path, as_bytes(a), as_bytes(b), "uint8"))
        elif differs is None:
            found.add("bytes", "")
        found.numberless |= values
        return
    numbers = values and are_comparable(a.dtype) and are_comparable(b.dtype)
    if differs is None or (differs and numbers):
        made = Numbers(a.dtype, b.dtype) if numbers else None
        pairs.append(Pair(path, a, b, a.dtype if made is None else made.dtype, made, cast=a.dtype != b.dtype))
    found.numberless |= values and not numbers


def by_digests(a: Any, b: Any) -> bool | None:
    """Return True if two tensors of one dtype and shape differ by their digests, or None if digests cannot tell.

    A digest may be missing, or the tensors may be split differently.
    """
    before, after = _digests_of(a), _digests_of(b)
    if before is None or after is None or before.keys() != after.keys():
        return None
    return before != after


def _digests_of(entry: e.AnyTensor) -> dict[Any, str] | None:
    made = {}
    for box, stored in entry.pieces():
        if not box.numel:
            continue
        if stored.digest is None or is_packed(stored):
            return None
        made[box] = stored.digest
    return made


def _compare_arrays(
    found: EntryDifference, pairs: list[Pair], path: str, a: e.NDArrayEntry, *, b: e.NDArrayEntry, values: bool
) -> None:
    for name in ("dtype", "shape", "order", "scalar"):
        before, after = getattr(a, name), getattr(b, name)
        if before != after:
            found.add(name, f"{name} {before} -> {after}")
    if (a.data.dtype, tuple(a.data.shape)) == (b.data.dtype, tuple(b.data.shape)):
        plain = isinstance(a.dtype, str) and a.dtype[1:2] in "biufc" and a.data.shape == a.shape
        numbers = plain and a.dtype == b.dtype
        _compare_bytes(found, pairs, path, a.data, b=b.data, values=values and numbers)
        found.numberless |= values and not numbers


def _compare_parts(
    found: EntryDifference, pairs: list[Pair], path: str, a: e.TensorPartsEntry, *, b: e.TensorPartsEntry, values: bool
) -> None:
    if a.params != b.params or a.parts.keys() != b.parts.keys():
        found.add("kind", _compare_params(a.params, b.params))
    both = [name for name in a.parts if name in b.parts]
    where = [name for name in both if name.endswith("indices")]
    numbers = values and bool(where) and a.params == b.params
    numbers = numbers and not any(_known_to_differ(a.parts[name], b.parts[name]) for name in where)
    inner = EntryDifference()
    for name in both:
        own = numbers and name == "values"
        _compare_tensors(inner, pairs, f"{path}[{name}]", a.parts[name], b=b.parts[name], values=own)
    for what in dict.fromkeys(inner.what):
        found.add(what, "")
    found.details += [each for each in inner.details if each]
    found.numberless = values and (not numbers or inner.numberless)


def _known_to_differ(a: Any, b: Any) -> bool:
    return (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)) or by_digests(a, b) is True


def _compare_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the parameters that differ, as text."""
    lines = []
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            here, there = (_shorten(each.get(name)) for each in (a, b))
            lines.append(f"{name} {here} -> {there}" if here != there else f"{name} differs")
    return ", ".join(lines) or "other parts"


def _shorten(value: Any) -> str:
    text = str(float.fromhex(value)) if isinstance(value, str) and value.lstrip("-").startswith("0x") else str(value)
    return text if len(text) <= LONGEST_SUMMARY else f"{text[:LONGEST_SUMMARY]}..."


def _compare_objects(found: EntryDifference, pairs: list[Pair], path: str, a: e.ObjectEntry, b: e.ObjectEntry) -> None:
    if (a.serializer, a.obj_type) != (b.serializer, b.obj_type) and a.obj_type != b.obj_type:
        found.add("kind", f"{a.obj_type} -> {b.obj_type}")
    if a.nbytes != b.nbytes or is_refused(a) or is_refused(b):
        found.add(
            "bytes",
            f"{a.summarise()} -> {b.summarise()}" if a.nbytes != b.nbytes else "cannot be read without a pickle",
        )
    elif a.digest is not None and b.digest is not None:
        if a.digest != b.digest:
            found.add("bytes", "")
    elif a.nbytes:
        pairs.append(Pair(path, as_bytes(a), as_bytes(b), "uint8"))


def content_of(entry: Any) -> Any:
    """Return a key of an entry's bytes, or None if it has no bytes or no digests."""
    if entry.is_tensor:
        held = _digests_of(entry)
        return ("Tensor", entry.dtype, tuple(entry.shape), repr(clean_extra(entry)), _freeze(held)) if held else None
    if isinstance(entry, e.NDArrayEntry):
        held = _digests_of(entry.data)
        return ("ndarray", str(entry.dtype), tuple(entry.shape), entry.order, _freeze(held)) if held else None
    if entry.is_object and entry.digest is not None and entry.nbytes:
        return "object", entry.serializer, entry.obj_type, entry.nbytes, entry.digest
    return None


def _freeze(held: dict[Any, str]) -> Iterable[Any]:
    return tuple(sorted(held.items()))


# Comparison of two checkpoints
#
# Names are compared without ranks, since a replicated or sharded tensor is the same on every rank. Entries of a
# single rank are compared rank by rank.

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
            if entry.is_sharded:
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
                if not all(entry.is_container for entry in form.values()):
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

    def ties(self) -> dict[tuple[str, Rank], frozenset[str]]:
        """Return, for each name, all names that are tied to it."""
        firsts: dict[Any, tuple[str, Rank]] = {}
        groups: dict[Any, list[tuple[str, Rank]]] = {}
        for name, form in self.forms.items():
            for rank, entry in form.items():
                if not entry.is_tensor or not entry.nbytes:
                    continue
                stored = entry.stored()[0]
                place = *place_of(stored), stored.byte_range[1], entry.dtype, entry.shape
                each = name, rank
                first = firsts.setdefault(place, each)
                if first is not each:
                    groups.setdefault(place, [first]).append(each)
        return {each: frozenset(name for name, _ in group) - {each[0]} for group in groups.values() for each in group}


@dataclass
class _DiffItem:
    """A name that both checkpoints have."""

    path: str
    found: EntryDifference
    pairs: list[Pair] = field(default_factory=list)


def compare_snapshots(
    operation: Operation,
    places: Sequence[Location],
    *,
    values: bool,
    select: Sequence[str],
    exclude: Sequence[str],
    rename: Rename | None,
) -> Diff:
    """Compare two checkpoints. Half of the memory is for comparing, a quarter for reading each."""
    for name, globs in (("select", select), ("exclude", exclude)):
        expect_globs(name, globs)
    a, b = (operation.open(place, divisor=4) for place in places)
    exchange = operation.exchange
    arguments = {"a": a.url, "b": b.url, "values": values, "select": select, "exclude": exclude, "rename": rename}
    sides = open_sources(exchange, "diff", arguments, (a, b))
    whole = bool(select or exclude or rename)
    here, there = (_read_names(a, b, whole=whole) for a, b in (sides, sides[::-1]))
    here.rename(rename)
    chosen = _choose_items([*here.forms, *there.forms], select, exclude)
    removed, added, items = _match_items(here, there, chosen, values)
    changes = _find_renamed(removed, added)
    pairs = [pair for item in items for pair in item.pairs]
    nbytes = 0
    planned = [(pair.name, pair.dtype, pair.nbytes) for pair in pairs]
    expect_same_plan(exchange, [*planned, *(item.path for item in items), *removed, *added])
    if pairs:
        held = MemoryBudget(operation.part(2) or min(a.budget.total, b.budget.total))
        nbytes = run(compare_pairs(sides[0], sides[1], pairs, held, operation.meter, exchange=exchange))
    equal = 0
    for item in items:
        change = _make_change(item)
        if change is None:
            equal += item.found.counts
        else:
            changes.append(change)
    read = sum(bool(item.pairs) for item in items)
    ordered = sorted(changes, key=lambda change: change.path)
    found = Diff(str(a.url), str(b.url), tuple(ordered), equal, read, nbytes, 0.0)
    return operation.done(found, "compared", bytes=nbytes, changes=len(ordered))


def _read_names(side: Opened, other: Opened, *, whole: bool) -> DiffNames:
    """Return the names of one side. Trees of plain values that are equal on both are one name, unless `whole`."""
    manifest = dict(side.document.manifest)
    there: Mapping[str, Any] = other.document.manifest

    def differs(path: str) -> bool:
        return whole or not is_tree(there.get(path)) or getattr(manifest[path], "digest", None) != there[path].digest

    expand_trees(side, manifest, differs)
    expand_objects(side, manifest, lambda _: True, RestoreAdapter)
    return DiffNames(side.document, manifest)


def _choose_items(names: Iterable[str], select: Sequence[str], exclude: Sequence[str]) -> Any:
    """Return a function that selects names. Raise for a glob that matches nothing in either checkpoint."""
    included, excluded = matcher(select or ["**"]), matcher(exclude)
    missing = find_unmatched([*select, *exclude], names) if select or exclude else []
    if missing:
        raise RestoreError(f"the glob {missing[0]!r} matches nothing in either", missing)
    return lambda name: included(name) and not excluded(name)


_SHARED: frozenset[Rank] = frozenset([None])


def _ranks(here: Mapping[Rank, Any], there: Mapping[Rank, Any], world: int) -> list[Rank]:
    """Return the ranks whose entries of one name are compared.

    An entry that one side shares is compared with each rank's entry of the other side. A rank that exists in both
    (there are `world`) and has no entry has lost it.
    """
    if here.keys() == there.keys() == _SHARED:  # most names
        return [None]
    own = {rank for rank in (*here, *there) if rank is not None}
    shared = [None in each for each in (here, there)]
    if here and there and shared[0] != shared[1]:
        held = (here if shared[0] else there)[None]
        most = min(world, MOST_RANKS)
        own.update(rank for rank in range(most) if not held.is_sharded or held.is_held_by(rank))
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
        forms = here.forms.get(name, {}), there.forms.get(name, {})
        for rank in _ranks(*forms, world):
            path = name if rank is None else f"{rank}/{name}"
            found: list[Any] = [form.get(rank, form.get(None)) for form in forms]
            a, b = found
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
    if all((name, rank) not in tied for tied in ties):  # most tensors
        return
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
        Change("removed", path, detail=entry.summarise()) for path, entry in removed.items() if path not in gone
    ]
    changes += [Change("added", path, detail=entry.summarise()) for path, entry in added.items() if path not in come]
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
