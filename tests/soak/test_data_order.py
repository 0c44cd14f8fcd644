"""Many drawn loops over data loaders: `SOAK_LOOPS=20000 python -m pytest -s tests/soak/test_data_order.py`."""

import os

import pytest

from tests.plugins.snapshot_trainers import orders, prepared_orders

CHECKS = [orders.check_one, orders.check_replicas, prepared_orders.check_same, prepared_orders.check_other]


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("check", CHECKS)
def test_soak_data_order_of_many_drawn_loops(check):
    count = int(os.environ.get("SOAK_LOOPS", "2000"))
    for number in range(10_000, 10_000 + count):
        check(number)
    print(f"{count:,} drawn loops")
