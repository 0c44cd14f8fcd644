"""The plan of a restore: all decisions that need no data. Mismatches are raised here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch

from snapshot import extensions
from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError, noting
from snapshot.formats.pickled_objects import expect_no_module
from snapshot.io.loop import run
from snapshot.loading.choose import Chooser, ChosenEntries, Matched, Receiver
from snapshot.loading.left_out import compare_left_out
from snapshot.loading.live import compare_twins, find_read_only_memory
from snapshot.loading.match import Matching, match_all
from snapshot.loading.open import Opened, expect_files, load_parts
from snapshot.loading.own_copies import OwnCopies
from snapshot.loading.read_object import expand_trees, read_tree
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.renaming import below_only_key, follow_rename, match_wrappers
from snapshot.loading.restore_options import RestoreOptions
from snapshot.loading.shared_memory import find_shared_memory
from snapshot.manifest.containers import ListEntry
from snapshot.manifest.document import IN_ONE, Document, PartEntry, find_locations
from snapshot.manifest.entries import DTensorEntry
from snapshot.manifest.parts import NumberedEntries
from snapshot.manifest.rank_view import (
    MOST_RANKS,
    RankView,
    group_by_key,
    make_rank_view,
    rename_entries,
    split_by_rank,
)
from snapshot.manifest.values import NoneEntry
from snapshot.plan.names import Change, compile_rename, matcher
from snapshot.reports import RestoreIssues
from snapshot.state.sharded import Sharded
from snapshot.state.stateful import Reshardable, RestoreAdapter
from snapshot.text import listed

MATCH_NAMES = "\n(to match other names: rename={...}; to restore only what matches: strict=False)"
SAVE_REPLICATED = (
    "\n(for any number of ranks, save what is equal on all of them with TakeOptions(replicated={0}); to leave it "
    "unchanged on all ranks: RestoreOptions(exclude={0}))"
)
SKIP_SHAPES = "\n(to leave tensors of another shape unchanged: RestoreOptions(mismatched='skip'))"


@dataclass(frozen=True)
class RestorePlan:
    """The steps of a restore."""

    adapters: dict[str, RestoreAdapter]
    """Key -> the way its state is handed back."""
    grouped: dict[str, dict[str, Any]]
    """Key -> path -> entry."""
    reads: ReadPlan
    checked: set[str]
    """The files that were found, with their sizes."""
    matched: Matched
    issues: RestoreIssues
    unknown: list[str]
    """Requested names that were not found here, with the reason; another rank may have them."""
    lacks_names: bool
    """True if a requested entry may be in manifest parts that have not been read yet."""

    @property
    def incomplete(self) -> bool:
        """True if an entry, or a part of a tensor, may be in manifest parts that have not been read yet."""
        return self.lacks_names or bool(self.reads.lacking)


def plan_restore(
    exchange: Exchange,
    opened: Opened,
    options: RestoreOptions,
    receivers: Sequence[Receiver],
    *,
    allow_pickle: bool,
    written: frozenset[str],
    done: Collection[str] = (),
) -> RestorePlan:
    """Return the plan, or raise `RestoreError` if the snapshot does not fit.

    `done`: keys that need no plan. `written`: live tensors that an earlier attempt wrote. All of them must be
    restored now.
    """
    document = opened.document
    checked = set[str]()
    copies = OwnCopies(opened)
    if options.map is not None and document.parts:
        run(load_parts(opened, list(document.parts)))  # a mapped tensor may need tensors of any rank

    def plan() -> RestorePlan:
        planner = _Planner(exchange, opened, options, receivers, checked=checked, written=written, copies=copies)
        return planner.plan(done, allow_pickle=allow_pickle)

    while document.parts:  # the parts that this rank needs may be those of other ranks
        # The first attempt tells which boxes are lacking, and so which parts have them. If it fails, all are read.
        needed = list(document.parts)
        with suppress(RestoreError):  # it may fit with the parts of other ranks
            made = plan()
            if not made.incomplete:
                return made
            needed = find_lacking_parts(document, made) or needed
        run(load_parts(opened, needed))
    return plan()


def find_lacking_parts(document: Document, plan: RestorePlan) -> list[PartEntry]:
    """Return the parts of a manifest that have the boxes that a plan lacks; empty if that is not known."""
    holders, known = set[int](), set[str]()
    for entry, box in () if plan.lacks_names else plan.reads.lacking:
        if not isinstance(entry, DTensorEntry):
            return []
        where = repr((entry.shape, entry.mesh, entry.placements, box))  # many tensors have the same
        if where in known:
            continue
        known.add(where)
        found = entry.find_holders(box)
        if not found:
            return []
        holders |= found
        if len(holders) >= document.world_size:
            break
    return [part for part in document.parts if not holders.isdisjoint(part.ranks)]


def _share_names(live: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the live values under the same strings as the entries, so that millions of names are in memory once."""
    leaves = [path for path, entry in entries.items() if not entry.is_container]
    if leaves == list(live):
        return dict(zip(leaves, live.values(), strict=True))
    names = {path: path for path in entries if path in live}
    return {names.get(path, path): value for path, value in live.items()}


class _Planner:
    """An attempt to plan with the manifest parts that were read."""

    def __init__(
        self,
        exchange: Exchange,
        opened: Opened,
        options: RestoreOptions,
        receivers: Sequence[Receiver],
        *,
        checked: set[str],
        written: frozenset[str],
        copies: OwnCopies,
    ) -> None:
        self._exchange = exchange
        self._opened = opened
        self._document = opened.document
        self._options = options
        self._receivers = receivers
        self._checked = checked
        self._written = written
        self._copies = copies
        self._issues = RestoreIssues()
        self._chooser = Chooser(exchange, opened, options, self._issues)
        self._change: Change = str
        self._others: dict[str, list[int]] | None = None

    def plan(self, done: Collection[str], *, allow_pickle: bool) -> RestorePlan:
        document = self._document
        view = self._view()
        chosen = self._chooser.choose(view, self._receivers, done)
        grouped = chosen.grouped
        adapters = {each.key: each.adapter for each in self._receivers if each.key in grouped}
        for key, entries in grouped.items() if len(document.manifest) > IN_ONE else ():
            adapters[key].live = _share_names(adapters[key].live, entries)
        self._expect_files(grouped, adapters)
        reads = ReadPlan(document.files, allow_pickle=allow_pickle, partial=bool(document.parts))
        matched = self._match(adapters, view, chosen, reads)
        withheld = self._is_new and any(path.partition("/")[0] in grouped for path in view.withheld)
        lacks = chosen.incomplete or matched.lacking or bool(chosen.unknown) or withheld
        made = RestorePlan(adapters, grouped, reads, self._checked, matched, self._issues, chosen.unknown, lacks)
        if not (made.incomplete and document.parts):
            try:
                self._expect_fit(view, reads, matched, allow_pickle=allow_pickle)
            except RestoreError:
                self._expect_files(grouped, adapters, all_of_them=True)  # damage is the graver fault
                raise
        return made

    def _expect_files(
        self,
        grouped: Mapping[str, Mapping[str, Any]],
        adapters: Mapping[str, RestoreAdapter],
        *,
        all_of_them: bool = False,
    ) -> None:
        """Check the files of what may become new values, before memory is allocated for them.

        Those of live tensors are checked when all ranges to read are known, unless that is cheap to do now.
        """
        files, needed = self._document.files, set[str]()
        cheap = all_of_them or (self._exchange.alone and self._opened.storage.capabilities.local)
        for key, entries in grouped.items():
            new: Mapping[str, Any] = entries
            if not cheap:
                live = adapters[key].live
                new = {path: entry for path, entry in entries.items() if not _fills_live(entry, live.get(path))}
            needed |= find_locations(new, files)
        needed = (needed & self._document.own_files.keys()) - self._checked
        if needed:
            run(expect_files(self._opened, needed, conditions=False))  # it may not be all for a read
            self._checked |= needed

    def _view(self) -> RankView:
        """Return the snapshot as this rank sees it, with the application's names."""
        opened, document, rename = self._opened, self._document, self._options.rename
        view = make_rank_view(
            document.manifest,
            self._exchange.rank,
            document.world_size,
            self._exchange.world,
            self._copies.are_equal,
        )
        # A view has names without a rank. Millions of names are in memory once: the manifest's are made from them.
        if document.world_size == 1 and len(document.manifest) > IN_ONE:
            document.manifest = cast("dict[str, Any]", NumberedEntries(0, dict(view.entries)))
        if rename or self._options.select or self._options.exclude:
            expand_trees(opened, view.entries)  # globs and new names may mean values in them
        view = below_only_key(document, view, self._receivers)
        if self._options.map is not None:
            from snapshot.loading.mapped_states import below_model_state  # few restores have a map
            from snapshot.loading.mapping import map_view

            view = below_model_state(map_view(opened, view, self._options.map), self._receivers)
        if rename:
            self._change = compile_rename(rename, {**view.elsewhere, **view.entries})[0]
            view = follow_rename(view, rename, self._receivers)
        return match_wrappers(view, self._receivers, self._issues, self._chooser.may_want)

    def _match(
        self, adapters: Mapping[str, RestoreAdapter], view: RankView, chosen: ChosenEntries, reads: ReadPlan
    ) -> Matched:
        """Find the place of each requested entry."""
        return match_all(
            Matching(
                self._options,
                adapters,
                chosen,
                view,
                reads,
                self._issues,
                self._chooser.wanted,
                self._holders,
                several=not self._exchange.alone,
                every=self._document.world_size == 1,
            )
        )

    def _expect_fit(self, view: RankView, reads: ReadPlan, matched: Matched, *, allow_pickle: bool) -> None:
        """Raise if the snapshot does not fit."""
        mismatches = self._issues.mismatches
        mismatches += find_shared_memory(reads) + find_read_only_memory(reads)
        mismatches += compare_twins(self._opened, matched.twins)
        mismatches += run(compare_left_out(self._opened, reads.left_out))
        self._expect_any(view, matched)
        self._expect_written(reads, matched)
        if mismatches:
            url = self._opened.url
            own = self._find_own_keys(view)
            expect_no_module(url, self._document.manifest, allow_pickle=allow_pickle)
            more = "more " if self._written else ""
            raise RestoreError(
                f"{url}: does not fit the application, and nothing {more}was touched:"
                f"{listed(mismatches, 100)}{MATCH_NAMES if self._issues.names else ''}"
                f"{SKIP_SHAPES if matched.shapes else ''}{SAVE_REPLICATED.format(own) if own else ''}",
                mismatches,
            )

    @property
    def _is_new(self) -> bool:
        """True if this rank did not exist when the snapshot was taken."""
        return self._exchange.rank >= self._document.world_size

    def _find_own_keys(self, view: RankView) -> list[str]:
        """Return the keys that do not fit since other ranks had values of their own, and this rank is new."""
        keys = sorted({path.partition("/")[0] for path in view.withheld} if self._is_new else ())
        return [key for key in keys if any(line.startswith((f"{key}:", f"{key}/")) for line in self._issues.mismatches)]

    def _holders(self, path: str) -> list[int]:
        """Return up to ten other ranks that had their own entry at a path."""
        if self._document.world_size == 1:
            return []
        if self._others is None:
            self._others = {}
            for full, entry in self._document.manifest.items():
                rank, _, name = full.partition("/")
                if int(rank) != self._exchange.rank and not entry.is_shared:
                    ranks = self._others.setdefault(self._change(name), [])
                    ranks += [int(rank)] if len(ranks) < 10 else []
        return self._others.get(path, [])

    def _expect_any(self, view: RankView, matched: Matched) -> None:
        """Add a mismatch if the snapshot has nothing that the application requests."""
        missing = any(line.kind == "missing" for line in self._issues.lines) or matched.left
        if missing and not matched.restored and not self._issues.mismatches:
            held = listed(sorted(group_by_key(view.entries)), 10)
            self._issues.mismatches.append(f"the snapshot has nothing that the application requests; it has:{held}")

    def _expect_written(self, reads: ReadPlan, matched: Matched) -> None:
        """Add a mismatch for each live tensor that would keep bytes from an earlier, failed attempt."""
        if self._written:
            left = matched.skipped | matched.unfit
            covered = {request.name for request in reads.requests} | {path for path in reads.values if path not in left}
            self._issues.mismatches += [
                f"{path}: holds bytes of a damaged snapshot from an earlier attempt, and is not in this one; "
                "atomic=True writes no live tensor before all bytes are verified"
                for path in sorted(self._written - covered)
            ]


def _fills_live(entry: Any, live: Any) -> bool:
    """Return True if no memory is allocated for an entry: a plain value, or one for a live tensor of its shape."""
    if entry.is_tensor:
        try:
            held = live.global_shape if isinstance(live, Sharded) else getattr(live, "shape", None)
        except RuntimeError:  # a lazy or nested tensor has no shape
            return False
        return isinstance(live, (Sharded, torch.Tensor)) and held == tuple(entry.shape)
    return bool(entry.is_value)


# State that must be redistributed if the number of ranks has changed, such as that of a data loader.

_LOADERS = ("torchdata.", "datasets.iterable_dataset.")
"""Packages with data loaders and datasets whose state belongs to one rank of a certain number of ranks."""


def reshard_states(
    exchange: Exchange,
    opened: Opened,
    options: RestoreOptions,
    receivers: Sequence[Receiver],
    *,
    allow_pickle: bool,
) -> dict[str, Any]:
    """Return the new state of each stateful with `reshard_state_dict()`, if the number of ranks has changed.

    The states of all ranks are read. No state is handed back yet.
    """
    document = opened.document
    saved, now = document.world_size, exchange.world
    if saved == now:
        return {}
    chosen = {
        each.key: each.stateful
        for each in receivers
        if isinstance(each.stateful, Reshardable) or _is_loader(each.stateful)
    }
    if not chosen:
        return {}
    if saved > MOST_RANKS:
        raise RestoreError(f"{opened.url}: the states of {saved:,} ranks cannot be redistributed", sorted(chosen))
    if document.parts:
        run(load_parts(opened, list(document.parts)))
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
                f"{opened.url}: {key}: is the state of a data loader on each of {saved} ranks, and now there are "
                f"{now}; save it with {extensions.ADVICE['loader']}, or give it a method "
                "reshard_state_dict(states, rank, world), or exclude it from the restore",
                [key],
            )
        plan = ReadPlan(document.files, allow_pickle=allow_pickle)
        held = read_tree(opened, plan, key, tree=tree, verify=options.verify)
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
    included, excluded = matcher(options.select or ["**"]), matcher(options.exclude)
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
