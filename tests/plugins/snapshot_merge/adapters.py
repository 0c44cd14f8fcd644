"""Adapters of LoRA that tests draw."""

import json

import torch
from safetensors.torch import save_file

PREFIX = "base_model.model."


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def adapter(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    save_file({f"{PREFIX}{name}": each for name, each in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def factors(module, rows, columns, rank=4, dtype=torch.float32):
    return {
        f"{module}.lora_A.weight": draw(rank, columns, dtype=dtype, seed=1),
        f"{module}.lora_B.weight": draw(rows, rank, dtype=dtype, seed=2),
    }
