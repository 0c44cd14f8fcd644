"""How a verb begins on several ranks: they agree on what is called, on which path, and on a name for it."""

from __future__ import annotations

import errno
import os
import secrets
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import SnapshotError, SnapshotExistsError, StorageError, StorageNotFoundError
from snapshot.formats import dcp
from snapshot.formats.notice import is_notice
from snapshot.manifest.document import METADATA, Document
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save import cleanup
from snapshot.storage import ABSENT, Expect, FileStat
from snapshot.url import URL

Open = Callable[[URL], Session]


class Hello(msgspec.Struct, array_like=True):
    """What each rank says first."""

    verb: str
    path: str
    globs: list[str]


class Answer(msgspec.Struct, array_like=True):
    """What the leader answers."""

    path: str
    save_id: str
    globs: list[str]
    """Those that all ranks gave."""


class Opening(msgspec.Struct):
    """What all ranks have agreed on."""

    url: URL
    save_id: str
    globs: list[str]
    expect: Expect = ABSENT
    """What the commit expects to stand at the path. The leader knows it."""
    claimed: bool = False
    """Whether this rank has laid a claim there."""


def open_take(
    exchange: Exchange, url: URL, verb: str, globs: Sequence[str], opener: Open, *, overwrite: bool = False, claim: bool
) -> tuple[Session, Opening]:
    """Agree on a take. The leader refuses to write over a snapshot, before anything is written, and lays its claim.

    With `claim=False` nothing is written and nothing refused: for a dry run.
    """
    if exchange.alone:
        return opener(url), Opening(url, secrets.token_hex(6), list(globs))
    held: list[Session] = []
    opening = Opening(url, "", [])

    def lead(hellos: list[Hello]) -> Answer:
        _same_verb(hellos)
        opening.save_id = secrets.token_hex(6)
        if claim:
            session = opener(url)
            held.append(session)
            opening.expect = run(expectation(session, overwrite=overwrite))
            opening.claimed = True
            run(cleanup.lay_claim(session.storage, opening.save_id))
        common = [glob for glob in hellos[0].globs if all(glob in hello.globs for hello in hellos)]
        return Answer(hellos[0].path, opening.save_id, common)

    try:
        answer = exchange.agree(Hello(verb, url.reveal(), list(globs)), lead, Hello, Answer)
    except BaseException:
        for session in held:
            if opening.claimed:
                cleanup.leave(opening.save_id)
                run(cleanup.withdraw(session.storage, opening.save_id))
            run(session.close())
        raise
    opening.url = _agreed(url, answer.path)
    opening.save_id, opening.globs = answer.save_id, answer.globs
    for glob in globs:
        if glob not in answer.globs:
            warnings.warn(f"replicated: the glob {glob!r} does not count, since not all ranks gave it", stacklevel=5)
    return held[0] if held else opener(opening.url), opening


def path_of(given: str | os.PathLike[str], opening: Opening) -> str | os.PathLike[str]:
    """The path as it was given, or the leader's."""
    return given if URL.parse(os.fspath(given)) == opening.url else opening.url.reveal()


class Standing(msgspec.Struct, array_like=True):
    """The snapshot that the leader found."""

    path: str
    save_id: str


def open_restore(exchange: Exchange, url: URL, verb: str, opener: Open) -> tuple[Session, Document]:
    """Agree on a snapshot: all ranks open the same one, even if it is replaced meanwhile."""
    held: list[tuple[Session, Document]] = []

    def at(place: URL) -> tuple[Session, Document]:
        session = opener(place)
        try:
            return session, run(session.open(None if exchange.alone else exchange.rank))
        except BaseException:
            run(session.close())
            raise

    if exchange.alone:
        return at(url)

    def lead(hellos: list[Hello]) -> Standing:
        _same_verb(hellos)
        held.append(at(url))
        return Standing(hellos[0].path, held[0][1].save_id)

    try:
        answer = exchange.agree(Hello(verb, url.reveal(), []), lead, Hello, Standing)
    except BaseException:
        for session, _ in held:
            run(session.close())
        raise
    url = _agreed(url, answer.path)
    for _ in range(2):
        session, document = held.pop() if held else at(url)
        if document.save_id == answer.save_id:
            return session, document
        run(session.close())
    raise SnapshotError(f"{url}: was replaced while the ranks opened it; restore again")


def _agreed(url: URL, answer: str) -> URL:
    """The leader's path."""
    if answer == url.reveal():
        return url
    agreed = URL.parse(answer)
    warnings.warn(f"this rank gave the path {str(url)!r}; rank 0's is used: {str(agreed)!r}", stacklevel=6)
    return agreed


def _same_verb(hellos: Sequence[Hello]) -> None:
    verbs = {hello.verb: rank for rank, hello in enumerate(hellos)}
    if len(verbs) > 1:
        raise SnapshotError(
            f"ranks called different verbs: {', '.join(f'rank {rank} {verb}' for verb, rank in verbs.items())}"
        )


async def _standing(session: Session, path: str, *absent: int) -> FileStat | None:
    try:
        return await session.storage.stat(path)
    except StorageNotFoundError:
        return None
    except StorageError as error:
        if error.errno not in absent:
            raise
        return None


async def expectation(session: Session, *, overwrite: bool) -> Expect:
    """What the commit expects to stand at the path: refuse to write over a snapshot, unless that was asked for."""
    capabilities = session.storage.capabilities
    if not (capabilities.write and capabilities.atomic_put):
        raise SnapshotError(f"{session.url}: this storage cannot be written to")
    standing = await _standing(session, METADATA)
    other = await _standing(session, dcp.METADATA, errno.EISDIR, errno.ENOTDIR)
    if other is not None and not await is_notice(session.storage):
        raise SnapshotExistsError(
            f"{session.url}: holds a checkpoint of torch.distributed.checkpoint, which others would read in place of "
            "this one; take to another path, or remove its files"
        )
    if standing is None:
        return ABSENT
    if not overwrite:
        raise SnapshotExistsError(
            f"{session.url}: holds a snapshot already; take to another path, or with overwrite=True"
        )
    with suppress(StorageNotFoundError):
        await cleanup.expect_ours(session.storage)
    return standing.token
