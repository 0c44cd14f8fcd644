"""Replicas: what a rank tells the others of its values and boxes, and what it makes of their answers."""

from types import SimpleNamespace

import pytest
import torch

from snapshot import RNGState, SnapshotError, StateDict
from snapshot.distributed.group import Ranks
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.values import IntEntry
from snapshot.plan import consensus
from snapshot.save import replication
from snapshot.save.replication import ReplicationRules
from snapshot.state.flatten import Flattened
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.state.stateful import map_modules
from snapshot.tensors.geometry import Box


def exchange_of(rank, members=(0, 1, 2), others=()):
    """An exchange whose other ranks have sent these values."""
    return SimpleNamespace(
        rank=rank,
        alone=len(members) == 1,
        ranks=Ranks(rank, members),
        agree=lambda mine, lead, *_: lead([mine, *others]),
    )


def piece(nbytes=8, holders=None, replica=0, at=0):
    return LocalPiece(Box((at,), (nbytes,)), torch.zeros(nbytes, dtype=torch.int8), holders, replica)


def shards_of(*pieces, ranks=None, layout="rows"):
    return Shards("DTensor", torch.int8, (64,), list(pieces), ranks, None, None, layout, False)


def flat_of(**more):
    return SimpleNamespace(**{"leaves": [], "blobs": [], "shards": {}, "ties": {}, "entries": {}, **more})


@pytest.mark.parametrize(
    ("holders", "members", "rank", "found"),
    [
        (None, (0, 1, 2), 2, (2,)),
        ((1,), (0, 1, 2), 2, (2,)),
        ((5,), (5,), 0, (0,)),
        ((4, 6), (4, 5, 6), 0, (0, 2)),
        ((4, 6), (4,), 0, (0,)),
    ],
)
def test_holders_of_a_box_are_ranks_of_the_group(holders, members, rank, found):
    assert replication.holders_of(exchange_of(rank, members), piece(holders=holders)) == found


def test_own_bytes_are_those_that_no_other_rank_writes():
    leaf = SimpleNamespace
    flat = flat_of(
        leaves=[leaf(entry="s/a", nbytes=100), leaf(entry="s/b", nbytes=1000)],
        blobs=[SimpleNamespace(path="s/c", data=b"123"), SimpleNamespace(path="s/d", data=b"12345")],
        shards={"s/x": shards_of(piece(8, (0, 1)), piece(8, None), piece(8, None, 1), piece(6, (0, 1, 2)))},
    )
    exchange = exchange_of(1)
    assert replication.own_bytes(exchange, flat, frozenset(), frozenset()) == 1108 + 4 + 8 + 2
    assert replication.own_bytes(exchange, flat, frozenset({"s/b", "s/d"}), frozenset({("s/x", 1)})) == 103 + 4 + 2


@pytest.mark.parametrize(("leader", "count"), [(True, 5), (False, 4)])
def test_count_entries_counts_replicas_on_the_leader(leader, count):
    flat = flat_of(entries=dict.fromkeys("abc"), shards={"x": shards_of(piece(), piece())})
    assert replication._count_entries(flat, frozenset("a"), leader=leader) == count


def test_layout_sums_of_all_ranks_are_equal_if_their_layouts_are():
    def sums(layouts, ties=()):
        terms = []
        for rank, layout in enumerate(layouts):
            shards = {
                "s/open": shards_of(piece(holders=None), ranks=None),
                "s/else": shards_of(piece(holders=(0,)), ranks=(0,), layout="alone"),
                "s/x": shards_of(piece(holders=(0, 1)), ranks=(0, 1), layout=layout),
            }
            flat = flat_of(shards=shards, ties={"s/x": "s/y"} if rank in ties else {})
            terms.append(replication._layout_sums(exchange_of(rank), flat))
        return consensus.add_sums(have for have, _ in terms), consensus.add_sums(expected for _, expected in terms)

    for layouts, ties, equal in (
        (("rows", "rows", "rows"), (), True),
        (("rows", "rows", "other"), (), True),
        (("rows", "columns", "rows"), (), False),
        (("columns", "rows", "rows"), (), False),
        (("rows", "rows", "rows"), (0, 1), True),
        (("rows", "rows", "rows"), (1,), False),
    ):
        have, expected = sums(layouts, ties)
        assert (have == expected) is equal, (layouts, ties)
        assert have != bytes(16)


def test_layout_sums_name_a_rank_outside_of_the_group():
    flat = flat_of(shards={"s/x": shards_of(piece(holders=(4, 9)), ranks=(4, 9, 10))})
    with pytest.raises(SnapshotError, match="s/x: rank 9 holds a shard of it"):
        replication._layout_sums(exchange_of(0, (4, 5)), flat)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (IntEntry("5"), "here 5"),
        (IntEntry("5", readable="five"), "here five"),
        (IntEntry("5" * 90), "here " + "5" * 75),
        (DictEntry([]), "a part, by its attribute"),
    ],
)
def test_value_text_of_what_differs(entry, text):
    assert replication._value_text(entry).startswith(text)
    assert len(replication._value_text(entry)) <= 80


def test_rules_select_globs_and_leave_random_numbers_alone():
    rules = ReplicationRules(
        map_modules({"s": StateDict(), "r/g": RNGState()}), ["s/**", "r%2Fg/**"], exchange_of(0).ranks
    )
    assert [rules.matches_glob(path) for path in ("s/a", "s/a/b", "t/a")] == [True, True, False]
    assert [rules.is_replicated(path) for path in ("s/a", "s/a/b", "t/a")] == [True, True, False]
    assert rules.select(["s/a", "t/a"]) == {"s/a"}
    assert [rules.is_private(path) for path in ("r%2Fg/x", "r%2Fg", "s/a", "r/x")] == [True, True, False, False]
    none = ReplicationRules(map_modules({"s": StateDict()}), [], exchange_of(0).ranks)
    assert none.select(["s/a"]) == frozenset()
    assert not none.matches_glob("s/a")
    assert not none.is_private("s/a")


BOX = "s/x[0:8] (on the ranks 0, 1)"


def test_check_replicas_compares_values_and_shared_boxes():
    values = Flattened()
    values.add("s", {"a": torch.ones(2), "b": torch.zeros(2)})
    flat = flat_of(leaves=values.leaves, shards={"s/x": shards_of(piece(8, (0, 1)), piece(8, (0,), at=8))})
    shared = SimpleNamespace(paths=frozenset({"s/a", "s/b"}), from_leader=frozenset({"s/b"}))
    sent = []

    def digest(leaves):
        sent.append(leaves)
        return [f"digest {number}" for number, _ in enumerate(leaves)]

    def check(*others):
        replication.check_replicas(exchange_of(0, others=others), flat, shared, digest)

    check()
    [compared] = sent
    assert len(compared) == 2
    check({"s/a": "digest 0", BOX: "digest 1"}, {})
    with pytest.raises(SnapshotError, match=r"s/a: rank 2 and rank 0 have different values") as caught:
        check({}, {"s/a": "other"})
    assert "s/x" not in str(caught.value)
    with pytest.raises(SnapshotError, match="rank 1 and rank 0"):
        check({BOX: "other"})
    sent.clear()
    replication.check_replicas(exchange_of(0, (0,)), flat, shared, digest)
    assert sent == [], "there is nothing to compare"
