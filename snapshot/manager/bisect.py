"""Bisection of a run: the first step with a bad state, found by reading few steps, and of them few tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshot.errors import RestoreError, SnapshotError
from snapshot.manifest import entries as e
from snapshot.reports import BisectReport
from snapshot.snapshot import Snapshot
from snapshot.tensors.memory import BY_NAME
from snapshot.tensors.statistics import TensorStatistics, combine_statistics, measure_tensor

PIECE = 4 << 20
"""Elements that are read at once."""
LOUD = 100.0
"""A tensor is bad by `norm` if its norm is this many times what it was in the first step."""


Fault = Callable[[TensorStatistics, TensorStatistics | None], str]
"""Returns why a tensor is bad, or ''. Its second argument is the same tensor in the first step, if it is there."""


def why_not_finite(now: TensorStatistics, first: TensorStatistics | None) -> str:
    """Return why a tensor is bad, if it was finite in the first step."""
    return f"{now.bad:,} are NaN or infinite" if now.bad and not (first is not None and first.bad) else ""


def why_too_loud(now: TensorStatistics, first: TensorStatistics | None) -> str:
    """Return why a tensor is bad by its norm."""
    fault = why_not_finite(now, first)
    if fault or first is None or not first.norm > 0 or not math.isfinite(first.norm):
        return fault
    return f"norm {now.norm:.4g}, was {first.norm:.4g}" if now.norm > LOUD * first.norm else ""


CHECKS: dict[str, Fault] = {"finite": why_not_finite, "norm": why_too_loud}


@dataclass
class _Reader:
    """Statistics of tensors, by step. Those that a take stored are used, and tensors of equal digests are read once."""

    open: Callable[[int], Snapshot]
    nbytes: int = 0
    _snapshots: dict[int, tuple[Snapshot, dict[str, Any]]] = field(default_factory=dict)
    _stored: dict[int, dict[str, TensorStatistics]] = field(default_factory=dict)
    _known: dict[Any, TensorStatistics] = field(default_factory=dict)

    def entries(self, step: int) -> tuple[Snapshot, dict[str, Any]]:
        """Return a step, and its floating tensors of more than one element."""
        if step not in self._snapshots:
            snapshot = self.open(step)
            held = {
                path: entry
                for path, entry in snapshot.get_manifest().items()
                if isinstance(entry, e.TENSORS)
                and BY_NAME[entry.dtype].is_floating_point
                and math.prod(entry.shape) > 1
            }
            self._snapshots[step], self._stored[step] = (snapshot, held), snapshot.get_statistics()
        return self._snapshots[step]

    def look(self, step: int, path: str) -> TensorStatistics | None:
        """Return the numbers of a tensor; None if the step lacks it."""
        snapshot, held = self.entries(step)
        entry = held.get(path)
        if entry is None:
            return None
        stored = self._stored[step].get(path)
        if stored is not None and stored.count == math.prod(entry.shape):
            return stored
        digests = tuple((str(box), stored.digest) for box, stored in entry.pieces())
        key = entry.dtype, tuple(entry.shape), digests
        known = None if any(digest is None for _, digest in digests) else self._known.get(key)
        if known is None:
            known = self._known[key] = self._read(snapshot, path, entry)
        return known

    def _read(self, snapshot: Snapshot, path: str, entry: Any) -> TensorStatistics:
        found = []
        for box in _boxes(tuple(entry.shape)):
            piece = snapshot.read_object(path, box=box)
            self.nbytes += piece.nbytes
            found.append(measure_tensor(piece))
        return combine_statistics(each for each in found if each is not None)


def _boxes(shape: tuple[int, ...]) -> Iterator[list[slice | int]]:
    """Yield boxes of at most PIECE elements, by rows. A row that is longer is cut in turn."""
    row = math.prod(shape[1:])
    if not shape or row <= PIECE:
        rows = max(1, PIECE // max(1, row))
        for begin in range(0, shape[0] if shape else 1, rows):
            yield [slice(begin, begin + rows)] if shape else []
        return
    for index in range(shape[0]):
        yield from ([slice(index, index + 1), *rest] for rest in _boxes(shape[1:]))


def find_first_bad(
    steps: Sequence[int], open_step: Callable[[int], Snapshot], check: str | Callable[[Snapshot], bool] = "finite"
) -> BisectReport:
    """Find the first bad step of a run, if a state that is bad stays bad.

    Args:
        steps: The committed steps, ascending. The first one counts as good.
        open_step: Returns the snapshot of a step.
        check: `"finite"`: a tensor has NaN or infinity, and had none in the first step. `"norm"`: also a norm that is
            100 times that of the first step. Or a function that returns True for a good snapshot.
    """
    if len(steps) < 2:
        raise SnapshotError(f"a bisection needs at least two steps, got {len(steps)}")
    reader = _Reader(open_step)
    if callable(check):
        return _by_function(steps, reader, check)
    if check not in CHECKS:
        raise ValueError(f"check must be {', '.join(map(repr, CHECKS))} or a function, got {check!r}")
    fault = CHECKS[check]

    def faults(step: int, paths: Sequence[str] | None = None, *, one: bool = False) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in reader.entries(step)[1] if paths is None else paths:
            now = reader.look(step, path)
            why = "" if now is None else fault(now, reader.look(steps[0], path))
            if why:
                found[path] = why
                if one:
                    break
        return found

    looked = [steps[-1]]
    bad = faults(steps[-1])
    if not bad:
        looked.append(steps[0])
        firsts = {path: reader.look(steps[0], path) for path in reader.entries(steps[0])[1]}
        nan = {path: each.nan for path, each in firsts.items() if each is not None and each.nan}
        if nan:
            lines = tuple(f"{path}: {count:,} are NaN" for path, count in nan.items())
            return BisectReport(steps[0], None, lines, tuple(looked), reader.nbytes)
        always = [path for path, each in firsts.items() if each is not None and each.infinite]
        lines = tuple(f"{path}: is infinite in step-{steps[0]}, too, so it was not judged" for path in always)
        return BisectReport(None, steps[-1], lines, tuple(looked), reader.nbytes)
    low, high = 0, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        looked.append(steps[middle])
        # what is bad here is bad in all later steps, so nothing else can tell
        if faults(steps[middle], list(bad), one=True):
            high = middle
            bad = faults(steps[middle], list(bad))
        else:
            low = middle
    found = faults(steps[high])
    lines = tuple(f"{path}: {why}" for path, why in found.items())
    return BisectReport(steps[high], steps[low], lines, tuple(dict.fromkeys(looked)), reader.nbytes)


def _by_function(steps: Sequence[int], reader: _Reader, check: Callable[[Snapshot], bool]) -> BisectReport:
    looked = [steps[-1]]
    if check(reader.open(steps[-1])):
        return BisectReport(None, steps[-1], (), tuple(looked), 0)
    low, high = 0, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        looked.append(steps[middle])
        low, high = (middle, high) if check(reader.open(steps[middle])) else (low, middle)
    return BisectReport(steps[high], steps[low], (), tuple(looked), 0)


def expect_steps(known: Sequence[int], first: int | None, last: int | None) -> list[int]:
    """Return the steps between two of them. Raise `RestoreError` for one that does not exist."""
    for each in (first, last):
        if each is not None and each not in known:
            raise RestoreError(f"step-{each} does not exist", [f"step-{each}"])
    return [step for step in known if (first is None or step >= first) and (last is None or step <= last)]
