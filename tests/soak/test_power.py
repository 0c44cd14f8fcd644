"""The power is lost at every operation of every verb, on each file system, around the page cache and through it."""

import pytest

from tests.faults.forked_jobs import Forker
from tests.faults.mounted_disks import KINDS, disk
from tests.faults.power_loss import lose_at_operations

VERBS = ["take", "overwrite", "async_take", "async_overwrite", "overlapped", "delete"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_soak_power_loss_at_every_operation(tmp_path, kind):
    with Forker() as forker, disk(kind, tmp_path) as made:
        for verb in VERBS:
            for mode in ("auto", "never", "portable"):
                losses = lose_at_operations(forker, made, verb, mode=mode)
                print(f"{kind} {verb} ({mode}): {losses} losses")
