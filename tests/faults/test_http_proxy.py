"""The fault proxy changes nothing that it was not told to, and each fault does what it says, and is seen to."""

import asyncio
import hashlib
import http.client
import os
import random
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tests.helpers import fault_proxy
from tests.helpers.fault_proxy import FaultProxy

PATTERN = random.Random(0).randbytes(1 << 20)
LONG = PATTERN * 50


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Nothing is counted here: connections of the proxy and of the server close a moment after a test."""


def content(nbytes):
    return LONG[:nbytes]


class Target(BaseHTTPRequestHandler):
    """`GET /length/N`, `/chunked/N`, `/close/N`, `/empty/STATUS`; `PUT` anything, answered with its digest."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        _, kind, number = self.path.partition("?")[0].split("/")
        if kind == "empty":
            return self.answer(int(number), None)
        whole = content(int(number))
        if (span := self.headers.get("Range")) is not None:
            begin, end = span.removeprefix("bytes=").split("-")
            return self.answer(206, whole[int(begin) : int(end) + 1])
        return self.answer(200, whole, kind)

    do_HEAD = do_GET

    def do_PUT(self):
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        body = bytearray()
        try:
            for piece in self.pieces():
                body += piece
        except EOFError:
            self.close_connection = True
            return None
        finally:
            self.server.came[self.path] = bytes(body)
            self.server.arrived.set()
        return self.answer(200, hashlib.sha256(body).hexdigest().encode())

    def pieces(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield from self.exactly(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline(), 16):
            yield from self.exactly(size)
            self.rfile.readline()
        self.rfile.readline()

    def exactly(self, left):
        while left:
            piece = self.rfile.read1(min(left, 1 << 20))
            if not piece:
                raise EOFError
            left -= len(piece)
            yield piece

    def answer(self, status, body, kind="length"):
        self.send_response(status)
        if kind == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
        elif kind == "close":
            self.send_header("Connection", "close")
        elif body is not None:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD" or body is None:
            return
        for begin in range(0, len(body), step := 1 << 18):
            piece = memoryview(body)[begin : begin + step]
            if kind == "chunked":
                self.wfile.write(f"{len(piece):x};of=it\r\n".encode())
            self.wfile.write(piece)
            if kind == "chunked":
                self.wfile.write(b"\r\n")
        if kind == "chunked":
            self.wfile.write(b"0\r\n\r\n")


class Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request, client_address):
        """Connections that break are what this is about."""


@pytest.fixture(scope="module")
def server():
    with Server(("127.0.0.1", 0), Target) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def target(server):
    server.seen = []
    server.came = {}
    server.arrived = threading.Event()
    return server


@pytest.fixture
def proxy(target):
    with FaultProxy(target.url) as proxy:
        yield proxy


@contextmanager
def client(proxy):
    with closing(http.client.HTTPConnection("127.0.0.1", int(proxy.url.rpartition(":")[2]), timeout=30)) as connection:
        yield connection


def ask(proxy, method, path, body=None, **headers):
    """Status, headers and body of the answer, on a connection of its own."""
    with client(proxy) as connection:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        with connection.getresponse() as response:
            return response.status, response.headers, response.read()


@contextmanager
def scripted():
    """A listener, and a proxy to it: the test itself is the target."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        FaultProxy(f"http://127.0.0.1:{listener.getsockname()[1]}/") as proxy,
    ):
        yield listener, proxy


@contextmanager
def accepted(listener):
    with closing(listener.accept()[0]) as connection:
        connection.settimeout(30)
        yield connection


@contextmanager
def raw(proxy, request=b""):
    with socket.create_connection(("127.0.0.1", int(proxy.url.rpartition(":")[2])), timeout=30) as connection:
        connection.sendall(request)
        yield connection


def all_of(connection):
    """What comes, and how it ends: in order, or reset."""
    came = bytearray()
    try:
        while piece := connection.recv(1 << 16):
            came += piece
    except ConnectionResetError:
        return bytes(came), "reset"
    return bytes(came), "end"


def exactly(connection, nbytes):
    came = b""
    while len(came) < nbytes:
        piece = connection.recv(nbytes - len(came))
        assert piece
        came += piece
    return came


def head_of(connection):
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += exactly(connection, 1)
    return head


def body_of(answer):
    return answer.partition(b"\r\n\r\n")[2]


def serving():
    """Whether the target still sees to a connection."""
    return any("process_request_thread" in thread.name for thread in threading.enumerate())


def silent(connection):
    return not select.select([connection], [], [], 0.05)[0]


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def get(path, *lines):
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: target", *lines, "", ""]).encode()


def put(path, nbytes):
    return f"PUT {path} HTTP/1.1\r\nHost: target\r\nContent-Length: {nbytes}\r\n\r\n".encode()


# ---- what is not to go wrong


@pytest.mark.parametrize("kind", ["length", "chunked", "close"])
def test_fault_proxy_passes_a_long_response_unchanged(proxy, kind):
    status, _, body = ask(proxy, "GET", f"/{kind}/{len(LONG)}")
    assert status == 200
    assert body == LONG
    [passed] = proxy.requests
    assert (passed.status, passed.request_bytes, passed.response_bytes) == (200, 0, len(LONG))


def test_fault_proxy_passes_a_long_request_unchanged(proxy, target):
    status, _, digest = ask(proxy, "PUT", "/it", LONG)
    assert (status, digest.decode()) == (200, hashlib.sha256(LONG).hexdigest())
    assert target.came["/it"] == LONG
    assert [(each.request_bytes, each.response_bytes) for each in proxy.requests] == [(len(LONG), 64)]


def test_fault_proxy_passes_a_chunked_request_unchanged(proxy, target):
    pieces = [LONG[:1], LONG[1:70_000], LONG[70_000:3_000_000], LONG[3_000_000:3_000_002]]
    assert ask(proxy, "PUT", "/it", iter(pieces))[0] == 200
    assert target.came["/it"] == LONG[:3_000_002]
    assert proxy.requests[0].request_bytes == 3_000_002


def test_fault_proxy_passes_headers_and_chunked_bodies_byte_for_byte():
    """Signatures cover them: so no header is added, left out, or written in another way."""
    request = (
        b"POST /a%20b//c?x=1&y HTTP/1.1\r\nhOsT:  elsewhere:1 \r\nX-Two: 1\r\nX-Two: 2\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
        b"5;name=value\r\nhello\r\n00A\r\n0123456789\r\n0\r\nTrailer: yes\r\nAnd: another\r\n\r\n"
    )
    answer = b"HTTP/1.1 299 Odd one\r\nSet-Cookie: a\r\nset-cookie: b\r\nContent-Length:3\r\n\r\nabc"
    with scripted() as (listener, proxy), raw(proxy, request) as connection, accepted(listener) as at_target:
        assert exactly(at_target, len(request)) == request
        at_target.sendall(answer)
        assert exactly(connection, len(answer)) == answer
        assert silent(connection)
        [passed] = proxy.requests
    assert (passed.method, passed.path, passed.status) == ("POST", "/a%20b//c?x=1&y", 299)
    assert (passed.headers["host"], passed.headers["x-two"]) == ("elsewhere:1", "1, 2")
    assert (passed.request_bytes, passed.response_bytes, passed.fault) == (15, 3, None)


def test_fault_proxy_keeps_a_connection_alive(proxy, target):
    with client(proxy) as connection:
        for number in range(20):
            method, body = ("PUT", b"x" * number) if number % 3 else ("GET", None)
            connection.request(method, f"/length/{number}", body)
            assert len(connection.getresponse().read()) == (64 if body else number)
    assert proxy.connections == 1
    assert proxy.count() == proxy.count("*", "/length/*") == len(target.seen) == 20
    assert proxy.count("GET") == proxy.count("*", lambda passed: passed.method == "GET") == 7
    until(lambda: not proxy.open_connections)


def test_fault_proxy_passes_pipelined_requests(proxy):
    with raw(proxy, get("/length/3") + get("/chunked/4") + get("/length/5", "Connection: close")) as connection:
        answers, end = all_of(connection)
    assert end == "end"
    assert answers.count(b"HTTP/1.1 200 OK") == 3
    assert [each.response_bytes for each in proxy.requests] == [3, 4, 5]


def test_fault_proxy_response_without_a_body_keeps_the_connection_usable(proxy):
    with client(proxy) as connection:
        for method, path in [
            ("HEAD", "/length/1000"),
            ("HEAD", "/chunked/9"),
            ("GET", "/empty/204"),
            ("GET", "/empty/304"),
        ]:
            connection.request(method, path)
            response = connection.getresponse()
            assert response.read() == b""
            if path == "/length/1000":
                assert response.headers["Content-Length"] == "1000"
    assert (proxy.connections, proxy.count()) == (1, 4)


def test_fault_proxy_passes_100_continue_of_the_target(proxy, target):
    with raw(proxy, put("/it", 5).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")) as connection:
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 OK\r\n")
    assert target.came["/it"] == b"hello"


def test_fault_proxy_sends_100_continue_if_the_target_is_not_asked(proxy, target):
    proxy.fault(status=503)
    with raw(proxy, put("/it", 5).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n")) as connection:
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert target.seen == []


def test_fault_proxy_with_many_clients_at_once(proxy):
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda number: ask(proxy, "GET", f"/length/{number}")[2], range(100_000, 100_064)))
    assert answers == [content(number) for number in range(100_000, 100_064)]
    assert proxy.count() == 64
    assert 1 <= proxy.peak <= 16


def test_fault_proxy_answers_502_if_the_target_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with FaultProxy(f"http://127.0.0.1:{port}") as proxy, client(proxy) as connection:
        for _ in range(2):
            connection.request("PUT", "/it", b"thrown away")
            response = connection.getresponse()
            assert response.status == 502
            assert b"can't be reached" in response.read()
        assert [each.status for each in proxy.requests] == [502, 502]


def test_fault_proxy_resets_a_connection_that_is_not_http(proxy):
    with raw(proxy, b"\x16\x03\x01 a greeting\r\n\r\n") as connection:
        assert all_of(connection) == (b"", "reset")
    assert proxy.requests == []


def test_fault_proxy_reconnects_to_a_target_that_closed_between_requests():
    with scripted() as (listener, proxy), raw(proxy) as connection:
        for _ in range(2):
            connection.sendall(get("/"))
            with accepted(listener) as at_target:
                assert exactly(at_target, len(get("/"))) == get("/")
                at_target.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                assert b"200 OK" in head_of(connection)
        assert (proxy.connections, proxy.count()) == (1, 2)


def test_fault_proxy_passes_a_response_sent_before_the_end_of_the_request():
    with scripted() as (listener, proxy), raw(proxy, put("/it", 1000)) as connection, accepted(listener) as at_target:
        at_target.sendall(b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")
        assert head_of(connection).startswith(b"HTTP/1.1 403 ")
        assert exactly(connection, 2) == b"no"
        connection.sendall(b"x" * 1000)
        assert all_of(connection) == (b"", "end")


@pytest.mark.parametrize("reset", [False, True])
def test_fault_proxy_passes_on_how_the_target_closes(reset):
    with scripted() as (listener, proxy), raw(proxy, get("/")) as connection:
        with accepted(listener) as at_target:
            if not reset:
                exactly(at_target, len(get("/")))  # what is unread makes the end a reset
            else:
                assert select.select([at_target], [], [], 30)[0]
        assert all_of(connection) == (b"", "reset" if reset else "end")


# ---- what is to go wrong


def test_fault_proxy_status_is_sent_instead_of_the_response(proxy, target):
    fault = proxy.fault(method="PUT", status=503, body=b"<Code>SlowDown</Code>", headers={"Retry-After": "1"})
    with client(proxy) as connection:
        connection.request("PUT", "/it", LONG[:5_000_000])
        response = connection.getresponse()
        assert (response.status, response.headers["Retry-After"]) == (503, "1")
        assert response.read() == b"<Code>SlowDown</Code>"
        assert target.seen == []
        connection.request("PUT", "/it", b"again")
        assert connection.getresponse().read()
    assert (fault.hits, fault.met, proxy.connections) == (1, 2, 1)
    assert [(each.status, each.fault is not None) for each in proxy.requests] == [(503, True), (200, False)]
    assert proxy.requests[0].request_bytes == 5_000_000


def test_fault_proxy_status_of_a_head_request_has_no_body(proxy):
    proxy.fault(status=503, body=b"four", times=None)
    with client(proxy) as connection:
        for _ in range(2):
            connection.request("HEAD", "/it")
            response = connection.getresponse()
            assert (response.status, response.headers["Content-Length"], response.read()) == (503, "4", b"")


@pytest.mark.parametrize("kind", ["length", "chunked", "close"])
@pytest.mark.parametrize("at", [0, 1, 100_000, 3_000_000])
def test_fault_proxy_reset_at_resets_a_response_at_a_byte(proxy, kind, at):
    fault = proxy.fault(path=f"/{kind}/*", reset_at=at)
    with client(proxy) as connection:
        connection.request("GET", f"/{kind}/4000000")
        with connection.getresponse() as response:
            came = response.read(at) if at else b""
            with pytest.raises(ConnectionResetError):
                response.read(1)
    assert (came, fault.hits) == (content(at), 1)
    assert "reset_at" in proxy.requests[0].fault
    assert ask(proxy, "GET", f"/{kind}/3")[2] == content(3)


def test_fault_proxy_reset_at_delivers_every_byte_before_the_reset(proxy):
    """A reset throws away what the client's kernel has not yet: the proxy waits until it has."""
    proxy.fault(reset_at=20_000_000)
    with raw(proxy, get("/length/30000000")) as connection:
        assert select.select([connection], [], [], 30)[0]  # it has begun, and waits for who reads it
        answer, end = all_of(connection)
    assert end == "reset"
    assert body_of(answer) == content(20_000_000)


def test_fault_proxy_close_at_ends_a_response_at_a_byte(proxy):
    fault = proxy.fault(close_at=100_000)
    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy, "GET", "/length/4000000")
    assert caught.value.partial == content(100_000)
    assert (fault.hits, proxy.requests[0].response_bytes) == (1, 100_000)


def test_fault_proxy_reset_before_resets_before_a_response(proxy, target):
    proxy.fault(reset_before=True)
    with raw(proxy, get("/length/3")) as connection:
        assert all_of(connection) == (b"", "reset")
    assert target.seen == []
    assert [each.status for each in proxy.requests] == [0]


@pytest.mark.parametrize("at", [0, 1, 100_000])
def test_fault_proxy_reset_upload_at_resets_a_request_at_a_byte(proxy, target, at):
    proxy.fault(reset_upload_at=at)
    with raw(proxy, put("/it", 1_000_000) + content(at)) as connection:
        assert all_of(connection) == (b"", "reset")
    assert target.arrived.wait(30)
    assert content(at).startswith(target.came["/it"])  # it may have been reset before it read that
    assert proxy.requests[0].request_bytes == at


@pytest.mark.parametrize("bit", [0, 8 * 700_000 + 3, 8 * 1_000_000 + 5])
def test_fault_proxy_flip_changes_a_bit_of_a_response(proxy, bit):
    proxy.fault(flip=bit)
    spoilt = bytearray(content(1_000_000))
    spoilt[bit // 8 % len(spoilt)] ^= 1 << bit % 8
    assert ask(proxy, "GET", "/length/1000000")[2] == spoilt


def test_fault_proxy_flip_changes_a_bit_of_a_request(proxy, target):
    proxy.fault(flip=8 * 600_000, side="request", times=2)
    spoilt = bytearray(content(1_000_000))
    spoilt[600_000] ^= 1
    ask(proxy, "PUT", "/it", content(1_000_000))
    ask(proxy, "PUT", "/chunked", iter([content(1_000_000)[:600_000], content(1_000_000)[600_000:]]))
    assert target.came == {"/it": spoilt, "/chunked": spoilt}


def test_fault_proxy_hang_holds_a_request_until_release(proxy, target):
    fault = proxy.fault(hang=True)
    with raw(proxy, put("/it", 5) + b"hello") as connection:
        fault.wait_reached()
        assert silent(connection)
        assert (proxy.requests, target.seen) == ([], [])
        fault.release()
        assert all_of(connection) == (b"", "end")
    assert proxy.requests[0].request_bytes == 5
    assert ask(proxy, "GET", "/length/3")[2] == content(3)


def test_fault_proxy_hang_ends_if_the_client_closes(proxy):
    fault = proxy.fault(hang=True)
    with raw(proxy, get("/length/3")):
        fault.wait_reached()
        assert (proxy.under_way, proxy.open_connections) == (1, 1)
    until(lambda: not proxy.open_connections)
    assert (proxy.under_way, proxy.count()) == (0, 1)


def test_fault_proxy_hang_at_holds_a_response_at_a_byte_until_release(proxy):
    fault = proxy.fault(hang_at=100_000)
    with raw(proxy, get("/length/3000000", "Connection: close")) as connection:
        head_of(connection)
        assert exactly(connection, 100_000) == content(100_000)
        assert silent(connection)
        assert (fault.hits, proxy.requests) == (1, [])
        fault.release()
        assert all_of(connection) == (content(3_000_000)[100_000:], "end")


def test_fault_proxy_lose_answer_drops_the_response_after_the_target_acted(proxy, target):
    proxy.fault(method="PUT", lose_answer=True)
    with raw(proxy, put("/it", 5) + b"hello") as connection:
        assert all_of(connection) == (b"", "reset")
    assert target.came["/it"] == b"hello"
    assert [(each.status, each.response_bytes) for each in proxy.requests] == [(0, 0)]


def test_fault_proxy_lose_answer_hang_keeps_the_connection_open(proxy, target):
    fault = proxy.fault(method="PUT", lose_answer="hang")
    with raw(proxy, put("/it", 5) + b"hello") as connection:
        fault.wait_reached()
        assert target.came["/it"] == b"hello"
        assert silent(connection)
        fault.release()
        assert all_of(connection) == (b"", "end")


def test_fault_proxy_delay_delays_a_request(proxy, target, pauses):
    fault = proxy.fault(delay=0.2)
    with raw(proxy, get("/length/3", "Connection: close")) as connection:
        fault.wait_reached()
        assert target.seen == []
        assert body_of(all_of(connection)[0]) == content(3)
    assert [each for each in pauses if each] == [0.2]


def test_fault_proxy_ignore_range_returns_the_whole_body(proxy, target):
    assert ask(proxy, "GET", "/length/10", Range="bytes=2-4")[::2] == (206, content(10)[2:5])
    fault = proxy.fault(ignore_range=True, times=None, must_happen=False)
    assert ask(proxy, "GET", "/length/10", Range="bytes=2-4")[::2] == (200, content(10))
    ask(proxy, "GET", "/length/10")
    assert (fault.hits, fault.met) == (1, 2)  # there was nothing to ignore in the second


def test_fault_proxy_truncate_cuts_a_response_and_adjusts_its_length(proxy):
    proxy.fault(truncate=1000, nth=2)
    proxy.fault(truncate=1000, method="HEAD", must_happen=False)
    with client(proxy) as connection:
        for nbytes in (3_000_000, 2_999_000, 3_000_000):
            connection.request("GET", "/length/3000000")
            response = connection.getresponse()
            assert response.headers["Content-Length"] == str(nbytes)
            assert response.read() == content(nbytes)
    assert proxy.connections == 1


# ---- which, and how many


def test_fault_proxy_faults_match_method_path_header_and_number(proxy):
    by_query = proxy.fault("GET", "*?part=2", status=501)
    by_header = proxy.fault(path=lambda request: "range" in request.headers, nth=2, times=2, status=502)
    always = proxy.fault("P*", times=None, status=504)
    asked = ["/length/3", "/length/3?part=1", "/length/3?part=2", "/length/3?part=2"]
    assert [ask(proxy, "GET", path)[0] for path in asked] == [200, 200, 501, 200]
    assert [ask(proxy, "GET", "/length/3", Range="bytes=0-1")[0] for _ in range(4)] == [206, 502, 502, 206]
    assert [ask(proxy, "PUT", "/it")[0] for _ in range(3)] == [504, 504, 504]
    assert [each.hits for each in (by_query, by_header, always)] == [1, 2, 3]
    proxy.heal()
    assert ask(proxy, "PUT", "/it")[0] == 200


def test_fault_proxy_request_that_two_faults_match_uses_the_first(proxy):
    proxy.fault(status=501, times=2)
    proxy.fault(status=502)
    assert [ask(proxy, "GET", "/length/3")[0] for _ in range(4)] == [501, 501, 502, 200]


def test_fault_proxy_fault_that_never_happened_fails_the_test(target):
    def use(**fault):
        with FaultProxy(target.url) as proxy:
            proxy.fault(**fault)
            ask(proxy, "GET", "/length/3")
            proxy.heal()

    with pytest.raises(AssertionError, match=r"GET '/other', .*, 0 hits\) never happened: 0 requests matched"):
        use(method="GET", path="/other", hang=True)
    with pytest.raises(AssertionError, match="1 requests matched, 0 were chosen"):
        use(reset_before=True, nth=2)
    with pytest.raises(AssertionError, match="1 requests matched, 1 were chosen"):
        use(reset_at=4)  # it has only three
    use(reset_at=4, must_happen=False)
    with FaultProxy(target.url) as proxy:
        with pytest.raises(AssertionError, match="never happened"), proxy.fault(status=500):
            pass
        proxy.check()  # that one is over, and was told of


def test_fault_proxy_fault_as_a_context_manager_ends_with_it(proxy):
    with proxy.fault(status=503, times=None) as fault:
        assert ask(proxy, "GET", "/length/3")[0] == 503
    assert ask(proxy, "GET", "/length/3")[0] == 200
    assert fault.hits == 1


def test_fault_proxy_reports_a_failing_callable(target):
    def wrong(request):
        raise KeyError("wrong")

    with closing(FaultProxy(target.url)) as proxy:
        proxy.fault(path=wrong, status=500, must_happen=False)
        with raw(proxy, get("/length/3")) as connection:
            assert all_of(connection) == (b"", "reset")
    with pytest.raises(KeyError, match="wrong"):
        proxy.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"hang": False},
        {"status": 503, "hang": True},
        {"hang": True, "body": b""},
        {"flip": 1, "side": "up"},
        {"no": 1},
    ],
)
def test_fault_proxy_fault_must_have_exactly_one_effect(proxy, wrong):
    with pytest.raises(ValueError, match=r"exactly one|cannot be combined|side must be"):
        proxy.fault(**wrong)


@pytest.mark.parametrize("wrong", ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1/path"])
def test_fault_proxy_target_must_be_http_host_and_port(wrong):
    with pytest.raises(ValueError, match="target must be http://host:port"):
        FaultProxy(wrong)


# ---- limits and counters


def test_fault_proxy_concurrency_refuses_more_requests(proxy):
    proxy.concurrency = 2
    with proxy.fault(hang=True, times=2) as fault, raw(proxy, get("/1")), raw(proxy, get("/2")):
        until(lambda: fault.hits == 2)
        assert ask(proxy, "GET", "/length/3")[0] == 503
        assert (proxy.peak, proxy.refused, proxy.under_way, proxy.open_connections >= 2) == (2, 1, 2, True)
        assert repr(proxy).startswith(f"FaultProxy({proxy.url} -> {proxy.target}, 1 requests, 2 under way, ")
    until(lambda: proxy.under_way == 0)
    with client(proxy) as connection:
        for _ in range(10):  # a request is over when its answer is here
            connection.request("GET", "/length/3")
            assert connection.getresponse().read() == content(3)
    proxy.clear()
    assert (proxy.requests, proxy.peak, proxy.refused) == ([], 0, 0)


def test_fault_proxy_bandwidth_limits_both_directions_together(proxy):
    proxy.bandwidth = 10_000_000
    with ThreadPoolExecutor(2) as pool:
        answer = pool.submit(ask, proxy, "GET", "/length/2000000")
        pool.submit(ask, proxy, "PUT", "/it", content(2_000_000)).result()
        assert answer.result()[2] == content(2_000_000)
    proxy.bandwidth = None
    assert ask(proxy, "GET", "/length/30000000")[2] == content(30_000_000)


def test_fault_proxy_bandwidth_paces_the_bytes(proxy, monkeypatch):
    now = 0.0

    async def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(fault_proxy, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(fault_proxy, "asyncio", SimpleNamespace(sleep=sleep))
    proxy.bandwidth = 10_000_000

    async def passes():
        for _ in range(20):
            await proxy.pace(proxy.portion())

    asyncio.run(passes())
    assert proxy.portion() == 200_000
    assert now == pytest.approx(0.4)


@pytest.fixture
def pauses(monkeypatch):
    """The seconds that the proxy pauses for."""
    made = []

    async def sleep(seconds):
        if seconds:
            made.append(seconds)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(fault_proxy, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return made


def test_fault_proxy_latency_applies_to_every_request(proxy, pauses):
    proxy.latency = 0.1
    with client(proxy) as connection:
        for _ in range(2):
            connection.request("GET", "/length/3")
            connection.getresponse().read()
    assert pauses == [0.1, 0.1]


# ---- the end


def test_fault_proxy_close_ends_hanging_requests_and_leaves_no_threads(target):
    until(lambda: not serving())
    descriptors = len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    proxy = FaultProxy(target.url)
    faults = [
        proxy.fault(path="/hang", hang=True),
        proxy.fault(path="/length/1000000", hang_at=10),
        proxy.fault(path="/length/3", lose_answer="hang"),
        proxy.fault(path="/delay", delay=1000.0),
    ]
    asked = [get("/hang"), get("/length/1000000"), get("/length/3"), get("/delay"), b"GET /unfi", put("/it", 5)]
    with ExitStack() as stack:
        connections = [stack.enter_context(raw(proxy, request)) for request in asked]
        for fault in faults:
            fault.wait_reached()
        until(lambda: len(target.seen) == 3)
        proxy.close()
        assert [all_of(each)[1] for each in connections] == ["reset"] * 6
        with pytest.raises(ConnectionRefusedError):
            stack.enter_context(raw(proxy))
    proxy.close()
    proxy.check()
    assert (proxy.count(), proxy.under_way, proxy.open_connections) == (5, 0, 0)
    for fault in faults:
        fault.release()
    until(lambda: not serving())
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)


def test_fault_proxy_closed_at_once_leaves_nothing(target):
    for _ in range(20):
        proxy = FaultProxy(target.url)
        with raw(proxy, get("/length/3")):
            proxy.close()
