"""The steps in a host's folder: which snapshot each is, and which of its files are here.

Plain system calls: the folder is local. Files are removed by the id of their save, since a take of the same step may
be running, whose claim is on another host.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from snapshot.errors import SnapshotError
from snapshot.events import log
from snapshot.manifest.document import METADATA, NEWEST_FORMAT, ManifestHead, decode_head
from snapshot.save.transaction import belongs_to, save_id_of
from snapshot.tiers.timeline import Origin, origin_of

PINNED = ".pinned"
"""File in a step's folder that protects it from removal. It belongs to no snapshot, so clean-up leaves it."""
PULLED = ".pulled"
"""File in a step's folder that names the replicas in it. Only a hint: without it, more is replicated or uploaded."""
FRESH = 300.0
"""Seconds after which files without a manifest count as left behind."""
STEP = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_FORMAT = re.compile(rb'\{"format":"snapshot/([1-9][0-9]{0,3})"')


class NearStep(NamedTuple):
    """A committed step in a host's folder."""

    step: int
    head: ManifestHead
    origin: Origin

    @property
    def save_id(self) -> str:
        """The save id."""
        return self.head.save_id


class NearFolder:
    """The folder of a run on this host."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._heads: dict[int, tuple[tuple[int, int, int], ManifestHead | None]] = {}

    def step_path(self, step: int) -> str:
        """Return the folder of a step."""
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
        """Return True if a step is pinned."""
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
