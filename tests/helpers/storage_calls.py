"""A storage used from a test that is not asynchronous."""

import asyncio

from snapshot.io.registry import open_storage
from snapshot.io.storage import URL

PATIENT = {"timeout": 20, "deadline": 60}
"""How long requests are waited for where a test does not wait for their end: also a machine that is busy is in time."""


def patience(fault):
    """The same where a fault is to be outlived: what hangs is given up soon."""
    hangs = "hang" in fault or "hang_at" in fault or fault.get("lose_answer") == "hang"
    return PATIENT | {"timeout": 1} if hangs else PATIENT


def use(url, options, work):
    """What some work on a storage, that is closed afterwards, returns."""

    async def body():
        storage = open_storage(URL.parse(url), options)
        try:
            return await work(storage)
        finally:
            await storage.close()

    return asyncio.run(body())
