"""A training of which most is frozen, and its snapshots."""

import json
from pathlib import Path

import torch
from torch import nn

from snapshot import Snapshot

WIDTH = 256


class Run:
    """A frozen network with a trained head: after each step, only the head and its optimizer differ."""

    def __init__(self, layers=4):
        torch.manual_seed(0)
        self.frozen = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)]).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 8)
        self.model = nn.ModuleDict({"frozen": self.frozen, "head": self.head})
        self.optimizer = torch.optim.AdamW(self.head.parameters())
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self):
        self.head(self.frozen(torch.randn(2, WIDTH))).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def values(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def expect_whole(path, values):
    """The snapshot verifies, and has these values of the model."""
    snapshot = Snapshot(path)
    assert snapshot.verify(), snapshot.verify()
    other = Run()
    for parameter in other.model.parameters():
        parameter.data.fill_(float("nan"))
    snapshot.restore({"model": other.model})
    assert all(value.equal(values[name]) for name, value in other.model.state_dict().items())


def files(path):
    return {each.name: each for each in sorted(Path(path, "data").iterdir())}


def entries(path):
    return json.loads(Path(path, ".snapshot_metadata").read_bytes())["files"]
