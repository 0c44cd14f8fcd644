"""ECDSA keys, and the bundles that they sign: OpenSSF Model Signing v1, which other tools write and verify, too.

A bundle is the file `model.sig`: a Sigstore bundle in JSON. Its envelope (DSSE) holds a statement (in-toto) with the
SHA-256 of each file of a folder. The statement isn't decoded before its signature is verified.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SignatureError
from snapshot.io.storage import check_path

CURVES = {"secp256r1": ("p256", "SHA256"), "secp384r1": ("p384", "SHA384")}
"""The curves of keys -> their names in messages, and the hash that each signs."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"
_SHA256 = re.compile("[0-9a-f]{64}")


def is_ecdsa(key: object) -> bool:
    """Return True if an object of `cryptography` is a key on an elliptic curve, of which Ed25519 is none."""
    from cryptography.hazmat.primitives.asymmetric import ec

    return isinstance(key, (ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey))


class EcdsaKey:
    """A key that verifies, and signs if its private half is known."""

    def __init__(self, key: Any, where: str, *, private: bool = False) -> None:
        """Raise `ValueError` for another curve, or with `private` for a public key. `where` begins the message."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        self._private = key if isinstance(key, ec.EllipticCurvePrivateKey) else None
        if private and self._private is None:
            raise ValueError(f"{where}: must be a private key, got a public one")
        if key.curve.name not in CURVES:
            raise ValueError(f"{where}: must be an ECDSA key on the curve P-256 or P-384, got one on {key.curve.name}")
        self._public = key if self._private is None else key.public_key()
        self._curve, name = CURVES[key.curve.name]
        self._algorithm = ec.ECDSA(getattr(hashes, name)())
        self.hint = hashlib.sha256(
            self._public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        ).hexdigest()
        """The digest of the public key's PEM file, with which a bundle names its key."""

    def verify(self, signature: bytes, payload: bytes) -> bool:
        """Return True if the signature of a payload is by this key."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(signature, _message(payload), self._algorithm)
        except InvalidSignature:
            return False
        return True

    def sign(self, payload: bytes) -> bytes:
        """Return the signature of a payload, verified: the key may be a subclass that asks a key service."""
        assert self._private is not None
        signature: bytes = self._private.sign(_message(payload), self._algorithm)
        if not self.verify(signature, payload):
            raise SignatureError(f"cannot sign: the key made a signature that does not match its public key {self}")
        return signature

    def __str__(self) -> str:
        return f"ecdsa-{self._curve}:{self.hint}"


def _message(payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's encoding of a payload with its type."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


# What is read of a bundle. Fields that it may also have, such as an empty list of entries in a log, are left alone.


class _Signature(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


class _Hint(msgspec.Struct):
    hint: str | None = None


class _Material(msgspec.Struct, rename="camel"):
    public_key: _Hint | None = None


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: _Material
    dsse_envelope: _Envelope


class _Subject(msgspec.Struct):
    digest: dict[str, str]


class _Statement(msgspec.Struct, rename="camel"):
    predicate_type: str
    subject: list[_Subject]
    predicate: msgspec.Raw
    type: str = msgspec.field(name="_type")


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Serialization(msgspec.Struct):
    method: str
    hash_type: str
    allow_symlinks: bool = False
    ignore_paths: list[str] = []


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class SignedFolder(NamedTuple):
    """The content of a bundle."""

    digests: dict[str, str]
    """The paths of all files -> their SHA-256."""
    ignored: Sequence[str]
    """Paths of files and folders that the signature doesn't cover."""
    links: bool
    """True if files may be links."""


def encode_bundle(key: EcdsaKey, name: str, digests: Mapping[str, str], ignored: Sequence[str]) -> bytes:
    """Return the bundle for the files of a folder. `name` is for readers: it isn't compared."""
    ordered = sorted(digests, key=lambda path: path.split("/"))
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": name, "digest": {"sha256": _root_of(digests[path] for path in ordered)}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(ignored),
            },
            "resources": [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in ordered],
        },
    }
    payload = msgspec.json.encode(statement)
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": key.hint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": b64encode(key.sign(payload)).decode(), "keyid": ""}],
        },
    }
    return msgspec.json.encode(bundle)


def decode_bundle(data: bytes, key: EcdsaKey, where: object) -> SignedFolder:
    """Return the content of a bundle. Raise `SignatureError` unless this key signed it."""
    try:
        payload = _verify(decode_json(data, _Bundle, where), key, where)
        statement: _Statement = decode_json(payload, _Statement, where)
        if (statement.type, statement.predicate_type) != (STATEMENT, PREDICATE):
            raise SignatureError(f"{where}: must be {PREDICATE}, got {statement.predicate_type[:200]!r}")
        return _expect_consistent(statement, decode_json(statement.predicate, _Predicate, where), where)
    except SignatureError:
        raise
    except CorruptSnapshotError as error:
        raise SignatureError(str(error)) from error


def _verify(bundle: _Bundle, key: EcdsaKey, where: object) -> bytes:
    """Return the payload of a bundle's envelope, if this key signed it."""
    envelope, named = bundle.dsse_envelope, bundle.verification_material.public_key
    if (bundle.media_type, envelope.payload_type) != (MEDIA_TYPE, PAYLOAD_TYPE):
        raise SignatureError(f"{where}: must be {MEDIA_TYPE}, got {bundle.media_type[:200]!r}")
    if named is None:
        raise SignatureError(f"{where}: is by a certificate or an identity, and only keys are known")
    if named.hint and named.hint != key.hint:
        raise SignatureError(f"{where}: is by another key: must be by {key}, got {named.hint[:200]!r}")
    if len(envelope.signatures) != 1:
        raise SignatureError(f"{where}: must have one signature, got {len(envelope.signatures)}")
    try:
        payload, signature = (b64decode(each, validate=True) for each in (envelope.payload, envelope.signatures[0].sig))
    except binascii.Error as error:
        raise SignatureError(f"{where}: is damaged: {error}") from error
    if not key.verify(signature, payload):
        raise SignatureError(f"{where}: does not match: the signature or the statement was changed, or the key differs")
    return payload


def _expect_consistent(statement: _Statement, predicate: _Predicate, where: object) -> SignedFolder:
    """Return the files of a statement. Raise `SignatureError` if it contradicts itself."""
    how = predicate.serialization
    if (how.method, how.hash_type) != ("files", "sha256"):
        found = f"{how.method[:50]!r} with {how.hash_type[:50]!r}"
        raise SignatureError(f"{where}: must have SHA-256 of whole files, got {found}; sign it again in that way")
    digests: dict[str, str] = {}
    for each in predicate.resources:
        if each.algorithm != "sha256" or not _SHA256.fullmatch(each.digest):
            raise SignatureError(f"{where}: {each.name[:200]!r}: must have a SHA-256, got {each.algorithm[:50]!r}")
        if each.name in digests:
            raise SignatureError(f"{where}: {each.name[:200]!r} is listed twice")
        digests[_expect_inside(each.name, where)] = each.digest
    expected = _root_of(digests.values())
    if [each.digest.get("sha256") for each in statement.subject] != [expected]:
        raise SignatureError(f"{where}: is inconsistent: its files have the digest {expected}, and its subject has not")
    ignored = [_expect_inside(path, where) for path in how.ignore_paths]
    return SignedFolder(digests, ignored, how.allow_symlinks)


def _expect_inside(path: str, where: object) -> str:
    """Return a path. Raise `SignatureError` unless it is of a file or folder below the root, in normal form."""
    try:
        return check_path(path)
    except ValueError:
        raise SignatureError(f"{where}: must have paths inside the folder, got {path[:200]!r}") from None


def _root_of(digests: Any) -> str:
    """Return the digest of digests, in their order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
