"""The folder of a subscriber: complete versions, the link `current`, and a lock for all processes of the host.

A version is built in a folder aside and renamed. Files of a version are never changed, since engines may map them.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from snapshot.errors import SnapshotError, StorageError
from snapshot.events import log
from snapshot.publish.version import version_name, version_of

MARKER = ".snapshot-pull.json"
LOCK = ".snapshot-pull.lock"
ASIDE = ".pull-"
"""The name prefix of folders that are built or deleted."""
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
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with self.errors():
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

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
        """Return the path of a version."""
        return self.path / version_name(version)

    def marker(self, version: int) -> Marker | None:
        """Return the origin of a local version; None if it is not here or not from this store."""
        try:
            found = msgspec.json.decode((self.folder(version) / MARKER).read_bytes(), type=Marker)
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.version == version and found.source == self._source else None

    def has(self, version: int, index: str) -> bool:
        """Return True if a version is here whose index has this digest. An empty digest matches any."""
        found = self.marker(version)
        return found is not None and index in ("", found.index)

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
        """Give a complete folder its name. A folder of that name from another source is replaced."""
        marker = Marker(version, self._source, index, boot_id(), time.time(), step)
        (aside / MARKER).write_bytes(msgspec.json.encode(marker))
        target = self.folder(version)
        if os.path.lexists(target):
            self.remove(version)
        os.rename(aside, target)

    def touch(self, version: int) -> None:
        """Record that a version was verified on this boot and pulled now."""
        marker = self.marker(version)
        if marker is not None:
            marker.boot, marker.time = boot_id(), time.time()
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

    def clean(self, keep: int, pulled: int) -> None:
        """Delete all versions but the last pulled ones, and leftovers of pulls that were killed."""
        try:
            kept = {pulled, *[each.version for each in self.versions() if each.version != pulled][: keep - 1]}
            for each in self.versions():
                if each.version not in kept:
                    self.remove(each.version)
            self.clean_aside()
        except OSError as error:  # the pull is complete: old files only cost space
            log.warning("%s: cannot delete old versions: %s", self.path, error)

    def clean_aside(self) -> None:
        """Delete folders and links aside. The lock must be held: then no other process uses them."""
        for each in self.path.iterdir():
            if each.name.startswith(ASIDE):
                with suppress(OSError):
                    each.unlink() if each.is_symlink() or each.is_file() else shutil.rmtree(each)
