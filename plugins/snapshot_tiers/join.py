"""The beginning of a job with near folders: all ranks learn the run, its hosts, and the uploaders' addresses."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.errors import BucketNotFoundError, RunDeletedError, RunForkedError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING, Storage
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, decode_head
from snapshot.runs.facts import TRIES, read_facts
from snapshot.runs.timeline import (
    Attempt,
    Facts,
    FactsCopy,
    Parent,
    RolledBackError,
    RunLine,
    Settled,
    new_name,
    settle_run,
)
from snapshot_tiers.control import Host, Registration, Upload, UploaderError, hosts_of, job_address
from snapshot_tiers.facts import (
    find_left,
    limited,
    mark_used,
    mend_facts,
    publish,
    publish_if_writable,
    publish_pending,
    read_copies,
    store_copy,
)
from snapshot_tiers.near_steps import NearFolder
from snapshot_tiers.peers import open_peer
from snapshot_tiers.requests import host_of
from snapshot_tiers.uploader_process import ensure_uploader, expect_own_folder

FAR_PATIENCE = 20.0
"""Seconds to wait for the far root, if the caller gives no shorter time."""


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
    copies: list[FactsCopy]
    """The facts of the runs in this host's near folder that upload to the same far root."""
    fault: str
    """Why the near folder cannot be used, or ''."""


class Joined(msgspec.Struct, array_like=True):
    """The leader's first answer."""

    run: str
    facts: Facts
    birth: Attempt | None
    hosts: list[Host]
    secret: str
    far_fault: str


class JoinedAttempt(msgspec.Struct, array_like=True):
    """The leader's answer about the attempt that begins."""

    facts: Facts
    attempt: Attempt


class ServedHost(msgspec.Struct, array_like=True):
    """A rank's second message: the address of its host's uploader."""

    address: str
    fault: str


@dataclass
class Membership:
    """The job, as one rank knows it."""

    run: str
    facts: Facts
    attempt: Attempt | None
    """The attempt of this job; None until its first take, or the end of a restore."""
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
    far_fault: str = ""
    """Why the far root could not be read, or ''."""

    @property
    def line(self) -> RunLine:
        """The line of the run that this job continues: the published one, unless its attempt is not published."""
        attempt = self.attempt
        if attempt is None:
            return RunLine(self.facts, self.facts.last)
        return RunLine(self.facts, None if self.facts.has(attempt.name) else attempt)

    def registration(self, options: TierOptions) -> Registration:
        """Return what the uploader must know."""
        return Registration(
            run=self.run,
            facts=self.facts,
            attempt=self.attempt.name if self.attempt is not None else "",
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


def join(exchange: Exchange, options: TierOptions, patience: float, *, needs_far: bool) -> Membership:
    """Agree on the run and its hosts, and start or adopt this host's uploader. All ranks call it.

    Raises:
        StorageError: The far root cannot be read, and is needed.
        RunForkedError: The hosts have steps of an attempt that another one was published instead of, or have seen facts
            that the root lacks now.
    """
    mine = _arrive(options)

    def lead(arrived: list[Arrived]) -> Joined:
        return _lead(arrived, options, patience, needs_far=needs_far)

    joined = exchange.agree(mine, lead, Arrived, Joined)
    if joined.far_fault and exchange.rank == 0:
        log.warning("%s: cannot be reached, so uploads wait: %s", options.far, joined.far_fault)
    index = next(at for at, host in enumerate(joined.hosts) if exchange.rank in host.ranks)
    member = Membership(
        run=joined.run,
        facts=joined.facts,
        attempt=joined.birth,
        hosts=joined.hosts,
        index=index,
        secret=joined.secret,
        folder=f"{options.near}/{joined.run}",
        leads=exchange.rank == joined.hosts[index].ranks[0],
        fault=mine.fault,
        far_fault=joined.far_fault,
    )
    ready = _start(options.near, member) if member.leads and not mine.fault else ServedHost("", mine.fault)

    def gather(all_: list[ServedHost]) -> list[ServedHost]:
        return [all_[host.ranks[0]] for host in joined.hosts]

    found = exchange.agree(ready, gather, ServedHost, list[ServedHost])
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
        expect_own_folder(options.near)
        found = [each for each in read_copies(options.near) if each.far == str(options.far)]
        return Arrived(host_of(options.near), name, found, "")
    except OSError as error:
        return Arrived(f"{name}:{options.near}", name, [], f"{options.near}: {error.strerror}")


def _lead(arrived: Sequence[Arrived], options: TierOptions, patience: float, *, needs_far: bool) -> Joined:
    """Find the run: by the facts in the far root, else by those of the hosts, else it is a new one."""
    hosts = [each.copies for each in arrived]
    fault = ""
    try:
        with Session(options.far, options.options) as session:
            found = run(limited(_settle(session.storage, hosts, str(options.far)), patience))
    except StorageError as error:
        if needs_far or isinstance(error, BucketNotFoundError):  # a bucket that does not exist will not come back
            raise
        found, fault = settle_run(None, hosts, str(options.far)), str(error)
    named = hosts_of([(each.key, each.name) for each in arrived])
    return Joined(found.run or new_name(), found.facts, found.birth, named, secrets.token_hex(16), fault)


async def _settle(storage: Storage, hosts: Sequence[Sequence[FactsCopy]], far: str) -> Settled:
    """Find the run in a root that can be read. Publish what the hosts' jobs could not, and the birth of a new run.

    If the root cannot be written, nothing is published yet.
    """
    for again in range(TRIES):
        root = await mend_facts(storage, [copy for copies in hosts for copy in copies])
        found = settle_run(root, [await find_left(storage, root, copies) for copies in hosts], far)
        try:
            names = [each.name for each in found.facts.pending]
            facts = await publish_if_writable(storage, found.facts, names)
            if found.run:
                return Settled(found.run, facts)
            if facts.tip is not None:
                log.warning("%s: is a copy of another root, so a new run begins", storage.url)
            parent = Parent(facts.tip.name, None) if facts.tip is not None else None
            birth = facts.next_attempt(new_name(), parent, host=socket.gethostname(), far=far)
            try:
                return Settled(birth.run, await publish(storage, facts, birth), birth)
            except StorageError as error:
                log.warning("%s: cannot be written, so attempts and uploads wait: %s", storage.url, error)
                return Settled(birth.run, facts.with_pending([birth]), birth)
        except (RunForkedError, RunDeletedError):  # another job began a moment ago
            if again + 1 == TRIES:
                raise
    raise AssertionError


def begin_attempt(
    options: TierOptions,
    member: Membership,
    parent_of: Callable[[Facts], Parent | None],
    patience: float,
    *,
    far: bool = True,
) -> JoinedAttempt | None:
    """Begin an attempt of this job, which has no takes yet, and publish it. Called on the leader.

    Return None if another attempt was published meanwhile: read the facts again, and choose the parent again. If the
    far root cannot be reached, the uploader publishes the attempt later. `far`: False if it has just failed to answer.
    """
    facts = member.facts
    attempt = facts.next_attempt(member.run, parent_of(facts), host=socket.gethostname(), far=str(options.far))
    pending = JoinedAttempt(facts.with_pending([attempt]), attempt)
    if not far:
        return pending
    with Session(options.far, options.options) as session:
        try:
            root = run(limited(read_facts(session.storage), patience))
            root.expect_no_rollback([FactsCopy(member.run, facts)], options.far)
            if root.lacks(facts):
                raise RunDeletedError(f"{options.far}: the run was deleted there; begin a new one in a new process")
            united = root.with_pending(pending.facts.pending)
            return JoinedAttempt(
                run(limited(publish_pending(session.storage, united, [attempt.name]), patience)), attempt
            )
        except RolledBackError:
            raise
        except RunForkedError:
            found = run(limited(read_facts(session.storage), patience))
            if any(each.name != attempt.name for each in facts.pending):
                raise  # this job, or the one before it, has made takes
            member.facts = found
            return None
        except StorageError as error:
            log.warning("%s: cannot be reached: %s", options.far, error)
            return pending


def _start(near: str, member: Membership) -> ServedHost:
    """Start or adopt the uploader of this host."""
    try:
        os.makedirs(member.folder, mode=0o700, exist_ok=True)
        expect_own_folder(member.folder)
        store_copy(member.folder, member.facts)
        mark_used(near, member.run)
        client, address = ensure_uploader(member.folder, job_address() if len(member.hosts) > 1 else None)
        client.close()
        return ServedHost(address, "")
    except (OSError, UploaderError) as error:
        return ServedHost("", f"{member.folder}: {error}")


Keepers = tuple[str, list[int]]
"""The save id of a step, and the hosts that have its manifest."""


def fetch_manifests(folder: NearFolder, member: Membership, manifests: Mapping[int, Keepers]) -> None:
    """Fetch the manifests of steps whose files are in a host's folder without one, or with that of an older save."""
    committed = folder.steps()
    for step, (save_id, keepers) in manifests.items():
        own = committed.get(step)
        if (own is not None and own.save_id == save_id) or not any(save_id in name for name in folder.files(step)):
            continue
        try:
            for host in keepers:
                data = read_manifest(member, step, host) if host != member.index else None
                if data is not None and decode_head(data, METADATA).save_id == save_id:
                    with Session(URL("near", folder.step_path(step)), None) as near:
                        run(near.storage.put(METADATA, data, expect=ANYTHING))
                    break
        except SnapshotError as error:
            log.info("step-%s: %s", step, error)


def read_manifest(member: Membership, step: int, host: int) -> bytes | None:
    """Return the manifest of a step from another host. None if that host offers nothing."""
    address = member.hosts[host].address
    if not address:
        return None
    with open_peer(address, member.secret, step) as session:
        return run(session.storage.get(METADATA))
