"""`snapshot diff`: differences between two snapshots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from snapshot.cli.arguments import Verbs, add_json, add_memory, add_select, add_storage, options_of, verb
from snapshot.cli.listing import NUMBERS, spans
from snapshot.cli.locate import open_all
from snapshot.cli.ranks import add_ranks, on_ranks
from snapshot.cli.screen import ExitStatus, as_json, bar, mute_torch_warnings, paint, printable, wrapped
from snapshot.errors import SnapshotNotFoundError
from snapshot.reports import MARKS, Change, Diff
from snapshot.snapshot import Snapshot

STYLES = {"added": "green", "removed": "red", "changed": "yellow", "renamed": "cyan"}
SHOWN = 200
"""Maximum number of lines on a terminal, unless all are requested."""


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "diff",
        "Show objects only in B (+), only in A (-), changed (~) and renamed (>). Snapshots are compared by the digests "
        "in their manifests. Data is read only if digests are not enough: for tensors that are split differently, for "
        "other formats, or with --values. Exit status: 0 if equal, 1 if not.",
        [
            ("diff run/step-100 run/step-200", "what changed in between"),
            ("diff run/step-100 run/step-200 --values", "and by how much"),
            ("diff run/step-100 s3://bucket/run/step-100", "is the copy the same?"),
            ("diff run/step-100 model.safetensors --select 'model/**' --rename model=", "and the export?"),
        ],
        on_ranks(run),
    )
    parser.add_argument("a", metavar="A", help="a snapshot, or a checkpoint of another library")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="read tensors that differ, and show by how much")
    parser.add_argument(
        "--all", action="store_true", help="a line for each object, even if only numbers in the names differ"
    )
    add_select(parser)
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=_pair,
        metavar="OLD=NEW",
        help="a name in A and its name in B; 'model=' removes that level; repeatable",
    )
    add_memory(parser)
    add_ranks(parser)
    add_json(parser)
    add_storage(parser, "src", "dst")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Compare, and print the differences."""
    sides = [(url, options_of(arguments, prefix)) for url, prefix in ((arguments.a, "src"), (arguments.b, "dst"))]
    a, b = (Snapshot(url, storage_options=options) for url, options in sides)
    try:
        with mute_torch_warnings(), bar("diff", ranks=arguments.ranks) as show:
            found = Snapshot.diff(
                a,
                b,
                values=arguments.values,
                select=arguments.select,
                exclude=arguments.exclude,
                rename=dict(arguments.rename) or None,
                memory_budget_bytes=arguments.memory,
                progress=show,
                ranks=arguments.ranks,
            )
    except SnapshotNotFoundError:
        for url, options in sides:
            open_all(url, options)  # raises an error that describes what exists there
        raise
    if arguments.json:
        print(as_json(diff_fields(found)))
    else:
        _show(found, whole=arguments.all)
    return ExitStatus.OK if found.same else ExitStatus.FOUND


def _show(found: Diff, *, whole: bool) -> None:
    lines = [(change.kind, str(change)) for change in found] if whole else list(_folded(found))
    most = SHOWN if sys.stdout.isatty() and not whole else len(lines)
    for kind, line in lines[:most]:
        print(paint(wrapped(printable(line)), STYLES[kind]))
    if most < len(lines):
        print(paint(f"... and {len(lines) - most:,} more: show them with --all", "dim"))
    print(wrapped(found.summary))


def _folded(found: Diff) -> Iterator[tuple[str, str]]:
    """Yield the kind and the line of each change. Changes that differ only in the numbers of names share a line."""
    groups: dict[Any, list[Change]] = {}
    for change in found:
        alike = change.kind, NUMBERS.sub("0", change.path), NUMBERS.sub("0", change.before), change.what, change.detail
        groups.setdefault(alike if change.values is None else (change.path, change.before), []).append(change)
    for group in groups.values():
        names = {f"{change.path}\n{change.before}": change for change in group}
        for name, held in spans([*names]):
            path, _, before = name.partition("\n")
            times = f" (x {len(held):,})" if len(held) > 1 else ""
            yield group[0].kind, f"{replace(names[held[0]], path=path, before=before)}{times}"


def diff_fields(found: Diff) -> dict[str, Any]:
    """Return the differences, for programs."""
    return {
        "a": found.a,
        "b": found.b,
        "same": found.same,
        "equal": found.equal,
        **{kind: len([change for change in found if change.kind == kind]) for kind in MARKS},
        "entries_read": found.entries_read,
        "bytes_read": found.bytes_read,
        "seconds": round(found.seconds, 6),
        "changes": [asdict(change) for change in found],
    }


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals):
        raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
    return old, new
