"""A call that several ranks make together: small exchanges through the store, and one decision."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from snapshot import errors
from snapshot.decoding import decode_json, decode_msgpack
from snapshot.distributed.group import SOLO, Liveness, Ranks, Waker, ranks_of
from snapshot.errors import RankError, SnapshotError, StorageError
from snapshot.events import warn
from snapshot.io.loop import in_own_thread, start_in_thread
from snapshot.io.url import PER_HOST, URL
from snapshot.settings import Settings, expect_positive
from snapshot.text import counted

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Every rank posts; the leader gathers and replies. A failure on one rank becomes the call's decision by compare-and-
# set, and all other ranks find it where they wait. The leader's decision to commit uses the same key. The first
# decision wins.
#
# The store may be served by a stopped rank, and then never responds. So all store requests run in threads that can be
# abandoned.

T = TypeVar("T")
LEADER = 0
COMMIT = b"commit"
ANSWERED, FAILED = b"\0", b"\1"
LONGEST_TEXT = 8000
SHOWN_LINES = 6
"""Lines of another rank's error that each rank repeats."""
PATIENCE = 0.02
"""The longer a rank has waited, the less often it looks: it sleeps for this fraction of the time so far."""
LONGEST_PAUSE = 0.05
"""Maximum seconds between two looks of a rank, unless there are very many ranks."""
LOOK = 0.5
"""Maximum seconds between two looks of a rank that the store wakes."""
FULL, WAKE = "full", "wake"
"""Keys of a step that wake the leader and the other ranks: all have arrived, there is a response, or a rank failed."""
FAULTS = 4
"""A rank that waits asks for the others' failures at each such look."""
LAST_WORDS = 5.0
"""Seconds that a failing rank may take to tell the other ranks."""


class RankFault(msgspec.Struct):
    """A rank's failure, as it is sent to the others."""

    rank: int
    kind: str
    text: str
    shared: bool = False
    """True if the leader found the failure on behalf of all ranks, which raise it unchanged."""
    absent: list[int] = []
    """The ranks that had not arrived when the call was given up."""

    def error(self) -> SnapshotError:
        """Return the error that the other ranks raise."""
        kind = getattr(errors, self.kind, None) if self.shared else None
        if isinstance(kind, type) and issubclass(kind, SnapshotError) and kind is not RankError:
            return kind(self.text)
        lines = self.text.split("\n")
        if len(lines) > SHOWN_LINES:
            lines[SHOWN_LINES:] = [f"  ({len(lines) - SHOWN_LINES:,} lines more, which rank {self.rank} shows)"]
        text = "\n".join([f"failed: {self.kind}: {lines[0]}" if self.kind else lines[0], *lines[1:]])
        return RankError(f"rank {self.rank} {text}", rank=self.rank, kind=self.kind)


class OutcomeUnknown(Exception):
    """Raised if the store cannot tell this rank whether the leader committed: the storage must be checked."""


class Exchange:
    """The communication of one operation. As a context, an error that leaves it is sent to the other ranks."""

    def __init__(self, ranks: Ranks, verb: str, timeout: float | None = None) -> None:
        """`timeout`: seconds after which a rank without a heartbeat counts as dead; None for the setting."""
        timeout = Settings.current().timeout if timeout is None else timeout
        expect_positive("timeout", timeout)
        self.ranks = ranks
        self.rank, self.world = ranks.rank, ranks.world
        self.timeout = timeout
        self._verb = verb
        self._step = 0
        self._name = ""
        self.number = 0
        """The number of this call among those of the ranks."""
        self._open = False
        self._heard = time.monotonic()
        self._busy = False
        self._abandoned = False
        self._led: Exception | None = None
        self.posted = False
        """True once this rank has reported that its work is done: from then on the leader may commit."""
        if not self.alone:
            self._guard(self._begin)
            self._open = True

    @property
    def alone(self) -> bool:
        """True if there is only one rank."""
        return self.world == 1

    def _begin(self) -> None:
        """Take a call number. Skip calls that the other ranks gave up because this rank never arrived."""
        self._store, self._heart = self.ranks.connected()
        while True:
            self.number = next(self.ranks.sequence)
            self._name = f"call/{self.number}"
            fault = self._fault()
            if fault is None or self.rank not in fault.absent:
                break
            self._leave()
        if self._abandoned:  # the ranks that began it gave up
            self._decide(RankFault(self.rank, "", f"gave up before the call began ({self._verb})"))
        else:
            self._heart.begin(self.timeout)

    # Exchange

    def agree(self, mine: Any, lead: Callable[[list[Any]], T], kind: type[Any], answer: type[T]) -> T:
        """Send this rank's value to the leader, and return the leader's reply. All ranks raise an error of `lead`."""
        if self.alone:
            return lead([mine])
        return self._guard(lambda: self._agree(mine, lead, kind, answer))

    def _agree(self, mine: Any, lead: Callable[[list[Any]], T], kind: type[Any], answer: type[T]) -> T:
        step, self._step = self._step, self._step + 1
        own, answered = self._key(f"{step}/{self.rank}"), self._key(f"{step}/answer")
        self._store.set(own, msgspec.msgpack.encode(mine))
        if self._store.add(self._key(f"{step}/count"), 1) == self.world and self.rank != LEADER:
            self.wake(self._key(f"{step}/{FULL}"))
        if self.rank == LEADER:
            records = self._gather(step)
            try:
                made = self._led_by(lead, [decode_msgpack(record, kind, OTHER_VERSION) for record in records])
            except Exception as error:
                self._led = error
                fault = self._fault_of(error, shared=True)
                standing = self._decide(fault)
                if standing is None:  # after the leader's decision to commit
                    self._store.set(answered, FAILED + msgspec.json.encode(fault))
                    self.wake(self._key(f"{step}/{WAKE}"))
                elif standing != fault:  # this error may be a result of another rank's clean-up
                    raise standing.error() from error
                raise
            try:
                self._store.set(answered, ANSWERED + msgspec.msgpack.encode(made))
                self.wake(self._key(f"{step}/{WAKE}"))
                late = self._fault()
            except RuntimeError:
                if not self.posted:  # a commit cannot be undone
                    raise
                late = None
            if late is not None:  # the others gave up: this rank was stopped for too long
                raise late.error()
            return made
        self._wait(lambda: self._store.check([answered]), lambda: [LEADER], step)
        found = self._store.get(answered)
        self._store.delete_key(own)
        if found[:1] == FAILED:
            raise _decode_fault(found[1:]).error()
        told: T = decode_msgpack(found[1:], answer, OTHER_VERSION)
        return told

    def _led_by(self, lead: Callable[[list[Any]], T], records: list[Any]) -> T:
        """Run the leader's part, which may take long, without blocking on the store."""
        self._busy = True
        try:
            return lead(records)
        finally:
            self._heard = time.monotonic()
            self._busy = False

    def _gather(self, step: int) -> Sequence[bytes]:
        keys = [self._key(f"{step}/{rank}") for rank in range(self.world)]
        count = self._key(f"{step}/count")
        all_here = False

        def missing() -> list[int]:
            nonlocal all_here
            found = [rank for rank in range(self.world) if not self._store.check([keys[rank]])]
            all_here = not found  # although one of them may have died before it was counted
            return found

        self._wait(lambda: all_here or int(self._store.get(count)) >= self.world, missing, step)
        fault = self._fault()
        if fault is not None:  # a rank arrived, and gave up before this one
            raise fault.error()
        if self._store.has_extended_api():
            found: Sequence[bytes] = self._store.multi_get(keys)
        else:
            found = [self._store.get(key) for key in keys]
        self._store.delete_key(keys[LEADER])
        return found

    # Collective work outside the store

    def together(self, done: Callable[[], bool]) -> bool:
        """Wait for collective work of all ranks, however slow they are. Return False if it failed on one of them.

        Raise if the call is given up, or another rank's heartbeat stops.
        """
        broken = self._key("broken")
        others = [rank for rank in range(self.world) if rank != self.rank]
        self._guard(lambda: self._wait(lambda: done() or self._store.check([broken]), lambda: others, -1))
        return done()

    def broke_off(self) -> None:
        """Report that collective work failed on this rank, so that the others do not wait."""
        self._guard(lambda: self._store.set(self._key("broken"), "1"))

    def _wait(self, done: Callable[[], bool], missing: Callable[[], list[int]], step: int) -> None:
        """Wait until a condition holds, the call is given up, or a rank that it depends on is silent for too long."""
        key = self._key(f"{step}/{FULL if self.rank == LEADER else WAKE}")
        with _Pauses(self, key if step >= 0 else "") as pauses:
            watch = Liveness(self._store, self.timeout, self.world)
            for look in itertools.count():
                if done():
                    return
                if not self._open:
                    raise OutcomeUnknown("the call is over")  # this rank was interrupted
                self._heard = time.monotonic()
                fault = None if pauses.are_frequent and look % FAULTS else self._fault()
                if fault is not None:
                    raise fault.error()
                silent = watch.silent(missing)
                if silent is not None and not done():
                    self._give_up(silent, step)
                pauses.pause()

    def _give_up(self, silent: int, step: int) -> None:
        """Give up the call, because a rank is silent."""
        everyone = range(self.world) if step == 0 else ()
        absent = [rank for rank in everyone if not self._store.check([self._key(f"0/{rank}")])]
        what = f"sent no heartbeat for {self.timeout:g} s"
        if silent in absent:
            what = f"did not call within {self.timeout:g} s"
        standing = self._decide(RankFault(silent, "", f"{what} ({self._verb})", absent=absent))
        if standing is None:
            raise OutcomeUnknown(f"rank {silent} {what}")
        raise standing.error()

    # Decision

    def note_done(self) -> None:
        """Report that this rank's work is done: from now on the leader may commit."""
        self.posted = True

    def commit(self) -> None:
        """Decide, as the leader, to commit. Raise if another rank failed before."""
        if not self.alone:
            key = self._key("decision")
            decided = self._guard(lambda: self._store.compare_set(key, "", COMMIT.decode()), self.timeout)
            if decided != COMMIT:
                raise _decode_fault(decided).error()

    def given_up(self) -> SnapshotError | None:
        """Return the error that ended the call, if any."""
        if self.alone or not self._open:
            return None
        fault = self._guard(self._fault)
        return fault.error() if fault is not None else None

    def fail(self, error: BaseException) -> bool:
        """Report this rank's failure. Return True if the commit is ruled out.

        Return False if the leader decided to commit first, or if that is unknown.
        """
        if self.alone or not self._open:
            return True
        fault = self._fault_of(error, shared=False)
        try:
            return self._guard(lambda: self._decide(fault), min(self.timeout, LAST_WORDS)) is not None
        except (SnapshotError, OutcomeUnknown):  # the store failed; this rank's own error is being raised
            return not self.posted

    def _fault_of(self, error: BaseException, *, shared: bool) -> RankFault:
        try:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        except Exception:  # noqa: BLE001 - an error that cannot be printed is an error all the same
            text = "(an error that cannot be printed)"
        text = text[:LONGEST_TEXT].encode("utf-8", "replace").decode()
        for_all = shared and isinstance(error, SnapshotError) and not isinstance(error, StorageError)
        return RankFault(self.rank, type(error).__name__, text, shared=for_all)

    def _decide(self, fault: RankFault) -> RankFault | None:
        """End the call with a fault, unless it was decided before. Return the fault that was decided, if any."""
        decided = self._store.compare_set(self._key("decision"), "", msgspec.json.encode(fault).decode())
        for step in (self._step - 1, self._step):  # the others are at one of them
            for name in (WAKE, FULL) if step >= 0 else ():
                with suppress(RuntimeError):  # the decision counts
                    self.wake(self._key(f"{step}/{name}"))
        return None if decided == COMMIT else _decode_fault(decided)

    def _fault(self) -> RankFault | None:
        key = self._key("decision")
        if not self._store.check([key]):
            return None
        decided = self._store.get(key)
        return None if decided == COMMIT else _decode_fault(decided)

    # The store

    def wake(self, key: str) -> None:
        """Set a key. It ends the waits of other ranks, or of this one, in the store."""
        self._store.set(key, "")

    def _key(self, name: str) -> str:
        return f"{self._name}/{name}"

    def _guard(self, work: Callable[[], T], timeout: float | None = None) -> T:
        """Run a store request. If the store fails or does not respond, blame the rank that serves it."""
        heard = self._heard = time.monotonic()
        future = start_in_thread(work, "snapshot-io-store")
        patience = timeout or self.timeout
        what = f"did not respond for {patience:g} s"
        quiet = 0  # counted in quarters: time in which this process is stopped must not count
        while quiet < 4:
            try:
                return future.result(patience / 4)
            except (SnapshotError, OutcomeUnknown):
                raise
            except RuntimeError as error:
                if error is self._led:
                    raise
                what = f"is unreachable ({error})"
                break
            except NotYet:
                if future.done():
                    raise
                quiet += 1
                if timeout is None and (self._busy or self._heard != heard):
                    quiet, heard = 0, self._heard
        self._abandoned = True
        if self.posted:
            raise OutcomeUnknown(f"the store of the process group {what}")
        raise lost_store_error(what)

    def close(self) -> None:
        """End this rank's participation."""
        if self._open:
            self._open = False
            self._heart.end(self.timeout)
            try:
                self._guard(self._leave, min(self.timeout, LAST_WORDS))
            except (SnapshotError, OutcomeUnknown):
                return  # the store has ended, with its keys

    def _leave(self) -> None:
        """Leave the call. The last rank deletes its keys from the store."""
        if self._store.add(self._key("over"), 1) == self.world:
            failed = self._fault() is not None  # otherwise each rank has deleted its own keys
            for step in range(MOST_STEPS):
                count = self._key(f"{step}/count")
                if not self._store.check([count]):
                    for name in (WAKE, FULL) if failed else ():
                        self._store.delete_key(self._key(f"{step}/{name}"))
                    break
                for name in ("count", "answer", WAKE, FULL, *(map(str, range(self.world)) if failed else ())):
                    self._store.delete_key(self._key(f"{step}/{name}"))
            for name in ("decision", "over", *(("broken",) if failed else ())):
                self._store.delete_key(self._key(name))

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
            self.close()


class _Pauses:
    """The pauses of one wait: short ones at first. Then the store itself wakes the rank, if it can."""

    def __init__(self, exchange: Exchange, key: str) -> None:
        """`key`: another rank sets it when there may be something new. Empty if there is no such key."""
        self._exchange = exchange
        self._key = key
        self._began = time.monotonic()
        world = exchange.world
        self._next, self._short = 0.0003, max(0.004, world / 20_000)
        self._longest = max(LONGEST_PAUSE, world / 10_000)
        self._awaited = ""
        self._waker: Waker | None = None
        self._woken = False

    @property
    def are_frequent(self) -> bool:
        """True if the rank looks so often, for so long, that it need not look for a fault each time."""
        return self._waker is None and not self._woken and self._next >= self._short

    def pause(self) -> None:
        """Pause once."""
        self._woken = False
        if self._key and self._next >= self._short:
            self._awaited, self._key = self._key, ""
            self._waker = self._exchange.ranks.borrow_waker()
            if self._waker is not None:
                self._waker.begin(self._awaited)
        if self._waker is None:
            time.sleep(self._next)
        elif self._waker.wait(min(LOOK, self._exchange.timeout / 8)):
            self._return()
            self._next, self._woken = self._short, True  # it is there now, or another thing has happened
            return
        patient = min((time.monotonic() - self._began) * PATIENCE, self._longest)
        self._next = min(self._next * 1.5, max(self._short, patient))

    def _return(self) -> None:
        if self._waker is not None:
            self._exchange.ranks.return_waker(self._waker)
        self._waker = None

    def __enter__(self) -> _Pauses:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waker is None:
            return
        with suppress(RuntimeError):  # the store may have ended
            self._exchange.wake(self._awaited)
            if self._waker.wait(LAST_WORDS):
                self._return()
                return
        self._waker.stop()


OTHER_VERSION = "cannot decode the message of another rank, which may have another version of the library"
MOST_STEPS = 100_000
"""More steps than any operation has."""


def _decode_fault(decided: bytes) -> RankFault:
    fault: RankFault = decode_json(decided, RankFault, OTHER_VERSION)
    return fault


def lost_store_error(what: str) -> RankError:
    """Return the error for a store that fails. Rank 0 serves it, or the agent that started rank 0."""
    return RankError(
        f"rank {LEADER}: the store of the process group {what}: the process that serves it "
        "(rank 0, or torchrun's agent) has stopped or exited",
        rank=LEADER,
    )


def solo_exchange(verb: str) -> Exchange:
    """Return an exchange of this process alone, even if it is in a group."""
    return Exchange(SOLO, verb)


async def beside_loop(exchange: Exchange, work: Callable[..., T], *arguments: Any) -> T:
    """Run work that may wait for other ranks, in a thread of its own. Without other ranks, it runs here at once."""
    return work(*arguments) if exchange.alone else await in_own_thread(work, *arguments)


@contextmanager
def call_of(verb: str, pg: ProcessGroup | None, *, ranks: bool, timeout: float | None = None) -> Iterator[Exchange]:
    """Yield the exchange of one call: of all ranks of a group if `ranks`, otherwise of this process alone.

    An error that leaves it is sent to the other ranks.
    """
    with Exchange(ranks_of(pg) if ranks else SOLO, verb, timeout) as exchange:
        yield exchange
    exchange.close()


# The first exchange of an operation: all ranks report which one they called, and with which path.


class Hello(msgspec.Struct, array_like=True):
    """A rank's first message."""

    verb: str
    path: str
    globs: list[str] = []
    keys: list[str] = []
    """The public keys of the operation and of its bases; empty texts for none."""


class _Caller(Protocol):
    """A rank's first message, of any kind."""

    verb: str


def expect_same_verb(hellos: Sequence[_Caller]) -> None:
    """Raise if the ranks called different verbs."""
    verbs = {hello.verb: rank for rank, hello in enumerate(hellos)}
    if len(verbs) > 1:
        raise SnapshotError(
            "all ranks must call the same method, got "
            f"{', '.join(f'{verb} on rank {rank}' for verb, rank in verbs.items())}"
        )


def expect_same_keys(argument: str, keys: Sequence[Sequence[str]]) -> None:
    """Raise unless the ranks gave the same keys. Otherwise, some ranks would use bytes that others refuse."""
    for rank, key in enumerate(keys):
        if key[:1] == keys[0][:1] and len(key) != len(keys[0]):
            raise SnapshotError(
                f"base must be given on all ranks, or on none, got {counted(len(keys[0]) - 1, 'base')} on rank 0, "
                f"{len(key) - 1} on rank {rank}"
            )
        if key != keys[0]:
            raise SnapshotError(
                f"{argument} must be the same on all ranks, got {_key_text(keys[0])} on rank 0, {_key_text(key)} on "
                f"rank {rank}"
            )


def _key_text(keys: Sequence[str]) -> str:
    return " and ".join(each or "no key" for each in keys) or "no key"


def agreed_url(url: URL, leader: str) -> URL:
    """Return the leader's URL. Warn if this rank gave another one, unless each host has its own."""
    if leader == url.reveal():
        return url
    agreed = URL.parse(leader)
    if agreed.scheme == url.scheme == PER_HOST:
        return url
    warn(f"this rank gave the path {str(url)!r}; rank 0's is used: {str(agreed)!r}")
    return agreed
