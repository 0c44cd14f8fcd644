"""Names of a snapshot and of an application: wrappers that are told from submodules, prefixes and globs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.plan.names import WRAPPERS, compile_rename, match_names

PARTS = ["a", "b", "layers", "0", "1"]
LEAVES = ["weight", "bias"]


@st.composite
def models(draw):
    """The names of a model: a set of dotted paths of which none leads through another's leaf."""
    paths = draw(st.lists(st.lists(st.sampled_from(PARTS), max_size=4).map(tuple), min_size=1, max_size=8, unique=True))
    return [(*path, leaf) for path in paths for leaf in LEAVES]


def wrap(names, places):
    """The same model with wrappers: place (a path of the plain model) -> the wrappers that stand there."""

    def wrapped(name):
        made = []
        for depth in range(len(name)):
            made += places.get(name[:depth], ())
            made.append(name[depth])
        return ".".join(made)

    return {".".join(name): wrapped(name) for name in names}


@st.composite
def wrapped_models(draw):
    names = draw(models())
    inner = sorted({name[:depth] for name in names for depth in range(len(name))})
    places = st.dictionaries(
        st.sampled_from(inner), st.lists(st.sampled_from(WRAPPERS), min_size=1, max_size=2), max_size=3
    )
    return wrap(names, draw(places)), wrap(names, draw(places))


@given(wrapped_models())
def test_match_names_finds_names_with_and_without_wrapper_prefixes(models):
    saved, live = models
    matched = match_names(saved.values(), live.values())
    assert not matched.ambiguous
    for plain, name in saved.items():
        assert matched.names.get(name, name) == live[plain]


@given(models(), models())
def test_match_names_does_not_guess_without_wrapper_prefixes(one, other):
    matched = match_names([".".join(name) for name in one], [".".join(name) for name in other])
    assert not matched.names
    assert not matched.ambiguous


def test_match_names_is_quick_for_long_or_many_names():
    deep = [".".join(["module"] * 3000 + ["w"])]
    assert match_names(deep, ["w"]).names == {deep[0]: "w"}
    saved = [f"module.layers.{i}.w{j}" for i in range(300) for j in range(100)]
    matched = match_names(saved, [name.removeprefix("module.") for name in saved])
    assert len(matched.names) == len(saved)


@pytest.mark.parametrize(
    ("rename", "path", "expected"),
    [
        ({"m/a": "m/b"}, "m/a", "m/b"),
        ({"m/a": "m/b"}, "m/a/deep", "m/b/deep"),
        ({"m/enc": "m/e"}, "m/enc.0.w", "m/e.0.w"),
        ({"m/enc": "m/e"}, "m/encoder.w", "m/encoder.w"),
        ({"m/enc.0": "m/first", "m/enc": "m/e"}, "m/enc.0.w", "m/first.w"),
        ({"m/h.*.w": "m/l.*.w"}, "m/h.3.w", "m/l.3.w"),
        ({"**/w": "x/**/w"}, "m/deep/w", None),
        ({"**/deep/w": "**/flat/w"}, "m/deep/w", "m/flat/w"),
        ({"m/**": "n/**"}, "m/deep/w", "n/deep/w"),
        ({"m/literal*": "m/star"}, "m/literal*", "m/star"),
        ({"m/h.[0-3].*": "m/first.*"}, "m/h.3.w", "m/first.w"),
    ],
)
def test_compile_rename_of_prefixes_and_globs(rename, path, expected):
    known = ["m", "m/a", "m/a/deep", "m/enc.0.w", "m/encoder.w", "m/h.3.w", "m/deep", "m/deep/w", "m/literal*"]
    if expected is None:
        with pytest.raises(ValueError, match="same wildcards"):
            compile_rename({"**/w": "x/w"}, known)
        return
    change, unmatched = compile_rename(rename, known)
    assert not unmatched
    assert change(path) == expected
