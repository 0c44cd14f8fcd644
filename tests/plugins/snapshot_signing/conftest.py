"""Keys of the tests."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@pytest.fixture(scope="session")
def secret():
    return Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


@pytest.fixture(scope="session")
def public(secret):
    return secret.public_key()


@pytest.fixture(scope="session")
def stranger():
    return Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
