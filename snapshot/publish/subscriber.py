"""Subscriber: published versions from a store into a local folder, for inference engines."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from snapshot.aio import in_thread, shielded
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.events import emit
from snapshot.publish.build import VersionBuilder
from snapshot.publish.local import LocalFolder, Marker, boot_id
from snapshot.publish.notify import check_hooks, start_hooks
from snapshot.publish.store import VersionStore
from snapshot.publish.version import Index, version_name
from snapshot.registry import open_storage
from snapshot.runtime.loop import refuse_on_loop, run
from snapshot.runtime.session import Session
from snapshot.system_calls import expect_linux
from snapshot.text import listed
from snapshot.url import URL

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
    >>> from snapshot import Publisher, Subscriber
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
        keep: int = 2,
        notify: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments. Nothing is read or written.

        Args:
            url: The folder of a `Publisher`, in any storage.
            folder: The local folder, which is created.
            keep: The number of pulled versions that stay in it. Files that an engine has mapped stay readable.
            notify: URLs to which a JSON message is sent after each new version.
            storage_options: Options for the storage plugin.

        Raises:
            ValueError: An argument is invalid, such as a folder in the store itself.
        """
        expect_linux("Subscriber")
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"keep must be a positive int, got {keep!r}")
        self._url = URL.parse(os.fspath(url))
        self._options = dict(storage_options or {})
        open_storage(self._url, self._options)
        self._local = LocalFolder(folder, str(self._url))
        expect_apart(self._url, self._local.path)
        self._failed: dict[int, Failure] = {}
        self._keep = keep
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
        refuse_on_loop()
        if step != "latest" and (not isinstance(step, int) or isinstance(step, bool)):
            raise ValueError(f"step must be an int or 'latest', got {step!r}; pass a version as version=")
        if version is not None and step != "latest":
            raise ValueError("pass a step or a version, not both")
        with self._local.locked(), self._local.errors():
            self._local.clean_aside()
            session = Session(self._url, self._options)
            pull = _Pull(session, self._local, None if step == "latest" else step, version, self._failed)
            try:
                number = run(pull.run())
            except BaseException as error:
                emit("failed", "pull", str(self._url), error=error)
                raise
            finally:
                run(session.close())
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

    async def _bring(self, index: Index) -> None:
        """Make sure that a version is in the folder."""
        if self._local.has(index.version, index.digest) and await self._is_sound(index.version):
            if self._local.versions()[0].version != index.version:
                self._local.touch(index.version)
            return
        here = {marker.version: marker for marker in self._local.versions()}
        while True:
            chain = await self._store.chain(index, lambda number, digest: _matches(here.get(number), digest))
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

    async def _build(self, index: Index, chain: Sequence[Index], base: int | None) -> None:
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
    def after(before: Failure | None, index: Index, reason: str) -> Failure:
        """Return the record of a failure."""
        again = before is not None and before.digest == index.digest
        pause = min(before.pause * 2, LONGEST_PAUSE) if again and before is not None else FIRST_PAUSE
        return Failure(index.digest, reason, time.monotonic() + pause, pause)

    def holds(self, index: Index) -> bool:
        """Return True if the version is unchanged and the pause is not over."""
        return self.digest == index.digest and time.monotonic() < self.until


def expect_apart(url: URL, folder: Path) -> None:
    """Raise `ValueError` if a local folder is a store on this host, or one is in the other."""
    if url.scheme.rpartition("+")[2] != "file":
        return
    store, local = Path(os.path.realpath(url.location)), Path(os.path.realpath(folder))
    if store == local or store in local.parents or local in store.parents:
        raise ValueError(f"{folder}: the local folder and the store {url} must not contain each other")


def _matches(marker: Marker | None, digest: str) -> bool:
    return marker is not None and digest in ("", marker.index)
