"""Hostile bytes for as long as one likes: `SNAPSHOT_SOAK_SECONDS=600 python -m pytest -s tests/soak/test_fuzz.py`."""

import contextlib
import os
import random
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot
from tests.helpers.trees import PYTHONPATH
from tests.hostile.hostile_snapshots import bounded, changed, document_of, encoded, exercise, rich, sign, spoil, store

ROOT = Path(__file__).parents[2]
SECONDS = int(os.environ.get("SNAPSHOT_SOAK_SECONDS", "120"))
RUNS = int(os.environ.get("SNAPSHOT_SOAK_RUNS", "0"))
"""Inputs after which a test ends, in place of seconds, if not 0."""
SEED = int(os.environ.get("SNAPSHOT_TEST_SEED", "1"))


@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize(
    "target",
    [
        "manifest", "pickled", "url", "dcp_metadata", "torch_pickle", "zip_directory", "safetensors_header",
        "torchsnapshot_manifest",
    ],
)  # fmt: skip
def test_soak_atheris_fuzzing(tmp_path, target):
    """Atheris, guided by coverage; manifests are also changed into other manifests."""
    if os.environ.get("SNAPSHOT_TEST_SERVERS") != "require":
        pytest.importorskip("atheris", reason="pip install atheris")
    end = f"-runs={RUNS}" if RUNS else f"-max_total_time={SECONDS}"
    options = [end, f"-seed={SEED}", "-timeout=30", "-rss_limit_mb=3000", "-print_final_stats=1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.fuzz_targets", target, tmp_path / "corpus", *options],
        check=False, cwd=tmp_path, capture_output=True, text=True, errors="replace",
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    runs = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert done.returncode == 0, f"with -seed={SEED}: {done.stderr[-3000:]}"
    assert runs, done.stderr[-3000:]
    assert int(runs[1]) > 10
    print(f"{target}: {int(runs[1]):,} inputs with -seed={SEED}")


@pytest.mark.timeout(SECONDS + 300)
def test_soak_manifests_with_random_changes_raise_errors_of_the_library():
    torch.set_num_threads(1)
    first = SEED
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take("memory://rich/s", rich(), overwrite=True)
        base = document_of("rich/s")
        end = time.monotonic() + SECONDS
        count = read = 0
        while count < RUNS if RUNS else time.monotonic() < end:
            document = spoil(base, random.Random(first + count))
            with contextlib.suppress(RecursionError):  # too deep for this side
                store("rich/s/.snapshot_metadata", sign(encoded(document)))
            with bounded():
                read += exercise("memory://rich/s", changed(document, base), f"seed {first + count}") > 6
            count += 1
    print(f"{count:,} manifests from seed {first}, {read:,} of them still read")
