"""`snapshot prune`: it shows what would go, asks, and removes no more than that."""

import io
import json
import os
import time

import pytest
import torch

from snapshot import Snapshot, SnapshotManager, StateDict
from snapshot.cli import main
from snapshot.save.transaction import DAY
from snapshot.testing import faulty

LOSSES = {10: 0.5, 20: 0.1, 30: float("nan"), 40: 0.3}


@pytest.fixture
def run(tmp_path):
    """A root with four steps, leftovers of an old take, a running one, and what is none of ours."""
    root = tmp_path / "run"
    manager = SnapshotManager(root, signals=())
    for step, loss in LOSSES.items():
        manager.take(step, {"s": StateDict(x=torch.zeros(10))}, metrics={"loss": loss})
    for step, age in ((5, DAY + 60), (50, 0)):
        (root / f"step-{step}" / "data").mkdir(parents=True)
        (root / f"step-{step}" / "data" / "0123456789ab-0-0.bin").write_bytes(b"x" * 100)
        claim = root / f"step-{step}" / ".take-0123456789ab"
        claim.touch()
        os.utime(claim, (time.time() - age,) * 2)
    (root / "step-7").mkdir()
    (root / "step-7" / ".metadata").write_bytes(b"of another library")
    (root / "notes").mkdir()
    return root


def there(root):
    return sorted(int(name.removeprefix("step-")) for name in os.listdir(root) if name.startswith("step-"))


def prune(*argv):
    return main(["prune", *map(str, argv)])


def fates(capsys, *argv):
    assert prune(*argv, "--json", "--dry-run") == 0
    return {each["step"]: each for each in json.loads(capsys.readouterr().out)["steps"]}


def test_cli_prune_dry_run_shows_what_would_be_removed_and_why_the_rest_stays(run, capsys):
    found = fates(capsys, run, "--keep-latest", 1, "--keep-best", "loss")
    assert {step: (each["goes"], each["why"]) for step, each in found.items()} == {
        5: (True, "an interrupted take"), 7: (False, "not a snapshot of this library"),
        10: (True, "no policy keeps it"), 20: (False, "best by loss"), 30: (True, "no policy keeps it"),
        40: (False, "latest"), 50: (False, "a take may be running there"),
    }  # fmt: skip
    assert found[20]["metrics"] == {"loss": 0.1}
    assert there(run) == [5, 7, 10, 20, 30, 40, 50]


def test_cli_prune_yes_removes_only_what_the_dry_run_showed(run, capsys):
    assert prune(run, "--keep-latest", 1, "--keep-best", "loss:1:min", "--yes") == 0
    assert "removed 2 snapshots and leftovers in 1 folder" in capsys.readouterr().out
    assert there(run) == [7, 20, 40, 50]
    assert (run / "step-7" / ".metadata").exists()
    assert (run / "step-50" / ".take-0123456789ab").exists()
    assert (run / "notes").exists()
    assert all(Snapshot(run / f"step-{step}").verify() for step in (20, 40))
    assert prune(run, "--keep-latest", 1, "--keep-best", "loss", "--yes") == 0
    assert "to remove: nothing, 0 B; to keep: 2 snapshots" in capsys.readouterr().out


def test_cli_prune_without_a_policy_removes_only_leftovers(run, capsys):
    assert prune(run, "--yes") == 0
    assert there(run) == [7, 10, 20, 30, 40, 50]
    assert prune(run, "--yes", "--older-than", "0") == 0
    assert there(run) == [7, 10, 20, 30, 40]


def test_cli_prune_removes_leftovers_beside_a_snapshot_and_keeps_the_snapshot(run):
    stale = run / "step-20" / "data" / "ba9876543210-0-0.bin"
    stale.write_bytes(b"x")
    mine = run / "step-20" / "data" / "mine.bin"
    mine.write_bytes(b"x")
    assert prune(run, "--yes") == 0
    assert not stale.exists()
    assert mine.exists()
    assert Snapshot(run / "step-20").verify()


def test_cli_prune_keeps_the_data_of_a_damaged_manifest(run, capsys):
    os.truncate(run / "step-20" / ".snapshot_metadata", 300)
    before = sorted((run / "step-20").rglob("*"))
    assert prune(run, "--keep-latest", 1, "--yes", "--older-than", 0) == 0
    assert "its manifest cannot be read" in capsys.readouterr().out
    assert sorted((run / "step-20").rglob("*")) == before


def test_cli_prune_does_not_count_or_remove_a_damaged_snapshot(run, capsys):
    (next((run / "step-40" / "data").glob("*.safetensors"))).unlink()
    found = fates(capsys, run, "--keep-latest", 1)
    assert (found[40]["what"], found[40]["goes"]) == ("damaged", False)
    assert "is missing" in found[40]["why"]
    assert {step: found[step]["goes"] for step in (10, 20, 30)} == {10: True, 20: True, 30: False}


def test_cli_prune_does_not_count_or_remove_foreign_files(run):
    (run / "step-60").mkdir()
    (run / "step-60" / ".snapshot_metadata").write_text("my own notes")
    assert prune(run, "--keep-latest", 1, "--yes") == 0
    assert there(run) == [7, 40, 50, 60]


def test_cli_prune_keep_best_with_an_unknown_metric_names_the_known_metrics(run, capsys):
    before = there(run)
    assert prune(run, "--keep-best", "los", "--yes") == 2
    assert "no snapshot has the metric 'los'; known metrics: loss" in capsys.readouterr().err
    assert there(run) == before


def test_cli_prune_older_than_applies_to_takes_beside_a_snapshot(run, capsys):
    (run / "step-10" / ".take-0123456789ab").touch()
    assert not fates(capsys, run, "--keep-latest", 1)[10]["goes"]
    assert prune(run, "--keep-latest", 1, "--yes", "--older-than", 0) == 0
    assert there(run) == [7, 40]


def test_cli_prune_keeps_pinned_steps_and_those_of_each_policy(run, capsys):
    SnapshotManager(run, signals=()).pin(10)
    found = fates(capsys, run, "--keep-every", 30, "--keep-for", "0.000001s", "--keep-best", "loss:9:max")
    assert {step: each["goes"] for step, each in found.items() if each["what"] == "snapshot"} == {
        10: False, 20: False, 30: False, 40: False
    }  # fmt: skip
    found = fates(capsys, run, "--keep-every", 30)
    assert {step: each["why"] for step, each in found.items() if each["what"] == "snapshot"} == {
        10: "pinned", 20: "no policy keeps it", 30: "every 30", 40: "newest"
    }  # fmt: skip
    assert found[30]["metrics"] == {"loss": "nan"}
    assert found[20]["bytes"] > 4000


def test_cli_prune_without_a_terminal_or_yes_refuses(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert prune(run, "--keep-latest", 1) == 2
    assert "pass --yes" in capsys.readouterr().err
    assert there(run) == [5, 7, 10, 20, 30, 40, 50]


@pytest.mark.parametrize(("answer", "status"), [("y\n", 0), ("\n", 1), ("", 1), ("nonsense\n", 1)])
def test_cli_prune_asks_at_a_terminal(run, capsys, monkeypatch, answer, status):
    typed = io.StringIO(answer)
    typed.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", typed)
    assert prune(run, "--keep-latest", 2) == status
    asked = capsys.readouterr().err
    assert f"remove 2 snapshots and leftovers in 1 folder from {run}? [y/N]" in asked
    assert (10 in there(run)) == bool(status)


def test_cli_prune_exits_1_if_a_removal_fails(run, capsys):
    url = f"faulty+file://{run}"
    with faulty(on="delete", path=".snapshot_metadata", times=1, error=PermissionError(13, "Permission denied")):
        assert prune(url, "--keep-latest", 2, "--yes") == 1
    out, err = capsys.readouterr()
    assert "removal failed" in err
    assert "Permission denied" in err
    assert "removed 1 snapshot and leftovers in 1 folder" in out


def test_cli_prune_of_a_root_without_steps_says_what_is_there(run, tmp_path, capsys):
    assert prune(tmp_path, "--keep-latest", 1) == 2
    assert "found run/" in capsys.readouterr().err
    assert prune(run / "step-20", "--keep-latest", 1) == 2
    assert f"not a folder of steps but a snapshot; name the folder above it: {run}" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert prune(tmp_path / "file", "--keep-latest", 1) == 2
    assert "but a file" in capsys.readouterr().err
    assert prune(tmp_path / "none", "--keep-latest", 1) == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["--keep-latest", "0"],
        ["--keep-latest", "x"],
        ["--keep-best", ":3"],
        ["--keep-best", "loss:0"],
        ["--keep-for", "soon"],
        ["--keep-for", "0s"],
        ["--older-than", "-1"],
        [],
    ],
)
def test_cli_prune_exits_2_if_arguments_are_invalid(argv, capsys):
    assert prune(*(["x", *argv] if argv else [])) == 2


def test_cli_prune_keep_best_metric_may_contain_colons():
    from snapshot.cli.prune import best

    assert str(best("val:loss:2:max")) == "best 2 by val:loss"
    assert (best("a:max").mode, best("a").mode, best("a:3").n) == ("max", "min", 3)
