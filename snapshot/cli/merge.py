"""`snapshot merge`: average checkpoints, or add them with weights."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from snapshot.cli.arguments import (
    Verbs,
    add_select,
    add_storage,
    options_of,
    verb,
)
from snapshot.cli.convert import add_output, float_dtype, print_report, target_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import on_ranks
from snapshot.cli.screen import ExitStatus, bar, name_overwrite, replace_cure
from snapshot.errors import RestoreError, SnapshotNotFoundError
from snapshot.io.url import URL
from snapshot.snapshot import Snapshot
from snapshot.transform.merge import OTHERS
from snapshot.weights import merge


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "merge",
        "Write the average, a weighted sum, or an exponential moving average of checkpoints. They may have different "
        "formats, storages and splits, but need tensors of the same names and shapes. They are read and written part "
        "by part, added in float32 and verified. Values that are not tensors are those of the first source.",
        [
            ("merge run/step-100 run/step-200 run/step-300 -o soup", "the average"),
            ("merge a.safetensors b.safetensors -o c.safetensors --weights 0.7,0.3", "a weighted sum"),
            ("merge run/step-* -o ema.safetensors --ema 0.999 --select 'model/**'", "a moving average, oldest first"),
        ],
        on_ranks(run),
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="anything that Snapshot(path) opens; at least 2")
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="a folder; a file for torch, and for safetensors with that suffix",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--average", action="store_true", help="the sum, divided by the number of sources (default)")
    how.add_argument("--weights", type=_numbers, metavar="LIST", help="a factor for each source: 0.5,0.3,0.2")
    how.add_argument("--ema", type=float, metavar="DECAY", help="a moving average over the sources in order of time")
    parser.add_argument(
        "--others",
        choices=OTHERS,
        default=OTHERS[0],
        help="integer, bool, sparse and quantised tensors must be equal in all sources (default), or are those of the "
        "first one",
    )
    add_select(parser)
    parser.add_argument("--dtype", type=float_dtype, help="dtype of floating point tensors, if not the first source's")
    add_output(parser)
    add_storage(parser, "src", "dst", short=False)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Merge, and print the report."""
    options = options_of(arguments, "src")
    with name_overwrite(), _in_options(arguments.sources, options), bar("merge", ranks=arguments.ranks) as show:
        report = merge(
            [
                Snapshot(each, storage_options=options, allow_pickle=arguments.allow_pickle)
                for each in arguments.sources
            ],
            target_of(arguments, arguments.output),
            weights=arguments.weights,
            ema=arguments.ema,
            others=arguments.others,
            select=arguments.select,
            exclude=arguments.exclude,
            dtype=arguments.dtype,
            verify=not arguments.no_verify,
            memory_budget_bytes=arguments.memory,
            progress=show,
            ranks=arguments.ranks,
        )
    print_report(arguments.output, report, json=arguments.json)
    return ExitStatus.OK


@contextmanager
def _in_options(sources: Sequence[str], options: dict[str, Any]) -> Iterator[None]:
    """Explain which source is missing, and name the options for tensors that differ."""
    try:
        with replace_cure(RestoreError, "pass --others first to keep the first source's values, or --exclude them"):
            yield
    except SnapshotNotFoundError as error:
        missing = [source for source in sources if str(error).startswith(f"{URL.parse(source)}:")]
        with explain_missing(missing[0] if missing else sources[0], options):
            raise


def _numbers(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 0.5,0.3,0.2, got {text!r}") from None
