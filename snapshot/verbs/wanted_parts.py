"""The part of each tensor that a load wants: a box, or this rank's boxes on a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from snapshot.errors import RestoreError, SnapshotError
from snapshot.loading.read_object import parse_box
from snapshot.plan.globs import compile_glob, find_unmatched
from snapshot.state.sharded import read_placement
from snapshot.tensors import meshes
from snapshot.tensors.geometry import Box, Shape, whole_box
from snapshot.text import listed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    Slices = slice | int | Sequence[slice | int]
    LoadPlan = (
        Mapping[str, Slices]
        | Callable[[str, Shape], Slices | None]
        | tuple[DeviceMesh, Mapping[str, Placement | Sequence[Placement]]]
    )


class WantedPart(Protocol):
    """The part of a tensor that is loaded."""

    @property
    def shape(self) -> Shape:
        """The shape of the memory that it needs on this rank."""

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """Yield each box to read, and its position in that memory."""

    def finish(self, held: torch.Tensor) -> torch.Tensor:
        """Return the tensor for the caller, from filled memory."""


class WantedBox:
    """One box. Dimensions that an int selects are dropped from the result."""

    def __init__(self, box: Box, dropped: frozenset[int] = frozenset()) -> None:
        self._box = box
        self._dropped = dropped

    @property
    def shape(self) -> Shape:
        return self._box.sizes

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        yield self._box, whole_box(self._box.sizes)

    def finish(self, held: torch.Tensor) -> torch.Tensor:
        for axis in sorted(self._dropped, reverse=True):
            held = held.squeeze(axis)
        return held


class WantedShard:
    """This rank's boxes of a DTensor."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], whole: Shape, held: meshes.HeldShards):
        self._mesh = mesh
        self._placements = placements
        self._whole = whole
        self._held = held

    @property
    def shape(self) -> Shape:
        return self._held.shape

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        yield from self._held.boxes

    def finish(self, held: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor import DTensor  # only such plans pay for this import

        stride = torch.empty(self._whole, device="meta").stride()
        return DTensor.from_local(
            held, self._mesh, self._placements, run_check=False, shape=torch.Size(self._whole), stride=stride
        )


def choose_parts(plan: LoadPlan | None, shapes: Mapping[str, Shape], device: torch.device) -> dict[str, WantedPart]:
    """Return the wanted part of each named tensor. A tensor without a part is wanted whole.

    Raise RestoreError with everything that does not fit.
    """
    choose: Callable[[str, Shape], WantedPart]
    if plan is None:
        return {}
    if isinstance(plan, tuple):
        choose = _choose_shards(plan, shapes, device)
    elif isinstance(plan, Mapping):
        find = _first_match("plan", plan, shapes)
        choose = lambda name, shape: _choose_box(name, shape, find(name))  # noqa: E731
    elif callable(plan):
        called = {name: plan(name, shape) for name, shape in shapes.items()}  # its own errors reach the caller
        choose = lambda name, shape: _choose_box(name, shape, called[name])  # noqa: E731
    else:
        raise TypeError(
            f"plan must be a dict of slices, a function, or a mesh with placements, got a {type(plan).__name__}"
        )
    parts: dict[str, WantedPart] = {}
    misfits = []
    for name, shape in shapes.items():
        try:
            parts[name] = choose(name, shape)
        except (SnapshotError, ValueError, IndexError, TypeError) as error:
            misfits.append(str(error))
    if misfits:
        raise RestoreError(f"the plan does not fit:{listed(misfits)}", misfits)
    return parts


def _first_match(what: str, found: Mapping[str, Any], names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that returns the value of a name, or of the first glob that matches it; None if none does.

    Raise RestoreError for globs that match nothing.
    """
    unmatched = [glob for glob in find_unmatched(list(found), names) if glob not in names]
    if unmatched:
        lines = [f"{glob!r} matches no tensor" for glob in unmatched]
        raise RestoreError(f"the {what} does not fit:{listed(lines)}", lines)
    globs = [(compile_glob(glob), value) for glob, value in found.items()]

    def find(name: str) -> Any:
        if name in found:
            return found[name]
        return next((value for glob, value in globs if glob.match(name)), None)

    return find


def _choose_box(name: str, shape: Shape, wanted: Slices | None) -> WantedBox:
    if wanted is None:
        return WantedBox(whole_box(shape))
    given: list[Any] = [*wanted] if isinstance(wanted, (list, tuple)) else [wanted]
    for each in given:
        if isinstance(each, bool) or not isinstance(each, (slice, int)):
            raise TypeError(f"{name}: a part must be given by slices and ints, got {each!r}")
    box, dropped = parse_box(name, shape, given)
    return WantedBox(box, frozenset(dropped))


def _choose_shards(
    plan: tuple[DeviceMesh, Mapping[str, Placement | Sequence[Placement]]],
    shapes: Mapping[str, Shape],
    device: torch.device,
) -> Callable[[str, Shape], WantedPart]:
    """Return a function that returns this rank's boxes of a tensor. Tensors without a placement are replicated."""
    from torch.distributed.device_mesh import DeviceMesh  # only such plans pay for these imports
    from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

    if len(plan) != 2 or not isinstance(plan[0], DeviceMesh) or not isinstance(plan[1], Mapping):
        raise TypeError("plan must be a DeviceMesh and a dict of placements if it is a tuple")
    mesh, placed = plan
    if mesh.device_type != device.type:
        raise ValueError(f"device must be of the mesh's type {mesh.device_type!r}, got {str(device)!r}")
    find = _first_match("plan", placed, shapes)
    mesh_shape, coordinate = tuple(map(int, mesh.mesh.shape)), mesh.get_coordinate()

    def choose(name: str, shape: Shape) -> WantedPart:
        found = find(name)
        given = [found] if isinstance(found, Placement) else [Replicate()] * mesh.ndim if found is None else [*found]
        if len(given) != mesh.ndim:
            raise ValueError(f"{name}: must have {mesh.ndim} placements, one per dimension of the mesh, got {given}")
        for each in given:
            if isinstance(each, Shard) and not -len(shape) <= each.dim < len(shape):
                raise ValueError(f"{name}: has no dimension {each.dim} to split, its shape is {list(shape)}")
        ours = tuple(read_placement(name, each, len(shape)) for each in given)
        if _is_ambiguous(shape, mesh_shape, ours):
            raise ValueError(f"{name}: {given} is ambiguous for {list(shape)}, since the sizes do not divide evenly")
        if coordinate is None:  # this rank is outside the mesh
            return WantedShard(mesh, given, shape, meshes.HeldShards((0,), ()))
        return WantedShard(mesh, given, shape, meshes.find_held_shards(shape, mesh_shape, ours, tuple(coordinate)))

    return choose


def _is_ambiguous(shape: Shape, mesh_shape: Shape, placements: meshes.Placements) -> bool:
    """Return True if torch's operations and FSDP would give any rank different boxes, as for uneven strides."""
    if not any(isinstance(each, meshes.Split) and each.strides > 1 for each in placements):
        return False
    order = meshes.find_nesting(mesh_shape, placements)
    if order is None:
        return False
    shards = (meshes.iterate_shards(shape, mesh_shape, placements, each) for each in (None, order))
    return any(one != other for one, other in zip(*shards, strict=True))
