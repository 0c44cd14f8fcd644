"""A verb whose work several ranks share: before any work, they agree on the call and on its sources.

Each rank computes all shares from the manifest and takes its own. So no plan is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import msgspec
import torch

from snapshot.distributed.exchange import LEADER, Exchange, expect_same_verb
from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.formats import zip_archive
from snapshot.formats.foreign import ForeignDocument, ReadOnlyStorage
from snapshot.formats.pickled import INLINE
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.session import Session, signer_of
from snapshot.io.storage import Storage
from snapshot.io.url import PER_HOST, URL
from snapshot.loading.left_out import stored_in
from snapshot.loading.open import expect_sound_archives, open_document
from snapshot.manifest.document import Document
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.layout import PartitionItem, partition_items
from snapshot.tensors.digest import digest_range

T = TypeVar("T")
Read = Callable[[Session], Coroutine[Any, Any, Document]]
LONGEST = 300
"""The maximum length of an argument in an error."""
AT_ONCE = 16
"""The maximum number of concurrent requests."""


class Call(msgspec.Struct, array_like=True):
    """A rank's call, with the arguments that must be the same on all ranks as text."""

    verb: str
    arguments: dict[str, str]


class Opened(msgspec.Struct, array_like=True):
    """A checkpoint that the leader opened. All ranks must read this one."""

    save_id: str
    description: str = ""
    """For another library's checkpoint: a digest of its entries."""
    tokens: dict[str, str] = {}
    """For another library's checkpoint: tokens of its files, which may be replaced one by one."""


def open_sources(
    exchange: Exchange,
    verb: str,
    arguments: Mapping[str, object],
    sessions: Sequence[Session],
    read: Read = open_document,
) -> list[Document]:
    """Open checkpoints. Several ranks agree on the call first, and raise unless all of them open the same saves.

    From then on, a session raises if a file of another library's checkpoint was replaced.
    """
    opened: list[Document] = []

    def lead(calls: list[Call]) -> list[Opened]:
        expect_same_calls(calls)
        opened.extend(_open_first(session, read) for session in sessions)
        return [] if exchange.alone else [_describe(document) for document in opened]

    given = {**arguments, "keys": [signer_of(session.seal) for session in sessions]}
    mine = Call(verb, {name: _text_of(value) for name, value in given.items()})
    found = exchange.agree(mine, lead, Call, list[Opened])
    if exchange.rank == LEADER:
        return opened
    return [_open_same(session, read, each) for session, each in zip(sessions, found, strict=True)]


def _open_first(session: Session, read: Read) -> Document:
    """Open a checkpoint, and record which files it has."""
    document = run(read(session))
    if isinstance(document, ForeignDocument):
        _keep_tokens(session, document, run(_find_tokens(session.storage, document.files.keys() - {INLINE})))
    return document


async def _find_tokens(storage: Storage, names: Iterable[str]) -> dict[str, str]:
    """Return the tokens of the files that exist. The verb reports the others."""

    async def look(name: str) -> tuple[str, str]:
        with suppress(StorageError):
            return name, (await storage.stat(name)).token
        return name, ""

    return {name: token for name, token in await gather_limited(names, look, AT_ONCE) if token}


def _open_same(session: Session, read: Read, opened: Opened) -> Document:
    """Open the checkpoint that the leader opened."""
    for _ in range(2):
        document = run(read(session))
        if isinstance(document, ForeignDocument):
            _keep_tokens(session, document, opened.tokens)
        if _describe(document) == opened:
            return document
    raise SnapshotError(f"{session.url}: was replaced while the ranks opened it; start again")


def _keep_tokens(session: Session, document: ForeignDocument, tokens: dict[str, str]) -> None:
    document.tokens = tokens
    cast(ReadOnlyStorage, session.stored).expect_tokens(tokens)


def tokens_of(document: Document) -> dict[str, str]:
    """Return the tokens of the files of another library's checkpoint."""
    return document.tokens if isinstance(document, ForeignDocument) else {}


def _describe(document: Document) -> Opened:
    if not isinstance(document, ForeignDocument):
        return Opened(document.save_id)
    entries = digest_range(msgspec.msgpack.encode(list(document.manifest.items())))
    return Opened(document.save_id, entries, document.tokens)


def expect_same_calls(calls: Sequence[Call]) -> None:
    """Raise if the ranks called different verbs, or with different arguments.

    >>> expect_same_calls([Call("copy", {"url": "a"}), Call("copy", {"url": "b"})])
    Traceback (most recent call last):
    snapshot.errors.SnapshotError: all ranks must call with the same arguments, got url: a on rank 0, b on rank 1
    """
    expect_same_verb(calls)
    wrong = []
    for name, first in calls[LEADER].arguments.items():
        values = [call.arguments[name] for call in calls]
        other = next((rank for rank, value in enumerate(values) if value != first), None)
        if other is not None:
            wrong.append(f"{name}: {first[:LONGEST]} on rank {LEADER}, {values[other][:LONGEST]} on rank {other}")
    if wrong:
        raise SnapshotError(f"all ranks must call with the same arguments, got {'; '.join(wrong)}")


def _text_of(value: object) -> str:
    """Return an argument as text. Functions and other objects are known by their names only."""
    if isinstance(value, URL):
        return str(value)
    if isinstance(value, Mapping):
        return repr(sorted(value.items()))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text_of, value)) or "nothing"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, TensorMap)):
        return str(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def expect_same_plan(exchange: Exchange, items: Iterable[object]) -> None:
    """Raise unless all ranks plan the same items: each computes all shares, but functions may differ between ranks."""

    def lead(plans: list[str]) -> bool:
        expect_equal_plans(plans)
        return True

    if not exchange.alone:
        exchange.agree(digest_plan(items), lead, str, bool)


def digest_plan(items: Iterable[object]) -> str:
    """Return a digest of planned items."""
    return digest_range(repr(list(items)).encode())


def expect_equal_plans(plans: Sequence[str]) -> None:
    """Raise unless the digests of all ranks' plans are equal."""
    other = next((rank for rank, plan in enumerate(plans) if plan != plans[LEADER]), None)
    if other is not None:
        raise SnapshotError(
            f"all ranks must plan the same work, got another plan on rank {other}; pass the same rename and map"
        )


def expect_common_place(exchange: Exchange, url: URL) -> None:
    """Raise if several ranks would write to a storage that each host has for itself."""
    if not exchange.alone and url.scheme == PER_HOST:
        raise SnapshotError(f"{url}: must be a storage that all ranks share; each host has this one for itself")


def share_whole(exchange: Exchange, items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Return each rank's items, in their order. Long ones are dealt first, each to the rank with the fewest bytes."""
    pieces = [PartitionItem((size,), 1, splits=False) for size in sizes]
    return [[items[each.item] for each in share] for share in partition_items(pieces, [0] * exchange.world)]


def share_runs(exchange: Exchange, items: Sequence[T], sizes: Sequence[int]) -> list[list[T]]:
    """Return each rank's items: one run each, of about the same number of bytes.

    >>> from snapshot.distributed.exchange import solo_exchange
    >>> share_runs(solo_exchange("verify"), "abc", [1, 2, 3])
    [['a', 'b', 'c']]
    """
    shares: list[list[T]] = [[] for _ in range(exchange.world)]
    total = max(1, sum(sizes))
    for item, size, end in zip(items, sizes, itertools.accumulate(sizes), strict=True):
        middle = end - size + size // 2
        shares[min(middle * exchange.world // total, exchange.world - 1)].append(item)
    return shares


async def expect_written(storage: Storage, shares: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raise if the leader does not find the files that the other ranks wrote. `shares`: names and sizes, by rank."""

    async def look(item: tuple[int, str, int]) -> None:
        rank, name, size = item
        try:
            found = (await storage.stat(name)).size
        except StorageNotFoundError as error:
            raise SnapshotError(
                f"{error}: rank {rank} wrote it, but rank {LEADER} cannot find it; all ranks must share one storage"
            ) from error
        if found != size:
            raise SnapshotError(f"{storage.url.join(name)}: must have {size:,} bytes from rank {rank}, got {found:,}")

    items = [(rank, name, size) for rank, share in enumerate(shares) if rank != LEADER for name, size in share]
    await gather_limited(items, look, AT_ONCE)


def expect_checksums(exchange: Exchange, session: Session, document: Document) -> None:
    """Raise if stored ranges do not match the checksums of other libraries' archives. Each rank reads a share."""
    found = zip_archive.find_archives(stored_in(document.manifest), document.files)
    archives = sorted(set(found.values()))
    shares = share_whole(exchange, archives, [end - begin for _, begin, end in archives])
    expect_sound_archives(session, shares[exchange.rank])
