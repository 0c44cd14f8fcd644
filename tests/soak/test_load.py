"""Load: a training loop that saves and restores for minutes, and snapshots that are large in every way.

`SNAPSHOT_SOAK_SECONDS=600 python -m pytest -s tests/soak/test_load.py`; `SNAPSHOT_TEST_SEED` plays a loop again.
"""

import collections
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("SNAPSHOT_SOAK_SECONDS", "600"))
"""For both loops together."""
SEED = int(os.environ.get("SNAPSHOT_TEST_SEED", time.time_ns() % 1_000_000))
say = print  # what was done is what this is for


def started(script, *arguments, log):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    with open(log, "w") as file:
        command = [sys.executable, "-m", f"tests.soak.{script}", *map(str, arguments)]
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


@pytest.mark.timeout(SECONDS + 400)
@pytest.mark.parametrize(("world", "share"), [(1, 0.4), (2, 0.55)])
def test_soak_training_loop_takes_and_restores_while_storages_fail(tmp_path, world, share):
    """Each rank looks at what came back, at what is left, and at itself; whoever hangs tells where."""
    logs = [tmp_path / f"log-{rank}" for rank in range(world)]
    seconds = int(SECONDS * share)
    ranks = [started("load_training", rank, world, tmp_path, seconds, SEED, log=log) for rank, log in enumerate(logs)]
    end = time.monotonic() + seconds + 300
    try:
        for each in ranks:
            each.wait(max(1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # as is seen below
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    ended = [each.returncode for each in ranks]
    assert ended == [0] * world, f"seed {SEED}: {ended}\n" + "\n".join(log.read_text()[-6000:] for log in logs)
    for rank, log in enumerate(logs):
        figures = json.loads(log.read_text().splitlines()[-1])
        say(f"rank {rank} of {world}, seed {SEED}, {seconds} s: " + "; ".join(f"{k} {v}" for k, v in figures.items()))
        assert figures["restores"] > figures["restores: failed"]


def measured(what, path, count):
    """What a process did with a snapshot of a size, as figures of each step."""
    log = path.with_name("log")
    process = started("load_sizes", what, path, count, log=log)
    try:
        code = process.wait(500)
    finally:
        process.kill()
        process.wait()
    told = log.read_text()
    assert code == 0, told[-6000:]
    figures = json.loads(told.splitlines()[-1])
    nbytes = figures.pop("bytes")
    say(f"{what} {count:,} ({nbytes:,} bytes): " + "; ".join(f"{k} {v}" for k, v in figures.items()))
    return nbytes >> 20, {step: each["MiB"] for step, each in figures.items() if "MiB" in each}


@pytest.mark.timeout(600)
def test_soak_take_of_a_million_entries(tmp_path):
    size, memory = measured("entries", tmp_path / "s", 1_000_000)
    assert max(memory.values()) < 16 * size, "memory is no longer a small multiple of the manifest"


@pytest.mark.timeout(600)
def test_soak_take_of_a_hundred_thousand_tensors(tmp_path):
    size, memory = measured("tensors", tmp_path / "s", 100_000)
    assert max(memory.values()) < 4 * size


@pytest.mark.timeout(600)
def test_soak_take_of_a_20_gib_tensor_and_read_object_boxes(tmp_path):
    if shutil.disk_usage(tmp_path).free < 24 << 30:
        pytest.skip("24 GiB of free disk are needed")
    try:
        _, memory = measured("huge", tmp_path / "s", 20)
        assert max(memory.values()) < 300
    finally:
        shutil.rmtree(tmp_path / "s", ignore_errors=True)
        (tmp_path / "source").unlink(missing_ok=True)


@pytest.mark.timeout(600)
def test_soak_hostile_manifest_of_ten_million_entries(tmp_path):
    size, memory = measured("tiny", tmp_path / "s", 10_000_000)  # under a limit of 9 times its size, and a little
    assert max(memory.values()) < 10 * size


def deep_dict(depth):
    made = {}
    for _ in range(depth):
        made = {"k": made}
    return made


def deep_list(depth):
    made = []
    for _ in range(depth):
        made = [made]
    return made


def deep_mixture(depth):
    made = 1
    for n in range(depth):
        made = collections.OrderedDict(a=made) if n % 3 == 0 else (made,) if n % 3 == 1 else [made]
    return made


def taken_down(value):
    """One by one: Python would need a stack as deep to drop all at once."""
    while isinstance(value, (dict, list, tuple)) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]


@pytest.mark.parametrize("make", [deep_dict, deep_list, deep_mixture])
@pytest.mark.parametrize("verb", [Snapshot.take, Snapshot.async_take, Snapshot.plan])
def test_soak_take_of_a_deeply_nested_state_is_refused(tmp_path, make, verb):
    for depth in (600, 10_000, 100_000):
        deep = make(depth)
        try:
            where = () if verb == Snapshot.plan else (tmp_path / "s",)
            with pytest.raises((ValueError, SnapshotError), match=r"^s\b.*: .*nested"):
                verb(*where, {"s": StateDict(x=deep)})
        finally:
            taken_down(deep)
        assert not (tmp_path / "s").exists()
    deep = make(300)
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=deep)}, options=TakeOptions(durable=False))
    live = StateDict()
    Snapshot(tmp_path / "s").restore({"s": live})
    assert live["x"] == deep
    assert type(live["x"]) is type(deep)
