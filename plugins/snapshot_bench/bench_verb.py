"""`snapshot bench`: speed on this machine, compared with raw I/O and other libraries.

Claims about speed should be checked on the user's own machine and storage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from snapshot.cli.arguments import add_json, add_storage, count, handed_on, options_of
from snapshot.cli.screen import ExitStatus, say
from snapshot.io.system import unwind_on_signals
from snapshot.save.reuse import OLDEST
from snapshot.text import parse_duration
from snapshot_bench.results import (
    OPERATIONS,
    READING,
    Goodput,
    compute_goodput,
    describe_device,
    draw_page,
    draw_result,
    goodput_text,
)
from snapshot_bench.rounds import Step, Workspace, describe, find_devices, measure, measure_device, place
from snapshot_bench.startup import measure_startup, startup_text
from snapshot_bench.systems import PEERS, SYSTEMS, installed
from snapshot_bench.workloads import BULK, CASES, DEFAULT, INCREMENTAL, Case

CYCLE = OLDEST + 1
"""Takes with one base, until one of them writes again what the others share."""


DESCRIPTION = (
    "Measure saving and restoring, compared with raw I/O of the same bytes and with other libraries. It uses a "
    "new folder below the URL, and removes it. Cases: "
    f"{'; '.join(f'{case.name}: {case.about}' for case in CASES.values())}."
)
EXAMPLES = [
    ("bench /scratch --scale 0.1", "everything, with a tenth of the bytes"),
    ("bench s3://bucket/x --case large --only take,restore", "one case on an object store"),
    ("bench /scratch --device cuda", "the same bytes on an accelerator, compared with plain pinned copies"),
    ("bench /scratch --incremental lora,full", "takes that share what did not change with earlier ones"),
    ("bench /scratch --startup", "the first use and the first take of new processes"),
    ("bench --report bench.html --goodput mtbf=3h", "a page with plots, and the training time lost per day"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "url", nargs="?", default=".", metavar="URL", help="where to save (default: the current folder)"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--case",
        type=NameList("case", CASES),
        default=DEFAULT,
        metavar="LIST",
        help=f"all, or some of {', '.join(CASES)} (default: {','.join(DEFAULT)})",
    )
    chosen.add_argument(
        "--incremental",
        type=NameList("state", INCREMENTAL),
        default=(),
        metavar="LIST",
        help=f"instead, takes that are based on earlier ones: all, or some of {', '.join(INCREMENTAL)}",
    )
    chosen.add_argument(
        "--startup", action="store_true", help="instead, what a new process pays for its first use and its first take"
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
    parser.add_argument(
        "--device",
        type=device_name,
        default="cpu",
        metavar="DEVICE",
        help="device of the tensors, such as cuda, cuda:1 or xpu (default: cpu)",
    )
    parser.add_argument("--scale", type=positive, default=1.0, metavar="F", help="scale the bytes by F (default: 1)")
    parser.add_argument(
        "--rounds", type=count, metavar="N", help=f"measured repetitions (default: 5; {CYCLE} with --incremental)"
    )
    add_json(parser)
    parser.add_argument(
        "--report",
        type=report_file,
        action="append",
        default=[],
        metavar="FILE",
        help="also write a report: .html (plots and tables), .svg (plots) or .json; may be repeated",
    )
    parser.add_argument(
        "--goodput",
        type=mtbf_seconds,
        metavar="mtbf=TIME",
        help="compute the training time lost per day if a failure happens every TIME, such as mtbf=3h",
    )
    parser.add_argument(
        "--near", metavar="FOLDER", help="with --goodput: also for saves to a near folder, uploaded in the background"
    )
    add_storage(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure the requested cases, and print the results."""
    arguments.rounds = arguments.rounds or (CYCLE if arguments.incremental else 5)
    with handed_on(options_of(arguments)):
        return _run_startup(arguments) if arguments.startup else _run(arguments)


def _run_startup(arguments: argparse.Namespace) -> int:
    with unwind_on_signals(), place(arguments.url) as where:
        if not where.local:
            raise ValueError(f"{arguments.url}: --startup needs a folder")
        found = measure_startup(Path(where.url.location), arguments.rounds)
    print(json.dumps(found, indent=2) if arguments.json else startup_text(found))
    return ExitStatus.OK


def _run(arguments: argparse.Namespace) -> int:
    with unwind_on_signals(), place(arguments.url) as where:
        host = describe(where)
        cold = where.local and host["file_system"] not in ("tmpfs", "ramfs")
        steps = _steps(arguments, where, cold)
        if not steps:
            raise ValueError("nothing to measure: no requested case has a requested operation here")
        _expect_goodput(arguments, {step.operation for step in steps})
        for step in steps:
            where.check_room(step.room(arguments.scale), f"{step.case.name}: {OPERATIONS[step.operation]}")
        if arguments.device != "cpu":
            host["device"] = measure_device(arguments.device)
        if not arguments.json:
            print(header(host, arguments.scale, arguments.rounds), flush=True)
        tables = []
        for number, step in enumerate(steps, 1):
            say(f"{number}/{len(steps)} {step.case.name}: {OPERATIONS[step.operation]} ...")
            table = measure(step, where, arguments.scale, arguments.rounds, arguments.device)
            tables.append(table)
            say("")
            if not arguments.json:
                print(f"\n{table.as_text()}", flush=True)
    settings = {"scale": arguments.scale, "rounds": arguments.rounds}
    result = {"host": host, "settings": settings, "tables": [table.as_json() for table in tables]}
    goodput = compute_goodput(result, arguments.goodput) if arguments.goodput else []
    goodput = sorted([*goodput, *_near_goodput(arguments, steps)], key=lambda each: (each.case, each.lost))
    if goodput:
        result["goodput"] = {"mtbf": arguments.goodput, "rows": [each.as_json() for each in goodput]}
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        if goodput:
            print(f"\n{goodput_text(goodput, result)}")
        print(f"\n{READING}", flush=True)
    for path in arguments.report:  # after the results are printed, since writing may fail
        path.write_text(REPORTS[path.suffix](result, goodput), encoding="utf-8")
    return ExitStatus.FOUND if any(table.failed for table in tables) else ExitStatus.OK


def _expect_goodput(arguments: argparse.Namespace, measured: Set[str]) -> None:
    """Raise ValueError if the goodput is wanted, and what it is computed from is not measured."""
    if arguments.goodput and not (measured & {"take", "durable"} and measured & {"restore", "cold"}):
        raise ValueError("--goodput needs a save and a restore: --only must include durable and restore")
    if arguments.near and not arguments.goodput:
        raise ValueError("--near needs --goodput")


def _near_goodput(arguments: argparse.Namespace, steps: Sequence[Step]) -> list[Goodput]:
    """Measure this library alone in a near folder, where a save is complete sooner."""
    if not arguments.near:
        return []
    tables = []
    with place(arguments.near) as near:
        for step in steps:
            if step.operation != "cold" and "snapshot" in step.systems:
                say(f"near: {step.case.name}: {OPERATIONS[step.operation]} ...")
                alone = replace(step, systems=("snapshot",))
                tables.append(measure(alone, near, arguments.scale, arguments.rounds, arguments.device))
    say("")
    found = compute_goodput({"tables": [table.as_json() for table in tables]}, arguments.goodput)
    return [replace(each, system="snapshot, near") for each in found]


def _steps(arguments: argparse.Namespace, where: Workspace, cold: bool) -> list[Step]:
    """Return the steps to measure. Without a device below the page cache, there are no cold reads."""
    known = CASES | INCREMENTAL
    return [
        _step(known[name], operation, arguments.peers, where)
        for name in arguments.incremental or arguments.case
        for operation in known[name].operations
        if operation in arguments.only and (cold or operation != "cold")
    ]


def _step(case: Case, operation: str, peers: tuple[str, ...], where: Workspace) -> Step:
    """Return a step with the systems to measure, and the reasons why others are left out."""
    if not where.local:
        return Step(case, operation, ("snapshot",), ("raw baselines and peers: they need a file system",))
    if operation not in BULK:
        return Step(case, operation, ("json", "snapshot"), ())
    if case.name in INCREMENTAL:
        return Step(case, operation, ("raw", "snapshot"), ())
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
    """Return the lines above the tables: settings, machine, versions, and the accelerator if there is one."""
    versions = ", ".join(f"{name} {number}" for name, number in host["versions"].items())
    device = describe_device({"host": host})
    return (
        f"snapshot bench: {rounds} rounds at scale {scale:g}, after one warm-up round\n"
        f"on {host['where']} ({host['file_system']}), {host['cores']} cores, "
        f"{host['memory_bytes'] / 2**30:.0f} GiB of memory, load {host['load']:g}, "
        f"Linux {host['kernel']}, {host['when']}\n"
        f"Python {host['python']}, {versions}" + (f"\n{device}" if device else "")
    )


REPORTS: dict[str, Callable[[dict[str, Any], list[Goodput]], str]] = {
    ".html": draw_page,
    ".svg": lambda result, goodput: draw_result(result),
    ".json": lambda result, goodput: json.dumps(result, indent=2) + "\n",
}


def report_file(text: str) -> Path:
    """Parse the name of a report, whose folder must exist."""
    path = Path(text)
    if path.suffix not in REPORTS:
        raise argparse.ArgumentTypeError(f"a report must end in {', '.join(REPORTS)}, got {text!r}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path.parent}: no such folder")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: cannot be written")
    return path


def mtbf_seconds(text: str) -> float:
    """Parse `mtbf=TIME`."""
    name, _, value = text.partition("=")
    seconds = parse_duration(value) if name == "mtbf" else None
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be mtbf=TIME, such as mtbf=3h, got {text!r}")
    return seconds


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


def device_name(text: str) -> str:
    """Return the name of a device that torch can use, with its number if it is an accelerator."""
    if text == "cpu":
        return text
    known = find_devices()
    name = text if ":" in text else f"{text}:0"
    if name not in known:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(known)}, got {text!r}")
    try:
        torch.empty(1, device=name)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"{name}: cannot be used: {str(error).splitlines()[0]}") from error
    return name


def positive(text: str) -> float:
    """Return a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
