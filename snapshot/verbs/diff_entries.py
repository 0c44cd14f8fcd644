"""Comparison of two entries: the differences in the manifests, and the tensors that must be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshot.formats.foreign import is_packed
from snapshot.formats.unpickling import is_refused
from snapshot.manifest import entries as e
from snapshot.manifest.counting import is_leaf
from snapshot.manifest.scalars import Scalar
from snapshot.text import counted
from snapshot.verbs.diff_bytes import Pair, as_bytes
from snapshot.verbs.diff_stats import Numbers, are_comparable
from snapshot.verbs.select import clean_extra

LONGEST = 60
"""The maximum number of characters of a value that are shown."""
NO_NUMBERS = "no numbers for this kind"
"""The message if the size of a difference was requested but is undefined."""


@dataclass
class EntryDifference:
    """The differences of an entry."""

    what: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    counts: int = 1
    """True if it counts as an entry, unlike containers with contents."""
    numberless: bool = False
    """True if the size of the difference was requested, but is undefined for this kind."""

    def add(self, what: str, detail: str) -> None:
        """Add a difference."""
        self.what.append(what)
        self.details.append(detail)


def kind_of(entry: e.Entry) -> str:
    """Return the readable type of an entry. All tensors are `Tensor`, however they are split."""
    if isinstance(entry, e.TENSORS):
        return "Tensor"
    return entry.kind if isinstance(entry, e.TensorPartsEntry) else entry.type


def value_text(entry: e.Entry) -> str:
    """Return a short description of an entry."""
    if isinstance(entry, Scalar):
        text = entry.readable or entry.serialized_value
        return f"{kind_of(entry)} {text[:LONGEST]}{'...' if len(text) > LONGEST else ''}"
    if isinstance(entry, (*e.TENSORS, e.NDArrayEntry)):
        return f"{entry.dtype}{list(entry.shape)}"
    if isinstance(entry, e.ObjectEntry):
        return f"{entry.obj_type}, {counted(entry.nbytes, 'byte')}"
    return kind_of(entry)


def compare_entries(
    path: str, a: Any, b: Any, values: bool, *, same_format: bool
) -> tuple[EntryDifference, list[Pair]]:
    """Return the differences of two entries, and the pairs of tensors that must be read to complete them."""
    found = EntryDifference(counts=int(is_leaf(b)))
    pairs: list[Pair] = []
    if kind_of(a) != kind_of(b):
        found.add("kind", f"{value_text(a)} -> {value_text(b)}")
    elif isinstance(a, e.Container):
        _compare_containers(found, a, b, same_format)
    elif isinstance(a, Scalar):
        if a.identity != b.identity:
            found.add("value", _compare_kinds(a, b))
    elif isinstance(a, e.TENSORS):
        _compare_tensors(found, pairs, path, a, b=b, values=values)
    elif isinstance(a, e.NDArrayEntry):
        _compare_arrays(found, pairs, path, a, b=b, values=values)
    elif isinstance(a, e.TensorPartsEntry):
        _compare_parts(found, pairs, path, a, b=b, values=values)
    else:
        _compare_objects(found, pairs, path, a, b)
    return found, pairs


def _compare_kinds(a: Scalar, b: Scalar) -> str:
    """Return two values as short text; for long values, the text around the first difference."""
    here, there = (each.readable or each.serialized_value for each in (a, b))
    if here == there:  # equal readable forms, but different stored values
        here, there = (each.serialized_value for each in (a, b))
    if max(len(here), len(there)) <= LONGEST:
        return f"{kind_of(a)} {here} -> {kind_of(b)} {there}"
    alike = (x == y for x, y in zip(here, there, strict=False))
    first = next((i for i, same in enumerate(alike) if not same), min(len(here), len(there)))
    begin = max(0, first - LONGEST // 3)
    texts = []
    for text in (here, there):
        cut = text[begin : begin + LONGEST]
        texts.append(f"{'...' * (begin > 0)}{cut}{'...' * (begin + LONGEST < len(text))} ({len(text):,} characters)")
    return f"{kind_of(a)} {texts[0]} -> {texts[1]}, from character {first:,} on"


def _compare_containers(found: EntryDifference, a: e.Container, b: e.Container, same_format: bool) -> None:
    """Compare the properties of containers that their children do not show: order, length, key types and settings."""
    if isinstance(a, e.DictEntry) and isinstance(b, e.DictEntry):
        here, there = (dict(zip(each.components(), each.keys, strict=True)) for each in (a, b))
        both = [name for name in here if name in there]
        if any(here[name] != there[name] for name in both):
            found.add("keys", "keys of other types")
        if both != [name for name in there if name in here]:
            found.add("order", "keys in another order")
    elif a.width != b.width:
        found.add("length", f"{a.width} -> {b.width} elements")
    long = ("context", *(("module_versions",) if same_format else ()))
    for name in ("maxlen", "factory", "obj_type", "dtype", "shape", "requires_grad", *long):
        before, after = getattr(a, name, None), getattr(b, name, None)
        if before != after:
            what = "class" if name == "obj_type" else name
            found.add(what, what if name in long else f"{what} {before} -> {after}")


def _compare_tensors(found: EntryDifference, pairs: list[Pair], path: str, a: Any, *, b: Any, values: bool) -> None:
    if (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)):
        found.what += [name for name in ("dtype", "shape") if getattr(a, name) != getattr(b, name)]
        found.details.append(f"{value_text(a)} -> {value_text(b)}")
    here, there = (clean_extra(each) or e.PLAIN for each in (a, b))
    for name in ("stride_order", "subclass", "requires_grad"):
        before, after = getattr(here, name), getattr(there, name)
        if before != after:
            found.add(name, f"{name} {before} -> {after}")
    if tuple(a.shape) == tuple(b.shape):
        _compare_bytes(found, pairs, path, a, b=b, values=values)


def _compare_bytes(found: EntryDifference, pairs: list[Pair], path: str, a: Any, *, b: Any, values: bool) -> None:
    """Compare the bytes of two tensors of one shape by digests, or add them to the pairs to read."""
    differs = True if a.dtype != b.dtype else by_digests(a, b)
    if differs and a.dtype == b.dtype:
        found.add("bytes", "")
    if not math.prod(a.shape):
        return
    numbers = values and are_comparable(a.dtype) and are_comparable(b.dtype)
    if differs is None or (differs and numbers):
        made = Numbers(a.dtype, b.dtype) if numbers else None
        pairs.append(Pair(path, a, b, a.dtype if made is None else made.dtype, made, cast=a.dtype != b.dtype))
    found.numberless |= values and not numbers


def by_digests(a: Any, b: Any) -> bool | None:
    """Return True if two tensors of one dtype and shape differ by their digests, or None if digests cannot tell.

    A digest may be missing, or the tensors may be split differently.
    """
    before, after = _digests_of(a), _digests_of(b)
    if before is None or after is None or before.keys() != after.keys():
        return None
    return before != after


def _digests_of(entry: e.AnyTensor) -> dict[Any, str] | None:
    made = {}
    for box, stored in entry.pieces():
        if not box.numel:
            continue
        if stored.digest is None or is_packed(stored):
            return None
        made[box] = stored.digest
    return made


def _compare_arrays(
    found: EntryDifference, pairs: list[Pair], path: str, a: e.NDArrayEntry, *, b: e.NDArrayEntry, values: bool
) -> None:
    for name in ("dtype", "shape", "order", "scalar"):
        before, after = getattr(a, name), getattr(b, name)
        if before != after:
            found.add(name, f"{name} {before} -> {after}")
    if (a.data.dtype, tuple(a.data.shape)) == (b.data.dtype, tuple(b.data.shape)):
        plain = isinstance(a.dtype, str) and a.dtype[1:2] in "biufc" and a.data.shape == a.shape
        numbers = plain and a.dtype == b.dtype
        _compare_bytes(found, pairs, path, a.data, b=b.data, values=values and numbers)
        found.numberless |= values and not numbers


def _compare_parts(
    found: EntryDifference, pairs: list[Pair], path: str, a: e.TensorPartsEntry, *, b: e.TensorPartsEntry, values: bool
) -> None:
    if a.params != b.params or a.parts.keys() != b.parts.keys():
        found.add("kind", _compare_params(a.params, b.params))
    both = [name for name in a.parts if name in b.parts]
    where = [name for name in both if name.endswith("indices")]
    numbers = values and bool(where) and a.params == b.params
    numbers = numbers and not any(_known_to_differ(a.parts[name], b.parts[name]) for name in where)
    inner = EntryDifference()
    for name in both:
        own = numbers and name == "values"
        _compare_tensors(inner, pairs, f"{path}[{name}]", a.parts[name], b=b.parts[name], values=own)
    for what in dict.fromkeys(inner.what):
        found.add(what, "")
    found.details += [each for each in inner.details if each]
    found.numberless = values and (not numbers or inner.numberless)


def _known_to_differ(a: Any, b: Any) -> bool:
    return (a.dtype, tuple(a.shape)) != (b.dtype, tuple(b.shape)) or by_digests(a, b) is True


def _compare_params(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the parameters that differ, as text."""
    lines = []
    for name in [*a, *(name for name in b if name not in a)]:
        if a.get(name) != b.get(name):
            here, there = (_shorten(each.get(name)) for each in (a, b))
            lines.append(f"{name} {here} -> {there}" if here != there else f"{name} differs")
    return ", ".join(lines) or "other parts"


def _shorten(value: Any) -> str:
    text = str(float.fromhex(value)) if isinstance(value, str) and value.lstrip("-").startswith("0x") else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _compare_objects(found: EntryDifference, pairs: list[Pair], path: str, a: e.ObjectEntry, b: e.ObjectEntry) -> None:
    if (a.serializer, a.obj_type) != (b.serializer, b.obj_type) and a.obj_type != b.obj_type:
        found.add("kind", f"{a.obj_type} -> {b.obj_type}")
    if a.nbytes != b.nbytes or is_refused(a) or is_refused(b):
        found.add(
            "bytes",
            f"{value_text(a)} -> {value_text(b)}" if a.nbytes != b.nbytes else "cannot be read without a pickle",
        )
    elif a.digest is not None and b.digest is not None:
        if a.digest != b.digest:
            found.add("bytes", "")
    elif a.nbytes:
        pairs.append(Pair(path, as_bytes(a), as_bytes(b), "uint8"))


def content_of(entry: e.Entry) -> Any:
    """Return a key of an entry's bytes, or None if it has no bytes or no digests."""
    if isinstance(entry, e.TENSORS):
        held = _digests_of(entry)
        return ("Tensor", entry.dtype, tuple(entry.shape), repr(clean_extra(entry)), _freeze(held)) if held else None
    if isinstance(entry, e.NDArrayEntry):
        held = _digests_of(entry.data)
        return ("ndarray", str(entry.dtype), tuple(entry.shape), entry.order, _freeze(held)) if held else None
    if isinstance(entry, e.ObjectEntry) and entry.digest is not None and entry.nbytes:
        return "object", entry.serializer, entry.obj_type, entry.nbytes, entry.digest
    return None


def _freeze(held: dict[Any, str]) -> Iterable[Any]:
    return tuple(sorted(held.items()))
