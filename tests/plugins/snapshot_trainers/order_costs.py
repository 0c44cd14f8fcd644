"""What the order and the ledger of a data loader cost: `python -m tests.plugins.snapshot_trainers.order_costs`.

The rounds of what is compared alternate, and the fastest of each counts.
"""

import time

import torch
from torch.utils.data import DataLoader

from snapshot_trainers.ledger import Ledger, pack_ids
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers.orders import Numbers

ROUNDS = 15


class Slow(Numbers):
    """A dataset whose samples cost about a microsecond each."""

    def __getitems__(self, indices):
        begin, end = time.perf_counter_ns(), 1000 * len(indices)
        while time.perf_counter_ns() - begin < end:
            pass
        return indices


def fastest(*works):
    """Return the seconds of the fastest round of each."""
    best = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for at, work in enumerate(works):
            begin = time.process_time()
            work()
            best[at] = min(best[at], time.process_time() - begin)
    return best


def main():
    torch.set_num_threads(1)
    for batch in (32, 256, 4096):
        ids = list(range(batch))
        loops = max(1, 400_000 // batch)

        def added(ids=ids, loops=loops):
            for _ in range(loops):
                [x + 1 for x in ids]

        def hashed(ids=ids, loops=loops):
            ledger = Ledger()
            for _ in range(loops):
                ledger.add(pack_ids(ids))
            return ledger.sum

        plain, ledger = fastest(added, hashed)
        count = batch * loops / 1e9
        print(
            f"batches of {batch:5}: [x + 1] {plain / count:6.1f} ns a sample, ledger {ledger / count:6.1f} ns", end=", "
        )
        length = 100_000 // batch * batch
        options = {"batch_size": batch, "shuffle": True, "collate_fn": list}
        untracked, tracked = DataLoader(Slow(length), **options), DataLoader(Slow(length), **options)
        LoaderState(tracked)

        def loop(loader):
            for _ in loader:
                pass

        one, other = fastest(lambda: loop(untracked), lambda: loop(tracked))  # noqa: B023
        print(f"a loop of 1 us a sample: {one / length * 1e6:.3f} us, tracked {100 * (other / one - 1):+.1f} %")


if __name__ == "__main__":
    main()
