"""Replicas: a host fetches its partners' files, verifies every digest, and keeps them beside its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.io.loop import run
from snapshot.io.peers import STATUS
from snapshot.io.session import Session
from snapshot.io.storage import ABSENT
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, Document, decode_document
from snapshot.tiers.control import Registration, Status, decode_status, partners
from snapshot.tiers.far_upload import FarStorage
from snapshot.tiers.near_steps import PULLED, NearFolder, NearStep, copy_verified, describe_files, is_intact


class Replicas:
    """The replicas that one host keeps."""

    def __init__(self, folder: NearFolder) -> None:
        self._folder = folder
        self._registration: Registration | None = None
        self._known: dict[str, Status] = {}
        """The last status of each partner, by address."""

    def register(self, registration: Registration) -> None:
        """Serve another job: its hosts may have other addresses."""
        self._registration = registration
        self._known = {}

    def _partners(self) -> list[str]:
        given = self._registration
        if given is None:
            return []
        found = partners(given.index, len(given.hosts), given.replicas)
        return [given.hosts[each].address for each in found if given.hosts[each].address]

    def _session(self, address: str, step: int | None = None) -> Session:
        assert self._registration is not None
        below = "" if step is None else f"/step-{step}"
        return Session(URL.parse(f"peer://{address}{below}"), {"secret": self._registration.secret})

    def pulled(self, step: int, files: Collection[str]) -> list[str]:
        """Return the files of a step that are replicas."""
        try:
            with open(f"{self._folder.step_path(step)}/{PULLED}", encoding="ascii") as file:
                return sorted(set(file.read().split()).intersection(files))
        except OSError:
            return []

    def is_complete(self, step: int, here: Mapping[str, int]) -> bool:
        """Return True if the replicas that this host must keep of a step are `here`, as far as partners answered."""
        for address in self._partners():
            known = self._known.get(address)
            theirs = known.steps.get(step) if known is not None else None
            if theirs is None:
                return False
            if any(here.get(name) != size for name, size in _own(theirs.files, theirs.pulled).items()):
                return False
        return True

    def pull(self) -> int:
        """Fetch the partners' new files, the newest step first. Return the number of files."""
        count = 0
        for address in self._partners():
            session = self._session(address)
            try:
                status = decode_status(run(session.storage.get(STATUS, limit=1 << 28)))
            except SnapshotError as error:
                log.debug("%s", error)
                continue
            finally:
                run(session.close())
            self._known[address] = status
            oldest = min(self._folder.steps(), default=-1)
            for step in sorted((step for step in status.steps if step >= oldest), reverse=True):
                theirs = status.steps[step]
                here = self._folder.files(step)
                wanted = {
                    name
                    for name, size in _own(theirs.files, theirs.pulled).items()
                    if here.get(name) != size and theirs.save_id in name
                }
                if wanted:
                    count += self._pull_step(address, step, theirs.save_id, wanted)
        return count

    def _pull_step(self, address: str, step: int, save_id: str, wanted: set[str]) -> int:
        source = self._session(address, step)
        near = Session(URL("near", self._folder.step_path(step)), None, durable=False)
        try:
            document = self._manifest(source, near, step, save_id)
            if document is None:
                return 0
            wanted &= {*document.own_files, *(each.location for each in document.parts)}
            with open(f"{self._folder.step_path(step)}/{PULLED}", "a", encoding="ascii") as file:
                file.writelines(f"{name}\n" for name in sorted(wanted))
            parts = sorted(name for name in wanted if name.endswith(".json"))
            for some in (parts, sorted(wanted.difference(parts))):  # parts describe the other files
                if some:
                    files = run(describe_files(near if some is not parts else source, document, some))
                    run(copy_verified(source, near, files))
            if self._folder.steps().get(step) is None:  # it was removed meanwhile
                self._folder.remove(step, save_id)
                return 0
            emit("replicated", "upload", self._folder.step_path(step), step=step, files=len(wanted), source=address)
            return len(wanted)
        finally:
            run(source.close())
            run(near.close())

    def _manifest(self, source: Session, near: Session, step: int, save_id: str) -> Document | None:
        """Return the manifest of a partner's step, and keep it here. None if this host has another snapshot there."""
        own = self._folder.steps().get(step)
        if own is not None and own.save_id != save_id:
            return None
        data = run((near if own is not None else source).storage.get(METADATA))
        document = decode_document(data, source.url.join(METADATA))
        if document.save_id != save_id:
            return None
        if own is None:
            run(near.storage.put(METADATA, data, expect=ABSENT))
        return document


def _own(files: dict[str, int], pulled: Collection[str]) -> dict[str, int]:
    return {name: size for name, size in files.items() if name not in pulled}


def heal_step(folder: NearFolder, near: NearStep, files: Collection[str], given: Registration) -> set[str]:
    """Replace the damaged ones of a step's files by copies from other hosts or the far root.

    Return those that are damaged still.
    """
    name = f"step-{near.step}"
    others = [each.address for at, each in enumerate(given.hosts) if at != given.index and each.address]
    places = [Session(URL.parse(f"peer://{address}/{name}"), {"secret": given.secret}) for address in others]
    places.append(Session(URL.parse(given.far).join(name), given.options, wrap=FarStorage))
    try:
        return _heal_from(folder, near, files, places)
    finally:
        for each in places:
            run(each.close())


def _heal_from(folder: NearFolder, near: NearStep, files: Collection[str], places: Sequence[Session]) -> set[str]:
    path = folder.step_path(near.step)
    session = Session(URL("near", path), None)
    try:
        with open(f"{path}/{METADATA}", "rb") as file:
            document = decode_document(file.read(), f"{path}/{METADATA}")
        damaged = run(_find_damaged(session, document, files))
        for name in sorted(damaged):
            for place in places:
                with suppress(SnapshotError):
                    described = run(describe_files(place if name.endswith(".json") else session, document, [name]))
                    run(copy_verified(place, session, described))
                    emit("healed", "upload", f"{path}/{name}", step=near.step, source=str(place.url))
                    log.warning("%s/%s: was damaged, and is replaced by the copy at %s", path, name, place.url)
                    damaged = damaged - {name}
                    break
        return damaged
    finally:
        run(session.close())


async def _find_damaged(session: Session, document: Document, files: Collection[str]) -> set[str]:
    """Return the files that are missing, or whose bytes do not match their digests."""
    damaged = set()
    for name in sorted(files):
        try:
            for each in await describe_files(session, document, [name]):
                if not await is_intact(session.storage, each):
                    damaged.add(name)
        except SnapshotError:
            damaged.add(name)
    return damaged
