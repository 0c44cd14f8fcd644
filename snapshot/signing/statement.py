"""The signature file: one line with the signature, and the statement that it covers.

    snapshot-signature/1 <public key> <signature>
    {"save_id": ..., "manifest": [size, root], "files": {location: [size, root], ...}}

Nothing of the statement is parsed before its signature is verified.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SignatureError
from snapshot.signing.keys import Signer, VerifyingKey
from snapshot.signing.tree import FileTree

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
