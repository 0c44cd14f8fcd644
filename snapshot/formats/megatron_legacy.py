"""Megatron's legacy checkpoints: a folder for each tensor-parallel rank and stage of a pipeline, `mp_rank_00_000`.

Files do not say how the parts of a tensor join. That follows from the names of Megatron's layers. Layers are numbered
from 0 in each stage, and get their numbers in the whole model. `model` is joined; all else belongs to the parts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats import pickle_nodes as p
from snapshot.formats.deepspeed_parts import JoinRules
from snapshot.formats.foreign import ForeignDocument, make_dict, make_document
from snapshot.formats.pickle_nodes import expect_dict
from snapshot.formats.rank_files import RankFile, RankMerge
from snapshot.formats.torch_save import TorchFile, TorchFiles
from snapshot.io.aio import gather_limited
from snapshot.io.storage import Storage
from snapshot.manifest.compounds import Container, DictEntry
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import ShardedTensorEntry, TensorEntry
from snapshot.manifest.paths import decode_component, encode_component
from snapshot.tensors.digest import digest_range

FORMAT = "megatron"
FILE = "model_optim_rng.pt"
AT_ONCE = 16
_FOLDER = re.compile(r"mp_rank_(?P<tensor>[0-9]{2,4})(_(?P<second>[0-9]{3}))?(_(?P<third>[0-9]{3}))?/")
_MODEL = re.compile(r"model[0-9]{0,3}")
_COLUMNS = re.compile(
    r"(.*[./])?(word_embeddings|output_layer|lm_head|linear_qkv|linear_q|linear_kv|query_key_value|query|key_value"
    r"|linear_fc1|dense_h_to_4h)[./](weight[0-9]*|bias[0-9]*)"
)
"""Tensors that are cut along their first dimension."""
_ROWS = re.compile(r"(.*[./])?(linear_proj|linear_fc2|dense|dense_4h_to_h)[./]weight[0-9]*")
"""Tensors that are cut along their second dimension."""
_GATED = re.compile(r"(.*[./])?(linear_fc1|dense_h_to_4h)[./](weight[0-9]*|bias[0-9]*)")
"""Tensors of two halves if the activation is gated. Each rank has a part of each half."""
_LAYER = re.compile(r"((?:.*[./])?layers\.)([0-9]{1,6})(\..*)", re.DOTALL)
_RULES = {
    "parameter_with_row_parallelism_patterns": ["rows"],
    "parameter_with_2_sub_params_cat_dim_0": ["gated"],
}
"""Rules for the names of the three ways that a tensor is cut."""


class Part(NamedTuple):
    """The file of a stage and tensor-parallel rank."""

    stage: int
    rank: int
    file: TorchFile


def is_checkpoint(names: Iterable[str]) -> bool:
    """Return True if a folder's names are those of Megatron's legacy format."""
    return any(_FOLDER.fullmatch(name) for name in names)


async def describe_folder(storage: Storage, names: Sequence[str], limit: int) -> ForeignDocument:
    """Return the checkpoint in the folder of an iteration, which has these names."""
    where = storage.url
    folders = sorted(
        (found["tensor"], found["second"] or "", found["third"] or "", found[0])
        for found in map(_FOLDER.fullmatch, names)
        if found
    )
    opened = TorchFiles(storage, limit)
    files = await gather_limited([f"{folder}{FILE}" for *_, folder in folders], opened.open, AT_ONCE)
    try:
        made = Checkpoint(
            where, [(int(a), int(b or 0), int(c or 0), file) for (a, b, c, _), file in zip(folders, files, strict=True)]
        )
        manifest = made.read()
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
        raise CorruptSnapshotError(f"{where}: not a checkpoint of Megatron: {type(error).__name__}: {error}") from error
    keys = dict.fromkeys(decode_component(path.split("/", 2)[1]) for path in manifest)
    tokens = [f"{each.name} {each.token} {digest_range(each.content)}" for each in files]
    return make_document(
        FORMAT,
        str(made.head.get("checkpoint_version") or ""),
        where,
        "\n".join(tokens).encode(),
        manifest=manifest,
        files={each.name: ForeignFile(each.size, archived=True) for each in files},
        world_size=len(files),
        root=make_dict(keys),
        inline=bytes(made.inline) or b"\0",
    )


class Checkpoint:
    """The contents of all parts, as entries."""

    def __init__(self, where: object, files: Sequence[tuple[int, int, int, TorchFile]]) -> None:
        self._where = where
        self.head = expect_dict(files[0][3].value)
        self.args: Mapping[str, Any] = p.read_fields(self.head.get("args"))
        """The arguments of the program that saved it."""
        self.inline = bytearray()
        if self._read_size("expert_model_parallel_size") > 1:
            raise UnsupportedFormatError(
                f"{where}: a legacy checkpoint of Megatron with expert parallelism is not read"
            )
        self._parts = sorted(Part(stage, rank, file) for rank, stage, _, file in files)
        self._width = 1 + max(part.rank for part in self._parts)
        stages = 1 + max(part.stage for part in self._parts)
        found = [(part.stage, part.rank) for part in self._parts]
        if found != [(stage, rank) for stage in range(stages) for rank in range(self._width)]:
            raise CorruptSnapshotError(
                f"{where}: the folder of a part is missing, got {[part.file.name for part in self._parts][:8]}"
            )
        self._rules = JoinRules(where, _RULES, self._width)
        self._gated = self.args.get("swiglu") is True or self.args.get("gated_linear_unit") is True
        self._sums = {part.file.name: part.file.sums() for part in self._parts}

    def _read_size(self, name: str) -> int:
        value = self.args.get(name, 1)
        return value if type(value) is int else 1

    def read(self) -> dict[str, Any]:
        """Return all entries."""
        manifest = self._read_model()
        files = []
        for part in self._parts:
            values = {key: each for key, each in dict.items(expect_dict(part.file.value)) if not self._is_model(key)}
            if isinstance(values.get("args"), p.StandIn):
                values["args"] = dict(p.read_fields(values["args"]))
            items = {encode_component(key): each for key, each in values.items() if type(key) is str}
            entries = part.file.describe_items(items, self.inline)
            own = {path.partition("/")[2]: entry for path, entry in entries.items()}
            files.append(RankFile(part.file.name, part.file.size, b"", own, part.file.sums(), None))
        return manifest | RankMerge(files, self.inline).join()

    def _is_model(self, key: Any) -> bool:
        return type(key) is str and bool(_MODEL.fullmatch(key))

    def _read_model(self) -> dict[str, Any]:
        """Return the entries of the model, joined from all parts."""
        joined: dict[str, Any] = {}
        firsts: dict[str, int] = {}
        """Number of the first layer of a stage, by the path above its layers."""
        chunks = sorted((key for key in self.head if self._is_model(key)), key=lambda key: (len(key), key))
        if not chunks:
            raise ValueError("the files have no model")
        for chunk in chunks:  # of a virtual pipeline: all stages have the first layers of each chunk
            for stage in range(len(self._parts) // self._width):
                parts = self._parts[stage * self._width : (stage + 1) * self._width]
                trees = [self._describe(part, chunk) for part in parts]
                if any(tree.keys() != trees[0].keys() for tree in trees):
                    raise ValueError(f"the tensor-parallel ranks of stage {stage} have different names")
                counts: dict[str, int] = {}
                for path, entry in trees[0].items():
                    found = _LAYER.fullmatch(path)
                    if found is not None:
                        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
                        renamed = f"{found[1]}{int(found[2]) + firsts.get(found[1], 0)}{found[3]}"
                    else:
                        renamed = path
                    if isinstance(entry, Container):
                        joined.setdefault(renamed, entry)
                    elif renamed not in joined:  # others are tied to an earlier stage
                        joined[renamed] = self._join(renamed, [tree[path] for tree in trees])
                firsts |= {above: firsts.get(above, 0) + count for above, count in counts.items()}
        return {f"0/{path}": _share(entry) for path, entry in _nest(joined).items()}

    def _describe(self, part: Part, chunk: str) -> dict[str, Any]:
        """Return the entries of a part's model, by their paths."""
        value = expect_dict(expect_dict(part.file.value)[chunk])
        entries = part.file.describe_items({"model": value}, self.inline, routed=chunk == "model")
        return {path.partition("/")[2]: entry for path, entry in entries.items()}

    def _join(self, path: str, entries: Sequence[Any]) -> Any:
        """Return a value of the whole model, from those of all tensor-parallel ranks."""
        name = "/".join(map(decode_component, path.split("/")))
        first = entries[0]
        tensors = [each for each in entries if isinstance(each, TensorEntry)]
        if len(entries) == 1 or len(tensors) < len(entries) or name.endswith("_extra_state"):
            return first  # not a tensor, or the state of Transformer Engine
        if _ROWS.fullmatch(name):
            return self._rules.join("rows", tensors)
        if _COLUMNS.fullmatch(name):
            return self._rules.join("gated" if self._gated and _GATED.fullmatch(name) else "columns", tensors)
        if len({self._identify(each) for each in tensors}) > 1:
            raise UnsupportedFormatError(
                f"{self._where}: {name[:200]}: the tensor-parallel ranks have different tensors, and how they join is "
                "not known by this name; open the file of one rank, such as mp_rank_00/model_optim_rng.pt"
            )
        return first

    def _identify(self, entry: TensorEntry) -> Any:
        """Return a value that is equal for tensors with equal checksums."""
        sums = self._sums.get(entry.location, {})
        return entry.dtype, entry.shape, sums.get(entry.byte_range[0])


def _nest(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries with containers of their actual children, which are from all stages."""
    children: dict[str, list[str]] = {path: [] for path, entry in entries.items() if isinstance(entry, DictEntry)}
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
    return entry if isinstance(entry, ShardedTensorEntry) else msgspec.structs.replace(entry, replicated=True)
