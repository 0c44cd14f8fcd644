"""The measurements of `snapshot bench`: the requested cases, and new processes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from snapshot.cli.screen import ExitStatus, say
from snapshot.io.system import unwind_on_signals
from snapshot_bench.names import PEERS
from snapshot_bench.results import OPERATIONS, READING, Goodput, compute_goodput, describe_device, goodput_text
from snapshot_bench.rounds import Step, Workspace, describe, measure, measure_device, place
from snapshot_bench.startup import measure_startup, startup_text
from snapshot_bench.systems import SYSTEMS, installed
from snapshot_bench.workloads import BULK, CASES, INCREMENTAL, Case

Write = Callable[[Path, dict[str, Any], list[Goodput]], object]


def measure_new_processes(arguments: argparse.Namespace) -> int:
    """Measure what a new process pays, and print the results."""
    with unwind_on_signals(), place(arguments.url) as where:
        if not where.local:
            raise ValueError(f"{arguments.url}: --startup needs a folder")
        found = measure_startup(Path(where.url.location), arguments.rounds)
    print(json.dumps(found, indent=2) if arguments.json else startup_text(found))
    return ExitStatus.OK


def measure_cases(arguments: argparse.Namespace, write: Write) -> int:
    """Measure the requested cases, and print the results. `write` writes a report."""
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
        write(path, result, goodput)
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
