"""The fast tests with many versions of Python and torch: `python -m tests.matrix`, from a checkout.

Each pair gets a new virtual environment in a temporary folder, which is removed afterwards. An environment with torch
takes some GiB of disk, and its tests take some minutes. A pair that cannot be installed here is reported. The status is
0 if the tests ran with at least one pair, and none failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NEWEST = "newest"
"""The torch that a plain installation takes."""
VERSION = "from importlib.metadata import version; print(version('torch').partition('+')[0])"
"""A script that prints the version of the installed torch."""
OLDEST = {"3.14": "2.9.0"}
"""The oldest torch for a Python, if it is newer than the oldest one of all."""
QUICK = ("tests/loading", "tests/manifest", "tests/save", "tests/state", "tests/tensors")
"""The tests of `--quick`."""
IGNORING = ("--doctest-ignore-import-errors",)
"""Options of pytest if a package is left out."""
LONGEST = 3600.0
"""Seconds that the installation or the tests of one pair may take."""
_COUNTS = ("tests", "failures", "errors", "skipped")
_NOT_COPIED = (".*_cache", "__pycache__", ".venv", "build")
PROBE = (
    "import json, sys, sysconfig; print(json.dumps(['.'.join(map(str, sys.version_info[:3])), "
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED'))]))"
)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that is installed here."""

    path: str
    version: str
    free_threaded: bool

    @property
    def name(self) -> str:
        """The minor version, such as 3.13, or 3.14t if it is free-threaded."""
        return ".".join(self.version.split(".")[:2]) + "t" * self.free_threaded


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    python: str
    torch: str
    counts: Mapping[str, int]
    outcome: str
    free_threaded: str = "no"

    @property
    def failed(self) -> bool:
        """True if the tests ran, and not all of them passed."""
        return self.outcome.startswith("failed")


def claims() -> tuple[list[str], str, SpecifierSet]:
    """Return the minor versions of Python, the oldest torch, and the range of Python that pyproject.toml claims."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minors = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    torch = next(re.fullmatch(r"torch>=([\d.]+)", each) for each in project["dependencies"] if each.startswith("torch"))
    assert torch is not None
    oldest = torch[1] if torch[1].count(".") > 1 else f"{torch[1]}.0"
    return minors, oldest, SpecifierSet(project["requires-python"])


def required(without: Iterable[str]) -> list[str]:
    """Return what the tests require, but for some packages. Raise ValueError for a package that they do not require."""
    held = tomllib.loads((ROOT / "pyproject.toml").read_text())
    left_out = set(map(canonicalize_name, without))
    found: dict[str, str] = {}

    def expand(lines: Iterable[str]) -> None:
        for line in lines:
            need = Requirement(line)
            if need.name != held["project"]["name"]:
                found[line] = canonicalize_name(need.name)
                continue
            for extra in sorted(need.extras):
                expand(held["project"]["optional-dependencies"][extra])

    expand(held["dependency-groups"]["test"])
    unknown = left_out.difference(found.values())
    if unknown:
        raise ValueError(f"--without must name packages that the tests require, got {', '.join(sorted(unknown))}")
    return [line for line, name in found.items() if name not in left_out]


def probe(path: str) -> Interpreter | None:
    """Return the interpreter at a path; None if it does not start."""
    try:
        run = subprocess.run([path, "-c", PROBE], capture_output=True, text=True, timeout=300, check=True)
        return Interpreter(path, *json.loads(run.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def places(minor: str) -> Iterator[str]:
    """Yield the paths where a Python of a minor version may be: on PATH, of pyenv, and of uv."""
    if found := shutil.which(f"python{minor}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for folder in sorted(pyenv.glob(f"{minor.removesuffix('t')}.*")):
        yield str(folder / "bin" / "python")
    if uv := shutil.which("uv"):
        asked = [uv, "python", "find", "--no-python-downloads", minor]
        yield subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


def find(minor: str, claimed: SpecifierSet) -> Interpreter | str:
    """Return the newest claimed Python of a minor version, or the reason why there is none."""
    found = [each for path in places(minor) if path and (each := probe(path)) is not None and each.name == minor]
    usable = [each for each in found if each.version in claimed]
    if usable:
        return max(usable, key=lambda each: int(each.version.split(".")[2]))
    left_out = ", ".join(sorted({each.version for each in found}))
    return f"not claimed: {left_out}" if left_out else "not installed"


def counts_of(report: Path) -> dict[str, int]:
    """Return the numbers of passed, failed and skipped tests from pytest's report; nothing if there is none."""
    try:
        found = [{name: int(each.get(name, 0)) for name in _COUNTS} for each in ET.parse(report).iter("testsuite")]
    except (OSError, ET.ParseError):
        return {}
    tests, *others, skipped = (sum(each[name] for each in found) for name in _COUNTS)
    return {"passed": tests - sum(others) - skipped, "failed": sum(others), "skipped": skipped}


class Runner:
    """Runs the commands of one pair, and writes what they print to a log."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.source, self.report = folder / "source", folder / "report.xml"
        self.python = folder / "venv" / "bin" / "python"
        self.environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
        self.environment["PATH"] = os.pathsep.join((str(self.python.parent), self.environment.get("PATH", "")))
        self._log = log

    def run(self, *command: str) -> int:
        """Run a command and return its status. If it takes too long, or is interrupted, end all its processes."""
        with (
            self._log.open("a") as out,
            subprocess.Popen(
                command,
                cwd=self.source,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            print("$", *command, file=out, flush=True)
            try:
                return process.wait(LONGEST)
            except subprocess.TimeoutExpired:
                print(f"ERROR: longer than {LONGEST:.0f} s", file=out, flush=True)
                return 124
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def read(self, script: str) -> str:
        """Return what a script prints."""
        command = [str(self.python), "-c", script]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout.strip()


def run_pair(python: Interpreter, torch: str, tests: Sequence[str], logs: Path, needs: Sequence[str]) -> Result:
    """Install one pair into a new environment with what the tests need, and run them there."""
    log = logs / f"python-{python.version}{'t' * python.free_threaded}-torch-{torch}.log"
    log.unlink(missing_ok=True)
    row = Result(python.version, torch, {}, "", "yes" if python.free_threaded else "no")
    with tempfile.TemporaryDirectory(prefix="snapshot-matrix-", ignore_cleanup_errors=True) as folder:
        runner = Runner(Path(folder), log)
        if python.free_threaded:
            runner.environment["PYTHON_GIL"] = "0"  # no import enables it
        pip = (str(runner.python), "-m", "pip", "install", "--quiet")
        wanted = "torch" if torch == NEWEST else f"torch=={torch}"
        try:
            shutil.copytree(ROOT, runner.source, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_COPIED))
            for command in (
                (python.path, "-m", "venv", str(runner.python.parents[1])),
                (*pip, "--upgrade", "pip"),
                (*pip, wanted),
            ):
                if runner.run(*command):
                    return replace(row, outcome=f"could not be had: {last_error(log)}")
            if torch == NEWEST:
                row = replace(row, torch=runner.read(VERSION))
            if runner.run(*pip, f"torch=={row.torch}", "--editable", ".", *needs):
                return replace(row, outcome=f"could not be had: {last_error(log)}")
            status = runner.run(str(runner.python), "-m", "pytest", "-q", f"--junitxml={runner.report}", *tests)
        except (OSError, subprocess.CalledProcessError) as error:
            return replace(row, outcome=f"could not be had: {error}")
        counts = counts_of(runner.report)
    passed = status == 0 and counts.get("passed", 0) > 0
    return replace(row, counts=counts, outcome="passed" if passed else f"failed: see {log}")


def last_error(log: Path) -> str:
    """Return the last error that pip logged."""
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines)[-1].removeprefix("ERROR: ")


def table(results: Iterable[Result]) -> str:
    """Return the results as an aligned table."""
    rows = [("Python", "free-threaded", "torch", "passed", "failed", "skipped", "result")]
    for each in results:
        counts = [str(each.counts.get(name, "-")) for name in ("passed", "failed", "skipped")]
        rows.append((each.python, each.free_threaded, each.torch, counts[0], counts[1], counts[2], each.outcome))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the pairs and print their table."""
    minors, oldest, claimed = claims()
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--python",
        action="append",
        type=_python,
        metavar="PYTHON",
        help="a version such as 3.13 or 3.14t, or the path of an interpreter (default: every claimed minor version)",
    )
    parser.add_argument(
        "--torch",
        action="append",
        metavar="VERSION",
        help=f"(default: {oldest}, the oldest, and {NEWEST}, which pip takes)",
    )
    parser.add_argument(
        "--without", action="append", metavar="PACKAGE", default=[], help="do not install a package that tests can skip"
    )
    parser.add_argument("--quick", action="store_true", help=f"only the fast tests of {', '.join(QUICK)}")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where to write the logs (default: a new folder)")
    arguments = parser.parse_args(argv)
    try:
        needs = required(arguments.without)
    except ValueError as error:
        parser.error(str(error))
    tests = list(IGNORING) if arguments.without else []
    if arguments.quick:
        from tests.conftest import FAST  # imports pytest

        tests += ["-m", FAST, *QUICK]
    logs = (arguments.logs or Path(tempfile.mkdtemp(prefix="snapshot-matrix-logs-"))).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the folders
    results = []
    try:
        for name in arguments.python or minors:
            python = (probe(name) or "does not start") if os.sep in name else find(name, claimed)
            for torch in arguments.torch or (OLDEST.get(name, oldest), NEWEST):
                if isinstance(python, str):
                    threads = "yes" if name.endswith("t") else "no"
                    results.append(Result(name, torch, {}, f"could not be had: {python}", threads))
                else:
                    print(f"Python {python.version} ({python.path}) with torch {torch}", file=sys.stderr, flush=True)
                    results.append(run_pair(python, torch, tests, logs, needs))
    finally:
        signal.signal(signal.SIGTERM, before)
        print(table(results))
        print(f"logs: {logs}")
    return int(any(each.failed for each in results) or all(not each.counts for each in results))


def _python(text: str) -> str:
    """Return a minor version, or an absolute path."""
    if os.sep in text:
        return os.path.abspath(text)
    if not re.fullmatch(r"3\.\d+t?", text):
        raise argparse.ArgumentTypeError(f"must be a version such as 3.13 or 3.14t, or a path with a /, got {text!r}")
    return text


if __name__ == "__main__":
    sys.exit(main())
