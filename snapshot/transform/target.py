"""Target: the checkpoint that a verb writes, its place and format, and the writing of a snapshot."""

from __future__ import annotations

import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from itertools import islice
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from snapshot.distributed.exchange import LEADER, Exchange
from snapshot.distributed.operation import Operation
from snapshot.errors import UnsafeObjectError
from snapshot.events import log
from snapshot.formats import registry
from snapshot.formats.foreign import add_root
from snapshot.formats.hugging_face import SHARD, ExtraFiles, GivenFiles
from snapshot.formats.registry import SNAPSHOT, FormatOptions
from snapshot.io.loop import run
from snapshot.io.session import MemoryDefaults, Session
from snapshot.io.url import URL, Location, expect_mapping
from snapshot.loading.open import Opened
from snapshot.loading.read_object import expand_trees
from snapshot.manifest import entries as e
from snapshot.manifest.containers import Compound, DictEntry
from snapshot.manifest.values import Entry, EnumEntry
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.layout import partition_items
from snapshot.plan.names import Rename, expect_globs
from snapshot.reports import ConvertReport
from snapshot.save.begin import claimed
from snapshot.save.compression import expect_compression, pack_leaves
from snapshot.save.planned_take import AtCommit, Take, plan_writes
from snapshot.save.rank_share import Share, item_of, size_of
from snapshot.save.take_options import usual_budget
from snapshot.settings import expect_positive
from snapshot.state import leaves
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Blob, Leaf
from snapshot.tensors.geometry import Box
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, contiguous_strides, is_castable, measure_span
from snapshot.text import with_article
from snapshot.transform.call import (
    Objects,
    chosen_of_ranks,
    clean_extra,
    expect_matches,
    expect_same_plan,
    expect_something,
    expect_sound,
    is_foreign_object,
)
from snapshot.transform.sources import CheckpointSource, LeafReads, expect_room, reads_ranges

_SUFFIX = re.compile(r"[^/]\.[A-Za-z][A-Za-z0-9_-]*$")
"""Suffix of a file name: `step-1.5` and `.hidden` have none."""


def suffix_of(url: URL) -> str:
    """Return the suffix of a name in lower case, with its dot; empty without one."""
    found = _SUFFIX.search(url.location)
    return "" if found is None else found[0][1:].lower()


def format_by_name(url: URL, choice: str) -> str:
    """Return the format for the suffix of a name. If it is unknown, raise ValueError that names another `choice`."""
    suffix = suffix_of(url)
    if not suffix:
        return SNAPSHOT
    found = registry.find_suffix(suffix)
    if found is None:
        known = ", ".join(sorted(each for form in registry.formats() for each in form.suffixes))
        raise ValueError(f"{url}: the suffix must be one of {known}, got {suffix!r}; or pass {choice}")
    return found.writes


def _choices() -> str:
    return f"one of {', '.join(map(repr, registry.written_formats()))}"


@dataclass(frozen=True)
class Target:
    """The checkpoint that `Snapshot.convert`, `Snapshot.copy` or `merge` writes. A path stands for `Target(path)`.

    Args:
        url: The destination: a folder, or a file for formats that are one file.
        to: `"snapshot"`; `"safetensors"`: one file for a name with that suffix, or a folder as Hugging Face has it;
            `"torch"`: a file as torch.save writes it; `"dcp"`: a folder that `torch.distributed.checkpoint.load` reads.
            Plugins of the library have `"gguf"`: a file for llama.cpp; `"peft"`: the folder of an adapter;
            `"deepspeed-universal"`: a folder that DeepSpeed resumes from on any number of ranks;
            `"torch_checkpointing"`: a folder that its manager loads on any number of ranks. By default, the suffix
            decides: `.safetensors`, `.pt`, `.pth` or `.gguf`; without a suffix, a snapshot is written.
        overwrite: Replace an existing checkpoint. An existing snapshot stays whole until the new one is committed.
        compression: `"zstd"`: compress the data files of a snapshot. See docs/guides/compression.md.
        durable: Return only when the result survives a loss of power.
        shard_bytes: The maximum size of each file if there are several.
        format_options: Options of one format, which choose `to`, such as those of GGUF and PEFT.
        files: The small files beside the weights in a folder of another format, such as `config.json` and the
            tokenizer's, which `from_pretrained` needs: a local folder that has them, or their contents by name. Weights
            and hidden files of the folder are not copied.
        storage_options: Options for the storage plugin of `url`, and of files that `format_options` name if their
            scheme is the same.

    >>> from snapshot import Target
    >>> Target("model.safetensors").format
    'safetensors'
    """

    url: str | os.PathLike[str]
    to: str | None = None
    _: KW_ONLY
    overwrite: bool = False
    compression: Literal["zstd"] | None = None
    durable: bool = True
    shard_bytes: int = SHARD
    format_options: FormatOptions | None = None
    files: GivenFiles = None
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)):
            raise TypeError(f"url must be a path or a URL, got {self.url!r}")
        if self.to is not None and not (isinstance(self.to, str) and registry.is_writable(self.to)):
            raise ValueError(f"to must be {_choices()}, got {self.to!r}")
        expect_positive("shard_bytes", self.shard_bytes)
        expect_mapping(self.storage_options)
        if not isinstance(self.files, (str, os.PathLike)):
            ExtraFiles(self.files)  # a folder may be on the host of rank 0 only
        compression: object = self.compression
        if compression == "auto":
            raise ValueError("compression must be None or 'zstd' here, got 'auto': only takes are measured")
        expect_compression(compression)
        if self.format_options is not None:
            registry.expect_options(self.format_options)
            if self.to not in (None, self.format_options.to):
                raise ValueError(f"format_options must be those of to={self.to!r}, got {self.format_options!r}")
            suffix = registry.find_suffix(suffix_of(self.place.url))
            if suffix is not None and suffix.writes != self.format_options.to:
                raise ValueError(f"format_options must be those of a {suffix.writes} file, got {self.format_options!r}")

    @classmethod
    def of(cls, target: str | os.PathLike[str] | Target) -> Target:
        """Return a target; a path becomes one with the defaults."""
        if isinstance(target, Target):
            return target
        if not isinstance(target, (str, os.PathLike)):
            raise TypeError(f"target must be a path, a URL or a Target, got {target!r}")
        return cls(target)

    @property
    def place(self) -> Location:
        """The parsed URL, and the storage options."""
        return Location(URL.parse(os.fspath(self.url)), self.storage_options)

    @property
    def format(self) -> str:
        """The format to write, also if the suffix of the name decides; raise ValueError if it does not."""
        if self.format_options is not None:
            return self.format_options.to
        return self.to or format_by_name(self.place.url, f"to=, {_choices()}")

    def open(self, operation: Operation, folder: URL, *, default_budget: int | None = None) -> Session:
        """Open the storage of a folder. The caller closes it. Half of the memory is for writing."""
        usual = usual_budget(self.compression) if default_budget is None else default_budget
        return Session(
            folder,
            self.storage_options,
            durable=self.durable,
            budget=operation.part(2),
            memory=MemoryDefaults(usual),
        )

    def open_file(self, operation: Operation, path: str | os.PathLike[str]) -> tuple[Session, str]:
        """Open the folder of a further file, with the options of the target if the scheme is the same."""
        url = URL.parse(os.fspath(path))
        above, _, name = url.location.rpartition("/")
        options = self.storage_options if url.scheme == self.place.url.scheme else None
        return operation.open(Location(URL(url.scheme, above or "/", url.query), options), divisor=4), name

    def agreed(self) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks."""
        return {
            "destination": self.place.url,
            "to": self.to,
            "format": None if self.format_options is None else self.format_options.to,
            "shard_bytes": self.shard_bytes,
            "overwrite": self.overwrite,
            "compression": self.compression,
            "format_options": None if self.format_options is None else dict(self.format_options.agreed()),
            "files": self.files is not None,
        }


# Objects with a class of their own, as plain values for formats without classes.


def without_classes(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return entries that need no class of the application, and a line for each entry that lost its class.

    A dataclass becomes a dict of its fields, a wrapped tensor a dict of its inner tensors, and an Enum member its
    value.
    """
    made: dict[str, Any] = {}
    lines = []
    for path, entry in entries.items():
        if isinstance(entry, Compound):
            made[path] = DictEntry(entry.keys, entry.tagged, entry.replicated)
            lines.append(f"{path}: the class {entry.described}; stored as a dict")
        elif isinstance(entry, EnumEntry):
            made[path] = entry.to_scalar()
            lines.append(f"{path}: the class {entry.obj_type}; stored as its {'value' if entry.held else 'name'}")
        else:
            made[path] = entry
    return made, lines


# Report lines for a target format: entries that it leaves out, and entries that load differently.

PARAMETER = "torch.nn.parameter.Parameter"


def tensor_changes(path: str, entry: e.AnyTensor, keeps: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield a line for each property of a tensor, other than its values, that a format drops.

    `keeps`: the properties that the format holds, among `parameter`, `requires_grad` and `order`.
    """
    extra = entry.extra or e.PLAIN
    if extra.subclass is not None and not (extra.subclass == PARAMETER and "parameter" in keeps):
        yield f"{path}: the {extra.subclass} becomes a plain tensor"
    elif extra.requires_grad and "requires_grad" not in keeps:
        yield f"{path}: requires_grad is not kept"
    if extra.stride_order is not None and "order" not in keeps:
        yield f"{path}: the memory layout becomes contiguous"


def memory_changes(entries: Mapping[str, Any], is_kept: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield a line for each tensor that shares memory with another one in the source, and not in the target.

    `is_kept`: whether the same view of the same memory, under two paths, stays one tensor.
    """
    firsts: dict[Any, str] = {}
    groups: dict[Any, list[str]] = {}
    for path, entry in entries.items():
        if not entry.is_tensor or entry.is_mapped:  # a mapped tensor never shared memory
            continue
        if 0 not in entry.shape and (stored := entry.stored()):
            place = stored[0].location, stored[0].byte_range
            first = firsts.setdefault(place, path)
            if first != path:
                groups.setdefault(place, [first]).append(path)
    for paths in groups.values():
        views = [_view_of(path, entries[path]) for path in paths]
        yield from _find_overlaps(sorted(views, key=lambda view: view[0]), is_kept)


def _view_of(path: str, entry: e.AnyTensor) -> tuple[int, int, str, str]:
    """Return a tensor's first element in its storage, its end if it is dense, its path, and a text of the view."""
    first = entry.pieces()[0][1]
    extra = first.extra or e.PLAIN
    begin, count = extra.storage_offset or 0, math.prod(first.shape)
    dense = measure_span(first.shape, extra.strides or contiguous_strides(first.shape)) == count
    view = repr((entry.places(), entry.dtype, entry.shape, clean_extra(entry)))
    return begin, begin + count if dense else begin, path, view


def _find_overlaps(views: list[tuple[int, int, str, str]], is_kept: Callable[[str, str], bool]) -> Iterator[str]:
    """Yield the lines for the views of one storage: first element, end (if dense), path, and view."""
    seen: dict[str, str] = {}
    reach, owner = 0, ""
    for begin, end, path, view in views:
        if (known := seen.setdefault(view, path)) != path:
            if not is_kept(path, known):
                yield f"{path}: the memory that it shares with {known} becomes its own"
            continue
        if begin < reach:
            yield f"{path}: the memory that it shares with {owner} becomes its own"
        if end > reach:
            reach, owner = end, path


def array_changes(path: str, entry: Entry) -> Iterator[str]:
    """Yield a line for a NumPy array whose dtype a pickle does not keep: NumPy reads most in the native order."""
    if isinstance(entry, e.NDArrayEntry) and not entry.scalar:
        dtype = leaves.read_dtype(path, entry.dtype)
        read = pickle.loads(pickle.dumps(np.empty(0, dtype), protocol=2)).dtype  # noqa: S301 - written here
        if read != dtype:
            yield f"{path}: the array of {dtype.str} becomes one of {read.str}"


def container_changes(state: Mapping[Any, Any], paths: Mapping[str, tuple[Any, ...]]) -> tuple[list[str], list[str]]:
    """Return lines for entries that DCP's flattening leaves out of a state, and for those that it changes.

    `paths`: for each flat name, the keys and indices that lead to its value.
    """
    flattened = {path[:length] for path in paths.values() for length in range(len(path))}
    left_out: list[str] = []
    changed: list[str] = []

    def walk(path: tuple[Any, ...], value: Any) -> None:
        name = "/".join(map(str, path)) or "the state"
        if isinstance(value, Mapping):
            kind = type(value).__name__
            if not value and path:
                left_out.append(f"{name}: the empty {kind}")
                return
            if type(value) is not dict:
                changed.append(f"{name}: the {kind} becomes a dict")
            if any(type(key) is not str for key in value):
                changed.append(f"{name}: its keys become strings")
            for key, child in value.items():
                walk((*path, str(key)), child)
        elif type(value) is list and path in flattened:
            for place, child in enumerate(value):
                walk((*path, place), child)

    walk((), state)
    return left_out, changed


# Conversion of any readable checkpoint to a snapshot: a take whose tensors are read from it, part by part.


@dataclass(frozen=True)
class Selection:
    """The part of a checkpoint to convert, and the conversion's options."""

    select: Sequence[str] = ()
    exclude: Sequence[str] = ()
    rename: Rename | None = None
    dtype: torch.dtype | None = None
    verify: bool = True
    allow_pickle: bool = False
    map: TensorMap | None = None

    def __post_init__(self) -> None:
        for name, globs in (("select", self.select), ("exclude", self.exclude)):
            expect_globs(name, globs)
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and is_castable(self.dtype)):
            raise TypeError(f"dtype must be a floating-point dtype such as torch.bfloat16, got {self.dtype!r}")

    def arguments(self) -> dict[str, object]:
        """Return the arguments, by their names."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def cast_dtype(self, dtype: str) -> str:
        """Return the dtype that a tensor is stored in. Only floating-point tensors are cast."""
        known = BY_NAME.get(dtype)
        if self.dtype is None or known is None or not (known.is_floating_point and self.dtype.is_floating_point):
            return dtype
        return str(self.dtype).removeprefix("torch.")


def expand_chosen_trees(opened: Opened, choice: Selection) -> None:
    """Replace trees of plain values by an entry for each value, if a selection or a new name may need one of them."""
    if choice.select or choice.exclude or choice.rename:
        expand_trees(opened, opened.document.manifest)


class RecordedShare(Share):
    """The share of a rank that converts a checkpoint. Several ranks share the leaves."""

    def __init__(self, exchange: Exchange, recording: Recording, world: int) -> None:
        super().__init__(recording.flat, world=world)
        self._exchange = exchange
        self._recorded = recording.replicated
        self.origins = recording.origins
        """For each leaf the source of its bytes."""
        self._elsewhere: set[str] = set()
        """Entries that only other ranks write."""
        self._here: set[str] = set()
        """Entries that this one of several ranks writes, at least in part."""
        if not exchange.alone:
            self._deal(recording)

    def _deal(self, recording: Recording) -> None:
        """Choose this rank's leaves. Leaves that only the leader has come after all others."""
        groups: dict[str, list[int]] = {}
        leaves, own = self.leaves[: recording.common], self._exchange.rank
        for number, leaf in enumerate(leaves):
            groups.setdefault(leaf.entry, []).append(number)
        dealt = list(groups.values())
        items = [item_of([leaves[number] for number in numbers]) for numbers in dealt]
        shares = partition_items(items, [0] * self._exchange.world)
        self.loads = [sum(size_of(items, each) for each in share) for share in shares]
        chosen: list[tuple[Leaf, Any]] = []
        for item, box in shares[own]:
            for number in dealt[item]:
                leaf = leaves[number] if box is None else _box_of(leaves[number], box)
                chosen.append((leaf, recording.origins[number]))
        more = zip(self.leaves[recording.common :], recording.origins[recording.common :], strict=True)
        chosen += more  # only the leader has any
        self.leaves, self.origins = [leaf for leaf, _ in chosen], [origin for _, origin in chosen]
        self._here = {leaf.entry for leaf in self.leaves}
        self._elsewhere = groups.keys() - self._here

    @property
    def cut(self) -> bool:
        return self._exchange.alone and super().cut

    def entries(self, written: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries, which are already under their ranks. The leader has all those without tensors."""
        own = {}
        leads, ties = self._exchange.rank == LEADER, self.flat.ties
        for path, entry in written.items():
            name = ties.get(path, path)
            if not self._exchange.alone and (name in self._elsewhere or not (leads or name in self._here)):
                continue
            shared = path in self._recorded and not getattr(entry, "replicated", True)
            own[path] = msgspec.structs.replace(entry, replicated=True) if shared else entry
        return own, {}


def _box_of(leaf: Leaf, box: Box) -> Leaf:
    """Return a box of a leaf whose bytes are not in memory."""
    nbytes = box.numel * ITEMSIZE[leaf.dtype]
    return Leaf(leaf.path, leaf.tensor, leaf.dtype, box.sizes, nbytes, origin=box.offsets, whole=leaf)


class Recording:
    """A checkpoint's entries, recorded for a new snapshot."""

    def __init__(self, opened: Opened, choice: Selection, splits: Callable[[e.AnyTensor], bool]) -> None:
        self._splits = splits
        self.flat = Flattened()
        self.origins: list[Any] = []
        """For each leaf that is read, its entry; object tensors are in memory already."""
        self.replicated: set[str] = set()
        self._document = opened.document
        self._choice = choice
        self._objects = Objects(opened, allow_pickle=choice.allow_pickle, verify=choice.verify)
        self._seen: dict[Any, str] = {}
        self.tensors = 0
        self.common = 0
        """The number of leaves that all ranks record: the first ones."""
        self.uncast: list[str] = []
        """Entries that keep their dtype although another one was requested."""

    def add(self, path: str, entry: Any) -> None:
        """Record an entry under its path in the manifest. Objects are recorded together."""
        if entry.replicated:
            self.replicated.add(path)
        if entry.is_tensor:
            self._tensor(path, entry)
        elif held := entry.tensors():
            self._parts(path, entry, held)
        elif not entry.is_object:
            self.flat.entries[path] = self._cast_record(entry)

    def _cast_record(self, entry: Entry) -> Any:
        """Return an optimizer's entry, with the parameters' new dtypes in its record."""
        record = getattr(entry, "optimizer", None)
        if record is None or self._choice.dtype is None:
            return entry
        dtypes = tuple(map(self._choice.cast_dtype, record.dtypes))
        return msgspec.structs.replace(entry, optimizer=msgspec.structs.replace(record, dtypes=dtypes))

    def _tensor(self, path: str, entry: Any) -> None:
        self.tensors += 1
        self.flat.entries[path] = None
        extra = clean_extra(entry)
        dtype = self._choice.cast_dtype(entry.dtype)
        if math.prod(entry.shape):
            key = repr((entry.places(), entry.dtype, entry.shape, extra, type(entry)))
            if (owner := self._seen.setdefault(key, path)) != path:
                self.flat.ties[path] = owner
                return
        wrap = None
        if entry.is_sharded and self._document.world_size > 1:
            entries = self.flat.entries  # not `self`, which holds the leaf: no reference cycle

            def wrap(path: str, stored: e.AnyTensor) -> None:
                boxes = [e.Shard(box.offsets, box.sizes, tensor) for box, tensor in stored.pieces()]
                entries[path] = msgspec.structs.replace(entry.with_boxes(boxes), dtype=dtype)

        self._leaf(path, entry, dtype, extra, wrap, splits=self._splits(entry))

    def _parts(self, path: str, entry: Any, held: Sequence[tuple[str, e.AnyTensor]]) -> None:
        """Record an entry of tensors that keep their dtypes."""
        if not isinstance(entry, e.NDArrayEntry):
            self.tensors += 1
            if self._choice.dtype is not None:
                self.uncast.append(f"{path}: {with_article(entry.kind)} tensor keeps its dtype")
        entries, written = self.flat.entries, dict[str, Any]()
        entries[path] = None
        for suffix, tensor in held:

            def wrap(_: str, stored: Any, suffix: str = suffix) -> None:
                written[suffix] = stored
                entries[path] = entry.with_tensors(written)

            self._leaf(path + suffix, tensor, tensor.dtype, clean_extra(tensor), wrap)

    def _leaf(
        self, path: str, entry: e.AnyTensor, dtype: str, extra: e.Extra | None, wrap: Any, *, splits: bool = False
    ) -> None:
        nbytes = math.prod(entry.shape) * ITEMSIZE[dtype]
        tensor = torch.empty(0, dtype=BY_NAME[dtype], device="meta")
        leaf = Leaf(path, tensor, dtype, tuple(entry.shape), nbytes, extra=extra, wrap=wrap, splits=splits)
        self.flat.leaves.append(leaf)
        self.origins.append(entry)

    def objects(self, entries: Mapping[str, Any]) -> None:
        """Record objects as plain values if possible, otherwise as bytes. All are read at once."""
        chosen = {path: entry for path, entry in entries.items() if entry.is_object}
        foreign = {path: entry for path, entry in chosen.items() if is_foreign_object(self._document, entry)}
        values = self._objects.read(foreign, all_or_none=False)
        for path, value in values.items():
            before, known = len(self.flat.leaves), len(self.flat.entries)
            self.flat.add(path, value)
            self.origins += [_bytes_of(leaf) for leaf in self.flat.leaves[before:]]
            if chosen[path].replicated:
                self.replicated.update(islice(self.flat.entries, known, None))
        others = {path: entry for path, entry in chosen.items() if path not in values}
        for path, data in self._objects.bytes_of(others).items():
            entry = others[path]
            if entry.serializer == "torch_save":
                self.flat.pickled.append(path)
            elif path in foreign:
                raise UnsafeObjectError(
                    f"{path}: {entry.obj_type} is compressed and can only be read by running a pickle"
                )
            self.flat.entries[path] = None
            self.flat.blobs.append(Blob(path, bytes(data), entry.serializer, entry.obj_type))


def write_as_snapshot(
    opened: Opened,
    choice: Selection,
    target: Target,
    operation: Operation,
    *,
    make_source: Callable[..., CheckpointSource] = CheckpointSource,
    splits: Callable[[e.AnyTensor], bool] = reads_ranges,
) -> ConvertReport:
    """Write a checkpoint as a snapshot with the same ranks. The ranks of the operation share the tensors.

    `make_source`: returns the source of the tensors' bytes. `splits`: returns True for a tensor that ranks may split.
    """
    document = opened.document
    exchange, url = operation.exchange, target.place.url
    expect_matches(document, choice.select, choice.exclude)
    recording = Recording(opened, choice, splits)
    entries = chosen_of_ranks(document.manifest, choice.select, choice.exclude, choice.rename)
    if choice.select or choice.exclude:
        expect_something(entries)
    expect_sound(entries, document)
    for path, entry in entries.items():
        recording.add(path, entry)
    expect_room(document, recording.flat.leaves, recording.origins)
    recording.common = len(recording.flat.leaves)
    expect_same_plan(exchange, ((leaf.path, leaf.dtype, leaf.shape) for leaf in recording.flat.leaves))
    if exchange.rank == LEADER:
        recording.objects(entries)
    if recording.flat.pickled:
        log.warning("%s: kept as pickles: %s", url, ", ".join(sorted(recording.flat.pickled)[:20]))
    opener = partial(target.open, operation)
    with claimed(exchange, url, operation.meter, opener, overwrite=target.overwrite) as claim:
        claim.transaction.expect_free()
        share = RecordedShare(exchange, recording, document.world_size)
        packing = pack_leaves(claim.session, share.leaves) if target.compression is not None else None
        plan = plan_writes(share, claim.session, staged=False, packing=packing)
        source = make_source(opened, share.leaves, share.origins, LeafReads(choice.verify))
        commit = AtCommit(add_root(document))
        take = Take(claim, share, plan, source=source, packing=packing, commit=commit)
        run(take.write_and_commit())
    changed = tuple(memory_changes(entries, lambda *_: True))
    return ConvertReport("snapshot", recording.tensors, take.committed_bytes, tuple(recording.uncast), changed=changed)


def _bytes_of(leaf: Leaf) -> bytes:
    tensor = leaf.tensor.detach().contiguous().cpu()
    return bytes(tensor.view(-1).view(torch.uint8).numpy().tobytes()) if leaf.nbytes else b""
