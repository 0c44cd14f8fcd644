"""What one rank sees of a manifest of several, and how parts of it come together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, RestoreError
from snapshot.manifest import entries as e
from snapshot.manifest.containers import DictEntry, ListEntry, OrderedDictEntry, SubclassEntry
from snapshot.manifest.document import expect_whole_tensors, merge
from snapshot.manifest.rank_view import (
    adopt_entry,
    find_rank_paths,
    group_by_key,
    has_path,
    is_rank,
    make_rank_view,
    remove_entry,
    rename_entries,
    resolve_path,
    split_by_rank,
    suggest_names,
)
from snapshot.manifest.values import IntEntry


def shard(begin, size):
    return e.Shard((begin,), (size,), e.TensorEntry("data/a-0-0.safetensors", (0, size * 4), "float32", (size,)))


def test_rank_view_prefers_an_own_entry_to_replicated_ones():
    one = IntEntry("1")
    manifest = {
        "0/s": DictEntry(["x"]), "0/s/x": e.ShardedTensorEntry("float32", (4,), [shard(0, 4)]),
        "1/s": DictEntry(["x"]), "1/s/x": one,
    }  # fmt: skip
    assert make_rank_view(manifest, 1, 2, 2).entries["s/x"] is one
    assert make_rank_view(manifest, 0, 2, 2).entries["s/x"] is manifest["0/s/x"]


@pytest.mark.parametrize("path", ["2/s", "x/s", "-1/s", "/s", "²/s"])
def test_rank_view_refuses_an_entry_without_a_rank(path):
    with pytest.raises(CorruptSnapshotError, match="must begin with a rank"):
        make_rank_view({"0/s": DictEntry([]), path: IntEntry("1")}, 0, 2, 2)


def test_adopt_and_remove_entry_update_the_keys_of_containers():
    entries = {"s": DictEntry(["a"]), "s/a": IntEntry("1")}
    adopt_entry(entries, "s/b%2Fc/d", IntEntry("2"))
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
    for other in (e.ShardedTensorEntry("float64", (4,), []), IntEntry("1"), e.DTensorEntry("float32", (4,), [])):
        with pytest.raises(CorruptSnapshotError, match="described twice, by rank 1"):
            merge(dict(made), {"0/w": other}, "rank 1")
    with pytest.raises(CorruptSnapshotError, match="2 of 4"):
        expect_whole_tensors({"0/w": e.ShardedTensorEntry("float32", (4,), [shard(0, 2)])})


@pytest.mark.parametrize(
    ("context", "error"),
    [
        ({"": IntEntry("5")}, None),
        ({"": ListEntry(2), "/0": IntEntry("1"), "/1": IntEntry("2")}, None),
        ({}, "one tree"),
        ({"": IntEntry("5"), "/0": IntEntry("1")}, "one tree"),
        ({"": ListEntry(2), "/0": IntEntry("1")}, "one tree"),
        ({"": ListEntry(1), "/1": IntEntry("1")}, "lacks the contents of the root"),
        ({"": ListEntry(1), "/0": ListEntry(1), "/0/1": IntEntry("1")}, "lacks the contents of /0"),
    ],
)
def test_context_of_a_wrapper_tensor_is_one_tree(context, error):
    entry = SubclassEntry(keys=[], obj_type="a.B", context=context)
    for call in (lambda: entry.check("s/x"), entry.context_value):
        if error is None:
            call()
            continue
        with pytest.raises(CorruptSnapshotError, match=error):
            call()
    if error is None:
        assert entry.context_value() == (5 if len(context) == 1 else [1, 2])


def own(value):
    return IntEntry(value)


def same(value):
    return IntEntry(value, replicated=True)


SHARD = e.ShardedTensorEntry("float32", (4,), [shard(0, 4)])
TWO = {
    "0/s": DictEntry(["a", "b", "c"]), "0/s/a": own("0"), "0/s/b": same("5"), "0/s/c": SHARD,
    "1/s": DictEntry(["a", "b", "d"]), "1/s/a": own("1"), "1/s/d": own("2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rank", "now", "entries", "withheld", "gone"),
    [
        (0, 2, {"s": ["a", "b", "c"], "s/a": "0", "s/b": "5", "s/c": SHARD}, {}, []),
        (1, 2, {"s": ["a", "b", "d"], "s/a": "1", "s/b": "5", "s/d": "2"}, {}, []),
        (0, 1, {"s": ["a", "b", "c"], "s/a": "0", "s/b": "5", "s/c": SHARD}, {}, ["1/s/a", "1/s/d"]),
        (2, 3, {"s": ["b", "c"], "s/b": "5", "s/c": SHARD}, {"s/a": "belongs to rank 0 alone"}, []),
    ],
)
def test_rank_view_has_own_entries_and_shared_ones(rank, now, entries, withheld, gone):
    view = make_rank_view(TWO, rank, 2, now)
    assert {path: shown(entry) for path, entry in view.entries.items()} == entries
    assert view.withheld == withheld
    assert view.gone == gone
    shared, alone = split_by_rank(TWO, 2)
    assert sorted(shared) == ["0/s/b", "0/s/c"]
    assert {number: sorted(held) for number, held in alone.items()} == {
        "0": ["0/s", "0/s/a"], "1": ["1/s", "1/s/a", "1/s/d"]
    }  # fmt: skip
    if rank < 2:
        again = make_rank_view({**shared, **alone[str(rank)]}, rank, 2, now)
        assert again.entries == view.entries


def shown(entry):
    return entry.keys if isinstance(entry, DictEntry) else getattr(entry, "serialized_value", entry)


def test_rank_view_of_a_new_rank_takes_what_all_ranks_have_stored():
    view = make_rank_view(TWO, 2, 2, 3, lambda path: path == "s/a")
    assert view.entries["s/a"] == same("0")
    assert view.entries["s"].keys == ["a", "b", "c"]
    assert view.withheld == {}


def test_rank_view_of_a_single_rank_is_visible_to_all():
    manifest = {"0/s": DictEntry(["a"]), "0/s/a": own("0")}
    for rank in (0, 3):
        assert make_rank_view(manifest, rank, 1, 4).entries == {"s": manifest["0/s"], "s/a": manifest["0/s/a"]}
    assert split_by_rank(manifest, 1) == (manifest, {})
    with pytest.raises(CorruptSnapshotError, match="single rank"):
        make_rank_view({**manifest, "1/s": DictEntry([])}, 0, 1, 1)


def test_rank_view_chooses_the_sharded_tensor_that_a_rank_had():
    first, second = (e.ShardedTensorEntry(kind, (4,), [shard(0, 4)]) for kind in ("float32", "float64"))
    manifest = {
        "0/s": DictEntry(["x"]), "0/s/x": first, "1/s": DictEntry(["x"]), "1/s/x": second,
        "2/s": DictEntry(["x"]),
    }  # fmt: skip
    assert make_rank_view(manifest, 0, 3, 3).entries["s/x"] is first
    assert make_rank_view(manifest, 1, 3, 3).entries["s/x"] is second
    view = make_rank_view(manifest, 2, 3, 3)
    assert "s/x" not in view.entries
    assert view.withheld == {"s/x": "a different tensor on each of the ranks 0, 1"}


def test_rank_view_sets_entries_aside_that_no_container_names():
    manifest = {
        "0/s": DictEntry(["a"]), "0/s/a": own("1"), "0/s/b": DictEntry(["c"]), "0/s/b/c": own("2"),
        "1/s": DictEntry([]),
    }  # fmt: skip
    view = make_rank_view(manifest, 0, 2, 2)
    assert list(view.entries) == ["s", "s/a"]
    assert sorted(view.elsewhere) == ["s/b", "s/b/c"]


@pytest.mark.parametrize(("depth", "wide", "fine"), [(501, 1, True), (502, 1, False), (1, 3, True), (1, 4, False)])
def test_rank_view_limits_depth_and_width(depth, wide, fine):
    deep = "s" + "/x" * depth
    manifest = {"0/s": ListEntry(wide), f"0/{deep}": own("1"), "0/t": own("2")}
    if fine:
        make_rank_view(manifest, 0, 1, 1)
        return
    with pytest.raises(CorruptSnapshotError, match="deep" if depth > 1 else "children"):
        make_rank_view(manifest, 0, 1, 1)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("0/s/a", "0/s/a"), ("1/s/a", "1/s/a"), ("s/d", "1/s/d"), ("s/b", "0/s/b"), ("1/s/b", "0/s/b"),
        ("1/s/c", "0/s/c"), ("s/c", "0/s/c"), ("0", "0"), ("1", "1"),
        ("s/a", "needs a rank: 2 ranks have one each; name one of '0/s/a', '1/s/a'"),
        ("s", "needs a rank"), ("2", "'2' not found"), ("0/s/d", "not found"), ("s/x", "not found"),
        ("5/s/a", "not found"),
    ],
)  # fmt: skip
def test_resolve_path_finds_an_object_with_or_without_its_rank(path, found):
    if found in TWO or found in "01":
        assert resolve_path(TWO, 2, path) == found
    else:
        with pytest.raises(RestoreError, match=found):
            resolve_path(TWO, 2, path)
        with pytest.raises(RestoreError, match=f"^here: .*{found.partition(':')[0]}"):
            resolve_path(TWO, 2, path, "here")
    known = path in TWO or f"0/{path}" in TWO or f"1/{path}" in TWO or path in ("1/s/b", "1/s/c", "0/s/d")
    assert has_path(TWO, 2, path) is known


def test_resolve_path_takes_containers_that_are_equal_on_all_ranks():
    manifest = {
        "0/s": DictEntry(["b"]), "0/s/b": same("5"), "1/s": DictEntry(["b"]),
        "0/t": DictEntry(["b"]), "0/t/b": own("5"), "1/t": DictEntry(["b"]), "1/t/b": own("5"),
        "0/u": DictEntry(["v"]), "0/u/v": DictEntry([]), "1/u": DictEntry(["v"]), "1/u/v": ListEntry(0),
    }  # fmt: skip
    assert resolve_path(manifest, 2, "s") == "0/s"
    for path in ("t", "u", "u/v"):
        with pytest.raises(RestoreError, match="needs a rank"):
            resolve_path(manifest, 2, path)


def test_resolve_path_of_many_ranks_names_ten():
    manifest = {f"{rank}/x": own(str(rank)) for rank in range(13)}
    for saved in (13, 10**6):
        with pytest.raises(RestoreError, match=r"13 ranks have one each.*'9/x' and 3 more$"):
            resolve_path(manifest, saved, "x")
        assert find_rank_paths(manifest, saved, "x") == [f"{rank}/x" for rank in range(13)]
        assert find_rank_paths(manifest, saved, "3/x") == ["3/x"]
    assert find_rank_paths(manifest, 5, "x") == [f"{rank}/x" for rank in range(5)]


@pytest.mark.parametrize(
    ("number", "saved", "found"),
    [
        ("0", 1, True),
        ("1", 1, False),
        ("01", 9, False),
        ("-1", 9, False),
        ("12", 13, True),
        ("12", 12, False),
        ("x", 9, False),
    ],
)
def test_is_rank_reads_canonical_numbers(number, saved, found):
    assert is_rank(number, saved) is found


def test_rename_entries_makes_parents_and_keeps_the_kinds_of_keys():
    entries = {
        "s": OrderedDictEntry(["a", 1], module_versions={"a": 2}), "s/a": own("1"), "s/1": own("2"),
        "t": DictEntry(["b"]), "t/b": own("3"),
    }  # fmt: skip
    names = {"s/a": "s/n", "s/1": "s/7", "t/b": "t/c/b"}
    made = rename_entries(entries, lambda path: names.get(path, path))
    assert {path: shown(entry) for path, entry in made.items()} == {
        "s": ["n", 7], "s/n": "1", "s/7": "2", "t": ["c"], "t/c/b": "3", "t/c": ["b"]
    }  # fmt: skip
    assert made["s"].module_versions is None
    assert type(made["s"]) is OrderedDictEntry
    kept = rename_entries(entries, lambda path: path)
    assert kept == entries
    assert kept["s"].module_versions == {"a": 2}
    with pytest.raises(RestoreError, match=r"two entries the name 's/a'"):
        rename_entries(entries, lambda path: path.replace("s/1", "s/a"))


@pytest.mark.parametrize(
    ("name", "names", "hint"),
    [
        ("weigth", ["weight", "bias"], "did you mean 'weight'?"),
        ("zzz", ["a", "b"], "the names are a, b"),
        ("zzz", [f"{number:02}" for number in range(10)], "the names are 00, 01, 02, 03, 04, 05, 06, 07, 08, 09"),
        ("zzz", [f"{number:02}" for number in range(11)], "the names are 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, …"),
        ("x", [], "there are no names"),
        ("b/weigth", [*(f"a/{number}" for number in range(2500)), "b/weight"], "did you mean 'b/weight'?"),
    ],
)
def test_suggest_names(name, names, hint):
    assert suggest_names(name, names) == hint


def test_group_by_key_keeps_keys_apart_that_begin_alike():
    view = {"s": 1, "s/a": 2, "s2": 3, "s2/a": 4, "s/b": 5}
    assert group_by_key(view) == {"s": {"s": 1, "s/a": 2, "s/b": 5}, "s2": {"s2": 3, "s2/a": 4}}
