"""Ed25519 keys, and the statement that one signs: which bytes a snapshot has."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, MissingExtraError, SignatureError
from snapshot.events import log
from snapshot.io.aio import in_thread
from snapshot.io.session import Key
from snapshot.io.storage import Storage
from snapshot.io.system import WINDOWS
from snapshot.manifest.paths import signature_path
from snapshot.tensors.digest import HASH_SIZE, FileTree, Root, count_leaves, root_of, tree_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

LONGEST = 64 << 10
"""Maximum bytes of a key file."""
LENGTH = 64
"""Length of a signature in bytes."""
DER_PUBLIC = 44
"""Length of a public key in DER."""


# Keys: from PEM files, or as objects of `cryptography`, which is imported only if a key is used.


def load_ed25519() -> Any:
    """Return cryptography's module of Ed25519 keys. Raise `MissingExtraError` if it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # slow to import, and rarely needed
    except ImportError as error:
        raise MissingExtraError("signatures need cryptography: install the extra 'sign'") from error
    return ed25519


class VerifyingKey:
    """A public key: it verifies signatures."""

    def __init__(self, public: Ed25519PublicKey) -> None:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self.raw = public.public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public: Ed25519PublicKey = load_ed25519().Ed25519PublicKey.from_public_bytes(self.raw)

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Return True if the signature of the message is by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self.public.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def __str__(self) -> str:
        return f"ed25519:{self.raw.hex()}"


class Signer(VerifyingKey):
    """The key of a take. Ranks other than the first may have its public half only."""

    def __init__(self, public: Ed25519PublicKey, private: Ed25519PrivateKey | None) -> None:
        super().__init__(public)
        self._private = private

    @property
    def can_sign(self) -> bool:
        """True if the private half is known."""
        return self._private is not None

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, verified: the key may be a subclass that asks a key service."""
        if self._private is None:
            raise ValueError("sign must be a private key, got a public one")
        signature = self._private.sign(message)
        if not (isinstance(signature, bytes) and len(signature) == LENGTH and self.verify(signature, message)):
            raise SignatureError(f"cannot sign: the key made a signature that does not match its public key {self}")
        return signature

    def __repr__(self) -> str:
        return f"Signer({self})"

    # As a take's signer: the leaves are stored first, then the signature.

    def expect_signable(self, storage: Storage, *, leads: bool) -> None:
        """Raise `ValueError` if a take with this storage cannot be signed, or if its leader has no private key."""
        if storage.host:
            raise ValueError(
                "sign cannot be combined with near folders, whose files the uploader may compress: sign the uploaded "
                "step with `snapshot sign`, or take without near="
            )
        if leads and not self.can_sign:
            raise ValueError("sign must be a private key on rank 0, got a public one")

    def files_of(self, save_id: str, location: str) -> list[str]:
        """Return the files that are stored beside a rank's data files. `location`: one of those."""
        return [leaves_path(location), signature_path(save_id)]

    async def put_leaves(self, storage: Storage, trees: Mapping[str, FileTree]) -> None:
        """Store the leaves of files. The same files always have the same leaves, so they may replace existing ones."""
        for path, leaves in join_leaves(trees).items():
            await storage.put(path, leaves)

    async def put_signature(self, storage: Storage, save_id: str, manifest: bytes, files: Mapping[str, Root]) -> None:
        """Sign a manifest and its files, whose leaves are stored."""

        def sign() -> bytes:  # in a thread: the key may be on another machine
            return encode_signature(self, save_id, tree_of(manifest), files)

        await storage.put(signature_path(save_id), await in_thread(sign))


def load_key(key: Key, argument: str = "key") -> VerifyingKey:
    """Return a key that verifies. Of a private key, the public half is used."""
    return VerifyingKey(load_signer(key, argument).public)


def load_signer(key: Key, argument: str = "sign", *, private: bool = False) -> Signer:
    """Return a key for a take, or with `private` one that signs. Raise `ValueError` or `TypeError` for a wrong one."""
    return make_signer(*read_key(key, argument), argument, private=private)


def read_key(key: Key, argument: str) -> tuple[Any, str]:
    """Return the object of a key, which is read if the key is a path, and the start of messages about it."""
    load_ed25519()  # raises if no key can be used
    if not isinstance(key, (str, os.PathLike)):
        return key, argument
    if not os.fspath(key):
        raise ValueError(f"{argument} must be an Ed25519 or ECDSA key or the path of a PEM file, got an empty path")
    where = f"{argument}: {os.fspath(key)}"
    return _read_pem(Path(key), where), where


def make_signer(key: Any, where: str, argument: str, *, private: bool = False) -> Signer:
    """Return the signer of a key's object. Raise `ValueError` or `TypeError` for a wrong one."""
    ed25519 = load_ed25519()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return Signer(key.public_key(), key)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        kind = TypeError if where == argument else ValueError
        raise kind(f"{where}: must be an Ed25519 or ECDSA key or the path of a PEM file, got {type(key).__name__}")
    if private:
        raise ValueError(f"{where}: must be a private key, got a public one")
    return Signer(key, None)


def _read_pem(path: Path, where: str) -> Any:
    """Return the key in a PEM file."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

    try:
        with path.open("rb") as file:
            data = file.read(LONGEST)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise OSError(error.errno, f"{where}: the key file cannot be read: {error.strerror}") from error
    secret = b"PRIVATE KEY-----" in data
    if secret and not WINDOWS and mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s: other users may read this private key; chmod 600 %s", where, path)
    try:
        return load_pem_private_key(data, None) if secret else load_pem_public_key(data)
    except TypeError as error:
        raise ValueError(f"{where}: is encrypted; decrypt it, or pass a key object of cryptography") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        wanted = "an Ed25519 key in PEM (PKCS8, or SubjectPublicKeyInfo), or an ECDSA key"
        raise ValueError(f"{where}: must be {wanted}{_hint(data)}") from error


def _hint(data: bytes) -> str:
    """Return the format of a key that is not PEM, and what to do."""
    if b"BEGIN OPENSSH" in data:
        return ", got an OpenSSH key; pass the object that cryptography's load_ssh_private_key returns, or a new key"
    if data.startswith(b"ssh-"):
        return ", got an OpenSSH key; pass the object that cryptography's load_ssh_public_key returns"
    if data.startswith(b"0") and b"-----" not in data:  # a DER sequence
        public = " -pubin -pubout" if len(data) == DER_PUBLIC else ""
        return f", got DER; convert it: openssl pkey -inform DER{public} -in KEY.der -out KEY.pem"
    return ""


def create_keys(path: str | os.PathLike[str], *, ecdsa: bool = False) -> tuple[Path, Path]:
    """Create a private key at a path, for its owner only, and its public half beside it. Return both paths.

    It is an Ed25519 key, or with `ecdsa` one on the curve P-256. Existing files are not overwritten.
    """
    ed25519 = load_ed25519()
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1()) if ecdsa else ed25519.Ed25519PrivateKey.generate()

    secret, public = Path(path), Path(f"{os.fspath(path)}.pub")
    held = private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    shown = private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    for place in (secret, public):
        if os.path.lexists(place):
            raise FileExistsError(f"{place}: exists already, and keys are not overwritten; choose another name")
    for place, data, mode in ((secret, held, 0o600), (public, shown, 0o644)):
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(data)
    return secret, public


# Files of a signature: the leaves of a rank's files, and the statement.


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
        if len(trees[location].leaves) > HASH_SIZE:
            made.setdefault(leaves_path(location), []).append(trees[location].leaves)
    return {path: b"".join(parts) for path, parts in made.items()}


def place_leaves(sizes: Mapping[str, int]) -> dict[str, tuple[str, int, int]]:
    """Return where the leaves of each file with several leaves are: a file, begin and end."""
    places: dict[str, tuple[str, int, int]] = {}
    used: dict[str, int] = {}
    for location in sorted(sizes):
        nbytes = count_leaves(sizes[location]) * HASH_SIZE
        if nbytes > HASH_SIZE:
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
_LOCATION = re.compile(r"data/[0-9a-f]{12}-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|stats)|\.json)")


class Statement(msgspec.Struct, forbid_unknown_fields=True):
    """The signed statement: which bytes a snapshot has."""

    save_id: str
    manifest: Root
    files: dict[str, Root]


_encode = msgspec.json.Encoder().encode


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
            raise SignatureError(f"{where}: has format {int(other[1])}; install a newer version of snapshot")
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
