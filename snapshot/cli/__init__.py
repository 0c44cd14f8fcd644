"""The `snapshot` command: what a shell can ask of snapshots.

Each verb is a module with `add(subparsers)`, which describes its arguments and sets `run` to a function that takes them
and returns the exit status. So a verb is added by one name in `VERBS`, and nothing here knows what any of them does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from snapshot.cli import bench, convert, verify
from snapshot.cli.status import ExitStatus
from snapshot.errors import SnapshotError

VERBS = (verify, convert, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, 1 (it found a difference or a fault) or 2 (it could not run)."""
    parser = argparse.ArgumentParser(
        prog="snapshot", description="Exact, verified, fast checkpoints of PyTorch applications."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verb.add(verbs)
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as stop:  # argparse has printed help (0) or what was wrong (2)
        return int(stop.code or 0)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        status = run(arguments)
        sys.stdout.flush()
    except (SnapshotError, OSError, ValueError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return ExitStatus.FOUND
        print(f"snapshot: error: {' '.join(str(error).split())}", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        return 130  # what shells give for SIGINT
    return status
