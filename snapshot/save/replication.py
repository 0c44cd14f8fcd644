"""Replication: which values all ranks have. `rank_share.py` decides which rank writes each.

Candidates are values that match the globs, values that `DistributedDataParallel` keeps equal, and small values with
equal bits. The optimizer's state of a parameter under `DistributedDataParallel` is a candidate if the digests of its
bytes are equal. Values that all ranks have are recorded and written once. The result is cached while the structure
stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash
from torch.nn.parallel import DistributedDataParallel

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import Ranks
from snapshot.distributed.known_replication import replication_memory
from snapshot.errors import SnapshotError
from snapshot.events import log, warn
from snapshot.io.system import PerProcess
from snapshot.manifest.containers import Container
from snapshot.manifest.paths import encode_component
from snapshot.manifest.plain_tree import PLAIN_TREE
from snapshot.manifest.values import Scalar
from snapshot.plan import consensus
from snapshot.plan.names import matcher
from snapshot.state.flatten import Flattened
from snapshot.state.foreign_parts import find_split_paths, is_split
from snapshot.state.leaves import Leaf
from snapshot.state.model_state import ModuleMap
from snapshot.state.rng import RNGState
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.buffers import wrap_memory
from snapshot.tensors.digest import digest_range, split_digests
from snapshot.tensors.memory import NAMES
from snapshot.text import listed


class ReplicationRules:
    """Which paths are replicated across ranks, by the user's globs or by known wrappers."""

    def __init__(self, statefuls: Sequence[ModuleMap], globs: Sequence[str], ranks: Ranks) -> None:
        self._globs: Callable[[str], bool] = matcher(globs) if globs else lambda path: False
        self._inferred: dict[str, bool] = {}
        equal: dict[int, str] = {}
        for each in statefuls:
            for prefix, wrapper in _list_ddp(each, ranks):
                self._inferred |= _names_of_ddp(each, prefix, wrapper)
                for name, parameter in _list_equal(each, wrapper):
                    equal.setdefault(id(parameter), f"{each.key}/{prefix}{name}")
        self._moments = _moments_of_ddp(statefuls, equal) if equal else {}
        self._split = find_split_paths(statefuls) if globs else ()
        self._any = bool(globs or self._inferred)
        self.own = tuple(each.path for each in statefuls if isinstance(each.stateful, RNGState))
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

    def may_be_split(self, path: str, leaves: Sequence[Leaf]) -> bool:
        """Return True if a mark says that ranks of a tensor parallelism have different parts of it.

        Megatron marks such parameters. It also does so if the parallelism has one rank, so their bytes decide.
        """
        marked = any(is_split(leaf.tensor) for leaf in leaves)
        return marked or f"{path}/".startswith(self._split)

    def find_moment(self, path: str) -> Moment | None:
        """Return what a path has the state of, if that is a parameter under `DistributedDataParallel`."""
        if not self._moments:
            return None
        found, above = self._moments.get(path.rpartition(".")[0]), path  # the name in a flat state dict
        while found is None and above:
            above = above.rpartition("/")[0]
            found = self._moments.get(above)
        return found


class Moment(NamedTuple):
    """A parameter that `DistributedDataParallel` keeps equal, and the optimizer that has a state for it."""

    optimizer: str
    parameter: str


def _list_ddp(of: ModuleMap, ranks: Ranks) -> Iterator[tuple[str, DistributedDataParallel]]:
    """Yield each `DistributedDataParallel` of a stateful whose process group has the calling ranks, and its prefix.

    Others have groups with their own models, or a group without some of the calling ranks.
    """
    for prefix, module in of.modules:
        if isinstance(module, DistributedDataParallel):
            members = torch.distributed.get_process_group_ranks(module.process_group)
            if tuple(members) == ranks.members:
                yield prefix, module


def _list_equal(of: ModuleMap, wrapper: DistributedDataParallel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters that a `DistributedDataParallel` keeps equal, with their names in the state dict.

    These have no wrappers in a `ModelState`.
    """
    for name, parameter in wrapper.module.named_parameters(remove_duplicate=False):
        if name not in wrapper.parameters_to_ignore:
            yield name if of.joined else f"module.{name}", parameter


def _names_of_ddp(of: ModuleMap, prefix: str, wrapper: DistributedDataParallel) -> dict[str, bool]:
    """Return the paths of what a `DistributedDataParallel` keeps equal on all ranks of this group.

    These are the parameters, and the buffers, which it broadcasts from its first rank before each forward pass. So the
    first rank's buffers are saved.
    """
    start = prefix if of.joined else f"{prefix}module."
    found = {f"{of.model_path}/{encode_component(prefix + name)}": False for name, _ in _list_equal(of, wrapper)}
    for name, _ in wrapper.module.named_buffers(remove_duplicate=False) if wrapper.broadcast_buffers else ():
        if name not in wrapper.parameters_to_ignore:
            found[f"{of.model_path}/{encode_component(start + name)}"] = True
    return found


def _moments_of_ddp(statefuls: Sequence[ModuleMap], equal: Mapping[int, str]) -> dict[str, Moment]:
    """Return the paths of the optimizers' state for parameters that `DistributedDataParallel` keeps equal.

    `equal`: these parameters, by their ids, and a name for each.
    """
    found: dict[str, Moment] = {}
    for each in statefuls:
        names = list(each.parameters()) if each.joined else []
        for number, optimizer in enumerate(each.optimizers):
            called = each.key if len(each.optimizers) == 1 else f"{each.key} (optimizer {number})"
            held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            mine = equal.keys() & held
            if not each.joined:
                found |= {
                    f"{each.state_path}/{at}": Moment(called, equal[one]) for at, one in enumerate(held) if one in mine
                }
            for name, parameter in names if mine else ():
                if id(parameter) in mine:
                    moment = Moment(called, equal[id(parameter)])
                    found[f"{each.state_path}/{encode_component(name)}"] = moment
                    found[f"{each.path}/optim/{encode_component(f'state.{name}')}"] = moment
    return found


SMALL = 1024
"""Tensors up to this many bytes count as replicated if they are equal on all ranks, without a glob."""
_digest = xxhash.xxh3_128_digest


@dataclass(frozen=True)
class Replication:
    """Which entries are replicated across ranks."""

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


NOT_REPLICATED = Replication("", frozenset(), ())
"""That of a rank whose values no other rank has."""


@dataclass
class ReplicaCandidates:
    """This rank's candidates for replication, with a digest for each, and its whole structure."""

    items: dict[str, bytes] = field(default_factory=dict)
    """Path -> a digest of everything that must be equal."""
    names: dict[str, bytes] = field(default_factory=dict)
    """Path of a value that matches a glob -> a digest of its name alone."""
    moments: dict[str, list[str]] = field(default_factory=dict)
    """Optimizer -> the paths of its state. They are replicated together, or not at all."""
    structure: str = ""

    def sketch(self, paths: frozenset[str]) -> bytes:
        """Return digests of values that are not replicated, to detect that all ranks have one of them now."""
        first = {min(held) for held in self.moments.values()}  # one path stands for all of an optimizer's
        left = sorted((path not in first, path) for path in self.items if path not in paths)[:SKETCH]
        return b"".join(self.items[path] for _, path in left)

    def digest(self, paths: frozenset[str] | None = None) -> str:
        """Return a digest of all candidates, or of some."""
        items = self.items
        chosen = items.values() if paths is None else (items[path] for path in paths if path in items)
        return digest_range(b"".join(sorted(chosen)))


DigestLeaves = Callable[[Sequence[Leaf]], list[str]]
"""Returns a digest of all bytes of each leaf."""


def find_candidates(flat: Flattened, rules: ReplicationRules, digest: DigestLeaves) -> ReplicaCandidates:
    """Find the replication candidates of this rank."""
    found = ReplicaCandidates()
    structure: list[str] = []
    tensors: list[str] = []
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
        elif isinstance(entry, Container):
            text = f"{path}\0{msgspec.json.encode(entry).decode()}"
            found.items[path] = _digest(text.encode())
            structure.append(text)
        else:
            tensors.append(path)
    structure += _add_tensors(found, tensors, flat, rules, digest)
    for path, shards in flat.shards.items():
        boxes = [(piece.box, piece.replica) for piece in shards.pieces]
        structure.append(f"{path}\0{shards.layout}\0{shards.dtype}\0{shards.shape}\0{boxes}")
    found.structure = digest_range("\n".join(structure).encode("utf-8", "surrogatepass"))
    return found


def _add_tensors(
    found: ReplicaCandidates,
    paths: Sequence[str],
    flat: Flattened,
    rules: ReplicationRules,
    digest: DigestLeaves,
) -> list[str]:
    """Add the candidates among tensors. Return a text for each tensor's place in the structure."""
    structure: list[str] = []
    moments: dict[str, str] = {}
    split: dict[str, str] = {}
    leaves = _by_path(flat)
    for path in paths:
        held = leaves.get(flat.ties.get(path, path), [])
        wanted = rules.is_replicated(path)
        text = f"{_identity_of(path, flat.ties.get(path, path), held)}\0{rules.is_led(path)}"
        structure.append(f"{text}\0{wanted}")
        if wanted and rules.may_be_split(path, held):
            split[path] = text
        elif wanted:
            found.items[path] = _digest(text.encode())
        elif all(leaf.nbytes <= SMALL for leaf in held):
            found.items[path] = _digest(text.encode() + b"".join(map(bytes_of, held)))
        elif (moment := rules.find_moment(path)) is not None:
            found.moments.setdefault(moment.optimizer, []).append(path)
            moments[path] = f"{text}\0{moment.parameter}"  # ranks may number other parameters, as ZeRO's do
    _add_moments(found, moments, flat, leaves, digest)
    for path, known in _digest_paths(split, flat, leaves, digest).items():
        found.items[path] = _digest(f"{split[path]}\0{known}".encode())
        found.names[path] = _digest(f"{path}\0tensor".encode())
    return structure


def _add_moments(
    found: ReplicaCandidates,
    moments: Mapping[str, str],
    flat: Flattened,
    leaves: Mapping[str, Sequence[Leaf]],
    digest: DigestLeaves,
) -> None:
    """Add the state of optimizers, with one digest for all of an optimizer's.

    Most of it has no use on other ranks without the rest.
    """
    if not moments:
        return
    known = _digest_paths(moments, flat, leaves, digest)
    for paths in found.moments.values():
        together = _digest("\n".join(f"{moments[path]}\0{known[path]}" for path in sorted(paths)).encode())
        for path in paths:
            found.items[path] = _digest(moments[path].encode() + together)


def _digest_paths(
    paths: Collection[str], flat: Flattened, leaves: Mapping[str, Sequence[Leaf]], digest: DigestLeaves
) -> dict[str, str]:
    """Return a digest of all bytes of each path."""
    owners = {path: flat.ties.get(path, path) for path in paths}
    needed = [leaf for owner in dict.fromkeys(owners.values()) for leaf in leaves[owner]]
    known: dict[str, str] = {}
    for leaf, each in zip(needed, digest(needed) if needed else (), strict=True):
        known[leaf.entry] = known.get(leaf.entry, "") + each
    return {path: known.get(owner, "") for path, owner in owners.items()}


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


def agree_on_replicas(
    exchange: Exchange, flat: Flattened, rules: ReplicationRules, digest: DigestLeaves
) -> Replication:
    """Agree with the other ranks on the replicated entries."""
    if exchange.alone:
        return Replication("", rules.select(flat.entries), (0,))
    found = find_candidates(flat, rules, digest)
    # A rank that cannot tell by itself who else holds a box asks the others, in the first round.
    asks = any(piece.holders is None and not piece.replica for held in flat.shards.values() for piece in held.pieces)
    memory = replication_memory(exchange.ranks)
    known = memory.find(found.structure) or (None if asks else memory.restored)
    basis = known.structure if known else consensus.FIRST
    paths = frozenset(found.items) if known is None else known.paths & found.items.keys()
    spare = known.written_elsewhere if known else frozenset()
    have, expected = _layout_sums(exchange, flat)
    # One round, if all ranks report the digests that they agreed on last time. Otherwise the leader asks for details
    # of what differs, and the ranks report again with what came of it.
    for _ in range(MOST_ASKED):
        record = consensus.RankRecord(
            found.structure,
            basis,
            found.digest(paths),
            found.digest(),
            have,
            expected,
            own_bytes(exchange, flat, paths, spare),
            _count_entries(flat, paths, leader=exchange.rank == 0),
            asks and basis == consensus.FIRST,
            found.sketch(paths) if basis not in (consensus.FIRST, consensus.ASKED) else b"",
        )
        answer = exchange.agree(record, consensus.compare_records, consensus.RankRecord, consensus.ConsensusReply)
        if answer.settled:
            break
        paths, spare = _exchange_details(exchange, flat, found, answer)
        basis = consensus.ASKED
    else:
        raise SnapshotError("the ranks cannot agree on replicated values: their states change during the save")
    if basis != answer.structure:
        _warn_of_differences(flat, rules, paths)
    if exchange.rank == 0:
        _log_own_moments(found, paths)
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
    exchange: Exchange, flat: Flattened, found: ReplicaCandidates, answer: consensus.ConsensusReply
) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
    """Send the details that the leader requests. Return the replicated paths, and the boxes that other ranks write."""
    details = consensus.CandidateDetails()
    if exchange.rank in answer.speakers:
        details.items = b"".join([*found.items.values(), *found.names.values()])
    for path, shards in flat.shards.items() if answer.boxes else ():
        boxes = [(piece.box.offsets, piece.box.sizes, piece.replica) for piece in shards.pieces]
        if shards.is_open:
            details.boxes.append(consensus.ShardBoxes(path, str(shards.dtype), shards.shape, boxes))
    for path, shards in flat.shards.items() if answer.layouts else ():
        if not shards.is_open and exchange.ranks.among(shards.ranks or ()):
            details.layouts[path] = _layout_text(flat, path, shards), list(_holder_numbers(exchange, path, shards))

    def settle(all_: list[consensus.CandidateDetails]) -> consensus.Settlement:
        return consensus.settle_details(all_, answer.speakers)

    settlement = exchange.agree(details, settle, consensus.CandidateDetails, consensus.Settlement)
    common = set(split_digests(settlement.items))
    differ = [path for path, name in found.names.items() if name in common and found.items[path] not in common]
    if differ:
        raise SnapshotError(
            "declared as replicated, but not equal on all ranks:"
            + listed([f"{path} ({_value_text(flat.entries[path])})" for path in differ])
        )
    paths = frozenset(path for path, item in found.items.items() if item in common)
    spare = frozenset((path, number) for rank, path, number in settlement.spare if rank == exchange.rank)
    return paths, spare


def _value_text(entry: Any) -> str:
    if not isinstance(entry, Scalar):
        return "a part, by its attribute tensor_model_parallel; leave it out of replicated"
    return f"here {entry.readable or entry.serialized_value}"[:80]


def _layout_sums(exchange: Exchange, flat: Flattened) -> tuple[bytes, bytes]:
    """Return this rank's terms for the check that all holders of a sharded tensor have the same layout."""
    have, expected = [], []
    for path, shards in flat.shards.items():
        if shards.is_open:
            continue
        numbers = _holder_numbers(exchange, path, shards)
        if not exchange.ranks.among(shards.ranks or ()):
            continue  # ranks outside the mesh also have a DTensor object
        digest = consensus.digest_layout(path, _layout_text(flat, path, shards))
        have.append(digest)
        if numbers[0] == exchange.rank:
            expected.append(digest * len(numbers))
    return consensus.sum_digests(have), consensus.sum_digests(expected)


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
        and not isinstance(entry, Container)
    ]
    sharded = [path for path in flat.shards if rules.matches_glob(path)]
    if left:
        warn(
            "replicated: ignored, since not all ranks have it with the same dtype and shape; each rank's own value "
            f"is saved:{listed(sorted(left))}"
        )
    if sharded:
        warn(f"replicated: ignored for sharded tensors, whose layout defines their replicas:{listed(sharded)}")


_logged: PerProcess[set[str]] = PerProcess(set)
"""Optimizers whose state was found to differ: a run logs each one only once."""


def _log_own_moments(found: ReplicaCandidates, paths: frozenset[str]) -> None:
    logged = _logged.get()
    for optimizer, held in found.moments.items():
        if not paths.issuperset(held) and optimizer not in logged:
            logged.add(optimizer)
            log.warning(
                "%s: its state differs between the ranks, though DistributedDataParallel keeps the parameters equal; "
                "each rank's own state is saved, and only the same number of ranks, or fewer, can restore it",
                optimizer,
            )


def check_replicas(exchange: Exchange, flat: Flattened, shared: Replication, digest: DigestLeaves) -> None:
    """Compare replicated values and shared boxes across ranks by digests of all bytes. Raise if they differ."""
    if exchange.alone:
        return
    compared: dict[str, Leaf] = {}
    leaves = _by_path(flat)
    for path in shared.paths - shared.from_leader:
        for leaf in leaves.get(flat.ties.get(path, path), ()):
            compared[path + leaf.path.removeprefix(leaf.entry).replace("%[", "[")] = leaf
    for path, shards in flat.shards.items():
        for piece in shards.pieces:
            if len(holders_of(exchange, piece)) > 1:
                among = ", ".join(map(str, holders_of(exchange, piece)))
                whole = Leaf(path, piece.tensor, NAMES[piece.tensor.dtype], shards.shape, 0)
                compared[f"{path}[{piece.box}] (on the ranks {among})"] = Leaf.box_of(whole, piece.box, piece.tensor)
    mine = dict(zip(compared, digest(list(compared.values())), strict=True))

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
