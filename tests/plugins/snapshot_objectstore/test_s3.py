"""S3 passes the contract: by both engines, against a server that is quick and one that checks everything."""

import asyncio
import base64
import datetime
import socket
import sys
import time
import traceback
import zlib
from types import SimpleNamespace

import pytest
import torch
from botocore import exceptions as failures
from botocore.exceptions import ClientError

from snapshot import Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.errors import (
    BucketNotFoundError,
    CorruptSnapshotError,
    MissingExtraError,
    StorageConflictError,
    StorageNotFoundError,
)
from snapshot.io.bodies import BufferSink, BytesSink, RequestBody
from snapshot.io.budget import MemoryBudget
from snapshot.io.registry import open_storage
from snapshot.io.retry import TransientError
from snapshot.io.storage import ABSENT, ANYTHING, URL, Context
from snapshot.save import transaction
from snapshot.testing import StorageTests
from snapshot.testing.conformance import BulkFileTests, fetch, pattern, store
from snapshot_objectstore.s3 import S3Storage
from tests.helpers.fault_proxy import FaultProxy
from tests.plugins.snapshot_objectstore.s3_options import options

MiB = 1 << 20
ENGINES = [pytest.param("s3fs", id="s3fs"), pytest.param(None, id="obstore")]
"""Who reads bulk bytes: obstore, unless the client that s3fs makes is asked for."""


class TestObstore(BulkFileTests):
    """obstore reads ranges; all else is s3fs's client's here, too."""

    capabilities = S3Storage.capabilities

    @pytest.fixture
    def url(self, moto):
        return f"s3://{moto.bucket()}/some/folder"

    @pytest.fixture
    def options(self, moto):
        return options(moto)


class TestWeed(StorageTests):
    # SeaweedFS shows a folder for a while after its last file is gone
    test_delete_removes_what_is_there_and_minds_nothing_else = None

    capabilities = S3Storage.capabilities
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestAzure

    @pytest.fixture
    def url(self, weed):
        return f"s3://{weed.bucket()}/some/folder"

    @pytest.fixture
    def options(self, weed):
        return options(weed, engine="s3fs")


def state(fill=None, rows=3000):
    tensor = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    small = {f"t{i}": torch.full((10,), float(i)) for i in range(50)}
    made = {"big": StateDict(x=tensor), "small": StateDict(**small, text="é" * 1000)}
    if fill is not None:
        for part in made.values():
            for value in part.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(fill)
    return made


def assert_same(a, b):
    for key, part in a.items():
        assert part.keys() == b[key].keys()
        for name, value in part.items():
            same = torch.equal(value, b[key][name]) if isinstance(value, torch.Tensor) else value == b[key][name]
            assert same, (key, name)


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_take_and_restore(moto, engine):
    url, given = f"s3://{moto.bucket()}/run/step-1", options(moto, engine=engine)
    Snapshot.take(url, state(), storage_options=given)
    live = state(fill=0)
    assert not Snapshot(url, storage_options=given).restore(live).lines
    assert_same(live, state())
    snapshot = Snapshot(url, storage_options=given)
    assert snapshot.verify()
    assert torch.equal(snapshot.read_object("0/big/x", box=[7]), state()["big"]["x"][7])
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state(), storage_options=given)
    Snapshot.async_take(url, state(fill=5), storage_options=given, overwrite=True).wait()
    Snapshot(url, storage_options=given).restore(live)
    assert_same(live, state(fill=5))
    storage = open_storage(URL.parse(url), given)
    assert len(_on_loop(storage, "list")) == 3  # the manifest and two files: what was replaced is gone
    snapshot.delete()
    assert not snapshot.exists()
    assert _on_loop(open_storage(URL.parse(url), given), "list") == []


def _on_loop(storage, verb, *arguments):
    async def work():
        try:
            return await getattr(storage, verb)(*arguments)
        finally:
            await storage.close()

    return asyncio.run(work())


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_row_of_a_large_snapshot_costs_few_requests_and_bytes(moto, engine):
    url = f"s3://{moto.bucket()}/s"
    Snapshot.take(url, state(rows=12_000), storage_options=options(moto))
    with FaultProxy(moto.url) as proxy:
        snapshot = Snapshot(url, storage_options=options(moto, engine=engine) | {"endpoint_url": proxy.url})
        snapshot.get_manifest()
        before = proxy.count()
        row = snapshot.read_object("0/big/x", box=[6_000])
        asked = [each for each in proxy.requests[before:] if "snapshot_metadata" not in each.path]
    assert torch.equal(row, state(rows=12_000)["big"]["x"][6_000])
    assert len(asked) <= 4, asked
    assert sum(each.response_bytes for each in asked) < MiB


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_long_files_are_written_and_read_in_parts(moto, engine):
    url = f"s3://{moto.bucket()}/s"
    with FaultProxy(moto.url) as proxy:
        given = options(moto, engine=engine, part_bytes=5 * MiB, endpoint_url=proxy.url)
        Snapshot.take(url, state(rows=10_000), storage_options=given)
        sent = [each for each in proxy.requests if each.method == "PUT" and "partNumber=" in each.path]
        assert len(sent) >= 8
        assert max(each.request_bytes for each in sent) == 5 * MiB
        live = state(fill=0, rows=10_000)
        proxy.clear()
        Snapshot(url, storage_options=given).restore(live)
        read = [each for each in proxy.requests if each.method == "GET" and "range" in each.headers]
        assert len(read) >= 8
        assert proxy.connections < 60
    assert_same(live, state(rows=10_000))


@pytest.mark.parametrize("cancelled", [False, True])
def test_s3_abandoned_upload_leaves_no_parts(weed, cancelled):
    bucket = weed.bucket()
    given = options(weed, part_bytes=5 * MiB)

    async def work():
        storage = open_storage(URL.parse(f"s3://{bucket}/s"), given, Context())
        writer = await storage.create("data/file", 17 * MiB)
        data = memoryview(bytearray(5 * MiB))
        writes = [asyncio.create_task(writer.write(at * 5 * MiB, [data])) for at in range(3)]
        if cancelled:
            await asyncio.sleep(0.02)
            for write in writes:
                write.cancel()
        await asyncio.gather(*writes, return_exceptions=True)
        await writer.abort()
        assert await storage.list() == []
        driver = await storage.driver()
        assert await driver.uploads("") == []
        await storage.close()

    asyncio.run(work())


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_parts_keep_their_order_if_some_wait_for_memory(moto, engine):
    """Parts of many buffers are joined, where the client wants that, and wait for the memory; others need not."""
    data = pattern(43 * MiB)

    async def work():
        memory = MemoryBudget(16 * MiB)
        given = options(moto, engine=engine)
        storage = open_storage(URL.parse(f"s3://{moto.bucket()}/s"), given, Context(memory=memory))
        writer = await storage.create("file", len(data))
        writes = []
        for number, begin in enumerate(range(0, len(data), 5 * MiB)):
            part = memoryview(data)[begin : begin + 5 * MiB]
            step = len(part) if number % 3 else 10_000
            buffers = [part[at : at + step] for at in range(0, len(part), step)]
            writes.append(asyncio.ensure_future(writer.write(begin, buffers)))
        await asyncio.gather(*writes)
        await writer.finish()
        assert await fetch(storage, "file", 0, [len(data)]) == data
        assert memory.statistics().used == 0
        await storage.close()

    asyncio.run(work())


def test_s3_engine_option_for_uploads_is_deprecated(moto):
    url, given = f"s3://{moto.bucket()}/s", options(moto, engine="obstore", part_bytes=5 * MiB)
    with FaultProxy(moto.url) as proxy:
        with pytest.warns(FutureWarning, match="engine='obstore'"):
            Snapshot.take(url, state(), storage_options=given | {"endpoint_url": proxy.url})
        sent = [each.headers["user-agent"] for each in proxy.requests if "partNumber=" in each.path]
        assert sent
        assert all("botocore" in each.lower() for each in sent)
    live = state(fill=0)
    Snapshot(url, storage_options=given).restore(live)  # reading by it is what it is for: no warning
    assert_same(live, state())


def test_s3_endpoint_may_be_set_by_the_environment(moto, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    url, given = f"s3://{moto.bucket()}/s", options(moto, part_bytes=5 * MiB)
    del given["endpoint_url"]
    Snapshot.take(url, state(), storage_options=given)
    live = state(fill=0)
    Snapshot(url, storage_options=given).restore(live)
    assert_same(live, state())


def test_s3_delete_keeps_uploads_of_others(moto):
    """moto's uploads look as if they were years old."""
    bucket = moto.bucket()

    async def work():
        storage = open_storage(URL.parse(f"s3://{bucket}"), options(moto, engine="s3fs"), Context())
        driver = await storage.driver()
        for key in ("run/data/video.bin", "run/other/thing", "data/film"):
            await driver.begin(key, 1)
        for url in (f"s3://{bucket}/run", f"s3://{bucket}"):
            await asyncio.to_thread(_take_and_delete, url, options(moto))
        assert len(await driver.uploads("")) == 3
        await storage.close()

    asyncio.run(work())


def _take_and_delete(url, given):
    Snapshot.take(url, {"s": StateDict(x=1)}, storage_options=given).delete()


def test_s3_sweep_aborts_uploads_of_a_killed_process(weed):
    bucket = weed.bucket()

    async def work():
        storage = open_storage(URL.parse(f"s3://{bucket}/s"), options(weed, engine="s3fs"), Context())
        writer = await storage.create("data/file", 11 * MiB)
        await writer.write(0, [bytes(6 * MiB)])  # and nobody finishes or aborts it
        assert list(await storage.sweep("data/", 3600)) == []
        assert list(await storage.sweep("other/", -5)) == []
        assert list(await storage.sweep("data/", -5)) == ["data/file"]
        assert list(await storage.sweep("data/", -5)) == []
        await storage.close()

    asyncio.run(work())


def test_s3_two_takes_at_once_have_one_winner(moto):
    url = f"s3://{moto.bucket()}/s"
    first = Snapshot.async_take(url, state(fill=1), storage_options=options(moto))
    second = Snapshot.async_take(url, state(fill=2), storage_options=options(moto))
    outcomes = []
    for pending in (first, second):
        try:
            pending.wait()
            outcomes.append("committed")
        except SnapshotExistsError:
            outcomes.append("refused")
    assert sorted(outcomes) == ["committed", "refused"]
    live = state(fill=0)
    Snapshot(url, storage_options=options(moto)).restore(live)
    assert_same(live, state(fill=1.0 if outcomes[0] == "committed" else 2.0))


def test_s3_part_with_a_wrong_checksum_is_refused_by_the_server_and_resent(weed):
    """And the part is sent again."""
    bucket = weed.bucket()
    with FaultProxy(weed.url) as proxy:
        given = options(weed, engine="s3fs", endpoint_url=proxy.url, part_bytes=5 * MiB, deadline=10)
        flipped = proxy.fault(method="PUT", path="*partNumber=2*", flip=100_000, side="request")
        data = pattern(12 * MiB)

        async def work():
            storage = open_storage(URL.parse(f"s3://{bucket}/s"), given)
            await store(storage, "data/file", data, part=5 * MiB)
            assert await fetch(storage, "data/file", 0, [len(data)]) == data
            await storage.close()

        asyncio.run(work())
        assert flipped.hits == 1


def test_s3_forked_child_creates_its_own_clients(moto, warm):
    url, given = f"s3://{moto.bucket()}/s", options(moto)
    script = f"""
import os, torch, warnings
warnings.simplefilter("error")
from snapshot import Snapshot, StateDict
url, given = {url!r}, {given!r}
Snapshot.take(url, {{"s": StateDict(x=torch.arange(3_000_000))}}, storage_options=given)
child = os.fork()
if child == 0:
    row = Snapshot(url, storage_options=given).read_object("0/s/x")
    os._exit(0 if torch.equal(row, torch.arange(3_000_000)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(Snapshot(url, storage_options=given).read_object("0/s/x"), torch.arange(3_000_000))
"""
    assert warm.run(script) == ""


def test_s3_clients_are_shared_by_operations(weed):
    url = f"s3://{weed.bucket()}/s"
    with FaultProxy(weed.url) as proxy:
        given = options(weed, engine="s3fs", endpoint_url=proxy.url)
        Snapshot.take(url, state(), storage_options=given)
        for _ in range(5):
            assert Snapshot(url, storage_options=given).exists()
        assert proxy.connections < 15
        assert proxy.open_connections


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_s3_wrong_keys_fail_at_once_and_are_not_shown(weed, engine, wrong):
    url = f"s3://{weed.bucket()}/s"
    given = options(weed, engine=engine) | {wrong: "a-very-wrong-value"}
    with pytest.raises(StorageError) as caught:
        Snapshot.take(url, state(), storage_options=given)
    assert url in str(caught.value)
    assert ("InvalidAccessKeyId" if wrong == "key" else "SignatureDoesNotMatch") in str(caught.value)
    if wrong == "secret":
        assert "a-very-wrong-value" not in "".join(_shown(caught.value))


def _shown(error):
    return [*traceback.format_exception(error), repr(error)]


def test_s3_missing_bucket_is_named_at_once(weed):
    with pytest.raises(StorageError, match="NoSuchBucket") as caught:
        Snapshot.take("s3://no-such-bucket-here/s", state(), storage_options=options(weed))
    assert not isinstance(caught.value, StorageNotFoundError)


@pytest.mark.parametrize("engine", ENGINES)
def test_s3_missing_object_may_look_forbidden(moto, engine):
    url = f"s3://{moto.bucket()}/s"
    with FaultProxy(moto.url) as proxy:
        given = options(moto, engine=engine, endpoint_url=proxy.url)
        proxy.fault(status=403, times=None)
        with pytest.raises(StorageError, match="ListBucket"):
            Snapshot(url, storage_options=given).exists()


def test_s3_keys_may_be_in_the_url(weed):
    given = options(weed)
    key, secret = given.pop("key"), given.pop("secret")
    url = f"s3://{key}:{secret}@{weed.bucket()}/s"
    snapshot = Snapshot.take(url, state(), storage_options=given)
    assert secret not in repr(snapshot)
    assert snapshot.exists()


def test_s3_at_sign_in_a_path_belongs_to_the_path(moto):
    bucket = moto.bucket()
    url = f"s3://{bucket}/run@2024/step@1"
    snapshot = Snapshot.take(url, state(), storage_options=options(moto))
    assert snapshot.verify()
    assert snapshot.path == url
    assert str(open_storage(URL.parse(url), options(moto)).url) == url


@pytest.mark.parametrize(
    "path", ["s3://bucket//x", "s3://bucket/a//b", "s3://bucket/a/../b", "s3://bucket/./a", "s3:///a"]
)
def test_s3_ambiguous_paths_are_refused(path):
    with pytest.raises(ValueError, match="s3://"):
        Snapshot.take(path, state())


@pytest.mark.parametrize(
    ("given", "region", "endpoint"),
    [
        ({}, "eu-central-1", "https://bucket.s3.eu-central-1.amazonaws.com/"),
        ({"endpoint_url": "https://vpce-1.s3.eu-west-1.vpce.amazonaws.com"}, "eu-west-1", None),
        (
            {"config_kwargs": {"use_dualstack_endpoint": True}},
            "eu-west-1",
            "https://s3.dualstack.eu-west-1.amazonaws.com/bucket/",
        ),
        ({}, "cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn/bucket/"),
    ],
)
def test_s3_obstore_uses_the_region_and_endpoint_of_the_client(given, region, endpoint):
    import obstore

    async def work():
        options = {"key": "aaaaaaaa", "secret": "bbbbbbbb", "client_kwargs": {"region_name": region}, **given}
        storage = open_storage(URL.parse("s3://bucket/s"), options)
        driver = await storage.driver()
        signed = await obstore.sign_async(driver.store, "GET", "key", datetime.timedelta(minutes=1))
        await storage.close()
        return signed

    assert asyncio.run(work()).startswith(endpoint or f"{given['endpoint_url']}/bucket/")


def test_s3_server_side_encryption_is_requested(moto):
    url = f"s3://{moto.bucket()}/s"
    with FaultProxy(moto.url) as proxy:
        given = options(moto, endpoint_url=proxy.url, s3_additional_kwargs={"ServerSideEncryption": "AES256"})
        Snapshot.take(url, state(), storage_options=given)
        made = [each for each in proxy.requests if each.method == "PUT" and "partNumber" not in each.path]
        made += [each for each in proxy.requests if each.method == "POST" and each.path.endswith("?uploads")]
        assert len(made) >= 3
        assert {each.headers.get("x-amz-server-side-encryption") for each in made} == {"AES256"}


def test_s3_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules, "snapshot_objectstore.s3", raising=False)
    with pytest.raises(MissingExtraError, match="install the extra 's3'"):
        Snapshot.take("s3://bucket/s", state())


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"part_bytes": 1}, "part_bytes"),
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0}, "timeout"),
        ({"deadline": "soon"}, "deadline"),
        ({"engine": "boto"}, "engine"),
        ({"engine": "obstore", "s3_additional_kwargs": {"ServerSideEncryption": "AES256"}}, "s3fs's client"),
        ({"part_bytes": "8M"}, "part_bytes"),
        ({"concurrency": 2.5}, "concurrency"),
        ({"acces_key": "x"}, "acces_key"),
    ],
)
def test_s3_storage_options_that_are_invalid_are_refused(wrong, match):
    with pytest.raises(ValueError, match=match):
        Snapshot.take("s3://bucket/s", state(), storage_options=wrong)


def test_s3_conditional_put_of_another_job_is_a_conflict(weed):
    """What the commit relies on, on a server that checks it."""

    async def work():
        storage = open_storage(URL.parse(f"s3://{weed.bucket()}/s"), options(weed))
        token = await storage.put("file", b"first", expect=ABSENT)
        with pytest.raises(StorageConflictError):
            await storage.put("file", b"second", expect=ABSENT)
        await storage.put("file", b"second", expect=token)
        with pytest.raises(StorageConflictError):
            await storage.put("file", b"third", expect=token)
        assert await storage.get("file") == b"second"
        await storage.close()

    asyncio.run(work())


@pytest.mark.parametrize("days", [-2, 2])
def test_s3_age_of_a_claim_uses_the_clock_of_the_server(moto, monkeypatch, days):
    """A host whose clock is two days ahead leaves the files of a running take alone."""
    url, now = URL.parse(f"s3://{moto.bucket()}/s"), time.time
    save_id = "0123456789ab"

    async def work():
        storage = open_storage(url, options(moto, engine="s3fs"), Context())
        await storage.put(f".take-{save_id}", b"claim", expect=ABSENT)
        await storage.put(f"data/{save_id}-0-0.bin", b"data", expect=ABSENT)
        monkeypatch.setattr(time, "time", lambda: now() + days * 24 * 3600)
        assert abs((await storage.stat(f".take-{save_id}")).age) < 600
        assert await transaction.is_busy(storage)
        assert await transaction.find_leftovers(storage) == []
        assert await transaction.find_leftovers(storage, -600) != []
        await (await storage.driver()).begin("data/x", 1)
        assert list(await storage.sweep("", 3600)) == []
        await storage.close()

    asyncio.run(work())


# Requests of the driver, with a client in memory


class Answer:
    """The body of a response, in chunks."""

    def __init__(self, *chunks):
        self.chunks, self.ended, self.content = list(chunks), "", self
        self.raw_stream = self

    async def readany(self):
        return self.chunks.pop(0) if self.chunks else b""

    def at_eof(self):
        return not self.chunks

    def release(self):
        self.ended += "released"

    def close(self):
        self.ended += "closed"


class Client:
    """A client whose calls are recorded and get the next answer of their name."""

    def __init__(self, **answers):
        self.answers, self.calls = {name: list(each) for name, each in answers.items()}, []
        self._request_signer = self

    def __getattr__(self, name):
        async def call(**arguments):
            self.calls.append((name, arguments))
            found = self.answers[name].pop(0)
            if isinstance(found, Exception):
                raise found
            return {"ResponseMetadata": {}} | found

        return call


class Creator:
    """What s3fs has of a client."""

    _s3 = "client"

    def __init__(self):
        self._s3creator, self.ended = self, 0

    def _get_s3_method_kwargs(self, method, **arguments):
        return arguments | {"RequestPayer": "me"}

    async def __aexit__(self, *_):
        self.ended += 1


def driver_of(client, checksum=True):
    from snapshot_objectstore.s3 import S3Driver

    return S3Driver(Creator(), client, "bucket", checksum)


def asked(client):
    """Return the calls without what all have."""
    assert all(given.pop("Bucket") == "bucket" and given.pop("RequestPayer") == "me" for _, given in client.calls)
    calls, client.calls = client.calls, []
    return calls


def refusal(code, status=400, operation="GetObject", message="why", **headers):
    meta = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": meta}, operation)


WHEN = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
WHERE = URL.parse("s3://bucket/run/file")


def test_driver_head_gives_size_time_and_token():
    told = {"HTTPHeaders": {"date": "Thu, 01 Jan 2026 00:01:40 GMT"}}
    head = {"ContentLength": 7, "LastModified": WHEN, "ETag": '"t"', "ResponseMetadata": told}
    client = Client(head_object=[head])
    driver = driver_of(client)
    found = asyncio.run(driver.head("run/file"))
    assert (found.size, found.mtime, found.token) == (7, WHEN.timestamp(), '"t"')
    assert 100 <= found.age < 3700, "by the clock of the server"
    assert asked(client) == [("head_object", {"Key": "run/file"})]
    asyncio.run(driver.close())
    assert (driver._fs.ended, driver._fs._s3) == (1, None)


@pytest.mark.parametrize(
    ("status", "seen", "reason"),
    [
        (404, False, True),
        (404, True, False),
        (403, False, True),
        (403, True, True),
        (400, True, True),
        (500, False, False),
    ],
)
def test_driver_head_asks_for_the_reason_of_an_error(status, seen, reason):
    """A missing bucket must not look like a missing key."""
    client = Client(
        head_object=[refusal(str(status), status, "HeadObject")],
        get_object=[refusal("NoSuchBucket", 404)],
        list_objects_v2=[{}],
    )
    driver = driver_of(client)

    async def work():
        if seen:
            await driver.list("run/", True, None)
        await driver.head("run/file")

    with pytest.raises(ClientError, match="NoSuchBucket" if reason else str(status)):
        asyncio.run(work())
    more = [("get_object", {"Key": "run/file", "Range": "bytes=0-0"})] if reason else []
    assert asked(client)[seen:] == [("head_object", {"Key": "run/file"}), *more]


def test_driver_head_raises_its_own_error_if_the_object_can_be_read():
    """And a missing key shows that there is a bucket."""
    answer = Answer()
    client = Client(
        head_object=[
            refusal("403", 403, "HeadObject"),
            refusal("404", 404, "HeadObject"),
            refusal("404", 404, "HeadObject"),
        ],
        get_object=[{"Body": answer}, refusal("NoSuchKey", 404)],
    )
    driver = driver_of(client)
    with pytest.raises(ClientError, match="403"):
        asyncio.run(driver.head("run/file"))
    assert answer.ended == "closed"
    driver._bucket_seen = -float("inf")
    with pytest.raises(ClientError, match="NoSuchKey"):
        asyncio.run(driver.head("run/file"))
    with pytest.raises(ClientError, match="404"):
        asyncio.run(driver.head("run/file"))
    assert [name for name, _ in client.calls] == ["head_object", "get_object"] * 2 + ["head_object"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_driver_read_asks_for_a_range_in_a_version(wrapped):
    first, second, third = Answer(b"45", b"678"), Answer(b"0123", b"45"), Answer(b"45")
    bodies = [SimpleNamespace(__wrapped__=each) if wrapped else each for each in (first, second, third)]
    client = Client(
        get_object=[
            {"Body": bodies[0], "ContentRange": "bytes 4-8/10", "ContentLength": 5, "ETag": "t"},
            {"Body": bodies[1], "ContentLength": 6, "ETag": "t"},
            {"Body": bodies[2], "ContentRange": "bytes 4-5/10", "ContentLength": 5, "ETag": "new"},
        ]
    )
    driver, held = driver_of(client), bytearray(4)
    asyncio.run(driver.read("k", BufferSink(WHERE, 4, [held], "t")))
    assert held == b"4567"
    sink = BytesSink(WHERE, None)
    asyncio.run(driver.read("k", sink))
    assert (sink.data, sink.token, sink.end) == (b"012345", "t", 6)
    with pytest.raises(StorageConflictError):
        asyncio.run(driver.read("k", BufferSink(WHERE, 4, [held], "t")))
    assert [first.ended, second.ended, third.ended] == ["released", "released", "closed"]
    assert asked(client) == [
        ("get_object", {"Key": "k", "Range": "bytes=4-7", "IfMatch": "t"}),
        ("get_object", {"Key": "k"}),
        ("get_object", {"Key": "k", "Range": "bytes=4-7", "IfMatch": "t"}),
    ]


def test_driver_list_gives_keys_folders_and_the_next_page():
    page = {
        "Contents": [{"Key": "a"}, {"Key": "b"}],
        "CommonPrefixes": [{"Prefix": "c/"}],
        "NextContinuationToken": "n",
    }
    client = Client(list_objects_v2=[page, {}])
    driver = driver_of(client)
    found = asyncio.run(driver.list("p", False, None))
    assert (found.keys, found.folders, found.following) == (["a", "b"], ["c/"], "n")
    found = asyncio.run(driver.list("p", True, "n"))
    assert (found.keys, found.folders, found.following) == ([], [], None)
    assert asked(client) == [
        ("list_objects_v2", {"Prefix": "p", "Delimiter": "/"}),
        ("list_objects_v2", {"Prefix": "p", "ContinuationToken": "n"}),
    ]


@pytest.mark.parametrize("checksum", [False, True])
def test_driver_uploads_send_conditions_and_checksums(checksum):
    sent = {"ChecksumCRC32": base64.b64encode(zlib.crc32(b"abc").to_bytes(4, "big")).decode()} if checksum else {}
    client = Client(
        put_object=[{"ETag": "t"}] * 3,
        create_multipart_upload=[{"UploadId": "u"}],
        upload_part=[{"ETag": "p"}],
        complete_multipart_upload=[{}],
        copy_object=[{}],
        upload_part_copy=[{"CopyPartResult": {"ETag": "p", **sent}}],
    )
    driver, body = driver_of(client, checksum), RequestBody([b"ab", b"c"])

    async def work():
        assert [await driver.put("k", body, expect) for expect in (ANYTHING, ABSENT, "old")] == ["t"] * 3
        assert await driver.begin("k", 9) == "u"
        tag = await driver.part("k", "u", 2, 3, body, last=False)
        assert tag == " ".join(["p", *sent.values()])
        await driver.complete("k", "u", {1: "q", 2: tag})
        await driver.copy("s", "v", "k", None)
        assert await driver.copy_part("k", "u", 2, "s", "v", begin=5, end=9) == tag

    asyncio.run(work())
    version = {"CopySource": {"Bucket": "bucket", "Key": "s"}, "CopySourceIfMatch": "v"}
    assert asked(client) == [
        ("put_object", {"Key": "k", "Body": body, **sent}),
        ("put_object", {"Key": "k", "Body": body, "IfNoneMatch": "*", **sent}),
        ("put_object", {"Key": "k", "Body": body, "IfMatch": "old", **sent}),
        ("create_multipart_upload", {"Key": "k"} | ({"ChecksumAlgorithm": "CRC32"} if checksum else {})),
        ("upload_part", {"Key": "k", "UploadId": "u", "PartNumber": 2, "Body": body, **sent}),
        ("complete_multipart_upload", {"Key": "k", "UploadId": "u", "MultipartUpload": {
            "Parts": [{"PartNumber": 1, "ETag": "q"}, {"PartNumber": 2, "ETag": "p", **sent}]}}),
        ("copy_object", {"Key": "k", **version}),
        ("upload_part_copy", {
            "Key": "k", "UploadId": "u", "PartNumber": 2, "CopySourceRange": "bytes=5-8", **version}),
    ]  # fmt: skip


def test_driver_lists_unfinished_uploads_and_parts_of_all_pages():
    def upload(key, name):
        return {"Key": key, "UploadId": name, "Initiated": WHEN}

    client = Client(
        list_multipart_uploads=[
            {"Uploads": [upload("run/a", "1"), upload("ru", "2")], "IsTruncated": True, "NextKeyMarker": "k"},
            {"IsTruncated": True, "NextKeyMarker": "l", "NextUploadIdMarker": "m"},
            {"Uploads": [upload("run/b", "3")]},
        ],
        list_parts=[
            {
                "Parts": [{"PartNumber": 1, "ETag": "a", "ChecksumCRC32": "x"}],
                "IsTruncated": True,
                "NextPartNumberMarker": 1,
            },
            {"Parts": [{"PartNumber": 3, "ETag": "b"}]},
        ]
        * 2,
    )
    found = asyncio.run(driver_of(client).uploads("run"))
    assert found == [("run/a", "1", WHEN.timestamp()), ("run/b", "3", WHEN.timestamp())]
    assert asked(client) == [
        ("list_multipart_uploads", {"Prefix": "run"}),
        ("list_multipart_uploads", {"Prefix": "run", "KeyMarker": "k", "UploadIdMarker": ""}),
        ("list_multipart_uploads", {"Prefix": "run", "KeyMarker": "l", "UploadIdMarker": "m"}),
    ]
    assert asyncio.run(driver_of(client).parts("k", "u")) == {1: "a x", 3: "b"}
    assert asked(client) == [
        ("list_parts", {"Key": "k", "UploadId": "u"}),
        ("list_parts", {"Key": "k", "UploadId": "u", "PartNumberMarker": 1}),
    ]
    assert asyncio.run(driver_of(client, checksum=False).parts("k", "u")) == {1: "a", 3: "b"}


@pytest.mark.parametrize(
    ("tag", "checksum", "same"),
    [
        ('"900150983cd24fb0d6963f7d28e17f72" crc', True, True),
        ('"900150983cd24fb0d6963f7d28e17f72"', True, False),
        ('"900150983cd24fb0d6963f7d28e17f72"', False, True),
        ('"900150983cd24fb0d6963f7d28e17f73" crc', True, False),
    ],
)
def test_driver_is_part_compares_the_md5(tag, checksum, same):
    assert driver_of(Client(), checksum).is_part(tag, RequestBody([b"ab", b"c"])) is same


def test_driver_delete_raises_errors_but_for_missing_keys():
    def failed(code):
        return {"Errors": [{"Code": "NoSuchKey", "Key": "a"}, {"Code": code, "Key": "run/b", "Message": "why"}]}

    client = Client(delete_objects=[{}, failed("NoSuchKey"), failed("AccessDenied"), failed("SlowDown")])
    driver = driver_of(client)
    for _ in range(2):
        asyncio.run(driver.delete(["a", "run/b"]))
    assert asked(client) == [
        ("delete_objects", {"Delete": {"Objects": [{"Key": "a"}, {"Key": "run/b"}], "Quiet": True}})
    ] * 2  # fmt: skip
    for kind in (StorageError, TransientError):
        with pytest.raises(StorageError, match=r"s3://bucket/run/b: \w+: why") as caught:
            asyncio.run(driver.delete(["a", "run/b"]))
        assert type(caught.value) is kind


def test_driver_abandon_minds_no_missing_upload():
    client = Client(abort_multipart_upload=[{}, refusal("NoSuchUpload", 404), refusal("AccessDenied", 403)])
    driver = driver_of(client)
    for _ in range(2):
        asyncio.run(driver.abandon("k", "u"))
    assert asked(client) == [("abort_multipart_upload", {"Key": "k", "UploadId": "u"})] * 2
    with pytest.raises(ClientError, match="AccessDenied"):
        asyncio.run(driver.abandon("k", "u"))


@pytest.mark.parametrize(
    ("code", "status", "kind", "refused", "text"),
    [
        ("NoSuchBucket", 404, BucketNotFoundError, None, "NoSuchBucket: why (HTTP 404)"),
        ("NotImplemented", 501, StorageError, None, "NotImplemented"),
        ("SlowDown", 503, TransientError, True, "SlowDown"),
        ("InternalError", 500, TransientError, False, "InternalError"),
        ("Whatever", 500, TransientError, False, "HTTP 500"),
        ("Whatever", 499, StorageError, None, "HTTP 499"),
        ("Whatever", 429, TransientError, True, "HTTP 429"),
        ("BadDigest", 400, TransientError, True, "BadDigest"),
        ("ConditionalRequestConflict", 409, TransientError, True, "Conditional"),
        ("NoSuchKey", 404, StorageNotFoundError, None, "NoSuchKey"),
        ("Whatever", 404, StorageNotFoundError, None, "HTTP 404"),
        ("NoSuchUpload", 400, StorageNotFoundError, None, "NoSuchUpload"),
        ("PreconditionFailed", 412, StorageConflictError, None, "PreconditionFailed"),
        ("Whatever", 409, StorageConflictError, None, "HTTP 409"),
        ("InvalidRange", 416, CorruptSnapshotError, None, "s3://bucket/run/file"),
        ("AccessDenied", 403, StorageError, None, "s3:ListBucket"),
        ("403", 403, StorageError, None, "s3:ListBucket"),
        ("InvalidAccessKeyId", 403, StorageError, None, "HTTP 403)"),
        ("PermanentRedirect", 301, StorageError, None, "region_name"),
        ("Redirect", 307, StorageError, None, "region_name"),
        ("Moved", 302, StorageError, None, "HTTP 302)"),
        ("ExpiredToken", 400, StorageError, None, "ExpiredToken"),
    ],
)
def test_driver_fault_translates_a_response(code, status, kind, refused, text):
    fault = driver_of(SimpleNamespace(_request_signer=None)).fault(refusal(code, status), WHERE)
    assert type(fault) is kind
    assert text in str(fault)
    assert "s3://bucket/run/file" in str(fault)
    assert getattr(fault, "refused", None) is refused
    if refused is not None:
        assert fault.after is None
        headers = {"retry-after": "7"}
        assert driver_of(None).fault(refusal(code, status, **headers), WHERE).after == 7.0
        headers = {"retry-after": "soon"}
        assert driver_of(None).fault(refusal(code, status, **headers), WHERE).after is None


def test_driver_fault_speaks_of_the_permission_to_list_only_for_reads():
    assert "ListBucket" in str(driver_of(None).fault(refusal("AccessDenied", 403, "HeadObject"), WHERE))
    assert "ListBucket" not in str(driver_of(None).fault(refusal("AccessDenied", 403, "PutObject"), WHERE))
    bare = ClientError({}, "PutObject")
    assert type(driver_of(None).fault(bare, WHERE)) is StorageError


def test_driver_fault_renews_credentials_that_expired():
    held = SimpleNamespace(_expiry_time=None)
    fault = driver_of(SimpleNamespace(_request_signer=SimpleNamespace(_credentials=held))).fault(
        refusal("ExpiredToken", 400), WHERE
    )
    assert type(fault) is TransientError
    assert fault.refused
    assert held._expiry_time.tzinfo is datetime.UTC


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (failures.ConnectionClosedError(endpoint_url="x"), TransientError),
        (failures.ReadTimeoutError(endpoint_url="x"), TransientError),
        (failures.ConnectTimeoutError(endpoint_url="x"), TransientError),
        (failures.SSLError(endpoint_url="x", error="y"), StorageError),
        (failures.ProxyConnectionError(proxy_url="x"), StorageError),
        (failures.HTTPClientError(error=ConnectionResetError()), TransientError),
        (failures.HTTPClientError(error=ValueError()), StorageError),
        (
            failures.EndpointConnectionError(endpoint_url="x", error=socket.gaierror(socket.EAI_NONAME, "x")),
            TransientError,
        ),
        (ConnectionResetError(), TransientError),
        (EOFError(), TransientError),
        (RecursionError(), StorageError),
        (KeyError("x"), StorageError),
        (failures.NoCredentialsError(), StorageError),
    ],
    ids=lambda each: getattr(each, "__name__", None) or type(each).__name__,
)
def test_driver_fault_translates_the_state_of_the_connection(error, kind):
    fault = driver_of(None).fault(error, WHERE)
    assert type(fault) is kind
    assert str(fault).startswith("s3://bucket/run/file: ")
    assert isinstance(error, RecursionError) == ("redirects" in str(fault))


def test_driver_fault_of_a_host_that_does_not_exist_is_final():
    error = failures.EndpointConnectionError(endpoint_url="x")
    error.__cause__ = socket.gaierror(socket.EAI_NONAME, "unknown")
    assert type(driver_of(None).fault(error, WHERE)) is StorageError


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"engine": "s3fs"}, False),
        ({"s3_additional_kwargs": {"StorageClass": "x"}}, False),
        ({"client_kwargs": {"verify": False}}, False),
        ({"config_kwargs": {"proxies": {}}}, False),
        ({"config_kwargs": {"client_cert": "x"}, "client_kwargs": {"region_name": "x"}}, False),
        ({"client_kwargs": {"region_name": "x"}}, True),
        ({"engine": "obstore"}, True),
    ],
)
def test_engine_is_obstore_unless_an_option_needs_the_client(options, expected):
    assert open_storage(URL.parse("s3://bucket/s"), options).reads_by_obstore is expected


def test_options_of_a_client_must_be_dicts():
    for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
        with pytest.raises(ValueError, match=f"{name} must be a dict"):
            open_storage(URL.parse("s3://bucket/s"), {name: "x"})
        open_storage(URL.parse("s3://bucket/s"), {name: None})


def test_secrets_are_those_of_keys_and_proxies():
    options = {
        "secret": "the secret", "token": "the token", "key": "shown", "config_kwargs": {"proxies": {"http": "http://u:word@p"}},
        "s3_additional_kwargs": {"SSECustomerKey": "sse", "SSECustomerKeyMD5": "md5", "StorageClass": "class"},
    }  # fmt: skip
    found = open_storage(URL.parse("s3://me:pass@bucket/s"), options).secrets()
    assert set(found) - {""} == {"the secret", "the token", "word", "sse", "md5", "pass"}


@pytest.mark.parametrize(
    ("text", "kind", "error"),
    [
        ("not found: NoSuchKey", StorageNotFoundError, "NotFoundError"),
        ("not found: NoSuchBucket", StorageError, "NotFoundError"),
        ("precondition", StorageConflictError, "PreconditionError"),
        ("returned non-partial response", StorageError, "GenericError"),
        ("status 416 Range Not Satisfiable", CorruptSnapshotError, "GenericError"),
        ("status 403 Forbidden", StorageError, "GenericError"),
        ("status 503 Slow", TransientError, "GenericError"),
        ("denied", StorageError, "PermissionDeniedError"),
    ],
)
def test_obstore_faults_are_translated_by_their_texts(text, kind, error):
    from obstore import exceptions

    from snapshot_objectstore.s3 import ObstoreDriver

    made = []
    held = SimpleNamespace(_expiry_time=None)
    client = SimpleNamespace(_request_signer=SimpleNamespace(_credentials=held))
    driver = ObstoreDriver(Creator(), client, "bucket", True, lambda: made.append("store") or len(made))
    raised = getattr(exceptions, error)(f"{text}\nmore <Token-1>hidden</Token-1>\n\nDebug source: x")
    fault = driver.fault(raised, WHERE)
    assert type(fault) is kind
    assert "hidden" not in str(fault)
    assert "Debug" not in str(fault)
    assert driver.store == 1
    fault = driver.fault(exceptions.GenericError("ExpiredToken: x"), WHERE)
    assert type(fault) is TransientError
    assert fault.refused
    assert driver.store == 2, "obstore keeps the credentials that it has"
    assert type(driver.fault(EOFError(), WHERE)) is TransientError
    del held._expiry_time
    assert not getattr(driver.fault(exceptions.GenericError("ExpiredToken: x"), WHERE), "refused", False)
    assert driver.store == 2
