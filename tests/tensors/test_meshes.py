"""What coordinates of a mesh hold, against torch's own cutting of a dense tensor; no processes are needed for that."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from snapshot.tensors.geometry import (
    Box,
    Copy,
    Split,
    add_strides,
    find_coordinates,
    find_held_shards,
    find_nesting,
    find_peers,
    intersect,
    is_inside,
    iterate_shards,
    parse_placements,
)
from tests.helpers.versions import even_only

shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)
mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def spreads(draw, most_strides=5):
    shape, mesh_shape = draw(shapes), draw(mesh_shapes)
    splits = st.builds(Split, st.integers(0, len(shape) - 1), st.integers(1, most_strides))
    placement = st.just(Copy()) | splits
    return shape, mesh_shape, tuple(draw(placement) for _ in mesh_shape)


def numbered(shape):
    return torch.arange(math.prod(shape)).view(shape)


def cut_by_torch(dense, mesh_shape, placements, coordinate):
    for size, placement, at in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, Split):
            plain = placement.strides == 1
            kind = Shard(placement.dim) if plain else _StridedShard(placement.dim, split_factor=placement.strides)
            dense = kind._split_tensor(dense, size, with_padding=False, contiguous=False)[0][at]
    return dense


def put_together(dense, held):
    """The local tensor that is filled with the boxes of a dense one."""
    local = torch.full(held.shape, -1)
    for box, part in held.boxes:
        local[part.slices()] = dense[box.slices()]
    return local


@even_only
@settings(max_examples=200, deadline=None)
@given(spreads())
@example(((9,), (4, 2), (Split(0, 2), Split(0))))
@example(((38, 3), (4, 4), (Split(0, 4), Split(0))))
def test_find_held_shards_equals_torch_for_every_coordinate(spread):
    shape, mesh_shape, placements = spread
    dense = numbered(shape)
    for coordinate, found in iterate_shards(shape, mesh_shape, placements):
        assert torch.equal(put_together(dense, found), cut_by_torch(dense, mesh_shape, placements, coordinate))


@settings(max_examples=200, deadline=None)
@given(spreads(), st.booleans())
def test_mesh_boxes_of_all_coordinates_tile_the_tensor(spread, in_order):
    shape, mesh_shape, placements = spread
    order = find_nesting(mesh_shape, placements) if in_order else None
    ranks = range(100, 100 + math.prod(mesh_shape))
    covered = torch.zeros(shape, dtype=torch.int64)
    for rank, (coordinate, found) in zip(ranks, iterate_shards(shape, mesh_shape, placements, order), strict=True):
        assert all(is_inside(box, shape) and box.numel for box, _ in found.boxes)
        assert all(is_inside(part, found.shape) and part.sizes == box.sizes for box, part in found.boxes)
        if rank == min(find_peers(ranks, mesh_shape, placements, coordinate)):
            for box, _ in found.boxes:
                covered[box.slices()] += 1
    assert covered.eq(1).all()


@settings(max_examples=300, deadline=None)
@given(spreads(), st.booleans(), st.data())
def test_mesh_coordinates_of_a_box_are_those_whose_boxes_meet_it(spread, in_order, data):
    shape, mesh_shape, placements = spread
    assume(all(shape))
    order = find_nesting(mesh_shape, placements) if in_order else None
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True))
    box = Box(offsets, sizes)
    found = list(find_coordinates(shape, mesh_shape, placements, box, order))
    assert len(set(found)) == len(found)
    assert set(found) == {
        coordinate
        for coordinate, held in iterate_shards(shape, mesh_shape, placements, order)
        if any(intersect(box, each) for each, _ in held.boxes)
    }
    assert parse_placements([str(each) for each in placements]) == placements


@even_only
@settings(max_examples=300, deadline=None)
@given(spreads())
def test_mesh_boxes_of_all_local_tensors_fill_the_original(spread):
    shape, mesh_shape, placements = spread
    dense, filled = numbered(shape), torch.full(shape, -1)
    for coordinate, found in iterate_shards(shape, mesh_shape, placements):
        local = cut_by_torch(dense, mesh_shape, placements, coordinate)
        for box, part in found.boxes:
            filled[box.slices()] = local[part.slices()]
    assert torch.equal(filled, dense)


@settings(deadline=None)
@given(spreads())
def test_mesh_peers_hold_the_same_boxes(spread):
    shape, mesh_shape, placements = spread
    ranks = list(range(math.prod(mesh_shape)))[::-1]
    of_rank = dict(zip(ranks, iterate_shards(shape, mesh_shape, placements), strict=True))
    for rank, (coordinate, found) in of_rank.items():
        same = find_peers(ranks, mesh_shape, placements, coordinate)
        assert rank in same
        assert list(same) == sorted(same, key=ranks.index)
        assert all(of_rank[peer][1] == found for peer in same)
        if found.boxes:
            assert set(same) == {other for other, (_, theirs) in of_rank.items() if theirs == found}


@settings(deadline=None)
@given(spreads(), st.randoms())
def test_find_nesting_reads_the_shard_order_from_strides(spread, random):
    shape, mesh_shape, placements = spread
    plain = tuple(Split(p.dim) if isinstance(p, Split) else p for p in placements)
    order = list(range(len(mesh_shape)))
    random.shuffle(order)
    order = tuple(order)
    told = add_strides(mesh_shape, plain, order)
    read = find_nesting(mesh_shape, told)
    assert list(iterate_shards(shape, mesh_shape, plain, order)) == list(iterate_shards(shape, mesh_shape, told, read))
    even = tuple(size * math.prod(mesh_shape) for size in shape)
    assert list(iterate_shards(even, mesh_shape, told)) == list(iterate_shards(even, mesh_shape, plain, order))


@settings(deadline=None)
@given(shapes, st.integers(1, 5), st.integers(1, 5))
def test_mesh_nested_shards_equal_chunks_of_chunks(shape, outer, inner):
    dense = numbered(shape)
    for i, j in itertools.product(range(outer), range(inner)):
        chunk = cut_by_torch(dense, (inner, outer), (Split(0), Split(0)), (0, 0))
        chunk = cut_by_torch(cut_by_torch(dense, (inner,), (Split(0),), (j,)), (outer,), (Split(0),), (i,))
        found = find_held_shards(shape, (outer, inner), (Split(0, inner), Split(0)), (i, j), order=(1, 0))
        assert torch.equal(put_together(dense, found), chunk)


def test_find_nesting_of_inconsistent_strides_is_none():
    assert find_nesting((4, 2), (Split(0, 3), Split(0))) is None
    assert find_nesting((4, 2), (Split(0, 2), Split(1))) is None


def test_find_held_shards_joins_consecutive_boxes():
    found = find_held_shards((8, 3), (2,), (Split(0, 8),), (0,))
    assert [str(box) for box, _ in found.boxes] == ["0:8,0:3"]


def test_find_held_shards_of_a_scalar_is_held_by_all():
    found = find_held_shards((), (2, 2), (Copy(), Copy()), (1, 0))
    assert found.shape == ()
    assert [box.numel for box, _ in found.boxes] == [1]


def test_find_held_shards_refuses_a_missing_placement():
    with pytest.raises(ValueError, match="one placement per dimension"):
        find_held_shards((4,), (2, 2), (Copy(),), (0, 0))


def test_placements_have_a_short_str():
    assert [str(placement) for placement in (Copy(), Split(1), Split(0, 4))] == ["R", "S(1)", "_S(0,4)"]
