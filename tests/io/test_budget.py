"""The memory budget: bytes are granted in order, given back once, and nobody waits for ever."""

import asyncio
import threading

import pytest

from snapshot.io.aio import run_inline
from snapshot.io.arena import GRAIN, Arena
from snapshot.io.budget import MemoryBudget, Pool
from snapshot.io.host_memory import available_memory, total_memory


def test_memory_budget_grants_requests_in_order():
    async def main():
        budget = MemoryBudget(10, Pool(10, reserve=False))
        await budget.acquire(8)
        order = []

        async def ask(nbytes):
            await budget.acquire(nbytes)
            order.append(nbytes)

        tasks = [asyncio.create_task(ask(nbytes)) for nbytes in (5, 1, 4)]
        await asyncio.sleep(0)
        assert order == []  # the 1 would fit, and does not overtake the 5
        budget.release(8)
        await asyncio.gather(*tasks)
        assert order == [5, 1, 4]
        for nbytes in order:
            budget.release(nbytes)
        seen = budget.statistics()
        assert (seen.used, seen.peak, seen.waits) == (0, 10, 3)
        assert "peak 10" in repr(budget)

    asyncio.run(main())


def test_memory_budget_grants_more_than_its_limit_if_nothing_else_is_held():
    budget = MemoryBudget(10, Pool(10, reserve=False))
    assert budget.try_acquire(100)
    assert not budget.try_acquire(1)
    budget.release(100)
    assert budget.try_acquire(1)


def test_memory_budget_cancelled_request_is_not_lost():
    async def main():
        budget = MemoryBudget(10, Pool(10, reserve=False))
        await budget.acquire(10)
        waiting = asyncio.create_task(budget.acquire(10))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        budget.release(10)
        assert budget.statistics().used == 0
        await budget.acquire(10)

    asyncio.run(main())


def test_memory_budget_failure_wakes_all_waiters():
    budget = MemoryBudget(10, Pool(10, reserve=False))
    budget.acquire_blocking(10)
    errors = []

    def ask():
        try:
            budget.acquire_blocking(1)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not budget.statistics().waits:
        pass
    budget.fail(RuntimeError("over"))
    thread.join(10)
    assert errors == ["over"]
    with pytest.raises(RuntimeError, match="over"):
        budget.try_acquire(1)


def test_memory_budget_operations_share_a_pool_and_fail_separately():
    pool = Pool(10, reserve=False)
    one, other = MemoryBudget(10, pool), MemoryBudget(10, pool)
    assert one.try_acquire(6)
    assert not other.try_acquire(5)
    waiting = [threading.Thread(target=budget.acquire_blocking, args=(5,)) for budget in (other,)]
    waiting[0].start()
    while not other.statistics().waits:
        pass
    one.fail(RuntimeError("over"))
    one.release(6)
    waiting[0].join(10)
    assert (one.statistics().used, other.statistics().used, pool.used) == (0, 5, 5)
    with pytest.raises(RuntimeError, match="over"):
        one.try_acquire(1)
    pool.resize(4)
    assert not other.try_acquire(1)
    other.release(5)
    assert other.try_acquire(4)


def test_memory_budget_bytes_granted_before_a_failure_are_returned():
    async def main():
        pool = Pool(10, reserve=False)
        one, other = MemoryBudget(10, pool), MemoryBudget(10, pool)
        await other.acquire(10)
        waiting = asyncio.create_task(one.acquire(10))
        await asyncio.sleep(0)
        other.release(10)  # granted, but it has not yet heard of it
        one.fail(RuntimeError("over"))
        with pytest.raises(RuntimeError, match="over"):
            await waiting
        assert pool.used == 0
        assert other.try_acquire(10)

    asyncio.run(main())


def test_memory_budget_borrow_does_not_wait_behind_slots():
    async def main():
        budget = MemoryBudget(16 << 20)
        await budget.acquire(budget.limit)
        waiting = asyncio.create_task(budget.acquire(budget.limit))
        await asyncio.sleep(0)
        async with budget.borrow(8 << 20) as view:
            assert len(view) >= 8 << 20
        budget.release(budget.limit)
        await waiting
        assert budget.statistics().limit == 16 << 20

    asyncio.run(main())


def test_memory_budget_acquire_without_a_loop_blocks():
    budget = MemoryBudget(10, Pool(10, reserve=False))
    budget.acquire_blocking(10)
    thread = threading.Thread(target=run_inline, args=(budget.acquire, 5))
    thread.start()
    while not budget.statistics().waits:
        pass
    budget.release(10)
    thread.join(10)
    assert budget.statistics().used == 5


def test_arena_keeps_memory_up_to_its_limit():
    arena = Arena(keep=3 * GRAIN)
    slots = [arena.take(GRAIN) for _ in range(5)]
    addresses = {slot.address for slot in slots}
    assert all(address % 4096 == 0 for address in addresses)
    for slot in slots:
        arena.give(slot)
    assert "3,145,728 bytes kept, 0 in use" in repr(arena)
    assert arena.take(5).address in addresses
    assert arena.take(GRAIN + 1).size == 2 * GRAIN
    assert arena.release() == 2 * GRAIN
    assert arena.release() == 0


def test_arena_slot_tensor_and_view_share_memory():
    slot = Arena(keep=0).take(100)
    slot.view[:3] = b"abc"
    assert bytes(slot.tensor[:3].tolist()) == b"abc"


def test_available_memory_is_at_most_total_memory():
    assert 0 < available_memory() <= total_memory()


def test_budget_close_releases_what_an_interrupted_call_holds_also_of_the_reserve():
    pool = Pool(100)
    budget = MemoryBudget(40, pool)
    assert pool.reserve is not None

    async def interrupted():
        assert budget.try_acquire(10)
        held = budget.count(1)
        await held.__aenter__()
        assert (pool.used, pool.reserve.used) == (10, 1)
        budget.close()
        assert (pool.used, pool.reserve.used) == (0, 0)
        await held.__aexit__(None, None, None)
        assert (pool.used, pool.reserve.used) == (0, 0), "later releases do nothing"

    asyncio.run(interrupted())
