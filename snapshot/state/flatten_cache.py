"""A cache for flattening: the same containers with the same kinds of tensors are not visited again.

For each large state dict, the result of flattening is cached: names, entries and the tensors' properties, but no
tensor. It is reused if the next state under the same key has the same structure, down to the type of every value.
Then only the tensors and changed numbers are replaced; otherwise the state is flattened from scratch.

All tensors are compared at once: a Python loop over ten thousand of them would dominate the cost.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, islice, repeat
from operator import attrgetter, is_, is_not, lt
from typing import Any

import torch

from snapshot.io.system import PerProcess
from snapshot.manifest.values import SCALARS, TYPED, Entry, Scalar, make_plain_entry
from snapshot.state.leaves import LOW, FlatState, Leaf
from snapshot.state.sharded import describes_parts
from snapshot.tensors.composite import is_freed

FEW = 32
"""States of fewer tensors are not cached."""
MOST = 64
"""The maximum number of cached states."""
_CONTAINERS = frozenset((dict, OrderedDict, list, tuple))
_KEYS = frozenset((str, int))
"""Types of keys whose equal values are identical."""
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_EXACT = frozenset((int, str, bool, bytes, type(None), torch.dtype, torch.device, torch.Size))
"""Types whose equal values are identical, unlike 0.0 and -0.0, or two ranges."""
_KNOWN = frozenset((*SCALARS, *_EXACT, *TYPED))
_dtype, _shape, _device = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")
_on_host, _requires = attrgetter("is_cpu"), attrgetter("requires_grad")
_path, _wrap = attrgetter("path"), attrgetter("wrap")
_COLUMNS = tuple(map(attrgetter, ("path", "dtype", "shape", "nbytes", "plain", "extra", "note")))


class _Unlike(Exception):
    """Raised if a state cannot be cached, or differs from the cached one."""


def read_module_versions(metadata: Any) -> dict[str, dict[str, Any]] | None:
    """Return a module's versions as plain values, without entries of hooks that JSON cannot represent."""
    if not isinstance(metadata, dict):
        return None
    plain = (str, int, float, bool, type(None))
    return {
        str(module): {str(name): value for name, value in versions.items() if isinstance(value, plain)}
        for module, versions in metadata.items()
        if isinstance(versions, dict)
    }


def _survey_values(value: Any, children: list[Any], structure: list[Any]) -> None:
    """Gather all values in nested containers, parents first, and the structure of the containers."""
    inner = value
    if type(value) is dict or type(value) is OrderedDict:
        if not _KEYS.issuperset(map(type, value)):
            raise _Unlike
        structure.append(list(value))
        if type(value) is OrderedDict:
            structure.append(read_module_versions(getattr(value, "_metadata", None)))
        inner = value.values()
    else:
        structure.append(len(value))
    children += inner
    if not _CONTAINERS.isdisjoint(map(type, inner)):
        for child in inner:
            if type(child) in _CONTAINERS:
                _survey_values(child, children, structure)


def _collect_names(path: str, value: Any, entries: Mapping[str, Entry | None], names: list[str]) -> None:
    """Gather the paths of the values in `_survey_values`, in its order."""
    entry = entries.get(path)
    if entry is None or not entry.is_container or entry.width != len(value):
        raise _Unlike
    inner = list(value.values()) if entry.is_keyed else value
    below = [f"{path}/{text}" for text in entry.components()]
    names += below
    for name, child in zip(below, inner, strict=True):
        if type(child) in _CONTAINERS:
            _collect_names(name, child, entries, names)


class TensorTraits:
    """Properties of many tensors, as lists that are compared at once.

    Reading one property of a tensor dominates the cost, so properties that others imply are not read.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.addresses = list(map(torch.Tensor.data_ptr, tensors))  # raises, unless all are strided
        if any(map(describes_parts, tensors)):
            raise _Unlike
        shapes: dict[Any, Any] = {}  # one object for each shape, since there may be millions
        self.shapes = [shapes.setdefault(shape, shape) for shape in map(_shape, tensors)]  # raises for what is nested
        self.dtypes = list(map(_dtype, tensors))
        self.contiguous = bytes(map(torch.Tensor.is_contiguous, tensors))
        self.requires_grad = bytes(map(_requires, tensors))
        self.devices = None if all(map(_on_host, tensors)) else list(map(_device, tensors))
        self.strides = (
            [] if all(self.contiguous) else [t.stride() for t, c in zip(tensors, self.contiguous, strict=True) if not c]
        )
        self.negative = bytes(map(torch.Tensor.is_neg, tensors))
        self.conjugate = list(map(torch.Tensor.is_conj, tensors)) if any(d.is_complex for d in set(self.dtypes)) else []

    def __eq__(self, other: object) -> bool:
        """Return True if all properties except the addresses are equal."""
        return isinstance(other, TensorTraits) and {**vars(self), "addresses": 0} == {**vars(other), "addresses": 0}

    __hash__ = None  # type: ignore[assignment]


class _Template:
    """The result of flattening a state."""

    def __init__(
        self, path: str, value: Any, entries: dict[str, Entry | None], made: Sequence[Leaf], flat: FlatState
    ) -> None:
        self.kind = type(value)
        children: list[Any] = []
        self.structure: list[Any] = []
        names: list[str] = []
        _survey_values(value, children, self.structure)
        _collect_names(path, value, entries, names)
        self.types = list(map(type, children))
        self.entries = entries
        tensors_at: list[int] = []
        self.scalars_at: list[int] = []
        for index, kind in enumerate(self.types):
            if kind in _TENSORS:
                tensors_at.append(index)
            elif kind not in _CONTAINERS:
                if kind not in _KNOWN or not isinstance(entries[names[index]], Scalar):
                    raise _Unlike
                self.scalars_at.append(index)
        self.scalars = [children[index] for index in self.scalars_at]
        self.scalar_names = [names[index] for index in self.scalars_at]
        self.inexact = [at for at, scalar in enumerate(self.scalars) if type(scalar) not in _EXACT]
        self.tensors_at = _pack_numbers(tensors_at)
        tensors = [children[index] for index in self.tensors_at]
        self.likeness = TensorTraits(tensors)
        self.pattern = _find_aliases(self.likeness.addresses)
        self.likeness.addresses = []
        named = [names[index] for index in self.tensors_at]
        order = dict(zip(map(_path, made), count()))
        ranks = list(map(order.get, named))
        self.ties = {name: flat.ties.get(name, "") for name, rank in zip(named, ranks, strict=True) if rank is None}
        if any(map(is_not, map(entries.get, named), repeat(None))) or not order.keys() >= set(self.ties.values()):
            raise _Unlike
        found = [at for at, rank in enumerate(ranks) if rank is not None]
        found.sort(key=ranks.__getitem__)  # type: ignore[arg-type]
        self.leaves_at = _pack_numbers(found)
        mine = [made[ranks[at]] for at in found]  # type: ignore[index]
        if any(map(is_not, map(_wrap, mine), repeat(None))):
            raise _Unlike
        addresses = [leaf.address for leaf in mine if leaf.nbytes]
        if len(set(addresses)) < len(addresses):
            raise _Unlike  # tensors that begin at one address and are not the same
        self.full = len(addresses) == len(mine)
        self.columns: list[Iterable[Any]] = [_pack_equal(list(map(get, mine))) for get in _COLUMNS]

    def replay(self, value: Any, flat: FlatState) -> None:
        """Add a value of the same structure to a flattened state.

        Raise `_Unlike`, and change nothing, for another structure.
        """
        if type(value) is not self.kind:
            raise _Unlike
        children: list[Any] = []
        structure: list[Any] = []
        _survey_values(value, children, structure)
        if structure != self.structure or list(map(type, children)) != self.types:
            raise _Unlike
        tensors = [children[index] for index in self.tensors_at]
        likeness = TensorTraits(tensors)
        if likeness != self.likeness:
            raise _Unlike
        addresses = likeness.addresses
        paths, dtypes, shapes, sizes, plain, extras, notes = self.columns
        held = [tensors[at] for at in self.leaves_at]
        begins = [addresses[at] for at in self.leaves_at]
        full = begins if self.full else [begin for begin, size in zip(begins, sizes, strict=False) if size]
        if _find_aliases(addresses) != self.pattern:
            raise _Unlike
        if full and min(full) < LOW and any(is_freed(each) for each in held if each.data_ptr() < LOW and each.numel()):
            raise _Unlike
        if not flat.seen.keys().isdisjoint(full):
            raise _Unlike  # it shares memory with another key's
        scalars = self._make_scalars([children[index] for index in self.scalars_at])
        leaves = list(map(Leaf, paths, held, dtypes, shapes, sizes, begins, plain, extras, notes))
        flat.entries.update(self.entries)
        flat.entries.update(scalars)
        flat.leaves += leaves
        flat.ties.update(self.ties)
        owners = leaves if self.full else [leaf for leaf in leaves if leaf.nbytes]
        flat.seen.update(zip(full, owners, strict=True))

    def _make_scalars(self, values: list[Any]) -> dict[str, Entry]:
        """Return the entries of values that changed."""
        changed = list(self.inexact)
        if values != self.scalars:
            known = self.scalars
            changed += [at for at, value in enumerate(values) if value is not known[at] and value != known[at]]
        found: dict[str, Entry] = {}
        for at in changed:
            entry = make_plain_entry(values[at])
            if entry is None:
                raise _Unlike
            found[self.scalar_names[at]] = entry
        return found


def _pack_numbers(numbers: Sequence[int]) -> Sequence[int]:
    """Return numbers in little memory, since a cached state may have millions."""
    if numbers and numbers[-1] - numbers[0] == len(numbers) - 1 and all(map(lt, numbers, islice(numbers, 1, None))):
        return range(numbers[0], numbers[-1] + 1)
    return array("q", numbers)


def _pack_equal(values: list[Any]) -> Iterable[Any]:
    """Return values in little memory if all are one object."""
    first = values[0] if values else None
    return repeat(first) if all(map(is_, values, repeat(first))) else values


def _find_aliases(addresses: list[int]) -> list[int]:
    """Return, for each tensor, the first one at its address; an empty list if all addresses are different."""
    if len(set(addresses)) == len(addresses):
        return []
    first: dict[int, int] = {}
    return [first.setdefault(address, at) for at, address in enumerate(addresses)]


class _Templates:
    """The cached templates, by path."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.kept: OrderedDict[str, _Template] = OrderedDict()
        self.failures: dict[str, int] = {}
        """The number of consecutive states that differed from the previous one."""


_templates = PerProcess(_Templates)


def replay_state(path: str, value: Any, flat: FlatState) -> bool:
    """Flatten a value with the template of its path; return False if it does not match."""
    templates = _templates.get()
    with templates.lock:
        template = templates.kept.get(path)
    if template is None:
        return False
    try:
        template.replay(value, flat)
    except (_Unlike, RecursionError, RuntimeError):  # what torch refuses to say of odd tensors, flattening tells better
        with templates.lock:
            if templates.kept.get(path) is template:
                del templates.kept[path]
        return False
    templates.failures.pop(path, None)
    return True


def remember_state(path: str, value: Any, flat: FlatState, before: tuple[int, ...]) -> None:
    """Cache the result of flattening a value. States that change each time are tried ever more rarely."""
    entries, leaves, *others = before
    if len(flat.leaves) - leaves < FEW or tuple(others) != (len(flat.blobs), len(flat.pickled), len(flat.shards)):
        return
    templates = _templates.get()
    times = templates.failures[path] = templates.failures.get(path, 0) + 1
    if times & (times - 1) or type(value) not in _CONTAINERS:
        return
    try:
        template = _Template(path, value, dict(islice(flat.entries.items(), entries, None)), flat.leaves[leaves:], flat)
    except (_Unlike, RuntimeError):
        return
    with templates.lock:
        templates.kept.pop(path, None)
        templates.kept[path] = template
        while len(templates.kept) > MOST:
            forgotten, _ = templates.kept.popitem(last=False)
            templates.failures.pop(forgotten, None)
