"""Azure Blob Storage. Microsoft's client parses addresses and signs; this module sends the requests."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import quote, unquote, urlencode
from xml.etree import ElementTree

import aiohttp
import yarl
from azure.core.exceptions import AzureError, HttpResponseError, ServiceRequestError, ServiceResponseError
from azure.core.pipeline.transport import AioHttpTransport
from azure.core.rest import HttpRequest
from azure.storage.blob.aio import BlobServiceClient

from snapshot.errors import BucketNotFoundError, SnapshotError, StorageConflictError, StorageError
from snapshot.io.aio import in_thread
from snapshot.io.bodies import RequestBody, ResponseSink
from snapshot.io.retry import RequestAttempts, TransientError
from snapshot.io.storage import ABSENT, ANYTHING, Context, Expect, FileStat, Limits
from snapshot.io.url import URL
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

# Parsing of Azure's XML responses.


def read_message(body: bytes) -> str:
    """Return the first line of an error message, without a detail that quotes the signed text."""
    try:
        found = ElementTree.fromstring(body)  # noqa: S314 - the store is trusted with the data anyway
    except ElementTree.ParseError:
        return ""
    message = (found.findtext("Message") or "").partition("\n")[0].strip()
    detail = (found.findtext("AuthenticationErrorDetail") or "").strip()
    return f"{message} {detail}".rstrip() if len(detail) < 200 and "signature found" not in detail else message


def read_name(entry: ElementTree.Element) -> str:
    """Return the name of a blob or folder in a listing."""
    name = entry.find("Name")
    if name is None:
        raise StorageError("the listing has no blob names; the server is not Azure Blob Storage")
    text = name.text or ""
    return unquote(text) if name.get("Encoded") == "true" else text


def is_folder(entry: ElementTree.Element) -> bool:
    """Return True if a blob in a listing stands for a folder."""
    folder = entry.findtext("Metadata/hdi_isfolder") or entry.findtext("Metadata/Hdi_isfolder")
    return folder == "true" or entry.findtext("Properties/ResourceType") == "directory"


# Azure Blob Storage. Microsoft's client parses addresses and signs; this module sends the requests.
#
# Options and environment variables have the names of adlfs. adlfs itself is not used: it starts fsspec's thread with
# a loop, to which finalizers tie every client, has no conditions, and copies the parts of uploads. The requests pass
# through the pipeline of `azure.storage.blob.aio`, without its retries, so that bodies are streamed without copies.
#
# Blocks that were uploaded but not committed are invisible, and Azure removes them a week after the last one.
# `abandon` drops them at once, unless a blob with their name exists.

MiB = 1 << 20
LIMITS = Limits(
    largest_part=4000 * MiB,
    most_parts=50_000,
    preferred_part=16 * MiB,
    grown_part=128 * MiB,
    parallel_parts=16,
    parts_per_file=8,
    parallel_files=4,
    merge_gap=MiB,
)
VERSION = "2021-12-02"
"""Version of the protocol, fixed for all versions of the client."""
PAGE = 5000
"""Names per page of a listing: Azure's maximum."""
_CONFLICTS = {"BlobAlreadyExists", "ResourceAlreadyExists", "PathAlreadyExists", "BlobOverwritten", ""}
"""Codes of a 409 that mean a failed expectation. Other codes mean that a blob cannot be written or read."""
_MARKER = "x-ms-meta-snapshot_abandoned"
"""Header of the empty blob that exists briefly while an upload is abandoned."""
_BLOB = {"x-ms-blob-type": "BlockBlob"}
_HOST = re.compile(r"([^.]+)\.(?:dfs|blob)\.(.+)")
_SIGNATURE = re.compile(r"(?:^|[?&])sig=([^&]+)")


class Refusal(StatusError):
    """Response with an error status and Azure's code."""

    def __init__(self, answer: aiohttp.ClientResponse, detail: str) -> None:
        self.code = answer.headers.get("x-ms-error-code", "")
        reason = self.code or answer.reason or ""
        super().__init__(answer.status, reason, answer.headers.get("Retry-After", ""), detail)


class AzureDriver(Driver):
    """Driver of Azure Blob Storage."""

    def __init__(self, service: BlobServiceClient, session: aiohttp.ClientSession, container: str, made: Any) -> None:
        self._session = session
        self._credential = made
        """Credential to close with this driver, if it was created for it."""
        self._pipeline: Any = service._pipeline
        endpoint, _, self._signature = service.primary_endpoint.partition("?")
        self._container = f"{endpoint.rstrip('/')}/{quote(container)}"

    async def close(self) -> None:
        await self._session.close()
        if self._credential is not None:
            await self._credential.close()

    def _url(self, key: str, params: Mapping[str, str] | None = None) -> str:
        query = [urlencode(params, quote_via=quote)] if params else []
        query += [self._signature] if self._signature else []
        return f"{self._container}/{quote(key)}".rstrip("/") + ("?" + "&".join(query) if query else "")

    @asynccontextmanager
    async def _send(
        self,
        method: str,
        key: str,
        params: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: RequestBody | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request; yield the response, or raise Refusal."""
        told = {"x-ms-version": VERSION, **(headers or {})}
        if body is not None:
            told["Content-Length"] = str(body.nbytes)
        if body:
            told["Content-Type"] = "application/octet-stream"
        content: Any = body or None  # aiohttp selects the payload by its type
        request = HttpRequest(method, self._url(key, params), headers=told, content=content)
        answered = await self._pipeline.run(request, stream=True)
        answer: aiohttp.ClientResponse = answered.http_response.internal_response
        async with released_response(answer):
            self.note_date(answer.headers.get("Date"))
            if answer.status >= 300:
                raise Refusal(answer, read_message(await answer.content.read(4000)))
            yield answer

    async def head(self, key: str) -> FileStat:
        async with self._send("HEAD", key) as answer:
            told = answer.headers
            return self.describe(int(told["Content-Length"]), _parse_time(told["Last-Modified"]), told["ETag"])

    async def read(self, key: str, sink: ResponseSink) -> None:
        wanted = {"x-ms-range": sink.range, "If-Match": sink.token}
        async with self._send("GET", key, headers={name: value for name, value in wanted.items() if value}) as answer:
            at, total = parse_content_range(answer.headers.get("Content-Range"), answer.content_length)
            sink.starts(at, total, answer.headers.get("ETag"))
            await drain_into(answer, sink)

    async def _list(self, prefix: str, include: str, marker: str = "", delimiter: str = "") -> ElementTree.Element:
        params = {"restype": "container", "comp": "list", "prefix": prefix, "include": include}
        params |= {"maxresults": str(PAGE)} | ({"marker": marker} if marker else {})
        params |= {"delimiter": delimiter} if delimiter else {}
        async with self._send("GET", "", params) as answer:
            return await in_thread(ElementTree.fromstring, await answer.read())

    async def list(self, prefix: str, recursive: bool, following: Any) -> Page:
        """Send `List Blobs`, and skip the empty blobs that stand for folders in some accounts."""
        found = await self._list(prefix, "metadata", following or "", "" if recursive else "/")
        names = [read_name(each) for each in found.iterfind("Blobs/Blob") if not is_folder(each)]
        folders = [read_name(each) for each in found.iterfind("Blobs/BlobPrefix")]
        return Page(names, folders, found.findtext("NextMarker") or None)

    async def put(self, key: str, body: RequestBody, expect: Expect) -> str:
        """Send `Put Blob`, with a condition if there is an expectation."""
        condition = {} if expect is ANYTHING else {"If-None-Match": "*"} if expect is ABSENT else {"If-Match": expect}
        headers = {name: str(value) for name, value in condition.items()}
        async with self._send("PUT", key, headers={**_BLOB, **headers}, body=body) as answer:
            return answer.headers["ETag"]

    async def begin(self, key: str, size: int) -> str:
        """Return a new upload name, which becomes part of its blocks' names. No request is sent."""
        return secrets.token_hex(8)

    async def part(self, key: str, upload: str, number: int, offset: int, body: RequestBody, *, last: bool) -> str:
        """Send `Put Block`; return the name of the block. All names have one length, as Azure requires."""
        block = b64encode(f"{upload}-{number:07}".encode()).decode()
        async with self._send("PUT", key, {"comp": "block", "blockid": block}, body=body):
            return block

    async def complete(self, key: str, upload: str, parts: Mapping[int, str]) -> None:
        """Send `Put Block List`. A retry finds the blocks in the blob itself, so a lost response does no harm."""
        await self._commit(key, parts.values(), {})

    async def _commit(self, key: str, blocks: Iterable[str], headers: Mapping[str, str]) -> str:
        latest = "".join(f"<Latest>{block}</Latest>" for block in blocks)
        body = RequestBody([f'<?xml version="1.0" encoding="utf-8"?><BlockList>{latest}</BlockList>'.encode()])
        async with self._send("PUT", key, {"comp": "blocklist"}, headers=headers, body=body) as answer:
            return answer.headers["ETag"]

    async def abandon(self, key: str, upload: str) -> None:
        """Commit no blocks, which drops them all, and delete the empty blob.

        An existing blob is not changed, and Azure removes the blocks in time.
        """
        token: str | None = None
        try:
            token = await self._commit(key, (), {"If-None-Match": "*", _MARKER: "true"})
        except Refusal as refusal:
            if refusal.status not in (409, 412):
                raise
            token = await self._find_marker(key)
        if token:
            await self._delete_blob(key, {"If-Match": token}, {404, 412})

    async def _find_marker(self, key: str) -> str | None:
        """Return the token of the empty blob of an earlier attempt whose response was lost."""
        try:
            async with self._send("HEAD", key) as answer:
                return answer.headers["ETag"] if _MARKER in answer.headers else None
        except Refusal as refusal:
            if refusal.status != 404:
                raise
            return None

    async def uploads(self, prefix: str) -> Sequence[tuple[str, str, float]]:
        """Send `List Blobs` with and without uncommitted ones. Only the difference shows the unfinished uploads."""
        listed: list[dict[str, float]] = []
        for include in (
            "uncommittedblobs",
            "metadata",
        ):  # in this order, so that a blob committed meanwhile is not in the difference
            found: dict[str, float] = {}
            marker: str | None = ""
            while marker is not None:
                page = await self._list(prefix, include, marker)
                for each in page.iterfind("Blobs/Blob"):
                    when = each.findtext("Properties/Last-Modified") or each.findtext("Properties/Creation-Time")
                    found[read_name(each)] = (
                        _parse_time(when) if when else float("inf")
                    )  # unknown age: Azure removes it
                marker = page.findtext("NextMarker") or None
            listed.append(found)
        every, committed = listed
        return [(key, "", began) for key, began in every.items() if key not in committed]

    async def _delete_blob(self, key: str, headers: Mapping[str, str], gone: set[int]) -> None:
        try:
            async with self._send("DELETE", key, headers=headers):
                pass
        except Refusal as refusal:
            if refusal.status not in gone or refusal.code == "ContainerNotFound":
                raise

    async def delete(self, keys: Sequence[str]) -> None:
        """Send `Delete Blob` including its snapshots: Azure refuses to delete a blob that has any."""
        for key in keys:
            await self._delete_blob(key, {"x-ms-delete-snapshots": "include"}, {404})

    async def copy(self, source: str, token: str, key: str, attempt: RequestAttempts) -> None:
        """Send `Copy Blob`, and wait until it is done."""
        headers = {"x-ms-copy-source": self._url(source), "x-ms-source-if-match": token}
        headers |= {} if attempt.uncertain else {"If-None-Match": "*"}
        try:
            async with self._send("PUT", key, headers=headers) as answer:
                told = answer.headers
        except Refusal as refusal:
            if refusal.code != "PendingCopyOperation":  # an earlier attempt began it
                raise
            async with self._send("HEAD", key) as answer:
                told = answer.headers
        pause = 0.05
        while told.get("x-ms-copy-status") == "pending":
            await asyncio.sleep(pause := min(2 * pause, 2))
            async with self._send("HEAD", key) as answer:
                told = answer.headers
            attempt.gain()
        if told.get("x-ms-copy-status", "success") != "success":
            why = told.get("x-ms-copy-status-description", "")
            raise StorageError(f"{self._container}/{key}: copy failed: {why}")

    def fault(self, error: Exception, url: URL) -> SnapshotError:
        """Translate by the status and Azure's code, or by the state of the connection."""
        if isinstance(error, Refusal):
            return _translate_refusal(error, url)
        if isinstance(error, (ServiceRequestError, ServiceResponseError)):
            inner = error.inner_exception
            return connection_fault(inner, url) if isinstance(inner, Exception) else TransientError(f"{url}: {error}")
        if isinstance(error, AzureError):  # from a credential; its long text has instructions
            status = error.status_code if isinstance(error, HttpResponseError) else None
            kind = TransientError if status is not None and (status >= 500 or status == 429) else StorageError
            return kind(f"{url}: {type(error).__name__}: {error}")
        return connection_fault(error, url)


def _translate_refusal(error: Refusal, url: URL) -> SnapshotError:
    """Translate a refusal. Leases, policies and archived blobs cause a 409 or 412 that is not a conflict."""
    said = f"{url}: {error}"
    if error.code in ("ContainerNotFound", "ContainerDisabled"):
        return BucketNotFoundError(said) if error.code == "ContainerNotFound" else StorageError(said)
    if error.status == 412:
        return StorageError(said) if error.code.startswith("Lease") else StorageConflictError(said)
    if error.status == 409:
        return StorageConflictError(said) if error.code in _CONFLICTS else StorageError(said)
    return status_fault(error, url)


def _parse_time(text: str) -> float:
    return parsedate_to_datetime(text).timestamp()


class AzureStorage(ObjectStorage[AzureDriver]):
    """Files below `az://container/prefix` or `abfss://container@account.dfs.core.windows.net/prefix`."""

    known: Mapping[str, str] = {
        "account_name": "The storage account, if the URL does not name it (AZURE_STORAGE_ACCOUNT_NAME).",
        "account_key": "Its key (AZURE_STORAGE_ACCOUNT_KEY).",
        "connection_string": "Account, key and address in one; takes precedence (AZURE_STORAGE_CONNECTION_STRING).",
        "sas_token": "A shared access signature (AZURE_STORAGE_SAS_TOKEN).",
        "credential": "A credential of azure-identity or azure-core, closed by its creator; or an account key.",
        "client_id": "A service principal, with client_secret and tenant_id (AZURE_STORAGE_CLIENT_ID).",
        "client_secret": "The secret of the service principal (AZURE_STORAGE_CLIENT_SECRET).",
        "tenant_id": "The tenant of the service principal (AZURE_STORAGE_TENANT_ID).",
        "anon": "Send unsigned requests (AZURE_STORAGE_ANON). Without any of these options, azure-identity's "
        "DefaultAzureCredential is used.",
        "account_host": "Its host, if not `<account_name>.blob.core.windows.net`.",
    }
    secret = frozenset({"account_key", "connection_string", "sas_token", "credential", "client_secret"})

    def __init__(self, url: URL, options: Mapping[str, Any], context: Context) -> None:
        super().__init__(url, options, context)
        self._given: dict[str, Any] = {name: options.get(name) for name in self.known}
        for name in self.known.keys() - {"credential", "account_host"}:
            if self._given[name] is None:
                self._given[name] = os.environ.get(f"AZURE_STORAGE_{name.upper()}")
        self._named = options.get("account_name")
        container, at, _ = url.location.partition("/")[0].rpartition("@")
        if at:
            host, self.bucket = self.bucket, container
            found = _HOST.fullmatch(host)
            if not found or not container or ":" in container:
                raise ValueError(f"{url}: must be like abfss://container@account.dfs.core.windows.net/run/step-1")
            if self._named not in (None, found[1]):
                raise ValueError(f"{url}: the account must be account_name={self._named!r}, got {found[1]!r}")
            self._named = self._given["account_name"] = found[1]
            self._given["account_host"] = self._given["account_host"] or f"{found[1]}.blob.{found[2]}"
        if not self._given["account_name"] and not self._given["connection_string"]:
            raise ValueError(
                f"{url}: no account; pass storage_options account_name or connection_string, set "
                "AZURE_STORAGE_ACCOUNT_NAME, or use abfss://container@account.dfs.core.windows.net/..."
            )

    def driver_limits(self) -> Limits:
        return LIMITS

    async def connect(self) -> AzureDriver:
        """Create a session on this loop, and a client that signs."""
        given = self._given
        credential, made = await asyncio.to_thread(self._credential)
        session = new_session({}, self.retry_policy, self.connections)
        # No read time-out: `retry_request` times each attempt from its last progress.
        limits = {
            "connection_timeout": min(self.retry_policy.timeout, self.retry_policy.deadline),
            "read_timeout": None,
        }
        transport = AioHttpTransport(session=session, session_owner=False, **limits)
        how: dict[str, Any] = {"transport": transport, "retry_total": 0}
        try:
            if given["connection_string"]:
                service = BlobServiceClient.from_connection_string(given["connection_string"], **how)
                if service.account_name != (self._named or service.account_name):
                    raise ValueError(
                        f"account must be {service.account_name} as in connection_string, got {self._named}"
                    )
            else:
                host = given["account_host"] or f"{given['account_name']}.blob.core.windows.net"
                signature = f"?{given['sas_token'].lstrip('?')}" if given["sas_token"] and not credential else ""
                service = BlobServiceClient(f"https://{host}{signature}", credential=credential, **how)
        except BaseException:
            await session.close()
            raise
        return AzureDriver(service, session, self.bucket, made)

    def _credential(self) -> tuple[Any, Any]:
        """Return the credential to sign with, and again if created here. It may read files: call it in a thread."""
        given = self._given
        if given["connection_string"]:
            return None, None
        if given["credential"]:
            return given["credential"], None
        if given["account_key"]:
            return {"account_name": given["account_name"], "account_key": given["account_key"]}, None
        if given["sas_token"] or str(given["anon"]).lower() not in ("none", "false", "0", "f", ""):
            return None, None
        from azure.identity import aio as identity  # slow import

        made: Any
        if given["client_id"]:
            made = identity.ClientSecretCredential(given["tenant_id"], given["client_id"], given["client_secret"])
        else:
            made = identity.DefaultAzureCredential()
        return made, made

    def secrets(self) -> list[str]:
        """Return the secrets, including those in the environment, in every form that the client may write."""
        return [*_secrets(self._given), *super().secrets()]


def _secrets(given: Mapping[str, Any]) -> list[str]:
    """Return every text in the options and the environment that grants access."""
    credential = given["credential"]
    found = [given[name] for name in ("account_key", "connection_string", "sas_token", "client_secret")]
    for part in str(given["connection_string"] or "").split(";"):
        name, _, value = part.partition("=")
        found += [value] if name.strip().lower() in ("accountkey", "sharedaccesssignature") else []
    found += [credential.get("account_key")] if isinstance(credential, Mapping) else [credential]
    found += [getattr(getattr(credential, "named_key", None), "key", None), getattr(credential, "signature", None)]
    texts = [each for each in found if isinstance(each, str)]
    for signature in [match[1] for each in texts for match in _SIGNATURE.finditer(each)]:
        texts += [signature, unquote(signature), yarl.URL(f"http://host/?sig={signature}").raw_query_string[4:]]
    return sorted((each for each in texts if len(each) > 3), key=len, reverse=True)
