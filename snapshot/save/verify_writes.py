"""Reading back what was written, before the commit: a bit that was flipped on its way to storage is found in time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from snapshot.errors import CorruptSnapshotError
from snapshot.events import Meter, emit
from snapshot.load.requests import ReadRequest
from snapshot.load.stored_ranges import wants_of
from snapshot.manifest.document import FORMAT, Document
from snapshot.reports import listed
from snapshot.runtime.session import Session
from snapshot.save.manifest_builder import RankManifest
from snapshot.verbs.verify import Stretch, Verification, cut_wants

PIECE = 4 << 20
"""Bytes that are read together where only a sample is read."""


def share_of(verify_writes: bool | float) -> float:
    """Return the share of the bytes that is read back; `ValueError` for what is no share."""
    share = float(verify_writes)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"verify_writes must be True, False or a share from 0 to 1, got {verify_writes!r}")
    return share


async def expect_written(session: Session, described: RankManifest, share: float, verb: str) -> None:
    """Read a share of what this process has written, and raise where it is not what was meant to be there."""
    files, manifest = described.files, {**described.shared, **described.own}
    storage = session.storage
    await storage.drop_caches(list(files))
    document = Document(FORMAT, "", "", 1, "", "", msgspec.Raw(b"{}"), files, [], manifest)
    verification = Verification(session, document, Meter(verb, None))
    everything = verification.everything(wants_of([manifest, {}], files, verification.faults), {}, {})
    chosen = everything if share == 1.0 else _sampled(everything, share)
    await verification.look(chosen, lambda _: None)
    faults = list(dict.fromkeys(verification.faults))
    if faults:
        raise CorruptSnapshotError(
            f"{session.url}: {len(faults)} of the ranges that were read back are not what was written, and nothing "
            f"was committed:{listed(faults)}",
            faults=faults,
        )
    emit("read_back", verb, str(session.url), bytes=chosen.nbytes)


def _sampled(everything: Stretch, share: float) -> Stretch:
    """Choose pieces at random: of each file that share, and one at least."""
    pieces: dict[str, list[ReadRequest]] = defaultdict(list)
    for want in cut_wants((*everything.plain, *everything.wants), PIECE):
        pieces[want.location].append(want)
    made = Stretch()
    for held in pieces.values():
        for want in _some(held, share):
            made.add(want)
    return made


def _some(pieces: Sequence[ReadRequest], share: float) -> list[ReadRequest]:
    return random.SystemRandom().sample(pieces, max(1, round(share * len(pieces))))
