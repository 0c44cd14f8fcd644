"""Bulk reads from S3 by obstore, whose threads receive in parallel.

The client that s3fs creates sends all other requests, and provides the credentials.
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
"""Minimum bytes of a piece of a response, since each piece costs a switch between threads."""
_TOKEN = re.compile(r"<Token-\d+>.*?</Token-\d+>")


class ObstoreDriver(S3Driver):
    """Driver of S3 that reads ranges by obstore."""

    def __init__(
        self, filesystem: Any, client: Any, bucket: str, checksum: bool, make_store: Callable[[], S3Store]
    ) -> None:
        super().__init__(filesystem, client, bucket, checksum)
        self._make_store = make_store
        self.store = make_store()

    def _renew_credentials(self) -> bool:
        """Renew the credentials, and create a new store, since obstore keeps credentials until they expire."""
        if not super()._renew_credentials():
            return False
        self.store = self._make_store()
        return True

    async def read(self, key: str, sink: ResponseSink) -> None:
        """Stream one range."""
        if sink.end is None:
            await super().read(key, sink)
            return
        options: Any = {"range": (sink.position, sink.end)} | ({"if_match": sink.token} if sink.token else {})
        answer = await self.store.get_async(key, options=options)
        sink.starts(answer.range[0], answer.meta["size"], answer.meta["e_tag"])
        async for chunk in answer.stream(min_chunk_size=CHUNK):
            sink.take(chunk)

    def fault(self, error: Exception, url: URL) -> SnapshotError:  # noqa: PLR0911 - one for each meaning
        """Translate by the text of an error, the only place where obstore reports the status."""
        if not isinstance(error, (BaseError, FileNotFoundError, PermissionError)):
            return super().fault(error, url)
        said = str(error).partition("\n\nDebug source")[0].replace("\n", " ")
        said = _TOKEN.sub("", said)  # S3 quotes an invalid token
        what = f"{url}: {said}"
        if any(code in said for code in EXPIRED) and self._renew_credentials():
            return TransientError(what, refused=True)
        if isinstance(error, (NotFoundError, FileNotFoundError)):
            return StorageError(what) if "NoSuchBucket" in said else StorageNotFoundError(what)
        if isinstance(error, PreconditionError):
            return StorageConflictError(what)
        if "non-partial response" in said:
            return StorageError(f"{url}: the server must support range requests")
        if "416 Range" in said:
            return past_end_error(url)
        if isinstance(error, GenericError) and not any(f" {status} " in said for status in (400, 401, 403, 405, 501)):
            return TransientError(what)
        return StorageError(what)


def make_store(
    client: Any, bucket: str, retry_policy: RetryPolicy, options: Mapping[str, Any], *, anonymous: bool
) -> S3Store:
    """Return obstore's store with the client's endpoint and credentials, and without retries."""
    endpoint = urlsplit(client.meta.endpoint_url)  # from the options, the environment or a profile
    region = client.meta.region_name or "us-east-1"
    style = ((options.get("config_kwargs") or {}).get("s3") or {}).get("addressing_style")
    config: dict[str, Any] = {
        "region": region,
        "virtual_hosted_style_request": style == "virtual",
        "skip_signature": anonymous,
        "request_payer": bool(options.get("requester_pays")),
    }
    if endpoint.hostname in ("s3.amazonaws.com", f"s3.{region}.amazonaws.com"):
        config["virtual_hosted_style_request"] = style != "path"  # obstore knows the address
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
            # This would count from the start of a request: `retry_request` times each attempt from its last progress.
            "timeout": timedelta(days=1),
            "connect_timeout": timedelta(seconds=min(retry_policy.timeout, retry_policy.deadline)),
        },
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=retry_policy.deadline)},
        **({} if anonymous else {"credential_provider": provide}),  # type: ignore[arg-type]
    )
