"""Clients are made once for all who want the same, kept for a while, and closed."""

import asyncio

import pytest

from snapshot.io.registry import SharedClients


class Maker:
    """Makes numbered clients, and remembers which were closed."""

    def __init__(self, error=None):
        self.made = 0
        self.closed = []
        self.error = error
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def __call__(self):
        await self.go_on.wait()
        if self.error is not None:
            raise self.error
        self.made += 1
        number = self.made

        async def close():
            self.closed.append(number)

        return number, close


def test_shared_clients_creates_one_client_per_key():
    async def work():
        make, clients = Maker(), SharedClients(kept=60)
        assert await asyncio.gather(*(clients.get("a", make) for _ in range(5))) == [1] * 5
        assert await clients.get("b", make) == 2
        for _ in range(5):
            await clients.release("a")
        assert await clients.get("a", make) == 1
        assert make.closed == []
        await clients.close()
        assert sorted(make.closed) == [1, 2]

    asyncio.run(work())


def test_shared_clients_closes_an_unused_client_later():
    async def work():
        make, clients = Maker(), SharedClients(kept=0.01)
        await clients.get("a", make)
        await asyncio.sleep(0.05)
        assert make.closed == []  # it is used
        await clients.release("a")
        for _ in range(200):
            if make.closed:
                break
            await asyncio.sleep(0.01)
        assert make.closed == [1]
        assert await clients.get("a", make) == 2

    asyncio.run(work())


def test_shared_clients_retries_a_client_that_could_not_be_created():
    async def work():
        make, clients = Maker(OSError("no")), SharedClients()
        for _ in range(2):
            with pytest.raises(OSError, match="no"):
                await clients.get("a", make)
        make.error = None
        assert await clients.get("a", make) == 1
        await clients.close()

    asyncio.run(work())


def test_shared_clients_cancelled_wait_does_not_affect_others():
    async def work():
        make, clients = Maker(), SharedClients(kept=60)
        make.go_on.clear()
        first, second = (asyncio.ensure_future(clients.get("a", make)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        make.go_on.set()
        assert await second == 1
        await clients.release("a")
        await clients.close()
        assert make.closed == [1]

    asyncio.run(work())
