"""Snapshots that are based on each other: what changes between them, and what is shared."""

import torch
from torch import nn

from snapshot import Snapshot
from tests.helpers.arguments import for_take


def tuned():
    """A model with a frozen layer of 256 KiB and a trained one, and some state that is never frozen."""
    torch.manual_seed(3)
    frozen = nn.Linear(256, 256, bias=False).requires_grad_(False)
    return nn.ModuleDict({"frozen": frozen, "trained": nn.Linear(256, 256, bias=False)})


def train(model):
    """Change all that is trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1e-3)


def take_steps(root, count=3, **options):
    """Take steps, each based on the step before it. Return them, and the model."""
    model, taken = tuned(), []
    for step in range(count):
        base = taken[-1] if taken else []
        only = options if taken else {}
        taken.append(Snapshot.take(root / f"step-{step}", {"model": model}, **for_take(base=base, **only)))
        train(model)
    return taken, model
