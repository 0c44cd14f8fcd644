"""The export of a sharded state to Hugging Face's layout with a tensor map: time and peak memory."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import Snapshot, StateDict
from snapshot.bench.raw_io import drop
from tests.helpers.rank_pool import Pool

WIDTH, INNER, VOCABULARY = 2048, 5504, 16384
HEADS, GROUPS = 16, 4
BUDGET = 256 << 20
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
}
KINDS = {
    "raw read and write": "",
    "without a map": "{}",
    "torchtitan to Hugging Face": "{'map': TensorMap.load('torchtitan-hf', config)}",
    "Megatron to Hugging Face": "{'map': TensorMap.load('megatron-hf', config)}",
}
CHILD = """
import json, os, resource, sys, time
from snapshot import Snapshot, TensorMap, Target
source, target, config, budget, given = sys.argv[1:]
config = json.loads(config)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
Snapshot(source).convert(Target(target + "-small", "safetensors"), select=["model/*norm.weight"])
before, began = peak(), time.perf_counter()
if given:
    Snapshot(source).convert(Target(target, "safetensors"), memory_budget_bytes=int(budget), **eval(given))
else:
    held = bytearray(16 << 20)
    os.makedirs(target)
    for name in os.listdir(source + "/data"):
        with open(f"{source}/data/{name}", "rb", 0) as file, open(f"{target}/{name}", "wb", 0) as made:
            while count := file.readinto(held):
                made.write(memoryview(held)[:count])
            os.fsync(made.fileno())
print(json.dumps([time.perf_counter() - began, peak() - before]))
"""


def compare(folder: Path, scale: float, rounds: int) -> Iterator[str]:
    """Save both layouts with two ranks, convert them in fresh processes, and yield the lines of a report."""
    layers = max(1, round(40 * scale))
    yield f"two ranks, {layers} layers, bfloat16; a budget of {BUDGET >> 20} MiB"
    for name in ("titan", "megatron"):
        with Pool(2, timeout=600) as pool:
            pool.run(_save, str(folder / name), layers, timeout=600)
    nbytes = sum(path.stat().st_size for path in (folder / "titan/data").iterdir())
    yield f"{nbytes / (1 << 30):.2f} GiB; the layouts hold the same values"
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    peaks: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for turn in range(rounds):
        for kind in list(KINDS)[:: 1 if turn % 2 else -1]:
            source = folder / ("megatron" if "Megatron" in kind else "titan")
            taken, peak = _run_child(source, folder / "made", KINDS[kind])
            seconds[kind].append(taken)
            peaks[kind].append(peak)
    yield f"{'':<30}{'seconds':>10}{'of raw':>10}{'peak, MiB':>12}{'over the budget':>18}"
    raw = seconds["raw read and write"]
    for kind, given in KINDS.items():
        ratio, median = min(seconds[kind]) / min(raw), statistics.median(seconds[kind])
        over = str((max(peaks[kind]) - BUDGET) >> 20) if given else ""
        yield f"{kind:<30}{median:>10.2f}{ratio:>10.2f}{max(peaks[kind]) >> 20:>12}{over:>18}"


def _run_child(source: Path, target: Path, given: str) -> tuple[float, int]:
    drop(source)
    command = [sys.executable, "-c", CHILD, str(source), str(target), json.dumps(CONFIG), str(BUDGET), given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr)
    for place in (target, Path(f"{target}-small")):
        for path in place.iterdir():
            path.unlink()
        place.rmdir()
    found = json.loads(done.stdout)
    return found[0], found[1]


def _save(folder: str, layers: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in _layout(folder, layers)}
    Snapshot.take(folder, {"model": StateDict(**state)})


def _layout(folder: str, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layout, with random values that do not matter here."""
    head = WIDTH // HEADS
    shapes: dict[str, Any] = {}
    if folder.endswith("titan"):
        shapes |= {"tok_embeddings.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
        shapes["norm.weight"] = (WIDTH,)
        for layer in range(layers):
            own = f"layers.{layer}"
            shapes[f"{own}.attention.qkv_linear.wq.weight"] = (WIDTH, WIDTH)
            shapes[f"{own}.attention.qkv_linear.wk.weight"] = (GROUPS * head, WIDTH)
            shapes[f"{own}.attention.qkv_linear.wv.weight"] = (GROUPS * head, WIDTH)
            shapes[f"{own}.attention.wo.weight"] = (WIDTH, WIDTH)
            shapes[f"{own}.feed_forward.w1.weight"] = shapes[f"{own}.feed_forward.w3.weight"] = (INNER, WIDTH)
            shapes[f"{own}.feed_forward.w2.weight"] = (WIDTH, INNER)
            shapes[f"{own}.attention_norm.weight"] = shapes[f"{own}.ffn_norm.weight"] = (WIDTH,)
    else:
        shapes |= {"embedding.word_embeddings.weight": (VOCABULARY, WIDTH), "output_layer.weight": (VOCABULARY, WIDTH)}
        shapes["decoder.final_layernorm.weight"] = (WIDTH,)
        for layer in range(layers):
            own = f"decoder.layers.{layer}"
            shapes[f"{own}.self_attention.linear_qkv.weight"] = ((HEADS + 2 * GROUPS) * head, WIDTH)
            shapes[f"{own}.self_attention.linear_proj.weight"] = (WIDTH, WIDTH)
            shapes[f"{own}.mlp.linear_fc1.weight"] = (2 * INNER, WIDTH)
            shapes[f"{own}.mlp.linear_fc2.weight"] = (WIDTH, INNER)
            shapes[f"{own}.input_layernorm.weight"] = shapes[f"{own}.pre_mlp_layernorm.weight"] = (WIDTH,)
    for name, shape in shapes.items():
        yield name, torch.randn(shape, dtype=torch.float32).bfloat16()
