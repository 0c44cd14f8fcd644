"""The steps of a take, in order: in the foreground, in the background, and as a plan without writing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import (
    CorruptSnapshotError,
    RestoreError,
    SnapshotNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.formats.foreign import ForeignDocument
from snapshot.io.loop import LoopFuture, refuse_on_loop, run
from snapshot.io.session import Session
from snapshot.io.system import gc_paused
from snapshot.io.url import URL, Location, locate_source, select_server
from snapshot.loading.left_out import attach_base
from snapshot.loading.open import open_document
from snapshot.options import Settings
from snapshot.plan.layout import SavePlan
from snapshot.progress import Meter, ProgressArgument
from snapshot.reports import TakeReport
from snapshot.save.background_take import LateCopies, PendingCopy, StagingAhead
from snapshot.save.base_files import Base, Comparer, open_base
from snapshot.save.begin import TakeOpening, TakeRequest, begin_take, open_dry_run, session_for_take, take_slots
from snapshot.save.compression import choose_packing
from snapshot.save.replication import RankShare, collect_rank_share
from snapshot.save.reuse import FileSharing, Unchanged, group_leaves, omit_frozen
from snapshot.save.staging import Stager
from snapshot.save.take import Take, Verify, plan_writes
from snapshot.save.transaction import committed_save_id
from snapshot.signing.keys import VerifyingKey
from snapshot.signing.seal import OptionalSeal, SignedStorage
from snapshot.state.model_state import find_frozen
from snapshot.state.stateful import Stateful, check_app_state

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# The snapshots that a take is based on: opened, compared with the take's tensors, and shared where they are equal.

ABSENT = (SnapshotNotFoundError, CorruptSnapshotError, UnsupportedFormatError, StorageError)
"""Errors of a base that make a take write everything."""


def find_unchanged(
    opening: TakeOpening, share: RankShare, app_state: Mapping[str, Any], options: TakeRequest
) -> Unchanged:
    """Compare the tensors of this rank with the bases, and share or omit what is equal.

    When this returns, nothing that it shares or omits is read from the live tensors again.
    """
    frozen = find_frozen(app_state, share.leaves)
    unchanged = Unchanged(compares=options.base is not None)
    with ExitStack() as opened:
        bases = _open_bases(opening, options, unchanged.notes, opened)
        unchanged.groups = group_leaves(share, frozen, bases[0].document.save_id if bases else None)
        if not bases:
            return unchanged
        opening.transaction()  # an existing snapshot is an error before anything is compared
        unchanged.compared = bases[0].copies()
        stager = Stager(share.leaves, copies=False)
        opened.callback(stager.forget)
        comparer = Comparer(opening, stager, unchanged.notes, read_all=options.read_back_share == 1.0)
        left_out = set[int]()
        if options.only and (lasting := _find_lasting(opening, bases[0], unchanged.notes)) is not None:
            left_out = run(omit_frozen(share, frozen, bases[0], comparer, unchanged))
            unchanged.leave_out(share.leaves, left_out)
            unchanged.base_session, unchanged.base_id = partial(_open_lasting, bases[0]), lasting
        signed = options.signer is not None
        sharing = FileSharing(opening, share, bases, comparer, unchanged, two_copies=options.two_copies, signed=signed)
        run(sharing.run(left_out))
    return unchanged


def _open_bases(opening: TakeOpening, options: TakeRequest, notes: list[str], opened: ExitStack) -> list[Base]:
    """Open the newest two bases. One that is not a snapshot of as many ranks is left out, with a note."""
    session, exchange = opening.session, opening.exchange
    bases: list[Base] = []
    for source in options.bases[:2]:
        base = locate_source(source, options.storage_options)
        url, theirs = base.url, base.options
        if theirs is options.storage_options and url.scheme != session.url.scheme:
            theirs = None  # they are for the take's storage
        same = url.scheme == session.url.scheme and select_server(theirs) == select_server(options.storage_options)
        optional = OptionalSeal(cast("VerifyingKey", options.signer)) if options.signer is not None else None
        place = Session(url, theirs, seal=base.seal or optional)
        opened.callback(_close, place)
        try:
            document = run(open_document(place, exchange.rank))
            if isinstance(document, ForeignDocument):
                raise UnsupportedFormatError(f"{url}: is a checkpoint of {document.format}, not a snapshot")
            if document.world_size != exchange.world:
                raise UnsupportedFormatError(
                    f"{url}: was taken by {document.world_size} ranks, and this take has {exchange.world}"
                )
        except ABSENT as error:
            notes.append(f"everything is written, since the base cannot be used: {error}")
            log.warning("%s: %s", session.url, notes[-1])
            continue
        shares = session.storage.capabilities.shares if same else ""
        bases.append(open_base(place, document, exchange.rank, shares=shares))
        if isinstance(place.stored, SignedStorage):
            bases[-1].signed = place.stored
        elif optional is not None:
            notes.append(f"no file is shared with the base, since this take's key does not sign it: {optional.fault}")
            log.warning("%s: %s", session.url, notes[-1])
    return bases


def _find_lasting(opening: TakeOpening, base: Base, notes: list[str]) -> str | None:
    """Return the save id of the snapshot that will have what is left out.

    Return None if it is not there, or if this take replaces it.
    """
    reference, session = base.reference, opening.session
    save_id = base.document.save_id
    try:
        if reference is not None:
            save_id = run(attach_base(base.session, base.document, _place_of(base)))
        if run(committed_save_id(session.storage)) != save_id:
            return save_id
        why = f"this take replaces {session.url}"
    except (*ABSENT, RestoreError, ValueError) as error:
        why = str(error)
    notes.append(f"nothing is left out, since the base cannot be relied on: {why}")
    log.warning("%s: %s", session.url, notes[-1])
    return None


def _place_of(base: Base) -> Location:
    """Return the place of the snapshot that has what is left out."""
    url, options = base.session.url, base.session.options
    if base.reference is not None:
        url = URL.parse(base.reference.url)
        options = options if url.scheme == base.session.url.scheme else None
    return Location(url, options)


def _open_lasting(base: Base) -> Session:
    place = _place_of(base)
    return Session(place.url, place.options)


def _close(session: Session) -> None:
    run(session.close())


def verify_written(share: float, verb: str) -> Verify | None:
    """Return a function that reads a fraction of the written bytes back before a commit; None for a fraction of 0."""
    if not share:
        return None
    from snapshot.transform.verify import expect_read_back  # only such takes pay for this import

    return partial(expect_read_back, share=share, verb=verb)


# The steps of a take, in order: in the foreground, in the background, and as a plan without writing.

T = TypeVar("T")
Path = str | os.PathLike[str]
AppState = Mapping[str, Stateful]


class StartedTake(NamedTuple):
    """A take that has begun in the background."""

    path: Path
    storage_options: Mapping[str, Any] | None
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
    make_options: Callable[[], TakeRequest],
    timeout: float | None,
) -> tuple[Path, TakeReport, TakeRequest]:
    """Take a snapshot, and return its path, a report and the options when it is committed.

    `make_options`: is called when an error for a wrong argument can be sent to the other ranks.
    """
    with (
        _timed("take", path),
        Exchange(ranks_of(pg), "take", timeout_or_default(timeout)) as exchange,
        gc_paused(),
    ):
        refuse_on_loop()
        options = make_options()
        check_app_state(app_state)
        meter = Meter("take", shown_once(options.progress, pg))
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
                    verify=verify_written(options.read_back_share, "take"),
                    packing=packing,
                    signer=options.signer,
                )
                run(take.write())
    return opening.path_as_given(path), take.report, options


def start_take(
    path: Path,
    app_state: AppState,
    pg: ProcessGroup | None,
    make_options: Callable[[], TakeRequest],
    *,
    make: Callable[[StartedTake], T],
    timeout: float | None,
) -> T:
    """Stage a snapshot, start to write it, and return what `make` returns. If `make` raises, the take ends.

    `make_options`: as for `run_take`.
    """
    refuse_on_loop()
    with (
        _timed("async_take", path),
        Exchange(ranks_of(pg), "async_take", timeout_or_default(timeout)) as exchange,
    ):
        options = make_options()
        check_app_state(app_state)
        sink = None
        if options.worker == "process":
            from snapshot.worker.client import expect_reachable, writer_process  # only such takes pay for this import

            expect_reachable(URL.parse(os.fspath(path)), options.storage_options)
            sink = writer_process()
        meter = Meter("async_take", shown_once(options.progress, pg))
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
                with StagingAhead(opening, share, plan, late, sink) as staging:
                    take = Take(
                        opening,
                        share,
                        plan,
                        unchanged,
                        stager=staging.stager,
                        staging=staging,
                        metadata=options.metadata_json,
                        verify=verify_written(options.read_back_share, "async_take"),
                        packing=packing,
                        signer=options.signer,
                    )
                    report = take.report
                    work = staging.stage(take)
                    slot.leave_after(work)
                    place = opening.path_as_given(path)
                    return make(
                        StartedTake(place, options.storage_options, report, work, meter, late.pending, opening.save_id)
                    )


def plan_take(
    path: Path, app_state: AppState, pg: ProcessGroup | None, make_options: Callable[[], TakeRequest]
) -> SavePlan:
    """Plan a take without writing anything."""
    with Exchange(ranks_of(pg), "plan", timeout_or_default(None)) as exchange:
        check_app_state(app_state)
        options = make_options()
        session, globs = open_dry_run(
            exchange, URL.parse(os.fspath(path)), options.replicated or (), partial(session_for_take, options)
        )
        with session:
            share = collect_rank_share(exchange, app_state, options, globs)
            groups = group_leaves(share, find_frozen(app_state, share.leaves), None)
            plan = plan_writes(share, session, staged=False, groups=groups)
        exchange.close()
    return plan


def timeout_or_default(given: float | None) -> float:
    """Return the seconds after which a rank without a heartbeat counts as dead."""
    return Settings.current().timeout if given is None else given


def shown_once(progress: ProgressArgument, pg: ProcessGroup | None) -> ProgressArgument:
    """Show one progress bar for all ranks."""
    return None if progress is True and ranks_of(pg).rank else progress
