"""A snapshot to look at, and a terminal to look at it in."""

import io

import pytest
import torch
from torch import nn

from snapshot import Snapshot, StateDict


def trained():
    """A model with its optimizer, after one step; the last layer shares its weight with the first."""
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(12)]
    model = nn.Sequential(nn.Embedding(50, 8), *layers, nn.Linear(8, 50, bias=False))
    model[-1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    progress = StateDict(step=100, losses=[1.0, 0.5], nothing={}, name="a\x1b[2Jb", data=b"\0" * 3000)
    return {"model": model, "optimizer": optimizer, "progress": progress}


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    """A folder with steps, a checkpoint of torch's, and what is none."""
    root = tmp_path_factory.mktemp("run")
    for step in (9, 100):
        Snapshot.take(root / f"step-{step}", trained(), metadata={"step": step, "metrics": {"loss": 1 / step}})
    torch.save(trained()["model"].state_dict(), root / "model.pt")
    (root / "logs").mkdir()
    (root / "logs" / "log.txt").write_text("nothing")
    return root


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of some width; what is printed there is returned by its `text()`."""

    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self):
            return True

        def text(self):
            return self.getvalue()

    def make(columns, colours=False):
        made = Terminal()
        monkeypatch.setattr("sys.stdout", made)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        return made

    return make
