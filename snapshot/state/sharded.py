"""Tensors with boxes on this rank, of any class.

Other modules need only the position of each local piece in the whole tensor, and the ranks that hold the same piece.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from snapshot.errors import SnapshotError
from snapshot.saved import class_name
from snapshot.tensors import composite, geometry
from snapshot.tensors.digest import digest_range
from snapshot.tensors.geometry import Box, Shape, is_inside


@dataclass(frozen=True, slots=True, eq=False)
class LocalPiece:
    """A box of a tensor, in this rank's memory."""

    box: Box
    """The box in the whole tensor."""
    tensor: torch.Tensor
    """A plain, detached view of the local memory: a write changes the live tensor."""
    holders: tuple[int, ...] | None
    """The global ranks that hold the same box, including this one; None if unknown."""
    replica: int = 0
    """The number of this copy among equal ones, if the value records it."""


@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """This rank's pieces of a tensor that is spread over ranks."""

    kind: str
    """`DTensor`, or `ShardedTensor` for any list of boxes."""
    dtype: torch.dtype
    shape: Shape
    """The shape of the whole tensor."""
    pieces: list[LocalPiece]
    """The pieces; no piece is empty."""
    ranks: tuple[int, ...] | None
    """All global ranks over which the tensor is spread; None if unknown."""
    mesh: list[Any] | None
    """The ranks as nested lists, shared by all tensors of the mesh: do not modify."""
    placements: list[str] | None
    """The placement on each dimension of the mesh: `R`, `S(dim)` or `_S(dim,strides)`."""
    layout: str
    """A text that must be equal on all `ranks`; empty if unknown."""
    requires_grad: bool

    @property
    def is_open(self) -> bool:
        """True if it is unknown which other ranks hold which of the boxes."""
        return self.ranks is None or any(piece.holders is None for piece in self.pieces)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Sharded:
    """A tensor that is a box of a larger one, for tensors that are sharded by hand.

    It replaces the tensor in the state dict. The boxes of all ranks form the whole tensor, and can be restored into
    any other boxes. If several ranks have the same box, `replica` numbers the copies, and only copy 0 needs to be
    stored.

    A pipeline's layer can be a box of all layers:

    >>> weight = torch.zeros(4, 3)
    >>> Sharded(weight.unsqueeze(0), global_shape=(24, 4, 3), offsets=(3, 0, 0))
    Sharded(float32 3:4,0:4,0:3 of (24, 4, 3))

    Raises TypeError or ValueError if the tensor is not such a box. It must have the larger
    tensor's number of dimensions.
    """

    tensor: torch.Tensor
    """Plain, of any device; restored in place."""
    global_shape: Sequence[int]
    """Of the larger tensor."""
    offsets: Sequence[int]
    """The offsets of this tensor in it."""
    replica: int = 0
    """The number of this copy among equal ones."""

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, torch.Tensor):
            raise TypeError(f"Sharded: `tensor` must be a torch.Tensor, got a {class_name(type(self.tensor))}")
        if composite.plain_subclass_name(self.tensor) is None or self.tensor.layout is not torch.strided:
            raise TypeError(f"Sharded: `tensor` must be plain and dense, got a {_describe_tensor(self.tensor)}")
        for name in ("global_shape", "offsets"):
            object.__setattr__(self, name, _expect_integers(name, getattr(self, name)))
        object.__setattr__(self, "replica", _expect_integers("replica", (self.replica,))[0])
        shape, box = tuple(self.global_shape), self.box()
        if not len(shape) == len(box.offsets) == len(box.sizes):
            raise ValueError(
                f"Sharded: `tensor` of shape {box.sizes}, `global_shape` {shape} and `offsets` {box.offsets} differ in "
                "their number of dimensions; give the tensor dimensions of size 1 (`tensor.unsqueeze`) to make it equal"
            )
        if not is_inside(box, shape):
            raise ValueError(f"Sharded: `tensor` of shape {box.sizes} at {box.offsets} is not within {shape}")
        if self.replica < 0:
            raise ValueError(f"Sharded: `replica` must not be negative, got {self.replica}")

    def box(self) -> Box:
        """Return the position of this part in the whole tensor."""
        return Box(tuple(self.offsets), tuple(self.tensor.shape))

    def __repr__(self) -> str:
        replica = f", replica {self.replica}" if self.replica else ""
        return f"Sharded({_dtype_name(self.tensor.dtype)} {self.box()} of {self.global_shape}{replica})"


def find_shards(path: str, value: Any) -> Shards | None:
    """Return this rank's pieces of a sharded value; None for any other value.

    Nothing here communicates. Raises SnapshotError if the boxes cannot be determined.
    """
    if isinstance(value, Sharded) or describes_parts(value):
        return _read_wrapper(path, value) if isinstance(value, Sharded) else _read_described(path, value)
    if _is_instance(value, "torch.distributed.tensor", "DTensor"):
        return _read_dtensor(path, value)
    if _is_instance(value, "torch.distributed._shard.sharded_tensor", "ShardedTensor"):
        return _read_sharded_tensor(path, value)
    describe = getattr(type(value), "__snapshot_shards__", None)
    if describe is not None:
        described: Shards = describe(value, path)
        return described
    if _is_checkpointable(value):
        shape = value.shape if hasattr(value, "shape") else value.size()
        return _read_checkpointable(path, value, tuple(map(int, shape)))
    return None


_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""Fields of torch's protocol `CheckpointableTensor`."""
_OFFSETS = _FIELDS[1:3]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def describes_parts(value: Any) -> bool:
    """Return True for a tensor whose own fields say that it has parts of a larger one.

    These are the fields of torch's protocol `CheckpointableTensor`. A plain tensor may have them as attributes. Only
    offsets count, since `global_shape` and `local_sizes` do not say that there are other parts.
    """
    if type(value) in _PLAIN and not value.__dict__:
        return False  # most tensors, at once
    try:
        told = getattr(value, "global_offsets", None)
        if told is None:
            told = getattr(value, "local_offsets", None)
    except Exception:  # noqa: BLE001 - a property that fails: it is called again where the path is known
        return isinstance(value, torch.Tensor)
    return told is not None and isinstance(value, torch.Tensor)


def _read_described(path: str, value: torch.Tensor) -> Shards:
    """Return the parts that a tensor describes: boxes of the larger tensor, and where each is in this one."""
    try:
        fields: dict[str, Any] = {name: getattr(value, name, None) for name in _FIELDS}
    except Exception as error:
        raise SnapshotError(f"{path}: a property that describes its parts has failed: {error!r}") from error
    missing = [name for name, each in fields.items() if each is None]
    if missing:
        raise SnapshotError(
            f"{path}: has {next(each for each in _OFFSETS if fields[each] is not None)}, so it is a part of a larger "
            f"tensor, but it lacks {', '.join(missing)}; set all of {', '.join(_FIELDS)}, or delete all"
        )
    shape, *lists = fields.values()
    try:
        shape = _to_integers(shape)
        boxes = list(zip(*([_to_integers(part) for part in each] for each in lists), strict=True))
    except (TypeError, ValueError) as error:
        raise SnapshotError(
            f"{path}: {', '.join(_FIELDS[1:])} must have equal lengths, and consist of integers: {error}"
        ) from error
    whole = _expect_plain(path, value)
    parts: list[tuple[Box, torch.Tensor]] = []
    places: list[Box] = []
    for begin, at, size in boxes:
        box, place = Box(begin, size), Box(at, size)
        for each, inside in ((box, shape), (place, tuple(whole.shape))):
            if not is_inside(each, inside):
                raise SnapshotError(
                    f"{path}: the part of sizes {each.sizes} at {each.offsets} is not within a tensor of shape {inside}"
                )
        places.append(place)
        parts.append((box, whole[place.slices()]))
    if geometry.boxes_overlap([each for each in places if each.numel]):
        raise SnapshotError(f"{path}: its parts must be apart in its memory, got {', '.join(map(str, places[:8]))}")
    pieces = _make_pieces(path, parts, None)
    return _make_shards(value.dtype, shape, pieces, None, layout="", requires_grad=value.requires_grad)


def shape_of_whole(tensor: torch.Tensor) -> Shape:
    """Return the shape of the tensor that a tensor has parts of, or its own."""
    return tuple(map(int, tensor.global_shape if describes_parts(tensor) else tensor.shape))  # type: ignore[attr-defined]


def copy_description(source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return another view of a tensor that has the fields which describe parts."""
    return mark_parts(source, tensor.detach())


def mark_parts(source: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor the fields of another one that describe parts."""
    for name in _FIELDS:
        setattr(tensor, name, getattr(source, name, None))
    return tensor


def allocate_like(value: Any, dtype: torch.dtype) -> Any:
    """Return an uninitialised tensor with the layout of a live one, as optimizers create their state.

    For a DTensor, the new tensor has the same mesh and placements, and new local memory on the same device.
    """
    with torch.no_grad():
        made = torch.empty_like(value, dtype=dtype, requires_grad=False)
    return copy_description(value, made) if describes_parts(value) else made


def _read_wrapper(path: str, value: Sharded) -> Shards:
    pieces = _make_pieces(path, [(value.box(), value.tensor)], None, value.replica)
    shape = tuple(value.global_shape)
    return _make_shards(value.tensor.dtype, shape, pieces, None, layout="", requires_grad=value.tensor.requires_grad)


def _read_dtensor(path: str, value: Any) -> Shards:
    for placement in value.placements:
        if placement.is_partial():
            raise SnapshotError(
                f"{path}: a DTensor that is {placement} over its mesh is not reduced yet, so no rank holds its values; "
                "give it another placement first (`redistribute`)"
            )
    mesh, shape = value.device_mesh, tuple(map(int, value.shape))
    mesh_shape, ranks, nested, mesh_text = _read_mesh(mesh)
    placements, order = _read_placements(path, value, mesh_shape)
    texts = [str(placement) for placement in placements]
    layout = f"DTensor {_dtype_name(value.dtype)} {list(shape)} on {mesh_text} as {', '.join(texts)}"
    dtype, pieces = value.dtype, []
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        with torch.no_grad():
            local = value.to_local()
        if _is_checkpointable(local):
            listed = _read_checkpointable(path, local, shape)
            dtype, pieces = listed.dtype, listed.pieces
        else:
            local = _expect_plain(path, local)
            if local.dtype != dtype:
                raise SnapshotError(f"{path}: the local part of a DTensor must be {dtype}, got {local.dtype}")
            coordinate = tuple(coordinate)
            held = _find_held_shards(
                path, local, shape, mesh_shape, placements=placements, coordinate=coordinate, order=order
            )
            holders = geometry.find_peers(ranks, mesh_shape, placements, coordinate)
            pieces = [LocalPiece(box, local[part.slices()], holders) for box, part in held.boxes]
    return Shards("DTensor", dtype, shape, pieces, ranks, nested, texts, layout, bool(value.requires_grad))


def _read_mesh(mesh: Any) -> tuple[Shape, tuple[int, ...], list[Any], str]:
    """Return a mesh's shape, its ranks (flat and nested), and a short text of them.

    The result is cached: a model has few meshes, and reading one takes longer than the rest of the work for a tensor.
    """
    found = _MESHES.get(mesh)
    if found is None:
        ranks = mesh.mesh
        shape, nested = tuple(map(int, ranks.shape)), ranks.tolist()
        text = str(nested)
        if len(text) > LONG:
            text = f"a mesh of {shape} from rank {int(ranks.min())} on ({digest_range(text.encode())})"
        found = _MESHES[mesh] = shape, tuple(ranks.flatten().tolist()), nested, text
    return found


_MESHES: weakref.WeakKeyDictionary[Any, tuple[Shape, tuple[int, ...], list[Any], str]] = weakref.WeakKeyDictionary()
LONG = 80
"""A mesh with a longer text is represented by a digest in layouts."""


def _read_placements(path: str, value: Any, mesh_shape: Shape) -> tuple[geometry.Placements, tuple[int, ...] | None]:
    """Return a DTensor's placements, and the order in which they cut, if it is recorded separately."""
    placements = tuple(read_placement(path, placement, value.ndim) for placement in value.placements)
    told = getattr(value._spec, "shard_order", None)
    if told is None or any(isinstance(placement, geometry.Split) and placement.strides > 1 for placement in placements):
        return placements, None
    order = tuple(mesh_dim for entry in told for mesh_dim in entry.mesh_dims)
    if all(tuple(entry.mesh_dims) == tuple(sorted(entry.mesh_dims)) for entry in told):
        return placements, None
    return geometry.add_strides(mesh_shape, placements, order), order


def read_placement(path: str, placement: Any, ndim: int) -> geometry.Placement:
    """Return a placement of torch's, for a tensor with `ndim` dimensions, as a value of this library."""
    types = sys.modules["torch.distributed.tensor.placement_types"]
    kind = type(placement)  # a subclass may cut in another way
    if kind is types._StridedShard:
        return geometry.Split(placement.dim % ndim, int(placement.split_factor))
    if kind is types.Shard:
        return geometry.Split(placement.dim % ndim)
    if kind is types.Replicate:
        return geometry.Copy()
    raise SnapshotError(
        f"{path}: unknown placement {placement!r} of the class {class_name(kind)}; give the tensor another placement "
        "(`redistribute`), or save its local part as Sharded(...)"
    )


def _find_held_shards(
    path: str,
    local: torch.Tensor,
    shape: Shape,
    mesh_shape: Shape,
    *,
    placements: geometry.Placements,
    coordinate: Shape,
    order: tuple[int, ...] | None,
) -> geometry.HeldShards:
    """Return the boxes of the local part."""
    try:
        return geometry.find_fitting_shards(
            tuple(local.shape), shape, mesh_shape, placements=placements, coordinate=coordinate, order=order
        )
    except ValueError as error:
        raise SnapshotError(f"{path}: {error}") from error


def _read_sharded_tensor(path: str, value: Any) -> Shards:
    metadata = value.metadata()
    shape, properties = tuple(map(int, metadata.size)), metadata.tensor_properties
    spread: dict[Box, list[int | None]] = {}
    for shard in metadata.shards_metadata:
        # the rank in a placement is a global one, also where the tensor's process group is not all of them
        rank = shard.placement.rank() if shard.placement is not None else None
        spread.setdefault(_make_box(shard.shard_offsets, shard.shard_sizes), []).append(rank)
    known = {box: tuple(sorted({rank for rank in ranks if rank is not None})) for box, ranks in spread.items()}
    told = all(None not in ranks for ranks in spread.values())
    parts = [
        (_make_box(shard.metadata.shard_offsets, shard.metadata.shard_sizes), shard.tensor)
        for shard in value.local_shards()
    ]
    _refuse_strays(path, parts, shape)
    pieces = _make_pieces(path, parts, known if told else None)
    if any(piece.tensor.dtype != properties.dtype for piece in pieces):
        raise SnapshotError(f"{path}: all shards of a ShardedTensor must be {properties.dtype}")
    ranks = tuple(sorted({rank for several in known.values() for rank in several})) if told else None
    texts = sorted(f"{box}@{','.join(map(str, several))}" for box, several in known.items())
    layout = f"ShardedTensor {_dtype_name(properties.dtype)} {list(shape)} in {' '.join(texts)}" if told else ""
    return _make_shards(
        properties.dtype, shape, pieces, ranks, layout=layout, requires_grad=bool(properties.requires_grad)
    )


def _is_checkpointable(value: Any) -> bool:
    kind = type(value)
    return (
        hasattr(kind, "__create_chunk_list__")
        and hasattr(kind, "__get_tensor_shard__")
        and torch.distributed.is_available()
    )


def _read_checkpointable(path: str, value: Any, shape: Shape) -> Shards:
    """Return the pieces that torch's checkpoint protocol reports for a value."""
    from torch.distributed.checkpoint.metadata import MetadataIndex  # it costs time, and few values need it

    parts = []
    for i, chunk in enumerate(value.__create_chunk_list__()):
        box = _make_box(chunk.offsets, chunk.sizes)
        if box.numel:
            parts.append((box, value.__get_tensor_shard__(MetadataIndex(path, torch.Size(box.offsets), i))))
    _refuse_strays(path, parts, shape)
    pieces = _make_pieces(path, parts, None)
    dtypes = {piece.tensor.dtype for piece in pieces} or {getattr(value, "dtype", torch.get_default_dtype())}
    if len(dtypes) > 1:
        raise SnapshotError(f"{path}: its parts are of several dtypes: {', '.join(sorted(map(str, dtypes)))}")
    return _make_shards(
        dtypes.pop(), shape, pieces, None, layout="", requires_grad=bool(getattr(value, "requires_grad", False))
    )


def _make_shards(
    dtype: torch.dtype,
    shape: Shape,
    pieces: list[LocalPiece],
    ranks: tuple[int, ...] | None,
    *,
    layout: str,
    requires_grad: bool,
) -> Shards:
    return Shards("ShardedTensor", dtype, shape, pieces, ranks, None, None, layout, requires_grad)


def _make_pieces(
    path: str,
    parts: Iterable[tuple[Box, torch.Tensor]],
    holders: dict[Box, tuple[int, ...]] | None,
    replica: int = 0,
) -> list[LocalPiece]:
    pieces = []
    for box, part in parts:
        tensor = _expect_plain(path, part)
        if tuple(tensor.shape) != box.sizes:
            raise SnapshotError(f"{path}: the part at {box} must have shape {box.sizes}, got {tuple(tensor.shape)}")
        if box.numel:
            pieces.append(LocalPiece(box, tensor, None if holders is None else holders.get(box), replica))
    return pieces


def _refuse_strays(path: str, parts: Iterable[tuple[Box, torch.Tensor]], shape: Shape) -> None:
    for box, _ in parts:
        if not is_inside(box, shape):
            raise SnapshotError(f"{path}: the part at {box} is not within a tensor of shape {shape}")


def wait_for_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, after any collective that is still filling it has finished."""
    if _is_instance(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        return tensor.wait()  # type: ignore[attr-defined,no-any-return]
    return tensor


def _expect_plain(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a local part as a plain tensor."""
    tensor = wait_for_tensor(tensor)
    if composite.plain_subclass_name(tensor) is None or tensor.layout is not torch.strided:
        raise SnapshotError(f"{path}: its local part must be plain and dense, got a {_describe_tensor(tensor)}")
    tensor = tensor.detach()
    return tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)


def _is_instance(value: Any, module: str, name: str) -> bool:
    """Return True if a value is of a class, without importing the class's module."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _make_box(offsets: Iterable[int], sizes: Iterable[int]) -> Box:
    return Box(tuple(map(int, offsets)), tuple(map(int, sizes)))


def _expect_integers(name: str, given: Iterable[Any]) -> Shape:
    try:
        return _to_integers(given)
    except TypeError as error:
        raise TypeError(f"Sharded: `{name}` must be integers, got {given!r}") from error


def _to_integers(given: Iterable[Any]) -> Shape:
    """Return integers of any class as those of Python. Raise TypeError for bool and float, also in texts."""
    values = tuple(given)
    if any(isinstance(number, bool) for number in values):
        raise TypeError(f"must be integers, got a bool in {values}")
    return tuple(operator.index(number) for number in values)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{class_name(type(tensor))} of layout {tensor.layout}"
