"""Entries with children, and of objects whose class a reader knows or has a name for."""

from __future__ import annotations

import argparse
import collections
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Union

import msgspec
from msgspec import field

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.paths import are_components, decode_key, decode_keys, find_tagged_keys, key_component
from snapshot.manifest.plain_tree import PLAIN_TREE
from snapshot.manifest.values import AnyValue, Entry, Scalar, check_class_name
from snapshot.saved import SavedObject
from snapshot.text import counted

# Record of an optimizer in a manifest, in addition to its state.


class OptimizerRecord(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """The class of an optimizer, or of several with one state dict, and the dtypes of their parameters."""

    classes: tuple[str, ...]
    """Module and name, such as `torch.optim.adamw.AdamW`. Never imported: only compared and shown."""
    dtypes: tuple[str, ...] = ()
    """Dtypes in the order of the parameters in `param_groups`; a single one if all are equal."""


# Entries with children: sequences, sets and dicts, each restored with its exact type.

Key = str | int | dict[str, str]
"""A dict's key as an item of `keys`: strings and ints unchanged, other types tagged to restore them exactly."""


MOST_COMPARISONS = 20_000_000
"""Maximum number of comparisons of keys with equal hashes, which take a dict about a second."""


class Container(Entry):
    """An entry with children, under paths one component longer than its own."""

    is_container = True
    is_hashable = False

    def describe(self) -> tuple[str, str]:
        return self.type, "empty"  # others are not listed

    def build(self, children: Sequence[Any]) -> Any:
        """Return the container itself, from its children in order."""
        return list(children)

    def without_children(self, gone: Iterable[bool]) -> Container:
        """Return the container without some of its children."""
        return self

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

    is_hashable = True
    make = tuple


class SetEntry(_Sequence, tag="set"):
    """A set."""

    make = set


class FrozensetEntry(_Sequence, tag="frozenset"):
    """A frozenset."""

    is_hashable = True
    make = frozenset


class SliceEntry(_Sequence, tag="slice"):
    """A slice, as a sequence of its start, stop and step."""

    is_hashable = True

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

    is_keyed = True
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
        return self.make(list(zip(decode_keys(self.keys), children, strict=True)))

    @property
    def width(self) -> int:
        return len(self.keys)

    def check(self, path: str) -> None:
        if dict not in set(map(type, self.keys)):
            return
        alike = collections.Counter(hash(decode_key(key)) for key in self.keys if type(key) is dict)
        if sum(count * count for count in alike.values()) > MOST_COMPARISONS:
            raise CorruptSnapshotError(f"{path}: too many hash collisions of keys; refusing a hostile manifest")

    def without_children(self, gone: Iterable[bool]) -> Container:
        kept = [i for i, away in enumerate(gone) if not away]
        tagged = [new for new, old in enumerate(kept) if old in (self.tagged or ())]
        return msgspec.structs.replace(self, keys=[self.keys[i] for i in kept], tagged=tagged or None)

    def with_keys(self, keys: list[Key]) -> Any:
        """Return the dict with keys of other names."""
        return msgspec.structs.replace(self, keys=keys, tagged=find_tagged_keys(map(decode_key, keys)) or None)

    def components(self) -> list[str]:
        if not self.tagged and are_components(self.keys):
            return list(self.keys)  # type: ignore[arg-type]
        tagged = set(self.tagged or ())
        return [key_component(key, i in tagged) for i, key in enumerate(self.keys)]


class OrderedDictEntry(DictEntry, tag="OrderedDict"):
    """An OrderedDict. A module's state dict has the versions of its modules."""

    module_versions: dict[str, dict[str, Any]] | None = None

    def with_keys(self, keys: list[Key]) -> Any:
        return msgspec.structs.replace(super().with_keys(keys), module_versions=None)  # they are under the old names

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


# Entries of objects with their own class: dataclasses, named tuples, and tensors that wrap tensors.
#
# They store their fields, or their inner tensors, like a dict its values, and only name the class.

DEEPEST_CONTEXT = 50


class Compound(DictEntry):
    """An object of a class that the manifest only names."""

    is_hashable = True
    obj_type: str = ""

    def list_names(self) -> list[str]:
        """Return the names of its fields."""
        return [str(decode_key(key)) for key in self.keys]

    @property
    def described(self) -> str:
        """The class, for messages."""
        return self.obj_type or self.type

    def check(self, path: str) -> None:
        super().check(path)
        check_class_name(self.obj_type)
        names = decode_keys(self.keys)
        if not all(type(name) is str for name in names) or len(set(names)) < len(names) or self.tagged:
            raise CorruptSnapshotError(f"{path}: field names must be distinct strings")


class RecordEntry(Compound, tag="dataclass"):
    """An instance of a dataclass: its attributes by name."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return SavedObject("dataclass", self.obj_type, dict(items))


class NamedTupleEntry(Compound, tag="namedtuple"):
    """A named tuple: its fields by name."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return SavedObject("namedtuple", self.obj_type, dict(items))


class OpaqueEntry(Scalar, tag="opaque"):
    """An object with only its class known: the class name is `serialized_value`."""

    def value(self) -> Any:
        return SavedObject("opaque", self.serialized_value, {})


PlainEntry = Union[  # noqa: UP007 - msgspec wants one union, and mypy one spelling of it
    ListEntry,
    TupleEntry,
    SetEntry,
    FrozensetEntry,
    DequeEntry,
    DictEntry,
    OrderedDictEntry,
    DefaultdictEntry,
    CounterEntry,
    SliceEntry,
    RecordEntry,
    OpaqueEntry,
    AnyValue,
]
"""Entries that are stored in the manifest alone."""


class SubclassEntry(Compound, tag="TensorSubclass"):
    """A tensor of a class that wraps tensors: its inner tensors, and the context of the class."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    """Outer shape; -1 for a size that is not a number."""
    requires_grad: bool = False
    context: dict[str, PlainEntry] = field(default_factory=dict)
    """The class's context, as entries under paths that are relative to an empty root path."""

    def check(self, path: str) -> None:
        super().check(path)
        context = self.context
        widths = sum(max(0, each.width) for each in context.values())
        if widths + 1 != len(context) or any(name.count("/") > DEEPEST_CONTEXT for name in context):
            raise CorruptSnapshotError(f"{path}: the context must be one tree of at most {DEEPEST_CONTEXT} levels")
        for name, each in context.items():
            if isinstance(each, Container):
                each.check(f"{path}: context{name}")
                if any(f"{name}/{below}" not in context for below in each.components()):
                    raise CorruptSnapshotError(f"{path}: the context lacks the contents of {name or 'the root'}")

    def context_value(self) -> Any:
        """Return the context of the class, as far as it is known."""
        self.check(self.obj_type)
        return inflate_entries(self.context, "")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        known = {"shape": self.shape, "dtype": self.dtype, "context": self.context_value()}
        return SavedObject("TensorSubclass", self.obj_type, {**known, **dict(items)}, self)


def inflate_entries(entries: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path of checked entries, all of which are containers or stored in the manifest."""
    entry = entries[path]
    if entry.is_value:
        return entry.value()
    children = [inflate_entries(entries, f"{path}/{name}") for name in entry.components()]
    try:
        return entry.build(children)
    except TypeError as error:
        raise CorruptSnapshotError(f"{path}: {error}") from error


# Objects whose classes every reader knows: namespaces, random number generators, configurations.
#
# A namespace has an entry like a dict. The others are leaves: their whole state is a text in JSON, so that no glob
# and no change of ranks can take a part of it. The class follows from the type or the serializer, never from a name
# in a file.

Items = list[tuple[Any, Any]]
RANDOM = "random"
"""Serializer of random number generators."""
CONFIG = "OmegaConf"
"""Serializer of configurations, and kind of a `SavedObject` if omegaconf is not installed."""
NEW_SERIALIZERS = frozenset((RANDOM, CONFIG, PLAIN_TREE))


class NamespaceEntry(Compound, tag="Namespace"):
    """An argparse.Namespace."""

    def make(self, items: Items) -> Any:
        made = argparse.Namespace()
        vars(made).update(items)
        return made


class SimpleNamespaceEntry(Compound, tag="SimpleNamespace"):
    """A types.SimpleNamespace."""

    def make(self, items: Items) -> Any:
        made = types.SimpleNamespace()
        vars(made).update(items)
        return made


NAMESPACES: dict[type, type[Compound]] = {
    argparse.Namespace: NamespaceEntry,
    types.SimpleNamespace: SimpleNamespaceEntry,
}
"""Exact types -> the types of their entries."""
