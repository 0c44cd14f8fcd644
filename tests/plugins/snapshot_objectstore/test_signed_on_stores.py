"""Signed snapshots in a bucket and in memory: reads in other parts, and damage on the way."""

import secrets

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import CorruptSnapshotError, Snapshot, StateDict, TakeOptions
from snapshot.errors import SignatureError
from snapshot.testing import faulty
from tests.helpers.storage_calls import use

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
MiB = 1 << 20


def state():
    return {"s": StateDict(w=torch.arange(3 * MiB + 7.0), b=torch.ones(3), blob=b"x" * 300_000, step=1)}


@pytest.fixture(params=["s3fs", "obstore", "memory"])
def place(request):
    """A URL, and its options."""
    if request.param == "memory":
        return f"memory://{secrets.token_hex(4)}", None
    moto = request.getfixturevalue("moto")
    options = {
        "key": moto.key, "secret": moto.secret, "endpoint_url": moto.url,
        "engine": "s3fs" if request.param == "s3fs" else None, "client_kwargs": {"region_name": moto.region},
    }  # fmt: skip
    return f"s3://{moto.bucket()}", options


def test_signed_snapshots_on_object_stores_verify(place):
    url, options = place
    Snapshot.take(f"{url}/a", state(), storage_options=options, options=TakeOptions(sign=KEY))
    Snapshot.async_take(
        f"{url}/b", state(), storage_options=options, options=TakeOptions(sign=KEY, compression="zstd")
    ).wait()
    Snapshot.take(f"{url}/c", state(), storage_options=options)
    assert Snapshot(f"{url}/c", storage_options=options).sign(KEY)
    Snapshot.take(
        f"{url}/d",
        state(),
        storage_options=options,
        base=Snapshot(f"{url}/a", None, options),
        options=TakeOptions(sign=KEY),
    )
    for name in "abcd":
        snapshot = Snapshot(f"{url}/{name}", storage_options=options, key=KEY.public_key())
        assert snapshot.verify()
        live = {"s": StateDict(w=torch.zeros(3 * MiB + 7), b=torch.zeros(3), blob=b"", step=0)}
        snapshot.restore(live)
        assert torch.equal(live["s"]["w"], state()["s"]["w"])
        assert snapshot.read_object("s/w", box=[slice(2 * MiB, 2 * MiB + 1)]).tolist() == [2 * MiB]
        snapshot.delete()


def test_snapshot_signed_as_a_folder_on_object_stores_verifies_until_a_file_changes(place):
    url, options = place
    key = ec.derive_private_key(7, ec.SECP256R1())
    Snapshot.take(f"{url}/a", state(), storage_options=options)
    Snapshot(f"{url}/a", storage_options=options).sign(key)
    signed = Snapshot(f"{url}/a", storage_options=options, key=key.public_key())
    assert signed.verify()
    use(f"{url}/a", options or {}, lambda storage: storage.put("data/more", b"x"))
    with pytest.raises(SignatureError, match="data/more is not signed"):
        signed.verify()
    use(f"{url}/a", options or {}, lambda storage: storage.delete(["data/more"]))
    assert signed.verify()
    signed.delete()
    assert "a/model.sig" not in use(url, options or {}, lambda storage: storage.list())


def test_signed_snapshot_damaged_in_transfer_is_read_again_or_refused(place):
    url, options = place
    Snapshot.take(f"{url}/a", state(), storage_options=options, options=TakeOptions(sign=KEY))
    for path in ("*.safetensors", "*.sha256", "*.signature", "*metadata"):
        on = "read_into" if path in ("*.safetensors", "*.sha256") else "get"
        with faulty("faulty", on=on, path=path, flip=77, times=1) as fault:
            snapshot = Snapshot(f"faulty+{url}/a", storage_options=options, key=KEY.public_key())
            assert torch.equal(snapshot.read_object("s/w", verify=False), state()["s"]["w"])
        assert fault.hits == 1
        with faulty("faulty", on=on, path=path, flip=77, times=None):
            snapshot = Snapshot(f"faulty+{url}/a", storage_options=options, key=KEY.public_key())
            with pytest.raises(CorruptSnapshotError):
                snapshot.read_object("s/w", verify=False)
