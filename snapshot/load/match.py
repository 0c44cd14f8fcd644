"""Matching: each entry's place in what the application holds, and everything that does not fit.

Nothing is read here, and nothing touched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from snapshot.errors import RestoreError, SnapshotError
from snapshot.load.aliasing import writable
from snapshot.load.class_binding import Binding
from snapshot.load.match_optimizer import match_optimizer
from snapshot.load.options import CASTS, RestoreOptions
from snapshot.load.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.paths import component
from snapshot.manifest.rank_view import View, adopt, leave_out
from snapshot.manifest.scalars import Scalar
from snapshot.manifest.validate import check_tensor
from snapshot.reports import RestoreIssues
from snapshot.saved import class_name
from snapshot.state import numpy_arrays
from snapshot.state.optimizer_kinds import StateOfParameters
from snapshot.state.sharded import Shards, empty_like, sharded
from snapshot.state.state_tree import MISSING, ChosenState
from snapshot.state.stateful_kinds import Kind, names_beneath
from snapshot.tensors.dtypes import BY_NAME
from snapshot.tensors.memory import address_of_tensor


class Match:
    """What is restored where."""

    def __init__(
        self,
        options: RestoreOptions,
        *,
        wanted: Callable[[str], bool],
        view: View,
        several: bool,
        every: bool,
        holders: Callable[[str], list[int]],
        notes: RestoreIssues,
    ) -> None:
        self._options = options
        self._strict = options.strict
        self._casts = CASTS[options.cast]
        self._wanted = wanted
        self._elsewhere = view.elsewhere
        """Entries that this rank did not have, and may have by name."""
        self._withheld = view.withheld
        self._several = several
        self._every = every
        """Whether all that is in the snapshot is for all ranks."""
        self._holders = holders
        """The other ranks that had something of their own at a path."""
        self._notes = notes
        self.restored = 0
        self.left = False
        """True if something that the snapshot has was left as it is, since it does not fit."""
        self.unfit: set[str] = set()
        """Tensors that are left as they are, since their shape differs."""
        self.unfit_memory: set[int] = set()
        """Addresses of the memory of those tensors."""
        self.shapes = False
        """True if a shape that differs is among the mismatches."""
        self.beside: Callable[[Any], bool] = lambda parameter: False
        """Return True if a live tensor is restored by a stateful other than the optimizer."""
        self.skipped: set[str] = set()
        self.lacking = False
        """Whether the application has names that were not found."""
        self.unknown: list[str] = []
        """Why what was asked for is not to be found here; on another rank it may be."""
        self.choices: dict[str, ChosenState] = {}
        self.dropped: dict[str, list[Any]] = {}
        """Key -> what is removed there before its state is handed back."""
        self.unexpected: dict[str, None] = {}
        """Names of modules that are shared, and which this rank has no use for: another rank may."""

    def add(self, kind: Kind, entries: dict[str, Any], gather: ReadPlan) -> bool:
        """Find each entry's place in what the stateful holds. False where all of it is left as it is."""
        if not self._match_structure(kind, entries):
            return False
        left = self.skipped if self._options.mismatched == "skip" else None
        binding = Binding(kind.live, kind.compounds, self._notes, exact=kind.exact, skipped=self.skipped, left=left)
        binding.bind(entries)
        self.unfit_memory.update(map(address_of_tensor, binding.unfit))
        if kind.exact:
            self.lacking = self.lacking or any(path not in entries for path in kind.live)
        skipped = self.skipped
        live = kind.places(entries, skipped) if isinstance(kind, StateOfParameters) else kind.live
        for path, entry in entries.items():
            held = live.get(path, MISSING)
            if type(entry) is e.TensorEntry and path not in skipped and gather.in_place(path, entry, held, kind.exact):
                self.restored += 1
                continue
            if isinstance(entry, e.Container):
                if isinstance(held, torch.Tensor) and kind.by_name:
                    self._notes.mismatches.append(f"{path}: the snapshot has a {_tag(entry)}, the application a tensor")
                continue
            if path in skipped:
                gather.values |= {path: held} if held is not MISSING else {}
                continue
            self.restored += 1
            if (
                isinstance(entry, e.TENSORS)
                and type(held) not in _PLAIN
                and self._match_shards(kind, path, entry, held, gather)
            ):
                continue
            if type(entry) is e.TensorEntry and isinstance(held, torch.Tensor):
                self._match_tensor(kind, path, entry, held, gather)
            elif isinstance(entry, Scalar):
                if isinstance(held, torch.Tensor):
                    self._replace(kind, path, entry)
                gather.values[path] = entry.value()
            else:
                self._match_other(kind, path, entry, held, gather)
        binding.expect_filled(gather.values)
        return True

    def _match_structure(self, kind: Kind, entries: dict[str, Any]) -> bool:
        """Compare containers and names, before any leaf. Return False if the whole stateful is
        left as it is."""
        if not kind.by_name:
            self._match_withheld(kind)
        adopted = kind.adopts(entries, self._elsewhere)
        for path in adopted:
            adopt(entries, path, self._elsewhere[path])
        if not all(map(self._wanted, adopted)):
            self._choose_again(kind.key, entries)
        choice = self.choices.get(kind.key)
        needed = choice is None or not choice.skipped.intersection(kind.needs)
        lines = kind.mismatches(entries) if needed else []
        if isinstance(kind, StateOfParameters) and not kind.optimizers and kind.base in entries:
            self._notes.add("unexpected", kind.base, "the application gives no optimizer for it")
            kind.leave_optimizer(entries)
        if isinstance(kind, StateOfParameters) and kind.optimizers:
            if (choice is None or choice.wants(kind.base)) and not self._match_optimizer(kind, entries, lines):
                return False
        else:
            self._notes.mismatches += lines
        self._match_kept(kind, entries)
        self._match_missing(kind, entries)
        if kind.by_name:
            self._match_names(kind, entries)
        elif choice is not None:
            try:
                choice.merge(kind.key, entries, dict.fromkeys(entries), kind.state)
            except RestoreError as error:
                self._notes.mismatches.append(str(error))
        return True

    def _match_optimizer(self, kind: StateOfParameters, entries: dict[str, Any], lines: list[str]) -> bool:
        found = match_optimizer(kind, entries, lines, self._options, self.beside, self._notes, self.unfit_memory)
        self.left |= found.left
        self.shapes |= found.shapes
        return found.goes_on

    def _match_missing(self, kind: Kind, entries: dict[str, Any]) -> None:
        """Raise or report names that the snapshot lacks, and names that only the snapshot has."""
        for path in filter(self._wanted, kind.missing(entries)):
            if self._strict:
                why = self._withheld.get(path, "is in the application, not in the snapshot")
                self._notes.mismatches.append(f"{path}: {why}")
            else:
                self._notes.add("missing", path, "left as it is")
        for path in kind.unexpected(entries):
            if not self._strict:
                self._notes.add("unexpected", path)
                leave_out(entries, path)
            elif self._several and (self._every or _is_shared(entries[path])):
                self.unexpected[path] = None
                leave_out(entries, path)
            else:
                self._notes.mismatches.append(f"{path}: is in the snapshot, not in the application")

    def _match_kept(self, kind: Kind, entries: Mapping[str, Any]) -> None:
        """Keep what the snapshot lacks, or remove it if that was asked for. What is another
        rank's is neither: the application asks for it."""
        gone = self.dropped[kind.key] = []
        for path, key in kind.kept(entries).items():
            if not self._wanted(path):
                continue
            self.lacking = True
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
                self._notes.add("skipped", path, f"{why}; left as it is")

    def _choose_again(self, key: str, entries: dict[str, Any]) -> None:
        """Of what was found with other ranks, too, only that is restored which was asked for."""
        choice = self.choices[key] = ChosenState(entries, self._wanted)
        for path in sorted(choice.skipped - self.skipped):
            self._notes.add("skipped", path, "not asked for")
        self.skipped |= choice.skipped

    def _match_withheld(self, kind: Kind) -> None:
        """What this rank cannot have: an optimizer would train on with half of its state."""
        for path, why in self._withheld.items():
            if path.startswith(f"{kind.key}/") and self._wanted(path):
                if kind.exact or (self._strict and kind.asks_for(path)):
                    self._notes.mismatches.append(f"{path}: {why}")
                else:
                    self._notes.add("skipped", path, why)

    def _match_names(self, kind: Kind, entries: dict[str, Any]) -> None:
        """Compare a module's names with the snapshot's; what has no match is an error, or left out and reported."""
        saved = names_beneath(kind.key, entries)
        if saved is None or not isinstance(kind.state, dict):
            self._notes.mismatches.append(f"{kind.key}: the snapshot holds no module's state under this key")
            return
        here = {f"{kind.key}/{component(name)}": None for name in kind.state}
        there = set(saved)
        for path in [path for path in here if path not in there and path in self._elsewhere]:
            adopt(entries, path, self._elsewhere[path])
            saved.append(path)
            there.add(path)
        missing = [path for path in here if path not in there and self._wanted(path)]
        unexpected = [path for path in saved if path not in here]
        if self._several and self._strict:
            of_use = (path for path in unexpected if self._every or _is_shared(entries.get(path)))
            self.unexpected |= dict.fromkeys(path for path in of_use if path not in self.skipped)
        if self._strict:
            lacks = "is in the application, not in the snapshot"
            self._notes.mismatches += [f"{path}: {self._withheld.get(path, lacks)}" for path in missing]
            self._notes.mismatches += [
                f"{path}: is in the snapshot, not in the application"
                for path in unexpected
                if path not in self.skipped and path not in self.unexpected
            ]
        for path in missing if not self._strict else ():
            self._notes.add("missing", path, "left as it is")
        for path in unexpected:
            if path not in self.skipped:
                self._notes.add("unexpected", path)
        away = set(unexpected)
        depth = kind.key.count("/") + 2
        for below in [each for each in entries if "/".join(each.split("/", depth)[:depth]) in away] if away else ():
            del entries[below]
        top = entries[kind.key]
        entries[kind.key] = top.without(path not in here for path in saved)

    def _match_tensor(self, kind: Kind, path: str, entry: Any, held: torch.Tensor, gather: ReadPlan) -> None:
        """A saved tensor and a live one: in place if they agree, else cast, replaced, or an error."""
        notes = self._notes
        if isinstance(held, UninitializedTensorMixin):
            self._make_new(gather, path, entry)
            return
        if held.is_meta:
            notes.mismatches.append(f"{path}: is on the meta device; give it memory first: module.to_empty(device=...)")
            return
        extra = getattr(entry, "extra", None) or e.PLAIN
        if not kind.exact and extra.subclass != _subclass(held):
            notes.add("replaced", path, f"a {extra.subclass or 'plain tensor'} instead of a {type(held).__name__}")
            self._make_new(gather, path, entry, held.device)
            return
        if held.shape != entry.shape or not writable(held):
            what = (
                f"the snapshot has {list(entry.shape)}, the application {list(held.shape)}"
                if held.shape != entry.shape
                else "the application's tensor has elements that share memory, or is of another layout"
            )
            if kind.exact:
                self._misfit(path, what, held, gather)
            else:
                notes.add("replaced", path, what)
                self._make_new(gather, path, entry, held.device)
            return
        fits = self._fits_dtype(kind, path, entry, held.dtype)
        if fits is None:
            self._make_new(gather, path, entry, held.device)
        if not fits:
            return
        if isinstance(entry, e.ShardedTensorEntry) and len(entry.shards) > 1:
            notes.add("resharded", path, "from shards to one tensor")
        check_tensor(path, entry, gather.files, partial=gather.partial)
        gather.into(path, entry, held, live=True)
        gather.values[path] = held

    def _misfit(self, path: str, what: str, held: Any, gather: ReadPlan) -> None:
        """A tensor that cannot be restored where it belongs: an error, or left as it is."""
        if self._options.mismatched == "skip":
            self._notes.add("skipped", path, f"{what}; left as it is")
            gather.values[path] = held
            self.unfit.add(path)
            self.unfit_memory |= {address_of_tensor(held)} if isinstance(held, torch.Tensor) else set()
            self.restored -= 1
            self.left = True
        else:
            self.shapes = True
            self._notes.mismatches.append(f"{path}: {what}")

    def _fits_dtype(self, kind: Kind, path: str, entry: Any, dtype: torch.dtype, *, exact: bool = False) -> bool | None:
        """Whether a dtype will do: None where the leaf is to be replaced, False where it is an error."""
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

    def _match_shards(self, kind: Kind, path: str, entry: Any, held: Any, gather: ReadPlan) -> bool:
        """A saved tensor and one of which this rank holds some boxes; False where what is there is no such thing."""
        try:
            made = kind.like(path, entry.shape) if held is MISSING else None
            dtype = self._dtype(kind, path, entry) if made is not None else None
            value = held if made is None or dtype is None else empty_like(made, dtype)
            target = None if value is MISSING else sharded(path, value)
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
        elif not all(writable(piece.tensor) for piece in target.pieces):
            what = "the application's tensor has elements that share memory"
        if what is not None:  # never replaced: a whole tensor may be larger than what one rank can hold
            self._misfit(path, what, held, gather)
        elif self._fits_dtype(kind, path, entry, target.dtype, exact=True):
            self._place_shards(path, entry, target, gather, live=made is None)
            gather.values[path] = value
        return True

    def _place_shards(self, path: str, entry: Any, target: Shards, gather: ReadPlan, *, live: bool) -> None:
        boxes = {(box.offsets, box.sizes) for box, _ in entry.pieces()}
        if not all((piece.box.offsets, piece.box.sizes) in boxes for piece in target.pieces if piece.box.numel):
            was = "shards" if isinstance(entry, e.ShardedTensorEntry) else "one tensor"
            self._notes.add("resharded", path, f"from {was} of another layout" if was == "shards" else f"from {was}")
        check_tensor(path, entry, gather.files, partial=gather.partial)
        for piece in target.pieces:
            gather.into_box(path, entry, piece.box, piece.tensor, live=live)

    def _match_other(self, kind: Kind, path: str, entry: Any, held: Any, gather: ReadPlan) -> None:
        """Everything that is not one stored range for one live tensor."""
        if isinstance(entry, e.TENSORS) and isinstance(held, torch.Tensor):
            self._match_tensor(kind, path, entry, held, gather)
            return
        if type(entry) is e.NDArrayEntry and not entry.scalar and _fits(held, entry, path):
            gather.into_array(path, entry, held)
            return
        generator = type(entry) is e.TensorPartsEntry and isinstance(held, torch.Generator)
        if generator and gather.into_generator(path, entry, held):
            return
        shape = entry.shape if isinstance(entry, e.TENSORS) else ()
        if type(entry) is e.TensorPartsEntry and isinstance(held, torch.Tensor):
            saved = entry.params.get("shape")
            if kind.by_name and saved is not None and list(held.shape) != saved:
                self._misfit(path, f"the snapshot has {saved}, the application {list(held.shape)}", held, gather)
                return
            if not kind.by_name:
                self._notes.add("replaced", path, f"a new {entry.kind} tensor")
        elif held is not MISSING and not isinstance(entry, e.ObjectEntry):
            self._replace(kind, path, entry)
        dtype = self._dtype(kind, path, entry) if isinstance(entry, e.TENSORS) else None
        if dtype is not None and dtype is not BY_NAME.get(entry.dtype):
            self._fits_dtype(kind, path, entry, dtype, exact=True)
        self._make_new(gather, path, entry, kind.device(path, shape), dtype)

    def _make_new(
        self,
        gather: ReadPlan,
        path: str,
        entry: Any,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a new value. A tensor that was a view of another one's memory has memory of its own now."""
        gather.new(path, entry, device, dtype)
        shares = getattr(getattr(entry, "extra", None), "shares", None)
        if shares is not None:
            self._notes.add("changed", path, f"shared memory with {shares}, and has memory of its own now")

    def _dtype(self, kind: Kind, path: str, entry: Any) -> torch.dtype | None:
        """The dtype of a new tensor: the saved one, but for an optimizer's state of a parameter that was cast."""
        chosen = kind.state_dtype(path, entry) if isinstance(kind, StateOfParameters) else None
        return chosen or BY_NAME.get(entry.dtype)

    def _replace(self, kind: Kind, path: str, entry: Any) -> None:
        """Something of another kind than what is there: a module cannot take it, everything else can."""
        if kind.by_name and isinstance(kind.live.get(path), torch.Tensor):
            self._notes.mismatches.append(f"{path}: the snapshot has a {_tag(entry)}, the application a tensor")
        else:
            self._notes.add("replaced", path, f"a new {'tensor' if isinstance(entry, e.TENSORS) else _tag(entry)}")


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_shared(entry: Any) -> bool:
    return isinstance(entry, e.ShardedTensorEntry) or bool(getattr(entry, "replicated", False))


def _tag(entry: Any) -> str:
    return str(type(entry).__struct_config__.tag)


def _subclass(tensor: torch.Tensor) -> str | None:
    return None if type(tensor) is torch.Tensor else class_name(type(tensor))


def _fits(held: Any, entry: e.NDArrayEntry, path: str) -> bool:
    return (
        type(held) is np.ndarray
        and held.flags.c_contiguous
        and held.flags.writeable
        and held.shape == entry.shape
        and entry.order == "C"
        and BY_NAME.get(entry.data.dtype) is not None
        and numpy_arrays.numpy_dtype(path, entry.dtype) == held.dtype
    )
