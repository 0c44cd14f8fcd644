"""Matching: finds each entry's place in the application, and every mismatch.

This reads no data and writes no live tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from snapshot.errors import RestoreError
from snapshot.loading.aliasing import Twin, find_tied
from snapshot.loading.class_binding import Binding
from snapshot.loading.match_leaves import LeafMatcher
from snapshot.loading.match_optimizer import match_optimizer
from snapshot.loading.matched import ChosenEntries, Matched
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.restore_options import RestoreOptions
from snapshot.manifest import entries as e
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import RankView, adopt_entry, remove_entry
from snapshot.manifest.scalars import Scalar
from snapshot.reports import RestoreIssues
from snapshot.state.optimizer_kinds import StateOfParameters
from snapshot.state.state_tree import MISSING, ChosenState
from snapshot.state.stateful_kinds import Kind, ModuleKind, find_names_beneath
from snapshot.tensors.addresses import address_of_tensor


class Matcher:
    """Finds the place of each entry in the application."""

    def __init__(
        self,
        options: RestoreOptions,
        chosen: ChosenEntries,
        view: RankView,
        *,
        wanted: Callable[[str], bool],
        beside: Callable[[Any], bool],
        holders: Callable[[str], list[int]],
        several: bool,
        every: bool,
        issues: RestoreIssues,
    ) -> None:
        self._options = options
        self._strict = options.strict
        self._wanted = wanted
        self._beside = beside
        """Returns True if a stateful other than the optimizer restores a live tensor."""
        self._holders = holders
        """Returns the other ranks that had their own entry at a path."""
        self._elsewhere = view.elsewhere
        """Entries of other ranks that this rank may use by name."""
        self._withheld = view.withheld
        self._several = several
        self._every = every
        """True if the snapshot has no entries of single ranks."""
        self._notes = issues
        self.matched = Matched(lacking=chosen.lacking, states=dict(chosen.states), skipped=set(chosen.skipped))
        """The result, once all keys were added."""
        self._leaves = LeafMatcher(options, issues, self.matched)

    def add(self, kind: Kind, entries: dict[str, Any], read_plan: ReadPlan) -> bool:
        """Match the entries of one stateful. Return False if all of it is left unchanged."""
        if not self._match_structure(kind, entries):
            return False
        self._match_twins(kind, entries)
        left = self.matched.skipped if self._options.mismatched == "skip" else None
        binding = Binding(
            kind.live, kind.compounds, self._notes, exact=kind.exact, skipped=self.matched.skipped, left=left
        )
        binding.bind(entries)
        self.matched.unfit_memory.update(map(address_of_tensor, binding.unfit))
        if kind.exact:
            self.matched.lacking = self.matched.lacking or any(path not in entries for path in kind.live)
        skipped = self.matched.skipped
        live = kind.find_places(entries, skipped) if isinstance(kind, StateOfParameters) else kind.live
        for path, entry in entries.items():
            held = live.get(path, MISSING)
            if (
                type(entry) is e.TensorEntry
                and path not in skipped
                and path not in self.matched.tied
                and read_plan.in_place(path, entry, held, kind.exact)
            ):
                self.matched.restored += 1
                continue
            if isinstance(entry, e.Container):
                if isinstance(held, torch.Tensor) and kind.by_name:
                    self._notes.mismatches.append(f"{path}: the snapshot has a {entry.type}, the application a tensor")
                continue
            if path in skipped or path in self.matched.tied:
                read_plan.values |= {path: held} if held is not MISSING else {}
                continue
            self.matched.restored += 1
            if (
                isinstance(entry, e.TENSORS)
                and type(held) not in _PLAIN
                and self._leaves.match_shards(kind, path, entry, held, read_plan)
            ):
                continue
            if type(entry) is e.TensorEntry and isinstance(held, torch.Tensor):
                self._leaves.match_tensor(kind, path, entry, held, read_plan)
            elif isinstance(entry, Scalar):
                if isinstance(held, torch.Tensor):
                    self._leaves.replace(kind, path, entry)
                read_plan.values[path] = entry.value()
            else:
                self._leaves.match_other(kind, path, entry, held, read_plan)
        binding.expect_filled(read_plan.values)
        return True

    def _match_structure(self, kind: Kind, entries: dict[str, Any]) -> bool:
        """Compare containers and names, before any leaf. Return False if the whole stateful is left unchanged."""
        if not kind.by_name:
            self._match_withheld(kind)
        adopted = kind.find_adopted(entries, self._elsewhere)
        for path in adopted:
            adopt_entry(entries, path, self._elsewhere[path])
        if not all(map(self._wanted, adopted)):
            self._choose_again(kind.key, entries)
        choice = self.matched.states.get(kind.key)
        needed = choice is None or not choice.skipped.intersection(kind.needs)
        lines = kind.find_mismatches(entries) if needed else []
        if isinstance(kind, StateOfParameters) and not kind.optimizers and kind.base in entries:
            if self._options.unused == "error":
                self._notes.mismatches.append(f"{kind.base}: app_state has no optimizer for it, and unused is 'error'")
            kind_of_line = "unexpected" if self._options.unused == "ignore" else "unused"
            self._notes.add(kind_of_line, kind.base, "the application passes no optimizer for it")
            kind.drop_optimizer(entries)
        if isinstance(kind, StateOfParameters) and kind.optimizers:
            if (choice is None or choice.includes(kind.base)) and not self._match_optimizer(kind, entries, lines):
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
        found = match_optimizer(
            kind, entries, lines, self._options, beside=self._beside, notes=self._notes, unfit=self.matched.unfit_memory
        )
        self.matched.left |= found.left
        self.matched.shapes |= found.shapes
        return found.goes_on

    def _match_missing(self, kind: Kind, entries: dict[str, Any]) -> None:
        """Raise or report names that the snapshot lacks, and names that only the snapshot has."""
        missing = [path for path in kind.find_missing(entries) if self._wanted(path)]
        tied = find_tied(kind, missing, (path for path in kind.live if self._restores(path, entries)))
        for path in missing:
            if path in tied:
                continue
            if self._strict:
                why = self._withheld.get(path, "is in the application, not in the snapshot")
                self._notes.add_wrong_name(f"{path}: {why}")
            else:
                self._notes.add("missing", path, "left unchanged")
        for path in kind.find_unexpected(entries):
            if not self._strict:
                self._notes.add("unexpected", path)
                remove_entry(entries, path)
            elif self._several and (self._every or _is_shared(entries[path])):
                self.matched.unexpected[path] = None
                remove_entry(entries, path)
            else:
                self._notes.add_wrong_name(f"{path}: is in the snapshot, not in the application")

    def _match_twins(self, kind: Kind, entries: Mapping[str, Any]) -> None:
        """Restore one of two entries for the same live tensor. Entries with digests are compared by those."""
        present = [path for path in kind.live if self._restores(path, entries) and path not in self.matched.tied]
        if kind.models is None or not present or _has_digest(entries[present[0]]):
            return
        for path, partner in find_tied(kind, present, present).items():
            entry, other = entries[path], entries[partner]
            if _describe(entry) == _describe(other) is not None:
                self.matched.tied.add(path)
                self.matched.restored += 1
                if list(entry.pieces()) != list(other.pieces()):
                    self.matched.twins.append(Twin(path, entry, partner, other))

    def _restores(self, path: str, entries: Mapping[str, Any]) -> bool:
        return path not in self.matched.skipped and isinstance(entries.get(path), e.TENSORS)

    def _match_kept(self, kind: Kind, entries: Mapping[str, Any]) -> None:
        """Keep keys that the snapshot lacks, or remove them if requested. A key of another rank only is a mismatch."""
        gone = self.matched.dropped[kind.key] = []
        for path, key in kind.find_kept(entries).items():
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

    def _match_withheld(self, kind: Kind) -> None:
        """Report entries that this rank cannot have, such as half of an optimizer's state."""
        for path, why in self._withheld.items():
            if path.startswith(f"{kind.key}/") and self._wanted(path):
                if kind.exact or (self._strict and kind.wants_entry(path)):
                    self._notes.mismatches.append(f"{path}: {why}")
                else:
                    self._notes.add("skipped", path, why)

    def _match_names(self, kind: Kind, entries: dict[str, Any]) -> None:
        """Compare a module's names with the snapshot's. Names without a match are errors, or left out and reported."""
        saved = find_names_beneath(kind.key, entries)
        if saved is None or not isinstance(kind.state, dict):
            self._notes.mismatches.append(f"{kind.key}: the snapshot holds no module's state under this key")
            return
        here = {f"{kind.key}/{encode_component(name)}": None for name in kind.state}
        there = set(saved)
        for path in [path for path in here if path not in there and path in self._elsewhere]:
            adopt_entry(entries, path, self._elsewhere[path])
            saved.append(path)
            there.add(path)
        kept = kind.kept_names if isinstance(kind, ModuleKind) else set()
        here_alone = (path for name, path in zip(kind.state, here, strict=True) if name not in kept)
        missing = [path for path in here_alone if path not in there and self._wanted(path)]
        of_both = (path for path in here if path in there and self._restores(path, entries))
        for path, partner in find_tied(kind, missing, of_both).items():
            adopt_entry(entries, path, entries[partner])
            self.matched.tied.add(path)
            saved.append(path)
        missing = [path for path in missing if path not in self.matched.tied]
        unexpected = [path for path in saved if path not in here]
        if self._several and self._strict:
            of_use = (path for path in unexpected if self._every or _is_shared(entries.get(path)))
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
        depth = kind.key.count("/") + 2
        for below in [each for each in entries if "/".join(each.split("/", depth)[:depth]) in away] if away else ():
            del entries[below]
        top = entries[kind.key]
        entries[kind.key] = top.without_children(path not in here for path in saved)


def _has_digest(entry: e.AnyTensor) -> bool:
    return isinstance(entry, _READ) and all(stored.digest is not None for _, stored in entry.pieces())


def _describe(entry: e.AnyTensor) -> tuple[str, tuple[int, ...]] | None:
    return (entry.dtype, tuple(entry.shape)) if isinstance(entry, _READ) else None


_READ = (e.TensorEntry, e.ShardedTensorEntry)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_shared(entry: e.Entry | None) -> bool:
    return isinstance(entry, e.ShardedTensorEntry) or (entry is not None and entry.replicated)
