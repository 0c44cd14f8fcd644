"""What the command prints: folded differences, the ends of names."""

import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main


def test_cli_diff_folds_names_that_differ_in_numbers(tmp_path, capsys):
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))
    Snapshot.take(tmp_path / "a", {"model": layers, "s": StateDict(step=1)})
    with torch.no_grad():
        for each in layers.parameters():
            each.add_(1)
    Snapshot.take(tmp_path / "b", {"model": layers, "s": StateDict(step=2)})
    urls = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["diff", *urls]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "~ model/{0..11}.bias: bytes (x 12)" in lines
    assert "~ s/step: int 1 -> int 2" in lines
    assert main(["diff", *urls, "--all"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 26
    assert main(["diff", *urls, "--json"]) == 1
    assert capsys.readouterr().out.count('"path"') == 25


def test_cli_ls_keeps_the_ends_of_names_on_a_narrow_terminal(tmp_path, terminal):
    state = {f"encoder.attention.projection.{name}": torch.ones(3) for name in ("weight", "bias")}
    Snapshot.take(tmp_path / "s", {"model": StateDict(state)})
    screen = terminal(40)
    assert main(["ls", str(tmp_path / "s")]) == 0
    text = screen.text()
    assert "ojection.weight " in text
    assert "ojection.bias " in text
