"""Live values: whether their memory can be written, which of them are tied, and the class that an entry gets."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from snapshot.errors import CorruptSnapshotError
from snapshot.loading.open import Opened
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.containers import NamedTupleEntry, OpaqueEntry, RecordEntry, SubclassEntry
from snapshot.manifest.entries import AnyTensor, is_leaf
from snapshot.manifest.paths import add_parents, encode_component
from snapshot.manifest.values import Entry, EnumEntry, Scalar, resolve_member
from snapshot.reports import RestoreIssues
from snapshot.saved import class_name
from snapshot.state import compound
from snapshot.state.compound import collect_leaves, find_form
from snapshot.state.flatten import flatten_context
from snapshot.state.stateful import RestoreAdapter
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.geometry import boxes_of_range
from snapshot.tensors.memory import BY_NAME, address_of_tensor, measure_span

COMPARED = 1 << 23
"""Elements of two stored tensors that are compared at once."""
FEW = 256
"""Up to this number of live tensors, asking torch about each is faster than reading the process's memory map."""


def find_read_only_memory(read_plan: ReadPlan) -> list[str]:
    """Return an error for each live tensor in read-only memory, such as a file mapped for reading.

    Writing to such memory would kill the process.
    """
    requests = [request for request in read_plan.requests if request.live]
    live = [request for request in requests if request.address]
    kept = {each.path for each in read_plan.left_out}
    kept -= {request.name for request in requests} if kept else set()  # the others are only compared
    targets = [(each.tensor.data_ptr(), each.name) for each in read_plan.targets if each.tensor.is_cpu]
    targets = [each for each in targets if each[1] not in kept] if kept else targets
    names = [request.name for request in live] + [name for _, name in targets]
    if len(names) <= FEW and all(map(_is_allocated, map(read_plan.values.get, names))):
        return []
    try:
        with open("/proc/self/maps", "rb") as file:
            maps = file.read().splitlines()
    except OSError:  # not Linux
        return []
    ranges = [line.split(b" ", 2)[0].split(b"-") for line in maps if line.split(b" ", 2)[1][1:2] != b"w"]
    begins = np.array([int(begin, 16) for begin, _ in ranges], np.uint64)
    ends = np.array([int(end, 16) for _, end in ranges], np.uint64)
    places = chain((request.address for request in live), (address for address, _ in targets))
    addresses = np.fromiter(places, np.uint64, len(names))
    found = np.searchsorted(begins, addresses, "right").astype(np.int64) - 1
    bad = (found >= 0) & (addresses < ends[found])
    return [
        f"{name}: its memory is read-only, such as a file mapped for reading; copy it first: tensor.clone()"
        for name in dict.fromkeys(names[int(i)] for i in np.flatnonzero(bad))
    ]


def _is_allocated(value: object) -> bool:
    """Return True if torch allocated the tensor's memory, so that it is writable."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.untyped_storage().resizable()  # type: ignore[attr-defined]


def is_writable(tensor: torch.Tensor) -> bool:
    """Return True if a tensor can be written in place: strided, with memory, and without overlapping elements."""
    if tensor.layout is not torch.strided or tensor.is_quantized or (tensor.nbytes and not tensor.data_ptr()):
        return False
    storage = tensor.untyped_storage()
    span = measure_span(tuple(tensor.shape), tensor.stride()) * tensor.itemsize
    if tensor.data_ptr() + span > storage.data_ptr() + storage.nbytes():
        return False  # it was shrunk
    if tensor.is_contiguous():
        return True
    return _is_apart(tensor.stride(), tensor.shape, 0)


def has_overlaps(array: np.ndarray[Any, Any]) -> bool:
    """Return True if elements of an array may share memory, so that it cannot hold any values."""
    return bool(array.size) and not _is_apart(map(abs, array.strides), array.shape, array.itemsize - 1)


def _is_apart(strides: Iterable[int], shape: Iterable[int], reach: int) -> bool:
    """Return True if elements do not overlap. `reach`: the distance from an element's first unit to its last one."""
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += stride * (size - 1)
    return True


def find_other_owner(
    adapters: Mapping[str, RestoreAdapter], grouped: Mapping[str, Mapping[str, Any]], skipped: set[str]
) -> Callable[[Any], bool]:
    """Return a function that returns True if one of the statefuls restores the memory of a live tensor."""

    @functools.cache
    def addresses() -> set[int]:
        return {
            address_of_tensor(held)
            for key, entries in grouped.items()
            for path, held in adapters[key].live.items()
            if isinstance(held, torch.Tensor) and path in entries and path not in skipped
        }

    return lambda tensor: address_of_tensor(tensor) in addresses()


def find_tied(adapter: RestoreAdapter, names: Iterable[str], present: Iterable[str]) -> dict[str, str]:
    """Return each name whose live tensor is also that of a present name, with the first such name.

    Parameters without memory on this rank, such as empty shards, are the same one if the module says so.
    """
    names = list(names)
    if not names:
        return {}
    model = adapter.stateful
    same = model.named_parameters(remove_duplicate=False) if isinstance(model, torch.nn.Module) else ()
    objects = {f"{adapter.key}/{encode_component(name)}": id(each) for name, each in same}

    def identities(path: str) -> list[Any]:
        held = adapter.live.get(path)
        found: list[Any] = [objects[path]] if path in objects else []
        if isinstance(held, torch.Tensor) and held.layout is torch.strided and not is_lazy(held):
            lazy = held.is_conj(), held.is_neg()
            found.append((address_of_tensor(held), held.dtype, held.shape, held.stride(), lazy))
        return found

    partners: dict[Any, str] = {}
    for path in present:
        for each in identities(path):
            partners.setdefault(each, path)
    known = {path: [partners[each] for each in identities(path) if each in partners] for path in names}
    return {path: found[0] for path, found in known.items() if found and found[0] != path}


class Twin(NamedTuple):
    """Two entries whose bytes must be equal, but whose digests do not show it."""

    path: str
    entry: AnyTensor
    partner: str
    other: AnyTensor


def compare_twins(opened: Opened, twins: Iterable[Twin]) -> list[str]:
    """Return an error for each pair of entries with different bytes. The pairs are read part by part."""
    return [
        f"{each.partner} and {each.path}: share memory in the application, but differ in the snapshot; leave one out: "
        f"exclude=[{each.path!r}]"
        for each in twins
        if not have_equal_bytes(opened, each, verify=False)
    ]


def have_equal_bytes(opened: Opened, twin: Twin, *, verify: bool) -> bool:
    """Return True if two entries have the same bytes. They are read part by part."""
    count = math.prod(twin.entry.shape)
    for begin in range(0, count, COMPARED):
        for _, box in boxes_of_range(twin.entry.shape, begin, min(begin + COMPARED, count)):
            reads, parts = ReadPlan(opened.document.files), []
            for path, entry in ((twin.path, twin.entry), (twin.partner, twin.other)):
                parts.append(torch.empty(box.sizes, dtype=BY_NAME[entry.dtype]))
                reads.into_box(path, entry, box, parts[-1])
            reads.execute(opened, verify=verify)
            one, other = (view_memory(part.data_ptr(), part.nbytes) for part in parts)
            if one != other:
                return False
    return True


class BoundMember(EnumEntry):
    """A member of an Enum that the application has."""

    member: Any = None

    def value(self) -> Any:
        return self.member


class BoundRecord(RecordEntry):
    """An instance of a dataclass or a named tuple that the application has."""

    kind: Any = None
    kept: Any = None
    """Fields of the live instance that the snapshot lacks; they keep their values."""
    target: Any = None
    """The instance that is filled in place; None if a new one is created."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        held = {**self.kept, **dict(items)}
        if self.target is None:
            return compound.make_instance(self.kind, held)
        compound.set_attributes(self.target, dict(items))
        return self.target


class BoundWrapper(SubclassEntry):
    """A new wrapped tensor, of a class that the application has."""

    kind: Any = None
    given: Any = None
    """The arguments that the class gets in addition to the inner tensors."""

    def make(self, items: list[tuple[Any, Any]]) -> Any:
        if any(value is None for _, value in items):
            return None  # a trial run, to check that everything has a place
        size = None if -1 in self.shape else torch.Size(self.shape)
        strides = None if size is None else _strides(self.shape)
        try:
            with torch.no_grad():
                made = self.kind.__tensor_unflatten__(dict(items), self.given, size, strides)
                return made.requires_grad_() if self.requires_grad else made
        except Exception as error:  # raised by the class's own code
            raise CorruptSnapshotError(
                f"cannot rebuild a {self.obj_type} from the saved inner tensors: {error}"
            ) from error


def _strides(shape: Iterable[int]) -> tuple[int, ...]:
    steps, step = [], 1
    for size in reversed(tuple(shape)):
        steps.append(step)
        step *= max(1, size)
    return tuple(reversed(steps))


class Binding:
    """The classes of one stateful's entries."""

    def __init__(
        self,
        live: Mapping[str, Any],
        compounds: Mapping[str, Any],
        notes: RestoreIssues,
        *,
        exact: bool,
        skipped: Collection[str] = (),
        fill: str | None = None,
        left: set[str] | None = None,
    ) -> None:
        """`fill`: the path of an instance that is filled in place.

        `left`: collects the inner tensors of wrapped tensors of another shape, if those are left unchanged.
        """
        self._live = live
        self._compounds = compounds
        self._notes = notes
        self._said = notes
        self._exact = exact
        self._skipped = skipped
        self._fill = fill
        self._left = left
        self._known: dict[tuple[str, str], type] | None = None
        self.unfit: list[torch.Tensor] = []
        """Live tensors of another shape, which are left unchanged."""
        self.wrappers: dict[str, Any] = {}
        """Path -> the live tensor whose inner tensors are filled."""

    def bind(self, entries: dict[str, Any]) -> None:
        """Replace entries that only name a class by entries that hold it."""
        gone: set[str] = set()
        naming: list[tuple[str, Any]] = []
        if not _NAMING.isdisjoint(map(type, entries.values())):
            naming = [(path, entry) for path, entry in entries.items() if type(entry) in _NAMING]
        wanted = self._above_wanted(entries) if self._skipped and naming else None
        for path, entry in naming:
            if gone and not gone.isdisjoint(_above(path)):
                continue
            # entries that stay unchanged are not reported
            self._notes = self._said if wanted is None or path in wanted else RestoreIssues()
            if type(entry) in (RecordEntry, NamedTupleEntry):
                gone.update(self._record(path, entry, entries))
            elif type(entry) is SubclassEntry:
                self._wrapper(path, entry, entries)
            else:
                self._member(path, entry, entries)
        self._notes = self._said
        if gone:
            prefixes = tuple(f"{path}/" for path in gone)
            for path in [path for path in entries if path in gone or path.startswith(prefixes)]:
                del entries[path]
        for path, held in self._compounds.items() if self._exact else ():
            entry = entries.get(path)
            plain = entry is not None and (entry.is_tensor or isinstance(entry, e.TensorPartsEntry))
            if plain and isinstance(held, torch.Tensor):
                self._notes.mismatches.append(
                    f"{path}: the snapshot has a plain tensor, the application a {class_name(type(held))}"
                )

    def _above_wanted(self, entries: Mapping[str, Any]) -> set[str]:
        """Return the paths that are restored, and of the containers around them."""
        return add_parents(path for path, entry in entries.items() if path not in self._skipped and is_leaf(entry))

    # Enums

    def _member(self, path: str, entry: EnumEntry, entries: dict[str, Any]) -> None:
        held = self._compounds.get(path)
        kind: Any = type(held) if isinstance(held, Enum) else self._class(compound.ENUM, entry.obj_type)
        if kind is None:
            self._unknown(path, entry.obj_type)
            return
        try:
            member = resolve_member(kind, entry)
        except LookupError as error:
            self._notes.mismatches.append(f"{path}: {error}")
            return
        self._renamed(path, entry.obj_type, kind)
        if entry.name is not None and member.name != entry.name and kind.__members__.get(entry.name) is not member:
            self._notes.add("replaced", path, f"{entry.name} is {member.name} here")
        entries[path] = BoundMember(
            entry.serialized_value, entry.readable, entry.replicated, entry.obj_type, entry.name, entry.held, member
        )

    # Dataclasses and named tuples

    def _record(self, path: str, entry: Any, entries: dict[str, Any]) -> list[str]:
        """Bind a dataclass or a named tuple. Return the paths of fields that the class lacks."""
        held = self._compounds.get(path)
        form = compound.RECORD if type(entry) is RecordEntry else compound.NAMED
        live = find_form(type(held)) is form
        kind: Any = type(held) if live else self._class(form, entry.obj_type)
        if kind is None:
            self._unknown(path, entry.obj_type)
            return []
        own = compound.read_attributes(held) if live else {}
        names = entry.list_names()
        kept = {}
        for name in [*own, *compound.find_field_names(kind)]:
            if name in names or name in kept:
                continue
            try:
                kept[name] = own[name] if name in own else compound.find_default(kind, name)
            except KeyError:
                self._lacks_field(path, kind, name)
                return []
            self._notes.add("kept", f"{path}/{encode_component(name)}", "the saved object has no such field")
        self._renamed(path, entry.obj_type, kind)
        away = [not compound.accepts_attribute(kind, own, name) for name in names]
        gone = [f"{path}/{text}" for text, is_gone in zip(entry.components(), away, strict=True) if is_gone]
        for each in gone:
            self._notes.add("unexpected", each, f"{class_name(kind)} has no such field")
        left = entry.without_children(away)
        target = held if path == self._fill and form is compound.RECORD else None
        entries[path] = BoundRecord(
            left.keys,
            replicated=entry.replicated,
            obj_type=entry.obj_type,
            kind=kind,
            kept=kept,
            target=target,
        )
        return gone

    # Wrapped tensors

    def _wrapper(self, path: str, entry: SubclassEntry, entries: dict[str, Any]) -> None:
        entry.check(path)
        held = self._compounds.get(path)
        if isinstance(held, torch.Tensor):
            self._filled(path, entry, held)
            return
        if path in self._live and self._exact:
            self._notes.mismatches.append(
                f"{path}: the snapshot has a {entry.obj_type}, the application a {type(self._live[path]).__name__}"
            )
            return
        kind = self._class(compound.WRAPPER, entry.obj_type)
        given = Binding({}, {}, RestoreIssues(), exact=False)
        given._known = self._classes()
        context = dict(entry.context)
        given.bind(context)
        opaque = any(type(each) in (OpaqueEntry, RecordEntry, EnumEntry) for each in context.values())
        if kind is None or opaque:
            if self._exact:
                self._notes.mismatches.append(
                    f"{path}: the snapshot has a {entry.obj_type}, and the application has none to fill; create it "
                    "in the application first, or allow its class: torch.serialization.add_safe_globals([...])"
                )
            else:
                self._unknown(path, entry.obj_type)
            return
        made = SubclassEntry(entry.keys, obj_type=entry.obj_type, context=context)
        entries[path] = BoundWrapper(
            entry.keys,
            replicated=entry.replicated,
            obj_type=entry.obj_type,
            dtype=entry.dtype,
            shape=entry.shape,
            requires_grad=entry.requires_grad,
            context=entry.context,
            kind=kind,
            given=made.context_value(),
        )

    def _filled(self, path: str, entry: SubclassEntry, held: Any) -> None:
        """Bind a live tensor of the same class, whose inner tensors are filled. All other properties must be equal."""
        inner, context = compound.read_inner_tensors(held)
        here = compound.make_wrapper_entry(held, list(inner), flatten_context(held, context))
        for what in ("obj_type", "keys", "dtype", "shape"):
            saved, live = getattr(entry, what), getattr(here, what)
            if saved == live:
                continue
            text = f"{path}: the snapshot has {_text(saved)}, the application {_text(live)}"
            if what == "shape" and self._left is not None:
                self._notes.add("skipped", path, f"{text.partition(': ')[2]}; left unchanged")
                self._left.update(each for each in self._live if each.startswith(f"{path}/"))
                self.wrappers[path] = held
                self.unfit.append(held)
            else:
                self._notes.mismatches.append(f"{text}; a wrapped tensor is not cast" if what == "dtype" else text)
            return
        for name in dict.fromkeys([*entry.context, *here.context]):
            saved, live = entry.context.get(name), here.context.get(name)
            if OpaqueEntry in (type(saved), type(live)):
                self._notes.add("kept", path, f"context{name} cannot be stored; the live tensor keeps its own")
            elif _plain(saved) != _plain(live):
                self._notes.mismatches.append(
                    f"{path}: the context{name} of its {entry.obj_type} was {_shown(saved)}, but is {_shown(live)} here"
                )
        self.wrappers[path] = held

    def expect_filled(self, values: dict[str, Any]) -> None:
        """Add mismatches for inner tensors that could not be restored in place, and set the live tensors as values."""
        for path, held in self.wrappers.items():
            for name in compound.read_inner_tensors(held)[0]:
                below = f"{path}/{encode_component(name)}"
                if below not in self.wrappers and values.get(below) is not self._live.get(below):
                    self._notes.mismatches.append(f"{below}: does not fit the inner tensor of the application's {path}")
            values[path] = held

    # Classes

    def _class(self, form: str, name: str) -> type | None:
        return self._classes().get((form, name))

    def _classes(self) -> dict[tuple[str, str], type]:
        """Return the classes of live values and the allowed ones, by name."""
        if self._known is None:
            nested = getattr(sys.modules.get("torch.nested._internal.nested_tensor"), "NestedTensor", None)
            allowed = [each for each in (nested, *torch.serialization.get_safe_globals()) if isinstance(each, type)]
            held = [type(each) for each in self._compounds.values()]
            for each in self._compounds.values():
                held += _in_context(each)
            in_sets = (type(each) for found in self._live.values() if type(found) in _SETS for each in found)
            self._known = {
                (form, class_name(kind)): kind
                for kind in (*allowed, *in_sets, *held)
                if (form := find_form(kind)) is not None
            }
        return self._known

    def _unknown(self, path: str, name: str) -> None:
        """Report an object whose class is neither that of a live object nor allowed."""
        short = name.rpartition(".")[2]
        self._notes.add(
            "replaced",
            path,
            f"the application has no {name} here, and its class is not allowed, so it is a SavedObject; put an "
            f"instance here before the restore, or call torch.serialization.add_safe_globals([{short}])",
        )

    def _lacks_field(self, path: str, kind: type, name: str) -> None:
        """Report an object that cannot be created, since its class has a new field."""
        self._notes.add(
            "replaced",
            path,
            f"{class_name(kind)} has a field {name!r} without a default, which was not saved, so it is a SavedObject",
        )

    def _renamed(self, path: str, saved: str, kind: type) -> None:
        if saved != class_name(kind):
            self._notes.add("replaced", path, f"was a {saved}, but is a {class_name(kind)} here")


_SETS = (set, frozenset)
_NAMING = frozenset((RecordEntry, NamedTupleEntry, SubclassEntry, EnumEntry))


def _above(path: str) -> Iterator[str]:
    """Yield a path, and the paths of the containers around it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _in_context(value: Any) -> list[type]:
    """Return the classes in the context of a wrapped tensor."""
    found: dict[str, Any] = {}
    if find_form(type(value)) is compound.WRAPPER:
        collect_leaves("", compound.read_inner_tensors(value)[1], found)
    return [type(each) for each in found.values()]


def _plain(entry: Any) -> Any:
    """Return the part of an entry that must be equal in two contexts; class names may have changed."""
    if isinstance(entry, EnumEntry):
        return "Enum", entry.held, entry.serialized_value if entry.held is not None else entry.name
    if entry is not None and entry.is_value:
        return type(entry), entry.identity
    return type(entry), getattr(entry, "keys", None), getattr(entry, "length", None), getattr(entry, "maxlen", None)


def _shown(entry: Entry | None) -> str:
    if entry is None:
        return "not there"
    if isinstance(entry, Scalar):
        return entry.readable or entry.serialized_value[:60]
    return entry.type


def _text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
