"""A plugin of pytest that notes which tests run each line of the library, and how long: `-p tests.mutants.reach`.

Lines count that a process runs which a test starts, unless the process is killed: each of them has the name of its test
in PYTEST_CURRENT_TEST, and imports this module from a sitecustomize.py. Ranks of a pool note their lines after each
request.
"""

import atexit
import functools
import json
import multiprocessing.util
import os
import shutil
import tempfile
import time
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
CHILD = f"""
import importlib.util, os, sys
if "PYTEST_CURRENT_TEST" in os.environ:
    spec = importlib.util.spec_from_file_location("tests.mutants.reach", {__file__!r})
    module = sys.modules["tests.mutants.reach"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.begin_child()
"""
"""What each interpreter below this one runs at its start."""
_seconds: dict[str, float] = {}
_measured: coverage.Coverage | None = None
_written = 0


def begin() -> coverage.Coverage:
    """Begin to note lines in this process."""
    sources = [str(ROOT / each) for each in ("snapshot", "plugins")]
    measured = coverage.Coverage(data_file=None, config_file=False, source=sources, messages=False)
    measured.set_option("run:disable_warnings", ["no-data-collected"])
    measured.start()
    return measured


def begin_child() -> None:
    """Begin to note lines in a process that works for a test, but is no worker of pytest."""
    begin().switch_context("0")
    atexit.register(write_child)
    # multiprocessing's children end without exit handlers, and forget those of their parent
    multiprocessing.util.register_after_fork(os, _register)


def _register(_: object) -> None:
    multiprocessing.util.Finalize(None, write_child, exitpriority=-100)


def write_child() -> None:
    """Write the lines that this process has run since the last time, as those of the test that it works for."""
    global _written  # noqa: PLW0603 - one for the process
    measured = coverage.Coverage.current()
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if measured is None or not test:
        return
    data, found = measured.get_data(), {}
    for path in data.measured_files():
        lines = data.contexts_by_lineno(path).items()
        found[_relative(path)] = {test: [line for line, written in lines if str(_written) in written]}
    _written += 1
    measured.switch_context(str(_written))
    if any(lines for each in found.values() for lines in each.values()):
        _write({}, found)


def _write(seconds: dict[str, float], found: dict[str, dict[str, list[int]]]) -> None:
    """Write a whole file, or none if this process is killed: the seconds of tests, and by module the lines of each."""
    file, path = tempfile.mkstemp(suffix=".part", dir=os.environ["SNAPSHOT_TEST_REACH"])
    with open(file, "w") as stream:
        json.dump([seconds, found], stream)
    os.rename(path, path.removesuffix(".part") + ".json")


def pytest_configure(config):
    """Begin, in the processes that run tests."""
    global _measured  # noqa: PLW0603 - one for the process
    if os.environ.get("PYTEST_XDIST_WORKER"):
        _measured = begin()
        return
    folder = tempfile.mkdtemp(prefix="reach-")
    Path(folder, "sitecustomize.py").write_text(CHILD)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Note the lines of a test under its name."""
    if _measured is not None:
        _measured.switch_context(item.nodeid)
    began = time.monotonic()
    yield
    _seconds[item.nodeid] = round(time.monotonic() - began, 3)
    if _measured is not None:
        _measured.switch_context("")


def pytest_sessionfinish():
    """Write the tests of each line into the folder that SNAPSHOT_TEST_REACH names."""
    if _measured is None:
        return
    _measured.stop()
    data, found = _measured.get_data(), {}
    for path in data.measured_files():
        tests = found[_relative(path)] = {}
        for line, reaching in data.contexts_by_lineno(path).items():
            for test in filter(None, reaching):
                tests.setdefault(test, []).append(line)
    _write(_seconds, found)


def _relative(path: str) -> str:
    return os.path.relpath(os.path.realpath(path), ROOT)
