"""Signing of a committed snapshot: every byte is read once, compared with its digest, and hashed."""

from __future__ import annotations

from dataclasses import replace

from snapshot.distributed.operation import Operation
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.url import Location
from snapshot.manifest.paths import signature_path
from snapshot.reports import VerifyReport
from snapshot.save.transaction import committed_save_id
from snapshot.tensors.digest import root_of
from snapshot.transform.verify import verify_newest
from snapshot_signing.keys import Signer, join_leaves
from snapshot_signing.seal import Recorder


def sign_files(operation: Operation, place: Location, signer: Signer) -> VerifyReport:
    """Sign what is stored at a place.

    Raise `CorruptSnapshotError` if a byte does not match its digest: nothing is signed then.
    """
    recorder = Recorder()
    session = operation.open(replace(place, seal=recorder))
    storage = session.storage
    expect_writable(session)
    signer.expect_signable(storage, leads=True)
    report = verify_newest(session, operation.meter, exchange=operation.exchange)
    expect_undamaged(session, report)
    run(_put(session, storage, recorder, signer))
    operation.emit("signed", key=str(signer), bytes=report.bytes_read)
    return replace(report, signer=str(signer))


def expect_writable(session: Session) -> None:
    """Raise `SnapshotError` if no signature can be stored."""
    if not (session.storage.capabilities.write and session.storage.capabilities.atomic_put):
        raise SnapshotError(f"{session.url}: this storage is read-only")


def expect_undamaged(session: Session, report: VerifyReport) -> None:
    """Raise `CorruptSnapshotError` if a verification found faults."""
    if not report.ok:
        raise CorruptSnapshotError(
            f"{session.url}: is damaged, so it was not signed: {'; '.join(report.faults)}", faults=report.faults
        )


async def _put(session: Session, storage: Storage, recorder: Recorder, signer: Signer) -> None:
    """Store the hashes and the signature. Raise if the snapshot was replaced meanwhile."""
    save_id, manifest, trees = recorder.recorded()
    await signer.put_leaves(storage, trees)
    roots = {location: root_of(tree) for location, tree in trees.items()}
    await signer.put_signature(storage, save_id, manifest, roots)
    if await committed_save_id(storage) != save_id:
        await storage.delete([signature_path(save_id), *join_leaves(trees)])
        raise SnapshotError(f"{session.url}: was replaced or deleted while it was signed; sign it again")
