"""What a copy or a conversion takes of a manifest: by globs, and under new names."""

import pytest

from snapshot import RestoreError
from snapshot.manifest import entries as e
from snapshot.transform.call import choose_entries


def manifest():
    return {
        "m": e.DictEntry(["a", "b"]),
        "m/a": e.DictEntry(["w", "x"]),
        "m/a/w": e.IntEntry("1"),
        "m/a/x": e.IntEntry("2"),
        "m/b": e.ListEntry(2),
        "m/b/0": e.IntEntry("3"),
        "m/b/1": e.IntEntry("4"),
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
    assert [path for path, entry in kept.items() if isinstance(entry, e.IntEntry)] == leaves
    for path, entry in kept.items():
        if isinstance(entry, e.Container):
            assert all(f"{path}/{name}" in kept for name in entry.components()), path


def test_choose_entries_takes_a_sequence_whole_or_not_at_all():
    with pytest.raises(RestoreError, match="m/b: a sequence can only be selected whole"):
        choose_entries(manifest(), ["m/b/0"], [], None)


def test_choose_entries_rename_moves_leaves():
    made = choose_entries(manifest(), ["m/a/*"], [], {"m/a": "n/deep"})
    assert (made["n/deep/w"], made["n/deep/x"]) == (e.IntEntry("1"), e.IntEntry("2"))
    assert not [path for path in made if path.startswith("m/a")]


def test_choose_entries_rename_of_an_unknown_name_raises():
    with pytest.raises(RestoreError, match=r"m/c is not in the checkpoint"):
        choose_entries(manifest(), [], [], {"m/c": "m/d"})
