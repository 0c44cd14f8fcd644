"""Writes small checkpoints with DeepSpeed on two ranks.

    python tests/plugins/snapshot_deepspeed/write_deepspeed_files.py DIR [NAME ...]

`deepspeed_files.zip` has its output: the checkpoints, and for each a file of what DeepSpeed's own tools make of it. Run
it only to add files. Those that exist are never written again, since later versions must read them, too. It needs
deepspeed (0.19.8), and neither a compiler nor an accelerator.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", CUDA_VISIBLE_DEVICES="")
WORLD = 2
TAG = "step2"


class Model(nn.Module):
    """A model with frozen parameters, a shared one, and buffers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 5)
        self.frozen = nn.Linear(5, 7).requires_grad_(False)
        self.norm = nn.LayerNorm(7)
        self.out = nn.Linear(7, 5, bias=False)
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(5.0))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, tokens):
        x = self.norm(self.frozen(self.embed(tokens)))
        return self.head(self.out(x) * self.scale.to(x.dtype))


class Split(nn.Module):
    """A model for tensor parallelism."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


def make_experts():
    from deepspeed.moe.layer import MoE

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.moe = MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2, k=1)
            self.last = nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.moe(self.first(x))[0])

    return Experts()


def make_groups(model):
    """Return two parameter groups, whose order is not the model's."""
    return [
        {"params": [model.embed.weight, model.out.weight]},
        {"params": [model.norm.weight, model.norm.bias], "weight_decay": 0.0},
    ]


def config(stage, *, bf16=True, zero=(), **more):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(zero)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if bf16 else {}),
        **more,
    }


SPECS = [
    {"patterns": [r".*up\.weight$"], "partition_type": "column"},
    {"patterns": [r".*down\.weight$"], "partition_type": "row"},
]
PARALLEL = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": SPECS}}
CASES = {
    "stage0": config(0, bf16=False),
    "stage1": config(1),
    "stage2": config(2, zero={"round_robin_gradients": True}),
    "stage2-float32": config(2, bf16=False),
    "stage3": config(3),
    "stage3-groups": config(3, zero={"sub_group_size": 40}),
    "experts": config(2),
    "tensor-parallel": config(2, tensor_parallel=PARALLEL),
    "pipeline": config(1),
}
UNIVERSAL = ("stage2", "stage3")
"""Checkpoints whose universal form is kept."""
JOINED = ("stage1", "stage2", "stage2-float32", "stage3", "stage3-groups", "tensor-parallel", "pipeline")
"""Checkpoints that DeepSpeed's own tools join."""


def train(rank, folder, name, port):
    """Train on one rank, and save."""
    import deepspeed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ["LOCAL_RANK"] = str(rank)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(rank if name == "experts" else 0)
    dtype = torch.bfloat16 if "bf16" in CASES[name] else torch.float32
    if name == "pipeline":
        layers = [deepspeed.pipe.LayerSpec(nn.Linear, 4, 4) for _ in range(4)]
        model = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: (y - t).float().square().sum())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    elif name == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        model = make_experts()
        groups = {"params": list(model.parameters()), "name": "all"}
        optimizer = torch.optim.AdamW(split_params_into_different_moe_groups_for_optimizer(groups), lr=1e-2)
    else:
        model = Split() if name == "tensor-parallel" else Model()
        optimizer = torch.optim.AdamW(model.parameters() if name == "tensor-parallel" else make_groups(model), lr=1e-3)
    scheduler = None if name == "pipeline" else torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=CASES[name])
    torch.manual_seed(5)
    for _ in range(2):
        if name == "pipeline":
            engine.train_batch(iter([(torch.randn(4, 4, dtype=dtype), torch.randn(4, 4, dtype=dtype))]))
            continue
        sizes = {"tensor-parallel": (4, 6), "experts": (4, 4)}.get(name)
        data = torch.randn(sizes, dtype=dtype) if sizes else torch.arange(4).view(2, 2) + rank
        engine.backward(engine(data).float().square().sum())
        engine.step()
    engine.save_checkpoint(str(Path(folder, name)), tag=TAG, client_state={"epoch": 3, "note": "x"})


def expect(folder, name):
    """Save what DeepSpeed's own tools make of a checkpoint. One of them writes the universal format."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    target = folder / f"{name}-universal"
    arguments = ["--input_folder", str(folder / name / TAG), "--output_folder", str(target / f"{TAG}_universal")]
    arguments += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run([sys.executable, ds_to_universal.__file__, *arguments], check=True)
    weights = {}
    if name.startswith("stage"):
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), tag=TAG)
    states = {}
    for each in (target / f"{TAG}_universal" / "zero").iterdir():
        if each.is_dir():
            found = {file.stem: torch.load(file, weights_only=False) for file in each.iterdir()}
            states[each.name] = {
                key: value["param"] if isinstance(value, dict) else value for key, value in found.items()
            }
    torch.save({"weights": dict(weights), "states": states}, folder / f"{name}.expected.pt")
    if name not in UNIVERSAL:
        shutil.rmtree(target)


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(CASES):
        if len(sys.argv) > 2 and name not in sys.argv[2:]:
            continue
        torch.multiprocessing.spawn(train, (str(folder), name, 29700 + number), nprocs=WORLD)
        for script in (folder / name).glob("*.py"):
            script.unlink()
        if name in JOINED:
            expect(folder, name)


if __name__ == "__main__":
    main()
