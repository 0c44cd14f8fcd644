"""States that `snapshot bench` saves and restores, created from a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import nn

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

    def nested(self) -> dict[str, Any]:
        """Return the state dicts, for systems that accept those."""
        return {key: each if isinstance(each, dict) else each.state_dict() for key, each in self.app_state.items()}

    @property
    def device(self) -> torch.device:
        """The device with the tensors. Scalars of an optimizer may be on the host nevertheless."""
        return next((each.device for each in self.tensors.values() if each.device.type != "cpu"), CPU)

    def nbytes(self) -> int:
        """Return the size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """Return a digest of all tensors' bytes, to verify a restore."""

        hashed = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            hashed.update(tensor.detach().reshape(-1).cpu().numpy().data)
        return hashed.hexdigest()

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


def _random(count: int, shape: tuple[int, ...], device: torch.device) -> dict[str, torch.Tensor]:
    generator = _generator()
    return {f"t{index:05}": torch.rand(shape, generator=generator).to(device) for index in range(count)}


def _plain(key: str, tensors: dict[str, torch.Tensor]) -> Payload:
    return Payload({key: tensors}, {f"{key}.{name}": tensor for name, tensor in tensors.items()})


def _large(scale: float, device: torch.device = CPU) -> Payload:
    return _plain("state", _random(4, (max(1, int(64 * MiB * scale)),), device))


def _count(full: int, scale: float) -> int:
    return max(1, int(full * scale))


def _small(scale: float, device: torch.device = CPU) -> Payload:
    return _plain("state", _random(_count(10_000, scale), (1024,), device))


def _manifest(scale: float, device: torch.device = CPU) -> Payload:
    return _plain("state", _random(_count(99_998, scale), (1,), device))  # the root and the dict are entries, too


def _keys(scale: float, device: torch.device = CPU) -> Payload:
    keys = _count(100, scale)
    tensors = _random(keys * 50, (16,), device)
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
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = _generator()
    for parameter in model.parameters():
        parameter.data.copy_(torch.empty(parameter.shape).uniform_(-0.05, 0.05, generator=generator))
        parameter.grad = parameter.data  # any gradient creates the moments; this one costs no memory
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optim.{index}.{name}": value for name, value in moments.items()}
    return Payload({"model": model, "optim": optimizer}, tensors)


def _train_bytes(scale: float) -> int:
    width = _width(scale)
    return (LAYERS * (12 * width + 13) + _count(VOCABULARY, math.sqrt(scale))) * width * 4 * 3


CASES = {
    case.name: case
    for case in (
        Case("large", "4 float32 tensors of 256 MiB", lambda s: int(1024 * MiB * s), _large, BULK),
        Case("small", "10,000 float32 tensors of 4 KiB", lambda s: _count(10_000, s) * 4096, _small, BULK),
        Case("train", "a transformer of 12 layers with AdamW's moments, about 1 GiB", _train_bytes, _train, BULK),
        Case(
            "manifest",
            "opening a manifest of 100,000 entries",
            lambda s: _count(99_998, s) * 512,
            _manifest,
            ("open",),
        ),
        Case(
            "keys",
            "100 keys in the app state, 50 tensors of 64 bytes in each",
            lambda s: _count(100, s) * 50 * 4096,
            _keys,
            ("take", "restore"),
            slow_peers=("torchsnapshot",),
        ),
    )
}
DEFAULT = ("large", "small", "train")
