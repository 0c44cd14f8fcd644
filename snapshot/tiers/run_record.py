"""The record of a run: its id, and its attempts in order. It tells abandoned steps from those of the run's line.

Each restore begins an attempt. The steps of earlier attempts that are newer than the restored step are abandoned: a
host that returns with such a step must not publish it. The record is in the far root, and a copy in each near root.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.events import log
from snapshot.storage import ABSENT, ANYTHING, Expect, Storage

RECORD = ".run.json"
"""File in the far root, and in the folder of the run in a near root."""
KEY = "snapshot.tiers"
"""Key in a snapshot's metadata."""
KEPT = 1000
"""The newest attempts, which a record names."""
TRIES = 20
_RUN = re.compile(r"[0-9a-f]{12}")
"""Ids of runs, which are names of folders."""


class Attempt(msgspec.Struct, array_like=True, frozen=True):
    """A time of training without a restore."""

    number: int
    """One more than the highest number that its hosts knew."""
    name: str
    restored: int | None
    """The step that it began with; None if it began without a restore through the manager."""


class Origin(NamedTuple):
    """The origin of a step, as its metadata has it."""

    run: str
    number: int
    """Number of the attempt."""
    attempt: str
    order: int
    """Number of the take in its attempt."""
    replaces: bool = False
    """True if the take may replace another snapshot of the step."""


NO_ORIGIN = Origin("", 0, "", 0)


def origin_of(metadata: Mapping[str, Any]) -> Origin:
    """Return the origin of a step. It is empty if a manager without `near` took the step."""
    match metadata.get(KEY):
        case {
            "run": str(run),
            "number": int(number),
            "attempt": str(attempt),
            "order": int(order),
            "replaces": bool(replaces),
        }:
            return Origin(run, number, attempt, order, replaces)
    return NO_ORIGIN


class RunRecord(msgspec.Struct):
    """A run and its attempts, the newest last."""

    run: str
    attempts: list[Attempt] = []
    far: str = ""
    """The far root without secrets. A record elsewhere was copied with the root."""
    published: bool = False
    """True in the copy of a host if the record was in the far root. If it is missing there, the run was deleted."""

    def next_attempt(self, restored: int | None) -> Attempt:
        """Return a new attempt."""
        return Attempt(self.attempts[-1].number + 1 if self.attempts else 1, new_name(), restored)

    def _later(self, origin: Origin) -> list[Attempt]:
        """Return the attempts that began after that of a step."""
        for at, each in enumerate(self.attempts):
            if each.name == origin.attempt:
                return self.attempts[at + 1 :]
        return [each for each in self.attempts if each.number >= origin.number]

    def is_abandoned(self, step: int, origin: Origin) -> bool:
        """Return True if a later attempt of the step's run began with an older step."""
        if origin.run != self.run:
            return False
        return any(each.restored is not None and each.restored < step for each in self._later(origin))

    def age(self, origin: Origin) -> tuple[int, int, int]:
        """Return a value that is greater for a later take."""
        return -len(self._later(origin)), origin.number, origin.order

    def is_newer(self, one: Origin, other: Origin) -> bool:
        """Return True if a snapshot of a step replaces another one of the same step.

        A snapshot that is not of this run is replaced only on purpose.
        """
        if other.run != self.run:
            return one.replaces
        return self.age(one) > self.age(other)

    def with_attempts(self, others: Sequence[Attempt]) -> RunRecord:
        """Return a record that also has these attempts.

        An unknown one comes before those with its number: its hosts were alone when the others were recorded here.
        """
        known = {each.name for each in self.attempts}
        new = [each for each in others if each.name not in known]
        merged = sorted([*new, *self.attempts], key=lambda each: each.number)
        return RunRecord(self.run, merged[-KEPT:], self.far, self.published)


def new_name() -> str:
    """Return a name for a run or an attempt that no other has."""
    return secrets.token_hex(6)


def decode_record(data: bytes, where: object) -> RunRecord:
    """Return a record."""
    try:
        record = msgspec.json.decode(data, type=RunRecord)
    except msgspec.DecodeError as error:
        raise CorruptSnapshotError(f"{where}: not a record of a run: {error}") from error
    if not _RUN.fullmatch(record.run):
        raise CorruptSnapshotError(f"{where}: not a record of a run: its id is {record.run[:40]!r}")
    return record


def store_record(folder: str, record: RunRecord) -> None:
    """Store a host's copy of a record. A folder that is full or read-only keeps the old copy."""
    aside = f"{folder}/{RECORD}.{secrets.token_hex(4)}.tmp"
    try:
        with open(aside, "wb") as file:
            file.write(msgspec.json.encode(record))
        os.replace(aside, f"{folder}/{RECORD}")
    except OSError as error:
        log.warning("%s: the record of the run is not stored: %s", folder, error)
        with suppress(OSError):
            os.unlink(aside)


async def read_record(storage: Storage) -> tuple[RunRecord, str] | None:
    """Return the record in a root and its version token; None if there is none."""
    try:
        token = (await storage.stat(RECORD)).token
        return decode_record(await storage.get(RECORD, limit=1 << 20), storage.url.join(RECORD)), token
    except StorageNotFoundError:
        return None


async def publish_record(storage: Storage, mine: RunRecord, live: str = "") -> RunRecord:
    """Add a record's attempts to the one in a far root, and return the result. Another run's record is returned as is.

    `live`: the attempt of a trainer that runs now. If others were published while it could not reach the root, it comes
    after them. Several hosts may do this at once: each write expects what was read.
    """
    for _ in range(TRIES):
        try:
            found = await read_record(storage)
        except CorruptSnapshotError as error:
            log.warning("%s: it is written again from the copies of the hosts", error)
            found = RunRecord(mine.run), (await storage.stat(RECORD)).token
        if found is not None and found[0].run != mine.run:
            return found[0]
        merged = mine if found is None else found[0].with_attempts(_renumbered(mine.attempts, found[0], live))
        if found is not None and merged.attempts == found[0].attempts and found[0].far:
            return found[0]
        expect: Expect = ABSENT if found is None else found[1]
        try:
            stored = msgspec.json.encode(RunRecord(merged.run, merged.attempts, mine.far))
            await storage.put(RECORD, stored, expect=expect if storage.capabilities.conditional_put else ANYTHING)
        except StorageConflictError:
            continue
        return merged
    raise StorageConflictError(f"{storage.url.join(RECORD)}: changed {TRIES} times while it was read")


def _renumbered(attempts: Sequence[Attempt], far: RunRecord, live: str) -> list[Attempt]:
    """Return attempts, the live one with a number above all published ones, if it is not published yet."""
    known = {each.name for each in far.attempts}
    top = max((each.number for each in far.attempts), default=0)
    return [
        msgspec.structs.replace(each, number=max(each.number, top + 1))
        if each.name == live and live not in known
        else each
        for each in attempts
    ]
