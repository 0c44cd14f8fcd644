"""Checkpoints of trainers: conversions by this library, by the trainer's own tool, and a raw read and write."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from snapshot.bench.raw_io import StaysCached, drop
from snapshot.bench.rounds import Workspace
from snapshot.text import size_text
from tests.benchmarks.harness import Work, draw_rows, folder_of, measure_process, time_rows, transfer

BUDGET = 256 << 20
RANKS = 4
LAYERS = 24
RAW, OURS, THEIRS = "raw read and write", "snapshot", "zero_to_fp32"
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def make_shapes(scale: float) -> OrderedDict[str, torch.Size]:
    """Return the shapes of a model's parameters: about 400 MiB in float32, times `scale`."""
    width = max(8, round(1024 * math.sqrt(scale)))
    shapes = {"w1": (width, 2 * width), "w2": (2 * width, width), "norm": (width,), "odd": (37, 7)}
    return OrderedDict(
        (f"layers.{layer}.{name}", torch.Size(shape)) for layer in range(LAYERS) for name, shape in shapes.items()
    )


def write_zero(folder: Path, stage: int, scale: float) -> None:
    """Write a checkpoint as DeepSpeed does with ZeRO, with moments of Adam."""
    shapes = make_shapes(scale)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    module = {name: each.bfloat16() if stage == 2 else torch.empty(0) for name, each in whole.items()}
    head = {"module": OrderedDict(module), "param_shapes": [shapes], "buffer_names": [], "shared_params": {}}
    head |= {"frozen_param_shapes": {}, "frozen_param_fragments": {}, "ds_version": "0.19.8"}
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    if stage == 2:
        torch.save(head, folder / "mp_rank_00_model_states.pt")
        flat = torch.cat([each.flatten() for each in whole.values()])
        parts = [each.clone() for each in flat.split(-(-flat.numel() // RANKS))]
    else:
        pieces: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
        for each in whole.values():
            step = -(-each.numel() // RANKS)
            padded = torch.cat([each.flatten(), torch.zeros(step * RANKS - each.numel())])
            for rank, held in enumerate(pieces):
                held.append(padded[rank * step : (rank + 1) * step])
        parts = [torch.cat(held) for held in pieces]
        for rank in range(RANKS):
            torch.save(head, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for rank, part in enumerate(parts):
        inner = {
            "state": {0: {"exp_avg": part / 2, "exp_avg_sq": part.square(), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.001, "params": [0]}],
        }
        own: dict[str, Any] = {"zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS]}
        if stage == 3:
            own |= {"fp32_flat_groups": [part], "optimizer_state_dict": inner}
        else:
            own |= {"single_partition_of_fp32_groups": [part], "base_optimizer_state": inner}
        torch.save({"optimizer_state_dict": own}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def compare_foreign(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """Yield the lines of the tables."""
    folder = folder_of(where)
    if not DEEPSPEED:
        yield "  zero_to_fp32 is left out: pip install deepspeed"
    for stage in (2, 3):
        nbytes = sum(map(math.prod, make_shapes(scale).values())) * 4
        where.check_room(8 * nbytes, f"ZeRO {stage}")
        write_zero(folder / "run" / "step", stage, scale)
        sizes = f"{size_text(nbytes)} of weights, and moments; budget {size_text(BUDGET)}"
        yield f"\nZeRO {stage} of {RANKS} ranks: {sizes}"
        yield from _convert_weights(folder, nbytes, rounds)
        where.empty()


def _convert_weights(folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    source, peaks = folder / "run", dict[str, int]()
    weights = folder / "weights"
    weights.write_bytes(bytes(nbytes))

    def convert(select: list[str], name: str) -> float:
        work = "Snapshot(source).convert(Target(target, durable=False), select=select, memory_budget_bytes=budget)"
        target = folder / ("out.safetensors" if len(select) == 1 else "out")
        names = {"source": str(source), "target": str(target), "select": select, "budget": BUDGET}
        seconds, peaks[name] = measure_process(work, **names)
        return seconds

    def join() -> float:
        work = "with redirect_stdout(sys.stderr): convert(source, target, safe_serialization=True)"
        prepare = (
            "from contextlib import redirect_stdout\nwith redirect_stdout(sys.stderr): "
            "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert"
        )
        seconds, peaks[THEIRS] = measure_process(
            work, prepare=prepare, source=str(source), target=str(folder / "theirs")
        )
        return seconds

    def clear(_: object) -> None:
        (folder / "out.safetensors").unlink(missing_ok=True)
        for each in ("out", "theirs", "raw"):
            shutil.rmtree(folder / each, ignore_errors=True)

    def clear_cold(name: object) -> None:
        clear(name)
        drop(folder)

    moments = f"{OURS}, with moments"
    rows: dict[str, Work] = {
        RAW: lambda: transfer([weights], folder / "raw"),
        OURS: partial(convert, ["model/**"], OURS),
        moments: partial(convert, ["model/**", "optim/**"], moments),
    }
    if DEEPSPEED:
        rows[THEIRS] = join
    for state, before in (("warm", clear), ("cold", clear_cold)):
        try:
            seconds = time_rows(rows, rounds, before=before)
        except StaysCached as error:
            yield f"  cold: left out: {error}"
            return
        yield f"  {state}"
        more = {name: f"peak {peak >> 20} MiB" for name, peak in peaks.items()}
        yield from (f"  {line}" for line in draw_rows(seconds, beside=dict.fromkeys(peaks, RAW), more=more))
