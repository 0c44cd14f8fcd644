"""A manifest as lines for people, and the sizes of snapshots that share physical bytes."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from snapshot.cli.locate import read_metadata, work_concurrently
from snapshot.cli.screen import line, paint
from snapshot.errors import SnapshotError
from snapshot.io.url import URL
from snapshot.manifest import entries as e
from snapshot.manifest.document import OWN_FORMATS, SnapshotMetadata
from snapshot.manifest.entries import is_leaf, stored_in
from snapshot.manifest.rank_view import is_rank
from snapshot.manifest.values import Entry
from snapshot.save.findings import noted_findings, suspicions
from snapshot.tensors.dtypes import SIZES
from snapshot.text import size_text


def describe_findings(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each finding of the guards in a snapshot's metadata."""
    for each in suspicions(metadata):
        yield paint("suspect", "red") + line(f"suspect: {each}").removeprefix("suspect")
    for each in noted_findings(metadata):
        yield paint("found", "yellow") + line(f"found: {each}").removeprefix("found")


# A manifest as lines for people: an item for each object, folds of similar items, and totals.

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


def in_order_of_keys(manifest: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return a manifest of several ranks in the order of the application.

    The manifest has the entries of each rank together: a replicated tensor is among those of the rank that wrote it.
    """
    places: dict[str, dict[str, int]] = {}
    for path, entry in manifest.items():
        logical = path.partition("/")[2]
        above, _, last = logical.rpartition("/")
        beside = places.setdefault(above, {})
        beside.setdefault(last, len(beside))
        if entry.is_container:
            inside = places.setdefault(logical, {})
            for name in entry.components():
                inside.setdefault(name, len(inside))

    def place(path: str) -> list[int]:
        rank, *parts = path.split("/")
        found = [places.get("/".join(parts[:depth]), {}).get(part, -1) for depth, part in enumerate(parts)]
        return [*found, int(rank) if rank.isdecimal() else -1]

    return dict(sorted(manifest.items(), key=lambda each: place(each[0])))


def items(manifest: Mapping[str, Entry], world_size: int) -> Iterator[ListedItem]:
    """Yield the objects of a manifest, in the order of the application."""
    if world_size > 1:
        manifest = in_order_of_keys(manifest)
    seen: dict[Any, str] = {}
    ranks = Counter(path.partition("/")[2] for path in manifest) if world_size > 1 else {}
    for path, entry in manifest.items():
        number, _, logical = path.partition("/")
        if not is_leaf(entry):
            continue
        nbytes = _nbytes(entry)
        kind, value = entry.describe()
        value = shorten(value) if entry.is_value else value
        if nbytes and (owner := seen.setdefault(stored_place(entry), logical)) != logical:
            nbytes, value = 0, f"{SHARES} {owner}"
        yield ListedItem(
            logical,
            path if ranks.get(logical, 1) > 1 or logical in manifest or is_rank(logical, world_size) else logical,
            int(number) if number.isdecimal() else 0,
            kind,
            _dtype(entry),
            getattr(entry, "shape", None),
            nbytes,
            _placed(entry, number, world_size),
            value,
        )


def _nbytes(entry: Any) -> int:
    """Return the size of an object. For tensors it is the raw size: other formats compress them or add headers."""
    size = SIZES.get(entry.dtype) if entry.is_tensor else None
    return int(entry.nbytes if size is None else math.prod(entry.shape) * size)


def stored_place(entry: Entry) -> tuple[Any, ...]:
    """Return a key of the bytes that an entry refers to."""
    return tuple((each.location, each.byte_range) for each in entry.stored())


def _dtype(entry: Entry) -> str:
    found = getattr(entry, "dtype", "")
    return found if isinstance(found, str) else "structured"


def _placed(entry: Any, number: str, world_size: int) -> str:
    if world_size == 1:
        return ""
    if entry.is_sharded:
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
            found += math.prod(each.shape)
        else:
            found += 1
    return found


def shorten(text: str, longest: int = LONGEST) -> str:
    """Return the text of a value, cut if it is long."""
    return text if len(text) <= longest else f"{text[:longest]}..."


# Totals, and folding


@dataclass(slots=True)
class Total:
    """Number and size of objects."""

    entries: int = 0
    nbytes: int = 0

    def add(self, nbytes: int, entries: int = 1) -> None:
        self.entries += entries
        self.nbytes += nbytes


@dataclass(slots=True)
class EntryTree:
    """Objects by the parts of their names."""

    name: str = ""
    """The last part, with its separator."""
    items: list[ListedItem] = field(default_factory=list)
    """The objects with this name, and all below it."""
    children: dict[str, EntryTree] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Iterable[ListedItem], separators: str) -> EntryTree:
        """Return the tree of objects. Each of the characters `separators` ends a part of a name."""
        part_end = re.compile(f"(?<=[{separators}])")
        root = cls()
        for item in found:
            node = root
            node.items.append(item)
            for part in filter(None, part_end.split(item.path)):
                node = node.children.setdefault(part, cls(part))
                node.items.append(item)
        return root

    def walk(self) -> Iterator[tuple[int, EntryTree]]:
        """Yield the nodes below this one with their level, each before its children."""
        rest = [(0, child) for child in reversed(self.children.values())]
        while rest:
            level, node = rest.pop()
            yield level, node
            rest += [(level + 1, child) for child in reversed(node.children.values())]


def size_of(found: Iterable[ListedItem]) -> int:
    """Return the bytes of some objects together."""
    return sum(item.nbytes for item in found)


def common_value(found: Iterable[ListedItem]) -> str:
    """Return the common value of all objects, or ''."""
    values = {item.value for item in found}
    return values.pop() if len(values) == 1 else ""


def by_key(found: Iterable[ListedItem]) -> dict[str, list[ListedItem]]:
    """Return the items below each top-level key, in order; other items are under the empty key.

    The states of random generators are the last: nobody looks for them.
    """
    keys: dict[str, list[ListedItem]] = {}
    for item in found:
        key, below, _ = item.path.partition("/")
        keys.setdefault(key if below else "", []).append(item)
    return dict(sorted(keys.items(), key=lambda each: _is_of_generators(*each)))


def _is_of_generators(key: str, held: Iterable[ListedItem]) -> bool:
    """Return True for what `RNGState` saves."""
    return {f"{key}/torch", f"{key}/python/words"} <= {item.path for item in held}


@dataclass(slots=True)
class Fold:
    """Items of one form whose names differ only in numbers."""

    name: str
    items: list[ListedItem]

    @property
    def nbytes(self) -> int:
        return size_of(self.items)


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


# Sizes of snapshots that share physical bytes, by their manifests.
#
# Inodes tell nothing here: a clone of a file has its own inode, and object stores have none.


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the data files of one snapshot."""

    nbytes: int
    """Bytes of its files, as if it shared none."""
    own: int
    """Bytes that no other snapshot of the folder has."""

    @property
    def shared(self) -> int:
        """Bytes that another snapshot of the folder has, too."""
        return self.nbytes - self.own


class SharedFiles:
    """The physical files of the snapshots of a folder."""

    def __init__(self, found: Mapping[str, SnapshotMetadata | SnapshotError]) -> None:
        """Leave out the snapshots that cannot be read."""
        snapshots = {name: each for name, each in found.items() if isinstance(each, SnapshotMetadata)}
        self._files: dict[str, dict[str, int]] = {}
        saves = set[str]()
        for name, metadata in snapshots.items():
            ours = metadata.format in OWN_FORMATS and metadata.save_id not in saves  # or another tool copied it
            saves.add(metadata.save_id)
            self._files[name] = _physical_files(metadata, "" if ours else f"{name}/")
        self._saves = {name: metadata.save_id for name, metadata in snapshots.items()}
        references = {name: metadata._document.base for name, metadata in snapshots.items()}
        self._bases = {name: base.save_id for name, base in references.items() if base is not None}
        self._holders = Counter(file for held in self._files.values() for file in held)

    def sizes(self, name: str) -> Sizes:
        held = self._files[name]
        own = sum(size for file, size in held.items() if self._holders[file] == 1)
        return Sizes(sum(held.values()), own)

    def apparent(self) -> int:
        """Return the bytes of all snapshots together, as if they shared none."""
        return sum(sum(held.values()) for held in self._files.values())

    def physical(self) -> int:
        """Return the bytes of all snapshots together, each physical file once."""
        return sum({file: size for held in self._files.values() for file, size in held.items()}.values())

    def dependents(self, name: str) -> list[str]:
        """Return the snapshots that left out tensors that this one has."""
        mine = self._saves.get(name)
        if any(save_id == mine for each, save_id in self._saves.items() if each != name and each in self._files):
            return []  # it has a copy
        return [each for each, save_id in self._bases.items() if save_id == mine]

    def remove(self, name: str) -> Sizes:
        """Forget a snapshot, as if it were removed. Return its sizes before: its own bytes are freed."""
        sizes = self.sizes(name)
        self._holders.subtract(self._files.pop(name).keys())
        self._bases.pop(name, None)
        return sizes


def _physical_files(metadata: SnapshotMetadata, prefix: str) -> dict[str, int]:
    """Return the size of each physical file of a snapshot, by the name of the first file that had its bytes."""
    files = metadata._document.own_files
    return {f"{prefix}{file.origin or location}": file.stored_size for location, file in files.items()}


def read_below(
    url: URL, options: Mapping[str, Any] | None, names: Sequence[str]
) -> dict[str, SnapshotMetadata | SnapshotError]:
    """Return the metadata of snapshots directly below a URL, or the error of reading it."""

    def look(name: str) -> SnapshotMetadata | SnapshotError:
        try:
            return read_metadata(url.join(name), options)
        except SnapshotError as error:
            return error

    return dict(zip(names, work_concurrently(look, names), strict=True))


def shared_bytes(metadata: SnapshotMetadata) -> int:
    """Return the bytes of the files that share their bytes with an earlier snapshot."""
    return sum(file.stored_size for file in metadata._document.own_files.values() if file.origin is not None)


def sharing(metadata: SnapshotMetadata) -> dict[str, tuple[str, int]]:
    """Return, for each shared file, the file that it shares its bytes with, and the takes since they were written."""
    files = metadata._document.own_files
    return {location: (file.origin, file.age) for location, file in files.items() if file.origin is not None}


def base_url(metadata: SnapshotMetadata) -> str:
    """Return the place of the base that has what was left out; empty if nothing was."""
    base = metadata._document.base
    return "" if base is None else base.url


def _base_files(metadata: SnapshotMetadata) -> Set[str]:
    """Return the files with entries of a snapshot that only its base has."""
    return metadata._document.files.keys() - metadata._document.own_files.keys()


def bytes_in_base(metadata: SnapshotMetadata) -> int:
    """Return the bytes that were left out of a snapshot, since its base has them."""
    held, stored = _base_files(metadata), stored_in(metadata._document.manifest)
    ranges = {(each.location, *each.byte_range) for each in stored if each.location in held}
    return sum(end - begin for _, begin, end in ranges)


def is_in_base(metadata: SnapshotMetadata, entry: Entry) -> bool:
    """Return True if only the base has the bytes of an entry, or a part of them."""
    held = _base_files(metadata)
    return any(each.location in held for each in entry.stored())


def describe_sharing(metadata: SnapshotMetadata) -> Iterable[str]:
    """Yield what a snapshot shares with earlier ones, and what it leaves to its base."""
    if shared := shared_bytes(metadata):
        yield f"{size_text(shared)} shared with earlier snapshots"
    if left := bytes_in_base(metadata):
        yield f"{size_text(left)} left to the base {base_url(metadata)}"
