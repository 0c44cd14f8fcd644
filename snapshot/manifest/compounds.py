"""Entries of objects with their own class: dataclasses, named tuples, and tensors that wrap tensors.

They store their fields, or their inner tensors, like a dict its values, and only name the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Union

from msgspec import field

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.containers import (
    Container,
    CounterEntry,
    DefaultdictEntry,
    DequeEntry,
    DictEntry,
    FrozensetEntry,
    ListEntry,
    OrderedDictEntry,
    SetEntry,
    SliceEntry,
    TupleEntry,
)
from snapshot.manifest.paths import decode_key
from snapshot.manifest.scalars import (
    BoolEntry,
    BytesEntry,
    ComplexEntry,
    DeviceEntry,
    DtypeEntry,
    FloatEntry,
    IntEntry,
    NoneEntry,
    Scalar,
    SizeEntry,
    StrEntry,
)
from snapshot.manifest.typed import (
    DateEntry,
    DatetimeEntry,
    DecimalEntry,
    EnumEntry,
    FractionEntry,
    PathEntry,
    RangeEntry,
    TimedeltaEntry,
    TimeEntry,
    TimezoneEntry,
    UUIDEntry,
    ZoneInfoEntry,
    check_class_name,
)
from snapshot.saved import SavedObject

DEEPEST_CONTEXT = 50


class Compound(DictEntry):
    """An object of a class that the manifest only names."""

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
        names = [decode_key(key) for key in self.keys]
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
    IntEntry,
    StrEntry,
    BoolEntry,
    BytesEntry,
    FloatEntry,
    ComplexEntry,
    NoneEntry,
    DtypeEntry,
    DeviceEntry,
    SizeEntry,
    DatetimeEntry,
    DateEntry,
    TimeEntry,
    TimedeltaEntry,
    TimezoneEntry,
    ZoneInfoEntry,
    PathEntry,
    UUIDEntry,
    DecimalEntry,
    FractionEntry,
    RangeEntry,
    EnumEntry,
    OpaqueEntry,
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
        widths = [max(0, each.width) for each in context.values() if isinstance(each, Container)]
        if sum(widths) + 1 != len(context) or any(name.count("/") > DEEPEST_CONTEXT for name in context):
            raise CorruptSnapshotError(f"{path}: the context must be one tree of at most {DEEPEST_CONTEXT} levels")
        for name, each in context.items():
            if isinstance(each, Container):
                each.check(f"{path}: context{name}")
                if any(f"{name}/{below}" not in context for below in each.components()):
                    raise CorruptSnapshotError(f"{path}: the context lacks the contents of {name or 'the root'}")

    def context_value(self) -> Any:
        """Return the context of the class, as far as it is known."""
        self.check(self.obj_type)
        return _inflate_entries(self.context, "")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        known = {"shape": self.shape, "dtype": self.dtype, "context": self.context_value()}
        return SavedObject("TensorSubclass", self.obj_type, {**known, **dict(items)}, self)


def _inflate_entries(entries: Mapping[str, Any], path: str) -> Any:
    entry = entries[path]
    if not isinstance(entry, Container):
        return entry.value()
    children = [_inflate_entries(entries, f"{path}/{name}") for name in entry.components()]
    try:
        return entry.build(children)
    except TypeError as error:
        raise CorruptSnapshotError(f"{path}: {error}") from error
