"""S3's bulk bytes read by obstore: received by threads of its own, where Python's client has one.

All else (uploads, small objects, conditions, listings) goes by the client that s3fs makes, and so do the credentials.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, GenericError, NotFoundError, PreconditionError
from obstore.store import S3Store

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.network.retry import RetryPolicy, TransientError
from snapshot.plugins.network.transfer import ResponseSink, past_end_error
from snapshot.plugins.objectstore.s3_driver import EXPIRED, S3Driver
from snapshot.storage import URL

CHUNK = 512 << 10
"""Answers are handed over in pieces at least this long: each costs a hop between threads."""
_TOKEN = re.compile(r"<Token-\d+>.*?</Token-\d+>")


class ObstoreDriver(S3Driver):
    """S3's driver, but for reading ranges."""

    def __init__(
        self, filesystem: Any, client: Any, bucket: str, checksum: bool, make_store: Callable[[], S3Store]
    ) -> None:
        super().__init__(filesystem, client, bucket, checksum)
        self._make_store = make_store
        self.store = make_store()

    def _renew(self) -> bool:
        """obstore keeps credentials until they expire: it has to begin anew, too."""
        if not super()._renew():
            return False
        self.store = self._make_store()
        return True

    async def read(self, key: str, sink: ResponseSink) -> None:
        """A stream of one range."""
        if sink.end is None:
            await super().read(key, sink)
            return
        options: Any = {"range": (sink.position, sink.end)} | ({"if_match": sink.token} if sink.token else {})
        answer = await self.store.get_async(key, options=options)
        sink.starts(answer.range[0], answer.meta["size"], answer.meta["e_tag"])
        async for chunk in answer.stream(min_chunk_size=CHUNK):
            sink.take(chunk)

    def fault(self, error: Exception, url: URL) -> SnapshotError:  # noqa: PLR0911 - one for each meaning
        """obstore's errors tell the status in their text alone."""
        if not isinstance(error, (BaseError, FileNotFoundError, PermissionError)):
            return super().fault(error, url)
        said = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
        said = _TOKEN.sub("", said)  # S3 repeats the one that it does not like
        what = f"{url}: {said}"
        if any(code in said for code in EXPIRED) and self._renew():
            return TransientError(what, refused=True)
        if isinstance(error, (NotFoundError, FileNotFoundError)):
            return StorageError(what) if "NoSuchBucket" in said else StorageNotFoundError(what)
        if isinstance(error, PreconditionError):
            return StorageConflictError(what)
        if "non-partial response" in said:
            return StorageError(f"{url}: this server ignores ranges")
        if "416 Range" in said:
            return past_end_error(url)
        if isinstance(error, GenericError) and not any(f" {status} " in said for status in (400, 401, 403, 405, 501)):
            return TransientError(what)
        return StorageError(what)


def make_store(
    client: Any, bucket: str, retry_policy: RetryPolicy, options: Mapping[str, Any], *, anonymous: bool
) -> S3Store:
    """obstore's store, which retries nothing, with what the client knows."""
    endpoint = urlsplit(client.meta.endpoint_url)  # of the options, the environment or a profile
    region = client.meta.region_name or "us-east-1"
    style = ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style")
    config: dict[str, Any] = {
        "region": region,
        "virtual_hosted_style_request": style == "virtual",
        "skip_signature": anonymous,
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

    return S3Store(
        bucket,
        config=config,  # type: ignore[arg-type]
        client_options={
            "allow_http": True,
            # Of a whole request, however much it moves: an attempt has a clock of its own, which progress sets back.
            "timeout": timedelta(days=1),
            "connect_timeout": timedelta(seconds=min(retry_policy.timeout, retry_policy.deadline)),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=retry_policy.deadline)},
        **({} if anonymous else {"credential_provider": provide}),  # type: ignore[arg-type]
    )
