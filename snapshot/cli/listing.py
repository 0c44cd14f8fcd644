"""A manifest as lines that people read: an item for each object, items of one kind folded, totals."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.errors import SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.entry import Entry
from snapshot.manifest.scalars import Scalar
from snapshot.tensors.dtypes import ITEMSIZE
from snapshot.tensors.generators import KIND as GENERATOR

LONGEST = 60
"""Characters of a value that are shown."""
SHARES = "shares the bytes of"


@dataclass(frozen=True, slots=True)
class Item:
    """One object of a snapshot: anything but a container that holds something."""

    path: str
    """Its logical path, without a rank."""
    rank: int
    kind: str
    dtype: str
    shape: tuple[int, ...] | None
    nbytes: int
    """Bytes of data files that it takes; 0 of what shares them with an item before it."""
    placed: str
    """Which ranks had it; empty where there was one."""
    value: str
    """Of what stands in the manifest, or what is special."""

    @property
    def form(self) -> tuple[str, str, tuple[int, ...] | None, str]:
        """What items have in common that are folded."""
        return self.kind, self.dtype, self.shape, self.placed

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"path": self.path, "rank": self.rank, "kind": self.kind, "bytes": self.nbytes}
        if self.shape is not None:
            made |= {"dtype": self.dtype, "shape": self.shape}
        return made | {name: text for name in ("placed", "value") if (text := getattr(self, name))}


def objects_text(number: int) -> str:
    """So many objects."""
    return "1 object" if number == 1 else f"{number:,} objects"


def shape_text(shape: Sequence[int] | None) -> str:
    """A shape as torch writes it; nothing for what has none."""
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"


def items(manifest: Mapping[str, Entry], world_size: int) -> Iterator[Item]:
    """The objects of a manifest, in its order."""
    seen: dict[Any, str] = {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        if isinstance(entry, e.Container) and entry.width:
            continue
        nbytes, value = _nbytes(entry), ""
        if nbytes and (owner := seen.setdefault(_place(entry), logical)) != logical:
            nbytes, value = 0, f"{SHARES} {owner}"
        yield Item(
            logical,
            int(number) if number.isdecimal() else 0,
            _kind(entry),
            _dtype(entry),
            getattr(entry, "shape", None),
            nbytes,
            _placed(entry, number, world_size),
            value or value_text(entry),
        )


def _nbytes(entry: Entry) -> int:
    """Bytes of an object. Others' formats keep theirs compressed, or behind headers: of a tensor its own count."""
    size = ITEMSIZE.get(_dtype(entry)) if isinstance(entry, e.TENSORS) else None
    return entry.nbytes if size is None else math.prod(entry.shape) * size  # type: ignore[attr-defined]


def _place(entry: Entry) -> Any:
    """Which bytes are an entry's."""
    if isinstance(entry, e.TENSORS):
        return tuple((stored.location, stored.byte_range) for _, stored in entry.pieces())
    if isinstance(entry, e.ObjectEntry):
        return entry.location, entry.byte_range
    return id(entry)


def _kind(entry: Entry) -> str:
    if isinstance(entry, e.ChunkedTensorEntry):
        return "Tensor"  # in how many pieces it lies is no one's concern
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
    return "replicated" if getattr(entry, "replicated", False) else f"rank {number}"


def ranks_of(entry: e.ShardedTensorEntry) -> int:
    """Over how many ranks a tensor was spread; 0 where it does not say so."""
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
    """The value of what stands in the manifest; of a tensor what is special about it."""
    if isinstance(entry, Scalar):
        try:
            text = repr(entry.value())
        except (SnapshotError, ValueError):  # no value of its type here, or more digits than Python writes
            text = entry.serialized_value
        return text if len(text) <= longest else f"{text[:longest]}..."
    if isinstance(entry, e.Container):
        return "empty"
    if isinstance(entry, e.ObjectEntry):
        return "a pickle" if entry.serializer == "torch_save" else ""
    if isinstance(entry, e.DTensorEntry) and entry.placements:
        return f"DTensor {', '.join(entry.placements)}"
    extra = getattr(entry, "extra", None)
    return (extra.subclass or "") if extra is not None else ""


# Totals, and folding


@dataclass(slots=True)
class Total:
    """How many objects there are, and how many bytes they take."""

    entries: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, entries: int = 1) -> None:
        self.entries += entries
        self.nbytes += nbytes


def by_key(found: Iterable[Item]) -> dict[str, list[Item]]:
    """The items below each top-level key, in order; those that are below none, under the empty one."""
    keys: dict[str, list[Item]] = {}
    for item in found:
        key, below, _ = item.path.partition("/")
        keys.setdefault(key if below else "", []).append(item)
    return keys


@dataclass(slots=True)
class Fold:
    """Items of one form whose names differ in numbers alone."""

    name: str
    items: list[Item]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def value(self) -> str:
        """Their value, if it is the same of all."""
        values = {item.value for item in self.items}
        return values.pop() if len(values) == 1 else ""


_NUMBERS = re.compile(r"\d+")


def folded(found: Iterable[Item]) -> list[Fold]:
    """Items in their order, those together whose names differ in numbers alone; and what ranks have each of its own."""
    groups: dict[Any, list[Item]] = {}
    for item in found:
        kind, dtype, shape, placed = item.form
        own = "each rank" if placed.startswith("rank ") else placed
        tied = item.value if item.value.startswith(SHARES) else ""
        alike = (*(tuple(_NUMBERS.split(text)) for text in (item.path, tied)), kind, dtype, shape, own)
        groups.setdefault(alike, []).append(item)
    return [Fold(_common([item.path for item in group]), group) for group in groups.values()]


def _common(paths: Sequence[str]) -> str:
    """One name for several: `{first..last}` where their numbers differ.

    >>> _common(["layers.0.w", "layers.1.w", "layers.11.w"])
    'layers.{0..11}.w'
    """
    first = paths[0]
    if len(paths) == 1:
        return first
    columns = list(zip(*(_NUMBERS.findall(path) for path in paths), strict=True))
    made = iter(_span(column) for column in columns)
    return _NUMBERS.sub(lambda _: next(made), first)


def _span(numbers: Sequence[str]) -> str:
    ordered = sorted(set(numbers), key=lambda text: (len(text.lstrip("0")), text.lstrip("0")))
    return ordered[0] if len(ordered) == 1 else f"{{{ordered[0]}..{ordered[-1]}}}"


def heaviest(found: Iterable[Item], depth: int) -> list[tuple[str, Total]]:
    """What takes the space: totals by the first so many parts of names, which `/` and `.` divide; largest first."""
    totals: dict[str, Total] = defaultdict(Total)
    for item in found:
        parts = re.split(r"(?<=[/.])", item.path, maxsplit=depth)
        head = "".join(parts[:depth])
        totals[head].add(item.nbytes)
    return sorted(totals.items(), key=lambda each: (-each[1].nbytes, each[0]))
