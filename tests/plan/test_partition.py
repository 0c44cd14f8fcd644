"""What several ranks hold is dealt out: every element once, in balance, and alike wherever it is worked out."""

import math

from hypothesis import given
from hypothesis import strategies as st

from snapshot.plan.layout import SHORTEST, PartitionItem, partition_items
from snapshot.tensors.geometry import boxes_overlap, whole_box

shapes = st.lists(st.integers(0, 700), max_size=3).map(tuple)
items = st.lists(st.builds(PartitionItem, shapes, st.sampled_from([1, 2, 4, 8]), st.booleans()), max_size=12)


@given(items, st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6))
def test_partition_items_assigns_every_element_once(given_items, loads):
    shares = partition_items(given_items, loads)
    assert len(shares) == len(loads)
    for number, item in enumerate(given_items):
        boxes = [dealt.box or whole_box(item.shape) for share in shares for dealt in share if dealt.item == number]
        assert boxes
        assert item.splits or len(boxes) == 1
        assert sum(box.numel for box in boxes) == math.prod(item.shape)
        assert not boxes_overlap([box for box in boxes if box.numel])


@given(items, st.integers(1, 6))
def test_partition_items_cuts_flat_ranges_of_a_minimum_length(given_items, world):
    for share in partition_items(given_items, [0] * world):
        for dealt in share:
            if dealt.box is not None:
                item = given_items[dealt.item]
                assert item.nbytes > SHORTEST
                sizes, shape = dealt.box.sizes, item.shape
                first = next((axis for axis, size in enumerate(sizes) if size != 1), len(sizes))
                assert sizes[first + 1 :] == shape[first + 1 :]


def loads_of(given_items, loads):
    made = list(loads)
    for rank, share in enumerate(partition_items(given_items, loads)):
        for dealt in share:
            item = given_items[dealt.item]
            made[rank] += item.nbytes if dealt.box is None else dealt.box.numel * item.itemsize
    return made


def test_partition_items_balances_a_transformer_over_eight_ranks():
    width = 768
    layer = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width), *[(width,)] * 8]
    tensors = [PartitionItem(shape, 4) for shape in [(50_257, width), (1024, width), *layer * 12]]
    for own in ([0] * 8, [10_000_000, 0, 0, 3_000_000, 0, 0, 0, 20_000_000]):
        loads = loads_of(tensors, own)
        assert max(loads) <= 1.1 * sum(loads) / 8


def test_partition_items_splits_one_huge_tensor():
    loads = loads_of([PartitionItem((1 << 14, 1 << 10), 4)], [0] * 8)
    assert max(loads) == min(loads) == (1 << 26) // 8


def test_partition_items_gives_less_to_ranks_with_own_data():
    assert loads_of([PartitionItem((1 << 22,), 1)], [1 << 22, 0]) == [1 << 22, 1 << 22]


def test_partition_items_for_thousands_of_ranks_has_few_pieces():
    shares = partition_items([PartitionItem((1 << 20, 1 << 10), 4)] * 20, [0] * 8192)
    assert sum(map(len, shares)) < 9000
