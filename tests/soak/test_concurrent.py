"""Several at one place, for minutes: `python -m pytest -s tests/soak/test_concurrent.py`."""

import os
import time

import pytest

from tests.faults.concurrent_jobs import Process, Threads
from tests.faults.concurrent_rounds import PAIRS, Place, between, three, together

SECONDS = 60
"""For what is random, of each kind."""
SEED = int(os.environ.get("SNAPSHOT_TEST_SEED", "0"))
say = print  # what was done is what this is for


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["files", "threads", "memory"])
def test_soak_concurrent_takes_restores_and_deletes_at_one_path(tmp_path, where):
    place = Place("memory://crowd" if where == "memory" else f"file://{tmp_path}/s")
    crowd = [Process() if where == "files" else Threads() for _ in range(4)]
    try:
        rounds, faults = between(crowd, place, PAIRS)
        say(f"{where}: {len(PAIRS)} pairs of verbs met at {rounds} steps")
        began, seed, count = time.monotonic(), SEED, 0
        while time.monotonic() - began < SECONDS / 2:
            done, found = three(crowd, place, rounds=20, seed=seed)
            faults, count, seed = faults + found, count + done, seed + 1
        say(f"{where}: three met {count} times (seeds {SEED} to {seed - 1})")
        ended, found = together(crowd, place, rounds=100_000, seed=SEED, seconds=SECONDS / 2)
        faults += found
        for (verb, how), times in sorted(ended.items()):
            say(f"{where}: at once, seed {SEED}: {verb}: {how} {times} times")
    finally:
        for each in crowd:
            each.close()
        place.prepare(None)
    say(f"{where}: {len(faults)} ended otherwise than documented")
    assert not faults, "\n".join(faults)
