"""Recipes: which tensors of one layout become which tensors of another, by patterns of axes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from snapshot.maps.names import NamePattern, split_names
from snapshot.tensors.geometry import Factor, Grid, Shape

# Patterns of axes: how the axes of one layout are composed of those of another.
#
# `(g (q + k + v) d) c -> (g q d) c, (g k d) c, (g v d) c` splits a fused projection. A name stands for a run of
# indices. Names in parentheses are one axis, from coarse to fine. A sum is a concatenation.

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


# Recipes

NOTHING = "-"
"""In place of a name: the part of a sum that is not kept, such as padding. In the reverse, that part is empty."""
_NUMBER = re.compile("0|[1-9][0-9]{0,6}", re.ASCII)


MOST_TARGETS = 1 << 20
"""Maximum number of tensors that an axis is taken apart into. A hostile shape may declare any number."""


class Spec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    shape: Shape


class RecipePart(NamedTuple):
    """The elements of a target that come from one source."""

    source: str
    grid: Grid


class RecipeTarget(NamedTuple):
    """A tensor that a map makes."""

    dtype: str
    shape: Shape
    parts: tuple[RecipePart, ...]

    @staticmethod
    def same(name: str, spec: Spec) -> RecipeTarget:
        """Return the target that equals a source."""
        return RecipeTarget(spec.dtype, spec.shape, (RecipePart(name, Grid.identity(spec.shape)),))


class Made(NamedTuple):
    """The result of a recipe for one choice of its placeholders."""

    targets: dict[str, RecipeTarget]
    ties: dict[str, str]
    """Names of further targets that are the same tensor as another one."""
    equal: list[tuple[str, str]]
    """Pairs of sources that must hold the same values. Only the first of each is used."""


Found = Mapping[tuple[int, tuple[str, ...]], str]
"""The sources of one choice: (number of the name pattern, values of the stacked placeholders) -> name."""


class Recipe:
    """One rule of a map."""

    def __init__(
        self,
        sources: Sequence[NamePattern],
        targets: Sequence[NamePattern],
        axes: AxesPattern | None,
        sizes: Mapping[str, Any],
        dtype: str | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.targets = tuple(targets)
        """Empty if the sources are dropped."""
        self.axes = axes
        self.sizes = dict(sizes)
        self.dtype = dtype
        left = {name for each in sources for name in each.placeholders}
        right = {name for each in targets for name in each.placeholders}
        self.free = tuple(sorted(left & right)) if targets else tuple(sorted(left))
        """Placeholders of both sides: each choice of them is a case of its own."""
        self.stacked = tuple(sorted(left - set(self.free)))
        """Placeholders of the sources that become an axis."""
        self.unstacked = tuple(sorted(right - left))
        """Placeholders of the targets that were an axis."""
        self._check()

    @staticmethod
    def parse(rule: str | Mapping[str, Any], sizes: Mapping[str, Any]) -> Recipe:
        """Parse a rule: a text of the form `old -> new`, or a mapping with more fields.

        >>> Recipe.parse("a.{i} -> b.{i}", {}).free
        ('i',)
        """
        if not isinstance(rule, (str, Mapping)):
            raise ValueError(f"a rule must be a text or a mapping, got {rule!r}")
        fields: dict[str, Any] = {"names": rule} if isinstance(rule, str) else dict(rule)
        for key in ("drop", "drop_in_reverse"):
            if key in fields:
                names = [NamePattern.compile(each) for each in _texts(key, fields.pop(key))]
                _expect_no_more(fields, rule)
                return Recipe(names, (), None, {}) if key == "drop" else Recipe((), names, None, {})
        text = fields.pop("names", None)
        if not isinstance(text, str) or text.count("->") != 1:
            raise ValueError(f"a rule must have names of the form 'old -> new', or drop, got {rule!r}")
        left, _, right = text.partition("->")
        axes = fields.pop("axes", None)
        own = fields.pop("sizes", {})
        dtype = fields.pop("dtype", None)
        _expect_no_more(fields, rule)
        if axes is not None and not isinstance(axes, str):
            raise ValueError(f"{text!r}: axes must be a text, got {axes!r}")
        if dtype is not None and not (isinstance(dtype, str) and _can_cast_to(dtype)):
            raise ValueError(f"{text!r}: dtype must be a floating-point dtype such as 'bfloat16', got {dtype!r}")
        return Recipe(
            [NamePattern.compile(each) for each in split_names(left)],
            [NamePattern.compile(each) for each in split_names(right)],
            None if axes is None else AxesPattern.parse(axes),
            {**sizes, **check_sizes(own)},
            dtype,
        )

    def __repr__(self) -> str:
        names = [", ".join(each.text for each in side) for side in (self.sources, self.targets)]
        more = [f"axes={self.axes.text!r}"] if self.axes is not None else []
        more += [f"sizes={dict(sorted(self.sizes.items()))}"] if self.sizes else []
        more += [f"dtype={self.dtype!r}"] if self.dtype is not None else []
        return f"Recipe({', '.join([repr(' -> '.join(names)), *more])})"

    def _check(self) -> None:
        if not (self.targets and self.sources):
            return
        for side in (self.sources, self.targets):
            kinds = {frozenset(each.placeholders) for each in side if each.text != NOTHING}
            if len(kinds) > 1:
                raise ValueError(f"{self}: the names of one side must have the same placeholders")
        if self.axes is None:
            if NOTHING in {each.text for each in (*self.sources, *self.targets)}:
                raise ValueError(f"{self}: {NOTHING} must have axes: it is the rest of a sum")
            if self.stacked or self.unstacked:
                name = (self.stacked + self.unstacked)[0]
                raise ValueError(f"{self}: {{{name}}} must be in the names of both sides, or a name in axes")
            if min(len(self.sources), len(self.targets)) > 1:
                raise ValueError(f"{self}: one side must have a single name")
            return
        stacked = frozenset(self.stacked), frozenset(self.unstacked)
        try:
            self.axes.check((len(self.sources), len(self.targets)), stacked)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from None

    def __str__(self) -> str:
        left, right = (", ".join(each.text for each in side) for side in (self.sources, self.targets))
        if not self.targets:
            return f"drop: {left}"
        return f"{left} -> {right}" if self.sources else f"drop_in_reverse: {right}"

    def reversed(self) -> Recipe:
        """Return the rule of the reverse. Dropped tensors do not come back."""
        return Recipe(self.targets, self.sources, None if self.axes is None else self.axes.reversed(), self.sizes)

    def find(self, name: str) -> tuple[tuple[str, ...], tuple[int, tuple[str, ...]]] | None:
        """Return the case that a source belongs to, and its place there; None if its name does not match."""
        for number, pattern in enumerate(self.sources):
            values = pattern.match(name)
            if values is not None and pattern.text != NOTHING:
                case = tuple(values.get(each, "") for each in self.free)
                return case, (number, tuple(values[each] for each in self.stacked))
        return None

    def make(self, case: Sequence[str], found: Found, specs: Mapping[str, Spec]) -> Made:
        """Return the targets of one case. Raise ValueError if the sources do not fit."""
        if not self.targets:
            return Made({}, {}, [])
        values = dict(zip(self.free, case, strict=True))
        if self.axes is None:
            return self._renamed(values, found, specs)
        return self._assembled(self.axes, values, found, specs)

    def _renamed(self, values: Mapping[str, str], found: Found, specs: Mapping[str, Spec]) -> Made:
        names = [found[place] for place in sorted(found)]
        first, *others = names
        spec = specs[first]
        for other in others:
            if specs[other] != spec:
                raise ValueError(f"{other} must equal {first}, but is {_text(specs[other])} instead of {_text(spec)}")
        target, *more = [each.fill(values) for each in self.targets]
        made = RecipeTarget.same(first, spec)._replace(dtype=self._cast(spec.dtype))
        return Made({target: made}, dict.fromkeys(more, target), [(first, other) for other in others])

    def _cast(self, dtype: str) -> str:
        from snapshot.tensors.memory import BY_NAME

        known = BY_NAME.get(dtype)
        return self.dtype if self.dtype is not None and known is not None and known.is_floating_point else dtype

    def _assembled(self, axes: AxesPattern, values: Mapping[str, str], found: Found, specs: Mapping[str, Spec]) -> Made:
        first = specs[next(iter(found.values()))]
        extra = len(first.shape) - sum(axis != ("...",) for axis in axes.sources[0].axes)
        sources = [each.expanded(max(0, extra)) for each in axes.sources]
        targets = [each.expanded(max(0, extra)) for each in axes.targets]
        sizes = {name: int(name) for each in (*sources, *targets) for name in each.names() if name.isdecimal()}
        sizes |= self.sizes | self._count_stacked(values, found)
        for (number, _), name in sorted(found.items()):
            if specs[name].dtype != first.dtype:
                raise ValueError(f"{name} must be {first.dtype} as the others are, got {specs[name].dtype}")
            try:
                solve_sizes(sources[number], specs[name].shape, sizes)
            except ValueError as error:
                held = list(specs[name].shape)
                raise ValueError(f"{name}: shape {held} does not fit {axes.text!r}: {error}") from None
        sizes |= self._empty_sizes(sources)
        made = {}
        for number, pattern in enumerate(self.targets):
            if pattern.text == NOTHING:
                continue
            target = targets[number]
            shape = target.shape(sizes)
            count = math.prod(sizes[each] for each in self.unstacked)
            if not 1 <= count <= MOST_TARGETS:
                raise ValueError(f"{pattern.text} would name {count:,} tensors")
            for indices in product(*(range(sizes[each]) for each in self.unstacked)):
                fixed = dict(zip(self.unstacked, indices, strict=True))
                name = pattern.fill({**values, **{each: str(index) for each, index in fixed.items()}})
                parts = []
                for (place, numbers), source in sorted(found.items()):
                    at = dict(zip(self.stacked, map(int, numbers), strict=True))
                    grid = make_grid(sources[place], target, sizes, (number, place), (fixed, at))
                    parts.append(RecipePart(source, grid))
                if sum(part.grid.numel for part in parts) != math.prod(shape):
                    raise ValueError(f"{name}: nothing fills the part that {NOTHING} stands for")
                made[name] = RecipeTarget(self._cast(first.dtype), shape, tuple(parts))
        return Made(made, {}, [])

    def _empty_sizes(self, sources: Sequence[TensorAxes]) -> dict[str, int]:
        """Return the sizes of names that only a missing part has: it is empty."""
        used: set[str] = set()
        unused: set[str] = set()
        for pattern, axes in zip(self.sources, sources, strict=True):
            (unused if pattern.text == NOTHING else used).update(axes.names())
        return {name: 0 for name in unused - used if not name.isdecimal()}

    def _count_stacked(self, values: Mapping[str, str], found: Found) -> dict[str, int]:
        """Return how many tensors are stacked along each axis. Raise if one is missing."""
        counts: dict[str, int] = {}
        for position, name in enumerate(self.stacked):
            seen = {numbers[position] for _, numbers in found}
            wrong = sorted(each for each in seen if not _NUMBER.fullmatch(each))
            if wrong:
                raise ValueError(f"{{{name}}} must be a number, got {wrong[0]!r}")
            most = max(map(int, seen)) + 1
            counts[name] = self.sizes.get(name, most)
            if most > counts[name]:
                raise ValueError(f"{{{name}}} must be below {counts[name]}, got {most - 1}")
        # one of the first len(found) + 1 numbers is missing if there are more: a range of any length needs memory
        for numbers in product(*(range(min(count, len(found) + 1)) for count in counts.values())):
            place = tuple(map(str, numbers))
            for number, pattern in enumerate(self.sources):
                if pattern.text != NOTHING and (number, place) not in found:
                    raise ValueError(f"{pattern.fill({**values, **dict(zip(counts, place, strict=True))})} is missing")
        return counts


def check_sizes(sizes: Any) -> dict[str, int]:
    """Return sizes by name. Raise ValueError unless they are positive."""
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be a mapping, got {sizes!r}")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"the size of {name!r} must be a positive int, got {size!r}")
    return dict(sizes)


def _texts(what: str, value: Any) -> list[str]:
    names = split_names(value) if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise ValueError(f"{what} must be a name or a list of names, got {value!r}")
    return names


def _text(spec: Spec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _can_cast_to(dtype: str) -> bool:
    from snapshot.tensors.memory import BY_NAME, is_castable

    return dtype in BY_NAME and is_castable(BY_NAME[dtype])


def _expect_no_more(fields: Mapping[str, Any], rule: Any) -> None:
    if fields:
        odd = min(fields, key=str)
        raise ValueError(f"a rule has names, axes, sizes and dtype, or drop; got {odd!r} in {rule!r}")
