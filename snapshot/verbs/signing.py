"""Signing of a committed snapshot: every byte is read once, compared with its digest, and hashed."""

from __future__ import annotations

from dataclasses import replace

from snapshot.distributed.exchange import call_of
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.progress import Meter
from snapshot.reports import VerifyReport
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.save.cleanup import committed_save_id
from snapshot.signing.keys import Signer
from snapshot.signing.seal import Recorder
from snapshot.signing.statement import root_of
from snapshot.signing.tree import join_leaves, signature_path
from snapshot.signing.write import expect_signable, put_leaves, put_signature
from snapshot.storage import Storage
from snapshot.verbs.verification import verify_newest


def sign_files(session: Session, recorder: Recorder, signer: Signer, meter: Meter) -> VerifyReport:
    """Sign what is stored. The session must have the recorder as its seal.

    Raise `CorruptSnapshotError` if a byte does not match its digest: nothing is signed then.
    """
    storage = session.storage
    if not (storage.capabilities.write and storage.capabilities.atomic_put):
        raise SnapshotError(f"{session.url}: this storage is read-only")
    expect_signable(storage, signer, leads=True)
    with call_of("sign", None, ranks=False) as exchange:
        report = verify_newest(session, meter, exchange=exchange)
    if not report.ok:
        raise CorruptSnapshotError(
            f"{session.url}: is damaged, so it was not signed: {'; '.join(report.faults)}", faults=report.faults
        )
    run(_put(session, storage, recorder, signer))
    return replace(report, signer=str(signer))


async def _put(session: Session, storage: Storage, recorder: Recorder, signer: Signer) -> None:
    """Store the hashes and the signature. Raise if the snapshot was replaced meanwhile."""
    save_id, manifest, trees = recorder.recorded()
    await put_leaves(storage, trees)
    roots = {location: root_of(tree) for location, tree in trees.items()}
    await put_signature(storage, signer, save_id, manifest, roots)
    if await committed_save_id(storage) != save_id:
        await storage.delete([signature_path(save_id), *join_leaves(trees)])
        raise SnapshotError(f"{session.url}: was replaced or deleted while it was signed; sign it again")
