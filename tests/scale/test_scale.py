"""The command that starts hundreds of ranks works with a few of them, and sees what goes wrong."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scale.faults import Fault, Outcome, names_rank
from tests.scale.job import Report

TOP = Path(__file__).parents[2]
pytestmark = pytest.mark.ranks
GOOD = Outcome(Fault("take", "write", "kill"), 7, 7, 7, 2.5, "RankError: rank 4")


def run(*arguments):
    command = [sys.executable, "-m", "tests.scale", *arguments]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_scale_eight_ranks_take_restore_and_lose_one():
    printed = run("verbs", "faults", "--ranks", "8", "--timeout", "2", "--phase", "finish")
    for name in ("take, same structure", "async_take and wait", "restore on 6 ranks", "restore on 10 ranks"):
        assert name in printed
    rows = [line for line in printed.splitlines() if "finish a data file" in line]
    assert len(rows) == 4
    assert all(row.count("7/7") == 2 and "nothing committed" in row for row in rows)


def test_scale_phase_that_is_unknown_is_refused():
    command = [sys.executable, "-m", "tests.scale", "faults", "--phase", "nothing"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--phase must be in one of before the call, state_dict," in done.stderr


@pytest.mark.timeout(300)  # fourteen faults, of some seconds each
def test_scale_compare_runs_the_same_faults_with_dcp():
    rows = [
        line for line in run("compare", "--ranks", "4", "--timeout", "2").splitlines() if line.split()[:1] == ["DCP"]
    ]
    assert len(rows) == 14
    assert any("0/3" in row for row in rows), "DCP names no culprit, or the text of an error is judged too kindly"


@pytest.mark.parametrize("change", [{"raised": 6}, {"named": 0}, {"slowest": 15.1}])
def test_scale_report_of_a_late_or_unaware_survivor_is_not_good(change):
    assert GOOD.is_good
    assert not replace(GOOD, **change).is_good


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("rank 4 sent no heartbeat", True),
        ("failed on ranks: [4]", True),
        ("RANK=4", True),
        ("rank 40 sent no heartbeat", False),
        ("rank 3 failed after 4 s", False),
        ("Connection closed by peer [127.0.0.1]:4", False),
    ],
)
def test_scale_names_rank_finds_the_rank_number_in_an_error(text, named):
    assert names_rank(Report(1, "ended", 0.0, error="E", text=text), 4) == named
    assert names_rank(Report(1, "ended", 0.0, error="E", culprit=4), 4)
