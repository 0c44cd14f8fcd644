"""The optimizer in Megatron's legacy checkpoints: its state of one part, by the names of the part's parameters.

Files do not name the parameters. Without the distributed optimizer, groups number them in the order of the model. With
it, `distrib_optim.pt` has a flat buffer for each dtype: the parameters in reverse order, as DistributedDataParallel of
Megatron-core lays them out. Some of the float32 values are compared with the model, so a wrong order is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from snapshot.errors import UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.flat_ranges import cut_run
from snapshot.formats.pickle_nodes import expect_dict, expect_list
from snapshot.formats.rank_files import find_raw_range
from snapshot.formats.to_entries import make_scalar
from snapshot.formats.torch_save import TorchFile
from snapshot.formats.zip_archive import read_range
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.text import counted

MAIN = "param"
"""Name of the float32 values among the states."""
MOMENTS = ("exp_avg", "exp_avg_sq")
OWN_OPTIONS = frozenset(
    {
        "wd_mult",
        "lr_mult",
        "is_expert_parallel",
        "is_decoupled_lr",
        "pre_wd_mult",
        "pre_lr_mult",
        "default_config",
        "step",
    }
    | {"bias_correction"}
)
"""Options of groups that no optimizer of torch has."""
_ALIGNED = 64
"""Parameters begin at multiples of this in a buffer."""
_COMPARED = 16
"""Maximum number of parameters of a part, and of elements of each, that are compared with the model."""
_AT_ONCE = 16

Parameters = Mapping[str, TensorEntry]
"""The parameters of a chunk of the model by their paths, in the model's order."""


class PartState(NamedTuple):
    """The optimizer's state of one part."""

    states: dict[str, dict[str, Any]]
    """Entries of states, by the path of the parameter."""
    groups: list[dict[str, Any]]
    """Parameter groups as saved, with the paths of their parameters."""


class NotJoinedError(UnsupportedFormatError):
    """The reason why the state of an optimizer cannot be joined."""


async def read_state(
    storage: Storage, file: TorchFile, flat: TorchFile | None, chunks: Sequence[Parameters]
) -> PartState:
    """Return the optimizer's state of a part.

    Args:
        storage: The storage of the files.
        file: The part's file, with its parameter groups.
        flat: The file of the distributed optimizer, if there is one.
        chunks: The parameters of the part.

    Raises:
        NotJoinedError: The state is not one that this library can join.
        ValueError: The values are damaged.
    """
    known = expect_dict(file.value)["optimizer"]
    if not isinstance(known, (list, tuple)):
        return await _read_one(storage, file, expect_dict(known), None if flat is None else (flat, flat.value), chunks)
    owners = [_choose(chunks, experts=False), _choose(chunks, experts=True)]
    values = [None] * len(known) if flat is None else flat.value
    whole = isinstance(values, (list, tuple)) and len(known) == len(values) == len(owners) and all(map(any, owners))
    if not whole:
        raise NotJoinedError(
            f"it is a chain of {counted(len(known), 'optimizer')}, other than those of experts and of the rest"
        )
    made = PartState({}, [])
    for held, value, own in zip(known, values, owners, strict=True):
        if flat is None or value is not None:  # another part has that of the layers without experts
            buffers = None if flat is None else (flat, value)
            found = await _read_one(storage, file, expect_dict(held), buffers, own)
            made.states.update(found.states)
            made.groups.extend(found.groups)
    return made


def is_expert(path: str) -> bool:
    """Return True for a parameter of an expert."""
    return ".experts." in path


def _choose(chunks: Sequence[Parameters], *, experts: bool) -> list[Parameters]:
    return [{path: each for path, each in chunk.items() if is_expert(path) == experts} for chunk in chunks]


async def _read_one(
    storage: Storage,
    file: TorchFile,
    held: Mapping[Any, Any],
    flat: tuple[TorchFile, Any] | None,
    chunks: Sequence[Parameters],
) -> PartState:
    """Return the state of one optimizer, for its parameters."""
    inner = expect_dict(held.get("optimizer", held))
    groups = [dict(expect_dict(each)) for each in expect_list(inner["param_groups"])]
    members = _sort_into_groups(groups, chunks)
    if flat is not None:
        states = await _read_buffers(storage, *flat, chunks)
        steps = {each["step"] for each in groups if "step" in each}
        if len(steps) == 1:
            for own in states.values():
                own["step"] = next(iter(steps))
    elif "state" in inner:
        states = _read_numbered(file, held, groups, members)
    else:
        raise NotJoinedError("distrib_optim.pt, which has the state of the distributed optimizer, is missing")
    for path, own in states.items():
        for key, each in own.items():
            own[key] = each if isinstance(each, TensorEntry) else make_scalar(each)
            if own[key] is None:
                raise NotJoinedError(f"{p.show_value(key)} of {path[:200]} is {p.show_value(each)}")
    await _compare(storage, states, {path: each for chunk in chunks for path, each in chunk.items()})
    return PartState(states, [{**group, "params": own} for group, own in zip(groups, members, strict=True)])


def _sort_into_groups(groups: Sequence[Mapping[str, Any]], chunks: Sequence[Parameters]) -> list[list[str]]:
    """Return the paths of each group's parameters, in the model's order: Megatron decays no vectors and biases."""
    everything = [path for chunk in chunks for path in chunk]
    if len(groups) == 1:
        return [everything]
    decays = [group.get("wd_mult") for group in groups]
    plain = all(
        group.get("lr_mult", 1.0) == 1.0
        and not group.get("is_decoupled_lr")
        and group.get("is_expert_parallel") == groups[0].get("is_expert_parallel")
        for group in groups
    )
    if sorted(map(str, decays)) != ["0.0", "1.0"] or not plain:
        raise NotJoinedError(f"{len(groups)} parameter groups, which are not only those with and without weight decay")
    vectors = {
        path
        for chunk in chunks
        for path, entry in chunk.items()
        if len(entry.shape) == 1 or path.endswith((".bias", "/bias"))
    }
    return [[path for path in everything if (path in vectors) == (decay == 0.0)] for decay in decays]


# The distributed optimizer: flat buffers.


async def _read_buffers(
    storage: Storage, flat: TorchFile, value: Any, chunks: Sequence[Parameters]
) -> dict[str, dict[str, Any]]:
    saved = expect_dict(value)
    if saved.get("buckets_coalesced") is not True:
        raise NotJoinedError("distrib_optim.pt has a tensor for each bucket, as before February 2024")
    buffers = [expect_dict(saved[number]) for number in sorted(each for each in saved if type(each) is int)]
    owners = [
        {path: entry for path, entry in chunk.items() if entry.dtype == dtype}
        for chunk in chunks
        for dtype in dict.fromkeys(entry.dtype for entry in chunk.values())
    ]
    if len(buffers) != len(owners) or any(len(each) != 1 for each in buffers):
        raise NotJoinedError(f"distrib_optim.pt has {len(buffers)} buffers, and the model has {len(owners)} of a dtype")
    states: dict[str, dict[str, Any]] = {}
    for buffer, own in zip(buffers, owners, strict=True):
        [(dtypes, tensors)] = dict.items(buffer)
        kind = dtypes[0] if isinstance(dtypes, tuple) and dtypes else None
        dtype = next(iter(own.values())).dtype
        if not isinstance(kind, p.Dtype) or kind.name != dtype:
            raise NotJoinedError(f"a buffer of {p.show_value(kind)}, where the model has parameters of {dtype}")
        for key in (MAIN, *MOMENTS):
            stored = flat.locate(expect_dict(tensors).get(key))
            if stored is None or len(stored.shape) != 1:
                raise NotJoinedError(f"a buffer without a flat tensor {key}")
            raw = await find_raw_range(storage, stored)
            for path, at in _lay_out(own, stored.shape[0]).items():
                states.setdefault(path, {})[key] = cut_run(raw, at, own[path].shape)
    return states


def _lay_out(parameters: Parameters, length: int) -> dict[str, int]:
    """Return the place of each parameter in a buffer of this length, without padding of buckets.

    If all have a multiple of 64 elements, the buckets do not matter. Otherwise, there must be one bucket.
    """
    made, end = {}, 0
    for path in reversed(list(parameters)):
        made[path] = -(-end // _ALIGNED) * _ALIGNED
        end = made[path] + math.prod(parameters[path].shape)
    if end != length:
        raise NotJoinedError(
            f"a buffer has {length:,} elements, and the model's parameters take {end:,}; if parameters are frozen, or "
            f"have other than multiples of {_ALIGNED} elements, its buckets are not known"
        )
    return made


# Other optimizers: states by numbers.


def _read_numbered(
    file: TorchFile,
    held: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Sequence[str]],
) -> dict[str, dict[str, Any]]:
    inner = expect_dict(held.get("optimizer", held))
    states: dict[str, dict[str, Any]] = {}
    saved = expect_dict(inner["state"])
    for group, own in zip(groups, members, strict=True):
        numbers = expect_list(group["params"])
        if len(numbers) != len(own):
            raise NotJoinedError(f"a group of {len(numbers)} parameters, where the model has {len(own)}")
        for number, path in zip(numbers, own, strict=True):
            found = expect_dict(saved.get(number) or {})
            states[path] = {key: file.locate(each) or each for key, each in found.items()}
    main = held.get("fp32_from_fp16_params")
    if main is not None:
        halves = [[path for path in own if path in states] for own in members]
        for tensors, own in zip(expect_list(main), halves, strict=True):
            listed = expect_list(tensors)
            if len(listed) != len(own):
                raise NotJoinedError("some parameters are of float32, and others are not")
            for tensor, path in zip(listed, own, strict=True):
                states[path][MAIN] = file.locate(tensor)
    return states


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorEntry)


# The comparison with the model.


async def _compare(storage: Storage, states: Mapping[str, Mapping[str, Any]], model: Parameters) -> None:
    """Raise NotJoinedError unless states have the shapes of the parameters, and some of them their values."""
    for path, own in states.items():
        shape = model[path].shape
        for key, entry in own.items():
            if _is_tensor(entry) and entry.shape not in ((), shape):
                raise NotJoinedError(f"{key} of {path[:200]} has the shape {list(entry.shape)}, not {list(shape)}")
    paths = [path for path, own in states.items() if _is_tensor(own.get(MAIN))]
    step = max(1, -(-len(paths) // _COMPARED))
    chosen = list(dict.fromkeys([*paths[::step], *paths[-1:]]))

    async def agrees(path: str) -> bool:
        kept, main = [await find_raw_range(storage, each) for each in (model[path], states[path][MAIN])]
        if kept.serializer != "raw" or main.serializer != "raw" or kept.dtype not in ("bfloat16", "float16", "float32"):
            return True
        found, expected = [await _read_first(storage, each) for each in (kept, main)]
        return torch.equal(found, expected.to(found.dtype)) or bool(expected.isnan().any())

    for path, same in zip(chosen, await gather_limited(chosen, agrees, _AT_ONCE), strict=True):
        if not same:
            raise NotJoinedError(f"its float32 values of {path[:200]} are not those of the model")


async def _read_first(storage: Storage, entry: TensorEntry) -> torch.Tensor:
    count = min(math.prod(entry.shape), _COMPARED)
    begin = entry.byte_range[0]
    data = await read_range(storage, entry.location, begin, begin + count * ITEMSIZE[entry.dtype])
    return torch.frombuffer(bytearray(data), dtype=BY_NAME[entry.dtype]) if count else torch.empty(0)
