"""Steps in a near folder whose metadata says which attempt has taken them, without a manager."""

import torch

from snapshot import Snapshot, StateDict
from snapshot.runs.timeline import Attempt, note_of
from tests.helpers.arguments import for_take

RUN = "c" * 12
A = Attempt("a" * 12, RUN, 1)
"""The first attempt of a run."""


def take(folder, *steps, of=A, order=1, value=0, **options):
    """Take steps, the first one as the `order`th take of the attempt, and each other as the next."""
    for at, step in enumerate(steps):
        note = note_of(of, order + at, replaces=False)
        app = {"s": StateDict(x=torch.full((50,), float(step + value)))}
        Snapshot.take(folder / f"step-{step}", app, **for_take(metadata=note, **options))
