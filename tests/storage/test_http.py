"""Snapshots that a web server shows are read by few requests, and nothing is ever written; against nginx."""

import logging
import os
import traceback
from urllib.parse import quote, urlsplit

import pytest
import torch

from snapshot import Snapshot, SnapshotError, SnapshotNotFoundError, StateDict, StorageError
from snapshot.errors import StorageConflictError, StorageNotFoundError
from snapshot.events import add_handler, remove_handler
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL
from snapshot.plugins.network import retry
from snapshot.plugins.web import HttpStorage
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, pattern
from tests.helpers import storage_calls
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.storage_calls import patience

MiB = 1 << 20


@pytest.fixture
def place(nginx):
    """Puts a file where nginx shows it, as whoever publishes it would: a new one in the place of an old one."""

    def put(path, data):
        file = nginx.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.fresh")
        fresh.write_bytes(data)
        os.replace(fresh, file)

    return put


@pytest.fixture
def folder(tmp_path):
    """The name of a fresh folder."""
    return tmp_path.name + tmp_path.parent.name


class TestHttp(StorageTests):
    capabilities = HttpStorage.capabilities

    @pytest.fixture
    def url(self, nginx, folder, place):
        self.put = lambda path, data: place(f"{folder}/{path}", data)
        return f"{nginx.url}/{folder}"

    async def place(self, storage, path, data):
        self.put(path, data)


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What fails on purpose is tried again soon."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


def use(url, work, **options):
    """The same, with options by name."""
    return storage_calls.use(url, options, work)


def proxied(url):
    """A proxy in front of a server, and a URL by way of it."""
    parts = urlsplit(url)
    proxy = FaultProxy(f"http://{parts.netloc}")
    return proxy, proxy.url + parts.path


def state(fill=None):
    big = torch.arange(3000 * 1024, dtype=torch.float32).reshape(3000, 1024)
    made = {"big": big, **{f"t{i}": torch.full((10,), float(i)) for i in range(30)}}
    return {
        "s": StateDict({name: value if fill is None else value.clone().fill_(fill) for name, value in made.items()})
    }


# Snapshots


@pytest.fixture
def published(nginx, folder):
    """The URL of a snapshot."""
    Snapshot.take(nginx.folder / folder / "step 1", state())
    return f"{nginx.url}/{folder}/step%201"


def test_http_restore(published):
    live = state(fill=0)
    assert not Snapshot(published).restore(live).lines
    for name, value in state()["s"].items():
        assert torch.equal(live["s"][name], value), name
    assert Snapshot(published).verify()


def test_http_restore_and_read_object_send_few_requests(published):
    proxy, url = proxied(published)
    with proxy:
        Snapshot(url).restore(state(fill=0))
        assert proxy.count() <= 12, proxy.requests
        snapshot = Snapshot(url)
        snapshot.get_manifest()
        proxy.clear()
        row = snapshot.read_object("0/s/big", box=[1500])
        assert torch.equal(row, state()["s"]["big"][1500])
        assert proxy.count() <= 4, proxy.requests
        assert sum(each.response_bytes for each in proxy.requests) < MiB


def test_http_damaged_response_is_read_again(published):
    proxy, url = proxied(published)
    with proxy:
        proxy.fault("GET", lambda each: "range" in each.headers, flip=1000)
        live = state(fill=0)
        Snapshot(url).restore(live)
        assert torch.equal(live["s"]["big"], state()["s"]["big"])


def test_http_missing_snapshot_is_not_found(nginx, folder):
    with pytest.raises(SnapshotNotFoundError, match=folder):
        Snapshot(f"{nginx.url}/{folder}").restore(state())


def test_http_storage_is_read_only(nginx, published):
    proxy, url = proxied(published)
    with proxy:
        for write in [
            lambda: Snapshot.take(url + "-new", state()),
            lambda: Snapshot.take(url, state(), overwrite=True),
            lambda: Snapshot.async_take(url + "-new", state()).wait(),
            lambda: Snapshot(url).delete(),
        ]:
            with pytest.raises(SnapshotError, match=r"http://.*(read-only|cannot (write|delete|list))"):
                write()
        assert {each.method for each in proxy.requests} <= {"GET", "HEAD"}
    assert not Snapshot(published).restore(state(fill=0)).lines


# Who is let in


@pytest.mark.parametrize("how", ["url", "options", "quoted", "headers"])
def test_http_basic_authentication(nginx, folder, place, how):
    place(f"{folder}/file", b"content")
    bare, options = nginx.private.removeprefix("http://"), {}
    url = f"http://{bare}/{folder}"
    if how == "url":
        url = f"http://{nginx.user}:{nginx.password}@{bare}/{folder}"
    elif how == "quoted":
        url = f"http://{nginx.user}:{quote(nginx.password).replace('o', '%6f')}@{bare}/{folder}"
    elif how == "options":
        options = {"username": nginx.user, "password": nginx.password}
    else:
        options = {"headers": {"Authorization": "Basic dXNlcjpwYXNzd29yZA=="}}
    assert use(url, lambda storage: storage.get("file"), **options) == b"content"


def shown(error, caplog):
    """All that somebody sees of an error."""
    return "".join(traceback.format_exception(error)) + repr(error) + caplog.text


SECRETS = {
    "url": ("http://user:guessed@{at}/{folder}", {}, ["guessed"]),
    "options": ("http://{at}/{folder}", {"username": "user", "password": "guessed"}, ["guessed"]),
    "token": ("http://{at}/{folder}", {"token": "guessed-token"}, ["guessed-token"]),
    "headers": ("http://{at}/{folder}", {"headers": {"X-Api-Key": "guessed-key"}}, ["guessed-key"]),
    "query": ("http://{at}/{folder}?signature=guessed%2Fone", {}, ["guessed%2Fone", "guessed/one"]),
}


@pytest.mark.parametrize("what", ["refused", "reset", "damaged", "redirected for ever", "no server"])
@pytest.mark.parametrize("how", SECRETS)
def test_http_secrets_are_never_shown(nginx, folder, how, what, caplog):
    caplog.set_level(logging.DEBUG)
    proxy, at = proxied(nginx.private)
    text, options, secrets = SECRETS[how]
    url = text.format(at=at.removeprefix("http://"), folder=folder)
    options = {**options, "timeout": 0.3, "deadline": 0.3}
    events = []
    add_handler(events.append)
    try:
        with proxy:
            if what == "reset":
                proxy.fault(times=None, reset_before=True)
            elif what == "damaged":
                proxy.fault(times=None, status=200, body=b"{" * 20, headers={"Transfer-Encoding": "chunked"})
            elif what == "redirected for ever":
                where = url.partition("@")[2] or url.removeprefix("http://")
                proxy.fault(times=None, status=302, headers={"Location": f"http://{where}"})
            elif what == "no server":
                proxy.close()
            with pytest.raises(StorageError) as caught:
                Snapshot(url, storage_options=options).restore(state())
            proxy.heal()
    finally:
        remove_handler(events.append)
    assert not isinstance(caught.value, SnapshotNotFoundError)
    storage = open_storage(URL.parse(url), options)
    text = shown(caught.value, caplog) + repr(events) + repr(Snapshot(url)) + repr(storage)
    assert folder in text
    for secret in [*secrets, "dXNlcjpndWVzc2Vk"]:  # the latter is how basic authentication puts it
        assert secret not in text


def test_http_url_query_is_sent_with_every_request(nginx, folder, place):
    place(f"{folder}/file", b"content")
    proxy, url = proxied(nginx.url)
    with proxy:

        async def work(storage):
            await storage.stat("file")
            return await storage.get("file")

        assert use(f"{url}/{folder}?sv=1&sig=a%2Bb", work) == b"content"
        assert [each.path.partition("?")[2] for each in proxy.requests] == ["sv=1&sig=a%2Bb"] * 2


def test_http_password_is_not_sent_to_another_server_after_a_redirect(nginx, folder, place):
    place(f"{folder}/file", b"content")
    proxy, _ = proxied(nginx.url)
    other, elsewhere = proxied(nginx.url)
    with proxy, other:
        proxy.fault(status=302, headers={"Location": f"{elsewhere}/{folder}/file"})
        url = f"{proxy.url}/{folder}".replace("http://", "http://user:guessed@")
        assert use(url, lambda storage: storage.get("file")) == b"content"
        assert "authorization" in proxy.requests[0].headers
        assert "authorization" not in other.requests[0].headers


# What servers do


def test_http_server_that_ignores_ranges_returns_no_wrong_bytes(nginx, folder, place):
    data = pattern(300_000)
    place(f"{folder}/file", data)

    async def work(storage):
        assert await fetch(storage, "file", 0, [len(data)]) == data
        assert await fetch(storage, "file", 0, [1000]) == data[:1000]
        assert await storage.get("file") == data
        with pytest.raises(StorageError, match=r"must support range requests$"):  # and it was not tried again
            await fetch(storage, "file", 1000, [1000])

    use(f"{nginx.whole}/{folder}", work)


def test_http_redirect_is_followed(nginx, folder, place):
    data = pattern(1000)
    place(f"{folder}/file", data)
    proxy, _ = proxied(nginx.url)
    with proxy:

        async def work(storage):
            proxy.fault("HEAD", status=307, headers={"Location": f"{nginx.url}/{folder}/file"})
            assert (await storage.stat("file")).size == 1000
            proxy.fault("GET", status=307, headers={"Location": f"{nginx.url}/{folder}/file"})
            return await fetch(storage, "file", 10, [100])

        assert use(f"{proxy.url}/anywhere", work) == data[10:110]


def test_http_failing_server_is_retried_until_the_deadline(nginx, folder):
    with pytest.raises(StorageError, match=r"HTTP 500.*failed after \d+ attempts") as caught:
        use(f"{nginx.broken}/{folder}", lambda storage: storage.get("file"), deadline=0.5)
    assert type(caught.value) is StorageError


def test_http_slow_server_is_waited_for_while_bytes_arrive(nginx, folder, place):
    data = pattern(200_000)
    place(f"{folder}/file", data)
    proxy, url = proxied(nginx.url)
    with proxy:
        proxy.bandwidth = 100_000
        read = use(f"{url}/{folder}", lambda storage: fetch(storage, "file", 0, [len(data)]), timeout=1.2, deadline=1.2)
        assert read == data
        assert len(data) / proxy.bandwidth > 1.5, "longer than an attempt may be without a byte"
        assert proxy.count() == 1


def test_http_server_without_head_works(nginx, folder, place):
    place(f"{folder}/file", b"content")
    place(f"{folder}/empty", b"")
    proxy, url = proxied(nginx.url)
    with proxy:
        proxy.fault("HEAD", status=405, times=None)

        async def work(storage):
            return [(await storage.stat(path)).size for path in ["file", "empty"]]

        assert use(f"{url}/{folder}", work) == [7, 0]


@pytest.mark.parametrize(
    "fault", [{"reset_at": 400_000}, {"close_at": 400_000}, {"hang_at": 400_000}, {"status": 503, "times": 2}], ids=str
)
def test_http_interrupted_read_continues_where_it_ended(nginx, folder, place, fault):
    data = pattern(MiB)
    place(f"{folder}/file", data)
    proxy, url = proxied(nginx.url)
    with proxy:
        proxy.fault("GET", **fault)
        assert (
            use(f"{url}/{folder}", lambda storage: fetch(storage, "file", 5, [MiB - 5]), **patience(fault)) == data[5:]
        )
        begin = int(proxy.requests[-1].headers["range"].removeprefix("bytes=").partition("-")[0])
        assert (begin > 5) == ("status" not in fault)


def test_http_file_replaced_during_a_read_is_not_mixed(nginx, folder, place):
    def replace(event):
        if event.name == "retry":
            place(f"{folder}/file", pattern(MiB, seed=1))
            os.utime(nginx.folder / folder / "file", (1, 1))  # nginx makes its tag of the time and the size

    place(f"{folder}/file", pattern(MiB))
    proxy, url = proxied(nginx.url)
    add_handler(replace)
    try:
        with proxy:
            proxy.fault("GET", reset_at=400_000)
            with pytest.raises(StorageConflictError, match="replaced"):
                use(f"{url}/{folder}", lambda storage: fetch(storage, "file", 0, [MiB]))
    finally:
        remove_handler(replace)


def test_http_410_is_not_found(nginx, folder):
    proxy, url = proxied(nginx.url)
    with proxy:
        proxy.fault(status=410)
        with pytest.raises(StorageNotFoundError):
            use(f"{url}/{folder}", lambda storage: storage.stat("file"))
