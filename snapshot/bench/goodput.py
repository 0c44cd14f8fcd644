"""Goodput: the training time that a job loses to saves, restores and repeated work, from measured times.

The model is that of `manager.advice`. A save blocks training for `blocked` seconds, and is complete after `lag` more
seconds. A failure happens once in `mtbf` seconds on average. It repeats the work since the last complete save, after a
restore. The lag of an asynchronous save is not measured: it is estimated as the time of a durable save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapshot.bench.figure import default_rows, name_device
from snapshot.durations import duration_text
from snapshot.manager.advice import lost_share, young_interval

DAY = 86_400.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """The best interval of saves for one system, and the time that is lost nevertheless."""

    case: str
    system: str
    way: str
    """The kind of save: `blocking` or `asynchronous`."""
    blocked: float
    lag: float
    restore: float
    mtbf: float

    @property
    def interval(self) -> float:
        """The seconds between saves with the least loss, never less than a save takes to complete."""
        return max(young_interval(self.blocked, self.mtbf), self.blocked + self.lag, 1e-9)

    @property
    def lost(self) -> float:
        """The seconds of training that are lost per day."""
        rest = self.lag + self.restore
        return DAY * lost_share(self.interval - self.blocked, self.blocked, self.mtbf, rest)

    def as_json(self) -> dict[str, Any]:
        """Return the values for programs."""
        names = ("case", "system", "way", "blocked", "lag", "restore", "interval", "lost")
        return {name: getattr(self, name) for name in names}


def compute_goodput(result: Mapping[str, Any], mtbf: float) -> list[Goodput]:
    """Return the goodput of each measured system that has a save and a restore, least loss first."""
    times: dict[tuple[str, str], dict[str, float]] = {}
    for table in result["tables"]:
        for system, row in default_rows(table).items():
            times.setdefault((table["case"], system), {})[table["operation"]] = row["median"]
    found = []
    for (case, system), held in times.items():
        restore = held.get("cold", held.get("restore"))
        save = held.get("durable", held.get("take"))
        if restore is None or save is None:
            continue
        found.append(Goodput(case, system, "blocking", save, 0.0, restore, mtbf))
        if "async" in held:
            found.append(Goodput(case, system, "asynchronous", held["async"], save, restore, mtbf))
    return sorted(found, key=lambda each: (each.case, each.lost))


def goodput_title(goodput: Sequence[Goodput], result: Mapping[str, Any]) -> str:
    """Return the title of a table of goodput. It names the accelerator, if there is one."""
    device = name_device(result)
    on_device = f" on {device}" if device else ""
    return f"training time lost{on_device}, with a failure every {duration_text(goodput[0].mtbf)}"
