"""Exports: a checkpoint as files of another format, planned by that format and written part by part."""

from __future__ import annotations

import math
import secrets
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.operation import Operation
from snapshot.errors import RestoreError, SnapshotError, UnsupportedFormatError
from snapshot.formats import torch_save
from snapshot.formats.foreign import find_root, narrow_root
from snapshot.formats.torch_save import VALUE
from snapshot.io.budget import MemoryBudget
from snapshot.io.session import Session
from snapshot.loading.open import Opened
from snapshot.manifest import entries as e
from snapshot.manifest.paths import decode_component
from snapshot.plan.layout import Extent, FilePlan
from snapshot.progress import Meter
from snapshot.reports import ConvertReport
from snapshot.save.staging import PartSource
from snapshot.save.writer import Writer
from snapshot.state.flatten import inflate_tree
from snapshot.state.leaves import Leaf
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, SAFETENSORS
from snapshot.text import listed, with_article
from snapshot.transform import target
from snapshot.transform.call import (
    Objects,
    clean_extra,
    digest_plan,
    expect_sound,
    seen_by_rank,
)
from snapshot.transform.sources import CheckpointSource, LeafReads, expect_room
from snapshot.transform.staged_files import StagedFiles
from snapshot.transform.target import Selection, Target, without_classes

# Names of tensors in files that hold only tensors: safetensors, and the dict that `snapshot.load` returns.

_RESERVED = "__metadata__"
"""The key of a safetensors header that is not a tensor."""


def name_tensors(entries: Mapping[str, Any], paths: Iterable[str]) -> dict[str, str]:
    """Return path -> name: the path's components joined with dots, without the top one if all entries share it.

    Raise RestoreError if two paths would get one name.
    """
    tops = {path.partition("/")[0] for path, entry in entries.items() if not entry.is_container}
    one = len(tops) == 1 and all(path.count("/") for path in entries if path not in tops)
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for path in paths:
        components = [decode_component(each) for each in path.split("/")]
        name = ".".join(components[1:] if one and len(components) > 1 else components)
        if name in owners or name == _RESERVED:
            raise RestoreError(f"{path} and {owners.get(name)} would both be named {name!r}: rename one of them")
        names[path] = name
        owners[name] = path
    return names


# An export is planned first, and then written by the writer of snapshots, part by part. The index is written last.

KEPT_BY_TORCH = frozenset({"parameter", "requires_grad", "order"})


class ExportPlan(msgspec.Struct):
    """The files of an export, and their contents."""

    kind: str
    leaves: list[Leaf] = []
    origins: list[Any] = []
    orders: dict[int, tuple[int, ...]] = {}
    files: list[tuple[str, FilePlan]] = []
    last: Callable[[], list[tuple[str, bytes]]] = list
    """The small files that complete the checkpoint, in order."""
    markers: tuple[str, ...] = ()
    """The files that every such checkpoint has. They are deleted before anything is replaced."""
    more: str = ""
    """A pattern for further files of a replaced checkpoint."""
    others: tuple[str, ...] = ()
    """Files of other formats that would hide this checkpoint."""
    left_out: list[str] = []
    changed: list[str] = []
    sums: dict[int, int] | None = None
    """The checksum of each leaf's bytes, if the format has any."""
    wrap: Callable[[CheckpointSource, MemoryBudget], PartSource] | None = None
    """Changes the bytes that are read, within some memory."""
    nothing: torch.Tensor = msgspec.field(default_factory=lambda: torch.empty(0, device="meta"))
    """The tensor of each leaf, whose bytes are read."""

    def leaf(self, name: str, dtype: str, shape: tuple[int, ...], origin: Any) -> int:
        """Add a leaf to write. Return its number."""
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        self.leaves.append(Leaf(name, self.nothing, dtype, shape, nbytes))
        self.origins.append(origin)
        return len(self.leaves) - 1

    def expect_filled(self) -> None:
        """Raise `SnapshotError` if a file has gaps, or a tensor that does not begin at a multiple of its elements."""
        for name, file in self.files:
            end = len(file.header)
            for extent in file.extents:
                leaf = self.leaves[extent.leaf]
                what = f"the format {self.kind}: {name}: the extent of {leaf.path}"
                if extent.begin != end:
                    raise SnapshotError(f"{what} must begin at {end}, where the one before ends, got {extent.begin}")
                if extent.begin % ITEMSIZE[leaf.dtype]:
                    size = ITEMSIZE[leaf.dtype]
                    raise SnapshotError(f"{what} must begin at a multiple of {size}, got {extent.begin}")
                end = extent.end
            if end != file.size:
                raise SnapshotError(f"the format {self.kind}: {name}: the size must be {end}, got {file.size}")

    def digest(self) -> str:
        """Return a digest of the files' headers, and of the name, type and place of each leaf in them."""
        places = [(name, extent.leaf, extent.begin, extent.end) for name, file in self.files for extent in file.extents]
        leaves = [(leaf.path, leaf.dtype, leaf.shape) for leaf in self.leaves]
        return digest_plan([*(file.header for _, file in self.files), *leaves, *places])


StandIns = dict[int, tuple[torch.Tensor, str, e.AnyTensor]]
"""Tensors without bytes in a state, with their paths and entries, by the ids of these tensors."""


class ExportRequest(NamedTuple):
    """What a format needs to plan an export, beside the checkpoint."""

    operation: Operation
    opened: Opened
    target: Target
    name: str | None
    """The name of the file, if the format is one file."""
    prepared: Any
    """What the format has read before, such as a template."""
    destination: Session
    """The storage of the folder that it writes to."""


class ArchiveLeaves:
    """The tensors of one torch archive: leaves of a plan, one after the other."""

    def __init__(self, plan: ExportPlan, cast_dtype: Callable[[str], str]) -> None:
        self._plan = plan
        self._cast_dtype = cast_dtype
        self._seen: dict[str, torch_save.AbsentTensor] = {}
        self._first = len(plan.leaves)

    @property
    def numbers(self) -> range:
        """The numbers of the leaves, until another archive begins."""
        return range(self._first, len(self._plan.leaves))

    def stand_in(self, path: str, entry: e.AnyTensor, plain: str | None = None) -> torch_save.AbsentTensor:
        """Return the placeholder of a tensor, the same for equal places. `plain`: the dtype of a contiguous one."""
        extra = clean_extra(entry) or e.PLAIN if plain is None else e.PLAIN
        key = repr(entry.places())
        dtype, shape, order = plain or self._cast_dtype(entry.dtype), tuple(entry.shape), extra.stride_order
        tied = f"{key} {dtype} {shape} {extra}" if math.prod(shape) else path
        known = self._seen.get(tied)
        if known is None:
            permuted = tuple(shape[axis] for axis in order) if order else shape
            number = self._plan.leaf(path, dtype, permuted, entry)
            if order:
                self._plan.orders[number] = order
            known = self._seen[tied] = torch_save.AbsentTensor(
                str(number - self._first), dtype, shape, order, extra.requires_grad, extra.subclass == target.PARAMETER
            )
        return known


def lay_out_archive(
    plan: ExportPlan,
    root: str,
    content: bytes,
    held: Mapping[str, bytes],
    *,
    numbers: Sequence[int],
    base: int,
    extents: list[Extent],
) -> int:
    """Lay out a torch archive at `base` in a file: a pickle, and the leaves of these numbers. Return its length."""
    members = [_member_header(plan, str(at), plan.leaves[each].nbytes, each) for at, each in enumerate(numbers)]
    members += [torch_save.ArchiveMember(key, len(data), data) for key, data in held.items()]
    identity = f"{secrets.randbelow(10**40):040d}"  # forty digits, as torch writes it
    found, size = torch_save.lay_out_archive(torch_save.wrap_storages(root, content, members, identity), zlib.crc32)
    sized = (number for number in numbers if plan.leaves[number].nbytes)
    position = base
    for each in found:
        if isinstance(each, torch_save.Frame):
            number = plan.leaf("", "uint8", (each.size,), each.make)
            nbytes = each.size
        else:
            number = next(sized)
            nbytes = plan.leaves[number].nbytes
        extents.append(Extent(number, position, position + nbytes))
        position += nbytes
    return size


class Export:
    """Rank 0's view of a checkpoint, for export to another format."""

    def __init__(self, opened: Opened, choice: Selection) -> None:
        document = opened.document
        self.source = opened
        self._document = document
        self.choice = choice
        self.objects = Objects(opened, allow_pickle=choice.allow_pickle, verify=choice.verify)
        view = seen_by_rank(document, choice.select, choice.exclude, choice.rename)
        self.entries = view.entries
        expect_sound(self.entries, document)
        self._gone = [f"{path}: of a rank other than 0" for path in view.gone]

    # Tensors by name: safetensors, GGUF

    def add_named(
        self,
        plan: ExportPlan,
        tensors: Sequence[tuple[str, str, e.AnyTensor, str]],
        dtypes: Collection[str] = SAFETENSORS,
    ) -> None:
        """Add the leaves of a file of tensors: name, path, entry and dtype. `dtypes`: those that the format has."""
        refused = [f"{path}: {dtype}" for _, path, _, dtype in tensors if dtype not in dtypes]
        if refused:
            raise UnsupportedFormatError(
                f"{self.source.url}: {plan.kind} does not support these dtypes; cast or exclude them:{listed(refused)}"
            )
        for name, _, entry, dtype in tensors:
            plan.leaf(name, dtype, tuple(entry.shape), entry)

    def named_tensors(self, plan: ExportPlan) -> Iterator[tuple[str, str, e.AnyTensor, str]]:
        """Yield name, path, entry and new dtype of each tensor, for a format that has only tensors."""
        names = name_tensors(self.entries, (path for path, entry in self.entries.items() if entry.is_tensor))
        for path, entry in self.entries.items():
            if entry.is_tensor:
                plan.changed += target.tensor_changes(path, entry)
                yield names[path], path, entry, self.choice.cast_dtype(entry.dtype)
            elif e.is_leaf(entry):
                plan.left_out.append(f"{path}: {with_article(entry.type)}")
        plan.changed += target.memory_changes(self.entries, lambda *_: False)

    # torch.save

    def changes_in_torch(self) -> Iterator[str]:
        for path, entry in self.entries.items():
            yield from target.array_changes(path, entry)
            if entry.is_tensor:
                yield from target.tensor_changes(path, entry, KEPT_BY_TORCH)
        yield from target.memory_changes(self.entries, lambda *_: True)

    def add_state(self, plan: ExportPlan, name: str, value: Any, stands: StandIns, dtype: str | None = None) -> None:
        """Add a file of torch.save with a part of a state. `dtype`: of its tensors, which are then plain."""
        leaves = ArchiveLeaves(plan, self.choice.cast_dtype)

        def absent(tensor: Any) -> torch_save.AbsentTensor | None:
            if isinstance(tensor, torch_save.LaterTensor):
                path, entry = tensor.path, tensor.entry
            elif id(tensor) in stands:
                _, path, entry = stands[id(tensor)]
            else:
                return None
            return leaves.stand_in(path, entry, dtype)

        content, held = torch_save.pickle_state(value, absent)
        root = name.rpartition("/")[2].partition(".")[0] or "archive"
        extents: list[Extent] = []
        size = lay_out_archive(plan, root, content, held, numbers=leaves.numbers, base=0, extents=extents)
        plan.files.append((name, FilePlan(b"", tuple(extents), size)))

    def lose_classes(self) -> list[str]:
        """Replace objects of other classes by plain values. Return a line for each lost class."""
        self.entries, lines = without_classes(self.entries)
        return lines

    def state(self, tensor: Callable[[str, Any], Any]) -> Any:
        """Return the nested state, with placeholders for its tensors."""
        values = self.objects.read(
            {path: entry for path, entry in self.entries.items() if not (entry.is_container or entry.is_tensor)}
        )
        values |= {path: tensor(path, entry) for path, entry in self.entries.items() if entry.is_tensor}
        bare = find_root(self._document) is None and self._document.format == "torch.save"
        if bare and self.entries.keys() == {VALUE}:
            return values[VALUE]  # it was saved without a dict around it
        root = narrow_root(self._document, dict.fromkeys(path.partition("/")[0] for path in self.entries))
        below = {f"0/{path}": entry for path, entry in self.entries.items()}
        return inflate_tree("0", {"0": root, **below}, {f"0/{path}": value for path, value in values.items()})

    def stand_in_state(self) -> tuple[Any, StandIns]:
        """Return the nested state, with tensors that have no bytes."""
        stands: StandIns = {}

        def stand(path: str, entry: e.AnyTensor) -> torch.Tensor:
            made = torch.empty(entry.shape, dtype=BY_NAME[self.choice.cast_dtype(entry.dtype)], device="meta")
            stands[id(made)] = made, path, entry
            return made

        return self.state(stand), stands

    def stand_in_dict(self, plan: ExportPlan) -> tuple[dict[Any, Any], StandIns]:
        """Return the same for a format that has only dicts."""
        state, stands = self.stand_in_state()
        if isinstance(state, dict):
            return state, stands
        plan.changed.append(f"the state: the {type(state).__name__} becomes the value of a dict, under {VALUE!r}")
        return {VALUE: state}, stands

    # All

    async def write(
        self,
        plan: ExportPlan,
        target: Session,
        meter: Meter,
        *,
        overwrite: bool,
        exchange: Exchange,
        make_source: Callable[..., CheckpointSource] = CheckpointSource,
    ) -> ConvertReport:
        """Write the planned files. Each rank writes a share of them."""
        outputs = StagedFiles(
            target.storage,
            [(name, file.size) for name, file in plan.files],
            plan.markers,
            plan.others,
            plan.more,
            exchange=exchange,
            contents="" if exchange.alone else plan.digest(),
        )
        read = self._document.files.keys() & {*outputs.names, *plan.markers}
        if read and not target.storage.capabilities.renames and self.source.storage.url == target.storage.url:
            raise ValueError(f"{target.url}: holds the source file {min(read)}; convert to another path")
        expect_room(self._document, plan.leaves, plan.origins)
        await outputs.begin(overwrite=overwrite)
        files = [plan.files[number][1] for number in outputs.share]
        own = {extent.leaf for file in files for extent in file.extents}
        reader = make_source(
            self.source,
            plan.leaves,
            [origin if number in own else b"" for number, origin in enumerate(plan.origins)],
            LeafReads(self.choice.verify, plan.orders, plan.sums),
        )
        source: PartSource = reader
        if plan.wrap is not None:
            source = plan.wrap(reader, self.source.budget.set_aside(self.source.budget.total // 4))
        meter.begin(sum(file.size for file in files))
        writer = Writer(target.storage, source, target.budget, meter.wrote, wanted_part=target.settings.part_bytes)
        await outputs.write(writer, files, plan.last)
        tensors = [
            leaf for leaf, origin in zip(plan.leaves, plan.origins, strict=True) if isinstance(origin, e.AnyTensor)
        ]
        names = (*outputs.names, *(name for name, _ in plan.last()))
        nbytes = sum(file.size for _, file in plan.files)
        left_out = (*plan.left_out, *self._gone)
        return ConvertReport(plan.kind, len(tensors), nbytes, left_out, names, changed=tuple(plan.changed))


def _member_header(plan: ExportPlan, name: str, size: int, number: int) -> torch_save.ArchiveMember:
    """Return an archive member with the bytes of a leaf."""
    sums = plan.sums
    assert sums is not None
    return torch_save.ArchiveMember(name, size, sum=lambda: sums.get(number, 0))
