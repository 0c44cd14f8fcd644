"""What verbs print fits narrow terminals: nothing is longer than a line, but for a name by itself."""

import re

import pytest
import torch
from torch import nn

from snapshot import Snapshot, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.cli.screen import cells


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two steps whose second is damaged, below a short name: what is asked of narrow terminals."""
    run = tmp_path_factory.mktemp("r")
    torch.manual_seed(3)
    for step in (1, 2, 3):
        layers = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 1024) for _ in range(2)), nn.Linear(64, 64))
        progress = StateDict(step=step, name="some text that is longer than a column", rate=0.1)
        metadata = {"snapshot.manager": {"step": step, "metrics": {"validation_loss": 1.25 / step, "accuracy": 0.5}}}
        Snapshot.take(
            run / f"step-{step}",
            {"model": layers, "progress": progress},
            metadata=metadata,
            options=TakeOptions(durable=False),
        )
    (file,) = (run / "step-2" / "data").iterdir()
    content = bytearray(file.read_bytes())
    content[100_000] ^= 1
    file.write_bytes(content)
    return run


VERBS = [
    (["ls", "."], 0),
    (["ls", "step-1"], 0),
    (["ls", "step-1", "--flat"], 0),
    (["ls", "step-1", "--tree"], 0),
    (["ls", "step-1", "--du"], 0),
    (["show", "step-1", "model/0.linear1.weight"], 0),
    (["show", "step-1", "model/0.norm1.bias", "--box", ":40"], 0),
    (["show", "step-1", "progress"], 0),
    (["show", "step-1", "model"], 0),
    (["diff", "step-1", "step-3"], 1),
    (["diff", "step-1", "step-3", "--values"], 1),
    (["verify", "step-1", "step-2"], 1),
    (["verify", "--quick", "step-1"], 0),
    (["prune", ".", "--keep-latest", "1", "--keep-best", "validation_loss", "--dry-run"], 0),
    (["rm", "step-1", "--dry-run"], 0),
    (["report", "step-1", "-o", "report.html"], 0),
]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(("words", "status"), VERBS, ids=[" ".join(words) for words, _ in VERBS])
def test_cli_output_lines_are_no_longer_than_the_terminal_is_wide(run, terminal, monkeypatch, columns, words, status):
    monkeypatch.chdir(run)
    screen = terminal(columns)
    assert main(words) == status
    for line in screen.text().splitlines():
        alone = len(re.findall(r"\S+", line)) == 1
        assert cells(line) <= columns or alone, line


@pytest.mark.parametrize("columns", [40, 80])
def test_cli_ls_shows_names_and_sizes_at_any_width(run, terminal, monkeypatch, columns):
    monkeypatch.chdir(run)
    screen = terminal(columns)
    assert main(["ls", "step-1"]) == 0
    (row,) = (line for line in screen.text().splitlines() if "[1024, 64]" in line)
    assert "float32" in row
    assert "512.0 KiB" in row
    screen = terminal(columns)
    assert main(["prune", ".", "--keep-latest", "1", "--dry-run"]) == 0
    assert [line.split()[0] for line in screen.text().splitlines()[1:4]] == ["step-1", "step-2", "step-3"]
    assert " remove " in screen.text()
