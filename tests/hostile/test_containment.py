"""Nothing leaves the snapshot's folder, nothing runs, nothing secret is shown."""

import logging
import os
import socket
import stat
import subprocess
import sys
import traceback
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict, StorageError, TakeOptions
from snapshot.events import add_handler, remove_handler
from snapshot.io.storage import check_path
from snapshot.manifest.document import METADATA, decode_document
from snapshot.testing import Tap, tapped
from tests.helpers.trees import PYTHONPATH
from tests.hostile.hostile_snapshots import document_of, sign, store


def state(value=1.0):
    return {"s": StateDict(x=torch.full((1000,), value), text="é" * 9000, step=3)}


# Names


@given(st.text(st.sampled_from("./\\ab\0%~:"), max_size=12))
def test_check_path_stays_below_the_root_or_raises(path):
    try:
        checked = check_path(path)
    except ValueError:
        return
    joined = os.path.normpath(f"/root/{checked}")
    assert joined.startswith("/root/")
    assert joined == f"/root/{checked}"


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd", "../other", "data/../../other", "data/../.snapshot_metadata", "data/a-0-0.bin/../x", ".take-x",
        "file:///etc/passwd", "s3://bucket/x", "memory://other/data", "data//a-0-0.bin", "data/a-0-0.bin\n", "",
        "data/", "data\\a-0-0.bin", "data/a-0-0.safetensors\0", "data/A-0-0.bin", "data/%2e%2e/x", ".snapshot_metadata",
        "~/x",
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["entry", "blocks", "file", "part"])
def test_manifest_cannot_name_files_of_others(where, location):
    Snapshot.take("memory://places/s", {"s": StateDict(x=torch.zeros(100_000))}, overwrite=True)
    Snapshot.take("memory://other", state(), overwrite=True)
    document = document_of("places/s")
    entry = document["manifest"]["0/s/x"]
    if where == "entry":
        entry["location"] = location
    elif where == "blocks":
        entry["blocks"][0] = location
    elif where == "file":
        document["files"][location] = {"size": 1}
    else:
        part = {"location": location, "size": 1, "digest": "xxh3:" + "0" * 32, "ranks": [0], "count": 1}
        document["parts"] = [part]
    store(f"places/s/{METADATA}", sign(msgspec.json.encode(document)))
    live = {"s": StateDict(x=torch.ones(100_000))}
    with pytest.raises(CorruptSnapshotError):
        Snapshot("memory://places/s").restore(live)
    assert live["s"]["x"].all()
    with pytest.raises(SnapshotError):
        Snapshot("memory://places/s").read_object("0/s/x", box=[0])


@settings(max_examples=50)
@given(st.text(max_size=20))
def test_manifest_data_file_names_must_have_the_format_of_the_library(name):
    body = {
        "format": "snapshot/1", "version": "", "save_id": "a", "world_size": 1, "created": "", "structure": "",
        "metadata": {}, "files": {f"data/{name}": {"size": 1}}, "parts": [], "manifest": {},
    }  # fmt: skip
    with pytest.raises(CorruptSnapshotError, match="invalid name of a data file"):
        decode_document(sign(msgspec.json.encode(body)), "here")


# Links


@pytest.fixture
def outside(tmp_path):
    """A folder that is none of the snapshot's, with files whose names are as a take's."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("precious", "0123456789ab-0-0.bin", "0123456789ab-0-0.safetensors", ".take-0123456789ab"):
        (folder / name).write_text("precious")
    yield folder
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        ("precious", "0123456789ab-0-0.bin", "0123456789ab-0-0.safetensors", ".take-0123456789ab"), "precious"
    )


@pytest.mark.parametrize("verb", ["take", "async_take", "delete"])
def test_linked_data_folder_is_not_written_or_deleted_through(tmp_path, outside, verb):
    Snapshot.take(tmp_path / "s", state())
    for file in (tmp_path / "s" / "data").iterdir():
        file.unlink()
    (tmp_path / "s" / "data").rmdir()
    (tmp_path / "s" / "data").symlink_to(outside)
    if verb == "delete":
        Snapshot(tmp_path / "s").delete()
        assert not Snapshot(tmp_path / "s").exists()
    else:
        take = Snapshot.take if verb == "take" else lambda *a, **o: Snapshot.async_take(*a, **o).wait()
        with pytest.raises(StorageError, match="symbolic link"):
            take(tmp_path / "s", state(), overwrite=True)
    assert (tmp_path / "s" / "data").is_symlink()


@pytest.mark.parametrize("verb", ["take", "delete"])
def test_linked_files_are_replaced_or_removed_but_not_their_targets(tmp_path, outside, verb):
    Snapshot.take(tmp_path / "s", state())
    names = [".take-0123456789ab", "data/0123456789ab-0-0.bin", "data/0123456789ab-0-7.safetensors", METADATA]
    for name in names:
        (tmp_path / "s" / name).unlink(missing_ok=True)
        (tmp_path / "s" / name).symlink_to(outside / "precious")
    if verb == "take":
        Snapshot.take(tmp_path / "s", state(2.0), overwrite=True)
        assert Snapshot(tmp_path / "s").verify()
        assert not (tmp_path / "s" / METADATA).is_symlink()
    else:
        Snapshot(tmp_path / "s").delete()
    assert not any((tmp_path / "s" / name).is_symlink() for name in names)


def test_linked_root_folder_is_allowed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    Snapshot.take(tmp_path / "link" / "s", state())
    assert Snapshot(tmp_path / "real" / "s").verify()
    Snapshot(tmp_path / "link" / "s").delete()
    assert list((tmp_path / "real").iterdir()) == []


# Rights


class Rights(Tap):
    """Notes the rights of everything below a folder, at each step."""

    def __init__(self, folder):
        self.folder = folder
        self.files, self.folders = set(), set()

    async def before(self, operation):
        self.look()

    def look(self):
        for folder, _, names in os.walk(self.folder):
            self.folders.add(stat.S_IMODE(os.stat(folder).st_mode))
            self.files |= {stat.S_IMODE(os.lstat(f"{folder}/{name}").st_mode) for name in names}


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027, 0o002])
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_file_and_folder_permissions_follow_the_umask(writer_process, tmp_path, umask, worker):
    before = os.umask(umask)
    rights = Rights(tmp_path / "deep")
    try:
        with tapped("watched", rights):
            for overwrite in (False, True):
                if worker == "thread":
                    Snapshot.take(f"watched+file://{tmp_path}/deep/er/s", state(), overwrite=overwrite)
                else:  # a process of its own opens no storage of this process's making
                    path = tmp_path / "deep" / "er" / "s"
                    Snapshot.async_take(path, state(), overwrite=overwrite, options=TakeOptions(worker=worker)).wait()
        rights.look()
    finally:
        os.umask(before)
    assert rights.files == {0o666 & ~umask}
    assert rights.folders == {0o777 & ~umask}


# What runs, and what is opened


@pytest.mark.slow
def test_take_and_restore_start_no_program_and_write_only_in_the_folder(tmp_path):
    """Python's own audit events tell: a shell is never asked, and one process started if that was wanted."""
    script = Path(__file__).with_name("audited_process.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path], check=False, cwd=script.parents[2], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


# Secrets

SECRET = "pAss-w0rd-of-mine"
PLACES = {
    "s3, options": ("s3://bucket/run", {"key": "user", "secret": SECRET, "endpoint_url": "http://127.0.0.1:1"}),
    "s3, URL": (f"s3://user:{SECRET}@bucket/run", {"endpoint_url": "http://127.0.0.1:1"}),
    "s3, token": (
        "s3://bucket/run", {"key": "u", "secret": SECRET, "token": SECRET, "endpoint_url": "http://127.0.0.1:1"},
    ),
    "gs, endpoint": ("gs://bucket/run", {"token": "anon", "endpoint_url": f"http://user:{SECRET}@127.0.0.1:1"}),
    "az, key": (
        "az://container/run", {"account_name": "a", "account_key": "cEFzcy13MHJk" + SECRET.encode().hex() + "AA==",
                               "endpoint": "http://127.0.0.1:1/a"},
    ),
    "az, sas": (
        "az://container/run", {"account_name": "a", "sas_token": f"sig={SECRET}", "endpoint": "http://127.0.0.1:1/a"},
    ),
    "https": (f"https://user:{SECRET}@127.0.0.1:1/run?token={SECRET}", {}),
    "webdav": ("webdav://run", {"base_url": "http://127.0.0.1:1", "auth": ("user", SECRET)}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_secrets_are_in_no_error_log_event_or_repr(place, caplog):
    if place.startswith("gs"):
        pytest.importorskip("gcsfs")
    url, options = PLACES[place]
    caplog.set_level(logging.DEBUG)
    shown, events = [], []
    add_handler(events.append)
    try:
        options = {**options, "timeout": 0.3, "deadline": 0.3}
        for verb in (
            lambda: Snapshot.take(url, state(), storage_options=options),
            lambda: Snapshot.async_take(url, state(), storage_options=options).wait(),
            lambda: Snapshot(url, storage_options=options).restore(state()),
            lambda: Snapshot(url, storage_options=options).verify(),
            lambda: Snapshot(url, storage_options=options).delete(),
            lambda: Snapshot(url, storage_options={**options, "nonsense": SECRET}).exists(),
        ):
            with pytest.raises((SnapshotError, ValueError)) as caught:
                verb()
            shown += traceback.format_exception(caught.value)
            shown.append(repr(caught.value))
    finally:
        remove_handler(events.append)
    shown += [repr(Snapshot(url, storage_options=options)), *map(repr, events)]
    # what other libraries write to logs of their own is theirs
    shown += [record.getMessage() for record in caplog.records if record.name.startswith("snapshot")]
    secret = options.get("account_key", SECRET)
    lines = [line for line in "\n".join(shown).split("\n") if secret in line]
    assert not lines


def test_manifest_has_no_host_name_path_or_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("HOME", "/home/of-somebody")
    monkeypatch.setattr(socket, "gethostname", lambda: "name-of-a-host")
    Snapshot.take(tmp_path / "s", state())
    written = b"".join(path.read_bytes() for path in (tmp_path / "s").rglob("*") if path.is_file())
    node = os.uname().nodename
    for text in (SECRET, str(tmp_path), "of-somebody", "name-of-a-host", *([node] if len(node) > 8 else [])):
        assert text.encode() not in written


def test_cli_does_not_print_storage_options(tmp_path, capfd, monkeypatch):
    from snapshot.cli import main

    file = tmp_path / "options"
    for text in (f'{{"secret": "{SECRET}"', f'["{SECRET}"]', f'{{"secret": "{SECRET}"}}', f"a: [{SECRET}", SECRET):
        file.write_text(text)
        assert main(["verify", str(tmp_path), "--options", str(file)]) == 2
        assert main(["verify", str(tmp_path), "-o", text]) == 2
    monkeypatch.setenv("SNAPSHOT_STORAGE_OPTIONS", f'{{"secret": "{SECRET}"')
    assert main(["verify", str(tmp_path)]) == 2
    out, err = capfd.readouterr()
    assert SECRET not in out + err
    assert "is not a mapping" in err
    assert "must be JSON or YAML" in err
