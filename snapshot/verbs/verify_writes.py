"""Read-back verification of written bytes before the commit, to detect bits that flipped on the way to storage."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import msgspec

from snapshot.distributed.exchange import solo_exchange
from snapshot.errors import CorruptSnapshotError
from snapshot.events import emit
from snapshot.loading.open import read_stored, read_unpacked
from snapshot.loading.requests import ReadRequest
from snapshot.loading.stored_ranges import requests_of
from snapshot.manifest.document import FORMAT, Document
from snapshot.progress import Meter
from snapshot.runtime.session import Session
from snapshot.save.manifest_builder import RankManifest
from snapshot.save.take import Verify
from snapshot.text import listed
from snapshot.verbs.stretches import Stretch, cut_requests
from snapshot.verbs.verification import Verification

PIECE = 4 << 20
"""Bytes that are read together if only a sample is read."""


def verify_written(share: float, verb: str) -> Verify | None:
    """Return a function that reads a fraction of the written bytes back before a commit; None for a fraction of 0."""
    return partial(expect_written, share=share, verb=verb) if share else None


async def expect_written(session: Session, described: RankManifest, *, share: float, verb: str) -> None:
    """Read back a fraction of the bytes that this process wrote. Raise if any byte differs.

    Files that are shared with a base were read before they were shared.
    """
    files, manifest = described.files, {**described.shared, **described.own}
    written = {location: file for location, file in files.items() if not (file.in_base or file.age)}
    storage = session.storage
    await storage.drop_caches(list(written))
    read_unpacked(session, written)
    document = Document(FORMAT, "", "", 1, "", "", msgspec.Raw(b"{}"), written, [], manifest)
    verification = Verification(session, document, Meter(verb, None), solo_exchange(verb))
    requests = requests_of([manifest, {}], files, verification.faults)
    everything = verification.everything([each for each in requests if each.location in written], {}, {})
    chosen = everything if share == 1.0 else _sample(everything, share)
    try:
        await verification.look(chosen, lambda _: None)
    finally:
        read_stored(session)
    faults = list(dict.fromkeys(verification.faults))
    if faults:
        raise CorruptSnapshotError(
            f"{session.url}: {len(faults)} of the ranges that were read back do not match their digests, so nothing "
            f"was committed:{listed(faults)}",
            faults=faults,
        )
    emit("read_back", verb, str(session.url), bytes=chosen.nbytes)


def _sample(everything: Stretch, share: float) -> Stretch:
    """Choose random pieces: the given fraction of each file, and at least one."""
    pieces: dict[str, list[ReadRequest]] = defaultdict(list)
    for request in cut_requests((*everything.plain, *everything.requests), PIECE):
        pieces[request.location].append(request)
    made = Stretch()
    for held in pieces.values():
        for request in _choose_pieces(held, share):
            made.add(request)
    return made


def _choose_pieces(pieces: Sequence[ReadRequest], share: float) -> list[ReadRequest]:
    return random.SystemRandom().sample(pieces, max(1, round(share * len(pieces))))
