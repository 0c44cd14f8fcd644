"""Azure Blob Storage passes the contract, against Azurite; and bears what goes wrong on the way."""

import asyncio
import logging
import traceback
from base64 import b64decode, b64encode
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.errors import BucketNotFoundError, StorageConflictError, StorageNotFoundError
from snapshot.io import retry
from snapshot.io.bodies import BufferSink, BytesSink, RequestBody
from snapshot.io.registry import open_storage
from snapshot.io.retry import TransientError
from snapshot.io.storage import ABSENT, ANYTHING, URL, Context
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, pattern, store
from snapshot_objectstore import azure
from snapshot_objectstore.azure import AzureStorage
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.storage_calls import PATIENT, patience, use

MiB = 1 << 20


class TestAzure(StorageTests):
    capabilities = AzureStorage.capabilities

    @pytest.fixture
    def url(self, azurite):
        return f"az://{azurite.container()}/folder"

    @pytest.fixture
    def options(self, azurite):
        return {"connection_string": azurite.connection_string}


@pytest.fixture
def proxy(azurite):
    with FaultProxy(azurite.url.removesuffix(f"/{azurite.account}")) as proxy:
        yield proxy


@pytest.fixture
def url(azurite):
    return f"az://{azurite.container()}/run/step-1"


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What fails on purpose is tried again soon."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


@pytest.fixture
def given(azurite, proxy):
    at = azurite.connection_string.replace(azurite.url, f"{proxy.url}/{azurite.account}")
    return PATIENT | {"connection_string": at}


def state(fill=None, rows=1500):
    big = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    made = {"s": StateDict(big=big, small=torch.arange(3), step=5)}
    if fill is not None:
        made["s"]["big"].fill_(fill)
        made["s"].update(small=torch.full((3,), fill), step=fill)
    return made


def assert_same(a, b):
    assert torch.equal(a["s"]["big"], b["s"]["big"])
    assert torch.equal(a["s"]["small"], b["s"]["small"])
    assert a["s"]["step"] == b["s"]["step"]


def restored(url, options):
    live = state(fill=0)
    assert not Snapshot(url, storage_options=options).restore(live).lines
    return live


def test_azure_take_and_restore(azurite, url):
    given = {"connection_string": azurite.connection_string}
    Snapshot.take(url, state(), storage_options=given)
    assert_same(restored(url, given), state())
    snapshot = Snapshot(url, storage_options=given)
    assert snapshot.verify()
    assert torch.equal(snapshot.read_object("0/s/big", box=[7]), state()["s"]["big"][7])
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state(), storage_options=given)
    before = use(url, given, lambda storage: storage.list())
    Snapshot.async_take(url, state(fill=7), storage_options=given, overwrite=True).wait()
    assert_same(restored(url, given), state(fill=7))
    after = use(url, given, lambda storage: storage.list())
    assert len(after) == len(before)  # what was replaced is gone
    snapshot.delete()
    assert not snapshot.exists()
    assert use(url, given, lambda storage: storage.list()) == []


def test_azure_long_files_are_written_and_read_in_parts(url, proxy, given):
    given["part_bytes"] = MiB
    Snapshot.take(url, state(), storage_options=given)
    blocks = [each for each in proxy.requests if "comp=block&" in each.path]
    assert len(blocks) >= 5
    assert max(each.request_bytes for each in blocks) == MiB
    assert proxy.count("PUT", "*comp=blocklist*") >= 1
    proxy.clear()
    assert_same(restored(url, given), state())
    assert proxy.count("GET", lambda each: "x-ms-range" in each.headers) >= 5


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("PUT", "*comp=block&*", {"status": 503, "times": 2}),
        ("PUT", "*comp=block&*", {"status": 500, "times": None}),
        ("PUT", "*comp=block&*", {"reset_upload_at": 300_000}),
        ("PUT", "*comp=block&*", {"lose_answer": True}),
        ("PUT", "*comp=block&*", {"hang": True}),
        ("PUT", "*comp=blocklist*", {"status": 503, "times": 2}),
        ("PUT", "*comp=blocklist*", {"lose_answer": True}),
        ("PUT", "*comp=blocklist*", {"lose_answer": "hang"}),
        ("GET", "*", {"status": 503, "times": 2, "headers": {"Retry-After": "0"}}),
        ("GET", "*", {"reset_at": 400_000}),
        ("GET", "*", {"close_at": 400_000}),
        ("GET", "*", {"hang_at": 400_000}),
        ("HEAD", "*", {"reset_before": True}),
    ],
    ids=str,
)
def test_azure_retries_transient_faults(url, proxy, given, method, path, fault):
    async def work(storage):
        if fault.get("times", 1) is None:
            with pytest.raises(StorageError, match=r"HTTP 500.*failed after"):
                await store(storage, "data/file", data, part=MiB)
            return
        await store(storage, "data/file", data, part=MiB)
        assert await fetch(storage, "data/file", 0, [len(data)]) == data
        assert (await storage.stat("data/file")).size == len(data)

    data = pattern(3 * MiB + 700_000)  # the last block, which may be the first to come, is also long enough
    given.update(patience(fault))
    if fault.get("times", 1) is None:
        given["deadline"] = 1
    proxy.fault(method, path, **fault)
    use(url, given, work)


def test_azure_interrupted_read_continues_where_it_ended(url, proxy, given):
    data = pattern(3 * MiB)

    async def work(storage):
        await storage.put("file", data)
        proxy.fault("GET", reset_at=2 * MiB)
        assert await fetch(storage, "file", 1000, [len(data) - 1000]) == data[1000:]

    use(url, given, work)
    first, second = [each for each in proxy.requests if each.method == "GET"]
    assert first.headers["x-ms-range"] == f"bytes=1000-{len(data) - 1}"
    begin = int(second.headers["x-ms-range"].removeprefix("bytes=").partition("-")[0])
    assert 1000 < begin <= 1000 + 2 * MiB


def test_azure_flipped_bit_in_transfer_is_found(url, proxy, given):
    Snapshot.take(url, state(), storage_options=given)
    with proxy.fault("GET", lambda each: "x-ms-range" in each.headers, flip=12_345):
        assert_same(restored(url, given), state())
    with (
        proxy.fault("GET", lambda each: "x-ms-range" in each.headers, times=None, flip=12_345),
        pytest.raises(CorruptSnapshotError),
    ):
        restored(url, given)


def test_azure_put_whose_response_is_lost_is_recognised(url, proxy, given):
    async def work(storage):
        with proxy.fault("PUT", lose_answer=True):
            token = await storage.put("file", b"ours", expect=ABSENT)
        assert (await storage.stat("file")).token == token
        with proxy.fault("PUT", lose_answer=True):
            token = await storage.put("file", b"again", expect=token)
        assert (await storage.stat("file")).token == token
        with proxy.fault("PUT", status=500), pytest.raises(StorageConflictError):
            await storage.put("file", b"theirs", expect=ABSENT)
        assert await storage.get("file") == b"again"

    use(url, given, work)


def test_azure_commit_whose_response_is_lost_is_a_commit(url, proxy, given):
    with proxy.fault("PUT", lambda each: "if-none-match" in each.headers, lose_answer=True, times=2):
        Snapshot.take(url, state(), storage_options=given)
    assert_same(restored(url, given), state())


def test_azure_abandoned_upload_leaves_no_blob(url, proxy, given):
    """Nor do its blocks cost anything; what stands in its place stays, and the retry of a lost answer knows it."""

    async def work(storage):
        driver = await storage.driver()
        half = await storage.create("half", 2 * MiB)
        await half.write(0, [pattern(MiB)])
        assert [key for key, _, _ in await driver.uploads("")] == ["run/step-1/half"]
        with proxy.fault("PUT", "*comp=blocklist*", lose_answer=True):
            await half.abort()
        assert list(await driver.uploads("")) == []
        await storage.put("stands", b"stands")
        other = await storage.create("stands", 2 * MiB)
        await other.write(0, [pattern(MiB)])
        await other.abort()
        assert await storage.get("stands") == b"stands"
        assert await storage.list() == ["stands"]

    use(url, given, work)


def test_azure_sweep_deletes_uncommitted_blocks(url, proxy, given):
    async def work(storage):
        for path in ["old/1", "old/2"]:
            writer = await storage.create(path, 2 * MiB)
            await writer.write(0, [pattern(MiB)])
        await store(storage, "old/whole", pattern(10))
        assert list(await storage.sweep("", 3600)) == []
        assert list(await storage.sweep("new", -60)) == []
        assert list(await storage.sweep("old", -60)) == ["old/1", "old/2"]
        assert list(await storage.sweep("old", -60)) == []
        assert await storage.list() == ["old/whole"]

    use(url, given, work)


def test_azure_list_of_many_pages_is_complete(url, given, monkeypatch):
    monkeypatch.setattr(azure, "PAGE", 2)

    async def work(storage):
        names = [f"{folder}/{i}" for folder in "abc" for i in range(3)]
        await asyncio.gather(*(storage.put(name, b"") for name in names))
        assert await storage.list() == names
        assert await storage.list("b/") == ["b/0", "b/1", "b/2"]
        assert await storage.list("", recursive=False) == ["a/", "b/", "c/"]

    use(url, given, work)


def test_azure_list_leaves_out_folders_and_reads_names_that_xml_cannot_hold(url, proxy, given):
    folder = "<Metadata><hdi_isfolder>true</hdi_isfolder></Metadata>"
    kind = "<Properties><ResourceType>directory</ResourceType></Properties>"
    listing = (
        "<EnumerationResults><Blobs>"
        f"<Blob><Name>run/step-1/data</Name>{folder}</Blob><Blob><Name>run/step-1/more</Name>{kind}</Blob>"
        '<Blob><Name>run/step-1/data/1</Name></Blob><Blob><Name Encoded="true">run/step-1/%EF%BF%BE</Name></Blob>'
        "</Blobs><NextMarker /></EnumerationResults>"
    )
    proxy.fault("GET", "*comp=list*", status=200, body=listing.encode())
    assert use(url, given, lambda storage: storage.list()) == ["data/1", "\ufffe"]


def test_azure_share_waits_for_a_pending_copy(url, proxy, given):
    async def work(storage):
        proxy.fault("PUT", status=409, headers={"x-ms-error-code": "PendingCopyOperation"})
        for status in ["pending", "pending", "success", "failed"]:
            proxy.fault("HEAD", status=200, headers={"x-ms-copy-status": status})
        await storage.send_request("share", "copy", copy)
        proxy.fault("PUT", status=409, headers={"x-ms-error-code": "PendingCopyOperation"})
        with pytest.raises(StorageError, match="copy failed"):
            await storage.send_request("share", "copy", copy)

    async def copy(driver, attempt):
        await driver.copy("file", "token", "copy", attempt)

    use(url, given, work)


def test_azure_share_deletes_a_copy_that_fails_later(url, proxy, given):
    async def work(storage):
        await storage.put("file", b"content")
        proxy.fault("PUT", status=202, headers={"x-ms-copy-status": "pending"})
        proxy.fault("HEAD", nth=3, status=200, headers={"x-ms-copy-status": "failed"})
        deleted = proxy.fault("DELETE", "*/shared", delay=0.01)
        with pytest.raises(StorageError, match="copy failed"):
            await storage.share(storage.url.join("file"), "shared")
        assert deleted.hits == 1

    use(url, given, work)


def test_azure_share_checks_the_version_on_the_server(url, given):
    """Also when the source is replaced after the check by this library."""

    async def work(storage):
        old = await storage.put("file", b"first")
        await storage.put("file", b"other")

        async def copy(driver, attempt):
            await driver.copy(storage.key("file"), old, storage.key("shared"), attempt)

        with pytest.raises(StorageConflictError):
            await storage.send_request("share", "shared", copy)
        await storage.put("shared", b"taken")
        old = (await storage.stat("file")).token
        with pytest.raises(StorageConflictError):
            await storage.send_request("share", "shared", copy)
        assert await storage.get("shared") == b"taken"

    use(url, given, work)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "BlobNotFound", StorageNotFoundError),
        (404, "ContainerNotFound", BucketNotFoundError),
        (412, "ConditionNotMet", StorageConflictError),
        (412, "LeaseIdMissing", StorageError),
        (409, "BlobAlreadyExists", StorageConflictError),
        (409, "BlobImmutableDueToPolicy", StorageError),
        (416, "InvalidRange", CorruptSnapshotError),
        (403, "AuthorizationPermissionMismatch", StorageError),
        (400, "InvalidQueryParameterValue", StorageError),
    ],
)
def test_azure_permanent_errors_are_not_retried(url, proxy, given, status, code, kind):
    proxy.fault(status=status, headers={"x-ms-error-code": code})
    with pytest.raises(StorageError if kind is StorageError else kind) as caught:
        use(url, given, lambda storage: storage.stat("file"))
    assert type(caught.value) is kind
    assert f"{url}/file" in str(caught.value)
    assert kind is CorruptSnapshotError or code in str(caught.value)
    assert proxy.count() == 1


def test_azure_missing_container_is_named_at_once(azurite, given):
    url = "az://no-such-container/run"
    for verb in [Snapshot.take, lambda *given, **more: Snapshot(given[0], **more).restore(given[1])]:
        with pytest.raises(StorageError, match=r"az://no-such-container/run.*ContainerNotFound") as caught:
            verb(url, state(), storage_options=given)
        assert "given up" not in str(caught.value)


def shown(error, caplog):
    """All that somebody sees of an error."""
    return "".join(traceback.format_exception(error)) + repr(error) + caplog.text


@pytest.mark.parametrize("how", ["key", "no base64", "signature"])
def test_azure_wrong_key_fails_at_once_and_is_not_shown(azurite, url, how, caplog):
    caplog.set_level(logging.DEBUG)
    secret = {
        "key": b64encode(b"guessed" * 8).decode(),
        "no base64": "guessed-guessed",
        "signature": "Z3Vlc3NlZA%3D%3D",
    }[how]
    parts = f"SharedAccessSignature=sv=2021-08-06&sig={secret}" if how == "signature" else f"AccountKey={secret}"
    text = f"DefaultEndpointsProtocol=http;AccountName={azurite.account};BlobEndpoint={azurite.url};{parts}"
    with pytest.raises(StorageError) as caught:
        Snapshot(url, storage_options={"connection_string": text}).restore(state())
    assert "given up" not in str(caught.value)
    assert url in str(caught.value)
    assert "Authenti" in str(caught.value) or "Authoriz" in str(caught.value) or "SigningError" in str(caught.value)
    assert secret not in shown(caught.value, caplog)
    assert "guessed" not in shown(caught.value, caplog)


def test_azure_shared_access_signature_works_and_is_not_shown(azurite, url, proxy, caplog):
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    caplog.set_level(logging.DEBUG)
    rights = AccountSasPermissions(read=True, write=True, delete=True, list=True, create=True)
    signature = generate_account_sas(
        azurite.account, azurite.key, ResourceTypes(container=True, object=True), rights, "2100-01-01T00:00:00Z"
    )
    given = {"connection_string": f"BlobEndpoint={proxy.url}/{azurite.account};SharedAccessSignature={signature}"}

    async def work(storage):
        await storage.put("file", b"content")
        await storage.share(storage.url.join("file"), "shared")
        assert await storage.get("shared") == b"content"
        assert await storage.list() == ["file", "shared"]
        assert repr(storage) == f"AzureStorage('{url}')"

    use(url, given, work)
    with proxy.fault(times=None, reset_before=True), pytest.raises(StorageError) as caught:
        use(url, given | {"deadline": 0.3}, lambda storage: storage.get("file"))
    text = shown(caught.value, caplog)
    secret = signature.partition("sig=")[2].partition("&")[0]
    assert secret not in text
    assert azure.unquote(secret) not in text


def test_azure_unknown_host_is_named_at_once(monkeypatch):
    import socket

    def nobody(*_args, **_more):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    monkeypatch.setattr("asyncio.base_events.socket.getaddrinfo", nobody)
    given = {"account_name": "nosuchaccount", "account_key": b64encode(b"key").decode()}
    with pytest.raises(StorageError, match=r"az://container/run") as caught:
        use("az://container/run", given, lambda storage: storage.stat("file"))
    assert "given up" not in str(caught.value)


# What says where and who


def opened(url, **options):
    return open_storage(URL.parse(url), options, Context())


def test_azure_url_may_name_the_account():
    storage = opened("abfss://container@account.dfs.core.windows.net/run/1")
    assert storage.bucket == "container"
    assert storage.key("x") == "run/1/x"
    assert storage._given["account_name"] == "account"
    assert storage._given["account_host"] == "account.blob.core.windows.net"
    elsewhere = opened("abfss://container@account.dfs.core.chinacloudapi.cn/run", account_name="account")
    assert elsewhere._given["account_host"] == "account.blob.core.chinacloudapi.cn"
    with pytest.raises(ValueError, match="account must be"):
        opened("abfss://container@account.dfs.core.windows.net/run", account_name="other")
    with pytest.raises(ValueError, match="abfss://container@account"):
        opened("abfss://container@localhost/run")


def test_azure_connection_string_of_another_account_is_refused(azurite):
    url = "abfss://container@account.dfs.core.windows.net/run"
    with pytest.raises(StorageError, match=azurite.account):
        use(url, {"connection_string": azurite.connection_string}, lambda storage: storage.stat("file"))


def test_azure_environment_variables_of_adlfs_are_used(azurite, url, monkeypatch):
    with pytest.raises(ValueError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        opened("az://container/run")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", azurite.connection_string)
    use(url, {}, lambda storage: storage.put("file", b"."))
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ANON", "true")
    assert opened("az://container/run")._credential() == (None, None)
    assert opened("az://container/run", anon=False)._credential()[0] is not None
    monkeypatch.setenv("AZURE_STORAGE_ANON", "0")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "key")
    assert opened("az://container/run")._credential()[0] == {"account_name": "account", "account_key": "key"}


def test_azure_identity_is_used_without_other_credentials(monkeypatch):
    from azure.identity import aio

    for name in ("ACCOUNT_KEY", "CONNECTION_STRING", "SAS_TOKEN", "ANON", "CLIENT_ID"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    credential, made = opened("az://container/run", account_name="account")._credential()
    assert isinstance(made, aio.DefaultAzureCredential)
    assert credential is made
    principal = {"client_id": "id", "client_secret": "secret", "tenant_id": "tenant"}
    credential, made = opened("az://container/run", account_name="account", **principal)._credential()
    assert isinstance(made, aio.ClientSecretCredential)


class Tokens:
    """A credential that cannot be had."""

    closed = 0

    async def get_token(self, *_scopes, **_more):
        from azure.core.exceptions import ClientAuthenticationError

        raise ClientAuthenticationError("AADSTS7000215: Invalid client secret")

    async def close(self):
        self.closed += 1


def test_azure_token_error_is_not_retried():
    tokens = Tokens()
    given = {"account_name": "account", "credential": tokens}
    with pytest.raises(StorageError, match=r"az://container/run/file.*AADSTS7000215"):
        use("az://container/run", given, lambda storage: storage.stat("file"))
    assert not tokens.closed  # it is another's


# Requests of the driver, with a pipeline in memory


class Answer:
    """A response to one request."""

    def __init__(self, status=200, body=b"", reason="", **headers):
        self.status, self.body, self.reason, self.ended, self.content = status, body, reason, "", self
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.content_length = len(body)

    async def read(self, limit=None):
        taken, self.body = self.body[:limit], self.body[limit:] if limit else b""
        return taken

    async def readany(self):
        return await self.read(4)

    def at_eof(self):
        return not self.body

    def release(self):
        self.ended = "released"

    def close(self):
        self.ended = "closed"


class Pipeline:
    """Requests, each with the next answer."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []

    async def run(self, request, stream):
        assert stream
        self.requests.append(request)
        found = self.answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(http_response=SimpleNamespace(internal_response=found))

    def asked(self):
        """Return method, path with query, and what headers say beyond those of all requests."""
        found = []
        for each in self.requests:
            headers = dict(each.headers)
            assert headers.pop("x-ms-version") == "2021-12-02"
            assert each.url.startswith("https://host/con%20tainer")
            found.append((each.method, each.url.removeprefix("https://host/con%20tainer"), headers))
        self.requests.clear()
        return found


class Closed:
    closed = 0

    async def close(self):
        self.closed += 1


def driver_of(*answers, signature="", made=None):
    pipeline = Pipeline(*answers)
    service = SimpleNamespace(_pipeline=pipeline, primary_endpoint=f"https://host/{signature}")
    return azure.AzureDriver(service, Closed(), "con tainer", made), pipeline


def listing(*names, marker="", more=""):
    blobs = "".join(each if each.startswith("<") else f"<Blob><Name>{each}</Name></Blob>" for each in names)
    return f"<R><Blobs>{blobs}{more}</Blobs><NextMarker>{marker}</NextMarker></R>".encode()


def refusal(status, code="", **headers):
    return Answer(status, b"<Error><Message>why\nmore</Message></Error>", "Reason", x_ms_error_code=code, **headers)


TIME = "Thu, 01 Jan 2026 00:00:00 GMT"
AT = 1767225600
WHERE = URL.parse("az://container/run/file")


def test_driver_head_gives_size_time_and_token():
    told = {"Content_Length": "7", "Last_Modified": TIME, "ETag": "t", "Date": "Thu, 01 Jan 2026 00:01:40 GMT"}
    driver, pipeline = driver_of(Answer(**told))
    found = asyncio.run(driver.head("run/a b"))
    assert (found.size, found.mtime, found.token) == (7, AT, "t")
    assert 100 <= found.age < 3700, "by the clock of the server"
    assert pipeline.asked() == [("HEAD", "/run/a%20b", {})]


@pytest.mark.parametrize("made", [None, Closed()])
def test_driver_close_ends_its_session_and_the_credential_that_it_made(made):
    driver, _ = driver_of(made=made)
    asyncio.run(driver.close())
    assert driver._session.closed == 1
    assert made is None or made.closed == 1


def test_driver_read_asks_for_a_range_in_a_version():
    answers = [
        Answer(206, b"456789", Content_Range="bytes 4-9/10", ETag="t"),
        Answer(200, b"012345", ETag="t"),
        Answer(206, b"4567", Content_Range="bytes 4-7/10", ETag="new"),
    ]
    driver, pipeline = driver_of(*answers)
    held = bytearray(4)
    asyncio.run(driver.read("k", BufferSink(WHERE, 4, [held], "t")))
    assert held == b"4567"
    sink = BytesSink(WHERE, None)
    asyncio.run(driver.read("k", sink))
    assert (sink.data, sink.token, sink.end) == (b"012345", "t", 6)
    with pytest.raises(StorageConflictError):
        asyncio.run(driver.read("k", BufferSink(WHERE, 4, [held], "t")))
    assert [each.ended for each in answers] == ["closed", "released", "closed"], "unread bytes are not waited for"
    ranged = {"x-ms-range": "bytes=4-7", "If-Match": "t"}
    assert pipeline.asked() == [("GET", "/k", ranged), ("GET", "/k", {}), ("GET", "/k", ranged)]


def test_driver_list_leaves_folders_out():
    folder = "<Blob><Name>f</Name><Metadata><hdi_isfolder>true</hdi_isfolder></Metadata></Blob>"
    other = "<Blob><Name>g</Name><Metadata><Hdi_isfolder>true</Hdi_isfolder></Metadata></Blob>"
    third = "<Blob><Name>h</Name><Properties><ResourceType>directory</ResourceType></Properties></Blob>"
    odd = '<Blob><Name Encoded="true">a%FF</Name><Properties><ResourceType>file</ResourceType></Properties></Blob>'
    plain = '<Blob><Name Encoded="false">b%20</Name><Metadata><hdi_isfolder>false</hdi_isfolder></Metadata></Blob>'
    driver, pipeline = driver_of(
        Answer(
            body=listing(
                "run/a", folder, other, third, odd, plain, marker="n", more="<BlobPrefix><Name>p/</Name></BlobPrefix>"
            )
        ),
        Answer(body=listing()),
        Answer(body=listing("<Blob/>")),
    )
    page = asyncio.run(driver.list("run/", False, None))
    assert (page.keys, page.folders, page.following) == (["run/a", "a\ufffd", "b%20"], ["p/"], "n")
    page = asyncio.run(driver.list("run/", True, "n"))
    assert (page.keys, page.folders, page.following) == ([], [], None)
    with pytest.raises(StorageError, match="not Azure"):
        asyncio.run(driver.list("", True, None))
    common = "?restype=container&comp=list&prefix=run%2F&include=metadata&maxresults=5000"
    assert [path for _, path, _ in pipeline.asked()][:2] == [f"{common}&delimiter=%2F", f"{common}&marker=n"]


def test_driver_uploads_send_conditions_and_names_of_one_length():
    body = RequestBody([b"ab", b"c"])
    driver, pipeline = driver_of(*[Answer(201, ETag="t")] * 7, signature="?sig=x")

    async def work():
        assert [await driver.put("k", body, expect) for expect in (ANYTHING, ABSENT, "old")] == ["t"] * 3
        await driver.put("k", RequestBody([]), ANYTHING)
        upload = await driver.begin("k", 9)
        assert len(upload) == 16
        assert upload != await driver.begin("k", 9)
        first = await driver.part("k", upload, 1, 0, body, last=False)
        second = await driver.part("k", upload, 50_000, 9, body, last=True)
        assert b64decode(first).decode() == f"{upload}-0000001"
        assert b64decode(second).decode() == f"{upload}-0050000"
        await driver.complete("k", upload, {1: first, 50_000: second})
        return first, second

    first, second = asyncio.run(work())
    sent = pipeline.requests[-1].content
    listed = f"<BlockList><Latest>{first}</Latest><Latest>{second}</Latest></BlockList>"
    assert sent.read().decode().endswith(listed)
    calls = pipeline.asked()
    kind = {"x-ms-blob-type": "BlockBlob", "Content-Length": "3", "Content-Type": "application/octet-stream"}
    assert calls[:4] == [
        ("PUT", "/k?sig=x", kind),
        ("PUT", "/k?sig=x", {**kind, "If-None-Match": "*"}),
        ("PUT", "/k?sig=x", {**kind, "If-Match": "old"}),
        ("PUT", "/k?sig=x", {"x-ms-blob-type": "BlockBlob", "Content-Length": "0"}),
    ]
    assert [path for _, path, _ in calls[4:]] == [
        f"/k?comp=block&blockid={quote(first, safe='')}&sig=x",
        f"/k?comp=block&blockid={quote(second, safe='')}&sig=x",
        "/k?comp=blocklist&sig=x",
    ]
    assert calls[4][2] == {name: value for name, value in kind.items() if name != "x-ms-blob-type"}


MARK = "x-ms-meta-snapshot_abandoned"


@pytest.mark.parametrize(
    ("answers", "methods"),
    [
        ([Answer(201, ETag="t"), Answer(202)], "PUT DELETE"),
        ([Answer(201, ETag="t"), refusal(404)], "PUT DELETE"),
        ([Answer(201, ETag="t"), refusal(412)], "PUT DELETE"),
        ([refusal(412), Answer(ETag="t")], "PUT HEAD"),
        ([refusal(409), Answer(ETag="t", x_ms_meta_snapshot_abandoned="true"), Answer(202)], "PUT HEAD DELETE"),
        ([refusal(409), refusal(404)], "PUT HEAD"),
    ],
)
def test_driver_abandon_drops_the_blocks_and_no_blob_of_another(answers, methods):
    for each in answers:
        if "x-ms-meta-snapshot-abandoned" in each.headers:
            each.headers[MARK] = each.headers.pop("x-ms-meta-snapshot-abandoned")
    driver, pipeline = driver_of(*answers)
    asyncio.run(driver.abandon("k", "u"))
    calls = pipeline.asked()
    assert [method for method, _, _ in calls] == methods.split()
    assert calls[0][1] == "/k?comp=blocklist"
    assert (calls[0][2]["If-None-Match"], calls[0][2][MARK]) == ("*", "true")
    if "DELETE" in methods:
        assert calls[-1][2] == {"If-Match": "t"}
    assert not pipeline.answers


@pytest.mark.parametrize(
    "answers",
    [
        [refusal(403)],
        [refusal(409), refusal(403)],
        [Answer(201, ETag="t"), refusal(403)],
        [Answer(201, ETag="t"), refusal(404, "ContainerNotFound")],
    ],
)
def test_driver_abandon_raises_other_errors(answers):
    driver, _ = driver_of(*answers)
    with pytest.raises(azure.Refusal):
        asyncio.run(driver.abandon("k", "u"))


def test_driver_unfinished_uploads_are_those_that_no_listing_of_blobs_has():
    def blob(name, **times):
        told = "".join(f"<{each.replace('_', '-')}>{TIME}</{each.replace('_', '-')}>" for each in times)
        return f"<Blob><Name>{name}</Name><Properties>{told}</Properties></Blob>"

    driver, pipeline = driver_of(
        Answer(body=listing(blob("run/a", Last_Modified=1), blob("run/b", Creation_Time=1), marker="n")),
        Answer(body=listing(blob("run/c"), blob("run/d", Last_Modified=1))),
        Answer(body=listing("run/d", "run/e")),
    )
    found = asyncio.run(driver.uploads("run/"))
    assert found == [("run/a", "", AT), ("run/b", "", AT), ("run/c", "", float("inf"))]
    paths = [path for _, path, _ in pipeline.asked()]
    assert [("include=uncommittedblobs" in each, "marker=n" in each) for each in paths] == [
        (True, False), (True, True), (False, False)
    ]  # fmt: skip


def test_driver_delete_minds_no_missing_blob():
    driver, pipeline = driver_of(Answer(202), refusal(404), refusal(404, "ContainerNotFound"), refusal(412))
    asyncio.run(driver.delete(["a", "b"]))
    snapshots = {"x-ms-delete-snapshots": "include"}
    assert pipeline.asked() == [("DELETE", "/a", snapshots), ("DELETE", "/b", snapshots)]
    for _ in range(2):
        with pytest.raises(azure.Refusal):
            asyncio.run(driver.delete(["a", "b"]))


@pytest.mark.parametrize("uncertain", [False, True])
def test_driver_copy_waits_until_it_is_done(uncertain, monkeypatch):
    pauses, plain = [], asyncio.sleep
    monkeypatch.setattr(azure.asyncio, "sleep", lambda seconds: (pauses.append(seconds), plain(0))[1])
    states = ["pending"] * 8 + ["success"]
    driver, pipeline = driver_of(*[Answer(202, x_ms_copy_status=each) for each in states])
    gains = []
    attempt = SimpleNamespace(uncertain=uncertain, gain=lambda: gains.append(1))
    asyncio.run(driver.copy("s", "v", "k", attempt))
    calls = pipeline.asked()
    condition = {} if uncertain else {"If-None-Match": "*"}
    expected = {"x-ms-copy-source": "https://host/con%20tainer/s", "x-ms-source-if-match": "v", **condition}
    assert calls == [("PUT", "/k", expected), *[("HEAD", "/k", {})] * 8]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2]
    assert len(gains) == 8
    driver, pipeline = driver_of(Answer(202))
    asyncio.run(driver.copy("s", "v", "k", attempt))
    assert len(pipeline.requests) == 1
    driver, pipeline = driver_of(refusal(409, "PendingCopyOperation"), Answer(x_ms_copy_status="success"))
    asyncio.run(driver.copy("s", "v", "k", attempt))
    assert [each.method for each in pipeline.requests] == ["PUT", "HEAD"]
    driver, _ = driver_of(refusal(409, "BlobAlreadyExists"))
    with pytest.raises(azure.Refusal, match="BlobAlreadyExists"):
        asyncio.run(driver.copy("s", "v", "k", attempt))
    driver, _ = driver_of(Answer(202, x_ms_copy_status="failed", x_ms_copy_status_description="no space"))
    with pytest.raises(StorageError, match=r"/k: copy failed: no space"):
        asyncio.run(driver.copy("s", "v", "k", attempt))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "ContainerNotFound", BucketNotFoundError),
        (403, "ContainerDisabled", StorageError),
        (404, "BlobNotFound", StorageNotFoundError),
        (412, "ConditionNotMet", StorageConflictError),
        (412, "LeaseIdMissing", StorageError),
        (409, "BlobAlreadyExists", StorageConflictError),
        (409, "", StorageConflictError),
        (409, "BlobArchived", StorageError),
        (416, "InvalidRange", CorruptSnapshotError),
        (500, "", TransientError),
        (501, "", StorageError),
        (505, "", StorageError),
        (408, "", TransientError),
        (300, "", StorageError),
    ],
)
def test_driver_fault_translates_a_refusal(status, code, kind):
    driver, _ = driver_of(refusal(status, code, Retry_After="9"))
    with pytest.raises(azure.Refusal) as caught:
        asyncio.run(driver.head("k"))
    fault = driver.fault(caught.value, WHERE)
    assert type(fault) is kind
    assert status == 416 or f"HTTP {status} {code or 'Reason'}: why" in str(fault)
    assert "more" not in str(fault)
    assert kind is not TransientError or fault.after == 9.0


def test_driver_answers_below_300_are_no_errors():
    driver, _ = driver_of(Answer(299, Content_Length="1", Last_Modified=TIME, ETag="t"))
    assert asyncio.run(driver.head("k")).size == 1


def test_driver_fault_translates_errors_of_the_client():
    from azure.core.exceptions import AzureError, HttpResponseError, ServiceRequestError, ServiceResponseError

    def failed(status):
        error = HttpResponseError("token")
        error.status_code = status
        return error

    driver, _ = driver_of()
    for error, kind in (
        (ServiceRequestError("x", error=ConnectionResetError()), TransientError),
        (ServiceResponseError("x", error=ValueError()), StorageError),
        (ServiceRequestError("x"), TransientError),
        (AzureError("x"), StorageError),
        (failed(None), StorageError),
        (failed(499), StorageError),
        (failed(500), TransientError),
        (failed(429), TransientError),
        (failed(403), StorageError),
        (ConnectionResetError(), TransientError),
        (ValueError(), StorageError),
    ):
        fault = driver.fault(error, WHERE)
        assert (error, type(fault)) == (error, kind)
        assert "az://container/run/file" in str(fault)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"not xml", ""),
        (b"<E/>", ""),
        (b"<E><Message> a \nb</Message></E>", "a"),
        (b"<E><Message>a</Message><AuthenticationErrorDetail> d </AuthenticationErrorDetail></E>", "a d"),
        (b"<E><Message>a</Message><AuthenticationErrorDetail>the signature found</AuthenticationErrorDetail></E>", "a"),
        (b"<E><Message>a</Message><AuthenticationErrorDetail>%b</AuthenticationErrorDetail></E>" % (b"d" * 200), "a"),
        (
            b"<E><Message>a</Message><AuthenticationErrorDetail>%b</AuthenticationErrorDetail></E>" % (b"d" * 199),
            "a " + "d" * 199,
        ),
    ],
)
def test_read_message_shows_no_signed_text(body, text):
    assert azure.read_message(body) == text


def test_secrets_are_shown_in_no_form():
    def secrets(url="az://container/run", **options):
        return opened(url, account_name="account", **options).secrets()

    assert "the key" in secrets(account_key="the key")
    assert "client" in secrets(client_secret="client")
    assert {"the/key==", "s/g=n"} <= {
        *secrets(connection_string="AccountName=a; AccountKey =the/key==;SharedAccessSignature=s/g=n")
    }
    assert "a" not in secrets(connection_string="AccountName=a")
    assert {"?x=1&sig=a%2Fb%2Bc", "a%2Fb%2Bc", "a/b+c"} <= {*secrets(sas_token="?x=1&sig=a%2Fb%2Bc")}
    assert "held" in secrets(credential={"account_key": "held"})
    assert "text" in secrets(credential="text")
    assert "named" in secrets(credential=SimpleNamespace(named_key=SimpleNamespace(key="named")))
    assert "signature" in secrets(credential=SimpleNamespace(signature="signature"))
    given = {"account_key": "four", "client_secret": "longer", "sas_token": "abc"}
    found = azure._secrets(opened("az://container/run", account_name="a", **given)._given)
    assert found == ["longer", "four"]


@pytest.mark.parametrize(
    ("anon", "signed"), [("1", False), ("F", True), ("false", True), ("None", True), (True, False)]
)
def test_anon_is_a_truth_value(anon, signed, monkeypatch):
    for name in ("ACCOUNT_KEY", "CONNECTION_STRING", "SAS_TOKEN", "CLIENT_ID"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}", raising=False)
    monkeypatch.setattr("azure.identity.aio.DefaultAzureCredential", lambda: "made")
    found = opened("az://container/run", account_name="account", anon=anon)._credential()
    assert found == (("made", "made") if signed else (None, None))
    given = opened("az://container/run", account_name="account", anon=anon, sas_token="sig=x")
    assert given._credential() == (None, None)


def test_connect_gives_the_address_of_the_account(monkeypatch):
    async def container(storage):
        return (await storage.driver())._container, (await storage.driver())._signature

    def at(url="az://container/run", **options):
        return use(url, {"account_name": "account", "anon": True, **options}, container)

    assert at() == ("https://account.blob.core.windows.net/container", "")
    assert at(account_host="127.0.0.1:1/account") == ("https://127.0.0.1:1/account/container", "")
    assert at(sas_token="?sig=x") == ("https://account.blob.core.windows.net/container", "sig=x")
    assert at(sas_token="sig=x", account_key="a2V5") == ("https://account.blob.core.windows.net/container", "")
    text = "DefaultEndpointsProtocol=https;AccountName=account;AccountKey=a2V5;EndpointSuffix=core.windows.net"
    assert at(connection_string=text) == ("https://account.blob.core.windows.net/container", "")
    with pytest.raises(StorageError, match="account must be account as in connection_string, got other"):
        at(connection_string=text, account_name="other")
