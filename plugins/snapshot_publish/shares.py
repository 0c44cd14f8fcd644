"""The tensors of a publication: the pieces of each rank, their owners with the memory, and the files of each share."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError, SnapshotError
from snapshot.formats.hugging_face import SHARD
from snapshot.io.accelerators import current_device_index
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.loop import start_in_thread
from snapshot.io.session import Session
from snapshot.maps.recipe import RecipeTarget, Spec
from snapshot.maps.tensor_map import TensorMap
from snapshot.plan.layout import FilePlan, group_in_order, plan_exact_file
from snapshot.plan.names import strip_wrappers
from snapshot.save.staging import Stager
from snapshot.save.writer import Writer, WrittenFile
from snapshot.state.leaves import Leaf
from snapshot.state.sharded import find_shards
from snapshot.tensors.digest import digest_bytes
from snapshot.tensors.geometry import Box, Grid, Shape, boxes_overlap, whole_box
from snapshot.tensors.memory import BY_NAME, ITEMSIZE, NAMES, SAFETENSORS
from snapshot.text import listed
from snapshot_publish.build import DeltaEncoder, EncodedDelta, TensorSums, checksum_text
from snapshot_publish.store import version_name

# The tensors of a publication: which pieces each rank holds, which rank owns each tensor, and who sends what.
#
# Each rank computes the same plan from the records of all ranks, without communication.

ALIGNMENT = 64


class HeldPiece(NamedTuple):
    """A box of a tensor, in this rank's memory."""

    box: Box
    tensor: torch.Tensor


class RankState(msgspec.Struct, array_like=True):
    """The tensors of one rank, as they are sent to the others: (name, dtype, shape, boxes)."""

    tensors: list[tuple[str, str, Shape, list[tuple[Shape, Shape]]]]


class Transfer(NamedTuple):
    """Elements of a source tensor that one rank copies or sends into an owner's target tensor."""

    target: str
    source: str
    box: Box
    """The box that the sender holds."""
    grid: Grid
    sender: int
    owner: int
    dtype: str
    """The source's dtype, in which the elements are sent."""
    nbytes: int


class SharePlan(NamedTuple):
    """The plan of a publication, equal on all ranks."""

    targets: Mapping[str, RecipeTarget]
    owners: Mapping[str, int]
    transfers: Sequence[Transfer]
    equal: Sequence[tuple[str, str, SharePlan]] = ()
    """Pairs of sources that must have the same bytes, with the plan that brings both to one rank."""

    def owned(self, rank: int) -> dict[str, RecipeTarget]:
        return {name: target for name, target in self.targets.items() if self.owners[name] == rank}


def target_bytes(target: RecipeTarget) -> int:
    """Return the number of bytes of a target."""
    return math.prod(target.shape) * ITEMSIZE[target.dtype]


def flatten_tensors(state: Any) -> dict[str, Any]:
    """Return the tensors of a module or of a nested state dict, by dotted names without wrappers' prefixes.

    Items of lists and tuples have their numbers as names. Values that are not tensors are left out, and a wrapper's own
    tensors.
    """
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    if not isinstance(state, Mapping):
        raise TypeError(f"publish: the state must be a module or a state dict, got a {type(state).__name__}")
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) or (prefix and find_shards(prefix, value) is not None):
            if not all(prefix.split(".")):
                raise ValueError(f"publish: each part of a tensor's name must have characters, got {prefix!r}")
            if prefix in found:
                raise ValueError(f"publish: two tensors would be named {prefix!r}")
            found[prefix] = value
        elif isinstance(value, Mapping | list | tuple):
            for key, below in value.items() if isinstance(value, Mapping) else enumerate(value):
                add(f"{prefix}.{key}" if value is not state else str(key), below)

    add("", state)
    names, own = strip_wrappers(found)
    return {names[name]: value for name, value in found.items() if name not in own}


def find_pieces(tensors: Mapping[str, Any]) -> tuple[RankState, dict[str, list[HeldPiece]]]:
    """Return the description and the memory of this rank's pieces."""
    described, held = [], {}
    for name, value in tensors.items():
        shards = find_shards(name, value)
        if shards is not None:
            dtype, shape = shards.dtype, shards.shape
            pieces = [HeldPiece(piece.box, piece.tensor) for piece in shards.pieces]
            for piece in pieces:
                _expect_dense(name, piece.tensor)
        else:
            _expect_dense(name, value)
            dtype, shape = value.dtype, tuple(value.shape)
            plain = value.detach().resolve_conj().resolve_neg()
            pieces = [HeldPiece(whole_box(shape), plain)] if value.numel() else []
        if dtype not in NAMES:
            raise SnapshotError(f"{name}: cannot publish a tensor of {dtype}")
        described.append((name, NAMES[dtype], shape, [(each.box.offsets, each.box.sizes) for each in pieces]))
        held[name] = pieces
    return RankState(described), held


def _expect_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise unless a tensor has plain values, and a name that can be stored."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SnapshotError(f"{name!r}: a published tensor must have a name that UTF-8 can encode") from error
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else tensor.layout
        raise SnapshotError(f"{name}: a published tensor must be dense, got {kind}")
    if tensor.is_meta:
        raise SnapshotError(f"{name}: a published tensor must have values, got a tensor on the meta device")


def plan_shares(states: Sequence[RankState], names: TensorMap | None) -> SharePlan:
    """Return the plan for the states of all ranks. Raise if they do not form whole tensors."""
    specs: dict[str, Spec] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(dict)
    wrong = []
    for rank, state in enumerate(states):
        for name, dtype, shape, boxes in state.tensors:
            spec = specs.setdefault(name, Spec(dtype, tuple(shape)))
            if spec != (dtype, tuple(shape)):
                wrong.append(f"{name}: {dtype}{list(shape)} on rank {rank}, {spec.dtype}{list(spec.shape)} on another")
            for offsets, sizes in boxes:
                holders[name].setdefault(Box(tuple(offsets), tuple(sizes)), []).append(rank)
    for name, spec in specs.items():
        boxes_ = list(holders[name])
        if not boxes_overlap(boxes_) and sum(box.numel for box in boxes_) == math.prod(spec.shape):
            continue
        wrong.append(f"{name}: the boxes of all ranks must form the whole tensor once")
    if wrong:
        raise SnapshotError(f"the states of the ranks cannot be published:{listed(wrong, 20)}")
    equal: list[tuple[str, str]] = []
    if names is not None:
        made = names.plan(specs)
        targets = dict(made.targets)
        targets |= {name: targets[owner] for name, owner in made.ties.items()}
        equal = made.equal
    else:
        targets = {name: RecipeTarget.same(name, spec) for name, spec in specs.items()}
    refused = [f"{name}: {each.dtype}" for name, each in targets.items() if each.dtype not in SAFETENSORS]
    if refused:
        raise SnapshotError(f"safetensors does not support these dtypes; cast or exclude them:{listed(refused)}")
    if not targets or "__metadata__" in targets:
        raise SnapshotError("the state to publish must have tensors, none of them named '__metadata__'")
    checks = []
    for first, other in equal:
        pair = {name: RecipeTarget.same(name, specs[name]) for name in (first, other)}
        checks.append((first, other, _assign(pair, specs, holders, len(states), together=True)))
    return _assign(targets, specs, holders, len(states))._replace(equal=checks)


def _assign(
    targets: dict[str, RecipeTarget],
    specs: Mapping[str, Spec],
    holders: Mapping[str, Mapping[Box, list[int]]],
    world: int,
    *,
    together: bool = False,
) -> SharePlan:
    """Give each target to the rank with the fewest bytes so far, among those that hold a part of it.

    With `together`, one rank gets all targets.
    """
    loads, sent = [0] * world, [0] * world
    owners: dict[str, int] = {}
    transfers: list[Transfer] = []
    for name, target in sorted(targets.items(), key=lambda item: (-target_bytes(item[1]), item[0])):
        pieces = [
            (part.source, box, grid, ranks)
            for part in target.parts
            for box, ranks in holders[part.source].items()
            for grid in part.grid.clip("source", box)
            if grid.numel
        ]
        choice = sorted({rank for *_, ranks in pieces for rank in ranks}) or range(world)
        if together and owners:
            choice = [*owners.values()]
        owner = owners[name] = min(choice, key=lambda rank: loads[rank])
        loads[owner] += target_bytes(target)
        for source, box, grid, ranks in pieces:
            sender = owner if owner in ranks else min(ranks, key=lambda rank: sent[rank])
            nbytes = grid.numel * ITEMSIZE[specs[source].dtype]
            sent[sender] += nbytes if sender != owner else 0
            transfers.append(Transfer(name, source, box, grid, sender, owner, specs[source].dtype, nbytes))
    return SharePlan(targets, owners, transfers)


# Host memory with the tensors that one rank owns, in one buffer that is used again.


class HostImage:
    """The bytes of a rank's targets. Two images take turns: the last published one is the base of the next."""

    def __init__(self, targets: Mapping[str, RecipeTarget]) -> None:
        self.targets = dict(targets)
        self._places: dict[str, int] = {}
        position = 0
        for name, target in self.targets.items():
            self._places[name] = position
            position += -(-target_bytes(target) // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.empty(position, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.numel()

    def fits(self, targets: Mapping[str, RecipeTarget]) -> bool:
        """Return True if the image is for targets of these names, dtypes and shapes."""
        return describe_targets(self.targets) == describe_targets(targets)

    def tensor(self, name: str) -> torch.Tensor:
        target = self.targets[name]
        begin = self._places[name]
        flat = self._buffer[begin : begin + target_bytes(target)]
        return flat.view(BY_NAME[target.dtype]).view(target.shape)

    def bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a target's memory as bytes."""
        begin = self._places[name]
        return self._buffer[begin : begin + target_bytes(self.targets[name])].numpy()

    def leaf(self, name: str) -> Leaf:
        """Return a target as a leaf for the writer."""
        target, tensor = self.targets[name], self.tensor(name)
        nbytes = target_bytes(target)
        return Leaf(name, tensor, target.dtype, target.shape, nbytes, tensor.data_ptr() if nbytes else 0, True)


def describe_targets(targets: Mapping[str, RecipeTarget]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the names, dtypes and shapes of targets, in order."""
    return [(name, target.dtype, tuple(target.shape)) for name, target in targets.items()]


# The pieces of all ranks are brought into the owners' host memory, through the process group.
#
# This runs in the foreground, in one order on all ranks. A rank that fails tells the others through the store.

ROUND = 256 << 20
"""Maximum bytes that a rank sends and receives before it waits."""
TAGS = 1 << 16
"""Number of different tags of a call. Messages of different calls have different tags, for a call may be broken off."""


def gather_pieces(
    exchange: Exchange, plan: SharePlan, held: Mapping[str, Sequence[HeldPiece]], image: HostImage
) -> None:
    """Fill the image with the tensors that this rank owns, and send what other ranks own."""
    with torch.no_grad():
        pieces = {(name, piece.box): piece.tensor for name, each in held.items() for piece in each}
        remote = []
        for transfer in plan.transfers:
            if transfer.sender != transfer.owner:
                remote.append(transfer)
            elif transfer.owner == exchange.rank:
                local = pieces[transfer.source, transfer.box]
                _target_view(image, transfer).copy_(transfer.grid.view("source", local, transfer.box.offsets))
        if remote:
            link = _Link(exchange)
            for each in _rounds(remote, exchange.world):
                link.exchange(each, pieces, image)


def expect_equal(exchange: Exchange, plan: SharePlan, held: Mapping[str, Sequence[HeldPiece]]) -> None:
    """Raise on all ranks unless tensors that become one tensor have the same bytes."""
    wrong = []
    for first, other, sub_plan in plan.equal:
        image = HostImage(sub_plan.owned(exchange.rank))
        gather_pieces(exchange, sub_plan, held, image)
        if image.targets and not np.array_equal(image.bytes(first), image.bytes(other)):
            wrong.append(f"{other} must equal {first}, since only one of them is used")

    def lead(ranks: list[list[str]]) -> bool:
        found = [each for rank in ranks for each in rank]
        if found:
            raise RestoreError(f"the tensor map does not fit: {'; '.join(found)}", found)
        return True

    if plan.equal:
        exchange.agree(wrong, lead, list[str], bool)


def _target_view(image: HostImage, transfer: Transfer) -> torch.Tensor:
    target = image.tensor(transfer.target)
    return transfer.grid.view("target", target, (0,) * target.dim())


def _rounds(transfers: Sequence[Transfer], world: int) -> Iterator[list[Transfer]]:
    """Split the transfers so that no rank sends and receives much more than `ROUND` bytes at once."""
    loads = [0] * world
    current: list[Transfer] = []
    for transfer in transfers:
        for rank in (transfer.sender, transfer.owner):
            loads[rank] += transfer.nbytes
        current.append(transfer)
        if max(loads[transfer.sender], loads[transfer.owner]) >= ROUND:
            yield current
            loads, current = [0] * world, []
    if current:
        yield current


class _Link:
    """Messages between the ranks of a process group."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        ranks = exchange.ranks
        self._members, self._group = ranks.members, ranks.pg
        devices = ranks.pg._device_types  # type: ignore[union-attr]
        self._device = torch.device("cpu")
        if not any(device.type == "cpu" for device in devices):
            self._device = torch.device(devices[0].type, current_device_index())

    def exchange(self, transfers: Sequence[Transfer], pieces: Mapping[Any, torch.Tensor], image: HostImage) -> None:
        """Send and receive one round, and place what arrives."""
        mine, operations = self._exchange.rank, []
        arriving: list[tuple[Transfer, torch.Tensor]] = []
        for number, transfer in enumerate(transfers):
            if mine == transfer.sender:
                local = pieces[transfer.source, transfer.box]
                view = transfer.grid.view("source", local, transfer.box.offsets)
                message = view.to(self._device).contiguous().view(-1).view(torch.uint8)
                operations.append(self._operation(dist.isend, message, transfer.owner, number))
            elif mine == transfer.owner:
                message = torch.empty(transfer.nbytes, dtype=torch.uint8, device=self._device)
                operations.append(self._operation(dist.irecv, message, transfer.sender, number))
                arriving.append((transfer, message))
        self._exchange.agree(True, all, bool, bool)  # a rank without memory fails before any other rank waits for it
        if operations:
            self._finish(operations)
        for transfer, message in arriving:
            received = message.view(BY_NAME[transfer.dtype]).view(transfer.grid.sizes)
            _target_view(image, transfer).copy_(received)

    def _operation(self, kind: Any, message: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        tag = (self._exchange.number * TAGS + tag % TAGS) % (1 << 31)
        return dist.P2POp(kind, message, self._members[peer], self._group, tag)

    def _finish(self, operations: list[dist.P2POp]) -> None:
        """Run the operations. Stop waiting when another rank has failed: the group's own timeout may be long."""

        def run() -> None:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if self._device.type != "cpu":
                torch.accelerator.synchronize()

        future = start_in_thread(run, "snapshot-io-gather")
        if not self._exchange.together(future.done):
            raise SnapshotError("another rank could not send its tensors")
        try:
            future.result()
        except RuntimeError as error:
            self._exchange.broke_off()
            raise SnapshotError(f"the process group could not send the tensors: {error}") from error


# The files of one rank's share of a version: whole tensors, or deltas, encoded by several threads.

GROUP = 256 << 20
"""Bytes of tensors that are compared before what changed is written. A longer tensor is compared alone."""
DELTA_SHARD = 256 << 20
"""Compressed bytes after which a file of deltas is written."""


class WrittenShare(msgspec.Struct, array_like=True):
    """A rank's report: the file and the digest of each tensor that it has written."""

    files: dict[str, str]
    digests: dict[str, str]
    nbytes: int
    """Bytes of the tensors that it owns."""
    stored: int
    """Bytes of its files."""


class ShareUpload:
    """The upload of one rank's share. `written` names the files, also after a failure."""

    def __init__(self, session: Session, version: int, attempt: str, rank: int, image: HostImage) -> None:
        self._session = session
        self.version = version
        self._folder = version_name(version)
        self._prefix = f"model-{attempt}-{rank:05d}"
        self._image = image
        self.written: list[str] = []
        self.sums: dict[str, TensorSums] = {}
        """The sums of each owned tensor."""
        self.share = WrittenShare({}, {}, image.nbytes, 0)

    async def write_full(self) -> None:
        leaves = [self._image.leaf(name) for name in self._image.targets]
        files = [plan_exact_file(leaves, group) for group in group_in_order([leaf.nbytes for leaf in leaves], SHARD)]
        for found in await self._write(leaves, files):
            for index, extent in enumerate(found.file.extents):
                digest = found.digests[index]
                name = leaves[extent.leaf].path
                table = found.tables.get(index, b"")
                self.sums[name] = TensorSums(digest, table or bytes.fromhex(digest.removeprefix("xxh3:")))
                self.share.digests[name] = digest

    async def write_delta(self, base: HostImage, base_sums: Mapping[str, TensorSums]) -> None:
        """Write the changes of the owned tensors."""
        names = list(self._image.targets)
        waiting: dict[str, EncodedDelta] = {}
        for group in group_in_order([len(self._image.bytes(name)) for name in names], GROUP):
            chosen = [names[index] for index in group]
            for name, encoded in zip(chosen, await self._encode(chosen, base, base_sums), strict=True):
                self.sums[name] = encoded.sums
                if encoded.compressed:
                    waiting[name] = encoded
            if sum(len(each.compressed) for each in waiting.values()) >= DELTA_SHARD:
                await self._write_deltas(waiting)
                waiting = {}
        if waiting:
            await self._write_deltas(waiting)

    async def _encode(
        self, names: Sequence[str], base: HostImage, base_sums: Mapping[str, TensorSums]
    ) -> list[EncodedDelta]:
        encoders: SimpleQueue[DeltaEncoder] = SimpleQueue()
        threads = self._session.settings.thread_count()
        for _ in range(threads):
            encoders.put(DeltaEncoder())

        def encode(name: str) -> EncodedDelta:
            encoder = encoders.get()
            try:
                return encoder.encode(self._image.bytes(name), base.bytes(name), base_sums[name])
            finally:
                encoders.put(encoder)

        longest_first = sorted(names, key=lambda name: -len(self._image.bytes(name)))
        found = await gather_limited(longest_first, lambda name: in_thread(encode, name), threads)
        by_name = dict(zip(longest_first, found, strict=True))
        return [by_name[name] for name in names]

    async def _write_deltas(self, deltas: Mapping[str, EncodedDelta]) -> None:
        leaves = []
        for name, delta in deltas.items():
            tensor = torch.frombuffer(delta.compressed, dtype=torch.uint8)
            leaves.append(Leaf(name, tensor, "uint8", (len(tensor),), len(tensor), tensor.data_ptr(), True))
            self.share.digests[name] = delta.sums.digest
        metadata = {name: checksum_text(delta.checksum) for name, delta in deltas.items()}
        await self._write(leaves, [plan_exact_file(leaves, range(len(leaves)), metadata)])

    async def write_extra(self, contents: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
        """Write small files, after all others. Return their sizes and digests."""
        self.written += contents
        await gather_limited(contents, lambda name: self._session.storage.put(f"{self._folder}/{name}", contents[name]))
        return {name: (len(data), digest_bytes(data)) for name, data in contents.items()}

    async def _write(self, leaves: Sequence[Leaf], files: Sequence[FilePlan]) -> list[WrittenFile]:
        session = self._session
        names = [f"{self._prefix}-{len(self.written) + number:05d}.safetensors" for number in range(len(files))]
        self.written += names
        source = Stager(leaves, copies=session.storage.limits.alignment > 1)
        writer = Writer(
            session.storage, source, session.budget, lambda _: None, wanted_part=session.settings.part_bytes
        )
        found = await writer.write(files, [f"{self._folder}/{name}" for name in names])
        for name, each in zip(names, found, strict=True):
            self.share.stored += each.file.size
            self.share.files.update({leaves[extent.leaf].path: name for extent in each.file.extents})
        return found
