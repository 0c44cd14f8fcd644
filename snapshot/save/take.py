"""The steps of a take, in order: in the foreground, in the background, and as a plan without writing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.events import emit
from snapshot.io.loop import LoopFuture, at_work, is_exiting, run, works_here
from snapshot.io.system import gc_paused
from snapshot.io.url import URL
from snapshot.plan.layout import SavePlan
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import TakeReport
from snapshot.save.background_take import LateCopies, StagingAhead
from snapshot.save.begin import Claim, begin_take, open_dry_run, session_for_take
from snapshot.save.observers import Observers, TakeView
from snapshot.save.planned_take import AtCommit, Take, Verify, plan_writes
from snapshot.save.rank_share import RankShare, collect_rank_share
from snapshot.save.reuse import find_reuse, group_leaves
from snapshot.save.staging import PartSource, Stager
from snapshot.save.step_barrier import PendingCopy
from snapshot.save.take_options import TakeCall, TakeRequest, find_sink
from snapshot.save.take_slots import take_slots
from snapshot.save.writer import PartSink
from snapshot.state.changing import find_frozen
from snapshot.state.model_state import ModuleMap
from snapshot.state.stateful import Stateful, map_modules

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from snapshot.save.compression import Packing


T = TypeVar("T")
VERIFY = "snapshot.transform.verify"
"""It is imported by its name, and only for a take that is read back."""
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


@gc_paused()  # until all that it made is freed: what is left would be examined at once
def run_take(
    path: Path,
    app_state: AppState,
    pg: ProcessGroup | None,
    call: TakeCall,
) -> tuple[Path, TakeReport]:
    """Take a snapshot, and return its path and a report when it is committed."""
    with (
        _timed("take", path),
        Exchange(ranks_of(pg), "take", call.timeout) as exchange,
        at_work(),
    ):
        options = call.request()  # its errors are sent to the other ranks
        statefuls = map_modules(app_state)
        meter = Meter("take", shown_once(options.progress, pg))
        with begin_take(exchange, path, options, meter) as claim, ExitStack() as opened:
            claim.transaction.expect_free()  # before any state is collected
            take = _assemble(opened, claim, statefuls, options)
            run(take.write_and_commit())
    return claim.path_as_given(path), take.report


def start_take(
    path: Path,
    app_state: AppState,
    pg: ProcessGroup | None,
    call: TakeCall,
    make: Callable[[StartedTake], T],
) -> T:
    """Stage a snapshot, start to write it, and return what `make` returns. If `make` raises, the take ends."""
    with (
        at_work(),
        _timed("async_take", path),
        Exchange(ranks_of(pg), "async_take", call.timeout) as exchange,
    ):
        options = call.request()
        statefuls = map_modules(app_state)
        sink: PartSink | None = None
        if options.worker != "thread" and not is_exiting():
            sink = find_sink(options.worker).start(URL.parse(os.fspath(path)), options.storage_options)
        meter = Meter("async_take", shown_once(options.progress, pg))
        with (
            take_slots().take(options.when_busy) as slot,
            gc_paused(),
            begin_take(exchange, path, options, meter, slot) as claim,
            ExitStack() as opened,
        ):
            take = _assemble(opened, claim, statefuls, options, background=not works_here(), sink=sink)
            report, late = take.report, take.late
            work = take.start()
            slot.leave_after(work)
            place = claim.path_as_given(path)
            return make(StartedTake(place, report, work, meter, late, claim.save_id))


def _assemble(
    opened: ExitStack,
    claim: Claim,
    statefuls: Sequence[ModuleMap],
    options: TakeRequest,
    *,
    background: bool = False,
    sink: PartSink | None = None,
) -> Take:
    """Collect, agree, share, compare and plan. `opened`: what an error in the rest of the call ends."""
    session, verb = claim.session, claim.meter.verb
    share = collect_rank_share(claim.exchange, session, statefuls, options, claim.globs)
    packing: Packing | None = None
    if options.compression is not None:
        from snapshot.save.compression import choose_packing  # few takes are compressed

        packing = choose_packing(options.compression, session, share.leaves)
    overlapped = background and options.staging == "overlapped" and options.prepare is None and not is_exiting()
    # From here on, a `step()` of the application waits: before anything is compared with a base, or planned.
    late = opened.enter_context(LateCopies(claim, share, overlapped=overlapped))
    # This reads all tensors and shares files, so it needs most of a take's time if little has changed.
    reuse = find_reuse(claim, share, options)
    observers = _observe(claim, share, options)
    groups = reuse.groups_with(late.marks)
    plan = plan_writes(share, session, staged=background, groups=groups, expected=options.plan, packing=packing)
    source: PartSource
    if background:
        ahead = StagingAhead(claim, share, plan, late.pending, shared=sink is not None, in_turn=packing is not None)
        if late.pending is not None:
            ahead.stager.watch(late.marks, late.owners, late.pending)
        source = opened.enter_context(ahead)
    else:
        source = stager = Stager(share.leaves, copies=session.storage.limits.alignment > 1)
        opened.enter_context(stager.digesting(plan.files, session.budget))
    return Take(
        claim,
        share,
        plan,
        reuse=reuse,
        source=source,
        packing=packing,
        sink=sink,
        commit=AtCommit(
            options.metadata_json,
            options.metadata if isinstance(options.metadata, Future) else None,
            verify_written(options.read_back_share, verb),
            options.signer,
            observers,
        ),
    )


def _observe(claim: Claim, share: RankShare, options: TakeRequest) -> Observers:
    """Show the state that is taken to the observers."""
    view = TakeView(
        share.statefuls,
        share.flat,
        share.leaves,
        share.replicas,
        claim.session.url,
        claim.meter.verb,
        int(claim.save_id, 16),
        claim.exchange.world,
        claim.exchange.rank == 0,
    )
    return Observers(view, options.observed)


def plan_take(path: Path, app_state: AppState, pg: ProcessGroup | None, call: TakeCall) -> SavePlan:
    """Plan a take without writing anything."""
    with Exchange(ranks_of(pg), "plan", call.timeout) as exchange:
        statefuls = map_modules(app_state)
        options = call.request()
        session, globs = open_dry_run(
            exchange, URL.parse(os.fspath(path)), options.replicated or (), partial(session_for_take, options)
        )
        with session:
            share = collect_rank_share(exchange, session, statefuls, options, globs)
            groups = group_leaves(share, find_frozen(share.statefuls, share.leaves), None)
            plan = plan_writes(share, session, staged=False, groups=groups)
        exchange.close()
    return plan


def shown_once(progress: ProgressArgument, pg: ProcessGroup | None) -> ProgressArgument:
    """Show one progress bar for all ranks."""
    return None if progress is True and ranks_of(pg).rank else progress


def verify_written(share: float, verb: str) -> Verify | None:
    """Return a function that reads a fraction of the written bytes back before a commit; None for a fraction of 0."""
    if not share:
        return None
    return partial(import_module(VERIFY).expect_read_back, share=share, verb=verb)
