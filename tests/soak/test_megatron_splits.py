"""Megatron-core's distributed optimizer from every split into every other one, each with a step more:
`python -m pytest -s tests/soak/test_megatron_splits.py`."""

import importlib.util
import itertools

import pytest

from tests.helpers.rank_pool import Pool

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from tests.plugins.snapshot_megatron.megatron_jobs import resume, take
from tests.plugins.snapshot_megatron.megatron_models import Layout

DENSE = [
    (1, Layout()),
    (2, Layout(bucket=3000)),
    (2, Layout(tensor=2)),
    (2, Layout(pipeline=2)),
    (2, Layout(pipeline=2, virtual=2)),
    (4, Layout(bucket=3000)),
    (4, Layout(tensor=2)),
    (4, Layout(tensor=2, pipeline=2)),
    (4, Layout(instances=2)),
]
TIED = [(1, Layout(tied=True)), (2, Layout(pipeline=2, tied=True)), (4, Layout(tensor=2, pipeline=2, tied=True))]
MIXTURE = [(1, Layout(experts=True)), (2, Layout(experts=True, expert=2)), (4, Layout(experts=True, expert=2))]
FLOAT32 = [(1, Layout(bf16=False)), (2, Layout(bf16=False, pipeline=2)), (4, Layout(bf16=False, tensor=2))]


@pytest.fixture(scope="module")
def pools():
    with Pool(1) as one, Pool(2) as two, Pool(4) as four:
        yield {1: one, 2: two, 4: four}


def _take(path, layout):
    take(path, layout)  # the job stays here


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("jobs", [DENSE, TIED, MIXTURE, FLOAT32], ids=["dense", "tied", "mixture", "float32"])
def test_soak_megatron_optimizer_goes_from_every_split_into_every_other(pools, tmp_path, jobs):
    for number, (world, layout) in enumerate(jobs):
        pools[world].run(_take, str(tmp_path / str(number)), layout)
    for (number, _), (world, layout) in itertools.product(enumerate(jobs), jobs):
        pools[world].run(resume, str(tmp_path / str(number)), layout)
    print(f"{len(jobs) ** 2} pairs of splits")
