"""A whole object in one request, under a condition whose answer may be lost."""

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

    A condition that is refused after an attempt without an answer may be refused due to our own success: so the object
    is compared with the body.
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
                refused = StorageConflictError(f"{url}: is gone ({refused})")
            if isinstance(refused, StorageConflictError):
                sink = BytesSink(url, body.nbytes)
                if attempt.uncertain and (token := await _find_own(driver, key, body, sink)):
                    return token
                raise refused from error
            raise

    return await storage.send_request("put", path, once)


async def _find_own(driver: Driver, key: str, body: RequestBody, sink: BytesSink) -> str | None:
    """Return the token of the object under a key if it holds this body's bytes."""
    try:
        await driver.read(key, sink)
    except Exception as error:  # an unreadable object is not ours, unless reading it may be tried again
        fault = error if isinstance(error, StorageError) else driver.fault(error, sink.url)
        if isinstance(fault, (StorageNotFoundError, StorageConflictError)):
            return None
        if isinstance(fault, TransientError):
            raise
        unknown = StorageError(f"{sink.url}: was written by us or by another, and cannot be looked at: {fault}")
        unknown.uncertain = True
        raise unknown from error
    body.seek(0)
    return sink.token if sink.data == body.read() else None
