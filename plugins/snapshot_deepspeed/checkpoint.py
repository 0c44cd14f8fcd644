"""Checkpoints of DeepSpeed: ZeRO's flat partitions of all ranks as tensors by name, with their optimizer state.

A partition of a parameter is a run of its elements. Files name no positions. They follow from the parameters' shapes,
in the order of the flat groups. ZeRO 1 and 2 cut a whole group into equal parts, and ZeRO 3 cuts each parameter.

| key | content |
|---|---|
| `model` | parameters in float32, as the optimizer has them, and buffers and frozen parameters as they are |
| `module` | all of the model in its trained form, if the files have it |
| `optim` | the optimizer's state by the names of parameters, as torch's `get_optimizer_state_dict` returns it |
| `zero` | the loss scale, and other values of ZeRO's optimizer |
| others | values of DeepSpeed's engine, and the client state |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.foreign import ForeignDocument, make_dict, make_document
from snapshot.formats.pickle_nodes import expect_dict, expect_name
from snapshot.formats.pickled_objects import INLINE
from snapshot.formats.rank_files import RankFile, RankMerge, TorchFiles
from snapshot.formats.to_entries import limit_nodes, make_scalar
from snapshot.formats.torch_save import TorchFile
from snapshot.formats.zip_archive import read_range
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.tensors.digest import digest_range
from snapshot_deepspeed.groups import AT_ONCE, WEIGHTS, FlatGroup, FlatPart, Tensors, plain_value, read_inner
from snapshot_deepspeed.parts import JoinRules, join_stages

FORMAT = "deepspeed"
_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<part>[0-9]{1,6})_model_states\.pt")
_OPTIM = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<part>[0-9]{1,6})_?optim_states\.pt", re.ASCII
)
_LAYER = re.compile(r"layer_(?P<layer>[0-9]{1,6})(-model_(?P<part>[0-9]{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"(layer_[0-9]{1,6}_)?expert_(?P<expert>[0-9]{1,6})_mp_rank_(?P<part>[0-9]{1,6})_model_states\.pt")
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_[0-9]+_mp_rank_[0-9]+_optim_states\.pt")
_AUTOEP = ("ds_autoep_layers", "autoep_layers")
_LAYOUT = frozenset({"param_shapes", "frozen_param_shapes", "frozen_param_fragments", "buffer_names", "shared_params"})
_OWN = frozenset({"model", "module", "optim", "zero"})
_GROUPED = frozenset(
    {"base_optimizer_state", "optimizer_state_dict", "single_partition_of_fp32_groups", "fp32_flat_groups"}
    | {"group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings", "param_groups"}
    | {"ds_zero_partition_groups", "base_optimizer_state_step", "fp32_groups"}
)
"""Fields of ZeRO's optimizer that describe its flat groups."""


def is_checkpoint(names: Iterable[str]) -> bool:
    """Return True if a folder's names are those of DeepSpeed."""
    return any(_MODEL.fullmatch(name) for name in names)


async def read_tag(storage: Storage, names: Iterable[str]) -> str | None:
    """Return the name of the newest checkpoint's folder, from the file that names it; None if there is none."""
    for name in ("latest", "latest_universal"):
        if name in names:
            tag = (await storage.get(name, limit=1000)).decode("utf-8", "replace").strip()
            if f"{tag}/" in names and tag not in ("", ".", ".."):
                return tag
    return None


async def describe_folder(storage: Storage, names: Sequence[str], limit: int) -> ForeignDocument:
    """Return the checkpoint in the folder of a tag, which has these names."""
    where = storage.url
    if any(_EXPERT_OPTIMIZER.fullmatch(name) for name in names):
        raise UnsupportedFormatError(
            f"{where}: a checkpoint of DeepSpeed with experts and without ZeRO is not read; save it with ZeRO"
        )
    models, optims = (group_by_part(where, pattern, names) for pattern in (_MODEL, _OPTIM))
    if optims and sorted(models) != sorted(optims):
        raise CorruptSnapshotError(f"{where}: must have files of the optimizer for each file of the model")
    opened = TorchFiles(storage, limit)

    async def open_all(files: Iterable[str]) -> list[TorchFile]:
        return await gather_limited(list(files), opened.open, AT_ONCE)

    parts = [(await open_all(models[part]), await open_all(optims.get(part, ()))) for part in sorted(models)]
    layers = sorted((match, name) for name in names if (match := _layer_of(name)) is not None)
    experts = sorted((match, name) for name in names if (match := _expert_of(name)) is not None)
    if any(part for (_, part), _ in experts):
        raise UnsupportedFormatError(
            f"{where}: a checkpoint of DeepSpeed with experts of several tensor-parallel ranks is not read: its files "
            "do not say if the ranks have parts of an expert"
        )
    held = dict(zip([place for place, _ in layers], await open_all(name for _, name in layers), strict=True))
    more = await open_all(name for _, name in experts)
    return await read_checkpoint(where, lambda: Checkpoint(storage, parts, opened.length, held, more))


async def read_checkpoint(where: object, make: Callable[[], Checkpoint]) -> ForeignDocument:
    """Return the document of a checkpoint. Raise CorruptSnapshotError for values that DeepSpeed does not write."""
    try:
        made = make()
        await made.read()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, ZeroDivisionError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(
            f"{where}: not a checkpoint of DeepSpeed: {type(error).__name__}: {error}"
        ) from error
    return made.document()


def list_models(where: object, names: Iterable[str]) -> list[str]:
    """Return the files of the first model-parallel part's model, by rank."""
    return group_by_part(where, _MODEL, names)[0]


def group_by_part(where: object, pattern: re.Pattern[str], names: Iterable[str]) -> dict[int, list[str]]:
    """Return the files of a kind by model-parallel part, each in the order of ranks; raise if one is missing."""
    found = [(match, name) for name in names if (match := pattern.fullmatch(name))]
    listed = sorted((int(match["part"]), int(match["rank"] or 0), name) for match, name in found)
    made: dict[int, list[str]] = {}
    for part, rank, name in listed:
        held = made.setdefault(part, [])
        if part != len(made) - 1 or rank != len(held):
            missing = re.sub(r"mp_rank_[0-9]+", f"mp_rank_{len(made) - 1:02d}", name)
            missing = re.sub(r"zero_pp_rank_[0-9]+", f"zero_pp_rank_{len(held)}", missing)
            raise CorruptSnapshotError(f"{where}: {missing} is missing")
        held.append(name)
    return made


def _layer_of(name: str) -> tuple[int, int] | None:
    """Return the layer and the tensor-parallel rank of a file; None for other files."""
    found = _LAYER.fullmatch(name)
    return (int(found["layer"]), int(found["part"] or 0)) if found else None


def _expert_of(name: str) -> tuple[int, int] | None:
    """Return the number and the model-parallel part of an expert's file; None for other files."""
    found = _EXPERT.fullmatch(name)
    return (int(found["expert"]), int(found["part"])) if found else None


class Module:
    """The model in its trained form: for each name, its entry, and those below it."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        """Name -> rest of the path -> entry; the rest is empty for the name's own entry."""
        self.top: Any = None
        """Container of all names, if they are from one file."""

    def add(self, file: TorchFile, values: Any, inline: bytearray, prefix: str = "") -> None:
        """Add the values of a file, under names with a prefix."""
        named = {encode_component(expect_name(name)): f"{prefix}{name}" for name in expect_dict(values)}
        found = file.describe_items({"m": values}, inline, routed=False)
        top = found.pop("0/m")
        if not top.is_keyed:
            raise ValueError("the weights of the model are not named by texts")
        self.top = top if not self.entries and not prefix else None
        for path, entry in found.items():
            component, slash, rest = path.removeprefix("0/m/").partition("/")
            self.entries.setdefault(named[component], {})[slash + rest] = entry

    def find_tensor(self, name: str) -> Any:
        """Return the entry of a tensor; None if there is none of this name."""
        entry = self.entries.get(name, {}).get("")
        return entry if entry is not None and entry.is_tensor else None


class Checkpoint:
    """The contents of a tag's folder, as entries."""

    def __init__(
        self,
        storage: Storage,
        parts: Sequence[tuple[Sequence[TorchFile], Sequence[TorchFile]]],
        length: int,
        layers: Mapping[tuple[int, int], TorchFile] | None = None,
        experts: Sequence[TorchFile] = (),
    ) -> None:
        """Read the values of all files.

        Args:
            storage: The storage of the folder.
            parts: For each model-parallel part, the files of its model and of its optimizer, by rank.
            length: The length of all pickles, which limits how often they can repeat their values.
            layers: The files of a pipeline's layers, by layer and tensor-parallel rank.
            experts: The files of experts.
        """
        self._storage = storage
        self._left = limit_nodes(length)
        """Remaining number of parts of tensors."""
        self._parts = [FlatPart(storage, states, zero, self._spend) for states, zero in parts]
        self._layers = layers or {}
        self._experts = experts
        self.files = [each for part in self._parts for each in (*part.states, *part.zero)]
        self.files += [*self._layers.values(), *experts]
        self._head = self._parts[0].head
        self._zero = self._parts[0].zero
        self._inline = bytearray()
        self._manifest: dict[str, Any] = {}
        if any(self._head.get(key) for key in _AUTOEP):
            raise UnsupportedFormatError(
                f"{storage.url}: a checkpoint of DeepSpeed with AutoEP is not read; convert it with ds_to_universal.py "
                "of DeepSpeed"
            )

    async def read(self) -> None:
        """Read all entries."""
        groups = [await part.read_groups() for part in self._parts]
        tensors = [part.join_groups(each) for part, each in zip(self._parts, groups, strict=True)]
        rules, width = self._read_rules()
        joined = join_stages(rules, tensors, width)
        module = self._read_module(rules, width)
        await self._add_model({name: each.pop(WEIGHTS) for name, each in joined.items()}, module, rules, width)
        if self._zero:
            await self._add_optimizer([group for each in groups for group in each], joined)
        self._add_rest()

    def document(self) -> ForeignDocument:
        """Return the document of all entries."""
        alone = all(path.startswith("0/") for path in self._manifest)
        if not alone:  # values of single ranks: all others belong to all ranks
            for path, entry in self._manifest.items():
                if path.split("/", 2)[1] in _OWN and not entry.is_shared:
                    self._manifest[path] = msgspec.structs.replace(entry, replicated=True)
        names = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in self._manifest)
        tokens = [f"{each.name} {each.token} {digest_range(each.content)}" for each in self.files]
        document = make_document(
            FORMAT,
            str(self._head.get("ds_version") or ""),
            self._storage.url,
            "\n".join(tokens).encode(),
            manifest=self._manifest,
            files={each.name: ForeignFile(each.size, archived=True) for each in self.files},
            world_size=1 if alone else sum(len(part.states) for part in self._parts),
        )
        document.root = make_dict(names)
        document.set_inline(bytes(self._inline) or b"\0")
        return document

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("too many repeated values")

    def _read_zero(self) -> dict[Any, Any]:
        """Return the state of ZeRO's optimizer, from the first rank."""
        return expect_dict(expect_dict(self._zero[0].value)["optimizer_state_dict"])

    def _read_rules(self) -> tuple[JoinRules, int]:
        """Return the rules of joining model-parallel parts, and the number of tensor-parallel ranks."""
        count = len(self._parts)
        info = self._head.get("universal_checkpoint_info")
        known = self._head.get("checkpoint_parallel_dimensions")
        width = known.get("tp_degree") if isinstance(known, dict) else None
        if width is None:  # written before DeepSpeed recorded it
            width = len({rank for _, rank in self._layers}) or count
        if type(width) is not int or not 0 < width <= count or count % width:
            raise ValueError(f"{count} model-parallel parts with {p.show_value(width)} tensor-parallel ranks")
        if width > 1 and not isinstance(info, dict):
            raise UnsupportedFormatError(
                f"{self._storage.url}: a checkpoint of DeepSpeed with {width} tensor-parallel ranks must have "
                "universal_checkpoint_info, which says how their tensors join; save it with the client state of "
                "Megatron-DeepSpeed, or with DeepSpeed's own tensor parallelism"
            )
        return JoinRules(self._storage.url, expect_dict(info or {}), width), width

    # The model

    def _read_module(self, rules: JoinRules, width: int) -> Module:
        """Return the model in its trained form, with its experts, and with the layers of a pipeline."""
        found = [self._read_module_of(rank) for rank in range(width)]
        for name, held in found[0].entries.items():
            others = [each.find_tensor(name) for each in found]
            if width > 1 and all(each is not None for each in others):
                held[""] = rules.join(name, others)
        return found[0]

    def _read_module_of(self, rank: int) -> Module:
        """Return the model of a tensor-parallel rank."""
        module = Module()
        part = self._parts[rank]
        if part.head.get("module") is not None:
            module.add(part.states[0], part.head["module"], self._inline)
        for (layer, owner), file in self._layers.items():
            if owner == rank:
                module.add(file, file.value, self._inline, f"{layer}.")
        for file in self._experts:
            module.add(file, file.value, self._inline)
        return module

    async def _add_model(self, weights: Mapping[str, Any], module: Module, rules: JoinRules, width: int) -> None:
        """Add the model in float32, and in its trained form."""

        def is_whole(name: str, shape: Any) -> bool:
            held = module.find_tensor(name)
            return held is not None and held.shape == shape

        frozen = [await part.read_frozen(is_whole) for part in self._parts]
        tensors: list[Tensors] = [{name: {"": entry} for name, entry in each.items()} for each in frozen]
        entries = dict(weights) | {name: each[""] for name, each in join_stages(rules, tensors, width).items()}
        for part in self._parts:
            shared = part.head.get("shared_params")
            for alias, name in dict.items(shared) if isinstance(shared, dict) else ():
                if type(name) is str and name in entries:
                    entries.setdefault(expect_name(alias), entries[name])
        tied = tuple(
            f".{name.partition('.')[2].partition('.')[2]}" for name in entries if name.startswith("tied_modules.")
        )
        names = [name for name in module.entries if name in entries or not (tied and name.endswith(tied))]
        if whole := all(is_whole(name, entry.shape) for name, entry in entries.items() if name in module.entries):
            self._put_module("0/module" if weights else "0/model", module)
        if not weights:
            if not whole or not module.entries:
                raise ValueError("the files have no weights of the model")
            return
        names += [name for name in entries if name not in module.entries]
        same = module.top is not None and names == list(module.entries)
        self._manifest["0/model"] = module.top if same else make_dict(names)
        for name in names:
            path = f"0/model/{encode_component(name)}"
            held = {"": entries[name]} if name in entries else module.entries[name]
            self._manifest |= {f"{path}{rest}": entry for rest, entry in held.items()}

    def _put_module(self, path: str, module: Module) -> None:
        top = module.top or make_dict(module.entries)
        self._manifest[path] = top
        for name, held in module.entries.items():
            below = f"{path}/{encode_component(name)}"
            self._manifest |= {f"{below}{rest}": entry for rest, entry in held.items()}

    # The optimizer

    async def _add_optimizer(self, groups: Sequence[FlatGroup], tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the optimizer's state by the names of parameters. Their own values precede those of the groups."""
        keep = self._manifest
        states: list[str] = []
        done: set[str] = set()
        for group in groups:
            scalars = {key: await self._read_scalar(node) for key, node in group.scalars.items()}
            for name in [each for each in group.shapes if each not in done]:
                done.add(name)
                own = tensors.get(name, {})
                found = {**own, **{key: each() for key, each in scalars.items() if key not in own}}
                if not found:
                    continue
                path = f"0/optim/state/{encode_component(name)}"
                keep[path] = make_dict(found)
                keep |= {f"{path}/{encode_component(key)}": entry for key, entry in found.items()}
                states.append(name)
        keep["0/optim"] = DictEntry(["state", "param_groups"])
        keep["0/optim/state"] = make_dict(states)
        if self._zero:
            self._add_values(self._zero[0], {"optim/param_groups": self._list_groups(groups)})

    def _list_groups(self, groups: Sequence[FlatGroup]) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer, with the names of their parameters."""
        flat: dict[int, dict[str, None]] = {}
        for held in groups:
            flat.setdefault(held.number, {}).update(dict.fromkeys(held.shapes))
        saved = [dict(expect_dict(each)) for each in read_inner(self._read_zero())[1]]
        given = [each.get("params") for each in saved]
        numbers = [[number for number in each if type(number) is int] for each in given if isinstance(each, list)]
        if sorted(number for each in numbers for number in each) != list(range(len(flat))):
            numbers = [[number] for number in range(len(flat))]
            saved = saved if len(saved) == len(flat) else [{} for _ in flat]
        module: Any = self._head.get("module") if self._is_shuffled() else None
        order = {name: place for place, name in enumerate(module or ())}
        made = []
        for group, each in zip(saved, numbers, strict=True):
            names = [name for number in each for name in flat[number]]
            names.sort(key=lambda name: order.get(name, 0))
            made.append({**group, "params": names})
        return made

    def _is_shuffled(self) -> bool:
        """Return True if the flat groups do not have the parameters in the optimizer's order."""
        config = self._head.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        return isinstance(zero, dict) and zero.get("round_robin_gradients") is True

    async def _read_scalar(self, node: Any) -> Callable[[], Any]:
        """Return a function that returns a new entry of a value, such as the step, for each parameter.

        Each parameter gets a tensor of its own, since an optimizer counts in it.
        """
        stored = self._zero[0].locate(node)
        if stored is None:
            entry = make_scalar(node)
            if entry is None:
                raise UnsupportedFormatError(
                    f"{self._storage.url}: the optimizer's state of a group must be of numbers and tensors, got "
                    f"{p.show_value(node)}"
                )
            return lambda: entry
        if math.prod(stored.shape) != 1:
            raise UnsupportedFormatError(
                f"{self._storage.url}: the optimizer's state of a group has a tensor of shape {list(stored.shape)}, "
                "which belongs to no parameter"
            )
        [raw] = await self._parts[0].find_raw([stored])
        if raw.serializer != "raw":
            raise UnsupportedFormatError(f"{self._storage.url}: {stored.location} is compressed, or big-endian")
        data = await read_range(self._storage, raw.location, *raw.byte_range)

        def make() -> TensorEntry:
            begin = -(-len(self._inline) // 16) * 16
            self._inline.extend(bytes(begin - len(self._inline)) + data)
            return TensorEntry(INLINE, (begin, len(self._inline)), stored.dtype, stored.shape)

        return make

    # Everything else

    def _add_values(self, file: TorchFile, items: Mapping[str, Any]) -> None:
        self._manifest |= file.describe_items(items, self._inline, routed=False)

    def _add_rest(self) -> None:
        """Add the values of the engine and of the client, which may differ between ranks."""
        if self._zero:
            zero = {key: plain_value(value) for key, value in self._read_zero().items() if key not in _GROUPED}
            self._add_values(self._zero[0], {"zero": zero})
        elif self._head.get("optimizer") is not None and len(self._parts) == 1:
            self._add_values(self._parts[0].states[0], {"optim": self._head["optimizer"]})
        files = []
        for file in [each for part in self._parts for each in part.states]:
            values = {key: each for key, each in dict.items(expect_dict(file.value)) if key not in _LAYOUT}
            values = {expect_name(key): each for key, each in values.items() if key not in ("module", "optimizer")}
            if clashing := {key: values.pop(key) for key in list(values) if key in _OWN}:
                values["client_state"] = clashing
            items = {encode_component(key): each for key, each in values.items()}
            entries = file.describe_items(items, self._inline)
            own = {path.partition("/")[2]: entry for path, entry in entries.items()}
            files.append(RankFile(file.name, file.size, b"", own, file.sums(), None))
        self._manifest |= RankMerge(files, self._inline).join()
