"""Verification of the checksums in other libraries' archives, before their contents are used."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from snapshot.errors import CorruptSnapshotError
from snapshot.formats import zip_checksums
from snapshot.manifest.validate import Files
from snapshot.progress import unmetered
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.text import listed


def expect_archive_checksums(session: Session, stored: Iterable[Any], files: Files) -> None:
    """Raise if stored ranges, or others in the same archives, do not match the archives' checksums."""
    expect_sound_archives(session, zip_checksums.find_archives(stored, files).values())


def expect_sound_archives(session: Session, archives: Collection[zip_checksums.Range]) -> None:
    """Raise if the contents of archives do not match their checksums."""
    if not archives:
        return
    faults, _ = run(zip_checksums.find_faults(session.storage, session.budget, archives, unmetered))
    if faults:
        raise CorruptSnapshotError(f"{session.url}: {len(faults)} damaged:{listed(faults)}", faults=faults)
