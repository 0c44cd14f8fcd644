"""Ranks that wait for others: the store wakes them, for a response and for a failure, and they ask few times."""

import threading
import time
from functools import partial

import pytest
import torch.distributed as dist

from snapshot.distributed import exchange as module
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import WAKERS, ranks_of
from snapshot.errors import RankError

pytestmark = pytest.mark.ranks


class Counted:
    """A store that counts the requests of its user."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def __getattr__(self, name):
        def call(*args):
            self.count += 1
            return getattr(self.store, name)(*args)

        return call


def wait(seconds, *, failing=-1, look=10_000.0):
    """Wait for a slow leader, or for a rank that fails. Return the requests to the store meanwhile."""
    module.LOOK = look  # a wake-up that is lost would take as long
    rank, store = dist.get_rank(), None
    try:
        with Exchange(ranks_of(None), "take", 100_000) as exchange:
            store = exchange._store = Counted(exchange._store)
            exchange.agree(0, lambda _: 0, int, int)
            store.count = 0
            if rank == failing:
                time.sleep(seconds)
                raise ValueError
            exchange.agree(0, lambda _: (time.sleep(seconds), 0)[1], int, int)
            requests = store.count
            exchange.close()
            return requests
    except RankError:
        return store.count
    except ValueError:
        return 0


@pytest.mark.parametrize("failing", [-1, 0, 2])
def test_store_wakes_waiting_ranks(fresh_pool, failing):
    pool = fresh_pool(3, store="tcp")
    for _ in range(3):
        found = pool.run(partial(wait, 1.0, failing=failing))
        for rank, requests in enumerate(found):
            if rank not in (failing, 0):
                assert requests < 60  # each of 1,000 milliseconds is not asked about


def several(calls):
    """Wait in several calls at once. Return the number of threads that wait in the store, during and after."""

    def one(number):
        barrier.wait()
        return exchanges[number].agree(0, lambda _: (time.sleep(1), 0)[1], int, int)

    barrier = threading.Barrier(calls)
    exchanges = [Exchange(ranks_of(None), "take", 600) for _ in range(calls)]
    threads = [threading.Thread(target=one, args=(number,)) for number in range(calls)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in exchanges:
        each.close()
    return sum(each.name == "snapshot-waker" for each in threading.enumerate())


def test_store_waits_at_once_use_few_threads(fresh_pool):
    pool = fresh_pool(2, store="tcp")
    assert max(pool.run(several, WAKERS + 2)) <= WAKERS
    assert max(pool.run(several, 1)) <= WAKERS


def test_file_store_is_polled_by_waiting_ranks(two):
    assert min(two.run(partial(wait, 0.2, look=0.5))) > 0
