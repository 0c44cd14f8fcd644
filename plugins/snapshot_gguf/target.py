"""Files of GGUF as a target: the names, types and key-values of a new file, and the rounding to eight bits."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from snapshot.distributed.operation import Operation
from snapshot.errors import CorruptSnapshotError, RestoreError, UnsupportedFormatError
from snapshot.io.aio import in_thread
from snapshot.io.arena import Slot
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.url import URL
from snapshot.manifest.paths import decode_component
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.layout import Extent, FilePart, FilePlan
from snapshot.save.staging import PartSource
from snapshot.text import listed
from snapshot.transform.sources import CheckpointSource
from snapshot.transform.target import Target
from snapshot_gguf import reader as gguf
from snapshot_gguf.options import GGUFOptions
from snapshot_gguf.reader import BLOCK, BLOCK_BYTES, Header, NewTensor

# The template: a file of GGUF whose key-values the new file gets, such as those of the tokenizer.

MAP = "gguf-hf"
_MODELS = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
"""Architectures in GGUF, and the model types in Hugging Face's config.json. Mistral is a Llama in GGUF."""
_TABLE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that llama.cpp's converter computes from the configuration. They are copied from the template."""
_LONGEST_TABLE = 1 << 20
_NAMED = re.compile(r"(.*\.)?(token_embd|output_norm|blk\.\d+\..+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFTemplate:
    """The file whose key-values are copied."""

    url: URL
    header: Header
    tables: dict[str, bytes]
    """The bytes of small float32 tensors that are copied, too."""

    @property
    def config(self) -> dict[str, Any]:
        """The fields of Hugging Face's config.json that the map needs."""
        values = self.header.values
        name = values.get(gguf.ARCHITECTURE)
        kind = _MODELS.get(str(name))
        if kind is None:
            raise UnsupportedFormatError(
                f"{self.url}: the architecture must be one of {', '.join(_MODELS)} for a map of names, got {name!r}; "
                "pass map= with one that makes GGUF's names"
            )
        heads = values.get(f"{name}.attention.head_count")
        experts = values.get(f"{name}.expert_count") or 0
        names = {info.name for info in self.header.tensors}
        made = {
            "model_type": "mixtral" if kind == "llama" and experts else kind,
            "num_attention_heads": heads,
            "num_key_value_heads": values.get(f"{name}.attention.head_count_kv", heads),
            "tie_word_embeddings": bool(names) and "output.weight" not in names,
        }
        return made | ({"num_local_experts": experts, "num_experts": experts} if experts else {})

    def find_map(self, manifest: Mapping[str, Any]) -> TensorMap | None:
        """Return the map from Hugging Face's names to GGUF's; None if the tensors have GGUF's names already."""
        paths = (path for path, entry in manifest.items() if entry.is_tensor)
        if any(_NAMED.fullmatch(".".join(map(decode_component, path.split("/")[1:]))) for path in paths):
            return None
        try:
            return TensorMap.load(MAP, self.config, reverse=True)
        except ValueError as error:
            raise CorruptSnapshotError(f"{self.url}: {error}") from error

    def expect_tensors(self, names: Iterable[str]) -> None:
        """Raise unless the names are those of the template's tensors, if it has any."""
        known = {info.name for info in self.header.tensors} - self.tables.keys()
        if not known:
            return
        made = set(names)
        missing = [f"{name}: is in {self.url}, and missing" for name in sorted(known - made - {"output.weight"})]
        missing += [
            f"{name}: is not in {self.url}" for name in sorted(made - known - {"output.weight"} - self.tables.keys())
        ]
        if missing:
            raise RestoreError(f"the tensors must have the names of those in kv_from:{listed(missing, 20)}", missing)


def options_of(target: Target) -> GGUFOptions:
    """Return the options of a target; raise TypeError if they are of another class."""
    if not isinstance(target.format_options, GGUFOptions):
        raise TypeError(f"format_options must be GGUFOptions, got {target.format_options!r}")
    return target.format_options


def read_template(operation: Operation, target: Target) -> GGUFTemplate:
    """Read the header of the file that a target names, and its small tables."""
    options = options_of(target)
    kv_from = URL.parse(os.fspath(options.kv_from))
    session, name = target.open_file(operation, options.kv_from)
    storage, limit = session.storage, session.settings.manifest_bytes

    async def read() -> GGUFTemplate:
        size = (await storage.stat(name)).size
        header = await gguf.read_header(storage, name, size, limit)
        tables = {}
        for info in header.tensors:
            nbytes = 4 * math.prod(info.shape)
            if _TABLE.fullmatch(info.name) and info.kind == 0 and nbytes <= _LONGEST_TABLE:
                tables[info.name] = bytearray(nbytes)
                await storage.read_into(name, header.data + info.offset, [tables[info.name]])
        return GGUFTemplate(kv_from, header, {name: bytes(data) for name, data in tables.items()})

    return run(read())


def lay_out(template: GGUFTemplate, tensors: Sequence[NewTensor], add_leaf: Callable[..., int]) -> FilePlan:
    """Return the plan of a file. The tensors are the first leaves; padding and the template's tables become more."""
    wrong = [
        f"{each.name}: {each.kind}{list(each.shape)}"
        for each in tensors
        if not gguf.can_hold(each.kind) or len(each.shape) > gguf.MOST_DIMENSIONS
    ]
    if wrong:
        raise UnsupportedFormatError(
            "tensors of GGUF must be float32, float16 or bfloat16, with up to "
            f"{gguf.MOST_DIMENSIONS} dimensions; cast or exclude these:{listed(wrong)}"
        )
    own = {each.name for each in tensors}
    tables = {name: data for name, data in template.tables.items() if name not in own}
    every = [*tensors, *(NewTensor(name, "float32", (len(data) // 4,)) for name, data in tables.items())]
    leaves = [*range(len(tensors)), *(add_leaf(name, "uint8", (len(data),), data) for name, data in tables.items())]
    alignment = template.header.alignment
    header, offsets = gguf.encode_header(template.header.raw, alignment, every)
    extents, position = [], len(header)
    for number, each, begin in zip(leaves, every, offsets, strict=True):
        for leaf, end in ((number, begin + each.nbytes), (None, begin + -(-each.nbytes // alignment) * alignment)):
            if end > position:
                count = end - position
                padding = add_leaf("", "uint8", (count,), bytes(count)) if leaf is None else leaf
                extents.append(Extent(padding, position, end))
                position = end
    return FilePlan(header, tuple(extents), position)


# Rounding to Q8_0: each part of the file is computed from the elements of the blocks that it overlaps.

_AT_ONCE = 16 << 10
"""Blocks whose elements are held at once, if the budget allows."""


class QuantisingSource(PartSource):
    """Another source of parts, whose leaves are written as blocks of Q8_0. They are float32 leaves of that source."""

    def __init__(self, inner: CheckpointSource, quantised: frozenset[int], memory: MemoryBudget) -> None:
        self._inner = inner
        self._quantised = quantised
        self._memory = memory
        self._at_once = max(1, min(_AT_ONCE, memory.limit // (2 * 4 * BLOCK)))

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        """Compute the blocks of a part in its slot, and read the rest of it from the source."""
        plain = []
        for extent in file.extents[part.first : part.last]:
            if extent.leaf not in self._quantised:
                plain.append(extent)
                continue
            for run_of_blocks in _cut_blocks(extent, part, self._at_once):
                await self._compute(extent.leaf, run_of_blocks, slot)
        whole = FilePlan(file.header, tuple(plain), file.size)
        await self._inner.read_part(whole, FilePart(part.begin, part.end, 0, len(plain)), slot)

    async def _compute(self, leaf: int, blocks: _Blocks, slot: Slot) -> None:
        """Read the elements of blocks, and write the requested bytes of the blocks to a slot."""
        nbytes = blocks.number * BLOCK * 4
        async with self._memory.slot(nbytes + blocks.number * BLOCK_BYTES) as scratch:
            file = FilePlan(b"", (Extent(leaf, 0, nbytes, blocks.first * BLOCK * 4),), nbytes)
            await self._inner.read_part(file, FilePart(0, nbytes, 0, 1), scratch)
            await in_thread(self._round, leaf, blocks, scratch, slot)

    def _round(self, leaf: int, blocks: _Blocks, scratch: Slot, slot: Slot) -> None:
        nbytes = blocks.number * BLOCK * 4
        source = scratch.tensor[:nbytes].view(torch.float32).view(blocks.number, BLOCK)
        target = scratch.tensor[nbytes : nbytes + blocks.number * BLOCK_BYTES]
        try:
            gguf.quantise(source, target.view(blocks.number, BLOCK_BYTES))
        except ValueError as error:
            raise UnsupportedFormatError(
                f"{self._inner.leaves[leaf].path}: {error}; exclude it, or write float16"
            ) from error
        slot.tensor[blocks.at : blocks.at + blocks.length] = target[blocks.skip : blocks.skip + blocks.length]


class _Blocks(NamedTuple):
    """A run of blocks of one leaf, and the bytes of it that a part has."""

    first: int
    number: int
    skip: int
    """The bytes of the first block that are before the part."""
    at: int
    """The position in the part."""
    length: int


def _cut_blocks(extent: Extent, part: FilePart, at_once: int) -> Iterator[_Blocks]:
    """Yield the blocks of an extent that a part overlaps."""
    base = extent.begin - extent.start
    low, high = max(extent.begin, part.begin), min(extent.end, part.end)
    last = -(-(high - base) // BLOCK_BYTES)
    for first in range((low - base) // BLOCK_BYTES, last, at_once):
        count = min(at_once, last - first)
        place = base + first * BLOCK_BYTES
        begin, end = max(low, place), min(high, place + count * BLOCK_BYTES)
        yield _Blocks(first, count, begin - place, begin - part.begin, end - begin)
