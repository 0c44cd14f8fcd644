"""One restore, step by step: open, plan, check, read, place, hand back.

Everything that can be known without reading data is checked before the first byte reaches a live tensor; all mismatches
are reported at once.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CorruptSnapshotError, RestoreError, SnapshotError
from snapshot.events import Meter, log
from snapshot.formats.unpickling import expect_no_module
from snapshot.load.aliasing import read_only_memory, restored_by, shared_memory
from snapshot.load.broadcast import BroadcastReader, Ranges, agree_on_reads, divided
from snapshot.load.checksums import expect_sums
from snapshot.load.fetch import expect_good, fetch
from snapshot.load.foreign_objects import unfold
from snapshot.load.match import Match
from snapshot.load.options import RestoreOptions
from snapshot.load.read_plan import ReadPlan, Uncovered
from snapshot.load.reader import ReadResult
from snapshot.load.renames import below_only_key, follow_rename, match_wrappers
from snapshot.load.requests import ReadRequest
from snapshot.manifest.document import Document
from snapshot.manifest.entries import Container, ListEntry, OrderedDictEntry, ShardedTensorEntry
from snapshot.manifest.paths import component
from snapshot.manifest.rank_view import View, by_key, nearest, rank_view
from snapshot.manifest.validate import check_tree, locations_of
from snapshot.plan.globs import matcher, unmatched
from snapshot.plan.renaming import Change, compile_rename
from snapshot.reports import RestoreIssues, RestoreReport, counted, listed
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.replication import remember
from snapshot.state.kind_of import kind_of, kind_type
from snapshot.state.optimizer_kinds import OptimizerKind
from snapshot.state.rng import RNGState
from snapshot.state.state_tree import ChosenState, inflate
from snapshot.state.stateful_kinds import Kind


class Restore:
    """A restore under way."""

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        document: Document,
        options: RestoreOptions,
        *,
        opened: float,
        allow_pickle: bool,
        meter: Meter,
        touched: set[str],
    ) -> None:
        """`touched` holds the names of live tensors that an attempt before this one has written to, all of which have
        to be restored now; the names of those that this one writes to are added."""
        options.check()
        self._exchange = exchange
        self._session = session
        self._document = document
        self._options = options
        self._include, self._exclude = options.include, options.exclude
        self._filtered = bool(self._include or self._exclude)
        included, excluded = matcher(self._include or ["**"]), matcher(self._exclude)
        self._wanted: Callable[[str], bool] = lambda path: included(path) and not excluded(path)
        self._allow_pickle = allow_pickle
        self._meter = meter
        remote = not session.storage.capabilities.blocking
        self._read_once = not exchange.alone and (remote if options.read_once == "auto" else bool(options.read_once))
        self._seconds: dict[str, float] = {"open": opened}
        self._touched = touched
        self._written = frozenset(touched)
        """The live tensors that have been written to before."""

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        """Do all of it."""
        try:
            with gc_paused():
                return self._run(app_state)
        except Exception as error:
            if self._touched and not isinstance(error, CorruptSnapshotError):
                error.add_note(f"live tensors that have been written to: {', '.join(sorted(self._touched))}")
            raise

    def _run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        kinds: dict[str, Kind] = {}
        with self._phase("plan"):
            try:
                grouped, gather = self._plan(app_state, kinds)
                if self._document.parts and (self._match.lacking or self._match.unknown):
                    raise Uncovered
            except (Uncovered, RestoreError):  # what this rank wants may stand in other ranks' parts
                if not self._document.parts:
                    raise
                run(self._session.load(self._document, list(self._document.parts)))
                grouped, gather = self._plan(app_state, kinds)
        with self._phase("check"):
            run(self._session.expect_files(self._document, {want.location for want in gather.wants}))
            common, waits = agree_on_reads(
                self._exchange, gather, self._match, kinds.values(), once=self._read_once, atomic=self._options.atomic
            )
        result = self._read(gather, common, waits)
        self._expect_all()
        with self._phase("place"):
            gather.finish()
        with self._phase("hand back"):
            for key, entries in grouped.items():
                self._hand_back(kinds[key], entries, gather.values)
        self._expect_all()
        remember(self._exchange, self._document)
        kept = [line.path for line in self._notes.lines if line.kind == "kept"]
        if kept:
            log.warning("%s: the snapshot lacks, and so keeps as it is:%s", self._session.url, listed(kept, 10))
        return RestoreReport(
            self._match.restored, result.bytes_read, result.requests, self._seconds, tuple(self._notes.lines)
        )

    # Plan

    def _plan(self, app_state: Mapping[str, Any], kinds: dict[str, Kind]) -> tuple[dict[str, dict[str, Any]], ReadPlan]:
        """Everything that can be known without reading data: what goes where. Raises for what does not fit."""
        document, session = self._document, self._session
        self._notes = RestoreIssues()
        view = rank_view(document.manifest, self._exchange.rank, document.world_size, self._exchange.world)
        view = below_only_key(document, view, app_state)
        self._others: dict[str, list[int]] | None = None
        self._change: Change = str
        if self._options.rename:
            self._change = compile_rename(self._options.rename, {**view.elsewhere, **view.entries})[0]
            view = follow_rename(view, self._options.rename, app_state)
        asked = self._may_want if self._filtered else lambda key: True
        view = match_wrappers(view, self._ordered(app_state), kinds, self._notes, asked)
        self._match = Match(
            self._options,
            wanted=self._wanted,
            view=view,
            several=not self._exchange.alone,
            every=document.world_size == 1,
            holders=self._holders,
            notes=self._notes,
        )
        grouped = self._chosen(view, app_state)
        needed = set().union(*(locations_of(entries, document.files) for entries in grouped.values()))
        run(session.expect_files(document, needed))
        gather = ReadPlan(document.files, allow_pickle=self._allow_pickle, partial=bool(document.parts))
        for key, stateful in self._ordered(app_state):
            if key in grouped and key not in kinds:
                kinds[key] = kind_of(key, stateful)
        self._match.beside = restored_by(kinds, grouped, self._match.skipped)
        keys = [key for key, _ in self._ordered(app_state) if key in grouped]
        for key in sorted(keys, key=lambda key: isinstance(kinds[key], OptimizerKind)):  # which follow their models
            if not self._match.add(kinds[key], grouped[key], gather):
                del grouped[key]
        self._notes.mismatches += shared_memory(gather) + read_only_memory(gather)
        self._expect_any(view)
        self._expect_written(gather)
        if self._notes.mismatches:
            expect_no_module(session.url, document.manifest, allow_pickle=self._allow_pickle)
            more = "more " if self._written else ""
            raise RestoreError(
                f"{session.url}: does not fit the application, and nothing {more}was touched:"
                f"{listed(self._notes.mismatches, 100)}{SKIP_SHAPES if self._match.shapes else ''}",
                self._notes.mismatches,
            )
        return grouped, gather

    def _holders(self, path: str) -> list[int]:
        """The other ranks that had something of their own at a path, at most ten."""
        if self._document.world_size == 1:
            return []
        if self._others is None:
            self._others = {}
            for full, entry in self._document.manifest.items():
                rank, _, name = full.partition("/")
                own = int(rank) != self._exchange.rank and not getattr(entry, "replicated", False)
                if own and not isinstance(entry, ShardedTensorEntry):
                    ranks = self._others.setdefault(self._change(name), [])
                    ranks += [int(rank)] if len(ranks) < 10 else []
        return self._others.get(path, [])

    def _expect_any(self, view: View) -> None:
        """Add a mismatch where nothing of what the application asks for is in the snapshot: it is another's."""
        missing = any(line.kind == "missing" for line in self._notes.lines) or self._match.left
        if missing and not self._match.restored and not self._notes.mismatches:
            held = listed(sorted(by_key(view.entries)), 10)
            self._notes.mismatches.append(
                f"nothing that the application asks for is in the snapshot, which holds:{held}"
            )

    def _expect_written(self, gather: ReadPlan) -> None:
        """Add a mismatch for each live tensor that would go on holding what an attempt before this one wrote."""
        if self._written:
            left = self._match.skipped | self._match.unfit
            covered = {want.name for want in gather.wants} | {path for path in gather.values if path not in left}
            self._notes.mismatches += [
                f"{path}: holds bytes of a damaged snapshot that was tried before, and is not restored from this one; "
                "atomic=True leaves live tensors alone until all bytes are verified"
                for path in sorted(self._written - covered)
            ]

    def _ordered(self, app_state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The statefuls in the order in which they are asked and handed back: by key, the RNG state last."""
        items = sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0]))
        return [(component(key), stateful) for key, stateful in items]

    def _chosen(self, view: View, app_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The entries of each key that is asked for; keys of which nothing is wanted are left alone."""
        grouped = by_key(view.entries)
        notes = self._notes
        self._check_globs(grouped, view)
        wanted = {}
        for key, stateful in self._ordered(app_state):
            if isinstance(stateful, RNGState) and self._exchange.rank >= self._document.world_size:
                notes.add("skipped", key, "this rank was not there when the snapshot was taken")
                continue
            entries = self._entries(key, grouped, view)
            if entries is None:
                if self._filtered and not self._wanted(key):
                    continue
                self._lack(key, view, grouped)
                continue
            if self._exchange.rank >= self._document.world_size:
                if self._filtered and not any(map(self._wanted, entries)):
                    notes.add("skipped", key, "not asked for")
                    continue
                if not self._shared_alone(key, entries, view):
                    continue
            run(unfold(self._session, self._document, entries, self._wanted, kind_type(stateful)))
            check_tree(key, entries)
            if not self._filtered or self._choose(key, entries, view):
                wanted[key] = entries
        if self._exchange.rank == 0:
            self._note_gone(view, wanted)
        return wanted

    def _lack(self, key: str, view: View, grouped: Mapping[str, Any]) -> None:
        """Say that the snapshot lacks a whole key, or that it is another rank's."""
        if key in view.withheld:
            self._notes.mismatches.append(f"{key}: {view.withheld[key]}")
        elif self._options.strict:
            self._notes.mismatches.append(f"{key}: the snapshot has no such key; {nearest(key, grouped)}")
        else:
            self._match.lacking = True
            self._notes.add("missing", key, "the snapshot has no such key; left as it is")

    def _check_globs(self, grouped: Mapping[str, Mapping[str, Any]], view: View) -> None:
        named = (path for entries in grouped.values() for path in entries)
        every = [*named, *view.elsewhere] if self._filtered else []
        for glob in unmatched(self._include, every) if self._include else ():
            view.unknown.append(f"include: the glob {glob!r} matches nothing in the snapshot")
        if self._exchange.alone:
            self._notes.mismatches += view.unknown
        self._match.unknown = view.unknown
        for glob in unmatched(self._exclude, every) if self._exclude else ():
            warnings.warn(f"exclude: the glob {glob!r} matches nothing in the snapshot", stacklevel=7)

    def _entries(self, key: str, grouped: Mapping[str, dict[str, Any]], view: View) -> dict[str, Any] | None:
        """What there is under a key. If only other ranks had it, a module finds its names there."""
        if key not in grouped and any(path.startswith(f"{key}/") for path in view.elsewhere):
            return {key: OrderedDictEntry([])}
        return grouped.get(key)

    def _choose(self, key: str, entries: Mapping[str, Any], view: View) -> bool:
        """Whether anything under a key is asked for, here or with other ranks; what is not is left alone."""
        choice = ChosenState(entries, self._wanted)
        if choice.nothing and not any(path.startswith(f"{key}/") and self._wanted(path) for path in view.elsewhere):
            if self._document.parts and self._may_want(key):
                raise Uncovered  # it may stand in a part that was not read yet
            self._notes.add("skipped", key, "not asked for")
            return False
        if choice.skipped:
            self._match.choices[key] = choice
        self._match.skipped |= choice.skipped
        for path in sorted(choice.skipped):
            self._notes.add("skipped", path, "not asked for")
        return True

    def _may_want(self, key: str) -> bool:
        """Whether what is asked for can be anything under a key."""
        heads = [glob.partition("/")[0] for glob in self._include]
        return not matcher(self._exclude)(key) and (
            not heads or any(head.startswith("**") or matcher([head])(key) for head in heads)
        )

    def _note_gone(self, view: View, wanted: Mapping[str, Any]) -> None:
        gone = Counter("/".join(path.split("/", 2)[:2]) for path in view.gone if path.split("/", 2)[1] in wanted)
        for path, count in gone.items():
            self._notes.add(
                "skipped", path, f"{counted(count, 'entry', 'entries')} of a rank that is not there any more"
            )

    def _shared_alone(self, key: str, entries: dict[str, Any], view: View) -> bool:
        """Whether a rank that was not there can have this key, with what all ranks shared of it."""
        for path in [path for path, entry in entries.items() if isinstance(entry, Container) and path != key]:
            if path in entries and not self._wanted(path) and not _whole(path, entries):
                for below in [below for below in entries if below.startswith(f"{path}/")]:
                    del entries[below]
                entries[path] = ListEntry(0)  # which nobody asked for: it stays as it is in the application
        missing = [
            f"{path}/{name}"
            for path, entry in entries.items()
            if isinstance(entry, Container)
            for name in entry.components()
            if f"{path}/{name}" not in entries
        ]
        withheld = [path for path in view.withheld if path.startswith(f"{key}/") and self._wanted(path)]
        nothing = withheld and all(isinstance(entry, Container) for entry in entries.values())
        if not missing and not nothing:
            return True
        what = (missing or withheld)[0]
        self._notes.mismatches.append(
            f"{key}: {what} {view.withheld.get(what, 'belongs to other ranks alone')}, and rank {self._exchange.rank} "
            "was not there when the snapshot was taken; take what is the same on all ranks with replicated=[...]"
        )
        return False

    # Read

    def _read(self, gather: ReadPlan, common: Ranges, waits: bool) -> ReadResult:
        """Objects first, then (atomic) every byte once without touching anything, then all into its place. `waits`: not
        before all ranks have come so far."""
        total = sum(want.end - want.begin for want in gather.wants)
        self._meter.begin(total * (2 if self._options.atomic else 1))
        with self._phase("read"):
            seen = self._fetch_shared(gather.objects, common)
            gather.finish_objects()
            if self._options.atomic:
                expect_sums(self._session, (want.stored for want in gather.wants), self._document.files)
                dry = [
                    ReadRequest(want.name, want.stored, want.location, want.begin, want.end) for want in gather.wants
                ]
                first = self._fetch(dry, verify=True)
                seen.bytes_read += first.bytes_read
                seen.requests += first.requests
            if waits:
                self._expect_all()
            result = self._fetch_shared(gather.wants, common)
            result.bytes_read += seen.bytes_read
            result.requests += seen.requests
        return result

    def _fetch_shared(self, wants: Sequence[ReadRequest], common: Ranges) -> ReadResult:
        """Read what this rank alone wants, and then with the others what all want."""
        alone, together = divided(wants, common)
        result = self._fetch(alone)
        if common:
            relay = BroadcastReader(
                self._exchange, self._session, together, self._meter, self._touched, verify=self._options.verify
            )
            self._expect_all()  # from here on, who fails must not leave others waiting
            relay.run(result)
            expect_good(self._session, result)
        return result

    def _expect_all(self) -> None:
        """All ranks have come so far, or all raise."""
        if not self._exchange.agree(True, all, bool, bool):
            raise SnapshotError(f"{self._session.url}: what one rank had read did not reach all others")

    def _fetch(self, wants: Sequence[ReadRequest], *, verify: bool | None = None) -> ReadResult:
        return fetch(
            self._session, wants, self._options.verify if verify is None else verify, self._meter, self._touched
        )

    # Hand back

    def _hand_back(self, kind: Kind, entries: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        choice = self._match.choices.get(kind.key)
        if choice is None or kind.by_name:
            state = inflate(kind.key, entries, values)
        else:
            state = choice.merge(kind.key, entries, values, kind.state)
        kind.drop(self._match.dropped.get(kind.key, ()))
        try:
            left = kind.hand_back(state, self._options.strict and not self._filtered)
        except Exception as error:
            error.add_note(f"raised by load_state_dict() of app_state[{kind.key!r}]; its tensors have been restored")
            raise
        for path in left:
            self._notes.add("skipped", path, "has no place here")


SKIP_SHAPES = "\n(to leave tensors of another shape as they are: strict=False, mismatched='skip')"


def _whole(path: str, entries: Mapping[str, Any]) -> bool:
    """Whether all that is in a container is there."""
    return all(
        f"{above}/{name}" in entries
        for above, entry in entries.items()
        if isinstance(entry, Container) and (above == path or above.startswith(f"{path}/"))
        for name in entry.components()
    )
