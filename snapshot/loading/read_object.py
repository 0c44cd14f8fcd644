"""Reading of single objects and whole state dicts, without a live application."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from snapshot.errors import RestoreError, SnapshotError
from snapshot.formats.foreign import ForeignDocument, narrow_root
from snapshot.io.loop import run
from snapshot.loading.live import Binding, has_overlaps, is_writable
from snapshot.loading.open import Opened, expect_conditions, expect_files
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.shared_memory import find_shared_memory
from snapshot.manifest import entries as e
from snapshot.manifest.containers import Container
from snapshot.manifest.document import Document, check_shape, check_tensor, check_tree, find_locations
from snapshot.manifest.paths import encode_component
from snapshot.manifest.plain_tree import PLAIN_TREE
from snapshot.manifest.rank_view import find_rank_paths, is_rank, make_rank_view, resolve_path, suggest_names
from snapshot.manifest.values import EnumEntry
from snapshot.reports import RestoreIssues
from snapshot.state import leaves
from snapshot.state.compound import collect_leaves
from snapshot.state.flatten import Flattened, inflate_tree
from snapshot.state.sharded import Shards, find_shards
from snapshot.state.stateful import RestoreAdapter
from snapshot.tensors.geometry import Box
from snapshot.tensors.memory import BY_NAME, NAMES
from snapshot.text import counted, listed, with_article

if TYPE_CHECKING:
    from snapshot.formats.to_entries import RebuiltTensor

# Objects in other libraries' archives that hold only plain values, expanded to entries.
#
# An optimizer can then be restored from the contents of its groups instead of opaque objects.

LONGEST = 1 << 20
"""Longer objects are not expanded."""


def expand_objects(
    opened: Opened,
    entries: dict[str, Any],
    wanted: Callable[[str], bool],
    adapter: type[RestoreAdapter],
) -> None:
    """Replace `wanted` objects of plain values by entries, for statefuls of this kind. Other objects stay unchanged."""
    if not isinstance(opened.document, ForeignDocument) or not adapter.unfolds:
        return
    chosen = {
        path: msgspec.structs.replace(entry, serializer="bytearray")
        for path, entry in entries.items()
        if entry.is_object and entry.serializer == "torch_save" and entry.nbytes <= LONGEST and wanted(path)
    }
    if not chosen:
        return
    from snapshot.formats.safe_pickle import evaluate_pickle
    from snapshot.formats.to_entries import make_entries, read_pickle  # for other libraries' checkpoints alone

    values = _read_values(opened, chosen, verify=False)
    for path in chosen:
        try:
            content = read_pickle(values[path])
            inline = bytearray()
            node = evaluate_pickle(content, path)
            found = make_entries({path: node}, path, _refuse_tensor, len(content), inline=inline)
        except (SnapshotError, ValueError, KeyError):
            continue  # reading it raises
        if not inline and not any(each.is_object for each in found.values()):
            entries.update(found)


def _read_values(opened: Opened, entries: Mapping[str, e.ObjectEntry], *, verify: bool) -> dict[str, Any]:
    """Return the values of some objects by path, after a look at their files."""
    run(expect_files(opened, find_locations(entries, opened.document.files)))
    read_plan = ReadPlan(opened.document.files)
    for path, entry in entries.items():
        read_plan.new(path, entry)
    read_plan.execute(opened, verify=verify)
    return read_plan.values


def expand_trees(opened: Opened, entries: dict[str, Any], wanted: Callable[[str], bool] = lambda path: True) -> None:
    """Replace `wanted` trees of plain values by an entry for each value, as a selection or a new name needs them."""
    chosen = {path: entry for path, entry in entries.items() if is_tree(entry) and wanted(path)}
    if not chosen:
        return
    values = _read_values(opened, chosen, verify=True)
    made: dict[str, Any] = {}
    for path, entry in entries.items():
        if path not in chosen:
            made[path] = entry
            continue
        flat = Flattened()
        flat.add(path, values[path])
        for below, each in flat.entries.items():
            assert each is not None  # no value of a tree is stored elsewhere
            made[below] = msgspec.structs.replace(each, replicated=True) if entry.replicated else each
    entries.clear()
    entries.update(made)


def is_tree(entry: Any) -> bool:
    """Return True if an entry is a tree of plain values."""
    return entry is not None and entry.is_object and entry.serializer == PLAIN_TREE


def _refuse_tensor(path: str, found: RebuiltTensor) -> e.TensorEntry:
    raise ValueError("a tensor in an object")


# Reading of single objects and whole state dicts, without a live application.


def read_object(
    opened: Opened,
    path: str,
    obj_out: Any,
    box: Sequence[slice | int] | None,
    *,
    verify: bool,
    allow_pickle: bool,
) -> Any:
    """Return the object at a path of the manifest."""
    document = opened.document
    path, tree = _find_tree(opened, path)
    entry = tree[path]
    if box is None:
        run(expect_files(opened, find_locations({path: entry}, document.files), reads=True))
    read_plan = ReadPlan(document.files, allow_pickle=allow_pickle)
    if box is not None:
        return _read_box(opened, read_plan, path, entry=entry, obj_out=obj_out, box=box, verify=verify)
    if isinstance(entry, (Container, EnumEntry)):
        return read_tree(opened, read_plan, path, tree=tree, verify=verify, out=obj_out)
    target = find_shards(path, obj_out) if entry.is_tensor and obj_out is not None else None
    if target is not None:
        _fill_shards(read_plan, path, entry, target, document)
        read_plan.values[path] = obj_out
    elif isinstance(obj_out, torch.Tensor) and entry.is_tensor:
        _expect_fitting_out(path, entry.shape, entry.dtype, obj_out)
        check_tensor(path, entry, document.files)
        read_plan.into(path, entry, obj_out, live=True)
        read_plan.values[path] = obj_out
    elif isinstance(obj_out, np.ndarray) and isinstance(entry, e.NDArrayEntry):
        _expect_fitting_array(path, entry, obj_out)
        read_plan.into_array(path, entry, obj_out)
    elif isinstance(obj_out, (torch.Tensor, np.ndarray)) and (entry.is_tensor or isinstance(entry, e.NDArrayEntry)):
        kind = "a tensor" if entry.is_tensor else "an array"
        raise RestoreError(f"{path}: obj_out must be {kind}, got a {type(obj_out).__name__}", [path])
    elif entry.is_object and read_plan.into_random(path, entry, obj_out):
        pass  # the live generator is the value
    elif isinstance(obj_out, torch.Generator) and type(entry) is e.TensorPartsEntry:
        if not read_plan.into_generator(path, entry, obj_out):
            raise RestoreError(
                f"{path}: obj_out must fit {with_article(entry.kind)} {entry.params}, got one on {obj_out.device}",
                [path],
            )
    else:
        read_plan.new(path, entry)
    _execute(opened, read_plan, verify)
    return read_plan.values[path]


def _expect_fitting_array(path: str, entry: e.NDArrayEntry, obj_out: np.ndarray[Any, Any]) -> None:
    if not obj_out.flags.writeable:
        raise RestoreError(f"{path}: obj_out must be writable", [path])
    if has_overlaps(obj_out):
        raise RestoreError(f"{path}: obj_out must be an array without overlapping elements", [path])
    if obj_out.shape != entry.shape or leaves.read_dtype(path, entry.dtype) != obj_out.dtype:
        raise RestoreError(
            f"{path}: obj_out must be {entry.dtype}{list(entry.shape)}, got {obj_out.dtype.str}{list(obj_out.shape)}",
            [path],
        )


def read_state_dict(opened: Opened, key: str, rank: int, *, allow_pickle: bool) -> Any:
    """Return the state that a rank saved under one key of the app state.

    A rank that did not exist gets the state that all ranks shared.
    """
    document = opened.document
    saved = document.world_size
    if rank >= saved:
        view = make_rank_view(document.manifest, rank, saved, rank + 1)
        for below, why in view.withheld.items():
            if below.startswith(encode_component(key) + "/"):
                raise RestoreError(
                    f"{opened.url}: {below} {why}, and rank {rank} did not exist; replicate_from_rank0=True returns "
                    "rank 0's state",
                    [below],
                )
        rank = 0
    path = f"{rank}/{encode_component(key)}"
    keys = (each.split("/") for each in document.manifest if each.count("/") == 1)
    known = [name for number, name in keys if number == str(rank)]
    try:
        tree = _entries_below(opened, path)
    except RestoreError:
        raise RestoreError(f"{opened.url}: has no key {key!r}; {suggest_names(key, known)}", [key]) from None
    return read_tree(opened, ReadPlan(document.files, allow_pickle=allow_pickle), path, tree=tree, verify=True)


def _find_tree(opened: Opened, path: str) -> tuple[str, dict[str, Any]]:
    """Return the manifest path for a name with or without a rank, and the entries below it."""
    document = opened.document
    if is_rank(path.partition("/")[0], document.world_size):
        try:
            return path, _entries_below(opened, path)
        except RestoreError:  # the number may be a key of the app state
            pass
    manifest, saved = document.manifest, document.world_size
    try:
        path = resolve_path(manifest, saved, path, str(opened.url))
    except RestoreError:
        above, inner = path, ""
        while "/" in above:
            above, _, name = above.rpartition("/")
            inner = f"/{name}{inner}"
            number, _, logical = above.partition("/")
            shared = find_rank_paths(manifest, saved, logical) if is_rank(number, saved) and logical else []
            for each in (*find_rank_paths(manifest, saved, above), *shared):
                if is_tree(manifest[each]):
                    full = resolve_path(manifest, saved, above, str(opened.url))
                    return _find_in_tree(opened, full, full + inner)
        raise
    return path, _entries_below(opened, path)


def _find_in_tree(opened: Opened, above: str, path: str) -> tuple[str, dict[str, Any]]:
    """Return the entries at a path inside a tree of plain values."""
    found = {above: opened.document.manifest[above]}
    expand_trees(opened, found)
    if path not in found:
        raise RestoreError(f"{opened.url}: has no entry {path!r}; {suggest_names(path, found)}", [path])
    return path, {below: each for below, each in found.items() if below == path or below.startswith(f"{path}/")}


def _entries_below(opened: Opened, path: str) -> dict[str, Any]:
    """Return the entries at a path and below it, as the path's rank sees them.

    Shared entries may be stored under another rank.
    """
    document = opened.document
    manifest: Mapping[str, Any] = document.manifest
    number, _, logical = path.partition("/")
    entry = manifest.get(path)
    if entry is not None and not entry.is_container:
        return {path: entry}
    if document.world_size > 1 and number.isdecimal() and int(number) < document.world_size:
        view = make_rank_view(manifest, int(number), document.world_size, document.world_size)
        entries = {**view.elsewhere, **view.entries} if logical not in view.entries else view.entries
        manifest = {f"{number}/{below}": each for below, each in entries.items()}
    prefix = path + "/"
    if path not in manifest and is_rank(path, document.world_size):
        return _all_of_rank(path, manifest, document)
    if path not in manifest:
        raise RestoreError(f"{opened.url}: has no entry {path!r}; {suggest_names(path, manifest)}", [path])
    return {below: each for below, each in manifest.items() if below == path or below.startswith(prefix)}


def _all_of_rank(number: str, manifest: Mapping[str, Any], document: Document) -> dict[str, Any]:
    """Return all entries of a rank, under its number."""
    below = {path: entry for path, entry in manifest.items() if path.startswith(f"{number}/")}
    names = dict.fromkeys(path.split("/", 2)[1] for path in below)
    return {number: narrow_root(document, names), **below}


def read_tree(
    opened: Opened,
    read_plan: ReadPlan,
    path: str,
    *,
    tree: dict[str, Any],
    verify: bool,
    out: Any = None,
) -> Any:
    """Return the object at a path from its entries, and those below it."""
    check_tree(path, tree)
    run(expect_files(opened, find_locations(tree, opened.document.files)))
    places = _bind_classes(path, tree, out, read_plan)
    for below, entry in tree.items():
        if entry.is_container or below in read_plan.values:
            continue
        held = places.get(below)
        if entry.is_tensor and isinstance(held, torch.Tensor):
            check_tensor(below, entry, opened.document.files)
            read_plan.into(below, entry, held, live=True)
            read_plan.values[below] = held
        else:
            read_plan.new(below, entry)
    if lines := find_shared_memory(read_plan):
        raise RestoreError(f"{path}: does not fit obj_out:{listed(lines)}", lines)
    _execute(opened, read_plan, verify)
    return inflate_tree(path, tree, read_plan.values)


def _bind_classes(path: str, tree: dict[str, Any], out: Any, read_plan: ReadPlan) -> dict[str, Any]:
    """Bind entries to the classes of `out`, and return the tensors of `out` that are filled.

    Those are the tensors inside objects that have a class of their own.
    """
    compounds: dict[str, Any] = {}
    live = collect_leaves(path, out, compounds) if out is not None else {}
    notes = RestoreIssues()
    binding = Binding(live, compounds, notes, exact=False, fill=path)
    binding.bind(tree)
    above = tuple(f"{each}/" for each in compounds)
    places = {}
    for below, held in live.items():
        entry = tree.get(below)
        if isinstance(held, torch.Tensor) and entry is not None and entry.is_tensor and below.startswith(above):
            fits = is_writable(held) and tuple(held.shape) == tuple(entry.shape)
            if fits and held.dtype == BY_NAME.get(entry.dtype):
                places[below] = held
    values = dict(places)
    binding.expect_filled(values)
    if notes.mismatches:
        raise RestoreError(f"{path}: does not fit obj_out:{listed(notes.mismatches)}", notes.mismatches)
    read_plan.values.update({below: values[below] for below in binding.wrappers})
    return places


def _fill_shards(read_plan: ReadPlan, path: str, entry: e.AnyTensor, target: Shards, document: Document) -> None:
    """Fill this rank's shards of a tensor, reading only their ranges."""
    if target.shape != tuple(entry.shape) or target.dtype != BY_NAME.get(entry.dtype):
        raise RestoreError(
            f"{path}: obj_out must be {entry.dtype}{list(entry.shape)}, "
            f"got {NAMES.get(target.dtype, target.dtype)}{list(target.shape)}",
            [path],
        )
    if not all(is_writable(piece.tensor) for piece in target.pieces):
        raise RestoreError(f"{path}: obj_out must be strided, without overlapping elements", [path])
    check_tensor(path, entry, document.files, boxes=[piece.box for piece in target.pieces])
    for piece in target.pieces:
        read_plan.into_box(path, entry, piece.box, piece.tensor, live=True)


def _read_box(
    opened: Opened,
    read_plan: ReadPlan,
    path: str,
    *,
    entry: Any,
    obj_out: Any,
    box: Sequence[slice | int],
    verify: bool,
) -> Any:
    if not entry.is_tensor:
        raise RestoreError(f"{path}: only a tensor can be read by a box, got {type(entry).__name__}", [path])
    if isinstance(obj_out, np.ndarray):
        raise RestoreError(f"{path}: obj_out must be a tensor, got a {type(obj_out).__name__}", [path])
    check_shape(path, entry)
    wanted, dropped = parse_box(path, entry.shape, box)
    check_tensor(path, entry, opened.document.files, boxes=[wanted])
    run(expect_conditions(opened, find_locations({path: entry}, opened.document.files)))
    made = torch.empty(wanted.sizes, dtype=BY_NAME[entry.dtype], device="cpu")
    shape = [size for axis, size in enumerate(wanted.sizes) if axis not in dropped]
    if isinstance(obj_out, torch.Tensor):
        _expect_fitting_out(path, tuple(shape), entry.dtype, obj_out)
        target = obj_out
        for axis in sorted(dropped):
            target = target.unsqueeze(axis)
        read_plan.into_box(path, entry, wanted, target, live=True)
    else:
        read_plan.into_box(path, entry, wanted, made)
    _execute(opened, read_plan, verify)
    return obj_out if isinstance(obj_out, torch.Tensor) else made.view(shape)


def parse_box(path: str, shape: tuple[int, ...], box: Sequence[slice | int]) -> tuple[Box, set[int]]:
    """Return the box that slices and ints select, and the dimensions that ints drop."""
    if len(box) > len(shape):
        raise ValueError(f"{path}: the box must have at most {counted(len(shape), 'dimension')}, got {len(box)}")
    offsets, sizes, dropped = list((0,) * len(shape)), list(shape), set()
    for axis, part in enumerate(box):
        if isinstance(part, slice):
            begin, stop, step = part.indices(shape[axis])
            if step != 1:
                raise ValueError(f"{path}: the slices of a box must have step 1, got {part}")
            offsets[axis], sizes[axis] = begin, max(0, stop - begin)
        else:
            index = part + shape[axis] if part < 0 else part
            if not 0 <= index < shape[axis]:
                raise IndexError(f"{path}: index {part} is out of range for a dimension of size {shape[axis]}")
            offsets[axis], sizes[axis] = index, 1
            dropped.add(axis)
    return Box(tuple(offsets), tuple(sizes)), dropped


def _expect_fitting_out(path: str, shape: tuple[int, ...], dtype: str, out: torch.Tensor) -> None:
    if not is_writable(out):
        raise RestoreError(f"{path}: obj_out must be strided, without overlapping elements", [path])
    if tuple(out.shape) != shape or out.dtype != BY_NAME.get(dtype):
        raise RestoreError(
            f"{path}: obj_out must be {dtype}{list(shape)}, got {NAMES.get(out.dtype, out.dtype)}{list(out.shape)}",
            [path],
        )


def _execute(opened: Opened, read_plan: ReadPlan, verify: bool) -> None:
    partial = [
        request for request in read_plan.requests if (request.begin, request.end) != tuple(request.stored.byte_range)
    ]
    needed = {request.location for request in partial} | {
        request.stored.blocks[0] for request in partial if request.stored.blocks
    }
    run(expect_files(opened, needed & opened.document.files.keys()))
    read_plan.execute(opened, verify=verify)
