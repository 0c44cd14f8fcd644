"""Hundreds of real ranks on one machine, and what happens if one of them is killed or stopped.

    python -m tests.scale                                  all of it with 256 ranks: about half an hour
    python -m tests.scale verbs --ranks 512                only saves and restores, with more ranks
    python -m tests.scale faults --phase write             only some of the faults
    python -m tests.scale compare --ranks 32               the same faults with DCP and torch_checkpointing

A rank needs about 25 MiB of memory. `compare` needs few ranks, since gloo connects each one with each other one. The
status is 1 if a value was wrong, or if a survivor did not raise in time or did not name the culprit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from snapshot.cli.screen import say
from snapshot_bench.results import align_columns
from tests.scale import faults, peers, verbs
from tests.scale.job import name_loopback

COMPARED = 32
"""The number of ranks of `compare`, unless --ranks is given."""
TABLES = ("verbs", "faults", "compare")


@dataclass
class Verdict:
    """Whether all was as it must be."""

    failed: list[str] = field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        """Record what failed."""
        if not good:
            self.failed.append(what)


def verb_table(world: int, folder: Path) -> Iterator[str]:
    """Yield the lines of the table of saves and restores."""
    yield f"{world} ranks: seconds until the last one returned, CPU of a rank, and memory that a rank does not share"
    lines = [("", "ranks", "seconds", "CPU ms", "MiB")]
    for name, ranks, reports, seconds in verbs.measure(world, folder):
        cpu = 1000 * sum(each.cpu for each in reports) / ranks
        memory = sum(each.private for each in reports) / ranks / (1 << 20)
        lines.append((name, str(ranks), f"{seconds:.1f}", f"{cpu:.0f}", f"{memory:.0f}"))
        say(f"{name} ({ranks} ranks): {seconds:.1f} s")
    yield from align_columns(lines)


def fault_table(world: int, timeout: float, phase: str, folder: Path, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of the table of faults."""
    yield f"{world} ranks, timeout={timeout:g}: one rank is killed or stopped (SIGSTOP) at a phase"
    lines = [("", "", "", "culprit", "raised", "named it", "slowest s", "at the path afterwards")]
    for fault, outcome, left in faults.try_faults(
        world, [each for each in faults.FAULTS if phase in each.phase], timeout, folder
    ):
        lines.append(_row(fault, outcome, left, world))
        say(" ".join(lines[-1]))
        verdict.expect(outcome.is_good and "DAMAGED" not in left, f"{lines[-1]}: {outcome.example}")
    yield from align_columns(lines)


def _row(fault: faults.Fault, outcome: faults.Outcome, left: str, world: int) -> tuple[str, ...]:
    slowest = f"{outcome.slowest:.1f}" if outcome.slowest < faults.HUNG else f"hung {faults.HUNG:g}"
    of = f"/{outcome.survivors}"
    return (
        fault.verb,
        fault.phase,
        fault.act,
        f"rank {fault.culprit(world)}",
        f"{outcome.raised}{of}",
        f"{outcome.named}{of}",
        slowest,
        left,
    )


def compare_table(world: int, timeout: float, folder: Path, verdict: Verdict) -> Iterator[str]:
    """Yield the lines of the table of libraries."""
    yield f"{world} ranks, all timeouts {timeout:g} s: the same faults with other libraries"
    lines = [("", "", "", "", "culprit", "raised", "named it", "slowest s", "committed")]
    for system, outcome, committed in peers.compare(world, timeout, folder):
        row = _row(outcome.fault, outcome, "yes" if committed else "no", world)
        lines.append((system.name, *row))
        say(" ".join(lines[-1]) + f"  {outcome.example}")
        if system.name == "snapshot":
            verdict.expect(outcome.is_good, f"{row}: {outcome.example}")
    yield from align_columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tables and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale", description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"some of {', '.join(TABLES)}; all by default")
    parser.add_argument("--ranks", type=int, help=f"number of ranks (256, and {COMPARED} for compare)")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds without a heartbeat (5)")
    parser.add_argument("--phase", default="", help="only the faults of phases with this text")
    given = parser.parse_args(arguments)
    wanted = given.tables or list(TABLES)
    if unknown := set(wanted) - set(TABLES):
        parser.error(f"a table must be one of {', '.join(TABLES)}, got {', '.join(sorted(unknown))}")
    if given.ranks is not None and given.ranks < 4:
        parser.error(f"--ranks must be at least 4, got {given.ranks}")
    if not any(given.phase in each.phase for each in faults.FAULTS):
        parser.error(f"--phase must be in one of {', '.join({each.phase: 0 for each in faults.FAULTS})}")
    name_loopback()
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        verbs.preload(folder)
        many = given.ranks or 256
        made = {
            "verbs": lambda where: verb_table(many, where),
            "faults": lambda where: fault_table(many, given.timeout, given.phase, where, verdict),
            "compare": lambda where: compare_table(given.ranks or COMPARED, given.timeout, where, verdict),
        }
        for table in wanted:
            (folder / table).mkdir()
            for line in made[table](folder / table):
                print(line.rstrip(), flush=True)
            print()
    for each in verdict.failed:
        print(f"FAILED: {each}")
    return 1 if verdict.failed else 0


if __name__ == "__main__":
    sys.exit(main())
