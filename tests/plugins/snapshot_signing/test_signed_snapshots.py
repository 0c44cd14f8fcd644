"""Signed snapshots: what a reader with the key accepts, and what it finds."""

import os
import re
import shutil
from dataclasses import replace

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import (
    CorruptSnapshotError,
    RestoreOptions,
    Snapshot,
    SnapshotManager,
    SnapshotNotFoundError,
    StateDict,
    StorageError,
    TakeOptions,
    Target,
    load,
)
from snapshot.errors import SignatureError
from snapshot.io.aio import in_thread
from snapshot.manifest.document import decode_document, encode
from snapshot.testing import Log, faulty, tapped
from snapshot.transform.verify import Verification
from snapshot_merge import MergeOptions, merge
from snapshot_signing.keys import Signer, Statement
from tests.helpers.arguments import for_restore
from tests.helpers.states import flip

BIG = 600_000
"""Elements of the long tensor: its file has several leaves."""


def state(value=1.0, elements=BIG):
    return {
        "s": StateDict(
            big=torch.arange(elements, dtype=torch.float32) * value, other=torch.full((7,), value), text="abc", step=3
        )
    }


def small(value=1.0):
    return state(value, 20)


def fresh(elements=BIG):
    return {"s": StateDict(big=torch.zeros(elements), other=torch.zeros(7), text="", step=0)}


def loaded(path, key, elements=BIG, **options):
    live = fresh(elements)
    Snapshot(path, key=key).restore(live, **for_restore(**options))
    return live["s"]


def files_of(path, ending=""):
    return sorted(each for each in (path / "data").iterdir() if each.name.endswith(ending))


def faults(path, key):
    """The faults that a reader with the key finds."""
    try:
        return Snapshot(path, key=key).verify().faults
    except CorruptSnapshotError as error:
        return (str(error),)


# Made


WAYS = {
    "take": lambda path, app, key: Snapshot.take(path, app, options=TakeOptions(sign=key)),
    "compressed": lambda path, app, key: Snapshot.take(path, app, options=TakeOptions(sign=key, compression="zstd")),
    "async": lambda path, app, key: Snapshot.async_take(path, app, options=TakeOptions(sign=key)).wait(),
    "async compressed": lambda path, app, key: Snapshot.async_take(
        path, app, options=TakeOptions(sign=key, compression="zstd")
    ).wait(),
    "process": lambda path, app, key: Snapshot.async_take(
        path, app, options=TakeOptions(sign=key, worker="process")
    ).wait(),
    "process compressed": lambda path, app, key: Snapshot.async_take(
        path, app, options=TakeOptions(sign=key, worker="process", compression="zstd")
    ).wait(),
    "later": lambda path, app, key: Snapshot.take(path, app).sign(key),
    "later compressed": lambda path, app, key: Snapshot.take(path, app, options=TakeOptions(compression="zstd")).sign(
        key
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_key_reads_a_signed_snapshot(tmp_path, secret, public, way):
    path = tmp_path / "s"
    WAYS[way](path, state(), secret)
    report = Snapshot(path, key=public).verify()
    assert report.ok
    assert re.fullmatch("ed25519:[0-9a-f]{64}", report.signer)
    assert str(report).endswith(f"every byte matches its digest, and is signed by {report.signer}")
    assert Snapshot(path).verify().signer == ""
    assert torch.equal(loaded(path, public)["big"], state()["s"]["big"])
    assert Snapshot(path, key=public).read_object("s/big", box=[slice(500_000, 500_002)]).tolist() == [500_000, 500_001]
    assert Snapshot(path, key=public).get_state_dict_for_key("s")["text"] == "abc"
    assert Snapshot(path, key=public).metadata.world_size == 1


def test_sign_during_the_take_and_later_make_the_same_files(tmp_path, secret):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    before = {each.name: each.read_bytes() for each in files_of(path)}
    assert Snapshot(path).sign(secret).ok
    assert {each.name: each.read_bytes() for each in files_of(path)} == before


def test_sign_replaces_the_signature_of_another_key(tmp_path, secret, public, stranger):
    path = tmp_path / "s"
    Snapshot.take(path, small(), options=TakeOptions(sign=stranger))
    Snapshot(path).sign(secret)
    assert not faults(path, public)
    assert "another key" in faults(path, stranger.public_key())[0]


def test_sign_and_key_accept_pem_files(tmp_path, capsys):
    from snapshot.cli import main

    assert main(["sign", "--new-key", str(tmp_path / "k")]) == 0
    assert os.stat(tmp_path / "k").st_mode & 0o777 == 0o600
    Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=tmp_path / "k"))
    assert Snapshot(tmp_path / "s", key=str(tmp_path / "k.pub")).verify()
    assert Snapshot(tmp_path / "s", key=tmp_path / "k").verify()  # its public half


def test_sign_refuses_wrong_keys_before_writing(tmp_path, secret, public, caplog):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    def pem(key, way=None):
        return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, way or s.NoEncryption())

    (tmp_path / "other").write_bytes(pem(X25519PrivateKey.generate()))
    (tmp_path / "encrypted").write_bytes(pem(secret, s.BestAvailableEncryption(b"secret")))
    (tmp_path / "text").write_text("not a key")
    (tmp_path / "open").write_bytes(pem(secret))
    (tmp_path / "open").chmod(0o644)
    for name, text in [("other", "must be an Ed25519"), ("encrypted", "is encrypted"), ("text", "must be an Ed")]:
        with pytest.raises(ValueError, match=text):
            Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=tmp_path / name))
    with pytest.raises(FileNotFoundError):
        Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=tmp_path / "missing"))
    with pytest.raises(TypeError, match="must be an Ed25519"):
        Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=b"key"))
    with pytest.raises(ValueError, match="must be a private key"):
        Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=public))
    assert not (tmp_path / "s").exists()
    Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=tmp_path / "open"))
    assert "other users may read this private key" in caplog.text
    with pytest.raises(ValueError, match="must be a private key"):
        Snapshot(tmp_path / "s").sign(public)


def test_sign_without_cryptography_raises_missing_extra_error(tmp_path, monkeypatch, secret):
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    from snapshot.errors import MissingExtraError

    with pytest.raises(MissingExtraError, match="install the extra 'sign'"):
        Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=secret))
    assert not (tmp_path / "s").exists()


# Found


@pytest.mark.parametrize("way", ["take", pytest.param("compressed", marks=pytest.mark.slow)])
def test_key_finds_every_changed_byte(tmp_path, secret, public, way):
    path = tmp_path / "s"
    WAYS[way](path, small(), secret)
    assert not faults(path, public)
    every = [path / ".snapshot_metadata", *files_of(path)]
    assert len(every) >= 3
    for file in every:
        held = file.read_bytes()
        padding = len(held) > 4096  # of headers: each byte of the rest, and some of these
        for at in range(len(held)):
            if padding and 600 < at < 4000 and at % 97:
                continue
            flip(file, at)
            assert faults(path, public), (file.name, at)
            file.write_bytes(held)
        for changed in (held[:-1], held + b"\0", b""):
            file.write_bytes(changed)
            assert faults(path, public), (file.name, len(changed))
        file.unlink()
        if file.suffix or "signature" in file.name:
            assert faults(path, public), file.name
        file.write_bytes(held)
    assert not faults(path, public)


def test_key_finds_and_names_changed_blocks_and_hashes_of_long_files(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    (data,) = files_of(path, ".safetensors")
    (leaves,) = files_of(path, ".sha256")
    for at in (0, 262_143, 262_144, 1_000_000, data.stat().st_size - 1):
        flip(data, at)
        begin = at // 262_144 * 262_144
        assert any(f"bytes {begin:,} to" in each and "not the signed ones" in each for each in faults(path, public))
        flip(data, at)
    for at in (0, 32, leaves.stat().st_size - 1):
        flip(leaves, at)
        assert "are not the signed ones" in faults(path, public)[0]
        flip(leaves, at)
    leaves.unlink()
    assert faults(path, public)
    with pytest.raises(CorruptSnapshotError):
        loaded(path, public)
    assert Snapshot(path).verify()  # without the key, its files are not needed


def forge(path, value):
    """Give a snapshot other values, with digests that match them, as who can write its files may do."""
    other = path.parent / "other"
    Snapshot.take(other, state(value))
    held = decode_document((path / ".snapshot_metadata").read_bytes(), path)
    made = decode_document((other / ".snapshot_metadata").read_bytes(), other)
    for name in made.files:
        shutil.copy(other / name, path / name.replace(made.save_id, held.save_id))
    text = (other / ".snapshot_metadata").read_bytes().replace(made.save_id.encode(), held.save_id.encode())
    document = msgspec.json.decode(text)
    document.pop("digest")
    body = msgspec.json.encode(document)[:-1]
    from snapshot.tensors.digest import digest_range

    (path / ".snapshot_metadata").write_bytes(body + f',"digest":"{digest_range(body)}"}}'.encode())
    return held.save_id


def test_key_refuses_forged_values_before_tensors_are_changed(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    honest = (path / ".snapshot_metadata").read_bytes()
    forge(path, 9.0)
    assert Snapshot(path).verify()  # its digests are right
    live = fresh()
    with pytest.raises(SignatureError, match="the manifest is not the signed one"):
        Snapshot(path, key=public).restore(live)
    assert not live["s"]["big"].any()
    (path / ".snapshot_metadata").write_bytes(honest)  # forged data under the honest manifest
    live = fresh()
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        Snapshot(path, key=public).restore(live, options=RestoreOptions(atomic=True, verify=False))
    assert not live["s"]["big"].any()


def test_key_verifies_the_signature_with_verify_false(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    (data,) = files_of(path, ".safetensors")
    flip(data, data.stat().st_size - 5_000)
    Snapshot(path).read_object("s/big", verify=False)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        Snapshot(path, key=public).read_object("s/big", verify=False)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        loaded(path, public, verify=False)


def test_key_reports_a_missing_signature(tmp_path, public, secret):
    Snapshot.take(tmp_path / "s", small())
    snapshot = Snapshot(tmp_path / "s", key=public)
    for call in (
        lambda: snapshot.restore(fresh(20)),
        lambda: snapshot.read_object("s/big"),
        lambda: snapshot.get_state_dict_for_key("s"),
        snapshot.get_manifest,
        lambda: snapshot.metadata,
        lambda: snapshot.verify(quick=True),
        lambda: snapshot.copy(tmp_path / "c"),
        lambda: snapshot.convert(Target(tmp_path / "c.safetensors", "safetensors")),
        lambda: Snapshot.diff(snapshot, tmp_path / "s"),
    ):
        with pytest.raises(SignatureError, match="is not signed"):
            call()
    assert not (tmp_path / "c").exists()
    torch.save({"a": torch.zeros(3)}, tmp_path / "foreign.pt")
    with pytest.raises(SnapshotNotFoundError, match="no snapshot of this library found"):
        Snapshot(tmp_path / "foreign.pt", key=public).read_object("a")
    with pytest.raises(SnapshotNotFoundError, match="no snapshot of this library found"):
        Snapshot(tmp_path / "foreign.pt").sign(secret)


def test_key_reports_a_signature_of_another_key_before_tensors_are_changed(tmp_path, public, stranger):
    Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=stranger))
    live = fresh(20)
    with pytest.raises(SignatureError, match="is by another key"):
        Snapshot(tmp_path / "s", key=public).restore(live)
    assert not live["s"]["big"].any()
    (signature,) = files_of(tmp_path / "s", ".signature")
    kind, _, rest = signature.read_bytes().split(b" ", 2)
    mine = Signer(public, None).raw.hex().encode()
    signature.write_bytes(b" ".join([kind, mine, rest]))  # it says that it is by this key
    assert "does not match" in faults(tmp_path / "s", public)[0]


def test_key_finds_swapped_files(tmp_path, secret, public):
    path = tmp_path / "s"
    noise = torch.randint(256, (2, 4 << 20), dtype=torch.uint8)  # stored as it is, in files as short as the budget's
    app = {"s": StateDict(a=noise[0], b=noise[1])}
    Snapshot.take(path, app, options=TakeOptions(sign=secret, compression="zstd", memory_budget_bytes=8 << 20))
    by_size = {}
    for each in files_of(path, ".safetensors"):
        by_size.setdefault(each.stat().st_size, []).append(each)
    one, two = max(by_size.values(), key=len)[:2]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    assert len(faults(path, public)) >= 2
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        Snapshot(path, key=public).restore(app, options=RestoreOptions(verify=False))


def test_key_finds_mixed_parts_of_two_signed_snapshots_but_not_an_old_one(tmp_path, secret, public):
    old, new = tmp_path / "step-1", tmp_path / "step-2"
    Snapshot.take(old, small(1.0), metadata={"step": 1}, options=TakeOptions(sign=secret))
    Snapshot.take(new, small(2.0), metadata={"step": 2}, options=TakeOptions(sign=secret))
    held = (new / ".snapshot_metadata").read_bytes()
    (theirs,), (mine,) = files_of(old, ".signature"), files_of(new, ".signature")
    kept = mine.read_bytes()
    mine.write_bytes(theirs.read_bytes())
    assert "the manifest is not the signed one" in faults(new, public)[0]
    mine.write_bytes(kept)
    for a, b in zip(files_of(old), files_of(new), strict=True):
        if a.suffix == ".safetensors":
            b.write_bytes(a.read_bytes())
    assert faults(new, public)
    shutil.rmtree(new)
    shutil.copytree(old, new)  # rollback: not found by the signature, but its metadata is signed
    assert not faults(new, public)
    assert Snapshot(new, key=public).metadata.metadata["step"] == 1
    (new / ".snapshot_metadata").write_bytes(held)
    assert faults(new, public)


# Reads


def test_key_small_read_hashes_only_its_blocks(tmp_path, secret, public):
    app = {"s": StateDict(w=torch.arange(4_000_000, dtype=torch.float32).view(4000, 1000))}
    Snapshot.take(tmp_path / "s", app, options=TakeOptions(sign=secret))
    log = Log()
    with tapped("watched", log):
        row = Snapshot(f"watched+file://{tmp_path}/s", key=public).read_object("s/w", box=[slice(2000, 2001)])
    assert torch.equal(row, app["s"]["w"][2000:2001])
    read = sum(each.nbytes for each in log.of("read_into"))
    assert read
    assert read < 1_200_000


def test_copy_of_a_signed_snapshot_is_not_signed(tmp_path, secret, public):
    signed = Snapshot.take(tmp_path / "s", small(), options=TakeOptions(sign=secret))
    report = Snapshot(tmp_path / "s", key=public).copy(tmp_path / "c")
    assert report.was_signed
    assert "the source is signed, the copy is not" in str(report)
    assert "is not signed" in faults(tmp_path / "c", public)[0]
    Snapshot(tmp_path / "c").sign(secret)
    assert not faults(tmp_path / "c", public)
    shutil.copytree(signed.path, tmp_path / "folder")  # the same files under the same names
    assert not faults(tmp_path / "folder", public)
    assert not Snapshot.take(tmp_path / "p", small()).copy(tmp_path / "q").was_signed


def test_copy_select_and_convert_with_a_key_read_only_signed_bytes(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    snapshot = Snapshot(path, key=public)
    assert snapshot.copy(tmp_path / "c", select=["s/big"]).was_signed
    assert snapshot.convert(Target(tmp_path / "c.safetensors", "safetensors")).tensors == 2
    (data,) = files_of(path, ".safetensors")
    flip(data, 500_000)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        snapshot.copy(tmp_path / "d", verify=False)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        snapshot.convert(Target(tmp_path / "d.safetensors", "safetensors"), verify=False)
    assert not (tmp_path / "d").exists() or not Snapshot(tmp_path / "d").exists()


def test_restore_options_key_file_is_read_once(tmp_path):
    """The file may be gone later in the run: an error in the middle of a take would be one of this rank alone."""
    from snapshot.cli import main

    path = tmp_path / "key.pem"
    assert main(["sign", "--new-key", str(path)]) == 0
    options = TakeOptions(sign=path)
    with SnapshotManager(tmp_path / "run", signals=(), timeout=30, take_options=TakeOptions(sign=path)) as manager:
        Snapshot.take(tmp_path / "alone", state(1.0), options=options)
        manager.take(1, state(1.0))
        path.unlink()
        manager.take(3, state(3.0))
        manager.async_take(4, state(2.0), options=options).wait()
        assert manager.restore_latest(state(0.0), key=f"{path}.pub") == 4


def test_manager_whose_key_is_missing_restores_and_fails_when_it_takes(tmp_path):
    given = TakeOptions(sign=tmp_path / "none.pem")
    with SnapshotManager(tmp_path / "run", signals=(), take_options=given) as manager:
        assert manager.restore_latest(state(0.0)) is None
        with pytest.raises(FileNotFoundError, match="the key file cannot be read"):
            manager.take(1, state(0.0))
        plain = replace(manager.take_options, sign=None)
        assert manager.take(1, state(0.0), options=plain).exists()


def test_load_and_merge_with_a_key_require_signatures(tmp_path, secret, public):
    one, two = tmp_path / "one", tmp_path / "two"
    Snapshot.take(one, state(1.0), options=TakeOptions(sign=secret))
    Snapshot.take(two, state(3.0))
    assert load(Snapshot(one, key=public))["other"].tolist() == [1.0] * 7
    with pytest.raises(SignatureError, match="is not signed"):
        load(Snapshot(two, key=public))
    with pytest.raises(SignatureError, match="is not signed"):
        merge([Snapshot(each, key=public) for each in (one, two)], tmp_path / "soup", others="first")
    assert not (tmp_path / "soup").exists()
    Snapshot(two).sign(secret)
    merge([Snapshot(each, key=public) for each in (one, two)], tmp_path / "soup", others="first")
    assert load(tmp_path / "soup")["other"].tolist() == [2.0] * 7
    (data,) = files_of(two, ".safetensors")
    flip(data, 500_000)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        load(Snapshot(two, key=public), verify=False)
    with pytest.raises(CorruptSnapshotError, match="not the signed ones"):
        merge(
            [Snapshot(each, key=public) for each in (one, two)], tmp_path / "more", options=MergeOptions(verify=False)
        )


def test_sign_refuses_a_damaged_snapshot(tmp_path, secret):
    path = tmp_path / "s"
    Snapshot.take(path, state())
    (data,) = files_of(path, ".safetensors")
    flip(data, 500_000)
    with pytest.raises(CorruptSnapshotError, match="is damaged, so it was not signed"):
        Snapshot(path).sign(secret)
    assert len(files_of(path)) == 2


def test_verify_resume_with_a_key_does_not_continue_one_without(tmp_path, secret, public):
    path, journal = tmp_path / "s", tmp_path / "journal"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    (data,) = files_of(path, ".safetensors")
    flip(data, 500_000)
    assert not Snapshot(path).verify(resume=journal)  # it stays, with its fault
    flip(data, 500_000)
    report = Snapshot(path, key=public).verify(resume=journal)
    assert report.ok
    assert report.bytes_before == 0


# Kept and removed


def test_sign_of_a_snapshot_replaced_meanwhile_signs_the_new_one(tmp_path, secret, public, monkeypatch):
    path = tmp_path / "s"
    Snapshot.take(path, state(1.0))
    run = Verification.run

    async def replaced(self, quick, resume):
        monkeypatch.undo()
        await in_thread(lambda: Snapshot.take(path, state(2.0), overwrite=True))
        return await run(self, quick, resume)

    monkeypatch.setattr(Verification, "run", replaced)
    assert Snapshot(path).sign(secret).ok
    assert Snapshot(path, key=public).verify().ok


def test_signature_is_removed_when_a_snapshot_is_overwritten_or_deleted(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    Snapshot.take(path, state(2.0), overwrite=True, options=TakeOptions(sign=secret))
    assert len(files_of(path)) == 4
    assert not faults(path, public)
    Snapshot.take(path, state(3.0), overwrite=True)
    assert len(files_of(path)) == 2
    Snapshot(path).sign(secret)
    Snapshot(path).delete()
    assert not path.exists() or not any(path.rglob("*"))


class Unsignable(Ed25519PrivateKey):
    """A key whose device does not answer."""

    def __init__(self, real):
        self.real = real

    def public_key(self):
        return self.real.public_key()

    def sign(self, data):
        raise RuntimeError("the device does not answer")

    def private_bytes_raw(self):
        raise NotImplementedError

    def private_bytes(self, *_):
        raise NotImplementedError

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self


def test_take_that_cannot_be_signed_is_not_committed(tmp_path, secret):
    with pytest.raises(RuntimeError, match="does not answer"):
        Snapshot.take(tmp_path / "s", state(), options=TakeOptions(sign=Unsignable(secret)))
    assert not any(path for path in (tmp_path / "s").rglob("*") if path.is_file())


def test_take_stores_the_signature_before_the_manifest(tmp_path, secret):
    """The signature is stored before the manifest; if it cannot be stored, nothing remains."""
    log = Log()
    with tapped("watched", log):
        Snapshot.take(f"watched+file://{tmp_path}/s", state(), options=TakeOptions(sign=secret))
    order = [each.path for each in log.operations if each.name in ("put", "commit")]
    where = [number for number, path in enumerate(order) if path.endswith(".signature")]
    assert where == [len(order) - 2]
    with faulty("failing", on="put", path="*.signature", error=StorageError("full")), pytest.raises(StorageError):
        Snapshot.take(f"failing+file://{tmp_path}/t", state(), options=TakeOptions(sign=secret))
    assert not any(path for path in (tmp_path / "t").rglob("*") if path.is_file())


# Hostile


def signed_by(secret, statement):
    """A signature file with a statement that the key signed."""
    key = Signer(secret.public_key(), secret)
    mark = secret.sign(b"snapshot-signature/1\n" + statement).hex()
    return b"snapshot-signature/1 %s %s\n%s" % (key.raw.hex().encode(), mark.encode(), statement)


@pytest.mark.parametrize(
    "statement",
    [
        b"",
        b"[" * 100_000,
        b'{"save_id":' + b'{"a":' * 50_000,
        b"{}",
        b'{"save_id":3,"manifest":[1,"a"],"files":{}}',
        b'{"save_id":"0123456789ab","manifest":[1,"a"],"files":{"x":[1]}}',
        b'{"save_id":"0123456789ab","manifest":[1,"a"],"files":[],"more":1}',
        b'{"save_id":"0123456789ab","manifest":[1,"a"],"files":{"../x":[1000000,"a"]}}',
        b'{"save_id":"0123456789ab","manifest":[1,"a"],"files":{"data/0123456789ab-0-0.bin":[-1,"a"]}}',
        b"\xff\xfe",
    ],
)
def test_signature_with_hostile_statements_raises(tmp_path, secret, public, statement):
    path = tmp_path / "s"
    Snapshot.take(path, small(), options=TakeOptions(sign=secret))
    (signature,) = files_of(path, ".signature")
    line = signature.read_bytes().partition(b"\n")[0]
    for data in (line + b"\n" + statement, statement, signed_by(secret, statement)):
        signature.write_bytes(data)
        with pytest.raises(SignatureError):
            Snapshot(path, key=public).get_manifest()
    assert Snapshot(path).metadata


def test_signature_of_another_snapshot_or_without_its_files_is_refused(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, state(), options=TakeOptions(sign=secret))
    (signature,) = files_of(path, ".signature")
    held = msgspec.json.decode(signature.read_bytes().partition(b"\n")[2], type=Statement)
    name, (size, root) = next(iter(held.files.items()))
    for changed in (
        msgspec.structs.replace(held, save_id="0123456789ab"),
        msgspec.structs.replace(held, manifest=(held.manifest[0] + 1, held.manifest[1])),
        msgspec.structs.replace(held, files={}),
        msgspec.structs.replace(held, files={**held.files, name: (size + 1, root)}),
        msgspec.structs.replace(held, files={**held.files, name: (1 << 60, root)}),
    ):
        signature.write_bytes(signed_by(secret, msgspec.json.encode(changed)))
        with pytest.raises(SignatureError, match=r"not the signed one|not those of the manifest"):
            Snapshot(path, key=public).get_manifest()
    signature.write_bytes(
        signed_by(secret, msgspec.json.encode(msgspec.structs.replace(held, files={**held.files, name: (size, "zz")})))
    )
    assert faults(path, public)


def test_signature_that_is_huge_is_not_read(tmp_path, secret, public, monkeypatch):
    path = tmp_path / "s"
    Snapshot.take(path, small(), options=TakeOptions(sign=secret))
    (signature,) = files_of(path, ".signature")
    os.truncate(signature, 1 << 40)
    monkeypatch.setenv("SNAPSHOT_MANIFEST_BYTES", "1000000")
    with pytest.raises(StorageError, match="larger than the limit"):
        Snapshot(path, key=public).get_manifest()


def test_signature_of_a_newer_format_says_what_to_do(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, small(), options=TakeOptions(sign=secret))
    (signature,) = files_of(path, ".signature")
    signature.write_bytes(signature.read_bytes().replace(b"signature/1", b"signature/2", 1))
    with pytest.raises(SignatureError, match="install a newer version"):
        Snapshot(path, key=public).get_manifest()


def test_manifest_is_not_decoded_before_its_signature_is_verified(tmp_path, secret, public):
    path = tmp_path / "s"
    Snapshot.take(path, small(), options=TakeOptions(sign=secret))
    manifest = path / ".snapshot_metadata"
    document = decode_document(manifest.read_bytes(), path)
    document.manifest.clear()
    manifest.write_bytes(encode(document)[:-60])  # also damaged, which decoding would find
    with pytest.raises(SignatureError, match="the manifest is not the signed one"):
        Snapshot(path, key=public).get_manifest()
