"""Ed25519 keys: from PEM files, or as objects of `cryptography`, which is imported only if a key is used."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshot.errors import MissingExtraError, SignatureError
from snapshot.events import log
from snapshot.io.system import WINDOWS

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Key = Any
"""A path of a PEM file, or an `Ed25519PrivateKey` or `Ed25519PublicKey` of `cryptography`."""
LONGEST = 64 << 10
"""Maximum bytes of a key file."""
LENGTH = 64
"""Length of a signature in bytes."""
DER_PUBLIC = 44
"""Length of a public key in DER."""


def load_ed25519() -> Any:
    """Return cryptography's module of Ed25519 keys. Raise `MissingExtraError` if it is not installed."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519  # slow to import, and rarely needed
    except ImportError as error:
        raise MissingExtraError("signatures need cryptography; pip install 'snapshot-torch[sign]'") from error
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


def load_key(key: Key, argument: str = "key") -> VerifyingKey:
    """Return a key that verifies. Of a private key, the public half is used."""
    return VerifyingKey(load_signer(key, argument).public)


def load_signer(key: Key, argument: str = "sign", *, private: bool = False) -> Signer:
    """Return a key for a take, or with `private` one that signs. Raise `ValueError` or `TypeError` for a wrong one."""
    ed25519 = load_ed25519()
    where = argument
    if isinstance(key, (str, os.PathLike)):
        if not os.fspath(key):
            raise ValueError(f"{argument} must be an Ed25519 key or the path of a PEM file, got an empty path")
        where = f"{argument}: {os.fspath(key)}"
        key = _read_pem(Path(key), where)
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return Signer(key.public_key(), key)
    if not isinstance(key, ed25519.Ed25519PublicKey):
        kind = TypeError if where == argument else ValueError
        raise kind(f"{where}: must be an Ed25519 key or the path of a PEM file, got {type(key).__name__}")
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
        wanted = "an Ed25519 key in PEM (PKCS8, or SubjectPublicKeyInfo)"
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


def create_keys(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Create a private key at a path, for its owner only, and its public half beside it. Return both paths.

    Existing files are not overwritten.
    """
    private = load_ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as s

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
