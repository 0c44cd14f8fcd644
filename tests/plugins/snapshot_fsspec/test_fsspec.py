"""What fsspec knows passes the contract, as far as it can keep it, and nothing of it can hang a take."""

import asyncio
import errno
import os
import secrets
import socket
import threading
import traceback
import warnings
import zipfile
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from snapshot import Snapshot, StateDict
from snapshot.errors import (
    CorruptSnapshotError,
    MissingExtraError,
    SnapshotError,
    SnapshotExistsError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io import retry
from snapshot.io.bodies import BufferSink
from snapshot.io.registry import open_storage, plugin_for
from snapshot.io.retry import RetryPolicy, TransientError
from snapshot.io.storage import URL, Capabilities
from snapshot.testing import StorageTests, Tap, conformance, tapped
from snapshot.testing.conformance import fetch, pattern, store
from snapshot_fsspec import client
from snapshot_fsspec.storage import FsspecReader, FsspecStorage

WRITES = Capabilities(conditional_put=False)
READS = Capabilities(write=False, delete=False, conditional_put=False)


class TestMemory(StorageTests):
    capabilities = WRITES

    @pytest.fixture
    def url(self):
        return f"fsspec+memory://{secrets.token_hex(8)}/run"


class TestLocal(StorageTests):
    capabilities = WRITES
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestMemory

    @pytest.fixture
    def url(self, tmp_path):
        return f"local://{tmp_path}/run"


class TestWebDav(StorageTests):
    capabilities = WRITES
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestMemory

    @pytest.fixture
    def url(self):
        return f"webdav://{secrets.token_hex(8)}/run"

    @pytest.fixture
    def options(self, webdav):
        return {"base_url": webdav.url}

    @pytest.fixture(autouse=True)
    def _names(self, monkeypatch):
        # wsgidav parses the URL that a file is to be moved to when its %3F is a ? already: it ends there
        monkeypatch.setattr(conformance, "ODD_NAMES", [name for name in conformance.ODD_NAMES if "?" not in name])


class TestSftp(StorageTests):
    capabilities = WRITES
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestMemory

    @pytest.fixture
    def url(self, sshd, tmp_path):
        return f"sftp://{sshd.username}@{sshd.host}:{sshd.port}{tmp_path}/run"

    @pytest.fixture
    def options(self, sshd):
        return {"client_keys": [str(sshd.client_key)], "known_hosts": str(sshd.known_hosts)}


class TestCache(StorageTests):
    """A cache is for reading: small files are read behind it, since they are what changes."""

    capabilities = READS
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestMemory

    @pytest.fixture
    def url(self):
        return f"simplecache::memory://{secrets.token_hex(8)}/run"

    async def place(self, storage, path, data):
        fsspec.filesystem("memory").pipe_file(f"{storage.url.location}/{path}", data)


class TestZip(StorageTests):
    capabilities = READS

    @pytest.fixture
    def url(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
            file.writestr("other", b"other")
        return f"zip://inner::file://{tmp_path}/a.zip"

    async def place(self, storage, path, data):
        await storage.close()  # an archive is read once
        with zipfile.ZipFile(storage.url.location.partition("::file://")[2], "a") as file:
            if f"inner/{path}" not in file.namelist():
                file.writestr(f"inner/{path}", data)


async def stored(storage):
    """Write a file and read it again, in parts."""
    await store(storage, "data/file", pattern(3 << 20))
    found = await fetch(storage, "data/file", 1, [2 << 20])
    names = await storage.list()
    await storage.close()
    return found == pattern(3 << 20)[1 : 1 + (2 << 20)] and names == ["data/file"]


@pytest.mark.parametrize("text", ["dir::memory://{}/run", "dir://sub::memory://{}/run", "dir::local:///tmp/{}"])
def test_fsspec_chained_urls_have_the_capabilities_of_the_inner_storage(text):
    storage = open_storage(URL.parse(text.format(secrets.token_hex(8))))
    assert storage.capabilities.atomic_put
    try:
        assert asyncio.run(stored(storage))
    finally:
        asyncio.run(storage.delete(["data/file"]))
    with pytest.raises(ValueError, match="nonsense"):
        open_storage(storage.url, {"memory": {"nonsense": 1}, "local": {"nonsense": 1}})


# Through the public face


def state():
    return {"model": StateDict(weight=torch.arange(30_000).view(100, 300), note="some")}


@pytest.fixture(params=["fsspec+memory", "webdav", "sshd"], ids=["fsspec+memory", "webdav", "sftp"])
def place(request, tmp_path):
    name = secrets.token_hex(8)
    if request.param == "webdav":
        return f"webdav://{name}", {"base_url": request.getfixturevalue("webdav").url}
    if request.param == "sshd":
        sshd = request.getfixturevalue("sshd")
        options = {"client_keys": [str(sshd.client_key)], "known_hosts": str(sshd.known_hosts)}
        return f"sftp://{sshd.username}@{sshd.host}:{sshd.port}{tmp_path}", options
    return f"fsspec+memory://{name}", {}


def test_fsspec_take_overwrite_restore_and_delete(place):
    base, options = place
    path, app = f"{base}/step", state()
    snapshot = Snapshot.take(path, app, storage_options=options)
    assert snapshot.verify()
    assert torch.equal(
        snapshot.read_object("0/model/weight", box=[slice(3, 5), slice(7, 9)]), app["model"]["weight"][3:5, 7:9]
    )
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(path, app, storage_options=options)
    app["model"]["weight"] += 1
    Snapshot.async_take(path, app, storage_options=options, overwrite=True).wait()
    restored = state()
    Snapshot(path, storage_options=options).restore(restored)
    assert torch.equal(restored["model"]["weight"], app["model"]["weight"])
    left = asyncio.run(listing(path, options))
    assert sum(name.endswith(".safetensors") for name in left) == 1
    assert not any(name.startswith(".take") for name in left)
    Snapshot(path, storage_options=options).delete()
    assert not Snapshot(path, storage_options=options).exists()
    assert asyncio.run(listing(path, options)) == []


async def listing(path, options):
    storage = open_storage(URL.parse(path), options)
    try:
        return await storage.list()
    finally:
        await storage.close()


def test_fsspec_take_notices_a_snapshot_committed_meanwhile():
    path = f"fsspec+memory://{secrets.token_hex(8)}/step"
    before = threading.Event()

    class First(Tap):
        async def before(self, operation):
            if operation.name == "create" and not before.is_set():
                before.set()
                await asyncio.to_thread(Snapshot.take, path, state())

    with tapped("first", First()), pytest.raises(SnapshotExistsError):
        Snapshot.take(f"first+{path}", state())
    assert Snapshot(path).verify()


def test_fsspec_simplecache_restores_a_snapshot(tmp_path):
    path = f"fsspec+memory://{secrets.token_hex(8)}/step"
    Snapshot.take(path, state())
    options = {"cache_storage": str(tmp_path)}
    cached = Snapshot(f"simplecache::{path.removeprefix('fsspec+')}", storage_options=options)
    assert cached.verify()
    Snapshot.take(path, state(), overwrite=True)
    assert cached.verify()
    with pytest.raises(SnapshotError, match="read-only"):
        Snapshot.take(cached.path, state(), storage_options=options)


# What goes wrong


@pytest.fixture
def silent():
    """A port that accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.timeout(15, func_only=True)
@pytest.mark.parametrize("scheme", ["webdav", "sftp"])
def test_fsspec_silent_server_fails_within_the_deadline(silent, scheme):
    options = {"deadline": 0.5, "timeout": 0.2}
    text = f"sftp://127.0.0.1:{silent}/run" if scheme == "sftp" else "webdav://run"
    if scheme == "webdav":
        options["base_url"] = f"http://127.0.0.1:{silent}"
    with pytest.raises(StorageError, match="failed after"):
        Snapshot.take(text, state(), storage_options=options)


class Stuck(MemoryFileSystem):
    protocol = "stuck"
    free = threading.Event()
    often: ClassVar[list] = []

    def info(self, path, **kwargs):
        if path.endswith("stuck") and self.often:
            self.often.pop()
            self.free.wait(30)
        return super().info(path, **kwargs)


def test_fsspec_call_that_hangs_does_not_block_others():
    register_implementation("stuck", Stuck, clobber=True)

    async def use():
        storage = open_storage(URL.parse(f"stuck://{secrets.token_hex(8)}"), {"timeout": 0.5})
        await storage.put("file", b"content")
        Stuck.often.append(1)
        hung = asyncio.create_task(storage.stat("stuck"))
        await asyncio.sleep(0.05)
        assert await storage.get("file") == b"content"
        with pytest.raises(StorageNotFoundError):
            await hung  # made again in another thread
        await storage.close()

    asyncio.run(use())
    Stuck.free.set()


@pytest.mark.slow
def test_fsspec_thread_that_hangs_does_not_block_the_exit(warm):
    program = """
import asyncio, socket, time
from snapshot.errors import StorageError
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL
with socket.create_server(("127.0.0.1", 0)) as server:
    options = {"base_url": f"http://127.0.0.1:{server.getsockname()[1]}", "timeout": 0.2, "deadline": 0.5}
    options["webdav"] = {"timeout": 3600}
    storage = open_storage(URL.parse("webdav://run"), options)
    try:
        asyncio.run(storage.get("file"))
    except StorageError as error:
        print(error)
"""
    assert "no response to get" in warm.run(program)


class Careless(MemoryFileSystem):
    protocol = "careless"

    def cat_file(self, path, start=None, end=None, **kwargs):
        return super().cat_file(path)


@pytest.mark.parametrize("size", [100, 5000, 9 << 20])
def test_fsspec_file_system_that_ignores_ranges_returns_the_right_bytes(size):
    register_implementation("careless", Careless, clobber=True)
    data = pattern(size)

    async def use():
        storage = open_storage(URL.parse(f"careless://{secrets.token_hex(8)}"))
        await store(storage, "file", data)
        half = size // 2
        assert await fetch(storage, "file", half, [size - half]) == data[half:]
        assert await fetch(storage, "file", 0, [half]) == data[:half]
        with pytest.raises(CorruptSnapshotError):
            await fetch(storage, "file", half, [size])
        fresh = open_storage(storage.url)
        with pytest.raises(CorruptSnapshotError):
            await fetch(fresh, "file", half, [size])
        await fresh.close()
        await storage.close()

    asyncio.run(use())


class Flaky(MemoryFileSystem):
    protocol = "flaky"
    errors: ClassVar[list] = []

    def __init__(self, flaky_key=None, **kwargs):
        super().__init__(**kwargs)

    def info(self, path, **kwargs):
        if self.errors:
            raise self.errors.pop()
        return super().info(path, **kwargs)


class Answer(Exception):
    def __init__(self, status):
        super().__init__(f"HTTP {status}")
        self.status = status


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (ConnectionResetError("gone"), None),
        (TimeoutError(), None),
        (EOFError(), None),
        (Answer(503), None),
        (Answer(429), None),
        (Answer(404), StorageNotFoundError),
        (Answer(403), StorageError),
        (PermissionError(13, "Permission denied"), StorageError),
        (IsADirectoryError(21, "Is a directory"), StorageError),
    ],
    ids=repr,
)
def test_fsspec_transient_errors_are_retried(error, ours):
    register_implementation("flaky", Flaky, clobber=True)

    async def use():
        storage = open_storage(URL.parse(f"flaky://{secrets.token_hex(8)}"))
        await storage.put("file", b"content")
        Flaky.errors.append(error)
        try:
            return (await storage.stat("file")).size
        finally:
            await storage.close()

    if ours is None:
        assert asyncio.run(use()) == 7
    else:
        with pytest.raises(ours) as caught:
            asyncio.run(use())
        assert type(caught.value) is ours
    Flaky.errors.clear()


def test_fsspec_errors_show_no_secret():
    register_implementation("flaky", Flaky, clobber=True)

    async def use():
        url = URL.parse(f"flaky://{secrets.token_hex(8)}")
        storage = open_storage(url, {"flaky_key": "topsecret"})
        Flaky.errors.append(ValueError("the key topsecret, by http://user:hidden@host/x"))
        try:
            await storage.stat("file")
        finally:
            await storage.close()

    with pytest.raises(StorageError) as caught:
        asyncio.run(use())
    shown = "".join(traceback.format_exception(caught.value))
    assert "http://user:***@host/x" in str(caught.value)
    assert "topsecret" not in shown.split("StorageError")[-1]
    assert caught.value.__cause__ is None


def test_fsspec_password_in_a_url_is_hidden(silent):
    storage = open_storage(
        URL.parse(f"sftp://user:topsecret@127.0.0.1:{silent}/run"),
        {"timeout": 0.3, "deadline": 0.5, "passphrase": "alsosecret"},
    )
    assert {"topsecret", "alsosecret"} <= set(storage._client.secrets)
    with pytest.raises(StorageError) as caught:
        asyncio.run(storage.stat("file"))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_fsspec_forked_child_opens_its_own_connections(sshd, tmp_path):
    options = {"client_keys": [str(sshd.client_key)], "known_hosts": str(sshd.known_hosts)}
    path = f"sftp://{sshd.username}@{sshd.host}:{sshd.port}{tmp_path}/step"
    Snapshot.take(path, state(), storage_options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os._exit(0 if Snapshot(path, storage_options=options).verify() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Snapshot(path, storage_options=options).verify()


def test_fsspec_sftp_unknown_host_key_is_refused(sshd, tmp_path):
    path = f"sftp://{sshd.username}@{sshd.host}:{sshd.port}{tmp_path}/step"
    given = {"client_keys": [str(sshd.client_key)], "deadline": 5}
    with pytest.raises(StorageError, match=r"(?i)host key"):
        Snapshot.take(path, state(), storage_options=given)


# The registry


@pytest.mark.parametrize("text", ["sftp://h/x", "zip://a::s3://b/c", "simplecache::s3://b/x", "fsspec+s3://b/x"])
def test_fsspec_opens_the_schemes_it_knows(text):
    assert plugin_for(URL.parse(text)) is FsspecStorage


def test_fsspec_unknown_scheme_is_an_error():
    with pytest.raises(StorageError, match="no storage plugin"):
        plugin_for(URL.parse("zzzzzz://x"))


def test_fsspec_missing_package_is_named():
    with pytest.raises(MissingExtraError, match="smbprotocol"):
        open_storage(URL.parse("smb://host/share/run"))


def test_fsspec_sweep_removes_files_of_a_killed_process():
    async def use():
        storage = open_storage(URL.parse(f"fsspec+memory://{secrets.token_hex(8)}"))
        writer = await storage.create("data/file", 10)
        await writer.write(0, [b"12345"])
        assert await storage.list() == []
        assert await storage.sweep("data/", 3600) == []
        [left] = await storage.sweep("data/", -1)
        assert left.startswith("data/.file.")
        await storage.close()

    asyncio.run(use())


# Calls that replace those of a client


class WebDavServer:
    """Files, as webdav4's file system has them, and its client: both with the calls that are used."""

    def __init__(self, ranges=True, **files):
        self.files, self.ranges, self.calls, self.late = dict(files), ranges, [], {}
        self.client = self.http = self

    def join_url(self, path):
        return f"https://host/{path}"

    def stream(self, method, url, headers, follow_redirects):
        self.calls.append((method, url, headers.get("Range"), headers["Accept-Encoding"], follow_redirects))
        data = self.files[url.removeprefix("https://host/")]
        found = headers.get("Range") if self.ranges else None
        if found:
            begin, _, end = found.removeprefix("bytes=").partition("-")
            data = data[int(begin) : int(end) + 1]
        return SentBytes(206 if found else 200, data)

    def move(self, source, path, overwrite=False):
        self.calls.append(("move", source, path, overwrite))
        for name in list(self.files):
            if f"{name}/".startswith(f"{source}/"):
                self.files[path + name[len(source) :]] = self.files.pop(name)
        self.files.update({f"{path}/{name}": data for name, data in self.late.items()})
        self.late = {}

    def ls(self, path, detail):
        assert not detail
        return [name for name in self.files if name.startswith(f"{path}/")]

    def info(self, path):
        return {"type": "directory" if self.ls(path, detail=False) or path not in self.files else "file"}

    def makedirs(self, path, exist_ok):
        self.calls.append(("makedirs", path, exist_ok))

    def rm_file(self, path):
        self.calls.append(("rm_file", path))
        for name in list(self.files):
            if f"{name}/".startswith(f"{path}/"):
                del self.files[name]


class SentBytes:
    def __init__(self, status, data):
        self.status_code, self.data = status, data

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def raise_for_status(self):
        pass

    def iter_bytes(self):
        for at in range(0, len(self.data), 3):
            yield self.data[at : at + 3]
            self.read = at + 3


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(("start", "end"), [(None, None), (0, 10), (0, 1), (4, 5), (4, 9), (3, 6), (9, 10), (7, 12)])
def test_read_range_takes_one_request_also_without_ranges(ranges, start, end):
    data = b"0123456789"
    server = WebDavServer(ranges, **{"a b": data})
    assert client.read_range(server, "a b", start, end) == data[start:end]
    wanted = None if start is None else f"bytes={start}-{end - 1}"
    assert server.calls == [("GET", "https://host/a b", wanted, "identity", True)]


def test_remove_file_refuses_a_folder():
    server = WebDavServer(**{"a": b"", "b/c": b""})
    client.remove_file(server, "a")
    with pytest.raises(IsADirectoryError):
        client.remove_file(server, "b")
    assert server.files == {"b/c": b""}


@pytest.mark.parametrize("path", ["folder", "run/folder"])
def test_remove_folder_keeps_files_that_come_meanwhile(path):
    server = WebDavServer(**{"other": b""})
    client.remove_folder(server, path)
    (_, source, aside, _), removed = server.calls
    assert (source, removed) == (path, ("rm_file", aside))
    assert aside.startswith(f"{path.rpartition('folder')[0]}.folder.")
    assert aside.endswith(".tmp")
    server.calls.clear()
    server.late = {"late": b"1"}
    client.remove_folder(server, path)
    assert server.files == {"other": b"", f"{path}/late": b"1"}
    assert server.calls[1] == ("makedirs", path, True)
    with pytest.raises(OSError, match="not empty") as caught:
        client.remove_folder(server, path)
    assert caught.value.errno == errno.ENOTEMPTY
    assert server.files == {"other": b"", f"{path}/late": b"1"}


def test_move_file_replaces_in_one_step():
    server = WebDavServer(a=b"new", b=b"old")
    client.move_file(server, "a", "b")
    assert server.files == {"b": b"new"}
    assert server.calls == [("move", "a", "b", True)]


def test_defaults_of_ssh_end_calls_that_were_given_up():
    found = client._ssh_defaults(RetryPolicy(timeout=8.0))
    assert found == {"connect_timeout": 8.0, "login_timeout": 8.0, "keepalive_interval": 4.0, "known_hosts": ()}
    assert client._ssh_defaults(RetryPolicy(timeout=1.0))["keepalive_interval"] == 1


def test_close_of_an_archive_and_of_ssh_closes_what_they_hold(monkeypatch):
    closed = []
    held = SimpleNamespace(close=lambda: closed.append("file"))
    client._close_zip(SimpleNamespace(close=lambda: closed.append("archive"), of=held))
    assert closed == ["archive", "file"]
    monkeypatch.setattr(
        client, "sync", lambda loop, function, *args, **more: closed.append((loop, function, args, more))
    )
    fs = SimpleNamespace(
        loop="loop", _pool=SimpleNamespace(close="pool"), _stack=SimpleNamespace(aclose="stack"), _rmdir="rmdir"
    )
    client._close_ssh(fs)
    client._remove_folder_by_ssh(fs, "path")
    assert closed[2:] == [
        ("loop", "pool", (), {"timeout": 2}), ("loop", "stack", (), {"timeout": 2}), ("loop", "rmdir", ("path",), {})
    ]  # fmt: skip


def test_disconnect_closes_each_file_system_of_a_chain(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("name", b"content")
    links = client.parse_chain(f"zip://::file://{tmp_path}/a.zip", {}, RetryPolicy())
    chain = client.connect(links, client.chain_traits(links))
    assert chain.outer.cat_file("name") == b"content"
    client.disconnect(chain)
    with pytest.raises(ValueError, match="closed"):
        chain.outer.cat_file("name")


# Threads that call a file system


def on_lane(work, threads=2):
    made, closed = [], []

    def make():
        made.append(threading.current_thread().name)
        return f"system {len(made)}"

    async def body():
        return await work(client.Lane(make, closed.append, threads))

    return asyncio.run(body()), made, closed


def test_lane_makes_one_file_system_and_calls_it_in_its_threads():
    async def work(lane):
        calls = [lane.call(lambda system, n=n: (system, n, threading.current_thread().name)) for n in range(5)]
        found = await asyncio.gather(*calls)
        with pytest.raises(KeyError):
            await lane.call(lambda _: {}["x"])
        assert lane.usable
        assert lane._started == 2
        assert not lane._jobs
        lane.retire()
        assert not lane.usable
        with pytest.raises(TransientError, match="abandoned") as caught:
            await lane.call(lambda _: 1)
        assert caught.value.refused
        return found

    found, made, _ = on_lane(work)
    assert found == [("system 1", n, "snapshot-fsspec") for n in range(5)]
    assert made == ["snapshot-fsspec"]


def test_lane_is_retired_by_a_call_that_is_cancelled_while_it_runs():
    begun, over = threading.Event(), threading.Event()

    def hang(_):
        begun.set()
        over.wait(60)

    async def work(lane):
        running = asyncio.ensure_future(lane.call(hang))
        await asyncio.to_thread(begun.wait, 60)
        waiting = asyncio.ensure_future(lane.call(lambda _: 1))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert lane.usable, "the call had not begun"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not lane.usable
        over.set()

    on_lane(work, threads=1)


def test_lane_restarts_the_clocks_of_a_starting_call_but_not_of_running_ones():
    class Clock:
        started = 0

        def progress(self):
            self.started += 1

    begun, over, errors = threading.Event(), threading.Event(), []
    first, second = Clock(), Clock()

    def hang(_):
        begun.set()
        over.wait(60)

    async def work(lane):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        running = asyncio.ensure_future(lane.call(hang, first))
        await asyncio.to_thread(begun.wait, 60)
        await lane.call(lambda _: 1)
        await lane.call(lambda _: 1, second)
        over.set()
        await running

    on_lane(work)
    assert (first.started, second.started, errors) == (1, 1, [])


# Files in short chunks


def in_memory(work, chunk=4, **options):
    """Run work on a storage that reads and writes four bytes at once."""

    async def body():
        storage = open_storage(URL.parse(f"fsspec+memory://chunks-{secrets.token_hex(4)}/run"), options)
        storage._client.chunk = chunk
        try:
            return await work(storage)
        finally:
            await storage.close()

    return asyncio.run(body())


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8, 11])
def test_files_of_any_length_are_written_and_read_in_chunks(size):
    data = pattern(size)

    async def work(storage):
        writer = await storage.create("a/file", size)
        half = size // 2
        await writer.write(0, [data[:half]])
        await writer.write(half, [data[half:]])
        assert "a/file" not in await storage.list()
        await writer.finish()
        assert await storage.list() == ["a/file"]
        for call in (writer.finish, lambda: writer.write(0, [b"x"])):
            with pytest.raises(ValueError, match="a/file"):
                await call()
        await writer.abort()
        assert await storage.get("a/file", limit=size) == data
        if size:
            with pytest.raises(StorageError, match=f"{size:,} bytes.* {size - 1:,} "):
                await storage.get("a/file", limit=size - 1)
        token = (await storage.stat("a/file")).token
        for begin in range(size + 1):
            for end in range(begin, size + 1):
                held = [bytearray(end - begin - (end - begin) // 2), bytearray((end - begin) // 2)]
                await storage.read_into("a/file", begin, held, token=token if begin % 2 else None)
                assert b"".join(held) == data[begin:end]
        with pytest.raises(CorruptSnapshotError, match=rf"a/file: ends at byte {size}, but"):
            await storage.read_into("a/file", 0, [bytearray(size + 1)])
        await storage.put("a/file", data + b"!")
        for held in ([bytearray(size)], []):
            with pytest.raises(StorageConflictError, match="a/file"):
                await storage.read_into("a/file", 0, held, token=token)
        with pytest.raises(StorageNotFoundError):
            await storage.stat("a")
        await storage.delete(["a/file", "none"])
        assert await storage.list("", recursive=False) == []

    in_memory(work)


def test_writer_takes_its_parts_in_order_and_leaves_nothing_when_aborted():
    async def work(storage):
        writer = await storage.create("file", 10)
        for offset, length in ((-1, 2), (8, 3), (10, 1)):
            with pytest.raises(StorageError, match=rf"bytes {offset}-{offset + length} .* 10"):
                await writer.write(offset, [bytes(length)])
        with pytest.raises(StorageError, match="expected offset 0, got 4"):
            await writer.write(4, [b"4567"])
        await writer.write(0, [b"0123", b"45"])
        with pytest.raises(StorageError, match="expected offset 6, got 0"):
            await writer.write(0, [b"0123"])
        with pytest.raises(StorageError, match="byte 6 of 10"):
            await writer.finish()
        await writer.abort()
        await writer.abort()
        assert await storage.list() == []
        assert storage._client.url.join("file")
        writer = await storage.create("file", 3)
        await writer.write(0, [b"012"])
        await writer.abort()
        assert await storage.list() == []
        with pytest.raises(StorageNotFoundError):
            await storage.get("file")

    in_memory(work)


class TooShort(MemoryFileSystem):
    """Gives half of what is asked for, now and then."""

    protocol = "tooshort"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    times = 0

    def cat_file(self, path, start=None, end=None, **kwargs):
        found = super().cat_file(path, start, end, **kwargs)
        if type(self).times > 0 and start is not None:
            type(self).times -= 1
            return found[:1]
        return found


def test_reads_that_get_too_few_bytes_are_repeated(told, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    register_implementation("tooshort", TooShort, clobber=True)
    data = pattern(11)

    async def body(times, **options):
        TooShort.times = 0
        TooShort.store["tooshort://run/file"] = MemoryFile(TooShort(), "/run/file", data)
        storage = open_storage(URL.parse("fsspec+tooshort://run"), options)
        storage._client.chunk = 4
        try:
            TooShort.times = times
            held = bytearray(9)
            await storage.read_into("file", 1, [held])
            return held
        finally:
            TooShort.times = 0
            await storage.close()

    assert asyncio.run(body(2)) == data[1:10]
    assert [each.name for each in told] == ["retry"] * 2
    with pytest.raises(StorageError, match="got 1 bytes of 4 from byte 1 on"):
        asyncio.run(body(10**9, deadline=0.05))


def test_reader_counts_its_bytes_as_progress_of_the_attempt():
    async def work(storage):
        await storage.put("file", b"0123456789")
        held = bytearray(9)
        sink = BufferSink(storage.url.join("file"), 1, [held], None)
        attempt = retry.RequestAttempts(RetryPolicy())
        attempt.began = attempt.heard = 0.0
        mounted = await storage._client.mount()
        await FsspecReader(storage._client, mounted.lane(), "file", sink).fill(attempt)
        assert held == b"123456789"
        assert attempt.began > 0

    in_memory(work)
