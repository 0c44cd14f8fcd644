"""Which plugins can be deleted: `python -m tests.deletable [NAME...]`, by default each in turn, and then all at once.

A copy of the library is made without a plugin and its entry points, in the place of the installed one, also for child
processes. There, all other modules are imported, and the verbs of the core run.

`python -m tests.deletable --pytest [NAME...]` runs the fast tier with a copy that lacks these plugins, by default all,
and without the tests that are theirs or that combined.txt names. Of each function, only the first case runs, but for
`.ci/tests --all`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py"))
BLIND = """
import sys
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in type(each).__module__ + repr(each)]
sys.path_hooks[:] = [each for each in sys.path_hooks if "__editable__" not in repr(each)]
"""
"""Hides the editable installation, in all processes with this copy on their path."""


def copy_without(names: set[str], target: Path) -> None:
    """Copy the library without some plugins, as an installation."""
    without_caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "snapshot", target / "snapshot", ignore=without_caches)
    kept = [each for each in PLUGINS if each not in names]
    for each in kept:
        shutil.copytree(ROOT / "plugins" / each, target / each, ignore=without_caches)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = target / f"snapshot_torch-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    (info / "top_level.txt").write_text("\n".join(["snapshot", *kept]) + "\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in points.items() if value.partition(".")[0] not in names]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (target / "sitecustomize.py").write_text(BLIND)


def environment_of(target: Path, *more: Path) -> dict[str, str]:
    path = os.pathsep.join(map(str, [target, *more]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def try_without(names: set[str]) -> str:
    """Return what fails without some plugins; empty if nothing does."""
    with tempfile.TemporaryDirectory() as work:
        target = Path(work, "site")
        target.mkdir()
        copy_without(names, target)
        ended = subprocess.run(
            [sys.executable, Path(__file__).with_name("without_plugins.py"), *sorted(names)],
            cwd=work, env=environment_of(target), capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
    return "" if ended.returncode == 0 else ended.stdout + ended.stderr


def run_tests(names: set[str]) -> int:
    """Run the tests of all that is left without some plugins."""
    with tempfile.TemporaryDirectory() as work:
        target = Path(work, "site")
        target.mkdir()
        copy_without(names, target)
        environment = environment_of(target, ROOT) | {"SNAPSHOT_TEST_WITHOUT": ",".join(sorted(names))}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-o",
            f"pythonpath={target} .",
            "-o",
            f"cache_dir={work}/cache",
        ]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    tests = arguments[:1] == ["--pytest"]
    arguments = arguments[tests:]
    wrong = sorted(set(arguments) - set(PLUGINS))
    if wrong:
        print(f"names must be of {', '.join(PLUGINS)}, got {wrong[0]}")
        return 2
    if tests:
        return run_tests(set(arguments or PLUGINS))
    rounds = [{each} for each in arguments or PLUGINS] + ([] if arguments else [set(PLUGINS)])
    failed = 0
    with ThreadPoolExecutor(2) as pool:
        for names, fault in zip(rounds, pool.map(try_without, rounds), strict=True):
            print(f"without {', '.join(sorted(names)) if len(names) == 1 else 'all plugins'}: {fault or 'works'}")
            failed += bool(fault)
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
