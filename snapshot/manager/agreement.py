"""Agreement of a manager's ranks: to act at the same call, and on the step of a take.

A vote acts at the same call on all ranks, without any rank waiting for another. Waiting would deadlock with the
collectives of training: a rank that waits here blocks the others there. Instead, every rank counts its calls. Before a
rank queries the store for a request, it publishes the number of the last call that it may pass without another query.
A rank that sees a request reads the numbers of all ranks, and proposes the first call after the largest. The first
proposal wins (compare-and-set), and every rank acts when it reaches that call.

No rank can be past that call: a rank that saw no request had published its number before the query, so before the
request existed. The proposer reads the numbers after that, and so finds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NotYet
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import torch.distributed as dist

from snapshot.distributed.exchange import Exchange, lost_store_error
from snapshot.distributed.group import ranks_of
from snapshot.errors import CommitUnknown, SnapshotError
from snapshot.events import log
from snapshot.io.loop import run, start_in_thread
from snapshot.manager.preemption import RESERVE
from snapshot.manager.root import Root
from snapshot.manager.steps import Steps
from snapshot.reports import Saved
from snapshot.save import transaction
from snapshot.settings import Settings
from snapshot.snapshot import PendingSnapshot

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
LOOK = 0.5
"""Approximate seconds between two queries of a rank. Groups of thousands wait longer, to spare their store."""
MOST = 64
"""Maximum calls without a query, so that a rank whose calls become slow notices within that many."""


class StepVote:
    """A repeated yes-or-no vote of all ranks, which must all call `ask` equally often.

    `store` has the interface of torch's stores; `prefix` must be unique to this vote.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world: int, timeout: float) -> None:
        self._store = store
        self._prefix = prefix
        self._rank, self._world = rank, world
        self._timeout = timeout
        self._look = max(LOOK, world / 2000)
        self.calls = 0
        self._passed = 0
        """Last call that this rank may pass without a query, as published."""
        self._epoch = 0
        """Number of agreed actions so far."""
        self._at: int | None = None
        """Call at which to act next, once that is agreed."""
        self._wished = False
        self._acted: list[tuple[int, int]] = []
        """Past epochs and their calls. Their keys are deleted when no rank needs them any more."""
        self._block = 1
        self._last = time.monotonic()
        self._slowest = 0.0

    def ask(self, wish: bool) -> bool:
        """Return True if all ranks act at this call. `wish`: this rank wants them to act as soon as possible.

        Raises RankError if the group's store is unreachable.
        """
        self.calls += 1
        now = time.monotonic()
        self._slowest, self._last = max(self._slowest, now - self._last), now
        if self._at is None and (self.calls > self._passed or (wish and not self._wished)):
            self._guarded(lambda: self._talk(wish))
            self._last = time.monotonic()  # time spent in the store is not time of the calls
        if self._at is None or self.calls < self._at:
            return False
        self._acted.append((self._epoch, self._at))
        self._epoch, self._at, self._wished = self._epoch + 1, None, False
        self._passed = self.calls  # the published number covers only the epoch that ended
        return True

    def _talk(self, wish: bool) -> None:
        if self.calls > self._passed:
            self._publish(1 if wish else MOST)
        if wish and not self._wished:
            self._store.set(self._key("wish"), "1")
            self._wished = True
        if self._wished or self._store.check([self._key("wish")]):
            self._at = self._decided()

    def _publish(self, most: int) -> None:
        """Publish how far this rank runs without a query: until the next one is due, judged by its slowest call."""
        due = int(self._look / self._slowest) if self._slowest > 0 else MOST
        self._block = max(1, min(due, 2 * self._block, most)) if self.calls > 1 else 1
        self._slowest = 0.0
        self._passed = self.calls + self._block - 1
        self._store.set(self._name(self._rank), str(self._passed))

    def _decided(self) -> int:
        """Return the agreed call, which is this rank's proposal if that is the first."""
        key = self._key("at")
        if self._store.check([key]):
            return int(self._store.get(key))
        passed = self._all_passed()
        self._forget(min(passed))
        return int(self._store.compare_set(key, "", str(max(passed) + 1)))

    def _all_passed(self) -> list[int]:
        """Return the published numbers of all ranks; 0 for a rank without one, which has not passed any call either."""
        names = [self._name(rank) for rank in range(self._world)]
        if self._store.has_extended_api() and self._store.check(names):
            return [int(value) for value in self._store.multi_get(names)]
        return [int(self._store.get(name)) if self._store.check([name]) else 0 for name in names]

    def _forget(self, slowest: int) -> None:
        """Delete the keys of epochs that all ranks have left: a published number is at most `MOST` calls ahead."""
        while self._acted and self._acted[0][1] + MOST < slowest:
            epoch, _ = self._acted.pop(0)
            for name in ("wish", "at"):
                self._store.delete_key(f"{self._prefix}/{epoch}/{name}")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{self._epoch}/{name}"

    def _name(self, rank: int) -> str:
        return f"{self._prefix}/passed/{rank}"

    def _guarded(self, work: Callable[[], None]) -> None:
        """Call the store in a thread that can be abandoned: a store whose server is stopped never responds."""
        try:
            start_in_thread(work, "snapshot-io-store").result(self._timeout)
            return
        except NotYet:
            what = f"has not responded for {self._timeout:g} s"
        except RuntimeError as error:
            what = f"cannot be reached any more ({error})"
        raise lost_store_error(what)


class Channels:
    """A `StepVote` for each question, created on its first use."""

    def __init__(self, pg: ProcessGroup | None, timeout: float | None) -> None:
        self._pg = pg
        self._timeout = timeout
        self._group: Any = None
        self._ranks = ranks_of(pg)
        self._number = -1
        """Number of this manager within the group."""
        self._agreements: dict[str, StepVote] = {}

    def ask(self, question: str, wish: bool, *, leader_alone: bool = False) -> bool:
        """Return True if all ranks act now. `wish`: this rank wants to; with `leader_alone` only rank 0's counts."""
        group = self._pg
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not self._group:  # looking up the ranks at each call would dominate its cost
            self._group, self._ranks, self._number, self._agreements = group, ranks_of(self._pg), -1, {}
        if self._ranks.world == 1:
            return wish
        if question not in self._agreements:
            self._agreements[question] = self._agreement(question)
        return self._agreements[question].ask(wish and not (leader_alone and self._ranks.rank))

    def _agreement(self, question: str) -> StepVote:
        ranks = self._ranks
        if self._number < 0:
            self._number = next(ranks.managers)
        timeout = Settings.current().timeout if self._timeout is None else self._timeout
        store, _ = ranks.connected()
        return StepVote(store, f"manager/{self._number}/{question}", ranks.rank, ranks.world, timeout)


class StepAnswer(msgspec.Struct, array_like=True):
    """Reply of the leader."""

    known: bool
    """True if an earlier asynchronous take has saved the current state."""
    bases: list[int]
    """Committed steps that the take is based on, the newest first."""
    near_fault: str = ""
    """Why a host cannot write near, or ''."""
    saved: Saved = "whole"
    """What is saved of the state."""
    left: float | None = None
    """The least seconds until a rank is killed."""
    needed: float = 0.0
    """Seconds that saving the whole state needs, if `left` is known."""


class StepBegin(msgspec.Struct, array_like=True):
    """Message of each rank."""

    step: int
    saved: bool
    """True if an asynchronous take has already saved this very state, as far as this rank knows."""
    near_fault: str = ""
    """Why this host cannot write near, or ''."""
    failures: int = 0
    """Failed takes in a row, as this rank saw them."""
    left: float | None = None
    """Seconds until this rank is killed, if the job is to stop, and it knows."""


def agree_on(
    exchange: Exchange,
    steps: Steps,
    pending: PendingSnapshot | None,
    mine: StepBegin,
    *,
    new: bool,
    incremental: bool,
    expect_few: Callable[[int], None],
    choose: Callable[[float, bool], tuple[Saved, float]],
) -> StepAnswer:
    """Return whether `pending`, an earlier take of this step, has saved the current state.

    The leader checks that the snapshot of `pending` still exists, and deletes a leftover pin if not. `new`: True if the
    step must be new. `expect_few` gets the number of failures, and `choose` the least time that is left, and whether
    all hosts can write near. Raise SnapshotError on all ranks if they passed different steps.
    """
    step, root = mine.step, steps.local

    def lead(all_: list[StepBegin]) -> StepAnswer:
        ranks = {each.step: rank for rank, each in enumerate(all_)}
        if len(ranks) > 1:
            said = ", ".join(f"rank {rank} {number}" for number, rank in ranks.items())
            raise SnapshotError(f"{root.url}: all ranks must pass the same step, got {said}; nothing was done")
        expect_few(max(each.failures for each in all_))
        run(root.forget_pin(step))
        known = all(each.saved for each in all_) and pending is not None and run(_is_committed(root, step, pending))
        fault = next((each.near_fault for each in all_ if each.near_fault), "")
        steps.check(step, fault, new=new and not known)
        left = min((each.left for each in all_ if each.left is not None), default=None)
        saved, needed = choose(left, not fault) if left is not None and not known else ("whole", 0.0)
        bases = steps.find_bases(step) if incremental and not known else []
        return StepAnswer(known, bases, fault, saved, left, needed)

    return exchange.agree(mine, lead, StepBegin, StepAnswer)


def may_be_committed(pending: PendingSnapshot | None, left: float | None = None) -> bool:
    """Wait for a pending take, and return True if it may be committed.

    Raise SnapshotError if it is still running when the job is about to be killed, in `left` seconds.
    """
    if pending is None:
        return False
    try:
        pending.wait(timeout=None if left is None else max(0.0, left - RESERVE))
    except CommitUnknown:
        return True
    except TimeoutError as error:
        raise SnapshotError(f"{error}, and the deadline is near") from None
    except Exception as error:  # noqa: BLE001 - `wait` or the log has reported it; it is taken again
        log.warning("%s: the earlier take failed, so the step is taken again: %s", pending.path, error)
        return False
    return True


async def _is_committed(root: Root, step: int, pending: PendingSnapshot) -> bool:
    async with root.opened(step) as session:
        return await transaction.committed_save_id(session.storage) == pending.save_id
