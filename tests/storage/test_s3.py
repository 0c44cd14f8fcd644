"""S3 passes the contract: by both engines, against a server that is quick and one that checks everything."""

import asyncio
import datetime
import sys
import time
import traceback

import pytest
import torch

from snapshot import Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.errors import MissingExtraError, StorageConflictError, StorageNotFoundError
from snapshot.io.budget import MemoryBudget
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, URL, Context
from snapshot.plugins.objectstore.s3 import S3Storage
from snapshot.save import transaction
from snapshot.testing import StorageTests
from snapshot.testing.conformance import BulkFileTests, fetch, pattern, store
from tests.helpers.fault_proxy import FaultProxy
from tests.storage.s3_options import options

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
    monkeypatch.delitem(sys.modules, "snapshot.plugins.objectstore.s3", raising=False)
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
