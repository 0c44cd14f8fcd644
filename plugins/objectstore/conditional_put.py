"""Upload of a whole object in one request, under a condition whose response may be lost."""

from __future__ import annotations

from typing import Any

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.network.retry import Attempt, TransientError
from snapshot.plugins.network.transfer import BytesSink, RequestBody
from snapshot.plugins.objectstore.connection import ConnectedStorage
from snapshot.plugins.objectstore.driver import Driver
from snapshot.storage import Expect


async def put_object(storage: ConnectedStorage[Any], path: str, body: RequestBody, expect: Expect) -> str:
    """Store an object; return its token.

    A condition that fails after an attempt without a response may fail because that attempt succeeded. So the object is
    compared with the body.
    """
    key, url = storage.key(path), storage.url.join(path)

    async def once(driver: Driver, attempt: Attempt) -> str:
        body.attempt = attempt
        body.seek(0)
        try:
            return await driver.put(key, body, expect)
        except Exception as error:
            refused = error if isinstance(error, StorageError) else driver.fault(error, url)
            if isinstance(refused, StorageNotFoundError) and isinstance(expect, str):
                refused = StorageConflictError(f"{url}: is missing ({refused})")
            if isinstance(refused, StorageConflictError):
                sink = BytesSink(url, body.nbytes)
                if attempt.uncertain and (token := await _find_own(driver, key, body, sink)):
                    return token
                raise refused from error
            raise

    return await storage.send_request("put", path, once)


async def _find_own(driver: Driver, key: str, body: RequestBody, sink: BytesSink) -> str | None:
    """Return the token of the object under a key if it has this body's bytes."""
    try:
        await driver.read(key, sink)
    except Exception as error:  # an unreadable object is foreign, unless the read may be retried
        fault = error if isinstance(error, StorageError) else driver.fault(error, sink.url)
        if isinstance(fault, (StorageNotFoundError, StorageConflictError)):
            return None
        if isinstance(fault, TransientError):
            raise
        unknown = StorageError(f"{sink.url}: written by this process or by another, and cannot be read: {fault}")
        unknown.uncertain = True
        raise unknown from error
    body.seek(0)
    return sink.token if sink.data == body.read() else None
