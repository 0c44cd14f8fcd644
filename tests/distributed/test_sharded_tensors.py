"""Tensors spread over ranks, described: real DTensors and ShardedTensors, on each rank of a world that is not there."""

import contextlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from snapshot.errors import SnapshotError
from snapshot.state.sharded import Sharded, allocate_like, find_shards
from snapshot.tensors.geometry import Box
from tests.helpers.versions import clear_sharding_cache, distribute, even_only, lists_of_boxes, skip_if_uneven


@contextlib.contextmanager
def world(rank, size=8):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()  # else it gives tensors the meshes of the rank before


def spread(dense, mesh, *placements):
    return distribute(dense, mesh, placements)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def check(dense, make, size=8):
    """Describe a tensor on every rank; its pieces are what the whole has there, and cover it. Gives what was found."""
    covered, found = torch.zeros(dense.shape, dtype=torch.int64), []
    for rank in range(size):
        with world(rank, size):
            shards = find_shards("here", make())
        assert shards.shape == dense.shape
        assert shards.dtype == dense.dtype
        for piece in shards.pieces:
            assert torch.equal(piece.tensor, dense[piece.box.slices()])
            assert type(piece.tensor) is torch.Tensor
            assert not piece.tensor.requires_grad
            assert rank in piece.holders
            covered[piece.box.slices()] += rank == piece.holders[0]
        found.append(shards)
    assert covered.eq(1).all()
    assert len({shards.layout for shards in found}) == 1
    return found


def boxes(shards):
    return [str(piece.box) for piece in shards.pieces]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((8,), [Shard(0)]),
        ((8,), [Shard(-1)]),
        ((8,), [Replicate()]),
        ((2, 4), [Replicate(), Shard(0)]),
        ((2, 4), [Shard(0), Replicate()]),
        ((2, 4), [Shard(0), Shard(0)]),
        ((4, 2), [Shard(1), Shard(0)]),
        ((2, 2, 2), [Shard(0), Replicate(), Shard(1)]),
        ((2, 2, 2), [Shard(0), Shard(0), Shard(0)]),
        pytest.param((8,), [_StridedShard(0, split_factor=3)], marks=even_only),
        pytest.param((2, 4), [Replicate(), _StridedShard(1, split_factor=2)], marks=even_only),
    ],
)
@pytest.mark.parametrize("shape", [(16, 8), (13, 5), (3, 2), (1, 1), (0, 4)])
def test_dtensor_pieces_are_parts_of_the_whole(mesh, placements, shape):
    dense = numbers(*shape)
    check(dense, lambda: spread(dense, init_device_mesh("cpu", mesh), *placements))


def test_dtensor_shards_describe_mesh_and_holders():
    dense = numbers(8, 3)
    found = check(dense, lambda: spread(dense, init_device_mesh("cpu", (2, 4)), Replicate(), Shard(0)))[5]
    assert found.kind == "DTensor"
    assert found.ranks == tuple(range(8))
    assert found.mesh == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert found.placements == ["R", "S(0)"]
    assert [(str(piece.box), piece.holders, piece.replica) for piece in found.pieces] == [("2:4,0:3", (1, 5), 0)]
    assert found.layout == "DTensor float32 [8, 3] on [[0, 1, 2, 3], [4, 5, 6, 7]] as R, S(0)"


def test_dtensor_pieces_are_views_of_the_live_tensor():
    with world(3):
        live = spread(numbers(8, 4), init_device_mesh("cpu", (8,)), Shard(0)).requires_grad_()
        found = find_shards("here", live)
        assert found.requires_grad
        found.pieces[0].tensor.fill_(-1)
        assert live.to_local().eq(-1).all()


def test_dtensor_scalar_is_one_box():
    dense = torch.tensor(3.0)
    assert boxes(check(dense, lambda: spread(dense, init_device_mesh("cpu", (8,)), Replicate()))[0]) == [""]


def test_dtensor_on_a_rank_outside_the_mesh_has_no_pieces():
    dense = numbers(5, 2)
    for rank in (1, 6):
        with world(rank):
            found = find_shards("here", spread(dense, DeviceMesh("cpu", [0, 1, 5]), Shard(0)))
        assert boxes(found) == (["2:4,0:2"] if rank == 1 else [])
        assert found.ranks == (0, 1, 5)
        assert found.shape == (5, 2)


def test_dtensor_local_tensor_may_be_strided():
    with world(1):
        local = numbers(6, 4).t()
        found = find_shards(
            "here", DTensor.from_local(local, init_device_mesh("cpu", (8,)), [Shard(0)], run_check=False)
        )
        assert found.pieces[0].tensor.data_ptr() == local.data_ptr()
        assert found.pieces[0].tensor.stride() == local.stride()


def test_dtensor_async_local_tensor_is_awaited():
    dense = numbers(4, 2)
    with world(2):
        mesh = init_device_mesh("cpu", (8,))
        pending = spread(dense, mesh, Shard(0)).redistribute(mesh, [Replicate()], async_op=True)
        assert type(pending._local_tensor).__name__ == "AsyncCollectiveTensor"
        (piece,) = find_shards("here", pending).pieces
        assert type(piece.tensor) is torch.Tensor
        assert piece.tensor.data_ptr() == pending._local_tensor.elem.data_ptr()


def test_dtensor_with_partial_placement_is_refused():
    with world(0):
        mesh = init_device_mesh("cpu", (8,))
        partial = DTensor.from_local(numbers(2), mesh, [Partial()], run_check=False)
        with pytest.raises(SnapshotError, match=r"model/x: .*not reduced"):
            find_shards("model/x", partial)


def test_dtensor_local_shape_that_contradicts_the_mesh_is_refused():
    with world(1):
        mesh = init_device_mesh("cpu", (8,))
        odd = DTensor.from_local(numbers(3, 2), mesh, [Shard(0)], run_check=False, shape=(16, 2), stride=(2, 1))
        with pytest.raises(SnapshotError, match=r"model/x: .*\(2, 2\).*\(3, 2\)"):
            find_shards("model/x", odd)


def fsdp_of_tp(dense, mesh_shape, placement=None):
    """A weight that is split for tensor parallelism, then by FSDP, as training code does it."""
    names = ("hsdp", "dp", "tp")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    linear = torch.nn.Linear(dense.shape[1], dense.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(spread(dense, mesh["tp"], placement or Shard(0)))
    with skip_if_uneven():
        fully_shard(linear, mesh=mesh[names[:-1]] if len(names) > 2 else mesh["dp"])
    return linear.weight


def test_dtensor_fsdp_of_a_tensor_parallel_weight():
    dense = numbers(16, 3)
    found = check(dense, lambda: fsdp_of_tp(dense, (4, 2)))
    assert found[3].placements == ["_S(0,2)", "S(0)"]
    assert boxes(found[3]) == ["10:12,0:3"]
    assert found[3].requires_grad


def test_dtensor_hsdp_of_a_tensor_parallel_weight():
    dense = numbers(16, 3)
    found = check(dense, lambda: fsdp_of_tp(dense, (2, 2, 2)))
    assert found[3].placements == ["R", "_S(0,2)", "S(0)"]
    assert found[3].pieces[0].holders == (3, 7)


@pytest.mark.parametrize("rows", [9, 11, 15, 3, 1])
def test_dtensor_fsdp_of_an_unevenly_divided_tensor_parallel_weight(rows):
    dense = numbers(rows, 3)
    check(dense, lambda: fsdp_of_tp(dense, (4, 2)))


def test_dtensor_fsdp_on_another_axis_than_tensor_parallel():
    dense = numbers(9, 7)
    found = check(dense, lambda: fsdp_of_tp(dense, (4, 2), Shard(1)))
    assert found[0].placements == ["S(0)", "S(1)"]


def test_dtensor_with_an_ambiguous_local_tensor_is_refused():
    dense = numbers(38, 1)
    with world(3 * 4 + 2, 16), pytest.raises(SnapshotError, match="is ambiguous"):
        find_shards("here", fsdp_of_tp(dense, (4, 4)))


def test_dtensor_with_another_shard_order():
    spec = pytest.importorskip("torch.distributed.tensor._dtensor_spec")
    if not hasattr(spec, "ShardOrderEntry"):
        pytest.skip("this torch knows no such order")
    dense = numbers(9, 2)

    def make():
        mesh = init_device_mesh("cpu", (4, 2))
        across, along = mesh.get_coordinate()
        local = Shard(0)._split_tensor(dense, 2, with_padding=False)[0][along]
        local = Shard(0)._split_tensor(local, 4, with_padding=False)[0][across]
        meta = spec.TensorMeta(dense.shape, dense.stride(), dense.dtype)
        order = (spec.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
        made = spec.DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
        return DTensor(local, made, requires_grad=False)

    assert check(dense, make)[0].placements == ["_S(0,2)", "S(0)"]


def test_allocate_like_places_optimizer_state_like_its_parameter():
    dense = numbers(9, 3)
    for rank in range(8):
        with world(rank):
            weight = fsdp_of_tp(dense, (4, 2))
            state = allocate_like(weight, torch.float64)
            assert (state.device_mesh, state.placements) == (weight.device_mesh, weight.placements)
            assert (state.shape, state.stride(), state.dtype) == (weight.shape, weight.stride(), torch.float64)
            assert state.to_local().shape == weight.to_local().shape
            assert not state.requires_grad
            assert boxes(find_shards("new", state)) == boxes(find_shards("old", weight))
    assert allocate_like(dense, torch.int8).dtype == torch.int8


def test_allocate_like_outside_the_mesh_is_empty():
    with world(6):
        outside = spread(numbers(5, 2), DeviceMesh("cpu", [0, 1, 5]), Shard(0))
        assert find_shards("new", allocate_like(outside, torch.float32)).pieces == []


def sharded_tensor(dense, rank, placed, group=None):
    """A ShardedTensor of (begin, end, rank) rows."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as Part
    from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    shards = [ShardMetadata([a, 0], [b - a, dense.shape[1]], f"rank:{owner}/cpu") for a, b, owner in placed]
    metadata = ShardedTensorMetadata(shards, dense.shape, TensorProperties(dtype=dense.dtype))
    local = [
        Part(dense[a:b].clone(), shard) for (a, b, owner), shard in zip(placed, shards, strict=True) if owner == rank
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=group)


def test_sharded_tensor_with_several_shards_on_a_rank():
    dense = numbers(10, 3)
    placed = [(0, 2, 1), (2, 5, 0), (5, 6, 1), (6, 10, 3)]
    found = check(dense, lambda: sharded_tensor(dense, dist.get_rank(), placed), size=4)
    assert found[1].kind == "ShardedTensor"
    assert boxes(found[1]) == ["0:2,0:3", "5:6,0:3"]
    assert boxes(found[2]) == []
    assert found[1].pieces[0].holders == (1,)
    assert found[1].ranks == (0, 1, 3)
    assert found[1].mesh is found[1].placements is None


def test_sharded_tensor_of_a_subgroup_has_global_ranks():
    dense = numbers(4, 3)
    with world(5):
        group = dist.new_group([4, 5])
        found = find_shards("here", sharded_tensor(dense, 5, [(0, 2, 4), (2, 4, 5)], group))
    assert found.ranks == (4, 5)
    assert found.pieces[0].holders == (5,)


def test_sharded_tensor_pieces_are_views_of_the_live_tensor():
    dense = numbers(4, 3)
    with world(1):
        live = sharded_tensor(dense, 1, [(0, 2, 0), (2, 4, 1)])
        find_shards("here", live).pieces[0].tensor.zero_()
        assert live.local_shards()[0].tensor.eq(0).all()


class Table:
    """Not a tensor, but torch's checkpoints would take it."""

    def __init__(self, shape, parts, dtype=torch.float32):
        self.shape, self.parts, self.dtype = torch.Size(shape), parts, dtype

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.parts]

    def __get_tensor_shard__(self, index):
        at, part = self.parts[index.index]
        assert index.offset == torch.Size(at)
        return part


def test_checkpointable_protocol_class_has_several_boxes():
    parts = [((0, 0), numbers(2, 3)), ((4, 1), numbers(1, 2)), ((5, 0), numbers(0, 3))]
    found = find_shards("here", Table((5, 3), parts))
    assert found.kind == "ShardedTensor"
    assert boxes(found) == ["0:2,0:3", "4:5,1:3"]
    assert found.pieces[1].tensor.data_ptr() == parts[1][1].data_ptr()
    assert found.ranks is found.pieces[0].holders is None
    assert found.layout == ""


def test_checkpointable_protocol_boxes_must_be_within_the_shape_and_of_one_dtype():
    with pytest.raises(SnapshotError, match=r"here: .*not within"):
        find_shards("here", Table((2, 3), [((1, 0), numbers(2, 3))]))
    with pytest.raises(SnapshotError, match=r"here: .*several dtypes"):
        find_shards("here", Table((4, 3), [((0, 0), numbers(2, 3)), ((2, 0), numbers(2, 3).int())]))


@lists_of_boxes
def test_dtensor_with_local_shards_wrapper_has_several_boxes():
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    with world(1, 2):
        local = LocalShardsWrapper([numbers(4, 2), -numbers(4, 1)], [(4, 0), (4, 2)])
        made = DTensor.from_local(
            local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False, shape=(8, 3), stride=(3, 1)
        )
        found = find_shards("here", made)
    assert found.kind == "DTensor"
    assert boxes(found) == ["4:8,0:2", "4:8,2:3"]
    assert found.pieces[0].holders is None


def test_sharded_marks_a_tensor_as_a_box_of_a_larger_one():
    weight = torch.nn.Parameter(numbers(4, 3))
    found = find_shards("here", Sharded(weight.unsqueeze(0), (24, 4, 3), (5, 0, 0), replica=2))
    (piece,) = found.pieces
    assert (found.kind, found.shape, found.dtype) == ("ShardedTensor", (24, 4, 3), torch.float32)
    assert piece.box == Box((5, 0, 0), (1, 4, 3))
    assert piece.replica == 2
    assert piece.holders is found.ranks is None
    assert found.requires_grad
    piece.tensor.zero_()
    assert weight.eq(0).all()


def test_sharded_box_may_be_empty():
    assert find_shards("here", Sharded(numbers(0, 3), (4, 3), (4, 0))).pieces == []


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([1.0], (1,), (0,)), TypeError, "must be a torch.Tensor, got a builtins.list"),
        ((numbers(2), (4.0,), (0,)), TypeError, "`global_shape` must be integers"),
        ((numbers(2), (4,), 0), TypeError, "`offsets` must be integers"),
        ((numbers(2), (4,), (0,), None), TypeError, "`replica` must be integers"),
        ((numbers(2), (4,), (0,), -1), ValueError, "`replica` must not be negative"),
        ((numbers(2), (4, 2), (0, 0)), ValueError, "number of dimensions.*unsqueeze"),
        ((numbers(2, 2), (4, 2), (0,)), ValueError, "number of dimensions"),
        ((numbers(2, 2), (4, 2), (3, 0)), ValueError, r"\(2, 2\) at \(3, 0\) is not within \(4, 2\)"),
        ((numbers(2, 2), (4, 2), (-1, 0)), ValueError, "is not within"),
        ((numbers(2).to_sparse(), (4,), (0,)), TypeError, "plain and dense"),
    ],
)
def test_sharded_refuses_an_invalid_box(arguments, error, text):
    with pytest.raises(error, match=text):
        Sharded(*arguments)


def test_sharded_refuses_a_dtensor():
    with world(0), pytest.raises(TypeError, match=r"plain and dense, got a torch\.distributed\.tensor\.DTensor"):
        Sharded(spread(numbers(8), init_device_mesh("cpu", (8,)), Shard(0)), (8,), (0,))


def test_find_shards_returns_none_for_other_values():
    for value in (numbers(2), torch.nn.Parameter(numbers(2)), 3, object(), [], torch.nn.Linear, torch):
        assert find_shards("here", value) is None


def test_find_shards_imports_nothing_for_plain_values():
    script = """
import sys, torch
from snapshot.state.sharded import find_shards
before = set(sys.modules)
assert find_shards("x", torch.ones(2)) is None and find_shards("x", object()) is None
assert not set(sys.modules) - before
assert not any(name.startswith("torch.distributed.tensor") for name in sys.modules), "imported with snapshot"
torch.distributed.is_available = lambda: False
assert find_shards("x", object()) is None
"""
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=False, timeout=300).returncode == 0
