"""Directories of Megatron-core (`torch_dist`), of which DCP knows the layout, but not what an optimizer means by it."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.events import log
from snapshot.formats.foreign import ForeignDocument, make_dict
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.safe_pickle import evaluate_pickle
from snapshot.formats.to_entries import make_entries as make_entries_of
from snapshot.formats.to_entries import read_pickle
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Storage
from snapshot.manifest.document import DerivedFile
from snapshot.manifest.entries import AnyTensor, ObjectEntry, ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.tensors.digest import digest_bytes
from snapshot_megatron.bucket_space import BUCKET, LayoutError, derive_layouts, find_buckets, make_entries
from snapshot_megatron.main_parameters import CAUSE, MainParameters, count_leading_axes, find_pairs

STATE = "optimizer.state."
"""Beginning of `optimizer.state.<param, exp_avg, ...>.<key of the model>`."""
_STATE = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.(\w+)\.(.+)")
"""Name of a tensor of an optimizer, which may be one of a chain: kind of state, and key of the model."""
GO_ON = "load it with Megatron-core, and save it with MegatronState(optimizer=...)"
UNKNOWN_ORDER = f"the order of parameters in the buckets of its version is not known; {GO_ON}"
LONGEST = 1 << 20
"""Bytes of an optimizer's groups of parameters."""
_OF_OPTIMIZER = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.")
_DISTRIBUTED = re.compile(_OF_OPTIMIZER.pattern + r"distributed\.")
_GROUPS = re.compile(r"(?:chained_(\d{1,4})\.)?optimizer\.distributed\.dp_group_idx_(\d{1,6})\.optimizer/shard_\d+_\d+")
_STEP = re.compile(r"0/optimizer/(?:%int:)?(?:\d{1,4}/)?(?:optimizer/)?param_groups/\d{1,6}/step")
STEPS = "steps of the optimizer"
"""Name of the derived file with the steps of all parameters."""
GUARDED = " (optimizer)"
"""What the name of a file gets, for the part of it that belongs to the optimizer."""


async def refine(folder: SearchedFolder, found: ForeignDocument) -> ForeignDocument | None:
    """Return the checkpoint with an optimizer whose main parameters are compared before it is read; None for others."""
    tensors: dict[str, Any] = {
        decode_component(path.removeprefix("0/")): entry
        for path, entry in found.manifest.items()
        if path.count("/") == 1 and entry.is_tensor
    }
    if any(BUCKET.fullmatch(name) for name in tensors):
        return add_steps(await _join_buckets(folder, found, tensors))
    guarded = guard_optimizer(found, tensors, CAUSE)
    return None if guarded is None else add_steps(guarded)


async def _join_buckets(
    folder: SearchedFolder, found: ForeignDocument, tensors: Mapping[str, AnyTensor]
) -> ForeignDocument:
    """Return a `dp_reshardable` checkpoint with the optimizer's state in the form of the model."""
    weights = {name: each for name, each in tensors.items() if not _OF_OPTIMIZER.match(name)}
    try:
        buckets = find_buckets(tensors)
        layouts = derive_layouts(weights, buckets)
        entries = await _choose(folder, found, weights, [make_entries(weights, buckets, each) for each in layouts])
        groups = await _read_groups(folder, found, {place.chain for place in buckets})
    except LayoutError as error:
        return _refuse(folder, found, weights, {BUCKET.fullmatch(name) for name in tensors} - {None}, str(error))
    made = {f"{STATE}{name}": entry for name, entry in entries.items()}
    manifest: dict[str, Any] = {}
    for path, entry in found.manifest.items():
        name = decode_component(path.split("/", 2)[1])
        if not _DISTRIBUTED.match(name) and (name != "optimizer" or not groups):
            manifest[path] = entry
    manifest |= {f"0/{encode_component(name)}": entry for name, entry in made.items()}
    manifest |= groups
    names = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in manifest)
    joined = msgspec.structs.replace(found, manifest=manifest, root=make_dict(names))
    return guard_optimizer(joined, {**weights, **made}, UNKNOWN_ORDER) or joined


async def _choose(
    folder: SearchedFolder,
    found: ForeignDocument,
    weights: Mapping[str, AnyTensor],
    layouts: Sequence[dict[str, AnyTensor]],
) -> dict[str, AnyTensor]:
    """Return the only layout, or the only one whose main parameters round to the weights."""
    if len(layouts) == 1:
        return layouts[0]
    if folder.reads is None:
        raise LayoutError(f"{len(layouts)} layouts fit, and their values cannot be compared")
    agreeing = []
    for each in layouts:
        mains = {name.removeprefix("param."): main for name, main in each.items() if name.startswith("param.")}
        if await MainParameters(*find_pairs(mains, weights), found.files, "").agree(folder.reads(found)):
            agreeing.append(each)
    if len(agreeing) != 1:
        raise LayoutError(f"{len(layouts)} layouts fit, and the main parameters of {len(agreeing)} of them the weights")
    return agreeing[0]


def _refuse(
    folder: SearchedFolder, found: ForeignDocument, weights: Mapping[str, AnyTensor], names: Collection[Any], why: str
) -> ForeignDocument:
    """Return a checkpoint whose optimizer is listed by the names of the model, and cannot be read by them."""
    lacks = f"the optimizer's state cannot be brought into the form of the model: {why}; {GO_ON}"
    if not weights:
        log.warning("%s: %s", folder.url, lacks)
        return found
    location = next(iter(found.files))
    files = {**found.files, location: msgspec.structs.replace(found.files[location], lacks=lacks)}
    manifest = dict(found.manifest)
    for state in sorted({match[7] for match in names}):
        for name, entry in weights.items():
            empty = ShardedTensorEntry("float32", tuple(entry.shape), [])
            manifest[f"0/{encode_component(f'{STATE}{state}.{name}')}"] = empty
    names = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in manifest)
    return msgspec.structs.replace(found, manifest=manifest, files=files, root=make_dict(names))


async def _read_groups(folder: SearchedFolder, found: ForeignDocument, known: Collection[int]) -> dict[str, Any]:
    """Return the entries of the groups of all optimizers, as `common.pt` of other directories has them.

    All ranks have the same groups. Those of a rank without parameters of a group may lack it, so two are read.
    """
    objects: dict[int, dict[int, ObjectEntry]] = {}
    for path, entry in found.manifest.items():
        match = _GROUPS.fullmatch(decode_component(path.removeprefix("0/")))
        if match is not None and isinstance(entry, ObjectEntry):
            objects.setdefault(int(match[1] or 0), {})[int(match[2])] = entry
    chains: dict[Any, Any] = {}
    length = 0
    for chain, those in sorted((chain, those) for chain, those in objects.items() if chain in known):
        groups: list[Any] = []
        for number in sorted({min(those), max(those)}):
            size, state = await _read_object(folder, those[number])
            length += size
            groups += [each for each in state["param_groups"] if each not in groups]
        chains[chain] = {"optimizer": {"param_groups": groups}}
    if not chains:
        return {}
    held = chains[0] if chains.keys() == {0} else chains
    try:
        return make_entries_of({"0/optimizer": held}, "0/optimizer", _refuse_tensor, length, inline=bytearray())
    except ValueError as error:
        raise LayoutError(f"the groups of its parameters are not plain values: {error}") from error


async def _read_object(folder: SearchedFolder, entry: ObjectEntry) -> tuple[int, Any]:
    """Return an optimizer's state without its tensors, and the length of its pickle."""
    where = folder.url.join(entry.location)
    if entry.serializer != "torch_save" or entry.nbytes > LONGEST:
        raise LayoutError(f"the groups of its parameters must be an archive of at most {LONGEST:,} bytes")
    data = bytearray(entry.nbytes)
    await folder.linkless.read_into(entry.location, entry.byte_range[0], [data])
    try:
        content = read_pickle(data)
        held = evaluate_pickle(content, where)
        held = held[0] if type(held) is list and held else held
        if type(held) is not dict or type(held.get("param_groups")) is not list:
            raise ValueError("has no param_groups")
    except (ValueError, KeyError) as error:
        raise LayoutError(f"{where}: {error}") from error
    return len(content), held


def _refuse_tensor(path: str, found: Any) -> Any:
    raise ValueError("a tensor in an object")


def guard_optimizer(found: ForeignDocument, tensors: Mapping[str, AnyTensor], cause: str) -> ForeignDocument | None:
    """Return a checkpoint that is read with the condition `MainParameters`; None without main parameters.

    `tensors` are those of the checkpoint, by name. The files of the optimizer's tensors get names of their own.
    """
    named = [(match, entry) for name, entry in tensors.items() if (match := _STATE.fullmatch(name)) is not None]
    mains = {match[2]: entry for match, entry in named if match[1] == "param"}
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
        path: moved(entry) if entry.is_tensor and _STATE.fullmatch(decode_component(path.removeprefix("0/"))) else entry
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


def add_steps(found: ForeignDocument) -> ForeignDocument:
    """Return a checkpoint in which each state has a step, as in a snapshot of a `MegatronState`.

    Megatron counts steps in the groups. Nothing is added unless all groups have the same one.
    """
    every: Mapping[str, Any] = found.manifest
    numbers = {entry.value() for path, entry in every.items() if _STEP.fullmatch(path) and entry.is_value}
    kinds = {
        match[2]: entry.shape[: min(count_leading_axes(match[2]), len(entry.shape) - 1)]
        for path, entry in every.items()
        if entry.is_tensor
        and (match := _STATE.fullmatch(decode_component(path.removeprefix("0/")))) is not None
        and match[1] == "exp_avg"
    }
    known = {decode_component(path.removeprefix("0/")) for path in every}
    if len(numbers) != 1 or not kinds or any(f"{STATE}step.{key}" in known for key in kinds):
        return found
    ((number),) = numbers
    if type(number) not in (int, float) or not 0 <= number < 1 << 24:
        return found  # float32 has no such number
    manifest, size = dict(every), 0
    for key, shape in kinds.items():
        end = size + 4 * math.prod(shape)
        digest = digest_bytes(struct.pack("<f", number) * math.prod(shape))
        name = encode_component(f"{STATE}step.{key}")
        manifest[f"0/{name}"] = TensorEntry(STEPS, (size, end), "float32", shape, digest)
        size = end
    names = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in manifest)
    return msgspec.structs.replace(
        found,
        manifest=manifest,
        root=make_dict(names),
        files={**found.files, STEPS: DerivedFile(size, exact=False)},
        derivations={**found.derivations, STEPS: Steps(float(number), next(iter(found.files)))},
    )


class Steps:
    """The derivation of a file that has one number again and again."""

    def __init__(self, number: float, place: str) -> None:
        """`place`: a file of the checkpoint, which must be there."""
        self.sources: Collection[str] = (place,)
        self._bytes = struct.pack("<f", number)

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Write the number."""
        for view in views:
            first = offset % 4
            view[:] = (self._bytes * (len(view) // 4 + 2))[first : first + len(view)]
            offset += len(view)


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
