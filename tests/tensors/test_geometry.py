"""Boxes against a dense reference."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.tensors.geometry import (
    Box,
    boxes_of_range,
    boxes_overlap,
    find_flat_ranges,
    intersect,
    is_flat_range,
    is_inside,
    split_shape,
    whole_box,
)

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)
full = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxed(draw, shape=None):
    shape = draw(shapes) if shape is None else shape
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return shape, Box(offsets, sizes)


def mask(shape, box):
    made = torch.zeros(shape, dtype=torch.bool)
    made[box.slices()] = True
    return made


@given(shapes, st.integers(1, 40))
def test_split_shape_covers_all_in_order_with_flat_ranges(shape, most):
    numbers = torch.arange(math.prod(shape)).view(shape)
    pieces = split_shape(shape, most)
    assert torch.equal(torch.cat([numbers[box.slices()].reshape(-1) for box in pieces]), numbers.reshape(-1))
    assert all(box.numel <= most for box in pieces)
    assert all(is_inside(box, shape) for box in pieces)


@given(full, st.data())
def test_boxes_of_range_are_that_range(shape, data):
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    numbers = torch.arange(total).view(shape)
    found = [(at, numbers[box.slices()].reshape(-1)) for at, box in boxes_of_range(shape, begin, end)]
    assert all(piece[0] == at for at, piece in found)
    flat = torch.cat([piece for _, piece in found]) if found else torch.empty(0, dtype=torch.int64)
    assert torch.equal(flat, torch.arange(begin, end))
    assert len(found) <= max(1, 2 * len(shape))


@settings(max_examples=300)
@given(boxed(), st.integers(0, 50))
def test_find_flat_ranges_covers_the_box_and_joins_small_gaps(case, gap):
    shape, box = case
    total = math.prod(shape)
    covered = torch.zeros(total, dtype=torch.bool)
    last = None
    for begin, end in find_flat_ranges(shape, box, gap):
        assert 0 <= begin < end <= total
        assert last is None or begin >= last
        covered[begin:end] = True
        last = end
    wanted = mask(shape, box).reshape(-1)
    assert not (wanted & ~covered).any()
    if gap == 0:
        assert torch.equal(wanted, covered)


@given(st.data())
def test_intersect_and_boxes_overlap_equal_a_dense_reference(data):
    shape = data.draw(full)
    a, b = data.draw(boxed(shape))[1], data.draw(boxed(shape))[1]
    both = mask(shape, a) & mask(shape, b)
    shared = intersect(a, b)
    assert torch.equal(mask(shape, shared) if shared else torch.zeros(shape, dtype=torch.bool), both)
    if shape:
        assert boxes_overlap([a, b]) == bool(both.any())


@given(shapes)
def test_is_inside_whole_box(shape):
    assert is_inside(whole_box(shape), shape)
    assert not is_inside(Box((0,) * len(shape), tuple(size + 1 for size in shape)), shape) or not shape


@given(full.flatmap(boxed))
def test_is_flat_range_equals_one_flat_range(shaped):
    shape, box = shaped
    if box.numel:
        assert is_flat_range(shape, box) == (len(find_flat_ranges(shape, box, 0)) == 1)


def test_boxes_overlap_is_quick_for_many_boxes():
    assert not boxes_overlap([Box((i, 0), (1, 4)) for i in range(100_000)])
    assert not boxes_overlap([Box((i * 2, j * 3), (2, 3)) for i in range(200) for j in range(200)])
    assert not boxes_overlap([Box((i, j, k), (1, 1, 1)) for i in range(20) for j in range(20) for k in range(20)])
    uneven = [Box((i * 3 + i % 2, 0), (3 - i % 2 + (i + 1) % 2, 7)) for i in range(0, 5000, 2)]
    assert not boxes_overlap(uneven)
    assert boxes_overlap([Box((i, 0), (1, 4)) for i in range(100_000)] + [Box((77, 3), (1, 1))])


def test_box_with_more_sizes_than_offsets_is_shown_in_the_error_that_refuses_it():
    assert str(Box((0,), (2, 3))) == "0:2"
    assert str(Box((1, 2), (3, 4))) == "1:4,2:6"
