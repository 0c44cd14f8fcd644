"""Patterns of axes: how the axes of one layout are composed of those of another.

`(g (q + k + v) d) c -> (g q d) c, (g k d) c, (g v d) c` splits a fused projection. A name stands for a run of
indices. Names in parentheses are one axis, from coarse to fine. A sum is a concatenation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from snapshot.maps.grid import Factor, Grid
from snapshot.tensors.geometry import Shape

_WORD = re.compile(r"\s*(\.\.\.|[A-Za-z_][A-Za-z0-9_]*|[0-9]+|[()+,])")

Term = tuple[str, ...]
"""Names from coarse to fine. A number is a name with that size."""


class Sum(NamedTuple):
    """A concatenation along part of an axis: one term for each tensor of the other side."""

    terms: tuple[Term, ...]


Axis = tuple[str | Sum, ...]


class TensorAxes(NamedTuple):
    """The axes of one tensor."""

    axes: tuple[Axis, ...]

    def names(self) -> Iterator[str]:
        """Yield all names, as often as they appear."""
        for axis in self.axes:
            for atom in axis:
                if isinstance(atom, Sum):
                    for term in atom.terms:
                        yield from term
                else:
                    yield atom

    @property
    def sum(self) -> Sum | None:
        """The sum among the axes, if there is one."""
        return next((atom for axis in self.axes for atom in axis if isinstance(atom, Sum)), None)

    def expanded(self, count: int) -> TensorAxes:
        """Return the axes with `...` replaced by `count` names."""
        made: list[Axis] = []
        for axis in self.axes:
            made += [(f"...{number}",) for number in range(count)] if axis == ("...",) else [axis]
        return TensorAxes(tuple(made))

    def extent(self, axis: Axis, sizes: Mapping[str, int]) -> int:
        """Return the size of an axis."""
        total = 1
        for atom in axis:
            total *= sum(_product(term, sizes) for term in atom.terms) if isinstance(atom, Sum) else sizes[atom]
        return total

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        """Return the tensor's shape."""
        return tuple(self.extent(axis, sizes) for axis in self.axes)

    def places(self, sizes: Mapping[str, int], term: int, fixed: Mapping[str, int]) -> _Places:
        """Return the place of each name in the tensor.

        `term` chooses the term of the sum. The names in `fixed` have a single index.
        """
        steps: dict[str, tuple[int, int]] = {}
        begins = []
        for number, axis in enumerate(self.axes):
            begin, step = 0, 1
            for atom in reversed(axis):
                chosen: Term = (atom,) if isinstance(atom, str) else atom.terms[term]
                inner = step
                for name in reversed(chosen):
                    if name in fixed:
                        begin += fixed[name] * inner
                    else:
                        steps[name] = (number, inner)
                    inner *= sizes[name]
                if isinstance(atom, Sum):
                    lengths = [_product(each, sizes) for each in atom.terms]
                    begin += sum(lengths[:term]) * step
                    step *= sum(lengths)
                else:
                    step = inner
            begins.append(begin)
        return _Places(tuple(begins), steps)


class _Places(NamedTuple):
    begins: Shape
    steps: dict[str, tuple[int, int]]


def make_grid(
    source: TensorAxes,
    target: TensorAxes,
    sizes: Mapping[str, int],
    terms: tuple[int, int],
    fixed: tuple[Mapping[str, int], Mapping[str, int]],
) -> Grid:
    """Return the grid between two tensors.

    `terms`: the term of the source's sum, and of the target's. `fixed`: names that have a single index on that side.
    """
    here = source.places(sizes, terms[0], fixed[0])
    there = target.places(sizes, terms[1], fixed[1])
    factors = tuple(
        Factor(sizes[name], step, there.steps[name]) for name, step in here.steps.items() if name in there.steps
    )
    return Grid(here.begins, there.begins, factors).simplified()


class AxesPattern(NamedTuple):
    """The axes of the tensors on both sides."""

    text: str
    sources: tuple[TensorAxes, ...]
    targets: tuple[TensorAxes, ...]

    @staticmethod
    def parse(text: str) -> AxesPattern:
        """Parse a pattern.

        >>> AxesPattern.parse("a b -> b a").targets
        (TensorAxes(axes=(('b',), ('a',))),)
        """
        left, arrow, right = text.partition("->")
        if not arrow or "->" in right:
            raise ValueError(f"axes must have the form 'a b -> b a', got {text!r}")
        return AxesPattern(text, _parse_tensors(left, text), _parse_tensors(right, text))

    def reversed(self) -> AxesPattern:
        """Return the pattern of the reverse."""
        left, _, right = self.text.partition("->")
        return AxesPattern(f"{right.strip()} -> {left.strip()}", self.targets, self.sources)

    def check(self, counts: tuple[int, int], stacked: tuple[frozenset[str], frozenset[str]]) -> None:
        """Raise unless the pattern fits the numbers of names, and both sides of each pair have the same names.

        `stacked`: the names that number tensors of this side, and are axes of the other one.
        """
        if (len(self.sources), len(self.targets)) != counts:
            raise ValueError(
                f"axes {self.text!r} must have {counts[0]} and {counts[1]} tensors, as the names do, "
                f"got {len(self.sources)} and {len(self.targets)}"
            )
        sums = [each.sum for each in (*self.sources, *self.targets) if each.sum is not None]
        several = max(counts)
        if several > 1 and (min(counts) > 1 or len(sums) != 1 or len(sums[0].terms) != several):
            raise ValueError(f"axes {self.text!r} must have one tensor with a sum of {several} terms on one side")
        if several == 1 and sums:
            raise ValueError(f"axes {self.text!r} must name a tensor for each term of the sum")
        for number in range(several):
            source, target = self.pair(number)
            left = _names_of_pair(source, number) - stacked[1]
            right = _names_of_pair(target, number) - stacked[0]
            if left != right:
                odd = ", ".join(sorted(left ^ right))
                raise ValueError(f"axes {self.text!r}: {odd} must be on both sides")
            for numbers, of in ((stacked[0], target), (stacked[1], source)):
                for name in numbers - set(of.names()):
                    raise ValueError(f"axes {self.text!r}: {name} numbers the tensors, and must be an axis there")
        for each in (*self.sources, *self.targets):
            names = [name for name in each.names() if name != "1"]
            terms = len(each.sum.terms) if each.sum is not None else 1
            for number in range(terms):
                own = list(_names_in_term(each, number))
                if len(own) != len(set(own)):
                    raise ValueError(f"axes {self.text!r}: a name must be used once in a tensor")
            if "..." in names and ("...",) not in each.axes:
                raise ValueError(f"axes {self.text!r}: ... must be an axis of its own")

    def pair(self, number: int) -> tuple[TensorAxes, TensorAxes]:
        """Return the axes of the source and the target with a number: one side may have a single tensor."""
        return self.sources[min(number, len(self.sources) - 1)], self.targets[min(number, len(self.targets) - 1)]


def solve_sizes(axes: TensorAxes, shape: Shape, sizes: dict[str, int]) -> None:
    """Add the sizes that follow from a tensor's shape. Raise ValueError if the shape does not fit."""
    if len(axes.axes) != len(shape):
        raise ValueError(f"must have {len(axes.axes)} axes")
    rest = list(zip(axes.axes, shape, strict=True))
    while rest:
        later = []
        for axis, length in rest:
            unknown = {name for name in TensorAxes((axis,)).names() if name not in sizes}
            if len(unknown) > 1:
                later.append((axis, length))
                continue
            if unknown:
                (name,) = unknown
                none = axes.extent(axis, {**sizes, name: 0})
                once = axes.extent(axis, {**sizes, name: 1}) - none
                count, left = divmod(length - none, once) if once else (0, 1)
                if left or count < 0:
                    raise ValueError(f"no size of {name} makes an axis of {length}{_given(axis, sizes)}")
                sizes[name] = count
            elif axes.extent(axis, sizes) != length:
                extent = axes.extent(axis, sizes)
                raise ValueError(f"an axis must be {extent}, got {length}{_given(axis, sizes)}")
        if len(later) == len(rest):
            names = sorted({name for axis, _ in later for name in TensorAxes((axis,)).names()} - sizes.keys())
            raise ValueError(f"the sizes of {', '.join(names)} do not follow from it; give all but one of them")
        rest = later


def _given(axis: Axis, sizes: Mapping[str, int]) -> str:
    known = dict.fromkeys(name for name in TensorAxes((axis,)).names() if name in sizes and not name.isdecimal())
    return f", with {', '.join(f'{name}={sizes[name]}' for name in known)}" if known else ""


def _product(term: Term, sizes: Mapping[str, int]) -> int:
    total = 1
    for name in term:
        total *= sizes[name]
    return total


def _names_in_term(axes: TensorAxes, number: int) -> Iterator[str]:
    for axis in axes.axes:
        for atom in axis:
            for name in (atom,) if isinstance(atom, str) else atom.terms[number]:
                if name != "1":
                    yield name


def _names_of_pair(axes: TensorAxes, number: int) -> set[str]:
    return set(_names_in_term(axes, number))


def _parse_tensors(text: str, whole: str) -> tuple[TensorAxes, ...]:
    words, position = [], 0
    text = text.rstrip()
    while position < len(text):
        found = _WORD.match(text, position)
        if found is None:
            raise ValueError(f"axes {whole!r}: unexpected {text[position:].strip()[:20]!r}")
        words.append(found[1])
        position = found.end()
    groups: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word == "(") - (word == ")")
        if word == "," and depth == 0:
            groups.append([])
        else:
            groups[-1].append(word)
    return tuple(TensorAxes(tuple(_parse_axes(group, whole))) for group in groups)


def _parse_axes(words: list[str], whole: str) -> Iterator[Axis]:
    rest = iter(words)
    for word in rest:
        if word == "(":
            yield _parse_group(rest, whole)
        elif word in ")+,":
            raise ValueError(f"axes {whole!r}: unexpected {word!r}")
        else:
            yield (word,)


def _parse_group(rest: Iterator[str], whole: str, *, inside: bool = False) -> Axis:
    """Parse up to the closing parenthesis: a product of names, or a sum of products."""
    terms: list[list[str | Sum]] = [[]]
    for word in rest:
        if word == ")":
            break
        if word == "+":
            terms.append([])
        elif word == "(":
            if inside:
                raise ValueError(f"axes {whole!r}: parentheses are nested too deep")
            terms[-1] += _parse_group(rest, whole, inside=True)
        elif word in ("...", ","):
            raise ValueError(f"axes {whole!r}: {word} must be outside of parentheses")
        else:
            terms[-1].append(word)
    else:
        raise ValueError(f"axes {whole!r}: a parenthesis is not closed")
    if not all(terms):
        raise ValueError(f"axes {whole!r}: a term of a sum, or a group, is empty")
    if len(terms) == 1:
        return tuple(terms[0])
    plain = [tuple(name for name in term if isinstance(name, str)) for term in terms]
    if [len(term) for term in plain] != [len(term) for term in terms]:
        raise ValueError(f"axes {whole!r}: there must be at most one sum")
    return (Sum(tuple(plain)),)
