"""Guards: signs of a wrong training in a state, found in each take.

A guard reads samples of the tensors and digests that the take computes in any case. It changes nothing, and what it
finds is a `Finding`. The option `guards` says what follows from those that act.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec
import numpy as np
import torch
import xxhash

from snapshot.decoding import decode_json
from snapshot.errors import SuspectStateError
from snapshot.events import emit, log
from snapshot.io.system import PerProcess
from snapshot.io.url import URL
from snapshot.manifest import entries as e
from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import IntEntry
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModelState, find_local_tensor, list_parameters
from snapshot.tensors.memory import wrap_memory
from snapshot.text import counted, listed

Guards = Literal["report", "warn", "suspect", "refuse", "off"]
KEY = "snapshot.guards"
"""Key in a snapshot's metadata, with the findings of a suspect one."""
ACTING = ("nonfinite", "stale", "missing")
"""Guards from which a policy follows. All others only report."""


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """A sign that something is wrong."""

    guard: str
    text: str

    @property
    def acts(self) -> bool:
        """True if the option `guards` acts on it."""
        return self.guard in ACTING

    def __str__(self) -> str:
        return f"{self.guard}: {self.text}"


def expect_guards(guards: Any) -> None:
    """Raise `ValueError` for an unknown choice."""
    if guards not in get_args(Guards):
        raise ValueError(f"guards must be {', '.join(map(repr, get_args(Guards)))}, got {guards!r}")


def suspicions(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the findings in a snapshot's metadata: empty unless it is suspect."""
    found = metadata.get(KEY)
    return tuple(map(str, found)) if isinstance(found, list) else ()


def act_on(guards: Guards, found: Sequence[Finding], metadata: msgspec.Raw, url: URL) -> msgspec.Raw:
    """Return the metadata to commit, with the findings if the snapshot is suspect. Raise `SuspectStateError` to refuse.

    Called on the leader, with the findings of all ranks.
    """
    acting = [str(each) for each in found if each.acts]
    if acting and guards == "refuse":
        raise SuspectStateError(f"{url}: not committed, since guards is 'refuse':{listed(acting)}", acting)
    if not acting or guards != "suspect":
        return metadata
    held = decode_json(metadata, dict[str, Any], "the metadata")
    return msgspec.Raw(msgspec.json.encode({**held, KEY: acting}))


# The parameters that optimizers change, and their moments, by their paths in the app state.
#
# They are found once, and again if the objects of the app state change. Nothing here keeps a tensor alive.


class Member(NamedTuple):
    """A parameter of a group."""

    path: str
    state: str
    """The path of the optimizer's state for it."""
    position: int
    """Its position in the group."""


class Group(NamedTuple):
    """The parameters of one group of an optimizer."""

    name: str
    place: tuple[str, int, int]
    """The key of the stateful, the number of its optimizer, and the number of the group."""
    members: list[Member]


def optimizers_of(stateful: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a stateful: itself, or those of a `ModelState`."""
    found = stateful.optimizers if isinstance(stateful, ModelState) else [stateful]
    return [each for each in found if isinstance(each, torch.optim.Optimizer) and hasattr(each, "param_groups")]


class PathsOfParameters:
    """The paths of parameters in the app state. One that no module has is found by its memory."""

    def __init__(self, app_state: Mapping[str, Any], flat: FlatState) -> None:
        self._flat = flat
        self._by_id: dict[int, str] = {}
        self._by_address: dict[int, str] | None = None
        for key, stateful in app_state.items():
            module = stateful.model if isinstance(stateful, ModelState) else stateful
            if isinstance(module, torch.nn.Module):
                below = f"{encode_component(key)}/" + ("model/" if module is not stateful else "")
                for name, parameter in list_parameters(module, unwrapped=module is not stateful):
                    self._by_id.setdefault(id(parameter), below + encode_component(name))

    @property
    def any_module(self) -> bool:
        """True if the app state has a module with parameters."""
        return bool(self._by_id)

    def find(self, parameter: torch.Tensor) -> str | None:
        """Return the path of a parameter, or None."""
        found = self._by_id.get(id(parameter))
        if found is not None:
            return found
        if self._by_address is None:
            pieces = ((path, each.tensor) for path, shards in self._flat.shards.items() for each in shards.pieces)
            self._by_address = {tensor.data_ptr(): path for path, tensor in pieces}
            self._by_address |= {leaf.address: leaf.path for leaf in self._flat.leaves}
        return self._by_address.get(find_local_tensor(parameter).data_ptr())


class Roles:
    """The values of an app state, as the guards need them: groups of parameters, leaves to sample, and counters."""

    def __init__(self, known: tuple[Any, ...], app_state: Mapping[str, Any], flat: FlatState, leaves: Sequence[Leaf]):
        self.known = known
        self.groups: list[Group] = []
        self.findings: list[Finding] = []
        paths = PathsOfParameters(app_state, flat)
        for key, stateful in app_state.items():
            for number, optimizer in enumerate(optimizers_of(stateful)):
                made = self._list_groups(optimizer, (key, number), paths, named=isinstance(stateful, ModelState))
                self.groups += made
                held = sum(len(group["params"]) for group in optimizer.param_groups)
                if paths.any_module and held and not any(group.members for group in made):
                    text = f"{key}: none of its {counted(held, 'parameter')} is of a module in the app state"
                    self.findings.append(Finding("missing", text))
        members = [each for group in self.groups for each in group.members]
        parameters, states = {each.path for each in members}, {each.state for each in members}
        self.numbers = [
            number
            for number, leaf in enumerate(leaves)
            if members
            and (leaf.path in parameters or leaf.path.rpartition("/")[0] in states)
            and leaf.tensor.numel() > 1
        ]
        """The numbers of the leaves that are parameters of the groups, or their moments."""
        self.paths = {leaves[number].path for number in self.numbers}
        self.counters: list[str] = [
            path for path, entry in flat.entries.items() if type(entry) is IntEntry and _is_counter(path)
        ]
        """The paths of ints that grow during training."""

    @staticmethod
    def _list_groups(
        optimizer: torch.optim.Optimizer, place: tuple[str, int], paths: PathsOfParameters, *, named: bool
    ) -> list[Group]:
        """Return the groups. An optimizer's state has numbers, or in a `ModelState` the names of the parameters."""
        below = f"{encode_component(place[0])}/" + ("optim/state/" if named else "state/")
        made, count = [], 0
        for number, group in enumerate(optimizer.param_groups):
            members = []
            for position, parameter in enumerate(group["params"]):
                path = paths.find(parameter)
                if path is not None and (not named or path.count("/") > 1):
                    state = below + (path.split("/", 2)[2] if named else str(count))
                    members.append(Member(path, state, position))
                count += 1
            made.append(Group(f"{place[0]} group {number}", (*place, number), members))
        return made


def _is_counter(path: str) -> bool:
    return path.rpartition("/")[2] in COUNTERS


def _key_of(app_state: Mapping[str, Any], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Return a key that changes with the objects of an app state."""
    held = [len(leaves), leaves[0].path if leaves else "", leaves[-1].path if leaves else ""]
    groups = [
        (id(group["params"][0]), id(group["params"][-1]), len(group["params"])) if group["params"] else ()
        for stateful in app_state.values()
        for optimizer in optimizers_of(stateful)
        for group in optimizer.param_groups
    ]
    return (*held, *((key, id(stateful)) for key, stateful in app_state.items()), *groups)


# Samples: a few elements of many tensors, and a run of each long one, at places that change from take to take.

LINE = 64
"""Bytes of a short tensor that are read."""
LONG_TENSOR = 1 << 20
SHARE = 1024
"""The part of a long tensor that is read: one of this number of bytes."""
MOST_LINES = 512
"""Short tensors that one take reads."""
MOST_ELSEWHERE = 256
"""Tensors on accelerators that one take reads."""
_SPACE = 1 << 47
"""Bytes of the address space of a process."""
_BEGIN = 1 << 16
"""Its lowest address that memory can have. NumPy takes the address 0 for none."""
_address, _nbytes = attrgetter("address"), attrgetter("nbytes")
_EXPONENTS: dict[str, tuple[str, int]] = {
    "float32": ("u4", 0x7F800000),
    "float64": ("u8", 0x7FF0000000000000),
    "bfloat16": ("u2", 0x7F80),
    "float16": ("u2", 0x7C00),
}
"""Dtype -> the integers of its size, and the bits that are all set in NaN and infinity."""


class _Space(threading.local):
    """The memory of this process, as arrays. Only memory of tensors is read through it."""

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}

    def of(self, kind: str) -> Any:
        if kind not in self.arrays:
            held: Any = (ctypes.c_ubyte * (_SPACE - _BEGIN)).from_address(_BEGIN)
            self.arrays[kind] = np.frombuffer(held, f"<{kind}")
        return self.arrays[kind]


_space = _Space()


def find_nonfinite(leaves: Sequence[Leaf], turn: int, *, everything: bool = False) -> list[Leaf]:
    """Return the leaves with NaN or infinity in a sample, or in all of their elements."""
    if everything:
        return [leaf for leaf in leaves if leaf.dtype in _EXPONENTS and _count_nonfinite(leaf)]
    short: dict[str, list[Leaf]] = {}
    found: list[Leaf] = []
    elsewhere: list[Leaf] = []
    for leaf in leaves:
        if leaf.dtype not in _EXPONENTS:
            continue
        if not leaf.plain or not leaf.tensor.is_cpu:
            elsewhere.append(leaf)
        elif leaf.nbytes >= LONG_TENSOR or leaf.address % 8 or not _BEGIN <= leaf.address < _SPACE - LONG_TENSOR:
            if _long_is_nonfinite(leaf, turn):
                found.append(leaf)
        else:
            short.setdefault(leaf.dtype, []).append(leaf)
    for dtype, held in short.items():
        found += _find_in_lines(dtype, _some(held, MOST_LINES, turn), turn)
    return found + _find_elsewhere(_some(elsewhere, MOST_ELSEWHERE, turn), turn)


def _some(leaves: list[Leaf], most: int, turn: int) -> list[Leaf]:
    """Return some of many leaves, others in each turn."""
    if len(leaves) <= most:
        return leaves
    begin = turn * most % len(leaves)
    return (leaves[begin:] + leaves[:begin])[:most]


def _find_in_lines(dtype: str, leaves: list[Leaf], turn: int) -> list[Leaf]:
    if not leaves:
        return []
    kind, bits = _EXPONENTS[dtype]
    size = int(kind[1])
    addresses = (np.fromiter(map(_address, leaves), np.int64, len(leaves)) - _BEGIN) // size
    counts = np.fromiter(map(_nbytes, leaves), np.int64, len(leaves)) // size
    wide = LINE // size
    begins = (turn * wide) % np.maximum(counts, 1)
    places = (begins[:, None] + np.arange(wide)) % np.maximum(counts, 1)[:, None]
    values = _space.of(kind)[addresses[:, None] + places]
    bad = ((values & bits) == bits).any(axis=1) & (counts > 0)
    return [leaves[at] for at in np.flatnonzero(bad)]


def _long_is_nonfinite(leaf: Leaf, turn: int) -> bool:
    tensor = leaf.tensor.detach().view(-1)
    length = min(tensor.numel(), max(LINE, tensor.numel() // SHARE))
    begin = turn * length % max(1, tensor.numel() - length + 1)
    return not bool(torch.isfinite(tensor[begin : begin + length]).all())


def _find_elsewhere(leaves: list[Leaf], turn: int) -> list[Leaf]:
    """Look at tensors with strides, or on an accelerator: their samples are brought together there."""
    together: dict[Any, list[tuple[Leaf, torch.Tensor]]] = {}
    for leaf in leaves:
        tensor = leaf.tensor.detach()
        if tensor.numel() == 0 or tensor.is_meta:
            continue
        flat = tensor.view(-1) if tensor.is_contiguous() else tensor[tuple(turn % n for n in tensor.shape[:-1])]
        length = min(flat.numel(), LINE)
        begin = turn * length % max(1, flat.numel() - length + 1)
        together.setdefault((tensor.device, tensor.dtype), []).append((leaf, flat[begin : begin + length]))
    found: list[Leaf] = []
    for held in together.values():
        sample = torch.cat([each for _, each in held])
        if not bool(torch.isfinite(sample).all()):
            found += [leaf for leaf, each in held if not bool(torch.isfinite(each).all())]
    return found


def _count_nonfinite(leaf: Leaf) -> int:
    return int(torch.isfinite(leaf.tensor.detach()).logical_not().sum())


# What a run's earlier takes were like.

MOST_RUNS = 8
REMEMBERED = 20_000
"""Entries of a take that are kept for comparisons with the next ones."""


class Past(NamedTuple):
    """An earlier take of a run."""

    keys: frozenset[str]
    entries: Mapping[str, Any]
    rates: dict[str, float]
    counters: dict[str, int]


_path = attrgetter("path")
_DIGITS = re.compile(r"\d+(?=[^/]*$)")
"""Numbers in the last part of a URL. Takes whose URLs differ only in them are of one run."""


class RunMemory:
    """The last takes of one run."""

    def __init__(self) -> None:
        self.turn = 0
        self.takes: deque[Past] = deque(maxlen=2)
        self.roles: Roles | None = None


class _Memories:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: OrderedDict[str, RunMemory] = OrderedDict()

    def of(self, run: str) -> RunMemory:
        with self._lock:
            memory = self._all.setdefault(run, RunMemory())
            self._all.move_to_end(run)
            while len(self._all) > MOST_RUNS:
                self._all.popitem(last=False)
            return memory


_memories = PerProcess(_Memories)
_path = attrgetter("path")
COUNTERS = frozenset(("step", "steps", "global_step", "epoch", "iteration", "iterations", "samples", "tokens"))
"""Names of plain ints that grow during training."""


BUCKETS = 16


class Sampled(msgspec.Struct, array_like=True):
    """Samples of a rank's replicas, which are compared with those of the other ranks."""

    turn: int
    digests: list[bytes]
    """A digest for each bucket of replicas."""


class Report(Protocol):
    """The report of a rank on its take."""

    findings: list[Finding]
    replicas: Sampled | None


class GuardedTake:
    """The guards of one take on this rank."""

    def __init__(
        self,
        guards: Guards,
        app_state: Mapping[str, Any],
        flat: FlatState,
        leaves: Sequence[Leaf],
        *,
        replicas: frozenset[str] = frozenset(),
        url: URL,
        verb: str,
    ) -> None:
        """Examine the values. `leaves`: those of the state that this rank writes. `replicas`: paths that all have."""
        self.policy = guards
        self._url, self._verb = url, verb
        self.findings: list[Finding] = []
        self._keys = frozenset(app_state)
        self._memory = _memories.get().of(_DIGITS.sub("#", str(url)))
        self._groups: list[tuple[Group, torch.optim.Optimizer]] = []
        self._counters: dict[str, int] = {}
        self._replicas: list[str] = []
        self._entries: Mapping[str, Any] = {}
        self.sampled: Sampled | None = None
        self._safely(self._examine, app_state, flat, leaves)
        self._safely(self._sample_replicas, flat, replicas)

    def _safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a guard's work. An unusual object in the app state must not fail a take."""
        if self.policy == "off":
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - the take is more important
            log.exception("%s: a guard failed, and the take continues", self._url)
            emit("guard_failed", self._verb, str(self._url), error=error)

    def _examine(self, app_state: Mapping[str, Any], flat: FlatState, leaves: Sequence[Leaf]) -> None:
        known, memory = _key_of(app_state, leaves), self._memory
        if memory.roles is None or memory.roles.known != known:
            memory.roles = Roles(known, app_state, flat, leaves)
        self._roles = memory.roles
        for group in self._roles.groups:
            key, number, _ = group.place
            self._groups.append((group, optimizers_of(app_state[key])[number]))
        ints = ((path, flat.entries.get(path)) for path in self._roles.counters)
        self._counters = {path: entry.value() for path, entry in ints if isinstance(entry, IntEntry)}
        self._add(self._roles.findings)
        self._examine_keys()
        self._examine_values(leaves)

    def _add(self, found: Collection[Finding]) -> None:
        for each in found:
            self.findings.append(each)
            emit("guard", self._verb, str(self._url), guard=each.guard, text=each.text)
            if self.policy in ("warn", "suspect"):
                log.warning("%s: %s", self._url, each)

    def _examine_keys(self) -> None:
        """Look for statefuls that the take before had, and for counters that ran back."""
        if not self._memory.takes:
            return
        before = self._memory.takes[-1]
        gone = sorted(before.keys - self._keys)
        if gone:
            self._add([Finding("missing", f"{', '.join(gone)}: was in the app state of the take before")])
        for path, value in self._counters.items():
            if value < before.counters.get(path, value):
                text = f"{path} is {value:,}, and was {before.counters[path]:,} in the take before"
                self._add([Finding("counter", text)])

    def _examine_values(self, leaves: Sequence[Leaf]) -> None:
        chosen = [leaves[number] for number in self._roles.numbers]
        if not chosen:
            return
        self._memory.turn += 1
        bad = [leaf for leaf in find_nonfinite(chosen, self._memory.turn) if leaf.path in self._roles.paths]
        if bad:
            counts = [f"{leaf.path} ({_count_nonfinite(leaf):,} of {leaf.tensor.numel():,})" for leaf in bad[:8]]
            more = f" and {len(bad) - 8:,} more" if len(bad) > 8 else ""
            self._add([Finding("nonfinite", f"NaN or infinity in {', '.join(counts)}{more}")])

    def _sample_replicas(self, flat: FlatState, paths: frozenset[str]) -> None:
        """Digest samples of what all ranks have. All ranks sample the same elements of the same tensors."""
        held = [leaf for leaf in flat.leaves if leaf.path in paths and leaf.plain and leaf.nbytes and _is_aligned(leaf)]
        if not held:
            return
        held = _some(sorted(held, key=_path), MOST_LINES, self._memory.turn)
        digests = [xxhash.xxh3_64() for _ in range(BUCKETS)]
        for at, leaf in enumerate(held):
            begin = self._memory.turn * LINE % max(1, leaf.nbytes - LINE + 1)
            digests[at % BUCKETS].update(bytes(wrap_memory(leaf.address + begin, min(LINE, leaf.nbytes))))
        self._replicas = [leaf.path for leaf in held]
        self.sampled = Sampled(self._memory.turn, [each.digest() for each in digests])

    def judge(self, reports: Sequence[Report], metadata: msgspec.Raw) -> msgspec.Raw:
        """Return the metadata to commit, on the leader. Raise `SuspectStateError` to refuse.

        Replicas that differ are a finding of the leader.
        """
        self._safely(self._compare_replicas, reports)
        found = dict.fromkeys([*self.findings, *(each for report in reports for each in report.findings)])
        return act_on(self.policy, list(found), metadata, self._url)

    def _compare_replicas(self, reports: Sequence[Report]) -> None:
        mine = self.sampled
        for rank, report in enumerate(reports):
            theirs = report.replicas
            if mine is None or theirs is None or theirs.turn != mine.turn:
                continue
            differ = {at for at, (a, b) in enumerate(zip(mine.digests, theirs.digests, strict=True)) if a != b}
            if differ:
                paths = [path for at, path in enumerate(self._replicas) if at % BUCKETS in differ]
                more = f" and {len(paths) - 3:,} more" if len(paths) > 3 else ""
                text = f"replicas of rank {rank} differ from those of rank 0, among {', '.join(paths[:3])}{more}"
                self._add([Finding("drift", text)])

    def compare(self, entries: Mapping[str, Any]) -> None:
        """Compare the digests of this take with those of the takes before. `entries`: this rank's, by path."""
        self._safely(self._compare, entries)

    def _compare(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        if len(self._memory.takes) == 2:
            first, second = self._memory.takes
            found = (self._examine_group(group, optimizer, first, second) for group, optimizer in self._groups)
            self._add([each for each in found if each is not None])

    def _examine_group(
        self, group: Group, optimizer: torch.optim.Optimizer, first: Past, second: Past
    ) -> Finding | None:
        """Return a finding if a group did not change over three takes, though its optimizer moved."""
        states = first.entries, second.entries, self._entries
        rates = [_rate_of(group, optimizer), *(each.rates.get(group.name, 0.0) for each in (first, second))]
        if min(rates) <= 0:
            return None
        held = []
        for each in group.members:
            if _digests_of(self._entries.get(each.path)) is None:
                continue  # another rank writes it
            if not _is_equal(each.path, *states):
                return None
            held.append(each)
        moved = [each for each in held if _has_moved(each.state, *states) and _would_change(group, optimizer, each)]
        if not moved:
            return None
        some = ", ".join(each.path for each in moved[:3])
        return Finding(
            "stale",
            f"{group.name}: {counted(len(held), 'parameter')} did not change in three takes, though the moments did, "
            f"and the learning rate is {rates[0]:g}: {some}",
        )

    def committed(self) -> None:
        """Remember this take, which is committed."""
        self._safely(self._remember)

    def _remember(self) -> None:
        kept = self._entries if len(self._entries) <= REMEMBERED else {}
        rates = {group.name: _rate_of(group, optimizer) for group, optimizer in self._groups}
        self._memory.takes.append(Past(self._keys, kept, rates, self._counters))

    def forget(self) -> None:
        """Release the application's optimizers."""
        self._groups = []


def _is_aligned(leaf: Leaf) -> bool:
    return leaf.tensor.is_cpu and _BEGIN <= leaf.address < _SPACE - LONG_TENSOR


def _rate_of(group: Group, optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[group.place[2]].get("lr", 0.0))


def _digests_of(entry: Any) -> Any:
    if isinstance(entry, e.TENSORS):
        found = [stored.digest for _, stored in entry.pieces()]
        return None if None in found else found
    return None


def _is_equal(path: str, *states: Mapping[str, Any]) -> bool:
    found = [_digests_of(each.get(path)) for each in states]
    return found[0] is not None and all(each == found[0] for each in found)


def _has_moved(below: str, *states: Mapping[str, Any]) -> bool:
    """Return True if some state of a parameter changed from each take to the next."""
    names = [f"{below}/{name}" for name in ("exp_avg", "momentum_buffer")]
    for path in names:
        found = [_digests_of(each.get(path)) for each in states]
        if None not in found and found[0] != found[1] != found[2]:
            return True
    return False


def _would_change(group: Group, optimizer: torch.optim.Optimizer, member: Member) -> bool:
    """Return True if the next step would change most elements by more than two units in the last place."""
    settings = optimizer.param_groups[group.place[2]]
    parameter = settings["params"][member.position]
    value = find_local_tensor(parameter).detach()
    state = optimizer.state.get(parameter)
    update = _expect_update(settings, state) if isinstance(state, Mapping) else None
    if update is None or update.shape != value.shape or not value.numel():
        return False
    return bool((update > 2 * torch.finfo(value.dtype).eps * value.abs().float()).float().mean() > 0.5)


def _expect_update(settings: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """Return the size of the next update, as far as the state tells: for optimizers like Adam, and for momentum."""
    held = {
        name: find_local_tensor(each).detach().float() for name, each in state.items() if isinstance(each, torch.Tensor)
    }
    if "exp_avg" in held and "exp_avg_sq" in held:
        scale = held.get("max_exp_avg_sq", held["exp_avg_sq"]).sqrt() + float(settings.get("eps", 1e-8))
        return float(settings["lr"]) * held["exp_avg"].abs() / scale
    if "momentum_buffer" in held and "square_avg" not in held:
        return float(settings["lr"]) * held["momentum_buffer"].abs()
    return None
