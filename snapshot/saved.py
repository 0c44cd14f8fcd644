"""Objects whose class the reader does not have, as plain values that name the class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GENERATOR = "Generator"
"""`kind` of torch's random number generators."""


def class_name(kind: type) -> str:
    """Return the module and the qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


class SavedObject(Mapping[str, Any]):
    """A saved object whose class the application does not provide.

    A snapshot names classes and never imports them. A dataclass, a named tuple, an Enum member or a wrapper-class
    tensor is read as a `SavedObject` unless a live object provides its class: in a `restore`, or as `obj_out` of
    `read_object`. Its fields are items and attributes. Saving it again stores the original object.

    >>> from snapshot.saved import SavedObject
    >>> saved = SavedObject("dataclass", "app.Config", {"lr": 0.1, "layers": 3})
    >>> saved
    <app.Config lr=0.1 layers=3>
    >>> saved.lr, saved["layers"], dict(saved)
    (0.1, 3, {'lr': 0.1, 'layers': 3})
    """

    __slots__ = ("_entry", "_fields", "class_name", "kind")
    kind: str
    """`dataclass`, `namedtuple`, `Enum` (fields `name` and `value`), `TensorSubclass`, `Generator` or `OmegaConf`.

    A `Generator` (fields `device` and `state`) is read as this if this machine lacks its device. An `OmegaConf` (fields
    `content` and `flags`) is read as this if omegaconf is not installed.
    """
    class_name: str
    """The module and the qualified name of the class."""

    def __init__(self, kind: str, class_name: str, fields: Mapping[str, Any], entry: Any = None) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "class_name", class_name)
        object.__setattr__(self, "_fields", dict(fields))
        object.__setattr__(self, "_entry", entry)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a SavedObject cannot be changed: {name}")

    def __getattr__(self, name: str) -> Any:
        if name not in SavedObject.__slots__ and name in self._fields:
            return self._fields[name]
        raise AttributeError(f"the saved {self.class_name} has no field {name!r}")

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SavedObject):
            return NotImplemented
        return (self.kind, self.class_name, self._fields) == (other.kind, other.class_name, other._fields)

    def __hash__(self) -> int:
        try:
            return hash((self.kind, self.class_name, tuple(self._fields.items())))
        except TypeError:  # it may be in a set: its own class may be hashable
            return object.__hash__(self)

    def __reduce__(self) -> Any:
        return SavedObject, (self.kind, self.class_name, self._fields, self._entry)

    def __repr__(self) -> str:
        return f"<{' '.join([self.class_name, *(f'{name}={value!r}' for name, value in self._fields.items())])}>"
