"""Read all requested ranges, and raise if any fails verification."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot.errors import CorruptSnapshotError
from snapshot.loading.reader import Reader, ReadResult
from snapshot.loading.requests import ReadRequest
from snapshot.progress import Meter
from snapshot.runtime.accelerators import await_current_streams
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.text import listed


def fetch_requests(
    session: Session, requests: Sequence[ReadRequest], verify: bool, meter: Meter, touched: set[str] | None = None
) -> ReadResult:
    """Read ranges, and raise if any fails verification. `touched` collects the live tensors that are written."""
    touched = set() if touched is None else touched
    if not requests:
        return ReadResult(touched=touched)
    await_current_streams({request.device for request in requests})
    reader = Reader(
        session.storage, session.budget, verify=verify, wanted_part=session.settings.part_bytes, touched=touched
    )
    result = run(reader.read(requests, meter.wrote))
    raise_faults(session, result)
    return result


TOUCHED = "\nlive tensors that were written, and may hold wrong data now:"


def raise_faults(session: Session, result: ReadResult) -> None:
    """Raise if any range failed verification."""
    if result.faults:
        touched = sorted(result.touched)
        raise CorruptSnapshotError(
            f"{session.url}: {len(result.faults)} damaged:{listed(result.faults)}"
            + (f"{TOUCHED}{listed(touched)}" if touched else ""),
            faults=result.faults,
            touched=touched,
        )
