"""Values that are stored in the manifest itself, as exact texts."""

from __future__ import annotations

import base64
import functools
import operator
import os
import pathlib
import re
import struct
import sys
import uuid
import zoneinfo
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag
from fractions import Fraction
from typing import Any, Union

import msgspec

from snapshot.errors import CorruptSnapshotError, SnapshotError, UnsupportedFormatError
from snapshot.manifest.paths import LONGEST_INT, decode_component, decode_text, encode_component, encode_text
from snapshot.saved import SavedObject, class_name
from snapshot.tensors.dtypes import SIZES

# Base class of all manifest entries.


class Entry(msgspec.Struct, tag_field="type", omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line of a manifest. Its attributes and methods are what may be asked of any entry; only fields are stored."""

    replicated = False
    """True if all ranks share the entry. Kinds that several ranks may share have a field of this name."""
    is_value = False
    """True for a value that is stored in the manifest itself: it has `value()`."""
    is_container = False
    """True for an entry with children, under paths one component longer than its own."""
    is_keyed = False
    """True for a container whose children have keys, so that each of them can be added, renamed or left out."""
    is_tensor = False
    """True for a tensor with strided elements: it has a dtype, a shape and `pieces()`."""
    is_sharded = False
    """True for a tensor with boxes on several ranks."""
    is_mapped = False
    """True for a tensor that is made of stored ones while they are read."""
    is_object = False
    """True for bytes that only a serializer can read."""
    is_hashable = True
    """True if the value can be in a set, provided that its elements can."""

    @property
    def type(self) -> str:
        """Kind of the entry in the manifest: `Tensor`, `dict`, `int`, `object`, ...

        >>> from snapshot.manifest.values import IntEntry
        >>> IntEntry("3").type
        'int'
        """
        return str(self.__struct_config__.tag)

    @property
    def kind(self) -> str:
        """Kind of the value, however it is stored: all tensors with strided elements are `Tensor`."""
        return self.type

    def describe(self) -> tuple[str, str]:
        """Return what listings show: the kind, and the value if it is in the manifest, or a remark in its place."""
        return self.type, ""

    def summarise(self) -> str:
        """Return a few words about the entry, for a difference."""
        return self.kind

    @property
    def form(self) -> Any:
        """All that the entry says of its value, except where its bytes are; None if that does not tell enough.

        Two entries of the same form have equal values if their tensors have equal elements.
        """
        return None

    @property
    def is_shared(self) -> bool:
        """True if the entry belongs to all ranks: it is replicated or sharded."""
        return self.replicated

    # Children

    @property
    def width(self) -> int:
        """Number of children."""
        return 0

    def components(self) -> list[str]:
        """Return the path components of the children, in order."""
        return []

    # Stored bytes

    @property
    def extra(self) -> Any:
        """Properties that few tensors have."""
        return None

    @property
    def nbytes(self) -> int:
        """Number of bytes in data files."""
        return 0

    def tensors(self) -> Sequence[tuple[str, Any]]:
        """Return the tensors that hold the entry's elements, each after its suffix.

        The name of a leaf is the entry's path, followed by the suffix, which is empty for an only tensor.
        """
        return ()

    def stored(self) -> Sequence[Any]:
        """Return the stored ranges that the entry refers to: entries with a location and a range."""
        return ()

    @property
    def boxes(self) -> list[Any] | None:
        """Boxes of a tensor that is stored in boxes, as the entry's own list; None for any other entry."""
        return None

    def is_whole(self) -> bool:
        """Return True unless boxes of a sharded tensor are missing."""
        return True


# Values that are stored in the manifest itself, as exact texts.

LONGEST_SUMMARY = 60
"""Maximum number of characters of a value in a summary."""


class Scalar(Entry):
    """A value in the manifest itself, as a text."""

    is_value = True
    serialized_value: str
    readable: str | None = None
    replicated: bool = False

    @staticmethod
    def write(value: Any) -> str:
        """Return the text of a value."""
        return str(value)

    @staticmethod
    def read(text: str) -> Any:
        """Return the value of a text."""
        return text

    @property
    def identity(self) -> tuple[Any, ...]:
        """Key that is equal for two values of this type if and only if they are equal."""
        return (self.serialized_value,)

    @property
    def form(self) -> Any:
        return self.type, self.identity

    def value(self) -> Any:
        """Return the value; raise CorruptSnapshotError if the text is not one of this type."""
        try:
            return type(self).read(self.serialized_value)
        except (ValueError, KeyError, struct.error, ArithmeticError) as error:
            raise CorruptSnapshotError(f"invalid value of type {self.type}: {self.serialized_value[:80]!r}") from error

    def describe(self) -> tuple[str, str]:
        try:
            return self.type, repr(self.value())
        except (SnapshotError, ValueError):  # invalid for its type here, or too many digits for Python
            return self.type, self.serialized_value

    def summarise(self) -> str:
        text = self.readable or self.serialized_value
        return f"{self.kind} {text[:LONGEST_SUMMARY]}{'...' if len(text) > LONGEST_SUMMARY else ''}"


_pack_float = struct.Struct(">d").pack


def _write_float(value: float) -> str:
    return _pack_float(value).hex()


def _read_float(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def read_int(text: str) -> int:
    """Return the int of a text."""
    if len(text) > 4000:
        return int(text, 16) if text.startswith(("0x", "-0x")) else _refuse_int(text)
    return int(text, 0 if text.startswith(("0x", "-0x")) else 10)


def _read_int64(text: str) -> int:
    value = read_int(text)
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"a size must be a 64-bit integer, got {text[:80]}")
    return value


def _refuse_int(text: str) -> int:
    raise ValueError(f"an integer must have at most 4000 decimal digits, got {len(text)}")


def write_int(value: int) -> str:
    """Return the text of an int of any size; from 4,000 digits on in hexadecimal."""
    return str(value) if value.bit_length() < LONGEST_INT else hex(value)


class IntEntry(Scalar, tag="int"):
    """An int of any size; from 4,000 digits on in hexadecimal."""

    write = staticmethod(write_int)
    read = staticmethod(read_int)


class StrEntry(Scalar, tag="str"):
    """A string; `escaped` if it has lone surrogates, which UTF-8 cannot encode."""

    escaped: bool = False

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.serialized_value, self.escaped

    def value(self) -> Any:
        return decode_text(self.serialized_value) if self.escaped else self.serialized_value


class BoolEntry(Scalar, tag="bool"):
    """True or False."""

    @staticmethod
    def read(text: str) -> Any:
        return {"True": True, "False": False}[text]


class BytesEntry(Scalar, tag="bytes"):
    """Short bytes, in base64."""

    write = staticmethod(lambda value: base64.b64encode(value).decode())
    read = staticmethod(lambda text: base64.b64decode(text, validate=True))


class FloatEntry(Scalar, tag="float"):
    """A float, by its eight bytes in hex; NaNs keep their payload."""

    write = staticmethod(_write_float)
    read = staticmethod(_read_float)


class ComplexEntry(Scalar, tag="complex"):
    """A complex number, by its sixteen bytes in hex."""

    write = staticmethod(lambda value: _write_float(value.real) + _write_float(value.imag))
    read = staticmethod(lambda text: complex(_read_float(text[:16]), _read_float(text[16:])))


class NoneEntry(Scalar, tag="NoneType"):
    """None."""

    @staticmethod
    def read(text: str) -> Any:
        return {"None": None}[text]


_QUANTISED = ("qint8", "quint8", "qint32")


class DtypeEntry(Scalar, tag="dtype"):
    """A torch.dtype."""

    write = staticmethod(lambda value: str(value).removeprefix("torch."))

    @staticmethod
    def read(text: str) -> Any:
        import torch

        from snapshot.tensors.memory import BY_NAME

        return BY_NAME[text] if text in BY_NAME else {name: getattr(torch, name) for name in _QUANTISED}[text]

    def describe(self) -> tuple[str, str]:
        text = self.serialized_value
        return self.type, f"torch.{text}" if text in SIZES or text in _QUANTISED else text


_DEVICE = re.compile(r"([a-z]\w*)(?::(\d+))?", re.ASCII)


class DeviceEntry(Scalar, tag="device"):
    """A torch.device."""

    @staticmethod
    def read(text: str) -> Any:
        import torch

        return torch.device(text)

    def describe(self) -> tuple[str, str]:
        found = _DEVICE.fullmatch(self.serialized_value)
        if found is None:
            return self.type, self.serialized_value
        return self.type, f"device(type={found[1]!r}{'' if found[2] is None else f', index={found[2]}'})"

    def value(self) -> Any:
        try:
            return super().value()
        except RuntimeError as error:
            raise CorruptSnapshotError(f"invalid device {self.serialized_value[:80]!r}: {error}") from error


class SizeEntry(Scalar, tag="Size"):
    """A torch.Size."""

    write = staticmethod(lambda value: ",".join(map(str, value)))

    @staticmethod
    def read(text: str) -> Any:
        import torch

        return torch.Size(_read_sizes(text))

    def describe(self) -> tuple[str, str]:
        try:
            return self.type, f"torch.Size({_read_sizes(self.serialized_value)})"
        except ValueError:
            return self.type, self.serialized_value


def _read_sizes(text: str) -> list[int]:
    return [_read_int64(each) for each in text.split(",")] if text else []


SCALARS: dict[type, type[Scalar]] = {
    int: IntEntry,
    bool: BoolEntry,
    bytes: BytesEntry,
    float: FloatEntry,
    complex: ComplexEntry,
    type(None): NoneEntry,
}
_OF_TORCH: dict[str, type[Scalar]] = {"dtype": DtypeEntry, "device": DeviceEntry, "Size": SizeEntry}


def find_scalar(kind: type) -> type[Scalar] | None:
    """Return the entry class of an exact type; None if its values are not stored in the manifest itself."""
    found = SCALARS.get(kind)
    if found is None and kind.__module__ == "torch" and getattr(sys.modules.get("torch"), kind.__name__, None) is kind:
        found = _OF_TORCH.get(kind.__name__)
    return found


LONG = 16 << 10
"""Strings and bytes longer than this are stored in a data file."""


def _make_str_entry(value: str) -> Scalar | None:
    if len(value) > LONG:
        return None
    escaped = encode_text(value)
    return StrEntry(value) if escaped is None else StrEntry(escaped, escaped=True)


def _make_scalar_entry(kind: type[Scalar], value: Any) -> Scalar:
    return kind(kind.write(value))


def _make_found_entry(value: Any) -> Scalar | None:
    """Return the entry of a value of torch, whose types are not known before torch is imported; None for others."""
    entry = find_scalar(type(value))
    return None if entry is None else entry(entry.write(value))


_MAKERS: dict[type, Callable[[Any], Scalar | None]] = {
    **{kind: functools.partial(_make_scalar_entry, entry) for kind, entry in SCALARS.items()},
    int: lambda value: IntEntry(write_int(value)),
    float: lambda value: FloatEntry(_write_float(value), repr(value)),
    complex: lambda value: ComplexEntry(ComplexEntry.write(value), repr(value)),
    bytes: lambda value: None if len(value) > LONG else BytesEntry(BytesEntry.write(value)),
    str: _make_str_entry,
}


def make_scalar_entry(value: Any) -> Scalar | None:
    """Return the entry of a value that is stored in the manifest itself; None for other values."""
    return _MAKERS.get(type(value), _make_found_entry)(value)


# Values of the standard library, stored in the manifest as texts: dates, paths, exact numbers, Enum members.
#
# Each text is the type's own, in one canonical form: a text that does not round-trip is refused. Texts longer than
# `LONG` are not stored here, but like other objects.


class Typed(Scalar):
    """A value of the standard library, as a text of at most `LONG` characters."""

    def value(self) -> Any:
        if len(self.serialized_value) > LONG:
            raise CorruptSnapshotError(
                f"{self.type} values must have at most {LONG:,} characters, got {len(self.serialized_value):,}"
            )
        return super().value()


def _expect_same_text(made: Any, text: str, write: Callable[[Any], str]) -> Any:
    """Return a decoded value, if its text is canonical."""
    if write(made) != text:
        raise ValueError(f"text must be canonical for {made!r}, got {text[:80]!r}")
    return made


def _write_delta(value: timedelta) -> str:
    return f"{value.days},{value.seconds},{value.microseconds}"


def _read_delta(text: str) -> timedelta:
    days, seconds, microseconds = map(read_int, text.split(","))
    made = timedelta(days, seconds, microseconds)
    return _expect_same_text(made, text, _write_delta)  # type: ignore[no-any-return]


class TimedeltaEntry(Typed, tag="timedelta"):
    """A datetime.timedelta: days, seconds, microseconds."""

    write = staticmethod(_write_delta)
    read = staticmethod(_read_delta)


class TimezoneEntry(Typed, tag="timezone"):
    """A datetime.timezone: its offset, and its name if it has one."""

    @staticmethod
    def write(value: Any) -> str:
        offset, *name = value.__getinitargs__()
        return ":".join([_write_delta(offset), *map(encode_component, name)])

    @staticmethod
    def read(text: str) -> Any:
        offset, *name = text.split(":", 1)
        made = timezone(_read_delta(offset), *map(decode_component, name))
        return UTC if made == UTC and not name else made


_ZONE = re.compile(r"[A-Za-z0-9_+\-]{1,40}(/[A-Za-z0-9_+\-]{1,40}){0,3}", re.ASCII)


class ZoneInfoEntry(Typed, tag="ZoneInfo"):
    """A zoneinfo.ZoneInfo, by its key."""

    write = staticmethod(lambda value: value.key)

    @staticmethod
    def read(text: str) -> Any:
        if not _ZONE.fullmatch(text):
            raise ValueError(f"invalid key of a time zone: {text[:80]!r}")
        try:
            return zoneinfo.ZoneInfo(text)
        except (KeyError, OSError) as error:
            raise UnsupportedFormatError(
                f"unknown time zone {text!r} on this machine: {error}; pip install tzdata"
            ) from error


def _write_zone(zone: Any) -> str | None:
    """Return the text of a `tzinfo`; None if it has none."""
    if zone is None:
        return ""
    if type(zone) is timezone:
        return "timezone:" + TimezoneEntry.write(zone)
    return f"ZoneInfo:{zone.key}" if type(zone) is zoneinfo.ZoneInfo and _has_key(zone) else None


def _has_key(zone: Any) -> bool:
    return isinstance(zone.key, str) and bool(_ZONE.fullmatch(zone.key))


def _read_zone(text: str) -> Any:
    kind, _, rest = text.partition(":")
    readers = {"": lambda _: None, "timezone": TimezoneEntry.read, "ZoneInfo": ZoneInfoEntry.read}
    return readers[kind](rest)


def _write_moment(value: Any) -> str:
    text = value.replace(tzinfo=None, fold=0).isoformat()
    return f"{text};{value.fold};{_write_zone(value.tzinfo)}" if value.fold or value.tzinfo is not None else text


def _read_moment(kind: Any, text: str) -> Any:
    bare, *more = text.split(";", 2)
    made = kind.fromisoformat(bare)
    if more:
        fold, zone = more
        made = made.replace(fold=read_int(fold), tzinfo=_read_zone(zone))
    return _expect_same_text(made, text, _write_moment)


class DatetimeEntry(Typed, tag="datetime"):
    """A datetime.datetime in ISO 8601, followed by semicolons, `fold` and the time zone."""

    write = staticmethod(_write_moment)
    read = staticmethod(lambda text: _read_moment(datetime, text))


class TimeEntry(Typed, tag="time"):
    """A datetime.time, in the form of `datetime`."""

    write = staticmethod(_write_moment)
    read = staticmethod(lambda text: _read_moment(time, text))


class DateEntry(Typed, tag="date"):
    """A datetime.date in ISO 8601."""

    write = staticmethod(lambda value: value.isoformat())
    read = staticmethod(lambda text: _expect_same_text(date.fromisoformat(text), text, date.isoformat))


_PATHS: dict[str, type[pathlib.PurePath]] = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PosixPath if os.name == "posix" else pathlib.PurePosixPath,
    "WindowsPath": pathlib.WindowsPath if os.name == "nt" else pathlib.PureWindowsPath,
}


class PathEntry(Typed, tag="Path"):
    """A path of pathlib: its class and its text. One of another system is restored as a pure path."""

    write = staticmethod(lambda value: f"{type(value).__name__}:{encode_component(str(value)).replace('%2F', '/')}")

    @staticmethod
    def read(text: str) -> Any:
        kind, path = text.split(":", 1)
        return _PATHS[kind](decode_component(path))


def _write_uuid(value: uuid.UUID) -> str:
    known = value.is_safe is not uuid.SafeUUID.unknown
    return f"{value};{value.is_safe.value}" if known else str(value)


def _read_uuid(text: str) -> uuid.UUID:
    bare, _, safe = text.partition(";")
    made = uuid.UUID(bare, is_safe=uuid.SafeUUID(read_int(safe)) if safe else uuid.SafeUUID.unknown)
    return _expect_same_text(made, text, _write_uuid)  # type: ignore[no-any-return]


class UUIDEntry(Typed, tag="UUID"):
    """A uuid.UUID, followed by a semicolon and `is_safe` if that is known."""

    write = staticmethod(_write_uuid)
    read = staticmethod(_read_uuid)


class DecimalEntry(Typed, tag="Decimal"):
    """A decimal.Decimal, as its `str`: digits and exponent."""

    read = staticmethod(lambda text: _expect_same_text(Decimal(text), text, str))


def _write_fraction(value: Fraction) -> str:
    return f"{write_int(value.numerator)}/{write_int(value.denominator)}"


def _read_fraction(text: str) -> Fraction:
    numerator, denominator = map(read_int, text.split("/"))
    return _expect_same_text(Fraction(numerator, denominator), text, _write_fraction)  # type: ignore[no-any-return]


class FractionEntry(Typed, tag="Fraction"):
    """A fractions.Fraction in lowest terms."""

    write = staticmethod(_write_fraction)
    read = staticmethod(_read_fraction)


class RangeEntry(Typed, tag="range"):
    """A range: start, stop, step."""

    write = staticmethod(lambda value: ",".join(map(write_int, (value.start, value.stop, value.step))))

    @staticmethod
    def read(text: str) -> Any:
        start, stop, step = map(read_int, text.split(","))
        return range(start, stop, step)


LONGEST_NAME = 1000
"""Maximum length of a class name."""


def check_class_name(name: str) -> None:
    """Raise CorruptSnapshotError for a text that is too long for a class name."""
    if len(name) > LONGEST_NAME:
        raise CorruptSnapshotError(
            f"class name too long ({len(name):,} of {LONGEST_NAME:,} characters): {name[:80]!r}..."
        )


class EnumEntry(Scalar, tag="Enum"):
    """A member of an Enum: its class, its name, and its value if that is plain."""

    obj_type: str = ""
    name: str | None = None
    """None for a flag without a name."""
    held: str | None = None
    """Type of the value, whose text is `serialized_value`; None if only the name is known."""

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.obj_type, self.name, self.held, self.serialized_value

    def member_value(self) -> Any:
        """Return the member's value."""
        check_class_name(self.obj_type)
        known = _ENUM_VALUES.get(self.held or "")
        if known is None or len(self.serialized_value) > LONG:
            raise CorruptSnapshotError(f"{self.obj_type[:80]}: unknown type of an Enum value: {str(self.held)[:80]!r}")
        return known(self.serialized_value).value()

    def to_scalar(self) -> Scalar:
        """Return the value as a plain scalar, or the name if the value is unknown."""
        if self.held is None:
            return StrEntry(str(self.name), replicated=self.replicated)
        self.member_value()
        return _ENUM_VALUES[self.held](self.serialized_value, replicated=self.replicated)

    def value(self) -> Any:
        check_class_name(self.obj_type)
        fields = {"name": self.name}
        if self.held is not None:
            fields["value"] = self.member_value()
        return SavedObject("Enum", self.obj_type, fields)


_ENUM_VALUES: dict[str, type[Scalar]] = {
    kind.__name__: SCALARS[kind] for kind in (int, bool, float, complex, bytes, type(None))
} | {"str": StrEntry}


def make_enum_entry(value: Any) -> EnumEntry | None:
    """Return the entry of an Enum member, or of a decoded member.

    Return None if neither its name nor its value can be recorded.
    """
    if isinstance(value, SavedObject):
        return _make_enum_entry(value.class_name, value.get("name"), value.get("value"), has_value="value" in value)
    kind = type(value)
    return _make_enum_entry(class_name(kind), value.name, value._value_, has_value=True)


def _make_enum_entry(obj_type: str, name: Any, value: Any, *, has_value: bool) -> EnumEntry | None:
    if len(obj_type) > LONGEST_NAME or len(name or "") > LONGEST_NAME:
        return None
    plain = make_scalar_entry(value) if has_value and type(value).__name__ in _ENUM_VALUES else None
    readable = f"{obj_type}.{name}"
    if plain is None or len(plain.serialized_value) > LONG or getattr(plain, "escaped", False):
        return None if name is None else EnumEntry("", readable, obj_type=obj_type, name=name)
    held = plain.type
    return EnumEntry(plain.serialized_value, readable, obj_type=obj_type, name=name, held=held)


def resolve_member(kind: type[Enum], entry: EnumEntry) -> Enum:
    """Return the member of a class that an entry names.

    Raise LookupError if the class has no such member, or if the name belongs to another one.
    """
    check_class_name(entry.obj_type)
    check_class_name(entry.name or "")
    named = _find_by_name(kind, entry.name)
    saved = f"{entry.obj_type}.{entry.name}"
    if entry.held is None:
        if named is None:
            raise LookupError(f"the snapshot has {saved}, but {kind.__qualname__} has no such member")
        return named
    value = entry.member_value()
    found = _find_by_value(kind, value)
    if found is None:
        raise LookupError(f"the snapshot has {saved} = {value!r}, but {kind.__qualname__} has no member of this value")
    if named is not None and named is not found and named != found:
        raise LookupError(f"the snapshot has {saved} = {value!r}, but {kind.__qualname__} has {found!r} and {named!r}")
    return found


def _find_by_name(kind: type[Enum], name: str | None) -> Enum | None:
    """Return the member with a name, or a combination of flags joined by `|`."""
    parts = [kind.__members__.get(each) for each in (name or "").split("|")]
    if not all(isinstance(each, kind) for each in parts):
        return None
    return parts[0] if len(parts) == 1 else functools.reduce(operator.or_, parts)


def _find_by_value(kind: type[Enum], value: Any) -> Enum | None:
    """Return the member with a value, without calling the class's own `_missing_`.

    Only flags are looked up through their class, by the bits that fit.
    """
    if issubclass(kind, Flag) and type(value) is int:
        try:
            return kind(value)
        except ValueError:
            return None
    found = kind._value2member_map_.get(value)
    return found if found is not None and type(found._value_) is type(value) else None


TYPED: dict[type, type[Typed]] = {
    datetime: DatetimeEntry,
    date: DateEntry,
    time: TimeEntry,
    timedelta: TimedeltaEntry,
    timezone: TimezoneEntry,
    zoneinfo.ZoneInfo: ZoneInfoEntry,
    pathlib.PurePosixPath: PathEntry,
    pathlib.PureWindowsPath: PathEntry,
    (pathlib.PosixPath if os.name == "posix" else pathlib.WindowsPath): PathEntry,
    uuid.UUID: UUIDEntry,
    Decimal: DecimalEntry,
    Fraction: FractionEntry,
    range: RangeEntry,
}
"""Exact types, with their entry classes."""


def make_typed_entry(value: Any) -> Typed | None:
    """Return the entry of a value of these types; None if it has no text, or a long one."""
    kind = type(value)
    if kind in (datetime, time) and _write_zone(value.tzinfo) is None:
        return None
    if kind is zoneinfo.ZoneInfo and not _has_key(value):
        return None
    entry = TYPED[kind]
    text = entry.write(value)
    if len(text) > LONG or (entry is PathEntry and PathEntry.read(text) != value):
        return None
    return entry(text)


PLAIN_MAKERS: dict[type, Callable[[Any], Scalar | None]] = {**_MAKERS, **dict.fromkeys(TYPED, make_typed_entry)}
"""Exact types of the values that are stored in the manifest itself, with functions that return their entries, or None:
see `make_plain_entry`."""


def make_plain_entry(value: Any) -> Scalar | None:
    """Return the entry of a value of any type that is stored in the manifest itself; None for other values."""
    return PLAIN_MAKERS.get(type(value), _make_found_entry)(value)


AnyValue = Union[  # noqa: UP007 - msgspec wants one union, and mypy one spelling of it
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
]
