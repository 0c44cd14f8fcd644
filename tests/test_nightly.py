"""The lists of tests: those of `.ci/run --all` alone, those that the fast tier leaves out or adds, and flaky ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snapshot.testing import conformance
from tests import flaky
from tests.conftest import COLLECTED, COMBINED, NIGHTLY, SLOW, SMOKE

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(NIGHTLY, id="nightly"),
        pytest.param(SLOW, id="slow"),
        pytest.param(SMOKE, id="smoke"),
        pytest.param({each for each in COMBINED if not each.startswith("snapshot/")}, id="combined"),
    ],
)
def test_each_line_of_a_list_names_tests(lines, request):
    names = request.config.stash.get(COLLECTED, ())
    for line in lines:
        module, *classes, name = line.partition("[")[0].split("::") if "::" in line else (line, "")
        source = (HERE / module).read_text()
        if classes:  # its tests may be those of a suite
            source += Path(conformance.__file__).read_text()
        indent = "    " * len(classes)
        assert not name or re.search(rf"^{indent}(async )?def {re.escape(name)}\(", source, re.MULTILINE), line
        # one case is there, too, if all modules were collected
        whole = lines is not NIGHTLY  # whose lines may be the beginnings of cases
        starts = (line + "[", line + "::") if whole else (line,)
        assert not names or any(each == line or each.startswith(starts) for each in names), line


def test_flaky_tests_have_a_date_and_a_cause(tmp_path, monkeypatch):
    flaky.read_known()
    monkeypatch.setattr(flaky, "LIST", tmp_path / "flaky.txt")
    flaky.LIST.write_text("# a comment\nio/test_a.py::test_b[x y]  2026-01-31  its port is taken\n")
    assert flaky.read_known() == {"tests/io/test_a.py::test_b[x y]"}
    flaky.LIST.write_text("io/test_a.py::test_b  its port is taken\n")
    with pytest.raises(ValueError, match="DATE"):
        flaky.read_known()


@pytest.mark.parametrize(("listed", "status"), [(True, 0), (False, 1)])
def test_flaky_list_decides_if_a_run_with_a_failed_test_passes(listed, status, tmp_path, monkeypatch, capsys):
    name = "tests/test_nightly.py::test_flaky_tests_have_a_date_and_a_cause"
    monkeypatch.setattr(flaky, "LIST", tmp_path / "flaky.txt")
    flaky.LIST.write_text(f"{name.removeprefix('tests/')}  2026-01-31  chance\n" if listed else "")
    (tmp_path / "lastfailed").write_text(f'{{"{name}": true}}')
    assert flaky.main("1", tmp_path / "lastfailed") == status
    assert "passes alone" in capsys.readouterr().out


@pytest.mark.parametrize("status", ["2", "3", "4", "5", "139"])
def test_flaky_excuses_no_run_that_did_not_end(status, tmp_path, monkeypatch):
    monkeypatch.setattr(flaky, "LIST", tmp_path / "flaky.txt")
    flaky.LIST.write_text("test_nightly.py::test_a  2026-01-31  chance\n")
    (tmp_path / "lastfailed").write_text('{"tests/test_nightly.py::test_a": true}')
    assert flaky.main(status, tmp_path / "lastfailed") == 1


@pytest.mark.slow
def test_pytest_fails_if_one_of_its_processes_crashes_between_tests(tmp_path):
    (tmp_path / "conftest.py").write_text(CRASHES.format(conftest=str(HERE / "conftest.py")))
    (tmp_path / "test_a.py").write_text("def test_a(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-c", os.devnull, "--rootdir", tmp_path, "test_a.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "node down" in done.stdout
    assert "1 passed" in done.stdout
    assert done.returncode == pytest.ExitCode.INTERNAL_ERROR, done.stdout


CRASHES = """
import ast, os, signal, pytest
tree = ast.parse(open({conftest!r}).read())
wanted = ("CRASHED", "pytest_testnodedown", "pytest_sessionfinish")
found = [each for each in tree.body if getattr(each, "name", None) in wanted or "CRASHED" in ast.unparse(each)[:7]]
exec(compile(ast.Module(found, []), "conftest", "exec"))

fail = pytest_sessionfinish

def pytest_sessionfinish(session):
    if getattr(session.config, "workerinput", {{}}).get("workerid") == "gw0":
        os.kill(os.getpid(), signal.SIGSEGV)
    fail(session)
"""
