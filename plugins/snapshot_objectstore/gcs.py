"""Google Cloud Storage. gcsfs finds the credentials; this module sends the requests.

gcsfs has no conditions, copies the parts of uploads, and retries on its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

import aiohttp
from gcsfs.core import GCSFileSystem

from snapshot.errors import BucketNotFoundError, SnapshotError, StorageConflictError, StorageError
from snapshot.io.bodies import RequestBody, ResponseSink
from snapshot.io.retry import RequestAttempts, TransientError
from snapshot.io.storage import ABSENT, ANYTHING, URL, Expect, FileStat, Limits
from snapshot_objectstore.http import (
    StatusError,
    connection_fault,
    drain_into,
    new_session,
    parse_content_range,
    released_response,
    status_fault,
)
from snapshot_objectstore.object_storage import Driver, ObjectStorage, Page

MiB = 1 << 20
LIMITS = Limits(
    smallest_part=MiB // 4,
    multiple=MiB // 4,
    preferred_part=16 * MiB,
    grown_part=128 * MiB,
    in_order=True,
    parallel_parts=16,
    parts_per_file=1,
    parallel_files=8,
    merge_gap=MiB,
)
"""The parts of a file are uploaded in order, so several files are uploaded concurrently."""
_TOKEN_SOURCES = {"google_default", "cache", "cloud", "anon", "browser"}
"""Values of `token` that name a method to find one."""
_RECEIVED = re.compile(r"bytes=0-(\d+)")


class GcsDriver(Driver):
    """Driver of Google's JSON API."""

    def __init__(self, filesystem: GCSFileSystem, session: aiohttp.ClientSession, bucket: str) -> None:
        self._fs = filesystem
        self._session = session
        self._bucket = bucket
        self._billing = {"userProject": filesystem.project} if filesystem.requester_pays else {}
        self._renewing = asyncio.Lock()

    async def close(self) -> None:
        await self._session.close()

    async def _headers(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the headers with a valid token. A token is renewed in a thread, since that waits for a server."""
        credentials = self._fs.credentials
        if credentials.credentials is not None and not credentials._credentials_valid(300):
            async with self._renewing:
                await asyncio.to_thread(credentials.maybe_refresh)
        headers = dict(more)
        if credentials.credentials is not None:
            credentials.credentials.apply(headers)
        return headers

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        data: Any = None,
        good: Sequence[int] = (),
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yield the response, or raise StatusError."""
        url = path if path.startswith("http") else f"{self._fs._location}{path}"
        told = await self._headers(headers or {})
        sent = {} if path.startswith("http") else {**(params or {}), **self._billing}
        answer = await self._session.request(method, url, params=sent, data=data, headers=told)
        async with released_response(answer):
            self.note_date(answer.headers.get("Date"))
            if answer.status >= 300 and answer.status not in good:
                if answer.status == 401:
                    self._expire_token()
                text = (await answer.content.read(2000)).decode("utf-8", "replace")
                raise StatusError.of(answer, _read_message(text))
            yield answer

    def _expire_token(self) -> None:
        """Expire the token, which was refused early, so that the next request renews it."""
        if self._can_renew():
            self._fs.credentials.credentials.expiry = datetime(1970, 1, 1)  # without a zone, as in google-auth

    def _object(self, key: str) -> str:
        return f"/storage/v1/b/{quote(self._bucket, safe='')}/o/{quote(key, safe='')}"

    @property
    def _upload(self) -> str:
        return f"/upload/storage/v1/b/{quote(self._bucket, safe='')}/o"

    async def head(self, key: str) -> FileStat:
        """Send `objects.get`."""
        async with self._send("GET", self._object(key), {"fields": "size,updated,generation"}) as answer:
            found = await answer.json(content_type=None)
        return self.describe(int(found["size"]), _parse_time(found["updated"]), str(found["generation"]))

    async def read(self, key: str, sink: ResponseSink) -> None:
        """Send `objects.get` for the media."""
        headers = {"Range": sink.range} if sink.range else {}
        async with self._send("GET", self._object(key), {"alt": "media"}, headers=headers) as answer:
            at, total = parse_content_range(answer.headers.get("Content-Range"), answer.content_length)
            sink.starts(at, total, answer.headers.get("x-goog-generation"))
            await drain_into(answer, sink)

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Send `objects.list`."""
        params = {"prefix": prefix, "fields": "items/name,prefixes,nextPageToken", "maxResults": "1000"}
        params |= {"pageToken": following} if following else {}
        params |= {} if recursive else {"delimiter": "/"}
        async with self._send("GET", f"/storage/v1/b/{quote(self._bucket, safe='')}/o", params) as answer:
            found = await answer.json(content_type=None)
        names = [each["name"] for each in found.get("items") or ()]
        return Page(names, found.get("prefixes") or (), found.get("nextPageToken") or None)

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Send `objects.insert` as a multipart request, the form in which emulators support conditions."""
        condition = {} if expect is ANYTHING else {"ifGenerationMatch": "0" if expect is ABSENT else str(expect)}
        line = secrets.token_hex(16)
        head = (
            f"--{line}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': key})}\r\n"
            f"--{line}\r\nContent-Type: application/octet-stream\r\n\r\n"
        )
        sent = RequestBody([head.encode(), *body.views, f"\r\n--{line}--\r\n".encode()])
        sent.attempt = body.attempt
        headers = {"Content-Type": f"multipart/related; boundary={line}", "Content-Length": str(sent.nbytes)}
        params = {"uploadType": "multipart", **condition}
        async with self._send("POST", self._upload, params, data=sent, headers=headers) as answer:
            return str((await answer.json(content_type=None))["generation"])

    async def begin(self, key: str, size: int) -> str:
        """Begin a resumable upload."""
        headers = {"X-Upload-Content-Type": "application/octet-stream", "X-Upload-Content-Length": str(size)}
        headers |= {"Content-Type": "application/json"}
        told = json.dumps({"name": key}).encode()
        params = {"uploadType": "resumable", "name": key}
        async with self._send("POST", self._upload, params, data=told, headers=headers) as answer:
            return f"{size} {self._session_address(answer.headers['Location'])}"

    def _session_address(self, location: str) -> str:
        """Return the address of an upload session at the given endpoint, since the server's own may be unreachable."""
        at = urlsplit(self._fs._location)
        if at.netloc.endswith("googleapis.com"):
            return location
        return urlsplit(location)._replace(scheme=at.scheme, netloc=at.netloc).geturl()

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Upload the next part. In a retry, send only the bytes that the server does not have."""
        size, _, session = upload.partition(" ")
        end, done = offset + body.nbytes, 0
        if body.attempt is not None and body.attempt.number > 1:
            async with self._send(
                "PUT", session, headers={"Content-Range": f"bytes */{size}", "Content-Length": "0"}, good=[308]
            ) as answer:
                reached = await self._received_bytes(key, answer, int(size))
            if reached >= end:
                return "sent"
            if reached < offset:
                raise StorageError(
                    f"gs://{self._bucket}/{key}: the server has only {reached} of the {offset} bytes before this part"
                )
            done = reached - offset
        rest = body.after(done) if done else body
        while rest.nbytes:
            begin = end - rest.nbytes
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}", "Content-Length": str(rest.nbytes)}
            async with self._send("PUT", session, data=rest, headers=headers, good=[308]) as answer:
                reached = await self._received_bytes(key, answer, int(size))
            if reached <= begin:
                raise TransientError(f"gs://{self._bucket}/{key}: the server stored nothing at offset {begin}")
            rest = rest.after(reached - begin)
        return "sent"

    async def _received_bytes(self, key: str, answer: aiohttp.ClientResponse, size: int) -> int:
        """Return the number of bytes that the server has: all of them if the object exists."""
        if answer.status >= 300:
            found = _RECEIVED.fullmatch(answer.headers.get("Range", ""))
            return int(found[1]) + 1 if found else 0
        made = int((await answer.json(content_type=None)).get("size", size))
        if made != size:
            raise StorageError(f"gs://{self._bucket}/{key}: the server stored {made} of {size} bytes")
        return size

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Do nothing: the last part completes an upload."""

    async def abandon(self, key: str, upload: str) -> None:
        """Cancel the upload, or delete the object if the last part has arrived."""
        _, _, session = upload.partition(" ")
        try:
            async with self._send("DELETE", session, headers={"Content-Length": "0"}, good=[404, 410, 499]) as answer:
                if answer.status == 499:  # the upload was cancelled
                    return
        except StatusError as error:
            if error.status >= 500:
                raise
        await self.delete([key])

    async def delete(self, keys: Sequence[str]) -> None:
        """Send `objects.delete`."""
        for key in keys:
            async with self._send("DELETE", self._object(key), good=[404]):
                pass

    async def copy(self, source: str, token: str, key: str, attempt: RequestAttempts) -> None:
        """Repeat `objects.rewrite` until the copy is complete."""
        target = f"{self._object(source)}/rewriteTo{self._object(key).removeprefix('/storage/v1')}"
        params = {"ifSourceGenerationMatch": token} | ({} if attempt.uncertain else {"ifGenerationMatch": "0"})
        while True:
            async with self._send("POST", target, params, headers={"Content-Length": "0"}) as answer:
                found = await answer.json(content_type=None)
            if found.get("done", True):
                return
            attempt.gain()
            params["rewriteToken"] = found["rewriteToken"]

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Translate by the status: 412 is a conflict, and 401 an expired token."""
        if not isinstance(error, StatusError):
            return connection_fault(error, url)
        if error.status == 412:
            return StorageConflictError(f"{url}: {error}")
        if error.status == 404 and "bucket" in str(error).lower():
            return BucketNotFoundError(f"{url}: {error}")
        if error.status == 401 and self._can_renew():
            return TransientError(f"{url}: {error}", refused=True)
        return status_fault(error, url)

    def _can_renew(self) -> bool:
        credentials = self._fs.credentials.credentials
        return bool(getattr(credentials, "refresh_token", None)) or hasattr(credentials, "service_account_email")


def _parse_time(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _read_message(text: str) -> str:
    """Return the message of an error response, in JSON or not."""
    try:
        found = json.loads(text)["error"]
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError):
        return " ".join(text.split())[:300]


class GcsStorage(ObjectStorage[GcsDriver]):
    """Files below `gs://bucket/prefix`."""

    known: Mapping[str, str] = {
        "token": "`google_default`, `cloud`, `anon`, a file of credentials, or credentials; without it, all are tried.",
        "project": "The project that pays, if the requester pays.",
        "access": "`full_control` (the default), `read_write` or `read_only`.",
        "endpoint_url": "URL of a server that is not Google's.",
        "requester_pays": "Let the project pay for requests to another owner's bucket.",
        "session_kwargs": "Arguments of gcsfs's own session, which it uses to find credentials.",
        "proxy": "URL of a proxy; default: from the environment.",
    }

    def driver_limits(self) -> Limits:
        return LIMITS

    def secrets(self) -> list[str]:
        """Return the secrets, including the token unless it is a file or the name of a method to find one."""
        token = self.options.get("token")
        shown = not isinstance(token, str) or token in _TOKEN_SOURCES or os.path.exists(token)
        return [*([] if shown else [str(token)]), *super().secrets()]

    async def connect(self) -> GcsDriver:
        """Create a session on this loop. Credentials are found in a thread, since that may wait for servers."""
        given = {name: value for name, value in self.options.items() if name in self.known and name != "proxy"}

        def make() -> GCSFileSystem:
            return GCSFileSystem(asynchronous=True, skip_instance_cache=True, use_listings_cache=False, **given)

        filesystem = await asyncio.to_thread(make)
        return GcsDriver(
            filesystem,
            new_session({}, self.retry_policy, self.connections, proxy=self.options.get("proxy")),
            self.bucket,
        )
