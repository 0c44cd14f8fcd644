"""Collecting: the application's state, flattened, and which of its values are known to be replicated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import msgspec
import torch
import xxhash
from msgspec.structs import replace

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import Ranks
from snapshot.distributed.known_replication import KnownReplication, replication_memory
from snapshot.errors import SnapshotError, UnsafeObjectError
from snapshot.events import log, warn
from snapshot.io.system import PerProcess
from snapshot.manifest import entries as e
from snapshot.manifest.entries import DictEntry, Extra
from snapshot.manifest.parts import NumberedEntries
from snapshot.manifest.paths import encode_component, encode_key
from snapshot.manifest.plain_tree import PLAIN_TREE
from snapshot.manifest.values import Scalar
from snapshot.plan import consensus as a
from snapshot.plan.layout import Assignment, PartitionItem, partition_items
from snapshot.plan.names import find_unmatched, matcher
from snapshot.save.take_request import TakeRequest
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Blob, Leaf, Prepare
from snapshot.state.model_state import ModelState
from snapshot.state.optimizers import has_param_groups, make_record
from snapshot.state.rng import RNGState
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.composite import find_stride_order
from snapshot.tensors.digest import digest_range, split_digests
from snapshot.tensors.geometry import split_shape
from snapshot.tensors.memory import ITEMSIZE, NAMES, is_plain, wrap_memory
from snapshot.text import listed


def collect_state(
    app_state: Mapping[str, Any],
    prepare: Prepare | None,
    exclude: Sequence[str],
    replicated: Sequence[str],
    allow_pickle: str | bool = "warn",
) -> Flattened:
    """Call each `state_dict()` and flatten the result. The RNG state is captured first and restored last."""
    flat = Flattened(
        prepare, matcher(exclude) if exclude else None, fits_tree=None if exclude else partial(_fits_tree, replicated)
    )
    rng = {key: value.state_dict() for key, value in app_state.items() if isinstance(value, RNGState)}
    try:
        for key in sorted(app_state):
            state = rng[key] if key in rng else app_state[key].state_dict()
            flat.add(encode_component(key), state)
            _record_optimizer(flat, encode_component(key), app_state[key], state)
    finally:
        for key, state in rng.items():
            app_state[key].load_state_dict(state)
    for glob in find_unmatched(replicated, flat.entries) if replicated else ():
        warn(f"replicated: the glob {glob!r} matches nothing in the app state")
    for glob in find_unmatched(exclude, [*flat.entries, *flat.excluded]) if exclude else ():
        warn(f"exclude: the glob {glob!r} matches nothing in the app state")
    report_pickles(flat.pickled, flat.lossy, allow_pickle)
    apart = find_overlaps(flat.leaves)
    for leaf, owner in apart:
        leaf.extra = replace(leaf.extra or Extra(), shares=owner.path)
    lines = [f"{leaf.path} shares memory with {owner.path}" for leaf, owner in apart]
    logged = _logged.get()
    if lines and (text := listed(lines)) not in logged:
        logged.add(text)
        log.warning("stored separately; if they are restored as new tensors, they do not share memory:%s", text)
    return flat


def _fits_tree(replicated: Sequence[str], path: str, value: Any) -> bool:
    """Return True if a tree of plain values may be one object: no glob matches only values in it."""
    if not replicated:
        return True
    below, matches = path, matcher(replicated)
    while type(value) in (list, dict) and value:
        name, value = next(iter(value.items() if type(value) is dict else enumerate(value)))
        text = encode_key(name)
        below += f"/{text if text is None else encode_component(str(text))}"
    return matches(path) == matches(below)


_CURE = (
    "replace each by tensors, plain values or a dataclass, store its state_dict(), or leave it out with exclude=[...]"
)


def report_pickles(pickled: Sequence[str], lossy: Sequence[str], allow_pickle: str | bool = "warn") -> None:
    """Warn about values that were pickled, or refuse them. Warn about values that lost attributes."""
    if pickled and allow_pickle == "error":
        raise UnsafeObjectError(
            f"only a pickle can hold these objects, and nothing was written; {_CURE}:{listed(pickled)}"
        )
    if pickled and allow_pickle == "warn":
        warn(
            "stored as pickles, since no other format can hold them; reading them may need allow_pickle=True; "
            f"{_CURE}:{listed(pickled)}"
        )
    if lossy:
        warn(f"stored without Python attributes; only data and class are restored:{listed(lossy)}")


_logged: PerProcess[set[str]] = PerProcess(set)
"""Messages about shared memory that were already logged: a run logs each one only once."""


def find_overlaps(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Leaf]]:
    """Return pairs of tensors: one that begins within the memory of another, and the other one, which has no gaps."""
    found: list[tuple[Leaf, Leaf]] = []
    order = sorted(range(len(leaves)), key=[leaf.address for leaf in leaves].__getitem__)
    reach = 0
    owner: Leaf | None = None
    for leaf in map(leaves.__getitem__, order):
        if owner is not None and leaf.address < reach and leaf.tensor.device == owner.tensor.device:
            found.append((leaf, owner))
        if leaf.address and leaf.address + leaf.nbytes > reach and (leaf.plain or _is_dense(leaf.tensor)):
            reach, owner = leaf.address + leaf.nbytes, leaf
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    return find_stride_order(tensor) is not None


class ReplicationRules:
    """Which paths are replicated across ranks, by the user's globs or by known wrappers."""

    def __init__(self, app_state: Mapping[str, Any], globs: Sequence[str], ranks: Ranks) -> None:
        self._globs: Callable[[str], bool] = matcher(globs) if globs else lambda path: False
        self._inferred: dict[str, bool] = {}
        for key, stateful in app_state.items():
            self._inferred |= _of_ddp(encode_component(key), stateful, ranks)
        self._any = bool(globs or self._inferred)
        self.own = tuple(encode_component(key) for key, stateful in app_state.items() if isinstance(stateful, RNGState))
        """Keys that are never shared: every rank has its own random state."""

    def select(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the paths that count as replicated without comparing their bytes."""
        return frozenset(filter(self.is_replicated, paths)) if self._any else frozenset()

    def is_private(self, path: str) -> bool:
        """Return True if a path is never shared."""
        return path.partition("/")[0] in self.own

    def matches_glob(self, path: str) -> bool:
        """Return True if a glob matches the path."""
        return self._globs(path)

    def is_replicated(self, path: str) -> bool:
        """Return True if the path counts as replicated without comparing its bytes."""
        return path in self._inferred or self._globs(path)

    def is_led(self, path: str) -> bool:
        """Return True if the leader's value is saved."""
        return self._inferred.get(path, False)


def _of_ddp(key: str, stateful: Any, ranks: Ranks) -> dict[str, bool]:
    """Return the names that `DistributedDataParallel` keeps equal on all ranks of this group.

    These are the parameters, and the buffers, which it broadcasts from its first rank before each forward pass. So the
    first rank's buffers are saved.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    named = isinstance(stateful, ModelState)
    model = stateful.model if named else stateful
    if parallel is None or not isinstance(model, torch.nn.Module):
        return {}
    found: dict[str, bool] = {}
    below = f"{key}/model" if named else key
    for prefix, module in model.named_modules():
        if not isinstance(module, parallel.DistributedDataParallel):
            continue
        members = torch.distributed.get_process_group_ranks(module.process_group)
        if tuple(members) != ranks.members:
            continue  # several groups with their own models, or a group without some of the calling ranks
        start = f"{prefix}.module." if prefix else "module."
        if named:  # names belong to the wrapped model
            start = f"{prefix}." if prefix else ""
        ignored = set(module.parameters_to_ignore)
        for name, _ in module.module.named_parameters(remove_duplicate=False):
            if name not in ignored:
                found[f"{below}/{encode_component(start + name)}"] = False
        for name, _ in module.module.named_buffers(remove_duplicate=False):
            if module.broadcast_buffers and name not in ignored:
                found[f"{below}/{encode_component(start + name)}"] = True
    return found


def _record_optimizer(flat: Flattened, key: str, stateful: Any, state: Any) -> None:
    """Record which model's parameters an optimizer's state dict belongs to."""
    if isinstance(stateful, ModelState):
        optimizers, path = stateful.optimizers, f"{key}/optim"
        held = state["optim"] if optimizers else {}
        names = [name for group in held.get("param_groups", ()) for name in group["params"]]
        if "param_groups" not in held:  # flat
            flat_names = (name for name in held if isinstance(name, str) and name.startswith("param_groups."))
            names = list(dict.fromkeys(name.partition(".")[2].rpartition(".")[0] for name in flat_names))
        parameters = [state["model"].get(name) for name in names]
    elif isinstance(stateful, torch.optim.Optimizer) and has_param_groups(stateful, state):
        optimizers, path = [stateful], key
        parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    else:
        return
    entry = flat.entries.get(path)
    if optimizers and isinstance(entry, DictEntry):
        flat.entries[path] = replace(entry, optimizer=make_record(optimizers, parameters))


# Replication: which entries are replicated across ranks, and which rank writes each.
#
# Candidates are values that match the globs, values that `DistributedDataParallel` keeps equal, and small values with
# equal bits. Values that all ranks have are recorded and written once. The result is cached while the structure stays
# the same.

FEW, SHORT = 64, 64 << 10
"""Maximum entries and bytes of objects of a state that is small."""
SMALL = 1024
"""Tensors up to this many bytes count as replicated if they are equal on all ranks, without a glob."""
_digest = xxhash.xxh3_128_digest


@dataclass(frozen=True)
class Replication:
    """Which entries are replicated across ranks, and which rank writes each."""

    structure: str
    """A digest of all ranks' structures; empty for a single rank."""
    paths: frozenset[str]
    """Paths of the replicated entries."""
    loads: tuple[int, ...]
    """Bytes that each rank writes of its own values and of shards."""
    cut: bool = False
    written_elsewhere: frozenset[tuple[str, int]] = frozenset()
    """Boxes that another rank writes, as (path, number of the piece)."""
    from_leader: frozenset[str] = frozenset()
    """The subset of `paths` that the leader writes, because the leader's values are the ones to save."""
    own: str = ""
    """This rank's own structure."""

    def known_plan(self) -> KnownReplication:
        """Return the plan that the next take of the same structure can reuse."""
        return KnownReplication(self.structure, self.paths, self.written_elsewhere)


@dataclass
class ReplicaCandidates:
    """This rank's candidates for replication, with a digest for each, and its whole structure."""

    items: dict[str, bytes] = field(default_factory=dict)
    """Path -> a digest of everything that must be equal."""
    names: dict[str, bytes] = field(default_factory=dict)
    """Path of a value that matches a glob -> a digest of its name alone."""
    structure: str = ""

    def sketch(self, paths: frozenset[str]) -> bytes:
        """Return digests of values that are not replicated, to detect that all ranks have one of them now."""
        left = sorted(path for path in self.items if path not in paths)[:SKETCH]
        return b"".join(self.items[path] for path in left)

    def digest(self, paths: frozenset[str] | None = None) -> str:
        """Return a digest of all candidates, or of some."""
        items = self.items
        chosen = items.values() if paths is None else (items[path] for path in paths if path in items)
        return digest_range(b"".join(sorted(chosen)))


def find_candidates(flat: Flattened, rules: ReplicationRules) -> ReplicaCandidates:
    """Find the replication candidates of this rank."""
    found = ReplicaCandidates()
    structure: list[str] = []
    leaves = _by_path(flat)
    blobs = {blob.path: blob for blob in flat.blobs}
    for path, entry in flat.entries.items():
        if path in flat.shards or rules.is_private(path):
            structure.append(path)
            continue
        wanted = rules.is_replicated(path)
        if isinstance(entry, Scalar):
            kind = type(entry).__name__
            found.items[path] = _digest(f"{path}\0{kind}\0{entry.identity}".encode())
            if rules.matches_glob(path):
                found.names[path] = _digest(f"{path}\0value".encode())
            structure.append(f"{path}\0{kind}\0{wanted}")
        elif path in blobs:
            blob = blobs[path]
            if wanted or len(blob.data) <= SMALL or blob.serializer == PLAIN_TREE:
                found.items[path] = _digest(f"{path}\0{blob.serializer}\0".encode() + _digest(blob.data))
            structure.append(f"{path}\0{blob.serializer}\0{wanted}")
        elif isinstance(entry, e.Container):
            text = f"{path}\0{msgspec.json.encode(entry).decode()}"
            found.items[path] = _digest(text.encode())
            structure.append(text)
        else:
            held = leaves.get(flat.ties.get(path, path), [])
            text = f"{_identity_of(path, flat.ties.get(path, path), held)}\0{rules.is_led(path)}"
            structure.append(f"{text}\0{wanted}")
            if wanted:
                found.items[path] = _digest(text.encode())
            elif all(leaf.nbytes <= SMALL for leaf in held):
                found.items[path] = _digest(text.encode() + b"".join(map(bytes_of, held)))
    for path, shards in flat.shards.items():
        boxes = [(piece.box, piece.replica) for piece in shards.pieces]
        structure.append(f"{path}\0{shards.layout}\0{shards.dtype}\0{shards.shape}\0{boxes}")
    found.structure = digest_range("\n".join(structure).encode("utf-8", "surrogatepass"))
    return found


def _by_path(flat: Flattened) -> dict[str, list[Leaf]]:
    """Return the leaves of each entry. A tensor of several parts has several leaves."""
    leaves: dict[str, list[Leaf]] = {}
    for leaf in flat.leaves:
        leaves.setdefault(leaf.entry, []).append(leaf)
    return leaves


def _identity_of(path: str, owner: str, leaves: Sequence[Leaf]) -> str:
    """Return all properties, except bytes, that must be equal for replicated tensors."""
    return "\0".join(
        f"{path}\0{owner}\0{leaf.path[len(owner) :]}\0{leaf.dtype}\0{leaf.shape}\0{leaf.note}" for leaf in leaves
    )


def bytes_of(leaf: Leaf) -> bytes:
    """Return the bytes of a small tensor."""
    tensor = leaf.tensor.detach()
    if not leaf.nbytes:
        return b""
    if leaf.plain:
        return bytes(wrap_memory(tensor.data_ptr(), leaf.nbytes))
    made = torch.empty(leaf.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
    return bytes(wrap_memory(made.data_ptr(), leaf.nbytes))


def agree_on_replicas(exchange: Exchange, flat: Flattened, rules: ReplicationRules) -> Replication:
    """Agree with the other ranks on the replicated entries."""
    if exchange.alone:
        return Replication("", rules.select(flat.entries), (0,))
    found = find_candidates(flat, rules)
    asks = any(piece.holders is None and not piece.replica for held in flat.shards.values() for piece in held.pieces)
    memory = replication_memory(exchange.ranks)
    known = memory.find(found.structure) or (None if asks else memory.restored)
    basis = known.structure if known else a.FIRST
    paths = frozenset(found.items) if known is None else known.paths & found.items.keys()
    spare = known.written_elsewhere if known else frozenset()
    have, expected = _layout_sums(exchange, flat)
    for _ in range(MOST_ASKED):
        record = a.RankRecord(
            found.structure,
            basis,
            found.digest(paths),
            found.digest(),
            have,
            expected,
            own_bytes(exchange, flat, paths, spare),
            _count_entries(flat, paths, leader=exchange.rank == 0),
            asks and basis == a.FIRST,
            found.sketch(paths) if basis not in (a.FIRST, a.ASKED) else b"",
        )
        answer = exchange.agree(record, a.compare_records, a.RankRecord, a.ConsensusReply)
        if answer.settled:
            break
        paths, spare = _exchange_details(exchange, flat, found, answer)
        basis = a.ASKED
    else:
        raise SnapshotError("the ranks cannot agree on replicated values: their states change during the save")
    if basis != answer.structure:
        _warn_of_differences(flat, rules, paths)
    return Replication(
        answer.structure,
        paths,
        tuple(answer.loads),
        answer.cut,
        spare,
        frozenset(filter(rules.is_led, paths)),
        found.structure,
    )


MOST_ASKED = 4
SKETCH = 64
"""The number of values that were not replicated last time and are checked again."""


def _exchange_details(
    exchange: Exchange, flat: Flattened, found: ReplicaCandidates, answer: a.ConsensusReply
) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
    """Send the details that the leader requests. Return the replicated paths, and the boxes that other ranks write."""
    details = a.Details()
    if exchange.rank in answer.speakers:
        details.items = b"".join([*found.items.values(), *found.names.values()])
    for path, shards in flat.shards.items() if answer.boxes else ():
        boxes = [(piece.box.offsets, piece.box.sizes, piece.replica) for piece in shards.pieces]
        if shards.is_open:
            details.boxes.append(a.ShardBoxes(path, str(shards.dtype), shards.shape, boxes))
    for path, shards in flat.shards.items() if answer.layouts else ():
        if not shards.is_open and exchange.ranks.among(shards.ranks or ()):
            details.layouts[path] = _layout_text(flat, path, shards), list(_holder_numbers(exchange, path, shards))
    settlement = exchange.agree(details, lambda all_: a.settle_details(all_, answer.speakers), a.Details, a.Settlement)
    common = set(split_digests(settlement.items))
    differ = [path for path, name in found.names.items() if name in common and found.items[path] not in common]
    if differ:
        raise SnapshotError(
            "declared as replicated, but not equal on all ranks:"
            + listed([f"{path} (here {_value_text(flat.entries[path])})" for path in differ])
        )
    paths = frozenset(path for path, item in found.items.items() if item in common)
    spare = frozenset((path, number) for rank, path, number in settlement.spare if rank == exchange.rank)
    return paths, spare


def _value_text(entry: Any) -> str:
    return str(entry.readable or entry.serialized_value)[:80]


def _layout_sums(exchange: Exchange, flat: Flattened) -> tuple[bytes, bytes]:
    """Return this rank's terms for the check that all holders of a sharded tensor have the same layout."""
    have, expected = [], []
    for path, shards in flat.shards.items():
        if shards.is_open:
            continue
        numbers = _holder_numbers(exchange, path, shards)
        if not exchange.ranks.among(shards.ranks or ()):
            continue  # ranks outside the mesh also have a DTensor object
        digest = a.digest_layout(path, _layout_text(flat, path, shards))
        have.append(digest)
        if numbers[0] == exchange.rank:
            expected.append(digest * len(numbers))
    return a.sum_digests(have), a.sum_digests(expected)


def _layout_text(flat: Flattened, path: str, shards: Shards) -> str:
    """Return the properties that all holders must agree on, including ties, which affect the division of work."""
    return f"{shards.layout}, the same as {flat.ties[path]}" if path in flat.ties else shards.layout


def _holder_numbers(exchange: Exchange, path: str, shards: Shards) -> tuple[int, ...]:
    """Return the ranks that hold a sharded tensor, in the rank numbers of this call."""
    numbers = exchange.ranks.numbers(shards.ranks or ())
    if len(numbers) != len(shards.ranks or ()):
        gone = [rank for rank in shards.ranks or () if exchange.ranks.number(rank) is None]
        raise SnapshotError(f"{path}: rank {gone[0]} holds a shard of it, but is not in the given process group")
    return numbers


def holders_of(exchange: Exchange, piece: LocalPiece) -> tuple[int, ...]:
    """Return the ranks that hold the same box, in the rank numbers of this call."""
    if piece.holders is None or len(piece.holders) == 1 or exchange.alone:
        return (exchange.rank,)
    return exchange.ranks.numbers(piece.holders)


def own_bytes(exchange: Exchange, flat: Flattened, paths: frozenset[str], spare: frozenset[tuple[str, int]]) -> int:
    """Return the bytes that only this rank can write, plus its share of bytes that several ranks could."""
    total = sum(leaf.nbytes for leaf in flat.leaves if leaf.entry not in paths)
    total += sum(len(blob.data) for blob in flat.blobs if blob.path not in paths)
    for path, shards in flat.shards.items():
        for number, piece in enumerate(shards.pieces):
            if not piece.replica and (path, number) not in spare:
                total += piece.tensor.nbytes // len(holders_of(exchange, piece))
    return total


def _count_entries(flat: Flattened, paths: frozenset[str], *, leader: bool) -> int:
    pieces = sum(len(shards.pieces) for shards in flat.shards.values())
    return pieces + len(flat.entries) - (0 if leader else len(paths))


def _warn_of_differences(flat: Flattened, rules: ReplicationRules, paths: frozenset[str]) -> None:
    left = [
        path
        for path, entry in flat.entries.items()
        if path not in paths
        and rules.is_replicated(path)
        and not rules.is_private(path)
        and path not in flat.shards
        and not isinstance(entry, e.Container)
    ]
    sharded = [path for path in flat.shards if rules.matches_glob(path)]
    if left:
        warn(
            "replicated: ignored, since not all ranks have it with the same dtype and shape; each rank's own value "
            f"is saved:{listed(sorted(left))}"
        )
    if sharded:
        warn(f"replicated: ignored for sharded tensors, whose layout defines their replicas:{listed(sharded)}")


def check_replicas(exchange: Exchange, flat: Flattened, shared: Replication) -> None:
    """Compare replicated values and shared boxes across ranks by digests of all bytes. Raise if they differ."""
    if exchange.alone:
        return
    mine: dict[str, str] = {}
    leaves = _by_path(flat)
    for path in shared.paths - shared.from_leader:
        for leaf in leaves.get(flat.ties.get(path, path), ()):
            mine[path + leaf.path.removeprefix(leaf.entry).replace("%[", "[")] = leaf_digest(leaf)
    for path, shards in flat.shards.items():
        for piece in shards.pieces:
            if len(holders_of(exchange, piece)) > 1:
                among = ", ".join(map(str, holders_of(exchange, piece)))
                name, dtype = f"{path}[{piece.box}] (on the ranks {among})", NAMES[piece.tensor.dtype]
                plain = is_plain(piece.tensor)
                mine[name] = leaf_digest(
                    Leaf(name, piece.tensor, dtype, piece.box.sizes, piece.tensor.nbytes, 0, plain)
                )

    def lead(all_: list[dict[str, str]]) -> bool:
        seen: dict[str, tuple[int, str]] = {}
        faults = {
            name: f"{name}: rank {rank} and rank {seen[name][0]} have different values"
            for rank, digests in enumerate(all_)
            for name, digest in digests.items()
            if seen.setdefault(name, (rank, digest))[1] != digest
        }
        if faults:
            raise SnapshotError(f"declared as replicated, but not equal on all ranks:{listed(sorted(faults.values()))}")
        return True

    exchange.agree(mine, lead, dict[str, str], bool)


def leaf_digest(leaf: Leaf) -> str:
    """Return a digest of all of a tensor's bytes, computed piece by piece."""
    running = xxhash.xxh3_128()
    for box in split_shape(leaf.shape, max(1, PIECE // ITEMSIZE[leaf.dtype])):
        running.update(bytes_of(leaf.take_box(box)) if box.sizes else bytes_of(leaf))
    return running.hexdigest()


PIECE = 8 << 20
"""Bytes that are compared at once."""


# A rank's share of a take: the leaves that it writes, its own and replicated ones, and its entries.
#
# The shares of all ranks form the snapshot. No two ranks write the same bytes.

_nbytes = attrgetter("nbytes")


class RankShare:
    """The leaves and entries that this rank writes."""

    def __init__(self, exchange: Exchange, flat: Flattened, replication: Replication) -> None:
        self._exchange = exchange
        self.world = exchange.world
        self.flat = flat
        self.replication = replication
        self.leaves: list[Leaf] = []
        self.loads = list(replication.loads)
        """Bytes that each rank writes."""
        self._choose_plain()
        self._meshes: dict[int, tuple[Any, Any]] = {}
        for path, shards in flat.shards.items():
            self._header(path, shards)
        self._choose_pieces()
        writes_shared = exchange.rank == 0
        self.blobs: list[Blob] = [blob for blob in flat.blobs if writes_shared or blob.path not in replication.paths]

    @property
    def alone(self) -> bool:
        """True if no other rank writes."""
        return self._exchange.alone

    def _choose_plain(self) -> None:
        """Choose the leaves of this rank alone, and its share of the replicated ones."""
        flat, paths = self.flat, self.replication.paths
        if self._exchange.alone:
            self.leaves = list(flat.leaves)
            self.loads = [self.nbytes]
            return
        common: dict[str, list[Leaf]] = {}
        by_path = {leaf.path: leaf for leaf in flat.leaves}
        for leaf in flat.leaves:
            if leaf.entry in paths:
                common.setdefault(leaf.entry, []).append(leaf)
            else:
                self.leaves.append(leaf)
        for path, owner in list(flat.ties.items()):
            if (path in paths) != (
                owner in paths
            ):  # only one of two tied names is replicated: the other one gets its own bytes
                del flat.ties[path]
                again = by_path[owner].copy_for(path)
                if path in paths:
                    common[path] = [again]
                else:
                    self.leaves.append(again)
        for path in self.replication.from_leader & common.keys():
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
                    and (path, number) not in self.replication.written_elsewhere
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
    def replicas(self) -> frozenset[str]:
        """The paths of values that should be equal on all ranks."""
        known = self.replication
        return frozenset() if self._exchange.alone else known.paths - known.from_leader

    @property
    def nbytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(map(_nbytes, self.leaves))

    @property
    def is_small(self) -> bool:
        """True if all entries are computed in less time than another thread needs to begin."""
        return len(self.flat.entries) <= FEW and sum(len(blob.data) for blob in self.blobs) <= SHORT

    def take_leaves(self) -> list[Leaf]:
        """Return the leaves, once: this object does not refer to them afterwards."""
        leaves = self.leaves
        self.leaves, self.flat.leaves, self.flat.seen = [], [], {}
        return leaves

    # The manifest

    def entries(self, written: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Return this rank's manifest entries: its own and sharded ones, and the replicated ones."""
        rank, paths, shards = self._exchange.rank, self.replication.paths, self.flat.shards
        if self._exchange.alone and not shards and not paths:
            return NumberedEntries(0, written), {}
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
            elif rank == 0 or not isinstance(entry, (Scalar, e.Container)):
                if not (self._exchange.alone and isinstance(entry, e.Container)):
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
    exchange: Exchange, app_state: Mapping[str, Any], options: TakeRequest, globs: Sequence[str]
) -> RankShare:
    """Collect the application's state, and agree with the other ranks on who writes shared values.

    `globs`: the `replicated` globs that all ranks gave.
    """
    flat = collect_state(app_state, options.prepare, options.exclude, globs, options.allow_pickle)
    replication = agree_on_replicas(exchange, flat, ReplicationRules(app_state, globs, exchange.ranks))
    if options.check_replicated:
        check_replicas(exchange, flat, replication)
    return RankShare(exchange, flat, replication)
