"""Entries with children: sequences, sets and dicts, each restored with its exact type."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.entry import Entry
from snapshot.manifest.optimizer import OptimizerRecord
from snapshot.manifest.paths import decode_key, key_component
from snapshot.text import counted

Key = str | int | dict[str, str]
"""A dict's key as an item of `keys`: strings and ints unchanged, other types tagged to restore them exactly."""


MOST_COMPARISONS = 20_000_000
"""Maximum number of comparisons of keys with equal hashes, which take a dict about a second."""


class Container(Entry):
    """An entry with children, under paths one component longer than its own."""

    def build(self, children: Sequence[Any]) -> Any:
        """Return the container itself, from its children in order."""
        return list(children)

    def components(self) -> list[str]:
        """Return the path components of the children, in order."""
        return []

    def without_children(self, gone: Iterable[bool]) -> Container:
        """Return the container without some of its children."""
        return self

    @property
    def width(self) -> int:
        """Number of children."""
        return 0

    def check(self, path: str) -> None:
        """Raise CorruptSnapshotError if the container cannot be built with any children."""


class _Sequence(Container):
    length: int
    replicated: bool = False
    make: ClassVar[Callable[[Sequence[Any]], Any]]

    @property
    def width(self) -> int:
        return self.length

    def check(self, path: str) -> None:
        if self.length < 0:
            raise CorruptSnapshotError(f"{path}: length must be at least 0, got {self.length}")

    def build(self, children: Sequence[Any]) -> Any:
        return type(self).make(children)

    def components(self) -> list[str]:
        return list(map(str, range(self.length)))


class ListEntry(_Sequence, tag="list"):
    """A list."""

    make = list


class TupleEntry(_Sequence, tag="tuple"):
    """A tuple."""

    make = tuple


class SetEntry(_Sequence, tag="set"):
    """A set."""

    make = set


class FrozensetEntry(_Sequence, tag="frozenset"):
    """A frozenset."""

    make = frozenset


class SliceEntry(_Sequence, tag="slice"):
    """A slice, as a sequence of its start, stop and step."""

    def build(self, children: Sequence[Any]) -> Any:
        return slice(*children)

    def check(self, path: str) -> None:
        if self.length != 3:
            raise CorruptSnapshotError(f"{path}: a slice must have 3 parts, got {self.length}")


class DequeEntry(_Sequence, tag="deque"):
    """A deque, with its `maxlen`."""

    maxlen: int | None = None

    def check(self, path: str) -> None:
        super().check(path)
        if self.maxlen is not None and not self.length <= self.maxlen < 1 << 63:
            raise CorruptSnapshotError(
                f"{path}: a deque must have at most {counted(self.maxlen, 'element')}, got {self.length}"
            )

    def build(self, children: Sequence[Any]) -> Any:
        return collections.deque(children, self.maxlen)


class DictEntry(Container, tag="dict"):
    """A dict: its keys in order. `components` returns the path components, which may differ from the keys' texts."""

    keys: list[Key]
    tagged: list[int] | None = None
    """Positions of keys with a tagged component, since another key of this dict has the same text."""
    replicated: bool = False
    optimizer: OptimizerRecord | None = None
    """Optimizer's record, for an optimizer's state dict."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        """Return the dict from its items."""
        return dict(items)

    def build(self, children: Sequence[Any]) -> Any:
        return self.make(list(zip(map(decode_key, self.keys), children, strict=True)))

    @property
    def width(self) -> int:
        return len(self.keys)

    def check(self, path: str) -> None:
        alike = collections.Counter(hash(decode_key(key)) for key in self.keys if type(key) is dict)
        if sum(count * count for count in alike.values()) > MOST_COMPARISONS:
            raise CorruptSnapshotError(f"{path}: too many hash collisions of keys; refusing a hostile manifest")

    def without_children(self, gone: Iterable[bool]) -> Container:
        kept = [i for i, away in enumerate(gone) if not away]
        tagged = [new for new, old in enumerate(kept) if old in (self.tagged or ())]
        return msgspec.structs.replace(self, keys=[self.keys[i] for i in kept], tagged=tagged or None)

    def components(self) -> list[str]:
        tagged = set(self.tagged or ())
        return [
            key
            if type(key) is str and key.isascii() and "/" not in key and "%" not in key
            else key_component(key, i in tagged)
            for i, key in enumerate(self.keys)
        ]


class OrderedDictEntry(DictEntry, tag="OrderedDict"):
    """An OrderedDict. A module's state dict has the versions of its modules."""

    module_versions: dict[str, dict[str, Any]] | None = None

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        made: Any = collections.OrderedDict(items)
        if self.module_versions is not None:
            made._metadata = collections.OrderedDict((name, dict(v)) for name, v in self.module_versions.items())
        return made


_FACTORIES: dict[str, Callable[[], Any] | None] = {
    f.__name__: f for f in (list, dict, set, tuple, int, float, str, bool, collections.OrderedDict, collections.deque)
} | {"None": None}


class DefaultdictEntry(DictEntry, tag="defaultdict"):
    """A defaultdict whose factory is a builtin type, or None."""

    factory: str = "None"

    def check(self, path: str) -> None:
        super().check(path)
        if self.factory not in _FACTORIES:
            raise UnsupportedFormatError(f"{path}: unknown factory of a defaultdict: {self.factory!r}")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return collections.defaultdict(_FACTORIES[self.factory], items)


class CounterEntry(DictEntry, tag="Counter"):
    """A Counter."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        made: collections.Counter[Any] = collections.Counter()
        dict.update(made, items)
        return made


def find_factory_name(factory: Callable[[], Any] | None) -> str | None:
    """Return the recorded name of a defaultdict's factory; None if it cannot be recorded."""
    return next((name for name, known in _FACTORIES.items() if known is factory), None)


SEQUENCES: dict[type, type[_Sequence]] = {
    list: ListEntry,
    tuple: TupleEntry,
    set: SetEntry,
    frozenset: FrozensetEntry,
}
"""Types of Python's sequences and sets that need only their length, and their entries."""
