"""Checks of a session: a manifest and its files must be signed, or are recorded to be signed."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Mapping, Sequence

from snapshot.errors import CorruptSnapshotError, SignatureError, StorageError, StorageNotFoundError
from snapshot.events import emit
from snapshot.io.aio import in_thread
from snapshot.io.storage import Buffer, FileStat, Storage, StorageWrapper
from snapshot.io.system import drop_oldest
from snapshot.manifest.paths import signature_path
from snapshot.tensors.digest import HASH_SIZE, LEAF, FileTree, Root, count_leaves, hash_root, root_of, tree_of
from snapshot_signing.keys import Statement, VerifyingKey, decode_signature, place_leaves

# Reads of whole blocks: each is compared with a signed leaf, or its leaf is recorded to be signed.

UNREADABLE = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP}
"""Error numbers of a signature or of hashes that cannot be read, while other files can."""


class LeafStorage(StorageWrapper):
    """Another storage, whose reads are extended to whole blocks, since a leaf covers one."""

    def __init__(self, inner: Storage, sizes: Mapping[str, int]) -> None:
        super().__init__(inner)
        self.sizes = sizes
        """The sizes of the files."""

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Fill the buffers with verified bytes. Damaged ones are read again: from another place, or once more."""
        views = [view.cast("B") for view in (memoryview(each) for each in buffers) if view.nbytes]
        end = offset + sum(map(len, views))
        if end > self._size(path):
            raise CorruptSnapshotError(f"{self.url.join(path)}: ends before {end:,}")
        if offset == end:
            return
        begin, stop = offset // LEAF * LEAF, min(count_leaves(end) * LEAF, self._size(path))
        whole = [memoryview(bytearray(offset - begin)), *views, memoryview(bytearray(stop - end))]
        whole = [view for view in whole if len(view)]
        await self.prepare(path)
        again = not self.capabilities.local
        while True:
            await self.inner.read_into(path, begin, whole, token=token)
            tree = await in_thread(tree_of, *whole)
            fault = await self.find_fault(path, begin // LEAF, tree.leaves)
            if not fault:
                return
            if not (self.inner.switch_source(path) or again):
                raise CorruptSnapshotError(f"{self.url.join(path)}: {fault}")
            again = False
            emit("retry", "read", str(self.url.join(path)), attempt=1, error=fault, pause=0.0)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        """Return a part of the manifest, verified. Other files are returned as they are."""
        data = await self.inner.get(path, limit=limit)
        if path in self.sizes:
            tree = await in_thread(tree_of, data)
            fault = f"must have {self.sizes[path]:,} bytes, got {tree.size:,}" if tree.size != self.sizes[path] else ""
            if fault or (fault := await self.find_fault(path, 0, tree.leaves)):
                raise CorruptSnapshotError(f"{self.url.join(path)}: {fault}")
        return data

    def _size(self, path: str) -> int:
        if path not in self.sizes:
            raise SignatureError(f"{self.url.join(path)}: is not a file of the signed snapshot")
        return self.sizes[path]

    async def prepare(self, path: str) -> None:
        """Do what may fail before bytes of a file are read into live tensors."""

    @abstractmethod
    async def find_fault(self, path: str, first: int, leaves: bytes) -> str:
        """Handle the leaves of blocks that were read, from number `first` on. Return a fault, or ''."""


class SignedStorage(LeafStorage):
    """Another storage, whose bytes are compared with their signed leaves."""

    def __init__(self, inner: Storage, files: Mapping[str, Root], leaves: dict[str, bytes]) -> None:
        """`leaves`: the verified leaves of files, which later reads use. What is read is added."""
        super().__init__(inner, {location: size for location, (size, _) in files.items()})
        self._files = files
        self._places = place_leaves(self.sizes)
        self._leaves = leaves
        self._ends: dict[str, int] = {}
        """The sizes of the files of leaves."""
        for location, _, end in self._places.values():
            self._ends[location] = max(end, self._ends.get(location, 0))
        self._found: set[str] = set()
        """The files of leaves that exist."""

    async def stat(self, path: str) -> FileStat:
        """Return the stat of a file. Raise `CorruptSnapshotError` if the file of its leaves is missing or short."""
        found = await self.inner.stat(path)
        location = self._places.get(path, ("",))[0]
        if location and location not in self._found and path not in self._leaves:
            try:
                size = (await self.inner.stat(location)).size
            except StorageError as error:
                if error.errno not in UNREADABLE and not isinstance(error, StorageNotFoundError):
                    raise
                raise CorruptSnapshotError(f"{location}, which has signed hashes, cannot be read: {error}") from error
            if size != self._ends[location]:
                raise CorruptSnapshotError(
                    f"{location}, which has signed hashes, must have {self._ends[location]:,} bytes, got {size:,}"
                )
            self._found.add(location)
        return found

    async def prepare(self, path: str) -> None:
        """Read and verify the leaves of a file."""
        if path in self._places:
            await self.tree(path)

    async def find_fault(self, path: str, first: int, leaves: bytes) -> str:
        """Compare leaves with the signed ones."""
        if path not in self._places:
            if hash_root(self.sizes[path], leaves).hex() == self._files[path][1]:
                return ""
        else:
            expected = (await self.tree(path)).leaves[first * HASH_SIZE : first * HASH_SIZE + len(leaves)]
            if leaves == expected:
                return ""
            while leaves[:HASH_SIZE] == expected[:HASH_SIZE]:
                leaves, expected, first = leaves[HASH_SIZE:], expected[HASH_SIZE:], first + 1
        begin = first * LEAF
        return f"bytes {begin:,} to {min(begin + LEAF, self.sizes[path]):,} are not the signed ones"

    async def tree(self, path: str) -> FileTree:
        """Return the signed tree of a file. Its leaves are read once; a file with a single leaf is read itself."""
        if path not in self._places:
            held = bytearray(self._size(path))
            await self.read_into(path, 0, [held])
            return tree_of(held)
        if path not in self._leaves:
            location, begin, end = self._places[path]
            again = not self.capabilities.local
            while True:
                held = bytearray(end - begin)
                await self.inner.read_into(location, begin, [held])
                if hash_root(self.sizes[path], held).hex() == self._files[path][1]:
                    break
                if not (self.inner.switch_source(location) or again):
                    raise CorruptSnapshotError(
                        f"{self.url.join(path)}: its hashes in {location}[{begin}:{end}] are not the signed ones"
                    )
                again = False
            self._leaves[path] = bytes(held)
        return FileTree(self.sizes[path], self._leaves[path])


class RecordingStorage(LeafStorage):
    """Another storage, whose leaves are recorded as its files are read, in any order."""

    def __init__(self, inner: Storage, sizes: Mapping[str, int]) -> None:
        super().__init__(inner, sizes)
        self._leaves = {path: bytearray(count_leaves(size) * HASH_SIZE) for path, size in sizes.items()}
        self._known = {path: bytearray(count_leaves(size)) for path, size in sizes.items()}

    async def find_fault(self, path: str, first: int, leaves: bytes) -> str:
        """Record leaves. A block that was read before must have the same bytes again."""
        held, known = self._leaves[path], self._known[path]
        for number in range(len(leaves) // HASH_SIZE):
            place = slice((first + number) * HASH_SIZE, (first + number + 1) * HASH_SIZE)
            leaf = leaves[number * HASH_SIZE : (number + 1) * HASH_SIZE]
            if known[first + number] and held[place] != leaf:
                return "changed while it was read"
            held[place] = leaf
            known[first + number] = 1
        return ""

    def trees(self) -> dict[str, FileTree]:
        """Return the trees of all files. Raise `CorruptSnapshotError` if a block was not read."""
        for path, known in self._known.items():
            if not all(known):
                raise CorruptSnapshotError(f"{self.url.join(path)}: has bytes that no digest covers")
        return {path: FileTree(self.sizes[path], bytes(leaves)) for path, leaves in self._leaves.items()}


# Checks of a session

KEPT = 4
"""Number of verified statements that a seal keeps: those of several threads."""


class KeySeal:
    """A seal that requires the signature of a key."""

    optional = False

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

    optional = True
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
    optional = False

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
