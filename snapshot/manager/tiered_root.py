"""The steps of a run on all tiers: what a restore chooses from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from snapshot.aio import gather_limited
from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.manager.root import Root, StepFolders
from snapshot.manifest.head import ManifestHead
from snapshot.reports import RestoreReport
from snapshot.signing.seal import Seal
from snapshot.snapshot import Snapshot
from snapshot.storage import FileStat
from snapshot.tiers.census import CensusStep, HostView
from snapshot.tiers.far_packed import FarStorage
from snapshot.tiers.join import FAR_PATIENCE, limited
from snapshot.tiers.manifests import Keepers
from snapshot.tiers.run_record import NO_ORIGIN, Attempt, origin_of
from snapshot.tiers.sources import FAR, MOST_KEEPERS, NEAR, PEER, Place, StepSources, place_of
from snapshot.tiers.tier_set import TierSet
from snapshot.tiers.tombstones import is_buried
from snapshot.url import URL

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_views = msgspec.msgpack.Decoder(HostView)
_places = msgspec.msgpack.Decoder(Place)


class Ended(msgspec.Struct, array_like=True):
    """The end of a restore, as the leader tells all ranks."""

    attempt: Attempt
    attempts: list[Attempt]
    """The attempts before it, as far as the leader knows."""
    manifests: dict[int, Keepers]
    """The hosts that have the manifest of each near step."""


class TieredRoot(Root):
    """The far root and the near folders of all hosts, as one root."""

    signable = False

    def __init__(self, url: URL, options: Mapping[str, Any] | None, tiers: TierSet) -> None:
        super().__init__(url, options)
        self._tiers = tiers
        self._census: dict[int, CensusStep] = {}
        self._is_leader = False
        self._far_answers = True
        self.sources: StepSources | None = None
        """The places that the step was read from, which was restored last on this rank."""
        self._step = -1

    # Exchange

    def view(self) -> bytes:
        """Return what this host has: only the lowest rank of a host looks."""
        return msgspec.msgpack.encode(self._tiers.view()) if self._tiers.member.leads else b""

    def see(self, views: Sequence[bytes]) -> None:
        """Take the census. Later rounds have no views."""
        self._is_leader = True
        if any(views):
            seen = [_views.decode(view) if view else HostView("") for view in views]
            self._census = self._tiers.census(seen)

    def place(self, step: int) -> bytes:
        """Return where the files of a near step are."""
        found = self._census.get(step)
        if found is None:
            return b""
        return msgspec.msgpack.encode(place_of(found, far=self._far_answers))

    def end(self, step: int) -> bytes:
        """Name the attempt that begins."""
        tiers = self._tiers
        tiers.refresh_record(far=self._far_answers)
        # a host that could not show its steps may have a newer one, which must not be abandoned
        attempt = tiers.member.record.next_attempt(None if tiers.member.fault else step)
        return msgspec.msgpack.encode(Ended(attempt, tiers.member.record.attempts, self._manifests()))

    def _manifests(self) -> dict[int, Keepers]:
        return {step: (each.save_id, sorted(each.keepers)[:MOST_KEEPERS]) for step, each in self._census.items()}

    def ended(self, step: int | None, told: bytes) -> None:
        """Begin an attempt with the restored step."""
        if step is not None:
            ended = msgspec.msgpack.decode(told, type=Ended)
            self._tiers.began_attempt(ended.attempt, ended.attempts, ended.manifests)
            if self._is_leader and self._far_answers:
                self._tiers.publish()

    def snapshot_of(self, step: int, place: bytes, pg: ProcessGroup | None, *, allow_pickle: bool) -> Snapshot:
        """Return a step as this rank reads it."""
        self.close()
        if not place:
            return Snapshot(self.step_url(step).reveal(), pg, self.options, allow_pickle=allow_pickle)
        self.sources, self._step = self._tiers.sources(step, _places.decode(place)), step
        options = {"sources": self.sources}
        return Snapshot(self._tiers.url_of(step), pg, options, allow_pickle=allow_pickle)

    def add_sources(self, report: RestoreReport | None) -> RestoreReport | None:
        """Add the bytes of each tier to a report, and close the places."""
        if report is not None:
            counts = {NEAR: 0, PEER: 0, FAR: report.bytes_read} if self.sources is None else self.sources.counts
            report = replace(report, sources=counts)
        self.close()
        return report

    def close(self) -> None:
        """Close the places of a step, and replace its damaged near files."""
        sources, self.sources = self.sources, None
        if sources is not None:
            sources.close()
            try:
                self._tiers.heal(self._step, sorted(sources.damaged))
            except SnapshotError as error:
                log.warning("step-%s: is not healed: %s", self._step, error)

    # Steps

    async def folders(self) -> StepFolders:
        """Return the steps of the far root and the near ones: of each step the newer snapshot."""
        try:
            folders = await limited(super().folders(), FAR_PATIENCE if self._census else None)
        except StorageError as error:
            if not self._census:
                raise
            log.warning("%s: cannot be reached, so only near steps are considered: %s", self.url, error)
            folders, self._far_answers = StepFolders(), False
        await self._leave_out_abandoned(folders)
        if self._far_answers:
            await self._leave_out_removed(folders)
        for step, found in list(self._census.items()):
            far = folders.committed.get(step)
            head = await self._head(step, far) if far is not None else None
            if isinstance(head, ManifestHead) and head.save_id != found.save_id and not self._is_newer(found, head):
                del self._census[step]
            else:
                folders.committed[step] = FileStat(0, 0.0, f"near:{found.save_id}")
        folders.committed = dict(sorted(folders.committed.items()))
        return folders

    async def _leave_out_removed(self, folders: StepFolders) -> None:
        """Leave out near steps that were removed from the far root on purpose."""
        async with self.opened() as session:
            for step, found in list(self._census.items()):
                with suppress(StorageError):  # a root that cannot be read says nothing
                    if step not in folders.committed and await is_buried(session.storage, found.save_id):
                        log.info("step-%s: passed over: it was removed from %s", step, self.url)
                        del self._census[step]

    def _is_newer(self, near: CensusStep, far: ManifestHead) -> bool:
        return self._tiers.member.record.is_newer(near.origin, origin_of(far.metadata))

    async def _leave_out_abandoned(self, folders: StepFolders) -> None:
        """Leave out the newest far steps, as far as later attempts abandoned them."""
        record = self._tiers.member.record
        if not any(each.restored is not None for each in record.attempts):
            return
        for step in sorted(folders.committed, reverse=True):
            head = await self._head(step, folders.committed[step])
            origin = origin_of(head.metadata) if isinstance(head, ManifestHead) else NO_ORIGIN
            if not record.is_abandoned(step, origin):
                return
            log.info("%s: passed over: a later attempt began with an older step", self.step_url(step))
            del folders.committed[step]

    async def fault(self, step: int, seal: Seal | None = None) -> str | None:
        """Return why a step cannot be restored: for a near one, the files that no host has, nor the far root."""
        found = self._census.get(step)
        if found is None:
            return await super().fault(step, seal)
        missing = found.missing
        if not missing:
            return None
        left = sorted(missing) if not self._far_answers else await self._not_far(step, found, missing)
        return f"{', '.join(left[:3])}: on no host, nor uploaded ({len(left)} files)" if left else None

    async def _not_far(self, step: int, found: CensusStep, names: Sequence[str]) -> list[str]:
        async with self.opened(step) as session:
            far = FarStorage(session.storage)

            async def good(name: str) -> bool:
                try:
                    return (await far.stat(name)).size == found.sizes[name]
                except StorageNotFoundError:
                    return False

            answers = await gather_limited(names, good)
        return [name for name, is_good in zip(names, answers, strict=True) if not is_good]

    async def token(self, step: int) -> str | None:
        """Return the version token of a step."""
        found = self._census.get(step)
        return await super().token(step) if found is None else f"near:{found.save_id}"

    async def copies(self, step: int, seal: Seal | None = None) -> set[str]:
        """Return the physical files of a far step; near ones have replicas and the far root."""
        return set() if step in self._census else await super().copies(step, seal)

    async def is_replaceable(self, step: int) -> bool:
        """Return True if this library wrote the damaged step."""
        return step in self._census or await super().is_replaceable(step)
