"""Files that a host offers to others: in ranges, for signed requests, by names and never by paths."""

import asyncio
import contextlib
import http.client
import os
import socket

import pytest

from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError
from snapshot.io.registry import open_storage
from snapshot.io.storage import Context
from snapshot.io.url import URL
from snapshot.storages.file.file_storage import FileStorage
from snapshot.testing import StorageTests
from snapshot_tiers.peers import PeerServer
from snapshot_tiers.requests import SIGNATURE, STATUS, sign

NAME = "data/0123456789ab-0-0.safetensors"
CONTENT = os.urandom(3 << 20)


class TestNearStorage(StorageTests):
    """A near folder without other places is a folder."""

    capabilities = FileStorage.capabilities
    test_one_write_takes_thousands_of_buffers = None  # its parts are aligned, and so one buffer each

    @pytest.fixture
    def url(self, tmp_path):
        return f"near://{tmp_path}/run/step-1"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "step-1/data").mkdir(parents=True)
    (tmp_path / "step-1" / NAME).write_bytes(CONTENT)
    (tmp_path / "step-1/.snapshot_metadata").write_bytes(b'{"manifest"}')
    (tmp_path / "secret").write_bytes(b"secret")
    os.symlink(tmp_path / "secret", tmp_path / "step-1/data/0123456789ab-1-0.safetensors")
    return tmp_path


@pytest.fixture
def server(folder):
    made = PeerServer(socket.create_server(("127.0.0.1", 0)), str(folder), lambda: b'{"status": 1}')
    made.secrets.append("right")
    yield made
    made.close()


def use(address, work, secret="right", below="/step-1"):
    async def body():
        storage = open_storage(URL.parse(f"peer://{address}{below}"), {"secret": secret}, Context())
        try:
            return await work(storage)
        finally:
            await storage.close()

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, len(CONTENT)), (1 << 20, 1 << 20), (len(CONTENT) - 1, 1), (5, 0)]
)
def test_peer_server_ranges_arrive_exactly(server, offset, length):
    buffers = [bytearray(length // 3), bytearray(length - length // 3)]
    use(server.address, lambda storage: storage.read_into(NAME, offset, buffers))
    assert b"".join(buffers) == CONTENT[offset : offset + length]


def test_peer_server_signs_small_files_and_the_status(server):
    assert use(server.address, lambda storage: storage.get(".snapshot_metadata")) == b'{"manifest"}'
    assert use(server.address, lambda storage: storage.get(STATUS), below="") == b'{"status": 1}'
    assert use(server.address, lambda storage: storage.stat(NAME)).size == len(CONTENT)


def test_peer_server_reads_use_one_connection(server):
    async def read(storage):
        for at in range(20):
            await storage.read_into(NAME, at, [bytearray(10)])
        return len(storage._idle)

    assert use(server.address, read) == 1


def test_peer_server_missing_file_is_not_found(server):
    with pytest.raises(StorageNotFoundError):
        use(server.address, lambda storage: storage.read_into("data/0123456789ab-7-0.safetensors", 0, [bytearray(1)]))
    with pytest.raises((CorruptSnapshotError, StorageError)):
        use(server.address, lambda storage: storage.read_into(NAME, len(CONTENT) - 1, [bytearray(2)]))
    with pytest.raises(StorageError):
        use(server.address, lambda storage: storage.read_into(NAME, len(CONTENT), [bytearray(2)]))


def test_peer_server_refuses_a_wrong_secret(server):
    for work in (
        lambda storage: storage.get(".snapshot_metadata"),
        lambda storage: storage.read_into(NAME, 0, [bytearray(1)]),
        lambda storage: storage.stat(NAME),
    ):
        with pytest.raises(StorageError, match=r"not signed|Forbidden"):
            use(server.address, work, secret="wrong")


def test_peer_storage_refuses_a_response_without_the_secret(folder):
    other = PeerServer(socket.create_server(("127.0.0.1", 0)), str(folder), lambda: b"{}")
    other.find_secret = lambda *_: "other"  # it answers everyone
    try:
        with pytest.raises(StorageError, match="answer is not signed"):
            use(other.address, lambda storage: storage.get(".snapshot_metadata"))
    finally:
        other.close()


def ask(server, target, signature, wanted=""):
    """Send a request as it is, and return the status and the text of the answer."""
    connection = http.client.HTTPConnection(server.address)
    try:
        connection.putrequest("GET", target)
        connection.putheader(SIGNATURE, signature)
        if wanted:
            connection.putheader("Range", wanted)
        connection.endheaders()
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "target",
    [
        "/secret",
        "/step-1/../secret",
        "/step-1/data/../../secret",
        "/step-1/%2e%2e/secret",
        "//etc/passwd",
        "/step-1/data/0123456789ab-0-0.safetensors/",
        "/step-01/.snapshot_metadata",
        "/step-1/.pulled",
        "/.run.json",
        "/step-1/data/0123456789ab-1-0.safetensors",
        "/",
    ],
)
def test_peer_server_offers_only_files_of_steps(server, target):
    status, text = ask(server, target, sign("right", "GET", target, ""))
    assert status in (403, 404)  # the server shortens "//", so that the signature is wrong
    assert text != b"secret"


def test_peer_server_signature_is_for_one_request(server):
    good = sign("right", "GET", f"/step-1/{NAME}", "bytes=0-9")
    for wanted, target in (
        ("bytes=0-99", f"/step-1/{NAME}"),
        ("bytes=0-9", "/step-1/.snapshot_metadata"),
        ("", f"/step-1/{NAME}"),
    ):
        assert ask(server, target, good, wanted)[0] == 403


def test_peer_server_that_ends_during_a_response_is_a_storage_error(folder):
    listening = socket.create_server(("127.0.0.1", 0))
    address = "{}:{}".format(*listening.getsockname())

    import threading

    def serve():
        with contextlib.suppress(OSError):  # the listener was shut down
            while True:
                connection, _ = listening.accept()
                connection.recv(10_000)
                connection.sendall(b"HTTP/1.1 206 x\r\nContent-Length: 100\r\n\r\nabc")
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(StorageError):
        use(address, lambda storage: storage.read_into(NAME, 0, [bytearray(100)]))
    listening.shutdown(socket.SHUT_RDWR)  # it ends the accept; a close would leave it waiting
    thread.join()
    listening.close()


def test_peer_storage_is_read_only(server):
    for work in (
        lambda storage: storage.create(NAME, 1),
        lambda storage: storage.put("x", b""),
        lambda storage: storage.delete(["x"]),
        lambda storage: storage.list(),
    ):
        with pytest.raises(StorageError):
            use(server.address, work)
