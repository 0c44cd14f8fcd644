"""KeptExport: which steps of a manager are exported, and the thread that decides and starts a process for each."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from heapq import nlargest
from pathlib import Path
from typing import Any

import torch

import snapshot
from snapshot.decoding import decode_json
from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.formats.hugging_face import ExtraFiles, GivenFiles
from snapshot.formats.registry import find_writer
from snapshot.io.loop import is_exiting, run
from snapshot.manager.policies import KeepBest, Policy, checked_policy, every_policy, needs_sizes
from snapshot.manager.retention import CLEANER
from snapshot.manager.root import Root, taken_of
from snapshot.manifest.document import ManifestHead
from snapshot.maps.tensor_map import TensorMap
from snapshot.transform.target import Selection, Target
from snapshot_export.export_folders import ExportFolders

PATIENCE = 300.0
"""Seconds that `close` waits for exports."""
TRIES, PAUSE = 3, 30.0
"""How often an export may fail, and the seconds after a failure, unless a step is committed or the manager closed."""
WAITING = 2
"""Steps that retention spares while they wait for their export, the newest ones. More would fill the disk."""
POLL, ENDS = 0.2, 10.0
"""Seconds between two looks at a process, and for the thread to end when its process was killed."""
BOOT = "import os; os.nice(19); from snapshot_export.export_folders import main; main()"
"""The program of the process: its imports have the lowest priority, too."""


@dataclass(frozen=True)
class KeptExport:
    """For `SnapshotManager(exports=[...])`: write committed steps in another format, as `step-<n>-<name>` in the root.

    Args:
        to: The format, a folder: `"safetensors"`, as Hugging Face has it, or another one that `Target` knows.
        map: Recipes that turn the tensors into others, as for `Snapshot.convert`.
        when: Policy of the steps to export, such as `KeepBest("loss")`, or a number of the latest. None exports all.
            Suspect steps are never exported.
        name: The end of the folder's name, by default the format.
        select: Globs over `<key>/<logical path>` to export, as for `Snapshot.convert`: usually `["model/**"]`.
        dtype: Cast floating-point tensors to this dtype.
        files: `config.json`, the tokenizer and so on, as for `Target`. A folder is read again for each export.

    >>> from snapshot import KeepEvery
    >>> KeptExport(select=["model/**"], when=KeepEvery(1000)).name
    'safetensors'
    """

    to: str = "safetensors"
    _: KW_ONLY
    map: TensorMap | None = None
    when: Policy | int | None = None
    name: str = ""
    select: Sequence[str] = ()
    dtype: torch.dtype | None = None
    files: GivenFiles = None

    def __post_init__(self) -> None:
        self.target()
        written = find_writer(self.to)
        if written.one_file or written.needs_options or not written.plan:
            raise ValueError(f"to must be a format that is a folder, such as 'safetensors', got {self.to!r}")
        Selection(self.select, dtype=self.dtype)
        if self.map is not None and not isinstance(self.map, TensorMap):
            raise TypeError(f"map must be a TensorMap, got {self.map!r}")
        try:
            policy = checked_policy(self.when)
        except (TypeError, ValueError) as error:
            raise type(error)(f"when: {error}") from None
        if needs_sizes(policy):  # it would choose all: exports are chosen without sizes
            raise ValueError(f"when must be a policy without KeepWithin, which is for `keep`, got {policy}")
        object.__setattr__(self, "name", self.name or self.to)
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z][\w-]{0,63}", self.name, re.ASCII):
            raise ValueError(f"name must be letters, digits, - and _, and begin with a letter, got {self.name!r}")
        if not isinstance(self.files, (str, os.PathLike)):
            object.__setattr__(self, "files", ExtraFiles(self.files).read() or None)
            return
        object.__setattr__(self, "files", os.path.abspath(self.files))
        if ranks_of(None).rank == 0:  # others may lack the folder
            ExtraFiles(self.files)

    def target(self) -> Target:
        """Return the destination, in any folder. What is there is of an export that was killed."""
        return Target("step", self.to, overwrite=True, files=self.files)

    def open(self, root: Root, released: Callable[[], None]) -> Exporter:
        """Return what runs for a manager. Raise ValueError if other processes cannot read the root."""
        if root.url.scheme.endswith("memory"):
            raise ValueError(f"exports must be empty for {root.url}, which other processes cannot read")
        return Exporter(self, root, released)


class Exporter:
    """Exports the steps of one root, one at a time, on rank 0. What is to be done is decided from what the root has."""

    def __init__(self, export: KeptExport, root: Root, released: Callable[[], None]) -> None:
        self._export, self._root, self._released = export, root, released
        self._folders = ExportFolders(root, export.name)
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._undecided: set[int] = set()
        """Committed steps that the thread has not looked at yet."""
        self._wanted: dict[int, str] = {}
        """Save ids of the steps to export."""
        self._running: int | None = None
        self._looks = self._closing = self._ended = self._held = False
        """`_held`: True if a removal had to spare a step."""
        self._failures: dict[tuple[int, str], int] = {}
        self._done: dict[int, str] = {}
        self._faults = 0
        """Looks that have failed since the last one that did not."""
        self._said: set[str] = set()
        """Metrics that no step has, of which the log tells."""

    def committed(self, step: int) -> None:
        with self._change:
            self._undecided.add(step)
            self._closing = self._ended = False
            self._look_soon()

    def _look_soon(self) -> None:
        """Wake the thread, or start it. The caller has the lock."""
        self._looks = True
        self._change.notify_all()
        if self._thread is None and not is_exiting():
            # the name tells the manager that a policy may call it
            self._thread = threading.Thread(target=self._work, name=CLEANER, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # there are too many, or the interpreter exits
                self._thread = None

    def needs(self, step: int) -> bool:
        with self._change:
            needed = step == self._running or step in self._undecided or step in nlargest(WAITING, self._wanted)
            self._held = self._held or needed
            return needed

    def removed(self, steps: Sequence[int]) -> None:
        for step in steps:
            with self._change:
                late = self._wanted.pop(step, None) is not None
            if late:
                why = "its step was removed before its export; choose fewer with `when`, or keep more"
                fault = SnapshotError(f"{self._where(step)}: {why}")
                log.warning("%s", fault)
                emit("export_failed", "export", self._where(step), step=step, error=fault, attempt=0, gives_up=True)
        self._remove(steps)

    def _where(self, step: int) -> str:
        return str(self._root.url.join(self._folders.path(step)))

    def _remove(self, steps: Sequence[int]) -> None:
        for step in steps:
            try:
                self._folders.remove(step)
            except (SnapshotError, OSError) as error:  # a later look removes it
                log.warning("%s: cannot remove the export of step-%d: %s", self._root.url, step, error)

    def close(self, *, patient: Callable[[], bool]) -> None:
        with self._change:
            self._closing, self._ended = True, not patient() or is_exiting()
            if not self._ended:
                if self._undecided or self._wanted:
                    self._look_soon()
                end = time.monotonic() + PATIENCE
                while patient() and time.monotonic() < end:  # a signal to stop may come meanwhile
                    if self._change.wait_for(lambda: self._thread is None, POLL):
                        return
                self._ended = True
            if left := {*self._wanted, *self._undecided}:
                names = ", ".join(f"step-{step}" for step in sorted(left))
                log.warning("%s: exports are left to the next manager: %s", self._root.url, names)
            if self._process is not None:
                self._process.kill()
            self._change.notify_all()
            self._change.wait_for(lambda: self._thread is None, ENDS)

    def _work(self) -> None:
        failed = False
        while True:
            with self._change:
                if failed:
                    self._change.wait_for(lambda: self._looks or self._closing, PAUSE)
                if self._ended or not (self._looks or self._wanted):
                    self._thread = None
                    self._change.notify_all()
                    return
            if self._looks:
                self._decide()
            failed = not self._export_newest()

    def _decide(self) -> None:
        """Look at the root, unless that fails. The next commit looks again."""
        with self._change:
            asked, self._looks = {*self._undecided}, False
        try:
            wanted = self._look()
        except Exception as error:  # noqa: BLE001 - also one of a policy: training must not fail
            log.warning("%s: cannot export: %s", self._root.url, error)
            emit("failed", "export", str(self._root.url), error=error)
            with self._change:
                self._faults += 1
                if self._faults < TRIES:
                    return
                self._undecided -= asked  # the policy may always raise, and retention must go on
                held, self._held = self._held, False
            if held:
                self._released()
            return
        with self._change:
            self._faults = 0
            self._undecided -= asked
            self._wanted = {step: each for step, each in wanted.items() if self._failures.get((step, each), 0) < TRIES}
            held, self._held = self._held, False
        if held:  # what is still needed is spared again
            self._released()

    def _look(self) -> dict[int, str]:
        """Return the steps to export. Remove leftovers, and exports of steps that were removed or replaced."""
        policy = checked_policy(self._export.when)
        if self._running is None:
            self._folders.remove_leftovers()
        found = run(self._root.folders())
        heads = run(self._root.heads(found.committed))
        on_line = run(self._root.on_line(found.committed))
        read = {step: head for step in on_line if isinstance(head := heads.get(step), ManifestHead)}
        ids = {step: head.save_id for step, head in read.items()}
        taken = [each for step, head in read.items() if not (each := taken_of(step, head)).suspect]
        for one in every_policy(policy):
            if isinstance(one, KeepBest) and taken and not any(one.metric in each.metrics for each in taken):
                self._warn_of(one.metric)
        chosen = {each.step for each in taken} if policy is None else policy.keep(taken, time.time())
        done, here = run(self._folders.find(self._done)), {*found.committed, *found.unreadable}
        gone = [step for step, each in done.items() if step not in here or each != ids.get(step, each)]
        self._remove([step for step in gone if step != self._running])
        self._done = {step: each for step, each in done.items() if step not in gone}
        return {each.step: ids[each.step] for each in taken if each.step in chosen and each.step not in self._done}

    def _warn_of(self, metric: str) -> None:
        if metric not in self._said:
            self._said.add(metric)
            log.warning("%s: no step has the metric %r, so `when` exports none for it", self._root.url, metric)

    def _export_newest(self) -> bool:
        """Export the newest step that waits, in a process. Return False if it failed."""
        with self._change:
            if not self._wanted:
                return True
            self._running = step = max(self._wanted)  # the newest one first: there may be no next manager
            save_id, began = self._wanted[step], time.monotonic()
        where = self._where(step)
        try:
            made = self._run(step, save_id)
        except Exception as error:  # noqa: BLE001 - no memory, for example, or the interpreter exits
            made = {"error": str(error)}
        with self._change:
            self._process = self._running = None
            if "error" not in made and self._wanted.get(step) == save_id:
                del self._wanted[step]  # also if the next look fails
        if "error" not in made:
            emit("exported", "export", where, step=step, **made, seconds=round(time.monotonic() - began, 3))
        self._decide()
        if "error" in made and not self._ended and self._wanted.get(step) == save_id:  # else it was removed meanwhile
            tries = self._failures[step, save_id] = self._failures.get((step, save_id), 0) + 1
            fault = SnapshotError(f"{where}: {made['error']}")
            log.warning("%s (failure %d of %d)", fault, tries, TRIES)
            emit("export_failed", "export", where, step=step, error=fault, attempt=tries, gives_up=tries == TRIES)
            if tries == TRIES:
                with self._change:
                    self._wanted.pop(step, None)
                    self._looks = True  # releases it
        return "error" not in made

    def _run(self, step: int, save_id: str) -> dict[str, Any]:
        """Return what a process has made, or its error. Decide about steps that are committed meanwhile."""
        export, root = self._export, self._root
        given = {"select": export.select, "map": export.map, "dtype": export.dtype}
        work = export.target(), given, step, save_id
        job: bytes | None = pickle.dumps((export.name, root.url.reveal(), root.options, work, os.getpid()))
        trees = dict.fromkeys(str(Path(file).parents[1]) for file in (snapshot.__file__, __file__))
        path = os.pathsep.join([*trees, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(  # noqa: S603 - this very interpreter
            [sys.executable, "-P", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the training
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        with self._change:
            self._process = process
        while True:
            with suppress(subprocess.TimeoutExpired):
                answer, _ = process.communicate(job, POLL)
                made: dict[str, Any] = decode_json(answer or b"{}", dict[str, Any], "the answer of an export")
                return made or {"error": f"its process ended with {process.returncode}"}
            job = None
            if self._ended:
                process.kill()
            if self._looks:
                self._decide()
