"""What a verification notes in a local file as it goes, so that one that was interrupted goes on where it was.

The first line says what it is of; each other line what was looked at next. A line that was cut off by a kill counts for
nothing, and nor does one that is not what was written, or what follows it. The notes are of the very files that were
looked at: if one of them was touched since, or its storage does not say, all begins anew.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from snapshot.load.stored_ranges import Place
from snapshot.tensors.digest import digest_range

Key = tuple[str, str, int, int]
"""What was looked at: `range` or `sum`, a file, and where in it."""
KIND = "snapshot verify"
DIGEST = "digest"
"""What each line ends with: that of the rest of it."""
PAUSE = 1.0
"""Seconds between two syncs: what a loss of power takes is looked at again."""


class VerifyJournal:
    """The notes of one verification, open to be added to."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._synced = time.monotonic()
        self.done: set[Key] = set()
        self.faults: list[str] = []
        """What was found to be damaged before."""
        self.without: set[Place] = set()
        """Archives without checksums."""
        self.before = 0
        """Bytes that were looked at before."""

    @staticmethod
    def open(
        path: str | os.PathLike[str], url: str, save_id: str, held: Mapping[str, tuple[int, str | None]]
    ) -> VerifyJournal:
        """Return the notes at a path; empty ones, where there are none yet, or where what they are of has changed.

        `ValueError` for a file that is something else, or of another snapshot's verification: it is not written over.
        """
        place = Path(path)
        head = {
            KIND: 2,
            "url": url,
            "save_id": save_id,
            "files": digest_range(json.dumps(held, sort_keys=True).encode()),
        }
        place.parent.mkdir(parents=True, exist_ok=True)
        file = open(place, "a+b")  # noqa: SIM115 - it stays open
        try:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            notes = VerifyJournal(place, file)
            if _read_journal(place, lines, url) == head and all(token for _, token in held.values()):
                kept = len(lines[0]) + notes._read(lines[1:])
                file.truncate(kept)
            else:
                file.truncate(0)
                notes._write(head)
        except BaseException:
            file.close()
            raise
        return notes

    def _read(self, lines: Sequence[bytes]) -> int:
        """Take what was noted; how many bytes of the lines are whole."""
        kept = 0
        for line in lines:
            try:
                noted = _read_line(line)
                keys = [(kind, location, begin, end) for kind, location, begin, end in noted["done"]]
                faults, without = list(noted["faults"]), {(where, begin, end) for where, begin, end in noted["without"]}
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n"):
                break
            self.done.update(keys)
            self.faults += faults
            self.without |= without
            kept += len(line)
        self.before = sum(end - begin for _, _, begin, end in self.done)
        return kept

    def add(self, done: Sequence[Key], faults: Sequence[str], without: Iterable[Place]) -> None:
        """All of this has been looked at."""
        self._write({"done": done, "faults": list(faults), "without": sorted(without)})

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps({**line, DIGEST: digest_range(json.dumps(line).encode())}).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > PAUSE:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Keep what was noted."""
        with self._file:
            os.fsync(self._file.fileno())

    def remove(self) -> None:
        """All is well: there is nothing to go on with."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def _read_line(line: bytes) -> dict[str, Any]:
    """Return what was noted in a line; `ValueError` where it is not what was written."""
    noted = json.loads(line)
    digest = noted.pop(DIGEST, None) if isinstance(noted, dict) else None
    if digest is None or digest != digest_range(json.dumps(noted).encode()):
        raise ValueError("damaged")
    return dict(noted)


def _read_journal(path: Path, lines: Sequence[bytes], url: str) -> Any:
    """Return the first line of notes, where they are of a verification of this URL; None where there is none yet."""
    if not lines:
        return None
    start = json.dumps(KIND).encode()
    if not (lines[0].startswith(b"{" + start) or (b"{" + start).startswith(lines[0])):
        raise ValueError(f"{path}: is no file in which a verification is noted; name another one")
    try:
        head = _read_line(lines[0])
    except ValueError:
        return None  # it was killed before it noted anything, or is damaged
    if head.get("url") != url:
        raise ValueError(f"{path}: is of the verification of {head.get('url')}; name another file, or remove it")
    return head
