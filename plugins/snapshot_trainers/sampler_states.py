"""What samplers hold: the random numbers of the process, their own generators, and their counters."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from snapshot.state.rng import RNGState

State = Mapping[str, Any]
_EVERYWHERE = frozenset(("epoch", "seed", "initial_seed"))
"""Attributes of samplers that are the same on all ranks, with whatever number of them."""
_SETTINGS = frozenset(
    ("batch_size", "num_processes", "num_replicas", "num_samples", "process_index", "rank", "total_size")
)
"""Attributes of samplers that the application gives, and that a restore leaves as they are."""


def read_globals() -> dict[str, Any]:
    """Return the state of the global generators on the host, as an `RNGState` has it.

    Samplers draw from no others, and to ask every accelerator for its state would take its context.
    """
    version, words, normal = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "normal": normal},
    }


def write_globals(held: State) -> None:
    """Set the state of some of the global generators."""
    RNGState().load_state_dict(dict(held))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def changed_globals(before: State, after: State) -> dict[str, Any]:
    """Return those states of the global generators that something has drawn from since."""
    return {name: state for name, state in before.items() if not _is_equal(after[name], state)}


def _is_equal(one: Any, other: Any) -> bool:
    """Return True if two states of a generator are equal: dicts, with arrays or tensors."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(each, other[name]) for name, each in one.items())
    return bool(np.array_equal(one, other))


@contextmanager
def globals_kept() -> Iterator[None]:
    """Put the global generators back at the end: the application goes on with the numbers it would have drawn."""
    held = read_globals()
    try:
        yield
    finally:
        write_globals(held)


def _read_generator(value: Any) -> Any:
    """Return the state of a generator as plain values; None for any other object."""
    if isinstance(value, torch.Generator):
        return {"torch": value.get_state().numpy().tobytes()} if value.device.type == "cpu" else None
    if isinstance(value, random.Random):
        version, numbers, kept = value.getstate()
        return {"python": [version, np.array(numbers, dtype=np.uint32).tobytes(), kept]}
    if isinstance(value, np.random.Generator):
        return {"numpy": copy.deepcopy(value.bit_generator.state)}
    if isinstance(value, np.random.RandomState):
        return {"numpy": copy.deepcopy(value.get_state(legacy=False))}
    return None


def write_generator(value: Any, state: State) -> None:
    """Set the state of a generator."""
    if isinstance(value, torch.Generator):
        value.set_state(_as_tensor(state["torch"]))
    elif isinstance(value, random.Random):
        version, numbers, kept = state["python"]
        value.setstate((version, tuple(np.frombuffer(numbers, dtype=np.uint32).tolist()), kept))
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state["numpy"]
    else:
        value.set_state(state["numpy"])


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, also those in slots."""
    slots = [name for kind in type(value).__mro__ for name in _slots_of(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots_of(kind: Any) -> Sequence[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_counter(value: Any) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def walk_samplers(sampler: Any) -> list[Any]:
    """Return a sampler and those that it draws from."""
    found: list[Any] = []
    left = [sampler]
    while left:
        each = left.pop(0)
        if each is None or any(each is known for known in found) or not hasattr(each, "__iter__"):
            continue
        found.append(each)
        left += [getattr(each, name, None) for name in ("batch_sampler", "sampler")]
        left += [value for value in _attributes(each).values() if isinstance(value, Sampler)]
        if isinstance(each, DistributedSampler):
            left.append(getattr(each.dataset, "_sampler", None))  # Lightning's wrapper divides what a sampler gave
    return found


def read_counters(samplers: Sequence[Any]) -> list[dict[str, int]]:
    """Return the integers that each sampler holds."""
    return [{name: int(value) for name, value in _attributes(each).items() if _is_counter(value)} for each in samplers]


def read_samplers(samplers: Sequence[Any], first: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Return the counters and generators of each sampler.

    `first`: the integers that they held when they were made. Those that are still the same are settings of the
    application, or counters that have not counted yet.
    """
    found = []
    for at, each in enumerate(samplers):
        settings = first[at] if at < len(first) else {}
        held: dict[str, Any] = {}
        for name, value in _attributes(each).items():
            if _is_counter(value):
                if name in _EVERYWHERE or settings.get(name) != value:
                    held[name] = int(value)
            elif (state := _read_generator(value)) is not None:
                held[name] = state
        found.append(held)
    return found


def write_samplers(
    samplers: Sequence[Any], saved: Sequence[State], first: Sequence[Mapping[str, int]], *, everywhere: bool
) -> None:
    """Set the counters and generators of samplers. With `everywhere`, only what is the same on all ranks."""
    for at, (each, held) in enumerate(zip(samplers, saved, strict=True)):
        for name, state in {**(first[at] if at < len(first) else {}), **held}.items():
            value = getattr(each, name, None)
            if isinstance(state, Mapping):
                if value is None and "torch" in state:  # that of another number of ranks had one
                    value = torch.Generator()
                    setattr(each, name, value)
                if value is not None:
                    write_generator(value, state)
            elif not (value is None or _is_counter(value)):
                continue
            elif value != state and (name in _EVERYWHERE or not (everywhere or name in _SETTINGS)):
                setattr(each, name, state if value is None else type(value)(state))


@contextmanager
def without_new_generators(samplers: Sequence[Any], saved: Sequence[State]) -> Iterator[None]:
    """Take generators away from samplers that had none when they were saved, and drew from the global one instead."""
    taken = [
        (each, each.generator)
        for each, held in zip(samplers, saved, strict=True)
        if isinstance(getattr(each, "generator", None), torch.Generator) and "generator" not in held
    ]
    for each, _ in taken:
        each.generator = None
    try:
        yield
    finally:
        for each, generator in taken:
            each.generator = generator


def is_strided(sampler: DistributedSampler[Any]) -> bool:
    """Return True if replicas take turns in one order, as in the base class. A subclass may have another order."""
    owner = next(each for each in type(sampler).__mro__ if "__iter__" in vars(each))
    return owner is DistributedSampler or owner.__module__.startswith("torchdata.")


def order_of_all(sampler: Any) -> list[Any]:
    """Return the order of an epoch that replicas divide: that of a single replica."""
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return list(DistributedSampler.__iter__(alone))
