"""Signatures of a folder as a whole: a bundle with the SHA-256 of each file, see `bundle.py`."""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from snapshot.distributed.operation import Operation
from snapshot.errors import SignatureError, SnapshotError, SnapshotNotFoundError, StorageError, StorageNotFoundError
from snapshot.formats.foreign import ForeignDocument
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import FileStat, Storage
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.io.url import Location
from snapshot.loading.open import checkpoint_exists, open_main
from snapshot.manifest.document import METADATA
from snapshot.manifest.paths import BUNDLE
from snapshot.progress import Meter
from snapshot.reports import VerifyReport
from snapshot.runs.facts import PINNED
from snapshot.transform.verify import verify_newest
from snapshot_signing.bundle import EcdsaKey, SignedFolder, decode_bundle, encode_bundle
from snapshot_signing.seal import UNREADABLE
from snapshot_signing.sign import expect_undamaged, expect_writable

IGNORED = (BUNDLE, ".git", ".gitattributes", ".github", ".gitignore", PINNED)
"""Files of no signature: the bundle, what other signers ignore, and the only file that is written into a step later."""
CLAIM = ".take-"
PIECE = 4 << 20
"""Bytes that are hashed at once."""
AT_ONCE = 4
"""The maximum number of files that are hashed at once."""
NAMED = 5
"""The maximum number of files that an error names."""

# Files that several snapshots share, as hard links, are hashed once, if they are verified one after another.

YOUNG = 2.0
"""Seconds after a change of a file in which another change may leave its time as it is."""
RECENT = 3600.0
"""Seconds after which a file is hashed again."""
MOST = 100_000
Identity = tuple[int, ...]
_hashed: PerProcess[dict[Identity, tuple[str, str, float]]] = PerProcess(dict)
"""Device, inode, size and times of files that this process has hashed -> the SHA-256, for which folder, and when.

No other digest, and no name, stands for a file's bytes.
"""


Files = Mapping[str, FileStat]
"""The paths of files, and what they were when they were found."""


class Folder:
    """The files of an operation's folder, for signatures of them all."""

    def __init__(self, session: Session, ignored: Sequence[str] = IGNORED, *, links: bool = False) -> None:
        """`links`: files may be links to others of the folder."""
        self._session = session
        self._storage = session.storage
        self._ignored = {BUNDLE, *ignored}
        self._links = links
        if self._storage.host:
            raise ValueError(
                f"{session.url}: key must be None for near steps, which are not signed; use the uploaded step"
            )
        has = self._storage.capabilities
        self._path = session.url.location if has.local and session.url.scheme == "file" else ""
        """The path of the folder in a file system; empty on other storages."""
        if not has.list:
            raise SnapshotError(f"{session.url}: this storage cannot list files, so added ones would not be noticed")

    async def scan(self) -> Files:
        """Return the stat of each file that a signature must cover."""
        found = [path for path in await self._storage.list() if not self._is_ignored(path)]
        if self._path:
            await in_thread(self._expect_no_links, found)

        async def look(path: str) -> tuple[str, FileStat]:
            try:
                return path, await self._storage.stat(path)
            except StorageError as error:
                if error.errno not in UNREADABLE:
                    raise
                raise SignatureError(f"{error}, which no signature can cover") from error

        return dict(await gather_limited(found, look))

    def _is_ignored(self, path: str) -> bool:
        parts = path.split("/")
        return any("/".join(parts[:count]) in self._ignored for count in range(1, len(parts) + 1))

    def _expect_no_links(self, paths: Sequence[str]) -> None:
        root = os.path.realpath(self._path)
        for path in paths:
            full = f"{self._path}/{path}"
            if os.path.islink(full):
                inside = os.path.commonpath([root, os.path.realpath(full)]) == root
                if not (self._links and inside and stat.S_ISREG(os.stat(full).st_mode)):
                    raise SignatureError(
                        f"{full}: is a link, whose target no signature covers; copy the folder with links followed "
                        "(cp -rL)"
                    )

    async def hash_files(self, files: Files, meter: Meter) -> dict[str, str]:
        """Return the SHA-256 of each file. Raise if one was replaced since the scan."""
        meter.begin(sum(each.size for each in files.values()))
        hashed = await gather_limited(files.items(), partial(self._hash, meter), AT_ONCE)
        return dict(zip(files, hashed, strict=True))

    async def _hash(self, meter: Meter, file: tuple[str, FileStat]) -> str:
        path, found = file
        before = await in_thread(self._identify, path)
        digest, origin, when = _hashed.get().get(before, ("", "", 0.0))
        if digest and origin != str(self._session.url) and time.monotonic() - when < RECENT:
            meter.wrote(found.size)
            return digest
        digest = await self._hash_bytes(path, found, meter)
        if before and before == await in_thread(self._identify, path) and time.time() - before[-1] / 1e9 >= YOUNG:
            _hashed.get()[before] = digest, str(self._session.url), time.monotonic()
            drop_oldest(_hashed.get(), MOST)
        return digest

    async def _hash_bytes(self, path: str, found: FileStat, meter: Meter) -> str:
        hasher, length = hashlib.sha256(), min(PIECE, self._session.budget.total)
        async with self._session.budget.slot(length) as slot:
            for begin in range(0, found.size, length):
                piece = slot.view[: min(length, found.size - begin)]
                await self._storage.read_into(path, begin, [piece], token=found.token or None)
                await in_thread(hasher.update, piece)
                meter.wrote(len(piece))
        return hasher.hexdigest()

    def _identify(self, path: str) -> Identity:
        """Return what changes with any change of a file; empty on storages that don't tell."""
        if not self._path:
            return ()
        found = os.stat(f"{self._path}/{path}")
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


# Verification


class FolderKey:
    """A key whose signatures cover folders as a whole, so that only a verification reads with it."""

    optional = False

    def __init__(self, key: EcdsaKey) -> None:
        self._key = key
        self.signer = str(key)

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Refuse to read parts of a snapshot."""
        raise self._refusal(storage)

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> Storage | None:
        """Refuse to read parts of a snapshot."""
        raise self._refusal(storage)

    def _refusal(self, storage: Storage) -> ValueError:
        return ValueError(
            f"{storage.url}: key must be an Ed25519 key, got an ECDSA key, whose signatures only cover whole files; "
            "verify the snapshot with `snapshot verify --key`, or Snapshot.verify, and read it without the key"
        )

    def verify_whole(
        self, operation: Operation, place: Location, *, quick: bool, resume: str | os.PathLike[str] | None
    ) -> VerifyReport:
        """Verify a folder's bundle, then the SHA-256 of each file, and then what is stored in them."""
        session = operation.open(replace(place, seal=None))
        exchange = operation.exchange
        signed = run(self._read_bundle(session))
        folder = Folder(session, signed.ignored, links=signed.links)
        before = run(folder.scan())
        added, removed = before.keys() - signed.digests.keys(), signed.digests.keys() - before.keys()
        _expect_none(session, {"not signed": added, "missing": removed})
        chosen = [METADATA] if quick else sorted(before)[exchange.rank :: exchange.world]
        mine = {path: before[path] for path in chosen if path in before}
        changed = run(_find_changed(session, folder, mine, signed.digests, operation.meter))
        _expect_none(session, {"not the signed one": changed})
        run(_expect_covered(session, signed))
        report = verify_newest(session, Meter("verify", None), exchange=exchange, quick=quick, resume=resume)
        if run(folder.scan()) != before:
            raise SignatureError(f"{session.url}: was changed while it was verified; verify it again")
        if quick:
            return replace(report, signer=self.signer if mine else "", seconds=operation.seconds)
        # the signed SHA-256 of each file stands for the digests that other libraries' checkpoints don't have
        return replace(report, signer=self.signer, unverifiable=0, seconds=operation.seconds)

    async def _read_bundle(self, session: Session) -> SignedFolder:
        where = session.url.join(BUNDLE)
        try:
            data = await session.storage.get(BUNDLE, limit=session.settings.manifest_bytes)
        except StorageNotFoundError as error:
            if not await checkpoint_exists(session):
                raise SnapshotNotFoundError(f"{session.url}: no snapshot found, and no {BUNDLE}") from error
            raise SignatureError(f"{session.url}: is not signed by an ECDSA key: {BUNDLE} is missing") from error
        except StorageError as error:
            if error.errno not in UNREADABLE:
                raise
            raise SignatureError(f"{session.url}: its signature cannot be read: {error}") from error
        return await in_thread(decode_bundle, data, self._key, where)


async def _find_changed(
    session: Session, folder: Folder, files: Files, digests: Mapping[str, str], meter: Meter
) -> list[str]:
    """Return the files whose SHA-256 is not the signed one. Over a network, these are read twice."""
    found = await folder.hash_files(files, meter)
    changed = {path: files[path] for path, digest in found.items() if digest != digests[path]}
    if changed and not session.storage.capabilities.local:
        found = await folder.hash_files(changed, Meter("verify", None))
    return [path for path in changed if found[path] != digests[path]]


def _expect_none(session: Session, faults: Mapping[str, Sequence[str] | set[str]]) -> None:
    """Raise `SignatureError` if there are files with a fault."""
    lines = [f"{path} is {fault}" for fault, paths in faults.items() for path in sorted(paths)]
    if lines:
        more = f", and {len(lines) - NAMED:,} more" if len(lines) > NAMED else ""
        raise SignatureError(f"{session.url}: is not as it was signed: {', '.join(lines[:NAMED])}{more}", faults=lines)


async def _expect_covered(session: Session, signed: SignedFolder) -> None:
    """Raise `SignatureError` if the snapshot has files that the bundle's signer ignored, or others elsewhere."""
    document = (await open_main(session)).document
    names = {*document.stored_files, *(part.location for part in document.parts)} - {INLINE}
    if isinstance(document, ForeignDocument):
        root, place = session.url.location.rstrip("/"), document.place.location
        if place != session.url.location and not place.startswith(f"{root}/"):
            raise SignatureError(f"{session.url}: has files in {document.place}, which the signature does not cover")
        names = {f"{place[len(root) :].strip('/')}/{name}".lstrip("/") for name in names}
    else:
        names.add(METADATA)
    _expect_none(session, {"ignored by the signature": names - signed.digests.keys()})


# Signing


def sign_folder(operation: Operation, place: Location, key: EcdsaKey) -> VerifyReport:
    """Verify a checkpoint, and sign all files of its folder. Raise `CorruptSnapshotError` if it is damaged."""
    session = operation.open(replace(place, seal=None))
    expect_writable(session)
    folder = Folder(session)
    before = run(folder.scan())
    if claims := [path for path in before if path.startswith(CLAIM)]:
        raise SnapshotError(f"{session.url}: {claims[0]} shows that a take is running, or was interrupted")
    report = verify_newest(session, Meter("sign", None), exchange=operation.exchange)
    expect_undamaged(session, report)
    digests = run(folder.hash_files(before, operation.meter))
    if run(folder.scan()) != before:
        raise SnapshotError(f"{session.url}: was changed while it was signed; sign it again")
    name = session.url.location.rstrip("/").rpartition("/")[2]
    run(session.storage.put(BUNDLE, encode_bundle(key, name, digests, IGNORED)))
    operation.emit("signed", key=str(key), bytes=report.bytes_read)
    return replace(report, signer=str(key), seconds=operation.seconds)
