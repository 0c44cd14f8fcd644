"""`snapshot upload`: upload near steps of a run, as its trainer's uploader does."""

from __future__ import annotations

import argparse
import math
import time

from snapshot.cli.arguments import add_storage, options_of
from snapshot.cli.screen import ExitStatus, printable
from snapshot.errors import SnapshotError
from snapshot.io.url import URL

DESCRIPTION = (
    "Upload the near steps of a run to its far root, and end when they are there. A trainer with near folders "
    "starts an uploader on each host by itself, which outlives it. This command is for what a host still has "
    "after its uploader was killed, too. Run it on each host that has near steps."
)
EXAMPLES = [
    ("upload /nvme/run", "the newest step, as the manager does by default"),
    ("upload /nvme/run --all", "all near steps"),
    ("upload /nvme/run s3://bucket/run --rate 50000000", "with a limit of 50 MB/s"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("near", metavar="NEAR", help="the near folder of this host")
    parser.add_argument("far", metavar="FAR", nargs="?", help="the far root; by default the one of the last trainer")
    parser.add_argument("--all", action="store_true", help="upload all near steps, not only the newest")
    parser.add_argument("--rate", type=float, metavar="BYTES", help="the maximum bytes per second")
    add_storage(parser)


def run(given: argparse.Namespace) -> ExitStatus:
    """Upload, and end."""
    from snapshot_tiers.uploader_process import find_runs, upload_by_hand  # with torch, which the help does not need

    if given.rate is not None and not 0 < given.rate < math.inf:
        raise ValueError(f"--rate must be a number of bytes above 0, got {given.rate}")
    far = None if given.far is None else URL.parse(given.far)
    found = find_runs(given.near, None if far is None else str(far))
    if not found:
        raise SnapshotError(f"{given.near}: no run with near steps is here")
    status = ExitStatus.OK
    for folder, copy in found.items():
        target = copy.far if far is None else far.reveal()
        began = time.monotonic()
        try:
            done = upload_by_hand(folder, copy.facts, target, options_of(given), everything=given.all, rate=given.rate)
        except SnapshotError as error:
            if len(found) == 1:
                raise
            print(printable(f"{folder}: {error}"))
            status = ExitStatus.FOUND
            continue
        for step, state in sorted(done.items()):
            print(printable(f"step-{step}: {state}"))
        print(printable(f"{folder} -> {URL.parse(target)}: {time.monotonic() - began:.1f} s"))
        if any(state != "whole" for state in done.values()):
            status = ExitStatus.FOUND
    return status
