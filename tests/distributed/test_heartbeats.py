"""Heartbeats and requests to the store of a process group, of ranks that are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import Heartbeat, Ranks


def test_heartbeat_thread_ends_with_its_process_group():
    """One thread for each group that was ever destroyed would go on sending to its store."""
    heart = Heartbeat(dist.HashStore(), 0, 2)
    heart.begin(60)
    thread = heart._thread
    assert thread.name == "snapshot-heart"
    assert thread.is_alive()
    heart.end(60)
    heart.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_store_timeout_is_not_reported_as_a_silent_rank():
    """The store's own error says more than that it did not respond."""
    store, met = dist.HashStore(), threading.Barrier(2)

    def fail():
        raise TimeoutError("wait timeout after 3 s")

    def call(rank):
        ranks = Ranks(rank, (0, 1), store)
        try:
            with Exchange(ranks, "take", 60) as exchange:
                met.wait(60)
                with pytest.raises(TimeoutError, match="wait timeout after 3 s"):
                    exchange._guard(fail)
                exchange.close()
        finally:
            met.wait(60)  # the other one may still wait for this one
            ranks.stop()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))
