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

from snapshot.distributed.call import Call
from snapshot.engine.fetch import expect_good, fetch
from snapshot.engine.gather import Gather, Uncovered
from snapshot.engine.loop import run
from snapshot.engine.match import CASTS, Match
from snapshot.engine.operation import Operation
from snapshot.engine.quiet import no_collection
from snapshot.engine.reader import ReadResult
from snapshot.engine.sharing import remember
from snapshot.engine.sums import expect_sums
from snapshot.engine.targets import shared_memory
from snapshot.engine.together import Ranges, Relay, agree_on_reads, divided
from snapshot.engine.unfold import unfold
from snapshot.engine.wants import Want
from snapshot.errors import CorruptSnapshotError, RestoreError, SnapshotError
from snapshot.events import Meter
from snapshot.formats.foreign import root_of, root_over
from snapshot.formats.unpickling import expect_no_module
from snapshot.manifest.check import check_tree, locations_of
from snapshot.manifest.document import Document
from snapshot.manifest.entries import Container, ListEntry, OrderedDictEntry
from snapshot.manifest.paths import component
from snapshot.manifest.view import Rename, View, by_key, nearest, rank_view, renamed_view
from snapshot.plan.globs import matcher, unmatched
from snapshot.report import Notes, RestoreReport, listed
from snapshot.state.kinds import Kind, kind_of, kind_type
from snapshot.state.live import Choice, inflate
from snapshot.state.rng import RNGState


class Restore:
    """A restore under way."""

    def __init__(
        self,
        call: Call,
        operation: Operation,
        document: Document,
        *,
        strict: bool,
        include: Sequence[str],
        exclude: Sequence[str],
        rename: Rename | None,
        cast: str,
        verify: bool,
        atomic: bool,
        read_once: str | bool,
        opened: float,
        allow_pickle: bool,
        meter: Meter,
    ) -> None:
        if cast not in CASTS:
            raise ValueError(f"cast={cast!r} is none of {', '.join(map(repr, CASTS))}")
        if read_once not in ("auto", True, False):
            raise ValueError(f"read_once={read_once!r} is none of 'auto', True, False")
        self._call = call
        self._operation = operation
        self._document = document
        self._strict = strict
        self._include, self._exclude = include, exclude
        self._filtered = bool(include or exclude)
        included, excluded = matcher(include or ["**"]), matcher(exclude)
        self._wanted: Callable[[str], bool] = lambda path: included(path) and not excluded(path)
        self._rename = rename
        self._cast = cast
        self._verify = verify
        self._atomic = atomic
        self._allow_pickle = allow_pickle
        self._meter = meter
        remote = not operation.storage.capabilities.blocking
        self._read_once = not call.alone and (remote if read_once == "auto" else bool(read_once))
        self._seconds: dict[str, float] = {"open": opened}
        self._touched: set[str] = set()
        """The live tensors that have been written to."""

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        """Do all of it."""
        try:
            with no_collection():
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
                run(self._operation.load(self._document, list(self._document.parts)))
                grouped, gather = self._plan(app_state, kinds)
        with self._phase("check"):
            run(self._operation.expect_files(self._document, {want.location for want in gather.wants}))
            common = agree_on_reads(self._call, gather, self._match, kinds.values(), once=self._read_once)
        result = self._read(gather, common)
        self._expect_all()
        with self._phase("place"):
            gather.finish()
        with self._phase("hand back"):
            for key, entries in grouped.items():
                self._hand_back(kinds[key], entries, gather.values)
        self._expect_all()
        remember(self._call, self._document)
        return RestoreReport(
            self._match.restored, result.bytes_read, result.requests, self._seconds, tuple(self._notes.lines)
        )

    # Plan

    def _plan(self, app_state: Mapping[str, Any], kinds: dict[str, Kind]) -> tuple[dict[str, dict[str, Any]], Gather]:
        """Everything that can be known without reading data: what goes where. Raises for what does not fit."""
        document, operation = self._document, self._operation
        self._notes = Notes()
        view = rank_view(document.manifest, self._call.rank, document.world_size, self._call.world)
        view = renamed_view(view, self._rename) if self._rename else view
        self._match = Match(
            strict=self._strict, cast=self._cast, wanted=self._wanted, view=view, several=not self._call.alone,
            every=document.world_size == 1,
            notes=self._notes,
        )  # fmt: skip
        grouped = self._chosen(view, app_state)
        needed = set().union(*(locations_of(entries, document.files) for entries in grouped.values()))
        run(operation.expect_files(document, needed))
        gather = Gather(document.files, allow_pickle=self._allow_pickle, partial=bool(document.parts))
        for key, stateful in self._ordered(app_state):
            if key in grouped:
                kind = kinds.get(key)
                if kind is None:
                    kind = kinds[key] = kind_of(key, stateful)
                self._match.add(kind, grouped[key], gather)
        self._notes.mismatches += shared_memory(gather)
        if self._notes.mismatches:
            expect_no_module(operation.url, document.manifest, allow_pickle=self._allow_pickle)
            raise RestoreError(
                f"{operation.url}: does not fit the application, and nothing was touched:"
                f"{listed(self._notes.mismatches, 100)}",
                self._notes.mismatches,
            )
        return grouped, gather

    def _ordered(self, app_state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """The statefuls in the order in which they are asked and handed back: by key, the RNG state last."""
        items = sorted(app_state.items(), key=lambda item: (isinstance(item[1], RNGState), item[0]))
        return [(component(key), stateful) for key, stateful in items]

    def _chosen(self, view: View, app_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """The entries of each key that is asked for; keys of which nothing is wanted are left alone."""
        grouped = self._whole(by_key(view.entries), app_state)
        notes = self._notes
        self._check_globs(grouped, view)
        wanted = {}
        for key, stateful in self._ordered(app_state):
            if isinstance(stateful, RNGState) and self._call.rank >= self._document.world_size:
                notes.add("skipped", key, "this rank was not there when the snapshot was taken")
                continue
            entries = self._entries(key, grouped, view)
            if entries is None:
                if self._filtered and not self._wanted(key):
                    continue
                alone = f"{key}: {view.withheld[key]}" if key in view.withheld else None
                notes.mismatches.append(alone or f"{key}: the snapshot has no such key; {nearest(key, grouped)}")
                continue
            if self._call.rank >= self._document.world_size:
                if self._filtered and not any(map(self._wanted, entries)):
                    notes.add("skipped", key, "not asked for")
                    continue
                if not self._shared_alone(key, entries, view):
                    continue
            run(unfold(self._operation, self._document, entries, self._wanted, kind_type(stateful)))
            check_tree(key, entries)
            if not self._filtered or self._choose(key, entries, view):
                wanted[key] = entries
        if self._call.rank == 0:
            self._note_gone(view, wanted)
        return wanted

    def _check_globs(self, grouped: Mapping[str, Mapping[str, Any]], view: View) -> None:
        named = (path for entries in grouped.values() for path in entries)
        every = [*named, *view.elsewhere] if self._filtered else []
        for glob in unmatched(self._include, every) if self._include else ():
            view.unknown.append(f"include: the glob {glob!r} matches nothing in the snapshot")
        if self._call.alone:
            self._notes.mismatches += view.unknown
        self._match.unknown = view.unknown
        for glob in unmatched(self._exclude, every) if self._exclude else ():
            warnings.warn(f"exclude: the glob {glob!r} matches nothing in the snapshot", stacklevel=7)

    def _whole(self, grouped: dict[str, dict[str, Any]], app_state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Where a format knows no names of statefuls, the only one of the application takes all."""
        if root_of(self._document) is None or len(app_state) != 1:
            return grouped
        key = component(*app_state)
        if key in grouped:
            return grouped
        below = {f"{key}/{path}": entry for entries in grouped.values() for path, entry in entries.items()}
        return {key: {key: root_over(self._document, grouped), **below}}

    def _entries(self, key: str, grouped: Mapping[str, dict[str, Any]], view: View) -> dict[str, Any] | None:
        """What there is under a key. If only other ranks had it, a module finds its names there."""
        if key not in grouped and any(path.startswith(f"{key}/") for path in view.elsewhere):
            return {key: OrderedDictEntry([])}
        return grouped.get(key)

    def _choose(self, key: str, entries: Mapping[str, Any], view: View) -> bool:
        """Whether anything under a key is asked for, here or with other ranks; what is not is left alone."""
        choice = Choice(entries, self._wanted)
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
            self._notes.add("skipped", path, f"{count} entries of a rank that is not there any more")

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
            f"{key}: {what} {view.withheld.get(what, 'belongs to other ranks alone')}, and rank {self._call.rank} was "
            "not there when the snapshot was taken; take what is the same on all ranks with replicated=[...]"
        )
        return False

    # Read

    def _read(self, gather: Gather, common: Ranges) -> ReadResult:
        """Objects first, then (atomic) every byte once without touching anything, then all into its place."""
        total = sum(want.end - want.begin for want in gather.wants)
        self._meter.begin(total * (2 if self._atomic else 1))
        with self._phase("read"):
            seen = self._fetch_shared(gather.objects, common)
            gather.finish_objects()
            if self._atomic:
                expect_sums(self._operation, (want.stored for want in gather.wants), self._document.files)
                dry = [
                    Want(want.name, want.stored, want.location, want.begin, want.end) for want in gather.wants
                ]  # fmt: skip
                first = self._fetch(dry, verify=True)
                seen.bytes_read += first.bytes_read
                seen.requests += first.requests
            result = self._fetch_shared(gather.wants, common)
            self._touched = result.touched
            result.bytes_read += seen.bytes_read
            result.requests += seen.requests
        return result

    def _fetch_shared(self, wants: Sequence[Want], common: Ranges) -> ReadResult:
        """Read what this rank alone wants, and then with the others what all want."""
        alone, together = divided(wants, common)
        result = self._fetch(alone)
        if common:
            relay = Relay(self._call, self._operation, together, self._meter, verify=self._verify)
            self._touched = result.touched
            self._expect_all()  # from here on, who fails must not leave others waiting
            relay.run(result)
            expect_good(self._operation, result)
        return result

    def _expect_all(self) -> None:
        """All ranks have come so far, or all raise."""
        if not self._call.exchange(True, all, bool, bool):
            raise SnapshotError(f"{self._operation.url}: what one rank had read did not reach all others")

    def _fetch(self, wants: Sequence[Want], *, verify: bool | None = None) -> ReadResult:
        return fetch(self._operation, wants, self._verify if verify is None else verify, self._meter)

    # Hand back

    def _hand_back(self, kind: Kind, entries: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        choice = self._match.choices.get(kind.key)
        if choice is None or kind.by_name:
            state = inflate(kind.key, entries, values)
        else:
            state = choice.merge(kind.key, entries, values, kind.state)
        try:
            left = kind.hand_back(state, self._strict and not self._filtered)
        except Exception as error:
            error.add_note(f"raised by load_state_dict() of app_state[{kind.key!r}]; its tensors have been restored")
            raise
        for path in left:
            self._notes.add("skipped", path, "has no place here")


def _whole(path: str, entries: Mapping[str, Any]) -> bool:
    """Whether all that is in a container is there."""
    return all(
        f"{above}/{name}" in entries
        for above, entry in entries.items()
        if isinstance(entry, Container) and (above == path or above.startswith(f"{path}/"))
        for name in entry.components()
    )
