"""`snapshot diff`: differences between two snapshots."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from snapshot.cli.arguments import (
    add_json,
    add_rename,
    add_selection,
    add_storage,
    add_work,
    options_of,
    selection_of,
    work_of,
)
from snapshot.cli.listing import NUMBERS, spans
from snapshot.cli.locate import find_metadata
from snapshot.cli.ranks import on_ranks
from snapshot.cli.screen import ExitStatus, bar, emit, line, mute_torch_warnings, paint
from snapshot.errors import SnapshotNotFoundError

if TYPE_CHECKING:
    from snapshot.reports import Change, Diff

STYLES = {"added": "green", "removed": "red", "changed": "yellow", "renamed": "cyan"}
SHOWN = 200
"""Maximum number of lines on a terminal, unless all are requested."""


DESCRIPTION = (
    "Show objects only in B (+), only in A (-), changed (~) and renamed (>). Snapshots are compared by the digests "
    "in their manifests. Data is read only if digests are not enough: for tensors that are split differently, for "
    "other formats, or with --values. Exit status: 0 if equal, 1 if not."
)
EXAMPLES = [
    ("diff run/step-100 run/step-200", "what changed in between"),
    ("diff run/step-100 run/step-200 --values", "and by how much"),
    ("diff run/step-100 s3://bucket/run/step-100", "is the copy the same?"),
    ("diff run/step-100 model.safetensors --select 'model/**' --rename model=", "and the export?"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("a", metavar="A", help="a snapshot, or a checkpoint of another library")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--values", action="store_true", help="read tensors that differ, and show by how much")
    parser.add_argument(
        "--all", action="store_true", help="a line for each object, even if only numbers in the names differ"
    )
    add_selection(parser)
    add_rename(parser, "a name in A and its name in B; 'model=' removes that level; repeatable", empty=True)
    add_work(parser)
    add_json(parser)
    add_storage(parser, "src", "dst")


@on_ranks
def run(arguments: argparse.Namespace) -> ExitStatus:
    """Compare, and print the differences."""
    from snapshot.save.observers import find_changes
    from snapshot.snapshot import Snapshot

    sides = [(url, options_of(arguments, prefix)) for url, prefix in ((arguments.a, "src"), (arguments.b, "dst"))]
    a, b = (Snapshot(url, storage_options=options) for url, options in sides)
    try:
        with mute_torch_warnings(), bar("diff", ranks=arguments.ranks) as show:
            found = Snapshot.diff(
                a, b, **selection_of(arguments), **work_of(arguments), values=arguments.values, progress=show
            )
    except SnapshotNotFoundError:
        for url, options in sides:
            find_metadata(url, options)  # raises an error that describes what exists there
        raise
    changed = find_changes(a.metadata.metadata, b.metadata.metadata)
    emit(arguments, {**found.as_json(), "environment": changed}, _lines(found, changed, whole=arguments.all))
    return ExitStatus.OK if found.same else ExitStatus.FOUND


def _lines(found: Diff, changed: list[str], *, whole: bool) -> Iterator[str]:
    changes = [(change.kind, str(change)) for change in found] if whole else list(_folded(found))
    most = SHOWN if sys.stdout.isatty() and not whole else len(changes)
    for kind, text in changes[:most]:
        yield line(text, STYLES[kind])
    if most < len(changes):
        yield paint(f"... and {len(changes) - most:,} more: show them with --all", "dim")
    yield line(found.summary)
    for text in changed:
        yield paint(f"environment: {text}", "dim")


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
