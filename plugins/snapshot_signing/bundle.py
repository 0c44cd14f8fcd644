"""ECDSA keys, and the bundles that they sign: OpenSSF Model Signing v1, which other tools write and verify, too.

A bundle is the file `model.sig`: a Sigstore bundle in JSON. Its envelope (DSSE) holds a statement (in-toto) with the
SHA-256 of each file of a folder. The statement isn't decoded before its signature is verified.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SignatureError
from snapshot.io.storage import check_path

CURVES = ("secp256r1", "secp384r1")
"""The curves of keys. Each signs a hash with as many bits."""
MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://model_signing/signature/v1.0"


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

        self._private: Any = key if isinstance(key, ec.EllipticCurvePrivateKey) else None
        if private and self._private is None:
            raise ValueError(f"{where}: must be a private key, got a public one")
        if key.curve.name not in CURVES:
            raise ValueError(f"{where}: must be an ECDSA key on the curve P-256 or P-384, got one on {key.curve.name}")
        self._public = key if self._private is None else key.public_key()
        self._algorithm = ec.ECDSA(getattr(hashes, f"SHA{key.key_size}")())
        pem = self._public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.hint = hashlib.sha256(pem).hexdigest()
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
        signature: bytes = self._private.sign(_message(payload), self._algorithm)
        if not self.verify(signature, payload):
            raise SignatureError(f"cannot sign: the key made a signature that does not match its public key {self}")
        return signature

    def __str__(self) -> str:
        return f"ecdsa-p{self._public.key_size}:{self.hint}"


def _message(payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's encoding of a payload with its type."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


# What is read of a bundle. It may have other fields, such as an empty list of entries in a log.


class _Signature(msgspec.Struct):
    sig: str


class _Envelope(msgspec.Struct, rename="camel"):
    payload: str
    payload_type: str
    signatures: list[_Signature]


class _Bundle(msgspec.Struct, rename="camel"):
    media_type: str
    verification_material: dict[str, Any]
    dsse_envelope: _Envelope


class _Serialization(msgspec.Struct):
    method: str
    hash_type: str
    ignore_paths: list[str] = []


class _Resource(msgspec.Struct):
    name: str
    algorithm: str
    digest: str


class _Predicate(msgspec.Struct):
    serialization: _Serialization
    resources: list[_Resource]


class _Digests(msgspec.Struct):
    sha256: str


class _Subject(msgspec.Struct):
    digest: _Digests


class _Statement(msgspec.Struct, rename="camel"):
    predicate_type: str
    subject: list[_Subject]
    predicate: msgspec.Raw
    type: str = msgspec.field(name="_type")


def encode_bundle(key: EcdsaKey, name: str, digests: Mapping[str, str], ignored: Sequence[str]) -> bytes:
    """Return the bundle for the files of a folder. `name` is for readers: it isn't compared."""
    ordered = sorted(digests, key=lambda path: path.split("/"))
    how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": list(ignored)}
    resources = [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in ordered]
    subject = {"name": name, "digest": {"sha256": _root_of(digests[path] for path in ordered)}}
    predicate = {"serialization": how, "resources": resources}
    statement = {"_type": STATEMENT, "subject": [subject], "predicateType": PREDICATE, "predicate": predicate}
    payload = msgspec.json.encode(statement)
    signature = {"sig": b64encode(key.sign(payload)).decode(), "keyid": ""}
    envelope = {"payload": b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": [signature]}
    material = {"publicKey": {"hint": key.hint}, "tlogEntries": []}
    return msgspec.json.encode({"mediaType": MEDIA_TYPE, "verificationMaterial": material, "dsseEnvelope": envelope})


def decode_bundle(data: bytes, key: EcdsaKey, where: object) -> tuple[dict[str, str], list[str]]:
    """Return the SHA-256 of each signed path, and the ignored paths, which are files or folders.

    Raise `SignatureError` unless this key signed the bundle.
    """
    try:
        statement: _Statement = decode_json(_verify(decode_json(data, _Bundle, where), key, where), _Statement, where)
        for wanted, got in ((STATEMENT, statement.type), (PREDICATE, statement.predicate_type)):
            if got != wanted:
                raise SignatureError(f"{where}: must be {wanted}, got {got[:200]!r}")
        predicate: _Predicate = decode_json(statement.predicate, _Predicate, where)
        how, resources = predicate.serialization, predicate.resources
        hashes = {how.hash_type, *(each.algorithm for each in resources)}
        if how.method != "files" or hashes != {"sha256"}:
            other = f"{sorted(hashes)} of {how.method!r}"[:200]
            raise SignatureError(f"{where}: must have sha256 of 'files', got {other}; sign it again in that way")
        digests = {check_path(each.name): each.digest.lower() for each in resources}
        if len(digests) < len(resources):
            raise SignatureError(f"{where}: lists a file twice")
        if [each.digest.sha256.lower() for each in statement.subject] != [_root_of(digests.values())]:
            raise SignatureError(f"{where}: is inconsistent: its subject does not have the digest of its files")
        return digests, list(map(check_path, how.ignore_paths))
    except CorruptSnapshotError as error:
        raise SignatureError(str(error)) from error
    except ValueError as error:  # a digest that is none, or a path that leads out of the folder
        raise SignatureError(f"{where}: is damaged: {str(error)[:300]}") from error


def _verify(bundle: _Bundle, key: EcdsaKey, where: object) -> bytes:
    """Return the payload of a bundle's envelope, if this key signed it."""
    envelope, named = bundle.dsse_envelope, bundle.verification_material.get("publicKey")
    for wanted, got in ((MEDIA_TYPE, bundle.media_type), (PAYLOAD_TYPE, envelope.payload_type)):
        if got != wanted:
            raise SignatureError(f"{where}: must be {wanted}, got {got[:200]!r}")
    if not isinstance(named, dict):
        raise SignatureError(f"{where}: is by a certificate or an identity, and only keys are known")
    if named.get("hint") not in (None, "", key.hint):
        raise SignatureError(f"{where}: is by another key: must be by {key}, got {str(named['hint'])[:200]!r}")
    if len(envelope.signatures) != 1:
        raise SignatureError(f"{where}: must have one signature, got {len(envelope.signatures)}")
    payload = b64decode(envelope.payload, validate=True)
    if not key.verify(b64decode(envelope.signatures[0].sig, validate=True), payload):
        raise SignatureError(f"{where}: does not match: the signature or the statement was changed, or the key differs")
    return payload


def _root_of(digests: Iterable[str]) -> str:
    """Return the digest of digests, in their order."""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
