"""Attacks on readers and writers with a key, by someone who can write the folder."""

import errno
import os
import shutil
import stat

import pytest
import torch
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import (
    CorruptSnapshotError,
    Snapshot,
    SnapshotManager,
    SnapshotNotFoundError,
    StateDict,
    StorageError,
    TakeOptions,
)
from snapshot.errors import MissingExtraError, SignatureError
from snapshot.formats import torchsnapshot
from snapshot.loading import open as opening
from snapshot.manager import root as manager_root
from snapshot.testing import Log, faulty, tapped
from snapshot_signing.keys import create_keys, load_key


def state(value=1.0, elements=20):
    return {"s": StateDict(big=torch.full((elements,), float(value)), step=int(value))}


def take_steps(root, *steps, sign, **options):
    with SnapshotManager(root, signals=(), **options) as manager:
        for step in steps:
            manager.take(step, state(step), options=TakeOptions(sign=sign))


def latest(root, key):
    """The step that is restored, and its value."""
    live = state(0)
    with SnapshotManager(root, signals=()) as manager:
        step = manager.restore_latest(live, key=key)
    return step, live["s"]["step"]


def signature_of(path):
    (found,) = (path / "data").glob("*.signature")
    return found


# Restore of the newest signed step


def test_key_prevents_decoding_of_unsigned_steps(tmp_path, secret, public, monkeypatch):
    take_steps(tmp_path, 1, 2, 3, 4, sign=secret, incremental=True)
    signature_of(tmp_path / "step-4").unlink()
    (tmp_path / "step-5").mkdir()
    (tmp_path / "step-5" / ".snapshot_metadata").write_bytes(b"version: 0.1.0\nworld_size: 1\nmanifest: {}\n")
    (tmp_path / "step-3" / ".snapshot_metadata").write_bytes((tmp_path / "step-4" / ".snapshot_metadata").read_bytes())
    decoded = []

    def note(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda data, *more: (decoded.append(bytes(data)), real(data, *more))[1])

    note(opening, "decode_document")
    note(manager_root, "decode_head")
    monkeypatch.setattr(torchsnapshot, "describe_snapshot", None)
    monkeypatch.setattr(opening, "find_foreign", None)
    assert latest(tmp_path, public) == (2, 2)
    assert set(decoded) == {(tmp_path / "step-2" / ".snapshot_metadata").read_bytes()}


def test_key_prevents_parsing_of_other_formats(tmp_path, public, monkeypatch):
    torch.save({"a": torch.zeros(3)}, tmp_path / "foreign.pt")
    monkeypatch.setattr(opening, "find_foreign", None)  # a call would be a TypeError
    snapshot = Snapshot(tmp_path / "foreign.pt", key=public)
    with pytest.raises(SnapshotNotFoundError, match="with a key, no other format is read"):
        snapshot.read_object("a")
    assert not snapshot.exists()


def test_signed_snapshot_in_the_folder_of_another_step_is_skipped(tmp_path, secret, public, caplog):
    take_steps(tmp_path, 1, 2, sign=secret)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9")
    Snapshot.take(
        tmp_path / "step-8", state(8), options=TakeOptions(sign=secret)
    )  # by no manager, so its step is not signed
    assert latest(tmp_path, public) == (2, 2)
    assert "its signed step number must be 9, got 1" in caplog.text
    assert "its signed step number must be 8, but no manager took it" in caplog.text
    assert "damaged" not in caplog.text
    assert latest(tmp_path, None) == (9, 1)


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("damage", [a_folder, a_link_to_itself, os.mkfifo])
def test_signature_that_cannot_be_read_is_skipped_by_restore_latest(tmp_path, secret, public, damage):
    take_steps(tmp_path, 1, 2, sign=secret)
    found = signature_of(tmp_path / "step-2")
    if damage is os.mkfifo:
        found.unlink()
    damage(found)
    assert latest(tmp_path, public) == (1, 1)
    with pytest.raises(SignatureError, match="its signature cannot be read"):
        Snapshot(tmp_path / "step-2", key=public).verify()


def test_signature_without_read_permission_is_skipped_by_restore_latest(tmp_path, secret, public):
    take_steps(tmp_path, 1, 2, sign=secret)
    name = signature_of(tmp_path / "step-2").name
    denied = StorageError("Permission denied")
    denied.errno = errno.EACCES
    with faulty("locked", on="get", path=f"*{name}", error=denied, times=None):
        assert latest(f"locked+file://{tmp_path}", public) == (1, 1)


# Hashes


@pytest.mark.parametrize("damage", [a_folder, a_link_to_itself, os.unlink, lambda path: path.write_bytes(b"")])
def test_signed_hashes_that_cannot_be_read_are_faults_before_data_is_read(tmp_path, secret, public, damage):
    root = tmp_path / "root"
    with SnapshotManager(root, signals=()) as manager:
        manager.take(1, state(1, 300_000), options=TakeOptions(sign=secret))
        manager.take(2, state(2, 300_000), options=TakeOptions(sign=secret))
        (leaves,) = (root / "step-2" / "data").glob("*.sha256")
        damage(leaves)
        for quick in (True, False):
            report = Snapshot(root / "step-2", key=public).verify(quick=quick)
            assert any("which has signed hashes" in fault for fault in report.faults)
        log = Log()
        live = state(0, 300_000)
        with tapped("watched", log), pytest.raises(CorruptSnapshotError, match="which has signed hashes"):
            Snapshot(f"watched+file://{root}/step-2", key=public).restore(live)
        assert not live["s"]["big"].any()
        assert not log.of("read_into", "*.safetensors")
        assert manager.restore_latest(live, key=public) == 1
        assert live["s"]["big"].eq(1).all()
    assert Snapshot(root / "step-2").verify()


def test_signed_hashes_that_are_damaged_are_found_before_tensors_are_changed(tmp_path, secret, public):
    Snapshot.take(tmp_path / "s", state(2, 300_000), options=TakeOptions(sign=secret))
    (leaves,) = (tmp_path / "s" / "data").glob("*.sha256")
    leaves.write_bytes(bytes(leaves.stat().st_size))
    live = state(0, 300_000)
    with pytest.raises(CorruptSnapshotError, match="its hashes in"):
        Snapshot(tmp_path / "s", key=public).restore(live)
    assert not live["s"]["big"].any()


# Manifests that change


def test_signed_manifest_that_differs_at_each_read_raises(tmp_path, secret, public, monkeypatch):
    Snapshot.take(tmp_path / "s", state())
    reads = []
    from snapshot.storages.file.file_storage import FileStorage

    real = FileStorage.get

    async def get(self, path, *, limit=None):
        data = await real(self, path, limit=limit)
        if path.endswith("_metadata"):
            reads.append(path)
            assert len(reads) < 50
            data += b" " * len(reads)
        return data

    monkeypatch.setattr(FileStorage, "get", get)
    with pytest.raises(SignatureError, match="is not signed"):
        Snapshot(tmp_path / "s", key=public).read_object("s/step")


# Keys


class Service(Ed25519PrivateKey):
    """A key service, which makes wrong signatures."""

    def __init__(self, key, change):
        self.key, self.change = key, change

    def sign(self, data):
        return self.change(self.key.sign(data))

    def public_key(self):
        return self.key.public_key()

    def _refuse(self, *args):
        raise NotImplementedError

    private_bytes = private_bytes_raw = __copy__ = __deepcopy__ = _refuse


def test_sign_with_a_key_service(tmp_path, secret, public):
    Snapshot.take(tmp_path / "s", state(), options=TakeOptions(sign=Service(secret, bytes)))
    assert Snapshot(tmp_path / "s", key=public).verify()


@pytest.mark.parametrize(
    "change",
    [lambda made: made[:-1] + bytes([made[-1] ^ 1]), lambda made: made[:-1], lambda made: made + b"\0", lambda _: None],
)
def test_sign_with_a_wrong_signature_of_a_key_service_does_not_commit(tmp_path, secret, change):
    with pytest.raises(SignatureError, match="does not match its public key"):
        Snapshot.take(tmp_path / "s", state(), options=TakeOptions(sign=Service(secret, change)))
    assert not any(path for path in tmp_path.rglob("*") if path.is_file())


def test_create_keys_without_cryptography_or_over_existing_files_raises(tmp_path, monkeypatch, capsys):
    from snapshot.cli import main

    (tmp_path / "k.pub").write_text("mine")
    with pytest.raises(FileExistsError, match=r"k\.pub: exists already, and keys are not overwritten"):
        create_keys(tmp_path / "k")
    assert not (tmp_path / "k").exists()
    with monkeypatch.context() as patch:
        for name in ("cryptography", "cryptography.hazmat.primitives", "cryptography.hazmat.primitives.asymmetric"):
            patch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(MissingExtraError, match="install the extra 'sign'"):
            create_keys(tmp_path / "other")
        assert main(["sign", "--new-key", str(tmp_path / "other")]) != 0
    assert "Traceback" not in capsys.readouterr().err
    create_keys(tmp_path / "other")
    assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o600


def test_sign_and_key_errors_name_the_argument_and_a_remedy(tmp_path, secret, public):
    der = secret.private_bytes(s.Encoding.DER, s.PrivateFormat.PKCS8, s.NoEncryption())
    der_public = public.public_bytes(s.Encoding.DER, s.PublicFormat.SubjectPublicKeyInfo)
    ssh = secret.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())
    ssh_public = public.public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)
    for data, text in [
        (der, "got DER; convert it: openssl pkey -inform DER -in"),
        (der_public, "got DER; convert it: openssl pkey -inform DER -pubin -pubout -in"),
        (ssh, "load_ssh_private_key"),
        (ssh_public, "load_ssh_public_key"),
    ]:
        (tmp_path / "k").write_bytes(data)
        (tmp_path / "k").chmod(0o600)
        with pytest.raises(ValueError, match=text):
            load_key(tmp_path / "k")
    with pytest.raises(ValueError, match=r"key must be .* got an empty path"):
        Snapshot(tmp_path, key="")
    with pytest.raises(FileNotFoundError, match=r"key: .*/none: the key file cannot be read"):
        Snapshot(tmp_path, key=tmp_path / "none")
