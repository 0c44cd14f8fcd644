"""Universal checkpoints of DeepSpeed: a file for each parameter and each of its states, in `zero/<name>/<state>.pt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats.flat_ranges import cut_run
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.pickle_nodes import expect_dict
from snapshot.formats.rank_files import TorchFiles
from snapshot.formats.torch_save import TorchFile
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.geometry import Shape
from snapshot.tensors.memory import contiguous_strides
from snapshot_deepspeed.checkpoint import Checkpoint, list_models, read_checkpoint
from snapshot_deepspeed.groups import WEIGHTS, FlatGroup, read_inner
from snapshot_deepspeed.parts import JoinRules

FOLDER = "zero/"
OPTIMIZER = "zero/optimizer_state.pt"
MODEL = "mp_rank_00_model_states.pt"
MODEL_OF_STAGE_3 = f"zero_pp_rank_0_{MODEL}"
"""The file that DeepSpeed reads into a model of ZeRO 3. Beside the other one, it has the same values."""
AT_ONCE = 64
_SUFFIX = ".pt"


async def describe_folder(storage: Storage, names: Sequence[str], limit: int) -> ForeignDocument:
    """Return the checkpoint in a folder with these names and the subfolder `zero/`."""
    listed = sorted(name for name in await storage.list(FOLDER) if name.endswith(_SUFFIX))
    opened = TorchFiles(storage, limit)
    own = [name for name in names if MODEL not in names or name != MODEL_OF_STAGE_3]
    states = await gather_limited(list_models(storage.url, own), opened.open, AT_ONCE)
    optimizer = [await opened.open(OPTIMIZER)] if OPTIMIZER in listed else []
    files = [name for name in listed if name != OPTIMIZER]
    found = await gather_limited(files, opened.open, AT_ONCE)
    parameters: dict[str, dict[str, TorchFile]] = {}
    for name, file in zip(files, found, strict=True):
        parameter, _, state = name.removeprefix(FOLDER).removesuffix(_SUFFIX).rpartition("/")
        parameters.setdefault(parameter, {})[state] = file
    return await read_checkpoint(
        storage.url, lambda: UniversalCheckpoint(storage, states, optimizer, parameters, opened.length)
    )


class UniversalCheckpoint(Checkpoint):
    """The contents of a universal checkpoint, as entries."""

    def __init__(
        self,
        storage: Storage,
        states: Sequence[TorchFile],
        optimizer: Sequence[TorchFile],
        parameters: Mapping[str, Mapping[str, TorchFile]],
        length: int,
    ) -> None:
        super().__init__(storage, [(states, optimizer)], length)
        self._parameters = parameters
        self.files += [file for held in parameters.values() for file in held.values()]

    async def read(self) -> None:
        """Read all entries."""
        groups = [FlatGroup(number, shapes, {}, {}, []) for number, shapes in enumerate(self._parts[0].read_shapes())]
        shapes = {name: shape for group in groups for name, shape in group.shapes.items()}
        rules, width = JoinRules(self._storage.url, {}, 1), 1
        module = self._read_module(rules, width)
        tensors: dict[str, dict[str, Any]] = {}
        for name, held in self._parameters.items():
            if name in shapes or name not in module.entries:  # others are buffers and frozen ones, which the module has
                tensors[name] = {state: self._read_state(file, shapes.get(name)) for state, file in held.items()}
        if missing := [name for name in shapes if WEIGHTS not in tensors.get(name, {})]:
            raise CorruptSnapshotError(f"{self._storage.url}: {FOLDER}{missing[0][:200]}/{WEIGHTS}.pt is missing")
        state = read_inner(self._read_zero())[0] if self._zero else {}
        for number, group in enumerate(groups):
            for key, value in expect_dict(state.get(number) or {}).items():
                stored = self._zero[0].locate(value)
                if stored is None or math.prod(stored.shape) == 1:
                    group.scalars[key] = value
        weights = {name: held.pop(WEIGHTS) for name, held in tensors.items() if WEIGHTS in held}
        await self._add_model(weights, module, rules, width)
        await self._add_optimizer(groups, tensors)
        self._add_rest()

    def _read_zero(self) -> dict[Any, Any]:
        return expect_dict(self._zero[0].value)

    def _read_state(self, file: TorchFile, shape: Shape | None) -> Any:
        """Return the entry of a state. A tensor from ZeRO 3 is flat, and gets its parameter's shape."""
        value = file.value.get("param") if isinstance(file.value, dict) else file.value
        stored = file.locate(value)
        if stored is None:
            return next(iter(file.describe_items({"value": value}, self._inline, routed=False).values()))
        flat = len(stored.shape) == 1 and shape is not None and stored.shape == (math.prod(shape),)
        if not flat or shape is None or stored.shape == shape:
            return _without_class(stored)
        if stored.extra is not None and stored.extra.strides not in (None, contiguous_strides(stored.shape)):
            raise UnsupportedFormatError(f"{self._storage.url.join(file.name)}: its tensor must be contiguous")
        return cut_run(stored, 0, shape)


def _without_class(stored: TensorEntry) -> TensorEntry:
    """Return an entry of a plain tensor, also if a parameter is stored."""
    if stored.extra is None or (stored.extra.subclass is None and not stored.extra.requires_grad):
        return stored
    extra = msgspec.structs.replace(stored.extra, subclass=None, requires_grad=False)
    return msgspec.structs.replace(stored, extra=extra)
