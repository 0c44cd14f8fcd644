"""DTensors and ShardedTensors in pickles: the boxes that one rank has, without torch.distributed's classes.

torch pickles both as a call with a class, and a state. Versions of torch name the fields of that state differently. So
only what determines the boxes is read: sizes, placements, the shape of the mesh, and this rank's coordinate in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from snapshot.formats import pickle_nodes as p
from snapshot.manifest.entries import MOST_DIMENSIONS, MOST_HOLDERS, Mesh
from snapshot.tensors import geometry
from snapshot.tensors.geometry import MOST_AXES, Box, Copy, Placements, Shape, Split, is_inside, whole_box

_PARAMETER = "torch._utils._rebuild_parameter"
_MODULE = "torch.distributed."
_DTENSOR, _SHARDED = ".DTensor", ".ShardedTensor"
LARGEST = 1 << 60
"""No size of a tensor has this many elements."""
MOST_STRIDES = 1 << 12
"""Maximum number of ranges that strides cut a tensor into."""
MOST_RANKS = 1 << 22
"""Maximum number of ranks in all meshes of a pickle, which can repeat a long list of them."""


class TensorPart(NamedTuple):
    """A box of a tensor, and the pickled tensor that has its elements."""

    box: Box
    tensor: Any
    """A `RebuiltTensor` of the box's shape."""


class PickledShards(msgspec.Struct):
    """The boxes of a tensor in one rank's file."""

    dtype: str
    shape: Shape
    parts: list[TensorPart]
    mesh: Mesh | list[Any] | None
    """Ranks that have parts of the tensor, as in an entry."""
    placements: list[str] | None
    """Placements of a DTensor."""


Rebuild = Callable[[Any], Any]
"""Function that returns the `RebuiltTensor` of a node; None for other nodes."""


class ShardReader:
    """Reads the sharded tensors of one pickle."""

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._meshes: dict[int, _PickledMesh] = {}
        """Meshes by the identity of their nodes: most tensors share one."""
        self._left = MOST_RANKS

    def read(self, value: Any) -> PickledShards | None:
        """Return the boxes of a sharded tensor; None for any other value.

        Raises:
            NotKnownError: The tensor's state has a class that this reader does not know.
            ValueError: The tensor's state is invalid.
        """
        if isinstance(value, p.StandIn) and value.name == _PARAMETER and 2 <= len(value.arguments) <= 3:
            value = value.arguments[0]
        if not isinstance(value, p.StandIn):
            return None
        name = value.class_name
        if not name.startswith(_MODULE) or not name.endswith((_DTENSOR, _SHARDED)):
            return None
        if value.name == p.REBUILD_TYPED:
            _, _, arguments, state = value.arguments
        else:
            arguments, state = (), value.state
        if name.endswith(_SHARDED):
            return self._read_sharded(state)
        fields = p.join_fields(state)
        if fields is None or not {"_local_tensor", "_spec"} <= fields.keys():
            raise p.NotKnownError(f"a {name} without its local tensor")
        sizes = arguments[2] if isinstance(arguments, tuple) and len(arguments) > 2 else None
        return self._read_dtensor(sizes, fields["_local_tensor"], fields["_spec"])

    def _tensor(self, node: Any) -> Any:
        found = self._rebuild(node)
        if found is None:
            raise p.NotKnownError(f"{p.show_value(node)} as a part of a sharded tensor")
        return msgspec.structs.replace(found, requires_grad=False, subclass=None)

    def _read_dtensor(self, sizes: Any, local: Any, spec: Any) -> PickledShards:
        fields = p.read_fields(spec)
        tensor, mesh = self._tensor(local), self._mesh(fields.get("mesh"))
        meta = fields.get("tensor_meta")
        shape = _read_sizes(meta.arguments[0] if isinstance(meta, p.StandIn) and meta.arguments else sizes)
        placements = _read_placements(fields.get("placements"), len(shape))
        if len(placements) != len(mesh.shape):
            raise ValueError(f"a mesh of shape {mesh.shape} must have one placement per dimension")
        strides = math.prod(each.strides for each in placements if isinstance(each, Split))
        if strides > MOST_STRIDES or len(shape) > MOST_AXES:
            raise ValueError("a tensor with too many strides or dimensions")
        order = None if strides > 1 else _read_order(fields.get("shard_order"), len(mesh.shape))
        if order is not None:
            placements = geometry.add_strides(mesh.shape, placements, order)
        parts = []
        if mesh.coordinate is not None:
            held = geometry.find_fitting_shards(
                tensor.shape, shape, mesh.shape, placements=placements, coordinate=mesh.coordinate, order=order
            )
            parts = [TensorPart(box, _cut(tensor, inner)) for box, inner in held.boxes if box.numel]
        return PickledShards(tensor.dtype, shape, parts, mesh.ranks, [str(each) for each in placements])

    def _spend(self, ranks: int) -> None:
        self._left -= ranks
        if self._left < 0:
            raise ValueError("too many meshes")

    def _mesh(self, node: Any) -> _PickledMesh:
        if id(node) not in self._meshes:
            self._meshes[id(node)] = _read_mesh(node, self._rebuild, self._spend)
        return self._meshes[id(node)]

    def _read_sharded(self, state: Any) -> PickledShards:
        """Return the boxes of a ShardedTensor, whose state has its own shards, and the places of all."""
        items = state if isinstance(state, tuple) else ()
        metadata = next((p.read_fields(each) for each in items if "shards_metadata" in p.read_fields(each)), None)
        local = next((each for each in items if isinstance(each, list)), None)
        if metadata is None or local is None or not isinstance(metadata["shards_metadata"], list):
            raise p.NotKnownError("a ShardedTensor without its metadata")
        shape = _read_sizes(metadata.get("size"))
        properties = metadata.get("tensor_properties")
        listed = properties.state if isinstance(properties, p.StandIn) else None
        dtype = listed[0] if isinstance(listed, tuple) and listed else p.read_fields(properties).get("dtype")
        if not isinstance(dtype, p.Dtype):
            raise ValueError("a ShardedTensor without a dtype")
        ranks = {_read_rank(p.read_fields(each).get("placement")) for each in metadata["shards_metadata"]}
        parts = []
        for shard in local:
            fields = p.read_fields(shard)
            tensor, box = self._tensor(fields.get("tensor")), _read_box(fields.get("metadata"))
            if tensor.shape != box.sizes or tensor.dtype != dtype.name or not is_inside(box, shape):
                raise ValueError(f"a shard of {tensor.dtype}{list(tensor.shape)} at {box} of {list(shape)}")
            if box.numel:
                parts.append(TensorPart(box, tensor))
        mesh = Mesh.from_lists(sorted(ranks)) if ranks and None not in ranks else None
        return PickledShards(dtype.name, shape, parts, mesh, None)


def _cut(tensor: Any, box: Box) -> Any:
    """Return the part of a pickled tensor in a box."""
    if box == whole_box(tensor.shape):
        return tensor
    offset = tensor.offset + sum(at * step for at, step in zip(box.offsets, tensor.strides, strict=True))
    return msgspec.structs.replace(tensor, shape=box.sizes, offset=offset)


# Meshes: the shape, the ranks, and the coordinate of the rank that wrote the file.


class _PickledMesh(NamedTuple):
    shape: Shape
    ranks: Mesh | list[Any] | None
    coordinate: Shape | None
    """None for a rank that is not in the mesh."""


def _read_mesh(node: Any, rebuild: Rebuild, spend: Callable[[int], None]) -> _PickledMesh:
    """Return a mesh: a tensor of ranks in older versions of torch, a layout of places in a list in newer ones."""
    fields = p.read_fields(node)
    tensor = rebuild(fields.get("mesh"))
    axes: list[tuple[Shape, Shape]]
    if tensor is not None:
        shape = tensor.shape
        axes = [(shape[axis : axis + 1], (math.prod(shape[axis + 1 :]),)) for axis in range(len(shape))]
    elif fields.get("_layout") is not None:
        axes = _read_axes(fields["_layout"])
        shape = tuple(math.prod(sizes) for sizes, _ in axes)
    else:
        raise p.NotKnownError(f"{p.show_value(node)} without a shape")
    if not shape or len(shape) > MOST_DIMENSIONS or min(shape) < 1 or math.prod(shape) > MOST_HOLDERS:
        raise ValueError(f"a mesh of shape {shape}")
    ranks_of = fields.get("_flatten_mesh_list" if tensor is not None else "_flatten_rank_map")
    spend(math.prod(shape) + (len(ranks_of) if isinstance(ranks_of, (tuple, list)) else 0))
    coordinate = _read_coordinate(fields, shape)
    listed = _read_ints(ranks_of)
    places = None if listed is None else _find_places(axes, listed, coordinate, fields.get("_rank"))
    ranks = None if places is None else Mesh.from_lists(np.asarray(listed, np.int64)[places].tolist())
    return _PickledMesh(shape, ranks, coordinate)


def _find_places(
    axes: list[tuple[Shape, Shape]], listed: Shape, coordinate: Shape | None, rank: Any
) -> np.ndarray[Any, Any] | None:
    """Return the places in a list of ranks that each coordinate of a mesh has; None if they are not known.

    The list is of a larger mesh if this mesh is a part of it. Then the place of the own rank is known.
    """
    places = np.zeros((), np.int64)
    for sizes, steps in axes:
        along = np.zeros((), np.int64)
        for size, step in zip(sizes, steps, strict=True):
            along = np.add.outer(along, np.arange(size, dtype=np.int64) * min(step, MOST_HOLDERS))
        places = np.add.outer(places, along.reshape(-1))
    if places.size != len(listed):
        if coordinate is None or rank not in listed:
            return None
        places = places + (listed.index(rank) - places[coordinate])
    return places if places.min() >= 0 and places.max() < len(listed) else None


def _read_coordinate(fields: Any, shape: Shape) -> Shape | None:
    """Return the coordinate of the rank that wrote the file; None if it is not in the mesh."""
    if "_coordinate_on_dim" not in fields:
        raise p.NotKnownError("a mesh without a coordinate")
    if fields["_coordinate_on_dim"] is None:
        return None
    coordinate = _read_ints(fields["_coordinate_on_dim"])
    if coordinate is None or len(coordinate) != len(shape) or not all(map(int.__lt__, coordinate, shape)):
        raise ValueError(f"a mesh of shape {shape} with an invalid coordinate")
    return coordinate


def _read_axes(layout: Any) -> list[tuple[Shape, Shape]]:
    """Return the sizes and steps of each dimension of a mesh, which may itself be of several."""
    fields = p.read_fields(layout)
    if isinstance(fields.get("axes"), tuple):  # since torch 2.13
        found = [p.read_fields(each) for each in fields["axes"]]
        pairs = [(each.get("shape"), each.get("stride")) for each in found]
    else:
        given = fields.get("shape"), fields.get("stride")
        if not all(each is not None for each in given) and isinstance(layout, p.StandIn) and len(layout.arguments) == 2:
            given = layout.arguments[0], layout.arguments[1]  # a named tuple
        shape, stride = (each if isinstance(each, tuple) else (each,) for each in given)
        if len(shape) != len(stride):
            raise ValueError("a mesh with an invalid layout")
        pairs = list(zip(shape, stride, strict=True))
    axes = []
    for sizes, steps in pairs:
        flat, along = (_read_ints(each if isinstance(each, tuple) else (each,)) for each in (sizes, steps))
        if flat is None or along is None or len(flat) != len(along) or len(flat) > MOST_DIMENSIONS:
            raise ValueError("a mesh with an invalid layout")
        if math.prod(flat) > MOST_HOLDERS:
            raise ValueError("a mesh with too many ranks")
        axes.append((flat, along))
    if len(axes) > MOST_DIMENSIONS:
        raise ValueError("a mesh with too many dimensions")
    return axes


# Placements and sizes.


def _read_placements(value: Any, ndim: int) -> Placements:
    if not isinstance(value, (tuple, list)):
        raise ValueError("a DTensor without placements")
    made: list[Copy | Split] = []
    for each in value:
        name = each.name.rpartition(".")[2] if isinstance(each, p.StandIn) else ""
        if name == "Replicate":
            made.append(Copy())
            continue
        if name not in ("Shard", "_StridedShard"):
            raise p.NotKnownError(f"a DTensor that is placed as {p.show_value(each)}")
        fields = {**dict(enumerate(each.arguments)), **(each.named or {}), **p.read_fields(each)}
        dim, strides = fields.get("dim", fields.get(0)), fields.get("split_factor", fields.get("sf", 1))
        if type(dim) is not int or type(strides) is not int or not -ndim <= dim < ndim or not 0 < strides < LARGEST:
            raise ValueError("a placement with an invalid dimension")
        made.append(Split(dim % ndim, strides if name == "_StridedShard" else 1))
    return tuple(made)


def _read_order(value: Any, mesh_dims: int) -> tuple[int, ...] | None:
    """Return the order in which a mesh's dimensions cut; None if it is from left to right."""
    if not isinstance(value, tuple):
        return None  # until torch 2.9
    found = []
    for entry in value:
        arguments = entry.arguments if isinstance(entry, p.StandIn) else ()
        dims = _read_ints(arguments[1]) if len(arguments) == 2 else None
        if dims is None:
            raise p.NotKnownError(f"{p.show_value(entry)} as the order of placements")
        found.append(dims)
    order = tuple(dim for dims in found for dim in dims)
    if len(set(order)) != len(order) or not all(dim < mesh_dims for dim in order):
        raise ValueError("an invalid order of placements")
    return None if all(dims == tuple(sorted(dims)) for dims in found) else order


def _read_sizes(value: Any) -> Shape:
    sizes = _read_ints(value)
    if sizes is None or math.prod(max(1, size) for size in sizes) >= LARGEST:
        raise ValueError(f"a sharded tensor with invalid sizes {p.show_value(value)}")
    return sizes


def _read_ints(value: Any) -> Shape | None:
    """Return a sequence of numbers; None for anything else."""
    if not isinstance(value, (tuple, list)) or not all(type(each) is int and 0 <= each < LARGEST for each in value):
        return None
    return tuple(value)


def _read_box(node: Any) -> Box:
    fields = p.read_fields(node)
    offsets, sizes = (_read_sizes(fields.get(name)) for name in ("shard_offsets", "shard_sizes"))
    return Box(offsets, sizes)


def _read_rank(placement: Any) -> int | None:
    rank = p.read_fields(placement).get("_rank")
    return rank if type(rank) is int and 0 <= rank < MOST_HOLDERS else None
