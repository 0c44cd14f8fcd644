"""`snapshot rm`: it removes what is a snapshot of ours, after a question, and nothing else."""

import io
import json

import pytest
import torch

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.testing import faulty


@pytest.fixture
def taken(tmp_path):
    path = tmp_path / "run" / "step-1"
    SnapshotManager(tmp_path / "run", signals=()).take(1, {"s": StateDict(x=torch.zeros(10))})
    return path


def rm(*argv):
    return main(["rm", *map(str, argv)])


def test_cli_rm_yes_removes_the_snapshot_and_keeps_other_files(taken, capsys):
    (taken / "data" / "0123456789ab-0-0.bin").write_bytes(b"x")  # nobody claims it
    (taken / "notes.txt").write_text("mine")
    assert rm(taken, "--yes") == 0
    out = capsys.readouterr().out
    assert f"removed {taken}: 2 files, " in out
    assert [path.name for path in taken.rglob("*")] == ["notes.txt"]
    (taken / "notes.txt").unlink()


def test_cli_rm_dry_run_removes_nothing(taken, capsys):
    assert rm(taken, "--dry-run", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["what"], found["removed"]) == ("snapshot", False)
    assert Snapshot(taken).verify()


def test_cli_rm_keeps_a_base_that_other_snapshots_need(tmp_path, capsys):
    model = torch.nn.Linear(200, 200).requires_grad_(False)
    base = Snapshot.take(tmp_path / "base", {"m": model})
    Snapshot.take(tmp_path / "adapter", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    assert rm(tmp_path / "base", "--yes") == 2
    assert "has tensors that adapter left out; remove those first, or pass --bases" in capsys.readouterr().err
    assert base.verify()
    assert rm(tmp_path / "base", tmp_path / "adapter", "--yes", "--dry-run") == 0
    assert rm(tmp_path / "base", "--yes", "--bases") == 0
    assert not base.exists()


def test_cli_rm_json_lists_what_was_removed(taken, capsys):
    assert rm(taken, f"{taken}/", "--yes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["url"], found["what"], found["files"], found["removed"]) == (str(taken), "snapshot", 1, True)
    assert not taken.exists()


def test_cli_rm_refuses_without_a_terminal_and_asks_at_one(taken, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert rm(taken) == 2
    assert "--yes" in capsys.readouterr().err
    for answer, status in (("n\n", 1), ("yes\n", 0)):
        typed = io.StringIO(answer)
        typed.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", typed)
        assert Snapshot(taken).exists()
        assert rm(taken) == status
        assert f"remove {taken}? [y/N]" in capsys.readouterr().err
    assert not taken.exists()


def test_cli_rm_keeps_a_pinned_snapshot_without_the_pinned_option(taken, capsys):
    SnapshotManager(taken.parent, signals=()).pin(1)
    assert rm(taken, "--yes") == 2
    assert "pinned by a manager" in capsys.readouterr().err
    assert rm(taken, "--yes", "--pinned") == 0
    assert not taken.exists()


def test_cli_rm_removes_leftovers_of_an_interrupted_take_when_old_enough(taken, capsys):
    (taken / ".snapshot_metadata").unlink()
    save_id = next((taken / "data").iterdir()).name[:12]
    (taken / f".take-{save_id}").touch()
    assert rm(taken, "--yes") == 2
    assert "a take is running here, or was interrupted recently" in capsys.readouterr().err
    assert rm(taken, "--yes", "--older-than", "0") == 0
    assert "leftovers" in capsys.readouterr().out
    assert not taken.exists()


def test_cli_rm_refuses_a_snapshot_that_is_being_overwritten(taken, capsys):
    (taken / ".take-0123456789ab").touch()
    assert rm(taken, "--yes") == 2
    assert "a take is running here" in capsys.readouterr().err
    assert Snapshot(taken).verify()


def test_cli_rm_refuses_checkpoints_of_other_formats(taken, tmp_path, capsys):
    torch.save({"x": torch.zeros(3)}, tmp_path / "model.pt")
    other = tmp_path / "other"
    other.mkdir()
    (other / ".snapshot_metadata").write_text("version: 0.1.0\nworld_size: 1\nmanifest: {}\n")
    for path, message in (
        (tmp_path / "model.pt", "written by another library"),
        (other, "another library"),
        (taken.parent, "a folder of 1 snapshot: step-1; name one of them"),
        (tmp_path / "none", "there is no snapshot here"),
    ):
        assert rm(taken, path, "--yes") == 2
        assert message in capsys.readouterr().err
    assert Snapshot(taken).verify()
    assert (tmp_path / "model.pt").exists()
    assert other.exists()


def test_cli_rm_exits_1_if_a_removal_fails(taken, capsys):
    with faulty(on="delete", times=None, error=PermissionError(13, "Permission denied")):
        assert rm(f"faulty+file://{taken}", "--yes") == 1
    assert "removal failed" in capsys.readouterr().err
    assert Snapshot(taken).verify()
