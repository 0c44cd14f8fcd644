"""Conversion, by `convert_checkpoint`: a checkpoint written as a snapshot, or as files of another format."""

from __future__ import annotations

import json
import math
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.operation import Operation
from snapshot.errors import (
    RestoreError,
    UnsupportedFormatError,
)
from snapshot.formats import dcp, hugging_face, registry, torch_save
from snapshot.formats.dcp import archive_object, encode_metadata, flatten_state
from snapshot.formats.foreign import find_root, narrow_root
from snapshot.formats.torch_save import VALUE
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, Location
from snapshot.loading.mapping import map_checkpoint
from snapshot.loading.open import Opened, expect_files
from snapshot.manifest import document
from snapshot.manifest import entries as e
from snapshot.manifest.entries import AnyTensor
from snapshot.manifest.paths import decode_component
from snapshot.plan.layout import Extent, FilePlan, group_in_order, plan_exact_file
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
    expect_checksums,
    expect_common_place,
    expect_sound,
    is_leaf_value,
    open_sources,
    places_of,
    seen_by_rank,
    select_entries,
    selected_locations,
)
from snapshot.transform.sources import CheckpointSource, expect_room, reads_ranges
from snapshot.transform.staged_files import StagedFiles
from snapshot.transform.target import (
    OWN,
    Selection,
    Target,
    expand_chosen_trees,
    suffix_of,
    without_classes,
    write_as_snapshot,
)

# Names of tensors in files that hold only tensors: safetensors, and the dict that `snapshot.load` returns.

_RESERVED = "__metadata__"
"""The key of a safetensors header that is not a tensor."""


def name_tensors(entries: Mapping[str, Any], paths: Iterable[str]) -> dict[str, str]:
    """Return path -> name: the path's components joined with dots, without the top one if all entries share it.

    Raise RestoreError if two paths would get one name.
    """
    tops = {path.partition("/")[0] for path, entry in entries.items() if not isinstance(entry, e.Container)}
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


# Export to other formats: safetensors (one file, or several with an index), torch.save and DCP.
#
# An export is planned first, and then written by the writer of snapshots, part by part. The index is written last.

_KEPT_BY_TORCH = frozenset({"parameter", "requires_grad", "order"})
DCP_ALIGNMENT = 64
_NARROW = re.compile("u?int[1-7]")
"""Dtypes of less than a byte, which torch cannot copy when DCP loads them."""


class Plan(msgspec.Struct):
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

    def digest(self) -> str:
        """Return a digest of the files' headers, and of the name, type and place of each leaf in them."""
        places = [(name, extent.leaf, extent.begin, extent.end) for name, file in self.files for extent in file.extents]
        leaves = [(leaf.path, leaf.dtype, leaf.shape) for leaf in self.leaves]
        return digest_plan([*(file.header for _, file in self.files), *leaves, *places])


StandIns = dict[int, tuple[torch.Tensor, str, e.AnyTensor]]
"""Tensors without bytes in a state, with their paths and entries, by the ids of these tensors."""


class Request(NamedTuple):
    """What a plugin's format needs to plan an export, beside the checkpoint."""

    operation: Operation
    opened: Opened
    target: Target
    name: str | None
    """The name of the file, if the format is one file."""
    prepared: Any
    """What the format has read before, such as a template."""


class _Nested(msgspec.Struct):
    """An object with tensors as one archive in DCP: its pickle, and the numbers of its leaves."""

    content: bytes
    held: dict[str, bytes]
    numbers: range


class Export:
    """Rank 0's view of a checkpoint, for export to another format."""

    def __init__(self, opened: Opened, choice: Selection) -> None:
        document = opened.document
        self.source = opened
        self._document = document
        self.choice = choice
        self._tied: dict[str, torch_save.AbsentTensor] = {}
        """The placeholders of tensors that were seen in the present archive."""
        self._first = 0
        """The number of the first leaf in the present archive."""
        self.objects = Objects(opened, allow_pickle=choice.allow_pickle, verify=choice.verify)
        view = seen_by_rank(document, choice.select, choice.exclude, choice.rename)
        self.entries = view.entries
        expect_sound(self.entries, document)
        self._gone = [f"{path}: of a rank other than 0" for path in view.gone]

    # Safetensors

    def safetensors(self, name: str | None, shard: int) -> Plan:
        """Plan one file of this name, or a folder in Hugging Face's layout."""
        plan = Plan("safetensors")
        self.add_named(plan, list(self.named_tensors(plan)))
        sizes = [leaf.nbytes for leaf in plan.leaves]
        if name is not None:
            plan.files.append((name, plan_exact_file(plan.leaves, range(len(sizes)))))
            return plan
        groups = group_in_order(sizes, shard)
        plan.markers = (hugging_face.INDEX, hugging_face.ALONE)
        plan.others = (document.METADATA, dcp.METADATA)
        plan.more = r"model-\d{5}-of-\d{5}\.safetensors"
        if len(groups) == 1:
            plan.files.append((hugging_face.ALONE, plan_exact_file(plan.leaves, groups[0])))
            return plan
        located = {}
        for number, group in enumerate(groups, 1):
            where = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            plan.files.append((where, plan_exact_file(plan.leaves, group)))
            located.update({plan.leaves[index].path: where for index in group})
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": located}
        plan.last = lambda: [(hugging_face.INDEX, json.dumps(index, indent=2).encode())]
        return plan

    def add_named(self, plan: Plan, tensors: Sequence[tuple[str, str, e.AnyTensor, str]]) -> None:
        """Add the leaves of a file of safetensors: name, path, entry and dtype."""
        refused = [f"{path}: {dtype}" for _, path, _, dtype in tensors if dtype not in SAFETENSORS]
        if refused:
            raise UnsupportedFormatError(
                f"{self.source.url}: safetensors does not support these dtypes; cast or exclude them:{listed(refused)}"
            )
        for name, _, entry, dtype in tensors:
            plan.leaf(name, dtype, tuple(entry.shape), entry)

    def named_tensors(self, plan: Plan) -> Iterator[tuple[str, str, e.AnyTensor, str]]:
        """Yield name, path, entry and new dtype of each tensor, for a format that has only tensors."""
        names = name_tensors(
            self.entries, (path for path, entry in self.entries.items() if isinstance(entry, e.TENSORS))
        )
        for path, entry in self.entries.items():
            if isinstance(entry, e.TENSORS):
                plan.changed += target.tensor_changes(path, entry)
                yield names[path], path, entry, self.choice.cast_dtype(entry.dtype)
            elif isinstance(entry, (e.TensorPartsEntry, e.NDArrayEntry)) or self._is_odd(entry):
                plan.left_out.append(f"{path}: {with_article(entry.type)}")
        plan.changed += target.memory_changes(self.entries, lambda *_: False)

    def _is_odd(self, entry: e.Entry) -> bool:
        return not isinstance(entry, e.Container) or entry.width == 0

    # torch.save

    def torch_file(self, name: str) -> Plan:
        """Plan one file in the format of torch.save."""
        plan = Plan("torch", sums={})
        plan.changed += self.changes_in_torch()
        plan.left_out += self.lose_classes()
        self.add_state(plan, name, self._state(torch_save.LaterTensor), {})
        return plan

    def changes_in_torch(self) -> Iterator[str]:
        for path, entry in self.entries.items():
            yield from target.array_changes(path, entry)
            if isinstance(entry, e.TENSORS):
                yield from target.tensor_changes(path, entry, _KEPT_BY_TORCH)
        yield from target.memory_changes(self.entries, lambda *_: True)

    def add_state(self, plan: Plan, name: str, value: Any, stands: StandIns, dtype: str | None = None) -> None:
        """Add a file of torch.save with a part of a state. `dtype`: of its tensors, which are then plain."""
        self._begin_archive(plan)

        def absent(tensor: Any) -> torch_save.AbsentTensor | None:
            if isinstance(tensor, torch_save.LaterTensor):
                path, entry = tensor.path, tensor.entry
            elif id(tensor) in stands:
                _, path, entry = stands[id(tensor)]
            else:
                return None
            return self._absent(plan, path, entry, dtype)

        content, held = torch_save.pickle_state(value, absent)
        root = name.rpartition("/")[2].partition(".")[0] or "archive"
        extents: list[Extent] = []
        numbers = range(self._first, len(plan.leaves))
        size = self._archive(plan, root, content, held, numbers=numbers, base=0, extents=extents)
        plan.files.append((name, FilePlan(b"", tuple(extents), size)))

    def _begin_archive(self, plan: Plan) -> None:
        self._tied = {}
        self._first = len(plan.leaves)

    def _archive(
        self,
        plan: Plan,
        root: str,
        content: bytes,
        held: dict[str, bytes],
        *,
        numbers: Sequence[int],
        base: int,
        extents: list[Extent],
    ) -> int:
        """Lay out a torch archive at `base` in a file: a pickle, and the leaves of these numbers. Return its length."""
        members = [_member_header(plan, str(at), plan.leaves[each].nbytes, each) for at, each in enumerate(numbers)]
        members += [torch_save.ArchiveMember(key, len(data), data) for key, data in held.items()]
        found, size = torch_save.lay_out_archive(
            torch_save.wrap_storages(root, content, members, _identity()), zlib.crc32
        )
        self._extents(plan, found, base, extents, (number for number in numbers if plan.leaves[number].nbytes))
        return size

    def _absent(self, plan: Plan, path: str, entry: e.AnyTensor, plain: str | None = None) -> torch_save.AbsentTensor:
        """Return the placeholder of a tensor. `plain`: the dtype of a plain and contiguous one."""
        extra = clean_extra(entry) or e.PLAIN if plain is None else e.PLAIN
        key = repr(places_of(entry))
        dtype, shape, order = plain or self.choice.cast_dtype(entry.dtype), tuple(entry.shape), extra.stride_order
        tied = f"{key} {dtype} {shape} {extra}" if math.prod(shape) else path
        known = self._tied.get(tied)
        if known is None:
            permuted = tuple(shape[axis] for axis in order) if order else shape
            number = plan.leaf(path, dtype, permuted, entry)
            if order:
                plan.orders[number] = order
            known = self._tied[tied] = torch_save.AbsentTensor(
                str(number - self._first), dtype, shape, order, extra.requires_grad, extra.subclass == target.PARAMETER
            )
        return known

    def lose_classes(self) -> list[str]:
        """Replace objects of other classes by plain values. Return a line for each lost class."""
        self.entries, lines = without_classes(self.entries)
        return lines

    def _state(self, tensor: Callable[[str, Any], Any]) -> Any:
        """Return the nested state, with placeholders for its tensors."""
        values = self.objects.read({path: entry for path, entry in self.entries.items() if is_leaf_value(entry)})
        values |= {path: tensor(path, entry) for path, entry in self.entries.items() if isinstance(entry, e.TENSORS)}
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

        return self._state(stand), stands

    def stand_in_dict(self, plan: Plan) -> tuple[dict[Any, Any], StandIns]:
        """Return the same for a format that has only dicts."""
        state, stands = self.stand_in_state()
        if isinstance(state, dict):
            return state, stands
        plan.changed.append(f"the state: the {type(state).__name__} becomes the value of a dict, under {VALUE!r}")
        return {VALUE: state}, stands

    def _extents(
        self, plan: Plan, found: Sequence[torch_save.Frame | int], base: int, extents: list[Extent], sized: Any
    ) -> None:
        """Add the extents of a file: frames, and between them the leaves that have bytes."""
        position = base
        for each in found:
            if isinstance(each, torch_save.Frame):
                number = plan.leaf("", "uint8", (each.size,), each.make)
                size = each.size
            else:
                number = next(sized)
                size = plan.leaves[number].nbytes
            extents.append(Extent(number, position, position + size))
            position += size

    # DCP

    def dcp(self, lanes: int) -> Plan:
        """Plan a folder in the format of torch.distributed.checkpoint."""
        plan = Plan("dcp", sums={}, markers=(dcp.METADATA,), others=(document.METADATA,), more=r"__\d+_\d+\.distcp")
        plan.left_out += self.lose_classes()
        parts = [path for path, entry in self.entries.items() if isinstance(entry, e.TensorPartsEntry)]
        if parts:
            raise UnsupportedFormatError(
                f"{self.source.url}: DCP does not support tensors of several parts; exclude them:{listed(parts)}"
            )
        narrow = [
            f"{path}: {entry.dtype}"
            for path, entry in self.entries.items()
            if isinstance(entry, e.TENSORS) and _NARROW.fullmatch(entry.dtype)
        ]
        if narrow:
            raise UnsupportedFormatError(
                f"{self.source.url}: DCP cannot load these dtypes; exclude them:{listed(narrow)}"
            )
        state, entries = self.stand_in_dict(plan)
        flat, paths = flatten_state(state)
        left_out, changed = target.container_changes(state, paths)
        plan.left_out += left_out
        plan.changed += changed
        for path, entry in self.entries.items():
            plan.changed += target.array_changes(path, entry)
        items: list[tuple[str, int, Any]] = []
        objects: dict[str, str] = {}
        for name, value in flat.items():
            if isinstance(value, torch.Tensor) and id(value) in entries:
                _, path, entry = entries[id(value)]
                plan.changed += target.tensor_changes(path, entry)
                items.append((name, value.nbytes, entry))
            else:
                items.append((name, *self._nested(plan, value, entries)))
                objects.update(dict.fromkeys(self._within, name))
        plan.changed += target.memory_changes(
            self.entries, lambda path, other: path in objects and objects[path] == objects.get(other)
        )
        lanes = max(1, min(lanes, sum(size for _, size, _ in items) // (16 << 20)))
        loads = [0] * lanes
        dealt: list[list[tuple[str, Any]]] = [[] for _ in range(lanes)]
        for name, size, what in items:
            lane = loads.index(min(loads))
            loads[lane] += size
            dealt[lane].append((name, what))
        placed: dict[str, tuple[str, int, int]] = {}
        for number, lane_items in enumerate(dealt):
            where = f"__0_{number}.distcp"
            plan.files.append((where, self._dcp_file(plan, where, lane_items, placed)))
        plan.last = lambda: [(dcp.METADATA, encode_metadata(flat, paths, placed))]
        return plan

    def _nested(self, plan: Plan, value: Any, entries: Mapping[int, Any]) -> tuple[int, bytes | _Nested]:
        """Return an object that DCP stores as one archive, and the leaves of its tensors.

        DCP does not split tuples, so their tensors are inside the archive. They are written part by part like all
        others.
        """
        self._begin_archive(plan)
        self._within: list[str] = []

        def absent(tensor: torch.Tensor) -> torch_save.AbsentTensor | None:
            if id(tensor) not in entries:
                return None
            _, path, entry = entries[id(tensor)]
            plan.changed += target.tensor_changes(path, entry, _KEPT_BY_TORCH)
            self._within.append(path)
            return self._absent(plan, path, entry)

        content, held = torch_save.pickle_state(value, absent)
        numbers = range(self._first, len(plan.leaves))
        if not self._tied:
            return 0, archive_object(value)
        return sum(plan.leaves[number].nbytes for number in numbers), _Nested(content, held, numbers)

    def _dcp_file(
        self, plan: Plan, where: str, items: list[tuple[str, Any]], placed: dict[str, tuple[str, int, int]]
    ) -> FilePlan:
        extents: list[Extent] = []
        position = 0
        for name, what in items:
            padding = -position % DCP_ALIGNMENT
            if padding:
                extents.append(Extent(plan.leaf("", "uint8", (padding,), bytes(padding)), position, position + padding))
                position += padding
            if isinstance(what, bytes):
                extents.append(Extent(plan.leaf(name, "uint8", (len(what),), what), position, position + len(what)))
                size = len(what)
            elif isinstance(what, _Nested):
                size = self._archive(
                    plan, "archive", what.content, what.held, numbers=what.numbers, base=position, extents=extents
                )
            else:
                dtype, shape = self.choice.cast_dtype(what.dtype), tuple(what.shape)
                number = plan.leaf(name, dtype, shape, what)
                member = _member_header(plan, "0", plan.leaves[number].nbytes, number)
                content = torch_save.pickle_tensor(dtype, shape)
                found, size = torch_save.lay_out_archive(
                    torch_save.wrap_storages("archive", content, [member], _identity()), zlib.crc32
                )
                self._extents(plan, found, position, extents, iter([number]))
            placed[name] = where, position, size
            position += size
        return FilePlan(b"", tuple(extents), position)

    # All

    async def write(
        self,
        plan: Plan,
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
            verify=self.choice.verify,
            orders=plan.orders,
            sums=plan.sums,
        )
        source: PartSource = reader
        if plan.wrap is not None:
            source = plan.wrap(reader, self.source.budget.set_aside(self.source.budget.total // 4))
        meter.begin(sum(file.size for file in files))
        writer = Writer(target.storage, source, target.budget, meter.wrote, wanted_part=target.settings.part_bytes)
        await outputs.write(writer, files, plan.last)
        tensors = [
            leaf for leaf, origin in zip(plan.leaves, plan.origins, strict=True) if isinstance(origin, e.TENSORS)
        ]
        names = (*outputs.names, *(name for name, _ in plan.last()))
        nbytes = sum(leaf.nbytes for leaf in tensors)
        left_out = (*plan.left_out, *self._gone)
        return ConvertReport(plan.kind, len(tensors), nbytes, left_out, names, changed=tuple(plan.changed))


def _member_header(plan: Plan, name: str, size: int, number: int) -> torch_save.ArchiveMember:
    """Return an archive member with the bytes of a leaf."""
    sums = plan.sums
    assert sums is not None
    return torch_save.ArchiveMember(name, size, sum=lambda: sums.get(number, 0))


def _identity() -> str:
    """Return a new archive id, as torch writes it: forty digits."""
    return f"{secrets.randbelow(10**40):040d}"


def expect_writable(target: Target, sources: Sequence[URL]) -> None:
    """Raise if the target's arguments do not fit each other, or if it is one of the sources."""
    url, form = target.place.url, target.format
    if target.compression is not None and form != "snapshot":
        raise ValueError(f"compression must be None for to={form!r}: no other library reads such files")
    written = None if form in OWN else registry.find_writer(form)
    if written is not None and written.needs_options and target.format_options is None:
        raise ValueError(f"format_options must be {written.options.replace(':', '.')} for to={form!r}, got None")
    if url in sources:
        raise ValueError(f"{url}: the destination is the source; convert to another path")


def write_checkpoint(
    operation: Operation,
    opened: Opened,
    choice: Selection,
    target: Target,
    *,
    make_source: Callable[..., CheckpointSource] = CheckpointSource,
    splits: Callable[[AnyTensor], bool] = reads_ranges,
    prepared: Any = None,
) -> ConvertReport:
    """Write a checkpoint. Each rank writes a share. See `write_as_snapshot` for the functions.

    `prepared`: what a plugin's format has read before.
    """
    url, exchange = target.place.url, operation.exchange
    expect_common_place(exchange, url)
    if target.format == "snapshot":
        return write_as_snapshot(opened, choice, target, operation, make_source=make_source, splits=splits)
    export = Export(opened, choice)
    name: str | None = None
    written = None if target.format in OWN else registry.find_writer(target.format)
    one = target.format == "torch" if written is None else written.one_file
    if one or (target.format == "safetensors" and suffix_of(url) == ".safetensors"):
        above, _, name = url.location.rpartition("/")
        if not name or (not above and url.scheme != "file"):
            raise ValueError(f"{url}: must be the name of a file")
        url = URL(url.scheme, above or "/", url.query)
    with target.open(operation, url, default_budget=opened.budget.limit) as made:
        plan: Plan
        if written is not None:
            plan = resolve_name(written.plan)(export, Request(operation, opened, target, name, prepared))
        elif target.format == "torch":
            assert name is not None
            plan = export.torch_file(name)
        elif target.format == "safetensors":
            plan = export.safetensors(name, target.shard_bytes)
        else:
            lanes = exchange.agree(made.settings.lane_count(), sum, int, int)
            plan = export.dcp(lanes)
        overwrite = target.overwrite
        work = export.write(
            plan, made, operation.meter, overwrite=overwrite, exchange=exchange, make_source=make_source
        )
        return run(work)


def convert_checkpoint(operation: Operation, origin: Location, target: Target, choice: Selection) -> ConvertReport:
    """Convert a checkpoint. Half of the memory is for reading it, and half for writing."""
    expect_writable(target, [origin.url])
    source = operation.open(origin, divisor=2)
    arguments = {"source": origin.url, **target.agreed(), **choice.arguments()}
    [found] = open_sources(operation.exchange, "convert", arguments, [source])
    expand_chosen_trees(found, choice)
    prepared, tensor_map = None, choice.map
    written = None if target.format in OWN else registry.find_writer(target.format)
    if written is not None and written.prepare:
        prepared = resolve_name(written.prepare)(operation, target)
        if tensor_map is None:
            tensor_map = resolve_name(written.choose_map)(prepared, found.document.manifest)
    opened = map_checkpoint(found, tensor_map)
    document = opened.document
    run(expect_files(opened, selected_locations(document, choice.select, choice.exclude)))
    if choice.verify:
        expect_checksums(operation.exchange, opened, select_entries(document, choice.select, choice.exclude))
    report = write_checkpoint(operation, opened, choice, target, prepared=prepared)
    return operation.done(report, "converted", bytes=report.nbytes)
