"""Google Cloud Storage passes the contract, against an emulator; and bears what goes wrong on the way.

The emulator takes the question how far an upload has come for its end, so uploads that break off go to a server here.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.errors import StorageConflictError
from snapshot.io import retry
from snapshot.io.storage import ABSENT
from snapshot.testing import StorageTests
from snapshot.testing.conformance import fetch, pattern, store
from snapshot_objectstore.object_storage import ObjectStorage
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.storage_calls import PATIENT, patience, use

pytest.importorskip("gcsfs")
MiB = 1 << 20


class TestGcs(StorageTests):
    capabilities = ObjectStorage.capabilities
    test_a_path_that_is_no_plain_path_is_refused = None  # it is one check, tested in TestAzure

    @pytest.fixture
    def url(self, gcs):
        return f"gs://{gcs.bucket()}/folder"

    @pytest.fixture
    def options(self, gcs):
        return {"endpoint_url": gcs.url, "token": "anon", "project": gcs.project}


@pytest.fixture(autouse=True)
def impatience(monkeypatch):
    """What fails on purpose is tried again soon."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)


@pytest.fixture
def url(gcs):
    return f"gs://{gcs.bucket()}/run/step-1"


@pytest.fixture
def proxy(gcs):
    with FaultProxy(gcs.url) as proxy:
        yield proxy


@pytest.fixture
def given(gcs, proxy):
    return PATIENT | {"endpoint_url": proxy.url, "token": "anon", "project": gcs.project}


def state(fill=None, rows=1500):
    big = torch.arange(rows * 1024, dtype=torch.float32).reshape(rows, 1024)
    return {"s": StateDict(big=big if fill is None else torch.full_like(big, fill), small=torch.arange(3), step=5)}


def restored(url, options):
    live = state(fill=0)
    assert not Snapshot(url, storage_options=options).restore(live).lines
    return live["s"]["big"]


def test_gcs_take_and_restore(url, proxy, given):
    given["part_bytes"] = MiB
    Snapshot.take(url, state(), storage_options=given)
    assert proxy.count("PUT", "*upload_id=*") >= 5  # also the parts go by way of the endpoint that was given
    assert torch.equal(restored(url, given), state()["s"]["big"])
    snapshot = Snapshot(url, storage_options=given)
    assert snapshot.verify()
    assert torch.equal(snapshot.read_object("0/s/big", box=[7]), state()["s"]["big"][7])
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state(), storage_options=given)
    before = use(url, given, lambda storage: storage.list())
    Snapshot.async_take(url, state(fill=7), storage_options=given, overwrite=True).wait()
    assert restored(url, given).eq(7).all()
    assert len(use(url, given, lambda storage: storage.list())) == len(before)  # what was replaced is gone
    snapshot.delete()
    assert use(url, given, lambda storage: storage.list()) == []


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("POST", "*uploadType=resumable*", {"status": 503, "times": 2}),
        ("POST", "*uploadType=resumable*", {"lose_answer": True}),
        ("GET", "*alt=media*", {"status": 429, "times": 2, "headers": {"Retry-After": "0"}}),
        ("GET", "*alt=media*", {"reset_at": 400_000}),
        ("GET", "*alt=media*", {"hang_at": 400_000}),
        ("GET", "*fields=*", {"hang": True}),
    ],
    ids=str,
)
def test_gcs_retries_transient_faults(url, proxy, given, method, path, fault):
    async def work(storage):
        await store(storage, "data/file", data, part=MiB)
        assert await fetch(storage, "data/file", 0, [len(data)]) == data
        assert (await storage.stat("data/file")).size == len(data)

    data = pattern(3 * MiB + 5)
    proxy.fault(method, path, **fault)
    use(url, given | patience(fault), work)


def test_gcs_put_whose_response_is_lost_is_recognised(url, proxy, given):
    async def work(storage):
        with proxy.fault("POST", lose_answer=True):
            token = await storage.put("file", b"ours", expect=ABSENT)
        assert (await storage.stat("file")).token == token
        with proxy.fault("POST", lose_answer="hang"):
            token = await storage.put("file", b"again", expect=token)
        assert (await storage.stat("file")).token == token
        with proxy.fault("POST", status=500), pytest.raises(StorageConflictError):
            await storage.put("file", b"theirs", expect=ABSENT)
        assert await storage.get("file") == b"again"

    use(url, given | {"timeout": 1}, work)


def test_gcs_commit_whose_response_is_lost_is_a_commit(url, proxy, given):
    with proxy.fault("POST", "*ifGenerationMatch=*", lose_answer=True, times=2):
        Snapshot.take(url, state(), storage_options=given)
    assert torch.equal(restored(url, given), state()["s"]["big"])


def test_gcs_flipped_bit_in_transfer_is_found(url, proxy, given):
    Snapshot.take(url, state(), storage_options=given)
    with proxy.fault("GET", lambda each: "range" in each.headers, flip=12_345):
        assert torch.equal(restored(url, given), state()["s"]["big"])
    with (
        proxy.fault("GET", lambda each: "range" in each.headers, times=None, flip=12_345),
        pytest.raises(CorruptSnapshotError),
    ):
        restored(url, given)


def test_gcs_missing_bucket_is_named_at_once(given, proxy):
    url = "gs://no-such-bucket/run"
    body = json.dumps({"error": {"code": 404, "message": "The specified bucket does not exist."}}).encode()
    proxy.fault(times=None, status=404, body=body)
    with pytest.raises(StorageError, match=r"gs://no-such-bucket/run.*bucket does not exist") as caught:
        Snapshot.take(url, state(), storage_options=given)
    assert "given up" not in str(caught.value)


# Uploads that break off


class Sessions(BaseHTTPRequestHandler):
    """Resumable uploads as Google's documentation has them: what came is kept in multiples of 256 KiB."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        name = parse_qs(urlsplit(self.path).query)["name"][0]
        number = str(len(self.server.sessions))
        self.server.sessions[number] = {"name": name, "kept": bytearray(), "lock": threading.Lock()}
        # as behind a gateway, the server does not know under which name it is reached
        self.answer(200, {"Location": f"https://storage.invalid{urlsplit(self.path).path}?upload_id={number}"})

    def do_PUT(self):
        session = self.server.sessions[parse_qs(urlsplit(self.path).query)["upload_id"][0]]
        with session["lock"]:
            told, _, total = self.headers["Content-Range"].removeprefix("bytes ").partition("/")
            kept, length = session["kept"], int(self.headers["Content-Length"])
            self.server.puts.append((told, len(kept)))
            if told != "*":
                if int(told.partition("-")[0]) != len(kept):
                    self.close_connection = True
                    return self.answer(400, {})
                if not self.receive(kept, length, int(total)):
                    return None
            if len(kept) < int(total):
                return self.answer(308, {"Range": f"bytes=0-{len(kept) - 1}"} if kept else {})
            self.server.objects[session["name"]] = bytes(kept)
            return self.answer(200, {}, json.dumps({"size": str(len(kept)), "generation": "1"}).encode())

    def receive(self, kept, length, total):
        before, whole = len(kept), True
        try:
            while length:
                piece = self.rfile.read1(min(length, 1 << 16))
                if not piece:
                    raise ConnectionError
                kept += piece
                length -= len(piece)
        except ConnectionError:
            whole, self.close_connection = False, True
        if self.server.keep:
            del kept[before + self.server.keep.pop(0) :]
        if len(kept) < total:
            del kept[len(kept) - len(kept) % (256 << 10) :]
        return whole

    def do_GET(self):
        path, _, query = self.path.partition("?")
        data = self.server.objects[unquote(path.rpartition("/")[2])]
        if "alt=media" in query:
            return self.answer(200, {"x-goog-generation": "1"}, data)
        body = {"size": str(len(data)), "updated": "2026-01-01T00:00:00+00:00", "generation": "1"}
        return self.answer(200, {}, json.dumps(body).encode())

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        """Connections that break are what this is about."""


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Sessions) as server:
        server.sessions, server.objects, server.puts, server.keep = {}, {}, [], []
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def gateway(server):
    with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
        yield proxy


def upload(gateway, data, **given):
    given = PATIENT | {"endpoint_url": gateway.url, "token": "anon"} | given

    async def work(storage):
        await store(storage, "file", data, part=MiB)
        assert await storage.get("file") == data

    use("gs://bucket/run", given, work)


@pytest.mark.parametrize("nth", [1, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    "fault",
    [
        {"reset_before": True},
        {"reset_upload_at": 3},
        {"reset_upload_at": 700_000},
        {"lose_answer": True},
        {"lose_answer": "hang"},
        {"status": 503, "times": 2},
    ],
    ids=str,
)
def test_gcs_resumable_upload_continues_at_the_offset_of_the_server(gateway, server, fault, nth):
    data = pattern(4 * MiB - 5)
    gateway.fault("PUT", nth=nth, **fault)
    upload(gateway, data, **patience(fault))
    assert server.objects["run/file"] == data
    assert any(told == "*" for told, _ in server.puts)


def test_gcs_resumable_upload_does_not_resend_bytes_that_were_stored(gateway, server):
    server.keep = [MiB, 512 << 10]
    gateway.fault("PUT", nth=2, lose_answer=True)
    upload(gateway, pattern(3 * MiB))
    assert [told for told, _ in server.puts] == [
        f"0-{MiB - 1}", f"{MiB}-{2 * MiB - 1}", "*", f"{MiB + (512 << 10)}-{2 * MiB - 1}", f"{2 * MiB}-{3 * MiB - 1}"
    ]  # fmt: skip


def test_gcs_resumable_upload_resends_bytes_that_were_not_stored(gateway, server):
    server.keep = [MiB, 256 << 10, 256 << 10]
    upload(gateway, pattern(3 * MiB))
    assert [told.partition("-")[0] for told, _ in server.puts] == [
        "0", f"{MiB}", f"{MiB + (256 << 10)}", f"{MiB + (512 << 10)}", f"{2 * MiB}"
    ]  # fmt: skip


def test_gcs_upload_ended_too_early_by_the_server_is_an_error(url, given, gcs):
    """As the emulator does, which takes a question for the end."""
    with FaultProxy(gcs.url) as proxy:
        proxy.fault("PUT", nth=2, lose_answer=True)
        with pytest.raises(StorageError, match=rf"the server stored {2 * MiB} of"):
            use(
                url,
                given | {"endpoint_url": proxy.url},
                lambda storage: store(storage, "file", pattern(3 * MiB), part=MiB),
            )


def test_gcs_abandoned_upload_keeps_the_existing_object(gateway, server):
    given = {"endpoint_url": gateway.url, "token": "anon"}

    async def work(storage):
        await store(storage, "file", pattern(2 * MiB), part=MiB)
        writer = await storage.create("file", 2 * MiB)
        await writer.write(0, [bytes(MiB)])
        await writer.abort()
        assert await storage.get("file") == pattern(2 * MiB)

    gateway.fault("DELETE", "*upload_id=*", status=499)
    use("gs://bucket/run", given, work)
    assert gateway.count("DELETE") == 1


def test_gcs_share_of_a_long_object_takes_several_requests(url, proxy, given):
    async def work(storage):
        await storage.put("file", b"content")
        proxy.fault("POST", "*rewriteTo*", status=200, body=b'{"done": false, "rewriteToken": "more"}')
        await storage.share(storage.url.join("file"), "shared")
        assert await storage.get("shared") == b"content"
        assert proxy.count("POST", "*rewriteTo*") == 2
        assert proxy.count("POST", "*rewriteTo*rewriteToken=more*") == 1

    use(url, given, work)


@pytest.mark.parametrize("fault", [{"status": 503}, {"reset_before": True}, {"lose_answer": True}])
def test_gcs_share_retries_transient_faults(url, proxy, given, fault):
    """Also if the response was lost, so that the copy exists."""

    async def work(storage):
        await storage.put("file", b"content")
        with proxy.fault("POST", "*rewriteTo*", **fault):
            await storage.share(storage.url.join("file"), "shared")
        assert await storage.get("shared") == b"content"

    use(url, given, work)


def test_gcs_share_sends_the_version_of_the_source(url, proxy, given):
    async def work(storage):
        token = await storage.put("file", b"content")
        await storage.share(storage.url.join("file"), "shared", token=token)
        assert proxy.count("POST", f"*rewriteTo*ifSourceGenerationMatch={token}&ifGenerationMatch=0*") == 1
        with proxy.fault("POST", "*rewriteTo*", status=412), pytest.raises(StorageConflictError):
            await storage.share(storage.url.join("file"), "again", token=token)

    use(url, given, work)
