"""What follows from what ranks say: nothing is shared that not all have, and contradictions are found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot import SnapshotError
from snapshot.plan.consensus import (
    FIRST,
    CandidateDetails,
    RankRecord,
    ShardBoxes,
    compare_records,
    digest_layout,
    settle_details,
    sum_digests,
)
from snapshot.tensors.geometry import split_shape

digest = b"%016d".__mod__


def record(**changes):
    plain = {
        "structure": "s",
        "basis": FIRST,
        "agreed": "a",
        "candidates": "c",
        "have": bytes(16),
        "expected": bytes(16),
    }
    return RankRecord(**{**plain, "load": 1, "entries": 1, "boxes": False, **changes})


def test_compare_records_of_equal_ranks_is_settled():
    answer = compare_records([record(load=rank) for rank in range(5)])
    assert answer.settled
    assert answer.loads == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"agreed": "b", "candidates": "d"}, {"basis": "old"}, {"boxes": True}])
def test_compare_records_requests_details_from_one_rank_of_each_kind(change):
    answer = compare_records([record(), record(), record(**change), record(**change)])
    assert not answer.settled
    assert answer.speakers == ([0, 2] if "candidates" in change else [0])


def test_compare_records_accepts_a_cached_plan_only_for_its_structure():
    known = compare_records([record(), record()]).structure
    assert compare_records([record(basis=known)] * 2).settled
    assert not compare_records([record(basis=known), record(basis=known, structure="new")]).settled
    assert not compare_records([record(basis=known), record()]).settled


@given(st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=6))
def test_settle_details_keeps_items_that_all_ranks_have(held):
    details = [CandidateDetails(b"".join(map(digest, sorted(items)))) for items in held]
    common = settle_details(details, range(len(held))).items
    assert common == b"".join(map(digest, sorted(set.intersection(*map(set, held)))))


@given(st.dictionaries(st.sampled_from("abcdef"), st.sets(st.integers(0, 4), min_size=1)), st.data())
def test_consensus_finds_a_sharded_tensor_that_one_holder_lacks(tensors, data):
    def sums(lacks):
        have, expected = [[] for _ in range(5)], [[] for _ in range(5)]
        for path, holders in tensors.items():
            made = digest_layout(path, "S(0)")
            for rank in holders:
                if (path, rank) != lacks:
                    have[rank].append(made)
            if (path, min(holders)) != lacks:
                expected[min(holders)].append(made * len(holders))
        return compare_records(
            [record(have=sum_digests(h), expected=sum_digests(x)) for h, x in zip(have, expected, strict=True)]
        )

    assert sums(None).settled
    several = [(path, rank) for path, holders in tensors.items() for rank in holders if len(holders) > 1]
    if several:
        assert sums(data.draw(st.sampled_from(several))).layouts


def boxes(*held, shape=(6, 4), dtype="float32"):
    return CandidateDetails(boxes=[ShardBoxes("w", dtype, shape, [(box.offsets, box.sizes, 0) for box in held])])


@given(st.integers(1, 24), st.integers(1, 4), st.data())
def test_consensus_accepts_boxes_that_fill_a_tensor_and_writes_copies_once(most, world, data):
    parts = split_shape((6, 4), most)
    owners = [data.draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in parts]
    details = [
        boxes(*(box for box, ranks in zip(parts, owners, strict=True) if rank in ranks)) for rank in range(world)
    ]
    spare = settle_details(details, []).spare
    assert len(spare) == sum(len(ranks) - 1 for ranks in owners)
    if len(parts) > 1:
        lacking = [boxes(*(box for box in map(parts.__getitem__, range(1, len(parts))))), *[boxes()] * (world - 1)]
        with pytest.raises(SnapshotError, match="elements"):
            settle_details(lacking, [])


def test_settle_details_names_layouts_that_contradict_each_other():
    mine = CandidateDetails(layouts={"w": ("S(0)", [0, 1])})
    with pytest.raises(SnapshotError, match="rank 1 lacks the tensor"):
        settle_details([mine, CandidateDetails()], [])
    with pytest.raises(SnapshotError, match=r"w: S\(0\) on rank 0, S\(1\) on rank 1"):
        settle_details([mine, CandidateDetails(layouts={"w": ("S(1)", [0, 1])})], [])
