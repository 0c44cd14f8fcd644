"""HTTP server of `snapshot ui`: one page and its data, on the loopback address, for requests with a secret token.

The first address has the token. The page removes it from the address, and later requests have it in a cookie. Only GET
is answered, and only under a loopback name, so that other sites cannot reach the server through a name of their own.
"""

from __future__ import annotations

import re
import secrets
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from queue import Empty, SimpleQueue
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl

from snapshot.cli.screen import as_json, complain
from snapshot.cli.ui_health import Abandoned
from snapshot.cli.ui_steps import RunView
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError, StorageNotFoundError
from snapshot.plan.globs import WILDCARDS, compile_glob
from snapshot.system_calls import WINDOWS

Work = Callable[[], dict[str, Any]]
HOST = "127.0.0.1"
MOST_STEPS = 5000
"""Maximum number of steps in a response."""
LONGEST_GLOB = 200
MOST_WILDCARDS = 4
"""Maximum wildcards of a glob: the time of a match grows by a power of them."""
PAUSE = 0.5
PATIENCE = 10.0
"""Seconds that a client may need to send its request, or to accept a part of the response."""
_LOOPBACK = re.compile(r"(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?", re.IGNORECASE)
_STATUS: list[tuple[type[Exception], HTTPStatus]] = [
    (SnapshotNotFoundError, HTTPStatus.NOT_FOUND),
    (StorageNotFoundError, HTTPStatus.NOT_FOUND),
    (CorruptSnapshotError, HTTPStatus.UNPROCESSABLE_ENTITY),
    (SnapshotError, HTTPStatus.BAD_GATEWAY),
    (ValueError, HTTPStatus.BAD_REQUEST),
    (OSError, HTTPStatus.BAD_GATEWAY),
]
"""Status of a response for each kind of error. The first match counts."""
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class PageServer(ThreadingHTTPServer):
    """The server of one root."""

    daemon_threads = True
    allow_reuse_address = not WINDOWS  # there, it would let another process listen on the same port

    def __init__(self, view: RunView, port: int) -> None:
        self.view = view
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"snapshot-ui-{secrets.token_hex(4)}"
        """Name of the cookie. Browsers send cookies to all ports of a host, so each server has its own."""
        self._jobs: SimpleQueue[tuple[Future[dict[str, Any]], Work] | None] = SimpleQueue()
        self.page = (files("snapshot.cli") / "ui.html").read_text(encoding="utf-8")
        try:
            super().__init__((HOST, port), PageHandler)
        except (OSError, OverflowError) as error:
            raise SnapshotError(f"cannot listen on {HOST}:{port}: {error}; choose another --port") from error

    def server_bind(self) -> None:
        """Bind the socket, without the lookup of a host name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def serve(self) -> None:
        """Serve until a signal, or until `stop` is called.

        Data is read in this thread, for one request at a time, so that a signal interrupts it as in other verbs.
        """
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="snapshot-ui", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    job = self._jobs.get(timeout=PAUSE)  # Windows interrupts no wait without a timeout
                except Empty:
                    continue
                if job is None:
                    break
                future, work = job
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(work())
                    except Exception as error:  # noqa: BLE001 - raised in the thread of the request
                        future.set_exception(error)
        finally:
            self.shutdown()
            thread.join()

    def stop(self) -> None:
        """End `serve` after the work that has begun."""
        self._jobs.put(None)

    def compute(self, work: Work, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Return the result of work that reads data. Raise Abandoned if the request is over before."""
        future: Future[dict[str, Any]] = Future()
        self._jobs.put((future, work))
        while True:
            try:
                return future.result(timeout=0.2)
            except TimeoutError:
                if future.done():  # the error of the work itself
                    raise
                if is_over():
                    future.cancel()
                    raise Abandoned from None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a bug. A client that has closed its connection is not one."""
        if not isinstance(sys.exception(), OSError):
            traceback.print_exc()

    @property
    def address(self) -> str:
        """The first address to open, with the token."""
        return f"http://{HOST}:{self.server_port}/?token={self.token}"


class PageHandler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer
    server_version, sys_version = "snapshot", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        """Send the page or its data, or an error as JSON."""
        path, _, text = self.path.partition("?")
        try:
            query = dict(parse_qsl(text, keep_blank_values=True, max_num_fields=10))
        except ValueError:
            query = {}
        if refused := self._refusal(path, query.get("token", "")):
            self._send_error(HTTPStatus.FORBIDDEN, refused)
        elif path == "/":
            self._send_page()
        elif (respond := _ROUTES.get(path)) is None:
            self._send_error(HTTPStatus.NOT_FOUND, f"no such page: {path[:100]}")
        else:
            self._send_data(respond, query)

    def _send_data(
        self, respond: Callable[[PageHandler, dict[str, str]], dict[str, Any]], query: dict[str, str]
    ) -> None:
        try:
            told = respond(self, query)
        except Abandoned:
            return
        except Exception as error:  # noqa: BLE001 - readers of other formats may raise anything
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), None)
            if status is None:
                traceback.print_exc()
                complain("error", "this is a bug in the command; please report it with the lines above")
            text = str(error) if status else f"a bug in the command: {type(error).__name__}; its terminal shows more"
            self._send_error(status or HTTPStatus.INTERNAL_SERVER_ERROR, text[:2000])
        else:
            self._send(HTTPStatus.OK, "application/json", as_json(told))

    def _refuse_method(self) -> None:
        """Send the error for a method other than GET."""
        refused = self._refusal(self.path.partition("?")[0], "")
        status = HTTPStatus.FORBIDDEN if refused else HTTPStatus.METHOD_NOT_ALLOWED
        self._send_error(status, refused or "only GET is allowed")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse_method

    def _refusal(self, path: str, token: str) -> str:
        """Return why a request is refused, or ''."""
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _LOOPBACK.fullmatch(hosts[0]):
            return f"the request must be for {HOST} or localhost"
        if path != "/" and self.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            return "the request comes from another site"
        cookies = dict(each.strip().partition("=")[::2] for each in self.headers.get("Cookie", "").split(";"))
        for given in (token, cookies.get(self.server.cookie, "")):
            if secrets.compare_digest(given.encode(errors="replace"), self.server.token.encode()):
                return ""
        return "the token is missing or wrong; open the address that the command printed"

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        cookie = f"{self.server.cookie}={self.server.token}; Path=/; HttpOnly; SameSite=Strict"
        headers = {"Content-Security-Policy": _POLICY.format(nonce), "Set-Cookie": cookie}
        self._send(HTTPStatus.OK, "text/html", self.server.page.replace("@NONCE@", nonce), headers)

    def _send_error(self, status: HTTPStatus, text: str) -> None:
        self._send(status, "application/json", as_json({"error": text}))

    def _send(self, status: HTTPStatus, kind: str, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode(errors="backslashreplace")
        self.send_response(status)
        policy = {"Content-Security-Policy": "default-src 'none'"}
        for name, value in {**_HEADERS, **policy, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send the error for a request that the base class cannot parse."""
        self.command = self.command or ""
        self._send_error(HTTPStatus(code), message or HTTPStatus(code).phrase)

    def log_message(self, *_: object) -> None:
        """Log nothing: the page sends many requests."""

    # Data

    def _is_over(self) -> bool:
        """Return True if the client has closed its connection."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def steps(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the newest steps."""
        return self.server.view.steps(max(1, min(_number(query, "most"), MOST_STEPS)))

    def check(self, query: dict[str, str]) -> dict[str, Any]:
        """Return if the files of a step exist."""
        return self.server.view.check(_number(query, "step"))

    def diff(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the differences between two steps."""
        a, b, values = _number(query, "a"), _number(query, "b"), query.get("values") == "1"
        return self.server.compute(lambda: self.server.view.diff(a, b, values=values), self._is_over)

    def tensors(self, query: dict[str, str]) -> dict[str, Any]:
        """Return which tensors of a step match a glob."""
        return self.server.view.tensors(_number(query, "step"), _glob(query))

    def health(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the health of the tensors of a step that match a glob."""
        step, glob = _number(query, "step"), _glob(query)
        return self.server.compute(lambda: self.server.view.health(step, glob, self._is_over), self._is_over)


_ROUTES: dict[str, Callable[[PageHandler, dict[str, str]], dict[str, Any]]] = {
    "/api/steps": PageHandler.steps,
    "/api/check": PageHandler.check,
    "/api/diff": PageHandler.diff,
    "/api/tensors": PageHandler.tensors,
    "/api/health": PageHandler.health,
}


def _number(query: dict[str, str], name: str) -> int:
    text = query.get(name, "")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise ValueError(f"{name} must be a number of at most 18 digits, got {text[:40]!r}")
    return int(text)


def _glob(query: dict[str, str]) -> str:
    text = query.get("glob", "")
    if not 0 < len(text) <= LONGEST_GLOB:
        raise ValueError(f"glob must have 1 to {LONGEST_GLOB} characters, got {len(text)}")
    if len(WILDCARDS.findall(text)) > MOST_WILDCARDS:
        raise ValueError(f"glob must have at most {MOST_WILDCARDS} wildcards, got {text!r}")
    try:
        compile_glob(text)
    except re.error as error:
        raise ValueError(f"invalid glob {text!r}: {error}") from error
    return text
