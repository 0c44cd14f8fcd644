"""Guards: signs of a wrong training in a state, found in each take.

A guard reads samples of the tensors and digests that the take computes in any case. It changes nothing, and what it
finds is a `Finding`. The option `guards` says what follows from those that act.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol, get_args

import msgspec
import torch
import xxhash
from torch.optim.optimizer import register_optimizer_step_post_hook

from snapshot.decoding import decode_json
from snapshot.errors import SuspectStateError
from snapshot.events import emit, log
from snapshot.io.system import PerProcess
from snapshot.io.url import URL
from snapshot.manifest import entries as e
from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import IntEntry
from snapshot.save.samples import (
    LINE,
    MOST_LINES,
    Rotation,
    count_nonfinite,
    find_nonfinite,
    is_in_memory,
    measure_squares,
    take_some,
)
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModelState, find_local_tensor, list_parameters
from snapshot.state.rng import RNGState
from snapshot.tensors.memory import BY_NAME, wrap_memory
from snapshot.tensors.statistics import ByPath, combine_statistics
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


def expect_good(guards: Guards, found: Sequence[Finding], url: URL) -> None:
    """Raise `SuspectStateError` if a finding acts, and the choice is to refuse."""
    acting = [str(each) for each in found if each.acts]
    if acting and guards == "refuse":
        raise SuspectStateError(f"{url}: not committed, since guards is 'refuse':{listed(acting)}", acting)


def act_on(guards: Guards, found: Sequence[Finding], metadata: msgspec.Raw, url: URL) -> msgspec.Raw:
    """Return the metadata to commit, with the findings if the snapshot is suspect. Raise `SuspectStateError` to refuse.

    Called on the leader, with the findings of all ranks.
    """
    acting = [str(each) for each in found if each.acts]
    expect_good(guards, found, url)
    marked = bool(acting) and guards == "suspect"
    if not marked and KEY.encode() not in bytes(metadata):
        return metadata
    held = decode_json(metadata, dict[str, Any], "the metadata")
    held.pop(KEY, None)  # of a suspect snapshot, whose metadata was given to this take
    return msgspec.Raw(msgspec.json.encode({**held, KEY: acting} if marked else held))


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
        self._stored = {leaf.entry for leaf in flat.leaves} | flat.shards.keys()
        self._by_id: dict[int, str] = {}
        self._by_address: dict[int, str] | None = None
        for key, stateful in app_state.items():
            module = stateful.model if isinstance(stateful, ModelState) else stateful
            if isinstance(module, torch.nn.Module):
                below = f"{encode_component(key)}/" + ("model/" if module is not stateful else "")
                for name, parameter in list_parameters(module, unwrapped=module is not stateful):
                    self._by_id.setdefault(id(parameter), below + encode_component(name))

    def list_trained(self) -> list[str]:
        """Return the paths of all parameters of modules."""
        return list(self._by_id.values())

    @property
    def any_module(self) -> bool:
        """True if the app state has a module with parameters."""
        return bool(self._by_id)

    def name(self, parameter: torch.Tensor) -> str | None:
        """Return the path of a parameter in its module, or None. Its state dict may use another name."""
        return self._by_id.get(id(parameter))

    def find(self, parameter: torch.Tensor) -> str | None:
        """Return the path under which a parameter is stored, or None."""
        found = self._by_id.get(id(parameter))
        if found is not None:
            found = self._flat.ties.get(found, found)
            if found in self._stored:
                return found
        if self._by_address is None:
            pieces = ((path, each.tensor) for path, shards in self._flat.shards.items() for each in shards.pieces)
            self._by_address = {tensor.data_ptr(): path for path, tensor in pieces}
            self._by_address |= {leaf.address: leaf.path for leaf in self._flat.leaves if leaf.nbytes}
        address = find_local_tensor(parameter).data_ptr()
        return self._by_address.get(address) if address else None


class Roles:
    """The values of an app state, as the guards need them: groups of parameters, leaves to sample, and counters."""

    def __init__(self, known: tuple[Any, ...], app_state: Mapping[str, Any], flat: FlatState, leaves: Sequence[Leaf]):
        self.known = known
        self.groups: list[Group] = []
        self.findings: list[Finding] = []
        self.strangers: list[tuple[str, tuple[str, int, int], str]] = []
        """Optimizers whose parameters were not found, with the beginning of the paths of their state."""
        paths = PathsOfParameters(app_state, flat)
        for key, stateful in app_state.items():
            for number, optimizer in enumerate(optimizers_of(stateful)):
                made = self._list_groups(optimizer, (key, number), paths, named=isinstance(stateful, ModelState))
                self.groups += made
                held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                if held and not any(group.members for group in made):
                    self.strangers.append((key, made[0].place, f"{encode_component(key)}/"))
                    if paths.any_module:
                        text = f"{key}: none of its {counted(len(held), 'parameter')} is of a module in the app state"
                        holders = _find_holders(app_state, flat, dict)
                        acts = not holders and _is_twin(held, app_state)
                        self.findings.append(Finding("missing" if acts else "elsewhere", text))
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
        self.rotation = Rotation(leaves, self.numbers)
        numbers = {leaves[number].path: number for number in self.numbers}
        few = self.groups[:MOST_NORMS]
        most = max(1, MOST_NORMS // max(1, len(few)))
        self.measured: list[tuple[int, int]] = [
            (at, numbers[member.path])
            for at, group in enumerate(few)
            for member in group.members[:: -(-len(group.members) // most) or 1]
            if member.path in numbers
        ]
        """Parameters whose norms are measured: the positions of their groups, and the numbers of their leaves."""
        self.counters: list[str] = [
            path for path, entry in flat.entries.items() if type(entry) is IntEntry and _is_counter(path)
        ]
        """The paths of ints that grow during training."""
        names = {name for path in flat.entries for name in path.split("/")}
        others = _has_others(app_state)
        self.untrained: list[str] = []
        """The parameters of modules, if the app state has no optimizer and no object that could hold its state."""
        if not _find_holders(app_state, flat) and not self.groups and not self.strangers and not names & _OF_OPTIMIZERS:
            self.untrained = paths.list_trained()
        self.saves_moments = bool(names & _OF_OPTIMIZERS)
        """True if the app state has the state of an optimizer."""
        self.unscheduled = not others and not names & _OF_SCHEDULERS
        """True if the app state has no scheduler and no object that could hold its state."""

    def list_scheduled(self, optimizers: Sequence[tuple[Group, torch.optim.Optimizer]]) -> list[Group]:
        """Return the groups whose learning rate a scheduler sets, if none is in the app state."""
        if not self.unscheduled:
            return []
        return [group for group, each in optimizers if "initial_lr" in each.param_groups[group.place[2]]]

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
                path = paths.find(parameter) if parameter.requires_grad else None
                name = paths.name(parameter) or path
                if path is not None and name is not None and (not named or name.count("/") > 1):
                    state = below + (name.split("/", 2)[2] if named else str(count))
                    members.append(Member(path, state, position))
                count += 1
            made.append(Group(f"{place[0]} group {number}", (*place, number), members))
        return made


_OF_OPTIMIZERS = frozenset(("param_groups", "exp_avg", "momentum_buffer"))
_OF_SCHEDULERS = frozenset(("last_epoch", "_last_lr", "_step_count"))
"""Names that the states of optimizers, and of schedulers, have."""


_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, ModelState)
_KNOWN = (*_TRAINED, dict, torch.amp.GradScaler, torch.utils.data.DataLoader, torch.utils.data.Sampler, RNGState)


def _find_holders(app_state: Mapping[str, Any], flat: FlatState, *more: type) -> list[str]:
    """Return the keys of objects that may hold parameters or moments in a form of their own.

    `more`: known types that count here, too.
    """
    paths = [leaf.path for leaf in flat.leaves if leaf.tensor.is_floating_point() and leaf.tensor.numel() > 1]
    stored = {path.partition("/")[0] for path in (*paths, *flat.shards, *(blob.path for blob in flat.blobs))}
    return [
        key
        for key, each in app_state.items()
        if (not isinstance(each, _KNOWN) or isinstance(each, more)) and encode_component(key) in stored
    ]


def _has_others(app_state: Mapping[str, Any]) -> bool:
    """Return True if an app state has objects that may hold a schedule in a form of their own."""
    others = [each for each in app_state.values() if not isinstance(each, _KNOWN)]
    return any(hasattr(each, "parameters") or not type(each).__module__.startswith("snapshot.") for each in others)


def _is_twin(parameters: Sequence[torch.Tensor], app_state: Mapping[str, Any]) -> bool:
    """Return True if a module has parameters of the same shapes and dtypes: probably a copy of the trained one."""
    wanted = sorted((str(each.shape), str(each.dtype)) for each in parameters)
    modules = (each.model if isinstance(each, ModelState) else each for each in app_state.values())
    found = (each for each in modules if isinstance(each, torch.nn.Module))
    return any(sorted((str(p.shape), str(p.dtype)) for p in each.parameters()) == wanted for each in found)


def _is_counter(path: str) -> bool:
    return path.rpartition("/")[2] in COUNTERS


def _key_of(app_state: Mapping[str, Any], leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Return a key that changes with the objects of an app state."""
    held = [len(leaves), leaves[0].path if leaves else "", leaves[-1].path if leaves else ""]
    groups = [
        (
            id(group["params"][0]),
            id(group["params"][-1]),
            len(group["params"]),
            sum(each.requires_grad for each in group["params"]),
        )
        if group["params"]
        else ()
        for stateful in app_state.values()
        for optimizer in optimizers_of(stateful)
        for group in optimizer.param_groups
    ]
    return (*held, *((key, id(stateful)) for key, stateful in app_state.items()), *groups)


# What a run's earlier takes were like.

MOST_RUNS = 8
REMEMBERED = 20_000
"""Entries of a take that are kept for comparisons with the next ones."""


MOST_NORMS = 64
"""Parameters whose norms a take measures."""
REMEMBERED_NORMS = 16
FEWEST_NORMS = 5
"""Norms that the next one is compared with: at most, and at least."""
JUMP = math.log(2)
"""The change of a norm that is a jump, if it is also ten times what is usual."""


class Past(NamedTuple):
    """An earlier take of a run."""

    url: str
    keys: frozenset[str]
    steps: int
    """The steps of all optimizers before it."""
    entries: Mapping[str, Any]
    rates: dict[tuple[str, int, int], float]
    counters: dict[str, int]


_DIGITS = re.compile(r"\d+(?=[^/]*$)|\d+(?=[^/]*/[^/\d]*$)")
"""Numbers in the last part of a URL, or in the part before if it has none.

Takes whose URLs differ only in them are of one run.
"""


class RunMemory:
    """The last takes of one run."""

    def __init__(self) -> None:
        self.turn = 0
        self.keys: frozenset[str] = frozenset()
        """The keys of the last take, even if it was refused. So a key that is left out on purpose is missed once."""
        self.known_keys: deque[frozenset[str]] = deque(maxlen=16)
        """The sets of keys of earlier takes: takes of some objects may alternate with takes of all."""
        self.takes: deque[Past] = deque(maxlen=2)
        self.roles: Roles | None = None
        self.norms: dict[tuple[str, int, int], deque[float]] = {}
        """The logarithms of the last norms of each group."""
        self.reported: set[str] = set()
        """Findings that are not repeated."""


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


class _StepCounter:
    """Counts the steps of all optimizers of a process."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        self.count += 1


_memories, _step_counter = PerProcess(_Memories), PerProcess(_StepCounter)
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
        turn: int = 0,
    ) -> None:
        """Examine the values. `leaves`: those of the state that this rank writes. `replicas`: paths that all have.

        `turn`: a number that all ranks share, and that differs from take to take: where replicas are sampled.
        """
        self.policy = guards
        self._url, self._verb, self._turn = url, verb, turn
        self.findings: list[Finding] = []
        self._keys = frozenset(app_state)
        self._steps = _step_counter.get().count if guards != "off" else 0
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
        gone, known = sorted(self._memory.keys - self._keys), self._memory.keys & self._keys
        seen = self._keys in self._memory.known_keys
        self._memory.keys = self._keys
        if not seen:
            self._memory.known_keys.append(self._keys)
        if gone and known and not seen:
            self._add([Finding("missing", f"{', '.join(gone)}: was in the app state of the take before")])
        if not self._memory.takes:
            return
        before = self._memory.takes[-1]
        for path, value in self._counters.items():
            if value < before.counters.get(path, value):
                text = f"{path} is {value:,}, and was {before.counters[path]:,} in the take before"
                self._add([Finding("counter", text)])

    def _examine_values(self, leaves: Sequence[Leaf]) -> None:
        if not self._roles.numbers:
            return
        self._memory.turn += 1
        self._examine_norms(leaves)
        chosen = self._roles.rotation.choose(leaves, self._memory.turn)
        bad = [leaf for leaf in find_nonfinite(chosen, self._memory.turn) if leaf.path in self._roles.paths]
        if bad:
            counts = [
                f"{leaf.path} ({count_nonfinite(leaf):,} of {leaf.tensor.numel():,})" if at < 2 else leaf.path
                for at, leaf in enumerate(bad[:8])
            ]
            self._add([Finding("nonfinite", f"NaN or infinity in {_some_of(counts, len(bad))}")])

    def examine_statistics(self, measured: ByPath) -> None:
        """Look for NaN and infinity in all elements, where they were measured."""
        self._safely(self._examine_measured, measured)

    def _examine_measured(self, measured: ByPath) -> None:
        told = " ".join(each.text for each in self.findings if each.guard == "nonfinite")
        whole = {path: combine_statistics(held) for path, held in measured.items() if path in self._roles.paths}
        counts = [
            f"{path} ({each.bad:,} of {each.count:,})"
            for path, each in whole.items()
            if each.bad and f"{path} (" not in told
        ]
        if counts:
            self._add([Finding("nonfinite", f"NaN or infinity in {_some_of(counts)}")])

    def _examine_norms(self, leaves: Sequence[Leaf]) -> None:
        """Look for groups whose norm is far from that of the last takes."""
        measured = self._roles.measured
        squares = measure_squares([leaves[number] for _, number in measured])
        held: dict[int, float] = {}
        for (at, number), square in zip(measured, squares, strict=True):
            held[at] = held.get(at, 0.0) + float(square) * leaves[number].tensor.numel()
        for at, total in held.items():
            if not 0 < total < math.inf:
                continue
            group, norm = self._roles.groups[at], math.log(total) / 2
            past = self._memory.norms.setdefault(group.place, deque(maxlen=REMEMBERED_NORMS))
            if len(past) >= FEWEST_NORMS:
                middle = median(past)
                spread = 1.4826 * median(abs(one - middle) for one in past)
                if abs(norm - middle) > max(JUMP, 10 * spread):
                    factor = math.exp(norm - middle)
                    text = f"{group.name}: the norm of its parameters is {factor:.3g} times that of the last takes"
                    self._add([Finding("jump", f"{text}, in samples")])
                    past.clear()
            past.append(norm)

    def _sample_replicas(self, flat: FlatState, paths: frozenset[str]) -> None:
        """Digest samples of what all ranks have. All ranks sample the same elements of the same tensors."""
        held = [
            leaf for leaf in flat.leaves if leaf.path in paths and leaf.plain and leaf.nbytes and is_in_memory(leaf)
        ]
        if not held:
            return
        held = take_some(sorted(held, key=_path), MOST_LINES, self._turn)
        digests = [xxhash.xxh3_64() for _ in range(BUCKETS)]
        for at, leaf in enumerate(held):
            begin = self._turn * LINE % max(1, leaf.nbytes - LINE + 1)
            digests[at % BUCKETS].update(bytes(wrap_memory(leaf.address + begin, min(LINE, leaf.nbytes))))
        self._replicas = [leaf.path for leaf in held]
        self.sampled = Sampled(self._turn, [each.digest() for each in digests])

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
                text = f"replicas of rank {rank} differ from those of rank 0, among {_some_of(paths, most=3)}"
                self._add([Finding("drift", text)])

    def compare(self, entries: Mapping[str, Any]) -> None:
        """Compare the digests of this take with those of the takes before. `entries`: this rank's, by path."""
        self._safely(self._compare, entries)

    def _compare(self, entries: Mapping[str, Any]) -> None:
        self._entries = entries
        if len(self._memory.takes) == 2:
            first, second = self._memory.takes
            found = [self._examine_group(group, optimizer, first, second) for group, optimizer in self._groups]
            found += [self._examine_stranger(key, below, first, second) for key, _, below in self._roles.strangers]
            found += [self._examine_state(first, second)]
            found += [self._examine_moments(group, first, second) for group, _ in self._groups]
            found += [] if self._groups else [self._examine_moments(None, first, second)]
            self._add([each for each in found if each is not None])
            self._examine_unsaved(first, second)

    def _examine_state(self, first: Past, second: Past) -> Finding | None:
        """Return a finding if no tensor changed over three takes of different steps."""
        states = first.entries, second.entries, self._entries
        if len({first.url, second.url, str(self._url)}) < 3:
            return None
        rates = [_rate_of(group, optimizer) for group, optimizer in self._groups]
        if max(rates, default=0.0) <= 0 and (rates or not self._roles.saves_moments):
            return None
        count, counts_steps = 0, False
        for path, entry in self._entries.items():
            if _digests_of(entry) and _is_floating(entry):
                if not _is_equal(path, *states):
                    return None
                count, counts_steps = count + 1, counts_steps or path.endswith("/step")
        if not count:
            return None
        text = f"{counted(count, 'tensor')}: none changed in three takes"
        if counts_steps and first.steps < second.steps < self._steps:
            return Finding("stale", f"{text}, not even an optimizer's number of steps, though optimizers made steps")
        return Finding("unchanged", text)

    def _examine_moments(self, group: Group | None, first: Past, second: Past) -> Finding | None:
        """Return a finding if a group's moments did not change over three takes, though its parameters did.

        Without a group, look at all tensors with the names of moments, and at all others.
        """
        states = first.entries, second.entries, self._entries
        moments: Iterable[str] = ()
        if group is not None:
            moments = (path for each in group.members for path in _list_moments(each.state))
        elif self._roles.saves_moments:
            moments = (path for path in self._entries if path.rpartition("/")[2] in _MOMENTS)
        name = ""
        for path in moments:
            if _digests_of(self._entries.get(path)) is not None:
                if not _is_equal(path, *states):
                    return None
                name = path if group is None else group.name
        others = (path for path in self._entries if path.rpartition("/")[2] not in _MOMENTS)
        parameters = others if group is None else (each.path for each in group.members)
        if not name or not any(_differs(path, *states) for path in parameters):
            return None
        return Finding("unchanged", f"{name}: moments did not change in three takes, though parameters did")

    def _examine_unsaved(self, first: Past, second: Past) -> None:
        """Look for modules without an optimizer, and for schedules without a scheduler. Each is reported once."""
        states, roles, reported = (first.entries, second.entries, self._entries), self._roles, self._memory.reported
        alternates = not first.keys == second.keys == self._keys
        if roles.untrained and "optimizer" not in reported and not alternates:
            moved = [path for path in roles.untrained if _differs(path, *states)]
            if moved:
                reported.add("optimizer")
                text = f"{', '.join(moved[:3])}: changes from take to take, and the app state has no optimizer"
                self._add([Finding("unsaved", text)])
        for group in roles.list_scheduled(self._groups):
            rates = [each.rates.get(group.place) for each in (first, second)]
            if "scheduler" not in reported and None not in rates and rates[0] != rates[1]:
                reported.add("scheduler")
                text = f"{group.name}: its learning rate follows a schedule, and the app state has no scheduler"
                self._add([Finding("unsaved", text)])

    def _examine_stranger(self, key: str, below: str, first: Past, second: Past) -> Finding | None:
        """Return a finding if nothing but an optimizer of unknown parameters changed over three takes."""
        states = first.entries, second.entries, self._entries
        tensors = {path for path, entry in self._entries.items() if _digests_of(entry) and _is_floating(entry)}
        others = {path for path in tensors if not path.startswith(below)}
        if not others or not all(_is_equal(path, *states) for path in others):
            return None
        if not any(_has_moved(path.rpartition("/")[0], *states) for path in tensors - others):
            return None
        text = f"{key}: its moments changed in three takes, and no tensor of the rest of the app state did"
        return Finding("stale", text)

    def _examine_group(
        self, group: Group, optimizer: torch.optim.Optimizer, first: Past, second: Past
    ) -> Finding | None:
        """Return a finding if a group did not change over three takes, though its optimizer moved."""
        states = first.entries, second.entries, self._entries
        rates = [_rate_of(group, optimizer), *(each.rates.get(group.place, 0.0) for each in (first, second))]
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
        rates = {group.place: _rate_of(group, optimizer) for group, optimizer in self._groups}
        self._memory.takes.append(Past(str(self._url), self._keys, self._steps, kept, rates, self._counters))

    def forget(self) -> None:
        """Release the application's optimizers."""
        self._groups = []


def _some_of(texts: Sequence[str], total: int = 0, most: int = 8) -> str:
    left = max(total, len(texts)) - min(most, len(texts))
    return f"{', '.join(texts[:most])}{f' and {left:,} more' if left else ''}"


def _rate_of(group: Group, optimizer: torch.optim.Optimizer) -> float:
    """Return a group's learning rate; 0.0 if it has none that is a number."""
    try:
        return float(optimizer.param_groups[group.place[2]].get("lr", 0.0))
    except (TypeError, ValueError, RuntimeError):
        return 0.0


def _digests_of(entry: Any) -> Any:
    if isinstance(entry, e.TENSORS):
        found = [stored.digest for _, stored in entry.pieces()]
        return None if None in found else found
    return None


def _is_floating(entry: Any) -> bool:
    return bool(BY_NAME[entry.dtype].is_floating_point)


def _is_equal(path: str, *states: Mapping[str, Any]) -> bool:
    found = [_digests_of(each.get(path)) for each in states]
    return found[0] is not None and all(each == found[0] for each in found)


def _has_moved(below: str, *states: Mapping[str, Any]) -> bool:
    """Return True if some state of a parameter changed from each take to the next."""
    return any(_differs(path, *states) for path in _list_moments(below))


_MOMENTS = ("exp_avg", "momentum_buffer")


def _list_moments(below: str) -> list[str]:
    return [f"{below}/{name}" for name in _MOMENTS]


def _differs(path: str, *states: Mapping[str, Any]) -> bool:
    """Return True if a tensor changed from each take to the next."""
    found = [_digests_of(each.get(path)) for each in states]
    return None not in found and bool(found[0] != found[1] != found[2])


def _would_change(group: Group, optimizer: torch.optim.Optimizer, member: Member) -> bool:
    """Return True if the next step would change most elements by more than two units in the last place."""
    settings = optimizer.param_groups[group.place[2]]
    parameter = settings["params"][member.position]
    value = find_local_tensor(parameter).detach()
    state = optimizer.state.get(parameter)
    slow = type(optimizer).__name__ == "RAdam"  # its first steps are shorter than their moments say
    update = _expect_update(settings, state) if isinstance(state, Mapping) and not slow else None
    if update is None or update.shape != value.shape or value.numel() < 2:
        return False
    size = value.abs()
    if bool((size == size.max()).all()):
        return False  # at the bounds of a clamp, or a sign
    return bool((update > 2 * torch.finfo(value.dtype).eps * value.abs().float()).float().mean() > 0.5)


def _expect_update(settings: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
    """Return the size of the next update, as far as the state tells: for optimizers like Adam, and for momentum.

    The moments of Adam are smaller in the first steps, so its number of steps must be known.
    """
    held = {
        name: find_local_tensor(each).detach().float() for name, each in state.items() if isinstance(each, torch.Tensor)
    }
    if "exp_avg" in held and "exp_avg_sq" in held:
        betas, steps = settings.get("betas"), state.get("step", settings.get("step"))
        if steps is None or not isinstance(betas, Sequence) or len(betas) != 2 or not float(steps) > 0:
            return None
        first, second = (1 - float(beta) ** float(steps) for beta in betas)
        if min(first, second) <= 0:
            return None
        root = held.get("max_exp_avg_sq", held["exp_avg_sq"]).sqrt() / math.sqrt(second)
        return float(settings["lr"]) * held["exp_avg"].abs() / first / (root + float(settings.get("eps", 1e-8)))
    if "momentum_buffer" in held and "square_avg" not in held:
        return float(settings["lr"]) * held["momentum_buffer"].abs()
    return None
