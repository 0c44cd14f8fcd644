"""S3 and what speaks like it. s3fs says how to get in; the client under it does the work, since it alone has parts,
conditions and bodies that are not made whole."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.util
import os
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import botocore.exceptions as failures
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession

from snapshot.errors import SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.attempts import Body, PassingError, Sink, ends_early
from snapshot.plugins.drivers import Driver, Page
from snapshot.plugins.objects import ObjectStorage
from snapshot.plugins.streams import content_range, drained, made_once, nowhere, pour
from snapshot.storage import ABSENT, ANYTHING, URL, Expect, FileStat, Limits, in_thread

MiB = 1 << 20
LIMITS = Limits(
    smallest_part=5 * MiB, largest_part=5 << 30, most_parts=10_000, preferred_part=16 * MiB, parallel_parts=16,
    parts_per_file=8, parallel_files=4, merge_gap=MiB
)  # fmt: skip
_PROCESS = os.getpid()
_MISSING = {"NoSuchKey", "NoSuchUpload", "NotFound", "404"}
_LASTING = {"NoSuchBucket", "NotImplemented", "501"}
_PASSING = {
    "SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "Throttling",
    "ThrottlingException", "TooManyRequests", "BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
    "IncompleteBody", "OperationAborted", "ConditionalRequestConflict"
}  # fmt: skip
EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}


class _Session(AIOHTTPSession):  # type: ignore[misc]  # which has no types
    """Connections that read far ahead, and make no request twice."""

    async def _get_session(self, proxy_url: str | None) -> aiohttp.ClientSession:
        session = made_once(await super()._get_session(proxy_url))
        session._read_bufsize = 1 << 20
        return session


class S3Driver(Driver):
    """One request a method, by aiobotocore's client."""

    batch = 1000

    def __init__(self, filesystem: s3fs.S3FileSystem, client: Any, bucket: str, checksum: bool) -> None:
        self._fs = filesystem
        self._client = client
        self._bucket = bucket
        self._checksum = checksum

    async def _call(self, name: str, **arguments: Any) -> Any:
        """A call with what the user wants added to calls of its kind: encryption, who pays."""
        method = getattr(self._client, name)
        return await method(**self._fs._get_s3_method_kwargs(method, Bucket=self._bucket, **arguments))

    async def close(self) -> None:
        """Close the client that s3fs made."""
        creator, self._fs._s3 = self._fs._s3creator, None
        await creator.__aexit__(None, None, None)

    async def head(self, key: str) -> FileStat:
        """`HeadObject`. A refusal has no body that says why: so its reason is asked for by a `GetObject`.

        A bucket that does not exist must not look like a key that does not.
        """
        try:
            found = await self._call("head_object", Key=key)
        except failures.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (400, 403, 404):
                raise
            (await self._call("get_object", Key=key, Range="bytes=0-0"))["Body"].close()
            raise
        return FileStat(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    async def read(self, key: str, sink: Sink) -> None:
        """`GetObject`."""
        wanted = {"Range": sink.range, "IfMatch": sink.token}
        found = await self._call("get_object", Key=key, **{name: value for name, value in wanted.items() if value})
        at, total = content_range(found.get("ContentRange"), found["ContentLength"])
        body = found["Body"]
        answer = getattr(body, "raw_stream", None) or body.__wrapped__
        async with drained(answer):
            sink.starts(at, total, found["ETag"])
            await pour(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """`ListObjectsV2`."""
        more = {"ContinuationToken": following} if following else {}
        if not recursive:
            more["Delimiter"] = "/"
        found = await self._call("list_objects_v2", Prefix=prefix, **more)
        return Page(
            [each["Key"] for each in found.get("Contents", ())],
            [each["Prefix"] for each in found.get("CommonPrefixes", ())],
            found.get("NextContinuationToken"),
        )

    async def _sum(self, body: Body) -> dict[str, str]:
        """The checksum by which the server sees that what it got is what was sent."""
        if not self._checksum:
            return {}

        def crc() -> int:
            value = 0
            for piece in body.pieces():
                value = zlib.crc32(piece, value)
            return value

        return {"ChecksumCRC32": b64encode((await in_thread(crc)).to_bytes(4, "big")).decode()}

    async def put(self, key: str, body: Body, expect: Expect) -> str:
        """`PutObject`, with a condition if there is an expectation."""
        condition = {} if expect is ANYTHING else {"IfNoneMatch": "*"} if expect is ABSENT else {"IfMatch": expect}
        made = await self._call("put_object", Key=key, Body=body, **condition, **await self._sum(body))
        return str(made["ETag"])

    async def begin(self, key: str, size: int) -> str:
        """`CreateMultipartUpload`."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum else {}
        return str((await self._call("create_multipart_upload", Key=key, **algorithm))["UploadId"])

    async def part(self, key: str, upload: str, number: int, offset: int, body: Body, *, last: bool) -> str:
        """`UploadPart`; ETag and checksum."""
        checksum = await self._sum(body)
        made = await self._call("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body, **checksum)
        return " ".join([made["ETag"], *checksum.values()])

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """`CompleteMultipartUpload`."""
        told = []
        for number, said in parts.items():
            etag, _, checksum = said.partition(" ")
            told.append({"PartNumber": number, "ETag": etag} | ({"ChecksumCRC32": checksum} if checksum else {}))
        await self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": told})

    async def abandon(self, key: str, upload: str) -> None:
        """`AbortMultipartUpload`."""
        try:
            await self._call("abort_multipart_upload", Key=key, UploadId=upload)
        except failures.ClientError as error:
            if _code(error) not in _MISSING:
                raise

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """`ListMultipartUploads`, all pages."""
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

    async def delete(self, keys: Sequence[str]) -> None:
        """`DeleteObjects`."""
        told = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        for failed in (await self._call("delete_objects", Delete=told)).get("Errors", ()):
            if failed.get("Code") not in _MISSING:
                kind = PassingError if failed.get("Code") in _PASSING else StorageError
                raise kind(f"s3://{self._bucket}/{failed.get('Key')}: {failed.get('Code')}: {failed.get('Message')}")

    async def copy(self, source: str, key: str) -> None:
        """`CopyObject`."""
        await self._call("copy_object", Key=key, CopySource={"Bucket": self._bucket, "Key": source})

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """By what the server said, or by what became of the connection."""
        if isinstance(error, failures.ClientError):
            return self._said(error, url)
        if isinstance(error, (failures.SSLError, failures.ProxyConnectionError)) or nowhere(error):
            return StorageError(f"{url}: {error}")
        if isinstance(error, RecursionError):  # the client followed redirects without end
            return StorageError(f"{url}: was redirected too often; is the region or the endpoint the right one?")
        if type(error) is failures.HTTPClientError:  # of all that it cannot name, some is a connection that broke
            error = getattr(error, "kwargs", {}).get("error") or error
        passing = (
            failures.ConnectionClosedError, failures.ReadTimeoutError, failures.ConnectionError,
            aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError, EOFError,
        )  # fmt: skip
        if isinstance(error, passing):
            return PassingError(f"{url}: {type(error).__name__}: {error}")
        return StorageError(f"{url}: {type(error).__name__}: {error}")

    def _said(self, error: failures.ClientError, url: URL) -> SnapshotError:  # noqa: PLR0911 - one for each meaning
        code = _code(error)
        meta = error.response.get("ResponseMetadata", {})
        status, headers = int(meta.get("HTTPStatusCode") or 0), meta.get("HTTPHeaders", {})
        said = f"{url}: {code}: {error.response.get('Error', {}).get('Message', '')} (HTTP {status})"
        if code in _LASTING:
            return StorageError(said)
        if code in EXPIRED and self._renew():
            return PassingError(said, refused=True)
        if code in _PASSING or status == 429 or status >= 500:
            after = headers.get("retry-after", "")
            refused = code in ("SlowDown", "ConditionalRequestConflict", "BadDigest") or status == 429
            return PassingError(said, after=float(after) if after.isdecimal() else None, refused=refused)
        if code in _MISSING or status == 404:
            return StorageNotFoundError(said)
        if status in (409, 412):
            return StorageConflictError(said)
        if status == 416:
            return ends_early(url)
        if status == 403 and code in ("AccessDenied", "403") and error.operation_name in ("HeadObject", "GetObject"):
            said += "; S3 says the same of a missing key to those who may not list the bucket (s3:ListBucket)"
        if status in (301, 307):
            said += "; the bucket is in another region: give client_kwargs={'region_name': ...}"
        return StorageError(said)

    def _renew(self) -> bool:
        """Let credentials that can be renewed be renewed by the next request."""
        credentials = getattr(self._client._request_signer, "_credentials", None)
        if credentials is None or not hasattr(credentials, "_expiry_time"):
            return False
        credentials._expiry_time = datetime.datetime.now(datetime.UTC)
        return True


def _code(error: failures.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


class S3Storage(ObjectStorage[S3Driver]):
    """`s3://bucket/prefix`, by s3fs and its client."""

    known: Mapping[str, str] = {
        "engine": "What moves bulk bytes: `obstore`, or `s3fs` (its client); else obstore reads, if installed.",
        "key": "Access key; without it, what the environment, a profile or the machine says.",
        "secret": "Secret key.",
        "token": "Session token.",
        "anon": "Whether requests are not signed.",
        "profile": "Name of a profile of the AWS configuration.",
        "endpoint_url": "Where a server lies that is not Amazon's.",
        "client_kwargs": "What the client is made with, as `region_name` and `verify`.",
        "config_kwargs": "The client's configuration, as `s3={'addressing_style': 'path'}` and `proxies`.",
        "s3_additional_kwargs": "What is added to requests, as `ServerSideEncryption`, `SSEKMSKeyId`, `StorageClass`.",
        "requester_pays": "Whether you pay for requests to somebody else's bucket.",
        "checksum": "Whether servers are given a checksum of what they are to store (True).",
    }
    secret = frozenset({"secret", "token"})

    @property
    def engine(self) -> str:
        """What moves bulk bytes."""
        engine = self.options.get("engine")
        if engine not in (None, "s3fs", "obstore"):
            raise ValueError(f"{self.url}: engine={engine!r} is neither 's3fs' nor 'obstore'")
        if engine == "obstore" and self._only_s3fs():
            raise ValueError(
                f"{self.url}: s3_additional_kwargs, verify, proxies and client_cert are for s3fs's client, and "
                "engine='obstore' would do without them; leave the engine out"
            )
        if os.getpid() != _PROCESS:  # obstore's threads did not come along, and it would wait for them
            return "s3fs"
        if engine is None and importlib.util.find_spec("obstore") and not self._only_s3fs():
            return "obstore"
        return str(engine or "s3fs")

    @property
    def uploads_by_obstore(self) -> bool:
        """Only if it is asked for: it is hardly faster, and what it retries nobody sees."""
        return self.engine == "obstore" and self.options.get("engine") == "obstore"

    def _only_s3fs(self) -> bool:
        """Whether something is asked for that only s3fs's client does."""
        asked = {**(self.options.get("client_kwargs") or {}), **(self.options.get("config_kwargs") or {})}
        return bool(self.options.get("s3_additional_kwargs") or {"verify", "proxies", "client_cert"} & asked.keys())

    def secrets(self) -> list[str]:
        """Keys that encrypt, and passwords of proxies, too."""
        added = self.options.get("s3_additional_kwargs") or {}
        proxies = (self.options.get("config_kwargs") or {}).get("proxies") or {}
        keys = [str(value) for name, value in added.items() if "CustomerKey" in name]
        return [*keys, *(urlsplit(str(each)).password or "" for each in proxies.values()), *super().secrets()]

    def driver_limits(self) -> Limits:
        for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
            if not isinstance(self.options.get(name) or {}, Mapping):
                raise ValueError(f"{self.url}: {name}={self.options[name]!r} is no dictionary")
        return replace(LIMITS, in_order=True) if self.uploads_by_obstore else LIMITS

    async def connect(self) -> S3Driver:
        """A client on this loop, which retries nothing."""
        given = {name: self.options[name] for name in self.known if self.options.get(name) is not None}
        for ours in ("checksum", "engine"):
            given.pop(ours, None)
        user, colon, password = self.url.apart()[0].partition(":")
        if colon:
            given |= {"key": unquote(user), "secret": unquote(password)}
        checksum = self.options.get("checksum") is not False
        config = given.get("config_kwargs", {})
        given["config_kwargs"] = {
            "connect_timeout": min(self.patience.timeout, self.patience.deadline),
            "read_timeout": None,  # an attempt has a clock of its own, which progress sets back
            "max_pool_connections": 2 * self.limits.parallel_parts + 64,
            "http_session_cls": _Session,
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **config,
            # What a CRC-32 covers needs no SHA-256 in the signature, which would take longer than sending it.
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
        if self.engine == "obstore":
            from snapshot.plugins.s3_obstore import ObstoreDriver, stores  # which may not be installed

            make = functools.partial(
                stores, client, self.bucket, self.patience, self.options,
                anonymous=bool(given.get("anon")), checksum=checksum, limits=self.limits,
            )  # fmt: skip
            return ObstoreDriver(filesystem, client, self.bucket, checksum, make=make, uploads=self.uploads_by_obstore)
        return S3Driver(filesystem, client, self.bucket, checksum)


@functools.cache
def _loader() -> Any:
    """What S3's requests look like: parsing it takes 0.1 s, and it is the same for all clients."""
    return AioSession().get_component("data_loader")


def _send_at_once(params: Mapping[str, Any], **_: Any) -> None:
    """A body is not held back until the server says that it may come: that costs a round trip a part."""
    with contextlib.suppress(KeyError):
        del params["headers"]["Expect"]
