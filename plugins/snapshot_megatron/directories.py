"""Directories of Megatron-core (`torch_dist`), of which DCP knows the layout, but not what an optimizer means by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.registry import SearchedFolder
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.manifest.document import DerivedFile
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.paths import decode_component
from snapshot_megatron.main_parameters import CAUSE, MainParameters, find_pairs

STATE = "optimizer.state."
"""Beginning of `optimizer.state.<param, exp_avg, ...>.<key of the model>`."""
PARAM = f"{STATE}param."
GUARDED = " (optimizer)"
"""What the name of a file gets, for the part of it that belongs to the optimizer."""


async def refine(folder: SearchedFolder, found: ForeignDocument) -> ForeignDocument | None:
    """Return the checkpoint with an optimizer whose main parameters are compared before it is read; None for others."""
    tensors: dict[str, Any] = {
        decode_component(path.removeprefix("0/")): entry
        for path, entry in found.manifest.items()
        if path.count("/") == 1 and entry.is_tensor
    }
    return guard_optimizer(found, tensors, CAUSE)


def guard_optimizer(found: ForeignDocument, tensors: Mapping[str, AnyTensor], cause: str) -> ForeignDocument | None:
    """Return a checkpoint that is read with the condition `MainParameters`; None without main parameters.

    `tensors` are those of the checkpoint, by name. The files of the optimizer's tensors get names of their own.
    """
    mains = {name.removeprefix(PARAM): entry for name, entry in tensors.items() if name.startswith(PARAM)}
    if not mains:
        return None
    files: dict[str, Any] = dict(found.files)
    renamed: dict[str, str] = {}

    def moved(entry: Any) -> Any:
        if hasattr(entry, "shards"):
            shards = [msgspec.structs.replace(each, tensor=moved(each.tensor)) for each in entry.shards]
            return msgspec.structs.replace(entry, shards=shards)
        if entry.location not in renamed:
            name = entry.location + GUARDED
            while name in files:
                name += "'"
            renamed[entry.location] = name
            files[name] = DerivedFile(files[entry.location].size, exact=False)
        return msgspec.structs.replace(entry, location=renamed[entry.location])

    manifest = {
        path: moved(entry) if entry.is_tensor and decode_component(path.removeprefix("0/")).startswith(STATE) else entry
        for path, entry in found.manifest.items()
    }
    pairs, without = find_pairs(mains, tensors)
    condition = MainParameters(pairs, without, found.files, cause)
    return msgspec.structs.replace(
        found,
        manifest=manifest,
        files=files,
        derivations={**found.derivations, **{name: PartOf(place) for place, name in renamed.items()}},
        conditions={**found.conditions, **dict.fromkeys(renamed.values(), condition)},
    )


class PartOf:
    """The derivation of a file that is another one, by another name."""

    def __init__(self, place: str) -> None:
        self.sources: Collection[str] = (place,)
        self._place = place

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Read the bytes of the other file."""
        await storage.read_into(self._place, offset, views, token=token)
