"""SHA-256 trees over files, the signed statement, and how both are stored."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SignatureError
from snapshot.io.aio import in_thread
from snapshot.io.storage import Buffer, Storage
from snapshot.signing.keys import Signer, VerifyingKey

# SHA-256 trees over files: leaves over blocks, a root over the leaves, and the signed statement over all roots.
#
# A range is verified by the blocks that it touches and by the leaves of its file. Leaves and roots are hashed with
# different prefixes, so neither can pass for the other. A root includes the size of its file.

LEAF = 256 << 10
"""Bytes of a leaf's block."""
SIZE = 32
"""Length of one hash in bytes."""
_LEAF_MARK = b"snapshot leaf\0"
_ROOT_MARK = b"snapshot file\0"


def count_leaves(nbytes: int) -> int:
    """Return the number of leaves of a file."""
    return -(-nbytes // LEAF)


def hash_root(nbytes: int, leaves: Buffer) -> bytes:
    """Return the root of a file with this size and these leaves."""
    made = hashlib.sha256(_ROOT_MARK)
    made.update(nbytes.to_bytes(8, "little"))
    made.update(leaves)
    return made.digest()


@dataclass(frozen=True, slots=True)
class FileTree:
    """The tree of one file."""

    size: int
    leaves: bytes

    @property
    def root(self) -> bytes:
        """The hash over the size and all leaves."""
        return hash_root(self.size, self.leaves)


class RunningTree:
    """The tree of a file whose bytes arrive in order, in pieces of any length."""

    __slots__ = ("_filled", "_leaves", "_open", "_size")

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._open = hashlib.sha256(_LEAF_MARK)
        self._filled = 0
        self._size = 0

    def update(self, buffers: Iterable[Buffer]) -> None:
        """Add the next bytes."""
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue
            view, position = view.cast("B"), 0
            while position < len(view):
                taken = min(LEAF - self._filled, len(view) - position)
                self._open.update(view[position : position + taken])
                position += taken
                self._filled += taken
                if self._filled == LEAF:
                    self._close_leaf()

    def _close_leaf(self) -> None:
        self._leaves.append(self._open.digest())
        self._size += self._filled
        self._open, self._filled = hashlib.sha256(_LEAF_MARK), 0

    def finish(self) -> FileTree:
        """Return the tree of all bytes."""
        if self._filled:
            self._close_leaf()
        return FileTree(self._size, b"".join(self._leaves))


def tree_of(*buffers: Buffer) -> FileTree:
    """Return the tree of bytes that are in memory.

    >>> tree_of(b"ab", b"c") == tree_of(b"abc")
    True
    """
    running = RunningTree()
    running.update(buffers)
    return running.finish()


def signature_path(save_id: str) -> str:
    """Return the path of a snapshot's signature."""
    return f"data/{save_id}.signature"


def leaves_path(location: str) -> str:
    """Return the path of the file with the leaves of a data file: one for all files of a rank.

    >>> leaves_path("data/0123456789ab-3-1.safetensors")
    'data/0123456789ab-3.sha256'
    """
    save_id, rank = location.partition(".")[0].split("-")[:2]
    return f"{save_id}-{rank}.sha256"


def join_leaves(trees: Mapping[str, FileTree]) -> dict[str, bytes]:
    """Return the content of each file of leaves. A file with one leaf needs none: its root shows the leaf."""
    made: dict[str, list[bytes]] = {}
    for location in sorted(trees):
        if len(trees[location].leaves) > SIZE:
            made.setdefault(leaves_path(location), []).append(trees[location].leaves)
    return {path: b"".join(parts) for path, parts in made.items()}


def place_leaves(sizes: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """Return where the leaves of each file with several leaves are: a file, begin and end."""
    places: dict[str, tuple[str, int, int]] = {}
    used: dict[str, int] = {}
    for location in sorted(sizes):
        nbytes = count_leaves(sizes[location]) * SIZE
        if nbytes > SIZE:
            path = leaves_path(location)
            begin = used.get(path, 0)
            used[path] = begin + nbytes
            places[location] = path, begin, begin + nbytes
    return places


# The signature file: one line with the signature, and the statement that it covers.
#
# snapshot-signature/1 <public key> <signature> {"save_id": ..., "manifest": [size, root], "files": {location: [size,
# root], ...}}
#
# Nothing of the statement is parsed before its signature is verified.

KIND = b"snapshot-signature/1"
_LINE = re.compile(rb"snapshot-signature/1 ([0-9a-f]{64}) ([0-9a-f]{128})\n")
_OTHER = re.compile(rb"snapshot-signature/(\d{1,9}) ")
_LOCATION = re.compile(r"data/[0-9a-f]{12}-[0-9]+(?:-[0-9]+\.(?:safetensors|bin)|\.json)")
Root = tuple[int, str]
"""Size and root of a file; the root is in hexadecimal."""


class Statement(msgspec.Struct, forbid_unknown_fields=True):
    """The signed statement: which bytes a snapshot has."""

    save_id: str
    manifest: Root
    files: dict[str, Root]


_encode = msgspec.json.Encoder().encode


def root_of(tree: FileTree) -> Root:
    """Return the size and the root of a tree."""
    return tree.size, tree.root.hex()


def encode_signature(signer: Signer, save_id: str, manifest: FileTree, files: Mapping[str, Root]) -> bytes:
    """Return the content of a signature file."""
    statement = _encode(Statement(save_id, root_of(manifest), dict(sorted(files.items()))))
    signature = signer.sign(_message(statement))
    return b"%s %s %s\n%s" % (KIND, signer.raw.hex().encode(), signature.hex().encode(), statement)


def decode_signature(data: bytes, key: VerifyingKey, where: object) -> Statement:
    """Return the statement in a signature file. Raise `SignatureError` unless this key signed it."""
    line = _LINE.match(data)
    if line is None:
        other = _OTHER.match(data)
        if other is not None and other[1] != b"1":
            raise SignatureError(f"{where}: has format {int(other[1])}; pip install --upgrade snapshot-torch")
        raise SignatureError(f"{where}: is damaged, or not a signature")
    if bytes.fromhex(line[1].decode()) != key.raw:
        raise SignatureError(f"{where}: is by another key: must be by {key}, got ed25519:{line[1].decode()}")
    statement = data[line.end() :]
    if not key.verify(bytes.fromhex(line[2].decode()), _message(statement)):
        raise SignatureError(f"{where}: does not match: the signature or the statement was changed")
    try:
        decoded: Statement = decode_json(statement, Statement, where)
    except CorruptSnapshotError as error:
        raise SignatureError(str(error)) from error
    for location, (size, _) in decoded.files.items():
        if size < 0 or not _LOCATION.fullmatch(location):
            raise SignatureError(f"{where}: {location[:200]!r} with {size:,} bytes is not a data file")
    return decoded


def _message(statement: bytes) -> bytes:
    """Return the bytes that are signed: no other use of the key has this beginning."""
    return KIND + b"\n" + statement


# Storing a signature: first the leaves, then the signature.


def expect_signable(storage: Storage, signer: Signer, *, leads: bool) -> None:
    """Raise `ValueError` if a take with this storage cannot be signed, or if its leader has no private key."""
    if storage.host:
        raise ValueError(
            "sign cannot be combined with near folders, whose files the uploader may compress: sign the uploaded step "
            "with `snapshot sign`, or take without near="
        )
    if leads and not signer.can_sign:
        raise ValueError("sign must be a private key on rank 0, got a public one")


async def put_leaves(storage: Storage, trees: Mapping[str, FileTree]) -> None:
    """Store the leaves of files. The same files always have the same leaves, so they may replace existing ones."""
    for path, leaves in join_leaves(trees).items():
        await storage.put(path, leaves)


async def put_signature(
    storage: Storage, signer: Signer, save_id: str, manifest: bytes, files: Mapping[str, Root]
) -> None:
    """Sign a manifest and its files, whose leaves are stored."""

    def sign() -> bytes:  # in a thread: the key may be on another machine
        return encode_signature(signer, save_id, tree_of(manifest), files)

    await storage.put(signature_path(save_id), await in_thread(sign))
