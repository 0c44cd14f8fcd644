"""Store of S3's protocol that is as fast as loopback allows: it keeps objects in memory, or discards them.

It responds to the requests of a snapshot, checks nothing, and is for benchmarks only. It runs in its own process:
`python -m tests.benchmarks.fake_s3 [--discard]` prints its port.
"""

from __future__ import annotations

import socket
import sys
import threading
from hashlib import md5
from itertools import count
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

DATE = "Sat, 01 Jan 2000 00:00:00 GMT"
LONG = 1 << 16
_numbers = count(1)


class Store:
    """Objects by their path, and uploads by their name."""

    def __init__(self, *, discard: bool) -> None:
        self.discard = discard
        self.objects: dict[str, list[memoryview]] = {}
        self.uploads: dict[str, dict[int, memoryview]] = {}


def _whole(parts: list[memoryview], begin: int, end: int) -> list[memoryview]:
    found, at = [], 0
    for part in parts:
        piece = part[max(begin - at, 0) : max(end - at, 0)]
        if len(piece):
            found.append(piece)
        at += len(part)
    return found


class Connection(threading.Thread):
    """Serves the requests of one client, one after the other."""

    def __init__(self, store: Store, sock: socket.socket) -> None:
        super().__init__(daemon=True)
        self.store = store
        self.sock = sock
        self.rest = bytearray()
        self.scrap = memoryview(bytearray(1 << 20))

    def run(self) -> None:
        """Serve until the client closes the connection."""
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while self._one():
                pass
        except OSError:
            pass
        finally:
            self.sock.close()

    def _one(self) -> bool:
        while (end := self.rest.find(b"\r\n\r\n")) < 0:
            got = self.sock.recv(LONG)
            if not got:
                return False
            self.rest += got
        lines = self.rest[:end].decode("latin-1").split("\r\n")
        del self.rest[: end + 4]
        method, target, _ = lines[0].split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        path, _, query = target.partition("?")
        if headers.get("expect"):
            self.sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        bulk = method == "PUT" and int(headers.get("content-length", 0)) > LONG
        body = self._body(int(headers.get("content-length", 0)), keep=not (bulk and self.store.discard))
        self._answer(method, unquote(path), parse_qs(query, keep_blank_values=True), headers, body)
        return True

    def _body(self, length: int, *, keep: bool) -> memoryview:
        if not keep:
            left = length - len(self.rest)
            self.rest.clear()
            while left > 0:
                left -= self.sock.recv_into(self.scrap, min(left, len(self.scrap)))
            return memoryview(b"\0")[:0]
        held = memoryview(bytearray(length))
        at = min(len(self.rest), length)
        held[:at] = self.rest[:at]
        del self.rest[:at]
        while at < length:
            got = self.sock.recv_into(held[at:])
            if not got:
                raise ConnectionResetError
            at += got
        return held

    def _send(self, status: int, body: bytes = b"", **headers: str) -> None:
        told = {"Content-Length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
        head = "".join(f"{name}: {text}\r\n" for name, text in told.items())
        self.sock.sendall(f"HTTP/1.1 {status} X\r\n{head}\r\n".encode() + body)

    def _answer(
        self, method: str, path: str, query: dict[str, list[str]], headers: dict[str, str], body: memoryview
    ) -> None:
        store = self.store
        if method == "PUT" and "uploadId" in query:
            store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._send(200, ETag=f'"{next(_numbers):032x}"')
        elif method == "PUT":
            store.objects[path] = [body]
            self._send(200, ETag=f'"{md5(body[:LONG], usedforsecurity=False).hexdigest()}"')
        elif method == "POST" and "uploads" in query:
            name = f"upload{next(_numbers)}"
            store.uploads[name] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        elif method == "POST" and "uploadId" in query:
            parts = store.uploads.pop(query["uploadId"][0])
            store.objects[path] = [part for _, part in sorted(parts.items())]
            self._xml("CompleteMultipartUploadResult", f'<ETag>"{next(_numbers):032x}"</ETag>')
        elif method == "POST":
            for name in bytes(body).decode().split("<Key>")[1:]:
                store.objects.pop(f"{path.rstrip('/')}/{name.partition('</Key>')[0]}", None)
            self._xml("DeleteResult", "")
        elif method == "DELETE":
            store.uploads.pop(query.get("uploadId", [""])[0], None)
            store.objects.pop(path, None)
            self._send(204)
        elif "list-type" in query:
            bucket = path.rstrip("/") + "/"
            begin = bucket + query.get("prefix", [""])[0]
            keys = sorted(key[len(bucket) :] for key in list(store.objects) if key.startswith(begin))
            self._xml(
                "ListBucketResult",
                "<IsTruncated>false</IsTruncated>"
                + "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys),
            )
        else:
            self._get(method, path, headers)

    def _xml(self, name: str, content: str) -> None:
        text = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'
        self._send(200, text.encode(), Content_Type="application/xml")

    def _get(self, method: str, path: str, headers: dict[str, str]) -> None:
        parts = self.store.objects.get(path)
        if parts is None:
            self._send(404, b"" if method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
            return
        total = sum(map(len, parts))
        begin, end, status = 0, total, 200
        told = {"ETag": f'"{md5(path.encode(), usedforsecurity=False).hexdigest()}"', "Last-Modified": DATE}
        if "range" in headers:
            first, _, last = headers["range"].removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1 if last else total, total), 206
            told["Content-Range"] = f"bytes {begin}-{end - 1}/{total}"
        head = "".join(f"{name}: {text}\r\n" for name, text in told.items())
        self.sock.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: {end - begin}\r\n{head}\r\n".encode())
        if method == "GET":
            for piece in _whole(parts, begin, end):
                self.sock.sendall(piece)


def main() -> None:
    """Serve until standard input is closed, which ends with the parent."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    store = Store(discard="--discard" in sys.argv)

    def serve() -> None:
        while True:
            Connection(store, listener.accept()[0]).start()

    threading.Thread(target=serve, daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
