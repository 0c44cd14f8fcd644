"""States that `snapshot bench` saves and restores, created from a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

from snapshot_bench import names

MiB = 1 << 20
SEED = 20_240_229
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Payload:
    """A state for each kind of system. All three views have the same live tensors."""

    app_state: dict[str, Any]
    """Modules, optimizers, or plain dicts of tensors, which each system wraps in its own kind of `StateDict`."""
    tensors: dict[str, torch.Tensor]
    """Every tensor under a unique name: for flat formats, and for the raw baselines."""
    changing: tuple[torch.Tensor, ...] = ()
    """The tensors that change between two takes. If there are any, takes with a base are measured, too."""

    def nested(self) -> dict[str, Any]:
        """Return the state dicts, for systems that accept those."""
        return {key: each if isinstance(each, dict) else each.state_dict() for key, each in self.app_state.items()}

    @property
    def device(self) -> torch.device:
        """The device with the tensors. Scalars of an optimizer may be on the host nevertheless."""
        return next((each.device for each in self.tensors.values() if each.device.type != "cpu"), CPU)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """Return a digest of all tensors' bytes, to verify a restore."""

        hashed = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            hashed.update(tensor.detach().reshape(-1).cpu().numpy().data)
        return hashed.hexdigest()

    def change(self) -> None:
        """Change every element of the changing tensors in place, as a training step does."""
        for tensor in self.changing:
            tensor.detach().add_(1e-3 if tensor.is_floating_point() else 1)

    def wipe(self) -> None:
        """Set all tensors to zero in place, so that the state is lost but its pages stay resident."""
        for tensor in self.tensors.values():
            tensor.detach().zero_()


class PayloadFactory(Protocol):
    """Function that creates a payload on a device. Scalars of an optimizer stay on the host, as in training."""

    def __call__(self, scale: float, device: torch.device = CPU) -> Payload: ...


@dataclass(frozen=True, slots=True)
class Case:
    """One shape of state. `scale` is the user's factor for the bytes."""

    name: str
    about: str
    nbytes: Callable[[float], int]
    """Approximate size, to check the free space."""
    make: PayloadFactory
    operations: tuple[str, ...]
    """Operations that are measured."""
    slow_peers: tuple[str, ...] = ()
    """Peers that take minutes: measured only if they are named."""


BULK = ("take", "durable", "restore", "cold", "async")


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def random_tensors(count: int, shape: tuple[int, ...], device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """Return equal float32 tensors with random values."""
    generator = _generator()
    return {f"t{index:05}": torch.rand(shape, generator=generator).to(device) for index in range(count)}


def plain_payload(key: str, tensors: dict[str, torch.Tensor]) -> Payload:
    """Return a state with one key, whose value is a dict of tensors."""
    return Payload({key: tensors}, {f"{key}.{name}": tensor for name, tensor in tensors.items()})


def _large(scale: float, device: torch.device = CPU) -> Payload:
    return plain_payload("state", random_tensors(4, (max(1, int(64 * MiB * scale)),), device))


def _count(full: int, scale: float) -> int:
    return max(1, int(full * scale))


def _small(scale: float, device: torch.device = CPU) -> Payload:
    return plain_payload("state", random_tensors(_count(10_000, scale), (1024,), device))


def _manifest(scale: float, device: torch.device = CPU) -> Payload:
    return plain_payload(
        "state", random_tensors(_count(99_998, scale), (1,), device)
    )  # the root and the dict are entries, too


def _keys(scale: float, device: torch.device = CPU) -> Payload:
    keys = _count(100, scale)
    tensors = random_tensors(keys * 50, (16,), device)
    names = list(tensors)
    app_state = {f"key{k:03}": {name: tensors[name] for name in names[k * 50 : (k + 1) * 50]} for k in range(keys)}
    return Payload(app_state, tensors)


LAYERS = 12
WIDTH = 768
VOCABULARY = 8_192


def _width(scale: float) -> int:
    return max(1, round(WIDTH * math.sqrt(scale) / 12)) * 12


def _train(scale: float, device: torch.device = CPU) -> Payload:
    width = _width(scale)
    with torch.device("meta"):  # skip an initialisation that is overwritten
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, batch_first=True)
        encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        model = nn.ModuleDict(
            {"embedding": nn.Embedding(_count(VOCABULARY, math.sqrt(scale)), width), "encoder": encoder}
        )
    return train_once(model, device)


def train_once(model: nn.Module, device: torch.device) -> Payload:
    """Return a model, created on the meta device, with random weights and AdamW's moments of those that are trained."""
    model.to_empty(device=device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = _generator()
    for parameter in model.parameters():
        parameter.data.copy_(torch.empty(parameter.shape).uniform_(-0.05, 0.05, generator=generator))
    for parameter in trained:
        parameter.grad = parameter.data  # any gradient creates the moments; this one costs no memory
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optim.{index}.{name}": value for name, value in moments.items()}
    frozen = {f"model.{name}" for name, value in model.named_parameters() if not value.requires_grad}
    changing = tuple(value for name, value in tensors.items() if name not in frozen) if frozen else ()
    return Payload({"model": model, "optim": optimizer}, tensors, changing)


def _train_bytes(scale: float) -> int:
    width = _width(scale)
    return (LAYERS * (12 * width + 13) + _count(VOCABULARY, math.sqrt(scale))) * width * 4 * 3


CASES = {
    case.name: case
    for case in (
        Case("large", names.CASES["large"], lambda s: int(1024 * MiB * s), _large, BULK),
        Case("small", names.CASES["small"], lambda s: _count(10_000, s) * 4096, _small, BULK),
        Case("train", names.CASES["train"], _train_bytes, _train, BULK),
        Case(
            "manifest",
            names.CASES["manifest"],
            lambda s: _count(99_998, s) * 512,
            _manifest,
            ("open",),
        ),
        Case(
            "keys",
            names.CASES["keys"],
            lambda s: _count(100, s) * 50 * 4096,
            _keys,
            ("take", "restore"),
            slow_peers=("torchsnapshot",),
        ),
    )
}
LINEAR = 2048
"""Width of a square layer: 16 MiB in float32."""


def _lora(scale: float, device: torch.device = CPU) -> Payload:
    with torch.device("meta"):
        frozen = nn.ModuleList(nn.Linear(LINEAR, LINEAR, bias=False) for _ in range(_count(64, scale)))
        down = nn.ModuleList(nn.Linear(LINEAR, 3, bias=False) for _ in frozen)
        up = nn.ModuleList(nn.Linear(3, LINEAR, bias=False) for _ in frozen)
    return train_once(nn.ModuleDict({"frozen": frozen.requires_grad_(False), "down": down, "up": up}), device)


def _half(scale: float, device: torch.device = CPU) -> Payload:
    with torch.device("meta"):  # a trained layer has two moments
        frozen = nn.ModuleList(nn.Linear(LINEAR, LINEAR, bias=False) for _ in range(3 * _count(11, scale)))
        trained = nn.ModuleList(nn.Linear(LINEAR, LINEAR, bias=False) for _ in range(_count(11, scale)))
    return train_once(nn.ModuleDict({"frozen": frozen.requires_grad_(False), "trained": trained}), device)


def _full(scale: float, device: torch.device = CPU) -> Payload:
    made = _train(scale, device)
    return Payload(made.app_state, made.tensors, tuple(made.tensors.values()))


INCREMENTAL = {
    case.name: case
    for case in (
        Case(
            "lora",
            names.INCREMENTAL["lora"],
            lambda s: _count(64, s) * (LINEAR + 6 * 3) * LINEAR * 4,
            _lora,
            ("take", "durable"),
        ),
        Case(
            "half",
            names.INCREMENTAL["half"],
            lambda s: _count(11, s) * 6 * LINEAR * LINEAR * 4,
            _half,
            ("take", "durable"),
        ),
        Case("full", names.INCREMENTAL["full"], _train_bytes, _full, ("take", "durable")),
    )
}
