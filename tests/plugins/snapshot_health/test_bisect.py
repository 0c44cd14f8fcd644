"""`snapshot bisect`: the first bad step, with few reads."""

import json
import math

import pytest
import torch

from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.testing import recording
from snapshot_health.bisection import find_first_bad
from snapshot_health.page_server import RunView


def make(root, bad_from, steps=range(10, 170, 10), value=math.nan):
    """A run whose tensor `w` is bad from a step on, beside one that never changes and a mask."""
    kept = torch.arange(5000.0)
    for step in steps:
        w = torch.full((40, 30), float(step))
        if step >= bad_from:
            w[7, 5:9] = value
        state = StateDict(w=w, kept=kept, mask=torch.full((8,), -math.inf), scale=torch.tensor([math.nan]), n=step)
        Snapshot.take(f"{root}/step-{step}", {"s": state})
    return list(steps)


@pytest.mark.parametrize("bad_from", [20, 30, 90, 150, 160])
def test_bisect_finds_the_first_bad_step_with_few_reads(tmp_path, bad_from):
    steps = make(tmp_path, bad_from)
    with recording() as log:
        report = find_first_bad(steps, lambda step: Snapshot(f"recording+file://{tmp_path}/step-{step}"))
    assert (report.step, report.last_good) == (bad_from, bad_from - 10)
    assert report.faults == ("0/s/w: 4 are NaN or infinite",)
    assert len(report.examined) <= 5
    data = log.nbytes("read_into", "data/*.safetensors")
    assert data < 9 * 40 * 30 * 4 + 2 * 5000 * 4  # the constant tensor is read once


def test_bisect_norm_compares_with_the_first_step(tmp_path):
    steps = make(tmp_path, 90, value=1e9)
    at = lambda step: Snapshot(tmp_path / f"step-{step}")  # noqa: E731
    assert find_first_bad(steps, at).step is None
    assert find_first_bad(steps, at, "norm").step == 90
    assert find_first_bad(steps, at, lambda snapshot: snapshot.read_object("s/n") < 130).step == 130
    with pytest.raises(ValueError, match="check must be 'finite', 'norm' or a function, got 'loud'"):
        find_first_bad(steps, at, "loud")
    with pytest.raises(SnapshotError, match="at least two steps"):
        find_first_bad(steps[:1], at)


def is_early(snapshot):
    return snapshot.read_object("s/n") < 50


def test_cli_bisect_prints_the_first_bad_and_last_good_step(tmp_path, capsys):
    make(tmp_path, 90)
    assert main(["bisect", str(tmp_path)]) == 1
    assert "step-90 is the first bad one, step-80 is good" in capsys.readouterr().out
    assert main(["bisect", str(tmp_path), "--last", "80", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] is None
    assert (
        main(
            ["bisect", str(tmp_path), "--check", "tests.plugins.snapshot_health.test_bisect:is_early", "--first", "20"]
        )
        == 1
    )
    assert "step-50 is the first bad one" in capsys.readouterr().out
    assert main(["bisect", str(tmp_path), "--first", "11"]) == 2
    assert main(["bisect", str(tmp_path / "nothing")]) == 2


def test_cli_ls_marks_a_suspect_step(tmp_path, capsys):
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    app = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    Snapshot.take(tmp_path / "step-1", app)
    assert main(["ls", str(tmp_path)]) == 0
    assert "suspect: nonfinite: NaN or infinity" in capsys.readouterr().out
    assert main(["ls", str(tmp_path / "step-1"), "--json"]) == 0
    capsys.readouterr()
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["snapshots"][0]["suspect"]


@pytest.mark.parametrize(("choice", "key"), [("suspect", "suspect"), ("report", "findings")])
def test_cli_ls_show_and_ui_print_the_findings_of_a_snapshot(tmp_path, capsys, choice, key):
    mark, problem = {"suspect": ("suspect", "problem"), "report": ("found", "found")}[choice]
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    app = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    Snapshot.take(tmp_path / "step-1", app, options=TakeOptions(guards=choice))
    for verb in (["ls", str(tmp_path)], ["ls", str(tmp_path / "step-1")], ["show", str(tmp_path / "step-1"), "m/bias"]):
        assert main(verb) == 0
        assert f"{mark}: nonfinite: NaN or infinity in m/weight" in capsys.readouterr().out
    assert main(["show", str(tmp_path / "step-1"), "m/bias", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[key] == ["nonfinite: NaN or infinity in m/weight (64 of 64)"]
    assert RunView(str(tmp_path)).steps(9)["steps"][0][problem].startswith(f"{mark}: nonfinite: NaN")
