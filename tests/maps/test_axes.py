"""Patterns of axes and grids: compared with an enumeration of all elements, for random patterns and boxes."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import TensorMap
from snapshot.maps.recipe import AxesPattern, Spec, Sum, TensorAxes, make_grid, solve_sizes
from snapshot.tensors.geometry import Box, Grid

NAMES = "abcdef"


@st.composite
def layouts(draw):
    """Sizes of names, and two ways to compose axes of them."""
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))
    sizes = {name: draw(st.integers(1, 4)) for name in names}

    def axes():
        order, groups = draw(st.permutations(names)), []
        for name in order:
            if groups and draw(st.booleans()):
                groups[-1].append(name)
            else:
                groups.append([name])
        return groups

    return sizes, axes(), axes()


def text_of(groups):
    return " ".join(group[0] if len(group) == 1 else f"({' '.join(group)})" for group in groups)


def place_of(groups, sizes, indices):
    """The index in a tensor of the element with these indices of names."""
    found = []
    for group in groups:
        index = 0
        for name in group:
            index = index * sizes[name] + indices[name]
        found.append(index)
    return tuple(found)


def shape_of(groups, sizes):
    return tuple(math.prod(sizes[name] for name in group) for group in groups)


def elements(sizes):
    for indices in itertools.product(*(range(size) for size in sizes.values())):
        yield dict(zip(sizes, indices, strict=True))


def boxes(draw, shape):
    offsets = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(offsets), tuple(draw(st.integers(0, size - at)) for at, size in zip(offsets, shape, strict=True)))


@settings(max_examples=300, deadline=None)
@given(layouts(), st.data())
def test_tensor_map_axes_grid_equals_the_pattern(layout, data):
    sizes, left, right = layout
    pattern = AxesPattern.parse(f"{text_of(left)} -> {text_of(right)}")
    grid = make_grid(pattern.sources[0], pattern.targets[0], sizes, (0, 0), ({}, {}))
    source = torch.arange(math.prod(sizes.values())).view(shape_of(left, sizes))
    target = torch.full(shape_of(right, sizes), -1)
    want = target.clone()
    for indices in elements(sizes):
        want[place_of(right, sizes, indices)] = source[place_of(left, sizes, indices)]
    zeros = (0,) * source.ndim, (0,) * target.ndim
    grid.view("target", target, zeros[1]).copy_(grid.view("source", source, zeros[0]))
    assert torch.equal(target, want)
    back = torch.full_like(source, -1)
    reverse = grid.reversed()
    reverse.view("target", back, zeros[0]).copy_(reverse.view("source", want, zeros[1]))
    assert torch.equal(back, source)

    # any box of either side, in parts with few other elements
    for side, tensor in (("target", want), ("source", source)):
        box = boxes(data.draw, tensor.shape)
        seen = torch.zeros(tensor.shape, dtype=torch.int)
        for clipped in grid.clip(side, box):
            for part in clipped.simplified().split(data.draw(st.integers(1, 8))):
                cover = part.cover("source")
                held = source[cover.slices()].contiguous()
                values = part.view("source", held, cover.offsets)
                assert torch.equal(values, part.view("target", want, zeros[1]))
                part.view(side, seen, zeros[side == "target"]).add_(1)
        inside = torch.zeros_like(seen)
        inside[box.slices()] = 1
        assert torch.equal(seen, inside)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_tensor_map_axes_sums_are_concatenations(lengths, groups, width, columns):
    terms = [f"t{number}" for number in range(len(lengths))]
    names = ", ".join(terms)
    axes = f"(g ({' + '.join(terms)}) d) c -> {', '.join(f'(g {term} d) c' for term in terms)}"
    sizes = {"g": groups, "d": width} | dict(zip(terms, lengths, strict=True))
    tensor_map = TensorMap([{"names": f"fused -> {names}", "axes": axes}], sizes=sizes)
    fused = torch.randn(groups * sum(lengths) * width, columns)
    apart = fused.view(groups, sum(lengths), width, columns).split(lengths, 1)
    apart = {term: each.reshape(-1, columns) for term, each in zip(terms, apart, strict=True)}
    assert_maps(tensor_map, {"fused": fused}, apart)
    assert_maps(tensor_map.reversed(), apart, {"fused": fused})


def assert_maps(tensor_map, sources, wanted):
    plan = tensor_map.plan({name: Spec("float32", tuple(each.shape)) for name, each in sources.items()})
    assert plan.targets.keys() == wanted.keys()
    for name, target in plan.targets.items():
        made = torch.full(target.shape, math.nan)
        assert sum(part.grid.numel for part in target.parts) == made.numel()
        for source, grid in target.parts:
            held = sources[source]
            grid.view("target", made, (0,) * made.ndim).copy_(grid.view("source", held, (0,) * held.ndim))
        assert torch.equal(made, wanted[name])


def test_tensor_map_axes_of_scalars_and_empty_tensors():
    for shape in ((), (0,), (3, 0, 2), (1, 1)):
        grid = Grid.identity(shape)
        for each in (grid, grid.simplified()):
            held, made = torch.randn(shape), torch.zeros(shape)
            each.view("target", made, (0,) * len(shape)).copy_(each.view("source", held, (0,) * len(shape)))
            assert torch.equal(held, made)
            assert each.cover("source").numel == held.numel()


@pytest.mark.parametrize(
    ("axes", "error"),
    [
        ("a b", "axes must have the form 'a b -> b a'"),
        ("a -> b -> c", "axes must have the form"),
        ("a b -> a", "b must be on both sides"),
        ("a a -> a", "a name must be used once in a tensor"),
        ("(a b -> a b", "a parenthesis is not closed"),
        ("a) -> a", r"unexpected '\)'"),
        ("(a + b) -> a", "must name a tensor for each term of the sum"),
        ("(a ()) -> a", "a term of a sum, or a group, is empty"),
        ("(a (b (c))) -> a b c", "parentheses are nested too deep"),
        ("a! -> a", "unexpected '!'"),
        ("(a ...) -> a ...", r"\.\.\. must be outside of parentheses"),
        ("a, b -> (a + b)", "must have 1 and 1 tensors, as the names do, got 2 and 1"),
    ],
)
def test_tensor_map_axes_that_are_wrong_are_refused(axes, error):
    with pytest.raises(ValueError, match=error):
        TensorMap([{"names": "x -> y", "axes": axes}])


QKV = Sum((("q",), ("k",), ("k",)))


@pytest.mark.parametrize(
    ("axes", "shape", "known", "found"),
    [
        ((("a",), ("b",)), (2, 3), {}, {"a": 2, "b": 3}),
        ((("a",), ("b",)), (0, 3), {}, {"a": 0, "b": 3}),
        ((("a", "b"),), (6,), {"a": 2}, {"a": 2, "b": 3}),
        ((("a", "b"), ("a",)), (6, 2), {}, {"a": 2, "b": 3}),
        (((QKV,), ("k",)), (10, 2), {}, {"q": 6, "k": 2}),
        (((QKV, "h"), ("h",)), (20, 2), {"q": 6}, {"q": 6, "k": 2, "h": 2}),
        (((QKV,),), (6,), {"q": 6}, {"q": 6, "k": 0}),
        (((QKV,),), (5,), {"q": 6}, "no size of k makes an axis of 5"),
        (((QKV,),), (9,), {"q": 6}, "no size of k makes an axis of 9"),
        ((("a", "b"),), (6,), {"a": 4}, "no size of b makes an axis of 6"),
        ((("a", "b"),), (0,), {"a": 0}, "no size of b"),
        ((("a", "b"),), (6,), {}, "sizes of a, b do not follow"),
        ((("a", "b"), ("b", "c"), ("d",)), (6, 6, 1), {}, "sizes of a, b, c do not follow"),
        ((("a",), ("b",)), (2, 2, 2), {}, "must have 2 axes"),
        ((("a",),), (2,), {"a": 3}, "an axis must be 3, got 2"),
        ((("a",), ("a",)), (2, 3), {}, "an axis must be 2, got 3"),
    ],
)
def test_solve_sizes_finds_what_follows_from_a_shape(axes, shape, known, found):
    sizes = dict(known)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=found):
            solve_sizes(TensorAxes(axes), shape, sizes)
        return
    solve_sizes(TensorAxes(axes), shape, sizes)
    assert sizes == found
    assert TensorAxes(axes).shape(sizes) == shape
