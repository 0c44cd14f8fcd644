"""`snapshot doctor`: test which operations work at a URL, how fast, and what would help."""

from __future__ import annotations

import argparse
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

from snapshot.bench.workspace import available_memory
from snapshot.cli.arguments import Verbs, add_json, add_storage, count, options_of, size, verb
from snapshot.cli.doctor_findings import Findings, MiB
from snapshot.cli.doctor_place import as_it_was, try_abilities
from snapshot.cli.doctor_speed import measure_speeds, open_once
from snapshot.cli.screen import Column, ScreenTable, as_json, paint, printable
from snapshot.cli.status import ExitStatus
from snapshot.runtime.loop import run as wait
from snapshot.system_calls import count_cores, resource
from snapshot.text import size_text
from snapshot.url import URL
from snapshot.version import VERSION

EXTRAS = {
    "s3": ("s3fs", "aiobotocore", "obstore"),
    "gcs": ("gcsfs", "aiohttp"),
    "azure": ("azure.storage.blob", "azure.identity"),
    "http": ("aiohttp",),
    "zstd": ("zstandard",),
    "otel": ("opentelemetry",),
    "cli": ("shtab",),
}
SHARED = "/dev/shm"  # noqa: S108 - shared memory between processes


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "doctor",
        "Test if this machine can write, read, list and delete at a URL, how fast with which settings, and what would "
        "help. It uses a new folder below the URL, and removes it. Without a URL it examines this machine only.",
        [
            ("doctor", "this machine: versions, extras, limits"),
            ("doctor s3://bucket/run", "and a place, with settings to paste"),
            ("doctor /scratch --size 1GiB --seconds 60", "measured more thoroughly"),
            ("doctor s3://bucket/run --near /nvme/run", "both tiers of a manager with near="),
        ],
        run,
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="where snapshots will be saved")
    parser.add_argument("--near", metavar="FOLDER", help="also test the near folder of a manager")
    parser.add_argument("--size", type=size, default=128 * MiB, metavar="SIZE", help="bytes to write (128MiB)")
    parser.add_argument("--seconds", type=count, default=20, metavar="N", help="approximate seconds to measure (20)")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Examine the machine and the URL, and print the findings."""
    findings = Findings()
    options = options_of(arguments)
    _machine(findings)
    near = Findings()
    if arguments.near is not None:
        _examine(URL.parse(arguments.near), {}, arguments, near)
    if arguments.url:
        _examine(URL.parse(arguments.url), options, arguments, findings)
    if arguments.json:
        told = _as_json(findings) | ({"near": _as_json(near)} if arguments.near is not None else {})
        print(as_json({"ok": findings.ok and near.ok} | told))
    else:
        for line in _lines(findings):
            print(line)
        if arguments.near is not None:
            print(f"\n{paint(f'near: {printable(arguments.near)}', 'bold')}")
            for line in _lines(near):
                print(line)
            for line in _compare(near, findings):
                print(line)
    findings.checks += near.checks
    return ExitStatus.OK if findings.ok else ExitStatus.FOUND


def _examine(url: URL, options: Mapping[str, Any], arguments: argparse.Namespace, findings: Findings) -> None:
    """Test one storage."""
    open_once(url, options)  # an invalid URL or option is raised before any test
    with as_it_was(url):
        if wait(try_abilities(url, options, findings)) and findings.ok:
            measure_speeds(url, options, arguments.size, arguments.seconds, findings)


def _as_json(findings: Findings) -> dict[str, Any]:
    names = ("ok", "checks", "speeds", "advice", "settings")
    return {name: getattr(findings, name) for name in names}


def _compare(near: Findings, far: Findings) -> Iterator[str]:
    """Yield how long one GiB takes on each tier."""
    fastest = [max((each["write"] for each in found.speeds), default=0.0) for found in (near, far)]
    if all(fastest):
        seconds = [(1 << 30) / each for each in fastest]
        yield f"\none GiB is near after {seconds[0]:.2g} s, and far after {seconds[1]:.2g} s more"


def _lines(findings: Findings) -> Iterator[str]:
    for check in findings.checks:
        mark, style = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("-", "dim")}[check["ok"]]
        yield f"{paint(f'{mark:<7}', style)}{check['check']:<13} {printable(check['text'])}"
    if findings.speeds:
        rows = [(each["settings"], _rate(each["write"]), _rate(each["read"])) for each in findings.speeds]
        columns = [Column("settings", shrinks=True), Column("write", right=True), Column("read", right=True)]
        yield ""
        yield from ScreenTable(columns, rows).lines()
    for title, lines in (("What would help:", findings.advice), ("Settings to paste:", findings.settings)):
        if lines:
            yield f"\n{title}"
            yield from (f"  {printable(line)}" for line in lines)


def _rate(nbytes: float) -> str:
    return f"{size_text(nbytes)}/s"


# The machine


def _machine(findings: Findings) -> None:
    devices = f", {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else ""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    findings.note("versions", f"snapshot {VERSION}, torch {torch.__version__}, {system}")
    cores, memory = count_cores(), available_memory()
    findings.note("machine", f"{cores} cores, {size_text(memory)} of memory free{devices}")
    if memory < 1 << 30:
        findings.advice.append(f"only {size_text(memory)} of memory is free: pass memory_budget_bytes to takes")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else -1
    if 0 <= soft < 1024:
        findings.advice.append(f"a process may open {soft} files only: ulimit -n 4096")
    with suppress(OSError):
        free = shutil.disk_usage(SHARED).free
        if free < 256 * MiB:
            findings.advice.append(f"{SHARED} has {size_text(free)} free: too little for worker='process'")
    there = [name for name, modules in EXTRAS.items() if all(map(_installed, modules))]
    missing = [name for name in EXTRAS if name not in there]
    findings.note(
        "extras", f"{', '.join(there) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else "")
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # raised for a missing parent package
        return False
