"""The steps of a take, in order: in the foreground, in the background, and as a plan without writing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.events import emit
from snapshot.options import Settings
from snapshot.plan.layout import SavePlan
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import TakeReport
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import LoopFuture, refuse_on_loop, run
from snapshot.save.background_take import BackgroundTake, LateCopies
from snapshot.save.begin import begin_take, session_for_take
from snapshot.save.concurrency import take_slots
from snapshot.save.optimizer_barrier import PendingCopy
from snapshot.save.packing import choose_packing
from snapshot.save.rank_share import collect_rank_share
from snapshot.save.rendezvous import open_dry_run
from snapshot.save.staging import Stager
from snapshot.save.take import Take, plan_writes
from snapshot.save.take_options import TakeOptions
from snapshot.save.unchanged import group_leaves
from snapshot.state.frozen import find_frozen
from snapshot.state.stateful import Stateful, check_app_state
from snapshot.url import URL
from snapshot.verbs.bases import find_unchanged
from snapshot.verbs.verify_writes import verify_written
from snapshot.worker.client import expect_reachable, writer_process

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
Path = str | os.PathLike[str]
AppState = Mapping[str, Stateful]


class StartedTake(NamedTuple):
    """A take that has begun in the background."""

    path: Path
    report: TakeReport
    work: LoopFuture[None]
    meter: Meter
    late: PendingCopy | None
    save_id: str


@contextmanager
def _timed(verb: str, path: Path) -> Iterator[None]:
    """Emit an event with the seconds until a call returns."""
    began = time.perf_counter()
    try:
        yield
    finally:
        with suppress(TypeError, ValueError):  # the call raises it for a wrong path
            place = str(URL.parse(os.fspath(path)))
            emit("blocked", verb, place, seconds=round(time.perf_counter() - began, 3))


def run_take(
    path: Path,
    app_state: AppState,
    pg: ProcessGroup | None,
    given: Mapping[str, Any],
    *,
    progress: ProgressArgument,
    timeout: float | None,
) -> tuple[Path, TakeReport]:
    """Take a snapshot, and return its path and a report when it is committed. `given`: fields of `TakeOptions`."""
    with (
        _timed("take", path),
        Exchange(ranks_of(pg), "take", timeout_or_default(timeout)) as exchange,
        gc_paused(),
    ):
        refuse_on_loop()
        options = TakeOptions(**given)
        check_app_state(app_state)
        meter = Meter("take", shown_once(progress, pg))
        with begin_take(exchange, path, options, meter) as opening:
            opening.look_at_path()
            opening.transaction()  # raises for an existing snapshot before any state is collected
            share = collect_rank_share(exchange, app_state, options, opening.globs)
            packing = choose_packing(options.compression, opening.session, share.leaves)
            unchanged = find_unchanged(opening, share, app_state, options)
            plan = plan_writes(
                share, opening.session, staged=False, groups=unchanged.groups, expected=options.plan, packing=packing
            )
            stager = Stager(share.leaves, copies=opening.session.storage.limits.alignment > 1)
            with stager.digesting(plan.files, opening.session.budget):
                take = Take(
                    opening,
                    share,
                    plan,
                    unchanged,
                    stager=stager,
                    metadata=options.metadata_json,
                    verify=verify_written(options.verify_share, "take"),
                    packing=packing,
                    signer=options.signer,
                )
                run(take.write())
    return opening.path_as_given(path), take.report


def start_take(
    path: Path,
    app_state: AppState,
    pg: ProcessGroup | None,
    given: Mapping[str, Any],
    make: Callable[[StartedTake], T],
    *,
    progress: ProgressArgument,
    timeout: float | None,
) -> T:
    """Stage a snapshot, start to write it, and return what `make` returns. `given`: fields of `TakeOptions`.

    If `make` raises, the take ends.
    """
    refuse_on_loop()
    with (
        _timed("async_take", path),
        Exchange(ranks_of(pg), "async_take", timeout_or_default(timeout)) as exchange,
    ):
        options = TakeOptions(**given)
        check_app_state(app_state)
        sink = None
        if options.worker == "process":
            expect_reachable(URL.parse(os.fspath(path)), options.storage_options)
            sink = writer_process()
        meter = Meter("async_take", shown_once(progress, pg))
        with (
            take_slots().take(options.when_busy) as slot,
            gc_paused(),
            begin_take(exchange, path, options, meter, slot) as opening,
        ):
            opening.look_at_path()
            share = collect_rank_share(exchange, app_state, options, opening.globs)
            packing = choose_packing(options.compression, opening.session, share.leaves)
            overlapped = options.staging == "overlapped" and options.prepare is None
            with LateCopies(opening, share, app_state if overlapped else None) as late:
                unchanged = find_unchanged(opening, share, app_state, options)
                groups = unchanged.groups_with(late.marks)
                plan = plan_writes(
                    share, opening.session, staged=True, groups=groups, expected=options.plan, packing=packing
                )
                with BackgroundTake(
                    opening,
                    share,
                    plan,
                    unchanged,
                    late,
                    metadata=options.metadata_json,
                    verify=verify_written(options.verify_share, "async_take"),
                    sink=sink,
                    packing=packing,
                    signer=options.signer,
                ) as take:
                    report = take.report
                    work = take.stage_and_start()
                    slot.leave_after(work)
                    place = opening.path_as_given(path)
                    return make(StartedTake(place, report, work, meter, late.pending, opening.save_id))


def plan_take(path: Path, app_state: AppState, pg: ProcessGroup | None, given: Mapping[str, Any]) -> SavePlan:
    """Plan a take without writing anything. `given`: fields of `TakeOptions`."""
    with Exchange(ranks_of(pg), "plan", timeout_or_default(None)) as exchange:
        check_app_state(app_state)
        options = TakeOptions(**given)
        session, globs = open_dry_run(
            exchange, URL.parse(os.fspath(path)), options.replicated or (), partial(session_for_take, options)
        )
        try:
            share = collect_rank_share(exchange, app_state, options, globs)
            groups = group_leaves(share, find_frozen(app_state, share.leaves), None)
            plan = plan_writes(share, session, staged=False, groups=groups)
        finally:
            run(session.close())
        exchange.close()
    return plan


def timeout_or_default(given: float | None) -> float:
    """Return the seconds after which a rank without a heartbeat counts as dead."""
    return Settings.current().timeout if given is None else given


def shown_once(progress: ProgressArgument, pg: ProcessGroup | None) -> ProgressArgument:
    """Show one progress bar for all ranks."""
    return None if progress is True and ranks_of(pg).rank else progress
