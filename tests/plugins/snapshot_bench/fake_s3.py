"""Store of S3's protocol that is as fast as loopback allows: it keeps objects in memory, or discards them.

It responds to the requests of a snapshot, checks nothing, and is for benchmarks only. It runs in its own process:
`python -m tests.plugins.snapshot_bench.fake_s3 [--discard]` prints its port.
"""

from __future__ import annotations

import sys
import threading
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

DATE = "Sat, 01 Jan 2000 00:00:00 GMT"
LONG = 1 << 16
_numbers = count(1)


class Store(ThreadingHTTPServer):
    """Objects by their path, and uploads by their name."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, *, discard: bool) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
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


class Connection(BaseHTTPRequestHandler):
    """Serves the requests of one client, one after the other."""

    server: Store
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _answer(self) -> None:
        path, _, text = self.path.partition("?")
        path, query, store = unquote(path), parse_qs(text, keep_blank_values=True), self.server
        body = self._body(int(self.headers.get("Content-Length", 0)))
        if self.command == "PUT" and "uploadId" in query:
            store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._send(200, ETag=f'"{next(_numbers):032x}"')
        elif self.command == "PUT":
            store.objects[path] = [body]
            self._send(200, ETag=f'"{md5(body[:LONG], usedforsecurity=False).hexdigest()}"')
        elif self.command == "POST" and "uploads" in query:
            name = f"upload{next(_numbers)}"
            store.uploads[name] = {}
            self._xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
        elif self.command == "POST" and "uploadId" in query:
            parts = store.uploads.pop(query["uploadId"][0])
            store.objects[path] = [part for _, part in sorted(parts.items())]
            self._xml("CompleteMultipartUploadResult", f'<ETag>"{next(_numbers):032x}"</ETag>')
        elif self.command == "POST":
            for name in bytes(body).decode().split("<Key>")[1:]:
                store.objects.pop(f"{path.rstrip('/')}/{name.partition('</Key>')[0]}", None)
            self._xml("DeleteResult", "")
        elif self.command == "DELETE":
            store.uploads.pop(query.get("uploadId", [""])[0], None)
            store.objects.pop(path, None)
            self._send(204)
        elif "list-type" in query:
            bucket = path.rstrip("/") + "/"
            begin = bucket + query.get("prefix", [""])[0]
            keys = sorted(key[len(bucket) :] for key in list(store.objects) if key.startswith(begin))
            found = "".join(f"<Contents><Key>{escape(key)}</Key></Contents>" for key in keys)
            self._xml("ListBucketResult", f"<IsTruncated>false</IsTruncated>{found}")
        else:
            self._get(path)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def _body(self, length: int) -> memoryview:
        """Return the body of the request; none of a long one that is discarded."""
        kept = not (self.command == "PUT" and length > LONG and self.server.discard)
        view = memoryview(bytearray(length if kept else min(length, 1 << 20)))
        at = 0
        while at < length:
            got = self.rfile.readinto1(view[at:] if kept else view[: length - at])  # type: ignore[attr-defined]
            if not got:
                raise ConnectionResetError
            at += got
        return view if kept else view[:0]

    def _send(self, status: int, body: bytes = b"", length: int | None = None, **headers: str) -> None:
        self.send_response_only(status)
        for name, text in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(body)

    def _xml(self, name: str, content: str) -> None:
        text = f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'
        self._send(200, text.encode(), Content_Type="application/xml")

    def _get(self, path: str) -> None:
        parts = self.server.objects.get(path)
        if parts is None:
            self._send(404, b"" if self.command == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
            return
        total = sum(map(len, parts))
        begin, end, status = 0, total, 200
        told = {"ETag": f'"{md5(path.encode(), usedforsecurity=False).hexdigest()}"', "Last_Modified": DATE}
        if wanted := self.headers["Range"]:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1 if last else total, total), 206
            told["Content_Range"] = f"bytes {begin}-{end - 1}/{total}"
        self._send(status, length=end - begin, **told)
        if self.command == "GET":
            for piece in _whole(parts, begin, end):
                self.wfile.write(piece)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> None:
    """Serve until standard input is closed, which ends with the parent."""
    store = Store(discard="--discard" in sys.argv)
    threading.Thread(target=store.serve_forever, daemon=True).start()
    print(store.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
