"""Signatures that `snapshot` and the package model-signing write for each other."""

import os
import shutil

import pytest
import torch
from cryptography.hazmat.primitives import serialization as s
from cryptography.hazmat.primitives.asymmetric import ec
from safetensors.torch import save_file

from snapshot import Snapshot, StateDict
from snapshot.cli import main
from snapshot.errors import SignatureError

pytestmark = pytest.mark.libraries
pytest.importorskip("model_signing")
pytest.importorskip("OpenSSL")  # which model-signing imports, and doesn't require
from model_signing import hashing, signing, verifying  # noqa: E402 - after the check that it is there
from model_signing._cli import main as model_signing  # noqa: E402


@pytest.fixture(params=[ec.SECP256R1, ec.SECP384R1])
def keys(tmp_path, request):
    """The files of a private and a public key."""
    key = ec.derive_private_key(11, request.param())
    private, public = tmp_path / "key", tmp_path / "key.pub"
    private.touch(mode=0o600)
    private.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture(params=["snapshot", "weights"])
def folder(tmp_path, request):
    path = tmp_path / "model"
    if request.param == "snapshot":
        Snapshot.take(path, {"s": StateDict(w=torch.arange(5000.0), names=["ä", "b"])})
    else:
        (path / "data é").mkdir(parents=True)
        save_file({"w": torch.arange(5000.0)}, path / "model.safetensors")
        (path / "data é" / "notes of.txt").write_text("x")
        (path / "data.txt").touch()  # before `data é/` as a path, and behind it as a text
        (path / ".gitattributes").write_text("x")
    return path


def sign_with_the_package(folder, private, **options):
    config = hashing.Config().use_file_serialization(**options).set_ignored_paths(paths=["model.sig"])
    config.set_allow_symlinks(options.get("allow_symlinks", False))
    signer = signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(config)
    signer.sign(folder, folder / "model.sig")


def verify_with_the_package(folder, public):
    verifying.Config().use_elliptic_key_verifier(public_key=public).verify(folder, folder / "model.sig")


def verify(folder, public):
    return Snapshot(folder, key=public).verify()


SIDES = [
    pytest.param(lambda folder, private: Snapshot(folder).sign(private), verify_with_the_package, id="signed here"),
    pytest.param(sign_with_the_package, verify, id="verified here"),
]


def change(folder):
    path = next(path for path in folder.rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    "changed": change,
    "added": lambda folder: (folder / "more").touch(),
    "removed": lambda folder: next(folder.rglob("*.safetensors")).unlink(),
    "renamed": lambda folder: (path := next(folder.rglob("*.safetensors"))).rename(path.with_name("other")),
}


@pytest.mark.parametrize(("sign", "check"), SIDES)
def test_signature_is_valid_in_both_programs_until_a_file_changes(folder, keys, sign, check, tmp_path):
    sign(folder, keys[0])
    for each in (check, verify, verify_with_the_package):
        each(folder, keys[1])
    for number, made in enumerate(CHANGES.values()):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        check(copy, keys[1])
        made(copy)
        for each in (verify, verify_with_the_package):
            with pytest.raises((SignatureError, ValueError)):
                each(copy, keys[1])


@pytest.mark.parametrize("sign", [side.values[0] for side in SIDES])
def test_signature_of_another_key_is_valid_in_no_program(folder, keys, sign, tmp_path):
    sign(folder, keys[0])
    stranger = ec.derive_private_key(12, ec.SECP256R1()).public_key()
    (tmp_path / "other").write_bytes(stranger.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo))
    for each in (verify, verify_with_the_package):
        with pytest.raises((SignatureError, ValueError)):
            each(folder, tmp_path / "other")


@pytest.mark.parametrize("folder", ["weights"], indirect=True)
@pytest.mark.parametrize("keys", [ec.SECP256R1], indirect=True)
def test_signature_with_links_or_other_hashes_of_the_package(folder, keys):
    (folder / "alias").symlink_to("model.safetensors")
    sign_with_the_package(folder, keys[0], allow_symlinks=True)
    with pytest.raises(SignatureError, match="alias: is a link"):
        verify(folder, keys[1])
    (folder / "alias").unlink()
    os.link(folder / "data.txt", folder / "linked")
    sign_with_the_package(folder, keys[0], allow_symlinks=True)
    assert verify(folder, keys[1]).ok
    sign_with_the_package(folder, keys[0], hashing_algorithm="blake2")
    with pytest.raises(SignatureError, match="blake2"):
        verify(folder, keys[1])


@pytest.mark.parametrize("keys", [ec.SECP256R1], indirect=True)
def test_commands_of_the_documentation_verify_each_others_signatures(folder, keys, capsys, monkeypatch):
    monkeypatch.chdir(folder.parent)
    signature = "model/model.sig"
    theirs = ["model", "--signature", signature]
    assert main(["sign", "--format", "oms", "--new-key", "ecdsa.pem"]) == 0
    assert main(["sign", "model", "--key", "ecdsa.pem"]) == 0
    model_signing(["verify", "key", *theirs, "--public_key", "ecdsa.pem.pub"], standalone_mode=False)
    os.unlink(signature)
    model_signing(["sign", "key", *theirs, "--private_key", "key"], standalone_mode=False)
    assert main(["verify", "model", "--key", "key.pub"]) == 0
    assert "and is signed by ecdsa-p256:" in " ".join(capsys.readouterr().out.split())
