"""Manifests of near steps from other hosts, for a host that was killed before it stored its copy."""

from __future__ import annotations

from collections.abc import Mapping

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.storage import ANYTHING, Context
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, decode_head
from snapshot.tiers.join import Membership
from snapshot.tiers.near_steps import NearFolder

Keepers = tuple[str, list[int]]
"""The save id of a step, and the hosts that have its manifest."""


def fetch_manifests(folder: NearFolder, member: Membership, manifests: Mapping[int, Keepers]) -> None:
    """Fetch the manifests of steps whose files are in a host's folder without one, or with that of an older save."""
    committed = folder.steps()
    for step, (save_id, keepers) in manifests.items():
        own = committed.get(step)
        if (own is not None and own.save_id == save_id) or not any(save_id in name for name in folder.files(step)):
            continue
        near = Session(URL("near", folder.step_path(step)), None)
        try:
            for host in keepers:
                data = read_manifest(member, step, host) if host != member.index else None
                if data is not None and decode_head(data, METADATA).save_id == save_id:
                    run(near.storage.put(METADATA, data, expect=ANYTHING))
                    break
        except SnapshotError as error:
            log.info("step-%s: %s", step, error)
        finally:
            run(near.close())


def read_manifest(member: Membership, step: int, host: int) -> bytes | None:
    """Return the manifest of a step from another host. None if that host offers nothing."""
    address = member.hosts[host].address
    if not address:
        return None
    storage = open_storage(URL.parse(f"peer://{address}/step-{step}"), {"secret": member.secret}, Context())
    try:
        return run(storage.get(METADATA))
    finally:
        run(storage.close())
