"""Globs over logical paths."""

import pytest

from snapshot.plan.names import compile_glob, find_unmatched, matcher


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("model", "model", True),
        ("model", "model/w", True),
        ("model", "model2", False),
        ("model/*", "model/a/b", True),
        ("model/*/b", "model/a/b", True),
        ("model/*/b", "model/a/c/b", False),
        ("model/**/b", "model/a/c/b", True),
        ("model/**/b", "model/b", True),
        ("**", "anything/at/all", True),
        ("**/exp_avg", "optim/state/0/exp_avg", True),
        ("**/exp_avg", "optim/state/0/exp_avg_sq", False),
        ("*.weight", "layer.weight", True),
        ("m/layer.?.w", "m/layer.3.w", True),
        ("m/layer.[0-2].w", "m/layer.3.w", False),
        ("m/layer.[!0-2].w", "m/layer.3.w", True),
        ("m/layer.[!0-2].w", "m/layer.0.w", False),
        ("m/layer.[!02].w", "m/layer.0.w", False),
        ("m/[\\d].w", "m/d.w", True),
        ("m/[\\d].w", "m/5.w", False),
        ("m/w[", "m/w[", True),
        ("a.b", "axb", False),
        ("**", "with\nnewline", True),
    ],
)
def test_compile_glob_matches_paths(glob, path, matches):
    assert bool(compile_glob(glob).match(path)) is matches


def test_matcher_refuses_a_single_string():
    with pytest.raises(TypeError, match="one string"):
        matcher("model")


def test_find_unmatched_returns_globs_without_a_match():
    assert find_unmatched(["a", "b/*"], ["a", "c"]) == ["b/*"]
