"""What a take records of its environment, and what is told of the changes since."""

import json
import logging
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import snapshot_environment
from snapshot import ModelState, RestoreOptions, Snapshot, StateDict
from snapshot.cli import main
from snapshot_environment import facts, note
from snapshot_environment.observe import KEY, Environment


@pytest.fixture(autouse=True)
def nothing_noted():
    facts._noted.clear()
    facts.read_variables.cache_clear()
    yield
    facts._noted.clear()


def training(**flags):
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), **flags)}


def recorded(folder):
    return Snapshot(folder).metadata.metadata[KEY]


def lines(caplog, level=logging.WARNING):
    return [each.getMessage() for each in caplog.records if each.levelno == level and "since" in each.getMessage()]


def test_take_records_versions_ranks_and_switches(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", "hunter2", tmp_path])
    monkeypatch.setenv("NCCL_ALGO", "Ring-of-hunter2")
    note(tokenizer="v3", shuffled=True)
    Snapshot.take(tmp_path / "s", training(fused=True))
    found = recorded(tmp_path / "s")
    assert found["versions"]["torch"] == torch.__version__
    assert found["world_size"] == 1
    assert found["switches"]["deterministic algorithms"] is False
    assert found["switches"]["default dtype"] == "float32"
    assert found["optimizers"]["optim"] == {"class": "AdamW", "fused": True} | {
        "foreach": None,
        "capturable": False,
        "amsgrad": False,
        "maximize": False,
        "decoupled_weight_decay": True,
    }
    assert found["application"] == {"tokenizer": "v3", "shuffled": True}
    assert "hunter2" not in (tmp_path / "s" / ".snapshot_metadata").read_text()  # the command line may have a secret
    assert found["variables"].keys() == {name for name in found["variables"] if not name.startswith("OMP_NUM")}
    assert "NCCL_ALGO" in found["variables"]


def test_restore_in_the_same_environment_logs_nothing(tmp_path, caplog):
    state = training()
    Snapshot.take(tmp_path / "s", state).restore(state)
    assert lines(caplog) == lines(caplog, logging.INFO) == []


def test_restore_logs_one_line_of_what_changes_numbers(tmp_path, caplog, monkeypatch):
    state = training()
    note(tokenizer="v3", dataset="a")
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    Snapshot.take(tmp_path / "s", state)
    monkeypatch.setattr(sys, "argv", ["train.py", "--resume"])  # as at each restart
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    note(tokenizer="v4", dataset=None)
    torch.use_deterministic_algorithms(True)
    try:
        Snapshot(tmp_path / "s").restore(state)
    finally:
        torch.use_deterministic_algorithms(False)
    [line] = lines(caplog)
    head, _, told = line.partition(": since this step was taken: ")
    assert head == str(tmp_path / "s")
    assert told.split("; ") == [
        "deterministic algorithms False -> True",
        "tokenizer v3 -> v4",
        "dataset a -> none",
        "the variable NCCL_ALGO was set",
    ]


def test_restore_with_environment_ignore_logs_nothing(tmp_path, caplog):
    state = training()
    note(tokenizer="v3")
    Snapshot.take(tmp_path / "s", state)
    note(tokenizer="v4")
    Snapshot(tmp_path / "s").restore(state, options=RestoreOptions(environment="ignore"))
    assert lines(caplog) == []
    with pytest.raises(ValueError, match="environment must be 'log' or 'ignore', got 'never'"):
        Snapshot(tmp_path / "s").restore(state, options=RestoreOptions(environment="never"))


def test_restore_of_a_part_tells_nothing_of_objects_that_are_left_out(tmp_path, caplog):
    state = training()
    Snapshot.take(tmp_path / "s", state)
    Snapshot(tmp_path / "s").restore({"model": state["model"]}, unused="ignore")
    assert lines(caplog) == []


def test_restore_tells_nothing_of_frameworks_that_only_one_process_has_imported(tmp_path, caplog, monkeypatch):
    state = training()
    Snapshot.take(tmp_path / "s", state)
    monkeypatch.setitem(sys.modules, "torchtitan", facts)
    monkeypatch.setattr(facts, "__version__", "1.0", raising=False)
    Snapshot(tmp_path / "s").restore(state)
    assert lines(caplog) == []
    Snapshot.take(tmp_path / "t", state)
    monkeypatch.setattr(facts, "__version__", "2.0")
    Snapshot(tmp_path / "t").restore(state)
    assert [each.partition("taken: ")[2] for each in lines(caplog)] == ["torchtitan 1.0 -> 2.0"]


def test_restore_into_another_optimizer_names_its_class_alone(tmp_path, caplog):
    before, after = training(), training()
    after["optim"] = torch.optim.Adam(after["model"].parameters())
    Snapshot.take(tmp_path / "s", before)
    Snapshot(tmp_path / "s").restore(after, strict=False)
    assert [each.partition("taken: ")[2] for each in lines(caplog)] == ["optimizer of 'optim': class AdamW -> Adam"]


@pytest.mark.parametrize("versions", [("2.14.1", "2.15.0"), ("2.15.0", "2.13.0+cpu")])
def test_restore_warns_of_another_meaning_of_reduce_dtype_none(versions, tmp_path, caplog, monkeypatch):
    """Torch 2.15 reduces in the dtype of the gradients where earlier versions took `param_dtype`."""
    monkeypatch.setattr(
        facts, "_policies", lambda found: [("model", {"reduce_dtype": None, "param_dtype": "bfloat16"})]
    )
    state = training()
    monkeypatch.setattr(facts, "_own_versions", lambda: {"torch": versions[0]})
    Snapshot.take(tmp_path / "s", state)
    monkeypatch.setattr(facts, "_own_versions", lambda: {"torch": versions[1]})
    Snapshot(tmp_path / "s").restore(state)
    [line] = lines(caplog)
    assert f"torch {versions[0]} -> {versions[1]}" in line
    assert "FSDP's reduce_dtype=None of 'model' means param_dtype until torch 2.14" in line


def test_restore_does_not_fail_by_a_damaged_record(tmp_path, caplog):
    state = training()
    for number, damaged in enumerate(["text", 7, {"versions": ["torch"], "policies": {"model": 3}, "": {"": {}}}]):
        Snapshot.take(tmp_path / f"{number}", state, metadata={KEY: damaged})
        assert recorded(tmp_path / f"{number}") == damaged  # what an application has put there stays
        Snapshot(tmp_path / f"{number}").restore(state)
    assert "failed" not in caplog.text


def test_restore_does_not_fail_by_an_observer(tmp_path, caplog, monkeypatch):
    def fail(self, view):
        raise OSError("no view")

    state = training()
    Snapshot.take(tmp_path / "s", state)
    monkeypatch.setattr(Environment, "restored", fail)
    assert Snapshot(tmp_path / "s").restore(state)
    assert "the observer environment failed" in caplog.text


def test_cli_diff_shows_changes_of_the_environment_below_an_unchanged_result(tmp_path, capsys):
    state = {"s": StateDict(x=torch.ones(3))}
    note(tokenizer="v3")
    Snapshot.take(tmp_path / "a", state)
    note(tokenizer="v4")
    Snapshot.take(tmp_path / "b", state)
    pair = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["diff", *pair]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("the same")
    assert second == "environment: tokenizer v3 -> v4"
    assert main(["diff", *pair, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["environment"] == ["tokenizer v3 -> v4"]
    state["s"]["x"] += 1
    Snapshot.take(tmp_path / "b", state, overwrite=True)
    assert main(["diff", *pair]) == 1


def test_cli_ls_does_not_list_the_environment(tmp_path, capsys):
    Snapshot.take(tmp_path / "s", training(), metadata={"mine": 1})
    assert main(["ls", str(tmp_path / "s")]) == 0
    assert "metadata: mine 1\n" in capsys.readouterr().out


def test_copy_keeps_the_environment_of_its_take(tmp_path):
    note(tokenizer="v3")
    Snapshot.take(tmp_path / "s", training())
    note(tokenizer="v4")
    Snapshot(tmp_path / "s").copy(tmp_path / "copy")
    assert recorded(tmp_path / "copy") == recorded(tmp_path / "s")


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"a": [1]}, TypeError),
        ({"a": torch.ones(1)}, TypeError),
        ({"a": "x" * (65 << 10)}, ValueError),
        ({"a": float("nan")}, ValueError),
    ],
)
def test_note_refuses_what_does_not_belong_into_a_manifest(given, error):
    note(before=1)
    with pytest.raises(error, match="must be"):
        note(**given)
    assert facts._noted == {"before": 1}


def test_public_names_are_documented():
    assert snapshot_environment.__all__ == ["note"]


# Ranks


def _shards(folder):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    Snapshot.take(folder, {"train": ModelState(model, torch.optim.SGD(model.parameters()))})


def test_take_of_a_sharded_model_records_the_mesh_and_mixed_precision(two, folder):
    two.run(_shards, folder)
    found = recorded(folder)
    assert found["world_size"] == 2
    assert found["mesh"] == {"dp": 2}
    wanted = {"param_dtype": "bfloat16", "reduce_dtype": "float32", "output_dtype": None, "cast_forward_inputs": True}
    assert found["policies"] == {"train": wanted}


def _restores(folder):
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("snapshot").addHandler(handler)
    logging.getLogger("snapshot").setLevel(logging.INFO)
    try:
        Snapshot(folder).restore({"s": StateDict(x=torch.ones(3))})
    finally:
        logging.getLogger("snapshot").removeHandler(handler)
        logging.getLogger("snapshot").setLevel(logging.NOTSET)
    return [each for each in logged if "since" in each], dist.get_rank()


def test_restore_on_more_ranks_says_so_on_rank_0(two, tmp_path):
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3))})
    (first, _), (second, _) = two.run(_restores, str(tmp_path / "s"))
    assert "world size 1 -> 2" in first[0]
    assert second == []
