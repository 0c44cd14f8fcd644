"""The tensors of a publication: which pieces each rank holds, which rank owns each tensor, and who sends what.

Each rank computes the same plan from the records of all ranks, without communication.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.errors import SnapshotError
from snapshot.maps.grid import Grid
from snapshot.maps.recipe import Spec, Target
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.wrappers import strip_wrappers
from snapshot.state.sharded import find_shards
from snapshot.tensors.dtypes import ITEMSIZE, NAMES, SAFETENSORS
from snapshot.tensors.geometry import Box, Shape, boxes_overlap, whole_box
from snapshot.text import listed

ALIGNMENT = 64


class HeldPiece(NamedTuple):
    """A box of a tensor, in this rank's memory."""

    box: Box
    tensor: torch.Tensor


class RankState(msgspec.Struct, array_like=True):
    """The tensors of one rank, as they are sent to the others: (name, dtype, shape, boxes)."""

    tensors: list[tuple[str, str, Shape, list[tuple[Shape, Shape]]]]


class Transfer(NamedTuple):
    """Elements of a source tensor that one rank copies or sends into an owner's target tensor."""

    target: str
    source: str
    box: Box
    """The box that the sender holds."""
    grid: Grid
    sender: int
    owner: int
    dtype: str
    """The source's dtype, in which the elements are sent."""
    nbytes: int


class SharePlan(NamedTuple):
    """The plan of a publication, equal on all ranks."""

    targets: Mapping[str, Target]
    owners: Mapping[str, int]
    transfers: Sequence[Transfer]
    equal: Sequence[tuple[str, str, SharePlan]] = ()
    """Pairs of sources that must have the same bytes, with the plan that brings both to one rank."""

    def owned(self, rank: int) -> dict[str, Target]:
        """Return the targets that a rank owns."""
        return {name: target for name, target in self.targets.items() if self.owners[name] == rank}


def target_bytes(target: Target) -> int:
    """Return the number of bytes of a target."""
    return math.prod(target.shape) * ITEMSIZE[target.dtype]


def flatten_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors of a module or of a nested state dict, by dotted names without wrappers' prefixes.

    Items of lists and tuples have their numbers as names. Values that are not tensors are left out, and a wrapper's own
    tensors.
    """
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, Mapping):
        raise TypeError(f"publish: the state must be a module or a state dict, got a {type(state).__name__}")
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) or (prefix and find_shards(prefix, value) is not None):
            if not all(prefix.split(".")):
                raise ValueError(f"publish: each part of a tensor's name must have characters, got {prefix!r}")
            if prefix in found:
                raise ValueError(f"publish: two tensors would be named {prefix!r}")
            found[prefix] = value
        elif isinstance(value, Mapping | list | tuple):
            for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
                add(f"{prefix}.{key}" if value is not state else str(key), below)

    add("", state)
    names, own = strip_wrappers(found)
    return {names[name]: value for name, value in found.items() if name not in own}


def find_pieces(tensors: Mapping[str, Any]) -> tuple[RankState, dict[str, list[HeldPiece]]]:
    """Return the description and the memory of this rank's pieces."""
    described, held = [], {}
    for name, value in tensors.items():
        shards = find_shards(name, value)
        if shards is not None:
            dtype, shape = shards.dtype, shards.shape
            pieces = [HeldPiece(piece.box, piece.tensor) for piece in shards.pieces]
            for piece in pieces:
                _expect_dense(name, piece.tensor)
        else:
            _expect_dense(name, value)
            dtype, shape = value.dtype, tuple(value.shape)
            plain = value.detach().resolve_conj().resolve_neg()
            pieces = [HeldPiece(whole_box(shape), plain)] if value.numel() else []
        if dtype not in NAMES:
            raise SnapshotError(f"{name}: cannot publish a tensor of {dtype}")
        described.append((name, NAMES[dtype], shape, [(each.box.offsets, each.box.sizes) for each in pieces]))
        held[name] = pieces
    return RankState(described), held


def _expect_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise unless a tensor has plain values, and a name that can be stored."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SnapshotError(f"{name!r}: a published tensor must have a name that UTF-8 can encode") from error
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise SnapshotError(f"{name}: a published tensor must be dense, got {kind}")
    if tensor.is_meta:
        raise SnapshotError(f"{name}: a published tensor must have values, got a tensor on the meta device")


def plan_shares(states: Sequence[RankState], names: TensorMap | None) -> SharePlan:
    """Return the plan for the states of all ranks. Raise if they do not form whole tensors."""
    specs: dict[str, Spec] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    wrong = []
    for rank, state in enumerate(states):
        for name, dtype, shape, boxes in state.tensors:
            spec = specs.setdefault(name, Spec(dtype, tuple(shape)))
            if spec != (dtype, tuple(shape)):
                wrong.append(f"{name}: {dtype}{list(shape)} on rank {rank}, {spec.dtype}{list(spec.shape)} on another")
            for offsets, sizes in boxes:
                holders[name].setdefault(Box(tuple(offsets), tuple(sizes)), []).append(rank)
    for name, spec in specs.items():
        boxes_ = list(holders[name])
        if not boxes_overlap(boxes_) and sum(box.numel for box in boxes_) == math.prod(spec.shape):
            continue
        wrong.append(f"{name}: the boxes of all ranks must form the whole tensor once")
    if wrong:
        raise SnapshotError(f"the states of the ranks cannot be published:{listed(wrong, 20)}")
    equal: list[tuple[str, str]] = []
    if names is not None:
        made = names.plan(specs)
        targets = dict(made.targets)
        targets |= {name: targets[owner] for name, owner in made.ties.items()}
        equal = made.equal
    else:
        targets = {name: Target.same(name, spec) for name, spec in specs.items()}
    refused = [f"{name}: {each.dtype}" for name, each in targets.items() if each.dtype not in SAFETENSORS]
    if refused:
        raise SnapshotError(f"safetensors does not support these dtypes; cast or exclude them:{listed(refused)}")
    if not targets or "__metadata__" in targets:
        raise SnapshotError("the state to publish must have tensors, none of them named '__metadata__'")
    checks = []
    for first, other in equal:
        pair = {name: Target.same(name, specs[name]) for name in (first, other)}
        checks.append((first, other, _assign(pair, specs, holders, len(states), together=True)))
    return _assign(targets, specs, holders, len(states))._replace(equal=checks)


def _assign(
    targets: dict[str, Target],
    specs: Mapping[str, Spec],
    holders: Mapping[str, Mapping[Box, list[int]]],
    world: int,
    *,
    together: bool = False,
) -> SharePlan:
    """Give each target to the rank with the fewest bytes so far, among those that hold a part of it.

    With `together`, one rank gets all targets.
    """
    loads, sent = [0] * world, [0] * world
    owners: dict[str, int] = {}
    transfers: list[Transfer] = []
    for name, target in sorted(targets.items(), key=lambda item: (-target_bytes(item[1]), item[0])):
        pieces = [
            (part.source, box, grid, ranks)
            for part in target.parts
            for box, ranks in holders[part.source].items()
            for grid in part.grid.clip("source", box)
            if grid.numel
        ]
        choice = sorted({rank for *_, ranks in pieces for rank in ranks}) or range(world)
        if together and owners:
            choice = [*owners.values()]
        owner = owners[name] = min(choice, key=lambda rank: loads[rank])
        loads[owner] += target_bytes(target)
        for source, box, grid, ranks in pieces:
            sender = owner if owner in ranks else min(ranks, key=lambda rank: sent[rank])
            nbytes = grid.numel * ITEMSIZE[specs[source].dtype]
            sent[sender] += nbytes if sender != owner else 0
            transfers.append(Transfer(name, source, box, grid, sender, owner, specs[source].dtype, nbytes))
    return SharePlan(targets, owners, transfers)
