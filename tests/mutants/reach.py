"""A plugin of pytest that notes which tests run each line of the library, and how long: `-p tests.mutants.reach`.

The lines of a test's own process count, not those of the processes that it starts.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

ROOT = Path(__file__).parents[2]
_seconds: dict[str, float] = {}
_measured: coverage.Coverage | None = None


def pytest_configure(config):
    """Begin, in the processes that run tests."""
    global _measured  # noqa: PLW0603 - one for the process
    if os.environ.get("PYTEST_XDIST_WORKER") or not config.option.numprocesses:
        sources = [str(ROOT / each) for each in ("snapshot", "plugins")]
        _measured = coverage.Coverage(data_file=None, config_file=False, source=sources)
        _measured.start()


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
        lines = defaultdict(list)
        for line, tests in data.contexts_by_lineno(path).items():
            lines[line] = [each for each in tests if each]
        found[os.path.relpath(os.path.realpath(path), ROOT)] = {line: tests for line, tests in lines.items() if tests}
    Path(os.environ["SNAPSHOT_TEST_REACH"], f"{os.getpid()}.json").write_text(json.dumps([_seconds, found]))
