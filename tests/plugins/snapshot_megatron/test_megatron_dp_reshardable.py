"""Directories of Megatron-core's `dp_reshardable` go on in jobs of other splits, bit for bit."""

import importlib.util
import subprocess
import sys

import pytest

from tests.helpers.rank_pool import Pool
from tests.plugins.snapshot_megatron.megatron_jobs import resume
from tests.plugins.snapshot_megatron.megatron_models import Layout

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(300)]

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def four():
    with Pool(4) as pool:
        yield pool


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ("--tensor 2 --pipeline 2", [Layout(bucket=3000), Layout(pipeline=2, virtual=2)]),
        ("--tensor 2 --bucket 3000 --shared", [Layout(pipeline=2)]),
        ("--bucket 3000 --pipeline 2 --virtual 2 --tied", [Layout(tensor=2, tied=True)]),
        ("--expert 2 --experts --pipeline 2", [Layout(experts=True), Layout(expert=4, experts=True)]),
        ("--instances 2 --no-bf16", [Layout(bf16=False, tensor=2)]),
    ],
    ids=["both", "shared", "tied", "experts", "float32"],
)
def test_megatron_state_restores_the_optimizer_of_a_dp_reshardable_directory(four, tmp_path, options, others):
    program = [sys.executable, "-m", "tests.plugins.snapshot_megatron.megatron_models", tmp_path / "d", "--world", "4"]
    more = ["--kinds", "dp_reshardable", *options.split()]
    subprocess.run([*program, *more], check=True, capture_output=True, timeout=300)
    for layout in others:
        four.run(resume, str(tmp_path / "d" / "dp_reshardable" / "iter_0000003"), layout)
