"""Many drawn loops over data loaders: `SOAK_LOOPS=20000 python -m pytest -s tests/soak/test_data_order.py`."""

import os

import pytest

from tests.plugins.snapshot_trainers import orders


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("check", [orders.check_one, orders.check_replicas])
def test_soak_data_order_of_many_drawn_loops(check):
    count = int(os.environ.get("SOAK_LOOPS", "2000"))
    for number in range(10_000, 10_000 + count):
        check(number)
    print(f"{count:,} drawn loops")
