"""The folder of a subscriber: complete versions, the link `current`, and a lock for all processes of the host.

A version is built in a folder aside and renamed. Files of a version are never changed, since engines may map them.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError
from snapshot.events import log
from snapshot.publish.version import version_name, version_of
from snapshot.system_calls import CLOEXEC, fcntl, libc

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
        """Return the path of a version."""
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

    def clean(self, keep: int, pulled: int) -> None:
        """Delete all versions but the last pulled ones, and leftovers of pulls that were killed."""
        try:
            kept = {pulled, *[each.version for each in self.versions() if each.version != pulled][: keep - 1]}
            for each in self.versions():
                if each.version not in kept or (each.boot == DAMAGED and each.version != pulled):
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
