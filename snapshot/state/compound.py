"""Objects with a class of their own: dataclasses as their attributes, wrapped tensors as inner ones.

Saved and live objects are taken apart in the same way, so that each part of one matches a part of the other.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from snapshot.errors import SnapshotError
from snapshot.manifest.containers import NAMESPACES, Compound, NamedTupleEntry, RecordEntry, SubclassEntry
from snapshot.manifest.paths import encode_component, encode_key, name_keys
from snapshot.saved import class_name
from snapshot.state.sharded import Sharded

ENUM, RECORD, NAMED, WRAPPER = "Enum", "dataclass", "namedtuple", "TensorSubclass"


_forms: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()


def find_form(kind: type) -> str | None:
    """Return the form of a class: `ENUM`, `RECORD`, `NAMED` or `WRAPPER`; None for any other."""
    try:
        return _forms[kind]
    except KeyError:
        form = _forms[kind] = _find_form(kind)
        return form


def _find_form(kind: type) -> str | None:
    if issubclass(kind, Enum):
        return ENUM
    if issubclass(kind, torch.Tensor):
        wraps = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
        return WRAPPER if wraps and kind is not torch.Tensor else None
    if issubclass(kind, tuple):
        return NAMED if _is_named_tuple(kind) else None
    return RECORD if _is_record(kind) else None


def _is_named_tuple(kind: Any) -> bool:
    """Return True if the fields of a named tuple's instances are their whole state."""
    names = getattr(kind, "_fields", None)
    if type(names) is not tuple or not all(type(each) is str for each in names) or not hasattr(kind, "_make"):
        return False
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    plain = getattr(object, "__getstate__", None)
    return getattr(kind, "__getstate__", plain) is plain and not hasattr(kind, "__setstate__")


def _is_record(kind: type) -> bool:
    """Return True if the attributes of a dataclass's instances are their whole state.

    A builtin base class may hold more, and a class may define its own pickling.
    """
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    if issubclass(kind, Sharded) or any(hasattr(kind, name) for name in _OTHERWISE):
        return False
    ours = (getattr(object, "__getstate__", None), getattr(dataclasses, "_dataclass_getstate", None))
    own = getattr(kind, "__getstate__", None)
    theirs = getattr(kind, "__setstate__", None)
    return own in ours and theirs in (None, getattr(dataclasses, "_dataclass_setstate", None))


_OTHERWISE = ("__getnewargs__", "__getnewargs_ex__", "__snapshot_shards__", "__create_chunk_list__")
"""Methods of classes with their own pickling or sharding."""


def take_apart(value: Any, *, within: bool) -> tuple[Compound, dict[str, Any]] | None:
    """Return an entry without keys, and the attributes of a dataclass's instance, a namespace or a named tuple.

    Return None for any other value, and for one that holds itself, which only a pickle can represent. `within`: it is a
    part of a value that was looked at.
    """
    kind = type(value)
    make, form = NAMESPACES.get(kind), find_form(kind)
    if make is None and form not in (RECORD, NAMED):
        return None
    if (not within and holds_itself(value)) or (form is NAMED and not is_complete(value)):
        return None
    if make is not None:
        return make([]), read_attributes(value)
    made = NamedTupleEntry if form is NAMED else RecordEntry
    return made([], obj_type=class_name(kind)), read_attributes(value)


def collect_leaves(path: str, value: Any, compounds: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the leaves of nested containers, under the paths that flattening gives them.

    Objects with a class of their own are added to `compounds`, under their paths.
    """
    found: dict[str, Any] = {}
    try:
        _collect_leaves(path, value, found, {} if compounds is None else compounds)
    except RecursionError as error:
        raise SnapshotError(f"{path}: nested deeper than Python's stack allows here, or holds itself") from error
    return found


def _collect_leaves(
    path: str, value: Any, found: dict[str, Any], compounds: dict[str, Any], within: bool = False
) -> None:
    """Collect leaves recursively; `within` is True inside an object that is known not to contain itself."""
    kind = type(value)
    names: Iterable[str | None]
    if kind in _SEQUENCES:
        names, held = map(str, range(len(value))), value
    elif kind in _DICTS:
        names, held = name_keys(value), value.values()
        if None in names:  # it is one value if it is saved, and has children in a snapshot that lacks this key
            found[path] = value
    else:
        parts = find_components(value) if within or not holds_itself(value) else None
        if parts is not None or find_form(kind) is ENUM:
            compounds[path] = value
        if parts is None:
            found[path] = value
            return
        names, held, within = map(encode_component, parts), parts.values(), True
    prefix = path + "/"
    for name, child in zip(names, held, strict=True):
        if name is None:
            continue
        if type(child) in _SIMPLE:
            found[prefix + name] = child
        else:
            _collect_leaves(prefix + name, child, found, compounds, within)


_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_SEQUENCES = frozenset((list, tuple, deque))


def find_components(value: Any) -> dict[str, Any] | None:
    """Return the attributes or inner tensors of a value; None for a value without such parts."""
    if type(value) in NAMESPACES:
        return read_attributes(value)
    form = find_form(type(value))
    if form is RECORD or (form is NAMED and is_complete(value)):
        return read_attributes(value)
    return read_inner_tensors(value)[0] if form is WRAPPER and is_wrapper(value) else None


# Dataclasses


def holds_itself(value: Any) -> bool:
    """Return True if an object contains itself, which only a pickle can represent."""
    return _contains_cycle(value, set(), set())


def _contains_cycle(value: Any, above: set[int], done: set[int]) -> bool:
    kind: Any = type(value)
    if kind in _SIMPLE:
        return False
    if find_form(kind) is RECORD or kind in NAMESPACES:
        held: Any = read_attributes(value).values()
    elif issubclass(kind, dict):
        held = value.values()
    elif issubclass(kind, (list, tuple, deque)):
        held = value
    else:
        return False
    if id(value) in above or id(value) in done:
        return id(value) in above
    above.add(id(value))
    found = any(_contains_cycle(each, above, done) for each in held)
    above.discard(id(value))
    done.add(id(value))
    return found


_SIMPLE = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))


def is_complete(value: Any) -> bool:
    """Return True if the fields of a named tuple are all that it holds."""
    return len(value) == len(value._fields) and not getattr(value, "__dict__", None)


def read_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass's instance, a namespace or a named tuple: its fields, then any others.

    Cached properties are left out, since they are computed again.
    """
    kind: Any = type(value)
    if kind in NAMESPACES:
        return dict(vars(value))
    if issubclass(kind, tuple):
        return dict(zip(kind._fields, value, strict=True))
    found = {}
    for name in _find_slots(kind):
        try:
            found[name] = getattr(value, name)
        except AttributeError:  # a field that was never set
            continue
    for name, held in getattr(value, "__dict__", {}).items():
        if name not in found and not is_computed(kind, name):
            found[name] = held
    return found


def find_field_names(kind: Any) -> tuple[str, ...]:
    """Return the names of a class's fields."""
    names = kind._fields if issubclass(kind, tuple) else [each.name for each in dataclasses.fields(kind)]
    return tuple(names)


def _find_slots(kind: Any) -> tuple[str, ...]:
    """Return the names that all instances may have: fields, and slots of classes that are not dataclasses."""
    if issubclass(kind, tuple):
        return find_field_names(kind)
    names = dict.fromkeys(each.name for each in dataclasses.fields(kind))
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names |= dict.fromkeys([slots] if isinstance(slots, str) else slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def is_computed(kind: type, name: str) -> bool:
    """Return True if an attribute is a cached property."""
    return any(isinstance(each.__dict__.get(name), cached_property) for each in kind.__mro__)


def accepts_attribute(kind: type, live: Mapping[str, Any], name: str) -> bool:
    """Return True if an instance accepts an attribute of this name."""
    return name in live or name in _find_slots(kind)


def make_instance(kind: type, held: Mapping[str, Any]) -> Any:
    """Return a new instance with these attributes, without running the code of its class."""
    if issubclass(kind, tuple):
        return tuple.__new__(kind, [held[name] for name in find_field_names(kind)])
    made: Any = object.__new__(kind)
    set_attributes(made, held)
    return made


def set_attributes(target: Any, held: Mapping[str, Any]) -> None:
    """Set attributes of an instance, including a frozen one."""
    for name, value in held.items():
        object.__setattr__(target, name, value)


def find_default(kind: Any, name: str) -> Any:
    """Return the default value of a field; raise KeyError if it has none."""
    if issubclass(kind, tuple):
        return getattr(kind, "_field_defaults", {})[name]
    for each in dataclasses.fields(kind):
        if each.name == name and each.default is not dataclasses.MISSING:
            return each.default
        if each.name == name and each.default_factory is not dataclasses.MISSING:
            return each.default_factory()
    raise KeyError(name)


# Tensors that wrap tensors


def _is_dtensor(tensor: Any) -> bool:
    distributed = sys.modules.get("torch.distributed.tensor")
    return distributed is not None and isinstance(tensor, distributed.DTensor)


def is_wrapped_local(tensor: Any) -> bool:
    """Return True for a DTensor whose local part wraps tensors: it cannot be cut into boxes."""
    return _is_dtensor(tensor) and find_form(type(tensor._local_tensor)) is WRAPPER and is_wrapper(tensor._local_tensor)


def is_wrapper(tensor: Any) -> bool:
    """Return True if a tensor of a wrapper class is stored as its inner tensors; a DTensor is stored as its boxes."""
    return not _is_dtensor(tensor) or is_wrapped_local(tensor)


def read_inner_tensors(tensor: Any) -> tuple[dict[str, Any], Any]:
    """Return the inner tensors of a tensor by name, and the context that its class needs.

    Some classes also name other objects, such as meshes. Those are taken from the live tensor.
    """
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    return {name: each for name, each in inner.items() if isinstance(each, torch.Tensor)}, context


def make_wrapper_entry(tensor: Any, names: list[str], context: dict[str, Any]) -> SubclassEntry:
    """Return the entry of a wrapped tensor."""
    return SubclassEntry(
        [encode_key(name) for name in names],  # type: ignore[misc]
        obj_type=class_name(type(tensor)),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=read_outer_shape(tensor),
        requires_grad=bool(tensor.requires_grad),
        context=context,
    )


def read_outer_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the outer shape of a wrapped tensor; -1 for a size that is not a number, as in a nested tensor."""
    return tuple(size if type(size) is int else -1 for size in tensor.shape)


def describe_context(tensor: Any, context: Any) -> Any:
    """Return the stored context of a tensor: the context of its class, or a text of a DTensor's layout."""
    if _is_dtensor(tensor):
        mesh = tensor.device_mesh.mesh.tolist()
        return f"mesh {mesh}, {', '.join(map(str, tensor.placements))}"
    return context
