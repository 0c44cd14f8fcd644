"""Selection: the entries of a snapshot that a restore requests, by key, globs, names and rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.events import warn
from snapshot.loading.live import Twin
from snapshot.loading.open import Opened
from snapshot.loading.read_object import expand_objects
from snapshot.loading.restore_options import RestoreOptions
from snapshot.manifest.containers import ListEntry, OrderedDictEntry
from snapshot.manifest.document import check_tree
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import RankView, group_by_key, suggest_names
from snapshot.plan.names import find_unmatched, matcher
from snapshot.reports import RestoreIssues
from snapshot.state.adapters import find_adapter, make_adapter
from snapshot.state.flatten import ChosenState
from snapshot.state.rng import RNGState
from snapshot.state.stateful import RestoreAdapter
from snapshot.text import counted

# Results of selection and matching, as values that are passed between the steps.


@dataclass
class ChosenEntries:
    """The requested entries of a snapshot, before they are compared with the application."""

    grouped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Key -> path -> entry."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys that are requested in part."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not requested."""
    lacking: bool = False
    """True if the snapshot, or the manifest parts that were read, lack a key."""
    unknown: list[str] = field(default_factory=list)
    """Requested names that were not found here, with the reason; another rank may have them."""
    incomplete: bool = False
    """True if a requested entry may be in manifest parts that have not been read yet."""


@dataclass
class Matched:
    """The entries that are restored, and those that are left unchanged."""

    restored: int = 0
    left: bool = False
    """True if a saved value does not fit and is not restored."""
    unfit: set[str] = field(default_factory=set)
    """Tensors that are left unchanged because their shape differs."""
    unfit_memory: set[int] = field(default_factory=set)
    """Addresses of the memory of those tensors."""
    shapes: bool = False
    """True if a mismatch is about a shape."""
    lacking: bool = False
    """True if the application has names that were not found."""
    states: dict[str, ChosenState] = field(default_factory=dict)
    """Keys that are restored in part."""
    skipped: set[str] = field(default_factory=set)
    """Paths that are not requested."""
    tied: set[str] = field(default_factory=set)
    """Names of live tensors that are restored under another name."""
    twins: list[Twin] = field(default_factory=list)
    """Entries of those names, whose bytes must be equal."""
    dropped: dict[str, list[Any]] = field(default_factory=dict)
    """Key -> names that are removed before its state is handed back."""
    unexpected: dict[str, None] = field(default_factory=dict)
    """Shared module names that this rank does not use, but another rank may."""


# Selection
#
# Nothing is compared with the application's tensors here.


class Receiver:
    """An object of the application that may receive a state."""

    def __init__(self, key: str, stateful: Any) -> None:
        """`key`: as it is in paths."""
        self.key = key
        self.stateful = stateful

    @cached_property
    def adapter(self) -> RestoreAdapter:
        """The way its state is handed back, which is made with its current state when it is needed."""
        return make_adapter(self.key, self.stateful)


def find_receivers(app_state: Mapping[str, Any]) -> list[Receiver]:
    """Return the objects of an application in restore order: by key, the RNG state last."""
    items = sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0]))
    return [Receiver(encode_component(key), stateful) for key, stateful in items]


class Chooser:
    """Selects the entries that a restore requests."""

    def __init__(self, exchange: Exchange, opened: Opened, options: RestoreOptions, issues: RestoreIssues) -> None:
        self._exchange = exchange
        self._opened = opened
        self._document = opened.document
        self._options = options
        self._notes = issues
        self._select, self._exclude = options.select, options.exclude
        self._filtered = bool(self._select or self._exclude)
        self._selected, self._excluded = matcher(self._select or ["**"]), matcher(self._exclude)
        self._chosen = ChosenEntries()

    def wanted(self, path: str) -> bool:
        """Return True if a path is requested."""
        return self._selected(path) and not self._excluded(path)

    def choose(self, view: RankView, receivers: Sequence[Receiver], done: Collection[str]) -> ChosenEntries:
        """Return the requested entries of each key. Keys without any are left unchanged.

        `done`: keys of the application that need no entries.
        """
        self._chosen = ChosenEntries()
        grouped = group_by_key(view.entries)
        notes = self._notes
        self._check_globs(grouped, view)
        wanted = self._chosen.grouped
        for each in receivers:
            key = each.key
            if key in done:
                continue
            if isinstance(each.stateful, RNGState) and self._exchange.rank >= self._document.world_size:
                notes.add("skipped", key, "this rank did not exist when the snapshot was taken")
                continue
            entries = self._entries(key, grouped, view)
            if entries is None:
                if self._filtered and not self.wanted(key):
                    continue
                self._lack(key, view, grouped)
                continue
            if self._exchange.rank >= self._document.world_size:
                if self._filtered and not any(map(self.wanted, entries)):
                    notes.add("skipped", key, "not requested")
                    continue
                if not self._shared_alone(key, entries, view):
                    continue
            expand_objects(self._opened, entries, self.wanted, find_adapter(each.stateful))
            check_tree(key, entries)
            if not self._filtered or self._choose(key, entries, view):
                wanted[key] = entries
        if self._exchange.rank == 0:
            self._note_gone(view, wanted)
        self._note_unused(view, grouped, {each.key for each in receivers})
        return self._chosen

    def _note_unused(self, view: RankView, grouped: Mapping[str, Mapping[str, Any]], known: Collection[str]) -> None:
        """Report the keys of the snapshot that the application lacks, so that none is forgotten in silence."""
        if self._options.unused == "ignore":
            return
        for key, entries in grouped.items():
            leaves = (path for path, entry in entries.items() if is_leaf(entry))
            if key not in known and (not self._filtered or any(map(self.wanted, leaves))):
                self._note_key(key, "app_state has no such key")
        if self._exchange.rank == 0:
            gone = (path.split("/", 2) for path in view.gone)
            for key in dict.fromkeys(key for _, key, *_ in gone if key not in known and key not in grouped):
                if self.may_want(key):
                    self._note_key(key, "app_state has no such key, and its ranks no longer exist")

    def _note_key(self, key: str, why: str) -> None:
        if self._options.unused == "error":
            self._notes.mismatches.append(f"{key}: is in the snapshot, not in app_state, and unused is 'error'")
        else:
            self._notes.add("unused", key, why)

    def _lack(self, key: str, view: RankView, grouped: Mapping[str, Any]) -> None:
        """Report a key that the snapshot lacks, or that belongs to another rank."""
        if key in view.withheld:
            self._notes.mismatches.append(f"{key}: {view.withheld[key]}")
        elif self._options.strict:
            self._notes.add_wrong_name(f"{key}: the snapshot has no such key; {suggest_names(key, grouped)}")
        else:
            self._chosen.lacking = True
            self._notes.add("missing", key, "the snapshot has no such key; left unchanged")

    def _check_globs(self, grouped: Mapping[str, Mapping[str, Any]], view: RankView) -> None:
        named = (path for entries in grouped.values() for path in entries)
        every = [*named, *view.elsewhere] if self._filtered else []
        for glob in find_unmatched(self._select, every) if self._select else ():
            view.unknown.append(f"select: the glob {glob!r} matches nothing in the snapshot")
        if self._exchange.alone:
            self._notes.mismatches += view.unknown
        self._chosen.unknown = view.unknown
        for glob in find_unmatched(self._exclude, every) if self._exclude else ():
            warn(f"exclude: the glob {glob!r} matches nothing in the snapshot")

    def _entries(self, key: str, grouped: Mapping[str, dict[str, Any]], view: RankView) -> dict[str, Any] | None:
        """Return the entries under a key. If only other ranks had it, a module finds its names there."""
        if key not in grouped and any(path.startswith(f"{key}/") for path in view.elsewhere):
            return {key: OrderedDictEntry([])}
        return grouped.get(key)

    def _choose(self, key: str, entries: Mapping[str, Any], view: RankView) -> bool:
        """Return True if an entry under a key is requested, here or from other ranks. Keys without any are skipped."""
        choice = ChosenState(entries, self.wanted)
        if choice.is_empty and not any(path.startswith(f"{key}/") and self.wanted(path) for path in view.elsewhere):
            if self._document.parts and self.may_want(key):
                self._chosen.incomplete = True  # it may be in a part that has not been read yet
                return False
            self._notes.add("skipped", key, "not requested")
            return False
        if choice.skipped:
            self._chosen.states[key] = choice
        self._chosen.skipped |= choice.skipped
        for path in sorted(choice.skipped):
            self._notes.add("skipped", path, "not requested")
        return True

    def may_want(self, key: str) -> bool:
        """Return True if an entry under a key may be requested."""
        if not self._filtered:
            return True
        heads = [glob.partition("/")[0] for glob in self._select]
        return not matcher(self._exclude)(key) and (
            not heads or any(head.startswith("**") or matcher([head])(key) for head in heads)
        )

    def _note_gone(self, view: RankView, wanted: Mapping[str, Any]) -> None:
        gone = Counter("/".join(path.split("/", 2)[:2]) for path in view.gone if path.split("/", 2)[1] in wanted)
        for path, count in gone.items():
            self._notes.add("skipped", path, f"{counted(count, 'entry', 'entries')} of a rank that no longer exists")

    def _shared_alone(self, key: str, entries: dict[str, Any], view: RankView) -> bool:
        """Return True if a new rank can restore this key from the entries that all ranks shared."""
        for path in [path for path, entry in entries.items() if entry.is_container and path != key]:
            if path in entries and not self.wanted(path) and not _is_complete(path, entries):
                for below in [below for below in entries if below.startswith(f"{path}/")]:
                    del entries[below]
                entries[path] = ListEntry(0)  # not requested, so the application's value stays
        missing = [
            f"{path}/{name}"
            for path, entry in entries.items()
            for name in entry.components()
            if f"{path}/{name}" not in entries
        ]
        withheld = [path for path in view.withheld if path.startswith(f"{key}/") and self.wanted(path)]
        nothing = withheld and all(entry.is_container for entry in entries.values())
        if not missing and not nothing:
            return True
        what = (missing or withheld)[0]
        self._notes.mismatches.append(
            f"{key}: {what} {view.withheld.get(what, 'belongs to other ranks alone')}, and rank {self._exchange.rank} "
            "did not exist when the snapshot was taken"
        )
        return False


def _is_complete(path: str, entries: Mapping[str, Any]) -> bool:
    """Return True if a container has all of its contents."""
    return all(
        f"{above}/{name}" in entries
        for above, entry in entries.items()
        if above == path or above.startswith(f"{path}/")
        for name in entry.components()
    )
