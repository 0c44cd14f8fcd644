"""Time that Hugging Face's Trainer is blocked by a save: with its own checkpoints, and with this library's."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from snapshot.errors import SnapshotError
from snapshot.text import size_text
from snapshot_bench.results import align_columns
from snapshot_bench.rounds import Workspace
from snapshot_trainers.transformers import SnapshotTrainerMixin
from tests.plugins.snapshot_bench.harness import folder_of

WAYS = ("plain", "take", "background")
SAVES, EVERY = 4, 20
"""Saves of a run, and steps between them. The first save is not counted: it allocates staging memory."""
LAYERS, BATCH = 24, 64


def compare(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """Yield the lines of a table. Ways alternate within each round, and each run is a process of its own."""
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        yield f"  left out: {', '.join(missing)} is not installed"
        return
    width = _width_for(scale)
    nbytes = 4 * LAYERS * (width * width + width)
    where.check_room(3 * 3 * nbytes, "checkpoints")
    yield f"\n{size_text(nbytes)} of weights, and AdamW's moments: {SAVES - 1} counted saves, {EVERY} steps apart"
    blocked: dict[str, list[float]] = {way: [] for way in WAYS}
    whole: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in WAYS:
            command = [sys.executable, "-m", __name__, way, str(folder_of(where) / "run"), str(width)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                raise SnapshotError(f"{way}: the run failed: {run.stderr[-2000:]}")
            result = json.loads(run.stdout.splitlines()[-1])
            blocked[way] += result["blocked"]
            whole[way].append(result["whole"])
    rows = [["", "blocked s, median", "min", "max", "x plain", "whole run s"]]
    for way in WAYS:
        times = blocked[way]
        share = median(times) / median(blocked["plain"])
        rows.append([way, *(f"{value:.3f}" for value in (median(times), min(times), max(times))), f"{share:.2f}"])
        rows[-1].append(f"{median(whole[way]):.1f}")
    yield from (f"  {line}" for line in align_columns(rows))


def _width_for(scale: float) -> int:
    return max(8, round(1152 * math.sqrt(scale)))


def train(way: str, folder: Path, width: int) -> dict[str, Any]:
    """Train, and return the seconds of each save but the first one, and of the whole run."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
            self.post_init()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return {"loss": x.square().mean()}

    class Mixed(SnapshotTrainerMixin, Trainer):  # type: ignore[misc]
        snapshot_in_background = way == "background"

    class Timed(Trainer if way == "plain" else Mixed):  # type: ignore[misc]
        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            begun = time.perf_counter()
            super()._save_checkpoint(model, trial)
            times.append(time.perf_counter() - begun)

    times: list[float] = []
    torch.manual_seed(0)
    torch.set_num_threads(1)
    data = [{"x": row} for row in torch.randn(BATCH, width)]
    arguments = TrainingArguments(
        str(folder), max_steps=SAVES * EVERY + EVERY // 2, save_steps=EVERY, per_device_train_batch_size=BATCH,
        save_total_limit=2, logging_steps=10**6, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Timed(Model(PretrainedConfig()), arguments, train_dataset=data)
    begun = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - begun
    shutil.rmtree(folder)
    return {"blocked": times[1:SAVES], "whole": whole}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(train(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
