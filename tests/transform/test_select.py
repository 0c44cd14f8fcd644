"""What a copy or a conversion takes of a manifest: by globs, and under new names."""

import pytest

from snapshot import RestoreError
from snapshot.manifest.containers import Container, DictEntry, ListEntry
from snapshot.manifest.values import IntEntry
from snapshot.transform.call import choose_entries, chosen_of_ranks


def manifest():
    return {
        "m": DictEntry(["a", "b"]),
        "m/a": DictEntry(["w", "x"]),
        "m/a/w": IntEntry("1"),
        "m/a/x": IntEntry("2"),
        "m/b": ListEntry(2),
        "m/b/0": IntEntry("3"),
        "m/b/1": IntEntry("4"),
    }


def test_choose_entries_without_globs_takes_all():
    assert choose_entries(manifest(), [], [], None) == manifest()


@pytest.mark.parametrize(
    ("select", "exclude", "leaves"),
    [
        (["m/a/*"], [], ["m/a/w", "m/a/x"]),
        (["m/a/w"], [], ["m/a/w"]),
        ([], ["m/b/*"], ["m/a/w", "m/a/x"]),
        (["**"], ["m/a/x"], ["m/a/w", "m/b/0", "m/b/1"]),
        (["m/b/*"], [], ["m/b/0", "m/b/1"]),
    ],
)
def test_choose_entries_select_and_exclude_choose_leaves(select, exclude, leaves):
    kept = choose_entries(manifest(), select, exclude, None)
    assert [path for path, entry in kept.items() if isinstance(entry, IntEntry)] == leaves
    for path, entry in kept.items():
        if isinstance(entry, Container):
            assert all(f"{path}/{name}" in kept for name in entry.components()), path


def test_choose_entries_takes_a_sequence_whole_or_not_at_all():
    with pytest.raises(RestoreError, match="m/b: a sequence can only be selected whole"):
        choose_entries(manifest(), ["m/b/0"], [], None)


def test_choose_entries_rename_moves_leaves():
    made = choose_entries(manifest(), ["m/a/*"], [], {"m/a": "n/deep"})
    assert (made["n/deep/w"], made["n/deep/x"]) == (IntEntry("1"), IntEntry("2"))
    assert not [path for path in made if path.startswith("m/a")]


def test_choose_entries_rename_of_an_unknown_name_raises():
    with pytest.raises(RestoreError, match=r"m/c is not in the checkpoint"):
        choose_entries(manifest(), [], [], {"m/c": "m/d"})


@pytest.mark.parametrize("name", ["", "n//x", "/n", "n/"])
def test_choose_entries_rename_to_an_invalid_path_raises(name):
    with pytest.raises(RestoreError, match="m/a/w: rename must give it a valid path"):
        choose_entries(manifest(), [], [], lambda path: name if path == "m/a/w" else path)


def of_ranks():
    """Return a manifest in which rank 1 has the shared entries, and rank 0 only its own."""
    return {
        "0/m": DictEntry(["a", "b", "own"]),
        "0/m/own": IntEntry("0"),
        "1/m": DictEntry(["a", "b", "own"]),
        "1/m/a": DictEntry(["w", "x"]),
        "1/m/a/w": IntEntry("1"),
        "1/m/a/x": IntEntry("2"),
        "1/m/b": ListEntry(1),
        "1/m/b/0": IntEntry("3"),
        "1/m/own": IntEntry("1"),
    }


@pytest.mark.parametrize(
    ("select", "exclude", "kept"),
    [
        ([], [], list(of_ranks())),
        (["m/a/w"], [], ["0/m", "1/m", "1/m/a", "1/m/a/w"]),
        (["m/own"], [], ["0/m", "0/m/own", "1/m", "1/m/own"]),
        ([], ["m/a/*", "m/own"], ["0/m", "1/m", "1/m/b", "1/m/b/0"]),
        (["other"], [], []),
    ],
)
def test_chosen_of_ranks_keeps_each_entry_under_its_rank(select, exclude, kept):
    made = chosen_of_ranks(of_ranks(), select, exclude, None)
    assert list(made) == kept
    for path, entry in made.items():
        if not isinstance(entry, Container):
            assert entry == of_ranks()[path]
    if kept:  # the containers of both ranks name the same
        assert made["0/m"].components() == made["1/m"].components()


def test_chosen_of_ranks_rename_moves_shared_and_own_entries():
    made = chosen_of_ranks(of_ranks(), [], [], {"m/a/w": "n/w"})
    assert made["1/n/w"] == IntEntry("1")
    assert made["1/n"].components() == ["w"]
    assert made["1/m/a"].components() == ["x"]
    assert made["0/m/own"] == IntEntry("0")
    assert "0/n/w" not in made
