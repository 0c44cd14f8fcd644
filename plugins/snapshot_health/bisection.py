"""The bisection of a run: its first step with a bad state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from snapshot.errors import RestoreError, SnapshotError
from snapshot.reports import BisectReport
from snapshot.snapshot import Snapshot
from snapshot.tensors.memory import BY_NAME
from snapshot_health.statistics import TensorStatistics, combine_statistics, measure_tensor

# The bisection: few steps are read, and of them few tensors.

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
            manifest: dict[str, Any] = snapshot.get_manifest()
            held = {
                path: entry
                for path, entry in manifest.items()
                if entry.is_tensor and BY_NAME[entry.dtype].is_floating_point and math.prod(entry.shape) > 1
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
        looked: list[int] = []
        is_good = check

        def is_bad(step: int) -> bool:
            looked.append(step)
            return not is_good(open_step(step))

        if not is_bad(steps[-1]):
            return BisectReport(None, steps[-1], (), tuple(looked), 0)
        at = _first_bad(steps, is_bad)
        return BisectReport(steps[at], steps[at - 1], (), tuple(looked), 0)
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

    def has_fault(step: int) -> bool:
        nonlocal bad
        looked.append(step)
        # what is bad here is bad in all later steps, so nothing else can tell
        found = faults(step, list(bad)) if faults(step, list(bad), one=True) else {}
        bad = found or bad
        return bool(found)

    at = _first_bad(steps, has_fault)
    lines = tuple(f"{path}: {why}" for path, why in faults(steps[at]).items())
    return BisectReport(steps[at], steps[at - 1], lines, tuple(dict.fromkeys(looked)), reader.nbytes)


def _first_bad(steps: Sequence[int], is_bad: Callable[[int], bool]) -> int:
    """Return the index of the first bad step. The first of the steps is good, and the last one is bad."""
    low, high = 0, len(steps) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(steps[middle]) else (middle, high)
    return high


def expect_steps(known: Sequence[int], first: int | None, last: int | None) -> list[int]:
    """Return the steps between two of them. Raise `RestoreError` for one that does not exist."""
    for each in (first, last):
        if each is not None and each not in known:
            raise RestoreError(f"step-{each} does not exist", [f"step-{each}"])
    return [step for step in known if (first is None or step >= first) and (last is None or step <= last)]


def find_check(text: str) -> str | Callable[[Any], bool]:
    """Return the check of a name, or the function of `MODULE:FUNCTION`."""
    module, colon, name = text.partition(":")
    if not colon:
        return text
    found = getattr(import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"--check must name a function, got {text!r}")

    def judge(snapshot: Snapshot) -> bool:
        try:
            return bool(found(snapshot))
        except SnapshotError:
            raise
        except Exception as error:  # of the user's function
            raise SnapshotError(f"{text}: failed for {snapshot}: {error!r}") from error

    return judge
