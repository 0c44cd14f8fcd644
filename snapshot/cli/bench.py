"""`snapshot bench`: speed on this machine, compared with raw I/O and other libraries.

Claims about speed should be checked on the user's own machine and storage.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from snapshot.bench.competitors import PEERS, SYSTEMS, installed
from snapshot.bench.rounds import Step, measure
from snapshot.bench.tables import OPERATIONS, READING, ResultTable
from snapshot.bench.workloads import BULK, CASES, DEFAULT, Case
from snapshot.bench.workspace import Workspace, describe, place
from snapshot.cli.arguments import Verbs, add_storage, handed_on, options_of, verb
from snapshot.cli.screen import say
from snapshot.cli.status import ExitStatus
from snapshot.runtime.cleanup_signals import unwind_on_signals


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    cases = "; ".join(f"{case.name}: {case.about}" for case in CASES.values())
    parser = verb(
        verbs,
        "bench",
        "Measure saving and restoring, compared with raw I/O of the same bytes and with other libraries. It uses a "
        f"new folder below the URL, and removes it. Cases: {cases}.",
        [
            ("bench /scratch --scale 0.1", "everything, with a tenth of the bytes"),
            ("bench s3://bucket/x --case large --only take,restore", "one case on an object store"),
        ],
        run,
    )
    parser.add_argument(
        "url", nargs="?", default=".", metavar="URL", help="where to save (default: the current folder)"
    )
    parser.add_argument(
        "--case",
        type=NameList("case", CASES),
        default=DEFAULT,
        metavar="LIST",
        help=f"all, or some of {', '.join(CASES)} (default: {','.join(DEFAULT)})",
    )
    parser.add_argument(
        "--only",
        type=NameList("operation", OPERATIONS),
        default=tuple(OPERATIONS),
        metavar="LIST",
        help=f"all, or some of {', '.join(OPERATIONS)} (default: all)",
    )
    parser.add_argument(
        "--peers",
        type=NameList("peer", PEERS),
        default=PEERS,
        metavar="LIST",
        help=f"all, none, or some of {', '.join(PEERS)} (default: all installed ones)",
    )
    parser.add_argument("--scale", type=positive, default=1.0, metavar="F", help="scale the bytes by F (default: 1)")
    parser.add_argument("--rounds", type=count, default=5, metavar="N", help="measured repetitions (default: 5)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure the requested cases, and print the results."""
    with handed_on(options_of(arguments)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    with unwind_on_signals(), place(arguments.url) as where:
        host = describe(where)
        cold = where.local and host["file_system"] not in ("tmpfs", "ramfs")
        steps = _steps(arguments, where, cold)
        if not steps:
            raise ValueError("nothing to measure: no requested case has a requested operation here")
        for step in steps:
            where.check_room(step.room(arguments.scale), f"{step.case.name}: {OPERATIONS[step.operation]}")
        if not arguments.json:
            print(header(host, arguments.scale, arguments.rounds), flush=True)
        tables = []
        for number, step in enumerate(steps, 1):
            say(f"{number}/{len(steps)} {step.case.name}: {OPERATIONS[step.operation]} ...")
            table = measure(step, where, arguments.scale, arguments.rounds)
            tables.append(table)
            say("")
            if not arguments.json:
                print(f"\n{table.as_text()}", flush=True)
    if arguments.json:
        print(_json(host, arguments, tables))
    else:
        print(f"\n{READING}")
    return ExitStatus.FOUND if any(table.failed for table in tables) else ExitStatus.OK


def _steps(arguments: argparse.Namespace, where: Workspace, cold: bool) -> list[Step]:
    """Return the steps to measure. Without a device below the page cache, there are no cold reads."""
    return [
        _step(CASES[name], operation, arguments.peers, where)
        for name in arguments.case
        for operation in CASES[name].operations
        if operation in arguments.only and (cold or operation != "cold")
    ]


def _step(case: Case, operation: str, peers: tuple[str, ...], where: Workspace) -> Step:
    """Return a step with the systems to measure, and the reasons why others are left out."""
    if not where.local:
        return Step(case, operation, ("snapshot",), ("raw baselines and peers: they need a file system",))
    if operation not in BULK:
        return Step(case, operation, ("json", "snapshot"), ())
    systems, left_out = ["raw", "snapshot"], []
    for peer in peers:
        if not installed(peer):
            left_out.append(f"{peer}: not installed")
        elif operation == "async" and not SYSTEMS[peer].in_background:
            left_out.append(f"{peer}: has no asynchronous save")
        elif peer in case.slow_peers and peers == PEERS:
            left_out.append(f"{peer}: takes minutes here; use --peers {peer} to measure it")
        else:
            systems.append(peer)
    return Step(case, operation, tuple(systems), tuple(left_out))


def header(host: dict[str, Any], scale: float, rounds: int) -> str:
    """Return the lines above the tables: settings, machine and versions."""
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    return (
        f"snapshot bench: {rounds} rounds at scale {scale:g}, after one warm-up round\n"
        f"on {host['where']} ({host['file_system']}), {host['cores']} cores, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB of memory, load {host['load']:g}, "
        f"Linux {host['kernel']}, {host['when']}\n"
        f"Python {host['python']}, {versions}"
    )


def _json(host: dict[str, Any], arguments: argparse.Namespace, tables: list[ResultTable]) -> str:
    settings = {"scale": arguments.scale, "rounds": arguments.rounds}
    return json.dumps({"host": host, "settings": settings, "tables": [table.as_json() for table in tables]}, indent=2)


class NameList:
    """Argument type for a list of names: `all`, `none`, or names separated by commas."""

    def __init__(self, what: str, known: Any) -> None:
        self.what = what
        self.known = tuple(known)

    def __call__(self, text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return self.known if text == "all" else ()
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in self.known:
                raise argparse.ArgumentTypeError(f"unknown {self.what} {name!r}; known: {', '.join(self.known)}")
        return names


def positive(text: str) -> float:
    """Return a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def count(text: str) -> int:
    """Return an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
