"""The snapshots that a take is based on: opened, compared with the take's tensors, and shared where they are equal."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from snapshot.errors import (
    CorruptSnapshotError,
    RestoreError,
    SnapshotNotFoundError,
    StorageError,
    UnsupportedFormatError,
)
from snapshot.events import log
from snapshot.formats.foreign import ForeignDocument
from snapshot.loading.left_out import attach_base
from snapshot.loading.open import open_document
from snapshot.loading.unpacking import UnpackingStorage
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.base_files import Base, open_base
from snapshot.save.cleanup import committed_save_id
from snapshot.save.comparison import Comparer
from snapshot.save.omitted import omit_frozen
from snapshot.save.rank_share import RankShare
from snapshot.save.rendezvous import TakeOpening
from snapshot.save.shared_files import FileSharing
from snapshot.save.staging import Stager
from snapshot.save.take_options import TakeOptions
from snapshot.save.unchanged import Unchanged, group_leaves
from snapshot.signing.seal import OptionalSeal
from snapshot.signing.signed_storage import SignedStorage
from snapshot.state.frozen import find_frozen
from snapshot.storage_options import locate_source, seal_of, select_server
from snapshot.url import URL

ABSENT = (SnapshotNotFoundError, CorruptSnapshotError, UnsupportedFormatError, StorageError)
"""Errors of a base that make a take write everything."""


def find_unchanged(
    opening: TakeOpening, share: RankShare, app_state: Mapping[str, Any], options: TakeOptions
) -> Unchanged:
    """Compare the tensors of this rank with the bases, and share or omit what is equal.

    When this returns, nothing that it shares or omits is read from the live tensors again.
    """
    frozen = find_frozen(app_state, share.leaves)
    unchanged = Unchanged(compares=options.base is not None)
    with ExitStack() as opened:
        bases = _open_bases(opening, options, unchanged.notes, opened)
        unchanged.groups = group_leaves(share, frozen, bases[0].document.save_id if bases else None)
        if not bases:
            return unchanged
        opening.transaction()  # an existing snapshot is an error before anything is compared
        unchanged.compared = bases[0].copies()
        stager = Stager(share.leaves, copies=False)
        opened.callback(stager.forget)
        comparer = Comparer(opening, stager, unchanged.notes, read_all=options.verify_share == 1.0)
        left_out = set[int]()
        if options.only and (lasting := _find_lasting(opening, bases[0], unchanged.notes)) is not None:
            left_out = run(omit_frozen(share, frozen, bases[0], comparer, unchanged))
            unchanged.leave_out(share.leaves, left_out)
            unchanged.base_session, unchanged.base_id = partial(_open_lasting, bases[0]), lasting
        signed = options.signer is not None
        sharing = FileSharing(opening, share, bases, comparer, unchanged, two_copies=options.two_copies, signed=signed)
        run(sharing.run(left_out))
    return unchanged


def _open_bases(opening: TakeOpening, options: TakeOptions, notes: list[str], opened: ExitStack) -> list[Base]:
    """Open the newest two bases. One that is not a snapshot of as many ranks is left out, with a note."""
    session, exchange = opening.session, opening.exchange
    bases: list[Base] = []
    for source in options.bases[:2]:
        url, theirs = locate_source(source, options.storage_options)
        if theirs is options.storage_options and url.scheme != session.url.scheme:
            theirs = None  # they are for the take's storage
        same = url.scheme == session.url.scheme and select_server(theirs) == select_server(options.storage_options)
        optional = OptionalSeal(options.signer) if options.signer is not None else None
        place = Session(url, theirs, seal=seal_of(source) or optional)
        opened.callback(_close, place)
        try:
            document = run(open_document(place, exchange.rank))
            if isinstance(document, ForeignDocument):
                raise UnsupportedFormatError(f"{url}: is a checkpoint of {document.format}, not a snapshot")
            if document.world_size != exchange.world:
                raise UnsupportedFormatError(
                    f"{url}: was taken by {document.world_size} ranks, and this take has {exchange.world}"
                )
        except ABSENT as error:
            notes.append(f"everything is written, since the base cannot be used: {error}")
            log.warning("%s: %s", session.url, notes[-1])
            continue
        shares = session.storage.capabilities.shares if same else ""
        bases.append(open_base(place, document, exchange.rank, shares=shares))
        stored = place.storage.inner if isinstance(place.storage, UnpackingStorage) else place.storage
        if isinstance(stored, SignedStorage):
            bases[-1].signed = stored
        elif optional is not None:
            notes.append(f"no file is shared with the base, since this take's key does not sign it: {optional.fault}")
            log.warning("%s: %s", session.url, notes[-1])
    return bases


def _find_lasting(opening: TakeOpening, base: Base, notes: list[str]) -> str | None:
    """Return the save id of the snapshot that will have what is left out.

    Return None if it is not there, or if this take replaces it.
    """
    reference, session = base.reference, opening.session
    save_id = base.document.save_id
    try:
        if reference is not None:
            save_id = run(attach_base(base.session, base.document, *_place_of(base)))
        if run(committed_save_id(session.storage)) != save_id:
            return save_id
        why = f"this take replaces {session.url}"
    except (*ABSENT, RestoreError, ValueError) as error:
        why = str(error)
    notes.append(f"nothing is left out, since the base cannot be relied on: {why}")
    log.warning("%s: %s", session.url, notes[-1])
    return None


def _place_of(base: Base) -> tuple[URL, Mapping[str, Any] | None]:
    """Return the URL and the options of the snapshot that has what is left out."""
    url, options = base.session.url, base.session.options
    if base.reference is not None:
        url = URL.parse(base.reference.url)
        options = options if url.scheme == base.session.url.scheme else None
    return url, options


def _open_lasting(base: Base) -> Session:
    return Session(*_place_of(base))


def _close(session: Session) -> None:
    run(session.close())
