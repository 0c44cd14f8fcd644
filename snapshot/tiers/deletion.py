"""Deletion of one snapshot: a tombstone for the hosts that still have it, then the manifest, then its files."""

from __future__ import annotations

import errno
from contextlib import suppress

from snapshot.errors import SnapshotError, SnapshotExistsError, SnapshotNotFoundError, StorageError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.loading.open import is_foreign
from snapshot.save import transaction
from snapshot.tiers.tombstones import bury_step


def delete_checkpoint(session: Session) -> None:
    """Delete the snapshot of a session. Raise for checkpoints of other libraries, which are never deleted."""
    try:
        run(bury_step(session))
        run(transaction.delete_snapshot(session.storage))
    except (SnapshotNotFoundError, StorageError) as error:
        foreign = False
        with suppress(SnapshotError):
            foreign = run(is_foreign(session))
        if not foreign and getattr(error, "errno", None) == errno.ENOTDIR:
            raise SnapshotNotFoundError(f"{session.url}: no snapshot to delete") from error
        if not foreign:
            raise
        raise SnapshotExistsError(
            f"{session.url}: was written by another library, so it is never replaced or deleted; delete it yourself"
        ) from error
