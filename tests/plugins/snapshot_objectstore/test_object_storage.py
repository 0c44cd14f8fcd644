"""What all object stores have in common, with a store in memory: retries, uploads in parts, copies, listings."""

import asyncio
import time
from fnmatch import fnmatch
from typing import ClassVar

import pytest

from snapshot.errors import (
    BucketNotFoundError,
    CorruptSnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io import retry
from snapshot.io.storage import ABSENT, ANYTHING, URL, Capabilities, Context, Limits
from snapshot_objectstore.http import StatusError, status_fault
from snapshot_objectstore.object_storage import ConnectedStorage, Driver, ObjectStorage, Page

DATE = "Thu, 01 Jan 2026 00:00:00 GMT"


class Store:
    """Objects, uploads, and the calls that reached them. `faults` are (pattern of calls, times, when, error)."""

    def __init__(self):
        self.objects, self.uploads, self.calls, self.faults, self.numbers = {}, {}, [], [], iter(range(1, 1000))

    def fault(self, call, error, *, after=False, times=1):
        self.faults.append([call, times, after, error])

    def called(self, pattern="*"):
        return [call for call in self.calls if fnmatch(call, pattern)]


class Shelf(Driver):
    batch = 3
    largest_copy = 10
    page = 4

    def __init__(self, store):
        self.store = store
        self.closed = 0

    async def _answer(self, call, work):
        self.store.calls.append(call)
        for after in (False, True):
            found = [each for each in self.store.faults if each[1] and each[2] == after and fnmatch(call, each[0])]
            if after:
                result = work()
            if found:
                found[0][1] -= 1
                raise found[0][3]
        return result

    def fault(self, error, url):
        return status_fault(error, url) if isinstance(error, StatusError) else StorageError(f"{url}: {error!r}")

    async def close(self):
        self.closed += 1

    def _find(self, key):
        if key not in self.store.objects:
            raise StatusError(404, "no such object")
        return self.store.objects[key]

    def _set(self, key, data):
        self.store.objects[key] = bytes(data), f"t{next(self.store.numbers)}"
        return self.store.objects[key][1]

    async def head(self, key):
        data, token = await self._answer(f"head {key}", lambda: self._find(key))
        return self.describe(len(data), 5.0, token)

    async def read(self, key, sink):
        data, token = await self._answer(f"read {key} {sink.range}", lambda: self._find(key))
        begin = sink.position
        sink.starts(begin, len(data), token)
        sink.take(data[begin : sink.end])

    async def list(self, prefix, recursive, following):
        def work():
            keys = sorted(key for key in self.store.objects if key.startswith(prefix) and key > (following or ""))
            page = keys[: self.page]
            folders = {prefix + key[len(prefix) :].partition("/")[0] + "/" for key in page if "/" in key[len(prefix) :]}
            plain = page if recursive else [key for key in page if "/" not in key[len(prefix) :]]
            return Page(plain, () if recursive else sorted(folders), page[-1] if len(keys) > self.page else None)

        return await self._answer(f"list {prefix} {recursive} {following}", work)

    async def put(self, key, body, expect):
        def work():
            token = self.store.objects.get(key, (b"", None))[1]
            if isinstance(expect, str) and token is None:
                raise StatusError(404, "gone")
            if expect is not ANYTHING and token != (None if expect is ABSENT else expect):
                raise StorageConflictError(f"{key}: the condition failed")
            return self._set(key, body.read())

        return await self._answer(f"put {key}", work)

    def _upload(self, upload):
        if upload not in self.store.uploads:
            raise StatusError(404, "no such upload")
        return self.store.uploads[upload]

    async def begin(self, key, size):
        def work():
            name = f"u{next(self.store.numbers)}"
            self.store.uploads[name] = key, self.now(), {}
            return name

        return await self._answer(f"begin {key} {size}", work)

    async def part(self, key, upload, number, offset, body, *, last):
        def work():
            data = body.read()
            self._upload(upload)[2][number] = data
            return f"tag-{data.decode()}"

        return await self._answer(f"part {key} {upload} {number} {offset} {last} {body.attempt.number}", work)

    async def complete(self, key, upload, parts):
        def work():
            _, _, held = self._upload(upload)
            assert {number: f"tag-{held[number].decode()}" for number in held} == parts
            self._set(key, b"".join(held[number] for number in sorted(held)))
            del self.store.uploads[upload]

        await self._answer(f"complete {key} {upload} {list(parts)}", work)

    async def abandon(self, key, upload):
        await self._answer(f"abandon {key} {upload}", lambda: self.store.uploads.pop(upload, None))

    async def uploads(self, prefix):
        found = [(key, name, began) for name, (key, began, _) in self.store.uploads.items() if key.startswith(prefix)]
        return await self._answer(f"uploads {prefix}", lambda: found)

    async def parts(self, key, upload):
        return {number: f"tag-{data.decode()}" for number, data in self._upload(upload)[2].items()}

    def is_part(self, tag, body):
        body.seek(0)
        return tag == f"tag-{body.read().decode()}"

    async def delete(self, keys):
        def work():
            for key in keys:
                self.store.objects.pop(key, None)

        await self._answer(f"delete {' '.join(keys)}", work)

    async def copy(self, source, token, key, attempt):
        def work():
            data, found = self._find(source)
            if found != token:
                raise StorageConflictError(f"{source}: was replaced")
            self._set(key, data)

        await self._answer(f"copy {source} {key} {attempt.uncertain}", work)

    async def copy_part(self, key, upload, number, source, token, *, begin, end):
        def work():
            self._upload(upload)[2][number] = self._find(source)[0][begin:end]
            return f"tag-{self._find(source)[0][begin:end].decode()}"

        return await self._answer(f"copy_part {number} {source} {begin} {end}", work)


class Shelves(ObjectStorage):
    """A storage on a `Shelf`, as `tie` has set it up."""

    known: ClassVar = {"label": "A label.", "key": "A secret."}
    secret = frozenset({"key"})
    stores: ClassVar = {}
    made: ClassVar = []

    def driver_limits(self):
        return Limits(smallest_part=2, largest_part=20, most_parts=5, parts_per_file=4, preferred_part=4, grown_part=9)

    async def connect(self):
        if "broken" in self.options.get("label", ""):
            raise OSError(f"cannot connect with {self.options['key']}")
        self.made.append(Shelf(self.stores[self.bucket]))
        return self.made[-1]


@pytest.fixture
def shelf(monkeypatch):
    """A store, and a function that runs some work on a storage of it and closes that."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    store = Store()
    monkeypatch.setattr(Shelves, "stores", {"bucket": store, "other": Store()})
    monkeypatch.setattr(Shelves, "made", [])

    def use(work, *, context=None, url="shelf://bucket/run", **options):
        async def body():
            storage = Shelves(URL.parse(url), options, context or Context())
            try:
                return await work(storage)
            finally:
                await storage.close()

        return asyncio.run(body())

    return store, use


def busy(**more):
    return StatusError(503, "busy", **more)


# Options


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"labels": 1, "more": 2}, ["'labels'", "'more'", "concurrency", "deadline", "key", "label", "part_bytes"]),
        ({"part_bytes": 1}, ["part_bytes", "2", "20", "1"]),
        ({"part_bytes": 21}, ["part_bytes", "2", "20", "21"]),
        ({"part_bytes": 4.0}, ["part_bytes", "integer", "4.0"]),
        ({"part_bytes": True}, ["part_bytes", "integer", "True"]),
        ({"concurrency": 0}, ["concurrency", "at least 1", "0"]),
        ({"concurrency": "3"}, ["concurrency", "integer", "'3'"]),
        ({"timeout": 0}, ["timeout", "0"]),
        ({"deadline": float("inf")}, ["deadline", "inf"]),
        ({"timeout": True}, ["timeout", "True"]),
    ],
)
def test_storage_options_that_no_store_takes_are_refused(options, names):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its parts are compared
        Shelves(URL.parse("shelf://bucket/run"), options, Context())
    assert not [name for name in names if name not in str(caught.value)], caught.value


@pytest.mark.parametrize("url", ["shelf://", "shelf:///run", "shelf://bucket/run?version=1", "shelf://bucket/a//b"])
def test_urls_without_a_bucket_or_with_what_clients_normalise_are_refused(url):
    with pytest.raises(ValueError, match="shelf:"):
        Shelves(URL.parse(url), {}, Context())


def test_part_bytes_and_concurrency_set_the_limits():
    def limits(**options):
        storage = Shelves(URL.parse("shelf://bucket/run"), options, Context())
        found = storage.limits
        return found.preferred_part, found.grown_part, found.parallel_parts, found.parts_per_file, storage.connections

    assert limits() == (4, 9, 4, 4, 72)
    assert limits(part_bytes=2) == (2, 0, 4, 4, 72)
    assert limits(part_bytes=20) == (20, 0, 4, 4, 72)
    assert limits(concurrency=1) == (4, 9, 1, 1, 66)
    assert limits(concurrency=9, part_bytes=5) == (5, 0, 9, 9, 82)


@pytest.mark.parametrize(
    ("in_order", "per_file", "concurrency", "expected"),
    [(True, 1, 7, (7, 1)), (True, 2, 7, (7, 7)), (False, 1, 7, (7, 7)), (True, 1, None, (4, 1))],
)
def test_concurrency_leaves_the_parts_of_a_file_in_order(in_order, per_file, concurrency, expected, monkeypatch):
    monkeypatch.setattr(Shelves, "driver_limits", lambda _: Limits(in_order=in_order, parts_per_file=per_file))
    options = {} if concurrency is None else {"concurrency": concurrency}
    found = Shelves(URL.parse("shelf://bucket/run"), options, Context()).limits
    assert (found.parallel_parts, found.parts_per_file) == expected


def test_driver_is_made_once_and_closed_once(shelf):
    _, use = shelf

    async def work(storage):
        assert not Shelves.made
        await asyncio.gather(storage.put("a", b"1"), storage.put("b", b"2"))
        assert await storage.driver() is Shelves.made[0]

    use(work)
    assert [driver.closed for driver in Shelves.made] == [1]
    use(lambda storage: storage.close())
    assert len(Shelves.made) == 1


def test_connect_that_fails_is_an_error_without_the_secret_and_is_tried_again(shelf):
    _, use = shelf

    async def work(storage):
        with pytest.raises(StorageError, match=r"shelf://bucket/run.*OSError.*with \*\*\*") as caught:
            await storage.get("a")
        assert caught.value.__cause__ is None
        assert "hidden" not in str(caught.value)
        storage.options["label"] = ""
        await storage.put("a", b"1")

    use(work, label="broken", key="hidden")


class Shared:
    """A cache of clients."""

    def __init__(self):
        self.held, self.released = {}, []

    async def get(self, key, make):
        if key not in self.held:
            self.held[key] = await make()
        return self.held[key][0]

    async def release(self, key):
        self.released.append(key)


def test_clients_of_a_cache_are_shared_by_equal_options_only(shelf, monkeypatch):
    _, use = shelf
    clients = Shared()

    def client(url="shelf://bucket/run", **options):
        async def work(storage):
            return await storage.driver()

        return use(work, context=Context(clients=clients), url=url, **options)

    first = client(label="x")
    assert client(url="shelf://bucket/another", label="x") is first
    for other in ({"label": "y"}, {"key": "x"}, {}):
        assert client(**other) is not first
    assert client(url="shelf://other/run", label="x") is not first
    assert client(url="shelf://me:word@bucket/run", label="x") is not first
    for name, same in (("AWS_PROFILE", False), ("HTTPS_PROXY", False), ("NAWS_PROFILE", True), ("https_proxy_x", True)):
        with monkeypatch.context() as patch:
            patch.setenv(name, "changed")
            assert (client(label="x") is first) is same, name
    assert len(clients.released) == 11
    assert first.closed == 0


@pytest.mark.parametrize(
    ("url", "options", "text", "shown"),
    [
        ("shelf://bucket/run", {"key": "abcd"}, "key abcd", "key ***"),
        ("shelf://bucket/run", {"key": "abc"}, "key abc", "key abc"),
        ("shelf://bucket/run", {"label": "abcd"}, "label abcd", "label abcd"),
        ("shelf://me:pass%20word@bucket/run", {}, "pass%20word, pass word", "***, ***"),
    ],
)
def test_errors_of_clients_show_no_secret(shelf, url, options, text, shown):
    store, use = shelf
    store.fault("head *", OSError(text))
    with pytest.raises(StorageError) as caught:
        use(lambda storage: storage.stat("x"), url=url, **options)
    assert shown in str(caught.value)
    assert (caught.value.__cause__ is None) is ("***" in shown)


# Reads


def test_reads_request_the_range_and_give_its_bytes(shelf):
    store, use = shelf

    async def work(storage):
        token = await storage.put("file", b"0123456789")
        held = [bytearray(3), bytearray(0), bytearray(2)]
        await storage.read_into("file", 4, held, token=token)
        assert held == [b"456", b"", b"78"]
        assert await storage.get("file") == b"0123456789"
        assert await storage.get("file", limit=10) == b"0123456789"
        with pytest.raises(StorageError, match=r"run/file.* 10 .* 9 "):
            await storage.get("file", limit=9)
        found = await storage.stat("file")
        assert (found.size, found.mtime, found.token) == (10, 5.0, token)
        with pytest.raises(CorruptSnapshotError, match="run/file"):
            await storage.read_into("file", 8, [bytearray(3)])
        with pytest.raises(StorageConflictError, match="run/file"):
            await storage.read_into("file", 8, [bytearray(2)], token="t0")
        store.calls.clear()
        await storage.read_into("file", 4, [])
        assert store.calls == ["head run/file"]
        with pytest.raises(StorageNotFoundError, match="run/none"):
            await storage.read_into("none", 4, [])

    use(work)
    assert Shelves.made[0].store is store


def test_reads_continue_after_the_last_byte_that_arrived(shelf, monkeypatch):
    store, use = shelf
    whole = Shelf.read
    cuts = [2, 3, 0]

    async def broken(driver, key, sink):
        if not cuts:
            return await whole(driver, key, sink)
        store.calls.append(f"read {sink.range}")
        sink.starts(sink.position, 10, "t1")
        sink.take(b"0123456789"[sink.position : sink.position + cuts.pop(0)])
        raise busy()

    monkeypatch.setattr(Shelf, "read", broken)

    async def work(storage):
        await storage.put("file", b"0123456789")
        held = bytearray(8)
        await storage.read_into("file", 1, [held])
        assert held == b"12345678"
        assert store.called("read *") == [
            "read bytes=1-8",
            "read bytes=3-8",
            "read bytes=6-8",
            "read run/file bytes=6-8",
        ]
        store.calls.clear()
        cuts.append(8)
        await storage.read_into("file", 1, [held])
        assert store.called("read *") == ["read bytes=1-8"], "all bytes have arrived"
        cuts.append(4)
        assert await storage.get("file") == b"0123456789"

    use(work)


def test_reads_that_end_too_early_are_repeated_until_the_deadline(shelf, monkeypatch):
    store, use = shelf

    async def short(driver, key, sink):
        store.calls.append("read")
        sink.starts(sink.position, 10, "t1")
        sink.take(b"01"[sink.position :])

    monkeypatch.setattr(Shelf, "read", short)
    with pytest.raises(StorageError, match="byte 2 of 4"):
        use(lambda storage: storage.read_into("file", 0, [bytearray(4)]), deadline=0.01)
    assert len(store.called("read")) >= 2


def test_expect_size_refuses_a_file_of_another_size(shelf):
    _, use = shelf

    async def work(storage):
        await storage.put("file", b"0123456789")
        held = bytearray(2)
        for size, fits in ((9, False), (10, True), (11, False)):
            assert storage.expect_size("file", size)
            if fits:
                await storage.read_into("file", 0, [held])
                continue
            with pytest.raises(CorruptSnapshotError, match=rf"run/file must have {size} bytes, got 10"):
                await storage.read_into("file", 0, [held])
        storage.expect_size("none", 3)
        with pytest.raises(CorruptSnapshotError, match="run/none is missing"):
            await storage.read_into("none", 0, [held])
        with pytest.raises(StorageNotFoundError):
            await storage.read_into("never expected", 0, [held])

    use(work)


def test_now_and_age_are_by_the_clock_of_the_server():
    driver = Shelf(Store())
    assert abs(driver.now() - time.time()) < 3600
    assert driver.describe(1, 2.0, "t").age > 1e9
    driver.note_date(DATE)
    at = 1767225600
    assert at <= driver.now() < at + 3600
    found = driver.describe(3, at - 100, "t")
    assert (found.size, found.mtime, found.token) == (3, at - 100, "t")
    assert 100 <= found.age < 3700
    for date in (None, "", "not a date"):
        driver.note_date(date)
    assert at <= driver.now() < at + 3600


# Listings


@pytest.mark.parametrize("url", ["shelf://bucket/run", "shelf://bucket"])
def test_list_joins_pages_and_gives_paths_below_the_root(shelf, url):
    store, use = shelf
    names = ["a/1", "a/2", "a/3", "b/1", "b/c/2", "d", "e"]
    root = "run/" if url.endswith("run") else ""
    for name in [*(root + name for name in names), f"{root}a/", *(["runs/x"] if root else [])]:
        store.objects[name] = b"", "t"

    async def work(storage):
        assert await storage.list() == names
        assert store.called("list *") == [f"list {root} True {last}" for last in (None, f"{root}a/3")]
        assert await storage.list("", recursive=False) == ["a/", "b/", "d", "e"]
        assert await storage.list("a/") == ["a/1", "a/2", "a/3"]
        assert await storage.list("b", recursive=True) == ["b/1", "b/c/2"]
        assert await storage.list("b/", recursive=False) == ["b/1", "b/c/"]
        assert await storage.list("none") == []
        assert await storage.list_root() is None, "there is a second page"
        for wrong in ("../x", "a/../b"):
            with pytest.raises(ValueError, match="path"):
                await storage.list(wrong)

    use(work, url=url)


def test_list_root_gives_one_page_or_none(shelf):
    store, use = shelf

    async def work(storage):
        for name in ("run/", "run/a/1", "run/b"):
            store.objects[name] = b"", "t"
        assert sorted(await storage.list_root()) == ["a/", "b"]
        for error in (StatusError(403, "denied"), StorageError("no list")):
            store.fault("list *", error)
            assert await storage.list_root() is None
        store.fault("list *", BucketNotFoundError("no bucket"))
        with pytest.raises(BucketNotFoundError):
            await storage.list_root()

    use(work)


# Whole files


@pytest.mark.parametrize(
    ("held", "expect", "lost", "outcome"),
    [
        (None, ABSENT, False, b"new"),
        (None, ABSENT, True, b"new"),
        (b"old", ABSENT, False, StorageConflictError),
        (b"new", ABSENT, False, StorageConflictError),
        (b"old", "t1", False, b"new"),
        (b"old", "t1", True, b"new"),
        (b"old", "t0", False, StorageConflictError),
        (None, "t1", False, StorageConflictError),
        (b"old", ANYTHING, False, b"new"),
        (b"old", ANYTHING, True, b"new"),
    ],
)
def test_put_keeps_its_condition_although_the_answer_may_be_lost(shelf, held, expect, lost, outcome):
    store, use = shelf

    async def work(storage):
        if held is not None:
            assert await storage.put("file", held) == "t1"
        if lost:
            store.fault("put *", busy(), after=True)
        if isinstance(outcome, type):
            with pytest.raises(outcome):
                await storage.put("file", b"new", expect=expect)
            assert store.objects.get("run/file", (None,))[0] == held
            return
        assert await storage.put("file", b"new", expect=expect) == store.objects["run/file"][1]
        assert store.objects["run/file"][0] == outcome

    use(work)


def test_put_of_another_process_after_a_lost_answer_is_a_conflict(shelf):
    store, use = shelf

    async def work(storage):
        store.objects["run/file"] = b"its", "t9"
        store.fault("put *", busy())
        with pytest.raises(StorageConflictError):
            await storage.put("file", b"new", expect=ABSENT)
        store.objects["run/file"] = b"news", "t9"  # it begins with the same bytes
        store.fault("put *", busy())
        with pytest.raises(StorageError):
            await storage.put("file", b"new", expect=ABSENT)
        del store.objects["run/file"]
        store.fault("put *", busy())
        store.fault("put *", StorageConflictError("refused"))
        with pytest.raises(StorageConflictError, match="refused"):
            await storage.put("file", b"new", expect=ABSENT)

    use(work)


def test_put_whose_outcome_cannot_be_read_is_uncertain(shelf):
    store, use = shelf

    async def work(storage):
        store.fault("put *", busy(), after=True)
        store.fault("read *", StatusError(403, "denied"))
        with pytest.raises(StorageError, match=r"run/file.*denied") as caught:
            await storage.put("file", b"new", expect=ABSENT)
        assert caught.value.uncertain
        del store.objects["run/file"]
        store.fault("put *", busy(), after=True)
        store.fault("read *", busy())
        assert await storage.put("file", b"new", expect=ABSENT) == store.objects["run/file"][1]
        store.fault("put *", StatusError(403, "denied"))
        with pytest.raises(StorageError) as caught:
            await storage.put("file", b"new")
        assert not caught.value.uncertain
        store.fault("put *", busy())
        store.fault("put *", StatusError(403, "denied"))
        with pytest.raises(StorageError) as caught:
            await storage.put("file", b"new")
        assert caught.value.uncertain

    use(work)


def test_delete_sends_batches_and_raises_their_errors_after_all(shelf):
    store, use = shelf

    async def work(storage):
        await storage.delete([])
        assert not store.calls
        for number in range(7):
            store.objects[f"run/{number}"] = b"", "t"
        await storage.delete([str(number) for number in range(7)])
        assert store.calls == ["delete run/0 run/1 run/2", "delete run/3 run/4 run/5", "delete run/6"]
        assert not store.objects
        store.fault("delete run/0*", StatusError(403, "denied"))
        store.objects["run/4"] = b"", "t"
        with pytest.raises(StorageError, match=r"run/0.*denied"):
            await storage.delete([str(number) for number in range(5)])
        assert not store.objects

    use(work)


@pytest.mark.parametrize(
    ("capability", "call"),
    [
        ("write", lambda storage: storage.put("x", b"")),
        ("write", lambda storage: storage.create("x", 1)),
        ("list", lambda storage: storage.list()),
        ("delete", lambda storage: storage.delete(["x"])),
        ("shares", lambda storage: storage.share(storage.url.join("y"), "x")),
    ],
)
def test_capabilities_that_are_missing_are_named(shelf, monkeypatch, capability, call):
    store, use = shelf
    monkeypatch.setattr(Shelves, "capabilities", Capabilities(**{capability: "" if capability == "shares" else False}))
    with pytest.raises(StorageError, match=f"cannot {capability.removesuffix('s')}"):
        use(call)
    assert not store.calls


# Uploads


def test_uploads_in_parts_are_numbered_by_their_offsets(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 10)
        await writer.write(4, [b"45", b"67"])
        await writer.write(8, [b"89"])
        await writer.write(4, [])
        assert "run/file" not in store.objects
        await writer.write(0, [b"0123"])
        await writer.finish()
        for call in (writer.finish, lambda: writer.write(0, [b"0123"])):
            with pytest.raises(ValueError, match="run/file"):
                await call()
        await writer.abort()

    use(work)
    assert store.objects["run/file"][0] == b"0123456789"
    assert store.calls == [
        "begin run/file 10",
        "part run/file u1 2 4 False 1",
        "part run/file u1 3 8 True 1",
        "part run/file u1 1 0 False 1",
        "complete run/file u1 [1, 2, 3]",
    ]


def test_uploads_whose_last_part_comes_first_are_numbered_by_the_smallest_length(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 11)  # at most 5 parts: of 3 bytes and more
        await writer.write(9, [b"9a"])
        for at in (0, 3, 6):
            await writer.write(at, [b"0123456789a"[at : at + 3]])
        await writer.finish()

    use(work)
    assert store.objects["run/file"][0] == b"0123456789a"
    assert [call.split()[3] for call in store.called("part *")] == ["4", "1", "2", "3"]


@pytest.mark.parametrize("size", [0, 5])
def test_uploads_of_whole_files_are_one_request(shelf, size):
    store, use = shelf
    data = b"01234"[:size]

    async def work(storage):
        writer = await storage.create("file", size)
        await writer.write(0, [data])
        await writer.finish()

    use(work)
    assert store.objects["run/file"][0] == data
    assert store.calls == ["put run/file"]


def test_uploads_refuse_parts_that_do_not_fit(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 10)
        for offset, data in ((-1, b"0123"), (8, b"890"), (10, b"x"), (0, b"0123456789a")):
            with pytest.raises(StorageError, match=rf"bytes {offset}-{offset + len(data)} .* 10"):
                await writer.write(offset, [data])
        assert not store.calls
        await writer.write(0, [b"0123"])
        for offset, data in ((0, b"0123"), (2, b"2345")):
            with pytest.raises(StorageError, match="one length"):
                await writer.write(offset, [data])
        with pytest.raises(StorageError, match="byte 4 of 10"):
            await writer.finish()
        await writer.write(8, [b"89"])
        with pytest.raises(StorageError, match="byte 4 of 10"):
            await writer.finish()
        await writer.abort()
        await writer.abort()
        with pytest.raises(ValueError, match="run/file"):
            await writer.write(4, [b"4567"])

    use(work)
    assert store.called("abandon *") == ["abandon run/file u1"]
    assert not store.uploads
    assert not store.objects


def test_uploads_that_fail_in_one_part_cannot_be_finished(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 6)
        store.fault("part *", StatusError(403, "denied"))
        with pytest.raises(StorageError, match="denied"):
            await writer.write(0, [b"0123"])
        await writer.write(4, [b"45"])
        with pytest.raises(StorageError, match="run/file"):
            await writer.finish()

    use(work)


def test_uploads_repeat_a_part_with_all_its_bytes(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 6)
        store.fault("part *", busy(), after=True)
        await writer.write(0, [b"01", b"23"])
        await writer.write(4, [b"45"])
        await writer.finish()

    use(work)
    assert store.objects["run/file"][0] == b"012345"
    assert [call[-1] for call in store.called("part *")] == ["1", "2", "1"], "the number of the attempt is passed on"


@pytest.mark.parametrize(
    ("lost", "size", "finished"), [(False, 6, False), (True, 6, True), (True, 5, False), (True, None, False)]
)
def test_finish_looks_at_the_object_after_a_lost_answer(shelf, lost, size, finished):
    """The upload is gone then: because the first request has completed it, or because it was aborted."""
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 6)
        await writer.write(0, [b"0123"])
        await writer.write(4, [b"45"])
        if lost:
            store.fault("complete *", busy())
        store.uploads.clear()
        if size is not None:
            store.objects["run/file"] = bytes(size), "t"
        if finished:
            await writer.finish()
            return
        with pytest.raises(StorageNotFoundError):
            await writer.finish()
        assert bool(store.called("head *")) is lost

    use(work)


def test_abort_deletes_a_file_that_was_whole_and_survives_a_failure(shelf):
    store, use = shelf

    async def work(storage):
        writer = await storage.create("file", 4)
        await writer.write(0, [b"0123"])
        assert store.objects["run/file"][0] == b"0123"
        await writer.abort()
        assert not store.objects
        writer = await storage.create("file", 6)
        await writer.write(0, [b"0123"])
        store.fault("abandon *", StatusError(403, "denied"))
        await writer.abort()

    use(work)


def test_resume_continues_the_newest_upload_and_sends_what_differs(shelf):
    store, use = shelf
    store.uploads.update(
        old=("run/file", 1.0, {1: b"0123"}),
        new=("run/file", 2.0, {1: b"0123", 2: b"xxxx"}),
        other=("run/file-2", 3.0, {1: b"0123"}),
    )

    async def work(storage):
        writer = await storage.create("file", 10)
        for at in (0, 4, 8):
            await writer.write(at, [b"0123456789"[at : at + 4]])
        await writer.abort()  # it may be continued
        assert "new" in store.uploads
        writer = await storage.create("file", 10)
        for at in (0, 4, 8):
            await writer.write(at, [b"0123456789"[at : at + 4]])
        await writer.finish()
        writer = await storage.create("another", 6)
        for at in (0, 4):
            await writer.write(at, [b"012345"[at : at + 4]])
        await writer.finish()

    use(work, context=Context(resume=True))
    assert store.objects["run/file"][0] == b"0123456789"
    assert store.called("part run/file *") == ["part run/file new 2 4 False 1", "part run/file new 3 8 True 1"]
    assert store.called("begin *") == ["begin run/another 6"]


def test_sweep_aborts_old_uploads_below_a_prefix(shelf):
    store, use = shelf

    async def work(storage):
        driver = await storage.driver()
        driver.note_date(DATE)
        now = driver.now()
        store.uploads.update(
            a=("run/data/1", now - 5000, {}),
            b=("run/data/1", now - 6000, {}),
            c=("run/data/2", now - 100, {}),
            d=("run/more/3", now - 5000, {}),
        )
        assert await storage.sweep("data/", 4000) == ["data/1"]
        assert sorted(store.uploads) == ["c", "d"]
        assert await storage.sweep("data/", 4000) == []
        assert await storage.sweep("", -5000) == ["data/2", "more/3"]

    use(work)


# Copies by the store


@pytest.mark.parametrize("size", [0, 9, 10, 11, 25, 60])
def test_share_copies_in_one_request_or_in_parts(shelf, size):
    store, use = shelf
    data = bytes(range(48, 48 + size))

    async def work(storage):
        token = await storage.put("file", data)
        store.calls.clear()
        await storage.share(storage.url.join("file"), "folder/copy", token=token)

    use(work)
    assert store.objects["run/folder/copy"][0] == data
    length = max(10, -(-size // 5))
    expected = [f"copy_part {at // length + 1} run/file {at} {min(at + length, size)}" for at in range(0, size, length)]
    assert store.called("copy*") == (expected if size > 10 else ["copy run/file run/folder/copy False"])
    assert store.called("put *") == []


def test_share_refuses_another_version_a_taken_name_and_another_bucket(shelf):
    store, use = shelf

    async def work(storage):
        token = await storage.put("file", b"data")
        await storage.put("taken", b"other")
        source = storage.url.join("file")
        with pytest.raises(StorageConflictError, match=r"run/file.*replaced"):
            await storage.share(source, "copy", token="t0")
        with pytest.raises(StorageConflictError, match="run/taken"):
            await storage.share(source, "taken", token=token)
        with pytest.raises(StorageNotFoundError, match="run/none"):
            await storage.share(storage.url.join("none"), "copy")
        for url in ("shelf://other/run/file", "shelf://bucket", "shelf://", "shelf://bucket/a//b", "shelf://b/x?q=1"):
            with pytest.raises(StorageError, match="cannot be shared"):
                await storage.share(URL.parse(url), "copy")
        await storage.share(URL.parse("shelf://bucket/run/file"), "copy")

    use(work)
    assert {key: data for key, (data, _) in store.objects.items()} == {
        "run/file": b"data", "run/taken": b"other", "run/copy": b"data"
    }  # fmt: skip


@pytest.mark.parametrize("size", [5, 25])
def test_share_that_fails_leaves_nothing(shelf, size):
    store, use = shelf

    async def work(storage):
        await storage.put("file", bytes(size))
        for error in (StatusError(403, "denied"), StorageConflictError("was replaced")):
            store.fault("copy*", error)
            with pytest.raises(StorageError, match=r"denied|replaced"):
                await storage.share(storage.url.join("file"), "copy")
        assert len(store.called("delete run/copy")) == 1, "after a conflict, the name is another's"
        store.fault("copy run/file*", busy())
        store.fault("copy run/file*", StorageConflictError("exists"))
        if size == 5:
            with pytest.raises(StorageConflictError):
                await storage.share(storage.url.join("file"), "copy")
            assert len(store.called("delete run/copy")) == 2, "the first request may have copied it"
        assert not store.uploads
        assert list(store.objects) == ["run/file"]

    use(work)


def test_share_compares_the_size_of_the_copy(shelf, monkeypatch):
    store, use = shelf

    async def short(driver, source, token, key, attempt):
        driver._set(key, b"dat")

    monkeypatch.setattr(Shelf, "copy", short)

    async def work(storage):
        await storage.put("file", b"data")
        with pytest.raises(StorageError, match=r"run/copy.* 3 of 4 bytes"):
            await storage.share(storage.url.join("file"), "copy")
        assert list(store.objects) == ["run/file"]

    use(work)


def test_requests_that_a_driver_lacks_are_not_implemented():
    class Empty(Driver):
        close = fault = head = read = list = None

    async def work():
        driver = Empty()
        for call in (
            driver.put("k", None, ANYTHING), driver.begin("k", 1), driver.part("k", "u", 1, 0, None, last=True),
            driver.complete("k", "u", {}), driver.abandon("k", "u"), driver.delete(["k"]),
            driver.copy("s", "t", "k", None),
            driver.copy_part("k", "u", 1, "s", "t", begin=0, end=1),
        ):  # fmt: skip
            with pytest.raises(NotImplementedError):
                await call
        assert list(await driver.uploads("")) == []
        assert dict(await driver.parts("k", "u")) == {}
        assert driver.is_part("tag", None) is False
        with pytest.raises(NotImplementedError):
            ConnectedStorage.driver_limits(None)
        with pytest.raises(NotImplementedError):
            await ConnectedStorage.connect(None)

    asyncio.run(work())
