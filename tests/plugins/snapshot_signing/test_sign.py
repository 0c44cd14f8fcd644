"""`snapshot sign`, and `snapshot verify --key`."""

import json
import shutil

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Snapshot.take(f"run/{name}", {"s": StateDict(w=torch.arange(300_000.0))})
    assert main(["sign", "--new-key", "key"]) == 0
    return tmp_path


def test_cli_verify_key_verifies_signed_snapshots(folder, capsys):
    assert main(["sign", "run/a", "run/b", "--key", "key"]) == 0
    assert main(["verify", "run", "--key", "key.pub"]) == 0
    capsys.readouterr()
    assert main(["sign", "run/a", "--key", "key", "--json"]) == 0
    signer = json.loads(capsys.readouterr().out)["signer"]
    assert main(["verify", "run/a", "--quick", "--key", "key.pub", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signer"] == signer
    assert main(["verify", "run/a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["signer"] == ""


def test_cli_verify_key_reports_an_unsigned_snapshot_and_verifies_the_others(folder, capsys):
    assert main(["sign", "run/b", "--key", "key"]) == 0
    capsys.readouterr()
    assert main(["verify", "run", "--key", "key.pub"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("1 fault") == text.count("is not signed: data/") == text.count("and is signed by ed25519:") == 1


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--key", "key"], "--key must have a URL"),
        (["run/a", "--new-key", "more"], "--new-key must not have a URL"),
        (["run/a", "--key", "key.pub"], "must be a private key, got a public one"),
        (["run/a", "--key", "nowhere"], "No such file"),
        (["run/a", "--key", "run"], "Is a directory"),
        (["run/a", "--key", "run/a/.snapshot_metadata"], "must be an Ed25519 key in PEM"),
        (["--new-key", "key"], "exists already, and keys are not overwritten"),
        (["nowhere", "--key", "key"], "nowhere"),
        (["run/a"], "--key"),
        (["run/a", "--key", "key", "--new-key", "more"], "not allowed with"),
    ],
)
def test_cli_sign_refuses_invalid_arguments(folder, capsys, given, text):
    held = (folder / "key").read_bytes()
    capsys.readouterr()
    assert main(["sign", *given]) == 2
    assert text in capsys.readouterr().err
    assert (folder / "key").read_bytes() == held
    assert not list(folder.rglob("*.signature"))
    assert not (folder / "more").exists()


def test_cli_sign_new_key_does_not_replace_a_public_key(folder, capsys):
    (folder / "key").unlink()
    assert main(["sign", "--new-key", "key"]) == 2
    assert "key.pub" in capsys.readouterr().err
    assert not (folder / "key").exists()


def test_cli_cp_of_a_signed_snapshot_says_that_the_copy_is_not_signed(folder, capsys):
    assert main(["sign", "run/a", "--key", "key"]) == 0
    assert main(["cp", "run/a", "copy"]) == 0
    assert "the source is signed, the copy is not" in " ".join(capsys.readouterr().out.split())
    shutil.copytree("run/a", "moved")
    assert main(["verify", "moved", "--key", "key.pub"]) == 0
    assert main(["verify", "copy", "--key", "key.pub"]) == 1
