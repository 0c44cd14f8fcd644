"""Other libraries with a flipped bit, a kill, a loss of power and a hostile pickle: the table in docs/start/why.md.

Each library saves and loads in a process of its own, with its defaults. That process is
`python -m tests.plugins.snapshot_bench.why SYSTEM VERB PATH`.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from snapshot.cli.screen import say
from snapshot_bench.results import align_columns
from snapshot_bench.rounds import Workspace

ROWS = 4 << 20
"""Rows of each of the two tensors, of 8 floats each: 128 MiB."""
PATIENCE = 300
OTHER = "other values"
MARK = "SNAPSHOT_WHY_MARK"
"""The variable with the path of a file that a hostile pickle creates."""
State = dict[str, Any]
Save = Callable[[str, State], object]
Load = Callable[[str, State], State]


def make(version: float, rows: int) -> State:
    """Return a state of random values, which depend on the version. A library that compresses must not gain."""
    import torch

    source = torch.Generator().manual_seed(int(version) + 1)
    return {name: torch.rand((rows, 8), generator=source) for name in ("a", "b")}


def _snapshot() -> tuple[Save, Load]:
    from snapshot import Snapshot, StateDict

    def load(path: str, live: State) -> State:
        app = {"s": StateDict(live)}
        Snapshot(path).restore(app)
        return app["s"]

    return lambda path, state: Snapshot.take(path, {"s": StateDict(state)}, overwrite=True), load


def _torch() -> tuple[Save, Load]:
    import torch

    return lambda path, state: torch.save(state, path), lambda path, live: torch.load(path)


def _safetensors() -> tuple[Save, Load]:
    from safetensors.torch import load_file, save_file

    return lambda path, state: save_file(state, path), lambda path, live: load_file(path)


def _dcp() -> tuple[Save, Load]:
    import torch.distributed.checkpoint as dcp

    def load(path: str, live: State) -> State:
        dcp.load(live, checkpoint_id=path)
        return live

    return lambda path, state: dcp.save(state, checkpoint_id=path), load


def _torch_checkpointing() -> tuple[Save, Load]:
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # some file systems refuse its writes
    manager = config.build()
    return (
        lambda path, state: manager.save(path, {"model": state}),
        lambda path, live: manager.load(path, into={"model": live})["model"],
    )


def _orbax() -> tuple[Save, Load]:
    import numpy as np
    import orbax.checkpoint as ocp
    import torch

    checkpointer = ocp.PyTreeCheckpointer()

    def save(path: str, state: State) -> None:
        checkpointer.save(os.path.abspath(path), {name: each.numpy() for name, each in state.items()}, force=True)

    def load(path: str, live: State) -> State:
        found = checkpointer.restore(os.path.abspath(path))
        return {name: torch.from_numpy(np.array(each)) for name, each in found.items()}

    return save, load


SYSTEMS = {
    "snapshot": (_snapshot, "snapshot"),
    "torch.save": (_torch, "torch"),
    "safetensors": (_safetensors, "safetensors"),
    "DCP": (_dcp, "torch"),
    "torch_checkpointing": (_torch_checkpointing, "torch_checkpointing"),
    "Orbax": (_orbax, "orbax"),
}
"""How to save and load, and the package."""


# In the process of its own


def _child(system: str, verb: str, path: str, version: float, rows: int) -> None:
    import torch

    warnings.simplefilter("ignore")
    save, load = SYSTEMS[system][0]()
    state = make(version if verb == "save" else -1.0, rows)
    print("begin", flush=True)
    began = time.perf_counter()
    found = save(path, state) if verb == "save" else load(path, state)
    seconds = time.perf_counter() - began
    if verb == "load":
        for known in (0, 1, 2):
            if all(torch.equal(found[name], each) for name, each in make(known, rows).items()):
                print(f"version {known}")
                break
        else:
            print(OTHER)
    print(f"seconds {seconds:.3f}", flush=True)
    os._exit(0)  # what runs at the exit is not looked at


class _Bomb:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (self._path,))


# What is tried


class Trial:
    """One library, in a folder."""

    def __init__(self, system: str, folder: Path, rows: int) -> None:
        self.system = system
        self.folder = folder
        self.rows = rows
        self.path = folder / "checkpoint"

    def start(self, verb: str, version: float = 0.0) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "tests.plugins.snapshot_bench.why",
            self.system,
            verb,
            str(self.path),
            str(version),
        ]
        environment = {**os.environ, MARK: str(self.folder / "mark"), "JAX_PLATFORMS": "cpu"}
        return subprocess.Popen(
            [*command, str(self.rows)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )

    def run(self, verb: str, version: float = 0.0) -> tuple[str, float]:
        """Run a verb: what it printed, or its error, and its seconds."""
        with self.start(verb, version) as process:
            printed, problem = process.communicate(timeout=PATIENCE)
        if process.returncode or "seconds" not in printed:
            last = [line for line in problem.splitlines() if line.strip() and not line.startswith(" ")]
            return f"error: {last[-1] if last else process.returncode}", 0.0
        lines = printed.splitlines()
        return " ".join(lines[1:-1]), float(lines[-1].split()[1])

    def save(self, version: float) -> float:
        said, seconds = self.run("save", version)
        if said:
            raise RuntimeError(f"{self.system}: cannot save: {said}")
        return seconds

    def files(self) -> list[Path]:
        """Return the files of the checkpoint, the longest first."""
        found = [self.path] if self.path.is_file() else [each for each in self.path.rglob("*") if each.is_file()]
        return sorted(found, key=lambda each: -each.stat().st_size)

    def clear(self) -> None:
        """Remove the checkpoint and what is beside it."""
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    # The rows of the table

    def flip(self) -> str:
        """Flip one bit at a third of the longest file, which is inside of a tensor, and load."""
        self.save(1.0)
        longest = self.files()[0]
        with longest.open("r+b") as file:
            file.seek(longest.stat().st_size // 3)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        said, _ = self.run("load")
        return "raises" if said.startswith("error") else "loads other values" if said == OTHER else f"loads {said}"

    def kill(self) -> str:
        """Save over an older checkpoint, kill the process at half of the bytes, and load."""
        self.save(1.0)
        half, before = self.rows * 32, self.written()
        with self.start("save", 2.0) as process:
            assert process.stdout is not None
            process.stdout.readline()
            while process.poll() is None and abs(self.written() - before) < half:
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
            process.wait()
            printed = process.stdout.read()
        if "seconds" in printed:
            return "was too quick to be killed"
        if process.returncode != -signal.SIGKILL:
            return "refuses to save over a checkpoint"
        said, _ = self.run("load")
        return {"version 1": "keeps the old one", "version 2": "has the new one", OTHER: "mixes both"}.get(
            said, "loses the old one"
        )

    def written(self) -> int:
        """Return the allocated bytes of all files in the folder."""
        total = 0
        for folder, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += os.stat(os.path.join(folder, name)).st_blocks * 512
                except FileNotFoundError:  # it was renamed
                    continue
        return total

    def pickle(self) -> str:
        """Put a pickle in the place of each file in turn, and load: does its code run?"""
        import torch

        self.save(1.0)
        mark = self.folder / "mark"
        for file in self.files():
            kept = file.read_bytes()
            for hostile in ("pickle", "archive"):
                if hostile == "pickle":
                    file.write_bytes(pickle.dumps(_Bomb(str(mark))))
                else:
                    with file.open("wb") as archive:
                        torch.save(_Bomb(str(mark)), archive)
                self.run("load")
                if mark.exists():
                    return f"runs code ({file.name})"
            file.write_bytes(kept)
        return "runs no code"

    def seconds(self) -> str:
        """Return the least seconds of three saves and loads."""
        saves, loads = [], []
        for number in range(3):
            self.clear()
            saves.append(self.save(float(number)))
            loads.append(self.run("load")[1])
        return f"{min(saves):.2f} / {min(loads):.2f}"


def lose_power_after_save(system: str, rows: int) -> str:
    """Save to a disk of its own, cut its power right after the save, and load."""
    from tests.faults.mounted_disks import disk, lose_power

    with tempfile.TemporaryDirectory() as name, disk("ext4", Path(name)) as made:
        trial = Trial(system, made.mount / "run", rows)
        trial.folder.mkdir()
        made.sync()
        trial.save(1.0)
        lose_power(made.mount)
        made.again()
        said, _ = trial.run("load")
    return "survives" if said == "version 1" else "is lost"


ROWS_OF_TABLE = {
    "a kill during a save over it": Trial.kill,
    "a flipped bit": Trial.flip,
    "a pickle in a file": Trial.pickle,
    "save / load of 256 MiB, s": Trial.seconds,
}


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    if not where.local:
        raise ValueError(f"{where.url}: must be a folder")
    rows = max(1000, int(ROWS * scale))
    names = [name for name, (_, package) in SYSTEMS.items() if importlib.util.find_spec(package)]
    yield from (f"left out: {name} is not installed" for name in SYSTEMS if name not in names)
    lines = [("", *names)]
    with tempfile.TemporaryDirectory(dir=where.url.location) as folder:
        for what, try_it in ROWS_OF_TABLE.items():
            cells = []
            for name in names:
                say(f"{what}: {name} ...")
                trial = Trial(name, Path(folder) / name, rows)
                trial.folder.mkdir(exist_ok=True)
                trial.clear()
                cells.append(try_it(trial))
                trial.clear()
            lines.append((what, *cells))
        say("")
    lines.append(("a loss of power after a save", *(_power(name) for name in names)))
    yield from align_columns(lines)


def _power(system: str) -> str:
    try:
        return lose_power_after_save(system, 20_000)
    except BaseException as error:  # noqa: BLE001 - also the skip of a test, where disks cannot be mounted
        return f"not tried: {error}"


if __name__ == "__main__":
    _child(*sys.argv[1:4], float(sys.argv[4]), int(sys.argv[5]))
