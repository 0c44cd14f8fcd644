"""One rank dies, stops or is slow at every point of every verb: `python -m pytest -s tests/soak/test_ranks.py`."""

import os
import random
import time
from collections import Counter

import pytest

from tests.distributed.fault_cases import Case, attempt, known

SECONDS = 270
"""After so long no more is begun: what is left out then is told."""
SEED = int(os.environ.get("SNAPSHOT_TEST_SEED", "0"))
say = print  # what was done is what this is for


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
def test_soak_silent_rank_at_any_point_is_named_by_all(tmp_path, world):
    template, cases = tmp_path / "template", []
    template.mkdir()
    for verb in ("take", "async_take", "restore", "read_once"):
        found = known(world, verb, str(template))
        for which in sorted({0, world // 2, world - 1}):
            for point in found.points(which):
                acts = ["die", "stop"]
                if not point.startswith(("call", "store")):  # a store that answers nothing is no slow rank
                    acts.append("slow")
                cases += [Case(world, verb, which, point, act) for act in acts]
    random.Random(SEED).shuffle(cases)
    began, faults, done = time.monotonic(), [], 0
    while done < len(cases) and time.monotonic() - began < SECONDS:
        batch = cases[done : done + 16 // world]
        faults += attempt(batch, tmp_path / str(done), str(template))
        done += len(batch)
    tried = Counter((case.verb, case.act) for case in cases[:done])
    for (verb, act), count in sorted(tried.items()):
        say(f"{world} ranks, {verb}: {act} {count} times")
    say(f"{world} ranks: {done} of {len(cases)} cases (seed {SEED}), {len(faults)} ended otherwise than they should")
    assert not faults, "\n".join(faults)
