"""`snapshot bench`: how fast we are on this machine, beside the bare hardware and beside what else there is.

A library that claims speed should let anyone check the claim where it matters: on their own machine and storage.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from snapshot.cli import bench_async
from snapshot.cli.arguments import Verbs, add_storage, handed_on, options_of, verb
from snapshot.cli.bench_async_systems import TRAINED
from snapshot.cli.bench_cases import BULK, CASES, DEFAULT, Case
from snapshot.cli.bench_place import Place, describe, place
from snapshot.cli.bench_ranks import simulate
from snapshot.cli.bench_report import OPERATIONS, READING, Table
from snapshot.cli.bench_run import Step, measure
from snapshot.cli.bench_systems import PEERS, SYSTEMS, installed
from snapshot.cli.bench_world import compare
from snapshot.cli.interrupts import unwinding
from snapshot.cli.screen import say
from snapshot.cli.status import ExitStatus


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    cases = "; ".join(f"{case.name}: {case.about}" for case in CASES.values())
    parser = verb(
        verbs,
        "bench",
        "Measure saving and restoring beside raw I/O of the same bytes, and beside other libraries. It works in a "
        f"fresh folder below the URL, and removes it. Cases: {cases}.",
        [
            ("bench /scratch --scale 0.1", "all, with a tenth of the bytes"),
            ("bench s3://bucket/x --case large --only take,restore", "one case on a store"),
            ("bench /scratch --async --case train", "what saving in the background costs a training"),
        ],
        run,
    )
    parser.add_argument(
        "url", nargs="?", default=".", metavar="URL", help="where to save (default: the current folder)"
    )
    parser.add_argument(
        "--case",
        type=Names("case", CASES, "params"),
        default=DEFAULT,
        metavar="LIST",
        help=f"all, or some of {', '.join(CASES)} (default: {','.join(DEFAULT)}); with --async train, params or both",
    )
    parser.add_argument(
        "--only",
        type=Names("operation", OPERATIONS),
        default=tuple(OPERATIONS),
        metavar="LIST",
        help=f"all, or some of {', '.join(OPERATIONS)} (default: all)",
    )
    parser.add_argument(
        "--peers",
        type=Names("peer", PEERS),
        default=PEERS,
        metavar="LIST",
        help=f"all, none, or some of {', '.join(PEERS)} (default: all that are installed)",
    )
    parser.add_argument("--scale", type=_positive, default=1.0, metavar="F", help="scale the bytes by F (default: 1)")
    parser.add_argument(
        "--rounds", type=_count, default=5, metavar="N", help="counted repetitions of each (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    several = parser.add_mutually_exclusive_group()
    several.add_argument(
        "--world", type=_several, metavar="N", help="measure what N ranks do together, beside one alone, and no case"
    )
    several.add_argument(
        "--ranks", type=_worlds, metavar="LIST", help="measure what planning costs with so many ranks, and no case"
    )
    several.add_argument(
        "--store", action="store_true",
        help="measure S3's clients and ours beside each other, on loopback or at an s3:// URL, and no case",
    )  # fmt: skip
    several.add_argument(
        "--dcp", action="store_true", help="measure torch.distributed.checkpoint with its storage and ours, and no case"
    )
    several.add_argument(
        "--formats", action="store_true", help="measure how others' checkpoints are read and converted, and no case"
    )
    several.add_argument(
        "--async", action="store_true", dest="background",
        help="measure saving in the background: what it costs the training beside it, and how soon it is safe",
    )  # fmt: skip
    parser.add_argument("--trace", metavar="FILE", help="with --async: a timeline of ours, to open at ui.perfetto.dev")
    parser.add_argument("--figure", metavar="FILE.svg", help="with --async: draw the time of each training step")
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure what was asked for, and print it."""
    with handed_on(options_of(arguments)):
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.background:
        return _run_async(arguments)
    if arguments.trace or arguments.figure or "params" in arguments.case:
        raise ValueError("--trace, --figure and --case params belong to --async")
    if any((arguments.world, arguments.ranks, arguments.store, arguments.dcp, arguments.formats)):
        return _run_apart(arguments)
    with unwinding(), place(arguments.url) as where:
        host = describe(where)
        cold = where.local and host["file_system"] not in ("tmpfs", "ramfs")
        steps = _steps(arguments, where, cold)
        if not steps:
            raise ValueError("nothing to measure here: no case that was asked for has an operation that was asked for")
        for step in steps:
            where.check_room(step.room(arguments.scale), f"{step.case.name}: {OPERATIONS[step.operation]}")
        if not arguments.json:
            print(_header(host, arguments), flush=True)
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


def _run_apart(arguments: argparse.Namespace) -> int:
    """Measure what is no case: several ranks, real ones or the planning of simulated ones; or the way to a store."""
    asked = "--" + next(name for name in ("world", "ranks", "store", "dcp", "formats") if getattr(arguments, name))
    if arguments.json:
        raise ValueError(f"{asked} prints a table only; leave out --json")
    if (arguments.case, arguments.only, arguments.peers) != (DEFAULT, tuple(OPERATIONS), PEERS):
        raise ValueError(f"{asked} measures something of its own; leave out --case, --only and --peers")
    with unwinding():
        if arguments.ranks:
            for line in simulate(arguments.ranks):
                print(line, flush=True)
            return ExitStatus.OK
        if arguments.store:
            from snapshot.cli.bench_remote import compare as compare_store  # whose clients may not be installed

            url = None if arguments.url == "." else arguments.url
            for line in compare_store(url, options_of(arguments), arguments.scale, arguments.rounds):
                print(line, flush=True)
            return ExitStatus.OK
        with place(arguments.url) as where:
            print(_header(describe(where), arguments), flush=True)
            for line in _lines(arguments, where):
                print(line, flush=True)
    return ExitStatus.OK


def _lines(arguments: argparse.Namespace, where: Place) -> Iterator[str]:
    """The table of what is measured in a place. Torch's DCP takes long to import."""
    if arguments.dcp:
        from snapshot.cli.bench_dcp import compare as compare_dcp

        return compare_dcp(where, arguments.scale, arguments.rounds)
    if arguments.formats:
        from snapshot.cli.bench_formats import compare as compare_formats

        return compare_formats(where, arguments.scale, arguments.rounds)
    return iter(compare(where, arguments.world, arguments.scale, arguments.rounds))


def _run_async(arguments: argparse.Namespace) -> int:
    """Measure saving in the background."""
    if arguments.json:
        raise ValueError("--async prints tables only; leave out --json")
    cases = tuple(TRAINED) if arguments.case == DEFAULT else arguments.case
    if arguments.only != tuple(OPERATIONS) or not set(cases) <= set(TRAINED):
        raise ValueError("--async measures the cases train and params; leave out --only and other cases")
    trace, figure = (Path(name).absolute() if name else None for name in (arguments.trace, arguments.figure))
    failed = False
    with unwinding(), place(arguments.url) as where:
        print(_header(describe(where), arguments), flush=True)
        chosen, left_out = bench_async.systems(arguments.peers, where.local)
        for line in left_out:
            print(f"left out: {line}")
        run = bench_async.Run(where, arguments.scale, arguments.rounds, chosen, trace)
        for line in bench_async.compare(run, cases, figure):
            failed = failed or line.startswith("  FAILED")
            print(line, flush=True)
    return ExitStatus.FOUND if failed else ExitStatus.OK


def _steps(arguments: argparse.Namespace, where: Place, cold: bool) -> list[Step]:
    """What is measured; nothing is cold where there is no device below the page cache."""
    return [
        _step(CASES[name], operation, arguments.peers, where)
        for name in arguments.case
        for operation in CASES[name].operations
        if operation in arguments.only and (cold or operation != "cold")
    ]


def _step(case: Case, operation: str, peers: tuple[str, ...], where: Place) -> Step:
    """Who takes part, and why others do not."""
    if not where.local:
        return Step(case, operation, ("snapshot",), ("raw baselines and peers, which need a file system",))
    if operation not in BULK:
        return Step(case, operation, ("json", "snapshot"), ())
    systems, left_out = ["raw", "snapshot"], []
    for peer in peers:
        if not installed(peer):
            left_out.append(f"{peer}: not installed")
        elif operation == "async" and not SYSTEMS[peer].in_background:
            left_out.append(f"{peer}: has no asynchronous save")
        elif peer in case.slow_peers and peers == PEERS:
            left_out.append(f"{peer}: takes minutes here; --peers {peer} measures it")
        else:
            systems.append(peer)
    return Step(case, operation, tuple(systems), tuple(left_out))


def _header(host: dict[str, Any], arguments: argparse.Namespace) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    return (
        f"snapshot bench: {arguments.rounds} rounds at scale {arguments.scale:g}, after one that is not counted\n"
        f"on {host['where']} ({host['file_system']}), {host['cores']} cores, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB of memory, load {host['load']:g}, "
        f"Linux {host['kernel']}, {host['when']}\n"
        f"Python {host['python']}, {versions}"
    )


def _json(host: dict[str, Any], arguments: argparse.Namespace, tables: list[Table]) -> str:
    settings = {"scale": arguments.scale, "rounds": arguments.rounds}
    return json.dumps({"host": host, "settings": settings, "tables": [table.as_json() for table in tables]}, indent=2)


class Names:
    """Reads a list of names: `all`, `none`, or names with commas between."""

    def __init__(self, what: str, known: Any, *more: str) -> None:
        self.what = what
        self.known = tuple(known)
        self.more = more  # names that must be given to be meant

    def __call__(self, text: str) -> tuple[str, ...]:
        if text in ("all", "none"):
            return self.known if text == "all" else ()
        names = tuple(dict.fromkeys(text.split(",")))
        for name in names:
            if name not in self.known + self.more:
                raise argparse.ArgumentTypeError(f"no {self.what} {name!r}; there are {', '.join(self.known)}")
        return names


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is not above 1")
    return value


def _worlds(text: str) -> tuple[int, ...]:
    return tuple(map(_several, text.split(",")))
