"""Near steps: the folder of a run on a host, the census of all hosts' steps, and reads of their files."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.io.aio import gather_limited
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.loading.open import add_layers, read_parts
from snapshot.manifest.document import (
    METADATA,
    NEWEST_FORMAT,
    Document,
    ManifestHead,
    PartEntry,
    decode_head,
)
from snapshot.manifest.parts import ManifestPart
from snapshot.plan.layout import FilePlan
from snapshot.progress import unmetered
from snapshot.runs.facts import PINNED, STEP
from snapshot.runs.timeline import NO_ORIGIN, Origin, RunLine, Standing, origin_of
from snapshot.save.compression import Packing
from snapshot.save.findings import suspicions
from snapshot.save.transaction import belongs_to, save_id_of
from snapshot.save.writer import Writer
from snapshot.tensors.digest import RunningDigest
from snapshot.transform.sources import (
    CheckedRange,
    CopiedFile,
    PlainDigest,
    checked_files,
    copy_files_through,
)

PULLED = ".pulled"
"""File in a step's folder that names the replicas in it. Only a hint: without it, more is replicated or uploaded."""
FRESH = 300.0
"""Seconds after which files without a manifest count as left behind."""
_FORMAT = re.compile(rb'\{"format":"snapshot/([1-9][0-9]{0,3})"')


class NearStep(NamedTuple):
    """A committed step in a host's folder."""

    step: int
    head: ManifestHead
    origin: Origin

    @property
    def save_id(self) -> str:
        return self.head.save_id

    @property
    def suspect(self) -> tuple[str, ...]:
        """The findings of the guards in it."""
        return suspicions(self.head.metadata)


class NearFolder:
    """The folder of a run on this host."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._heads: dict[int, tuple[tuple[int, int, int], ManifestHead | None]] = {}

    def step_path(self, step: int) -> str:
        return f"{self.path}/step-{step}"

    def steps(self) -> dict[int, NearStep]:
        """Return the committed steps, ascending. One whose manifest is damaged is passed over."""
        found = {}
        folders = sorted(self.folders())
        for gone in self._heads.keys() - set(folders):
            self._heads.pop(gone, None)
        for step in folders:
            head = self._head(step)
            if head is not None:
                found[step] = NearStep(step, head, origin_of(head.metadata))
        return found

    def steps_of(self, run: str) -> dict[int, NearStep]:
        """Return the committed steps of a run, ascending."""
        return {step: each for step, each in self.steps().items() if each.origin.run == run}

    def folders(self) -> list[int]:
        """Return the steps that have a folder."""
        try:
            names = os.listdir(self.path)
        except OSError:
            return []
        return [int(match[1]) for match in map(STEP.fullmatch, names) if match]

    def _head(self, step: int) -> ManifestHead | None:
        path = f"{self.step_path(step)}/{METADATA}"
        try:
            seen = os.stat(path)
            identity = (seen.st_ino, seen.st_size, seen.st_mtime_ns)
            known = self._heads.get(step)
            if known is not None and known[0] == identity:
                return known[1]
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            self._heads.pop(step, None)
            return None
        try:
            head: ManifestHead | None = decode_head(data, path)
        except SnapshotError as error:
            log.warning("%s", error)
            head = None
        self._heads[step] = identity, head
        return head

    def files(self, step: int) -> dict[str, int]:
        """Return the data files in a step's folder, with their sizes."""
        found = {}
        with suppress(OSError), os.scandir(f"{self.step_path(step)}/data") as entries:
            for entry in entries:
                name = f"data/{entry.name}"
                if save_id_of(name) is not None:
                    with suppress(OSError):
                        found[name] = entry.stat(follow_symlinks=False).st_size
        return found

    def physical_sizes(self, near: NearStep) -> dict[str, int]:
        """Return the bytes of each physical file of a step that is here, as `ManifestHead.physical_sizes` names it."""
        origins = {name: each.origin or name for name, each in near.head.files.items()}
        found = {origins.get(name, name): size for name, size in self.files(near.step).items()}
        with suppress(OSError):
            found[f"step-{near.step}/{METADATA}"] = os.stat(f"{self.step_path(near.step)}/{METADATA}").st_size
        return found

    def is_whole(self, near: NearStep) -> bool:
        """Return True if all files of a committed step are here."""
        files = self.files(near.step)
        return all(files.get(name) == size for name, size in near.head.sizes().items())

    def remove(self, step: int, save_id: str) -> None:
        """Remove a snapshot of a step, the manifest first, but no file of another save."""
        folder = self.step_path(step)
        head = self._head(step)
        if head is not None and head.save_id == save_id:
            _unlink(f"{folder}/{METADATA}")
        for name in self.files(step):
            if belongs_to(name, save_id, None):
                _unlink(f"{folder}/{name}")
        with suppress(OSError):
            for name in os.listdir(f"{folder}/data"):
                if save_id in name and name.endswith(".aside"):
                    _unlink(f"{folder}/data/{name}")
            os.rmdir(f"{folder}/data")
            for name in (PULLED, PINNED):
                _unlink(f"{folder}/{name}")
        with suppress(OSError):
            os.rmdir(folder)

    def remove_leftovers(self, upto: int, spared: Callable[[int], bool]) -> None:
        """Remove files of steps before `upto` that have no manifest: of interrupted takes, and late replicas.

        Those that changed a moment ago may belong to a take of another job, whose claim is on another host.
        """
        for step in self.folders():
            folder = self.step_path(step)
            if step >= upto or spared(step) or os.path.exists(f"{folder}/{METADATA}"):
                continue
            with suppress(OSError):
                found = [*os.listdir(folder), *(f"data/{name}" for name in os.listdir(f"{folder}/data"))]
                names = [name for name in found if save_id_of(name) is not None]
                if all(os.stat(f"{folder}/{name}").st_mtime < time.time() - FRESH for name in names):
                    for save_id in {save_id_of(name) or "" for name in names}:
                        self.remove(step, save_id)
                    for name in names:  # claims
                        _unlink(f"{folder}/{name}")
            with suppress(OSError):
                os.rmdir(folder)

    def damaged(self) -> list[int]:
        """Return the steps whose manifest is damaged, so that no upload can use them."""
        found = [step for step in self.folders() if self._head(step) is None and step in self._heads]
        return [step for step in found if not self._is_of_later_version(step)]

    def _is_of_later_version(self, step: int) -> bool:
        try:
            with open(f"{self.step_path(step)}/{METADATA}", "rb") as file:
                match = _FORMAT.match(file.read(100))
        except OSError:
            return True
        return match is not None and int(match[1]) > int(NEWEST_FORMAT.rpartition("/")[2])

    def is_pinned(self, step: int) -> bool:
        return os.path.exists(f"{self.step_path(step)}/{PINNED}")

    def remove_damaged(self, step: int, why: str) -> None:
        """Remove a step whose manifest is damaged, unless it is pinned."""
        if step in self.damaged() and not self.is_pinned(step):
            log.warning("step-%s: removed: its manifest is damaged, and %s", step, why)
            _unlink(f"{self.step_path(step)}/{METADATA}")
            for save_id in {"", *(save_id_of(name) or "" for name in self.files(step))}:
                self.remove(step, save_id)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


class StepView(msgspec.Struct, array_like=True):
    """A step in the folder of one host."""

    step: int
    save_id: str
    """The snapshot whose manifest is here; empty if there is none."""
    origin: tuple[str, int, str, int, bool]
    files: dict[str, int]
    """The data files that are here."""
    suspect: tuple[str, ...] = ()
    """The findings of the guards in it."""


class HostView(msgspec.Struct, array_like=True):
    """The steps of one host."""

    key: str
    steps: list[StepView] = []


def view_of(folder: NearFolder, key: str) -> HostView:
    """Return the view of a host's folder."""
    committed, views = folder.steps(), []
    for step in sorted(folder.folders()):
        found = committed.get(step)
        files = folder.files(step)
        if found is not None:
            views.append(StepView(step, found.save_id, (*found.origin,), files, found.suspect))
        elif files:
            views.append(StepView(step, "", (*NO_ORIGIN,), files))
    return HostView(key, views)


@dataclass
class CensusStep:
    """A snapshot of a step, with the hosts that have its files."""

    step: int
    save_id: str
    origin: Origin
    keepers: set[int] = field(default_factory=set)
    """Hosts that have the manifest, by their positions."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The files that the snapshot must have, by its manifest."""
    holders: dict[str, list[int]] = field(default_factory=dict)
    """Hosts that have each file with its right size."""
    suspect: tuple[str, ...] = ()
    """The findings of the guards in it."""

    @property
    def missing(self) -> list[str]:
        """The files that no host has."""
        return [name for name in self.sizes if not self.holders.get(name)]

    @property
    def replicas(self) -> int:
        """The number of further hosts that have each file: the lowest one. -1 if a file is missing."""
        return min((len(self.holders.get(name, ())) for name in self.sizes), default=1) - 1


def take_census(
    views: Sequence[HostView], line: RunLine, sizes_of: Callable[[CensusStep], dict[str, int]], *, good: bool = True
) -> list[CensusStep]:
    """Return the snapshots on the line of a run, with the holders of their files.

    There is one for each step: the newest. With `good`, it is the newest that is not suspect, if there is one.
    `sizes_of` reads the manifest of one; it is empty if no host can read it.

    >>> a = HostView("a", [StepView(1, "s", ("r", 1, "t", 1, False), {"x": 1})])
    >>> b = HostView("b", [StepView(1, "", ("", 0, "", 0, False), {"x": 1, "y": 2})])
    >>> from snapshot.runs.timeline import Attempt, Facts
    >>> line = RunLine(Facts(1, (Attempt("t", "r", 1),)))
    >>> [found] = take_census([a, b], line, lambda step: {"x": 1, "y": 2})
    >>> found.step, found.missing, found.replicas
    (1, [], 0)
    """
    best: dict[int, CensusStep] = {}

    def rank(origin: Origin, suspect: Sequence[str]) -> tuple[bool, tuple[int, int]]:
        return not (good and suspect), line.age(origin)

    for at, view in enumerate(views):
        for each in view.steps:
            origin = Origin(*each.origin)
            if not origin.attempt or line.standing(each.step, each.save_id, origin) != Standing.ON:
                continue
            known = best.get(each.step)
            if known is None or rank(origin, each.suspect) > rank(known.origin, known.suspect):
                known = best[each.step] = CensusStep(each.step, each.save_id, origin, suspect=each.suspect)
            if known.save_id == each.save_id:
                known.keepers.add(at)
    for known in best.values():
        known.sizes = sizes_of(known)
    for at, view in enumerate(views):
        for each in view.steps:
            if (known := best.get(each.step)) is not None:
                for name, size in each.files.items():
                    if known.sizes.get(name) == size:
                        known.holders.setdefault(name, []).append(at)
    return [each for each in best.values() if each.sizes]


PIECE = 4 << 20
"""Bytes that are read at once to verify a file: a multiple of a digest's block."""
AT_ONCE = 4
"""Files that are copied in parallel. A failure of one leaves those that are finished."""


def aside_of(location: str) -> str:
    """Return a name for a file until it is whole. No other process uses it."""
    folder, _, name = location.rpartition("/")
    return f"{folder}/.{name}.{secrets.token_hex(4)}.aside"


async def describe_files(session: Session, document: Document, locations: Sequence[str]) -> list[CopiedFile]:
    """Return files of a step with the digests that their bytes must have.

    Those of a rank with a part of the manifest need that part in the session's storage.
    """
    wanted = set(locations)
    parts = [each for each in document.parts if each.location in wanted]
    ranks = {rank_of(each) for each in locations}
    needed = [each for each in document.parts if rank_of(each.location) in ranks]
    held: list[ManifestPart] = (
        await read_parts(add_layers(session, document), needed) if wanted - {each.location for each in parts} else []
    )
    data = {each: None for each in locations if each in document.files}
    files = checked_files(document, held, data, url=session.url, verify=True) if data else []
    return [*map(described_part, parts), *files]


def described_part(part: PartEntry) -> CopiedFile:
    """Return a part of a manifest as a file to copy."""
    return CopiedFile(part.location, part.size, None, (CheckedRange(part.location, 0, part.size, part.digest, True),))


def rank_of(location: str) -> str:
    """Return the rank in the name of a data file."""
    return location.partition("-")[2].partition("-")[0].partition(".")[0]


async def copy_verified(
    source: Session,
    target: Session,
    files: Sequence[CopiedFile],
    progress: Callable[[int], None] = unmetered,
    *,
    pack: Callable[[CopiedFile], Coroutine[Any, Any, Packing | None]] | None = None,
) -> None:
    """Copy files and compare all bytes with their digests. A file has its name only when it is whole.

    `pack` returns the compression of a file.
    """
    renames = target.storage.capabilities.renames

    async def one(file: CopiedFile) -> None:
        name = aside_of(file.location) if renames else file.location

        async def write(writer: Writer, plans: Sequence[FilePlan]) -> object:
            return await writer.write(plans, [name])

        packing = await pack(file) if pack is not None else None
        await copy_files_through(source.storage, target, [file], progress, write, packing=packing)
        if renames:
            await target.storage.rename(name, file.location)

    await gather_limited(files, one, AT_ONCE)
    await target.storage.settle()


async def is_intact(storage: Storage, file: CopiedFile) -> bool:
    """Read a file, and return True if all of its bytes match their digests."""
    view = memoryview(bytearray(min(PIECE, max(1, file.size))))
    for each in file.ranges:
        digest = PlainDigest() if each.plain else RunningDigest()
        for begin in range(each.begin, each.end, len(view)):
            piece = view[: min(len(view), each.end - begin)]
            await storage.read_into(file.location, begin, [piece])
            digest.update(piece)
        if each.digest is not None and digest.finish()[0] != each.digest:
            return False
    return True


async def remove_asides(storage: Storage) -> None:
    """Remove files that were never finished. No other process may be writing to this storage."""
    with suppress(SnapshotError):
        left = [each for each in await storage.list("data/") if each.endswith(".aside")]
        await storage.delete(left)
