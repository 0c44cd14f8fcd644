"""Azure Blob Storage passes the contract, against Azurite; and bears what goes wrong on the way."""

import asyncio
import logging
import traceback
from base64 import b64encode

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.errors import BucketNotFoundError, StorageConflictError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, URL, Context
from snapshot.plugins.network import retry
from snapshot.plugins.objectstore import azure
from snapshot.plugins.objectstore.azure import AzureStorage
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, pattern, store
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
