"""The beginning of a take: all ranks agree on its path and its id, and claim the path."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import msgspec

from snapshot.distributed.exchange import Exchange, Hello, agreed_url, expect_same_keys, expect_same_verb
from snapshot.events import emit, warn
from snapshot.io.loop import run
from snapshot.io.session import MemoryDefaults, Session
from snapshot.io.url import URL
from snapshot.progress import Meter
from snapshot.save.take_options import TakeRequest, usual_budget
from snapshot.save.take_slots import TakeSlot, take_slots
from snapshot.save.transaction import State, Transaction

OpenSession = Callable[[URL], Session]


class Answer(msgspec.Struct, array_like=True):
    """The leader's reply."""

    path: str
    save_id: str
    globs: list[str]
    """The globs that all ranks gave."""


class Claim(NamedTuple):
    """A take's right to write at a path. All ranks have agreed on it."""

    exchange: Exchange
    session: Session
    transaction: Transaction
    globs: Sequence[str]
    """The `replicated` globs that all ranks gave."""
    meter: Meter

    @property
    def save_id(self) -> str:
        """The save id, which is part of all file names."""
        return self.transaction.save_id

    def path_as_given(self, given: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path as this rank gave it, or the leader's if they differ."""
        return given if URL.parse(os.fspath(given)) == self.session.url else self.session.url.reveal()

    def give_up(self, error: BaseException) -> None:
        """End the take after an error, unless its writing has begun: then what writes does so."""
        self.transaction.stop_looking()
        if self.transaction.state in (State.NEW, State.CLAIMED, State.SHARING):
            self.meter.close()
            self.exchange.fail(error)
            run(self.transaction.abort())
            run(self.session.close())
            emit("failed", self.meter.verb, str(self.session.url), error=error)


@contextmanager
def claimed(
    exchange: Exchange,
    url: URL,
    meter: Meter,
    open_session: OpenSession,
    *,
    overwrite: bool,
    globs: Sequence[str] = (),
    keys: Sequence[str] = (),
) -> Iterator[Claim]:
    """Agree on a take, and look whether a snapshot at the path must be kept. An error in the block ends the take.

    The leader of several ranks stores its claim here. A single rank stores it before its first file: the block begins
    at once, and `Transaction.expect_free` waits for the look. All ranks must have the same `keys`.
    """
    claim = _agree_on_claim(exchange, url, meter, open_session, overwrite=overwrite, globs=globs, keys=keys)
    try:
        yield claim
    except BaseException as error:
        claim.give_up(error)
        raise


def _agree_on_claim(
    exchange: Exchange,
    url: URL,
    meter: Meter,
    open_session: OpenSession,
    *,
    overwrite: bool,
    globs: Sequence[str],
    keys: Sequence[str],
) -> Claim:
    opened: list[tuple[Session, Transaction]] = []

    def begin(url: URL, save_id: str) -> Transaction:
        session = open_session(url)
        transaction = Transaction(session, exchange, save_id)
        opened.append((session, transaction))
        return transaction

    def lead(hellos: list[Hello]) -> Answer:
        expect_same_verb(hellos)
        expect_same_keys("sign", [hello.keys for hello in hellos])
        transaction = begin(url, secrets.token_hex(6))
        transaction.look_at_path(overwrite=overwrite)
        run(transaction.claim())
        return Answer(hellos[0].path, transaction.save_id, common_globs(hellos))

    try:
        if exchange.alone:
            begin(url, secrets.token_hex(6)).look_at_path(overwrite=overwrite)
        else:
            answer = exchange.agree(Hello(meter.verb, url.reveal(), list(globs), list(keys)), lead, Hello, Answer)
            url = agreed_url(url, answer.path)
            warn_of_globs(globs, answer.globs)  # a warning may be an error
            globs = answer.globs
            if not opened:
                begin(url, answer.save_id)
    except BaseException:
        for session, transaction in opened:
            transaction.stop_looking()
            run(transaction.abort())
            run(session.close())
        raise
    return Claim(exchange, *opened[0], globs, meter)


def common_globs(hellos: Sequence[Hello]) -> list[str]:
    """Return the globs that all ranks gave."""
    return [glob for glob in hellos[0].globs if all(glob in hello.globs for hello in hellos)]


def warn_of_globs(given: Sequence[str], common: Sequence[str]) -> None:
    """Warn about globs that only some ranks gave."""
    for glob in given:
        if glob not in common:
            warn(f"replicated: the glob {glob!r} is ignored, since not all ranks gave it")


def open_dry_run(
    exchange: Exchange, url: URL, globs: Sequence[str], open_session: OpenSession
) -> tuple[Session, Sequence[str]]:
    """Agree on a plan without writing or refusing anything."""
    if exchange.alone:
        return open_session(url), globs

    def lead(hellos: list[Hello]) -> Answer:
        expect_same_verb(hellos)
        return Answer(hellos[0].path, "", common_globs(hellos))

    answer = exchange.agree(Hello("plan", url.reveal(), list(globs)), lead, Hello, Answer)
    warn_of_globs(globs, answer.globs)
    return open_session(agreed_url(url, answer.path)), answer.globs


def begin_take(
    exchange: Exchange,
    path: str | os.PathLike[str],
    options: TakeRequest,
    meter: Meter,
    slot: TakeSlot | None = None,
) -> AbstractContextManager[Claim]:
    """Claim the path of a take with the other ranks."""
    return claimed(
        exchange,
        URL.parse(os.fspath(path)),
        meter,
        partial(session_for_take, options, slot=slot),
        overwrite=options.overwrite,
        globs=options.replicated or (),
        keys=options.keys,
    )


def session_for_take(options: TakeRequest, url: URL, slot: TakeSlot | None = None) -> Session:
    """Open the session of a take. Background takes share one budget."""
    return Session(
        url,
        options.storage_options,
        durable=options.durable,
        budget=options.memory_budget_bytes,
        memory=MemoryDefaults(usual_budget(options.compression))
        if slot is None
        else MemoryDefaults(take_slots().usual_limit(), slot.pool),
    )
