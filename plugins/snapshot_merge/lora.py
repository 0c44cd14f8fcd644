"""LoRA: an adapter of PEFT merged into the weights of a checkpoint, part by part."""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.operation import Operation, operation
from snapshot.errors import RestoreError, SnapshotError, StorageError
from snapshot.formats.foreign import is_absence
from snapshot.io.arena import Slot
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.url import Location
from snapshot.loading.mapping import map_checkpoint
from snapshot.loading.open import Opened, expect_files
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, find_locations
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.rank_view import make_rank_view, suggest_names
from snapshot.maps.tensor_map import TensorMap
from snapshot.options import expect_options, with_options
from snapshot.plan.layout import FilePart, FilePlan
from snapshot.reports import ConvertReport
from snapshot.snapshot import Snapshot
from snapshot.state.leaves import Leaf
from snapshot.tensors.geometry import Factor, Grid, position_of
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.text import listed
from snapshot.transform.call import expect_checksums, expect_sound, open_sources, selected_locations
from snapshot.transform.convert import write_checkpoint
from snapshot.transform.sources import CheckpointSource, LeafReads, reads_ranges
from snapshot.transform.target import Selection, Target
from snapshot_merge import peft
from snapshot_merge.merging import expect_mergeable, key_of, open_origins, spellings
from snapshot_merge.mixing import InputRun, MixedSource, Piece
from snapshot_merge.options import MergeOptions
from snapshot_merge.peft import AdapterPair, LoraConfig

# The plan: the change of each tensor of the base.

_FLOATS = ("float32", "float16", "bfloat16", "float64")


class Product(NamedTuple):
    """A tensor that is added: the product of two matrices, times a scale."""

    left: AnyTensor
    """Its elements are rows of `rank` elements: one for each row of the result."""
    right: AnyTensor
    """Its elements are `rank` rows, as long as those of the result."""
    rows: int
    rank: int
    columns: int
    scale: float
    magnitude: AnyTensor | None = None
    """For DoRA: the length that each row of the result gets, or each column if it is turned."""
    turned: bool = False
    start: AnyTensor | None = None
    """The values that it is added to, if the adapter has them: in place of those of the base."""


Change = Product | AnyTensor
"""A product that is added, or a tensor that replaces another one."""


def plan_lora(base: Opened, adapter: Opened, config: LoraConfig) -> dict[str, Change]:
    """Return the changes by `key_of` the tensor of the base. Raise RestoreError with all that does not fit."""
    factors = _tensors_of(adapter.document)
    names = peft.sort_names(factors, adapter.session.url)
    held = _tensors_of(base.document)
    paths: dict[str, set[str]] = defaultdict(set)
    known = make_rank_view(base.document.manifest, 0, base.document.world_size, 1).entries
    for path, entry in known.items():
        if entry.is_tensor:
            for name in spellings(path):
                paths[name].add(path)
    misfits: list[str] = []
    changes: dict[str, tuple[str, Change]] = {}

    def find(name: str) -> AnyTensor | None:
        found = sorted(paths.get(name, ()))
        if len(found) == 1:
            return known[found[0]]  # type: ignore[no-any-return]
        text = f"may be {' or '.join(found)}" if found else f"is missing; {suggest_names(name, held)}"
        misfits.append(f"{name}: {text} in {base.session.url}")
        return None

    def add(name: str, entry: AnyTensor, change: Change) -> None:
        owner, _ = changes.setdefault(key_of(entry) or name, (name, change))
        if owner != name:
            misfits.append(f"{name}: is the same tensor as {owner}, which is changed, too")

    for module, pair in names.pairs.items():
        name = f"{module}.weight"
        entry = find(name)
        if config.use_dora != (pair.magnitude is not None):
            misfits.append(f"{name}: must have a lora_magnitude_vector if, and only if, use_dora is set")
        elif entry is not None:
            a, b = factors[pair.a], factors[pair.b]
            magnitude = factors.get(pair.magnitude) if pair.magnitude is not None else None
            made = _make_product(
                entry,
                a,
                b,
                config.scale_of(module, a.shape[0] if a.shape else 1),
                pair=pair,
                turned=config.fan_in_fan_out,
                magnitude=magnitude,
                start=factors.get(pair.saved) if pair.saved is not None else None,
            )
            if isinstance(made, str):
                misfits.append(f"{name}: {made}")
            else:
                add(name, entry, made)
    misfits += _list_ambiguous(names.pairs, factors, dict(changes.values()), config)
    for name, source in names.replaced.items():
        entry = find(name)
        if entry is not None and tuple(entry.shape) != tuple(factors[source].shape):
            misfits.append(f"{name}: has shape {list(entry.shape)}, but {list(factors[source].shape)} in the adapter")
        elif entry is not None:
            add(name, entry, factors[source])
    if misfits:
        raise RestoreError(f"{adapter.session.url}: the adapter does not fit:{listed(misfits)}", misfits)
    return {key: change for key, (_, change) in changes.items()}


def _list_ambiguous(
    pairs: Mapping[str, AdapterPair], factors: Mapping[str, AnyTensor], made: Mapping[str, Change], config: LoraConfig
) -> list[str]:
    """Return what is wrong with square weights: they are turned by a field that PEFT stores for the last module only.

    The shapes of other weights may contradict this field.
    """
    squares, odd = [], []
    for module, pair in pairs.items():
        name = f"{module}.weight"
        change = made.get(name)
        if not isinstance(change, Product) or pair.embedding or len(factors[pair.a].shape) != 2:
            continue
        if change.rows == change.columns:
            squares.append(name)
        elif change.turned != config.fan_in_fan_out:
            odd.append(name)
    return [
        f"{name}: is square, so its shape does not say whether the inputs come first; fan_in_fan_out is "
        f"{str(config.fan_in_fan_out).lower()}, which is wrong for {odd[0]}. PEFT stores it only for the last module. "
        "Split the adapter in two by its right value, and merge one after the other"
        for name in squares
        if odd
    ]


def _tensors_of(document: Document) -> dict[str, AnyTensor]:
    """Return the tensors by their names: the parts of a path joined with dots, without the first one."""
    entries = make_rank_view(document.manifest, 0, document.world_size, 1).entries
    return {spellings(path)[1]: entry for path, entry in entries.items() if entry.is_tensor}


def _make_product(
    entry: AnyTensor,
    a: AnyTensor,
    b: AnyTensor,
    scale: float,
    *,
    pair: AdapterPair,
    turned: bool,
    magnitude: AnyTensor | None,
    start: AnyTensor | None,
) -> Product | str:
    """Return the product that a module's weight gets, or the reason why the shapes do not fit.

    `turned`: a square weight has the inputs first.
    """
    shape, rank = tuple(entry.shape), (a.shape[0] if a.shape else 0)
    wrong = f"has shape {list(shape)}, but the factors have {list(a.shape)} and {list(b.shape)}"
    if start is not None:
        wrong += f", and the saved base layer {start.dtype}{list(start.shape)}"
    if entry.dtype not in _FLOATS or a.dtype not in _FLOATS or a.dtype != b.dtype:
        return f"dtypes must be floating point, and the same for both factors: {entry.dtype}, {a.dtype}, {b.dtype}"
    if not rank or len(b.shape) < 2 or len(a.shape) < 2 or b.shape[1] != rank or math.prod(b.shape[2:]) != 1:
        return wrong
    straight, swapped = (b.shape[0], *a.shape[1:]), (*a.shape[1:], b.shape[0])
    flat = len(a.shape) == 2
    turn = flat and (pair.embedding or (turned and shape == swapped) or shape != straight)
    fits = start is None or (tuple(start.shape) == shape and start.dtype in _FLOATS)
    if not fits or shape != (swapped if turn else straight):
        return wrong
    if magnitude is not None:
        if pair.embedding or not flat:
            return "DoRA of an embedding or a convolution cannot be merged"
        if tuple(magnitude.shape) != (b.shape[0],) or magnitude.dtype not in _FLOATS:
            return f"the magnitudes of DoRA must be {b.shape[0]} numbers, got {magnitude.dtype}{list(magnitude.shape)}"
    left, right = (_transpose(a), _transpose(b)) if turn else (b, a)
    return Product(left, right, shape[0], rank, math.prod(shape[1:]), scale, magnitude, turn, start)


def _transpose(entry: AnyTensor) -> AnyTensor:
    rows, columns = entry.shape[0], entry.shape[1]
    grid = Grid((0, 0), (0, 0), (Factor(columns, (1, 1), (0, 1)), Factor(rows, (0, 1), (1, 1))))
    return e.MappedTensorEntry(entry.dtype, (columns, rows), [e.MappedPart(entry, grid)])  # type: ignore[arg-type]


def _tensors_in(change: Change) -> dict[str, AnyTensor]:
    """Return the tensors of the adapter that a change needs."""
    if not isinstance(change, Product):
        return {"whole": change}
    found = {"a": change.left, "b": change.right, "magnitude": change.magnitude, "start": change.start}
    return {name: entry for name, entry in found.items() if entry is not None}


# The changed tensors as one source of parts.

_ROWS = 32
"""Rows of a product that are computed at once, from a multiple of their number on: so parts do not change the bits."""
_MEASURED = 1 << 20
"""Elements whose lengths are measured at once."""
_AT_ONCE = 1 << 20
"""Maximum number of elements that are computed at once, if a row is that long."""


class LoraSource(MixedSource):
    """The leaves of the base, with the changes of an adapter.

    As in PEFT, a product is computed in float32, or in float64 if the base has it. It is multiplied by the scale and
    added to the base, and the sum is rounded to the dtype of the base.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        origins: Sequence[Any],
        how: LeafReads,
        *,
        base: Opened,
        adapter: Opened,
        changes: Mapping[str, Change],
        scratch: MemoryBudget,
    ) -> None:
        """`scratch`: the memory for elements of both. See `CheckpointSource` for the others."""
        self._changes = [changes.get(key_of(each)) if isinstance(each, AnyTensor) else None for each in origins]
        self._dtypes = [origin.dtype if isinstance(origin, AnyTensor) else "uint8" for origin in origins]
        sources = []
        self._factors: dict[int, torch.Tensor] = {}
        """For leaves with DoRA, the factor of each row, or of each column if it is turned."""
        self._measuring = asyncio.Lock()
        for number in range(5):
            own = [self._input(number, change, origin) for change, origin in zip(self._changes, origins, strict=True)]
            stored = [
                leaf if entry is None else _leaf_of(leaf, entry, whole=number in (1, 2, 4))
                for leaf, entry in zip(leaves, own, strict=True)
            ]
            side = base if number == 0 else adapter
            orders = how.orders if number in (0, 3) else {}
            sources.append(CheckpointSource(side, stored, own, LeafReads(how.verify, orders)))
        super().__init__(base, leaves, origins, how, sources=sources, scratch=scratch)

    @staticmethod
    def _input(number: int, change: Change | None, origin: Any) -> AnyTensor | None:
        """Return the tensor of a source: the base, both factors, the replacement, and the magnitudes."""
        if isinstance(change, Product):
            return (origin, change.left, change.right, change.start, change.magnitude)[number]
        return change if number == 3 else None

    def is_mixed(self, leaf: int) -> bool:
        return self._changes[leaf] is not None

    def inputs_of(self, piece: Piece) -> list[InputRun]:
        change = self._changes[piece.leaf]
        none = InputRun(0, 0, 1)
        if not isinstance(change, Product):
            assert change is not None
            return [none, none, none, InputRun(piece.first, piece.count, ITEMSIZE[change.dtype]), none]
        first, last = self._rows(piece, change)
        last, itemsize = min(last, change.rows), ITEMSIZE[change.left.dtype]
        start = change.start
        return [
            none if start is not None else InputRun(piece.first, piece.count, ITEMSIZE[self._dtypes[piece.leaf]]),
            InputRun(first * change.rank, (last - first) * change.rank, itemsize),
            InputRun(0, change.rank * change.columns, itemsize),
            none if start is None else InputRun(piece.first, piece.count, ITEMSIZE[start.dtype]),
            none
            if change.magnitude is None
            else InputRun(0, change.magnitude.shape[0], ITEMSIZE[change.magnitude.dtype]),
        ]

    def _begin(self, piece: Piece) -> int:
        """Return the first element of a piece in the whole tensor: a leaf may be a box that is one range of it."""
        leaf = self.leaves[piece.leaf]
        whole = 0 if leaf.whole is None else position_of(leaf.origin or (0,) * len(leaf.shape), leaf.whole.shape)
        return whole + piece.first

    def _rows(self, piece: Piece, product: Product) -> tuple[int, int]:
        """Return the rows that are computed for a piece: whole blocks. The last one may end after the tensor."""
        begin, block = self._begin(piece), _block_of(product)
        width = block * product.columns
        return begin // width * block, -(-(begin + piece.count) // width) * block

    def mix(self, piece: Piece, held: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        change = self._changes[piece.leaf]
        if not isinstance(change, Product):
            assert change is not None
            target.copy_(held[3].view(BY_NAME[change.dtype]).to(BY_NAME[self._dtypes[piece.leaf]]))
            return
        factors = self._factors.get(piece.leaf)
        for low, high, base, product in self._summands(piece, change, held):
            total = base.clone()
            if factors is None:
                total += product
            else:
                line = torch.arange(low, high)
                line = line % change.columns if change.turned else line // change.columns
                total = (factors[line] * (base + product)).to(base.dtype)
            target[low - self._begin(piece) : high - self._begin(piece)].copy_(total)

    def _summands(
        self, piece: Piece, change: Product, held: Sequence[torch.Tensor]
    ) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """Yield runs of elements of the whole tensor, with those of the base and of the product."""
        first, last = self._rows(piece, change)
        begin, block, columns = self._begin(piece), _block_of(change), change.columns
        base = held[0].view(BY_NAME[self._dtypes[piece.leaf]])
        if change.start is not None:
            base = held[3].view(BY_NAME[change.start.dtype]).to(base.dtype)
        wide = torch.promote_types(base.dtype, torch.float32)
        stored = BY_NAME[change.left.dtype]
        left = torch.zeros(last - first, change.rank, dtype=wide)
        left.view(-1)[: held[1].numel() // stored.itemsize] = held[1].view(stored)
        right = held[2].view(stored).view(change.rank, columns).to(wide)
        for row in range(first, last, block):
            low, high = max(row * columns, begin), min((row + block) * columns, begin + piece.count)
            if low < high:
                product = (left[row - first : row - first + block] @ right).mul_(change.scale).view(-1)
                yield low, high, base[low - begin : high - begin], product[low - row * columns : high - row * columns]

    # DoRA: each row is scaled to a given length, so all of it is read before any of it is written.

    async def read_part(self, file: FilePlan, part: FilePart, slot: Slot) -> None:
        """Mix a part into a slot. The lengths of the rows that it has are measured first."""
        for extent in file.extents[part.first : part.last]:
            change = self._changes[extent.leaf]
            if isinstance(change, Product) and change.magnitude is not None:
                async with self._measuring:
                    if extent.leaf not in self._factors:
                        self._factors[extent.leaf] = await self._measure(extent.leaf, change)
        await super().read_part(file, part, slot)

    async def _measure(self, leaf: int, change: Product) -> torch.Tensor:
        """Return the factors of all rows: the magnitudes, divided by the lengths of the sums."""
        wide = torch.promote_types(BY_NAME[self._dtypes[leaf]], torch.float32)
        columns, block = change.columns, _block_of(change)
        lengths = torch.zeros(columns if change.turned else change.rows, dtype=torch.float64 if change.turned else wide)
        magnitudes = torch.empty(len(lengths), dtype=wide)

        def add(piece: Piece, held: Sequence[torch.Tensor]) -> None:
            for low, high, base, product in self._summands(piece, change, held):
                rows = (base + product).view(-1, columns)
                if change.turned:
                    lengths.add_(rows.to(torch.float64).square_().sum(0))
                else:
                    lengths[low // columns : high // columns] = torch.linalg.norm(rows, dim=1)
            assert change.magnitude is not None
            magnitudes.copy_(held[4].view(BY_NAME[change.magnitude.dtype]))

        step = max(1, _MEASURED // (block * columns)) * block
        offset = self._begin(Piece(leaf, 0, 0, 0))
        for row in range(0, change.rows, step):
            count = min(step, change.rows - row) * columns
            await self._with_inputs([Piece(leaf, row * columns - offset, count, 0)], add)
        return magnitudes / (lengths.sqrt_().to(wide) if change.turned else lengths)


def _block_of(product: Product) -> int:
    """Return the rows of a product that are computed at once."""
    return max(2, min(_ROWS, _AT_ONCE // max(1, product.columns)))


def _leaf_of(leaf: Leaf, entry: AnyTensor, *, whole: bool) -> Leaf:
    """Return the leaf for a tensor of a source: with `whole`, all of it, even if the leaf is a box."""
    if not whole:
        return msgspec.structs.replace(leaf, dtype=entry.dtype)
    nbytes = math.prod(entry.shape) * ITEMSIZE[entry.dtype]
    return Leaf(leaf.path, torch.empty(0, device="meta"), entry.dtype, tuple(entry.shape), nbytes)


# The merge.


def add_adapter(
    operation: Operation, origins: tuple[Location, Location], target: Target, choice: Selection
) -> ConvertReport:
    """Write a base with an adapter. Memory: a quarter for reading, a quarter for both, and half for writing."""
    exchange = operation.exchange
    expect_mergeable(target, origins)
    sessions = open_origins(operation, origins)
    arguments = {"base": origins[0].url, "lora": origins[1].url, **target.agreed(), **choice.arguments()}
    base, adapter = open_sources(exchange, "merge", arguments, sessions)
    base = map_checkpoint(base, choice.map)
    changes = plan_lora(base, adapter, run(_read_config(adapter)))
    needed = {
        f"{number}/{name}": entry
        for number, change in enumerate(changes.values())
        for name, entry in _tensors_in(change).items()
    }
    expect_sound(needed, adapter.document)
    run(expect_files(base, selected_locations(base.document, choice.select, choice.exclude)))
    run(expect_files(adapter, find_locations(needed, adapter.document.files)))
    if choice.verify:
        for side in (base, adapter):
            expect_checksums(exchange, side)
    scratch = MemoryBudget(operation.part(4) or base.budget.total)

    def make_source(opened: Opened, *leaves: Any) -> LoraSource:
        return LoraSource(*leaves, base=base, adapter=adapter, changes=changes, scratch=scratch)

    document, changed = _without_orders(base.document, changes)
    report = write_checkpoint(
        operation, base.with_document(document), choice, target, make_source=make_source, splits=reads_ranges
    )
    report = replace(report, changed=(*report.changed, *changed))
    return operation.done(report, "merged", bytes=report.nbytes)


def _without_orders(document: Document, changes: dict[str, Change]) -> tuple[Document, list[str]]:
    """Return the document with its changed tensors in C order, since products are computed row by row.

    Also return a line for each of them. Their changes get new keys.
    """
    manifest: dict[str, Any] = dict(document.manifest)
    lines = []
    for path, entry in manifest.items():
        if entry.extra is None or entry.extra.stride_order is None:
            continue
        change = changes.get(key_of(entry))
        if isinstance(change, Product):
            made = msgspec.structs.replace(entry, extra=msgspec.structs.replace(entry.extra, stride_order=None))
            manifest[path] = made
            changes[key_of(made)] = change
            lines.append(f"{path.partition('/')[2]}: the memory layout becomes contiguous")
    return msgspec.structs.replace(document, manifest=manifest), lines


async def _read_config(adapter: Opened) -> LoraConfig:
    where = adapter.storage.url.join(peft.CONFIG)
    try:
        data = await adapter.storage.get(peft.CONFIG, limit=adapter.settings.manifest_bytes)
    except StorageError as error:
        if not is_absence(adapter.storage, error):
            raise
        raise SnapshotError(f"{where}: is missing, so {adapter.url} is not an adapter of PEFT") from error
    return peft.parse_config(data, where)


@with_options(MergeOptions)
def merge_lora(
    base: str | os.PathLike[str] | Snapshot,
    adapter: str | os.PathLike[str] | Snapshot,
    target: str | os.PathLike[str] | Target,
    *,
    map: TensorMap | None = None,
    select: Sequence[str] = (),
    exclude: Sequence[str] = (),
    options: MergeOptions | None = None,
) -> ConvertReport:
    """Add a LoRA of PEFT to the weights of its base model, within the memory budget.

    The result has the structure of the base model. docs/guides/weights.md describes the arithmetic, and what is
    refused.

    Args:
        base: The base model: the path of anything that `Snapshot` opens, or a `Snapshot`.
        adapter: The folder of the adapter, or a `Snapshot` of it.
        target: The destination: a path whose suffix tells the format, or a `Target` with its format and options.
        map: A map for the base model, such as one that dequantises its weights. The adapter has the new names.
        select: Globs over `<key>/<logical path>` of the base model to keep; all by default.
        exclude: Globs to leave out.
        options: The dtype, verification, memory, progress and ranks, as `MergeOptions`.

    Raises:
        RestoreError: The adapter does not fit. `mismatches` lists every reason; nothing was written.
        SnapshotExistsError: The destination exists; nothing was written.
        CorruptSnapshotError: A source is damaged; nothing was committed.
        UnsupportedFormatError: The format cannot hold a tensor, or the adapter is of a kind that cannot be merged;
            nothing was written.
    """
    options = options or MergeOptions()
    expect_options(options, MergeOptions)
    model, made = Snapshot.of(base), Target.of(target)
    choice = Selection(select, exclude, None, options.dtype, options.verify, model.allow_pickle, map)
    url = made.place.url
    with operation(
        "merge",
        url,
        pg=model.pg,
        ranks=options.ranks,
        budget=options.memory_budget_bytes,
        progress=options.progress,
    ) as op:
        return add_adapter(op, (model.location, Snapshot.of(adapter).location), made, choice)
