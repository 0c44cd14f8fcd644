"""Subscriber: published versions from a store into a local folder, for inference engines."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import msgspec

from snapshot.decoding import decode_json
from snapshot.distributed.operation import operation
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.io.aio import gather_limited, in_thread, shielded
from snapshot.io.loop import LoopFuture, finish_before_exit, in_own_thread, run, start
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.system import CLOEXEC, expect_linux, fcntl, libc
from snapshot.io.url import URL, Location
from snapshot.manager.policies import Policy, Taken, checked_policy, choose_kept
from snapshot.text import listed
from snapshot_publish.build import VersionBuilder
from snapshot_publish.store import VersionIndex, VersionStore, version_name, version_of

# Hooks: a JSON message by HTTP POST after a version was published or pulled.

DEADLINE = 30.0
"""Seconds that a receiver may take to respond. The interpreter's exit waits for it."""


def check_hooks(urls: Sequence[str]) -> tuple[str, ...]:
    """Return the URLs of hooks. Raise `ValueError` if one is not an HTTP URL."""
    if isinstance(urls, str):
        urls = [urls]
    for url in urls:
        parts = urlsplit(url)
        try:
            plain = parts.port != 0 and url.isascii() and url.isprintable() and " " not in url
        except ValueError:  # of the port
            plain = False
        if "@" in parts.netloc:
            raise ValueError("notify URLs must not have a user or a password; put a token into the query")
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
            raise ValueError(f"notify must be http:// or https:// URLs, got {url!r}")
    return tuple(urls)


def start_hooks(urls: Sequence[str], verb: str, message: Mapping[str, Any]) -> LoopFuture[list[bool]]:
    """Send a message to all URLs in the background. The interpreter's exit waits for it.

    A failure is a `notify_failed` event and a line in the log.
    """
    body = json.dumps(message).encode()

    async def post(url: str) -> bool:
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc}{parts.path}"  # queries may be secret
        error: Exception | None
        try:
            error = await asyncio.wait_for(in_own_thread(_post, url, body), DEADLINE)
        except TimeoutError:
            error = TimeoutError(f"no response within {DEADLINE:g} s")
        if error is not None:
            reason = str(getattr(error, "reason", "")) or str(error) or type(error).__name__
            emit("notify_failed", verb, shown, error=reason)
            log.warning("%s: a hook failed: %s", shown, reason)
        return error is None

    work = start(gather_limited(urls, post, 64))
    finish_before_exit(work)
    return work


def _post(url: str, body: bytes) -> Exception | None:
    """Send a message, and return the error. The body of the response says nothing, so it is not read."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
    try:
        urllib.request.urlopen(request, timeout=DEADLINE).close()  # noqa: S310 - checked: only HTTP
    except urllib.error.HTTPError as error:
        error.close()
        return error
    except Exception as error:  # noqa: BLE001 - whatever a receiver does must not stop the others
        return error
    return None


# The folder of a subscriber: complete versions, the link `current`, and a lock for all processes of the host.
#
# A version is built in a folder aside and renamed. Files of a version are never changed, since engines may map them.

MARKER = ".snapshot-pull.json"
LOCK = ".snapshot-pull.lock"
ASIDE = ".pull-"
"""The name prefix of folders that are built or deleted."""
LONGEST_SOURCE = 1 << 16
DAMAGED = "damaged"
"""In place of the id of a boot: the version may be damaged."""
CURRENT = "current"


class Marker(msgspec.Struct):
    """The origin of a local version."""

    version: int
    source: str
    """URL of the store, without secrets."""
    index: str
    """Digest of the version's index in the store."""
    boot: str
    """Id of the boot of the host. After another boot, files may have lost bytes and are verified again."""
    time: float
    step: int | None = None
    files: dict[str, int] = {}
    """Size of each file."""


def boot_id() -> str:
    """Return the id of this boot of the host; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class LocalFolder:
    """The local versions of a subscriber."""

    def __init__(self, path: str | os.PathLike[str], source: str) -> None:
        self.path = Path(os.path.abspath(path))
        self._source = source

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this host. Processes that wait continue one by one."""
        with self.errors():
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | CLOEXEC, 0o666)
        try:
            with self.errors():
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._expect_own(descriptor)
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may hold a copy of the descriptor
            os.close(descriptor)

    def _expect_own(self, descriptor: int) -> None:
        """Raise if the folder is another store's, or if its link `current` is not a link."""
        source = self._source.encode(errors="surrogateescape")
        known = os.pread(descriptor, LONGEST_SOURCE, 0)
        if known and known != source:
            raise SnapshotError(
                f"{self.path}: has versions of {known.decode(errors='replace')}, got {self._source}; use another folder"
            )
        link = self.path / CURRENT
        if os.path.lexists(link) and not link.is_symlink():
            raise SnapshotError(f"{link}: must be a link of a subscriber; rename it, or use another folder")
        if not known:
            os.pwrite(descriptor, source, 0)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Raise `StorageError` for an error of the file system, such as a full disk."""
        try:
            yield
        except SnapshotError:
            raise
        except OSError as error:
            where = error.filename if error.filename is not None else self.path
            raised = StorageError(f"{where}: {error.strerror or error}; the last pulled version is unchanged")
            raised.errno = error.errno
            raise raised from error

    def folder(self, version: int) -> Path:
        return self.path / version_name(version)

    def marker(self, version: int) -> Marker | None:
        """Return the origin of a local version; None if it is not here or not from this store."""
        try:
            found: Marker = decode_json((self.folder(version) / MARKER).read_bytes(), Marker, MARKER)
        except (OSError, CorruptSnapshotError):
            return None
        return found if found.version == version and found.source == self._source else None

    def has(self, version: int, index: str) -> bool:
        """Return True if a version is here whose index has this digest. An empty digest matches any."""
        found = self.marker(version)
        return found is not None and index in ("", found.index)

    def expect_replaceable(self, version: int) -> None:
        """Raise if a folder that no subscriber has made is in the place of a version."""
        folder = self.folder(version)
        if os.path.lexists(folder) and not os.path.lexists(folder / MARKER):
            raise SnapshotError(f"{folder}: must be a version that was pulled; rename it, or use another folder")

    def is_whole(self, marker: Marker) -> bool:
        """Return True if all files of a version are here, with their sizes."""
        folder = self.folder(marker.version)
        try:
            return all((folder / name).stat().st_size == size for name, size in marker.files.items())
        except OSError:
            return False

    def distrust(self, version: int) -> None:
        """Record that a version is damaged, or must be verified before it is used again."""
        with suppress(OSError):
            self._mark(version, DAMAGED)

    def versions(self) -> list[Marker]:
        """Return the local versions of this store, the last pulled one first."""
        numbers = [version_of(each.name) for each in self.path.iterdir()]
        found = [marker for number in numbers if number is not None and (marker := self.marker(number)) is not None]
        return sorted(found, key=lambda each: each.time, reverse=True)

    def begin(self) -> Path:
        """Return a new, empty folder aside."""
        aside = self.path / f"{ASIDE}{secrets.token_hex(6)}"
        aside.mkdir()
        return aside

    def finish(self, aside: Path, index: str, version: int, step: int | None) -> None:
        """Give a complete folder its name, in exchange with a version that has the name. `current` stays valid."""
        files = {each.name: each.stat().st_size for each in aside.iterdir()}
        marker = Marker(version, self._source, index, boot_id(), time.time(), step, files)
        (aside / MARKER).write_bytes(msgspec.json.encode(marker))
        target = self.folder(version)
        if not os.path.lexists(target):
            os.rename(aside, target)
            return
        self.expect_replaceable(version)
        if not exchange_paths(aside, target):
            os.rename(target, self.path / f"{ASIDE}{secrets.token_hex(6)}")
            os.rename(aside, target)
        self.clean_aside()

    def touch(self, version: int) -> None:
        """Record that a version was verified on this boot and pulled now."""
        self._mark(version, boot_id(), time.time())

    def _mark(self, version: int, boot: str, pulled: float | None = None) -> None:
        marker = self.marker(version)
        if marker is not None:
            marker.boot = boot
            marker.time = marker.time if pulled is None else pulled
            made = self.folder(version) / f"{MARKER}.new"
            made.write_bytes(msgspec.json.encode(marker))
            os.replace(made, self.folder(version) / MARKER)

    def point(self, version: int) -> None:
        """Let `current` point to a version, atomically."""
        target, link = version_name(version), self.path / CURRENT
        if link.is_symlink() and os.readlink(link) == target:
            return
        made = self.path / f"{ASIDE}{secrets.token_hex(6)}"
        os.symlink(target, made)
        os.replace(made, link)

    def remove(self, version: int) -> None:
        """Delete a version. It is renamed first, so that it never looks complete."""
        gone = self.path / f"{ASIDE}{secrets.token_hex(6)}"
        os.rename(self.folder(version), gone)
        shutil.rmtree(gone, ignore_errors=True)

    def clean(self, keep: Policy | None, pulled: int) -> None:
        """Delete the versions that a policy does not keep, and leftovers of pulls that were killed.

        The policy sees the order of the pulls as steps. The version that was pulled last, `pulled`, stays.
        """
        try:
            found = {each.version: each for each in reversed(self.versions())}
            order = [*(number for number in found if number != pulled), pulled]
            taken = [Taken(at, found[number].time) for at, number in enumerate(order) if number in found]
            kept = choose_kept(keep, taken, time.time())
            removed = {order[each.step] for each in taken if each.step not in kept}
            for number, each in found.items():
                if number != pulled and (number in removed or each.boot == DAMAGED):
                    self.remove(number)
            self.clean_aside()
        except (OSError, SnapshotError) as error:  # the pull is complete: old files only cost space
            log.warning("%s: cannot delete old versions: %s", self.path, error)

    def clean_aside(self) -> None:
        """Delete folders and links aside. The lock must be held: then no other process uses them."""
        for each in self.path.iterdir():
            if each.name.startswith(ASIDE):
                with suppress(OSError):
                    each.unlink() if each.is_symlink() or each.is_file() else shutil.rmtree(each)


def exchange_paths(one: Path, other: Path) -> bool:
    """Exchange two paths atomically. Return False if the system cannot."""
    if libc.renameat2 is None:
        return False
    result: int = libc.renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return result == 0


_HERE = -100
"""AT_FDCWD: paths are absolute, or below the current folder."""
_EXCHANGE = 2
"""RENAME_EXCHANGE."""


# Subscriber

RETRIES = 5
"""Maximum number of listings of the store, if versions are deleted during a pull."""
FIRST_PAUSE = 30.0
"""Seconds after which a damaged version is tried again."""
LONGEST_PAUSE = 3600.0


class Subscriber:
    """Pulls published versions into a local folder, from which inference engines load them.

    Each version is a folder in Hugging Face's layout, and `current` is a link to the last one that was pulled. Several
    processes of a host can share the folder: one pulls, and the others wait for it.

    >>> import tempfile, torch
    >>> from snapshot_publish import Publisher, Subscriber
    >>> publisher = Publisher("memory://docs/weights")
    >>> publisher.publish(100, torch.nn.Linear(4, 2)).wait()
    Published(version=1, step=100, base=None)
    >>> subscriber = Subscriber("memory://docs/weights", tempfile.mkdtemp())
    >>> subscriber.pull().name
    'weight_v000001'
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        keep: Policy | int | None = 2,
        notify: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments. Nothing is read or written.

        Args:
            url: The folder of a `Publisher`, in any storage.
            folder: The local folder, which is created.
            keep: The number of pulled versions that stay in it, or a policy, which sees the order of the pulls as
                steps. None keeps all. Files that an engine has mapped stay readable.
            notify: URLs to which a JSON message is sent after each new version.
            storage_options: Options for the storage plugin.

        Raises:
            ValueError: An argument is invalid, such as a folder in the store itself.
        """
        expect_linux("Subscriber")
        self._url = URL.parse(os.fspath(url))
        self._options = dict(storage_options or {})
        open_storage(self._url, self._options)
        self._local = LocalFolder(folder, str(self._url))
        expect_apart(self._url, self._local.path)
        self._failed: dict[int, Failure] = {}
        self._keep = checked_policy(keep, metrics=False)
        self._notify = check_hooks(notify)

    def pull(self, step: int | Literal["latest"] = "latest", *, version: int | None = None) -> Path:
        """Bring a version into the local folder, let `current` point to it, and return its path.

        Every tensor that is downloaded or changed is verified. A version can be damaged, or a version that it is a
        delta of can be missing. Then the next older one that fits the request is used, with a `fell_back` event. A
        failed pull changes nothing.

        Args:
            step: The newest usable version (`"latest"`), or the newest usable one that was published for this step.
            version: The number of a version: this one or an error.

        Raises:
            SnapshotNotFoundError: No such version is published.
            CorruptSnapshotError: No such version is usable. The error lists why.
            StorageError: The store cannot be read, or the folder cannot be written.
        """
        if step != "latest" and (not isinstance(step, int) or isinstance(step, bool)):
            raise ValueError(f"step must be an int or 'latest', got {step!r}; pass a version as version=")
        if version is not None and step != "latest":
            raise ValueError("pass a step or a version, not both")
        with operation("pull", self._url) as call, self._local.locked(), self._local.errors():
            self._local.clean_aside()
            session = call.open(Location(self._url, self._options))
            pull = _Pull(session, self._local, None if step == "latest" else step, version, self._failed)
            number = run(pull.run())
            self._local.point(number)
            self._local.clean(self._keep, number)
        folder = self._local.folder(number)
        if pull.built and self._notify:
            message = {
                "local_checkpoint_dir": str(folder),
                "source_dir": str(self._url),
                "target_version": number,
                "step": pull.step,
            }
            start_hooks(self._notify, "pull", message)
        return folder

    @property
    def current(self) -> Path | None:
        """The version that was pulled last; None before the first pull. Nothing is read from the store."""
        try:
            return self._local.path / os.readlink(self._local.path / "current")
        except OSError:
            return None

    def __repr__(self) -> str:
        return f"Subscriber({str(self._url)!r}, {str(self._local.path)!r})"


class _Pull:
    """One pull, with the lock held."""

    def __init__(
        self,
        session: Session,
        local: LocalFolder,
        step: int | None,
        version: int | None,
        failed: dict[int, Failure],
    ) -> None:
        self._session, self._local = session, local
        self._store = VersionStore(session.storage)
        self._wanted_step, self._wanted = step, version
        self._faults: list[str] = []
        self._failed = failed
        self.step: int | None = None
        self.built = False
        """True if the version was not here before."""

    async def run(self) -> int:
        """Return the number of the version, which is in the folder then."""
        for _ in range(RETRIES):
            numbers = await self._list()
            self._faults = []
            found = await self._newest_usable(numbers)
            if found is not None:
                return found
            if max(await self._list(), default=0) <= max(numbers, default=0):
                break
        wanted = "version" if self._wanted_step is None else f"version of step {self._wanted_step}"
        if self._wanted is not None:
            wanted = f"version {self._wanted}"
        if not self._faults:
            raise SnapshotNotFoundError(f"{self._session.url}: no {wanted} is published here")
        raise CorruptSnapshotError(
            f"{self._session.url}: no usable {wanted}:{listed(self._faults)}", faults=self._faults
        )

    async def _list(self) -> list[int]:
        return [self._wanted] if self._wanted is not None else await self._store.numbers()

    async def _newest_usable(self, numbers: list[int]) -> int | None:
        for number in reversed(numbers):
            try:
                index = await self._store.read(number)
            except StorageNotFoundError:  # not committed, or deleted meanwhile
                continue
            except (CorruptSnapshotError, UnsupportedFormatError) as error:
                self._fault(number, error)
                continue
            if self._wanted_step is not None and index.details.step != self._wanted_step:
                continue
            failed = self._failed.get(number)
            if failed is not None and self._wanted is None and failed.holds(index):
                self._faults.append(f"version {number}: {failed.reason}")
                continue
            self._local.expect_replaceable(number)
            try:
                await self._bring(index)
            except (StorageNotFoundError, CorruptSnapshotError, UnsupportedFormatError) as error:
                self._failed[number] = Failure.after(failed, index, str(error))
                self._fault(number, error)
            else:
                self._failed.pop(number, None)
                self.step = index.details.step
                return number
        return None

    def _fault(self, number: int, error: SnapshotError) -> None:
        self._faults.append(f"version {number}: {error}")
        emit("fell_back", "pull", str(self._session.url.join(version_name(number))), error=str(error))

    async def _bring(self, index: VersionIndex) -> None:
        """Make sure that a version is in the folder."""
        if self._local.has(index.version, index.digest) and await self._is_sound(index.version):
            if self._local.versions()[0].version != index.version:
                self._local.touch(index.version)
            return
        here = {marker.version: marker for marker in self._local.versions()}
        while True:
            chain = await self._store.chain(
                index, lambda number, digest: number in here and digest in ("", here[number].index)
            )
            base = chain[0].base
            if base is not None and not await self._is_sound(base):
                del here[base]
                continue
            try:
                await self._build(index, chain, base)
            except CorruptSnapshotError:
                if base is None:
                    raise
                del here[base]  # the local files may be the damaged ones
                await in_thread(self._local.distrust, base)
            else:
                return

    async def _build(self, index: VersionIndex, chain: Sequence[VersionIndex], base: int | None) -> None:
        aside = self._local.begin()
        folder = self._local.folder(base) if base is not None else None
        builder = VersionBuilder(self._session, chain, aside, folder)
        try:
            await builder.build()
            await in_thread(self._local.finish, aside, index.digest, index.version, index.details.step)
        except BaseException:
            await shielded(in_thread(self._local.clean_aside))
            raise
        self.built = True
        emit(
            "pulled",
            "pull",
            str(self._local.folder(index.version)),
            version=index.version,
            base=base,
            versions=len(chain),
            received=builder.received,
        )

    async def _is_sound(self, version: int) -> bool:
        """Return True if a local version was verified on this boot, or is verified now."""
        marker = self._local.marker(version)
        if marker is None:
            return False
        if not await in_thread(self._local.is_whole, marker):
            return await self._distrust(version, "files are missing or have another size")
        if marker.boot == boot_id() != "":
            return True
        try:
            await VersionBuilder(self._session, (), self._local.path, self._local.folder(version)).verify()
        except (CorruptSnapshotError, StorageNotFoundError, FileNotFoundError) as error:
            return await self._distrust(version, str(error))
        self._local.touch(version)
        return True

    async def _distrust(self, version: int, error: str) -> bool:
        """Mark a damaged version. `current` may point to it, so it stays until another one replaces it."""
        emit("damaged", "pull", str(self._local.folder(version)), error=error)
        await in_thread(self._local.distrust, version)
        return False


class Failure(NamedTuple):
    """A version that could not be used. It is tried again after a pause, which grows."""

    digest: str
    """Digest of its index."""
    reason: str
    until: float
    pause: float

    @staticmethod
    def after(before: Failure | None, index: VersionIndex, reason: str) -> Failure:
        again = before is not None and before.digest == index.digest
        pause = min(before.pause * 2, LONGEST_PAUSE) if again and before is not None else FIRST_PAUSE
        return Failure(index.digest, reason, time.monotonic() + pause, pause)

    def holds(self, index: VersionIndex) -> bool:
        """Return True if the version is unchanged and the pause is not over."""
        return self.digest == index.digest and time.monotonic() < self.until


def expect_apart(url: URL, folder: Path) -> None:
    """Raise `ValueError` if a local folder is a store on this host, or one is in the other."""
    if url.scheme.rpartition("+")[2] != "file":
        return
    store, local = Path(os.path.realpath(url.location)), Path(os.path.realpath(folder))
    if store == local or store in local.parents or local in store.parents:
        raise ValueError(f"{folder}: the local folder and the store {url} must not contain each other")
