"""A restore on one rank: plan, check, read (shared with other ranks), place, hand back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from snapshot.distributed.operation import Operation
from snapshot.errors import CorruptSnapshotError, RestoreError, SnapshotError, noting
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.loading.choose import find_receivers
from snapshot.loading.open import Opened, expect_conditions, expect_files, remember_plan
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.read_requests import ReadRequest
from snapshot.loading.reader import ReadResult, fetch_requests, raise_faults
from snapshot.loading.restore_options import RestoreOptions
from snapshot.loading.restore_plan import RestorePlan, plan_restore, reshard_states
from snapshot.loading.shared_reads import BroadcastReader, Ranges, agree_on_reads, share_checks, split_requests
from snapshot.manifest.document import check_tensor
from snapshot.reports import Line, RestoreReport
from snapshot.state.flatten import inflate_tree
from snapshot.state.optimizers import StateOfParameters
from snapshot.state.stateful import RestoreAdapter
from snapshot.tensors.geometry import Box
from snapshot.tensors.memory import BY_NAME
from snapshot.text import counted, listed


class Restore:
    """A restore in progress."""

    def __init__(
        self,
        operation: Operation,
        opened: Opened,
        options: RestoreOptions,
        *,
        seconds: float,
        allow_pickle: bool,
        touched: set[str],
    ) -> None:
        """`touched`: names of live tensors that an earlier attempt wrote. All of them must be restored now.

        The names of the tensors that this attempt writes are added.
        """
        self._exchange = exchange = operation.exchange
        self._opened = opened
        self._document = opened.document
        self._options = options
        self._allow_pickle = allow_pickle
        self._meter = operation.meter
        remote = not opened.storage.capabilities.local
        self._read_once = not exchange.alone and (remote if options.read_once == "auto" else bool(options.read_once))
        self._seconds: dict[str, float] = {"open": seconds}
        self._touched = touched

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        """Run all steps."""
        try:
            return self._run(app_state)
        except Exception as error:
            note = f"live tensors that were written: {', '.join(sorted(self._touched))}"
            known = isinstance(error, CorruptSnapshotError) or note in getattr(error, "__notes__", ())
            if self._touched and not known:
                error.add_note(note)
            raise

    def _run(self, app_state: Mapping[str, Any]) -> RestoreReport:
        options, opened, document = self._options, self._opened, self._document
        receivers = find_receivers(app_state)
        with self._phase("plan"):
            resharded = reshard_states(self._exchange, opened, options, receivers, allow_pickle=self._allow_pickle)
            plan = plan_restore(
                self._exchange,
                opened,
                options,
                receivers,
                done=resharded.keys(),
                allow_pickle=self._allow_pickle,
                written=frozenset(self._touched),
            )
        with self._phase("check"):
            needed = {request.location for request in plan.reads.requests} - plan.checked
            mine = share_checks(self._exchange, opened, needed)
            only = self._exchange.alone and not plan.checked  # else another file may be missing when a byte is written
            if mine:
                run(expect_files(opened, mine, reads=only, conditions=False))
            run(expect_conditions(opened, {each.location for each in (*plan.reads.objects, *plan.reads.requests)}))
            doubted = self._find_doubted(plan)
            waits = options.atomic or bool(doubted) or any(each.compares_values for each in plan.adapters.values())
            agreed = agree_on_reads(self._exchange, plan, opened.url, once=self._read_once, waits=waits)
            if agreed.same:
                opened.storage.share_reads()
        result = self._read(plan, agreed.common, doubted, waits=agreed.waits)
        self._expect_all()
        plan.reads.requests, plan.reads.objects = [], []  # before the states are built, which takes memory again
        with self._phase("place"):
            plan.reads.finish()
        with self._phase("hand back"):
            filled: set[int] = set()
            for adapter in plan.adapters.values():
                if isinstance(adapter, StateOfParameters):
                    adapter.filled = filled
            for each in receivers:
                with noting(f"raised by load_state_dict() of app_state[{each.key!r}]; its tensors are restored"):
                    if each.key in resharded:
                        each.stateful.load_state_dict(resharded[each.key])
                    elif each.key in plan.grouped:
                        self._hand_back(plan, each.adapter)
        self._expect_all()
        remember_plan(self._exchange, document)
        lines = plan.issues.lines
        self._warn(lines)
        return RestoreReport(
            plan.matched.restored + len(resharded), result.bytes_read, result.requests, self._seconds, tuple(lines)
        )

    def _warn(self, lines: Sequence[Line]) -> None:
        """Log what an application may have forgotten: entries that it keeps, and keys that it did not restore."""
        url = self._opened.url
        found: dict[str, list[str]] = {}
        for line in lines:
            found.setdefault(line.kind, []).append(line.path)
        if "kept" in found:
            log.warning(
                "%s: the snapshot lacks these entries; they are left unchanged:%s", url, listed(found["kept"], 10)
            )
        manifest, rank = self._document.manifest, self._exchange.rank
        if rank:  # rank 0 logs what is equal on all ranks
            found = {"unused": [key for key in found.get("unused", ()) if f"0/{key}" not in manifest]}
        if found.get("missing"):
            log.warning(
                "%s: the snapshot lacks %s of the application; they keep their values:%s",
                url,
                counted(len(found["missing"]), "name"),
                listed(found["missing"], 10),
            )
        if found.get("unused"):
            log.warning(
                "%s: the snapshot has keys that app_state lacks, so they were not restored: %s; add them, or pass "
                "unused='ignore'",
                url,
                ", ".join(found["unused"][:10]) + (", ..." if len(found["unused"]) > 10 else ""),
            )

    # Read

    def _find_doubted(self, plan: RestorePlan) -> list[ReadRequest]:
        """Return what is read from a folder of weights, which may have changed since the take."""
        files = self._document.files
        doubted = {location for location, file in files.items() if file.name}
        return [each for each in plan.reads.requests if each.location in doubted] if doubted else []

    def _read(self, plan: RestorePlan, common: Ranges, doubted: Sequence[ReadRequest], *, waits: bool) -> ReadResult:
        """Read objects first, then verify what is doubted, or all bytes if `atomic`, then read everything into place.

        If `waits`, wait for all ranks before writing to live tensors.
        """
        reads = plan.reads
        total = sum(request.end - request.begin for request in reads.requests)
        again = sum(request.end - request.begin for request in doubted)
        self._meter.begin(total * (2 if self._options.atomic else 1) + again)
        with self._phase("read"):
            reads.await_targets()
            seen = self._fetch_shared(reads.objects, common)
            reads.finish_objects()
            self._compare_values(plan)
            if doubted:
                from snapshot.loading.base_folder import expect_unchanged  # few snapshots have such a base

                seen.add(expect_unchanged(self._opened, doubted, self._meter))
            if self._options.atomic:
                from snapshot.loading.archive_checksums import expect_archive_checksums  # read by `atomic` alone

                expect_archive_checksums(self._opened, (request.stored for request in reads.requests))
                seen.add(self._fetch([request.as_dry() for request in reads.requests], verify=True))
            if waits:
                self._expect_all()
            result = self._fetch_shared(reads.requests, common)
            result.add(seen)
        return result

    def _compare_values(self, plan: RestorePlan) -> None:
        """Raise if an adapter finds stored values that its stateful cannot take."""
        wrong = []
        for adapter in plan.adapters.values():
            if adapter.compares_values:
                entries, skipped, values = plan.grouped[adapter.key], plan.matched.skipped, plan.reads.values
                wrong += adapter.find_wrong_values(entries, skipped, values, self._read_boxes)
        if wrong:
            raise RestoreError(
                f"{self._opened.url}: does not fit the application, and nothing was touched:{listed(wrong, 100)}", wrong
            )

    def _read_boxes(self, boxes: Sequence[tuple[str, Any, Box]]) -> list[torch.Tensor]:
        """Return boxes of stored tensors, given by path, entry and box. They are verified when all is read."""
        files, partial = self._document.files, bool(self._document.parts)
        plan, made = ReadPlan(files, partial=partial), []
        for path, entry, box in boxes:
            check_tensor(path, entry, files, partial=partial, boxes=[box])
            made.append(torch.empty(box.sizes, dtype=BY_NAME[entry.dtype]))
            plan.into_box(path, entry, box, made[-1])
            if plan.lacking:
                raise CorruptSnapshotError(f"{path}: its parts do not have the box [{box}]")
        plan.execute(self._opened, verify=False)
        return made

    def _fetch_shared(self, requests: Sequence[ReadRequest], common: Ranges) -> ReadResult:
        """Read the ranges of this rank alone, then the shared ones together with the other ranks."""
        alone, together = split_requests(requests, common)
        result = self._fetch(alone)
        if common:
            relay = BroadcastReader(
                self._exchange, self._opened, together, self._meter, self._touched, verify=self._options.verify
            )
            self._expect_all()  # from here on, a failing rank must not leave others waiting
            relay.run(result)
            raise_faults(self._opened, result)
        return result

    def _expect_all(self) -> None:
        """Wait until all ranks are this far, or raise on all of them."""
        if not self._exchange.agree(True, all, bool, bool):
            raise SnapshotError(f"{self._opened.url}: the bytes that one rank read did not reach all others")

    def _fetch(self, requests: Sequence[ReadRequest], *, verify: bool | None = None) -> ReadResult:
        return fetch_requests(
            self._opened, requests, self._options.verify if verify is None else verify, self._meter, self._touched
        )

    # Hand back

    def _hand_back(self, plan: RestorePlan, adapter: RestoreAdapter) -> None:
        """Give a stateful its state."""
        entries, values = plan.grouped[adapter.key], plan.reads.values
        choice = plan.matched.states.get(adapter.key)
        if choice is None or adapter.by_name:
            state = inflate_tree(adapter.key, entries, values)
        else:
            state = choice.merge(adapter.key, entries, values, adapter.state)
        adapter.drop_keys(plan.matched.dropped.get(adapter.key, ()))
        strict = self._options.strict and not (self._options.select or self._options.exclude)
        for path in adapter.load_state(state, strict):
            plan.issues.add("skipped", path, "the application has no such name")
