"""The facts of a run: how they are read, stored and published, and the tombstones of deleted snapshots."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from snapshot.errors import (
    CorruptSnapshotError,
    RunDeletedError,
    RunForkedError,
    SnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.io.storage import ABSENT, ANYTHING, Storage
from snapshot.io.system import store_file
from snapshot.manifest.document import METADATA, NotOurs, decode_head
from snapshot.runs.facts import _FACT, FOLDER, LONGEST, RECORD, STEP, _list_numbers, path_of, read_facts
from snapshot.runs.timeline import (
    Attempt,
    Facts,
    FactsCopy,
    Parent,
    attempt_of,
    decode_attempt,
    decode_facts,
    decode_record,
    encode_attempt,
    encode_facts,
    forked_error,
    new_name,
    origin_of,
)
from snapshot_tiers.near_steps import NearFolder

T = TypeVar("T")
KEPT = 16
"""Files of facts in a far root. Each has all earlier facts, so older files are deleted."""
_ATTEMPT = re.compile(r"[0-9a-f]{12}\.json")
_USED = re.compile(r"used-([0-9]{1,18})")


async def limited(work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Await a request to the far root. Raise StorageError after some seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise StorageError(f"the far root did not answer within {seconds} s") from error


# The far root


async def mend_facts(storage: Storage, copies: Sequence[FactsCopy]) -> Facts:
    """Return the published facts. Replace a damaged file by the copy of a host, or raise CorruptSnapshotError."""
    try:
        return await read_facts(storage)
    except CorruptSnapshotError as error:
        number = max(await _list_numbers(storage), default=0)
        path = path_of(number) if number else RECORD
        lines = (await storage.get(path, limit=LONGEST)).splitlines()
        before = await _read_before(storage, number)
        copy = next((each.facts for each in copies if _fits(each.facts, number, lines, before)), None)
        if copy is None:
            raise CorruptSnapshotError(
                f"{error}; no host has a copy, so delete the file to continue from the attempt before it"
            ) from error
        log.warning("%s: it is written again from the copy of a host", error)
        await storage.put(path_of(copy.number), encode_facts(copy), expect=ANYTHING)
        return copy


async def _read_before(storage: Storage, number: int) -> Facts | None:
    """Return the facts in the file before a damaged one."""
    with suppress(CorruptSnapshotError, StorageNotFoundError):
        path = path_of(number - 1)
        return decode_facts(await storage.get(path, limit=LONGEST), storage.url.join(path))
    return None


def _fits(copy: Facts, number: int, lines: Sequence[bytes], before: Facts | None) -> bool:
    """Return True if a copy has the facts of a damaged file, not those of a run that was deleted in the same root.

    The file's text or its digest is undamaged, or the file before it has the same attempts.
    """
    if not copy.published or copy.number != number:
        return False
    known = encode_facts(copy).splitlines()
    same = len(lines) == len(known) and any(one == other for one, other in zip(known, lines, strict=True))
    return same or (before is not None and before.tip is not None and copy.has(before.tip.name))


async def publish(storage: Storage, known: Facts, *attempts: Attempt) -> Facts:
    """Publish attempts as the next fact after those that were just read, and return the facts.

    Without attempts, only use up a number. Without conditional puts, only one job at a time may write to a root.

    Raises:
        RunForkedError: Another attempt was published first. The attempts are not published.
        RunDeletedError: The root was deleted meanwhile.
    """
    made = known.with_published(*attempts)
    path, data = path_of(made.number), encode_facts(made)
    if storage.capabilities.conditional_put:
        with suppress(StorageConflictError):  # or an earlier try has put it, and its answer was lost
            await storage.put(path, data, expect=ABSENT)
    else:
        log.warning("%s: has no conditional writes, so only one job at a time may write there", storage.url)
        if made.number not in await _list_numbers(storage):
            await storage.put(path, data, expect=ANYTHING)
    found = await read_facts(storage)
    for each in attempts:
        if not found.has(each.name):  # also if an old number was free, since its file was deleted
            raise forked_error(each, found.tip)
    numbers = await _list_numbers(storage)
    if known.number and numbers == [made.number]:
        await _expect_record(storage, path)
    await storage.delete([path_of(each) for each in numbers if each <= found.number - KEPT])
    return found.with_pending(made.pending)


async def _expect_record(storage: Storage, path: str) -> None:
    """Withdraw a fact and raise RunDeletedError, unless the facts before it are in a record of an earlier version."""
    try:
        await storage.stat(RECORD)
    except StorageNotFoundError as error:
        await storage.delete([path])
        raise RunDeletedError(f"{storage.url}: the run was deleted there") from error


async def find_left(storage: Storage, root: Facts, copies: Sequence[FactsCopy]) -> list[FactsCopy]:
    """Return the copies of hosts. Mark those of runs that have steps in a root that lost its facts."""
    if root.published or not any(each.facts.published for each in copies):
        return list(copies)
    names = list[str]()
    with suppress(StorageNotFoundError):
        names = await storage.list("", recursive=False)
    steps = sorted((int(found[1]) for name in names if (found := STEP.fullmatch(name.rstrip("/")))), reverse=True)
    runs = set[str]()
    for step in steps:
        with suppress(StorageNotFoundError, CorruptSnapshotError, NotOurs):
            path = f"step-{step}/{METADATA}"
            head = decode_head(await storage.get(path), storage.url.join(path))
            runs.add(origin_of(head.metadata).run)
        if runs.issuperset(each.run for each in copies):
            break
    return [each._replace(left=each.run in runs) for each in copies]


async def publish_pending(storage: Storage, facts: Facts, names: Collection[str]) -> Facts:
    """Publish the pending attempts with these names, and their pending ancestors. `facts`: the root's, just read.

    Return the facts. Raise RunForkedError at the first attempt that did not see what is published.
    """
    for each in facts.with_ancestors(names):
        while facts.number + 1 < each.number:  # what it saw was never published: no other may take that number
            facts = await publish(storage, facts)
        if not facts.has(each.name):
            descends = facts.has(each.parent.attempt) if each.parent is not None else not facts.published
            if each.number <= facts.number or not descends:
                raise forked_error(each, facts.tip)
            facts = await publish(storage, facts, each)
    return facts


async def publish_if_writable(storage: Storage, facts: Facts, names: Collection[str]) -> Facts:
    """As `publish_pending`. In a root that can be read and not written, the attempts stay pending."""
    try:
        return await publish_pending(storage, facts, names)
    except StorageError as error:
        log.warning("%s: cannot be written, so attempts and uploads wait: %s", storage.url, error)
        waiting = Facts(facts.number, facts.published).with_pending(facts.with_ancestors(names))
        waiting.expect_no_fork()
        return waiting


async def sync_facts(storage: Storage, copy: Facts, names: Collection[str]) -> tuple[Facts, RunForkedError | None]:
    """Read the root, and publish the pending attempts with these names. Return the facts, and the fork if there is one.

    Raises:
        RunDeletedError: The root lacks what was published before.
        RolledBackError: It has only a part of that.
    """
    root = await read_facts(storage)
    root.expect_no_rollback([FactsCopy("", copy)], storage.url)
    if root.lacks(copy):
        raise RunDeletedError(f"{storage.url}: the run was deleted there, so nothing is uploaded to it")
    try:
        return (await publish_pending(storage, root.with_pending(copy.pending), names)).with_pending(copy.pending), None
    except RunForkedError as error:
        return (await read_facts(storage)).with_pending(copy.pending), error


async def choose_attempt(storage: Storage, copies: Sequence[FactsCopy], name: str, host: str, far: str) -> Facts:
    """Publish the choice of a person: the line of the run continues one attempt, and leaves all pending other ones.

    If the root was rolled back, it has all that the hosts have seen published afterwards.
    """
    root = await mend_facts(storage, copies)
    copies = await find_left(storage, root, copies)
    lost = [each.facts.number for each in copies if root.was_rolled_back(each)]
    while root.number < max(lost, default=0):  # a number that a host knows must not get another meaning
        root = await publish(storage, Facts(root.number, root.published))
    united = root.with_copies(copies)
    chosen = united.find(name)
    if chosen is None:
        known = ", ".join(each.name for each in (*united.published, *united.pending))
        raise SnapshotError(f"{storage.url}: the chosen attempt must be one of {known or 'none'}, got {name}")
    choice = Attempt(new_name(), chosen.run, root.number + 1, Parent(name, None), host, far)
    return await publish(storage, Facts(root.number, root.published), *united.pending, choice)


# Copies on hosts


def read_copy(folder: str) -> Facts:
    """Return the facts in the folder of a run. Damaged files are passed over: other hosts have copies."""
    facts = Facts()
    try:
        names = sorted(os.listdir(f"{folder}/{FOLDER}"))
    except OSError:
        names = []
    found = list[Attempt]()
    for name in names:
        path = f"{folder}/{FOLDER}/{name}"
        try:
            if _FACT.fullmatch(name):
                facts = facts.unite(decode_facts(_read(path), path))
            elif _ATTEMPT.fullmatch(name):
                found.append(decode_attempt(_read(path), path))
        except (OSError, SnapshotError) as error:
            log.warning("%s: passed over: %s", path, error)
    facts = facts.with_pending(found)
    if facts.last is None:
        path = f"{folder}/{RECORD}"
        with suppress(OSError, SnapshotError):
            facts = decode_record(_read(path), path)
    return facts


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def store_copy(folder: str, facts: Facts) -> None:
    """Add facts to those in the folder of a run. A folder that is full or read-only stays as it is."""
    try:
        os.makedirs(f"{folder}/{FOLDER}", mode=0o700, exist_ok=True)
        for name, data in _files_of(facts):
            path = f"{folder}/{FOLDER}/{name}"
            if not os.path.exists(path) or _read(path) != data:
                store_file(path, data, durable=True)
        _remove_old_copies(folder, facts)
    except OSError as error:
        log.warning("%s: the facts of the run are not stored: %s", folder, error)


def _files_of(facts: Facts) -> Iterator[tuple[str, bytes]]:
    if facts.published:
        yield path_of(facts.number).rpartition("/")[2], encode_facts(facts)
    for each in facts.pending:
        yield f"{each.name}.json", encode_attempt(each)


def _remove_old_copies(folder: str, facts: Facts) -> None:
    """Remove copies that a later one repeats."""
    numbers = sorted(int(found[1]) for found in map(_FACT.fullmatch, os.listdir(f"{folder}/{FOLDER}")) if found)
    for number in numbers[:-2]:
        os.unlink(f"{folder}/{path_of(number)}")
    if numbers and numbers[-1] == facts.number:
        for each in facts.published:
            with suppress(FileNotFoundError):
                os.unlink(f"{folder}/{FOLDER}/{each.name}.json")


def mark_used(near: str, run: str) -> None:
    """Record that a run is the one that was used last in a near root."""
    folder = f"{near}/{run}/{FOLDER}"
    last = max((_used_in(entry.path) for entry in os.scandir(near)), default=0)
    with suppress(OSError):
        old = [name for name in os.listdir(folder) if _USED.fullmatch(name)]
        with open(f"{folder}/used-{last + 1}", "wb"):
            pass
        for name in old:
            os.unlink(f"{folder}/{name}")


def _used_in(folder: str) -> int:
    try:
        found = map(_USED.fullmatch, os.listdir(f"{folder}/{FOLDER}"))
        return max((int(each[1]) for each in found if each), default=0)
    except OSError:
        return 0


def read_copies(near: str) -> list[FactsCopy]:
    """Return the facts of all runs in a near root."""
    found = [copy_in(entry.path) for entry in os.scandir(near) if entry.is_dir(follow_symlinks=False)]
    return [each for each in found if any(at.run == each.run for at in (*each.facts.published, *each.facts.pending))]


def copy_in(folder: str) -> FactsCopy:
    """Return the facts in the folder of a run. Those that are damaged there are read from the steps."""
    facts, name = read_copy(folder), os.path.basename(folder)
    steps = NearFolder(folder).steps_of(name).values()
    took = {each.name: each for step in steps if (each := attempt_of(step.head.metadata)) is not None}
    return FactsCopy(
        name,
        facts.with_pending(each for each in took.values() if facts.find(each.name) is None),
        frozenset(step.origin.attempt for step in steps),
        _used_in(folder),
    )
