"""Checks of a session: a manifest and its files must be signed, or are recorded to be signed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from snapshot.aio import in_thread
from snapshot.errors import SignatureError, StorageError, StorageNotFoundError
from snapshot.per_process import drop_oldest
from snapshot.signing.keys import VerifyingKey
from snapshot.signing.signed_storage import UNREADABLE, LeafStorage, RecordingStorage, SignedStorage
from snapshot.signing.statement import Statement, decode_signature, root_of
from snapshot.signing.tree import FileTree, signature_path, tree_of
from snapshot.storage import Storage

KEPT = 4
"""Number of verified statements that a seal keeps: those of several threads."""


class Seal(Protocol):
    """A check of every file that a session reads."""

    signer: str
    """The public key that all bytes are verified with; empty if there is none."""

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Handle the bytes of a manifest, before they are decoded. `limit`: the maximum bytes of a signature."""
        ...

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> LeafStorage | None:
        """Return a storage that checks the files of a snapshot, which have these sizes."""
        ...


def signer_of(seal: Seal | None) -> str:
    """Return the public key that a seal verifies with; empty if there is none."""
    return "" if seal is None else seal.signer


class KeySeal:
    """A seal that requires the signature of a key."""

    def __init__(self, key: VerifyingKey) -> None:
        self._key = key
        self.signer = str(key)
        self._opened: dict[str, tuple[Statement, dict[str, bytes]]] = {}
        """The verified statements of the snapshots that were opened last, and the leaves that were read of them."""

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Raise `SignatureError` unless the key signed this manifest."""
        path = signature_path(save_id)
        where = storage.url.join(path)
        try:
            data = await storage.get(path, limit=limit)
        except StorageNotFoundError as error:
            raise SignatureError(f"{storage.url}: is not signed: {path} is missing") from error
        except StorageError as error:
            if error.errno not in UNREADABLE:
                raise
            raise SignatureError(f"{storage.url}: its signature cannot be read: {error}") from error
        statement = await in_thread(decode_signature, data, self._key, where)
        found = root_of(await in_thread(tree_of, manifest))
        if (statement.save_id, statement.manifest) != (save_id, found):
            raise SignatureError(f"{storage.url}: the manifest is not the signed one")
        self._opened[save_id] = statement, {}
        drop_oldest(self._opened, KEPT)

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> LeafStorage | None:
        """Return a storage that compares all bytes with the signed hashes."""
        opened = self._opened.get(save_id)
        found = None if opened is None else SignedStorage(storage, opened[0].files, opened[1])
        if found is None or not sizes.items() <= found.sizes.items():
            raise SignatureError(f"{storage.url}: the signed files are not those of the manifest")
        return found


class OptionalSeal(KeySeal):
    """A seal that accepts a snapshot without a signature of the key. If there is one, all bytes are verified."""

    fault = ""
    """Why the snapshot that was opened last is not signed; empty if it is."""

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Verify the manifest if it has a signature of the key."""
        self.fault = ""
        try:
            await super().check_manifest(storage, save_id, manifest, limit)
        except (SignatureError, StorageError) as error:
            self._opened.pop(save_id, None)
            self.fault = str(error)

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> LeafStorage | None:
        """Return a storage that compares all bytes with the signed hashes; None if there are none."""
        return super().wrap(storage, save_id, sizes) if save_id in self._opened else None


class Recorder:
    """A seal for a snapshot that is to be signed: it records the hashes of all bytes."""

    signer = ""

    def __init__(self) -> None:
        self._save_id = ""
        self._manifest = b""
        self._storage: RecordingStorage | None = None

    async def check_manifest(self, storage: Storage, save_id: str, manifest: bytes, limit: int) -> None:
        """Record the bytes of the manifest."""
        self._save_id, self._manifest, self._storage = save_id, manifest, None

    def wrap(self, storage: Storage, save_id: str, sizes: Mapping[str, int]) -> LeafStorage | None:
        """Return a storage that records what is read."""
        if self._storage is None or self._storage.inner is not storage:
            self._storage = RecordingStorage(storage, sizes)
        return self._storage

    def recorded(self) -> tuple[str, bytes, dict[str, FileTree]]:
        """Return the save id, the manifest, and the trees of all files."""
        assert self._storage is not None
        return self._save_id, self._manifest, self._storage.trees()
