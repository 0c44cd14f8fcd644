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


def wait(seconds, *, failing=-1, look=60.0):
    """Wait for a slow leader, or for a rank that fails. Return the requests, and how late the end was noticed."""
    module.LOOK = look  # a wake-up that is lost would take as long
    rank, store = dist.get_rank(), None
    began = time.time()
    try:
        with Exchange(ranks_of(None), "take", 600) as exchange:
            store = exchange._store = Counted(exchange._store)
            exchange.agree(0.0, lambda _: 0.0, float, float)
            store.count = 0
            if rank == failing:
                time.sleep(seconds)
                raise ValueError(str(time.time()))
            ended = exchange.agree(0.0, lambda _: (time.sleep(seconds), time.time())[1], float, float)
            requests, late = store.count, time.time() - ended
            exchange.close()
            return requests, late, time.time() - began
    except RankError as error:
        return store.count, time.time() - float(str(error).split()[-1]), time.time() - began
    except ValueError:
        return 0, 0.0, time.time() - began


@pytest.mark.parametrize("failing", [-1, 0, 2])
def test_store_wakes_waiting_ranks(fresh_pool, failing):
    pool = fresh_pool(3, store="tcp")
    for _ in range(3):
        found = pool.run(partial(wait, 1.0, failing=failing))
        for rank, (requests, late, seconds) in enumerate(found):
            if rank != failing:
                assert late < 30  # else it only looked again
                assert seconds < 50
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
    found = two.run(partial(wait, 0.2, look=0.5))
    assert all(late < 30 for _, late, _ in found)
