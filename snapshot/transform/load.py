"""Loading of any readable checkpoint into new plain tensors, or parts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from snapshot.distributed.operation import Operation
from snapshot.errors import RestoreError, SnapshotError
from snapshot.formats.pickled_objects import is_refused
from snapshot.io.loop import run
from snapshot.io.system import gc_paused
from snapshot.io.url import Location
from snapshot.loading.archive_checksums import expect_archive_checksums
from snapshot.loading.mapping import map_checkpoint
from snapshot.loading.open import Opened, expect_files, open_checkpoint
from snapshot.loading.read_object import parse_box
from snapshot.loading.read_plan import ReadPlan
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, find_locations
from snapshot.manifest.entries import stored_in
from snapshot.plan.names import compile_glob, find_unmatched
from snapshot.progress import Meter
from snapshot.state.sharded import read_placement
from snapshot.tensors import composite, geometry
from snapshot.tensors.geometry import Box, Shape, whole_box
from snapshot.tensors.memory import BY_NAME
from snapshot.text import listed
from snapshot.transform.call import expect_sound, seen_by_rank
from snapshot.transform.export import name_tensors
from snapshot.transform.target import Selection

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


# The part of each tensor that a load wants: a box, or this rank's boxes on a mesh of devices.

if TYPE_CHECKING:
    Slices = slice | int | Sequence[slice | int]
    Parts = (
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

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], whole: Shape, held: geometry.HeldShards):
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


def choose_parts(parts: Parts | None, shapes: Mapping[str, Shape], device: torch.device) -> dict[str, WantedPart]:
    """Return the wanted part of each named tensor. A tensor without a part is wanted whole.

    Raise RestoreError with everything that does not fit.
    """
    choose: Callable[[str, Shape], WantedPart]
    if parts is None:
        return {}
    if isinstance(parts, tuple):
        choose = _choose_shards(parts, shapes, device)
    elif isinstance(parts, Mapping):
        find = _first_match("parts", parts, shapes)
        choose = lambda name, shape: _choose_box(name, shape, find(name))  # noqa: E731
    elif callable(parts):
        called = {name: parts(name, shape) for name, shape in shapes.items()}  # its own errors reach the caller
        choose = lambda name, shape: _choose_box(name, shape, called[name])  # noqa: E731
    else:
        raise TypeError(
            f"parts must be a dict of slices, a function, or a mesh with placements, got a {type(parts).__name__}"
        )
    wanted: dict[str, WantedPart] = {}
    misfits = []
    for name, shape in shapes.items():
        try:
            wanted[name] = choose(name, shape)
        except (SnapshotError, ValueError, IndexError, TypeError) as error:
            misfits.append(str(error))
    if misfits:
        raise RestoreError(f"the parts do not fit:{listed(misfits)}", misfits)
    return wanted


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
    parts: tuple[DeviceMesh, Mapping[str, Placement | Sequence[Placement]]],
    shapes: Mapping[str, Shape],
    device: torch.device,
) -> Callable[[str, Shape], WantedPart]:
    """Return a function that returns this rank's boxes of a tensor. Tensors without a placement are replicated."""
    from torch.distributed.device_mesh import DeviceMesh  # only such plans pay for these imports
    from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

    if len(parts) != 2 or not isinstance(parts[0], DeviceMesh) or not isinstance(parts[1], Mapping):
        raise TypeError("parts must be a DeviceMesh and a dict of placements if it is a tuple")
    mesh, placed = parts
    if mesh.device_type != device.type:
        raise ValueError(f"device must be of the mesh's type {mesh.device_type!r}, got {str(device)!r}")
    find = _first_match("parts", placed, shapes)
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
            return WantedShard(mesh, given, shape, geometry.HeldShards((0,), ()))
        return WantedShard(mesh, given, shape, geometry.find_held_shards(shape, mesh_shape, ours, tuple(coordinate)))

    return choose


def _is_ambiguous(shape: Shape, mesh_shape: Shape, placements: geometry.Placements) -> bool:
    """Return True if torch's operations and FSDP would give any rank different boxes, as for uneven strides."""
    if not any(isinstance(each, geometry.Split) and each.strides > 1 for each in placements):
        return False
    order = geometry.find_nesting(mesh_shape, placements)
    if order is None:
        return False
    shards = (geometry.iterate_shards(shape, mesh_shape, placements, each) for each in (None, order))
    return any(one != other for one, other in zip(*shards, strict=True))


# Loading of any readable checkpoint into new plain tensors, or parts of them, on one device.


class Loading:
    """The tensors of one checkpoint that are read into new memory of a device."""

    def __init__(self, document: Document, choice: Selection, parts: Parts | None, device: torch.device) -> None:
        """Choose the tensors and their parts. Everything that does not fit raises here, before data is read."""
        self._document = document
        self._choice = choice
        self._device = device
        entries = seen_by_rank(document, choice.select, choice.exclude, choice.rename).entries
        expect_sound(entries, document)
        wanted = [path for path, entry in entries.items() if entry.is_tensor]
        pickled = [path for path, entry in entries.items() if choice.allow_pickle and is_refused(entry)]
        self._names = name_tensors(entries, [*wanted, *pickled])
        self._tensors: dict[str, Any] = {path: entries[path] for path in wanted}
        self._pickled: dict[str, Any] = {path: entries[path] for path in pickled}
        shapes = {self._names[path]: tuple(entry.shape) for path, entry in self._tensors.items()}
        self._parts = choose_parts(parts, shapes, device)
        self._values: dict[str, torch.Tensor] = {}
        self._made: dict[Any, torch.Tensor] = {}

    def read(self, opened: Opened, meter: Meter) -> dict[str, torch.Tensor]:
        """Read all parts, and return the tensors by name."""
        chosen = {**self._tensors, **self._pickled}
        if self._device.type == "meta":
            chosen = self._pickled
        run(expect_files(opened, find_locations(chosen, self._document.files)))
        if self._choice.verify:
            expect_archive_checksums(opened, stored_in(chosen))
        read_plan = ReadPlan(self._document.files, allow_pickle=self._choice.allow_pickle)
        for path, entry in self._tensors.items():
            self._request(read_plan, path, entry)
        for path, entry in self._pickled.items():
            read_plan.new(path, entry)
        meter.begin(sum(each.end - each.begin for each in (*read_plan.requests, *read_plan.objects)))
        read_plan.execute(opened, verify=self._choice.verify, meter=meter)
        for name, part in self._parts.items():
            self._values[name] = part.finish(self._values[name])
        for path in self._pickled:
            value = read_plan.values[path]
            if isinstance(value, torch.Tensor):
                self._values[self._names[path]] = value.detach().to(self._device)
        return self._values

    def _request(self, read_plan: ReadPlan, path: str, entry: e.AnyTensor) -> None:
        """Create the memory of a tensor or its part, and request its bytes.

        Tensors of the same stored bytes share memory.
        """
        name, shape = self._names[path], tuple(entry.shape)
        part = self._parts.get(name)
        boxes = tuple(part.boxes()) if part is not None else ()
        whole = part is None or [box for box, _ in boxes] == [whole_box(shape)]
        key = (_key_of(entry), None if whole else repr(boxes)) if math.prod(shape) else path
        if key in self._made:
            self._values[name] = self._made[key]
            return
        dtype = BY_NAME[self._choice.cast_dtype(entry.dtype)]
        order = (entry.extra or e.PLAIN).stride_order if whole else None
        read_plan.claim(path, entry)
        size = shape if part is None else part.shape
        held = self._values[name] = self._made[key] = composite.allocate_tensor(size, dtype, order, self._device)
        if self._device.type == "meta":
            return
        if whole:
            read_plan.into(path, entry, held)
            return
        for box, place in boxes:
            read_plan.into_box(path, entry, box, held[place.slices()])


def _key_of(entry: e.AnyTensor) -> Any:
    """Return a key that is equal for two entries of the same stored elements."""
    if type(entry) is e.TensorEntry and entry.extra is None:
        return entry.location, entry.byte_range, entry.serializer, entry.dtype, tuple(entry.shape)
    return repr((entry.places(), entry.dtype, entry.shape))


def load_tensors(
    operation: Operation, origin: Location, choice: Selection, parts: Parts | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name."""
    session = operation.open(origin)
    with gc_paused():
        opened = map_checkpoint(run(open_checkpoint(session)), choice.map)
        opened.storage.share_reads()  # other ranks, or the next start of a server, load the same files
        loaded = Loading(opened.document, choice, parts, device).read(opened, operation.meter)
    nbytes = sum(tensor.nbytes for tensor in loaded.values())
    operation.emit("loaded", bytes=nbytes, seconds=round(operation.seconds, 3))
    return loaded
