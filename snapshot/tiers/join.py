"""The beginning of a job with near folders: all ranks learn the run, its hosts, and the uploaders' addresses."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.peer_requests import host_of
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.tiers.control import Registration, UploaderError
from snapshot.tiers.hosts import Host, hosts_of, job_address
from snapshot.tiers.run_record import (
    RECORD,
    Attempt,
    RunRecord,
    decode_record,
    new_name,
    publish_record,
    read_record,
    store_record,
)
from snapshot.tiers.upload_queue import Upload
from snapshot.tiers.uploader_process import ensure_uploader, expect_own_folder
from snapshot.url import URL

T = TypeVar("T")
FAR_PATIENCE = 20.0
"""Seconds to wait for the far root at the beginning of a job, if there are near steps."""


@dataclass(frozen=True, kw_only=True)
class TierOptions:
    """A manager's arguments about tiers."""

    near: str
    far: URL
    options: dict[str, Any]
    """Storage options of the far root."""
    upload: Upload = "latest"
    replicas: int = 1
    rate: float | None = None
    compression: str | None = None


class Arrived(msgspec.Struct, array_like=True):
    """A rank's first message."""

    key: str
    name: str
    records: list[RunRecord]
    """The runs in this host's near folder that upload to the same far root."""
    fault: str
    """Why the near folder cannot be used, or ''."""


class Joined(msgspec.Struct, array_like=True):
    """The leader's first answer."""

    record: RunRecord
    attempt: Attempt
    hosts: list[Host]
    secret: str
    far_fault: str


class Ready(msgspec.Struct, array_like=True):
    """A rank's second message: the address of its host's uploader."""

    address: str
    fault: str


@dataclass
class Membership:
    """The job, as one rank knows it."""

    record: RunRecord
    attempt: Attempt
    hosts: list[Host]
    index: int
    """Position of this rank's host."""
    secret: str
    folder: str
    """The folder of the run on this host."""
    leads: bool
    """True if this is the lowest rank of its host."""
    fault: str
    """Why a host cannot use its near folder, or ''."""

    def registration(self, options: TierOptions) -> Registration:
        """Return what the uploader must know."""
        return Registration(
            record=self.record,
            attempt=self.attempt.name,
            far=options.far.reveal(),
            options=options.options,
            upload=options.upload,
            replicas=options.replicas,
            hosts=self.hosts,
            index=self.index,
            secret=self.secret,
            rate=options.rate,
            compression=options.compression,
        )


def join(exchange: Exchange, options: TierOptions) -> Membership:
    """Agree on the run and its hosts, and start or adopt this host's uploader. All ranks call it."""
    mine = _arrive(options)

    def lead(arrived: list[Arrived]) -> Joined:
        return _lead(arrived, options)

    joined = exchange.agree(mine, lead, Arrived, Joined)
    if joined.far_fault and exchange.rank == 0:
        log.warning("%s: cannot be reached, so uploads wait: %s", options.far, joined.far_fault)
    index = next(at for at, host in enumerate(joined.hosts) if exchange.rank in host.ranks)
    leads = exchange.rank == joined.hosts[index].ranks[0]
    joined.record.far = str(options.far)
    joined.record.published |= not joined.far_fault
    member = Membership(
        record=joined.record,
        attempt=joined.attempt,
        hosts=joined.hosts,
        index=index,
        secret=joined.secret,
        folder=f"{options.near}/{joined.record.run}",
        leads=leads,
        fault=mine.fault,
    )
    ready = _start(member) if leads and not mine.fault else Ready("", mine.fault)

    def gather(all_: list[Ready]) -> list[Ready]:
        return [all_[host.ranks[0]] for host in joined.hosts]

    found = exchange.agree(ready, gather, Ready, list[Ready])
    for host, each in zip(member.hosts, found, strict=True):
        host.address = each.address
    faults = [f"{host.name}: {each.fault}" for host, each in zip(member.hosts, found, strict=True) if each.fault]
    member.fault = "; ".join(faults[:3])
    return member


def _arrive(options: TierOptions) -> Arrived:
    """Create the near folder, and look for runs in it."""
    name = socket.gethostname()
    try:
        os.makedirs(options.near, mode=0o700, exist_ok=True)
        return Arrived(host_of(options.near), name, _records(options), "")
    except OSError as error:
        return Arrived(f"{name}:{options.near}", name, [], f"{options.near}: {error.strerror}")


def _records(options: TierOptions) -> list[RunRecord]:
    """Return the records of this host for the far root, the one that was used last first."""
    found = []
    for entry in os.scandir(options.near):
        path = f"{entry.path}/{RECORD}"
        with suppress(OSError, SnapshotError), open(path, "rb") as file:
            record = decode_record(file.read(), path)
            if record.run == entry.name and record.far == str(options.far):
                found.append((os.fstat(file.fileno()).st_mtime_ns, record))
    return [record for _, record in sorted(found, key=lambda each: -each[0])]


def _lead(arrived: Sequence[Arrived], options: TierOptions) -> Joined:
    """Find the run: by the record in the far root, else by those of the hosts, else it is a new one."""
    far, fault, deleted, copied = None, "", False, False
    session = Session(options.far, options.options)
    patience = FAR_PATIENCE if any(each.records for each in arrived) else 3 * FAR_PATIENCE
    try:
        try:
            found = run(limited(read_record(session.storage), patience))
            far = found[0] if found is not None and found[0].far in ("", str(options.far)) else None
            deleted = found is None
            copied = found is not None and far is None
        except StorageError as error:
            fault = str(error)
        except CorruptSnapshotError as error:
            log.warning("%s: it is written again from the copies of the hosts", error)
        newest = [each.records[0].run for each in arrived if each.records]
        if not fault and deleted:  # a published record that is missing now was deleted with the run
            newest = [each.records[0].run for each in arrived if each.records and not each.records[0].published]
        chosen = far.run if far is not None else max(newest, key=newest.count, default=new_name())
        if copied:  # the root is a copy of another one, whose run continues there
            log.warning("%s: has the record of a run in another place, so a new run begins", options.far)
            chosen = new_name()
        record = far if far is not None else RunRecord(chosen, far=str(options.far))
        for each in (record for host in arrived for record in host.records):
            if each.run == chosen:
                record = record.with_attempts(each.attempts)
        attempt = record.next_attempt(None)
        record = record.with_attempts([attempt])
        if not fault:
            try:
                if copied:
                    run(limited(session.storage.delete([RECORD]), patience))
                published = run(limited(publish_record(session.storage, record, attempt.name), patience))
                if published.run != record.run:  # another job began a moment ago
                    alone = RunRecord(published.run, [attempt])
                    published = run(limited(publish_record(session.storage, alone, attempt.name), patience))
                record = published
                attempt = next(each for each in record.attempts if each.name == attempt.name)
            except StorageError as error:
                fault = str(error)
    finally:
        run(session.close())
    hosts = hosts_of([(each.key, each.name) for each in arrived])
    return Joined(record, attempt, hosts, secrets.token_hex(16), fault)


async def limited(work: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """Await a request to the far root. Raise StorageError after some seconds."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise StorageError(f"the far root did not answer within {seconds} s") from error


def _start(member: Membership) -> Ready:
    """Start or adopt the uploader of this host."""
    try:
        os.makedirs(member.folder, mode=0o700, exist_ok=True)
        expect_own_folder(member.folder)
        store_record(member.folder, member.record)
        client, address = ensure_uploader(member.folder, job_address() if len(member.hosts) > 1 else None)
        client.close()
        return Ready(address, "")
    except (OSError, UploaderError) as error:
        return Ready("", f"{member.folder}: {error}")
