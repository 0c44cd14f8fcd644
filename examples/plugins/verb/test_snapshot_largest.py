"""The tests of the plugin, which is installed."""

import json

import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main


def test_largest_lists_tensors_by_size(tmp_path, capsys):
    Snapshot.take(tmp_path / "s", {"s": StateDict(a=torch.zeros(10), b=torch.zeros(1000), text="x" * 9999)})
    assert main(["largest", str(tmp_path / "s")]) == 0
    assert capsys.readouterr().out.split() == ["4,000", "0/s/b", "40", "0/s/a"]
    assert main(["largest", str(tmp_path / "s"), "--count", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"0/s/b": 4000}


def test_largest_of_nothing_is_an_error(tmp_path, capsys):
    assert main(["largest", str(tmp_path)]) == 2
    assert "no snapshot found" in capsys.readouterr().err


def test_largest_is_in_the_help(capsys):
    assert main([]) == 2
    assert "show the largest tensors of a checkpoint" in capsys.readouterr().err
