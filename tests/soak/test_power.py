"""The power is lost at every operation of every verb, on each file system, around the page cache and through it."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE.parent / "trust", HERE.parent / "storage"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
from disks import KINDS, disk  # noqa: E402 - it is found from here on
from forks import Warm  # noqa: E402
from power import lose_at_operations  # noqa: E402

VERBS = ["take", "overwrite", "async_take", "async_overwrite", "overlapped", "delete"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_power_lost_at_every_operation(tmp_path, kind):
    with Warm() as warm, disk(kind, tmp_path) as made:
        for verb in VERBS:
            for direct_io in ("auto", "never"):
                losses = lose_at_operations(warm, made, verb, direct_io=direct_io)
                print(f"{kind} {verb} (direct_io={direct_io}): {losses} losses")
