"""Options of exports are checked when they are created, and those of a manager when that is."""

import pytest
import torch

from snapshot import KeepEvery, SnapshotManager, StateDict, TensorMap
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
