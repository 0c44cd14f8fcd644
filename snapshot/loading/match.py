"""Matching: finds each entry's place in the application, and every mismatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.errors import RestoreError, SnapshotError
from snapshot.loading.choose import ChosenEntries, Matched
from snapshot.loading.live import Binding, Twin, find_other_owner, find_tied, is_writable
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.restore_options import CASTS, RestoreOptions
from snapshot.manifest import entries as e
from snapshot.manifest.document import check_tensor
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import RankView, adopt_entry, remove_entry
from snapshot.manifest.values import Entry
from snapshot.reports import RestoreIssues
from snapshot.saved import class_name
from snapshot.state import leaves
from snapshot.state.flatten import MISSING, ChosenState
from snapshot.state.optimizers import OptimizerAdapter, StateOfParameters
from snapshot.state.sharded import Shards, allocate_like, describes_parts, find_shards
from snapshot.state.stateful import ModuleAdapter, RestoreAdapter, find_names_beneath
from snapshot.tensors.memory import BY_NAME, address_of_tensor

# Matching of leaves: stored tensors, arrays and objects with their live counterparts.


class LeafMatcher:
    """Finds the place of single leaves."""

    def __init__(self, of: Matching, matched: Matched) -> None:
        self._options = of.options
        self._casts = CASTS[of.options.cast]
        self._notes = of.issues
        self.matched = matched
        self._reads = of.reads

    def match_tensor(self, adapter: RestoreAdapter, path: str, entry: e.AnyTensor, held: torch.Tensor) -> None:
        """Match a saved tensor with a live one: filled in place, cast, replaced, or an error."""
        notes = self._notes
        if isinstance(held, UninitializedTensorMixin):
            self._make_new(path, entry)
            return
        if held.is_meta:
            notes.mismatches.append(f"{path}: is on the meta device; give it memory first: module.to_empty(device=...)")
            return
        extra = entry.extra or e.PLAIN
        if not adapter.exact and extra.subclass != _subclass_name(held):
            notes.add("replaced", path, f"a {extra.subclass or 'plain tensor'} instead of a {type(held).__name__}")
            self._make_new(path, entry, held.device)
            return
        if held.shape != entry.shape or not is_writable(held):
            what = (
                f"the snapshot has {list(entry.shape)}, the application {list(held.shape)}"
                if held.shape != entry.shape
                else "the application's tensor has overlapping elements, another layout, or less memory than elements"
            )
            if adapter.exact:
                self._misfit(path, what, held)
            else:
                notes.add("replaced", path, what)
                self._make_new(path, entry, held.device)
            return
        fits = self._fits_dtype(adapter, path, entry, held.dtype)
        if fits is None:
            self._make_new(path, entry, held.device)
        if not fits:
            return
        if entry.is_sharded and len(entry.stored()) > 1:
            notes.add("resharded", path, "from shards to one tensor")
        check_tensor(path, entry, self._reads.files, partial=self._reads.partial)
        self._reads.into(path, entry, held, live=True)
        self._reads.values[path] = held

    def _misfit(self, path: str, what: str, held: Any) -> None:
        """Report a tensor that cannot be restored, or leave it unchanged."""
        if self._options.mismatched == "skip":
            self._notes.add("skipped", path, f"{what}; left unchanged")
            self._reads.values[path] = held
            self.matched.unfit.add(path)
            self.matched.unfit_memory |= {address_of_tensor(held)} if isinstance(held, torch.Tensor) else set()
            self.matched.restored -= 1
            self.matched.left = True
        else:
            self.matched.shapes = True
            self._notes.mismatches.append(f"{path}: {what}")

    def _fits_dtype(
        self, adapter: RestoreAdapter, path: str, entry: e.AnyTensor, dtype: torch.dtype, *, exact: bool = False
    ) -> bool | None:
        """Return True if the dtype fits, None if the leaf is to be replaced, and False if it is an error."""
        saved = BY_NAME.get(entry.dtype)
        if saved is dtype or saved is None:
            return True
        what = f"the snapshot has {entry.dtype}, the application {str(dtype).removeprefix('torch.')}"
        if not (adapter.exact or exact):
            self._notes.add("replaced", path, what)
            return None
        if not self._casts(saved, dtype):
            hint = "; allow it with RestoreOptions(cast='same_kind'), or 'any'" if self._options.cast == "error" else ""
            self._notes.mismatches.append(f"{path}: {what}{hint}")
            return False
        self._notes.add("cast", path, what)
        return True

    def match_shards(self, adapter: RestoreAdapter, path: str, entry: e.AnyTensor, held: Any) -> bool:
        """Match a saved tensor with a live sharded one. Return False if this rank holds no such tensor."""
        try:
            made = adapter.find_like(path, entry.shape) if held is MISSING else None
            dtype = self._dtype(adapter, path, entry) if made is not None else None
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
            self._misfit(path, what, held)
        elif self._fits_dtype(adapter, path, entry, target.dtype, exact=True):
            self._place_shards(path, entry, target, live=made is None)
            self._reads.values[path] = value
        return True

    def _place_shards(self, path: str, entry: e.AnyTensor, target: Shards, *, live: bool) -> None:
        boxes = {(box.offsets, box.sizes) for box, _ in entry.pieces()}
        if not all((piece.box.offsets, piece.box.sizes) in boxes for piece in target.pieces if piece.box.numel):
            was = "shards" if entry.is_sharded else "one tensor"
            self._notes.add("resharded", path, f"from {was} of another layout" if was == "shards" else f"from {was}")
        wanted = [piece.box for piece in target.pieces]
        check_tensor(path, entry, self._reads.files, partial=self._reads.partial, boxes=wanted)
        for piece in target.pieces:
            self._reads.into_box(path, entry, piece.box, piece.tensor, live=live)

    def match_other(self, adapter: RestoreAdapter, path: str, entry: Any, held: Any) -> None:
        """Match any other pair: arrays, generators, objects, and tensors of several parts."""
        if entry.is_tensor and isinstance(held, torch.Tensor):
            self.match_tensor(adapter, path, entry, held)
            return
        if type(entry) is e.NDArrayEntry and not entry.scalar and _array_fits(held, entry, path):
            self._reads.into_array(path, entry, held)
            return
        parts = isinstance(entry, e.TensorPartsEntry)
        if parts and isinstance(held, torch.Generator) and self._reads.into_generator(path, entry, held):
            return
        if entry.is_object and self._reads.into_random(path, entry, held):
            return
        if parts and isinstance(held, torch.Tensor):
            saved = entry.params.get("shape")
            if adapter.by_name and saved is not None and list(held.shape) != saved:
                self._misfit(path, f"the snapshot has {saved}, the application {list(held.shape)}", held)
                return
            if not adapter.by_name:
                self._notes.add("replaced", path, f"a new {entry.kind} tensor")
        elif held is not MISSING and not entry.is_object:  # objects have no kind to compare before they are read
            self.replace(adapter, path, entry)
        shape, dtype = (), None
        if entry.is_tensor:
            shape, dtype = entry.shape, self._dtype(adapter, path, entry)
            if dtype is not None and dtype is not BY_NAME.get(entry.dtype):
                self._fits_dtype(adapter, path, entry, dtype, exact=True)
        self._make_new(path, entry, adapter.choose_device(path, shape), dtype)

    def _make_new(
        self,
        path: str,
        entry: Entry,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create a new value. A tensor that was a view of another one's memory gets memory of its own."""
        self._reads.new(path, entry, device, dtype)
        shares = None if entry.extra is None else entry.extra.shares
        if shares is not None:
            self._notes.add("changed", path, f"shared memory with {shares}, now has its own")

    def _dtype(self, adapter: RestoreAdapter, path: str, entry: e.AnyTensor) -> torch.dtype | None:
        """Return the dtype of a new tensor: the saved one, unless a cast parameter's optimizer state needs another."""
        chosen = adapter.choose_state_dtype(path, entry) if isinstance(adapter, StateOfParameters) else None
        return chosen or BY_NAME.get(entry.dtype)

    def replace(self, adapter: RestoreAdapter, path: str, entry: Entry) -> None:
        """Handle an entry of another kind than the live value: an error for a module, a new value otherwise."""
        if adapter.by_name and isinstance(adapter.live.get(path), torch.Tensor):
            self._notes.mismatches.append(f"{path}: the snapshot has a {entry.type}, the application a tensor")
        else:
            self._notes.add("replaced", path, f"a new {'tensor' if entry.is_tensor else entry.type}")


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
        and leaves.read_dtype(path, entry.dtype) == held.dtype
    )


# Matching
#
# This reads no data and writes no live tensor.


class Matching(NamedTuple):
    """What is matched: the requested entries of a snapshot, the application's values, and what is known of others."""

    options: RestoreOptions
    adapters: Mapping[str, RestoreAdapter]
    chosen: ChosenEntries
    view: RankView
    reads: ReadPlan
    issues: RestoreIssues
    wanted: Callable[[str], bool]
    """Returns True if a path is requested."""
    holders: Callable[[str], list[int]]
    """Returns the other ranks that had their own entry at a path."""
    several: bool
    """True if several ranks restore."""
    every: bool
    """True if the snapshot has no entries of single ranks."""


def match_all(of: Matching) -> Matched:
    """Find the place of each requested entry. The entries of statefuls that are left unchanged are dropped."""
    matcher, grouped = Matcher(of), of.chosen.grouped
    # Modules first: the state of an optimizer follows what was found of their parameters.
    optimizers_last = sorted(grouped, key=lambda key: isinstance(of.adapters[key], OptimizerAdapter))
    for key in optimizers_last:
        if not matcher.add(of.adapters[key], grouped[key]):
            del grouped[key]
    return matcher.matched


class Matcher:
    """Finds the place of each entry in the application."""

    def __init__(self, of: Matching) -> None:
        self._options = of.options
        self._strict = of.options.strict
        self._wanted, self._holders = of.wanted, of.holders
        self._beside = find_other_owner(of.adapters, of.chosen.grouped, of.chosen.skipped)
        self._elsewhere = of.view.elsewhere
        """Entries of other ranks that this rank may use by name."""
        self._withheld = of.view.withheld
        self._several, self._every = of.several, of.every
        self._notes = of.issues
        chosen = of.chosen
        self.matched = Matched(lacking=chosen.lacking, states=dict(chosen.states), skipped=set(chosen.skipped))
        """The result, once all keys were added."""
        self._reads = of.reads
        self._leaves = LeafMatcher(of, self.matched)

    def add(self, adapter: RestoreAdapter, entries: dict[str, Any]) -> bool:
        """Match the entries of one stateful. Return False if all of it is left unchanged."""
        if not self._match_structure(adapter, entries):
            return False
        self._match_twins(adapter, entries)
        left = self.matched.skipped if self._options.mismatched == "skip" else None
        binding = Binding(
            adapter.live, adapter.compounds, self._notes, exact=adapter.exact, skipped=self.matched.skipped, left=left
        )
        binding.bind(entries)
        self.matched.unfit_memory.update(map(address_of_tensor, binding.unfit))
        if adapter.exact:
            self.matched.lacking = self.matched.lacking or any(path not in entries for path in adapter.live)
        skipped, reads = self.matched.skipped, self._reads
        live = adapter.find_places(entries, skipped) if isinstance(adapter, StateOfParameters) else adapter.live
        for path, entry in self._request_equal(adapter, entries, live):
            held = live.get(path, MISSING)
            if entry.is_container:
                if isinstance(held, torch.Tensor) and adapter.by_name:
                    self._notes.mismatches.append(f"{path}: the snapshot has a {entry.type}, the application a tensor")
                continue
            if path in skipped or path in self.matched.tied:
                reads.values |= {path: held} if held is not MISSING else {}
                continue
            self.matched.restored += 1
            if entry.is_value:
                if isinstance(held, torch.Tensor):
                    self._leaves.replace(adapter, path, entry)
                reads.values[path] = entry.value()
                continue
            if (
                entry.is_tensor
                and (type(held) not in _PLAIN or describes_parts(held))
                and self._leaves.match_shards(adapter, path, entry, held)
            ):
                continue
            if type(entry) is e.TensorEntry and isinstance(held, torch.Tensor):
                self._leaves.match_tensor(adapter, path, entry, held)
            else:
                self._leaves.match_other(adapter, path, entry, held)
        binding.expect_filled(reads.values)
        return True

    def _request_equal(
        self, adapter: RestoreAdapter, entries: Mapping[str, Any], live: Mapping[str, Any]
    ) -> list[tuple[str, Any]]:
        """Request the tensors that are read straight into plain live ones. Return all other entries."""
        kinds = _PLAIN if adapter.exact else _PLAIN[:1]
        left = self.matched.skipped | self.matched.tied
        paths: list[str] = []
        stored: list[e.TensorEntry] = []
        tensors: list[Any] = []
        others = []
        for path, entry in entries.items():
            if (
                type(entry) is e.TensorEntry
                and type(held := live.get(path)) in kinds
                and not (held.__dict__ and describes_parts(held))
                and path not in left
            ):
                paths.append(path)
                stored.append(entry)
                tensors.append(held)
            else:
                others.append((path, entry))
        made = self._reads.request_equal(paths, stored, tensors)
        self.matched.restored += len(made)
        if len(made) == len(paths):
            return others
        equal = {paths[number] for number in made}
        return [(path, entry) for path, entry in entries.items() if path not in equal]

    def _match_structure(self, adapter: RestoreAdapter, entries: dict[str, Any]) -> bool:
        """Compare containers and names, before any leaf. Return False if the whole stateful is left unchanged."""
        if not adapter.by_name:
            self._match_withheld(adapter)
        adopted = adapter.find_adopted(entries, self._elsewhere)
        for path in adopted:
            adopt_entry(entries, path, self._elsewhere[path])
        if not all(map(self._wanted, adopted)):
            self._choose_again(adapter.key, entries)
        choice = self.matched.states.get(adapter.key)
        needed = choice is None or not choice.skipped.intersection(adapter.needs)
        lines = adapter.find_mismatches(entries) if needed else []
        if isinstance(adapter, StateOfParameters) and not adapter.optimizers and adapter.base in entries:
            if self._options.unused == "error":
                self._notes.mismatches.append(
                    f"{adapter.base}: app_state has no optimizer for it, and unused is 'error'"
                )
            kind_of_line = "unexpected" if self._options.unused == "ignore" else "unused"
            self._notes.add(kind_of_line, adapter.base, "the application passes no optimizer for it")
            adapter.drop_optimizer(entries)
        if isinstance(adapter, StateOfParameters) and adapter.optimizers:
            if (choice is None or choice.includes(adapter.base)) and not self._match_optimizer(adapter, entries, lines):
                return False
        else:
            self._notes.mismatches += lines
        self._match_kept(adapter, entries)
        self._match_missing(adapter, entries)
        if adapter.by_name:
            self._match_names(adapter, entries)
        elif choice is not None:
            try:
                choice.merge(adapter.key, entries, dict.fromkeys(entries), adapter.state)
            except RestoreError as error:
                self._notes.mismatches.append(str(error))
        return True

    def _match_optimizer(self, adapter: StateOfParameters, entries: dict[str, Any], lines: list[str]) -> bool:
        """Compare an optimizer with the saved one: its class, options, dtypes and shapes, before any state is placed.

        `lines` has the reasons already known why it cannot take the state. Return False if nothing is restored.
        """
        options, notes, matched = self._options, self._notes, self.matched
        why = adapter.describe_mismatch(entries)
        lines = [why] if why else lines
        if lines and not options.strict:
            reasons = "; ".join(line.removeprefix(f"{adapter.base}: ") for line in lines)
            notes.add("skipped", adapter.base, f"left unchanged: {reasons}")
            matched.left = True
            return not adapter.drop_optimizer(entries)
        if lines:
            notes.mismatches += [f"{line}; strict=False leaves the optimizer unchanged" for line in lines]
            return True
        for line, path, detail in adapter.make_notes():
            notes.add(line, path, detail)
        notes.mismatches += adapter.choose_dtypes(options.cast, CASTS[options.cast], self._beside)
        for name, what in adapter.find_other_shapes(entries, matched.unfit_memory).items():
            path = f"{adapter.base}/state/{name}"
            if options.mismatched == "skip":
                adapter.drop_state(name, entries)
                notes.add("skipped", path, f"{what}; left unchanged")
                matched.left = True
            else:
                matched.shapes = True
                notes.mismatches.append(f"{path}: {what}")
        return True

    def _match_missing(self, adapter: RestoreAdapter, entries: dict[str, Any]) -> None:
        """Raise or report names that the snapshot lacks, and names that only the snapshot has."""
        missing = [path for path in adapter.find_missing(entries) if self._wanted(path)]
        tied = find_tied(adapter, missing, (path for path in adapter.live if self._restores(path, entries)))
        for path in missing:
            if path in tied:
                continue
            if self._strict:
                why = self._withheld.get(path, "is in the application, not in the snapshot")
                self._notes.add_wrong_name(f"{path}: {why}")
            else:
                self._notes.add("missing", path, "left unchanged")
        for path in adapter.find_unexpected(entries):
            if not self._strict:
                self._notes.add("unexpected", path)
                remove_entry(entries, path)
            elif self._several and (self._every or entries[path].is_shared):
                self.matched.unexpected[path] = None
                remove_entry(entries, path)
            else:
                self._notes.add_wrong_name(f"{path}: is in the snapshot, not in the application")

    def _match_twins(self, adapter: RestoreAdapter, entries: Mapping[str, Any]) -> None:
        """Restore one of two entries for the same live tensor. Entries with digests are compared by those."""
        if adapter.models is None:
            return
        present = [path for path in adapter.live if self._restores(path, entries) and path not in self.matched.tied]
        if not present or _has_digest(entries[present[0]]):
            return
        for path, partner in find_tied(adapter, present, present).items():
            entry, other = entries[path], entries[partner]
            if _describe(entry) == _describe(other) is not None:
                self.matched.tied.add(path)
                self.matched.restored += 1
                if list(entry.pieces()) != list(other.pieces()):
                    self.matched.twins.append(Twin(path, entry, partner, other))

    def _restores(self, path: str, entries: Mapping[str, Any]) -> bool:
        return path in entries and path not in self.matched.skipped and entries[path].is_tensor

    def _match_kept(self, adapter: RestoreAdapter, entries: Mapping[str, Any]) -> None:
        """Keep keys that the snapshot lacks, or remove them if requested. A key of another rank only is a mismatch."""
        gone = self.matched.dropped[adapter.key] = []
        for path, key in adapter.find_kept(entries).items():
            if not self._wanted(path):
                continue
            self.matched.lacking = True
            why = next((why for name, why in self._withheld.items() if f"{name}/".startswith(f"{path}/")), None)
            ranks = self._holders(path)
            if ranks and why is None:
                why = f"belongs to rank {', '.join(map(str, ranks))} alone"
            if self._options.exact:
                gone.append(key)
                self._notes.add("removed", path, why or "the snapshot lacks it")
            elif why is None:
                self._notes.add("kept", path, "the snapshot lacks it")
            elif self._strict:
                self._notes.mismatches.append(f"{path}: {why}")
            elif path not in self._withheld:
                self._notes.add("skipped", path, f"{why}; left unchanged")

    def _choose_again(self, key: str, entries: dict[str, Any]) -> None:
        """Apply include and exclude globs to entries that were found with other ranks."""
        choice = self.matched.states[key] = ChosenState(entries, self._wanted)
        for path in sorted(choice.skipped - self.matched.skipped):
            self._notes.add("skipped", path, "not requested")
        self.matched.skipped |= choice.skipped

    def _match_withheld(self, adapter: RestoreAdapter) -> None:
        """Report entries that this rank cannot have, such as half of an optimizer's state."""
        for path, why in self._withheld.items():
            if path.startswith(f"{adapter.key}/") and self._wanted(path):
                if adapter.exact or (self._strict and adapter.wants_entry(path)):
                    self._notes.mismatches.append(f"{path}: {why}")
                else:
                    self._notes.add("skipped", path, why)

    def _match_names(self, adapter: RestoreAdapter, entries: dict[str, Any]) -> None:
        """Compare a module's names with the snapshot's. Names without a match are errors, or left out and reported."""
        saved = find_names_beneath(adapter.key, entries)
        if saved is None or not isinstance(adapter.state, dict):
            self._notes.mismatches.append(f"{adapter.key}: the snapshot holds no module's state under this key")
            return
        here = {f"{adapter.key}/{encode_component(name)}": None for name in adapter.state}
        there = set(saved)
        for path in [path for path in here if path not in there and path in self._elsewhere]:
            adopt_entry(entries, path, self._elsewhere[path])
            saved.append(path)
            there.add(path)
        kept = adapter.kept_names if isinstance(adapter, ModuleAdapter) else set()
        here_alone = (path for name, path in zip(adapter.state, here, strict=True) if name not in kept)
        missing = [path for path in here_alone if path not in there and self._wanted(path)]
        of_both = (path for path in here if path in there and self._restores(path, entries))
        for path, partner in find_tied(adapter, missing, of_both).items():
            adopt_entry(entries, path, entries[partner])
            self.matched.tied.add(path)
            saved.append(path)
        missing = [path for path in missing if path not in self.matched.tied]
        unexpected = [path for path in saved if path not in here]
        if self._several and self._strict:
            of_use = (path for path in unexpected if self._every or (path in entries and entries[path].is_shared))
            self.matched.unexpected |= dict.fromkeys(path for path in of_use if path not in self.matched.skipped)
        if self._strict:
            lacks = "is in the application, not in the snapshot"
            for path in missing:
                self._notes.add_wrong_name(f"{path}: {self._withheld.get(path, lacks)}")
            for path in unexpected:
                if path not in self.matched.skipped and path not in self.matched.unexpected:
                    self._notes.add_wrong_name(f"{path}: is in the snapshot, not in the application")
        for path in missing if not self._strict else ():
            self._notes.add("missing", path, "left unchanged")
        for path in unexpected:
            if path not in self.matched.skipped:
                self._notes.add("unexpected", path)
        away = set(unexpected)
        depth = adapter.key.count("/") + 2
        for below in [each for each in entries if "/".join(each.split("/", depth)[:depth]) in away] if away else ():
            del entries[below]
        top = entries[adapter.key]
        entries[adapter.key] = top.without_children(path not in here for path in saved)


def _has_digest(entry: e.AnyTensor) -> bool:
    return isinstance(entry, _READ) and all(stored.digest is not None for _, stored in entry.pieces())


def _describe(entry: e.AnyTensor) -> tuple[str, tuple[int, ...]] | None:
    return (entry.dtype, tuple(entry.shape)) if isinstance(entry, _READ) else None


_READ = (e.TensorEntry, e.ShardedTensorEntry)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
