"""The exports in a root, and the process that makes one.

A file in each has the save id of its step, and is empty while the export is not complete. In a local root, an export
also gets its name when it is complete. An object store has no such step.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from snapshot.errors import SnapshotError, SnapshotExistsError, StorageError
from snapshot.formats.foreign import is_absence
from snapshot.io.aio import gather_limited
from snapshot.io.loop import run
from snapshot.io.system import lower_priority, sync_folder
from snapshot.io.url import URL
from snapshot.manager.root import UNREADABLE, Root, list_folder
from snapshot.snapshot import Snapshot

if TYPE_CHECKING:
    from snapshot.reports import ConvertReport
    from snapshot.transform.target import Target

MADE_OF = ".exported"
PR_SET_PDEATHSIG = 1
LOWEST, IDLE = 19, 3 << 13
"""The nice value, and the class of a process whose disk access must wait for that of others, for `ioprio_set`."""


class ExportFolders:
    """The exports of one name."""

    def __init__(self, root: Root, name: str) -> None:
        self.root, self.name = root, name
        self.folder = root.url.location if root.url.scheme == "file" else ""
        self.pattern = re.compile(rf"(?:\.export-(?:[0-9a-f]{{8}}-)?)?step-(0|[1-9][0-9]{{0,17}})-{name}/?")

    def path(self, step: int) -> str:
        """Return the name of an export in the root, which no list of steps takes for one of them."""
        return f"step-{step}-{self.name}"

    async def list(self, prefix: str) -> list[str]:
        async with self.root.opened() as session:
            return await list_folder(session.storage, prefix)

    async def read(self, step: int) -> str | None:
        """Return the save id of the step that was exported, '' if that is incomplete, or None for anything else."""
        async with self.root.opened() as session:
            try:
                return (await session.storage.get(f"{self.path(step)}/{MADE_OF}", limit=1 << 10)).decode(
                    errors="replace"
                )
            except StorageError as error:
                if is_absence(session.storage, error) or error.errno in UNREADABLE:  # then it is none of ours
                    return None
                raise

    async def write(self, path: str, save_id: str) -> None:
        async with self.root.opened() as session:
            await session.storage.put(f"{path}/{MADE_OF}", save_id.encode())
            await session.storage.settle()

    async def find(self, known: Mapping[int, str]) -> dict[int, str]:
        """Return what `read` does for each export. Complete ones that are `known` are not read again."""
        steps = [int(found[1]) for each in await self.list("step-") if (found := self.pattern.fullmatch(each))]

        async def read(step: int) -> str | None:
            return known.get(step) or await self.read(step)

        records = await gather_limited(steps, read)
        return {step: each for step, each in zip(steps, records, strict=True) if each is not None}

    def export(self, target: Target, given: Mapping[str, Any], step: int, save_id: str) -> ConvertReport:
        """Export a step to its folder, not to the target's. Raise SnapshotExistsError if another one has the name.

        `given`: arguments of `Snapshot.convert`.
        """
        path = self.path(step)
        if run(self.read(step)) is None and run(self.list(f"{path}/")):
            raise SnapshotExistsError(f"{self.root.url.join(path)}: exists already, and is no export of a manager")
        where = f".export-{path}" if self.folder else path
        run(self.write(where, ""))
        options = self.root.options
        source = Snapshot(self.root.step_url(step).reveal(), storage_options=options)
        made = source.convert(replace(target, url=self.root.url.join(where).reveal(), storage_options=options), **given)
        run(self.write(where, save_id))
        if self.folder:
            if not all(os.path.exists(f"{self.folder}/{where}/{name}") for name in made.files):
                raise SnapshotError(f"{self.root.url.join(where)}: was removed meanwhile")  # by another manager
            os.rename(f"{self.folder}/{where}", f"{self.folder}/{path}")
            sync_folder(self.folder)
        return made

    def remove(self, step: int) -> None:
        """Remove an export, if there is one. From the first moment on, it is not complete."""
        if run(self.read(step)) is None:
            return
        if self.folder:
            self._discard(self.path(step))
            return

        async def delete() -> None:
            own = f"{self.path(step)}/{MADE_OF}"
            await self.write(self.path(step), "")
            async with self.root.opened() as session:
                listed = await session.storage.list(f"{self.path(step)}/")
                await session.storage.delete([each for each in listed if each != own])
                await session.storage.delete([own])

        run(delete())

    def remove_leftovers(self) -> None:
        """Remove what killed processes have left. Nothing may be running."""
        for each in os.listdir(self.folder) if self.folder else ():
            if each.startswith(".export-") and self.pattern.fullmatch(each):
                with suppress(FileNotFoundError):  # another manager was faster
                    self._discard(each)

    def _discard(self, name: str) -> None:
        """Remove a folder, under a name that no process writes to or publishes."""
        aside = f"{self.folder}/.export-{os.urandom(4).hex()}-{name[name.index('step-') :]}"
        os.rename(f"{self.folder}/{name}", aside)
        shutil.rmtree(aside, ignore_errors=True)  # a look may remove it, too


def main() -> None:
    """Export the step that the standard input tells of, and write what was made, or the error, to the output."""
    answer = os.dup(1)
    os.dup2(2, 1)  # what event handlers print
    lower_priority(LOWEST, IDLE)
    torch.set_num_threads(1)
    name, root, options, job, parent = pickle.load(sys.stdin.buffer)  # noqa: S301 - the parent's own
    with suppress(OSError):  # without memory, the system ends this process, and not the training
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    with suppress(AttributeError):  # Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the next manager removes what was written
    if os.getppid() != parent:
        os._exit(1)
    try:
        made = ExportFolders(Root(URL.parse(root), options), name).export(*job)
        told: dict[str, Any] = {"tensors": made.tensors, "bytes": made.nbytes}
    except Exception as error:  # noqa: BLE001 - the parent reports it
        told = {"error": f"{type(error).__name__}: {error}"}
    with suppress(BrokenPipeError):  # the parent has just ended
        os.write(answer, json.dumps(told).encode())
