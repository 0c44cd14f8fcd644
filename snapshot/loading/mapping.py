"""Tensor maps on checkpoints: a view's tensors are replaced by those that a map makes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch

from snapshot.errors import RestoreError
from snapshot.io.loop import run
from snapshot.loading.mapped_states import MODEL, plan_states, separate_keys
from snapshot.loading.open import Opened, expect_files
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, check_tensor, find_locations
from snapshot.manifest.paths import add_parents, decode_component, encode_component
from snapshot.manifest.rank_view import RankView, adopt_entry, make_rank_view, rename_entries
from snapshot.manifest.values import Entry
from snapshot.maps.recipe import RecipeTarget, Spec
from snapshot.maps.states import find_states
from snapshot.maps.tensor_map import MapPlan, TensorMap
from snapshot.tensors.geometry import Grid, split_shape
from snapshot.tensors.memory import BY_NAME
from snapshot.text import listed, with_article

_COMPARED = 8 << 20
"""Bytes of a tensor that are compared at once."""


def map_view(opened: Opened, view: RankView, tensor_map: TensorMap) -> RankView:
    """Return a view of a checkpoint with mapped tensors.

    The rules name tensors below a level of the state, such as `model`. Its tensors are replaced, and everything else
    stays. If the map names states of an optimizer and some are there, `model`, `optim` and the rest become
    keys of their own. Quantised weights have been replaced before, by `dequantise_checkpoint`.
    """
    if not isinstance(tensor_map, TensorMap):
        raise TypeError(f"map must be a TensorMap, got {type(tensor_map).__name__}")
    if tensor_map.dequantise is not None and not tensor_map.recipes:
        return view
    known = {**view.elsewhere, **view.entries}
    tensors = {path: entry for path, entry in known.items() if entry.is_tensor}
    bases = _find_bases(tensors, tensor_map)
    made: dict[str, Any] = {}
    gone: set[str] = set()
    shaped: list[str] = []
    for base, names in bases.items():
        own = {name: tensors[path] for name, path in names.items()}
        states = find_states(tensor_map.states, own)
        specs = {name: Spec(each.dtype, tuple(each.shape)) for name, each in own.items() if name not in states}
        plan = tensor_map.plan(specs)
        _expect_equal(opened, own, plan)
        level = f"{base}/{MODEL}" if base and states else MODEL if states else base
        made |= {_join(level, name): entry for name, entry in _map_entries(own, plan).items()}
        if states:
            found = plan_states(own, states, plan, tensor_map)
            made |= {f"{base}/{path}" if base else path: _map_entry(own, target) for path, target in found.items()}
            shaped.append(base)
        gone |= {*names.values(), *_find_dropped_values(known, base, tensor_map)}
    # A target that needs a tensor of another rank alone stays with the others of that rank: it is read only on demand.
    remote = {id(entry) for entry in view.elsewhere.values()}
    there = {path for path, entry in made.items() if any(id(each) in remote for each in entry.sources())}
    kept = {path: entry for path, entry in view.entries.items() if path not in gone}
    taken = sorted((made.keys() & known.keys()) - gone)
    if taken:  # a value that no rule names would be lost silently
        raise RestoreError(f"the tensor map makes {taken[0]}, which exists already", taken)
    kept |= {path: entry for path, entry in made.items() if path not in there}
    elsewhere = {path: entry for path, entry in view.elsewhere.items() if path not in gone}
    elsewhere |= {path: made[path] for path in there}
    view = RankView(_with_containers(kept, view.entries, gone), elsewhere, view.withheld, view.gone, view.unknown)
    for base in shaped:
        view = separate_keys(view, base)
    return view


def dequantise_weights(opened: Opened, tensor_map: Any) -> Opened:
    """Return a checkpoint with plain weights in place of quantised ones, if a map says so."""
    method = getattr(tensor_map, "dequantise", None)
    if method is None:
        return opened
    from snapshot.formats import registry  # few checkpoints are quantised

    found: Opened = registry.find_view(method)(opened, tensor_map)
    return found


def map_checkpoint(opened: Opened, tensor_map: TensorMap | None) -> Opened:
    """Return a checkpoint with mapped tensors, as the state of a single rank.

    Tensors that only one rank has, such as those of a pipeline stage, are part of it.
    """
    if tensor_map is None:
        return opened
    opened = dequantise_weights(opened, tensor_map)
    document = opened.document
    view = make_rank_view(document.manifest, 0, document.world_size, document.world_size)
    several = _adopt_from_ranks(document, view)
    made = map_view(opened, view, tensor_map)
    wrong = sorted(path for path in several if any(tensor_map.matches(name) for _, name in _names_below(path)))
    if wrong:
        raise RestoreError(f"{wrong[0]}: several ranks have a tensor of this name, each with its own values", wrong)
    for path, entry in made.elsewhere.items():
        adopt_entry(made.entries, path, entry)
    manifest = {f"0/{path}": entry for path, entry in made.entries.items()}
    return opened.with_document(msgspec.structs.replace(document, manifest=manifest, world_size=1))


def _adopt_from_ranks(document: Document, view: RankView) -> set[str]:
    """Add the tensors that a single rank has to a view. Return the names of those that several ranks have."""
    several: set[str] = set()
    for path, entry in document.manifest.items():
        number, _, logical = path.partition("/")
        if number == "0" or not entry.is_tensor or entry.is_shared:
            continue
        if logical in view.entries or logical in view.elsewhere:
            several.add(logical)
        else:
            view.elsewhere[logical] = entry
    return several


def _find_bases(tensors: Mapping[str, e.AnyTensor], tensor_map: TensorMap) -> dict[str, dict[str, str]]:
    """Return, for each level that has tensors which the rules name, all tensors below it: name -> path."""
    bases: dict[str, dict[str, str]] = {}
    heads = set()
    for path in tensors:
        for base, name in _names_below(path):
            if tensor_map.matches(name):
                bases.setdefault(base, {})
                heads.add(path.partition("/")[0])
                break
    if not bases:
        some = sorted(tensors)[:5]
        raise RestoreError(f"no rule of the tensor map names a tensor of the checkpoint, such as {some}", some)
    for path in tensors:
        for base, name in _names_below(path):
            # Below the top level, only the keys in which a rule names something: others have names of their own.
            if base in bases and (base or path.partition("/")[0] in heads or "/" not in path):
                if name in bases[base]:
                    raise RestoreError(f"{path} and {bases[base][name]} would both be named {name!r}", [path])
                bases[base][name] = path
                break
    return bases


def _names_below(path: str) -> Iterable[tuple[str, str]]:
    """Yield the levels above a tensor, and its name below each, joined with dots.

    The key of the app state comes first, then a level below it, then the top.
    """
    components = path.split("/")
    for depth in (1, 2, 0):
        if depth < len(components):
            yield "/".join(components[:depth]), ".".join(map(decode_component, components[depth:]))


def _join(base: str, name: str) -> str:
    return f"{base}/{encode_component(name)}" if base else encode_component(name)


def _find_dropped_values(known: Mapping[str, Entry], base: str, tensor_map: TensorMap) -> list[str]:
    """Return the values other than tensors that a rule drops. Raise if a rule uses one."""
    named = {
        path: tensor_map.drops(name)
        for path, entry in known.items()
        if not (entry.is_container or entry.is_tensor)
        for level, name in _names_below(path)
        if level == base and tensor_map.matches(name)
    }
    wrong = [
        f"{path}: a map needs a dense tensor, got {with_article(known[path].type)}"
        for path, drops in named.items()
        if not drops
    ]
    if wrong:
        raise RestoreError(f"the tensor map does not fit:{listed(wrong, 20)}", wrong)
    return list(named)


def _map_entries(own: Mapping[str, e.AnyTensor], plan: MapPlan) -> dict[str, e.AnyTensor]:
    """Return the entries of the targets. A tensor that only gets another name keeps its entry."""
    made: dict[str, e.AnyTensor] = {}
    for name, target in plan.targets.items():
        made[name] = _map_entry(own, target)
    for name, owner in plan.ties.items():
        made[name] = made[owner]
    return made


def _map_entry(own: Mapping[str, e.AnyTensor], target: RecipeTarget) -> e.AnyTensor:
    first = own[target.parts[0].source] if target.parts else None
    if first is not None and len(target.parts) == 1 and (first.dtype, tuple(first.shape)) == target[:2]:
        identity = Grid.identity(target.shape)
        if target.parts[0].grid in (identity, identity.simplified()):
            return first  # it is read as before the map: straight into the live tensor
    parts = [e.MappedPart(own[part.source], part.grid) for part in target.parts]  # type: ignore[arg-type]
    return e.MappedTensorEntry(target.dtype, target.shape, parts)


def _expect_equal(opened: Opened, own: Mapping[str, e.AnyTensor], plan: MapPlan) -> None:
    """Raise unless names of one tensor hold the same values. Values are read if there are no digests."""
    wrong = [
        f"{other} must equal {first}, since only one of them is used"
        for first, other in plan.equal
        if _contents(own[first]) != _contents(own[other])
        and not (_may_be_equal(own[first], own[other]) and _are_equal(opened, own[first], own[other]))
    ]
    if wrong:
        raise RestoreError(f"the tensor map does not fit: {'; '.join(wrong)}", wrong)


def _may_be_equal(first: e.AnyTensor, other: e.AnyTensor) -> bool:
    """Return False if digests tell that two tensors differ. Both have the same dtype and shape."""
    one, two = (entry.pieces() for entry in (first, other))
    if [box for box, _ in one] != [box for box, _ in two]:
        return True  # cut in other ways, so the digests are of other bytes
    digests = [(a.digest, b.digest) for (_, a), (_, b) in zip(one, two, strict=True)]
    return all(a is None or b is None or a == b for a, b in digests)


def _are_equal(opened: Opened, first: e.AnyTensor, other: e.AnyTensor) -> bool:
    """Read two tensors part by part, and compare their bytes."""
    document = opened.document
    dtype = BY_NAME[first.dtype]
    for entry in (first, other):
        check_tensor("a tensor with two names", entry, document.files)
    run(expect_files(opened, find_locations({"first": first, "other": other}, document.files)))
    for box in split_shape(tuple(first.shape), _COMPARED // dtype.itemsize):
        read_plan = ReadPlan(document.files)
        held = [torch.empty(box.sizes, dtype=dtype) for _ in range(2)]
        for entry, target in zip((first, other), held, strict=True):
            read_plan.into_box("a tensor with two names", entry, box, target)
        read_plan.execute(opened, verify=True)
        if not torch.equal(*(each.reshape(-1).view(torch.uint8) for each in held)):
            return False
    return True


def _contents(entry: e.AnyTensor) -> list[Any]:
    """Return a description of the stored values: digests if there are any, otherwise the places of their bytes."""
    return [
        (box, stored.digest or (stored.location, stored.byte_range, stored.extra, stored.serializer))
        for box, stored in entry.pieces()
    ]


def _with_containers(kept: Mapping[str, Any], before: Mapping[str, Any], gone: set[str]) -> dict[str, Any]:
    """Return entries whose containers name their new contents. Containers that the map has emptied are left out."""
    leaves = {path for path, entry in kept.items() if not entry.is_container}
    needed = add_parents(leaves)
    held = add_parents(gone) - gone
    lists = [path for path in held if path in before and before[path].is_container and not before[path].is_keyed]
    emptied = {path for path in held if path not in needed and "/" in path}
    broken = sorted(path for path in lists if path not in emptied)
    if broken:
        raise RestoreError(f"{broken[0]}: elements of a sequence cannot be mapped one by one", broken)
    entries = {path: entry for path, entry in kept.items() if path not in emptied}
    return rename_entries(entries, str)
