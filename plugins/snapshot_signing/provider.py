"""Keys for the core: the entry point `ed25519` of the group `snapshot.seals`."""

from __future__ import annotations

from snapshot.distributed.operation import Operation
from snapshot.io.session import Key
from snapshot.io.url import Location
from snapshot.reports import VerifyReport
from snapshot.save.take_options import TakeSigner
from snapshot_signing.keys import Signer, load_key, load_signer
from snapshot_signing.seal import KeySeal, OptionalSeal


class Ed25519:
    """Keys of the package `cryptography`, and PEM files with them."""

    def load_signer(self, key: Key, argument: str = "sign", *, private: bool = False) -> Signer:
        """Return what signs with a key."""
        return load_signer(key, argument, private=private)

    def seal(self, key: Key) -> KeySeal:
        """Return the check that everything that is read has the signature of a key."""
        return KeySeal(load_key(key))

    def optional_seal(self, signer: TakeSigner) -> OptionalSeal:
        """Return the seal with which a signed take opens its base."""
        assert isinstance(signer, Signer)
        return OptionalSeal(signer)

    def sign(self, operation: Operation, place: Location, signer: TakeSigner) -> VerifyReport:
        """Verify what is stored at a place, and sign it."""
        from snapshot_signing.sign import sign_files  # a take does not pay for what verifies

        assert isinstance(signer, Signer)
        return sign_files(operation, place, signer)


KEYS = Ed25519()
