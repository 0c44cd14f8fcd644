"""Values that are stored in the manifest itself, as exact texts."""

from __future__ import annotations

import base64
import struct
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.entry import Entry
from snapshot.manifest.paths import LONGEST_INT, decode_text, encode_text
from snapshot.tensors.dtypes import BY_NAME


class Scalar(Entry):
    """A value in the manifest itself, as a text."""

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

    def value(self) -> Any:
        """Return the value; raise CorruptSnapshotError if the text is not one of this type."""
        try:
            return type(self).read(self.serialized_value)
        except (ValueError, KeyError, struct.error, ArithmeticError) as error:
            raise CorruptSnapshotError(f"invalid value of type {self.type}: {self.serialized_value[:80]!r}") from error


def _write_float(value: float) -> str:
    return struct.pack(">d", value).hex()


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


class DtypeEntry(Scalar, tag="dtype"):
    """A torch.dtype."""

    write = staticmethod(lambda value: str(value).removeprefix("torch."))
    read = staticmethod(lambda text: BY_NAME[text] if text in BY_NAME else _read_dtype(text))


def _read_dtype(text: str) -> torch.dtype:
    return {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}[text]


class DeviceEntry(Scalar, tag="device"):
    """A torch.device."""

    @staticmethod
    def read(text: str) -> Any:
        return torch.device(text)

    def value(self) -> Any:
        try:
            return super().value()
        except RuntimeError as error:
            raise CorruptSnapshotError(f"invalid device {self.serialized_value[:80]!r}: {error}") from error


class SizeEntry(Scalar, tag="Size"):
    """A torch.Size."""

    write = staticmethod(lambda value: ",".join(map(str, value)))
    read = staticmethod(lambda text: torch.Size([_read_int64(each) for each in text.split(",")] if text else ()))


SCALARS: dict[type, type[Scalar]] = {
    int: IntEntry,
    bool: BoolEntry,
    bytes: BytesEntry,
    float: FloatEntry,
    complex: ComplexEntry,
    type(None): NoneEntry,
    torch.dtype: DtypeEntry,
    torch.device: DeviceEntry,
    torch.Size: SizeEntry,
}

LONG = 16 << 10
"""Strings and bytes longer than this are stored in a data file."""


def make_scalar_entry(value: Any) -> Scalar | None:
    """Return the entry of a value that is stored in the manifest itself; None for other values."""
    kind = type(value)
    if kind is str:
        if len(value) > LONG:
            return None
        escaped = encode_text(value)
        return StrEntry(value) if escaped is None else StrEntry(escaped, escaped=True)
    entry = SCALARS.get(kind)
    if entry is None or (kind is bytes and len(value) > LONG):
        return None
    return entry(entry.write(value), repr(value) if kind in (float, complex) else None)
