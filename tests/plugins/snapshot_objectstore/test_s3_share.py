"""Further names in S3: copies by the server, whole or in parts, and none that is left when one fails."""

import asyncio

import pytest

from snapshot.errors import StorageConflictError, StorageError, StorageNotFoundError
from snapshot.io.retry import RetryPolicy
from snapshot.io.storage import URL
from snapshot.testing.conformance import SharedFileTests, fetch, pattern, store
from snapshot_objectstore.s3 import S3Driver, S3Storage
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.storage_calls import use
from tests.plugins.snapshot_objectstore.s3_options import options

MiB = 1 << 20


class TestMoto(SharedFileTests):
    capabilities = S3Storage.capabilities

    @pytest.fixture
    def url(self, moto):
        return f"s3://{moto.bucket()}/some/folder"

    @pytest.fixture
    def options(self, moto):
        return options(moto)


@pytest.fixture(params=["moto", "weed"])
def sharing(request, monkeypatch):
    """A server, a proxy before it, and a function that works with a storage, which copies 5 MiB at once."""
    monkeypatch.setattr(S3Driver, "largest_copy", 5 * MiB)
    server = request.getfixturevalue(request.param)
    url = f"s3://{server.bucket()}/run"
    with FaultProxy(server.url) as proxy:
        given = options(server, endpoint_url=proxy.url, deadline=20)
        yield proxy, lambda work: use(url, given, work)


def copies(proxy):
    return [each for each in proxy.requests if "x-amz-copy-source" in each.headers]


def test_s3_share_copies_a_short_object_in_one_request(sharing):
    proxy, use_it = sharing
    data = pattern(5 * MiB)

    async def work(storage):
        await storage.put("file", data)
        token = (await storage.stat("file")).token
        proxy.clear()
        await storage.share(storage.url.join("file"), "shared", token=token)
        assert [each.headers["x-amz-copy-source-if-match"] for each in copies(proxy)] == [token]
        assert max(each.request_bytes + each.response_bytes for each in proxy.requests) < 5000
        assert await storage.get("shared") == data

    use_it(work)


def test_s3_share_copies_a_long_object_in_parts(sharing):
    proxy, use_it = sharing
    data = pattern(12 * MiB)

    async def work(storage):
        await store(storage, "file", data, part=6 * MiB)
        proxy.clear()
        await storage.share(storage.url.join("file"), "shared")
        told = copies(proxy)
        ranges = {f"bytes={begin}-{min(begin + 5 * MiB, len(data)) - 1}" for begin in range(0, len(data), 5 * MiB)}
        assert {each.headers["x-amz-copy-source-range"] for each in told} == ranges
        assert len({each.headers["x-amz-copy-source-if-match"] for each in told}) == 1
        assert await fetch(storage, "shared", 0, [len(data)]) == data

    use_it(work)


@pytest.mark.parametrize("size", [100, 11 * MiB])
def test_s3_share_of_a_replaced_source_is_a_conflict(weed, size, monkeypatch):
    """moto ignores the condition."""
    monkeypatch.setattr(S3Driver, "largest_copy", 5 * MiB)
    data = pattern(size)

    async def work(storage):
        await storage.put("file", data)
        driver = await storage.driver()
        head = driver.head

        async def head_then_replaced(key):
            monkeypatch.setattr(driver, "head", head)
            found = await head(key)
            await storage.put("file", data[::-1])
            return found

        monkeypatch.setattr(driver, "head", head_then_replaced)
        with pytest.raises(StorageConflictError):
            await storage.share(storage.url.join("file"), "shared")
        with pytest.raises(StorageNotFoundError):
            await storage.stat("shared")
        assert await driver.uploads("") == []

    use(f"s3://{weed.bucket()}/run", options(weed), work)


@pytest.mark.parametrize(
    "fault",
    [{"status": 503, "times": 2}, {"reset_before": True}, {"lose_answer": True}, {"status": 429}],
    ids=lambda fault: next(iter(fault)),
)
@pytest.mark.parametrize("size", [100, 11 * MiB])
def test_s3_share_retries_transient_faults(sharing, size, fault):
    proxy, use_it = sharing
    data = pattern(size)

    async def work(storage):
        await storage.put("file", data)
        proxy.fault("PUT", "*/shared*", **fault)
        await storage.share(storage.url.join("file"), "shared")
        assert await storage.get("shared") == data
        assert await (await storage.driver()).uploads("") == []

    use_it(work)
    proxy.check()


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (405, "MethodNotAllowed"), (403, "AccessDenied")]
)
@pytest.mark.parametrize(("size", "nth"), [(100, 1), (11 * MiB, 2)])
def test_s3_share_that_is_refused_leaves_no_object(sharing, size, nth, status, code):
    proxy, use_it = sharing

    async def work(storage):
        await storage.put("file", bytes(size))
        body = f"<Error><Code>{code}</Code></Error>".encode()
        proxy.fault("PUT", "*/shared*", nth=nth, times=None, status=status, body=body)
        with pytest.raises(StorageError, match=code) as caught:
            await storage.share(storage.url.join("file"), "shared")
        assert type(caught.value) is StorageError
        assert await storage.list() == ["file"]
        assert await (await storage.driver()).uploads("") == []

    use_it(work)


def test_s3_share_whose_responses_are_lost_leaves_no_object(sharing):
    proxy, use_it = sharing

    async def work(storage):
        await storage.put("file", b"content")
        storage.retry_policy = RetryPolicy(timeout=60, deadline=1)  # a slow server may still copy after a time-out
        with proxy.fault("PUT", "*/shared", times=None, lose_answer=True), pytest.raises(StorageError):
            await storage.share(storage.url.join("file"), "shared")
        assert await storage.list() == ["file"]

    use_it(work)


@pytest.mark.parametrize("size", [100, 11 * MiB])
def test_s3_share_that_is_cancelled_leaves_no_object(sharing, size):
    proxy, use_it = sharing

    async def work(storage):
        await storage.put("file", bytes(size))
        held = proxy.fault("PUT", "*/shared*", lose_answer="hang")
        task = asyncio.ensure_future(storage.share(storage.url.join("file"), "shared"))
        await asyncio.to_thread(held.wait_reached)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await storage.list() == ["file"]
        assert await (await storage.driver()).uploads("") == []

    use_it(work)


def test_s3_sweep_aborts_the_copy_of_a_killed_process(sharing):
    _, use_it = sharing

    async def work(storage):
        await storage.put("file", bytes(11 * MiB))
        driver, key = await storage.driver(), storage.key("data/shared")
        upload = await driver.begin(key, 11 * MiB)
        token = (await storage.stat("file")).token
        assert await driver.copy_part(key, upload, 1, storage.key("file"), token, begin=0, end=5 * MiB)
        assert list(await storage.sweep("data/", -5)) == ["data/shared"]
        assert await driver.uploads("") == []

    use_it(work)


@pytest.mark.parametrize(
    "other", ["s3://other-bucket/run/file", "gs://{}/run/file", "s3://{}", "s3://key:secret@{}/file"]
)
def test_s3_share_from_another_bucket_is_refused(moto, other):
    bucket = moto.bucket()

    async def work(storage):
        with pytest.raises(StorageError, match="another bucket or account") as caught:
            await storage.share(URL.parse(other.format(bucket)), "shared")
        assert "secret" not in str(caught.value)

    use(f"s3://{bucket}/run", options(moto), work)
