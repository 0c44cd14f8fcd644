"""Matching of leaves: stored tensors, arrays and objects with their live counterparts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.errors import SnapshotError
from snapshot.loading.aliasing import is_writable
from snapshot.loading.matched import Matched
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.restore_options import CASTS, RestoreOptions
from snapshot.manifest import entries as e
from snapshot.manifest.validate import check_tensor
from snapshot.reports import RestoreIssues
from snapshot.saved import class_name
from snapshot.state import numpy_arrays
from snapshot.state.optimizer_kinds import StateOfParameters
from snapshot.state.sharded import Shards, allocate_like, find_shards
from snapshot.state.state_tree import MISSING
from snapshot.state.stateful_kinds import Kind
from snapshot.tensors.addresses import address_of_tensor
from snapshot.tensors.dtypes import BY_NAME


class LeafMatcher:
    """Finds the place of single leaves."""

    def __init__(self, options: RestoreOptions, issues: RestoreIssues, matched: Matched) -> None:
        self._options = options
        self._casts = CASTS[options.cast]
        self._notes = issues
        self.matched = matched

    def match_tensor(self, kind: Kind, path: str, entry: e.AnyTensor, held: torch.Tensor, read_plan: ReadPlan) -> None:
        """Match a saved tensor with a live one: filled in place, cast, replaced, or an error."""
        notes = self._notes
        if isinstance(held, UninitializedTensorMixin):
            self._make_new(read_plan, path, entry)
            return
        if held.is_meta:
            notes.mismatches.append(f"{path}: is on the meta device; give it memory first: module.to_empty(device=...)")
            return
        extra = entry.extra or e.PLAIN
        if not kind.exact and extra.subclass != _subclass_name(held):
            notes.add("replaced", path, f"a {extra.subclass or 'plain tensor'} instead of a {type(held).__name__}")
            self._make_new(read_plan, path, entry, held.device)
            return
        if held.shape != entry.shape or not is_writable(held):
            what = (
                f"the snapshot has {list(entry.shape)}, the application {list(held.shape)}"
                if held.shape != entry.shape
                else "the application's tensor has overlapping elements, or another layout"
            )
            if kind.exact:
                self._misfit(path, what, held, read_plan)
            else:
                notes.add("replaced", path, what)
                self._make_new(read_plan, path, entry, held.device)
            return
        fits = self._fits_dtype(kind, path, entry, held.dtype)
        if fits is None:
            self._make_new(read_plan, path, entry, held.device)
        if not fits:
            return
        if isinstance(entry, e.ShardedTensorEntry) and len(entry.shards) > 1:
            notes.add("resharded", path, "from shards to one tensor")
        check_tensor(path, entry, read_plan.files, partial=read_plan.partial)
        read_plan.into(path, entry, held, live=True)
        read_plan.values[path] = held

    def _misfit(self, path: str, what: str, held: Any, read_plan: ReadPlan) -> None:
        """Report a tensor that cannot be restored, or leave it unchanged."""
        if self._options.mismatched == "skip":
            self._notes.add("skipped", path, f"{what}; left unchanged")
            read_plan.values[path] = held
            self.matched.unfit.add(path)
            self.matched.unfit_memory |= {address_of_tensor(held)} if isinstance(held, torch.Tensor) else set()
            self.matched.restored -= 1
            self.matched.left = True
        else:
            self.matched.shapes = True
            self._notes.mismatches.append(f"{path}: {what}")

    def _fits_dtype(
        self, kind: Kind, path: str, entry: e.AnyTensor, dtype: torch.dtype, *, exact: bool = False
    ) -> bool | None:
        """Return True if the dtype fits, None if the leaf is to be replaced, and False if it is an error."""
        saved = BY_NAME.get(entry.dtype)
        if saved is dtype or saved is None:
            return True
        what = f"the snapshot has {entry.dtype}, the application {str(dtype).removeprefix('torch.')}"
        if not (kind.exact or exact):
            self._notes.add("replaced", path, what)
            return None
        if not self._casts(saved, dtype):
            hint = "; allow it with cast='same_kind' or 'any'" if self._options.cast == "error" else ""
            self._notes.mismatches.append(f"{path}: {what}{hint}")
            return False
        self._notes.add("cast", path, what)
        return True

    def match_shards(self, kind: Kind, path: str, entry: e.AnyTensor, held: Any, read_plan: ReadPlan) -> bool:
        """Match a saved tensor with a live sharded one. Return False if this rank holds no such tensor."""
        try:
            made = kind.find_like(path, entry.shape) if held is MISSING else None
            dtype = self._dtype(kind, path, entry) if made is not None else None
            value = held if made is None or dtype is None else allocate_like(made, dtype)
            target = None if value is MISSING else find_shards(path, value)
        except SnapshotError as error:
            self._notes.mismatches.append(str(error))
            return True
        if target is None:
            return False
        what = None
        if target.shape != entry.shape:
            what = f"the snapshot has {list(entry.shape)}, the application {list(target.shape)}"
        elif any(piece.tensor.is_meta for piece in target.pieces):
            self._notes.mismatches.append(f"{path}: is on the meta device; give it memory first: to_empty(device=...)")
            return True
        elif not all(is_writable(piece.tensor) for piece in target.pieces):
            what = "the application's tensor has overlapping elements"
        if what is not None:  # never replaced: a whole tensor may exceed one rank's memory
            self._misfit(path, what, held, read_plan)
        elif self._fits_dtype(kind, path, entry, target.dtype, exact=True):
            self._place_shards(path, entry, target, read_plan, live=made is None)
            read_plan.values[path] = value
        return True

    def _place_shards(self, path: str, entry: e.AnyTensor, target: Shards, read_plan: ReadPlan, *, live: bool) -> None:
        boxes = {(box.offsets, box.sizes) for box, _ in entry.pieces()}
        if not all((piece.box.offsets, piece.box.sizes) in boxes for piece in target.pieces if piece.box.numel):
            was = "shards" if isinstance(entry, e.ShardedTensorEntry) else "one tensor"
            self._notes.add("resharded", path, f"from {was} of another layout" if was == "shards" else f"from {was}")
        check_tensor(path, entry, read_plan.files, partial=read_plan.partial)
        for piece in target.pieces:
            read_plan.into_box(path, entry, piece.box, piece.tensor, live=live)

    def match_other(self, kind: Kind, path: str, entry: e.Entry, held: Any, read_plan: ReadPlan) -> None:
        """Match any other pair: arrays, generators, objects, and tensors of several parts."""
        if isinstance(entry, e.TENSORS) and isinstance(held, torch.Tensor):
            self.match_tensor(kind, path, entry, held, read_plan)
            return
        if type(entry) is e.NDArrayEntry and not entry.scalar and _array_fits(held, entry, path):
            read_plan.into_array(path, entry, held)
            return
        if (
            isinstance(entry, e.TensorPartsEntry)
            and isinstance(held, torch.Generator)
            and read_plan.into_generator(path, entry, held)
        ):
            return
        if isinstance(entry, e.ObjectEntry) and read_plan.into_random(path, entry, held):
            return
        shape = entry.shape if isinstance(entry, e.TENSORS) else ()
        if type(entry) is e.TensorPartsEntry and isinstance(held, torch.Tensor):
            saved = entry.params.get("shape")
            if kind.by_name and saved is not None and list(held.shape) != saved:
                self._misfit(path, f"the snapshot has {saved}, the application {list(held.shape)}", held, read_plan)
                return
            if not kind.by_name:
                self._notes.add("replaced", path, f"a new {entry.kind} tensor")
        elif held is not MISSING and not isinstance(entry, e.ObjectEntry):
            self.replace(kind, path, entry)
        dtype = None
        if isinstance(entry, e.TENSORS):
            dtype = self._dtype(kind, path, entry)
            if dtype is not None and dtype is not BY_NAME.get(entry.dtype):
                self._fits_dtype(kind, path, entry, dtype, exact=True)
        self._make_new(read_plan, path, entry, kind.choose_device(path, shape), dtype)

    def _make_new(
        self,
        read_plan: ReadPlan,
        path: str,
        entry: e.Entry,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a new value. A tensor that was a view of another one's memory gets memory of its own."""
        read_plan.new(path, entry, device, dtype)
        shares = entry.extra.shares if isinstance(entry, e.TENSORS) and entry.extra is not None else None
        if shares is not None:
            self._notes.add("changed", path, f"shared memory with {shares}, now has its own")

    def _dtype(self, kind: Kind, path: str, entry: e.AnyTensor) -> torch.dtype | None:
        """Return the dtype of a new tensor: the saved one, unless a cast parameter's optimizer state needs another."""
        chosen = kind.choose_state_dtype(path, entry) if isinstance(kind, StateOfParameters) else None
        return chosen or BY_NAME.get(entry.dtype)

    def replace(self, kind: Kind, path: str, entry: e.Entry) -> None:
        """Handle an entry of another kind than the live value: an error for a module, a new value otherwise."""
        if kind.by_name and isinstance(kind.live.get(path), torch.Tensor):
            self._notes.mismatches.append(f"{path}: the snapshot has a {entry.type}, the application a tensor")
        else:
            self._notes.add("replaced", path, f"a new {'tensor' if isinstance(entry, e.TENSORS) else entry.type}")


def _subclass_name(tensor: torch.Tensor) -> str | None:
    return None if type(tensor) is torch.Tensor else class_name(type(tensor))


def _array_fits(held: Any, entry: e.NDArrayEntry, path: str) -> bool:
    return (
        type(held) is np.ndarray
        and held.flags.c_contiguous
        and held.flags.writeable
        and held.shape == entry.shape
        and entry.order == "C"
        and BY_NAME.get(entry.data.dtype) is not None
        and numpy_arrays.read_dtype(path, entry.dtype) == held.dtype
    )
