"""Differences between versions of torch, for tests that call it."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
ALONE = {"no_dist": True} if VERSION >= (2, 7) else {}
"""Arguments of DCP's functions for a process without a group. torch 2.6 notices it without an argument."""


def _splits_unevenly():
    """Return True if torch splits as FSDP does below tensor parallelism: older versions refuse it, or differ."""
    try:
        kind = _StridedShard(0, split_factor=2)
        parts = kind._split_tensor(torch.arange(9), 4, with_padding=False, contiguous=False)[0]
    except (AssertionError, NotImplementedError):
        return False
    return parts[0].tolist() == [0, 1, 5]


UNEVEN = _splits_unevenly()
even_only = pytest.mark.skipif(not UNEVEN, reason="DTensor of this torch cannot split in strides unevenly")
lists_of_boxes = pytest.mark.skipif(VERSION < (2, 8), reason="DTensor of this torch cannot hold a list of boxes")
newer_adamw = pytest.mark.skipif(
    "decoupled_weight_decay" not in torch.optim.AdamW([torch.zeros(1)]).param_groups[0],
    reason="AdamW of this torch has fewer values than the ones that were counted",
)


@contextlib.contextmanager
def skip_if_uneven():
    """Skip the test if this torch refuses a DTensor that does not divide evenly."""
    try:
        yield
    except (AssertionError, NotImplementedError) as error:
        if not UNEVEN and "even" in str(error):
            pytest.skip("this torch cannot divide a DTensor unevenly in strides")
        raise


def clear_sharding_cache():
    """Clear the caches in which DTensor keeps results with the mesh of an earlier rank."""
    # torch 2.7 has the first of these, torch 2.10 the others
    names = ("_clear_sharding_prop_cache", "_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache")
    found = [getattr(debug, name) for name in names if hasattr(debug, name)]
    for clear in found or [DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear]:
        clear()


def distribute(dense, mesh, placements):
    """Return a DTensor without communication: each rank has the whole tensor, and keeps its own part."""
    if VERSION >= (2, 7):
        return distribute_tensor(dense, mesh, placements, src_data_rank=None)
    place, local = mesh.get_coordinate(), dense
    placements = [Shard(each.dim % dense.ndim) if type(each) is Shard else each for each in placements]
    for dim, placement in enumerate(placements):
        if place is None:
            local = dense.new_empty(0)
        elif placement.is_shard():
            with skip_if_uneven():
                local = placement._split_tensor(local, mesh.size(dim), with_padding=False)[0][place[dim]]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=dense.shape, stride=dense.stride())
