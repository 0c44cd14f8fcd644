"""The script that runs the tests with many versions: interpreters, results, and a pair that cannot be installed."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.matrix.__main__ import Interpreter, Result, claims, find, main, probe, required, table


def test_matrix_claims_are_read_from_pyproject():
    minors, oldest, claimed = claims()
    assert "3.11" in minors
    assert oldest.count(".") == 2
    assert "3.12.1" not in claimed


def test_matrix_probe_reports_the_version_of_an_interpreter():
    found = probe(sys.executable)
    assert found.version == ".".join(map(str, sys.version_info[:3]))
    assert probe("/no/such/python") is None
    assert Interpreter("python", "3.14.2", True).name == "3.14t"


def test_matrix_required_leaves_out_packages():
    every, some = required([]), required(["GCSFS", "ninja"])
    assert sorted(re.split(r"[^a-z]", each)[0] for each in set(every) - set(some)) == ["gcsfs", "ninja"]
    assert set(some) < set(every)
    assert not [each for each in every if each.startswith("snapshot")]
    with pytest.raises(ValueError, match="must name packages that the tests require, got no-such-package"):
        required(["no_such_package"])


def test_matrix_find_uses_only_claimed_interpreters(tmp_path, monkeypatch):
    here = probe(sys.executable)
    link = tmp_path / f"python{here.name}"
    link.symlink_to(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find(here.name, SpecifierSet(">=3")).path == str(link)
    assert find(here.name, SpecifierSet(f"!={here.version}")) == f"not claimed: {here.version}"
    assert find("3.1", SpecifierSet(">=3")) == "not installed"


def test_matrix_table_has_one_row_per_pair():
    rows = [
        Result("3.11.7", "2.6.0", {"passed": 10, "failed": 0, "skipped": 2}, "passed"),
        Result("3.14t", "2.6.0", {}, "could not be had: not installed", "yes"),
    ]
    assert table(rows).splitlines() == [
        "Python  free-threaded  torch  passed  failed  skipped  result",
        "3.11.7  no             2.6.0  10      0       2        passed",
        "3.14t   yes            2.6.0  -       -       -        could not be had: not installed",
    ]


@pytest.mark.parametrize("name", ["3.12.3", "python3.13", "3", ""])
def test_matrix_python_option_is_a_version_or_a_path(name, capsys):
    with pytest.raises(SystemExit):
        main(["--python", name])
    assert "must be a version such as 3.13 or 3.14t, or a path with a /" in capsys.readouterr().err


STUB = """#!/bin/sh
case "$*" in
  *json.dumps*) echo '["3.99.1", true]' ;;
  *importlib.metadata*) echo 9.9.9 ;;
  *venv*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *'-m pytest '*)
    [ "$PYTHON_GIL" = 0 ] || exit 3
    for each in "$@"; do case $each in --junitxml=*) cat > "${each#*=}" << END
<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="4" tests="17"></testsuite></testsuites>
END
    esac; done
    sleep 60 & echo $! > LEFT; STATUS ;;
esac
"""
"""A free-threaded Python whose installations succeed."""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return a function that writes an interpreter whose tests end with a status, and lets the script run it."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path)

    def run(status, *more):
        left = tmp_path / "left"
        (tmp_path / "python").write_text(STUB.replace("LEFT", str(left)).replace("STATUS", status))
        (tmp_path / "python").chmod(0o755)
        try:
            return main(["--python", "./python", "--torch", "2.9.0", "--logs", "logs", *more])
        finally:
            if left.exists():
                assert is_gone(int(left.read_text()))
            assert not list((tmp_path / "temporary").iterdir())

    return run


def is_gone(pid):
    """True soon, if a process was ended."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("status", "outcome"), [("exit 0", "passed"), ("exit 1", "failed: see")])
def test_matrix_runs_and_counts_a_pair_and_leaves_no_files(stub, tmp_path, capsys, status, outcome):
    assert stub(status) == int(outcome != "passed")
    row = capsys.readouterr().out.splitlines()[1]
    assert re.fullmatch(r"3\.99\.1 +yes +2\.9\.0 +10 +3 +4 +" + outcome + ".*", row)
    assert (
        "install --quiet torch==2.9.0 --editable . " in (tmp_path / "logs/python-3.99.1t-torch-2.9.0.log").read_text()
    )


def test_matrix_torch_newest_installs_what_pip_chooses(stub, tmp_path, capsys):
    assert stub("exit 0", "--torch", "newest") == 0
    assert [row.split()[2] for row in capsys.readouterr().out.splitlines()[1:3]] == ["2.9.0", "9.9.9"]
    log = (tmp_path / "logs/python-3.99.1t-torch-newest.log").read_text()
    assert "install --quiet torch\n" in log
    assert "install --quiet torch==9.9.9 --editable . " in log


def test_matrix_ends_tests_that_take_too_long(stub, monkeypatch, capsys):
    monkeypatch.setattr("tests.matrix.__main__.LONGEST", 2.0)
    assert stub("exec sleep 60") == 1
    assert "failed: see" in capsys.readouterr().out


def test_matrix_interrupted_by_a_signal_prints_its_results(stub, tmp_path, capsys):
    # once the script has noted the command in the log, it waits for it
    noted = f"until grep -q -e '-m pytest' {tmp_path}/logs/*; do sleep 0.05; done"
    with pytest.raises(SystemExit):
        stub(f"{noted}; kill -TERM {os.getpid()}; exec sleep 60")
    assert "Python" in capsys.readouterr().out


def test_matrix_reports_a_pair_that_cannot_be_installed(stub, tmp_path, capsys):
    assert stub("exit 0", "--python", "/no/such/python", "--quick") == 0
    assert "could not be had: does not start" in capsys.readouterr().out
    assert main(["--python", "/no/such/python"]) == 1, "no test ran"


@pytest.mark.slow
def test_matrix_reports_a_failed_installation(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # no network
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert main(["--python", sys.executable, "--torch", "0.0.1", "--logs", str(tmp_path / "logs")]) == 1
    assert "could not be had: " in capsys.readouterr().out
    assert [each.name for each in (tmp_path / "logs").iterdir()]
