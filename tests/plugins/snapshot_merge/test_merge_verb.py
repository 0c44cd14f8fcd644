"""`snapshot merge`: what it writes, prints and refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import snapshot
from snapshot import Snapshot, StateDict
from snapshot.cli import main


@pytest.fixture
def sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        state = {"w": torch.full((4,), float(number)), "n": torch.tensor(number)}
        save_file(state, f"{number}.safetensors")
        Snapshot.take(f"{number}", {"model": StateDict(state)})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], 1.0),
        (["--average"], 1.0),
        (["--weights", "0.5,0.25,0.25"], 0.75),
        (["--ema", "0.5"], (0 * 0.5 + 1 * 0.5) * 0.5 + 2 * 0.5),
    ],
)
def test_cli_merge_methods(sources, capsys, arguments, expected):
    command = ["merge", "0", "1.safetensors", "2", "-o", "out.safetensors", "--others", "first", *arguments]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "2 tensors" in out
    assert "model/n: differs in" in out
    got = load_file("out.safetensors")
    assert got["w"].eq(expected).all()
    assert got["n"] == 0
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0


def test_cli_merge_json_dtype_and_format(sources, capsys):
    arguments = [
        "--select",
        "model/w",
        "--dtype",
        "float16",
        "--to",
        "dcp",
        "--json",
        "--memory",
        "1MiB",
        "--no-verify",
    ]
    assert main(["merge", "0", "2", "-o", "out", *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "dcp"
    assert report["tensors"] == 1
    assert torch.equal(snapshot.load("out")["w"], torch.ones(4).half())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["0", "1"], "pass --others first to keep the first source's values, or --exclude them"),
        (["0"], "at least 2 checkpoints"),
        (["0", "absent"], "absent: there is no snapshot here"),
        (["0", "1", "--weights", "1,x"], "must be numbers such as 0.5,0.3,0.2"),
        (["0", "1", "--weights", "1,2", "--ema", "0.5"], "not allowed with argument"),
        (["0", "1", "--weights", "1,2,3"], "weights must be 2 finite numbers"),
    ],
)
def test_cli_merge_refuses_invalid_arguments(sources, capsys, arguments, text):
    assert main(["merge", *arguments, "-o", "out"]) == 2
    assert text in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()
