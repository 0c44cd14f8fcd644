"""Metadata of torch_checkpointing that tests write."""

import itertools
import math
import pickle

import torch
from safetensors.torch import save_file

from snapshot.tensors.geometry import Copy, find_held_shards


def write_metadata(folder, tensors, **changes):
    """Write an item of safetensors: its tensors with (whole tensor, mesh shape, placements)."""
    paths, locals_ = {}, {}
    for name, (whole, mesh_shape, placements) in tensors.items():
        described = [
            {"type": "Replicate"} if isinstance(each, Copy) else {"type": "Shard", "dim": each.dim}
            for each in placements
        ]
        world = math.prod(mesh_shape)
        mesh = {
            "device_type": "cpu",
            "mesh_shape": mesh_shape,
            "mesh_data": tuple(range(world)),
            "mesh_dim_names": None,
        }
        data = {"dtype": "torch.int64", "global_shape": list(whole.shape), "placements": described, "mesh_spec": mesh}
        sharding = {"type": "DTensorShardingMetadata", "data": data}
        paths[f'["state","{name}"]'] = [{"ranks": tuple(range(world)), "sharding_metadata": sharding}]
        for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
            held = find_held_shards(tuple(whole.shape), mesh_shape, placements, coordinate)
            local = torch.empty(held.shape, dtype=whole.dtype)
            for box, inner in held.boxes:
                local[inner.slices()] = whole[box.slices()]
            locals_.setdefault(rank, {})[f"state.{name}"] = local
    layouts = {}
    for rank, held in locals_.items():
        save_file(held, folder / f"part-{rank}.st")
        kind = {"type": "SafetensorsSerialization"}
        layouts[rank] = {"file_path": f"part-{rank}.st", "serialization_format": kind}
    item = {"nested_path_to_metadata": paths, "rank_to_layout_info": layouts}
    metadata = {"metadata": {"optim": item}, "world_size": len(locals_), "version": "2.0"}
    for change in changes.values():
        change(metadata, item)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(metadata))
