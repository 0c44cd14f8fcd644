"""Megatron's legacy checkpoints: a folder for each tensor-parallel rank and stage of a pipeline, `mp_rank_00_000`.

With expert parallelism, each of its ranks has a folder, too. Files do not say how the parts of a tensor join. That
follows from the names of Megatron's layers. Layers are numbered from 0 in each stage, and experts on each rank. They
get their numbers in the whole model.

| key | content |
|---|---|
| `model` | the model, joined |
| `optim` | the optimizer's state by the names of parameters, if it can be joined |
| `main_params` | the optimizer's float32 values of the parameters |
| others | values of the parts, as they are |
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, product
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, StorageError, UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.foreign import ForeignDocument, is_absence, make_dict, make_document
from snapshot.formats.pickle_nodes import expect_dict
from snapshot.formats.pickled_objects import INLINE
from snapshot.formats.rank_files import RankFile, RankMerge, TorchFiles, find_raw_range
from snapshot.formats.registry import SearchedFolder
from snapshot.formats.torch_save import TorchFile
from snapshot.formats.zip_archive import read_range
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import PLAIN, ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.tensors.digest import digest_range
from snapshot.tensors.memory import ITEMSIZE, contiguous_strides
from snapshot_megatron.legacy_optimizer import MAIN, MOMENTS, OWN_OPTIONS, NotJoinedError, PartState, read_state

FORMAT = "megatron"
FILE = "model_optim_rng.pt"
FLAT = "distrib_optim.pt"
AT_ONCE = 16
_FOLDER = re.compile(r"mp_rank_(?P<tensor>[0-9]{2,4})(_(?P<second>[0-9]{3}))?(_(?P<third>[0-9]{3}))?/")
_MODEL = re.compile(r"model[0-9]{0,3}")
_ATTENTION = r"\w*attention[./]"
_MLP = r"(?:mlp|shared_experts|experts|local_experts[./][0-9]+|vision_projection[./]encoder)[./]"
_COLUMNS = re.compile(
    r"(?:.*[./])?(?:"
    r"(?:word_embeddings|word_embeddings_for_head|output_layer|lm_head|eh_proj|vision_model[./]embedder|vision_projection[./]encoder|"
    rf"{_ATTENTION}(?:linear_qkv|linear_q|linear_kv|query_key_value|query|key_value"
    rf"|linear_q_proj|linear_q_up_proj|linear_kv_up_proj)|{_MLP}(?:linear_fc1|dense_h_to_4h))"
    r"[./](?:weight|bias)[0-9]*"
    rf"|(?:mixer[./]|{_ATTENTION})(?:A_log|dt_bias)|mixer[./](?:D|norm[./]weight)"
    r"|core_attention[./]softmax_offset)",
    re.DOTALL,
)
"""Tensors that are cut along their first dimension."""
_ROWS = re.compile(
    rf"(?:.*[./])?(?:{_ATTENTION}(?:linear_proj|dense|out_proj)|mixer[./]out_proj|{_MLP}(?:linear_fc2|dense_4h_to_h))"
    r"[./]weight[0-9]*",
    re.DOTALL,
)
"""Tensors that are cut along their second dimension."""
_REFUSED = re.compile(
    rf"(?:.*[./])?(?:(?:mixer[./]|{_ATTENTION})(?:in_proj[./](?:weight|bias)|conv1d[./](?:weight|bias))"
    r"|experts[./]weight[12])",
    re.DOTALL,
)
"""Tensors of several pieces. Each rank has a part of each. Files do not have the sizes: Mamba's, and experts'."""
_GATED = re.compile(
    rf"(?P<above>(?:.*[./])?{_MLP})(?P<layer>linear_fc1|dense_h_to_4h)[./](?:weight|bias)(?P<number>[0-9]*)", re.DOTALL
)
"""Tensors of two halves if the activation is gated. Each rank has a part of each half."""
_NEXT = {"linear_fc1": "linear_fc2", "dense_h_to_4h": "dense_4h_to_h"}
"""The layer behind the activation."""
_OTHER_MODELS = re.compile(r"(?:.*[./])?(?:vision|image|radio|clip|audio)\w*[./].*", re.DOTALL)
"""Tensors of models that the arguments may not describe."""
_PIECE = 1 << 20
_LAYER = re.compile(r"((?:.*[./])?layers\.)([0-9]{1,6})(\..*)", re.DOTALL)
_RULES = {
    "parameter_with_row_parallelism_patterns": ["rows"],
    "parameter_with_2_sub_params_cat_dim_0": ["gated"],
}
"""Rules for the names of the three ways that a tensor is cut."""


_EXPERT = re.compile(
    r"(?P<above>(?:.*[./])?experts\.)(?:(?P<place>local_experts\.)(?P<number>[0-9]{1,6})(?P<below>\..*)"
    r"|(?P<layer>linear_fc[12]\.(?:weight|bias))(?P<last>[0-9]{1,6}))",
    re.DOTALL,
)
"""Tensors of one expert. Others below `experts.` have all experts of a rank, and do not say how they join."""


class LegacyPart(NamedTuple):
    """The files of a part."""

    place: tuple[int, int, int]
    """The stage, the tensor-parallel rank, and the rank of expert parallelism."""
    file: TorchFile
    flat: TorchFile | None
    """The state of the distributed optimizer."""


Place = tuple[str, int, int]
"""A chunk of the model, a stage, and a tensor-parallel rank."""


def is_checkpoint(names: Iterable[str]) -> bool:
    """Return True if a folder's names are those of Megatron's legacy format."""
    return any(_FOLDER.fullmatch(name) for name in names)


async def describe_folder(folder: SearchedFolder) -> ForeignDocument | None:
    """Return the checkpoint in the folder of an iteration; None if it is none."""
    storage, names, limit = folder.linkless, await folder.names(), folder.limit
    if not is_checkpoint(names):
        return None
    where = storage.url
    folders = sorted(
        (found["tensor"], found["second"] or "", found["third"] or "", found[0])
        for found in map(_FOLDER.fullmatch, names)
        if found
    )
    opened = TorchFiles(storage, limit)
    files = await gather_limited([f"{folder}{FILE}" for *_, folder in folders], opened.open, AT_ONCE)
    flats = await gather_limited([f"{folder}{FLAT}" for *_, folder in folders], partial(_open_flat, opened), AT_ONCE)
    try:
        numbers = [[int(each) for each in given if each] for *given, _ in folders]
        made = LegacyCheckpoint(storage, list(zip(numbers, files, flats, strict=True)))
        manifest = await made.read()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not a checkpoint of Megatron: {type(error).__name__}: {error}") from error
    keys = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in manifest)
    files = [*files, *(each for each in flats if each is not None)]
    tokens = [f"{each.name} {each.token} {digest_range(each.content)}" for each in files]
    document = make_document(
        FORMAT,
        str(made.head.get("checkpoint_version") or ""),
        where,
        "\n".join(tokens).encode(),
        manifest=manifest,
        files={each.name: ForeignFile(each.size, archived=True, lacks=made.lacks) for each in files},
        world_size=len(folders),
    )
    document.root = make_dict(keys)
    document.set_inline(bytes(made.inline) or b"\0")
    return document


async def _open_flat(opened: TorchFiles, name: str) -> TorchFile | None:
    try:
        return await opened.open(name)
    except StorageError as error:
        if not is_absence(opened.storage, error):
            raise
        return None


class LegacyCheckpoint:
    """The contents of all parts, as entries."""

    def __init__(self, storage: Storage, files: Sequence[tuple[Sequence[int], TorchFile, TorchFile | None]]) -> None:
        """`files`: the numbers in a folder's name, and its files."""
        self._storage = storage
        self._where = storage.url
        self.head = expect_dict(files[0][1].value)
        args = self.head.get("args")
        self.args: Mapping[str, Any] = args if isinstance(args, dict) else p.read_fields(args)
        """The arguments of the program that saved it."""
        self.inline = bytearray()
        self.lacks = ""
        """Reason why the optimizer's state is listed, but not read."""
        self._experts = self._read_size("expert_model_parallel_size")
        parts = (LegacyPart(self._place(numbers), file, flat) for numbers, file, flat in files)
        self._parts = sorted(parts, key=lambda part: part.place)
        self._stages, self._width = (1 + max(part.place[axis] for part in self._parts) for axis in range(2))
        found = [part.place for part in self._parts]
        counts = self._stages, self._width, self._experts
        if math.prod(counts) != len(found) or found != list(product(*map(range, counts))):
            raise CorruptSnapshotError(
                f"{self._where}: the folder of a part is missing, got {[part.file.name for part in self._parts][:8]}"
            )
        from snapshot_deepspeed.parts import JoinRules  # of another plugin, which this format needs

        self._rules = JoinRules(self._where, _RULES, self._width)
        self._gates: dict[str, bool] = {}
        """True for tensors of the model that have two halves, by their names."""
        self._copies: set[str] = set()
        """Names of tensors of the model that are equal on all tensor-parallel ranks."""
        self._added: dict[tuple[Any, ...], int] = {}
        """Checksums that were computed, by the place of a tensor."""
        self._sums = {part.file.name: part.file.sums() for part in self._parts}

    def _place(self, numbers: Sequence[int]) -> tuple[int, int, int]:
        """Return the place of a part from the numbers in the name of its folder."""
        rank, *more = numbers
        if self._experts > 1 and self._read_size("pipeline_model_parallel_size") == 1:
            more = [0, *more]
        stage, expert = (*more, 0, 0)[:2]
        return stage, rank, expert

    def _read_size(self, name: str) -> int:
        value = self.args.get(name, 1)
        return value if type(value) is int else 1

    async def read(self) -> dict[str, Any]:
        """Return all entries."""
        chunks = sorted((key for key in self.head if self._is_model(key)), key=lambda key: (len(key), key))
        if not chunks:
            raise ValueError("the files have no model")
        described = {(part.file.name, chunk): self._describe(part, chunk) for part in self._parts for chunk in chunks}
        if self._width > 1:
            await gather_limited(self._parts, lambda part: self._add_sums(part, chunks, described), AT_ONCE)
        trees: dict[Place, Mapping[str, Any]] = {}
        for (stage, rank), held in groupby(self._parts, key=lambda part: part.place[:2]):
            names = [part.file.name for part in held]
            for chunk in chunks:
                trees[chunk, stage, rank] = self._merge_experts([described[name, chunk] for name in names])
        renamed: dict[tuple[str, int, str], str] = {}
        model = self._join_trees(chunks, trees, renamed)
        manifest = {f"0/{path}": _share(entry) for path, entry in _nest(model).items()}
        if self.head.get("optimizer") is not None:
            manifest |= await self._read_optimizer(chunks, trees, described, renamed, model)
        files = []
        for part in self._parts:
            values = {key: each for key, each in dict.items(expect_dict(part.file.value)) if not self._is_model(key)}
            if isinstance(values.get("args"), p.StandIn):
                values["args"] = dict(p.read_fields(values["args"]))
            if not self.lacks and isinstance(values.get("optimizer"), dict):
                own = expect_dict(values.pop("optimizer"))
                if "grad_scaler" in own:
                    values["grad_scaler"] = own["grad_scaler"]
            items = {encode_component(key): each for key, each in values.items() if type(key) is str}
            entries = part.file.describe_items(items, self.inline)
            named = {path.partition("/")[2]: entry for path, entry in entries.items()}
            files.append(RankFile(part.file.name, part.file.size, b"", named, part.file.sums(), None))
        return manifest | RankMerge(files, self.inline).join()

    def _is_model(self, key: Any) -> bool:
        return type(key) is str and bool(_MODEL.fullmatch(key))

    def _join_trees(
        self, chunks: Sequence[str], trees: Mapping[Place, Mapping[str, Any]], renamed: dict[tuple[str, int, str], str]
    ) -> dict[str, Any]:
        """Return the entries of the whole model, and add the names of all paths in it to `renamed`."""
        joined: dict[str, Any] = {}
        firsts: dict[str, int] = {}
        """Number of the first layer of a stage, by the path above its layers."""
        for chunk in chunks:  # of a virtual pipeline: all stages have the first layers of each chunk
            for stage in range(self._stages):
                held = [trees[chunk, stage, rank] for rank in range(self._width)]
                if any(tree.keys() != held[0].keys() for tree in held):
                    raise ValueError(f"the tensor-parallel ranks of stage {stage} have different names")
                counts: dict[str, int] = {}
                for path, entry in held[0].items():
                    found = _LAYER.fullmatch(path)
                    name = path
                    if found is not None:
                        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
                        name = f"{found[1]}{int(found[2]) + firsts.get(found[1], 0)}{found[3]}"
                    renamed[chunk, stage, path] = name
                    if entry.is_container:
                        joined.setdefault(name, entry)
                    elif name not in joined:  # others are tied to an earlier stage
                        joined[name] = self._join(
                            name, [tree[path] for tree in held], partial(_find_next, held[0], path)
                        )
                firsts |= {above: firsts.get(above, 0) + count for above, count in counts.items()}
        return joined

    def _describe(self, part: LegacyPart, chunk: str) -> dict[str, Any]:
        """Return the entries of a part's model, by their paths."""
        value = expect_dict(expect_dict(part.file.value)[chunk])
        entries = part.file.describe_items({"model": value}, self.inline, routed=chunk == "model")
        return {path.partition("/")[2]: entry for path, entry in entries.items()}

    def _merge_experts(self, trees: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the entries of all ranks of expert parallelism. What is not of an expert is on each of them."""
        if self._experts > 1 or (self._width > 1 and self.args.get("expert_tensor_parallel_size") is not None):
            self._expect_known_experts(trees[0])
        if self._experts == 1:
            return trees[0]
        total = self.args.get("num_experts")
        local = total // self._experts if type(total) is int else 0
        if local < 1 or local * self._experts != total:
            raise ValueError(f"{p.show_value(total)} experts on {self._experts} ranks")
        if any(tree.keys() != trees[0].keys() for tree in trees):
            raise ValueError("the ranks of expert parallelism have different names")
        made: dict[str, Any] = {}
        for path in trees[0]:
            found = _EXPERT.fullmatch(path)
            for number, tree in enumerate(trees[:1] if found is None else trees):
                made[path if found is None else _number_expert(found, number * local)] = tree[path]
        return made

    def _expect_known_experts(self, tree: Mapping[str, Any]) -> None:
        """Raise unless the names say how the tensors of experts join."""
        width = self.args.get("expert_tensor_parallel_size")
        for path, entry in tree.items():
            if ".experts." not in path or entry.is_container or path.endswith("_extra_state"):
                continue
            if type(width) is int and width != self._width:
                raise UnsupportedFormatError(
                    f"{self._where}: a legacy checkpoint of Megatron with {width} tensor-parallel ranks of experts, "
                    f"and {self._width} of other layers, is not read"
                )
            if self._experts > 1 and not _EXPERT.fullmatch(path):
                raise UnsupportedFormatError(
                    f"{self._where}: {path[:200]}: how this tensor of several experts joins is not known by its name; "
                    "open the file of one rank"
                )

    # The optimizer

    async def _read_optimizer(
        self,
        chunks: Sequence[str],
        trees: Mapping[Place, Mapping[str, Any]],
        described: Mapping[tuple[str, str], Mapping[str, Any]],
        renamed: Mapping[tuple[str, int, str], str],
        model: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the entries of the optimizer's state. If it cannot be joined, set `lacks`: they have no bytes."""
        try:
            read = await gather_limited(self._parts, lambda part: self._read_part(part, chunks, described), AT_ONCE)
        except NotJoinedError as error:
            self.lacks = f"the state of Megatron's optimizer is not joined: {error}; exclude optim/**"
            shapes = {path: entry for path, entry in model.items() if self._is_parameter(path, entry)}
            tensors = {
                path: {key: ShardedTensorEntry("float32", tuple(entry.shape), []) for key in MOMENTS}
                for path, entry in shapes.items()
            }
            return self._put_optimizer(tensors, None)
        found: dict[tuple[int, ...], PartState] = {}
        for part, state in zip(self._parts, read, strict=True):
            held_state = found.setdefault(part.place[:2], PartState({}, []))
            held_state.states.update(state.states)
            held_state.groups.extend(state.groups)
        states: dict[str, dict[str, Any]] = {}
        for key in dict.fromkeys(key for each in found.values() for own in each.states.values() for key in own):
            held: dict[Place, dict[str, Any]] = {place: {} for place in trees}
            for (chunk, stage, rank), tree in trees.items():
                own = found[stage, rank].states
                for path in tree:
                    if key in own.get(f"{chunk}:{path}", {}):
                        held[chunk, stage, rank][path] = own[f"{chunk}:{path}"][key]
            for path, entry in self._join_trees(chunks, held, {}).items():
                states.setdefault(path, {})[key] = entry
        groups: dict[str, dict[str, Any]] = {}
        names: dict[str, dict[str, None]] = {}
        for (stage, rank), state in found.items():
            for group in state.groups if rank == 0 else ():
                key = str(group.get("wd_mult"))
                groups.setdefault(key, {name: each for name, each in group.items() if name not in OWN_OPTIONS})
                for each in group["params"]:
                    chunk, _, path = each.partition(":")
                    names.setdefault(key, {})[_dotted(renamed[chunk, stage, path])] = None
        return self._put_optimizer(states, [{**groups[key], "params": list(own)} for key, own in names.items()])

    async def _read_part(
        self, part: LegacyPart, chunks: Sequence[str], described: Mapping[tuple[str, str], Mapping[str, Any]]
    ) -> PartState:
        """Return the state of a part, by a chunk and the path in it. Experts have their numbers in the whole model."""
        parameters = [
            {
                f"{chunk}:{path}": entry
                for path, entry in described[part.file.name, chunk].items()
                if self._is_parameter(path, entry)
            }
            for chunk in chunks
        ]
        found = await read_state(self._storage, part.file, part.flat, parameters)
        if self._experts == 1:
            return found
        names = {path: self._name_of_whole(path, part.place[2]) for chunk in parameters for path in chunk}
        for path, name in names.items():
            if name is not None and path not in found.states:
                raise NotJoinedError(f"{part.file.name} lacks the state of {path[:200]}")
        states = {name: found.states[path] for path, name in names.items() if name is not None}
        groups = []
        for group in found.groups:
            own = [name for name in map(names.get, group["params"]) if name is not None]
            groups += [{**group, "params": own}] if own else []
        return PartState(states, groups)

    def _name_of_whole(self, path: str, rank: int) -> str | None:
        """Return the path of a parameter of a rank in the whole model; None if another rank has it, too."""
        found = _EXPERT.fullmatch(path)
        if found is not None:
            return _number_expert(found, rank * (self._read_size("num_experts") // self._experts))
        return None if rank else path

    @staticmethod
    def _is_parameter(path: str, entry: Any) -> bool:
        return entry.is_tensor and not path.endswith(("_extra_state", "expert_bias", "inv_freq"))

    def _put_optimizer(
        self, states: Mapping[str, Mapping[str, Any]], groups: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        main = {_dotted(path): own[MAIN] for path, own in states.items() if MAIN in own}
        made: dict[str, Any] = {"0/optim": make_dict(["state", *(["param_groups"] if groups else [])])}
        made["0/optim/state"] = make_dict(map(_dotted, states))
        for path, own in states.items():
            above = f"0/optim/state/{encode_component(_dotted(path))}"
            kept = {key: entry for key, entry in own.items() if key != MAIN}
            made[above] = make_dict(kept)
            made |= {f"{above}/{encode_component(key)}": _share(entry) for key, entry in kept.items()}
        if main:
            made["0/main_params"] = make_dict(main)
            made |= {f"0/main_params/{encode_component(name)}": _share(entry) for name, entry in main.items()}
        if groups:
            made |= self._parts[0].file.describe_items({"optim/param_groups": groups}, self.inline, routed=False)
        return made

    def _join(self, path: str, entries: Sequence[Any], find_next: Callable[[], Any]) -> Any:
        """Return a value of the whole model, from those of all tensor-parallel ranks.

        `find_next`: returns the weight of the layer behind the activation, on the first of them.
        """
        name = _join_levels(path)
        first = entries[0]
        tensors = [each for each in entries if each.is_tensor]
        if len(entries) == 1 or not tensors or name.endswith("_extra_state") or tensors[0].shape == ():
            return first  # not a tensor, the state of Transformer Engine, or a step of the optimizer
        if len(tensors) < len(entries):
            raise self._refuse(name, "it is a tensor on some tensor-parallel ranks only")
        if _ROWS.fullmatch(name):
            return self._rules.join("rows", tensors)
        if _REFUSED.fullmatch(name):
            raise self._refuse(name, "each tensor-parallel rank has several pieces of it, whose sizes are not stored")
        if _GATED.fullmatch(name):
            if name not in self._gates:
                self._gates[name] = self._is_gated(name, first, find_next())
            return self._rules.join("gated" if self._gates[name] else "columns", tensors)
        if _COLUMNS.fullmatch(name):
            return self._rules.join("columns", tensors)
        known = [self._identify(each) for each in tensors]
        if None in known:
            if name not in self._copies:
                raise self._refuse(name, "the parts of the tensor-parallel ranks cannot be compared")
        elif any(each != known[0] for each in known):
            raise self._refuse(name, "the tensor-parallel ranks have different tensors")
        self._copies.add(name)
        return first

    def _refuse(self, name: str, why: str) -> UnsupportedFormatError:
        return UnsupportedFormatError(
            f"{self._where}: {name[:200]}: {why}, so it is not known how they join; "
            "open the file of one rank, such as mp_rank_00/model_optim_rng.pt"
        )

    def _is_gated(self, name: str, entry: Any, following: Any) -> bool:
        """Return True for a tensor of two halves. Then the next layer has as many columns as each half has rows."""
        if following is not None and following.is_tensor and len(following.shape) == 2:
            columns = following.shape[1]
            if columns and entry.shape[0] in (columns, 2 * columns):
                return bool(entry.shape[0] == 2 * columns)
        fields = [self.args.get(each) for each in ("swiglu", "quick_geglu", "gated_linear_unit")]
        if _OTHER_MODELS.fullmatch(name) or not any(type(each) is bool for each in fields):
            raise self._refuse(name, "neither the next layer nor the arguments say if it is gated")
        return True in fields

    def _identify(self, entry: Any) -> Any:
        """Return a value that is equal for equal tensors; None for one that cannot be compared."""
        if not isinstance(entry, TensorEntry):
            return None
        form = entry.dtype, tuple(entry.shape)
        if entry.location == INLINE:
            return *form, bytes(self.inline[slice(*entry.byte_range)])
        added = self._added.get(_place_of(entry))
        if added is not None:
            return *form, added
        found = self._sums.get(entry.location, {}).get(entry.byte_range[0], (0, 0))
        extra = entry.extra or PLAIN
        plain = entry.serializer == "zip" and extra.strides in (None, contiguous_strides(entry.shape))
        if not found[0] or (plain and found[1] != math.prod(entry.shape) * ITEMSIZE[entry.dtype]):
            return None  # no checksum, or one of more than this tensor
        return *form, entry.serializer, msgspec.json.encode(extra), found

    async def _add_sums(
        self, part: LegacyPart, chunks: Sequence[str], described: Mapping[tuple[str, str], Mapping[str, Any]]
    ) -> None:
        """Compute the checksums of tensors of unknown names that the archive does not have. Each is read once."""
        left = part.file.size
        for entry in (each for chunk in chunks for each in self._list_unknown(described[part.file.name, chunk])):
            extra = entry.extra or PLAIN
            if _place_of(entry) in self._added or extra.strides not in (None, contiguous_strides(entry.shape)):
                continue
            raw = await find_raw_range(self._storage, entry)
            begin, end = raw.byte_range
            left -= end - begin
            if raw is entry or left < 0:  # packed; or many views of the same bytes
                continue
            found = 0
            for at in range(begin, end, _PIECE):
                found = zlib.crc32(await read_range(self._storage, raw.location, at, min(end, at + _PIECE)), found)
            self._added[_place_of(entry)] = found

    def _list_unknown(self, tree: Mapping[str, Any]) -> Iterator[TensorEntry]:
        """Yield the tensors that must be compared, and have no checksum."""
        for path, entry in tree.items():
            name = _join_levels(path)
            known = any(each.fullmatch(name) for each in (_ROWS, _COLUMNS, _REFUSED))
            if isinstance(entry, TensorEntry) and entry.shape != () and not known and self._identify(entry) is None:
                yield entry


def _find_next(tree: Mapping[str, Any], path: str) -> Any:
    """Return the weight of the layer behind the activation; None if there is none."""
    found = _GATED.fullmatch(path)
    if found is None:
        return None
    mark = path[found.end("layer")]
    return tree.get(f"{found['above']}{_NEXT[found['layer']]}{mark}weight{found['number']}")


def _place_of(entry: TensorEntry) -> tuple[Any, ...]:
    return entry.location, *entry.byte_range, entry.dtype, tuple(entry.shape), (entry.extra or PLAIN).storage_offset


def _join_levels(path: str) -> str:
    return "/".join(map(decode_component, path.split("/")))


def _dotted(path: str) -> str:
    """Return the name of a parameter, without the level of the model."""
    return ".".join(map(decode_component, path.split("/")[1:]))


def _number_expert(found: re.Match[str], first: int) -> str:
    """Return the path of an expert's tensor, by its number in the whole model."""
    if found["place"]:
        return f"{found['above']}{found['place']}{first + int(found['number'])}{found['below']}"
    return f"{found['above']}{found['layer']}{first + int(found['last'])}"


def _nest(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with containers of their actual children, which are from all stages."""
    children: dict[str, list[str]] = {path: [] for path, entry in entries.items() if entry.is_keyed}
    for path in entries:
        above, _, name = path.rpartition("/")
        if above in children:
            children[above].append(name)
    made = dict(entries)
    for path, names in children.items():
        if names != entries[path].components():
            made[path] = make_dict(map(decode_component, names))
    return made


def _share(entry: Any) -> Any:
    return entry if entry.is_shared else msgspec.structs.replace(entry, replicated=True)
