"""Writes small quantised checkpoints, and what the packages make of them: `write_quantised_files.py DIR`.

`quantised_files.zip` has its output: for each folder the quantised `model.safetensors`, Hugging Face's `config.json`,
and `expected.safetensors`, with the weights that the package computes. Run it only to add files. The packages, on
a CPU: bitsandbytes 0.50.2 and gptqmodel 7.7.0.

bitsandbytes' own kernel for AVX-512 takes wrong factors if a row is not a multiple of the block, so its portable one
computes these.
"""

import json
import sys
from pathlib import Path

import torch
from bitsandbytes import functional as bnb
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as dequantize
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from safetensors.torch import save_file
from torch import nn


def save(folder, state, expected, config):
    folder.mkdir(parents=True)
    save_file({name: each.contiguous() for name, each in state.items()}, folder / "model.safetensors")
    save_file({name: each.contiguous() for name, each in expected.items()}, folder / "expected.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": config}))


def write_four_bit(folder, rows, columns, dtype, *, kind, nested, storage=torch.uint8):
    made = Linear4bit(columns, rows, quant_type=kind, compress_statistics=nested, quant_storage=storage)
    made.weight.data = torch.randn(rows, columns).to(dtype)
    made = made.to("cpu")
    state = made.state_dict(prefix="layers.0.q_proj.")
    own = made.weight.quant_state
    factors = own.absmax if own.state2 is None else bnb.dequantize_blockwise(own.absmax, own.state2) + own.offset
    packed = made.weight.data.view(torch.uint8).view(-1)
    weight = dequantize(packed, factors, own.code, own.blocksize, (rows, columns), dtype)
    if columns % own.blocksize == 0:
        assert torch.equal(weight, bnb.dequantize_4bit(made.weight.data, own))
    expected = {"layers.0.q_proj.weight": weight, "layers.0.q_proj.bias": state["layers.0.q_proj.bias"]}
    save(folder, state, expected, {"quant_method": "bitsandbytes", "load_in_4bit": True})


def write_eight_bit(folder):
    made = Linear8bitLt(72, 40, has_fp16_weights=False)
    made.load_state_dict({"weight": torch.randn(40, 72, dtype=torch.float16), "bias": torch.randn(40)})
    state = made.to("cpu").state_dict(prefix="layers.0.q_proj.")
    name = "layers.0.q_proj.weight"
    expected = {name: bnb.int8_vectorwise_dequant(state[name], state["layers.0.q_proj.SCB"])}
    expected["layers.0.q_proj.bias"] = state["layers.0.q_proj.bias"]
    save(folder, state, expected, {"quant_method": "bitsandbytes", "load_in_8bit": True})


def quantise(linear, groups, bits, *, symmetric):
    """The scale and the zero of each group of columns."""
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        some = linear.weight.data[:, groups == group]
        low, high = some.amin(1).clamp(max=0), some.amax(1).clamp(min=0)
        scale = (high - low).clamp(min=1e-3) / (2**bits - 1)
        scales.append(scale)
        zeros.append(torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale).round())
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def write_gptq(folder, rows, columns, bits, dtype, *, size, ordered=True, first=True, symmetric=False):
    linear = nn.Linear(columns, rows)
    groups = torch.arange(columns) // size
    groups = groups if ordered else groups[torch.randperm(columns)]
    scales, zeros = quantise(linear, groups, bits, symmetric=symmetric)
    made = TorchLinear(
        bits=bits,
        group_size=size,
        sym=symmetric,
        desc_act=not ordered,
        in_features=columns,
        out_features=rows,
        bias=True,
    ).eval()
    made.pack_original(linear, scales, zeros, groups.int())
    made.scales = made.scales.to(dtype)
    if first:
        convert_gptq_v2_to_v1_format_module(made, QuantizeConfig(bits=bits, group_size=size))
    state = {f"layers.0.q_proj.{name}": each.clone() for name, each in made.state_dict().items()}
    if first:
        convert_gptq_v1_to_v2_format_module(made, bits, torch.int32)
    expected = {"layers.0.q_proj.weight": made.dequantize_weight().T, "layers.0.q_proj.bias": made.bias}
    kind = "gptq" if first else "gptq_v2"
    save(folder, state, expected, {"quant_method": "gptq", "bits": bits, "checkpoint_format": kind})


def write_awq(folder, rows, columns, dtype, *, size):
    linear = nn.Linear(columns, rows).to(dtype)
    scales, zeros = quantise(linear, torch.arange(columns) // size, 4, symmetric=False)
    made = AwqTorchLinear(
        bits=4,
        group_size=size,
        sym=False,
        desc_act=False,
        in_features=columns,
        out_features=rows,
        bias=True,
        register_buffers=True,
    )
    made.pack(linear, scales, zeros)
    state = {f"layers.0.q_proj.{name}": each for name, each in made.state_dict().items()}
    weight = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, size)
    expected = {"layers.0.q_proj.weight": weight.T, "layers.0.q_proj.bias": made.bias}
    save(folder, state, expected, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"})


def main(out):
    torch.manual_seed(0)
    write_eight_bit(out / "int8")
    write_four_bit(out / "nf4", 24, 128, torch.bfloat16, kind="nf4", nested=False)
    write_four_bit(out / "nf4-nested", 300, 96, torch.float16, kind="nf4", nested=True)
    write_four_bit(out / "nf4-bf16", 40, 64, torch.bfloat16, kind="nf4", nested=True, storage=torch.bfloat16)
    write_four_bit(out / "fp4", 17, 33, torch.float32, kind="fp4", nested=False)
    write_four_bit(out / "fp4-nested", 64, 64, torch.float16, kind="fp4", nested=True)
    write_gptq(out / "gptq", 96, 64, 4, torch.float16, size=16)
    write_gptq(out / "gptq-ordered", 32, 64, 4, torch.bfloat16, size=16, ordered=False)
    write_gptq(out / "gptq-symmetric", 32, 96, 4, torch.float16, size=32, symmetric=True)
    write_gptq(out / "gptq-v2", 64, 64, 4, torch.float16, size=16, ordered=False, first=False)
    write_gptq(out / "gptq-8", 40, 64, 8, torch.float16, size=64)
    write_gptq(out / "gptq-8-v2", 32, 64, 8, torch.bfloat16, size=16, ordered=False, first=False)
    write_gptq(out / "gptq-2", 32, 64, 2, torch.float16, size=16)
    write_awq(out / "awq", 48, 64, torch.float16, size=16)
    write_awq(out / "awq-bf16", 32, 96, torch.bfloat16, size=32)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
