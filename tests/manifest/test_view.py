"""What one rank sees of a manifest of several, and how parts of it come together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.document import expect_whole_tensors, merge
from snapshot.manifest.rank_view import adopt_entry, make_rank_view, remove_entry


def shard(begin, size):
    return e.Shard((begin,), (size,), e.TensorEntry("data/a-0-0.safetensors", (0, size * 4), "float32", (size,)))


def test_rank_view_prefers_an_own_entry_to_replicated_ones():
    one = e.IntEntry("1")
    manifest = {
        "0/s": e.DictEntry(["x"]), "0/s/x": e.ShardedTensorEntry("float32", (4,), [shard(0, 4)]),
        "1/s": e.DictEntry(["x"]), "1/s/x": one,
    }  # fmt: skip
    assert make_rank_view(manifest, 1, 2, 2).entries["s/x"] is one
    assert make_rank_view(manifest, 0, 2, 2).entries["s/x"] is manifest["0/s/x"]


@pytest.mark.parametrize("path", ["2/s", "x/s", "-1/s", "/s", "²/s"])
def test_rank_view_refuses_an_entry_without_a_rank(path):
    with pytest.raises(CorruptSnapshotError, match="must begin with a rank"):
        make_rank_view({"0/s": e.DictEntry([]), path: e.IntEntry("1")}, 0, 2, 2)


def test_adopt_and_remove_entry_update_the_keys_of_containers():
    entries = {"s": e.DictEntry(["a"]), "s/a": e.IntEntry("1")}
    adopt_entry(entries, "s/b%2Fc/d", e.IntEntry("2"))
    assert entries["s"].keys == ["a", "b/c"]
    assert entries["s/b%2Fc"].keys == ["d"]
    remove_entry(entries, "s/a")
    assert entries["s"].keys == ["b/c"]


@given(st.integers(0, 50), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=3))
def test_mesh_with_equal_steps_is_encoded_shortly_and_knows_its_ranks(begin, axes):
    ranks = np.full(tuple(size for size, _ in axes), begin)
    for axis, (size, step) in enumerate(axes):
        ranks = ranks + np.arange(size).reshape([-1 if each == axis else 1 for each in range(len(axes))]) * step
    held = e.ShardedTensorEntry("float32", (4,), [], e.Mesh.from_lists(ranks.tolist()))
    assert {rank for rank in range(200) if held.is_held_by(rank)} == set(ranks.flatten().tolist())


@pytest.mark.parametrize("shape", [(8192,), (1024, 8), (2, 3, 4), (1, 5, 1)])
def test_mesh_of_common_shapes_is_encoded_shortly(shape):
    ranks = np.arange(np.prod(shape)).reshape(shape)
    for part in (ranks, ranks[..., 0] if len(shape) > 1 else ranks, ranks[-1:]):
        assert isinstance(e.Mesh.from_lists(part.tolist()), e.Mesh)


def test_mesh_of_other_ranks_is_stored_as_lists():
    ranks = [[3, 1], [0, 2]]
    assert e.Mesh.from_lists(ranks) == ranks
    assert [rank for rank in range(6) if e.ShardedTensorEntry("float32", (4,), [], ranks).is_held_by(rank)] == [
        0,
        1,
        2,
        3,
    ]


def test_merge_joins_the_shards_of_a_tensor():
    made = {"0/w": e.ShardedTensorEntry("float32", (4,), [shard(2, 2)])}
    merge(made, {"0/w": e.ShardedTensorEntry("float32", (4,), [shard(0, 2)])}, "rank 1")
    expect_whole_tensors(made)
    assert [each.offsets for each in made["0/w"].shards] == [(0,), (2,)]
    for other in (e.ShardedTensorEntry("float64", (4,), []), e.IntEntry("1"), e.DTensorEntry("float32", (4,), [])):
        with pytest.raises(CorruptSnapshotError, match="described twice, by rank 1"):
            merge(dict(made), {"0/w": other}, "rank 1")
    with pytest.raises(CorruptSnapshotError, match="2 of 4"):
        expect_whole_tensors({"0/w": e.ShardedTensorEntry("float32", (4,), [shard(0, 2)])})
