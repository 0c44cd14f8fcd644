"""The work of the ranks in test_foreign_weights.py."""

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import snapshot_merge
from snapshot import RestoreOptions, Snapshot, Target, TensorMap

DENSE = [{"names": "dense.kernel -> weight", "axes": "i o -> o i"}, "dense.bias -> bias"]


def restore(path):
    """Restore into a module that is sharded over all ranks, and return its whole tensors."""
    module = nn.Linear(64, 40)
    fully_shard(module)
    Snapshot(path).restore({"model": module})
    return {name: each.full_tensor() for name, each in module.state_dict().items()}


def restore_mapped(path):
    """Restore a dense layer of JAX into a sharded module."""
    module = nn.Linear(8, 4)
    fully_shard(module)
    tensor_map = TensorMap(DENSE, others="drop")
    Snapshot(path).restore(
        {"params": module}, select=["params/**"], options=RestoreOptions(map=tensor_map, cast="same_kind")
    )
    return {name: each.full_tensor() for name, each in module.state_dict().items()}


def restore_quantised(path, method, rows, columns):
    """Restore a quantised layer into a sharded module."""
    module = nn.Linear(columns, rows)
    fully_shard(module)
    tensor_map = TensorMap(["layers.0.q_proj.{rest...} -> {rest...}"], dequantise=method)
    Snapshot(path).restore({"model": module}, options=RestoreOptions(map=tensor_map, cast="same_kind"))
    return {name: each.full_tensor() for name, each in module.state_dict().items()}


def convert(path, target, kind, method=None):
    tensor_map = None if method is None else TensorMap([], dequantise=method)
    Snapshot(path).convert(Target(target, kind), ranks=True, map=tensor_map)
    dist.barrier()


def merge(path, adapter, target):
    snapshot_merge.merge_lora(path, adapter, target, options=snapshot_merge.MergeOptions(ranks=True))
    dist.barrier()


def verify(path):
    return bool(Snapshot(path).verify(ranks=True))
