"""The kinds of entries in a manifest. What depends on the kind of an entry lives with it here, and is asked of it.

Entries are tagged by `type`, and written with their defaults left out. They are plain values: nothing here does I/O.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Union

import msgspec
import numpy as np

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.manifest.entry import Entry
from snapshot.manifest.optimizer import OptimizerRecord
from snapshot.manifest.paths import component_of, decode_key
from snapshot.manifest.scalars import (
    BoolEntry,
    BytesEntry,
    ComplexEntry,
    DeviceEntry,
    DtypeEntry,
    FloatEntry,
    IntEntry,
    NoneEntry,
    SizeEntry,
    StrEntry,
)
from snapshot.tensors.geometry import Box, whole

Key = str | int | dict[str, str]
"""A dict's key as it stands in `keys`: strings and ints as they are, others tagged, so that they come back as they
were."""


MOST_COMPARISONS = 20_000_000
"""Of keys whose hashes are equal: so many take a dict a second."""


class Container(Entry):
    """An entry that holds others, under paths one component longer than its own."""

    def build(self, children: Sequence[Any]) -> Any:
        """The container itself, from its children in order."""
        return list(children)

    def components(self) -> list[str]:
        """The path components of the children, in order."""
        return []

    def without(self, gone: Iterable[bool]) -> Container:
        """The same container without some of its children."""
        return self

    @property
    def width(self) -> int:
        """How many children it has."""
        return 0

    def check(self, path: str) -> None:
        """Raise `CorruptSnapshotError` where it could not be built, whatever its children are."""


class _Sequence(Container):
    length: int
    replicated: bool = False
    make: ClassVar[Callable[[Sequence[Any]], Any]]

    @property
    def width(self) -> int:
        return self.length

    def check(self, path: str) -> None:
        if self.length < 0:
            raise CorruptSnapshotError(f"{path}: has {self.length} elements")

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


class DequeEntry(_Sequence, tag="deque"):
    """A deque, with its `maxlen`."""

    maxlen: int | None = None

    def check(self, path: str) -> None:
        super().check(path)
        if self.maxlen is not None and self.maxlen < self.length:
            raise CorruptSnapshotError(f"{path}: a deque of at most {self.maxlen} elements has {self.length}")

    def build(self, children: Sequence[Any]) -> Any:
        return collections.deque(children, self.maxlen)


class DictEntry(Container, tag="dict"):
    """A dict: its keys in order. `components` of the path where a key's text is not its component."""

    keys: list[Key]
    tagged: list[int] | None = None
    """Which keys stand under a tagged component, since another key of this dict has the same text."""
    replicated: bool = False
    optimizer: OptimizerRecord | None = None
    """Of an optimizer's state dict: whose it is."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        """The dict itself, from its items."""
        return dict(items)

    def build(self, children: Sequence[Any]) -> Any:
        return self.make(list(zip(map(decode_key, self.keys), children, strict=True)))

    @property
    def width(self) -> int:
        return len(self.keys)

    def check(self, path: str) -> None:
        alike = collections.Counter(hash(decode_key(key)) for key in self.keys if type(key) is dict)
        if sum(count * count for count in alike.values()) > MOST_COMPARISONS:
            raise CorruptSnapshotError(f"{path}: its keys were chosen to be slow")

    def without(self, gone: Iterable[bool]) -> Container:
        kept = [i for i, away in enumerate(gone) if not away]
        tagged = [new for new, old in enumerate(kept) if old in (self.tagged or ())]
        return msgspec.structs.replace(self, keys=[self.keys[i] for i in kept], tagged=tagged or None)

    def components(self) -> list[str]:
        tagged = set(self.tagged or ())
        return [
            key
            if type(key) is str and key.isascii() and "/" not in key and "%" not in key
            else component_of(key, i in tagged)
            for i, key in enumerate(self.keys)
        ]


class OrderedDictEntry(DictEntry, tag="OrderedDict"):
    """An OrderedDict; a module's state dict carries the versions of its modules."""

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
            raise UnsupportedFormatError(f"{path}: a defaultdict of {self.factory!r} is not known to this version")

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        return collections.defaultdict(_FACTORIES[self.factory], items)


class CounterEntry(DictEntry, tag="Counter"):
    """A Counter."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        made: collections.Counter[Any] = collections.Counter()
        dict.update(made, items)
        return made


def factory_name(factory: Callable[[], Any] | None) -> str | None:
    """The name under which a defaultdict's factory is recorded; None where it cannot be."""
    return next((name for name, known in _FACTORIES.items() if known is factory), None)


class Extra(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """What few tensors have: an entry without it decodes a third faster."""

    stride_order: tuple[int, ...] | None = None
    """The order of the dimensions in memory, from the slowest on, where it is dense but not C order."""
    subclass: str | None = None
    requires_grad: bool = False
    strides: tuple[int, ...] | None = None
    """In elements, of a view into the stored range: only foreign formats have them."""
    storage_offset: int | None = None


PLAIN = Extra()


class TensorEntry(Entry, tag="Tensor"):
    """A tensor whose bytes lie in one range of one file, in C order."""

    location: str
    byte_range: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None
    blocks: tuple[str, int, int] | None = None
    """File, begin and end of the table of its blocks' digests, where it is longer than one block."""
    replicated: bool = False
    serializer: str = "raw"
    extra: Extra | None = None

    @property
    def nbytes(self) -> int:
        return self.byte_range[1] - self.byte_range[0]

    def pieces(self) -> list[tuple[Box, TensorEntry]]:
        """The stored ranges, each with the box that it fills."""
        return [(whole(self.shape), self)]


class Shard(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A box of a tensor, with the range that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: TensorEntry


class _Boxes(Entry):
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for _, stored in self.pieces())

    def pieces(self) -> list[tuple[Box, TensorEntry]]:
        """The stored ranges, each with the box that it fills."""
        shards: list[Shard] = self.chunks if isinstance(self, ChunkedTensorEntry) else self.shards  # type: ignore[attr-defined]
        return [(Box(shard.offsets, shard.sizes), shard.tensor) for shard in shards]


class ChunkedTensorEntry(_Boxes, tag="ChunkedTensor"):
    """A tensor that was cut into boxes, since it is long."""

    chunks: list[Shard]
    replicated: bool = False
    extra: Extra | None = None


class Mesh(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Ranks at equal steps in each dimension, one dimension within the next, as in nearly all meshes: short, however
    many they are."""

    begin: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def __contains__(self, rank: int) -> bool:
        rest = rank - self.begin
        for size, step in sorted(zip(self.shape, self.steps, strict=False), key=lambda each: -each[1]):
            rest -= min(rest // step, size - 1) * step if rest >= 0 and step > 0 else 0
        return rest == 0

    @staticmethod
    def of(ranks: Any) -> Mesh | list[Any]:
        """A mesh from lists in lists; these themselves where it is none of this kind."""
        array = np.asarray(ranks)
        steps = tuple(
            int(array.take(1, axis).flat[0] - array.flat[0]) if size > 1 else 1 for axis, size in enumerate(array.shape)
        )
        made = array.flat[0] + sum(
            (index * step for index, step in zip(np.indices(array.shape), steps, strict=True)), np.zeros(array.shape)
        )
        reach, within = 1, True
        for size, step in sorted(zip(array.shape, steps, strict=True), key=lambda each: each[1]):
            within = within and (size == 1 or step >= reach)
            reach = max(reach, step * size)
        if array.size == 0 or not within or not np.array_equal(made, array):
            return ranks  # type: ignore[no-any-return]
        return Mesh(int(array.flat[0]), tuple(array.shape), steps)


class ShardedTensorEntry(_Boxes, tag="ShardedTensor"):
    """A tensor whose boxes lay on several ranks."""

    shards: list[Shard]
    mesh: Mesh | list[Any] | None = None
    """The ranks that held it, where all of them knew."""

    def held_by(self, rank: int) -> bool:
        """Whether a rank is one of them."""
        rest: list[Any] = [] if self.mesh is None else [self.mesh]
        while rest:
            each = rest.pop()
            if isinstance(each, list):
                rest += each
            elif each == rank or (isinstance(each, Mesh) and rank in each):
                return True
        return False


class DTensorEntry(ShardedTensorEntry, tag="DTensor"):
    """A DTensor, with the placements that it had over its mesh."""

    placements: list[str] | None = None


class NDArrayEntry(Entry, tag="ndarray"):
    """A NumPy array, or (`scalar`) a NumPy scalar: as bytes, with NumPy's own text for the dtype."""

    data: TensorEntry | ChunkedTensorEntry
    dtype: Any
    shape: tuple[int, ...]
    order: str = "C"
    scalar: bool = False
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class TensorPartsEntry(Entry, tag="TensorParts"):
    """A tensor that is made of tensors: a sparse layout, or a quantised one."""

    kind: str
    parts: dict[str, TensorEntry | ChunkedTensorEntry]
    params: dict[str, Any]
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


class ObjectEntry(Entry, tag="object"):
    """Bytes that only their serializer can read: `bytes`, `bytearray`, `utf8` (long values), or `torch_save` (a
    pickle)."""

    location: str
    byte_range: tuple[int, int]
    serializer: str
    obj_type: str
    digest: str | None = None
    blocks: tuple[str, int, int] | None = None
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return self.byte_range[1] - self.byte_range[0]


AnyTensor = TensorEntry | ChunkedTensorEntry | ShardedTensorEntry | DTensorEntry
TENSORS = (TensorEntry, ChunkedTensorEntry, ShardedTensorEntry, DTensorEntry)

AnyEntry = Union[  # noqa: UP007 - msgspec wants one union, and mypy one spelling of it
    ListEntry,
    TupleEntry,
    SetEntry,
    FrozensetEntry,
    DequeEntry,
    DictEntry,
    OrderedDictEntry,
    DefaultdictEntry,
    CounterEntry,
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
    TensorEntry,
    ChunkedTensorEntry,
    ShardedTensorEntry,
    DTensorEntry,
    NDArrayEntry,
    TensorPartsEntry,
    ObjectEntry,
]
