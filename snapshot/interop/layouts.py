"""DTensors of one process as plain values: the local tensor, and the layout. Other ranks have no part in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map, tree_map_only

from snapshot.errors import SnapshotError

DTENSOR = "snapshot.dtensor"
"""Key of a DTensor's layout, beside its local tensor."""


def describe_layouts(state: Any) -> Any:
    """Return a state with a plain value in place of each DTensor."""
    return tree_map_only(DTensor, _describe_layout, state)


def _describe_layout(tensor: DTensor) -> dict[str, Any]:
    mesh, placements = tensor.device_mesh, []
    for each in tensor.placements:
        if type(each) is Shard:
            placements.append(["shard", each.dim])
        elif type(each) is Replicate:
            placements.append(["replicate"])
        elif type(each) is Partial:
            placements.append(["partial", each.reduce_op])
        else:
            raise SnapshotError(
                f"a DTensor must have placements that are known (Shard, Replicate, Partial), got {each}"
            )
    layout = {
        "device": mesh.device_type,
        "mesh": mesh.mesh.tolist(),
        "names": list(mesh.mesh_dim_names or ()),
        "placements": placements,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
    }
    return {DTENSOR: layout, "local": tensor.to_local().detach()}


def restore_layouts(state: Any) -> Any:
    """Return a state with the DTensors again. They have the sender's layout, on a mesh without communication."""
    return tree_map(lambda leaf: _build_dtensor(leaf) if _is_layout(leaf) else leaf, state, is_leaf=_is_layout)


def _is_layout(value: Any) -> bool:
    return isinstance(value, dict) and DTENSOR in value


def _build_dtensor(described: Mapping[str, Any]) -> Any:
    layout, local = described[DTENSOR], described["local"]
    kinds = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    names = tuple(layout["names"]) or None
    mesh = DeviceMesh(layout["device"], layout["mesh"], mesh_dim_names=names, _init_backend=False)
    placements = [kinds[kind](*rest) for kind, *rest in layout["placements"]]
    shape, stride = torch.Size(layout["shape"]), tuple(layout["stride"])
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    # from_local drops the data of a rank without a place in the mesh
    made: Any = DTensor
    return made(local, spec, requires_grad=layout["requires_grad"])
