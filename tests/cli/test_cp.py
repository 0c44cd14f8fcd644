"""`snapshot cp`: from one place to another, or not at all."""

import json

import pytest
import torch

from snapshot import Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.cli import main
from snapshot.io.url import select_server
from snapshot.testing import faulty
from tests.helpers.warm_interpreter import Failed


@pytest.fixture
def taken(tmp_path):
    """A snapshot."""
    return Snapshot.take(tmp_path / "run" / "step-1", {"m": StateDict(w=torch.ones(3000), b=torch.zeros(2), step=1)})


def test_cli_cp_copies_and_refuses_to_overwrite_without_the_option(taken, tmp_path, capsys):
    target = str(tmp_path / "copy")
    assert main(["cp", taken.path, target, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["entries"], made["files"], made["checked"]) == (3, 1, "digests")
    assert Snapshot.diff(taken, target).same
    assert main(["cp", taken.path, target]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert main(["cp", taken.path, target, "--overwrite", "--memory", "1MiB", "--no-verify", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["url"], made["checked"], made["files"]) == (target, "sizes", 1)


def test_cli_cp_select_and_exclude_copy_a_part(taken, tmp_path, capsys):
    assert main(["cp", taken.path, str(tmp_path / "part"), "--select", "m/*", "--exclude", "m/w"]) == 0
    assert set(Snapshot(tmp_path / "part").get_manifest()) == {"0/m", "0/m/b", "0/m/step"}


def test_cli_cp_src_o_and_dst_o_go_to_their_storages(taken, capsys):
    url = "memory://cp/there"
    assert main(["cp", taken.path, url, "--dst-o", "nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert main(["cp", taken.path, url, "--src-o", "nonsense=1"]) == 2
    assert main(["cp", taken.path, url]) == 0
    assert main(["verify", url]) == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("{run}/step-1", "the destination is the source"),
        ("{run}/step-1/x", "is inside the source"),
        ("http://127.0.0.1:9/x", ""),
    ],
)
def test_cli_cp_exits_2_if_the_destination_is_refused(taken, tmp_path, capsys, target, said):
    assert main(["cp", taken.path, target.format(run=tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("snapshot: error: ")
    assert len(err.splitlines()) == 1
    assert said in err


def test_cli_cp_of_a_folder_of_snapshots_asks_to_name_one(taken, tmp_path, capsys):
    taken.copy(tmp_path / "run" / "step-2")
    assert main(["cp", str(tmp_path / "run"), str(tmp_path / "all")]) == 2
    assert "a folder of 2 snapshots: step-1, step-2; name one of them" in capsys.readouterr().err


def test_cli_cp_names_damage_and_leaves_no_files(capsys, tmp_path):
    Snapshot.take("memory://cp/damaged", {"m": StateDict(w=torch.ones(3000))}, overwrite=True)
    with faulty(on="read_into", path="data/*", flip=50_000, times=None):
        assert main(["cp", "faulty+memory://cp/damaged", str(tmp_path / "t")]) == 2
    assert "0/m/w: data/" in capsys.readouterr().err
    assert not list((tmp_path / "t").rglob("*.*"))


def test_cli_cp_and_convert_to_an_existing_path_name_the_overwrite_option(taken, tmp_path, capsys):
    for verb, name in (("cp", "copy"), ("convert", "made"), ("convert", "made.safetensors")):
        arguments = [verb, taken.path, str(tmp_path / name), "--select", "m/[wb]"]
        assert main(arguments) == 0
        capsys.readouterr()
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert "--overwrite" in err
        assert "overwrite=True" not in err
        assert "take to" not in err
    with pytest.raises(SnapshotExistsError, match="pass overwrite=True"):
        taken.copy(tmp_path / "copy")


KEYS = {"part_bytes": "8MiB", "timeout": 3, "concurrency": 2, "account_key": "x", "client_kwargs": {"retries": 1}}


def test_select_server_ignores_options_that_do_not_choose_a_server(taken, tmp_path):
    assert select_server(KEYS) == select_server(None) == {}
    for other in ({"endpoint_url": "http://a"}, {"client_kwargs": {"endpoint_url": "http://a"}}, {"profile": "x"}):
        assert select_server({**KEYS, **other}) not in ({}, select_server({"account_name": "x"}))
    taken.copy(Target("memory://cp/apart", overwrite=True))
    for target, said in (
        ("memory://cp/apart", "destination is the source"),
        ("memory://cp/apart/x", "is inside the source"),
    ):
        with pytest.raises(ValueError, match=said):
            Snapshot("memory://cp/apart").copy(Target(target, storage_options=KEYS, overwrite=True))


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_cli_cp_interrupted_by_a_signal_leaves_no_files_and_can_be_repeated(taken, tmp_path, warm, number, status):
    script = f"""
import asyncio, os, signal, sys
from snapshot.cli import main
from snapshot.testing.storages import tapped
from snapshot.testing.storages import Tap

class Strike(Tap):
    async def before(self, operation):
        if operation.name == "read_into" and operation.path.startswith("data/"):
            os.kill(os.getpid(), signal.{number})
            await asyncio.sleep(60)  # until it is cancelled: a busy machine may be late with the signal

with tapped("recording", Strike()):
    status = main(["cp", "recording+file://{taken.path}", "{tmp_path}/copy"])
sys.exit(status)
"""
    with pytest.raises(Failed) as failed:
        warm.run(script)
    assert str(failed.value) == f"exit status {status}:\n"
    assert not [path for path in (tmp_path / "copy").rglob("*") if path.is_file()]
    assert main(["cp", taken.path, str(tmp_path / "copy")]) == 0
    assert Snapshot.diff(taken, tmp_path / "copy").same
