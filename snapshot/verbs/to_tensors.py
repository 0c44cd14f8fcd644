"""Loading of any readable checkpoint into new plain tensors, or parts of them, on one device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from snapshot.formats.unpickling import is_refused
from snapshot.loading.checksums import expect_archive_checksums
from snapshot.loading.mapping import map_document
from snapshot.loading.open import expect_files, open_document
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.stored_ranges import stored_in
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document
from snapshot.manifest.validate import find_locations
from snapshot.progress import Meter
from snapshot.runtime.gc_pause import gc_paused
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.tensors import composite
from snapshot.tensors.dtypes import BY_NAME
from snapshot.tensors.geometry import whole_box
from snapshot.verbs.select import expect_sound, places_of, seen_by_rank
from snapshot.verbs.tensor_names import name_tensors
from snapshot.verbs.to_snapshot import Selection
from snapshot.verbs.wanted_parts import choose_parts

if TYPE_CHECKING:
    from snapshot.verbs.wanted_parts import LoadPlan


class Loading:
    """The tensors of one checkpoint that are read into new memory of a device."""

    def __init__(self, document: Document, choice: Selection, plan: LoadPlan | None, device: torch.device) -> None:
        """Choose the tensors and their parts. Everything that does not fit raises here, before data is read."""
        self._document = document
        self._choice = choice
        self._device = device
        entries = seen_by_rank(document, choice.select, choice.exclude, choice.rename).entries
        expect_sound(entries, document)
        wanted = [path for path, entry in entries.items() if isinstance(entry, e.TENSORS)]
        pickled = [path for path, entry in entries.items() if choice.allow_pickle and is_refused(entry)]
        self._names = name_tensors(entries, [*wanted, *pickled])
        self._tensors: dict[str, Any] = {path: entries[path] for path in wanted}
        self._pickled: dict[str, Any] = {path: entries[path] for path in pickled}
        shapes = {self._names[path]: tuple(entry.shape) for path, entry in self._tensors.items()}
        self._parts = choose_parts(plan, shapes, device)
        self._values: dict[str, torch.Tensor] = {}
        self._made: dict[Any, torch.Tensor] = {}

    def read(self, session: Session, meter: Meter) -> dict[str, torch.Tensor]:
        """Read all parts, and return the tensors by name."""
        chosen = {**self._tensors, **self._pickled}
        if self._device.type == "meta":
            chosen = self._pickled
        run(expect_files(session, self._document, find_locations(chosen, self._document.files)))
        if self._choice.verify:
            expect_archive_checksums(session, stored_in(chosen), self._document.files)
        read_plan = ReadPlan(self._document.files, allow_pickle=self._choice.allow_pickle)
        for path, entry in self._tensors.items():
            self._request(read_plan, path, entry)
        for path, entry in self._pickled.items():
            read_plan.new(path, entry)
        meter.begin(sum(each.end - each.begin for each in (*read_plan.requests, *read_plan.objects)))
        read_plan.execute(session, verify=self._choice.verify, meter=meter)
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
    return repr((places_of(entry), entry.dtype, entry.shape))


def load_tensors(
    session: Session, choice: Selection, plan: LoadPlan | None, device: torch.device, meter: Meter
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name."""
    with gc_paused():
        document = map_document(session, run(open_document(session)), choice.map)
        session.storage.share_reads()  # other ranks, or the next start of a server, load the same files
        return Loading(document, choice, plan, device).read(session, meter)
