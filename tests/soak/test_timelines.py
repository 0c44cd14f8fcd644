"""Timelines under random schedules: on the model and on the code, and real managers with real uploaders."""

import contextlib
import logging
import os
import random
import shutil
import signal
from collections import Counter

import pytest

from snapshot.errors import SnapshotError, StorageError
from snapshot.testing import FaultProxy
from tests.soak.namespaces import is_permitted
from tests.soak.real_runs import describe, run_schedules
from tests.tiers.jobs import ask, holds, manager_of, runs_in, state, stop_uploaders
from tests.tiers.oracle import BucketRoot, Wrong
from tests.tiers.schedules import run_schedule
from tests.tiers.whole_house import House

SCHEDULES, CHUNK = int(os.environ.get("SOAK_SCHEDULES", "10000")), 500
REAL = int(os.environ.get("SOAK_REAL", "500"))
HOUSES = int(os.environ.get("SOAK_HOUSES", "9500"))
BUCKET_HOUSES = int(os.environ.get("SOAK_BUCKET_HOUSES", "500"))
BUCKETS = int(os.environ.get("SOAK_BUCKETS", "500"))
HOSTS = "abcd"


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
def test_random_schedules_on_the_model_and_on_the_code(tmp_path, first):
    actions = sum(run_schedule(seed, tmp_path / "world") for seed in range(first, first + CHUNK))
    print(f"seeds {first} to {first + CHUNK - 1}: {actions} actions, 0 wrong")


@pytest.mark.timeout(3600)
def test_random_schedules_with_a_bucket_that_loses_answers(tmp_path, moto):
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
def test_random_schedules_of_a_whole_run(tmp_path, first):
    """Managers, uploaders, replicas and files of several hosts in this process, on a clock of their own."""
    tally, last = Tally(), min(first + CHUNK, HOUSES)
    for seed in range(first, last):
        tally.play(House(seed, tmp_path / "house"))
    tally.report(f"seeds {first} to {last - 1}")


@pytest.mark.timeout(36000)
def test_random_schedules_of_a_whole_run_with_a_bucket(tmp_path, moto):
    """Requests fail, and answers are lost."""
    tally = Tally()
    for seed in range(BUCKET_HOUSES):
        with FaultProxy(moto.url) as proxy:
            tally.play(House(seed, tmp_path / "house", BucketRoot(moto, proxy)))
    tally.report(f"seeds 0 to {BUCKET_HOUSES - 1}, in a bucket")


class Run:
    """A run with real managers and uploaders, and what each job was promised."""

    def __init__(self, folder, seed):
        self.chance = random.Random(seed)
        self.far, self.near = folder / "far", folder / "hosts"
        self.near.mkdir(parents=True)
        self.line, self.on_hosts, self.safe = [], {}, set()
        """The steps of the timeline that continues; the host of each near step; the steps promised to be far."""
        self.is_down, self.value, self.here = False, 0, ""
        self.values = {}

    def toggle(self):
        """Let the root fail, or bring it back."""
        away = self.far.with_name("away")
        if self.is_down:
            self.far.unlink()
            if away.exists():
                away.rename(self.far)
        else:
            if self.far.exists():
                self.far.rename(away)
            self.far.write_text("down")
        self.is_down = not self.is_down

    def hurt(self, host):
        """Kill or stop the uploader of a host, or lose the host."""
        near = self.near / host
        how = self.chance.choice(["kill", "stop"] if host == self.here else ["kill", "stop", "lose"])
        if how == "stop":
            for folder in runs_in(near):
                with contextlib.suppress(SnapshotError, OSError):
                    os.kill(ask(folder).pid, signal.SIGSTOP)
            return
        stop_uploaders(near)
        if how == "lose" and not self.is_down:
            shutil.rmtree(near, ignore_errors=True)
            self.on_hosts = {step: each for step, each in self.on_hosts.items() if each != host}

    def job(self):
        """Restore on some host, take some steps, and end or vanish."""
        host = self.here = self.chance.choice(HOSTS)
        options = {"upload": self.chance.choice(["latest", 1]), "keep_near": None, "grace": 0}
        with manager_of(self.far, self.near / host, **options) as manager:
            live = state(-1)
            if self.is_down:
                with pytest.raises(StorageError):
                    manager.restore_latest(live)
                return  # a job that must not guess
            found = manager.restore_latest(live)
            known = [step for step in self.line if step in self.safe or self.on_hosts.get(step) == host]
            if known:
                assert found is not None, f"{known} were promised"
                assert found >= max(known), f"{known} were promised"
            assert found is None or found in self.line, f"{found} is not on the line {self.line}"
            assert found is None or holds(live, self.values[found])
            self.line = [step for step in self.line if found is not None and step <= found]
            for step in range((found or 0) + 10, (found or 0) + 10 * self.chance.randint(2, 4), 10):
                self.value += 1
                pending = manager.async_take(step, state(self.value))
                pending.wait()
                self.values[step] = self.value
                self.line.append(step)
                self.on_hosts[step] = host
                self.safe.discard(step)
                if self.chance.random() < 0.4:
                    self.chance.choice([self.toggle, lambda: self.hurt(self.chance.choice(HOSTS))])()
                elif not self.is_down and self.chance.random() < 0.5:
                    pending.wait("far", timeout=60)
                    self.safe.add(step)


@pytest.mark.timeout(36000)
@pytest.mark.parametrize("seed", range(REAL))
def test_random_schedules_with_real_uploaders(tmp_path, seed):
    made = Run(tmp_path, seed)
    try:
        for _ in range(4):
            made.job()
            if made.is_down and made.chance.random() < 0.7:
                made.toggle()
        if made.is_down:
            made.toggle()
        made.job()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
    finally:
        stop_uploaders(*[made.near / host for host in HOSTS])


@pytest.mark.timeout(36000)
def test_random_schedules_with_real_processes_and_networks():
    """Hosts are network namespaces: `python -m tests.soak.real_runs SEED 1` runs a seed again."""
    if not is_permitted():
        pytest.skip("namespaces need root")
    figures, wrong = run_schedules(range(REAL))
    print(describe(figures))
    assert not wrong, "\n\n".join(wrong)
