"""States of torch's random number generators, as tensors of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.saved import SavedObject

KIND = "Generator"
"""`kind` of their entries."""


def read_device(path: str, params: Mapping[str, Any]) -> torch.device:
    """Return the device of a saved generator."""
    name = params.get("device")
    try:
        if isinstance(name, str):
            return torch.device(name)
    except RuntimeError:
        pass
    raise CorruptSnapshotError(f"{path}: invalid device of a generator: {str(name)[:80]!r}")


def make_generator(path: str, params: Mapping[str, Any], state: torch.Tensor) -> Any:
    """Return a generator in this state, or its device and state if this machine lacks the device."""
    device = read_device(path, params)
    try:
        generator = torch.Generator(device)
    except (RuntimeError, AssertionError):
        return SavedObject("Generator", "torch.Generator", {"device": device, "state": state})
    return fill_generator(path, generator, state)


def fill_generator(path: str, generator: torch.Generator, state: torch.Tensor) -> torch.Generator:
    """Set a generator's state."""
    try:
        generator.set_state(state.cpu())
    except (RuntimeError, TypeError) as error:
        raise CorruptSnapshotError(f"{path}: invalid state of a generator on {generator.device}: {error}") from error
    return generator
