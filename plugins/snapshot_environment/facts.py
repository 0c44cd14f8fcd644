"""What a state is computed with: versions, ranks, and the switches of torch that change its numbers.

Each take reads it, so nothing here walks over tensors or asks a device. Values that may be secret, the command line and
variables of the environment, are recorded as digests.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import islice
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import xxhash

from snapshot.state.model_state import ModuleMap
from snapshot.tensors.memory import NAMES
from snapshot.text import VERSION

FRAMEWORKS = (
    *("accelerate", "bitsandbytes", "composer", "deepspeed", "flash_attn", "lightning", "megatron.core", "numpy"),
    *("peft", "pytorch_lightning", "ray", "torchao", "torchtitan", "transformer_engine", "transformers", "triton"),
)
"""Modules whose version is recorded, if the process has imported them."""
VARIABLES = ("CUBLAS_", "CUDNN_", "HSA_", "KMP_", "MKL_", "NCCL_", "NVTE_", "OMP_", "PYTORCH_", "RCCL_", "TORCH_")
"""The beginnings of variables that change how numbers are computed."""
HARMLESS = ("MKL_NUM", "NCCL_ASYNC", "NCCL_DEBUG", "NCCL_SOCKET", "OMP_NUM", "OMP_PLACES", "OMP_PROC", "TORCH_NCCL_")
"""The beginnings of those among them that differ from host to host, and are not worth a warning."""
SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: NAMES[torch.get_default_dtype()],
    "matmul precision": torch.get_float32_matmul_precision,
    "TF32 in cuBLAS": lambda: torch.backends.cuda.matmul.allow_tf32,
    "TF32 in cuDNN": lambda: torch.backends.cudnn.allow_tf32,
    "reduced precision in bf16 matmul": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
    "reduced precision in fp16 matmul": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
    "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
    "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
    "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
}
FLAGS = ("fused", "foreach", "capturable", "amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
"""Options of optimizers that choose another kernel, or another update."""
POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype", "cast_forward_inputs")
MOST_MODULES = 16
"""Modules of a model that are examined for FSDP, from the top."""
MOST_NOTED = 64 << 10
"""Bytes that an application may add."""

_noted: dict[str, Any] = {}


def note(**values: str | float | bool | None) -> None:
    """Record values with each later take of this process, such as the version of a tokenizer; None removes one.

    A restore logs those that differ, and `snapshot diff` shows them.

    >>> note(tokenizer="v3", dataset="2026-11")
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, (str, int, float, bool)):
            raise TypeError(f"{name} must be a text, a number, True, False or None, got {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be finite, got {value}")
    made = {name: value for name, value in (_noted | values).items() if value is not None}
    size = len(msgspec.json.encode(made))
    if size > MOST_NOTED:
        raise ValueError(f"what is noted must be at most {MOST_NOTED:,} bytes, got {size:,}")
    _noted.clear()
    _noted.update(made)


def describe(statefuls: Sequence[ModuleMap], world: int) -> dict[str, Any]:
    """Return what the states of statefuls are computed with on this rank, as JSON values by name."""
    switches = {}
    for name, read in SWITCHES.items():
        with suppress(Exception):  # torch raises if an application mixes its old and its new switches
            switches[name] = read()
    found: dict[str, Any] = {
        "versions": _versions(),
        "device": _device(),
        "world_size": world,
        "mesh": _mesh(statefuls),
        "switches": switches,
        "policies": dict(_policies(statefuls)),
        "optimizers": dict(_optimizers(statefuls)),
        "variables": dict(read_variables()),
        "command": _digest("\0".join(map(str, sys.argv))),
        "application": dict(_noted),
    }
    return {name: value for name, value in found.items() if value not in ({}, None)}


def _versions() -> dict[str, str]:
    found = dict(_own_versions())
    for name in FRAMEWORKS:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


@cache
def _own_versions() -> Mapping[str, str]:
    found = {"torch": str(torch.__version__), "snapshot": VERSION, "python": platform.python_version()}
    if torch.version.cuda or torch.version.hip:
        found["CUDA" if torch.version.cuda else "ROCm"] = str(torch.version.cuda or torch.version.hip)
    return found


def _device() -> str | None:
    """Return the name of the accelerator, if the process uses one. A take must not be what initialises it."""
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]


def _mesh(statefuls: Sequence[ModuleMap]) -> dict[str, int]:
    """Return the dimensions of the mesh on which the first parameter that has one is distributed."""
    for each in statefuls:
        for parameter in islice(each.model.parameters() if each.model is not None else (), 1):
            mesh: Any = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                names = mesh.mesh_dim_names or [f"dimension {number}" for number in range(mesh.ndim)]
                return dict(zip(names, mesh.shape, strict=True))
    return {}


def _policies(statefuls: Sequence[ModuleMap]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the mixed precision of the first module of each stateful that FSDP shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_initialized():
        return
    for each in statefuls:
        for module in islice(each.model.modules() if each.model is not None else (), MOST_MODULES):
            policy = None
            if isinstance(module, fsdp.FSDPModule):
                policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
            elif isinstance(module, fsdp.FullyShardedDataParallel):
                policy = module.mixed_precision
            if policy is not None:
                yield each.key, {name: _plain(getattr(policy, name)) for name in POLICY if hasattr(policy, name)}
                break


def _optimizers(statefuls: Sequence[ModuleMap]) -> Iterator[tuple[str, dict[str, Any]]]:
    for each in statefuls:
        for number, optimizer in enumerate(each.optimizers):
            group = optimizer.param_groups[0] if optimizer.param_groups else {}
            name = each.key if number == 0 else f"{each.key} ({number})"
            yield name, {"class": type(optimizer).__name__} | {key: _plain(group[key]) for key in FLAGS if key in group}


@cache
def read_variables() -> Mapping[str, str]:
    """Return a digest of each variable that changes how numbers are computed. Libraries read them at their start."""
    return {
        name: _digest(value)
        for name, value in os.environ.items()
        if name.startswith(VARIABLES) and not name.startswith(HARMLESS)
    }


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(text))


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: a dtype by its name, and other objects by the name of their type."""
    if isinstance(value, torch.dtype):
        return NAMES.get(value, str(value))
    return value if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
