"""The journal of a verification: a local file, from which an interrupted verification continues.

The first line names the verified snapshot; each further line names ranges that were verified. A line that a kill cut
off, and all lines after a damaged one, are ignored. The journal belongs to specific files. If one of them was changed
since, or its storage cannot tell, verification starts over.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from snapshot.decoding import decode_json
from snapshot.loading.stored_ranges import Place
from snapshot.system_calls import sync_file
from snapshot.tensors.digest import digest_range

Key = tuple[str, str, int, int]
"""A verified item: `range` or `sum`, a file, and the range in it."""
KIND = "snapshot verify"
DIGEST = "digest"
"""The digest at the end of each line, over the rest of it."""
PAUSE = 1.0
"""Seconds between two syncs. Ranges that a loss of power takes from the journal are verified again."""


class VerifyJournal:
    """The journal of one verification, open for appending."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._synced = time.monotonic()
        self.done: set[Key] = set()
        self.faults: list[str] = []
        """Faults that were found before."""
        self.without: set[Place] = set()
        """Archives without checksums."""
        self.before = 0
        """Bytes that were verified before."""

    @staticmethod
    def open(
        path: str | os.PathLike[str], url: str, save_id: str, held: Mapping[str, tuple[int, str | None]]
    ) -> VerifyJournal:
        """Open the journal at a path. Start an empty one if there is none, or if the snapshot has changed.

        Raise `ValueError` if the file is something else, or belongs to another snapshot. It is not overwritten.
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
        """Parse the lines. Return the number of bytes of valid lines."""
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
        """Record that these ranges were verified."""
        self._write({"done": done, "faults": list(faults), "without": sorted(without)})

    def _write(self, line: Any) -> None:
        self._file.write(json.dumps({**line, DIGEST: digest_range(json.dumps(line).encode())}).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > PAUSE:
            sync_file(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Sync and close the journal."""
        with self._file:
            sync_file(self._file.fileno())

    def remove(self) -> None:
        """Delete the journal after a verification without faults."""
        with suppress(FileNotFoundError):
            self._path.unlink()


def _read_line(line: bytes) -> dict[str, Any]:
    """Return the contents of a line. Raise `ValueError` if it does not match its digest."""
    noted: Any = decode_json(line, Any, "damaged")
    digest = noted.pop(DIGEST, None) if isinstance(noted, dict) else None
    if digest is None or digest != digest_range(json.dumps(noted).encode()):
        raise ValueError("damaged")
    return dict(noted)


def _read_journal(path: Path, lines: Sequence[bytes], url: str) -> Any:
    """Return the first line if it belongs to a verification of this URL, or None if there is none yet."""
    if not lines:
        return None
    start = json.dumps(KIND).encode()
    if not (lines[0].startswith(b"{" + start) or (b"{" + start).startswith(lines[0])):
        raise ValueError(f"{path}: must be the journal of a verification; choose another file")
    try:
        head = _read_line(lines[0])
    except ValueError:
        return None  # killed before its first line, or damaged
    if head.get("url") != url:
        raise ValueError(f"{path}: is the journal of {head.get('url')}; choose another file, or delete it")
    return head
