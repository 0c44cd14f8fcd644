"""A manifest as lines for people: an item for each object, folds of similar items, and totals."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.counting import is_leaf
from snapshot.manifest.entry import Entry
from snapshot.manifest.rank_view import is_rank
from snapshot.manifest.scalars import Scalar
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.generators import KIND as GENERATOR

LONGEST = 60
"""Maximum length of a value in characters."""
SHARES = "shares the bytes of"


@dataclass(frozen=True, slots=True)
class ListedItem:
    """One object of a snapshot: any entry but a container with children."""

    path: str
    """Logical path, without a rank."""
    name: str
    """Argument for `read_object` and `snapshot show`: the path, with its rank if needed."""
    rank: int
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    """Size in data files; 0 if an earlier item has the same bytes."""
    placed: str
    """Ranks that had the object; empty if there was only one rank."""
    value: str
    """Value that is stored in the manifest, or a remark."""

    @property
    def shared(self) -> bool:
        """True if the object belongs to all ranks."""
        return not self.placed.startswith("rank ")

    @property
    def form(self) -> tuple[str, str, tuple[int, ...] | None, str]:
        """Properties that folded items have in common."""
        return self.kind, self.dtype, self.shape, self.placed

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "path": self.path,
            "name": self.name,
            "rank": self.rank,
            "kind": self.kind,
            "bytes": self.nbytes,
        }
        if self.shape is not None:
            made |= {"dtype": self.dtype, "shape": self.shape}
        return made | {name: text for name in ("placed", "value") if (text := getattr(self, name))}


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a shape as torch prints it; '' for None."""
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def items(manifest: Mapping[str, Entry], world_size: int) -> Iterator[ListedItem]:
    """Yield the objects of a manifest, in its order."""
    seen: dict[Any, str] = {}
    ranks = Counter(path.partition("/")[2] for path in manifest) if world_size > 1 else {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        if not is_leaf(entry):
            continue
        nbytes, value = _nbytes(entry), ""
        if nbytes and (owner := seen.setdefault(stored_place(entry), logical)) != logical:
            nbytes, value = 0, f"{SHARES} {owner}"
        yield ListedItem(
            logical,
            path if ranks.get(logical, 1) > 1 or logical in manifest or is_rank(logical, world_size) else logical,
            int(number) if number.isdecimal() else 0,
            _kind(entry),
            _dtype(entry),
            getattr(entry, "shape", None),
            nbytes,
            _placed(entry, number, world_size),
            value or value_text(entry),
        )


def _nbytes(entry: Entry) -> int:
    """Return the size of an object. For tensors it is the raw size: other formats compress them or add headers."""
    size = ITEMSIZE.get(_dtype(entry)) if isinstance(entry, e.TENSORS) else None
    return entry.nbytes if size is None else math.prod(entry.shape) * size  # type: ignore[attr-defined]


def stored_place(entry: Entry) -> Any:
    """Return a key of the bytes that an entry refers to."""
    if isinstance(entry, e.TENSORS):
        return tuple((stored.location, stored.byte_range) for _, stored in entry.pieces())
    if isinstance(entry, e.ObjectEntry):
        return entry.location, entry.byte_range
    return id(entry)


def _kind(entry: Entry) -> str:
    if isinstance(entry, e.ChunkedTensorEntry):
        return "Tensor"  # the number of pieces does not matter to users
    if isinstance(entry, e.TensorPartsEntry):
        return entry.kind if entry.kind == GENERATOR else f"{entry.kind} tensor"
    if isinstance(entry, e.ObjectEntry):
        return entry.obj_type.rpartition(".")[2] or "object"
    return str(type(entry).__struct_config__.tag)


def _dtype(entry: Entry) -> str:
    found = getattr(entry, "dtype", "")
    return found if isinstance(found, str) else "structured"


def _placed(entry: Entry, number: str, world_size: int) -> str:
    if world_size == 1:
        return ""
    if isinstance(entry, e.ShardedTensorEntry):
        ranks = ranks_of(entry)
        return f"sharded over {ranks}" if ranks else "sharded"
    return "replicated" if entry.replicated else f"rank {number}"


def ranks_of(entry: e.ShardedTensorEntry) -> int:
    """Return the number of ranks that a tensor was sharded over; 0 if unknown."""
    rest: list[Any] = [] if entry.mesh is None else [entry.mesh]
    found = 0
    while rest:
        each = rest.pop()
        if isinstance(each, list):
            rest += each
        elif isinstance(each, e.Mesh):
            product = 1
            for size in each.shape:
                product *= size
            found += product
        else:
            found += 1
    return found


def value_text(entry: Entry, longest: int = LONGEST) -> str:
    """Return a value that is stored in the manifest, or a remark about a tensor."""
    if isinstance(entry, Scalar):
        try:
            text = repr(entry.value())
        except (SnapshotError, ValueError):  # invalid for its type here, or too many digits for Python
            text = entry.serialized_value
        return text if len(text) <= longest else f"{text[:longest]}..."
    if isinstance(entry, e.Container):
        return "empty"
    if isinstance(entry, e.ObjectEntry):
        return "a pickle" if entry.serializer == "torch_save" else ""
    if isinstance(entry, e.DTensorEntry) and entry.placements:
        return f"DTensor {', '.join(entry.placements)}"
    return (entry.extra.subclass or "") if isinstance(entry, e.TENSORS) and entry.extra is not None else ""


# Totals, and folding


@dataclass(slots=True)
class Total:
    """Number and size of objects."""

    entries: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, entries: int = 1) -> None:
        self.entries += entries
        self.nbytes += nbytes


def by_key(found: Iterable[ListedItem]) -> dict[str, list[ListedItem]]:
    """Return the items below each top-level key, in order; other items are under the empty key."""
    keys: dict[str, list[ListedItem]] = {}
    for item in found:
        key, below, _ = item.path.partition("/")
        keys.setdefault(key if below else "", []).append(item)
    return keys


@dataclass(slots=True)
class Fold:
    """Items of one form whose names differ only in numbers."""

    name: str
    items: list[ListedItem]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def value(self) -> str:
        """The common value of all items, or ''."""
        values = {item.value for item in self.items}
        return values.pop() if len(values) == 1 else ""


NUMBERS = re.compile(r"\d+")


def folded(found: Iterable[ListedItem]) -> list[Fold]:
    """Return items in order, folded if their names differ only in numbers or each rank has its own."""
    groups: dict[Any, list[ListedItem]] = {}
    for item in found:
        kind, dtype, shape, placed = item.form
        own = "each rank" if placed.startswith("rank ") else placed
        tied = item.value if item.value.startswith(SHARES) else ""
        alike = (*(tuple(NUMBERS.split(text)) for text in (item.name, tied)), kind, dtype, shape, own)
        groups.setdefault(alike, []).append(item)
    return [fold for group in groups.values() for fold in _folds(group)]


def _folds(group: list[ListedItem]) -> Iterator[Fold]:
    """Yield items whose names differ only in numbers, in as few folds as match exactly these names."""
    if len(group) == 1:
        yield Fold(group[0].name, group)
        return
    named = {item.name: item for item in group}
    for name, held in spans([*named]):
        yield Fold(name, [named[each] for each in held])


def spans(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return names that differ only in numbers, grouped by patterns with `{first..last}` that match no other names.

    >>> [name for name, _ in spans(["layers.0.w", "layers.1.w", "layers.2.w", "layers.5.w"])]
    ['layers.{0..2}.w', 'layers.5.w']
    >>> [name for name, _ in spans(["a.0.b.0", "a.0.b.1", "a.1.b.0"])]
    ['a.0.b.{0..1}', 'a.1.b.0']
    """
    texts = NUMBERS.split(names[0])
    found: list[tuple[list[str], list[str]]] = [(NUMBERS.findall(name), [name]) for name in names]
    for column in reversed(range(len(texts) - 1)):
        joined: dict[Any, list[tuple[list[str], list[str]]]] = {}
        for numbers, held in found:
            joined.setdefault((*numbers[:column], "", *numbers[column + 1 :]), []).append((numbers, held))
        found = [fold for alike in joined.values() for fold in _runs(alike, column)]
    return [("".join(map("".join, zip(texts, [*numbers, ""], strict=True))), held) for numbers, held in found]


def _runs(alike: list[tuple[list[str], list[str]]], column: int) -> Iterator[tuple[list[str], list[str]]]:
    """Join names whose numbers in one column are consecutive."""
    run: list[tuple[list[str], list[str]]] = []
    for each in [*sorted(alike, key=lambda each: _order(each[0][column])), None]:
        if run and (each is None or not _follows(run[-1][0][column], each[0][column])):
            numbers, last = list(run[0][0]), run[-1][0][column]
            if len(run) > 1:
                numbers[column] = f"{{{numbers[column]}..{last}}}"
            yield numbers, [name for _, names in run for name in names]
            run = []
        if each is not None:
            run.append(each)


def _order(number: str) -> tuple[int, str]:
    return len(number), number


def _follows(one: str, other: str) -> bool:
    """Return True if `other` is the number after `one`. Numbers with a leading 0 do not count."""
    if len(one) > 18 or (one[:1] == "0" and one != "0") or (other[:1] == "0"):
        return False
    return one.isascii() and other.isascii() and int(one) + 1 == int(other)


def heaviest(found: Iterable[ListedItem], depth: int) -> list[tuple[str, Total]]:
    """Return totals by the first `depth` parts of names, which `/` and `.` separate; largest first."""
    totals: dict[str, Total] = defaultdict(Total)
    for item in found:
        parts = re.split(r"(?<=[/.])", item.path, maxsplit=depth)
        head = "".join(parts[:depth])
        totals[head].add(item.nbytes)
    return sorted(totals.items(), key=lambda each: (-each[1].nbytes, each[0]))
