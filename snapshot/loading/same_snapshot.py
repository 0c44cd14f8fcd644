"""The beginning of a restore: all ranks open the same snapshot, even if it is replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from snapshot.distributed.agreed_plans import KnownPlan, plan_memory
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.hello import Hello, agreed_url, expect_same_keys, expect_same_verb
from snapshot.errors import SnapshotError
from snapshot.loading.open import open_document
from snapshot.manifest.document import Document
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.url import URL


class FoundSnapshot(msgspec.Struct, array_like=True):
    """The snapshot that the leader found."""

    path: str
    save_id: str


def open_restore(
    exchange: Exchange, url: URL, verb: str, open_session: Callable[[URL], Session], *, keys: Sequence[str] = ()
) -> tuple[Session, Document]:
    """Agree on a snapshot with the other ranks, and open it. All ranks must have the same `keys`."""
    held: list[tuple[Session, Document]] = []

    def at(place: URL) -> tuple[Session, Document]:
        session = open_session(place)
        try:
            return session, run(open_document(session, None if exchange.alone else exchange.rank))
        except BaseException:
            run(session.close())
            raise

    if exchange.alone:
        return at(url)

    def lead(hellos: list[Hello]) -> FoundSnapshot:
        expect_same_verb(hellos)
        expect_same_keys("key", [hello.keys for hello in hellos])
        held.append(at(url))
        return FoundSnapshot(hellos[0].path, held[0][1].save_id)

    try:
        answer = exchange.agree(Hello(verb, url.reveal(), keys=list(keys)), lead, Hello, FoundSnapshot)
    except BaseException:
        for session, _ in held:
            run(session.close())
        raise
    url = agreed_url(url, answer.path)
    for _ in range(2):
        session, document = held.pop() if held else at(url)
        if document.save_id == answer.save_id:
            return session, document
        run(session.close())
    raise SnapshotError(f"{url}: was replaced while the ranks opened it; restore again")


def remember_plan(exchange: Exchange, document: Document) -> None:
    """Keep the agreed plan of a restored snapshot, so that the next take can reuse it."""
    if exchange.alone or document.world_size != exchange.world:
        return
    paths = frozenset(path.partition("/")[2] for path, entry in document.manifest.items() if entry.replicated)
    plan_memory(exchange.ranks).keep_restored(KnownPlan(document.structure, paths))
