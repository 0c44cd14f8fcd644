"""`snapshot bench`: speed on this machine, compared with raw I/O and other libraries.

Claims about speed should be checked on the user's own machine and storage.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, count, handed_on, options_of
from snapshot.text import parse_duration
from snapshot_bench.names import CASES, DEFAULT, INCREMENTAL, PEERS
from snapshot_bench.results import OPERATIONS, Goodput, draw_page, draw_result

CYCLE = 17
"""Takes with one base, until one of them writes again what the others share."""


DESCRIPTION = (
    "Measure saving and restoring, compared with raw I/O of the same bytes and with other libraries. It uses a "
    "new folder below the URL, and removes it. Cases: "
    f"{'; '.join(f'{name}: {about}' for name, about in CASES.items())}."
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
    from snapshot_bench.measuring import (  # with torch, which the help does not need
        measure_cases,
        measure_new_processes,
    )

    arguments.rounds = arguments.rounds or (CYCLE if arguments.incremental else 5)
    with handed_on(options_of(arguments)):
        if arguments.startup:
            return measure_new_processes(arguments)
        return measure_cases(arguments, lambda path, *found: path.write_text(REPORTS[path.suffix](*found), "utf-8"))


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
    import torch

    from snapshot_bench.rounds import find_devices

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
