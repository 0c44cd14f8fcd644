"""What a new process pays: the first use of the library after torch, and its first take."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from snapshot.errors import SnapshotError

DISTRIBUTIONS = 600
"""Installed packages, more than most environments have. The first take looks for plugins among them."""
_SCRIPT = """
import sys, time
import torch
begin = time.perf_counter()
from snapshot import Snapshot, StateDict, TakeOptions
used = time.perf_counter()
Snapshot.take(sys.argv[1], {"s": StateDict(x=torch.ones(1000))}, options=TakeOptions(durable=False))
print(used - begin, time.perf_counter() - used)
"""


def measure_startup(folder: Path, rounds: int) -> dict[str, float]:
    """Return medians in seconds, of new processes that alternate: with other distributions beside, and without.

    The first process of each kind is not counted. It compiles the modules, if that is allowed.
    """
    seconds: dict[str, list[tuple[float, float]]] = {"few": [], "many": []}
    with tempfile.TemporaryDirectory(dir=folder) as work:
        others = Path(work, "site")
        install_others(others, DISTRIBUTIONS)
        for turn in range(rounds + 1):
            for name, times in seconds.items():
                measured = _start(Path(work, f"{name}-{turn}"), {"few": "", "many": str(others)}[name])
                if turn:
                    times.append(measured)
    few, many = (median(take for _, take in seconds[name]) for name in ("few", "many"))
    first = median(first for times in seconds.values() for first, _ in times)
    return {"first_use": first, "first_take": few, "first_take_beside_others": many, "others": DISTRIBUTIONS}


def install_others(site: Path, count: int) -> None:
    """Lay out distributions as pip does, each with an entry point."""
    for number in range(count):
        info = site / f"other_{number}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: other-{number}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[console_scripts]\nother-{number} = other_{number}:main\n")


def _start(target: Path, site: str) -> tuple[float, float]:
    paths = [site, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ended = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", _SCRIPT, target], env=environment, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise SnapshotError(f"a new process failed: {ended.stderr.strip()}")
    first, take = map(float, ended.stdout.split())
    return first, take


def startup_text(found: Mapping[str, float]) -> str:
    """Return the figures as a paragraph."""
    more = found["first_take_beside_others"] - found["first_take"]
    return (
        f"In a new process with torch imported, the first use of Snapshot takes {found['first_use'] * 1e3:.0f} ms.\n"
        f"The first take takes {found['first_take'] * 1e3:.1f} ms, and {more * 1e3:+.1f} ms with {found['others']:.0f} "
        "more distributions installed."
    )
