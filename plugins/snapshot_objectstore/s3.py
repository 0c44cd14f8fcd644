"""S3 and compatible stores. s3fs finds the credentials, its client sends the requests, and obstore reads."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.util
import math
import os
import re
import time
import warnings
import zlib
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import botocore.exceptions as failures
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from obstore.exceptions import BaseError, GenericError, NotFoundError, PreconditionError
from obstore.store import S3Store

from snapshot.errors import BucketNotFoundError, SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.aio import in_thread
from snapshot.io.bodies import RequestBody, ResponseSink, past_end_error
from snapshot.io.retry import RequestAttempts, RetryPolicy, TransientError
from snapshot.io.storage import ABSENT, ANYTHING, Expect, FileStat, FileWriter, Limits
from snapshot.io.url import URL
from snapshot_objectstore.http import (
    drain_into,
    is_unknown_host,
    parse_content_range,
    released_response,
    without_resending,
)
from snapshot_objectstore.object_storage import Driver, ObjectStorage, Page

# Requests to S3 by aiobotocore's client, which supports parts, conditions and streamed bodies.

_MISSING = {"NoSuchKey", "NoSuchUpload", "NotFound", "404"}
_LASTING = {"NoSuchBucket", "NotImplemented", "501"}
_TRANSIENT = {
    "SlowDown",
    "InternalError",
    "ServiceUnavailable",
    "RequestTimeout",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "BadDigest",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
    "IncompleteBody",
    "OperationAborted",
    "ConditionalRequestConflict",
}
JUST_NOW = 10.0
"""For so long, a bucket that was there still counts as being there, in seconds."""
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}


class S3Driver(Driver):
    """Driver of S3, by aiobotocore's client."""

    batch = 1000
    largest_copy = 256 << 20
    """A copy takes seconds per GiB. `CopyObject` allows 5 GiB, but a response would be late, and parts are parallel."""

    def __init__(self, filesystem: s3fs.S3FileSystem, client: Any, bucket: str, checksum: bool) -> None:
        self._fs = filesystem
        self._client = client
        self._bucket = bucket
        self._checksum = checksum
        self._bucket_seen = -math.inf
        """When a response last showed that the bucket exists."""

    async def _call(self, name: str, **arguments: Any) -> Any:
        """Call the client, with the user's additional arguments, such as encryption or requester pays."""
        method = getattr(self._client, name)
        try:
            found = await method(**self._fs._get_s3_method_kwargs(method, Bucket=self._bucket, **arguments))
        except failures.ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                self._bucket_seen = time.monotonic()
            raise
        self._bucket_seen = time.monotonic()
        self.note_date(found["ResponseMetadata"].get("HTTPHeaders", {}).get("date"))
        return found

    async def close(self) -> None:
        """Close the client that s3fs created."""
        creator, self._fs._s3 = self._fs._s3creator, None
        await creator.__aexit__(None, None, None)

    async def head(self, key: str) -> FileStat:
        """Send `HeadObject`. Its errors have no body, so get the reason with a `GetObject`.

        A missing bucket must not look like a missing key. If the bucket was there just now, only the key is missing.
        """
        try:
            found = await self._call("head_object", Key=key)
        except failures.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status not in (400, 403, 404) or (status == 404 and time.monotonic() - self._bucket_seen < JUST_NOW):
                raise
            (await self._call("get_object", Key=key, Range="bytes=0-0"))["Body"].close()
            raise
        return self.describe(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    async def read(self, key: str, sink: ResponseSink) -> None:
        wanted = {"Range": sink.range, "IfMatch": sink.token}
        found = await self._call("get_object", Key=key, **{name: value for name, value in wanted.items() if value})
        at, total = parse_content_range(found.get("ContentRange"), found["ContentLength"])
        body = found["Body"]
        answer = getattr(body, "raw_stream", None) or body.__wrapped__
        async with released_response(answer):
            sink.starts(at, total, found["ETag"])
            await drain_into(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        more = {"ContinuationToken": following} if following else {}
        if not recursive:
            more["Delimiter"] = "/"
        found = await self._call("list_objects_v2", Prefix=prefix, **more)
        return Page(
            [each["Key"] for each in found.get("Contents", ())],
            [each["Prefix"] for each in found.get("CommonPrefixes", ())],
            found.get("NextContinuationToken"),
        )

    async def _compute_checksum(self, body: RequestBody) -> dict[str, str]:
        """Return the checksum for the server to verify a body."""
        if not self._checksum:
            return {}

        def crc() -> int:
            value = 0
            for piece in body.pieces():
                value = zlib.crc32(piece, value)
            return value

        return {"ChecksumCRC32": b64encode((await in_thread(crc)).to_bytes(4, "big")).decode()}

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Send `PutObject`, with a condition if there is an expectation."""
        condition = {} if expect is ANYTHING else {"IfNoneMatch": "*"} if expect is ABSENT else {"IfMatch": expect}
        made = await self._call("put_object", Key=key, Body=body, **condition, **await self._compute_checksum(body))
        return str(made["ETag"])

    async def begin(self, key: str, size: int) -> str:
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum else {}
        return str((await self._call("create_multipart_upload", Key=key, **algorithm))["UploadId"])

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Send `UploadPart`; return ETag and checksum."""
        checksum = await self._compute_checksum(body)
        made = await self._call("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body, **checksum)
        return " ".join([made["ETag"], *checksum.values()])

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        told = []
        for number, said in parts.items():
            etag, _, checksum = said.partition(" ")
            told.append({"PartNumber": number, "ETag": etag} | ({"ChecksumCRC32": checksum} if checksum else {}))
        await self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": told})

    async def abandon(self, key: str, upload: str) -> None:
        try:
            await self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except failures.ClientError as error:
            if _error_code(error) not in _MISSING:
                raise

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """Send `ListMultipartUploads` for all pages."""
        uploads: list[tuple[str, str, float]] = []
        more: dict[str, str] = {}
        while True:
            found = await self._call("list_multipart_uploads", Prefix=prefix, **more)
            uploads += [
                (each["Key"], each["UploadId"], each["Initiated"].timestamp())
                for each in found.get("Uploads", ())
                if each["Key"].startswith(prefix)
            ]
            if not found.get("IsTruncated"):
                return uploads
            more = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found.get("NextUploadIdMarker", "")}

    async def parts(self, key: str, upload: str) -> Mapping[int, str]:
        """Send `ListParts` for all pages."""
        found: dict[int, str] = {}
        more: dict[str, int] = {}
        while True:
            page = await self._call("list_parts", Key=key, UploadId=upload, **more)
            for each in page.get("Parts", ()):
                checksum = each.get("ChecksumCRC32") if self._checksum else None
                found[each["PartNumber"]] = " ".join(filter(None, [each["ETag"], checksum]))
            if not page.get("IsTruncated"):
                return found
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def is_part(self, tag: str, body: RequestBody) -> bool:
        """Compare the MD5, which is the ETag of parts that the server does not encrypt with a key of its own."""
        etag, _, checksum = tag.partition(" ")
        if self._checksum and not checksum:
            return False
        made = hashlib.md5(usedforsecurity=False)
        for piece in body.pieces():
            made.update(piece)
        return etag.strip('"') == made.hexdigest()

    async def delete(self, keys: Sequence[str]) -> None:
        told = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        for failed in (await self._call("delete_objects", Delete=told)).get("Errors", ()):
            if failed.get("Code") not in _MISSING:
                kind = TransientError if failed.get("Code") in _TRANSIENT else StorageError
                raise kind(f"s3://{self._bucket}/{failed.get('Key')}: {failed.get('Code')}: {failed.get('Message')}")

    def _version(self, source: str, token: str) -> dict[str, Any]:
        return {"CopySource": {"Bucket": self._bucket, "Key": source}, "CopySourceIfMatch": token}

    async def copy(self, source: str, token: str, key: str, attempt: RequestAttempts) -> None:
        await self._call("copy_object", Key=key, **self._version(source, token))

    async def copy_part(
        self, key: str, upload: str, number: int, source: str, token: str, *, begin: int, end: int
    ) -> str:
        """Send `UploadPartCopy`; return ETag and checksum, which the server computes."""
        where = {"UploadId": upload, "PartNumber": number, "CopySourceRange": f"bytes={begin}-{end - 1}"}
        made = await self._call("upload_part_copy", Key=key, **where, **self._version(source, token))
        told = made["CopyPartResult"]
        return " ".join(told[name] for name in ("ETag", "ChecksumCRC32") if told.get(name))

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Translate by the response, or by the state of the connection."""
        if isinstance(error, failures.ClientError):
            return self._translate_response(error, url)
        if isinstance(error, (failures.SSLError, failures.ProxyConnectionError)) or is_unknown_host(error):
            return StorageError(f"{url}: {error}")
        if isinstance(error, RecursionError):  # endless redirects
            return StorageError(f"{url}: too many redirects; check the region and the endpoint")
        if type(error) is failures.HTTPClientError:  # it may wrap a broken connection
            error = getattr(error, "kwargs", {}).get("error") or error
        passing = (
            failures.ConnectionClosedError,
            failures.ReadTimeoutError,
            failures.ConnectionError,
            aiohttp.ClientConnectionError,
            aiohttp.ClientPayloadError,
            ConnectionError,
            EOFError,
        )
        if isinstance(error, passing):
            return TransientError(f"{url}: {type(error).__name__}: {error}")
        return StorageError(f"{url}: {type(error).__name__}: {error}")

    def _translate_response(self, error: failures.ClientError, url: URL) -> SnapshotError:  # noqa: PLR0911 - one for each meaning
        code = _error_code(error)
        meta = error.response.get("ResponseMetadata", {})
        status, headers = int(meta.get("HTTPStatusCode") or 0), meta.get("HTTPHeaders", {})
        said = f"{url}: {code}: {error.response.get('Error', {}).get('Message', '')} (HTTP {status})"
        if code in _LASTING:
            return BucketNotFoundError(said) if code == "NoSuchBucket" else StorageError(said)
        if code in EXPIRED and self._renew_credentials():
            return TransientError(said, refused=True)
        if code in _TRANSIENT or status == 429 or status >= 500:
            after = headers.get("retry-after", "")
            refused = code in ("SlowDown", "ConditionalRequestConflict", "BadDigest") or status == 429
            return TransientError(said, after=float(after) if after.isdecimal() else None, refused=refused)
        if code in _MISSING or status == 404:
            return StorageNotFoundError(said)
        if status in (409, 412):
            return StorageConflictError(said)
        if status == 416:
            return past_end_error(url)
        if status == 403 and code in ("AccessDenied", "403") and error.operation_name in ("HeadObject", "GetObject"):
            said += "; S3 also reports a missing key this way without permission to list the bucket (s3:ListBucket)"
        if status in (301, 307):
            said += "; the bucket is in another region; pass client_kwargs={'region_name': ...}"
        return StorageError(said)

    def _renew_credentials(self) -> bool:
        """Make the next request renew the credentials. Return True if they can be renewed."""
        credentials = getattr(self._client._request_signer, "_credentials", None)
        if credentials is None or not hasattr(credentials, "_expiry_time"):
            return False
        credentials._expiry_time = datetime.datetime.now(datetime.UTC)
        return True


def _error_code(error: failures.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


# Bulk reads from S3 by obstore, whose threads receive in parallel.
#
# The client that s3fs creates sends all other requests, and provides the credentials.

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


# S3 and compatible stores. s3fs finds the credentials, its client sends the requests, and obstore reads.

MiB = 1 << 20
LIMITS = Limits(
    smallest_part=5 * MiB,
    largest_part=5 << 30,
    most_parts=10_000,
    preferred_part=16 * MiB,
    grown_part=128 * MiB,
    parallel_parts=16,
    parts_per_file=8,
    parallel_files=4,
    merge_gap=MiB,
)
_PROCESS = os.getpid()


class _Session(AIOHTTPSession):  # type: ignore[misc]  # it has no types
    """Connections with a large read buffer and without retries."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = without_resending(await super()._get_session(proxy_url))
        session._read_bufsize = 1 << 20
        return session


class S3Storage(ObjectStorage[S3Driver]):
    """Files below `s3://bucket/prefix`."""

    known: Mapping[str, str] = {
        "engine": "Reader of bulk bytes: `obstore`, or `s3fs` (its client). Default: obstore, if installed.",
        "key": "Access key. Default: from the environment, a profile or the machine.",
        "secret": "Secret key.",
        "token": "Session token.",
        "anon": "Send unsigned requests.",
        "profile": "Name of a profile of the AWS configuration.",
        "endpoint_url": "URL of a server that is not Amazon's.",
        "client_kwargs": "Arguments of the client, such as `region_name` and `verify`.",
        "config_kwargs": "The client's configuration, such as `s3={'addressing_style': 'path'}` and `proxies`.",
        "s3_additional_kwargs": "Extra request arguments: `ServerSideEncryption`, `SSEKMSKeyId`, `StorageClass`, ...",
        "requester_pays": "Pay for requests to another owner's bucket.",
        "checksum": "Send a checksum of uploaded bytes to the server (True).",
    }
    secret = frozenset({"secret", "token"})

    @property
    def reads_by_obstore(self) -> bool:
        """True if obstore reads bulk bytes: by default if it is installed and supports all options."""
        if os.getpid() != _PROCESS:  # obstore's threads do not survive a fork, and it would wait for them
            return False
        engine = self.options.get("engine")
        return engine == "obstore" or (
            engine is None and importlib.util.find_spec("obstore") is not None and not self._only_s3fs()
        )

    async def create(self, path: str, size: int) -> FileWriter:
        """Begin a file. Warn if `engine` requests uploads by obstore, which now only reads."""
        if self.options.get("engine") == "obstore":
            warnings.warn(
                f"{self.url}: engine='obstore' only reads, and s3fs's client uploads; remove the option engine",
                FutureWarning,
                stacklevel=2,
            )
        return await super().create(path, size)

    def _only_s3fs(self) -> bool:
        """Return True if an option is given that only s3fs's client supports."""
        asked = {**(self.options.get("client_kwargs") or {}), **(self.options.get("config_kwargs") or {})}
        return bool(self.options.get("s3_additional_kwargs") or {"verify", "proxies", "client_cert"} & asked.keys())

    def secrets(self) -> list[str]:
        """Return the secrets, including encryption keys and passwords of proxies."""
        added = self.options.get("s3_additional_kwargs") or {}
        proxies = (self.options.get("config_kwargs") or {}).get("proxies") or {}
        keys = [str(value) for name, value in added.items() if "CustomerKey" in name]
        return [*keys, *(urlsplit(str(each)).password or "" for each in proxies.values()), *super().secrets()]

    def driver_limits(self) -> Limits:
        for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
            if not isinstance(self.options.get(name) or {}, Mapping):
                raise ValueError(f"{self.url}: {name} must be a dict, got {self.options[name]!r}")
        engine = self.options.get("engine")
        if engine not in (None, "s3fs", "obstore"):
            raise ValueError(f"{self.url}: engine must be 's3fs' or 'obstore', got {engine!r}")
        if engine == "obstore" and self._only_s3fs():
            raise ValueError(
                f"{self.url}: s3_additional_kwargs, verify, proxies and client_cert need s3fs's client, "
                "since engine='obstore' would ignore them; remove the option engine"
            )
        return LIMITS

    async def connect(self) -> S3Driver:
        """Create a client on this loop, without retries."""
        given = {name: self.options[name] for name in self.known if self.options.get(name) is not None}
        for ours in ("checksum", "engine"):
            given.pop(ours, None)
        user, colon, password = self.url.apart()[0].partition(":")
        if colon:
            given |= {"key": unquote(user), "secret": unquote(password)}
        checksum = self.options.get("checksum") is not False
        config = given.get("config_kwargs", {})
        given["config_kwargs"] = {
            "connect_timeout": min(self.retry_policy.timeout, self.retry_policy.deadline),
            "read_timeout": None,  # `retry_request` times each attempt from its last progress
            "max_pool_connections": self.connections,
            "http_session_cls": _Session,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **config,
            # A body with a CRC-32 needs no SHA-256 in the signature, which would take longer than the upload.
            "s3": {**({"payload_signing_enabled": False} if checksum else {}), **config.get("s3", {})},
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        session = AioSession(profile=given.pop("profile", None))
        session.register_component("data_loader", _loader())
        filesystem = s3fs.S3FileSystem(
            asynchronous=True, skip_instance_cache=True, use_listings_cache=False, session=session, **given
        )
        client = await filesystem.set_session()
        client.meta.events.register("before-call.s3", _send_at_once)
        if self.reads_by_obstore:
            anonymous = bool(given.get("anon"))
            make = functools.partial(
                make_store, client, self.bucket, self.retry_policy, self.options, anonymous=anonymous
            )
            return ObstoreDriver(filesystem, client, self.bucket, checksum, make)
        return S3Driver(filesystem, client, self.bucket, checksum)


@functools.cache
def _loader() -> Any:
    """Return the schema of S3's requests, which takes 0.1 s to parse and is shared by all clients."""
    return AioSession().get_component("data_loader")


def _send_at_once(params: Mapping[str, Any], **_: Any) -> None:
    """Send bodies without waiting for `100 Continue`, which costs a round trip per part."""
    with contextlib.suppress(KeyError):
        del params["headers"]["Expect"]
