"""`snapshot prune`: remove the steps of a root that a policy does not keep, and leftovers of interrupted takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

from snapshot.cli.arguments import add_json, add_storage, count, duration, options_of, size
from snapshot.cli.locate import explain_missing, is_local_file
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, ask, complain, emit, line, printable
from snapshot.errors import SnapshotError, SnapshotNotFoundError
from snapshot.io.loop import run as on_loop
from snapshot.io.url import URL
from snapshot.loading.open import is_foreign
from snapshot.manager.policies import KeepBest, KeepEvery, KeepFor, KeepLatest, Policy
from snapshot.manager.retention import Fate, Removed, Survey, remove_steps, survey_steps
from snapshot.manager.root import Root
from snapshot.manager.thinning import KeepSpread, KeepWithin
from snapshot.manifest.document import METADATA
from snapshot.save.transaction import DAY
from snapshot.text import counted, size_text

UNASKED = "nothing was removed: no terminal to ask on; pass --yes, or --dry-run to only show"


DESCRIPTION = (
    "Remove snapshots named step-<number> in a folder, except those that a --keep option keeps, the newest, and "
    "pinned ones. Also remove snapshots whose lifetime is over, and leftovers of interrupted takes and removals; "
    "without a --keep option or --within, remove only these. Checkpoints of other libraries are left alone. It shows "
    "what it would remove, and asks."
)
EXAMPLES = [
    ("prune run --keep-latest 3 --dry-run", "show what would be removed"),
    ("prune run --keep-latest 3 --keep-every 1000", "the latest 3, and each 1000th"),
    ("prune run --keep-best loss:2 --keep-best f1:1:max", "the best by metrics"),
    ("prune run --keep-for 7d --yes", "without asking, for scripts"),
    ("prune run --keep-latest 20 --within 2TiB", "the latest 20, as far as they fit"),
    ("prune run", "only what has expired, and leftovers of interrupted takes"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("root", metavar="ROOT", help="the folder of the steps")
    keep = parser.add_argument_group("steps to keep", "A step is kept if any of these options keeps it.")
    for flag, kind, metavar, what in (
        ("--keep-latest", lambda text: KeepLatest(count(text)), "N", "the latest N"),
        ("--keep-best", best, "METRIC[:N[:max]]", "the N best by a metric: the lowest, or with max the highest"),
        ("--keep-every", lambda text: KeepEvery(count(text)), "N", "each step that is a multiple of N"),
        (
            "--keep-for",
            lambda text: KeepFor(duration(text)),
            "TIME",
            "snapshots younger than this, such as 12h or 7d",
        ),
    ):
        keep.add_argument(flag, action="append", default=[], type=kind, dest="keep", metavar=metavar, help=what)
    spread = "ever fewer the older they are: at most two for each doubling of the distance in steps"
    keep.add_argument("--keep-spread", action="append_const", const=KeepSpread(), dest="keep", help=spread)
    keep.add_argument(
        "--within", type=size, metavar="SIZE", help="of these, or of all, only the newest that fit, such as 2TiB"
    )
    add_careful(parser)
    add_json(parser)
    add_storage(parser)


def add_careful(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of all verbs that remove files."""
    parser.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--older-than",
        type=duration,
        default=DAY,
        metavar="TIME",
        help="age after which an uncommitted take counts as interrupted, and its files are removed (default: 1d)",
    )


def best(text: str) -> KeepBest:
    """Return the policy for `loss`, `loss:2` or `f1:1:max`. A metric's name may contain colons."""
    name, n, mode = text, 1, "min"
    head, colon, tail = name.rpartition(":")
    if colon and tail in ("min", "max"):
        name, mode = head, tail
    head, colon, tail = name.rpartition(":")
    if colon and tail.isascii() and tail.isdecimal():
        name, n = head, count(tail)
    if not name:
        raise argparse.ArgumentTypeError(f"must be METRIC, METRIC:N or METRIC:N:max, got {text!r}")
    return KeepBest(name, n, mode)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Show what would be removed, ask, and remove it."""
    options = options_of(arguments)
    url = URL.parse(arguments.root)
    root = Root(url, options)
    policy: Policy | None = reduce(lambda one, other: one | other, arguments.keep) if arguments.keep else None
    policy = policy if arguments.within is None else KeepWithin(arguments.within, policy)
    if is_local_file(url):
        raise SnapshotError(f"{url}: not a folder of steps, but a file")
    fates = survey_steps(root, Survey(policy=policy, older_than=arguments.older_than, thorough=True))
    if not fates:
        on_loop(_expect_folder(root))
        with explain_missing(arguments.root, options):
            raise SnapshotNotFoundError("no steps")
    going = [fate for fate in fates if fate.goes]
    if not arguments.json:
        print(ScreenTable(COLUMNS).fill(fates, lambda fate: "red" if fate.goes else ""))
        kept = sum(fate.what == "snapshot" and not fate.goes for fate in fates)
        print(line(f"to remove: {_counted(going)}, {_size(going)}; to keep: {counted(kept, 'snapshot')}"))
    done = Removed(())
    if going and not arguments.dry_run:
        if not confirmed(arguments, f"remove {_counted(going)} from {url}?"):
            return ExitStatus.FOUND
        done = on_loop(remove_steps(root, going, older_than=arguments.older_than))
    failed = {(fate.step, fate.what): str(error) for fate, error in done.failed}
    steps = [_json(fate, fate in done.fates, failed.get((fate.step, fate.what))) for fate in fates]
    removed = [f"removed {_counted(done.fates)}, {_size(done.fates)}"] if done.fates else []
    emit(arguments, {"url": str(url), "steps": steps}, removed)
    for fate, error in () if arguments.json else done.failed:
        complain(f"step-{fate.step}", f"removal failed: {error}")
    return ExitStatus.FOUND if done.failed else ExitStatus.OK


async def _expect_folder(root: Root) -> None:
    """Raise if the root is not a folder of steps."""
    async with root.opened() as session:
        storage = session.storage
        if METADATA in await storage.list(METADATA):
            above = root.url.location.rstrip("/").rpartition("/")[0]
            raise SnapshotError(
                f"{root.url}: not a folder of steps but a snapshot; name the folder above it"
                + (f": {URL(root.url.scheme, above, root.url.query)}" if above else "")
            )
        if await is_foreign(session):
            raise SnapshotError(f"{root.url}: not a folder of steps, but a checkpoint")


def confirmed(arguments: argparse.Namespace, question: str) -> bool:
    """Return True if the user confirms; raise SnapshotError without a terminal to ask on."""
    if arguments.yes:
        return True
    if not (sys.stdin and sys.stdin.isatty()):
        raise SnapshotError(UNASKED)
    if ask(printable(question)):
        return True
    print("nothing was removed", file=sys.stderr)
    return False


def _metrics(fate: Fate) -> str:
    metrics = fate.taken.metrics if fate.taken is not None else {}
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


COLUMNS = [
    Column("step", lambda fate: f"step-{fate.step}"),
    Column("size", lambda fate: "" if fate.nbytes is None else size_text(fate.nbytes), right=True),
    Column("", lambda fate: "remove" if fate.goes else "keep"),
    Column("why", lambda fate: fate.why + (f": {counted(fate.files, 'file')}" if fate.files else ""), shrinks=True),
    Column("metrics", _metrics, optional=1),
]


def _counted(fates: Sequence[Fate]) -> str:
    snapshots = sum(fate.what == "snapshot" for fate in fates)
    said = [counted(snapshots, "snapshot")] if snapshots else []
    if len(fates) > snapshots:
        said.append(f"leftovers in {counted(len(fates) - snapshots, 'folder')}")
    return " and ".join(said) or "nothing"


def _size(fates: Sequence[Fate]) -> str:
    return size_text(sum(fate.nbytes or 0 for fate in fates))


def _json(fate: Fate, removed: bool, error: str | None) -> dict[str, Any]:
    made = {"step": fate.step, "what": fate.what, "goes": fate.goes, "why": fate.why, "removed": removed}
    if fate.nbytes is not None:
        made["bytes"] = fate.nbytes
    if fate.taken is not None:
        made["metrics"] = dict(fate.taken.metrics)
    return made | ({"error": error} if error else {})
