"""Committed steps are exported beside themselves, in a process, and their exports go with them."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

import snapshot
from snapshot import KeepBest, KeepEvery, KeepLatest, Snapshot, SnapshotManager, StateDict, TensorMap
from snapshot.cli import main
from snapshot.manager.policies import Policy
from snapshot_export import KeptExport, kept_export
from tests.helpers.processes import command_line
from tests.helpers.trees import PYTHONPATH

pytestmark = pytest.mark.slow
MODEL = ["model/**"]


def state(value=0):
    return {"model": StateDict(weight=torch.full((1000,), float(value))), "progress": StateDict(step=value)}


def manager_of(root, *exports, **options):
    return SnapshotManager(root, **{"signals": (), "exports": exports or [KeptExport(select=MODEL)], **options})


def named(told, *names):
    return [(each.name, each.fields["step"]) for each in told if each.name in names]


def names(root):
    return sorted(each.name for each in Path(root).iterdir())


def until(true):
    """Wait until something is true, and return it."""
    end = time.monotonic() + 300
    while not (found := true()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def exports_of(parent=None):
    """Return the processes that export for another one, which may have others, too."""
    return [each for each in psutil.Process(parent).children() if "snapshot_export" in command_line(each)]


def exporting(parent=None):
    """Return the process that exports for another one, as soon as it has begun."""
    return until(lambda: exports_of(parent))[0]


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore")
def test_kept_export_is_a_folder_that_transformers_loads(tmp_path, told):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(0)
    net = transformers.LlamaForCausalLM(config).eval()
    config.save_pretrained(tmp_path / "config")
    own = StateDict({f"own.{name}": each for name, each in net.state_dict().items()})
    tensor_map = TensorMap([f"own.{name} -> {name}" for name in net.state_dict()])
    export = KeptExport(map=tensor_map, when=KeepEvery(10), select=MODEL, files=tmp_path / "config", name="hf")
    with manager_of(tmp_path / "run", export, keep=KeepLatest(1) | KeepEvery(20)) as manager:
        for step in (10, 15, 20, 25):
            manager.take(step, {"model": own, "more": StateDict(x=torch.ones(3))})
    assert sorted(named(told, "exported", "export_failed")) == [("exported", 10), ("exported", 20)]
    done = next(each for each in told if each.name == "exported")
    assert (done.verb, done.fields["tensors"]) == ("export", len(net.state_dict()))
    assert done.fields["bytes"] > 0
    assert names(tmp_path / "run") == ["step-20", "step-20-hf", "step-25"]
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "run" / "step-20-hf")
    tokens = torch.arange(20).view(1, -1)
    assert torch.equal(again(tokens).logits, net(tokens).logits)


def test_kept_export_of_async_takes_with_other_formats(tmp_path, told):
    exports = [KeptExport(select=MODEL, when=KeepBest("loss"), dtype=torch.bfloat16), KeptExport("dcp", when=1)]
    with manager_of(tmp_path / "run", *exports) as manager:
        for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
            manager.async_take(step, state(step), metrics={"loss": loss}).wait()
    assert {"step-2-safetensors", "step-3-dcp"} <= {*names(tmp_path / "run")}
    assert not named(told, "export_failed")
    assert "step-3-safetensors" not in names(tmp_path / "run")
    assert snapshot.load(tmp_path / "run/step-2-safetensors")["weight"].equal(torch.full((1000,), 2.0).bfloat16())
    assert snapshot.load(tmp_path / "run/step-3-dcp")["model.weight"].equal(torch.full((1000,), 3.0))


def test_kept_exports_are_not_taken_for_steps(tmp_path, capsys):
    root = tmp_path / "run"
    with manager_of(root) as manager:
        manager.take(1, state(1))
        manager.take(2, state(2))
    assert names(root) == ["step-1", "step-1-safetensors", "step-2", "step-2-safetensors"]
    assert manager.steps() == [1, 2]
    assert SnapshotManager(root, signals=()).restore_latest(state()) == 2
    assert main(["ls", str(root)]) == 0
    listed = {*re.findall(r"step-[^\s\"/]+", capsys.readouterr().out)}
    assert listed == {*names(root)}  # it lists checkpoints of all formats
    assert main(["prune", str(root), "--keep-latest", "1", "--yes"]) == 0
    assert names(root) == ["step-1-safetensors", "step-2", "step-2-safetensors"]
    with manager_of(root) as manager:  # removes the export of the step that the command has removed
        manager.restore_latest(state())
    assert names(root) == ["step-2", "step-2-safetensors"]


def test_restart_makes_up_for_missing_exports_and_replaces_old_ones(tmp_path, told):
    root = tmp_path / "run"
    with SnapshotManager(root, signals=()) as manager:
        for step in (2, 3):
            manager.take(step, state(step))
        net = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(net.weight, float("nan"))
        manager.take(4, {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)})
        assert manager.suspect(4)
    (root / "step-3-safetensors").mkdir()
    (root / "step-3-safetensors" / "mine").touch()
    with manager_of(root, KeptExport(select=MODEL, when=KeepEvery(1))) as manager:
        manager.restore_latest(state())
    assert named(told, "exported") == [("exported", 2)]
    refused = [each for each in told if each.name == "export_failed"]
    assert [(each.fields["step"], each.fields["attempt"], each.fields["gives_up"]) for each in refused] == [
        (3, 1, False), (3, 2, False), (3, 3, True)
    ]  # fmt: skip
    assert "exists already, and is no export of a manager" in str(refused[0].fields["error"])
    assert names(root / "step-3-safetensors") == ["mine"]
    shutil.rmtree(root / "step-3-safetensors")
    with manager_of(root) as manager:
        manager.take(2, state(22), overwrite=True)
    assert snapshot.load(root / "step-2-safetensors")["weight"][0] == 22
    assert snapshot.load(root / "step-3-safetensors")["weight"][0] == 3


def test_removal_waits_for_the_export_of_a_step(tmp_path, told):
    root = tmp_path / "run"
    with manager_of(root, KeptExport(select=MODEL, when=KeepEvery(10)), keep=1) as manager:
        manager.take(10, state(10))
        process = exporting()
        process.suspend()
        for step in (11, 12, 13):
            manager.take(step, state(step))
        until(lambda: {"step-10", "step-11", "step-12", "step-13"} - {*names(root)} == {"step-11", "step-12"})
        assert not list(root.glob("*/.pinned"))
        process.resume()
    order = [each.name for each in told if each.name in ("exported", "pruned")]
    assert order[-2:] == ["exported", "pruned"]
    assert names(root) == ["step-13"]


def test_kept_export_runs_with_low_priority_and_is_repeated_after_a_kill(tmp_path, told, monkeypatch):
    monkeypatch.setattr(kept_export, "PAUSE", 0.0)
    with manager_of(tmp_path / "run", keep=1) as manager:
        manager.take(1, state(1))
        process = exporting()
        until(lambda: process.nice() == 19)
        until(lambda: process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE)
        assert os.getpgid(process.pid) != os.getpgid(0)
        until(lambda: Path(f"/proc/{process.pid}/oom_score_adj").read_text() == "1000\n")
        process.kill()
        until(lambda: named(told, "exported"))
        assert named(told, "export_failed") == [("export_failed", 1)]
        manager.take(2, state(2))
    assert named(told, "exported") == [("exported", 1), ("exported", 2)]
    assert names(tmp_path / "run") == ["step-2", "step-2-safetensors"]
    assert not exports_of()


def test_export_whose_folder_is_removed_meanwhile_is_made_again(tmp_path, told, monkeypatch):
    """As by a manager of a job that was started again, while the process of the first one has not ended yet."""
    monkeypatch.setattr(kept_export, "PAUSE", 0.0)
    root, many = tmp_path / "run", {f"w{number}": torch.ones(1 << 21) for number in range(16)}
    with manager_of(root) as manager:
        manager.take(1, {"model": StateDict(many)})
        process, aside = exporting(), root / ".export-step-1-safetensors"
        until(lambda: aside.exists() and len(os.listdir(aside)) > 1)  # a file of weights has begun
        process.suspend()
        shutil.rmtree(aside)
        process.resume()
    assert named(told, "exported", "export_failed") == [("export_failed", 1), ("exported", 1)]
    assert snapshot.load(root / "step-1-safetensors").keys() == many.keys()
    assert names(root) == ["step-1", "step-1-safetensors"]


def test_failed_export_is_given_up_and_made_by_the_next_manager(tmp_path, told):
    root, files = tmp_path / "run", tmp_path / "files"
    files.mkdir()
    export = KeptExport(select=MODEL, files=files)
    with manager_of(root, export, keep=1) as manager:
        files.rmdir()
        manager.take(1, state(1))
        until(lambda: named(told, "export_failed"))
        manager.take(2, state(2))
    failed = [(each.fields["step"], each.fields["attempt"], each.fields["gives_up"]) for each in told
              if each.name == "export_failed"]  # fmt: skip
    assert [each for each in failed if each[0] == 1] == [(1, 1, False), (1, 2, False), (1, 3, True)]
    assert [each for each in failed if each[0] == 2] == [(2, 1, False), (2, 2, False), (2, 3, True)]
    assert names(root) == ["step-2"]  # training goes on, and so do removals
    files.mkdir()
    (files / "config.json").write_text("{}")
    with manager_of(root, export, keep=1) as manager:
        manager.restore_latest(state())
    assert names(root / "step-2-safetensors") == [".exported", "config.json", "model.safetensors"]


def test_retention_spares_only_the_newest_steps_that_wait_for_exports(tmp_path, told):
    """More steps than that would fill the disk, if exports are slower than saves."""
    root = tmp_path / "run"
    with manager_of(root, keep=1) as manager:
        manager.take(1, state(1))
        process = exporting()
        process.suspend()
        for step in range(2, 8):
            manager.take(step, state(step))
        until(lambda: names(root) == ["step-1", "step-6", "step-7"])
        process.resume()
    assert named(told, "exported") == [("exported", 1), ("exported", 7), ("exported", 6)]
    skipped = [each.fields for each in told if each.name == "export_failed"]
    assert sorted(each["step"] for each in skipped) == [2, 3, 4, 5]
    assert {(each["attempt"], each["gives_up"]) for each in skipped} == {(0, True)}
    assert "was removed before its export" in str(skipped[0]["error"])
    assert names(root) == ["step-7", "step-7-safetensors"]


def test_step_whose_export_is_given_up_is_tried_no_more(tmp_path, told, monkeypatch):
    monkeypatch.setattr(kept_export, "PAUSE", 0.0)
    started = tmp_path / "started"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho >> {started}\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with manager_of(tmp_path / "run", KeptExport(when=KeepEvery(10)), keep=1) as manager:
        manager.take(10, state(10))
        manager.take(11, state(11))
        until(lambda: manager.steps() == [11])
    assert [each.fields["gives_up"] for each in told if each.name == "export_failed"] == [False, False, True]
    assert len(started.read_text()) == 3


class Broken(Policy):
    def keep(self, taken, now):
        raise KeyError("secret of a policy")


def test_policy_that_raises_stops_exports_alone(tmp_path, told):
    with manager_of(tmp_path / "run", KeptExport(select=MODEL, when=Broken())) as manager:
        manager.take(1, state(1))
    assert "secret of a policy" in str([each.fields["error"] for each in told if each.name == "failed"])
    assert manager.steps() == [1]


def fail(manager):
    manager.take(2, state(2))
    exporting().suspend()
    raise ZeroDivisionError


def test_close_does_not_wait_if_the_job_stops_or_fails(tmp_path, told):
    root = tmp_path / "run"
    with manager_of(root, signals=[signal.SIGUSR1]) as manager:
        manager.take(1, state(1))
        exporting().suspend()  # it would never end
        os.kill(os.getpid(), signal.SIGUSR1)
        assert manager.should_stop()
    assert not exports_of()
    with pytest.raises(ZeroDivisionError), manager_of(root) as manager:
        fail(manager)
    assert not exports_of()
    assert not named(told, "exported", "export_failed")
    with manager_of(root) as manager:
        manager.restore_latest(state())
    assert names(root) == ["step-1", "step-1-safetensors", "step-2", "step-2-safetensors"]


@pytest.mark.parametrize("how", ["signal", "deadline"])
def test_stop_ends_the_wait_of_close(how, tmp_path, told):
    kill_at = []
    options = {"signals": [signal.SIGUSR1], "deadline": lambda: kill_at[0] if kill_at else None}
    manager = manager_of(tmp_path / "run", **options)
    manager.take(1, state(1))
    exporting().suspend()  # it would never end
    stop = [os.kill, os.getpid(), signal.SIGUSR1] if how == "signal" else [kill_at.append, time.time() + 30]
    threading.Timer(1.0, stop[0], stop[1:]).start()
    manager.close()
    assert manager.should_stop()
    assert not exports_of()
    assert not named(told, "exported")


def test_close_ends_exports_that_take_too_long(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(kept_export, "PATIENCE", 0.5)
    with manager_of(tmp_path / "run") as manager:
        manager.take(1, state(1))
        exporting().suspend()
    assert not exports_of()
    assert "exports are left to the next manager: step-1" in caplog.text


TRAINING = """
import sys, time, torch
from snapshot import SnapshotManager, StateDict
from snapshot_export import KeptExport
state = {"model": StateDict(weight=torch.ones(1 << 25))}
manager = SnapshotManager(sys.argv[1], keep=1, exports=[KeptExport(select=["model/**"])])
for step in (1, 2):
    manager.take(step, state)
print("taken", flush=True)
if sys.argv[2] == "wait":
    time.sleep(1000)
"""


def train(root, how):
    return subprocess.Popen(
        [sys.executable, "-c", TRAINING, root, how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


@pytest.mark.deadly
def test_exports_end_with_a_training_that_is_killed_and_are_made_by_the_next(tmp_path):
    root = tmp_path / "run"
    with train(root, "wait") as training:
        training.stdout.readline()
        process = exporting(training.pid)
        until(lambda: list(root.glob(".export-step-*")))
        process.suspend()  # it cannot end by itself
        training.kill()
    process.wait(300)
    assert list(root.glob(".export-step-*"))
    with manager_of(root, keep=1) as manager:
        manager.restore_latest({"model": StateDict(weight=torch.zeros(1 << 25))})
        until(lambda: "step-2-safetensors" in names(root))
        manager.take(3, state(3))
    assert names(root) == ["step-3", "step-3-safetensors"]


def test_exit_of_a_training_that_does_not_close_its_manager_ends_exports(tmp_path):
    with train(tmp_path / "run", "end") as training:
        training.stdout.readline()
        assert training.wait(300) == 0
    children = psutil.Process().children(recursive=True)
    assert not any("snapshot_export" in command_line(each) for each in children)
    assert Snapshot(tmp_path / "run" / "step-2").verify()


def _export(root):
    told = []
    snapshot.events.add_handler(told.append)
    try:
        with manager_of(root, keep=1, timeout=60) as manager:
            for step in (1, 2):
                manager.take(step, {"model": StateDict(weight=torch.full((10,), float(step)))},
                             replicated=["**"])  # fmt: skip
            began = bool(exports_of())
        dist.barrier()
    finally:
        snapshot.events.remove_handler(told.append)
    return [name for name, _ in named(told, "exported")], began


def test_ranks_other_than_the_first_export_nothing(two, tmp_path):
    one, other = two.run(_export, tmp_path / "run")
    assert "exported" in one[0]
    assert other == ([], False)
    assert names(tmp_path / "run") == ["step-2", "step-2-safetensors"]


def test_kept_export_on_an_object_store(moto, told):
    options = {
        "key": moto.key,
        "secret": moto.secret,
        "endpoint_url": moto.url,
        "client_kwargs": {"region_name": moto.region},
    }
    root = f"s3://{moto.bucket()}/run"
    with manager_of(root, keep=1, storage_options=options) as manager:
        manager.take(1, state(1))
        until(lambda: named(told, "exported"))
        manager.take(2, state(2))
    assert named(told, "exported", "export_failed") == [("exported", 1), ("exported", 2)]
    assert manager.steps() == [2]
    made = Snapshot(f"{root}/step-2-safetensors", storage_options=options)
    assert made.read_object("weight")[0] == 2
    with pytest.raises(snapshot.SnapshotNotFoundError):
        Snapshot(f"{root}/step-1-safetensors", storage_options=options).read_object("weight")
