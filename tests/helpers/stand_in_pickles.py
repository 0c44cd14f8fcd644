"""Files of torch.save with objects of classes that are not here: those of other versions, and of other libraries."""

import pickle

import torch

from snapshot.tensors.geometry import Copy


class Name(str):
    """A class or function, by its module and name: `"torch.distributed.tensor DTensor"`."""


class Call:
    """What a call returns, with a state that is set later."""

    def __init__(self, name, *arguments, state=None):
        self.name, self.arguments, self.state = Name(name), arguments, state


class New:
    """An object that is created without a call of `__init__`."""

    def __init__(self, name, *arguments, state=None):
        self.name, self.arguments, self.state = Name(name), arguments, state


class _Pickler(pickle._Pickler):
    """A pickler that writes the names themselves, and imports nothing."""

    def save(self, value, save_persistent_id=True):
        if type(value) is Name:
            known = self.memo.get(id(value))
            if known is None:
                self.write(b"c" + value.replace(" ", "\n").encode() + b"\n")
                self.memoize(value)
            else:
                self.write(self.get(known[0]))
        elif type(value) in (Call, New):
            known = self.memo.get(id(value))
            if known is not None:
                self.write(self.get(known[0]))
                return
            self.save(value.name)
            self.save(tuple(value.arguments))
            self.write(pickle.REDUCE if type(value) is Call else pickle.NEWOBJ)
            self.memoize(value)
            if value.state is not None:
                self.save(value.state)
                self.write(pickle.BUILD)
        else:
            super().save(value, save_persistent_id)


class _Module:
    """What torch.save takes for the module `pickle`."""

    Pickler = _Pickler


def save(value, file):
    """Save a value with stand-ins as torch.save does."""
    torch.save(value, file, pickle_module=_Module)


# DTensors of several versions of torch.


def tensor_mesh(ranks, coordinate):
    """Return a mesh of torch 2.6 to 2.8, which has a tensor of ranks."""
    fields = {"device_type": "cuda", "mesh": torch.tensor(ranks, dtype=torch.int), "mesh_dim_names": ("fsdp",)}
    listed = tuple(torch.tensor(ranks).flatten().tolist())
    fields |= {"_flatten_mesh_list": listed, "_thread_id": None, "_coordinate_on_dim": coordinate}
    return New("torch.distributed.device_mesh DeviceMesh", state=fields)


def layout_mesh(ranks, coordinate):
    """Return a mesh of torch 2.10 to 2.12, which has a layout of places in a list of ranks."""
    array = torch.tensor(ranks)
    layout = New(
        "torch.distributed._mesh_layout _MeshLayout",
        state={
            "shape": tuple(array.shape) if array.dim() > 1 else array.shape[0],
            "stride": array.stride() if array.dim() > 1 else 1,
        },
    )
    fields = {"_device_type": "cuda", "_layout": layout, "_rank_map": array.flatten().int()}
    fields |= {"_flatten_rank_map": tuple(array.flatten().tolist()), "_coordinate_on_dim": tuple(coordinate)}
    return New("torch.distributed.device_mesh DeviceMesh", state=fields)


def dtensor(local, shape, placements, mesh, module="torch.distributed.tensor"):
    """Return a DTensor with this local part."""
    strides = torch.empty(shape, device="meta").stride()
    meta = New(f"{module}._dtensor_spec TensorMeta", torch.Size(shape), strides, local.dtype)
    spec = New(
        f"{module}._dtensor_spec DTensorSpec", state={"mesh": mesh, "placements": placements, "tensor_meta": meta}
    )
    kind = Name(f"{module} DTensor")
    arguments = (kind, local.dtype, tuple(shape), strides, 0, torch.strided, torch.device("cpu"), False)
    state = (None, {"_local_tensor": local, "_spec": spec})
    return Call(
        "torch._tensor _rebuild_from_type_v2", Name("torch._utils _rebuild_wrapper_subclass"), kind, arguments, state
    )


def placement(placed):
    """Return torch's placement of one of this library's."""
    module = "torch.distributed.tensor.placement_types"
    if isinstance(placed, Copy):
        return New(f"{module} Replicate")
    if placed.strides > 1:
        return New(f"{module} _StridedShard", state={"dim": placed.dim, "split_factor": placed.strides})
    return New(f"{module} Shard", state={"dim": placed.dim})
