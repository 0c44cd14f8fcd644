"""The arguments of a take, as one checked value."""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import msgspec

from snapshot.distributed.exchange import Exchange, Hello, agreed_url, expect_same_keys, expect_same_verb
from snapshot.errors import SnapshotBusyError, SnapshotError, SnapshotExistsError, StorageError, StorageNotFoundError
from snapshot.events import emit, warn
from snapshot.formats import dcp
from snapshot.formats.dcp import is_notice
from snapshot.io.aio import Latch
from snapshot.io.arena import arena, available_memory
from snapshot.io.budget import Pool
from snapshot.io.loop import LoopFuture, run, start
from snapshot.io.session import Seal, Session, signer_of
from snapshot.io.storage import FileStat, Storage
from snapshot.io.system import PerProcess, expect_linux
from snapshot.io.url import URL, Location, Source, locate_source
from snapshot.manifest.document import METADATA, measure_nesting
from snapshot.manifest.rank_view import DEEPEST
from snapshot.options import MiB, Settings
from snapshot.plan.layout import SavePlan
from snapshot.plan.names import matcher
from snapshot.progress import Meter, ProgressArgument
from snapshot.save.compression import expect_compression, usual_budget
from snapshot.save.guards import Guards, expect_guards
from snapshot.save.transaction import PathState, State, Transaction, expect_own_manifest
from snapshot.state.leaves import Prepare
from snapshot.tensors.digest import FileTree, Root
from snapshot.text import counted

Staging = Literal["blocking", "overlapped"]
Worker = Literal["thread", "process"]
WhenBusy = Literal["wait", "raise"]
Only = Literal["trainable"]
AllowPickle = Literal["warn", "error", True]


Compression = Literal["zstd", "auto"]
BaseArgument = Source | Sequence[Source] | None
SIGNING = "snapshot.signing"
"""The package of keys. Like a plugin, it is imported by its name, and only for a take that is signed."""


@runtime_checkable
class TakeSigner(Protocol):
    """A key that signs a take."""

    def expect_signable(self, storage: Storage, *, leads: bool) -> None:
        """Raise `ValueError` if a take with this storage cannot be signed, or if its leader has no private key."""
        ...

    def files_of(self, save_id: str, location: str) -> list[str]:
        """Return the files that are stored beside a rank's data files. `location`: one of those."""
        ...

    async def put_leaves(self, storage: Storage, trees: Mapping[str, FileTree]) -> None:
        """Store the hashes of files, before they are signed."""
        ...

    async def put_signature(self, storage: Storage, save_id: str, manifest: bytes, files: Mapping[str, Root]) -> None:
        """Sign a manifest and its files."""
        ...


def load_signer(key: Any) -> TakeSigner:
    """Return what signs with a key. Raise `ValueError` or `TypeError` for a wrong one."""
    made: TakeSigner = import_module(f"{SIGNING}.keys").load_signer(key)
    return made


class OptionalSeal(Seal, Protocol):
    """A seal of a base. It accepts a snapshot without a signature, and verifies one that has it."""

    fault: str
    """Why the snapshot that was opened last is not signed; empty if it is."""


def make_optional_seal(signer: TakeSigner) -> OptionalSeal:
    """Return the seal with which a signed take opens its base."""
    made: OptionalSeal = import_module(f"{SIGNING}.seal").OptionalSeal(signer)
    return made


@dataclass(frozen=True, kw_only=True)
class TakeOptions:
    """The options that all takes of a run share, for `SnapshotManager.take` and `async_take`.

    Each is explained at `Snapshot.take` and `Snapshot.async_take`. Wrong values raise `ValueError` or `TypeError`.

    >>> from snapshot import TakeOptions
    >>> options = TakeOptions(replicated=["model/**"], staging="overlapped")
    """

    replicated: Sequence[str] | None = None
    prepare: Prepare | None = None
    """As `_custom_tensor_prepare_func` of `Snapshot.take`."""
    durable: bool = True
    exclude: Sequence[str] = ()
    memory_budget_bytes: int | None = None
    check_replicated: bool = False
    read_back: bool | float = False
    progress: ProgressArgument = None
    timeout: float | None = None
    plan: SavePlan | None = None
    base: BaseArgument = None
    only: Only | None = None
    compression: Compression | None = None
    sign: Any = None
    """The path of a PEM file with an Ed25519 key, or a key object of `cryptography`."""
    allow_pickle: AllowPickle = "warn"
    staging: Staging = "blocking"
    worker: Worker = "thread"
    when_busy: WhenBusy = "wait"
    guards: Guards = "report"
    statistics: bool = False
    signer: TakeSigner | None = field(init=False)
    """The key that `sign` names."""

    def __post_init__(self) -> None:
        for name, allowed in (("staging", Staging), ("worker", Worker), ("when_busy", WhenBusy)):
            if getattr(self, name) not in get_args(allowed):
                choices = " or ".join(map(repr, get_args(allowed)))
                raise ValueError(f"{name} must be {choices}, got {getattr(self, name)!r}")
        if self.allow_pickle not in ("warn", "error") and self.allow_pickle is not True:
            raise ValueError(f"allow_pickle must be 'warn', 'error' or True, got {self.allow_pickle!r}")
        expect_guards(self.guards)
        if self.worker == "process":
            expect_linux("worker='process'")
        if self.only not in (None, "trainable"):
            raise ValueError(f"only must be 'trainable' or None, got {self.only!r}")
        _ = self.bases  # raises for a wrong one
        expect_compression(self.compression)
        signer = self.sign if self.sign is None or isinstance(self.sign, TakeSigner) else load_signer(self.sign)
        object.__setattr__(self, "signer", signer)
        matcher(self.replicated or ())
        if not 0.0 <= self.read_back_share <= 1.0:
            raise ValueError(f"read_back must be True, False or a fraction from 0 to 1, got {self.read_back!r}")

    def at(
        self,
        storage_options: Mapping[str, Any] | None,
        *,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        **changes: Any,
    ) -> TakeRequest:
        """Return the request of a take with these options, but for some changes. The key is not read again."""
        shared = {each.name: getattr(self, each.name) for each in fields(TakeOptions) if each.init}
        own = {"storage_options": storage_options, "overwrite": overwrite, "metadata": metadata}
        return TakeRequest(**{**shared, "sign": self.signer, **own, **changes})

    @property
    def bases(self) -> list[Source]:
        """The snapshots that the take is based on, the newest first."""
        if self.base is None:
            return []
        given: list[Any] = list(self.base) if isinstance(self.base, (list, tuple)) else [self.base]
        for each in given:
            if not isinstance(each, (str, os.PathLike)) and not isinstance(getattr(each, "location", None), Location):
                raise TypeError(
                    f"base must be a path, a URL or a Snapshot, or a list of them, got {type(each).__name__}"
                )
        return given

    @property
    def keys(self) -> list[str]:
        """The public keys of the take and of its bases, which must be the same on all ranks; empty texts for none."""
        return [str(self.signer or ""), *(signer_of(locate_source(each).seal) for each in self.bases)]

    @property
    def two_copies(self) -> bool:
        """True if the newest two snapshots must have two physical copies of what is unchanged."""
        return isinstance(self.base, (list, tuple))

    @property
    def read_back_share(self) -> float:
        """The fraction of the written bytes that is read back before the commit."""
        return float(self.read_back)


TAKE_OPTIONS = TakeOptions()
"""The defaults."""


@dataclass(frozen=True, kw_only=True)
class TakeRequest(TakeOptions):
    """All options of one take: also those that belong to its place."""

    storage_options: Mapping[str, Any] | None = None
    overwrite: bool = False
    metadata: Mapping[str, Any] | None = None
    metadata_json: msgspec.Raw = field(init=False)
    """The user's metadata, as written to the manifest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only and not self.bases:  # a manager adds the base
            raise ValueError("only='trainable' must have a base: the snapshot that has what is left out")
        object.__setattr__(self, "metadata_json", encode_metadata(self.metadata))


def encode_metadata(metadata: Mapping[str, Any] | None) -> msgspec.Raw:
    """Encode the user's metadata for the manifest; raise `TypeError` if JSON cannot hold it."""
    try:
        json.dumps(metadata, allow_nan=False)  # JSON has no NaN, and msgspec would make it null
        encoded = msgspec.json.encode(dict(metadata or {}))
        if measure_nesting(encoded) > DEEPEST:
            raise ValueError(f"it must nest at most {DEEPEST} levels")
        return msgspec.Raw(encoded)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"metadata must be a JSON value: {error}") from error


# Limits on the concurrent asynchronous takes of a process: a number of slots, and one shared budget.


class TakeSlot:
    """A slot of one take, from its call until it is committed or failed."""

    def __init__(self, take_slots: TakeSlots) -> None:
        self._in_flight = take_slots

    def pool(self, limit: int) -> Pool:
        """Return the memory pool that all pending takes share. The newest take sets its limit."""
        return self._in_flight.pool(limit)

    def leave_after(self, work: Future[Any]) -> None:
        """Hold the slot until the work is done."""
        work.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        """Release the slot. Later calls do nothing."""
        self._in_flight.left(self)


class TakeSlots:
    """All slots of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[TakeSlot] = set()
        self._waiting: list[Latch] = []
        self._pool = Pool(0)

    @contextmanager
    def take(self, when_busy: str) -> Iterator[TakeSlot]:
        """Take a slot, and release it if the body fails. `when_busy` decides whether to wait if none is free."""
        most = Settings.current().pending
        place = TakeSlot(self)
        try:
            while (gate := self._enter(place, most)) is not None:
                if when_busy == "raise":
                    raise SnapshotBusyError(
                        f"{counted(most, 'snapshot')} {'is' if most == 1 else 'are'} already pending; wait() for "
                        "one, save less often, or raise SNAPSHOT_PENDING"
                    )
                gate.wait()
            yield place
        except BaseException:
            place.leave()
            raise

    def _enter(self, place: TakeSlot, most: int) -> Latch | None:
        """Take a slot, or return a latch to wait for."""
        with self._lock:
            if len(self._taken) < most:
                self._taken.add(place)
                return None
            self._waiting.append(Latch())
            return self._waiting[-1]

    def left(self, place: TakeSlot) -> None:
        """Free a slot that was taken."""
        with self._lock:
            self._taken.discard(place)
            waiting, self._waiting = self._waiting, []
        for gate in waiting:
            gate.open()

    def pool(self, limit: int) -> Pool:
        with self._lock:
            if len(self._taken) == 1:
                self._pool = Pool(limit)
            else:
                with self._pool.lock:
                    self._pool.resize(limit)
            return self._pool

    def usual_limit(self) -> int:
        """Return half of the host's free memory without pending takes, shared by the processes of a job."""
        free = available_memory() + arena().kept + self._pool.used
        return max(64 * MiB, free // 2 // Settings.processes())


_take_slots = PerProcess(TakeSlots)


def take_slots() -> TakeSlots:
    """Return the slots of this process."""
    return _take_slots.get()


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
    known = {METADATA, dcp.METADATA} if names is None else {name.rstrip("/") for name in names}
    manifest = await _stat(session, METADATA) if METADATA in known else None
    other = await _stat(session, dcp.METADATA, errno.EISDIR, errno.ENOTDIR) if dcp.METADATA in known else None
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
        default_budget=take_slots().usual_limit() if slot is not None else usual_budget(options.compression),
        pool=slot.pool if slot is not None else None,
    )
