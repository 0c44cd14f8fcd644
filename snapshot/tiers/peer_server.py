"""The server of a host: finished files of its near folder for other hosts of the run, in ranges over HTTP.

It answers only requests that are signed with the run's secret, for names of data files and manifests.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from snapshot.events import log
from snapshot.io.peers import SIGNATURE, STATUS, is_signed, parse_target, sign

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")
PATIENCE = 120.0
"""Seconds after which an idle connection is closed."""
FIRST = 10.0
"""Seconds after which a connection without a signed request is closed."""
MOST = 1024
"""Connections at a time."""


class PeerServer:
    """Serves a near folder on a listening socket until it is closed."""

    def __init__(self, listening: socket.socket, folder: str, describe: Callable[[], bytes]) -> None:
        self._folder = folder
        self._describe = describe
        self.secrets: list[str] = []
        """The secrets of the run that are valid: those of a trainer that died may still be in use."""
        handler = type("Handler", (_Handler,), {"peer": self})
        self._server = _Server(listening.getsockname()[:2], handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listening
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="snapshot-peers", daemon=True).start()

    @property
    def address(self) -> str:
        """The address and port that it listens on."""
        host, port = self._server.socket.getsockname()[:2]
        return f"{host}:{port}"

    def accept_secret(self, secret: str) -> None:
        """Accept requests with a secret of the run, and with the last few of earlier jobs."""
        if secret not in self.secrets:
            self.secrets = [*self.secrets[-7:], secret]

    def find_secret(self, signature: str | None, method: str, target: str, wanted: str) -> str | None:
        """Return the secret that a request is signed with, or None."""
        return next((each for each in self.secrets if is_signed(signature, each, method, target, wanted)), None)

    def describe(self) -> bytes:
        """Return the status of this host."""
        return self._describe()

    def open(self, step: str, name: str) -> int:
        """Open a file for reading, without following links."""
        return os.open(f"{self._folder}/{step}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    free = threading.BoundedSemaphore(MOST)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, if there are not too many."""
        if self.free.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except RuntimeError:  # no more threads
                self.free.release()
                self.shutdown_request(request)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a connection from %s ended early", client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = FIRST
    peer: PeerServer
    wbufsize = 0
    disable_nagle_algorithm = True

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        wanted = self.headers["Range"] or ""
        secret = self.peer.find_secret(self.headers[SIGNATURE], self.command, self.path, wanted)
        if secret is None:
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "the request is not signed with the secret of this run")
            return
        self.connection.settimeout(PATIENCE)
        if self.path == f"/{STATUS}":
            self._send_signed(secret, self.peer.describe())
        elif (found := parse_target(self.path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "not a name of a file that hosts offer")
        else:
            self._send_file(secret, *found, wanted)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        data = why.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_signed(self, secret: str, data: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Length", str(len(data)))
        self.send_header(SIGNATURE, sign(secret, "answer", self.path, data))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _send_file(self, secret: str, step: str, name: str, wanted: str) -> None:
        try:
            descriptor = self.peer.open(step, name)
        except OSError:
            self._refuse(HTTPStatus.NOT_FOUND, "this host does not have it")
            return
        with os.fdopen(descriptor, "rb") as file:
            if not wanted and self.command == "GET":  # manifests and their parts
                self._send_signed(secret, file.read())
                return
            size = os.fstat(descriptor).st_size
            found = _RANGE.fullmatch(wanted)
            begin, end = (int(found[1]), min(int(found[2]) + 1, size)) if found else (0, size)
            if begin >= end and size:
                self._refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, f"the file has {size} bytes")
                return
            self.send_response(HTTPStatus.PARTIAL_CONTENT if found else HTTPStatus.OK)
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            if self.command == "GET" and self.connection.sendfile(file, begin, end - begin) < end - begin:
                raise ConnectionError("the file became shorter")

    def log_message(self, *_: object) -> None:
        """Log nothing: the requests of a restore are many."""
