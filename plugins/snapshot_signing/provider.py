"""Keys for the core: the entry point `ed25519` of the group `snapshot.seals`."""

from __future__ import annotations

from typing import Any

from snapshot.distributed.operation import Operation
from snapshot.io.session import Key, Seal
from snapshot.io.url import Location
from snapshot.reports import VerifyReport
from snapshot.save.take_options import TakeSigner
from snapshot_signing.bundle import EcdsaKey, is_ecdsa
from snapshot_signing.keys import Signer, VerifyingKey, make_signer, read_key
from snapshot_signing.seal import KeySeal, OptionalSeal


class KeysOfFiles:
    """Keys of the package `cryptography`, and PEM files with them. Its kind decides what a key signs, and how.

    An Ed25519 key signs what a take writes, and an ECDSA key signs a folder as a whole, for other tools.
    """

    def load_signer(self, key: Key, argument: str = "sign", *, private: bool = False) -> Any:
        """Return what signs with a key: a take, or with `private` what is stored."""
        held, where = read_key(key, argument)
        if not is_ecdsa(held):
            return make_signer(held, where, argument, private=private)
        if not private:
            later = "sign the snapshot after the take, with Snapshot.sign or `snapshot sign --format oms`"
            raise ValueError(f"{where}: must be an Ed25519 key, got an ECDSA key; {later}")
        return EcdsaKey(held, where, private=True)

    def seal(self, key: Key) -> Seal:
        """Return the check that everything that is read has the signature of a key."""
        held, where = read_key(key, "key")
        if not is_ecdsa(held):
            return KeySeal(VerifyingKey(make_signer(held, where, "key").public))
        from snapshot_signing.folder import FolderKey

        return FolderKey(EcdsaKey(held, where))

    def optional_seal(self, signer: TakeSigner) -> OptionalSeal:
        """Return the seal with which a signed take opens its base."""
        assert isinstance(signer, Signer)
        return OptionalSeal(signer)

    def sign(self, operation: Operation, place: Location, signer: TakeSigner | EcdsaKey) -> VerifyReport:
        """Verify what is stored at a place, and sign it."""
        if isinstance(signer, EcdsaKey):
            from snapshot_signing.folder import sign_folder  # a take does not pay for what verifies

            return sign_folder(operation, place, signer)
        from snapshot_signing.sign import sign_files  # a take does not pay for what verifies

        assert isinstance(signer, Signer)
        return sign_files(operation, place, signer)


KEYS = KeysOfFiles()
