"""A rank's share of a take: the leaves that it writes, its own and its part of the replicated ones, and its entries.

The shares of all ranks form the snapshot. No two ranks write the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.known_replication import KnownReplication, remember_replication
from snapshot.io.session import Session
from snapshot.manifest import document
from snapshot.manifest import entries as e
from snapshot.manifest.parts import NumberedEntries
from snapshot.plan.layout import Assignment, PartitionItem, partition_items
from snapshot.save.collect import collect_state
from snapshot.save.leaf_digests import digest_leaves
from snapshot.save.replication import (
    NOT_REPLICATED,
    Replication,
    ReplicationRules,
    agree_on_replicas,
    check_replicas,
    holders_of,
)
from snapshot.save.take_options import TakeRequest
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Blob, Leaf, hold_memory
from snapshot.state.model_state import ModuleMap
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.memory import ITEMSIZE, NAMES

FEW, SHORT = 64, 64 << 10
"""Maximum entries and bytes of objects of a state that is small."""
_nbytes = attrgetter("nbytes")


class Share:
    """What one rank writes: leaves, objects, and the entries that describe them. By default, all of a state."""

    def __init__(self, flat: Flattened, *, world: int) -> None:
        """`world`: the number of ranks that the snapshot is for."""
        self.world = world
        self.flat = flat
        self.leaves: list[Leaf] = list(flat.leaves)
        self.blobs: list[Blob] = list(flat.blobs)
        self.loads = [self.nbytes]
        """Bytes that each rank writes."""
        self.structure = ""
        """A digest of all ranks' structures; empty if they have none in common."""
        self.replicated: frozenset[str] = frozenset()
        """Paths of the entries that all ranks have."""

    @property
    def cut(self) -> bool:
        """True if the entries of each rank are in a file of their own, since they are many."""
        return self.world == 1 and len(self.flat.entries) > document.IN_ONE

    @property
    def nbytes(self) -> int:
        """Bytes of the leaves."""
        return sum(map(_nbytes, self.leaves))

    @property
    def is_small(self) -> bool:
        """True if all entries are computed in less time than another thread needs to begin."""
        return len(self.flat.entries) <= FEW and sum(len(blob.data) for blob in self.blobs) <= SHORT

    def take_leaves(self) -> list[Leaf]:
        """Return the leaves, once: this object does not refer to them afterwards."""
        leaves = self.leaves
        self.leaves, self.flat.leaves, self.flat.seen, self.flat.memory = [], [], {}, []
        return leaves

    def entries(self, written: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return this rank's manifest entries: its own and sharded ones, and the replicated ones.

        `written`: all entries of the state by path; None for one that another rank writes.
        """
        return NumberedEntries(0, written), {}

    def committed(self) -> None:
        """See that the snapshot is committed."""


class RankShare(Share):
    """The share of a rank of an application, whose ranks agreed on who writes what several of them have."""

    def __init__(
        self,
        exchange: Exchange,
        flat: Flattened,
        replication: Replication = NOT_REPLICATED,
        statefuls: Sequence[ModuleMap] = (),
    ) -> None:
        super().__init__(flat, world=exchange.world)
        self._exchange = exchange
        self._replication = replication
        self.statefuls = statefuls
        """The objects of the app state, with their modules and optimizers."""
        self.structure, self.replicated = replication.structure, replication.paths
        if not exchange.alone:
            self.leaves, self.loads = [], list(replication.loads)
            self._choose_plain()
        self._meshes: dict[int, tuple[Any, Any]] = {}
        for path, shards in flat.shards.items():
            self._header(path, shards)
        self._choose_pieces()
        known = len(flat.leaves) if exchange.alone else 0
        flat.memory = hold_memory(flat.leaves) + hold_memory(self.leaves[known:])
        if exchange.rank != 0:
            self.blobs = [blob for blob in flat.blobs if blob.path not in replication.paths]

    def _choose_plain(self) -> None:
        """Choose the leaves of this rank alone, and its share of the replicated ones."""
        flat, paths = self.flat, self.replicated
        common: dict[str, list[Leaf]] = {}
        by_path = {leaf.path: leaf for leaf in flat.leaves}
        for leaf in flat.leaves:
            if leaf.entry in paths:
                common.setdefault(leaf.entry, []).append(leaf)
            else:
                self.leaves.append(leaf)
        for path, owner in list(flat.ties.items()):
            if (path in paths) != (owner in paths):
                # Only one of two names of a tensor is replicated: the other one gets bytes of its own, since the two
                # are written by different ranks.
                del flat.ties[path]
                again = by_path[owner].copy_for(path)
                if path in paths:
                    common[path] = [again]
                else:
                    self.leaves.append(again)
        for path in self._replication.from_leader & common.keys():
            group = common.pop(path)
            self.loads[0] += sum(leaf.nbytes for leaf in group)
            self.leaves += group if self._exchange.rank == 0 else []
        groups = [common[path] for path in sorted(common)]
        items = [item_of(group) for group in groups]
        for rank, share in enumerate(partition_items(items, self.loads)):
            for dealt in share:
                self.loads[rank] += size_of(items, dealt)
                if rank == self._exchange.rank:
                    group = groups[dealt.item]
                    self.leaves += group if dealt.box is None else [group[0].take_box(dealt.box)]

    def _header(self, path: str, shards: Shards) -> None:
        """Add the entry of a sharded tensor, without shards yet. Every holder has such an entry."""
        shape, dtype, mesh = shards.shape, NAMES[shards.dtype], None
        if not shards.is_open:
            held = shards.mesh if shards.mesh is not None else shards.ranks
            if id(held) not in self._meshes:  # tensors of one mesh share its entry
                self._meshes[id(held)] = held, e.Mesh.from_lists(self._numbered(held))
            mesh = self._meshes[id(held)][1]
        if shards.kind == "DTensor":
            self.flat.entries[path] = e.DTensorEntry(dtype, shape, [], mesh, shards.placements)
        else:
            self.flat.entries[path] = e.ShardedTensorEntry(dtype, shape, [], mesh)

    def _choose_pieces(self) -> None:
        """Choose this rank's share of the boxes that it holds. One of a box's holders writes it."""
        groups: dict[tuple[int, ...], list[tuple[str, LocalPiece]]] = {}
        for path in sorted(self.flat.shards):
            for number, piece in enumerate(self.flat.shards[path].pieces):
                if (
                    not piece.replica
                    and (path, number) not in self._replication.written_elsewhere
                    and path not in self.flat.ties
                ):
                    groups.setdefault(holders_of(self._exchange, piece), []).append((path, piece))
        for ranks, pieces in groups.items():
            share: Sequence[Assignment] = [Assignment(index, None) for index in range(len(pieces))]
            if len(ranks) > 1:
                items = [PartitionItem(piece.box.sizes, piece.tensor.element_size()) for _, piece in pieces]
                share = partition_items(items, [0] * len(ranks))[ranks.index(self._exchange.rank)]
            for dealt in share:
                path, piece = pieces[dealt.item]
                leaf = self._leaf(path, piece)
                self.leaves.append(leaf if dealt.box is None else leaf.take_box(dealt.box))

    def _leaf(self, path: str, piece: LocalPiece) -> Leaf:
        entries = self.flat.entries  # no reference to `self`, so that the leaf can be freed

        def wrap(path: str, stored: e.TensorEntry | e.ChunkedTensorEntry) -> None:
            entry: Any = entries[path]
            entry.shards += [e.Shard(box.offsets, box.sizes, tensor) for box, tensor in stored.pieces()]

        whole = Leaf(path, piece.tensor, NAMES[piece.tensor.dtype], self.flat.shards[path].shape, 0, wrap=wrap)
        return Leaf.box_of(whole, piece.box, piece.tensor)

    def _numbered(self, mesh: Any) -> Any:
        """Return a mesh in the rank numbers of this call."""
        if isinstance(mesh, (list, tuple)):
            return [self._numbered(each) for each in mesh]
        return mesh if self._exchange.alone else self._exchange.ranks.number(mesh)

    @property
    def cut(self) -> bool:
        return self._replication.cut or (self._exchange.alone and super().cut)

    @property
    def replicas(self) -> frozenset[str]:
        """The paths of values that should be equal on all ranks."""
        known = self._replication
        return frozenset() if self._exchange.alone else known.paths - known.from_leader

    def committed(self) -> None:
        """Remember what is replicated, for the next take of the same structure."""
        known = self._replication
        plan = KnownReplication(known.structure, known.paths, known.written_elsewhere)
        remember_replication(self._exchange.ranks, known.own, plan)

    # The manifest

    def entries(self, written: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        rank, paths, shards = self._exchange.rank, self.replicated, self.flat.shards
        if self._exchange.alone and not shards and not paths:
            return super().entries(written)
        own: dict[str, Any] = {}
        common: dict[str, Any] = {}
        for path, made in written.items():
            entry = made
            if entry is None or (isinstance(entry, e.TensorPartsEntry) and not entry.parts):
                continue  # another rank writes it
            if path in shards:
                own[f"{self._lowest(shards[path])}/{path}"] = entry
            elif path in self.flat.once and path not in paths and not self._exchange.alone:
                common[f"0/{path}"] = replace(entry, replicated=True)
            elif path not in paths:
                own[f"{rank}/{path}"] = entry
            elif rank == 0 or not (entry.is_value or entry.is_container):
                if not (self._exchange.alone and entry.is_container):
                    entry = replace(entry, replicated=True)  # a copy: flattening may reuse the entry
                common[f"0/{path}"] = entry
        return own, common

    def _lowest(self, shards: Shards) -> int:
        """Return the rank under whose number a sharded tensor is listed: its first holder, or 0 if unknown."""
        if shards.is_open or self._exchange.alone:
            return 0
        return self._exchange.ranks.numbers(shards.ranks or ())[0]


def item_of(leaves: Sequence[Leaf]) -> PartitionItem:
    """Return the leaves of one entry as an item that ranks share. Only a single leaf may be split."""
    first = leaves[0]
    if len(leaves) == 1 and first.splits:
        return PartitionItem(first.shape, ITEMSIZE[first.dtype])
    return PartitionItem((sum(leaf.nbytes for leaf in leaves),), 1, splits=False)


def size_of(items: Sequence[PartitionItem], dealt: Assignment) -> int:
    """Return the bytes of an item, or of a box of it."""
    item = items[dealt.item]
    return item.nbytes if dealt.box is None else dealt.box.numel * item.itemsize


def collect_rank_share(
    exchange: Exchange, session: Session, statefuls: Sequence[ModuleMap], options: TakeRequest, globs: Sequence[str]
) -> RankShare:
    """Collect the application's state, and agree with the other ranks on who writes shared values.

    `globs`: the `replicated` globs that all ranks gave.
    """
    flat = collect_state(statefuls, options.prepare, options.exclude, globs, options.allow_pickle)
    digest = partial(digest_leaves, session)
    replication = agree_on_replicas(exchange, flat, ReplicationRules(statefuls, globs, exchange.ranks), digest)
    if options.check_replicated:
        check_replicas(exchange, flat, replication, digest)
    return RankShare(exchange, flat, replication, statefuls)
