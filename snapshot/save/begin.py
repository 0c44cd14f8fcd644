"""The beginning of a take: a session for its options, and the agreement of all ranks on its path and id."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType

import msgspec

from snapshot.distributed.exchange import Exchange, Hello, agreed_url, expect_same_keys, expect_same_verb
from snapshot.errors import SnapshotError, SnapshotExistsError, StorageError, StorageNotFoundError
from snapshot.events import emit, warn
from snapshot.formats.dcp_notice import METADATA as DCP_METADATA
from snapshot.formats.dcp_notice import is_notice
from snapshot.io.loop import LoopFuture, run, start
from snapshot.io.session import MemoryDefaults, Session
from snapshot.io.storage import FileStat
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA
from snapshot.progress import Meter
from snapshot.save.compression import usual_budget
from snapshot.save.take_options import TakeRequest
from snapshot.save.take_slots import TakeSlot, take_slots
from snapshot.save.transaction import PathState, State, Transaction, expect_own_manifest

# The agreement before a take: all ranks agree on path and id, and the leader claims the path.

OpenSession = Callable[[URL], Session]


class Answer(msgspec.Struct, array_like=True):
    """The leader's reply."""

    path: str
    save_id: str
    globs: list[str]
    """The globs that all ranks gave."""


class TakeOpening:
    """A take that all ranks have agreed on. As a context, an error before writing begins ends the take.

    Later, the writing code closes the session and ends the exchange.
    """

    def __init__(
        self,
        exchange: Exchange,
        session: Session,
        transaction: Transaction,
        globs: Sequence[str],
        meter: Meter,
        *,
        overwrite: bool,
    ) -> None:
        self.exchange = exchange
        self.session = session
        self.globs = globs
        self.meter = meter
        self._transaction = transaction
        self._overwrite = overwrite
        self._expected: LoopFuture[PathState] | None = None

    @property
    def save_id(self) -> str:
        """The save id, which is part of all file names."""
        return self._transaction.save_id

    def look_at_path(self) -> None:
        """Check the path in the background, and refuse to replace a snapshot. A leader has done so already."""
        if self.exchange.alone:
            self._expected = start(expect_at_path(self.session, overwrite=self._overwrite))

    def transaction(self) -> Transaction:
        """Wait for the check of the path, and return the transaction. The first call must not be on the loop."""
        if self._expected is not None:
            self._transaction.expect(self._expected.result())
            self._expected = None
        return self._transaction

    def expect_path_free(self) -> None:
        """Raise `SnapshotExistsError` if a snapshot is there that must not be overwritten."""
        self.transaction()

    def path_as_given(self, given: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the path as this rank gave it, or the leader's if they differ."""
        return given if URL.parse(os.fspath(given)) == self.session.url else self.session.url.reveal()

    def __enter__(self) -> TakeOpening:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._expected is not None:  # otherwise it could open connections after the storage is closed
            self._expected.cancel()
            self._expected.settled(60)
        if self._transaction.state in (State.NEW, State.CLAIMED, State.SHARING):
            self.meter.close()
            self.exchange.fail(error)
            run(self._transaction.abort())
            run(self.session.close())
            emit("failed", self.meter.verb, str(self.session.url), error=error)


def open_take(
    exchange: Exchange,
    url: URL,
    globs: Sequence[str],
    meter: Meter,
    open_session: OpenSession,
    *,
    overwrite: bool,
    keys: Sequence[str] = (),
) -> TakeOpening:
    """Agree on a take. The leader of several ranks refuses to replace a snapshot, and claims the path.

    All ranks must have the same `keys`.
    """
    if exchange.alone:
        session = open_session(url)
        transaction = Transaction(session, exchange, secrets.token_hex(6))
        return TakeOpening(exchange, session, transaction, globs, meter, overwrite=overwrite)
    opened: list[tuple[Session, Transaction]] = []

    def lead(hellos: list[Hello]) -> Answer:
        expect_same_verb(hellos)
        expect_same_keys("sign", [hello.keys for hello in hellos])
        session = open_session(url)
        transaction = Transaction(session, exchange, secrets.token_hex(6))
        opened.append((session, transaction))
        transaction.expect(run(expect_at_path(session, overwrite=overwrite)))
        run(transaction.claim())
        return Answer(hellos[0].path, transaction.save_id, common_globs(hellos))

    try:
        answer = exchange.agree(Hello(meter.verb, url.reveal(), list(globs), list(keys)), lead, Hello, Answer)
        url = agreed_url(url, answer.path)
        warn_of_globs(globs, answer.globs)  # a warning may be an error
        if not opened:
            session = open_session(url)
            opened.append((session, Transaction(session, exchange, answer.save_id)))
    except BaseException:
        for session, transaction in opened:
            run(transaction.abort())
            run(session.close())
        raise
    return TakeOpening(exchange, *opened[0], answer.globs, meter, overwrite=overwrite)


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


CLAIMED_OR_DATA = (".take-", "data/")
"""Beginnings of the names that a save has in the root of a snapshot, apart from the manifest."""


async def expect_at_path(session: Session, *, overwrite: bool) -> PathState:
    """Return the state that the commit expects at the path. Raise if a snapshot exists and may not be overwritten.

    A name that a listing misses only delays the error: the commit checks again.
    """
    capabilities = session.storage.capabilities
    if not (capabilities.write and capabilities.atomic_put):
        raise SnapshotError(f"{session.url}: this storage is read-only")
    names = await session.storage.list_root()
    known = {METADATA, DCP_METADATA} if names is None else {name.rstrip("/") for name in names}
    manifest = await _stat(session, METADATA) if METADATA in known else None
    other = await _stat(session, DCP_METADATA, errno.EISDIR, errno.ENOTDIR) if DCP_METADATA in known else None
    if other is not None and not await is_notice(session.storage):
        raise SnapshotExistsError(
            f"{session.url}: holds a checkpoint of torch.distributed.checkpoint, which other tools would read instead "
            "of this one; save to another path, or delete its files"
        )
    if manifest is None:
        return PathState(is_clean=names is not None and not any(name.startswith(CLAIMED_OR_DATA) for name in names))
    if not overwrite:
        raise SnapshotExistsError(f"{session.url}: a snapshot exists already").with_cure(
            "save to another path, or pass overwrite=True"
        )
    with suppress(StorageNotFoundError):
        await expect_own_manifest(session.storage)
    return PathState(manifest.token)


async def _stat(session: Session, path: str, *absent: int) -> FileStat | None:
    """Return the stat of a path, or None. Errors with a number in `absent` count as a missing file."""
    try:
        return await session.storage.stat(path)
    except StorageNotFoundError:
        return None
    except StorageError as error:
        if error.errno not in absent:
            raise
        return None


# The beginning of a take: a session for its options, and agreement between the ranks.


def begin_take(
    exchange: Exchange,
    path: str | os.PathLike[str],
    options: TakeRequest,
    meter: Meter,
    slot: TakeSlot | None = None,
) -> TakeOpening:
    """Agree with the other ranks on a take."""
    return open_take(
        exchange,
        URL.parse(os.fspath(path)),
        options.replicated or (),
        meter,
        partial(session_for_take, options, slot=slot),
        overwrite=options.overwrite,
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
