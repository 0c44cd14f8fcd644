"""The steps of a run on all tiers: what a restore chooses from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from snapshot.decoding import decode_msgpack
from snapshot.errors import SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.session import Seal
from snapshot.io.storage import FileStat
from snapshot.io.url import URL
from snapshot.manager.root import Root, StepFolders
from snapshot.manifest.document import ManifestHead
from snapshot.reports import RestoreReport
from snapshot.snapshot import Snapshot
from snapshot.tiers.facts import is_buried, limited
from snapshot.tiers.far_upload import FarStorage
from snapshot.tiers.join import Begun, Keepers
from snapshot.tiers.near_steps import CensusStep, HostView
from snapshot.tiers.peers import FAR, MOST_KEEPERS, NEAR, PEER, Place, StepSources, place_of
from snapshot.tiers.tier_set import TierSet
from snapshot.tiers.timeline import NO_ORIGIN, Facts, Line, Origin, Parent, origin_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Ended(msgspec.Struct, array_like=True):
    """The end of a restore, as the leader tells all ranks."""

    begun: Begun
    manifests: dict[int, Keepers]
    """The hosts that have the manifest of each near step."""


class TieredRoot(Root):
    """The far root and the near folders of all hosts, as one root."""

    signable = False

    def __init__(
        self, url: URL, options: Mapping[str, Any] | None, tiers: TierSet, patience: float, *, offline: bool
    ) -> None:
        """`patience`: seconds to wait for the far root. `offline`: go on without it, if it cannot be read."""
        super().__init__(url, options)
        self._tiers = tiers
        self._patience = patience
        self._offline = offline
        self._views: list[HostView] = []
        self._census: dict[int, CensusStep] = {}
        self._far_answers = True
        self._of_run = tiers.member.line
        self._origins: dict[int, tuple[Origin, str]] = {}
        """The origin and the save id of each candidate."""
        self.sources: StepSources | None = None
        """The places that the step was read from, which was restored last on this rank."""
        self._step = -1

    # Exchange

    def view(self) -> bytes:
        """Return what this host has: only the lowest rank of a host looks."""
        return msgspec.msgpack.encode(self._tiers.view()) if self._tiers.member.leads else b""

    def see(self, views: Sequence[bytes]) -> None:
        """Read the facts, and take the census. Later rounds have no views."""
        if any(views):
            self._views = [decode_msgpack(view, HostView, "a host's steps") if view else HostView("") for view in views]
            self._read_facts()

    def _read_facts(self) -> None:
        """Read the facts of the far root, and find the near steps on the line.

        Raises:
            StorageError: The far root cannot be read, and the restore is not `offline`: it may have a newer line.
        """
        stepped = {each.origin[2] for view in self._views for each in view.steps if each.save_id}
        try:
            self._tiers.read_far(stepped, self._patience)
            self._far_answers = True
        except StorageError as error:
            if not self._offline:
                error.add_note("restore_latest(..., offline=True) restores the newest near step that is known")
                raise
            log.warning("%s: cannot be reached, so only near steps are considered: %s", self.url, error)
            self._tiers.member.facts = self._tiers.member.facts.without_vain(stepped)
            self._tiers.member.facts.expect_no_fork()
            self._far_answers = False
        facts = self._tiers.member.facts
        self._of_run = Line(facts, facts.last)
        self._census = self._tiers.census(self._views, self._of_run)

    def expect_all_known(self) -> None:
        """Raise StorageError if the far root was not read: it may have the files that no host has."""
        if not self._far_answers:
            some = f"a whole one of the steps {', '.join(map(str, self._census))}" if self._census else "a near step"
            raise StorageError(f"{self.url}: cannot be read, and no host has {some}; try again later")

    def place(self, step: int) -> bytes:
        """Return where the files of a near step are."""
        found = self._census.get(step)
        if found is None:
            return b""
        return msgspec.msgpack.encode(place_of(found, far=self._far_answers))

    def end(self, step: int) -> bytes | None:
        """Begin the attempt that continues with a step. None if the line has changed: the steps are chosen again."""

        def parent_of(facts: Facts) -> Parent | None:
            origin, save_id = self._origins.get(step, (NO_ORIGIN, ""))
            if facts.find(origin.attempt) is not None:
                return Parent(origin.attempt, step, save_id)
            return Parent(facts.last.name, step) if facts.last is not None else None

        begun = self._tiers.begin(parent_of, far=self._far_answers)
        if begun is None:
            self._read_facts()
            return None
        return msgspec.msgpack.encode(Ended(begun, self._manifests()))

    def _manifests(self) -> dict[int, Keepers]:
        return {step: (each.save_id, sorted(each.keepers)[:MOST_KEEPERS]) for step, each in self._census.items()}

    def ended(self, step: int | None, told: bytes) -> None:
        """Begin an attempt with the restored step."""
        if step is not None:
            ended: Ended = decode_msgpack(told, Ended, "the end of a restore")
            self._tiers.began(ended.begun, ended.manifests)

    def snapshot_of(self, step: int, place: bytes, pg: ProcessGroup | None, *, allow_pickle: bool) -> Snapshot:
        """Return a step as this rank reads it."""
        self.close()
        if not place:
            return Snapshot(self.step_url(step).reveal(), pg, self.options, allow_pickle=allow_pickle)
        self.sources, self._step = self._tiers.sources(step, decode_msgpack(place, Place, "a step's place")), step
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
        folders = StepFolders()
        if self._far_answers:
            try:
                folders = await limited(super().folders(), self._patience)
                await self._leave_out_removed(folders)
            except StorageError as error:
                if not self._offline:
                    raise
                log.warning("%s: cannot be reached, so only near steps are considered: %s", self.url, error)
                folders, self._far_answers = StepFolders(), False
        for step, found in list(self._census.items()):
            far = folders.committed.get(step)
            head = await self._head(step, far) if far is not None else None
            if isinstance(head, ManifestHead) and head.save_id != found.save_id and not self._is_newer(found, head):
                del self._census[step]
            else:
                folders.committed[step] = FileStat(0, 0.0, f"near:{found.save_id}")
        folders.committed = dict(sorted(folders.committed.items()))
        return folders

    async def line(self) -> Line:
        """Return the line that this restore follows."""
        return self._of_run

    async def counts(self, step: int, stat: FileStat) -> bool:
        """Return True if a step is on the line of the run."""
        found = self._census.get(step)
        if found is not None:
            self._origins[step] = found.origin, found.save_id
            return True
        head = await self._head(step, stat)
        if not isinstance(head, ManifestHead):
            return True  # damage is reported by the attempt to restore it
        self._origins[step] = origin_of(head.metadata), head.save_id
        return self._of_run.counts(step, head.save_id, origin_of(head.metadata))

    async def _leave_out_removed(self, folders: StepFolders) -> None:
        """Leave out near steps that were removed from the far root on purpose."""
        async with self.opened() as session:
            for step, found in list(self._census.items()):
                with suppress(StorageError):  # a root that cannot be read says nothing
                    if step not in folders.committed and await is_buried(session.storage, found.save_id):
                        log.info("step-%s: passed over: it was removed from %s", step, self.url)
                        del self._census[step]

    def _is_newer(self, near: CensusStep, far: ManifestHead) -> bool:
        return self._of_run.is_newer(near.step, (near.save_id, near.origin), (far.save_id, origin_of(far.metadata)))

    async def fault(self, step: int, seal: Seal | None = None) -> str | None:
        """Return why a step cannot be restored: for a near one, the files that no host has, nor the far root."""
        found = self._census.get(step)
        if found is None:
            return await super().fault(step, seal)
        missing = found.missing
        if not missing:
            return None
        left = sorted(missing) if not self._far_answers else await self._not_far(step, found, missing)
        far = "nor uploaded" if self._far_answers else f"and {self.url} cannot be read"
        return f"{', '.join(left[:3])}: on no host, {far} ({len(left)} files)" if left else None

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
        """Return True if a step that cannot be restored may be replaced.

        A near step may not if the far root was not read: it may be whole with its files, and the run may continue it.
        """
        return self._far_answers if step in self._census else await super().is_replaceable(step)
