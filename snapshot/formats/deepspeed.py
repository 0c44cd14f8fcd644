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
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.flat_ranges import cut_run, join_runs
from snapshot.formats.foreign import ForeignDocument, make_document
from snapshot.formats.pickled_objects import INLINE
from snapshot.formats.rank_files import RankFile, RankMerge
from snapshot.formats.to_entries import limit_nodes, make_scalar
from snapshot.formats.torch_save import TorchFile, TorchFiles, find_raw_range
from snapshot.formats.zip_archive import read_range
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.compounds import DictEntry
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component, encode_key
from snapshot.tensors.digest import digest_range
from snapshot.tensors.geometry import Shape

FORMAT = "deepspeed"
_MODEL = re.compile(r"(zero_pp_rank_(?P<rank>[0-9]{1,6})_)?mp_rank_(?P<part>[0-9]{1,6})_model_states\.pt")
_OPTIM = re.compile(
    r"(bf16_|fp16_)?zero_pp_rank_(?P<rank>[0-9]{1,6})_mp_rank_(?P<part>[0-9]{1,6})_?optim_states\.pt", re.ASCII
)
_PIPELINE = re.compile(r"layer_[0-9]+-model_[0-9]+-model_states\.pt")
_EXPERTS = re.compile(r"(layer_[0-9]+_)?expert_[0-9]+_mp_rank_[0-9]+_model_states\.pt")
AT_ONCE = 16
WEIGHTS = "fp32"
"""Name of the parameters themselves among the states of the optimizer."""
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
    models, optims = (_by_rank(pattern, names) for pattern in (_MODEL, _OPTIM))
    parts = {part for part, _ in models} | {part for part, _ in optims}
    if len(parts) > 1 or any(_PIPELINE.fullmatch(name) for name in names):
        raise UnsupportedFormatError(
            f"{where}: a checkpoint of DeepSpeed with {max(parts) + 1} model-parallel parts, which this version does "
            "not join; convert it with ds_to_universal.py of DeepSpeed, and open the result"
        )
    if any(_EXPERTS.fullmatch(name) for name in names):
        raise UnsupportedFormatError(
            f"{where}: a checkpoint of DeepSpeed with separate files of experts, which this version does not join"
        )
    for files in (models, optims):
        expect_all_ranks(where, files)
    opened = TorchFiles(storage, limit)
    states = await gather_limited(list(models.values()), opened.open, AT_ONCE)
    zero = await gather_limited(list(optims.values()), opened.open, AT_ONCE)
    return await read_checkpoint(where, lambda: Checkpoint(storage, states, zero, opened.length))


async def read_checkpoint(where: object, make: Callable[[], Checkpoint]) -> ForeignDocument:
    """Return the document of a checkpoint. Raise CorruptSnapshotError for values that DeepSpeed does not write."""
    try:
        made = make()
        await made.read()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(
            f"{where}: not a checkpoint of DeepSpeed: {type(error).__name__}: {error}"
        ) from error
    return await made.document()


def _by_rank(pattern: re.Pattern[str], names: Iterable[str]) -> dict[tuple[int, int], str]:
    """Return the files of a kind by their parts and ranks, in order."""
    found = [(match, name) for name in names if (match := pattern.fullmatch(name))]
    return dict(sorted(((int(match["part"]), int(match["rank"] or 0)), name) for match, name in found))


def list_models(names: Iterable[str]) -> list[str]:
    """Return the files of the first model-parallel part's model, by rank."""
    return [name for (part, _), name in _by_rank(_MODEL, names).items() if part == 0]


def expect_all_ranks(where: object, files: Mapping[tuple[int, int], str]) -> None:
    """Raise if the file of a rank is missing."""
    for number, ((_, rank), name) in enumerate(files.items()):
        if rank != number:
            missing = re.sub(r"(zero_pp_rank_)[0-9]+", rf"\g<1>{number}", name)
            raise CorruptSnapshotError(f"{where}: {missing} is missing")


# Flat groups: which rank has which elements of a parameter.


class Slice(NamedTuple):
    """Elements of a parameter in one rank's flat tensor."""

    rank: int
    begin: int
    """Position of the first one in the parameter."""
    at: int
    """Position of the first one in the flat tensor."""
    numel: int


class Group(msgspec.Struct):
    """A flat group: its parameters, and the partitions of all ranks."""

    shapes: dict[str, Shape]
    """Shapes of the parameters, in their order in the group."""
    states: dict[str, list[TensorEntry]]
    """Partitions of the weights, and of each state of the optimizer, by rank."""
    scalars: dict[str, Any]
    """States that are one value for all parameters, as nodes."""
    paddings: list[int]
    """Number of elements after each parameter in the group."""
    count: int = 0
    """Number of parts of each parameter, if each is cut by itself, as ZeRO 3 does."""

    def find_slices(self, key: str) -> dict[str, list[Slice]]:
        """Return the slices of each parameter in the partitions of a state."""
        return (_cut_parameters if self.count else _cut_group)(self, [each.shape[0] for each in self.states[key]])


def _cut_group(group: Group, lengths: Sequence[int]) -> dict[str, list[Slice]]:
    """Return the slices if the whole group is cut. Only the last partition may end earlier."""
    ends = list(accumulate(lengths))
    made, place = {}, 0
    for (name, shape), padding in zip(group.shapes.items(), group.paddings, strict=True):
        numel = math.prod(shape)
        found: list[Slice] = []
        for rank in range(bisect_right(ends, place), len(ends)):
            base = ends[rank] - lengths[rank]
            low, high = max(place, base), min(place + numel, ends[rank])
            if low >= high:
                break
            found.append(Slice(rank, low - place, low - base, high - low))
        made[name] = found
        place += numel + padding
    return made


def _cut_parameters(group: Group, lengths: Sequence[int]) -> dict[str, list[Slice]]:
    """Return the slices if each parameter is cut by itself. The last part of each may be padded."""
    made, at = {}, 0
    for name, shape in group.shapes.items():
        made[name], step = cut_parameter(math.prod(shape), group.count, at)
        at += step
    if any(at > length for length in lengths):
        raise ValueError("a partition is too short for its parameters")
    return made


def cut_parameter(numel: int, count: int, at: int = 0) -> tuple[list[Slice], int]:
    """Return the slices of a parameter that is cut into equal parts, and the length of a part.

    >>> [tuple(each) for each in cut_parameter(5, 2)[0]]
    [(0, 0, 0, 3), (1, 3, 0, 2)]
    """
    step = -(-numel // count)
    found = (Slice(rank, rank * step, at, min(step, numel - rank * step)) for rank in range(count))
    return [each for each in found if each.numel > 0], step


class Checkpoint:
    """The contents of a tag's folder, as entries."""

    def __init__(self, storage: Storage, states: Sequence[TorchFile], zero: Sequence[TorchFile], length: int) -> None:
        self._storage = storage
        self._states = states
        self._zero = zero
        self.files = [*states, *zero]
        self._left = limit_nodes(length)
        """Remaining number of parts of tensors: a pickle can repeat its values."""
        self._inline = bytearray()
        self._head = expect_dict(states[0].value)
        self._manifest: dict[str, Any] = {}

    async def read(self) -> None:
        """Read all entries."""
        groups = await self._read_groups() if self._zero else []
        tensors: dict[str, dict[str, Any]] = {}
        for group in groups:
            for key, flats in group.states.items():
                for name, slices in group.find_slices(key).items():
                    tensors.setdefault(name, {})[key] = self._join(name, group.shapes[name], flats, slices)
        await self._add_model({name: each.pop(WEIGHTS) for name, each in tensors.items()})
        if groups:
            await self._add_optimizer(groups, tensors)
        self._add_rest()

    async def document(self) -> ForeignDocument:
        """Return the document of all entries."""
        alone = all(path.startswith("0/") for path in self._manifest)
        if not alone:  # values of single ranks: all others belong to all ranks
            for path, entry in self._manifest.items():
                if path.split("/", 2)[1] in _OWN and not isinstance(entry, ShardedTensorEntry):
                    self._manifest[path] = msgspec.structs.replace(entry, replicated=True)
        names = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in self._manifest)
        return make_document(
            FORMAT,
            str(self._head.get("ds_version") or ""),
            self._storage.url,
            await make_token(self._storage, self.files),
            manifest=self._manifest,
            files={each.name: ForeignFile(each.size, archived=True) for each in self.files},
            world_size=1 if alone else len(self._states),
            root=DictEntry([encode_key(name) for name in names]),  # type: ignore[misc]
            inline=bytes(self._inline) or b"\0",
        )

    def _read_zero(self) -> dict[Any, Any]:
        """Return the state of ZeRO's optimizer, from the first rank."""
        return expect_dict(expect_dict(self._zero[0].value)["optimizer_state_dict"])

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("too many repeated values")

    def _read_shapes(self) -> list[dict[str, Shape]]:
        """Return the shapes of the parameters of each group."""
        groups = []
        for given in expect_list(self._head["param_shapes"]):
            self._spend(len(given))
            groups.append({_expect_name(name): _read_shape(shape) for name, shape in dict.items(expect_dict(given))})
        return groups

    async def _read_groups(self) -> list[Group]:
        """Return the flat groups, with the partitions of all ranks."""
        held = [expect_dict(expect_dict(each.value)["optimizer_state_dict"]) for each in self._zero]
        stage = _read_stage(held[0].get("zero_stage"))
        weights = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        inner = [read_inner(each)[0] for each in held]
        groups = []
        for number, shapes in enumerate(self._read_shapes()):
            paddings = _read_paddings(held[0], number, len(shapes))
            group = Group(shapes, {}, {}, paddings, _read_count(held[0], number, len(held)) if stage == 3 else 0)
            group.states[WEIGHTS] = self._locate([expect_list(each[weights])[number] for each in held])
            states = [expect_dict(each.get(number) or {}) for each in inner]
            for key in map(_expect_name, states[0]):
                values = [each[key] for each in states]
                if _is_flat(self._zero[0].locate(values[0]), group.states[WEIGHTS][0]):
                    group.states[key] = self._locate(values)
                else:
                    group.scalars[key] = values[0]
            groups.append(group)
        for group in groups:
            for key, flats in group.states.items():
                group.states[key] = await self._find_raw(flats)
        return groups

    async def _find_raw(self, entries: Sequence[TensorEntry]) -> list[TensorEntry]:
        return await gather_limited(entries, partial(find_raw_range, self._storage), AT_ONCE)

    def _locate(self, nodes: Sequence[Any]) -> list[TensorEntry]:
        """Return the flat tensors of all ranks."""
        made = []
        for file, node in zip(self._zero, nodes, strict=True):
            stored = file.locate(node)
            if stored is None or len(stored.shape) != 1:
                raise UnsupportedFormatError(
                    f"{self._storage.url.join(file.name)}: a flat group must be a tensor with one dimension, got "
                    f"{p.show_value(node) if stored is None else list(stored.shape)}"
                )
            made.append(stored)
        if len({each.dtype for each in made}) > 1:
            raise ValueError("the partitions of a group have several dtypes")
        return made

    def _join(self, name: str, shape: Shape, flats: Sequence[TensorEntry], slices: Sequence[Slice]) -> Any:
        """Return the entry of a tensor from its slices."""
        held = sum(each.numel for each in slices)
        if held != math.prod(shape):
            raise ValueError(f"{name[:200]}: the partitions have {held:,} of {math.prod(shape):,} elements")
        self._spend(len(slices))
        runs = [(each.begin, cut_run(flats[each.rank], each.at, (each.numel,))) for each in slices]
        return join_runs(flats[0].dtype, shape, runs) if runs else make_empty(flats[0].dtype, shape)

    # The model

    async def _add_model(self, weights: Mapping[str, Any]) -> None:
        """Add the model in float32, and in its trained form."""
        module: Any = self._head.get("module")
        trained = self._states[0].describe_items({"module": module}, self._inline, routed=False)
        top = trained.get("0/module")
        if not isinstance(top, DictEntry):
            raise ValueError("the files have no weights of the model")
        if not weights:
            self._manifest |= {f"0/model{path.removeprefix('0/module')}": entry for path, entry in trained.items()}
            return
        entries = dict(weights) | await self._read_frozen(trained)
        shared = self._head.get("shared_params")
        for alias, name in dict.items(shared) if isinstance(shared, dict) else ():
            if name in entries:
                entries.setdefault(_expect_name(alias), entries[name])
        named = {_expect_name(name): encode_component(name) for name in module}
        whole = all(
            getattr(trained.get(f"0/module/{named.get(name)}"), "shape", None) == entry.shape
            for name, entry in weights.items()
        )
        more = [name for name in entries if name not in named]
        self._manifest["0/model"] = DictEntry([encode_key(name) for name in [*named, *more]]) if more else top  # type: ignore[misc]
        for name in [*named, *more]:
            path = f"0/module/{named.get(name)}"
            if name in entries:
                self._manifest[f"0/model/{encode_component(name)}"] = entries[name]
            else:
                below = {each: entry for each, entry in trained.items() if each == path or each.startswith(f"{path}/")}
                self._manifest |= {f"0/model{each.removeprefix('0/module')}": entry for each, entry in below.items()}
        if whole:
            self._manifest |= trained

    async def _read_frozen(self, trained: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters that are not trained."""
        shapes = self._head.get("frozen_param_shapes")
        made: dict[str, Any] = {}
        for name, given in dict.items(shapes) if isinstance(shapes, dict) else ():
            shape = _read_shape(given)
            whole = trained.get(f"0/module/{encode_component(_expect_name(name))}")
            if isinstance(whole, TensorEntry) and whole.shape == shape:
                continue  # the module has it
            fragments = [
                expect_dict(expect_dict(each.value).get("frozen_param_fragments") or {}) for each in self._states
            ]
            found = [file.locate(each.get(name)) for file, each in zip(self._states, fragments, strict=True)]
            pieces = [each for each in found if each is not None]
            if len(pieces) < len(found) or len({each.dtype for each in pieces}) > 1:
                raise ValueError(f"{name[:200]}: a rank lacks its part")
            if len(pieces) == 1 and pieces[0].shape == shape:
                made[name] = pieces[0]
                continue
            slices, step = cut_parameter(math.prod(shape), len(pieces))
            if any(len(each.shape) != 1 or each.shape[0] < step for each in pieces):
                raise ValueError(f"{name[:200]}: a rank has another part than its own")
            made[name] = self._join(name, shape, await self._find_raw(pieces), slices)
        return made

    # The optimizer

    async def _add_optimizer(self, groups: Sequence[Group], tensors: Mapping[str, Mapping[str, Any]]) -> None:
        """Add the optimizer's state by the names of parameters. Their own values precede those of the groups."""
        keep = self._manifest
        states: list[str] = []
        for group in groups:
            scalars = {key: await self._read_scalar(node) for key, node in group.scalars.items()}
            for name in group.shapes:
                own = tensors.get(name, {})
                found = {**own, **{key: each() for key, each in scalars.items() if key not in own}}
                if not found:
                    continue
                path = f"0/optim/state/{encode_component(name)}"
                keep[path] = DictEntry([encode_key(key) for key in found])  # type: ignore[misc]
                keep |= {f"{path}/{encode_component(key)}": entry for key, entry in found.items()}
                states.append(name)
        keep["0/optim"] = DictEntry(["state", "param_groups"])
        keep["0/optim/state"] = DictEntry([encode_key(name) for name in states])  # type: ignore[misc]
        if self._zero:
            self._add_values(self._zero[0], {"optim/param_groups": self._list_groups(groups)})

    def _list_groups(self, groups: Sequence[Group]) -> list[dict[str, Any]]:
        """Return the parameter groups of the optimizer, with the names of their parameters."""
        saved = [dict(expect_dict(each)) for each in read_inner(self._read_zero())[1]]
        given = [each.get("params") for each in saved]
        numbers = [[number for number in each if type(number) is int] for each in given if isinstance(each, list)]
        if sorted(number for each in numbers for number in each) != list(range(len(groups))):
            numbers = [[number] for number in range(len(groups))]
            saved = saved if len(saved) == len(groups) else [{} for _ in groups]
        order = {name: place for place, name in enumerate(expect_dict(self._head["module"]))}
        order = order if self._is_shuffled() else {}
        made = []
        for group, each in zip(saved, numbers, strict=True):
            names = [name for number in each for name in groups[number].shapes]
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
        [raw] = await self._find_raw([stored])
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
            zero = {key: _plain_value(value) for key, value in self._read_zero().items() if key not in _GROUPED}
            self._add_values(self._zero[0], {"zero": zero})
        elif self._head.get("optimizer") is not None:
            self._add_values(self._states[0], {"optim": self._head["optimizer"]})
        files = []
        for file in self._states:
            values = {key: each for key, each in dict.items(expect_dict(file.value)) if key not in _LAYOUT}
            values = {_expect_name(key): each for key, each in values.items() if key not in ("module", "optimizer")}
            if clashing := {key: values.pop(key) for key in list(values) if key in _OWN}:
                values["client_state"] = clashing
            items = {encode_component(key): each for key, each in values.items()}
            entries = file.describe_items(items, self._inline, routed=False)
            own = {path.partition("/")[2]: entry for path, entry in entries.items()}
            files.append(RankFile(file.name, file.size, b"", own, file.sums(), None))
        self._manifest |= RankMerge(files, self._inline).join()


async def make_token(storage: Storage, files: Iterable[TorchFile]) -> bytes:
    """Return bytes that differ if one of the files differs."""
    found = [f"{each.name} {(await storage.stat(each.name)).token} {digest_range(each.content)}" for each in files]
    return "\n".join(found).encode()


def make_empty(dtype: str, shape: Shape) -> TensorEntry:
    """Return the entry of a tensor without elements."""
    return TensorEntry(INLINE, (0, 0), dtype, shape)


# Values in the pickles.


def expect_dict(value: Any) -> dict[Any, Any]:
    """Return a dict; raise for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict, got {p.show_value(value)}")
    return value


def expect_list(value: Any) -> list[Any]:
    """Return a list; raise for any other value."""
    if type(value) is not list:
        raise ValueError(f"expected a list, got {p.show_value(value)}")
    return value


def _expect_name(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a name must be a str, got {p.show_value(value)}")
    return value


def _read_shape(value: Any) -> Shape:
    if not isinstance(value, tuple) or not all(type(size) is int and 0 <= size < 1 << 60 for size in value):
        raise ValueError(f"a shape must be a tuple of ints, got {p.show_value(value)}")
    return tuple(value)


def _plain_value(value: Any) -> Any:
    """Return the value of an enum, and the fields of a loss scaler; other values as they are."""
    if isinstance(value, p.StandIn) and value.name.startswith("deepspeed."):
        if value.name.endswith("Enum") and len(value.arguments) == 1:
            return value.arguments[0]
        if not value.arguments:
            return dict(p.read_fields(value))
    return value


def _read_stage(value: Any) -> int:
    stage = _plain_value(value)
    if type(stage) is not int or not 1 <= stage <= 3:
        raise UnsupportedFormatError(f"a checkpoint of DeepSpeed must be of ZeRO 1 to 3, got {p.show_value(stage)}")
    return stage


def read_inner(held: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Any]]:
    """Return the state of the inner optimizer by group, and its parameter groups."""
    found = held.get("base_optimizer_state", held.get("optimizer_state_dict"))
    if isinstance(found, list):  # an elastic checkpoint
        return dict(enumerate(found)), []
    inner = expect_dict(found or {})
    groups = inner.get("param_groups") or held.get("param_groups") or []
    return expect_dict(inner.get("state") or {}), expect_list(groups)


def _is_flat(stored: TensorEntry | None, weights: TensorEntry) -> bool:
    """Return True for a state with an element for each weight. The last rank's weights have no padding."""
    return stored is not None and len(stored.shape) == 1 and stored.shape[0] >= max(2, weights.shape[0])


def _read_paddings(held: Mapping[str, Any], number: int, count: int) -> list[int]:
    given = held.get("param_alignment_paddings")
    paddings = expect_list(expect_list(given)[number]) if given else [0] * count
    if len(paddings) != count or not all(type(each) is int and 0 <= each < 1 << 60 for each in paddings):
        raise ValueError("the paddings of a group do not match its parameters")
    return paddings


def _read_count(held: Mapping[str, Any], number: int, ranks: int) -> int:
    """Return the number of parts of each parameter of a group in ZeRO 3."""
    groups = held.get("ds_zero_partition_groups")
    own = expect_dict(groups[number]) if isinstance(groups, list) and number < len(groups) else {}
    count = own.get("partition_count", held.get("partition_count", ranks))
    if count != ranks:
        raise UnsupportedFormatError(
            f"a checkpoint of DeepSpeed whose parameters are cut into {p.show_value(count)} parts on {ranks} ranks "
            "is not read; convert it with ds_to_universal.py of DeepSpeed"
        )
    return ranks
