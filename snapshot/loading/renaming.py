"""Names: the entries of a snapshot under the names of the application, its models and its optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as changed
from typing import Any

from msgspec.structs import replace

from snapshot.errors import RestoreError
from snapshot.formats.foreign import find_root, narrow_root
from snapshot.loading.choose import Receiver
from snapshot.manifest.containers import DictEntry, ListEntry
from snapshot.manifest.document import Document
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.manifest.rank_view import RankView, group_by_key, remove_entry, rename_view, suggest_names
from snapshot.manifest.values import Entry, IntEntry, StrEntry, make_scalar_entry
from snapshot.plan.names import OWN, Change, Rename, compile_rename, match_names
from snapshot.reports import RestoreIssues
from snapshot.state.adapters import ModelStateAdapter, find_adapter
from snapshot.state.model_state import ModelState
from snapshot.state.optimizers import SavedOptimizer
from snapshot.state.stateful import ModuleAdapter, RestoreAdapter, find_names_beneath
from snapshot.text import listed

# Flat optimizer states, as torch's `flatten_optimizer_state_dict` writes them, converted to nested ones.

_STATE, _GROUPS = "state.", "param_groups."


def _is_flat(entry: Entry | None) -> bool:
    """Return True if this is the container of a flat state."""
    if entry is None or not entry.is_keyed:
        return False
    names = entry.components()
    return bool(names) and "param_groups" not in names and all(name.startswith((_STATE, _GROUPS)) for name in names)


def _nest_optimizer(view: RankView, base: str) -> RankView:
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


def _name_optimizer(view: RankView, adapter: ModelStateAdapter, notes: RestoreIssues) -> RankView:
    """Return a view in which an optimizer's state that was saved by number has the names of its parameters.

    Optimizers of torch number their parameters in the order of the groups, which is the same in the application.
    """
    if not isinstance(view.entries.get(f"{adapter.base}/param_groups/0/params/0"), IntEntry):
        return view
    saved = SavedOptimizer.from_entries(adapter.base, view.entries)
    listed = f"{adapter.base}/param_groups"
    numbers = [name for group in saved.groups for name in group] if saved else []
    paths = [
        f"{listed}/{i}/params/{at}" for i, group in enumerate(saved.groups if saved else ()) for at in range(len(group))
    ]
    if len(set(numbers)) < len(numbers) or not all(isinstance(view.entries.get(path), IntEntry) for path in paths):
        return view
    lengths = [[len(group) for group in groups] for groups in (saved.groups, adapter.groups)]  # type: ignore[union-attr]
    if lengths[0] != lengths[1]:
        notes.mismatches.append(
            f"{listed}: the snapshot numbers the parameters, in groups of {lengths[0]}, and the optimizer has "
            f"{lengths[1]}"
        )
        return view
    names = dict(zip(numbers, (name for group in adapter.groups for name in group), strict=True))
    made = rename_view(view, make_optimizer_change(f"{adapter.base}/", names))
    for path, number in zip(paths, numbers, strict=True):
        entry = make_scalar_entry(decode_component(names[number]))
        assert entry is not None
        made.entries[path] = entry
    return made


# Names: converts a snapshot's names to those of the application.
#
# Names change in this order. A checkpoint without statefuls is put below the application's only one. Then `rename` is
# applied. Then wrappers of models are matched.


def below_only_key(document: Document, view: RankView, receivers: Sequence[Receiver]) -> RankView:
    """Put a checkpoint without statefuls below the key of the application's only stateful.

    Names beside those of a `ModelState` remain keys of their own, which the application does not have.
    """
    if find_root(document) is None or len(receivers) != 1:
        return view
    [only] = receivers
    key = only.key
    grouped = group_by_key(view.entries)
    if key in grouped:
        return view
    parts = {"model", "optim"}
    heads = parts if isinstance(only.stateful, ModelState) and parts <= grouped.keys() else grouped.keys()
    moved = [name for name in grouped if name in heads]

    def change(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{key}/{path}" if path.partition("/")[0] in heads else path: each for path, each in entries.items()}

    entries = {key: narrow_root(document, moved)} | change(view.entries)
    return changed(view, entries=entries, elsewhere=change(view.elsewhere), withheld=change(view.withheld))


def follow_rename(view: RankView, rename: Rename, receivers: Sequence[Receiver]) -> RankView:
    """Return a view under the names that the user gave.

    In a `ModelState`, a model's new names apply to its optimizer, too.
    """
    known = {**view.elsewhere, **view.entries}
    change, unmatched = compile_rename(rename, known)
    wrong = _wrong_names(known, change, {each.key for each in receivers})
    if wrong:
        raise RestoreError(f"rename does not fit the application, and nothing was touched:{listed(wrong, 10)}", wrong)
    inner: dict[str, tuple[Change, dict[str, str]]] = {}
    for key in [each.key for each in receivers if isinstance(each.stateful, ModelState)]:
        names: dict[str, str] = {}
        for old in known:
            new = change(old)
            if new != old and new.startswith(f"{key}/model/"):
                names[_third_component(old)] = _third_component(new)
        if names:
            inner[f"{key}/optim/"] = make_optimizer_change(f"{key}/optim/", names), names

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
        elif parent is not None and not parent.is_container:
            lines.append(f"{path}: rename moves it below {above}, which holds a value")
        elif moved and (_is_sequence(parent) or _is_sequence(was)):
            lines.append(f"{path}: rename moves it to {name}; elements of a sequence cannot be moved")
    return lines


def _is_sequence(entry: Entry | None) -> bool:
    return entry is not None and entry.is_container and not entry.is_keyed


def _third_component(path: str) -> str:
    return path.split("/", 3)[2] if path.count("/") > 1 else ""


def match_wrappers(
    view: RankView, receivers: Sequence[Receiver], notes: RestoreIssues, asked: Callable[[str], bool]
) -> RankView:
    """Return a view in which models have the application's names, if only wrappers make the difference.

    `asked` returns True for restored keys.
    """
    saved = {path.partition("/")[0] for path in (*view.entries, *view.elsewhere)}
    for each in receivers:
        below = find_adapter(each.stateful).models
        if below is None or each.key not in saved or not asked(each.key):
            continue
        adapter = each.adapter
        view = _match_model(view, adapter, f"{each.key}{below}", notes)
        if isinstance(adapter, ModelStateAdapter) and _is_flat(view.entries.get(adapter.base)):
            view = _nest_optimizer(view, adapter.base)
            adapter.forget_groups()
        elif isinstance(adapter, ModelStateAdapter) and adapter.groups:
            view = _name_optimizer(view, adapter, notes)
    return view


def _match_model(view: RankView, adapter: RestoreAdapter, base: str, notes: RestoreIssues) -> RankView:
    prefix = f"{base}/"
    there = [path.removeprefix(prefix) for path in find_names_beneath(base, view.entries) or ()]
    there += [path[len(prefix) :].partition("/")[0] for path in view.elsewhere if path.startswith(prefix)]
    found = match_names(there, adapter.list_model_names())
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
    if isinstance(adapter, ModuleAdapter):
        for name in found.kept:
            notes.add("kept", prefix + name, f"belongs to a wrapper ({_owner_of_name(name)}) that the snapshot lacks")
            adapter.kept_names.add(decode_component(name))
    if not found.names:
        return view
    texts = " and ".join(f"'{wrapper}.'" for wrapper in found.wrappers)
    notes.add("renamed", adapter.key, f"names matched without {texts}")

    def change(path: str) -> str:
        if not path.startswith(prefix):
            return path
        name, slash, rest = path[len(prefix) :].partition("/")
        return f"{prefix}{found.names.get(name, name)}{slash}{rest}"

    view = rename_view(view, change)
    return _rename_optimizer(view, adapter.key, found.names) if isinstance(adapter.stateful, ModelState) else view


def _owner_of_name(name: str) -> str:
    return next(wrapper for wrapper, own in OWN.items() if name.rpartition(".")[2] == own)


def _rename_optimizer(view: RankView, key: str, names: Mapping[str, str]) -> RankView:
    """Return a view in which the optimizer of a `ModelState` has its model's parameter names."""
    base = f"{key}/optim/"
    made = rename_view(view, make_optimizer_change(base, names))
    _rename_params(made, base, names)
    return made


def make_optimizer_change(base: str, names: Mapping[str, str]) -> Change:
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
