"""Requests to S3 by aiobotocore's client, which supports parts, conditions and streamed bodies."""

from __future__ import annotations

import datetime
import hashlib
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
import botocore.exceptions as failures
import s3fs

from snapshot.errors import BucketNotFoundError, SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from snapshot.plugins.network.aiohttp_client import drain_into, is_unknown_host, parse_content_range, released_response
from snapshot.plugins.network.retry import Attempt, TransientError
from snapshot.plugins.network.transfer import RequestBody, ResponseSink, past_end_error
from snapshot.plugins.objectstore.driver import Driver, Page
from snapshot.storage import ABSENT, ANYTHING, URL, Expect, FileStat, in_thread

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

    async def _call(self, name: str, **arguments: Any) -> Any:
        """Call the client, with the user's additional arguments, such as encryption or requester pays."""
        method = getattr(self._client, name)
        return await method(**self._fs._get_s3_method_kwargs(method, Bucket=self._bucket, **arguments))

    async def close(self) -> None:
        """Close the client that s3fs created."""
        creator, self._fs._s3 = self._fs._s3creator, None
        await creator.__aexit__(None, None, None)

    async def head(self, key: str) -> FileStat:
        """Send `HeadObject`. Its errors have no body, so get the reason with a `GetObject`.

        A missing bucket must not look like a missing key.
        """
        try:
            found = await self._call("head_object", Key=key)
        except failures.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] not in (400, 403, 404):
                raise
            (await self._call("get_object", Key=key, Range="bytes=0-0"))["Body"].close()
            raise
        return FileStat(found["ContentLength"], found["LastModified"].timestamp(), found["ETag"])

    async def read(self, key: str, sink: ResponseSink) -> None:
        """Send `GetObject`."""
        wanted = {"Range": sink.range, "IfMatch": sink.token}
        found = await self._call("get_object", Key=key, **{name: value for name, value in wanted.items() if value})
        at, total = parse_content_range(found.get("ContentRange"), found["ContentLength"])
        body = found["Body"]
        answer = getattr(body, "raw_stream", None) or body.__wrapped__
        async with released_response(answer):
            sink.starts(at, total, found["ETag"])
            await drain_into(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Send `ListObjectsV2`."""
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
        """Send `CreateMultipartUpload`."""
        algorithm = {"ChecksumAlgorithm": "CRC32"} if self._checksum else {}
        return str((await self._call("create_multipart_upload", Key=key, **algorithm))["UploadId"])

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Send `UploadPart`; return ETag and checksum."""
        checksum = await self._compute_checksum(body)
        made = await self._call("upload_part", Key=key, UploadId=upload, PartNumber=number, Body=body, **checksum)
        return " ".join([made["ETag"], *checksum.values()])

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Send `CompleteMultipartUpload`."""
        told = []
        for number, said in parts.items():
            etag, _, checksum = said.partition(" ")
            told.append({"PartNumber": number, "ETag": etag} | ({"ChecksumCRC32": checksum} if checksum else {}))
        await self._call("complete_multipart_upload", Key=key, UploadId=upload, MultipartUpload={"Parts": told})

    async def abandon(self, key: str, upload: str) -> None:
        """Send `AbortMultipartUpload`."""
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
        """Send `DeleteObjects`."""
        told = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        for failed in (await self._call("delete_objects", Delete=told)).get("Errors", ()):
            if failed.get("Code") not in _MISSING:
                kind = TransientError if failed.get("Code") in _TRANSIENT else StorageError
                raise kind(f"s3://{self._bucket}/{failed.get('Key')}: {failed.get('Code')}: {failed.get('Message')}")

    def _version(self, source: str, token: str) -> dict[str, Any]:
        return {"CopySource": {"Bucket": self._bucket, "Key": source}, "CopySourceIfMatch": token}

    async def copy(self, source: str, token: str, key: str, attempt: Attempt) -> None:
        """Send `CopyObject`."""
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
