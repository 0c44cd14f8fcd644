"""The plan of a restore: all decisions that need no data. Mismatches are raised here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError
from snapshot.formats.unpickling import expect_no_module
from snapshot.loading.aliasing import compare_twins, find_other_owner, find_read_only_memory, find_shared_memory
from snapshot.loading.choose import Chooser, in_restore_order
from snapshot.loading.left_out import compare_left_out
from snapshot.loading.mapping import map_view
from snapshot.loading.match import Matcher
from snapshot.loading.matched import ChosenEntries, Matched
from snapshot.loading.open import expect_files, load_parts
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.renames import below_only_key, follow_rename, match_wrappers
from snapshot.loading.restore_options import RestoreOptions
from snapshot.manifest.document import Document
from snapshot.manifest.entries import ShardedTensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import RankView, group_by_key, make_rank_view
from snapshot.manifest.validate import find_locations
from snapshot.plan.renaming import Change, compile_rename
from snapshot.reports import RestoreIssues
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.state.kind_of import make_kind
from snapshot.state.optimizer_kinds import OptimizerKind
from snapshot.state.stateful_kinds import Kind
from snapshot.text import listed

MATCH_NAMES = "\n(to match other names: rename={...}; to restore only what matches: strict=False)"
SKIP_SHAPES = "\n(to leave tensors of another shape unchanged: mismatched='skip')"


@dataclass(frozen=True)
class RestorePlan:
    """The steps of a restore."""

    kinds: dict[str, Kind]
    """Key -> the way its state is handed back."""
    grouped: dict[str, dict[str, Any]]
    """Key -> path -> entry."""
    reads: ReadPlan
    matched: Matched
    issues: RestoreIssues
    unknown: list[str]
    """Requested names that were not found here, with the reason; another rank may have them."""
    incomplete: bool
    """True if a requested entry may be in manifest parts that have not been read yet."""


def plan_restore(
    exchange: Exchange,
    session: Session,
    document: Document,
    options: RestoreOptions,
    app_state: Mapping[str, Any],
    *,
    allow_pickle: bool,
    written: frozenset[str],
    done: Collection[str] = (),
) -> RestorePlan:
    """Return the plan, or raise `RestoreError` if the snapshot does not fit.

    `done`: keys that need no plan. `written`: live tensors that an earlier attempt wrote. All of them must be
    restored now.
    """
    kinds: dict[str, Kind] = {}
    if options.map is not None and document.parts:
        run(load_parts(session, document, list(document.parts)))  # a mapped tensor may need tensors of any rank

    def plan() -> RestorePlan:
        planner = _Planner(exchange, session, document, options, kinds=kinds, written=written)
        return planner.plan(app_state, done, allow_pickle=allow_pickle)

    try:
        made = plan()
        if not (document.parts and made.incomplete):
            return made
    except RestoreError:
        if not document.parts:
            raise
    run(load_parts(session, document, list(document.parts)))  # this rank's entries may be in other ranks' parts
    return plan()


class _Planner:
    """An attempt to plan with the manifest parts that were read."""

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        document: Document,
        options: RestoreOptions,
        *,
        kinds: dict[str, Kind],
        written: frozenset[str],
    ) -> None:
        self._exchange = exchange
        self._session = session
        self._document = document
        self._options = options
        self._kinds = kinds
        self._written = written
        self._issues = RestoreIssues()
        self._chooser = Chooser(exchange, session, document, options, self._issues)
        self._change: Change = str
        self._others: dict[str, list[int]] | None = None

    def plan(self, app_state: Mapping[str, Any], done: Collection[str], *, allow_pickle: bool) -> RestorePlan:
        document, session, kinds = self._document, self._session, self._kinds
        view = self._view(app_state)
        app_state = {key: each for key, each in app_state.items() if encode_component(key) not in done}
        chosen = self._chooser.choose(view, app_state, done)
        grouped = chosen.grouped
        needed = set().union(*(find_locations(entries, document.files) for entries in grouped.values()))
        run(expect_files(session, document, needed & document.own_files.keys()))
        reads = ReadPlan(document.files, allow_pickle=allow_pickle, partial=bool(document.parts))
        matched = self._match(app_state, view, chosen, reads)
        incomplete = chosen.incomplete or reads.incomplete or matched.lacking or bool(chosen.unknown)
        if not (incomplete and document.parts):
            self._expect_fit(view, reads, matched, allow_pickle=allow_pickle)
        return RestorePlan(kinds, grouped, reads, matched, self._issues, chosen.unknown, incomplete)

    def _view(self, app_state: Mapping[str, Any]) -> RankView:
        """Return the snapshot as this rank sees it, with the application's names."""
        session, document, rename = self._session, self._document, self._options.rename
        view = make_rank_view(document.manifest, self._exchange.rank, document.world_size, self._exchange.world)
        view = map_view(session, document, below_only_key(document, view, app_state), self._options.map)
        if rename:
            self._change = compile_rename(rename, {**view.elsewhere, **view.entries})[0]
            view = follow_rename(view, rename, app_state)
        return match_wrappers(view, in_restore_order(app_state), self._kinds, self._issues, self._chooser.may_want)

    def _match(self, app_state: Mapping[str, Any], view: RankView, chosen: ChosenEntries, reads: ReadPlan) -> Matched:
        """Find the place of each requested entry."""
        kinds, grouped = self._kinds, chosen.grouped
        for key, stateful in in_restore_order(app_state):
            if key in grouped and key not in kinds:
                kinds[key] = make_kind(key, stateful)
        matcher = Matcher(
            self._options,
            chosen,
            view,
            wanted=self._chooser.wanted,
            beside=find_other_owner(kinds, grouped, chosen.skipped),
            holders=self._holders,
            several=not self._exchange.alone,
            every=self._document.world_size == 1,
            issues=self._issues,
        )
        keys = [key for key, _ in in_restore_order(app_state) if key in grouped]
        for key in sorted(keys, key=lambda key: isinstance(kinds[key], OptimizerKind)):  # models come first
            if not matcher.add(kinds[key], grouped[key], reads):
                del grouped[key]
        return matcher.matched

    def _expect_fit(self, view: RankView, reads: ReadPlan, matched: Matched, *, allow_pickle: bool) -> None:
        """Raise if the snapshot does not fit."""
        mismatches = self._issues.mismatches
        mismatches += find_shared_memory(reads) + find_read_only_memory(reads)
        mismatches += compare_twins(self._session, self._document.files, matched.twins)
        mismatches += run(compare_left_out(self._session, self._document, reads.left_out))
        self._expect_any(view, matched)
        self._expect_written(reads, matched)
        if mismatches:
            url = self._session.url
            expect_no_module(url, self._document.manifest, allow_pickle=allow_pickle)
            more = "more " if self._written else ""
            raise RestoreError(
                f"{url}: does not fit the application, and nothing {more}was touched:"
                f"{listed(mismatches, 100)}{MATCH_NAMES if self._issues.names else ''}"
                f"{SKIP_SHAPES if matched.shapes else ''}",
                mismatches,
            )

    def _holders(self, path: str) -> list[int]:
        """Return up to ten other ranks that had their own entry at a path."""
        if self._document.world_size == 1:
            return []
        if self._others is None:
            self._others = {}
            for full, entry in self._document.manifest.items():
                rank, _, name = full.partition("/")
                own = int(rank) != self._exchange.rank and not entry.replicated
                if own and not isinstance(entry, ShardedTensorEntry):
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
