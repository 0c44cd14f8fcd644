"""Timelines under random schedules: the model, whole runs in one process, and real processes on real networks."""

import logging
import os
from collections import Counter

import pytest

from tests.helpers.fault_proxy import FaultProxy
from tests.plugins.snapshot_tiers.oracle import BucketRoot, Wrong
from tests.plugins.snapshot_tiers.schedules import run_schedule
from tests.plugins.snapshot_tiers.spoiled_house import SpoiledHouse
from tests.plugins.snapshot_tiers.whole_house import House
from tests.soak.namespaces import is_permitted
from tests.soak.real_runs import describe, run_schedules

SCHEDULES, CHUNK = int(os.environ.get("SOAK_SCHEDULES", "10000")), 500
REAL = int(os.environ.get("SOAK_REAL", "500"))
HOUSES = int(os.environ.get("SOAK_HOUSES", "9500"))
BUCKET_HOUSES = int(os.environ.get("SOAK_BUCKET_HOUSES", "500"))
SPOILED_HOUSES = int(os.environ.get("SOAK_SPOILED_HOUSES", "1000"))
BUCKETS = int(os.environ.get("SOAK_BUCKETS", "500"))


class Tally:
    """What happened in many schedules."""

    def __init__(self):
        self.events, self.actions, self.skipped, self.wrong = Counter(), 0, Counter(), []
        logging.disable(logging.CRITICAL)

    def play(self, house):
        try:
            house.play()
        except Wrong as wrong:
            self.wrong.append(str(wrong))
        self.events.update(house.events)
        self.skipped.update(house.skipped)
        self.actions += len(house.log)

    def report(self, what):
        logging.disable(logging.NOTSET)
        counts = f"{dict(self.events)}; skipped: {dict(self.skipped)}"
        print(f"{what}: {self.actions} actions, {len(self.wrong)} wrong; {counts}")
        assert not self.wrong, "\n".join(self.wrong)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(0, SCHEDULES, CHUNK))
def test_soak_timelines_random_schedules_on_the_model_and_the_code(tmp_path, first):
    actions = sum(run_schedule(seed, tmp_path / "world") for seed in range(first, first + CHUNK))
    print(f"seeds {first} to {first + CHUNK - 1}: {actions} actions, 0 wrong")


@pytest.mark.timeout(3600)
def test_soak_timelines_random_schedules_with_a_bucket_that_loses_responses(tmp_path, moto):
    """The requests are sent through a proxy, and repeated by the library if an answer is lost."""
    with FaultProxy(moto.url) as proxy:
        region = {"region_name": moto.region}
        options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, "client_kwargs": region}

        def lose():
            proxy.fault("PUT", "*.run*", lose_answer="reset")

        actions = 0
        for seed in range(BUCKETS):
            bucket = f"s3://{moto.bucket()}/run", options
            actions += run_schedule(seed, tmp_path / "world", bucket=bucket, lose=lose)
    print(f"seeds 0 to {BUCKETS - 1}: {actions} actions, 0 wrong")


@pytest.mark.timeout(36000)
@pytest.mark.parametrize("first", range(0, HOUSES, CHUNK))
def test_soak_timelines_random_schedules_of_a_whole_run(tmp_path, first):
    """Managers, uploaders, replicas and files of several hosts in this process, on a clock of their own."""
    tally, last = Tally(), min(first + CHUNK, HOUSES)
    for seed in range(first, last):
        tally.play(House(seed, tmp_path / "house"))
    tally.report(f"seeds {first} to {last - 1}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rolls", [False, True])
def test_soak_timelines_random_schedules_with_suspect_steps_and_a_restored_root(tmp_path, rolls):
    tally = Tally()
    for seed in range(SPOILED_HOUSES):
        tally.play(SpoiledHouse(seed, tmp_path / "house", rolls=rolls))
    tally.report(f"seeds 0 to {SPOILED_HOUSES - 1}, with suspect steps{' and roll-backs' if rolls else ''}")


@pytest.mark.timeout(36000)
def test_soak_timelines_random_schedules_of_a_whole_run_with_a_bucket(tmp_path, moto):
    """Requests fail, and answers are lost."""
    tally = Tally()
    for seed in range(BUCKET_HOUSES):
        with FaultProxy(moto.url) as proxy:
            tally.play(House(seed, tmp_path / "house", BucketRoot(moto, proxy)))
    tally.report(f"seeds 0 to {BUCKET_HOUSES - 1}, in a bucket")


@pytest.mark.timeout(36000)
def test_soak_timelines_random_schedules_with_real_processes_and_networks():
    """Hosts are network namespaces: `python -m tests.soak.real_runs SEED 1` runs a seed again."""
    if not is_permitted():
        pytest.skip("namespaces need root")
    figures, wrong = run_schedules(range(REAL))
    print(describe(figures))
    assert not wrong, "\n\n".join(wrong)
