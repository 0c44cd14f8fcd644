"""Layout: every byte of every leaf in one place, files without holes, lanes balanced."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.io.storage import Limits
from snapshot.plan import layout, plan_cache
from snapshot.plan.layout import Extent, FilePlan, choose_part_size, cut_file, make_plan
from snapshot.state.leaves import Leaf
from snapshot.tensors.memory import ITEMSIZE

MiB = 1 << 20


def leaf(i, dtype, shape):
    return Leaf(f"m/t{i}", None, dtype, shape, math.prod(shape) * ITEMSIZE[dtype])


leaves = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bool", "bfloat16", "complex128", "int64"]),
        st.lists(st.integers(0, 60), max_size=3).map(tuple),
    ),
    max_size=30,
).map(lambda items: [leaf(i, *item) for i, item in enumerate(items)])


@settings(max_examples=150, deadline=None)
@given(leaves, st.sampled_from([500, 5000, 1 << 40]), st.integers(1, 4), st.sampled_from([100, 1 << 40]))
def test_layout_plans_every_byte_of_every_leaf_once(found, largest, lanes, worth):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LARGEST_FILE", largest)
        patch.setattr(layout, "WORTH_A_FILE", worth)
        patch.setattr(layout, "CUT", min(worth, layout.CUT))
        plan = make_plan(found, 0, Limits(parallel_files=4), lanes, staged_bytes=0)
    covered = {i: [] for i in range(len(found))}
    for file in plan.files:
        header = json.loads(file.header[8:])
        assert len(file.header) % 4096 == 0
        assert len(header) == len(file.extents) + 1
        position, last = len(file.header), 16
        for extent in file.extents:
            each = found[extent.leaf]
            itemsize = ITEMSIZE[each.dtype]
            assert extent.begin == position
            assert extent.begin % itemsize == 0
            assert itemsize <= last
            covered[extent.leaf].append((extent.start, extent.start + extent.end - extent.begin))
            position, last = extent.end, itemsize
        assert position == file.size
        assert file.size - len(file.header) <= largest or len(file.extents) == 1
    for i, ranges in covered.items():
        at = 0
        for begin, end in sorted(ranges):
            assert begin == at
            at = end
        assert at == found[i].nbytes
        assert ranges


@given(leaves, st.integers(1, 5000))
def test_layout_cut_file_covers_a_file_and_names_its_extents(found, length):
    for file in make_plan(found, 0, Limits(), 2, staged_bytes=0).files:
        position = 0
        seen = {}
        for part in cut_file(file, max(length, file.size // 8000) * 8):
            assert part.begin == position
            position = part.end
            for index in range(part.first, part.last):
                extent = file.extents[index]
                assert extent.begin < part.end
                assert extent.end > part.begin
                seen[index] = seen.get(index, 0) + max(0, min(extent.end, part.end) - max(extent.begin, part.begin))
        assert position == file.size
        for index, extent in enumerate(file.extents):
            assert seen.get(index, 0) == extent.end - extent.begin


def test_layout_balances_lanes_and_cuts_a_large_tensor():
    for sizes in ([256] * 4, [1024], [700, 100, 100, 50], [1] * 1000, [300] + [1] * 300):
        found = [leaf(i, "uint8", (size, MiB)) for i, size in enumerate(sizes)]
        for lanes in (2, 4):
            plan = make_plan(found, 0, Limits(parallel_files=8), lanes, staged_bytes=0)
            loads = [file.size for file in plan.files]
            assert len(loads) == lanes
            assert max(loads) / (sum(loads) / lanes) < 1.2, (sizes, lanes, loads)


def test_layout_uses_one_file_for_small_payloads_and_serial_storages():
    assert len(make_plan([leaf(0, "uint8", (MiB,))] * 3, 0, Limits(), 2, staged_bytes=0).files) == 1
    assert (
        len(
            make_plan(
                [leaf(i, "uint8", (64 * MiB,)) for i in range(3)], 0, Limits(parallel_files=1), 4, staged_bytes=0
            ).files
        )
        == 1
    )
    assert make_plan([], 0, Limits(), 2, staged_bytes=0).files == ()


def test_layout_of_equal_structures_is_equal():
    found = [leaf(i, "float32", (i, 3)) for i in range(50)]
    assert make_plan(found, 0, Limits(), 2, staged_bytes=0) == make_plan(found, 0, Limits(), 2, staged_bytes=0)
    other = [leaf(i, "float32", (3, i)) for i in range(50)]
    assert (
        make_plan(found, 0, Limits(), 2, staged_bytes=0).structure
        != make_plan(other, 0, Limits(), 2, staged_bytes=0).structure
    )


def test_layout_part_size_grows_with_the_file():
    limits = Limits(most_parts=10_000, preferred_part=16 * MiB, grown_part=128 * MiB, parallel_parts=16)
    sizes = [choose_part_size(limits, 4096 * MiB, size * MiB) // MiB for size in (1, 512, 1024, 4096, 1 << 20)]
    assert sizes == [16, 16, 32, 128, 128]
    assert choose_part_size(limits, 256 * MiB, 4096 * MiB) == 32 * MiB  # an eighth of the budget
    few = Limits(preferred_part=16 * MiB, grown_part=128 * MiB, parallel_parts=2)
    assert choose_part_size(few, 256 * MiB, 1 << 40) == 32 * MiB
    assert choose_part_size(limits, 4096 * MiB, 4096 * MiB, 8 * MiB) == 8 * MiB  # as the setting says
    assert choose_part_size(Limits(), 4096 * MiB, 1 << 40) == Limits().preferred_part


@given(
    st.integers(1, 1 << 30), st.integers(1, 1 << 42), st.sampled_from([1, 512, 4096]),
    st.integers(1, 16 * MiB), st.integers(1, 10_000),
)  # fmt: skip
def test_layout_part_size_respects_limits_and_budget(budget, file_size, multiple, smallest, most):
    limits = Limits(smallest_part=smallest, most_parts=most, multiple=multiple)
    size = choose_part_size(limits, budget, file_size)
    assert size % multiple == 0
    assert size >= smallest
    assert -(-file_size // size) <= most


def test_cut_file_cached_cuts_each_file_and_length_once():
    extents = tuple(Extent(number, 10 * number, 10 * number + 10) for number in range(4))
    file, other = FilePlan(b"", extents, 40), FilePlan(b"", extents[:2], 20)
    first = plan_cache.cut_file_cached(file, 16)
    assert first == cut_file(file, 16)
    assert [(each.begin, each.end, each.first, each.last) for each in first] == [
        (0, 16, 0, 2),
        (16, 32, 1, 4),
        (32, 40, 3, 4),
    ]
    assert plan_cache.cut_file_cached(file, 16) is first
    assert plan_cache.cut_file_cached(file, 40) == cut_file(file, 40) != first
    plan_cache._cuts.get()[id(other), 16] = file, first  # of a file that had this id before
    assert plan_cache.cut_file_cached(other, 16) == cut_file(other, 16)
    for number in range(3 * plan_cache.KEPT):
        plan_cache.cut_file_cached(file, 17 + number)
    assert len(plan_cache._cuts.get()) == 2 * plan_cache.KEPT
    assert plan_cache.cut_file_cached(file, 16) is not first
