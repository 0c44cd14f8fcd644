"""Entries of tensors, arrays and objects, whose bytes are in data files, and the union of all kinds of entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import msgspec

from snapshot.manifest.containers import (
    NEW_SERIALIZERS,
    NamedTupleEntry,
    NamespaceEntry,
    PlainEntry,
    SimpleNamespaceEntry,
    SubclassEntry,
)
from snapshot.manifest.values import Entry
from snapshot.saved import GENERATOR
from snapshot.tensors.geometry import Box, Grid, Split, find_coordinates, find_nesting, parse_placements, whole_box
from snapshot.text import counted

if TYPE_CHECKING:
    import numpy as np

# Entries are tagged by `type`, and written without default values. They are plain values: nothing here does I/O.


class Extra(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """Properties that few tensors have: an entry without them decodes a third faster."""

    stride_order: tuple[int, ...] | None = None
    """Order of the dimensions in memory, slowest first, if dense but not in C order."""
    subclass: str | None = None
    requires_grad: bool = False
    strides: tuple[int, ...] | None = None
    """Strides in elements of a view into the stored range, which only foreign formats have."""
    storage_offset: int | None = None
    shares: str | None = None
    """Path of the tensor that shared memory with this one; both are stored separately."""


PLAIN = Extra()


class _Tensor(Entry):
    is_tensor = True

    @property
    def kind(self) -> str:
        return "Tensor"

    def describe(self) -> tuple[str, str]:
        return self.type, "" if self.extra is None else self.extra.subclass or ""

    def summarise(self: Any) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def form(self: Any) -> Any:
        return None if self.is_sharded else (self.kind, self.dtype, self.shape, self.extra)

    def tensors(self) -> Sequence[tuple[str, Any]]:
        return (("", self),)

    def stored(self) -> Sequence[Any]:
        return [stored for _, stored in self.pieces()]

    def pieces(self) -> list[tuple[Box, TensorEntry]]:
        """Return the stored ranges, each with the box that it fills."""
        raise NotImplementedError

    def sources(self) -> Sequence[AnyTensor]:
        """Return the stored tensors that have the elements."""
        return (self,)  # type: ignore[return-value]

    def places(self) -> list[tuple[Any, ...]]:
        """Return the place and the form of each stored range. It is equal for two entries of the same stored values."""
        return [(box, each.location, each.byte_range, each.extra, each.serializer) for box, each in self.pieces()]


class TensorEntry(_Tensor, tag="Tensor"):
    """A tensor whose bytes are one range of one file, in C order."""

    location: str
    byte_range: tuple[int, int]
    dtype: str
    shape: tuple[int, ...]
    digest: str | None = None
    blocks: tuple[str, int, int] | None = None
    """File, begin and end of the table of block digests, if the tensor is longer than one block."""
    replicated: bool = False
    serializer: str = "raw"
    extra: Extra | None = None

    @property
    def nbytes(self) -> int:
        return self.byte_range[1] - self.byte_range[0]

    def stored(self) -> Sequence[Any]:
        return (self,)

    def pieces(self) -> list[tuple[Box, TensorEntry]]:
        return [(whole_box(self.shape), self)]


class Shard(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A box of a tensor, with the range of its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: TensorEntry


class _Boxes(_Tensor):
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self: Any) -> int:
        return sum(shard.tensor.nbytes for shard in self.boxes)

    def stored(self: Any) -> Sequence[Any]:
        return [shard.tensor for shard in self.boxes]

    def pieces(self: Any) -> list[tuple[Box, TensorEntry]]:
        return [(Box(shard.offsets, shard.sizes), shard.tensor) for shard in self.boxes]


class ChunkedTensorEntry(_Boxes, tag="ChunkedTensor"):
    """A long tensor that was split into boxes."""

    chunks: list[Shard]
    replicated: bool = False
    extra: Extra | None = None

    def describe(self) -> tuple[str, str]:
        return self.kind, super().describe()[1]  # the number of pieces does not matter to users

    @property
    def boxes(self) -> list[Shard]:
        return self.chunks

    def with_boxes(self, boxes: list[Shard]) -> Any:
        """Return the entry with other boxes."""
        return msgspec.structs.replace(self, chunks=boxes)


class Mesh(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """Ranks at equal steps in each dimension, one dimension nested in the next.

    Nearly all meshes have this form, and it is short for any number of ranks.
    """

    begin: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def __contains__(self, rank: int) -> bool:
        rest = rank - self.begin
        for size, step in sorted(zip(self.shape, self.steps, strict=False), key=lambda each: -each[1]):
            rest -= min(rest // step, size - 1) * step if rest >= 0 and step > 0 else 0
        return rest == 0

    def rank_at(self, coordinate: tuple[int, ...]) -> int:
        """Return the rank at a coordinate."""
        return self.begin + sum(at * step for at, step in zip(coordinate, self.steps, strict=False))

    @staticmethod
    def from_lists(ranks: Any) -> Mesh | list[Any]:
        """Return a mesh from nested lists, or the lists themselves if they are not regular."""
        import numpy as np

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
    """A tensor with boxes on several ranks."""

    is_sharded = True
    shards: list[Shard]
    mesh: Mesh | list[Any] | None = None
    """Ranks that had parts of the tensor, if all of them knew."""

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def boxes(self) -> list[Shard]:
        return self.shards

    def with_boxes(self, boxes: list[Shard]) -> Any:
        """Return the entry with other boxes."""
        return msgspec.structs.replace(self, shards=boxes)

    def is_whole(self) -> bool:
        """Return True if the boxes have as many elements as the tensor."""
        return sum(math.prod(shard.sizes) for shard in self.shards) == math.prod(self.shape)

    def is_held_by(self, rank: int) -> bool:
        """Return True if a rank had a part of the tensor."""
        rest: list[Any] = [] if self.mesh is None else [self.mesh]
        while rest:
            each = rest.pop()
            if isinstance(each, list):
                rest += each
            elif each == rank or (isinstance(each, Mesh) and rank in each):
                return True
        return False


class DTensorEntry(ShardedTensorEntry, tag="DTensor"):
    """A DTensor, with its placements over its mesh."""

    placements: list[str] | None = None

    def describe(self) -> tuple[str, str]:
        return self.type, f"DTensor {', '.join(self.placements)}" if self.placements else ""

    def find_holders(self, box: Box) -> set[int]:
        """Return the ranks whose boxes meet a box, by the mesh and the placements: a hint, and empty without one."""
        placements = parse_placements(self.placements or ())
        if isinstance(self.mesh, Mesh):
            shape, rank_at = self.mesh.shape, self.mesh.rank_at
        else:
            ranks = _as_array(self.mesh)
            shape, rank_at = ranks.shape, lambda coordinate: int(ranks[coordinate])
        if not 0 < len(shape) <= MOST_DIMENSIONS or placements is None or len(placements) != len(shape):
            return set()
        splits = [each for each in placements if isinstance(each, Split)]
        if min(shape) < 1 or math.prod(shape) * math.prod(each.strides for each in splits) > MOST_HOLDERS:
            return set()
        if any(each.dim >= len(self.shape) for each in splits):
            return set()
        orders = {None, find_nesting(shape, placements)}  # strides do not say in which order dimensions cut
        found = {at for order in orders for at in find_coordinates(self.shape, shape, placements, box, order)}
        return set(map(rank_at, found))


def _as_array(mesh: Any) -> np.ndarray[Any, Any]:
    """Return nested lists of ranks as an array; one without dimensions if they are none."""
    import numpy as np

    try:
        made = np.asarray(mesh)
    except ValueError:  # the lists have different lengths
        return np.array(0)
    return made if made.dtype.kind in "iu" else np.array(0)


MOST_HOLDERS = 1 << 18
"""Maximum number of ranks in a mesh that is followed, times the strides of its placements."""
MOST_DIMENSIONS = 8
"""Maximum number of dimensions of such a mesh."""


class MappedPart(NamedTuple):
    """Elements of a stored tensor, and their places in a mapped one."""

    entry: TensorEntry | ChunkedTensorEntry | ShardedTensorEntry
    grid: Grid


class MappedTensorEntry(_Tensor, tag="Mapped"):
    """A tensor that a tensor map makes of stored ones while they are read. Manifests do not have such entries."""

    is_mapped = True
    dtype: str
    shape: tuple[int, ...]
    parts: list[MappedPart]
    replicated: bool = True
    bounds: Any = None
    """For each part and dimension, the begin and end of its elements: see `parts_in`."""

    @property
    def nbytes(self) -> int:
        from snapshot.tensors.memory import ITEMSIZE

        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def parts_in(self, box: Box) -> list[MappedPart]:
        """Return the parts that may have elements in a box of the tensor. There may be thousands of parts."""
        if len(self.parts) == 1 or not self.shape:
            return self.parts
        import numpy as np

        if self.bounds is None:
            covers = [part.grid.cover("target") for part in self.parts]
            lows = np.array([cover.offsets for cover in covers])
            self.bounds = lows, lows + np.array([cover.sizes for cover in covers])
        lows, highs = self.bounds
        begins = np.array(box.offsets)
        near = ((lows < begins + np.array(box.sizes)) & (highs > begins)).all(axis=1)
        return [self.parts[number] for number in np.flatnonzero(near)]

    def pieces(self) -> list[tuple[Box, TensorEntry]]:
        """Return the stored ranges, each with the smallest box that has all of its elements."""
        return [
            (grid.cover("target"), stored)
            for entry, whole in self.parts
            for piece, stored in entry.pieces()
            for grid in whole.clip("source", piece)
        ]

    def sources(self) -> Sequence[AnyTensor]:
        return [part.entry for part in self.parts]

    def places(self) -> list[tuple[Any, ...]]:
        return [(part.grid, *part.entry.places()) for part in self.parts]


class NDArrayEntry(Entry, tag="ndarray"):
    """A NumPy array, or (`scalar`) a NumPy scalar: as bytes, with NumPy's own text for the dtype."""

    is_hashable = False
    data: TensorEntry | ChunkedTensorEntry
    dtype: Any
    shape: tuple[int, ...]
    order: str = "C"
    scalar: bool = False
    replicated: bool = False

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def summarise(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def form(self) -> Any:
        return self.kind, self.dtype, self.shape, self.order, self.scalar, self.data.dtype

    def tensors(self) -> Sequence[tuple[str, Any]]:
        return (("", self.data),)

    def with_tensors(self, tensors: Mapping[str, Any]) -> NDArrayEntry:
        """Return the entry with other tensors, by their suffixes."""
        return msgspec.structs.replace(self, data=tensors[""])

    def stored(self) -> Sequence[Any]:
        return self.data.stored()


class TensorPartsEntry(Entry, tag="TensorParts"):
    """A tensor composed of tensors: a sparse layout, or a quantised one."""

    kind: str
    parts: dict[str, TensorEntry | ChunkedTensorEntry]
    params: dict[str, Any]
    replicated: bool = False

    def describe(self) -> tuple[str, str]:
        return self.kind if self.kind == GENERATOR else f"{self.kind} tensor", ""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def form(self) -> Any:
        parts = [(name, part.dtype, part.shape) for name, part in self.parts.items()]
        return self.type, self.kind, self.params, parts

    def tensors(self) -> Sequence[tuple[str, Any]]:
        return [(f"%[{name}]", part) for name, part in self.parts.items()]

    def with_tensors(self, tensors: Mapping[str, Any]) -> TensorPartsEntry:
        """Return the entry with other tensors, by their suffixes."""
        parts = {suffix.removeprefix("%[").removesuffix("]"): tensor for suffix, tensor in tensors.items()}
        return msgspec.structs.replace(self, parts=parts)

    def stored(self) -> Sequence[Any]:
        return [stored for part in self.parts.values() for stored in part.stored()]


class ObjectEntry(Entry, tag="object"):
    """An object as bytes that only its serializer can read.

    The serializers are `bytes`, `bytearray`, `utf8` (long values), `BytesIO`, `random`, `OmegaConf`, and `torch_save`
    (a pickle).
    """

    is_object = True
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

    def describe(self) -> tuple[str, str]:
        name = self.obj_type.rpartition(".")[2] or "object"
        return name, "a pickle" if self.serializer == "torch_save" else ""

    def summarise(self) -> str:
        return f"{self.obj_type}, {counted(self.nbytes, 'byte')}"

    @property
    def form(self) -> Any:
        return None if self.digest is None else (self.type, self.serializer, self.obj_type, self.nbytes, self.digest)

    def stored(self) -> Sequence[Any]:
        return (self,)


AnyTensor = TensorEntry | ChunkedTensorEntry | ShardedTensorEntry | DTensorEntry | MappedTensorEntry

AnyEntry = Union[  # noqa: UP007 - msgspec wants one union, and mypy one spelling of it
    PlainEntry,
    NamedTupleEntry,
    NamespaceEntry,
    SimpleNamespaceEntry,
    SubclassEntry,
    TensorEntry,
    ChunkedTensorEntry,
    ShardedTensorEntry,
    DTensorEntry,
    NDArrayEntry,
    TensorPartsEntry,
    ObjectEntry,
]

_THIRD = (NamedTupleEntry, NamespaceEntry, SimpleNamespaceEntry)


def needs_third_format(entries: Iterable[Any]) -> bool:
    """Return True if one of the entries has a type or a serializer that `snapshot/3` added."""
    found = list(entries)
    kinds = set(map(type, found))
    if not kinds.isdisjoint(_THIRD):
        return True
    return ObjectEntry in kinds and any(type(e) is ObjectEntry and e.serializer in NEW_SERIALIZERS for e in found)


def stored_in(manifest: Mapping[str, Any]) -> Iterator[TensorEntry | ObjectEntry]:
    """Yield all stored ranges of a manifest; a range with several names is repeated."""
    for entry in manifest.values():
        yield from entry.stored()


# Counting of entries, consistent in all reports, listings and errors.


def is_leaf(entry: Entry) -> bool:
    """Return True if an entry counts: a tensor, a value, or an empty container.

    Other containers are represented by their contents.
    """
    return not entry.width


def count_entries(manifest: Mapping[str, Any]) -> int:
    """Return the number of entries that count."""
    return sum(map(is_leaf, manifest.values()))
