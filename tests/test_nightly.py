"""The lists of tests: those of `.ci/run --all` alone, those that the fast tier leaves out or adds, and flaky ones."""

import re
from pathlib import Path

import pytest

from snapshot.testing import conformance
from tests import flaky
from tests.conftest import COLLECTED, NIGHTLY, SLOW, SMOKE

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "lines", [pytest.param(NIGHTLY, id="nightly"), pytest.param(SLOW, id="slow"), pytest.param(SMOKE, id="smoke")]
)
def test_each_line_of_nightly_slow_and_smoke_txt_names_tests(lines, request):
    names = request.config.stash.get(COLLECTED, ())
    for line in lines:
        module, *classes, name = line.partition("[")[0].split("::") if "::" in line else (line, "")
        source = (HERE / module).read_text()
        if classes:  # its tests may be those of a suite
            source += Path(conformance.__file__).read_text()
        indent = "    " * len(classes)
        assert not name or re.search(rf"^{indent}(async )?def {re.escape(name)}\(", source, re.MULTILINE), line
        # one case is there, too, if all modules were collected
        assert not names or any(each.startswith(line) for each in names), line


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
    (tmp_path / "log").write_text("1 failed")
    (tmp_path / "lastfailed").write_text(f'{{"{name}": true}}')
    assert flaky.main(tmp_path / "log", tmp_path / "lastfailed") == status
    assert "passes alone" in capsys.readouterr().out


def test_flaky_main_fails_if_a_worker_crashed(tmp_path):
    (tmp_path / "log").write_text("worker 'gw0' crashed while running ...")
    (tmp_path / "lastfailed").write_text("{}")
    assert flaky.main(tmp_path / "log", tmp_path / "lastfailed") == 1
