"""Options of exports are checked when they are created, and those of a manager when that is."""

import time
from pathlib import Path

import pytest
import torch

from snapshot import KeepBest, KeepEvery, KeepWithin, SnapshotManager, StateDict, TensorMap
from snapshot.manager.policies import Policy
from snapshot_export import KeptExport
from snapshot_tiers import Near


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"to": "hf"}, ValueError, "^to must be one of .*'safetensors'.*, got 'hf'"),
        ({"to": "torch"}, ValueError, "^to must be a format that is a folder, such as 'safetensors', got 'torch'"),
        ({"to": "gguf"}, ValueError, "^to must be a format that is a folder"),
        ({"to": "snapshot"}, ValueError, "^to must be a format that is a folder"),
        ({"map": "llama"}, TypeError, "^map must be a TensorMap, got 'llama'"),
        ({"when": 0}, ValueError, "^when: keep must be at least 1, got 0"),
        ({"when": "best"}, TypeError, "^when: keep must be a number or a policy"),
        ({"name": "a.b"}, ValueError, "^name must be letters, .* got 'a.b'"),
        ({"name": "../up"}, ValueError, "^name must be letters"),
        ({"name": "5"}, ValueError, "^name must be letters"),
        ({"name": 5}, ValueError, "^name must be letters"),
        ({"when": KeepWithin("1kB") | KeepEvery(2)}, ValueError, "^when must be a policy without KeepWithin"),
        ({"select": "model/**"}, TypeError, "^select must be"),
        ({"dtype": torch.int8}, TypeError, "^dtype must be a floating-point dtype"),
        ({"files": "absent"}, ValueError, "^files must be a local folder, got '.*/absent'"),
        ({"files": {"model.bin": b""}}, ValueError, "^files must not have weights"),
    ],
)
def test_kept_export_refuses_wrong_options(given, error, text):
    with pytest.raises(error, match=text):
        KeptExport(**given)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"exports": KeptExport()}, TypeError, r"exports must be a list such as \[KeptExport\(...\)\], got Kept"),
        ({"exports": ["safetensors"]}, TypeError, "exports must be a list"),
        ({"exports": [KeptExport]}, TypeError, "exports must be a list"),
        ({"exports": [Path("out")]}, TypeError, "exports must be a list"),
        ({"exports": [KeptExport(), KeptExport()]}, ValueError, "must have different names, got safetensors, safet"),
        ({"exports": [KeptExport()], "near": Near("near")}, ValueError, "exports must be empty with `near`"),
        ({"exports": [KeptExport()], "root": "memory://x"}, ValueError, "exports must be empty for memory://x"),
        ({"exports": [KeptExport()], "root": "fsspec+memory://x"}, ValueError, "exports must be empty for fsspec"),
    ],
)
def test_manager_refuses_wrong_exports(tmp_path, given, error, text):
    with pytest.raises(error, match=text):
        SnapshotManager(**{"root": tmp_path / "run", "signals": (), **given})
    assert list(tmp_path.iterdir()) == []


def test_kept_export_that_keeps_no_step_starts_no_process(tmp_path, told):
    export = KeptExport(map=TensorMap(["x -> y"]), when=KeepEvery(10), dtype=torch.bfloat16)
    with SnapshotManager(tmp_path / "run", keep=1, signals=(), exports=[export]) as manager:
        for step in (1, 2, 3):
            manager.take(step, {"model": StateDict(x=torch.ones(3))})
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["step-3"]
    assert {each.name for each in told} == {"start", "blocked", "committed", "pruned"}


def test_metric_that_no_step_has_is_a_warning(tmp_path, caplog):
    export = KeptExport(when=KeepEvery(10) | KeepBest("losss"))
    with SnapshotManager(tmp_path / "run", signals=(), exports=[export]) as manager:
        for step in (1, 2):
            manager.take(step, {"model": StateDict(x=torch.ones(3))}, metrics={"loss": 1.0})
    assert [each.getMessage().partition(": ")[2] for each in caplog.records if each.levelname == "WARNING"] == [
        "no step has the metric 'losss', so `when` exports none for it"
    ]


class Broken(Policy):
    def keep(self, taken, now):
        raise KeyError("secret of a policy")


def test_policy_that_always_raises_does_not_stop_retention(tmp_path, told):
    with SnapshotManager(tmp_path / "run", keep=1, signals=(), exports=[KeptExport(when=Broken())]) as manager:
        for step in range(1, 6):
            manager.take(step, {"model": StateDict(x=torch.ones(3))})
            while len([each for each in told if each.name == "failed"]) < step:
                time.sleep(0.005)
    assert manager.steps() == [5]


@pytest.mark.parametrize("kind", ["file", "folder", "loop"])
def test_names_of_exports_that_are_none_do_not_stop_retention(kind, tmp_path, told):
    path = tmp_path / "run" / "step-1-safetensors"
    path.parent.mkdir()
    if kind == "file":
        path.touch()
    elif kind == "folder":
        (path / ".exported").mkdir(parents=True)
    else:
        path.symlink_to(path)
    with SnapshotManager(tmp_path / "run", keep=1, signals=(), exports=[KeptExport(when=KeepEvery(10))]) as manager:
        for step in (2, 3):
            manager.take(step, {"model": StateDict(x=torch.ones(3))})
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["step-1-safetensors", "step-3"]
    assert "failed" not in {each.name for each in told}
