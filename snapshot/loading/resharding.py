"""State that must be redistributed if the number of ranks has changed, such as that of a data loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError, noting
from snapshot.loading.open import load_parts
from snapshot.loading.read_object import read_tree
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.restore_options import RestoreOptions
from snapshot.manifest.document import Document
from snapshot.manifest.entries import ListEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import MOST_RANKS, make_rank_view, rename_entries, split_by_rank
from snapshot.manifest.scalars import NoneEntry
from snapshot.plan.globs import matcher
from snapshot.plan.renaming import Change, compile_rename
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.state.stateful import Reshardable

_LOADERS = ("torchdata.", "datasets.iterable_dataset.")
"""Packages with data loaders and datasets whose state belongs to one rank of a certain number of ranks."""


def reshard_states(
    exchange: Exchange,
    session: Session,
    document: Document,
    options: RestoreOptions,
    app_state: Mapping[str, Any],
    *,
    allow_pickle: bool,
) -> dict[str, Any]:
    """Return the new state of each stateful with `reshard_state_dict()`, if the number of ranks has changed.

    The states of all ranks are read. No state is handed back yet.
    """
    saved, now = document.world_size, exchange.world
    if saved == now:
        return {}
    chosen = {
        encode_component(key): stateful
        for key, stateful in app_state.items()
        if isinstance(stateful, Reshardable) or _is_loader(stateful)
    }
    if not chosen:
        return {}
    if saved > MOST_RANKS:
        raise RestoreError(f"{session.url}: the states of {saved:,} ranks cannot be redistributed", sorted(chosen))
    if document.parts:
        run(load_parts(session, document, list(document.parts)))
    change: Change = str
    if options.rename:
        known = {path.partition("/")[2]: None for path in document.manifest}
        change = compile_rename(options.rename, known)[0]
    states: dict[str, Any] = {}
    for key, stateful in chosen.items():
        tree = _states_of_all_ranks(document, key, change)
        if not _is_wanted(key, tree, options):
            continue
        if not isinstance(stateful, Reshardable):
            raise RestoreError(
                f"{session.url}: {key}: is the state of a data loader on each of {saved} ranks, and now there are "
                f"{now}; save it with snapshot.interop.torchdata.LoaderState, or give it a method "
                "reshard_state_dict(states, rank, world), or exclude it from the restore",
                [key],
            )
        plan = ReadPlan(document.files, allow_pickle=allow_pickle)
        held = read_tree(session, document, plan, key, tree=tree, verify=options.verify)
        with noting(f"raised by reshard_state_dict() of app_state[{key!r}]; nothing was touched"):
            states[key] = stateful.reshard_state_dict(held, exchange.rank, now)
    return states


def _is_loader(stateful: Any) -> bool:
    """Return True for a data loader or a dataset of a known library, which is not imported for it."""
    return any(f"{each.__module__}.".startswith(_LOADERS) for each in type(stateful).__mro__)


def _states_of_all_ranks(document: Document, key: str, change: Change) -> dict[str, Any]:
    """Return a tree with a list of the states under a key, one for each rank; empty if no rank had one."""
    saved = document.world_size
    below = {
        path: entry
        for path, entry in document.manifest.items()
        if change(path.partition("/")[2]).partition("/")[0] == key
    }
    shared, own = split_by_rank(below, saved)
    tree: dict[str, Any] = {}
    found = False
    for rank in range(saved):
        view = rename_entries(make_rank_view({**shared, **own.get(str(rank), {})}, rank, saved, saved).entries, change)
        found = found or key in view
        mine = {f"{key}/{rank}{path[len(key) :]}": entry for path, entry in view.items()}
        tree |= mine if key in view else {f"{key}/{rank}": NoneEntry("None")}
    return {key: ListEntry(saved), **tree} if found else {}


def _is_wanted(key: str, tree: Mapping[str, Any], options: RestoreOptions) -> bool:
    """Return True if the state under a key is requested. Raise if only a part of it is."""
    included, excluded = matcher(options.include or ["**"]), matcher(options.exclude)
    paths = {"/".join((key, *path.split("/")[2:])) for path in tree if "/" in path}
    paths = paths - {key} or paths  # `key/**` is all of it
    wanted = {path for path in paths if included(path) and not excluded(path)}
    if wanted and wanted != paths:
        missing = sorted(paths - wanted)[0]
        raise RestoreError(
            f"{key}: its state is redistributed over another number of ranks, so it must be restored as a whole; "
            f"{missing} is not requested",
            [key],
        )
    return bool(wanted)
