"""The state of an application by logical path: state dicts are flattened, and inflated again."""

from __future__ import annotations

import contextlib
import copy
import datetime
import io
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice, repeat
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from snapshot.errors import CorruptSnapshotError, RestoreError, SnapshotError
from snapshot.manifest import entries as e
from snapshot.manifest.containers import (
    CONFIG,
    NAMESPACES,
    SEQUENCES,
    Compound,
    Container,
    CounterEntry,
    DefaultdictEntry,
    DequeEntry,
    DictEntry,
    NamedTupleEntry,
    OpaqueEntry,
    OrderedDictEntry,
    RecordEntry,
    SliceEntry,
    SubclassEntry,
    find_factory_name,
)
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.objects import encode_object
from snapshot.manifest.paths import (
    add_parents,
    are_components,
    decode_key,
    encode_component,
    encode_key,
    find_tagged_keys,
    key_component,
)
from snapshot.manifest.plain_tree import GROUPS, PLAIN_TREE, encode_tree, may_be_tree
from snapshot.manifest.rank_view import DEEPEST
from snapshot.manifest.values import LONGEST_NAME, PLAIN_MAKERS, TYPED, Scalar, make_enum_entry, make_plain_entry
from snapshot.saved import SavedObject, class_name
from snapshot.state import compound
from snapshot.state.compound import collect_leaves, find_components, find_form
from snapshot.state.flatten_cache import read_module_versions, remember_state, replay_state
from snapshot.state.leaves import AT_ONCE, FEW, Blob, FromOneRank, TensorLeaves
from snapshot.tensors import composite

MISSING: Any = object()
"""A placeholder for a missing leaf."""


def inflate_tree(path: str, entries: Mapping[str, Any], values: Mapping[str, Any]) -> Any:
    """Return the value at a path: its containers from `entries`, its leaves from `values`.

    A leaf that is MISSING leaves no key.
    """
    entry = entries.get(path)
    if path in values or entry is None or not entry.is_container:
        return values.get(path, MISSING)
    below = list(map((path + "/").__add__, entry.components()))
    children = list(map(values.get, below, repeat(entry)))  # an entry is no value
    for at, child in enumerate(children):
        if child is entry:
            children[at] = inflate_tree(below[at], entries, values)
    if any(map(is_, children, repeat(MISSING))):
        if not entry.is_keyed:
            raise RestoreError(f"{path}: a sequence cannot be restored without some of its elements", [path])
        return entry.without_children(child is MISSING for child in children).build(
            [c for c in children if c is not MISSING]
        )
    return _build_container(path, entry, children)


def _build_container(path: str, entry: Container, children: list[Any]) -> Any:
    try:
        return entry.build(children)
    except TypeError as error:  # a set with an unhashable element, which is stored as opaque bytes
        raise CorruptSnapshotError(f"{path}: {error}") from error


class ChosenState:
    """The leaves of a tree of entries that are restored; all others remain unchanged in the application."""

    def __init__(self, entries: Mapping[str, Any], wanted: Callable[[str], bool]) -> None:
        leaves = {path: wanted(path) for path, entry in entries.items() if is_leaf(entry)}
        self.skipped = {path for path, is_wanted in leaves.items() if not is_wanted}
        self._above_skipped = add_parents(self.skipped)
        self._above_wanted = add_parents(path for path, is_wanted in leaves.items() if is_wanted)

    @property
    def is_empty(self) -> bool:
        """True if nothing is restored."""
        return not self._above_wanted

    def includes(self, path: str) -> bool:
        """Return True if anything at a path or beneath it is restored."""
        return path in self._above_wanted

    def merge(self, path: str, entries: Mapping[str, Any], values: Mapping[str, Any], live: Any) -> Any:
        """Return the live value with the chosen leaves replaced; raise if a sequence lacks their positions."""
        if path not in self._above_skipped:
            return inflate_tree(path, entries, values)
        if path not in self._above_wanted:
            return live
        entry = entries[path]
        names = entry.components()
        if isinstance(entry, Compound):
            held = find_components(live) or {}
            children = [
                self.merge(f"{path}/{name}", entries, values, held.get(key, MISSING))
                for name, key in zip(names, entry.list_names(), strict=True)
            ]
            kept = entry.without_children(child is MISSING for child in children)
            return _build_container(path, kept, [child for child in children if child is not MISSING])
        if entry.is_keyed and isinstance(live, dict):
            made = copy.copy(live)
            for name, key in zip(names, map(decode_key, entry.keys), strict=True):
                child = self.merge(f"{path}/{name}", entries, values, live.get(key, MISSING))
                if child is not MISSING:
                    made[key] = child
            return made
        if isinstance(live, (list, tuple, deque)) and len(live) == len(names):
            children = [self.merge(f"{path}/{name}", entries, values, live[i]) for i, name in enumerate(names)]
            return _build_container(path, entry, children)
        raise RestoreError(
            f"{path}: a partial restore needs a live {type(entry).__name__} of {len(names)} to hold the rest, "
            f"and the application has none",
            [path],
        )


def _find_dict_maker(value: dict[Any, Any]) -> Callable[[list[Any], list[int] | None], DictEntry] | None:
    """Return a function that creates the entry of this type of dict; None if a factory cannot be recorded."""
    kind = type(value)
    if kind is dict:
        return DictEntry
    if kind is Counter:
        return CounterEntry
    if kind is defaultdict:
        factory = find_factory_name(value.default_factory)  # type: ignore[attr-defined]
        return None if factory is None else lambda keys, tagged: DefaultdictEntry(keys, tagged, factory=factory)
    versions = read_module_versions(getattr(value, "_metadata", None))
    return lambda keys, tagged: OrderedDictEntry(keys, tagged, module_versions=versions)


# Flattening: nested containers become entries, tensors become leaves under logical paths.
#
# This is the hottest Python of a take: a snapshot of 10,000 small tensors spends more here than in system calls. So
# there is one dispatch by exact type, and a plain tensor costs one small struct. Many of them are added at once.


class Flattened(TensorLeaves):
    """The state of an application, flattened. A leaf's entry is None until the leaf has been written.

    `excluded` returns True for a path to leave out with everything beneath it, which is not visited. With `fits_tree`,
    lists and dicts of many plain values are objects, if it returns True for their path and value.
    """

    def add(self, path: str, value: Any) -> None:
        """Flatten a value below `path`."""
        if self._leaves_out(path, value):
            return
        plain = self._prepare is None and self._excluded is None
        if plain and replay_state(path, value, self):
            return
        before = len(self.entries), len(self.leaves), len(self.blobs), len(self.pickled), len(self.shards)
        try:
            self._add_value(path, value, 0)
        except RecursionError as error:
            raise SnapshotError(f"{path}: nested deeper than Python's stack allows here, or holds itself") from error
        if plain and not self.once:
            remember_state(path, value, self, before)

    def _leaves_out(self, path: str, value: Any) -> bool:
        """Return True if a path is excluded, and record its names: globs that match them are not unmatched."""
        if self._excluded is None or not self._excluded(path):
            return False
        self.excluded.append(path)
        with contextlib.suppress(SnapshotError):  # it holds itself, and has no names to record
            self.excluded.extend(collect_leaves(path, value))
        return True

    def _add_value(self, path: str, value: Any, depth: int) -> None:
        """Flatten a value of any type. Types in `_VISITORS` are dispatched directly, except by `add`."""
        visitor = _VISITORS.get(type(value))
        if visitor is not None:
            visitor(self, path, value, depth)
        elif isinstance(value, torch.Tensor):
            self._add_tensor_like(path, value)
        elif isinstance(value, (np.ndarray, np.generic)):
            self._add_array(path, value, depth)
        elif type(value) is FromOneRank:
            before = len(self.entries)
            _VISITORS.get(type(value.value), Flattened._add_value)(self, path, value.value, depth)
            self.once.update(islice(self.entries, before, None))
        else:
            self._add_instance(path, value, depth)

    def _add_tree(self, path: str, value: Any) -> bool:
        """Store a list or a dict of many plain values as one object. Return False for any other one."""
        fits = self._fits_tree
        if fits is None or not may_be_tree(value) or f"/{GROUPS}" in path or not fits(path, value):
            return False
        text = encode_tree(value)
        if text is not None:
            self._add_blob(path, text, PLAIN_TREE, type(value))
        return text is not None

    def _add_sequence(self, path: str, value: Any, depth: int) -> None:
        self._check_depth(path, depth)
        if depth and type(value) is list and self._add_tree(path, value):
            return
        if type(value) is deque:
            self.entries[path] = DequeEntry(len(value), maxlen=value.maxlen)
        else:
            self.entries[path] = SEQUENCES[type(value)](len(value))
        paths = [f"{path}/{number}" for number in range(len(value))]
        if self._excluded is not None:
            for below in paths:
                self._expect_included(below)
        for below, child in self._others(paths, value):
            _VISITORS.get(type(child), Flattened._add_value)(self, below, child, depth + 1)

    def _others(self, paths: Iterable[str], values: Collection[Any]) -> Iterator[tuple[str, Any]]:
        """Flatten the plain tensors and values of a container, and yield the others in their order.

        The caller flattens these, so that nesting takes few frames of Python's stack.
        """
        entries, makers = self.entries, PLAIN_MAKERS
        for below, children in self._blocks(paths, values):
            for path, value in zip(below, children, strict=True):
                make = makers.get(type(value))
                entry = None if make is None else make(value)
                if entry is None:
                    yield path, value
                else:
                    entries[path] = entry

    def _blocks(self, paths: Iterable[str], values: Collection[Any]) -> Iterator[tuple[Iterable[str], Iterable[Any]]]:
        """Flatten blocks of plain tensors together, and yield all others."""
        if len(values) < FEW or torch.Tensor not in set(map(type, values)):
            yield paths, values
            return
        below, children = list(paths), list(values)
        for begin in range(0, len(below), AT_ONCE):
            block = slice(begin, begin + AT_ONCE)
            if not self._add_plain_tensors(below[block], children[block]):
                yield below[block], children[block]

    def _expect_included(self, path: str) -> None:
        if self._excluded is not None and self._excluded(path):
            raise ValueError(f"exclude: {path} cannot be left out, since it is an element of a sequence")

    def _add_slice(self, path: str, value: slice, depth: int) -> None:
        self._check_depth(path, depth)
        self.entries[path] = SliceEntry(3)
        for number in range(3):
            self._expect_included(f"{path}/{number}")
        parts = value.start, value.stop, value.step
        for below, child in self._others([f"{path}/{number}" for number in range(3)], parts):
            _VISITORS.get(type(child), Flattened._add_value)(self, below, child, depth + 1)

    def _add_dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        self._check_depth(path, depth)
        if depth and type(value) is dict and self._add_tree(path, value):  # a stateful's own dict is always a container
            return
        make = _find_dict_maker(value)
        keys = list(value)
        names = keys if are_components(keys) else None
        strings = names is not None or set(map(type, keys)) <= _STRING
        recorded = [encode_key(key) for key in keys] if names is None else keys
        if make is None or None in recorded:
            self._add_object(path, value)
            return
        if strings and self._excluded is None:
            self.entries[path] = make(recorded, None)
            self.add_named(path + "/", value, depth, names)
            return
        tagged = set(find_tagged_keys(keys))  # also of keys that are excluded: names are those of the whole dict
        held = [
            (key, i in tagged, f"{path}/{key_component(key, i in tagged)}", child)
            for i, (key, child) in enumerate(zip(recorded, value.values(), strict=True))
        ]
        held = [each for each in held if not self._leaves_out(*each[2:])]
        tags = [i for i, (_, is_tagged, _, _) in enumerate(held) if is_tagged]
        self.entries[path] = make([key for key, _, _, _ in held], tags or None)
        for _, _, below, child in held:
            _VISITORS.get(type(child), Flattened._add_value)(self, below, child, depth + 1)

    def add_named(self, prefix: str, value: dict[str, Any], depth: int, names: Iterable[str] | None = None) -> None:
        """Flatten the values of a dict whose keys are all strings. `names`: their components, if these are known."""
        paths = map(prefix.__add__, map(encode_component, value) if names is None else names)
        for below, child in self._others(paths, value.values()):
            _VISITORS.get(type(child), Flattened._add_value)(self, below, child, depth + 1)

    def _check_depth(self, path: str, depth: int) -> None:
        if depth > DEEPEST:
            raise SnapshotError(f"{path[:200]}...: nested more than {DEEPEST} deep, or holds itself")

    def _add_scalar(self, path: str, value: Any, depth: int) -> None:
        entry = make_plain_entry(value)
        if entry is not None:
            self.entries[path] = entry
        elif type(value) in TYPED:
            self._add_object(path, value)
        else:
            text = type(value) is str
            data = value.encode("utf-8", "surrogatepass") if text else bytes(value)  # a bytearray may change
            self._add_blob(path, data, "utf8" if text else type(value).__name__, type(value))

    def _add_member(self, path: str, value: Any) -> None:
        """Store a member of an Enum, or a saved member whose class is unknown."""
        entry = make_enum_entry(value)
        if entry is None:
            self._add_object(path, value)
        else:
            self.entries[path] = entry

    def _add_instance(self, path: str, value: Any, depth: int) -> None:
        """Flatten an object with a class of its own: as its parts if these are all that it holds, or as one object."""
        form = find_form(type(value)) if self._classes else None
        parts = compound.take_apart(value, within=self._within) if self._classes else None
        if parts is not None:
            self._add_parts(path, value, *parts, depth)
        elif form is None:
            self._add_known_object(path, value)
        elif form is compound.ENUM:
            self._add_member(path, value)
        else:
            self._add_object(path, value)

    def _add_known_object(self, path: str, value: Any) -> None:
        """Store a generator or a configuration as bytes. Pickle any other object."""
        stored = encode_object(value) if self._classes and type(value) not in NAMESPACES else None
        if stored is None:
            self._add_object(path, value)
        else:
            self.entries[path] = None
            self.blobs.append(Blob(path, stored.data, stored.serializer, stored.kind))

    def _add_parts(self, path: str, value: Any, entry: Compound, held: dict[str, Any], depth: int) -> None:
        within, self._within = self._within, True
        try:
            self._add_fields(path, value, entry, held=held, depth=depth)
        finally:
            self._within = within

    def _add_fields(self, path: str, value: Any, entry: Compound, *, held: dict[str, Any], depth: int) -> None:
        """Flatten an object as its parts; `entry` has no keys yet."""
        self._check_depth(path, depth)
        if not all(type(each) is str for each in held) or len(entry.obj_type) > LONGEST_NAME:
            self._add_object(path, value)
            return
        if self._excluded is not None:
            below = {name: f"{path}/{encode_component(name)}" for name in held}
            held = {name: child for name, child in held.items() if not self._leaves_out(below[name], child)}
        self.entries[path] = replace(entry, keys=[encode_key(name) for name in held])
        self.add_named(path + "/", held, depth)

    def _add_wrapped(self, path: str, tensor: torch.Tensor) -> bool:
        if not self._classes or find_form(type(tensor)) is not compound.WRAPPER or not compound.is_wrapper(tensor):
            return False
        inner, context = compound.read_inner_tensors(tensor)
        self._add_inner_tensors(
            path, compound.make_wrapper_entry(tensor, list(inner), flatten_context(tensor, context)), inner
        )
        return True

    def _add_inner_tensors(self, path: str, entry: SubclassEntry, inner: dict[str, Any]) -> None:
        """Flatten inner tensors without preparing them, since only their class can interpret them."""
        self.entries[path] = entry
        prepare, self._prepare = self._prepare, None
        try:
            for name, child in inner.items():
                below = f"{path}/{encode_component(name)}"
                _VISITORS.get(type(child), Flattened._add_value)(self, below, child, 0)
        finally:
            self._prepare = prepare

    def _add_saved(self, path: str, value: SavedObject, depth: int) -> None:
        """Save a `SavedObject`, whose class is not available, as the original object."""
        if value.kind in _NAMED_PARTS:
            entry = _NAMED_PARTS[value.kind]([], obj_type=value.class_name)
            self._add_fields(path, value, entry, held=dict(value), depth=depth)
        elif value.kind == CONFIG:
            self._add_known_object(path, value)
        elif value.kind == compound.ENUM:
            self._add_member(path, value)
        elif value.kind == compound.WRAPPER and isinstance(value._entry, SubclassEntry):
            entry = value._entry
            self._add_inner_tensors(path, entry, {name: value[name] for name in entry.list_names()})
        elif value.kind == composite.KIND:
            self._add_generator_state(path, value["device"], value["state"])
        else:
            self._add_object(path, value)

    def _add_bytes_io(self, path: str, value: io.BytesIO, depth: int) -> None:
        """Store a file in memory: its position in eight bytes, then its contents."""
        if getattr(value, "__dict__", None):
            self._add_object(path, value)
            return
        try:
            data = value.tell().to_bytes(8, "little") + value.getvalue()
        except ValueError as error:
            raise SnapshotError(f"{path}: a BytesIO cannot be stored: {error}") from error
        self._add_blob(path, data, "BytesIO", type(value))

    def _add_generator(self, path: str, value: torch.Generator, depth: int) -> None:
        self._add_generator_state(path, value.device, value.get_state())

    def _add_generator_state(self, path: str, device: torch.device, state: torch.Tensor) -> None:
        self.entries[path] = entry = e.TensorPartsEntry(composite.KIND, {}, {"device": str(device)})
        self._add_part(path, "state", state, entry.parts, f"{composite.KIND} {device}")

    def _add_blob(self, path: str, data: bytes, serializer: str, kind: type) -> None:
        self.entries[path] = None
        self.blobs.append(Blob(path, data, serializer, class_name(kind)))

    def _add_object(self, path: str, value: Any) -> None:
        """Pickle an object that has no other representation, and record it for a warning."""
        if isinstance(value, SavedObject):
            raise SnapshotError(f"{path}: cannot save {value!r}, whose fields are unknown; exclude it")
        if self._add_sharded(path, value):
            return
        held = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.save(value, held, pickle_module=_PICKLE)
        except Exception as error:
            raise SnapshotError(
                f"{path}: a {class_name(type(value))} cannot be stored, not even pickled: {error}"
            ) from error
        self.pickled.append(f"{path} ({class_name(type(value))})")
        self._add_blob(path, held.getvalue(), "torch_save", type(value))


class _Pickler(pickle.Pickler):
    """Keeps the second of two equal times, `fold=1`, which torch's protocol of pickles has no place for."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (datetime.time, datetime.datetime)) and value.fold:
            return value.__reduce_ex__(4)
        return NotImplemented


_PICKLE = SimpleNamespace(__name__="pickle", Pickler=_Pickler)
"""The pickle module for `torch.save`."""


class _Context(Flattened):
    """The context of a wrapper class: plain values, and the class name of any other object."""

    def _add_object(self, path: str, value: Any) -> None:
        self.entries[path] = OpaqueEntry(class_name(type(value)))

    def _add_tensor_like(self, path: str, tensor: torch.Tensor) -> None:
        self._add_object(path, tensor)

    def _add_known_object(self, path: str, value: Any) -> None:
        self._add_object(path, value)

    def _add_instance(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, tuple):
            self._add_object(path, value)
        else:
            super()._add_instance(path, value, depth)

    def _add_array(self, path: str, value: Any, depth: int) -> None:
        self._add_object(path, value)


def flatten_context(tensor: Any, context: Any) -> dict[str, Any]:
    """Return the context of a wrapped tensor's class, as entries."""
    flat = _Context()
    flat._add_value("", compound.describe_context(tensor, context), 0)
    plain = (Scalar, Container)
    return {
        path: entry if isinstance(entry, plain) and not isinstance(entry, SubclassEntry) else OpaqueEntry("tensor")
        for path, entry in flat.entries.items()
    }


_Visitor = Callable[[Flattened, str, Any, int], None]
_VISITORS: dict[type, _Visitor] = {
    torch.Tensor: Flattened._add_tensor,
    torch.nn.Parameter: Flattened._add_parameter,
    np.ndarray: Flattened._add_array,
    **dict.fromkeys((dict, OrderedDict, defaultdict, Counter), Flattened._add_dict),
    **dict.fromkeys((list, tuple, set, frozenset, deque), Flattened._add_sequence),
    **dict.fromkeys(
        (int, str, bool, bytes, bytearray, float, complex, type(None), torch.dtype, torch.device, torch.Size, *TYPED),
        Flattened._add_scalar,
    ),
    slice: Flattened._add_slice,
    io.BytesIO: Flattened._add_bytes_io,
    torch.Generator: Flattened._add_generator,
    SavedObject: Flattened._add_saved,
    **dict.fromkeys(NAMESPACES, Flattened._add_instance),
}
_STRING = {str}
_NAMED_PARTS: dict[str, type[Compound]] = {compound.RECORD: RecordEntry, compound.NAMED: NamedTupleEntry}
