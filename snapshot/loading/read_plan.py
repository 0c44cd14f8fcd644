"""Read plans: the ranges to read for entries of a manifest, and the values that they become.

Bytes are read straight into a tensor's memory if that is contiguous host memory of the same dtype. Otherwise they are
read into a slot, and copied with strides, a cast or a device transfer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, count, repeat
from operator import add, attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from snapshot.errors import CorruptSnapshotError, RestoreError, UnsafeObjectError
from snapshot.formats.pickled_objects import SavedFile, find_object, is_refused, load_object, run_pickle
from snapshot.io.accelerators import accelerator_of, await_host_copies
from snapshot.loading.left_out import LeftOut
from snapshot.loading.open import Opened
from snapshot.loading.read_requests import (
    ReadRequest,
    SharedRanges,
    add_requests,
    copy_into,
    is_packed,
    place_of,
    request_all,
    request_mapped,
    request_packed,
    request_strided,
)
from snapshot.loading.reader import Reader, ReadResult, fetch_requests, raise_faults
from snapshot.manifest import entries as e
from snapshot.manifest.containers import RANDOM
from snapshot.manifest.document import Files, ForeignFile, check_range, check_tensor
from snapshot.manifest.objects import fill_generator, is_filled_by
from snapshot.progress import Meter, unmetered
from snapshot.state import leaves
from snapshot.tensors import composite
from snapshot.tensors.buffers import address_of
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.geometry import Box, intersect, whole_box
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, NAMES, is_flat, is_plain
from snapshot.text import listed

# Claims on stored bytes: new values must not take far more memory than the files have bytes.

ROOM = 1 << 30
MOST_TIMES = 4
"""New values from other libraries' files, which may be compressed, take at most ROOM plus a multiple of their size."""


class MemoryClaims:
    """The bytes that new values use, of all bytes in the files."""

    def __init__(self, files: Files) -> None:
        self._claimed: dict[tuple[str, tuple[int, int]], tuple[Any, ...]] = {}
        self._unclaimed = sum(file.size for file in files.values())
        """Bytes of the files that no new value uses yet."""
        self.room = ROOM + MOST_TIMES * self._unclaimed
        """Bytes that new values from packed tensors or views may still take."""

    def claim(self, path: str, stored: e.TensorEntry | e.ObjectEntry, *what: Any) -> None:
        """Raise if new values would take more memory than the files have bytes.

        A hostile manifest of a few bytes may name the same range many times, each time with another type.
        """
        place = stored.location, stored.byte_range
        if not stored.nbytes:
            return
        if isinstance(stored, e.TensorEntry) and is_packed(stored):
            self.room -= math.prod(stored.shape) * ITEMSIZE[stored.dtype]
            if self.room < 0:
                raise CorruptSnapshotError(
                    f"{path}: would take far more memory than its files have bytes; restore it into an existing tensor"
                )
            return
        if place not in self._claimed:
            self._claimed[place] = what
            self._unclaimed -= stored.nbytes
        if self._claimed[place] != what or self._unclaimed < 0:
            raise CorruptSnapshotError(f"{path}: its bytes also belong to other values")


class LiveTarget(NamedTuple):
    """A tensor of the application that gets stored elements."""

    name: str
    tensor: torch.Tensor
    pieces: list[tuple[Box, e.TensorEntry]] | None
    """The stored pieces of the entry; None for a mapped tensor."""
    box: Box
    """The box of the entry that the tensor is."""
    source: Hashable = None
    """Of a mapped tensor: its entry."""


_AT_ONCE = 256
"""Live tensors whose properties are read at once."""
_dtype, _shape, _nbytes, _on_host = map(attrgetter, ("dtype", "shape", "nbytes", "is_cpu"))


class ReadPlan:
    """Collects the ranges to read for one operation."""

    def __init__(self, files: Files, *, allow_pickle: bool = False, partial: bool = False) -> None:
        self.files = files
        self.partial = partial
        """True if entries may lack shards, because parts of the manifest were not read yet."""
        self.lacking: list[tuple[e.AnyTensor, Box]] = []
        """Tensors that need such shards, and the boxes that do."""
        self.requests: list[ReadRequest] = []
        self.left_out: list[LeftOut] = []
        """Ranges that only the snapshot's base has."""
        self.objects: list[ReadRequest] = []
        """Requests for objects' bytes, which are read first: an object may be refused."""
        self.values: dict[str, Any] = {}
        """Path -> value, complete after `finish`."""
        self._allow_pickle = allow_pickle
        self._finish: list[Callable[[], None]] = []
        self._finish_objects: list[Callable[[], None]] = []
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}
        self.targets: list[LiveTarget] = []
        """Live tensors to fill, but those of `request_equal`."""
        self._whole: dict[str, bytearray | SavedFile] = {}
        """Files whose pickles are run: their bytes, then their contents."""
        self._boxes: dict[tuple[Any, ...], torch.Tensor] = {}
        self._filled: dict[str, dict[int, ReadRequest | tuple[Any, torch.Tensor]]] = {}
        """By location and begin: the request that fills a live tensor, or an entry and the tensor for it."""
        self._kept: list[tuple[str, torch.UntypedStorage, int]] = []
        """Names, memory and addresses of `request_equal`: no memory is freed if a tensor gets another one."""
        self._generators: dict[int, tuple[Any, Any]] = {}
        """The live generators that are filled."""
        self._claims = MemoryClaims(files)
        self._ranges = SharedRanges()

    # New values

    def new(self, path: str, entry: Any, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> None:
        """Create a new value for an entry, with the saved dtype or another one. Tied weights share the tensor."""
        if entry.is_value:
            self.values[path] = entry.value()
        elif entry.is_tensor:
            self._new_tensor(path, entry, device, dtype)
        elif isinstance(entry, e.NDArrayEntry):
            self._new_array(path, entry)
        elif isinstance(entry, e.TensorPartsEntry):
            self._new_parts(path, entry)
        elif is_refused(entry) and self._allow_pickle:
            self._new_pickled(path, entry)
        elif entry.is_object:
            self._new_object(path, entry)

    def _new_tensor(self, path: str, entry: e.AnyTensor, device: torch.device | str, dtype: torch.dtype | None) -> None:
        extra = entry.extra or e.PLAIN
        subclass, requires_grad = extra.subclass, extra.requires_grad
        key: tuple[Any, ...] | None = None
        if entry.nbytes:
            first = None if entry.is_mapped else entry.pieces()[0][1]
            key = (
                *(place_of(first) if first else (id(entry), 0)),
                first.byte_range if first else None,
                entry.dtype,
                entry.shape,
                subclass,
                requires_grad,
                str(device),
                dtype,
            )
        if key and key in self._made:
            self.values[path] = self._made[key]
            return
        tensor = self._plain(path, entry, device, dtype)
        if subclass is not None or requires_grad:
            tensor = composite.restore_class(path, tensor, subclass, requires_grad)
        self.values[path] = tensor
        if key:
            self._made[key] = tensor

    def _plain(
        self, path: str, entry: e.AnyTensor, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        check_tensor(path, entry, self.files, partial=self.partial)
        self.claim(path, entry)
        order = (entry.extra or e.PLAIN).stride_order
        tensor = composite.allocate_tensor(entry.shape, dtype or BY_NAME[entry.dtype], order, device)
        self.into(path, entry, tensor)
        return tensor

    def _new_array(self, path: str, entry: e.NDArrayEntry) -> None:
        tensor = self._plain(path, entry.data)

        def finish() -> None:
            self.values[path] = leaves.rebuild_array(
                path, tensor, entry.dtype, entry.shape, order=entry.order, scalar=entry.scalar
            )

        leaves.read_dtype(path, entry.dtype)
        self._finish.append(finish)

    def _new_parts(self, path: str, entry: e.TensorPartsEntry) -> None:
        if entry.kind == composite.KIND:
            state = self._generator_state(path, entry)
            self._finish.append(lambda: self.values.update({path: composite.make_generator(path, entry.params, state)}))
            return
        parts = {name: self._plain(f"{path}[{name}]", part) for name, part in entry.parts.items()}

        def finish() -> None:
            self.values[path] = composite.compose_tensor(path, entry.kind, parts, entry.params)

        self._finish.append(finish)

    def _new_object(self, path: str, entry: e.ObjectEntry) -> None:
        check_range(path, entry, self.files)
        self._claims.claim(path, entry, entry.serializer)
        data = bytearray(entry.nbytes)
        self.objects.append(request_all(path, entry, address_of(memoryview(data))))

        def finish() -> None:
            held, serializer = data, entry.serializer
            if isinstance(self.files[entry.location], ForeignFile) and serializer.endswith("torch_save"):
                if serializer != "torch_save":
                    from snapshot.formats.packed_tensors import decode_object  # few checkpoints have packed objects

                    held, serializer = decode_object(path, entry, data, self._claims.room), "torch_save"
                self._claims.room -= len(held)
            try:
                self.values[path] = load_object(
                    path, held, serializer, entry.obj_type, allow_pickle=self._allow_pickle, stored=entry.nbytes
                )
            except UnsafeObjectError as error:
                if serializer != "torch_save" or not isinstance(self.files[entry.location], ForeignFile):
                    raise
                from snapshot.formats.to_entries import NotPlainError, read_plain_value  # for other libraries' files

                try:
                    self.values[path] = read_plain_value(path, held, entry.nbytes)
                except NotPlainError:
                    raise error from None

        self._finish_objects.append(finish)

    def _new_pickled(self, path: str, entry: e.ObjectEntry) -> None:
        """Create an object by running its file's pickle. The whole file is read, once for all of its objects."""
        where = entry.location
        check_range(path, entry, self.files)
        if where not in self._whole:
            data = bytearray(self.files[where].size)
            whole = e.ObjectEntry(where, (0, len(data)), "torch_save", entry.obj_type)
            self.objects.append(request_all(path, whole, address_of(memoryview(data))))
            self._whole[where] = data

        def finish() -> None:
            held = self._whole[where]
            if isinstance(held, bytearray):
                held = self._whole[where] = SavedFile(run_pickle(path, held, entry.obj_type))
            self.values[path] = find_object(path, held.value, entry)

        self._finish_objects.append(finish)

    def claim(self, path: str, entry: e.AnyTensor) -> None:
        """Raise if a new tensor for an entry would take more memory than the files have bytes for it."""
        for _, stored in entry.pieces():
            self._claims.claim(path, stored, stored.dtype, stored.shape)

    # Existing destinations

    def request_equal(
        self, paths: Sequence[str], entries: Sequence[e.TensorEntry], tensors: Sequence[torch.Tensor]
    ) -> list[int]:
        """Request ranges straight into the memory of plain live tensors, where all agrees; return their positions.

        Most tensors of most restores come this way, and each of its steps costs as much as the read of a small one. So
        torch's properties are read by `map`, without a step of Python for each tensor.
        """
        made: list[int] = []
        for begin in range(0, len(tensors), _AT_ONCE):
            block = slice(begin, begin + _AT_ONCE)
            with suppress(RuntimeError):  # raised by torch for an odd tensor: its block is matched one by one
                self._request_block(begin, paths[block], entries[block], tensors[block], made)
        return made

    def _request_block(
        self,
        begin: int,
        paths: Sequence[str],
        entries: Sequence[e.TensorEntry],
        tensors: Sequence[torch.Tensor],
        made: list[int],
    ) -> None:
        location, file = "", None
        filled: dict[int, ReadRequest | tuple[Any, torch.Tensor]] = {}
        addresses, storages = map(torch.Tensor.data_ptr, tensors), list(map(torch.Tensor.untyped_storage, tensors))
        begins, lengths = map(torch.UntypedStorage.data_ptr, storages), map(torch.UntypedStorage.nbytes, storages)
        plain: Iterable[bool] = repeat(True)
        if (
            not all(map(torch.Tensor.is_contiguous, tensors))
            or not all(map(_on_host, tensors))
            or any(map(torch.Tensor.is_neg, tensors))
            or any(map(torch.Tensor.is_conj, tensors))
        ):
            plain = map(is_plain, tensors)
        columns = zip(paths, entries, tensors, addresses, map(_nbytes, tensors), map(_dtype, tensors), strict=True)
        more = zip(map(_shape, tensors), plain, storages, map(add, begins, lengths), strict=False)
        for number, (path, entry, held, address, nbytes, dtype), (shape, fits, storage, limit) in zip(
            count(begin), columns, more, strict=False
        ):
            if entry.location != location:
                location = entry.location
                file, filled = self.files.get(location), self._filled.setdefault(location, {})
            low, high = entry.byte_range
            if (
                not fits
                or shape != entry.shape
                or NAMES.get(dtype) != entry.dtype
                or entry.serializer != "raw"
                or entry.extra is not None
                or file is None
                or file.in_base
                or nbytes != high - low
                or not file.header <= low <= high <= file.size
                or not 0 < nbytes <= BLOCK
                or low in filled
                or not address
                or address + nbytes > limit  # it was shrunk, which the caller reports
            ):
                continue
            # The storage is kept, so that its memory stays where it is until the bytes arrive.
            self._kept.append((path, storage, address))
            filled[low] = request = ReadRequest(path, entry, location, low, high, address, None, True)
            self.requests.append(request)
            self.values[path] = held
            made.append(number)

    def into(self, path: str, entry: e.AnyTensor, target: torch.Tensor, *, live: bool = False) -> None:
        """Fill a tensor of the entry's shape, with any dtype, strides and device. The entry has been checked."""
        if not math.prod(entry.shape):
            return
        if entry.is_mapped:
            self.into_box(path, entry, whole_box(entry.shape), target, live=live)
            return
        pieces = entry.pieces()
        if not pieces:
            self.lacking.append((entry, whole_box(entry.shape)))
            return
        place = place_of(pieces[0][1])
        if live:
            target = target.detach()  # its memory is kept, even if the application's tensor gets another one
            self.targets.append(LiveTarget(path, target, pieces, whole_box(entry.shape)))
        filled = self._filled.setdefault(place[0], {})
        if place[1] in filled:
            if self._again(entry, pieces, target, *self._first(filled[place[1]])):
                return
        else:
            filled[place[1]] = entry, target
        self.add_pieces(path, entry, pieces, target, whole_box(entry.shape), live=live)

    def into_box(self, path: str, entry: e.AnyTensor, box: Box, target: torch.Tensor, *, live: bool = False) -> None:
        """Fill a tensor of the box's shape with that part of the entry's tensor."""
        if not box.numel:
            return
        if isinstance(entry, e.MappedTensorEntry):
            self._add_mapped(path, entry, target, box, live)
            return
        pieces = entry.pieces()
        if live:
            target = target.detach()
            place = path, box, target.data_ptr()
            self.targets.append(LiveTarget(path, target, pieces, box))
            if place in self._boxes:
                return
            self._boxes[place] = target
        self.add_pieces(path, entry, pieces, target, box, live=live)

    def add_pieces(
        self,
        path: str,
        entry: e.AnyTensor,
        pieces: list[tuple[Box, e.TensorEntry]],
        target: torch.Tensor,
        box: Box,
        *,
        live: bool,
    ) -> None:
        """Add requests for the part of some stored pieces of an entry that is in a box."""
        found = 0
        for piece, stored in pieces:
            found += self._piece(path, stored, piece, target, box=box, live=live)
        if found != box.numel and self.partial:
            self.lacking.append((entry, box))

    def _add_mapped(self, path: str, entry: e.MappedTensorEntry, target: torch.Tensor, box: Box, live: bool) -> None:
        target = target.detach() if live else target
        place = id(entry), box, target.data_ptr()
        if live:
            self.targets.append(LiveTarget(path, target, None, box, id(entry)))
            if place in self._boxes:
                return
            self._boxes[place] = target
        first, add = len(self.requests), partial(self.add_pieces, path, entry, live=live)
        self.requests += request_mapped(path, entry, target, box, self.files, add=add, finish=self._finish, live=live)
        self._ranges.join(self.requests, first)

    def into_array(self, path: str, entry: e.NDArrayEntry, array: np.ndarray[Any, Any]) -> None:
        """Fill an array of the entry's dtype and shape: in place if it is C-ordered, otherwise by a copy at the end."""
        if not array.flags.c_contiguous:

            def finish() -> None:
                np.copyto(array, self.values[path], casting="no")
                self.values[path] = array

            self.new(path, entry)
            self._finish.append(finish)
            return
        check_tensor(path, entry.data, self.files)
        self.into(path, entry.data, leaves.wrap_array(array).view(BY_NAME[entry.data.dtype]), live=True)
        self.values[path] = array

    def into_generator(self, path: str, entry: e.TensorPartsEntry, generator: torch.Generator) -> bool:
        """Set a generator's state.

        Return False, without a change, if it is for another kind of device, or if another entry has another state for
        the same generator.
        """
        if entry.kind != composite.KIND or composite.read_device(path, entry.params).type != generator.device.type:
            return False
        stored = entry.parts.get("state")
        identity = (stored.digest or (stored.location, stored.byte_range)) if type(stored) is e.TensorEntry else path
        if self._generators.setdefault(id(generator), (generator, identity))[1] != identity:
            return False
        state = self._generator_state(path, entry)

        def finish() -> None:
            self.values[path] = composite.fill_generator(path, generator, state)

        self.values[path] = generator
        self._finish.append(finish)
        return True

    def into_random(self, path: str, entry: e.ObjectEntry, live: Any) -> bool:
        """Set the state of a live generator of NumPy or Python, once all bytes were verified.

        Return False, without a change, if it is of another kind, or if another entry fills it.
        """
        if entry.serializer != RANDOM or not is_filled_by(live, entry.obj_type) or id(live) in self._generators:
            return False
        self._generators[id(live)] = live, path
        self._new_object(path, entry)
        self._finish.append(lambda: self.values.update({path: fill_generator(live, self.values[path])}))
        return True

    def _generator_state(self, path: str, entry: e.TensorPartsEntry) -> torch.Tensor:
        stored = entry.parts.get("state")
        if stored is None or stored.dtype != "uint8":
            raise CorruptSnapshotError(f"{path}: a generator must have a state of dtype uint8")
        return self._plain(f"{path}[state]", stored)

    def _first(self, filled: ReadRequest | tuple[Any, torch.Tensor]) -> tuple[Any, torch.Tensor]:
        """Return the entry and the tensor of the first destination of a range."""
        return (filled.stored, self.values[filled.name]) if isinstance(filled, ReadRequest) else filled

    def _again(
        self,
        entry: e.AnyTensor,
        pieces: list[tuple[Box, e.TensorEntry]],
        target: torch.Tensor,
        other: e.AnyTensor,
        source: torch.Tensor,
    ) -> bool:
        """Fill a second destination from the first one, so that the range is read once. Return False if that fails."""
        if other.shape != entry.shape or other.dtype != entry.dtype:
            return False
        alike = [(box, stored.byte_range, place_of(stored)) for box, stored in other.pieces()]
        if alike != [(box, stored.byte_range, place_of(stored)) for box, stored in pieces]:
            return False
        if source.device == target.device and source.data_ptr() == target.data_ptr():
            return source.stride() == target.stride() and source.dtype == target.dtype
        if source.dtype != BY_NAME[entry.dtype]:
            return False  # the first destination lost precision in a cast
        self._finish.append(lambda: copy_into(target, source))
        self._boxes["", target.data_ptr()] = target
        return True

    def _piece(
        self, path: str, stored: e.TensorEntry, piece: Box, target: torch.Tensor, *, box: Box, live: bool
    ) -> int:
        """Add requests for the part of a stored piece that is in a box. Return its number of elements.

        The bytes are copied to a tensor of the box's shape.
        """
        if not is_packed(stored) and not self.files[stored.location].in_base:
            return add_requests(self.requests, path, stored, piece, target=target, box=box, live=live)
        shared = intersect(piece, box)
        if shared is None:
            return 0
        if self.files[stored.location].in_base:
            self.left_out.append(LeftOut(path, stored, piece, target, box, live))
            return shared.numel
        part = target.detach()[shared.relative_to(box.offsets).slices()]
        inner = shared.relative_to(piece.offsets)
        same = inner.sizes == stored.shape and part.dtype == BY_NAME[stored.dtype] and part.is_cpu and is_flat(part)
        request = request_packed(
            path,
            stored,
            lambda elements: [(part, elements[inner.slices()])],
            partial(request_strided, path, box=inner, target=part, live=live, finish=self._finish),
            flat=part if same else None,
            live=live,
            device=accelerator_of(target),
        )
        self.requests.append(request)
        return shared.numel

    # Read

    def execute(
        self,
        opened: Opened,
        *,
        verify: bool,
        meter: Meter | None = None,
        all_or_none: bool = True,
    ) -> ReadResult:
        """Read everything and create the values: objects first, so that a refused one leaves live tensors unchanged."""
        meter = meter or Meter("read", None)
        self.await_targets()
        first = fetch_requests(opened, self.objects, verify, meter)
        self.finish_objects(all_or_none=all_or_none)
        result = fetch_requests(opened, self.requests, verify, meter)
        self.finish()
        result.add(first)
        return result

    async def fetch(self, opened: Opened) -> None:
        """Read what is requested into new tensors, without verifying it: for a caller on the loop."""
        if self.requests:
            raise_faults(opened, await Reader(opened, verify=False).read(self.requests, unmetered))
        self.requests = []
        for each in self._finish:
            each()

    def await_targets(self) -> None:
        """Wait for copies under way that would still write to, or read, the tensors to fill."""
        filled = (self._first(each)[1] for held in self._filled.values() for each in held.values())
        await_host_copies(chain(filled, self._boxes.values()))
        self._filled, self._boxes, self._made = {}, {}, {}  # no more requests are added

    def finish_objects(self, *, all_or_none: bool = True) -> None:
        """Decode the objects, whose bytes were read and verified.

        If not `all_or_none`, skip those that only a pickle can decode.
        """
        for each in self._finish_objects:
            try:
                each()
            except UnsafeObjectError:
                if all_or_none:
                    raise

    def finish(self) -> None:
        """Create the values that need several reads, after all bytes were read and verified."""
        self._expect_in_place()
        for each in self._finish:
            each()

    def _expect_in_place(self) -> None:
        """Raise if live tensors have other memory than that which was filled."""
        kept, self._kept = self._kept, []
        plain, values = {torch.Tensor, torch.nn.Parameter}, self.values
        replaced: list[str] = []
        held: list[Any] = [values.get(name) for name, _, _ in kept]
        addresses = [address for _, _, address in kept]
        if not set(map(type, held)) <= plain or list(map(torch.Tensor.data_ptr, held)) != addresses:
            replaced += [
                name
                for (name, _, address), each in zip(kept, held, strict=True)
                if type(each) in plain and each.data_ptr() != address
            ]
        replaced += [  # a target may be a part of the value
            each.name
            for each in self.targets
            if each.tensor.layout is torch.strided
            and type(values.get(each.name)) in plain
            and each.tensor.untyped_storage().data_ptr() != values[each.name].untyped_storage().data_ptr()
        ]
        lines = [
            f"{name}: its memory was replaced during the restore, so it may have other values"
            for name in dict.fromkeys(replaced)
        ]
        if lines:
            raise RestoreError(f"another thread changed tensors; restore again when none does:{listed(lines)}", lines)
