"""S3's bulk bytes by obstore: sent and received by threads of its own, where Python's client has one.

All else (small objects, conditions, listings, abandoned uploads) goes by the client that s3fs makes, and so do the
credentials. obstore cuts and retries the parts of an upload itself, within the deadline of ours.
"""

from __future__ import annotations

import asyncio
import re
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from obstore.exceptions import BaseError, GenericError, NotFoundError, PreconditionError
from obstore.store import S3Store

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.attempts import Body, PassingError, Patience, Sink, ends_early
from snapshot.plugins.objects import ObjectStorage
from snapshot.plugins.s3 import EXPIRED, S3Driver
from snapshot.plugins.uploads import LAST_WORDS
from snapshot.storage import URL, Buffer, FileWriter, Limits, uninterrupted

CHUNK = 512 << 10
"""Answers are handed over in pieces at least this long: each costs a hop between threads."""
GENTLY = 2.0
"""Seconds in which obstore may abandon an upload by itself, before it is cancelled."""
_TOKEN = re.compile(r"<Token-\d+>.*?</Token-\d+>")
FEW = 8
"""Parts of more buffers than these are joined: each buffer costs a hop, too."""


class _Lent(np.ndarray):
    """A view of lent memory, whose end shows that the client has let go of it."""


class ObstoreDriver(S3Driver):
    """S3's driver, but for what is long."""

    def __init__(self, *arguments: Any, make: Callable[[], tuple[S3Store, S3Store]], uploads: bool) -> None:
        super().__init__(*arguments)
        self._uploads = uploads
        self._make = make
        self.store, self.patient = make()

    def _renew(self) -> bool:
        """obstore keeps credentials until they expire: it has to begin anew, too."""
        if not super()._renew():
            return False
        self.store, self.patient = self._make()
        return True

    async def read(self, key: str, sink: Sink) -> None:
        """A stream of one range."""
        if sink.end is None:
            await super().read(key, sink)
            return
        options: Any = {"range": (sink.position, sink.end)} | ({"if_match": sink.token} if sink.token else {})
        answer = await self.store.get_async(key, options=options)
        sink.starts(answer.range[0], answer.meta["size"], answer.meta["e_tag"])
        async for chunk in answer.stream(min_chunk_size=CHUNK):
            sink.take(chunk)

    def writer(self, storage: ObjectStorage[Any], path: str, key: str, size: int) -> FileWriter:
        """By obstore, unless it goes up in one request."""
        if size <= storage.limits.smallest_part or not self._uploads:
            return super().writer(storage, path, key, size)
        return StreamedWriter(storage, self, path, key, size)

    def fault(self, error: Exception, url: URL) -> SnapshotError:  # noqa: PLR0911 - one for each meaning
        """obstore's errors tell the status in their text alone."""
        if not isinstance(error, (BaseError, FileNotFoundError, PermissionError)):
            return super().fault(error, url)
        said = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
        said = _TOKEN.sub("", said)  # S3 repeats the one that it does not like
        what = f"{url}: {said}"
        if any(code in said for code in EXPIRED) and self._renew():
            return PassingError(what, refused=True)
        if isinstance(error, (NotFoundError, FileNotFoundError)):
            return StorageError(what) if "NoSuchBucket" in said else StorageNotFoundError(what)
        if isinstance(error, PreconditionError):
            return StorageConflictError(what)
        if "non-partial response" in said:
            return StorageError(f"{url}: this server ignores ranges")
        if "416 Range" in said:
            return ends_early(url)
        if isinstance(error, GenericError) and not any(f" {status} " in said for status in (400, 401, 403, 405, 501)):
            return PassingError(what)
        return StorageError(what)


class StreamedWriter(FileWriter):
    """A file whose parts obstore pulls, in their order, and sends side by side from where they lie."""

    def __init__(self, storage: ObjectStorage[Any], driver: ObstoreDriver, path: str, key: str, size: int) -> None:
        self._storage = storage
        self._driver = driver
        self._path = path
        self._key = key
        self._size = size
        self._url = storage.url.join(path)
        self._unit = self._reached = self._reached_queue = 0
        self._queue: asyncio.Queue[Buffer | None] = asyncio.Queue()
        self._queued: asyncio.Event | None = None
        """Whether the part that was written last is in the queue."""
        self._sending: asyncio.Task[Any] | None = None
        self._lent = 0
        """How many buffers obstore has not let go of."""
        self._over = self._finished = False

    async def _source(self) -> AsyncIterator[Buffer]:
        while (lent := await self._queue.get()) is not None:
            if self._over:
                raise asyncio.CancelledError  # upon which obstore abandons what it has begun
            yield lent
            del lent

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Lend the buffers until they are sent."""
        body = Body(buffers)
        end = offset + body.nbytes
        if self._over:
            raise ValueError(f"{self._url}: was finished or aborted already")
        if offset < 0 or end > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{end} do not fit a file of {self._size}")
        if not body.nbytes:
            return
        if offset != self._reached or (self._unit and body.nbytes != self._unit and end < self._size):
            raise StorageError(f"{self._url}: parts come in order, and equally long but for the last one")
        self._reached = end
        if self._sending is None:
            self._unit = body.nbytes
            self._sending = asyncio.ensure_future(
                self._driver.patient.put_async(
                    self._key,
                    self._source(),
                    use_multipart=True,
                    chunk_size=self._unit,
                    max_concurrency=self._storage.limits.parts_per_file,
                )
            )
        before, self._queued = self._queued, asyncio.Event()
        queued = self._queued
        try:
            if len(buffers) > FEW:
                async with self._storage.context.memory.count(body.nbytes):
                    await self._lend([body.read()], end, before, queued)
            else:
                await self._lend(body.views, end, before, queued)
        finally:
            queued.set()  # if this part did not come so far, the upload is over, and the next one sees it

    async def _lend(
        self, views: Sequence[Buffer], end: int, before: asyncio.Event | None, queued: asyncio.Event
    ) -> None:
        if before is not None:  # the part before this one may still wait for memory
            await before.wait()
        if self._over or self._reached_queue != end - sum(len(view) for view in views):
            raise StorageError(f"{self._url}: another part of it failed")
        self._reached_queue = end
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()
        left = len(views)

        def returned() -> None:
            nonlocal left
            self._lent -= 1
            left -= 1
            if not left:
                sent.set()

        for view in views:
            lent = np.frombuffer(view, np.uint8).view(_Lent)
            self._lent += 1
            weakref.finalize(lent, loop.call_soon_threadsafe, returned).atexit = False
            self._queue.put_nowait(lent.data)
            del lent
        if end == self._size:
            self._queue.put_nowait(None)
        queued.set()
        assert self._sending is not None
        waiting = asyncio.ensure_future(sent.wait())
        try:
            await asyncio.wait([waiting, self._sending], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await uninterrupted(self._stop())
            raise
        finally:
            waiting.cancel()
        if self._sending.done():
            if self._sending.cancelled():
                raise StorageError(f"{self._url}: another part of it failed")
            if (error := self._sending.exception()) is not None:
                await uninterrupted(self._stop())
                raise self._failed(error)

    def _failed(self, error: BaseException) -> BaseException:
        if not isinstance(error, Exception):
            return error
        made, cause = self._storage.ours(error, self._url, self._driver)
        made = StorageError(str(made)) if isinstance(made, PassingError) else made
        made.__cause__ = cause
        return made

    async def _stop(self) -> None:
        """Let obstore let go of everything: what it still holds is lent no longer."""
        assert self._sending is not None
        self._over = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(b"")  # its source fails; it abandons the upload, if the server lets it
        await asyncio.wait([self._sending], timeout=GENTLY)
        self._sending.cancel()
        await asyncio.gather(self._sending, return_exceptions=True)
        deadline = time.monotonic() + LAST_WORDS
        while self._lent and time.monotonic() < deadline:  # its tasks end one after the other
            await asyncio.sleep(0.01)

    async def finish(self) -> None:
        """Wait for the last part, and for the request that makes them a file."""
        if self._over:
            raise ValueError(f"{self._url}: was finished or aborted already")
        if self._reached < self._size or self._sending is None:
            raise StorageError(f"{self._url}: nothing was written at byte {self._reached} of {self._size}")
        failed: BaseException | None = None
        try:
            await asyncio.shield(self._sending)
        except Exception as error:  # noqa: BLE001 - obstore's, and translated
            failed = self._failed(error)
        if failed is not None:
            raise failed
        self._over = self._finished = True

    async def abort(self) -> None:
        """Drop what was begun. obstore does not say its name: but nobody else uploads to this key."""
        if self._finished:
            return
        self._finished = True
        if self._sending is not None:
            await self._stop()
            await self._storage.abandon_all(self._path)


def stores(
    client: Any,
    bucket: str,
    patience: Patience,
    options: Mapping[str, Any],
    *,
    anonymous: bool,
    checksum: bool,
    limits: Limits,
) -> tuple[S3Store, S3Store]:
    """obstore's stores, one that retries nothing and one that retries parts, with what the client knows."""
    endpoint = urlsplit(client.meta.endpoint_url)  # of the options, the environment or a profile
    region = client.meta.region_name or "us-east-1"
    style = ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style")
    config: dict[str, Any] = {
        "region": region,
        "virtual_hosted_style_request": style == "virtual",
        "skip_signature": anonymous,
        # Without encryption a SHA-256 is in the signature, with it beside it, if it is wanted.
        "unsigned_payload": endpoint.scheme == "https",
        **({"checksum_algorithm": "SHA256"} if checksum else {}),
        "request_payer": bool(options.get("requester_pays")),
    }
    if endpoint.hostname in ("s3.amazonaws.com", f"s3.{region}.amazonaws.com"):
        config["virtual_hosted_style_request"] = style != "path"  # obstore knows the way
    elif style == "virtual":
        config["endpoint"] = endpoint._replace(netloc=f"{bucket}.{endpoint.netloc}").geturl()
    else:
        config["endpoint"] = endpoint.geturl()
    credentials: Any = None if anonymous else client._request_signer._credentials

    async def provide() -> dict[str, Any]:
        frozen = await credentials.get_frozen_credentials()
        expiry = getattr(credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": expiry.astimezone(UTC) if expiry else None,
        }

    # obstore's time-out is that of a whole request, however much it moves. What is read has a clock of ours beside it;
    # what is written is given the time of a line that moves a few MiB a second.
    at_once = limits.preferred_part * limits.parallel_parts
    seconds = {0: 24 * 3600.0, 20: patience.timeout + at_once / (4 << 20) if patience.timeout > 5 else patience.timeout}
    made = []
    for retries, timeout in seconds.items():
        made.append(
            S3Store(
                bucket,
                config=config,  # type: ignore[arg-type]
                client_options={
                    "allow_http": True,
                    "timeout": timedelta(seconds=timeout),
                    "connect_timeout": timedelta(seconds=min(patience.timeout, patience.deadline)),
                },
                retry_config={"max_retries": retries, "retry_timeout": timedelta(seconds=patience.deadline)},
                **({} if anonymous else {"credential_provider": provide}),  # type: ignore[arg-type]
            )
        )
    return made[0], made[1]
