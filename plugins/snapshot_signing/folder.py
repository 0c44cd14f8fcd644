"""Signatures of a folder as a whole: a bundle with the SHA-256 of each file, see `bundle.py`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from snapshot.distributed.operation import Operation
from snapshot.errors import SignatureError, SnapshotError, SnapshotNotFoundError, StorageError, StorageNotFoundError
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import FileStat, Storage
from snapshot.io.system import PerProcess, drop_oldest
from snapshot.io.url import Location
from snapshot.loading.open import checkpoint_exists, open_main
from snapshot.manifest.paths import BUNDLE
from snapshot.progress import Meter
from snapshot.reports import VerifyReport
from snapshot.runs.facts import PINNED
from snapshot.text import listed
from snapshot.transform.verify import verify_newest
from snapshot_signing.bundle import EcdsaKey, decode_bundle, encode_bundle
from snapshot_signing.seal import UNREADABLE
from snapshot_signing.sign import expect_undamaged, expect_writable

GIT = (".git", ".github")
IGNORED = (BUNDLE, *GIT, ".gitattributes", ".gitignore", PINNED)
"""Files of no signature: the bundle, what other signers ignore, and the only file that is written into a step later.
Nothing else is left out, whatever a bundle says. Of these, `GIT` are folders."""
LONGEST = 64 << 20
"""Maximum bytes of a bundle, which is decoded before its signature is verified: of some 250,000 files."""
PIECE = 4 << 20
"""Bytes that are hashed at once."""
AT_ONCE = 4
"""The maximum number of files that are hashed at once."""

# Files that a snapshot shares with one that was just verified, as hard links, are not hashed again.

YOUNG = 2.0
"""Seconds after a change of a file in which another change may leave its time as it is."""
RECENT = 60.0
"""Seconds after a verification in which its files count as just verified."""
Identity = tuple[int, ...]
"""Device, inode, size and times of a file, which change with its bytes; empty on storages that don't tell."""
_verified: PerProcess[dict[Identity, tuple[str, str, float]]] = PerProcess(dict)
"""Files of verified folders -> the SHA-256, of which folder, and when. No name and no other digest stands for bytes."""


class Folder:
    """The files of a session's folder, for a signature of all of them."""

    def __init__(self, session: Session, ignored: Sequence[str] = IGNORED) -> None:
        self._session, self._storage = session, session.storage
        self._ignored = {BUNDLE, *ignored} & {*IGNORED}
        if self._storage.host:
            raise ValueError(f"{session.url}: near steps have no signature, so key must be None; use an uploaded step")
        if not self._storage.capabilities.list:
            raise SnapshotError(f"{session.url}: this storage cannot list files, so added ones would not be noticed")
        self._path = session.url.location if session.url.scheme == "file" else ""
        """The path of the folder in a file system; empty on other storages."""
        self._hashed: dict[Identity, str] = {}

    async def scan(self) -> dict[str, tuple[FileStat, Identity]]:
        """Return the stat and identity of each file that a signature must cover."""
        ignored, folders = self._ignored, self._ignored & {*GIT}
        found = [each for each in await self._storage.list()
                 if each not in ignored and each.partition("/")[0] not in folders]  # fmt: skip

        async def look(path: str) -> tuple[FileStat, Identity]:
            if not self._path:
                return await self._storage.stat(path), ()
            full = f"{self._path}/{path}"
            if os.path.islink(full):
                raise SignatureError(f"{full}: is a link, which no signature covers; copy it (cp -L)")
            known = os.stat(full)
            identity = known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns
            return await self._storage.stat(path), identity

        return dict(zip(found, await gather_limited(found, look), strict=True))

    async def hash_files(
        self, files: Mapping[str, tuple[FileStat, Identity]], meter: Meter, *, reuse: bool = False
    ) -> dict[str, str]:
        """Return the SHA-256 of each file; with `reuse`, as it was just verified in another folder."""
        meter.begin(sum(found.size for found, _ in files.values()))

        async def hash_file(path: str) -> str:
            (found, identity), here = files[path], str(self._session.url)
            digest, origin, when = _verified.get().get(identity, ("", here, 0.0))
            if reuse and origin != here and time.monotonic() - when < RECENT:
                meter.wrote(found.size)
                return digest
            began = time.time()
            digest = await self._hash(path, found, meter)
            if identity and began - identity[-1] / 1e9 >= YOUNG:
                self._hashed[identity] = digest
            return digest

        return dict(zip(files, await gather_limited(files, hash_file, AT_ONCE), strict=True))

    async def _hash(self, path: str, found: FileStat, meter: Meter) -> str:
        hasher, length = hashlib.sha256(), min(PIECE, self._session.budget.total)
        async with self._session.budget.slot(length) as slot:
            for begin in range(0, found.size, length):
                piece = slot.view[: min(length, found.size - begin)]
                await self._storage.read_into(path, begin, [piece], token=found.token or None)
                await in_thread(hasher.update, piece)
                meter.wrote(len(piece))
        return hasher.hexdigest()

    def note_verified(self) -> None:
        """Record that all files are as they were signed."""
        now, here = time.monotonic(), str(self._session.url)
        _verified.get().update({identity: (digest, here, now) for identity, digest in self._hashed.items()})
        drop_oldest(_verified.get(), 100_000)


class FolderKey:
    """A key whose signatures cover folders as a whole, so that nothing is read with it but for a verification."""

    optional = False

    def __init__(self, key: EcdsaKey) -> None:
        self._key, self.signer = key, str(key)

    def check_manifest(self, storage: Storage, *_: object) -> Any:
        """Refuse to read parts of a snapshot."""
        raise ValueError(
            f"{storage.url}: key must be an Ed25519 key, got an ECDSA key, whose signatures only cover whole files; "
            "verify the snapshot with `snapshot verify --key`, or Snapshot.verify, and read it without the key"
        )

    wrap = check_manifest

    def verify_whole(
        self, operation: Operation, place: Location, *, quick: bool, resume: str | os.PathLike[str] | None
    ) -> VerifyReport:
        """Verify a folder's bundle, then the SHA-256 of each file, and then what is stored in them."""
        if quick:
            raise ValueError("quick must be False with an ECDSA key, since its signature covers whole files")
        session, exchange = operation.open(replace(place, seal=None)), operation.exchange
        signed, ignored = run(self._read_bundle(session))
        folder = Folder(session, ignored)
        before = run(folder.scan())
        added, removed = before.keys() - signed.keys(), signed.keys() - before.keys()
        _expect_none(session, {"not signed": added, "missing": removed})
        mine = {path: before[path] for path in sorted(before)[exchange.rank :: exchange.world]}
        hashed = run(folder.hash_files(mine, operation.meter, reuse=True))
        _expect_none(session, {"not the signed one": {path for path in hashed if hashed[path] != signed[path]}})
        covered = {str(session.url.join(path)) for path in signed}
        _expect_none(session, {"not covered by the signature": run(_find_needed(session)) - covered})
        report = verify_newest(session, Meter("verify", None), exchange=exchange, resume=resume)
        if run(folder.scan()) != before:
            raise SignatureError(f"{session.url}: was changed while it was verified; verify it again")
        folder.note_verified()
        # the signed SHA-256 of each file stands for the digests that other libraries' checkpoints don't have
        return replace(report, signer=self.signer, unverifiable=0, seconds=operation.seconds)

    async def _read_bundle(self, session: Session) -> tuple[dict[str, str], list[str]]:
        try:
            data = await session.storage.get(BUNDLE, limit=min(LONGEST, session.settings.manifest_bytes))
        except StorageError as error:
            if isinstance(error, StorageNotFoundError) and not await checkpoint_exists(session):
                raise SnapshotNotFoundError(f"{session.url}: no snapshot found, and no {BUNDLE}") from error
            if not isinstance(error, StorageNotFoundError) and error.errno not in UNREADABLE:
                raise
            raise SignatureError(f"{session.url}: is not signed: cannot read {BUNDLE}: {error}") from error
        return await in_thread(decode_bundle, data, self._key, session.url.join(BUNDLE))


def _expect_none(session: Session, found: Mapping[str, set[str]]) -> None:
    """Raise `SignatureError` if paths with faults were found."""
    if faults := [f"{repr(path)[1:-1]} is {fault}" for fault, paths in found.items() for path in sorted(paths)]:
        raise SignatureError(f"{session.url}: is not as it was signed:{listed(faults)}", faults=faults)


async def _find_needed(session: Session) -> set[str]:
    """Return the places of the files that a checkpoint consists of, wherever they are."""
    document = (await open_main(session)).document
    names = {*document.stored_files, *(part.location for part in document.parts)}
    place = getattr(document, "place", session.url)  # of another library's checkpoint
    return {str(place.join(name)) for name in names - {INLINE}}


def sign_folder(operation: Operation, place: Location, key: EcdsaKey) -> VerifyReport:
    """Verify a checkpoint, and sign all files of its folder. Raise `CorruptSnapshotError` if it is damaged."""
    session = operation.open(replace(place, seal=None))
    expect_writable(session)
    folder = Folder(session)
    before = run(folder.scan())
    if claims := [path for path in before if path.startswith(".take-")]:
        raise SnapshotError(f"{session.url}: {claims[0]} shows that a take is running, or was interrupted")
    if strange := [path for path in before if not path.isprintable()]:
        raise SnapshotError(f"{session.url}: cannot sign a file of this name: {strange[0]!r}; rename it")
    report = verify_newest(session, Meter("sign", None), exchange=operation.exchange)
    expect_undamaged(session, report)
    digests = run(folder.hash_files(before, operation.meter))
    if run(folder.scan()) != before:
        raise SnapshotError(f"{session.url}: was changed while it was signed; sign it again")
    name = session.url.location.rpartition("/")[2]
    run(session.storage.put(BUNDLE, encode_bundle(key, name, digests, IGNORED)))
    operation.emit("signed", key=str(key), bytes=report.bytes_read)
    return replace(report, signer=str(key), seconds=operation.seconds)
