"""Selection: the entries of a snapshot that a restore requests, by key, globs, names and rank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import Any, Literal

import torch
from msgspec.structs import replace

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError
from snapshot.events import warn
from snapshot.formats.foreign import find_root, narrow_root
from snapshot.io.session import Session
from snapshot.io.url import Source
from snapshot.loading.live import Twin
from snapshot.loading.read_object import expand_objects
from snapshot.manifest.compounds import Container, DictEntry, ListEntry, OrderedDictEntry
from snapshot.manifest.document import Document, check_tree
from snapshot.manifest.entries import is_leaf
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.manifest.rank_view import RankView, group_by_key, remove_entry, rename_view, suggest_names
from snapshot.manifest.values import Entry, IntEntry, StrEntry, make_scalar_entry
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.names import OWN, Change, Rename, compile_rename, find_unmatched, match_names, matcher
from snapshot.progress import ProgressArgument
from snapshot.reports import RestoreIssues
from snapshot.state.flatten import ChosenState
from snapshot.state.model_state import ModelState, ModelStateKind, find_kind, make_kind
from snapshot.state.optimizers import SavedOptimizer
from snapshot.state.rng import RNGState
from snapshot.state.stateful import Kind, ModuleKind, find_names_beneath
from snapshot.text import counted, listed

# The arguments of a restore, as a value.

Accept = Callable[[Document], None]
"""A check of a manifest, which raises if it refuses it."""
CASTS: dict[str, Callable[[torch.dtype, torch.dtype], bool]] = {
    "error": lambda saved, wanted: False,
    "same_kind": torch.can_cast,
    "any": lambda saved, wanted: True,
}
"""Rules for `cast`: each returns True if a saved dtype may be cast to the wanted one."""


Mismatched = Literal["error", "skip"]
Cast = Literal["error", "same_kind", "any"]
Unused = Literal["warn", "error", "ignore"]


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """The options of a restore, for `SnapshotManager.restore_latest`: what is restored, and how it may differ.

    Each is explained at `Snapshot.restore`. With `atomic=True`, a damaged step changes no live tensor.
    """

    strict: bool = True
    exact: bool = False
    mismatched: Mismatched = "error"
    select: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    map: TensorMap | None = None
    cast: Cast = "error"
    verify: bool = True
    atomic: bool = False
    memory_budget_bytes: int | None = None
    read_once: Literal["auto"] | bool = "auto"
    base: Source | None = None
    """The snapshot that has what this one left out, or its URL."""
    unused: Unused = "warn"
    progress: ProgressArgument = None
    timeout: float | None = None

    def check(self) -> None:
        """Raise `ValueError` for an invalid choice. Called when the error can be sent to the other ranks."""
        if self.cast not in CASTS:
            raise ValueError(f"cast must be {', '.join(map(repr, CASTS))}, got {self.cast!r}")
        if self.read_once not in ("auto", True, False):
            raise ValueError(f"read_once must be 'auto', True or False, got {self.read_once!r}")
        if self.unused not in ("warn", "error", "ignore"):
            raise ValueError(f"unused must be 'warn', 'error' or 'ignore', got {self.unused!r}")
        if self.mismatched not in ("error", "skip"):
            raise ValueError(f"mismatched must be 'error' or 'skip', got {self.mismatched!r}")


RESTORE_OPTIONS = RestoreOptions()
"""The defaults."""

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


# Flat optimizer states, as torch's `flatten_optimizer_state_dict` writes them, converted to nested ones.

_STATE, _GROUPS = "state.", "param_groups."


def is_flat(entry: Entry | None) -> bool:
    """Return True if this is the container of a flat state."""
    if not isinstance(entry, DictEntry):
        return False
    names = entry.components()
    return bool(names) and "param_groups" not in names and all(name.startswith((_STATE, _GROUPS)) for name in names)


def nested_view(view: RankView, base: str) -> RankView:
    """Return a view in which the optimizer state below `base` is nested.

    Each parameter gets a group of its own, since a flat state does not record which parameters shared one.
    """
    top: Any = view.entries[base]
    names = [name for name in top.components() if name.startswith(_GROUPS)]
    params = list(dict.fromkeys(name.removeprefix(_GROUPS).rpartition(".")[0] for name in names))
    numbers = {name: number for number, name in enumerate(params)}
    prefix = f"{base}/"

    def change(path: str) -> str:
        if not path.startswith(prefix):
            return path
        head, slash, rest = path[len(prefix) :].partition("/")
        name, _, what = head.partition(".")[2].rpartition(".")
        if head.startswith(_STATE):
            return f"{base}/state/{name}/{what}{slash}{rest}"
        return f"{base}/param_groups/{numbers.get(name, len(params))}/{what}{slash}{rest}"

    record = top.optimizer
    view.entries[base] = DictEntry([])
    view = rename_view(view, change)
    entries = view.entries
    entries.setdefault(f"{base}/state", DictEntry([]))
    entries[f"{base}/param_groups"] = ListEntry(len(params))
    for name, number in numbers.items():
        group = f"{base}/param_groups/{number}"
        held: Any = entries.get(group, DictEntry([]))
        entries[group] = replace(held, keys=[*held.keys, "params"])
        entries[f"{group}/params"] = ListEntry(1)
        entry = make_scalar_entry(decode_component(name))
        assert entry is not None
        entries[f"{group}/params/0"] = entry
    entries[base] = DictEntry(["state", "param_groups"], optimizer=record)
    return view


def named_view(view: RankView, kind: ModelStateKind, notes: RestoreIssues) -> RankView:
    """Return a view in which an optimizer's state that was saved by number has the names of its parameters.

    Optimizers of torch number their parameters in the order of the groups, which is the same in the application.
    """
    if not isinstance(view.entries.get(f"{kind.base}/param_groups/0/params/0"), IntEntry):
        return view
    saved = SavedOptimizer.from_entries(kind.base, view.entries)
    listed = f"{kind.base}/param_groups"
    numbers = [name for group in saved.groups for name in group] if saved else []
    paths = [
        f"{listed}/{i}/params/{at}" for i, group in enumerate(saved.groups if saved else ()) for at in range(len(group))
    ]
    if len(set(numbers)) < len(numbers) or not all(isinstance(view.entries.get(path), IntEntry) for path in paths):
        return view
    lengths = [[len(group) for group in groups] for groups in (saved.groups, kind.groups)]  # type: ignore[union-attr]
    if lengths[0] != lengths[1]:
        notes.mismatches.append(
            f"{listed}: the snapshot numbers the parameters, in groups of {lengths[0]}, and the optimizer has "
            f"{lengths[1]}"
        )
        return view
    names = dict(zip(numbers, (name for group in kind.groups for name in group), strict=True))
    made = rename_view(view, optimizer_change(f"{kind.base}/", names))
    for path, number in zip(paths, numbers, strict=True):
        entry = make_scalar_entry(decode_component(names[number]))
        assert entry is not None
        made.entries[path] = entry
    return made


# Names: converts a snapshot's names to those of the application.
#
# Names change in this order. A checkpoint without statefuls is put below the application's only one. Then `rename` is
# applied. Then wrappers of models are matched.


def below_only_key(document: Document, view: RankView, app_state: Mapping[str, Any]) -> RankView:
    """Put a checkpoint without statefuls below the key of the application's only stateful.

    Names beside those of a `ModelState` remain keys of their own, which the application does not have.
    """
    if find_root(document) is None or len(app_state) != 1:
        return view
    key = encode_component(*app_state)
    grouped = group_by_key(view.entries)
    if key in grouped:
        return view
    [stateful] = app_state.values()
    parts = {"model", "optim"}
    heads = parts if isinstance(stateful, ModelState) and parts <= grouped.keys() else grouped.keys()
    moved = [name for name in grouped if name in heads]

    def change(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{key}/{path}" if path.partition("/")[0] in heads else path: each for path, each in entries.items()}

    entries = {key: narrow_root(document, moved)} | change(view.entries)
    return changed(view, entries=entries, elsewhere=change(view.elsewhere), withheld=change(view.withheld))


def follow_rename(view: RankView, rename: Rename, app_state: Mapping[str, Any]) -> RankView:
    """Return a view under the names that the user gave.

    In a `ModelState`, a model's new names apply to its optimizer, too.
    """
    known = {**view.elsewhere, **view.entries}
    change, unmatched = compile_rename(rename, known)
    wrong = _wrong_names(known, change, {encode_component(key) for key in app_state})
    if wrong:
        raise RestoreError(f"rename does not fit the application, and nothing was touched:{listed(wrong, 10)}", wrong)
    inner: dict[str, tuple[Change, dict[str, str]]] = {}
    for key in [encode_component(key) for key, stateful in app_state.items() if isinstance(stateful, ModelState)]:
        names: dict[str, str] = {}
        for old in known:
            new = change(old)
            if new != old and new.startswith(f"{key}/model/"):
                names[_third_component(old)] = _third_component(new)
        if names:
            inner[f"{key}/optim/"] = optimizer_change(f"{key}/optim/", names), names

    def with_optimizers(path: str) -> str:
        new = change(path)
        for base, (follow, _) in inner.items():
            if new.startswith(base) and path.endswith(f"/optim/{new[len(base) :]}"):  # otherwise it is renamed already
                return follow(new)
        return new

    made = rename_view(view, with_optimizers)
    made.unknown += [f"rename: {name} is not in the snapshot; {suggest_names(name, known)}" for name in unmatched]
    for base, (_, names) in inner.items():
        _rename_params(made, base, names)
    return made


def _wrong_names(known: Mapping[str, Any], change: Callable[[str], str], keys: set[str]) -> list[str]:
    """Return a line for each new name that is invalid, or that no stateful of the application has."""
    lines = []
    new = {path: change(path) for path in known}
    made = {name: known[path] for path, name in new.items()}
    taken = {name.partition("/")[0] for path, name in new.items() if name != path}
    for path, name in new.items():
        if name == path:
            continue
        above, _, last = name.rpartition("/")
        parent, was = made.get(above), known.get(path.rpartition("/")[0])
        moved = new.get(path.rpartition("/")[0]) != above or path.rpartition("/")[2] != last
        if not name or "" in name.split("/"):
            lines.append(f"{path}: rename must give it a valid path, got {name!r}")
        elif path.partition("/")[0] in keys - taken and name.partition("/")[0] not in keys:
            lines.append(
                f"{path}: rename moves it to {name}, and the application has no key {name.partition('/')[0]!r}"
            )
        elif parent is not None and not isinstance(parent, Container):
            lines.append(f"{path}: rename moves it below {above}, which holds a value")
        elif moved and (_is_sequence(parent) or _is_sequence(was)):
            lines.append(f"{path}: rename moves it to {name}; elements of a sequence cannot be moved")
    return lines


def _is_sequence(entry: Entry | None) -> bool:
    return isinstance(entry, Container) and not isinstance(entry, DictEntry)


def _third_component(path: str) -> str:
    return path.split("/", 3)[2] if path.count("/") > 1 else ""


def match_wrappers(
    view: RankView,
    ordered: Sequence[tuple[str, Any]],
    kinds: dict[str, Kind],
    notes: RestoreIssues,
    asked: Callable[[str], bool],
) -> RankView:
    """Return a view in which models have the application's names, if only wrappers make the difference.

    Adds the kinds of models to `kinds`, since their names are needed. `asked` returns True for keys that are restored.
    """
    saved = group_by_key(view.entries)
    for path in view.elsewhere:
        saved.setdefault(path.partition("/")[0], {})
    for key, stateful in ordered:
        below = find_kind(stateful).models
        if below is None or key not in saved or not asked(key):
            continue
        if key not in kinds:
            kinds[key] = make_kind(key, stateful)
        view = _match_model(view, kinds[key], f"{key}{below}", notes)
        kind = kinds[key]
        if isinstance(kind, ModelStateKind) and is_flat(view.entries.get(kind.base)):
            view = nested_view(view, kind.base)
            kind.forget_groups()
        elif isinstance(kind, ModelStateKind) and kind.groups:
            view = named_view(view, kind, notes)
    return view


def _match_model(view: RankView, kind: Kind, base: str, notes: RestoreIssues) -> RankView:
    prefix = f"{base}/"
    there = [path.removeprefix(prefix) for path in find_names_beneath(base, view.entries) or ()]
    there += [path[len(prefix) :].partition("/")[0] for path in view.elsewhere if path.startswith(prefix)]
    found = match_names(there, kind.list_model_names())
    for live, saved in found.ambiguous:
        names, candidates = (
            sep.join(prefix + each for each in names) for sep, names in ((" and ", live), (" or ", saved))
        )
        notes.mismatches.append(f"{names}: may be {candidates} of the snapshot; choose with rename={{...}}")
    for name in found.left_out:
        notes.add(
            "skipped", prefix + name, f"belongs to a wrapper ({_owner_of_name(name)}) that this model does not have"
        )
        view.elsewhere.pop(prefix + name, None)
        if prefix + name in view.entries:
            remove_entry(view.entries, prefix + name)
    if isinstance(kind, ModuleKind):
        for name in found.kept:
            notes.add("kept", prefix + name, f"belongs to a wrapper ({_owner_of_name(name)}) that the snapshot lacks")
            kind.kept_names.add(decode_component(name))
    if not found.names:
        return view
    texts = " and ".join(f"'{wrapper}.'" for wrapper in found.wrappers)
    notes.add("renamed", kind.key, f"names matched without {texts}")

    def change(path: str) -> str:
        if not path.startswith(prefix):
            return path
        name, slash, rest = path[len(prefix) :].partition("/")
        return f"{prefix}{found.names.get(name, name)}{slash}{rest}"

    view = rename_view(view, change)
    return _rename_optimizer(view, kind.key, found.names) if isinstance(kind.stateful, ModelState) else view


def _owner_of_name(name: str) -> str:
    return next(wrapper for wrapper, own in OWN.items() if name.rpartition(".")[2] == own)


def _rename_optimizer(view: RankView, key: str, names: Mapping[str, str]) -> RankView:
    """Return a view in which the optimizer of a `ModelState` has its model's parameter names."""
    base = f"{key}/optim/"
    made = rename_view(view, optimizer_change(base, names))
    _rename_params(made, base, names)
    return made


def optimizer_change(base: str, names: Mapping[str, str]) -> Change:
    """Return a function that renames the parameters in the paths of an optimizer's state."""

    def change(path: str) -> str:
        if not path.startswith(base):
            return path
        head, _, rest = path[len(base) :].partition("/")
        if head == "state":
            name, slash, below = rest.partition("/")
            return f"{base}state/{names.get(name, name)}{slash}{below}" if rest else path
        what, dot, flat = head.partition(".")  # torch's flattened form: state.<name>.<what>
        for end in _dot_positions(flat) if dot and what in ("state", "param_groups") else ():
            if flat[:end] in names:
                return f"{base}{what}.{names[flat[:end]]}{flat[end:]}" + (f"/{rest}" if rest else "")
        return path

    return change


def _rename_params(view: RankView, base: str, names: Mapping[str, str]) -> None:
    """Rename the parameters that are listed in groups."""
    params = re.compile(re.escape(base) + r"param_groups/\d+/params/\d+\Z")
    for path, entry in view.entries.items():
        if isinstance(entry, StrEntry) and params.match(path):
            name = encode_component(entry.value())
            if name in names:
                view.entries[path] = replace(entry, serialized_value=decode_component(names[name]), escaped=False)


def _dot_positions(text: str) -> Iterable[int]:
    return [found.start() for found in re.finditer(r"\.", text)]


# Selection: the entries of a snapshot that a restore requests, by key, globs and rank.
#
# Nothing is compared with the application's tensors here.


def in_restore_order(app_state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the statefuls in restore order: by key, the RNG state last."""
    items = sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0]))
    return [(encode_component(key), stateful) for key, stateful in items]


class Chooser:
    """Selects the entries that a restore requests."""

    def __init__(
        self, exchange: Exchange, session: Session, document: Document, options: RestoreOptions, issues: RestoreIssues
    ) -> None:
        self._exchange = exchange
        self._session = session
        self._document = document
        self._options = options
        self._notes = issues
        self._select, self._exclude = options.select, options.exclude
        self._filtered = bool(self._select or self._exclude)
        self._selected, self._excluded = matcher(self._select or ["**"]), matcher(self._exclude)
        self._chosen = ChosenEntries()

    def wanted(self, path: str) -> bool:
        """Return True if a path is requested."""
        return self._selected(path) and not self._excluded(path)

    def choose(self, view: RankView, app_state: Mapping[str, Any], done: Collection[str]) -> ChosenEntries:
        """Return the requested entries of each key. Keys without any are left unchanged.

        `done`: keys of the application that need no entries.
        """
        self._chosen = ChosenEntries()
        grouped = group_by_key(view.entries)
        notes = self._notes
        self._check_globs(grouped, view)
        wanted = self._chosen.grouped
        for key, stateful in in_restore_order(app_state):
            if isinstance(stateful, RNGState) and self._exchange.rank >= self._document.world_size:
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
            expand_objects(self._session, self._document, entries, self.wanted, find_kind(stateful))
            check_tree(key, entries)
            if not self._filtered or self._choose(key, entries, view):
                wanted[key] = entries
        if self._exchange.rank == 0:
            self._note_gone(view, wanted)
        self._note_unused(view, grouped, {*map(encode_component, app_state), *done})
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
        for path in [path for path, entry in entries.items() if isinstance(entry, Container) and path != key]:
            if path in entries and not self.wanted(path) and not _is_complete(path, entries):
                for below in [below for below in entries if below.startswith(f"{path}/")]:
                    del entries[below]
                entries[path] = ListEntry(0)  # not requested, so the application's value stays
        missing = [
            f"{path}/{name}"
            for path, entry in entries.items()
            if isinstance(entry, Container)
            for name in entry.components()
            if f"{path}/{name}" not in entries
        ]
        withheld = [path for path in view.withheld if path.startswith(f"{key}/") and self.wanted(path)]
        nothing = withheld and all(isinstance(entry, Container) for entry in entries.values())
        if not missing and not nothing:
            return True
        what = (missing or withheld)[0]
        self._notes.mismatches.append(
            f"{key}: {what} {view.withheld.get(what, 'belongs to other ranks alone')}, and rank {self._exchange.rank} "
            "did not exist when the snapshot was taken; save values that are equal on all ranks with replicated=[...]"
        )
        return False


def _is_complete(path: str, entries: Mapping[str, Any]) -> bool:
    """Return True if a container has all of its contents."""
    return all(
        f"{above}/{name}" in entries
        for above, entry in entries.items()
        if isinstance(entry, Container) and (above == path or above.startswith(f"{path}/"))
        for name in entry.components()
    )
