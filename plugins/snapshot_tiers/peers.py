"""Files of other hosts: the server that offers this host's files, the places of a near step's files, and replicas."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from snapshot.errors import SnapshotError
from snapshot.events import emit, log
from snapshot.io.aio import in_thread
from snapshot.io.loop import run, shared_clients
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.storage import ABSENT, Buffer, Capabilities, Context, ReadOnlyStorage, Storage
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA, Document, decode_document, decode_head
from snapshot_tiers.control import Host, Registration, Status, decode_status, partners
from snapshot_tiers.far_upload import FarStorage
from snapshot_tiers.near_steps import PULLED, CensusStep, NearFolder, NearStep, copy_verified, describe_files, is_intact
from snapshot_tiers.requests import SIGNATURE, STATUS, is_signed, parse_target, sign

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
        self.describe = describe
        """Returns the status of this host."""
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

    def open(self, step: str, name: str) -> int:
        """Open a file for reading, without following links."""
        return os.open(f"{self._folder}/{step}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def close(self) -> None:
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

    def _answer(self) -> None:
        wanted = self.headers["Range"] or ""
        secret = self.peer.find_secret(self.headers[SIGNATURE], self.command, self.path, wanted)
        if secret is None:
            self.close_connection = True
            self._refuse(HTTPStatus.FORBIDDEN, "the request is not signed with the secret of this run")
            return
        self.connection.settimeout(PATIENCE)
        if self.path == f"/{STATUS}":
            self._send(HTTPStatus.OK, self.peer.describe(), secret)
        elif (found := parse_target(self.path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND, "not a name of a file that hosts offer")
        else:
            self._send_file(secret, *found, wanted)

    do_GET = do_HEAD = _answer

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._send(status, why.encode())

    def _send(self, status: HTTPStatus, data: bytes, secret: str = "") -> None:
        """Send data, signed if there is a secret."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if secret:
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
                self._send(HTTPStatus.OK, file.read(), secret)
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


NEAR, PEER, FAR = "near", "peer", "far"
MOST_KEEPERS, MOST_HOLDERS = 16, 8
"""Hosts that are named for a manifest, and for another file."""


class PeerPlace(msgspec.Struct, array_like=True):
    """The places of a step's files, as the leader tells all ranks."""

    save_id: str
    keepers: list[int]
    """Some of the hosts that have the manifest."""
    holders: list[list[int]]
    """For each file that the manifest names, in the order of names: the hosts that have it."""
    far: bool
    """True if the far storage can be read."""


def place_of(step: CensusStep, *, far: bool) -> PeerPlace:
    """Return the place of a step.

    >>> from snapshot.runs.timeline import NO_ORIGIN
    >>> place_of(CensusStep(1, "s", NO_ORIGIN, {1}, {"b": 2, "a": 1}, {"b": [0, 1]}), far=False).holders
    [[], [0, 1]]
    """
    holders = [step.holders.get(name, [])[:MOST_HOLDERS] for name in sorted(step.sizes)]
    return PeerPlace(step.save_id, sorted(step.keepers)[:MOST_KEEPERS], holders, far)


class StepSources:
    """The places of one step's files, in the order in which this host reads them."""

    def __init__(
        self,
        step: int,
        place: PeerPlace,
        folder: str,
        hosts: Sequence[Host],
        index: int,
        *,
        secret: str,
        far: URL,
        options: Any,
    ) -> None:
        """`folder`: this host's folder of the step; `index`: its position in `hosts`."""
        self.save_id = place.save_id
        self.counts = {NEAR: 0, PEER: 0, FAR: 0}
        self.damaged: dict[str, str] = {}
        """The files that could not be read from this host's folder, although they are there, each with the reason."""
        self._step = step
        self._hosts = hosts
        self._index = index
        self._secret = secret
        self._far = _open_far(far, options) if place.far else None
        self._peers: dict[int, Storage] = {}
        self._places: dict[str, Sequence[Storage | None]] = {}
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._holders = {METADATA: place.keepers}
        self._read_sizes(folder, place)

    def _read_sizes(self, folder: str, place: PeerPlace) -> None:
        """Read the names and sizes of all files from the nearest manifest that is not damaged."""
        own = open_storage(URL("near", folder), None, Context())
        for each in self.places(METADATA):
            try:
                data = run((own if each is None else each).get(METADATA))
                head = decode_head(data, METADATA)
            except SnapshotError as error:
                log.info("step-%s: %s", self._step, error)
                continue
            if head.save_id == self.save_id:
                self._sizes = head.sizes()
                self._holders |= zip(sorted(self._sizes), place.holders, strict=True)
                break
        self.remote = 2 * sum(self._index in each for each in place.holders) < len(place.holders)

    def places(self, path: str) -> Sequence[Storage | None]:
        """Return the storages that have a file, the nearest first; None stands for this host's folder."""
        with self._lock:
            found = self._places.get(path)
            if found is None:
                found = self._places[path] = self._find(path)
            return found

    def _find(self, path: str) -> Sequence[Storage | None]:
        holders = self._holders.get(path, [self._index])  # an unknown file is not offered by other hosts
        found: list[Storage | None] = [None] if self._index in holders else []
        count = len(self._hosts)
        others = sorted(
            (host for host in holders if host != self._index), key=lambda host: (host - self._index) % count
        )
        found += [self._peer(host) for host in others if self._hosts[host].address]
        return found if self._far is None else [*found, self._far]

    def _peer(self, host: int) -> Storage:
        if host not in self._peers:
            url = URL.parse(f"peer://{self._hosts[host].address}/step-{self._step}")
            self._peers[host] = open_storage(url, {"secret": self._secret}, Context())
        return self._peers[host]

    def size(self, path: str) -> int | None:
        """Return the size that a file must have, if it is known."""
        return self._sizes.get(path)

    def passed(self, path: str, place: Storage | None, error: str) -> None:
        """Record that a file cannot be read from a place, or is damaged there."""
        where = "this host" if place is None else str(place.url)
        if place is None:
            self.damaged[path] = error
        log.warning("step-%s: %s is read from another place than %s: %s", self._step, path, where, error)
        emit("rerouted", "restore", path, step=self._step, source=where, error=error)

    def count(self, place: Storage | None, nbytes: int) -> None:
        """Count bytes that were read from a place."""
        tier = NEAR if place is None else FAR if place is self._far else PEER
        with self._lock:
            self.counts[tier] += nbytes

    def close(self) -> None:
        for each in [*self._peers.values(), *([self._far] if self._far is not None else [])]:
            try:
                run(each.close())
            except SnapshotError as error:
                log.debug("%s", error)


def _open_far(url: URL, options: Mapping[str, Any] | None) -> Storage:
    storage: Storage = FarStorage(open_storage(url, options, Context(clients=shared_clients())))
    return storage if storage.capabilities.blocking else WaitingStorage(storage)


class WaitingStorage(ReadOnlyStorage):
    """A storage that waits on the event loop, for callers that wait only in threads."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.capabilities = Capabilities(write=False, delete=False, atomic_put=False, blocking=True)

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Let the loop read, and wait in a thread."""
        await in_thread(lambda: run(self.inner.read_into(path, offset, buffers, token=token)))


# Replicas: a host fetches its partners' files, verifies every digest, and keeps them beside its own.


def open_peer(address: str, secret: str, step: int | None = None) -> Session:
    """Open what another host offers: one of its steps, or the host itself. The caller closes it."""
    below = "" if step is None else f"/step-{step}"
    return Session(URL.parse(f"peer://{address}{below}"), {"secret": secret})


class Replicas:
    """The replicas that one host keeps."""

    def __init__(self, folder: NearFolder) -> None:
        self._folder = folder
        self._registration: Registration | None = None
        self._known: dict[str, Status] = {}
        """The last status of each partner, by address."""

    def register(self, registration: Registration) -> None:
        """Serve another job: its hosts may have other addresses."""
        self._registration = registration
        self._known = {}

    def _partners(self) -> list[str]:
        given = self._registration
        if given is None:
            return []
        found = partners(given.index, len(given.hosts), given.replicas)
        return [given.hosts[each].address for each in found if given.hosts[each].address]

    def _session(self, address: str, step: int | None = None) -> Session:
        assert self._registration is not None
        return open_peer(address, self._registration.secret, step)

    def pulled(self, step: int, files: Collection[str]) -> list[str]:
        """Return the files of a step that are replicas."""
        try:
            with open(f"{self._folder.step_path(step)}/{PULLED}", encoding="ascii") as file:
                return sorted(set(file.read().split()).intersection(files))
        except OSError:
            return []

    def is_complete(self, step: int, here: Mapping[str, int]) -> bool:
        """Return True if the replicas that this host must keep of a step are `here`, as far as partners answered."""
        for address in self._partners():
            known = self._known.get(address)
            theirs = known.steps.get(step) if known is not None else None
            if theirs is None:
                return False
            if any(here.get(name) != size for name, size in _own(theirs.files, theirs.pulled).items()):
                return False
        return True

    def pull(self) -> int:
        """Fetch the partners' new files, the newest step first. Return the number of files."""
        count = 0
        for address in self._partners():
            try:
                with self._session(address) as session:
                    status = decode_status(run(session.storage.get(STATUS, limit=1 << 28)))
            except SnapshotError as error:
                log.debug("%s", error)
                continue
            self._known[address] = status
            oldest = min(self._folder.steps(), default=-1)
            for step in sorted((step for step in status.steps if step >= oldest), reverse=True):
                theirs = status.steps[step]
                here = self._folder.files(step)
                wanted = {
                    name
                    for name, size in _own(theirs.files, theirs.pulled).items()
                    if here.get(name) != size and theirs.save_id in name
                }
                if wanted:
                    count += self._pull_step(address, step, theirs.save_id, wanted)
        return count

    def _pull_step(self, address: str, step: int, save_id: str, wanted: set[str]) -> int:
        path = self._folder.step_path(step)
        with self._session(address, step) as source, Session(URL("near", path), None, durable=False) as near:
            document = self._manifest(source, near, step, save_id)
            if document is None:
                return 0
            wanted &= {*document.own_files, *(each.location for each in document.parts)}
            with open(f"{path}/{PULLED}", "a", encoding="ascii") as file:
                file.writelines(f"{name}\n" for name in sorted(wanted))
            parts = sorted(name for name in wanted if name.endswith(".json"))
            for some in (parts, sorted(wanted.difference(parts))):  # parts describe the other files
                if some:
                    files = run(describe_files(near if some is not parts else source, document, some))
                    run(copy_verified(source, near, files))
            if self._folder.steps().get(step) is None:  # it was removed meanwhile
                self._folder.remove(step, save_id)
                return 0
            emit("replicated", "upload", path, step=step, files=len(wanted), source=address)
            return len(wanted)

    def _manifest(self, source: Session, near: Session, step: int, save_id: str) -> Document | None:
        """Return the manifest of a partner's step, and keep it here. None if this host has another snapshot there."""
        own = self._folder.steps().get(step)
        if own is not None and own.save_id != save_id:
            return None
        data = run((near if own is not None else source).storage.get(METADATA))
        document = decode_document(data, source.url.join(METADATA))
        if document.save_id != save_id:
            return None
        if own is None:
            run(near.storage.put(METADATA, data, expect=ABSENT))
        return document


def _own(files: dict[str, int], pulled: Collection[str]) -> dict[str, int]:
    return {name: size for name, size in files.items() if name not in pulled}


def heal_step(folder: NearFolder, near: NearStep, files: Collection[str], given: Registration) -> set[str]:
    """Replace the damaged ones of a step's files by copies from other hosts or the far root.

    Return those that are damaged still.
    """
    name = f"step-{near.step}"
    others = [each.address for at, each in enumerate(given.hosts) if at != given.index and each.address]
    places = [open_peer(address, given.secret, near.step) for address in others]
    places.append(Session(URL.parse(given.far).join(name), given.options, wrap=FarStorage))
    path = folder.step_path(near.step)
    with ExitStack() as stack:
        for each in places:
            stack.enter_context(each)
        session = stack.enter_context(Session(URL("near", path), None))
        with open(f"{path}/{METADATA}", "rb") as file:
            document = decode_document(file.read(), f"{path}/{METADATA}")
        damaged = run(_find_damaged(session, document, files))
        for name in sorted(damaged):
            for place in places:
                with suppress(SnapshotError):
                    described = run(describe_files(place if name.endswith(".json") else session, document, [name]))
                    run(copy_verified(place, session, described))
                    emit("healed", "upload", f"{path}/{name}", step=near.step, source=str(place.url))
                    log.warning("%s/%s: was damaged, and is replaced by the copy at %s", path, name, place.url)
                    damaged = damaged - {name}
                    break
        return damaged


async def _find_damaged(session: Session, document: Document, files: Collection[str]) -> set[str]:
    """Return the files that are missing, or whose bytes do not match their digests."""
    damaged = set()
    for name in sorted(files):
        try:
            for each in await describe_files(session, document, [name]):
                if not await is_intact(session.storage, each):
                    damaged.add(name)
        except SnapshotError:
            damaged.add(name)
    return damaged
