"""`snapshot ui`: a local page over the steps of a run: metrics, sizes, places, differences, health."""

from __future__ import annotations

import math
import os
import re
import secrets
import select
import socket
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from queue import Empty, SimpleQueue
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl

import torch

from snapshot.cli.listing import stored_place
from snapshot.cli.screen import as_json, complain
from snapshot.cli.tensor_values import countable, widened
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io.loop import run as on_loop
from snapshot.io.storage import FileStat
from snapshot.io.system import WINDOWS
from snapshot.io.url import URL
from snapshot.loading.open import Opened, expect_files, open_checkpoint
from snapshot.loading.read_plan import ReadPlan
from snapshot.manager.root import Root
from snapshot.manager.step_metadata import noted_metrics
from snapshot.manager.steps import HeldStep, find_kind
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document, ManifestHead, check_tensor, find_locations
from snapshot.plan.names import WILDCARDS, compile_glob, matcher
from snapshot.save.findings import noted_findings, suspicions
from snapshot.save.transaction import committed_save_id
from snapshot.snapshot import Snapshot
from snapshot.tensors.geometry import Box, split_shape
from snapshot.tensors.memory import BY_NAME, ITEMSIZE
from snapshot.text import VERSION
from snapshot.transform.diff_bytes import STEP, l2_norm

# Health of tensors: norms, and numbers of values that are not finite, read part by part.

AT_ONCE = 16 << 20
"""Bytes that are read at once."""
EACH = 8
"""Number of tensors whose values are reported one by one."""
WORST = 20
"""Number of tensors with values that are not finite that are reported."""


class Abandoned(SnapshotError):
    """Raised when the caller does not wait for the result any more."""


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Norm and number of the finite values of a tensor, and the numbers of the others."""

    norm: float = 0.0
    finite: int = 0
    nan: int = 0
    infinite: int = 0

    def __add__(self, other: TensorHealth) -> TensorHealth:
        norm, finite = math.hypot(self.norm, other.norm), self.finite + other.finite
        return TensorHealth(norm, finite, self.nan + other.nan, self.infinite + other.infinite)

    def as_json(self) -> dict[str, Any]:
        return {"norm": self.norm if self.finite else math.nan, "nan": self.nan, "infinite": self.infinite}


def measured_tensors(document: Document, glob: str) -> dict[str, tuple[str, e.AnyTensor]]:
    """Return the floating-point tensors that a glob matches: path in the manifest and entry, by name.

    The name of a tensor means this tensor only, also if it contains a wildcard. Tied tensors appear once. Tensors that
    only the base has are left out.
    """
    exact = any(path.partition("/")[2] == glob for path in document.manifest)
    wanted, in_base = glob.__eq__ if exact else matcher([glob]), document.files.keys() - document.own_files.keys()
    found: dict[str, tuple[str, e.AnyTensor]] = {}
    seen = set[Any]()
    manifest: Mapping[str, Any] = document.manifest
    for path, entry in manifest.items():
        logical = path.partition("/")[2]
        if not entry.is_tensor or not (wanted(logical) and _is_measured(entry)):
            continue
        place = stored_place(entry)
        if place in seen or (in_base and any(each.location in in_base for each in entry.stored())):
            continue
        seen.add(place)
        shared = (document.world_size == 1 or entry.is_shared) and logical not in found
        found[logical if shared else path] = path, entry
    return found


def _is_measured(entry: e.AnyTensor) -> bool:
    dtype = BY_NAME.get(entry.dtype) if entry.nbytes else None
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex) and countable(dtype)


def size_of(tensors: Mapping[str, tuple[str, e.AnyTensor]]) -> int:
    """Return the number of bytes that are read for the health of some tensors."""
    return sum(math.prod(entry.shape) * ITEMSIZE[entry.dtype] for _, entry in tensors.values())


def health(opened: Opened, glob: str, is_over: Callable[[], bool]) -> dict[str, Any]:
    """Return the health of the tensors that a glob matches: of all together, of the first ones, and of the worst ones.

    Raise Abandoned soon after `is_over` returned True.
    """
    document = opened.document
    tensors = measured_tensors(document, glob)
    entries = dict(tensors.values())
    for path, entry in entries.items():
        check_tensor(path, entry, document.files)
    on_loop(expect_files(opened, find_locations(entries, document.files)))
    measured = dict.fromkeys(tensors, TensorHealth())
    for batch in _batches(tensors):
        if is_over():
            raise Abandoned
        read_plan = ReadPlan(document.files)
        parts = []
        for name, box in batch:
            path, entry = tensors[name]
            parts.append((name, torch.empty(box.sizes, dtype=BY_NAME[entry.dtype])))
            read_plan.into_box(path, entry, box, parts[-1][1])
        read_plan.execute(opened, verify=True)
        for name, part in parts:
            measured[name] += _health_of(part)
    ill = [each for each in measured.items() if each[1].nan or each[1].infinite]
    ill.sort(key=lambda each: -each[1].nan - each[1].infinite)
    return {
        "tensors": len(tensors),
        "bytes": size_of(tensors),
        **sum(measured.values(), TensorHealth()).as_json(),
        "each": [{"name": name, **found.as_json()} for name, found in list(measured.items())[:EACH]],
        "ill": len(ill),
        "worst": [{"name": name, **found.as_json()} for name, found in ill[:WORST]],
    }


def _batches(tensors: Mapping[str, tuple[str, e.AnyTensor]]) -> Iterator[list[tuple[str, Box]]]:
    """Yield the parts of tensors in groups that are read together."""
    batch: list[tuple[str, Box]] = []
    nbytes = 0
    for name, (_, entry) in tensors.items():
        size = ITEMSIZE[entry.dtype]
        for box in split_shape(tuple(entry.shape), max(1, AT_ONCE // size)):
            batch.append((name, box))
            nbytes += box.numel * size
            if nbytes >= AT_ONCE:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _health_of(part: torch.Tensor) -> TensorHealth:
    """Return the health of a part, whose values are widened in small steps, since that needs more memory."""
    total = TensorHealth()
    for step in torch.split(part.reshape(-1), STEP):
        parts = torch.view_as_real(step) if step.is_complex() else step.reshape(-1, 1)
        values = widened(parts).reshape(parts.shape)
        ill, finite = values.isnan().any(1), values.isfinite().all(1)
        good, nan = values[finite], int(ill.sum())
        total += TensorHealth(l2_norm(good.abs()), len(good), nan, len(values) - len(good) - nan)
    return total


# The steps of a run as `snapshot ui` shows them: listed, checked, compared and measured. Nothing is written.

CHANGES = 500
"""Maximum number of changes of a comparison that are reported."""
NAMES = 200
"""Maximum number of names of tensors that are reported."""
METRICS = 50
"""Maximum number of metrics of a step that are reported."""
LONGEST = 500
"""Maximum length of a reported name, value or error in characters."""
KEPT = 10_000
"""Number of results of `health` that are kept in memory."""
BUDGET = 128 << 20
"""Memory budget of a comparison in bytes."""
TORN = "no manifest: a take that runs or was interrupted, or another library's files"


class RunView:
    """The steps under a root, and in the near folder of this host if one is given."""

    def __init__(self, root: str, near: str | None = None, options: Mapping[str, Any] | None = None) -> None:
        self.url = URL.parse(root)
        self._near = near
        self._options = options
        self._root = Root(self.url, options)
        self._listing = threading.Lock()
        self._seen: dict[int, tuple[FileStat, ManifestHead]] = {}
        """The manifests that were listed last."""
        self._healths: OrderedDict[tuple[str, str], dict[str, Any]] = OrderedDict()

    def steps(self, most: int) -> dict[str, Any]:
        """Return the newest steps, the newest first."""
        if self.url.scheme == "file" and not os.path.isdir(self.url.location):
            raise SnapshotNotFoundError(f"{self.url}: no such folder")
        with self._listing:
            numbers = on_loop(self._root.numbers())
            near = self._near_steps()
            every = sorted({*numbers, *near})
            chosen = set(every[-most:])
            folders = on_loop(self._root.examine([step for step in numbers if step in chosen]))
            heads = on_loop(self._root.heads(folders.committed))
            pinned = on_loop(self._root.pinned(heads))
            self._seen = {
                step: (folders.committed[step], head) for step, head in heads.items() if isinstance(head, ManifestHead)
            }
        described: dict[int, object] = dict.fromkeys(chosen, TORN) | dict(folders.unreadable)
        described |= {step: near[step].head for step in chosen & near.keys()}
        described |= heads
        places: dict[int, dict[str, str]] = {}
        line = on_loop(self._root.line())
        for row in [] if self._near is None else find_kind("near").list_steps(self._near, self.url, heads, line)[0]:
            if places.get(row["step"], {"near": "absent"})["near"] == "absent":
                places[row["step"]] = {"near": row["near"], "far": row["far"]}
        rows = [
            _row(step, described[step])
            | places.get(step, {})
            | {"pinned": step in pinned or (step in near and near[step].is_pinned())}
            for step in sorted(chosen, reverse=True)
        ]
        return {"url": str(self.url), "near": self._near, "version": VERSION, "total": len(every), "steps": rows}

    def check(self, step: int) -> dict[str, Any]:
        """Return the first missing or short file of a listed step. No data is read."""
        if step not in self._seen:
            raise SnapshotNotFoundError(f"{self._root.step_url(step)}: is not in the root")
        stat, head = self._seen[step]
        fault = on_loop(Root(self.url, self._options).missing(step, stat, head))  # a root keeps what it found once
        if fault and on_loop(self._root.token(step)) != stat.token:
            raise SnapshotNotFoundError(f"{self._root.step_url(step)}: was removed or replaced meanwhile")
        return {"step": step, "fault": _short(fault)}

    def diff(self, a: int, b: int, *, values: bool) -> dict[str, Any]:
        """Return the differences between two steps. With `values`, the largest relative ones are first."""
        sides = self._checkpoint(a), self._checkpoint(b)
        found = Snapshot.diff(*sides, values=values, memory_budget_bytes=BUDGET)
        told = found.as_json() | {"summary": found.summary}
        changes = sorted(told["changes"], key=_weight, reverse=True) if values else told["changes"]
        told["changes"] = [
            change | {name: _short(change[name]) for name in ("path", "before", "detail")}
            for change in changes[:CHANGES]
        ]
        return told | {"left_out": max(0, len(changes) - CHANGES)}

    def tensors(self, step: int, glob: str) -> dict[str, Any]:
        """Return the number and size of the floating-point tensors of a step that a glob matches, and some names."""
        with self._opened(step) as opened:
            found = measured_tensors(opened.document, glob)
        keys = sorted({path.split("/", 2)[1] for path in opened.document.manifest if path.count("/") > 1})
        return {
            "step": step,
            "tensors": len(found),
            "bytes": size_of(found),
            "names": [name for name in list(found)[:NAMES] if len(name) <= LONGEST],
            "keys": [key for key in keys[:NAMES] if len(key) <= LONGEST and not set("*?[") & set(key)],
        }

    def health(self, step: int, glob: str, is_over: Callable[[], bool]) -> dict[str, Any]:
        """Return the health of the tensors of a step that a glob matches. Results are kept by save id."""
        with self._opened(step) as opened:
            key = opened.document.save_id, glob
            if key not in self._healths:
                found = health(opened, glob, is_over)
                for each in (*found["each"], *found["worst"]):
                    each["name"] = _short(each["name"])
                self._healths[key] = found
                while len(self._healths) > KEPT:
                    self._healths.popitem(last=False)
            return {"step": step} | self._healths[key]

    @contextmanager
    def _opened(self, step: int) -> Iterator[Opened]:
        with self._checkpoint(step).new_session(BUDGET) as session:
            yield on_loop(open_checkpoint(session))

    def _near_steps(self) -> Mapping[int, HeldStep]:
        return {} if self._near is None else find_kind("near").held_steps(self._near, self.url)

    def _checkpoint(self, step: int) -> Snapshot:
        """Return a step: from the near folder if it has all files of the same save, otherwise from the root."""
        near = self._near_steps().get(step)
        if near is not None and on_loop(self._save_id(step)) in (None, near.save_id) and (path := near.whole_path()):
            return Snapshot(path)
        return Snapshot(self._root.step_url(step).reveal(), storage_options=self._options)

    async def _save_id(self, step: int) -> str | None:
        """Return the save id of a step in the root as it is now, or None if it is not there or cannot be read."""
        with suppress(StorageError):
            async with self._root.opened(step) as session:
                return await committed_save_id(session.storage)
        return None


def _row(step: int, head: object) -> dict[str, Any]:
    """Return the properties of a step by its manifest, or by a text or an error about it."""
    if not isinstance(head, ManifestHead):
        return {"step": step, "metrics": {}, "problem": _short(str(head))}
    metrics, suspect, found = noted_metrics(head.metadata), suspicions(head.metadata), noted_findings(head.metadata)
    return {
        "step": step,
        **({"problem": _short(f"suspect: {'; '.join(suspect)}")} if suspect else {}),
        **({"found": _short(f"found: {'; '.join(found)}")} if found else {}),
        "taken": head.created,
        "metrics": {_short(name, 100): metrics[name] for name in list(metrics)[:METRICS]},
        "bytes": head.nbytes,
        "shared": sum(file.stored_size for file in head.files.values() if file.origin is not None and not file.in_base),
    }


def _weight(change: Mapping[str, Any]) -> tuple[int, float]:
    """Return a sort key for a change: NaN on one side counts most, then the relative difference."""
    values = change["values"]
    return (values["not_numbers"], values["relative"]) if values else (0, 0.0)


def _short(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


# HTTP server of `snapshot ui`: one page and its data, on the loopback address, for requests with a secret token.
#
# The first address has the token. The page removes it from the address, and later requests have it in a cookie. Only
# GET is answered, and only under a loopback name, so that other sites cannot reach the server through a name of their
# own.

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
        self.page = (files("snapshot_health") / "ui.html").read_text(encoding="utf-8")
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

    def compute(self, work: Callable[[RunView], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of work that reads data, in the thread of the server."""
        return self.server.compute(lambda: work(self.server.view), self._is_over)

    def diff(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the differences between two steps."""
        a, b, values = _number(query, "a"), _number(query, "b"), query.get("values") == "1"
        return self.compute(lambda view: view.diff(a, b, values=values))

    def health(self, query: dict[str, str]) -> dict[str, Any]:
        """Return the health of the tensors of a step that match a glob."""
        step, glob = _number(query, "step"), _glob(query)
        return self.compute(lambda view: view.health(step, glob, self._is_over))


_ROUTES: dict[str, Callable[[PageHandler, dict[str, str]], dict[str, Any]]] = {
    "/api/steps": lambda page, query: page.server.view.steps(max(1, min(_number(query, "most"), MOST_STEPS))),
    "/api/check": lambda page, query: page.server.view.check(_number(query, "step")),
    "/api/tensors": lambda page, query: page.server.view.tensors(_number(query, "step"), _glob(query)),
    "/api/diff": PageHandler.diff,
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
