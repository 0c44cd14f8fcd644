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
from itertools import islice
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

import msgspec
import torch
import xxhash

from snapshot.decoding import decode_json, decode_msgpack
from snapshot.distributed.exchange import OTHER_VERSION
from snapshot.errors import SuspectStateError
from snapshot.events import emit, log
from snapshot.io.system import PerProcess
from snapshot.io.url import URL
from snapshot.manifest.document import STATISTICS
from snapshot.manifest.values import IntEntry
from snapshot.save.findings import KEY, NOTED, Finding, Guards
from snapshot.save.observers import TakeView
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModuleMap
from snapshot.tensors.buffers import wrap_memory
from snapshot.tensors.composite import is_freed
from snapshot.tensors.memory import BY_NAME, NAMES, find_local_tensor, is_plain
from snapshot.text import counted, listed
from snapshot_health.parameter_roles import (
    Member,
    OptimizerGroup,
    Roles,
    Stranger,
    count_steps,
    find_holders,
    has_masters,
    is_twin,
    key_of,
    list_counts,
    stores_live_steps,
)
from snapshot_health.samples import (
    LINE,
    MOST_LINES,
    SHORT_ELSEWHERE,
    count_nonfinite,
    find_in_whole,
    find_nonfinite,
    is_in_memory,
    measure_squares,
    take_some,
)
from snapshot_health.statistics import ByPath, combine_statistics, encode_statistics


def expect_good(guards: Guards, found: Sequence[Finding], url: URL) -> None:
    """Raise `SuspectStateError` if a finding acts, and the choice is to refuse."""
    acting = [str(each) for each in found if each.acts]
    if acting and guards == "refuse":
        raise SuspectStateError(f"{url}: not committed, since guards is 'refuse':{listed(acting)}", acting)


def note_findings(guards: Guards, found: Sequence[Finding], metadata: msgspec.Raw) -> msgspec.Raw:
    """Return the metadata to commit, with the findings of all ranks."""
    noted = {KEY: [str(each) for each in found if each.acts and guards == "suspect"]}
    noted[NOTED] = [text for text in map(str, found) if text not in noted[KEY]]
    if not found and not any(key.encode() in bytes(metadata) for key in noted):
        return metadata
    held = decode_json(metadata, dict[str, Any], "the metadata")
    for key in noted:  # the metadata of an earlier snapshot, whose findings are not those of this one
        held.pop(key, None)
    return msgspec.Raw(msgspec.json.encode(held | {key: texts for key, texts in noted.items() if texts}))


# What a run's earlier takes were like.

MOST_RUNS = 8
REMEMBERED = 20_000
"""Entries of a take that are kept for comparisons with the next ones."""


REMEMBERED_NORMS = 16
FEWEST_NORMS = 5
"""Norms that the next one is compared with: at most, and at least."""
JUMP = math.log(2)
"""The change of a norm that is a jump, if it is also ten times what is usual."""


class Entries:
    """The entries of one rank's part of a take, by path, with the digests of those that were asked for."""

    def __init__(self, entries: Mapping[str, Any], samples: Mapping[str, float] | None = None) -> None:
        self.all = entries
        self.samples = samples or {}
        """Moments that another rank writes, by path: a number that changes with a sample."""
        self._digests: dict[str, Any] = {}

    def digests_of(self, path: str) -> Any:
        """Return the digests of a tensor, or None if there is none, or not all of its bytes have one."""
        if path not in self._digests:
            entry = self.all.get(path)
            found = [stored.digest for stored in entry.stored()] if entry is not None and entry.is_tensor else [None]
            self._digests[path] = None if None in found else found
        return self._digests[path]


class Past(NamedTuple):
    """An earlier take of a run."""

    url: str
    keys: frozenset[str]
    steps: tuple[float, bool]
    """As `count_steps` returned."""
    entries: Entries
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
        self.logged: set[str] = set()
        """Findings that do not act, and that were logged: without their numbers, since each is logged once."""


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


BUCKETS = 16
_NUMBERS = re.compile(r"\d+")


class SampledReplicas(msgspec.Struct, array_like=True):
    """Samples of a rank's replicas, which are compared with those of the other ranks."""

    turn: int
    digests: list[bytes]
    """A digest for each bucket of replicas."""


class RankFindings(msgspec.Struct, array_like=True):
    """What a rank tells the leader of its take."""

    findings: list[Finding]
    replicas: SampledReplicas | None


class GuardedTake:
    """The guards of one take on this rank."""

    def __init__(
        self,
        guards: Guards,
        view: TakeView,
    ) -> None:
        """Examine the values."""
        self.policy = guards
        self._url, self._verb, self._turn = view.url, view.verb, view.turn
        self.findings: list[Finding] = []
        self._keys = frozenset(each.key for each in view.statefuls)
        self._steps = 0.0, False
        self._stores_steps = False
        self._samples: dict[str, float] = {}
        self._memory = _memories.get().of(_DIGITS.sub("#", str(view.url)))
        self._groups: list[tuple[OptimizerGroup, torch.optim.Optimizer]] = []
        self._counters: dict[str, int] = {}
        self._replicas: list[str] = []
        self._entries = Entries({})
        self._mastered: set[str] = set()
        """Keys of optimizers that have masters of parameters in the app state."""
        self.sampled: SampledReplicas | None = None
        self.measured: ByPath | None = None
        """The statistics of the tensors that this rank writes, if they are wanted."""
        self._safely(self._examine, view.statefuls, view.flat, view.leaves)
        self._safely(self._sample_replicas, view.flat, view.replicas)

    def _safely(self, work: Callable[..., None], *arguments: Any) -> None:
        """Do a guard's work. An unusual object in the app state must not fail a take."""
        if self.policy == "off":
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - the take is more important
            log.exception("%s: a guard failed, and the take continues", self._url)
            emit("guard_failed", self._verb, str(self._url), error=error)

    def _examine(self, statefuls: Sequence[ModuleMap], flat: FlatState, leaves: Sequence[Leaf]) -> None:
        known, memory = key_of(statefuls, leaves), self._memory
        if memory.roles is None or memory.roles.known != known:
            memory.roles = Roles(known, statefuls, flat, leaves)
        optimizers = {each.key: each.optimizers for each in statefuls}
        self._roles = memory.roles
        for group in self._roles.groups:
            key, number, _ = group.place
            self._groups.append((group, optimizers[key][number]))
        ints = ((path, flat.entries.get(path)) for path in self._roles.counters)
        self._counters = {path: entry.value() for path, entry in ints if isinstance(entry, IntEntry)}
        counts = list_counts(statefuls)
        self._steps = count_steps(counts)
        steps = self._roles.find_stored_steps(flat) if len(memory.takes) == 2 else []
        self._stores_steps = stores_live_steps(counts, steps)
        self._samples = self._sample_moments(flat, leaves)
        for stranger in self._roles.strangers:
            optimizer = optimizers[stranger.key][stranger.place[1]]
            self._examine_parameters(stranger, optimizer, statefuls, flat)
        self._examine_keys()
        self._examine_values(leaves)

    def _add(self, found: Collection[Finding]) -> None:
        for each in found:
            self.findings.append(each)
            emit("guard", self._verb, str(self._url), guard=each.guard, text=each.text)

    def _examine_parameters(
        self,
        stranger: Stranger,
        optimizer: torch.optim.Optimizer,
        statefuls: Sequence[ModuleMap],
        flat: FlatState,
    ) -> None:
        """Look for an optimizer that trains other parameters than those of the modules in the app state."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not self._roles.any_module:
            return
        if has_masters(optimizer, statefuls):
            self._mastered.add(stranger.key)
            return
        text = f"{stranger.key}: none of its {counted(len(held), 'parameter')} is of a module in the app state"
        acts = not find_holders(statefuls, flat, dict) and is_twin(held, statefuls)
        self._add([Finding("missing" if acts else "elsewhere", text)])

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
        roles, memory = self._roles, self._memory
        if not roles.numbers and not roles.unstored:
            return
        memory.turn += 1
        self._examine_norms(leaves)
        unstored = [_leaf_of(name, tensor) for name, held in roles.unstored if (tensor := held()) is not None]
        some = take_some([leaf for leaf in unstored if leaf is not None], MOST_LINES, memory.turn)
        found = find_nonfinite(roles.rotation.choose(leaves, memory.turn), memory.turn)
        found += find_in_whole(roles.rotation.choose_whole(leaves))
        found = [leaf for leaf in found if leaf.path in roles.paths] + find_nonfinite(some, memory.turn)
        found += find_in_whole([leaf for leaf in some if leaf.nbytes <= SHORT_ELSEWHERE])
        bad = list({leaf.path: leaf for leaf in found}.values())
        if bad:
            counts = [
                f"{leaf.path} ({count_nonfinite(leaf):,} of {leaf.tensor.numel():,})" if at < 2 else leaf.path
                for at, leaf in enumerate(bad[:8])
            ]
            self._add([Finding("nonfinite", f"NaN or infinity in {_some_of(counts, len(bad))}")])

    def examine_statistics(self, measured: ByPath) -> None:
        """Keep statistics. Look for NaN and infinity in all elements, where they were measured."""
        self.measured = measured
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

    def _sample_moments(self, flat: FlatState, leaves: Sequence[Leaf]) -> dict[str, float]:
        """Return samples of moments that another rank writes, of the parameters that this rank writes."""
        if len(leaves) == len(flat.leaves):
            return {}
        written = {leaf.path for leaf in leaves}
        held = {leaf.path: leaf for leaf in flat.leaves if leaf.path not in written}
        members = (member for group, _ in self._groups for member in group.members if member.path in written)
        paths = [path for member in members for path in _list_moments(member.state) if path in held]
        squares = measure_squares([held[path] for path in paths])
        return {path: float(each) for path, each in zip(paths, squares, strict=True) if not math.isnan(each)}

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
        if not paths:
            return
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
        self.sampled = SampledReplicas(self._turn, [each.digest() for each in digests])

    @property
    def suffixes(self) -> list[str]:
        """The file with statistics, if they are wanted."""
        return [] if self.measured is None else [STATISTICS]

    def files(self) -> dict[str, bytes]:
        """Return the file with the statistics of this rank's tensors."""
        return {STATISTICS: encode_statistics(self.measured)} if self.measured else {}

    def tell(self) -> bytes:
        """Return the findings of this rank, and samples of its replicas."""
        return msgspec.msgpack.encode(RankFindings(self.findings, self.sampled))

    def judge(self, told: Sequence[bytes], metadata: msgspec.Raw) -> msgspec.Raw:
        """Return the metadata to commit, on the leader. Raise `SuspectStateError` to refuse.

        Replicas that differ are a finding of the leader.
        """
        reports = [decode_msgpack(each, RankFindings, OTHER_VERSION) for each in told]
        self._safely(self._compare_replicas, reports)
        found = list(dict.fromkeys([*self.findings, *(each for report in reports for each in report.findings)]))
        expect_good(self.policy, found, self._url)
        self._log(found)
        return note_findings(self.policy, found, metadata)

    def _log(self, found: Sequence[Finding]) -> None:
        """Log what acts for each take, since it says what the snapshot is, and everything else once in a run."""
        for each in found:
            text = _NUMBERS.sub("#", str(each))
            if each.acts:
                log.warning("%s: %s%s", self._url, "suspect: " if self.policy == "suspect" else "", each)
            elif text not in self._memory.logged:
                self._memory.logged.add(text)
                log.warning("%s: %s", self._url, each)

    def _compare_replicas(self, reports: Sequence[RankFindings]) -> None:
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

    def described(self, entries: Mapping[str, Any]) -> None:
        """Compare the digests of this take with those of the takes before. `entries`: this rank's, by path."""
        self._safely(self._compare, entries)

    def _compare(self, entries: Mapping[str, Any]) -> None:
        self._entries = Entries(entries, self._samples)
        if len(self._memory.takes) == 2:
            first, second = self._memory.takes
            found = [self._examine_group(group, optimizer, first, second) for group, optimizer in self._groups]
            strangers = [each for each in self._roles.strangers if each.key not in self._mastered]
            found += [self._examine_stranger(each, first, second) for each in strangers]
            found += [self._examine_state(first, second)]
            found += [self._examine_moments(group, first, second) for group, _ in self._groups]
            found += [] if self._groups else [self._examine_moments(None, first, second)]
            self._add([each for each in found if each is not None])
            self._examine_unsaved(first, second)

    def _examine_state(self, first: Past, second: Past) -> Finding | None:
        """Return a finding if no tensor changed over three takes of different steps."""
        states = first.entries, second.entries, self._entries
        steps = [each[0] for each in (first.steps, second.steps, self._steps)]
        idle = self._steps[1] and steps[0] == steps[1] == steps[2]  # all optimizers count their steps, and made none
        if idle or len({first.url, second.url, str(self._url)}) < 3:
            return None
        rates = [_rate_of(group, optimizer) for group, optimizer in self._groups]
        if max(rates, default=0.0) <= 0 and (rates or not self._roles.saves_moments):
            return None
        count, counts_steps = 0, False
        for path, entry in self._entries.all.items():
            if self._entries.digests_of(path) and _is_floating(entry):
                if not _is_equal(path, *states):
                    return None
                count, counts_steps = count + 1, counts_steps or path.endswith("/step")
        if not count:
            return None
        text = f"{counted(count, 'tensor')}: none changed in three takes"
        if counts_steps and steps[0] < steps[1] < steps[2] and not self._stores_steps:
            return Finding("stale", f"{text}, not even an optimizer's number of steps, though optimizers made steps")
        return Finding("unchanged", text)

    def _examine_moments(self, group: OptimizerGroup | None, first: Past, second: Past) -> Finding | None:
        """Return a finding if a group's moments did not change over three takes, though its parameters did.

        Without a group, look at all tensors with the names of moments, and at all others.
        """
        states = first.entries, second.entries, self._entries
        moments: Iterable[str] = ()
        if group is not None:
            moments = (path for each in group.members for path in _list_moments(each.state))
        elif self._roles.saves_moments:
            moments = (path for path in self._entries.all if path.rpartition("/")[2] in _MOMENTS)
        name = ""
        for path in moments:
            if self._entries.digests_of(path) is not None:
                if not _is_equal(path, *states):
                    return None
                name = path if group is None else group.name
        others = (path for path in self._entries.all if path.rpartition("/")[2] not in _MOMENTS)
        parameters = others if group is None else (each.path for each in group.members)
        if not name or not any(_differs(path, *states) for path in parameters):
            return None
        return Finding("unchanged", f"{name}: moments did not change in three takes, though parameters did")

    def _examine_unsaved(self, first: Past, second: Past) -> None:
        """Look for modules without an optimizer, and for schedules without a scheduler."""
        states, roles = (first.entries, second.entries, self._entries), self._roles
        alternates = not first.keys == second.keys == self._keys
        if roles.untrained and not alternates:
            moved = [*islice((path for path in roles.untrained if _differs(path, *states)), 3)]
            if moved:
                text = f"{', '.join(moved)}: changes from take to take, and the app state has no optimizer"
                self._add([Finding("unsaved", text)])
        for group in roles.list_scheduled(self._groups):
            rates = [each.rates.get(group.place) for each in (first, second)]
            if None not in rates and rates[0] != rates[1]:
                text = f"{group.name}: its learning rate follows a schedule, and the app state has no scheduler"
                self._add([Finding("unsaved", text)])
                break

    def _examine_stranger(self, stranger: Stranger, first: Past, second: Past) -> Finding | None:
        """Return a finding if nothing but an optimizer of unknown parameters changed over three takes.

        Its steps must be long enough to be seen: its parameters may be masters, of modules with a lower precision.
        """
        states = first.entries, second.entries, self._entries
        held = self._entries
        tensors = {path for path, entry in held.all.items() if held.digests_of(path) and _is_floating(entry)}
        others = {path for path in tensors if not path.startswith(stranger.below)}
        if not others or not all(_is_equal(path, *states) for path in others):
            return None
        if not any(_has_moved(path.rpartition("/")[0], *states) for path in tensors - others):
            return None
        eps = max(torch.finfo(BY_NAME[held.all[path].dtype]).eps for path in others)
        mine = [each for each in self._groups if each[0].place[:2] == stranger.place[:2]]
        if not any(_list_rates(*each, first, second)[0] > 0 and _would_be_seen(*each, eps) for each in mine):
            return None
        text = f"{stranger.key}: its moments changed in three takes, and no tensor of the rest of the app state did"
        return Finding("stale", text)

    def _examine_group(
        self, group: OptimizerGroup, optimizer: torch.optim.Optimizer, first: Past, second: Past
    ) -> Finding | None:
        """Return a finding if a group did not change over three takes, though its optimizer moved."""
        states = first.entries, second.entries, self._entries
        lowest, rate = _list_rates(group, optimizer, first, second)
        if lowest <= 0:
            return None
        held = []
        for each in group.members:
            if self._entries.digests_of(each.path) is None:
                continue  # another rank writes it, or it is stored under another name
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
            f"and the learning rate is {rate:g}: {some}",
        )

    def committed(self) -> None:
        """Remember this take, which is committed."""
        self._safely(self._remember)

    def _remember(self) -> None:
        kept = self._entries if len(self._entries.all) <= REMEMBERED else Entries({})
        rates = {group.place: _rate_of(group, optimizer) for group, optimizer in self._groups}
        self._memory.takes.append(Past(str(self._url), self._keys, self._steps, kept, rates, self._counters))

    def forget(self) -> None:
        """Release the application's optimizers."""
        self._groups = []


def _some_of(texts: Sequence[str], total: int = 0, most: int = 8) -> str:
    left = max(total, len(texts)) - min(most, len(texts))
    return f"{', '.join(texts[:most])}{f' and {left:,} more' if left else ''}"


def _leaf_of(path: str, parameter: torch.Tensor) -> Leaf | None:
    """Return the local part of a live parameter as a leaf; None for one whose elements have no plain memory.

    A module that stores copies may have freed its parameters.
    """
    tensor = find_local_tensor(parameter).detach()
    if type(tensor) is not torch.Tensor or tensor.dtype not in NAMES or tensor.numel() < 2:
        return None
    if tensor.layout is not torch.strided or tensor.is_meta or is_freed(tensor):
        return None
    name, address = NAMES[tensor.dtype], tensor.data_ptr()
    return Leaf(path, tensor, name, tuple(tensor.shape), tensor.nbytes, address, is_plain(tensor))


def _rate_of(group: OptimizerGroup, optimizer: torch.optim.Optimizer) -> float:
    """Return a group's learning rate; 0.0 if it has none that is a number."""
    try:
        return float(optimizer.param_groups[group.place[2]].get("lr", 0.0))
    except (TypeError, ValueError, RuntimeError):
        return 0.0


def _list_rates(
    group: OptimizerGroup, optimizer: torch.optim.Optimizer, first: Past, second: Past
) -> tuple[float, float]:
    """Return the lowest learning rate of a group in three takes, and that of this one."""
    rate = _rate_of(group, optimizer)
    return min(rate, *(each.rates.get(group.place, 0.0) for each in (first, second))), rate


def _is_floating(entry: Any) -> bool:
    return bool(BY_NAME[entry.dtype].is_floating_point)


def _is_equal(path: str, *states: Entries) -> bool:
    found = [each.digests_of(path) for each in states]
    return found[0] is not None and all(each == found[0] for each in found)


def _has_moved(below: str, *states: Entries) -> bool:
    """Return True if some state of a parameter changed from each take to the next."""
    return any(
        _differs(path, *states) or _is_changing([each.samples.get(path) for each in states])
        for path in _list_moments(below)
    )


_MOMENTS = ("exp_avg", "momentum_buffer")


def _list_moments(below: str) -> list[str]:
    return [f"{below}/{name}" for name in _MOMENTS]


def _differs(path: str, *states: Entries) -> bool:
    """Return True if a tensor changed from each take to the next."""
    return _is_changing([each.digests_of(path) for each in states])


def _is_changing(found: Sequence[Any]) -> bool:
    return None not in found and bool(found[0] != found[1] != found[2])


def _would_change(group: OptimizerGroup, optimizer: torch.optim.Optimizer, member: Member) -> bool:
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


MOST_SEEN = 16
"""Parameters of a group whose next steps are computed."""


def _would_be_seen(group: OptimizerGroup, optimizer: torch.optim.Optimizer, eps: float) -> bool:
    """Return True if the next step would change some values in a copy of lower precision, or if that is not known."""
    settings = optimizer.param_groups[group.place[2]]
    for parameter in settings["params"][:MOST_SEEN]:
        state, value = optimizer.state.get(parameter), find_local_tensor(parameter).detach()
        update = _expect_update(settings, state) if isinstance(state, Mapping) else None
        if update is None or update.shape != value.shape:
            return True
        if bool((update > 2 * eps * value.abs().float()).float().mean() > 0.01):
            return True
    return False


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
