"""Snapshots that a web server shows are read by few requests, and nothing is ever written; against nginx."""

import asyncio
import errno
import logging
import os
import socket
import traceback
from types import SimpleNamespace
from urllib.parse import quote, urlsplit

import aiohttp
import pytest
import torch

from snapshot import Snapshot, SnapshotError, SnapshotNotFoundError, StateDict, StorageError
from snapshot.errors import CorruptSnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.events import add_handler, remove_handler
from snapshot.io import bodies, retry
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, pattern
from snapshot_objectstore import http, web
from snapshot_objectstore.web import HttpStorage
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


# Responses, bodies and statuses, without a server

WHERE = URL.parse("https://host/run/file")


def test_request_body_is_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(bodies, "PIECE", 3)
    body = bodies.RequestBody([b"abc", b"defg", b"h"])
    assert [bytes(each) for each in body.pieces()] == [b"abc", b"def", b"g", b"h"]

    class Told:
        moved = 0

        def progress(self):
            self.moved += 1

    body.attempt, sent = Told(), []

    class Writer:
        transport = None

        async def write(self, piece):
            if self.transport is not None and len(sent) > 5:
                raise OSError
            sent.append(bytes(piece))

        async def drain(self):
            sent.append("drained")

    class Transport:
        high, aborted = None, 0

        def set_write_buffer_limits(self, high):
            self.high = high

        def abort(self):
            self.aborted += 1

    payload = http.BodyPayload(body)
    assert payload.size == 8
    asyncio.run(payload.write(Writer()))
    assert sent == [b"abc", "drained", b"def", "drained", b"g", "drained", b"h", "drained"]
    assert body.attempt.moved == 4
    sent.clear()
    writer = Writer()
    writer.transport = Transport()
    with pytest.raises(OSError):  # noqa: PT011 - the one above
        asyncio.run(payload.write(writer))
    assert (writer.transport.high, writer.transport.aborted, len(sent)) == (0, 1, 6)
    with pytest.raises(TypeError):
        payload.decode()
    asyncio.run(payload.close())


@pytest.mark.parametrize(
    ("header", "length", "found"),
    [
        ("bytes 4-9/10", 6, (4, 10)),
        (" bytes 4-9/* ", 6, (4, None)),
        (None, 6, (0, 6)),
        ("", None, (0, None)),
        ("items 4-9/10", 6, (0, 6)),
        ("bytes */10", 6, (0, 6)),
    ],
)
def test_parse_content_range(header, length, found):
    assert http.parse_content_range(header, length) == found


@pytest.mark.parametrize(
    ("status", "kind", "refused", "denied"),
    [
        (404, StorageNotFoundError, None, False),
        (410, StorageNotFoundError, None, False),
        (416, CorruptSnapshotError, None, False),
        (408, retry.TransientError, False, False),
        (425, retry.TransientError, True, False),
        (429, retry.TransientError, True, False),
        (499, StorageError, None, False),
        (500, retry.TransientError, False, False),
        (501, StorageError, None, False),
        (503, retry.TransientError, False, False),
        (505, StorageError, None, False),
        (400, StorageError, None, True),
        (401, StorageError, None, True),
        (403, StorageError, None, True),
        (402, StorageError, None, False),
        (405, StorageError, None, False),
    ],
)
def test_status_fault_translates_a_status(status, kind, refused, denied):
    fault = http.status_fault(http.StatusError(status, "Reason", "8", "why"), WHERE)
    assert type(fault) is kind
    assert "https://host/run/file" in str(fault)
    assert status == 416 or f"HTTP {status} Reason: why" in str(fault)
    assert getattr(fault, "refused", None) is refused
    assert getattr(fault, "after", 8.0) == 8.0
    assert (getattr(fault, "errno", None) == errno.EACCES) is denied


def test_status_error_reads_only_seconds_to_wait():
    assert [http.StatusError(503, "R", after).after for after in ("12", "", "soon", "1.5", "-1")] == [
        12.0,
        None,
        None,
        None,
        None,
    ]
    assert str(http.StatusError(503, "")) == "HTTP 503"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConnectionResetError(104, "reset"), retry.TransientError, "ConnectionResetError: reset"),
        (EOFError(), retry.TransientError, "EOFError"),
        (aiohttp.ClientPayloadError("https://secret"), retry.TransientError, "ClientPayloadError"),
        (aiohttp.ServerDisconnectedError(), retry.TransientError, "ServerDisconnectedError"),
        (OSError(28, "no space"), StorageError, "OSError: no space"),
        (aiohttp.InvalidURL("https://secret"), StorageError, "InvalidURL"),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), StorageError, "gaierror: unknown"),
    ],
)
def test_connection_fault_shows_no_text_of_the_client(error, kind, text):
    fault = http.connection_fault(error, WHERE)
    assert type(fault) is kind
    assert str(fault) == f"https://host/run/file: {text}"


def test_is_unknown_host_looks_at_causes():
    unknown, later = socket.gaierror(socket.EAI_NONAME, "x"), socket.gaierror(socket.EAI_AGAIN, "x")
    assert http.is_unknown_host(unknown)
    assert not http.is_unknown_host(later)
    assert not http.is_unknown_host(None)
    for name in ("os_error", "__cause__", "__context__"):
        for inner, known in ((unknown, True), (later, False)):
            outer = ValueError()
            setattr(outer, name, inner)
            assert http.is_unknown_host(outer) is known
    odd = ValueError()
    odd.os_error = "text"
    assert not http.is_unknown_host(odd)


# Attempts


def attempts(outcomes, *, within=None, timeout=20.0, deadline=60.0, monkeypatch):
    """Run a request with these outcomes; return the result or the error, the pauses, and the attempts."""
    pauses, seen, now = [], [], [100.0]

    async def sleep(seconds):
        pauses.append(seconds)
        now[0] += seconds

    async def request(attempt):
        seen.append((attempt.number, attempt.uncertain))
        now[0] += 1
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(retry.asyncio, "sleep", sleep)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    policy = retry.RetryPolicy(timeout, deadline)
    try:
        found = asyncio.run(retry.retry_request("get", WHERE, policy, request, within))
    except StorageError as error:
        found = error
    return found, pauses, seen


def busy(**more):
    return retry.TransientError("https://host/x: busy", **more)


def test_retry_doubles_the_pauses_up_to_the_longest(monkeypatch, told):
    found, pauses, seen = attempts([*(busy() for _ in range(10)), 7], deadline=500, monkeypatch=monkeypatch)
    assert found == 7
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 20, 20, 20])
    assert seen == [(1, False), *[(number, True) for number in range(2, 12)]]
    assert [each.name for each in told] == ["retry"] * 10


@pytest.mark.parametrize(("after", "first"), [(None, 0.2), (0.0, 0.2), (0.1, 0.2), (5.0, 5.0)])
def test_retry_waits_as_long_as_the_server_asks(after, first, monkeypatch):
    found, pauses, _ = attempts([busy(after=after), 7], monkeypatch=monkeypatch)
    assert (found, pauses) == (7, pytest.approx([first]))


def test_retry_of_a_refused_request_is_not_uncertain(monkeypatch):
    _, _, seen = attempts([busy(refused=True), busy(), busy(refused=True), 7], monkeypatch=monkeypatch)
    assert seen == [(1, False), (2, False), (3, True), (4, True)]


@pytest.mark.parametrize(
    ("within", "deadline", "count", "spent"),
    [
        (None, 10, 5, 8.0),
        (10, 60, 5, 8.0),
        (60, 10, 5, 8.0),
        (None, 7.1, 5, 8.0),
        (None, 6.9, 4, 5.4),
        (None, 1.1, 1, 1.0),
    ],
)
def test_retry_ends_at_the_deadline(within, deadline, count, spent, monkeypatch):
    """An attempt takes a second here. The last pause would end after the deadline."""
    found, pauses, seen = attempts([busy()], within=within, deadline=deadline, monkeypatch=monkeypatch)
    assert len(seen) == count == len(pauses) + 1
    assert type(found) is StorageError
    times = f"{count} attempts" if count > 1 else "1 attempt"
    assert str(found) == f"https://host/x: busy (failed after {times} in {spent:.1f} seconds)"
    assert found.uncertain


def test_retry_passes_other_errors_at_once(monkeypatch):
    for error, uncertain in ((StorageConflictError("x"), False), (StorageError("x"), False)):
        found, _, seen = attempts([error], monkeypatch=monkeypatch)
        assert found is error
        assert len(seen) == 1
        assert found.uncertain is uncertain
    found, _, _ = attempts([busy(), StorageError("x")], monkeypatch=monkeypatch)
    assert found.uncertain
    found, _, _ = attempts([busy(), StorageConflictError("x")], monkeypatch=monkeypatch)
    assert not found.uncertain, "the outcome of a condition is certain"


def test_retry_of_an_attempt_that_times_out_names_the_seconds(monkeypatch):
    found, _, seen = attempts([TimeoutError(), 7], monkeypatch=monkeypatch)
    assert (found, seen) == (7, [(1, False), (2, True)])
    found, _, _ = attempts([TimeoutError()], deadline=1.0, monkeypatch=monkeypatch)
    assert "https://host/run/file: no response to get in 1 seconds" in str(found)
    assert isinstance(found.__cause__, TimeoutError)
    found, _, _ = attempts([TimeoutError()], timeout=3.0, deadline=3.5, monkeypatch=monkeypatch)
    assert "no response to get in" in str(found)


def test_retry_gains_time_with_bytes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(retry, "time", SimpleNamespace(monotonic=lambda: now[0]))
    attempt = retry.RequestAttempts(retry.RetryPolicy(5.0, 60.0))
    now[0] = 3.0
    attempt.progress()
    assert (attempt.began, attempt.heard) == (0.0, 3.0)
    now[0] = 4.0
    attempt.gain()
    assert (attempt.began, attempt.heard) == (4.0, 4.0)

    async def clock():
        timer = attempt.time_out_after(100)
        async with timer:
            attempt.progress()
            left = timer.when() - asyncio.get_running_loop().time()
        return 0 < left <= 5.0

    assert asyncio.run(clock())


# The driver of web servers


class Answer:
    def __init__(self, status=200, length=None, body=b"", **headers):
        self.status, self.content_length, self.reason, self.closed = status, length, "Reason", 0
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}
        self.body, self.content = body, self

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None

    def __await__(self):
        yield from ()
        return self

    async def readany(self):
        found, self.body = self.body, b""
        return found

    def at_eof(self):
        return not self.body

    def close(self):
        self.closed += 1

    release = close


class Session:
    def __init__(self, **answers):
        self.answers, self.calls = answers, []

    def head(self, url, **more):
        self.calls.append(("head", url, more))
        return self.answers["head"]

    def get(self, url, **more):
        self.calls.append(("get", url, more))
        return self.answers["get"]


TIME = "Thu, 01 Jan 2026 00:00:00 GMT"
AT = 1767225600.0


@pytest.mark.parametrize(
    ("head", "get", "expected"),
    [
        (Answer(length=7, ETag="t", Last_Modified=TIME), None, (7, AT, "t")),
        (Answer(length=0, Last_Modified=TIME), None, (0, AT, f"{TIME} 0")),
        (Answer(length=7, Date=TIME), None, (7, AT, " 7")),
        (Answer(length=7), None, (7, 0.0, " 7")),
        (Answer(404), None, StorageNotFoundError),
        (Answer(410), None, StorageNotFoundError),
        (Answer(500), None, retry.TransientError),
        (Answer(405), Answer(206, 1, Content_Range="bytes 0-0/9", ETag="t"), (9, 0.0, "t")),
        (Answer(499), Answer(200, 9, ETag="t"), (9, 0.0, "t")),
        (Answer(200), Answer(416, 5, ETag="t", Content_Range="bytes */0"), (5, 0.0, "t")),
        (Answer(300, 7), Answer(404), StorageNotFoundError),
        (Answer(405), Answer(300), StorageError),
        (Answer(405), Answer(206, 1, Content_Range="bytes 0-0/*"), StorageError),
        (Answer(405), Answer(416), (0, 0.0, " 0")),
    ],
)
def test_driver_head_asks_for_one_byte_if_the_server_knows_no_head(head, get, expected):
    session = Session(head=head, get=get)
    driver = web.HttpDriver(session, "https://host", "q=1")
    if isinstance(expected, tuple):
        found = asyncio.run(driver.head("run/a b"))
        assert (found.size, found.mtime, found.token) == expected
    else:
        with pytest.raises((http.StatusError, StorageError)) as caught:
            asyncio.run(driver.head("run/a b"))
        fault = caught.value if isinstance(caught.value, StorageError) else driver.fault(caught.value, WHERE)
        assert type(fault) is expected
    calls = [("head", "https://host/run/a%20b?q=1", {"allow_redirects": True})]
    calls += [("get", "https://host/run/a%20b?q=1", {"headers": {"Range": "bytes=0-0"}})] if get else []
    assert session.calls == calls


def test_driver_read_checks_the_version_of_a_server_without_etags():
    for answer, outcome in (
        (Answer(206, 4, b"4567", Content_Range="bytes 4-7/10", Last_Modified=TIME), None),
        (Answer(206, 4, b"4567", Content_Range="bytes 4-7/11", Last_Modified=TIME), StorageConflictError),
        (Answer(300), http.StatusError),
    ):
        session, held = Session(get=answer), bytearray(4)
        driver = web.HttpDriver(session, "https://host", "")
        sink = bodies.BufferSink(WHERE, 4, [held], f"{TIME} 10")
        if outcome is None:
            asyncio.run(driver.read("k", sink))
            assert held == b"4567"
        else:
            with pytest.raises(outcome):
                asyncio.run(driver.read("k", sink))
        assert answer.closed == 1
        assert session.calls == [("get", "https://host/k", {"headers": {"Range": "bytes=4-7"}})]
    session = Session(get=Answer(200, 0))
    asyncio.run(web.HttpDriver(session, "https://host", "").read("k", bodies.BytesSink(WHERE, None)))
    assert session.calls[0][2] == {"headers": {}}
    with pytest.raises(NotImplementedError):
        asyncio.run(driver.list("", True, None))
    assert type(driver.fault(EOFError(), WHERE)) is retry.TransientError


@pytest.mark.parametrize(
    ("url", "options", "header"),
    [
        ("https://host/run", {}, None),
        ("https://host/run", {"token": "word"}, "Bearer word"),
        ("https://me:p%20w@host/run", {}, "Basic bWU6cCB3"),
        ("https://me:other@host/run", {"username": "you", "password": "p w"}, "Basic eW91OnAgdw=="),
        ("https://me:other@host/run", {"token": "word"}, "Bearer word"),
        ("https://host/run", {"headers": {"Authorization": "own"}}, "own"),
    ],
)
def test_headers_say_who_asks(url, options, header):
    storage = open_storage(URL.parse(url), options)
    assert storage._headers.get("Authorization") == header
    assert storage._headers["Accept-Encoding"] == "identity"
    assert header is None or header in storage.secrets()
    assert "identity" not in storage.secrets()
