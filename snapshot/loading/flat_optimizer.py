"""Flat optimizer states, as torch's `flatten_optimizer_state_dict` writes them, converted to nested ones."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from snapshot.manifest.entries import DictEntry, Entry, ListEntry
from snapshot.manifest.paths import decode_component
from snapshot.manifest.rank_view import RankView, rename_view
from snapshot.manifest.scalars import make_scalar_entry

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
