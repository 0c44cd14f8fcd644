"""A Prometheus endpoint of an uploader: its own metrics, and those that the trainer's ranks leave in files.

It exists if `SNAPSHOT_METRICS` is an address in the trainer's environment. It serves numbers and the names of verbs,
without paths.
"""

from __future__ import annotations

import errno
import glob
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError
from snapshot.events import Event, Labels, Metrics, Readings, add_handler, as_prometheus, log, remove_handler
from snapshot.io.system import PerProcess
from snapshot.options import Settings
from snapshot.tiers.near_steps import NearStep
from snapshot.tiers.uploader import Uploader

ADDRESS = ".metrics.address"
"""File with the address of the endpoint."""
EVERY = 1.0
"""Seconds between two writes of a rank's file, if no operation ends."""
ENDINGS = ("blocked", "staged", "committed", "restored", "failed")
PATIENCE = 10.0
LONGEST = 1 << 20
_written: PerProcess[dict[str, RankMetrics]] = PerProcess(dict)


class RankMetrics:
    """Writes the metrics of a trainer's process to a file beside the near steps."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._metrics = Metrics()
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        """Count an event, and write the file from time to time."""
        self._metrics(event)
        now = time.monotonic()
        if event.name in ENDINGS or now - self._last > EVERY:
            self._last = now
            aside = f"{self._path}.{threading.get_ident()}"
            try:
                with open(aside, "wb") as file:
                    file.write(msgspec.json.encode(self._metrics.read()))
                os.replace(aside, self._path)
            except OSError as error:  # a full disk must not disturb training
                log.debug("%s: %s", self._path, error)


def leave_metrics(folder: str, rank: int) -> None:
    """Let this process leave its metrics for the uploader of a folder, if there is an endpoint."""
    path = f"{folder}/.metrics-{rank}.json"
    written = _written.get()
    if Settings.current().metrics and path not in written:
        made = RankMetrics(path)
        if written.setdefault(path, made) is made:  # otherwise another thread was faster
            add_handler(made)


def _read_regular(path: str) -> bytes:
    """Return the content of a file. Raise OSError for anything else, which could block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return file.read(LONGEST)


class MetricsServer:
    """The endpoint of an uploader."""

    def __init__(self, uploader: Uploader, address: str) -> None:
        self._uploader = uploader
        self._metrics = Metrics()
        self._far: tuple[int, float] | None = None
        """The newest step that this process has seen in the far root, and when it was taken."""
        host, _, port = address.rpartition(":")
        handler = type("Handler", (_Handler,), {"endpoint": self})
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = type("Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        self._server = server((host.strip("[]") or "127.0.0.1", int(port)), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.2,), name="snapshot-metrics", daemon=True).start()
        add_handler(self._metrics)
        add_handler(self._note_upload)
        with suppress(OSError), open(f"{uploader.folder.path}/{ADDRESS}", "w", encoding="ascii") as file:
            shown = f"[{host.strip('[]')}]" if family == socket.AF_INET6 else self._server.server_address[0]
            file.write(f"{shown}:{self._server.server_address[1]}")

    @classmethod
    def start(cls, uploader: Uploader) -> MetricsServer | None:
        """Start the endpoint that the settings ask for. One that cannot listen is logged, and left out."""
        address = Settings.current().metrics
        if not address:
            return None
        try:
            return cls(uploader, address)
        except (OSError, ValueError, OverflowError) as error:
            log.warning("SNAPSHOT_METRICS=%s: no metrics are offered: %s", address, error)
            return None

    def text(self) -> str:
        """Return all metrics."""
        now = time.time()
        processes: list[tuple[Labels, Readings]] = [((("process", "uploader"),), self._metrics.read())]
        for path in sorted(glob.glob(f"{glob.escape(self._uploader.folder.path)}/.metrics-*.json")):
            with suppress(OSError, OverflowError, CorruptSnapshotError):
                readings: Readings = decode_json(_read_regular(path), Readings, path)
                os.kill(readings.pid, 0)  # raises if this rank has ended
                rank = path.rpartition("-")[2].removesuffix(".json")
                processes.append(((("process", "trainer"), ("rank", rank)), readings))
        return as_prometheus(processes, self._gauges(now), now)

    def _note_upload(self, event: Event) -> None:
        """Remember a step in the far root. Its near files may be deleted soon."""
        if event.name == "uploaded":
            self._note_far(self._uploader.folder.steps(), int(event.fields["step"]))

    def _note_far(self, near: Mapping[int, NearStep], step: int) -> None:
        if step in near and (self._far is None or step > self._far[0]):
            self._far = step, _taken_at(near[step])

    def _gauges(self, now: float) -> dict[str, list[tuple[Labels, float]]]:
        states = self._uploader.status().steps
        near = self._uploader.folder.steps()
        counts = Counter(each.far for each in states.values())
        for step, each in states.items():
            if each.far == "whole":
                self._note_far(near, step)
        ages = {"near": _taken_at(near[max(near)])} if near else {}
        newest = {"near": max(near)} if near else {}
        if self._far is not None:
            newest["far"], ages["far"] = self._far
        elif near:  # what is in the far root is older, if anything is
            ages["far"] = _taken_at(near[min(near)])
        return {
            "steps": [((("state", state),), float(count)) for state, count in counts.items()],
            "upload_pending_bytes": [
                ((), float(sum(e.total - e.sent for e in states.values() if e.far in ("queued", "uploading"))))
            ],
            "newest_step": [((("tier", tier),), float(step)) for tier, step in newest.items()],
            "newest_step_age_seconds": [((("tier", tier),), max(0.0, now - taken)) for tier, taken in ages.items()],
        }

    def close(self) -> None:
        """Stop listening."""
        remove_handler(self._metrics)
        remove_handler(self._note_upload)
        self._server.shutdown()
        self._server.server_close()
        with suppress(OSError):
            os.unlink(f"{self._uploader.folder.path}/{ADDRESS}")


def _taken_at(near: NearStep) -> float:
    """Return the time when a step was taken."""
    with suppress(ValueError):
        return datetime.fromisoformat(near.head.created).timestamp()
    return time.time()


class _Handler(BaseHTTPRequestHandler):
    timeout = PATIENCE
    endpoint: MetricsServer

    def do_GET(self) -> None:
        """Answer with the metrics."""
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.endpoint.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a scraper asks every few seconds."""
