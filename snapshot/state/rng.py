"""The global RNG state as a stateful object, without a pickle. Pickles name this module."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from snapshot.manifest.objects import find_bit_generator


class RNGState:
    """The global RNG state: torch's CPU and every accelerator's, NumPy's, and Python's `random`.

    In an app state it is captured before all else, and restored after all else: after `restore`, random numbers are
    those that followed `take`. At most one of them in an app state.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator, as tensors, arrays and numbers."""
        version, words, normal = random.getstate()
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(legacy=False),
            "python": {"version": version, "words": np.array(words, dtype=np.uint32), "normal": normal},
        }
        for index, device in enumerate(_find_devices()):
            state[f"{device.type}:{index}"] = _find_module(device).get_rng_state(index)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> list[str]:
        """Put the generators back; the names of those that this process does not have, and which were skipped.

        A generator that was not saved, or not whole, stays as it is. Snapshots of torchsnapshot have torch's alone,
        under another name."""
        state = dict(state_dict)
        if "torch" not in state and "rng_state" in state:
            state["torch"] = state.pop("rng_state")
        for name, restore in (("torch", torch.set_rng_state), ("numpy", _restore_numpy), ("python", _restore_python)):
            if name in state and restore(state[name]) is not False:
                del state[name]
        for index, device in enumerate(_find_devices()):
            saved = state.pop(f"{device.type}:{index}", None)
            if saved is not None:
                _find_module(device).set_rng_state(saved, index)
        return list(state)


def _restore_numpy(saved: dict[str, Any]) -> bool:
    """Restore NumPy's global generator of any kind. Return False if that is impossible."""
    if "kind" in saved:  # as the first snapshots had it
        saved = {
            "bit_generator": saved["kind"],
            "state": {"key": saved.get("keys"), "pos": saved.get("position")},
            **{name: saved[name] for name in ("has_gauss", "gauss") if name in saved},
        }
    name = saved.get("bit_generator")
    current = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        made = current if type(current).__name__ == name else find_bit_generator(name)()
    except KeyError:
        return False
    before = made.state
    try:
        made.state = {key: value for key, value in saved.items() if key not in ("has_gauss", "gauss")}
    except (KeyError, TypeError, ValueError):  # part of it was left out
        made.state = before
        return False
    if made is not current:
        np.random.set_bit_generator(made)  # type: ignore[attr-defined]
    np.random.set_state(saved)
    return True


def _restore_python(saved: dict[str, Any]) -> bool:
    """Restore `random`; return False if part of its state was left out."""
    if not {"version", "words", "normal"} <= saved.keys():
        return False
    random.setstate((saved["version"], tuple(map(int, saved["words"])), saved["normal"]))
    return True


def _find_devices() -> list[torch.device]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None or not hasattr(_find_module(accelerator), "get_rng_state"):
        return []
    return [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]


def _find_module(device: torch.device) -> Any:
    return torch.get_device_module(device)
