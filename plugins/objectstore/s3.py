"""S3 and compatible stores. s3fs finds the credentials, its client sends the requests, and obstore reads."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession

from snapshot.plugins.network.aiohttp_client import without_resending
from snapshot.plugins.objectstore.object_storage import ObjectStorage
from snapshot.plugins.objectstore.s3_driver import S3Driver
from snapshot.storage import FileWriter, Limits

MiB = 1 << 20
LIMITS = Limits(
    smallest_part=5 * MiB,
    largest_part=5 << 30,
    most_parts=10_000,
    preferred_part=16 * MiB,
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
            from snapshot.plugins.objectstore.s3_obstore import ObstoreDriver, make_store  # it may be missing

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
