"""`snapshot publish` and `snapshot pull`."""

import json
import time

import pytest
import torch
from safetensors.torch import save_file

from snapshot import Snapshot, StateDict
from snapshot.cli import main
from tests.plugins.snapshot_publish import engine


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        status = main(words)
        return status, capsys.readouterr()

    return call


def take(step, value):
    state = {"model": StateDict(a=torch.full((1000,), value), b=torch.ones(3)), "optimizer": StateDict(x=1.0)}
    Snapshot.take(f"run/step-{step}", state)


def test_cli_publish_and_pull_versions(run, tmp_path):
    take(100, 1.0)
    take(200, 2.0)
    status, shown = run("publish", "run/step-100", "policy", "--select", "model/**", "--delta", "base")
    assert (status, shown.out) == (0, f"{tmp_path}/policy/weight_v000001: version 1, step 100, complete\n")
    status, shown = run("publish", "run/step-200", "policy", "--select", "model/**", "--delta", "base", "--json")
    assert json.loads(shown.out) == {"url": f"{tmp_path}/policy/weight_v000002", "version": 2, "step": 200, "base": 1}
    assert engine.read(tmp_path / "policy", 2).keys() == {"a", "b"}
    status, shown = run("pull", "policy", "local")
    assert (status, shown.out) == (0, f"{tmp_path}/local/weight_v000002\n")
    status, shown = run("pull", "policy", "local", "--version", "1", "--json")
    assert json.loads(shown.out) == {"folder": f"{tmp_path}/local/weight_v000001"}
    assert run("pull", "policy", "local", "--step", "200")[1].out == f"{tmp_path}/local/weight_v000002\n"
    assert run("pull", "policy", "local", "--version", "latest")[0] == 0
    status, shown = run("publish", "run/step-200", "policy", "--select", "model/**", "--delta", "base")
    assert "delta of version 2" in shown.out


def test_cli_publish_delta_restarts_at_full_every(run):
    take(1, 1.0)
    words = (
        "publish",
        "run/step-1",
        "policy",
        "--select",
        "model/**",
        "--delta",
        "base",
        "--full-every",
        "2",
        "--json",
    )
    assert [json.loads(run(*words)[1].out)["base"] for _ in range(5)] == [None, 1, None, 3, None]


def test_cli_publish_keep_is_the_number_of_complete_versions(run, tmp_path):
    take(1, 1.0)
    for _ in range(3):
        assert run("publish", "run/step-1", "policy", "--select", "model/**", "--keep", "1")[0] == 0
    assert sorted(path.name for path in (tmp_path / "policy").glob("weight_*")) == ["weight_v000003"]


def test_cli_publish_delta_of_other_tensors_is_a_complete_version(run):
    take(1, 1.0)
    run("publish", "run/step-1", "policy", "--select", "model/a")
    status, shown = run("publish", "run/step-1", "policy", "--select", "model/**", "--delta", "base")
    assert status == 0
    assert "complete" in shown.out
    assert "the next version is complete" in shown.err


def test_cli_publish_of_a_hugging_face_folder_includes_its_config(run, tmp_path):
    (tmp_path / "llama").mkdir()
    save_file({"w": torch.arange(5)}, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "x"}')
    assert run("publish", "llama", "policy", "--step", "0")[0] == 0
    run("pull", "policy", "local")
    assert (tmp_path / "local" / "current" / "config.json").read_text() == '{"model_type": "x"}'


def test_cli_pull_of_a_damaged_version_falls_back_and_exits_1(run, tmp_path):
    take(1, 1.0)
    run("publish", "run/step-1", "policy", "--select", "model/**")
    run("publish", "run/step-1", "policy", "--select", "model/**")
    next((tmp_path / "policy" / "weight_v000002").glob("*.safetensors")).unlink()
    status, shown = run("pull", "policy", "local")
    assert (status, shown.out) == (1, f"{tmp_path}/local/weight_v000001\n")
    assert "fell back from" in shown.err


def test_cli_pull_follow_prints_each_version_and_survives_errors(run, monkeypatch, tmp_path):
    take(1, 1.0)
    turns = iter(
        [
            lambda: run_quietly("publish", "run/step-1", "policy", "--select", "model/**"),
            lambda: None,
            lambda: (tmp_path / "policy").rename(tmp_path / "away"),
            lambda: (tmp_path / "away").rename(tmp_path / "policy"),
            lambda: run_quietly("publish", "run/step-1", "policy", "--select", "model/**"),
        ]
    )
    pauses = []

    def run_quietly(*words):
        assert main(words) == 0

    def pause(seconds):
        pauses.append(seconds)
        step = next(turns, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr(time, "sleep", pause)
    status, shown = run("pull", "policy", "local", "--follow", "--every", "9s")
    assert status == 130
    lines = [line for line in shown.out.splitlines() if "version" not in line]
    assert lines == [f"{tmp_path}/local/weight_v000001", f"{tmp_path}/local/weight_v000002"]
    assert shown.err.count("no version is published here") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("publish", "run", "policy"), "--step is missing"),
        (("publish", "run/step-1", "policy", "--map-config", "x"), "--map-config needs --map"),
        (("pull", "policy", "local"), "no version is published here"),
        (("pull", "policy", "local", "--follow", "--step", "1"), "--follow pulls the latest version"),
    ],
)
def test_cli_publish_and_pull_errors(run, words, message):
    status, shown = run(*words)
    assert status == 2
    assert message in shown.err
