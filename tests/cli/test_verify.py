"""`snapshot verify`: what a shell, a script and a person learn from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.testing import faulty
from tests.helpers.warm_interpreter import Failed, Warm

ROOT = Path(__file__).parents[2]


def taken(path: Path) -> Path:
    Snapshot.take(path, {"s": StateDict(x=torch.arange(1000), y=torch.ones(3), step=3)})
    return path


def damage(path: Path, name: str = "0/s/x") -> Path:
    entry = Snapshot(path).get_manifest()[name]
    file = path / entry.location
    content = bytearray(file.read_bytes())
    content[entry.byte_range[0]] ^= 1
    file.write_bytes(content)
    return path


def test_cli_verify_of_damaged_data_exits_1_and_names_the_entry(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damage(taken(tmp_path / "s"))
    entry = Snapshot(path).get_manifest()["0/s/x"]
    assert main(["verify", "--json", str(path)]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    place = f"{entry.location}[{entry.byte_range[0]}:{entry.byte_range[1]}]"
    assert fault.startswith(f"0/s/x: {place}: digest must be {entry.digest}, got xxh3:")


def test_cli_verify_of_a_damaged_manifest_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = taken(tmp_path / "s")
    manifest = path / ".snapshot_metadata"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    assert main(["verify", str(path)]) == 1
    assert "1 fault" in capsys.readouterr().out


def test_cli_verify_of_a_missing_snapshot_exits_2_and_verifies_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = taken(tmp_path / "good"), damage(taken(tmp_path / "bad"))
    assert main(["verify", str(tmp_path / "none"), str(bad), str(good)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("snapshot: error: ")
    assert "there is no snapshot here" in err
    assert len(err.splitlines()) == 1
    assert [line.partition(":")[0] for line in out.splitlines() if line[0] != " "] == [str(bad), str(good)]


def test_cli_verify_json_prints_a_line_per_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = taken(tmp_path / "good"), damage(taken(tmp_path / "bad"))
    assert main(["verify", "--json", str(good), str(bad)]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["url"], first["ok"], first["faults"]) == (str(good), True, [])
    assert (first["entries"], first["bytes_read"], first["unverifiable"]) == (3, 4096 + 8012, 0)
    assert (second["url"], second["ok"], len(second["faults"])) == (str(bad), False, 1)


def test_cli_verify_works_on_every_storage(capsys: pytest.CaptureFixture[str]) -> None:
    Snapshot.take("memory://command/s", {"s": StateDict(x=torch.ones(3))}, overwrite=True)
    assert main(["verify", "memory://command/s", "--memory", "16777216"]) == 0
    with faulty(on="read_into", flip=3, times=None):
        assert main(["verify", "faulty+memory://command/s"]) == 1
    assert "fault" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--memory", "much", "x"], ["--options", "[]", "x"], ["--nonsense", "x"]])
def test_cli_verify_exits_2_if_arguments_are_invalid(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert "usage: snapshot" in capsys.readouterr().err


@pytest.mark.slow
def test_cli_verify_in_a_subprocess_exits_1_for_a_damaged_snapshot(tmp_path: Path) -> None:
    path = damage(taken(tmp_path / "s"))
    done = subprocess.run(
        [sys.executable, "-m", "snapshot", "verify", path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 fault" in done.stdout


def test_cli_verify_quick_says_that_no_bytes_were_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(taken(tmp_path / "s"))
    assert main(["verify", "--quick", str(path)]) == 0
    capsys.readouterr()
    entry = Snapshot(path).get_manifest()["0/s/x"]
    (path / entry.location).unlink()
    assert main(["verify", "--quick", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["quick"], found["ok"], found["files"]) == (True, False, 1)
    assert found["faults"] == [f"{entry.location} is missing (holds 0/s/x and 1 more)"]


def test_cli_verify_of_a_file_without_digests_is_not_a_plain_ok(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "x.safetensors")
    assert main(["convert", str(taken(tmp_path / "s")), path]) == 0
    capsys.readouterr()
    assert main(["verify", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unverifiable"] == 2
    assert main(["verify", "--strict", path]) == 1
    assert main(["verify", "--strict", str(tmp_path / "s")]) == 0


def test_cli_verify_resume_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, notes = taken(tmp_path / "s"), str(tmp_path / "notes")
    assert main(["verify", "--resume", notes, str(damage(path))]) == 1
    assert main(["verify", "--resume", notes, str(path)]) == 1
    assert ", 0 B (and " in capsys.readouterr().out
    damage(path)
    assert main(["verify", "--resume", notes, str(path)]) == 0
    assert not Path(notes).exists()
    assert main(["verify", "--resume", notes, str(path), str(path)]) == 2
    assert main(["verify", "--resume", notes, "--quick", str(path)]) == 2
    Path(notes).write_text("mine")
    assert main(["verify", "--resume", notes, str(path)]) == 2
    assert "choose another file" in capsys.readouterr().err


def test_cli_verify_escapes_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Snapshot.take(tmp_path / "s", {"s": StateDict({"a\x1b[2J": torch.ones(9)})})
    assert main(["verify", str(damage(tmp_path / "s", "0/s/a\x1b[2J"))]) == 1
    assert "0/s/a\\x1b[2J: data/" in capsys.readouterr().out


def test_cli_verify_of_an_unknown_format_exits_2_and_of_a_damaged_known_one_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.txt").write_text("something else")
    assert main(["verify", str(tmp_path / "file.txt")]) == 2
    out, err = capsys.readouterr()
    assert (out, "not a checkpoint of any known format" in err) == ("", True)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    assert main(["verify", str(tmp_path / "model.safetensors")]) == 1
    assert "1 fault" in capsys.readouterr().out


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_cli_verify_resume_continues_after_a_signal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], warm: Warm, number: str, status: int
) -> None:
    state = StateDict(**{f"t{i}": torch.full((1 << 16,), float(i)) for i in range(40)})
    Snapshot.take(tmp_path / "s", {"m": state}, options=TakeOptions(durable=False))
    script = f"""
import os, signal, sys
from snapshot.cli import main
from snapshot.transform import verify as stretches
from snapshot.transform import verify as verify_journal
stretches.STRETCH = 256 << 10
add = verify_journal.VerifyJournal.add
def counted(self, *arguments):
    add(self, *arguments)
    counted.met += 1
    if counted.met == 3:
        os.kill(os.getpid(), signal.{number})
counted.met = 0
verify_journal.VerifyJournal.add = counted
sys.exit(main(["verify", "--resume", "{tmp_path}/notes", "{tmp_path}/s"]))
"""
    with pytest.raises(Failed) as failed:
        warm.run(script)
    assert str(failed.value) == f"exit status {status}:\n"
    assert main(["verify", "--json", "--resume", str(tmp_path / "notes"), str(tmp_path / "s")]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_before"] >= 3 * (256 << 10)


def test_cli_verify_of_a_folder_verifies_all_its_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SnapshotManager(tmp_path / "run", keep=None, signals=()) as manager:
        for step in (1, 2, 10):
            manager.take(step, {"s": StateDict(x=torch.arange(1000), step=step)})
    assert main(["verify", str(tmp_path / "run"), "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(Path(each["url"]).name, each["ok"], each["entries"]) for each in told] == [
        ("step-1", True, 2), ("step-2", True, 2), ("step-10", True, 2)
    ]  # fmt: skip

    damage(tmp_path / "run" / "step-2")
    (tmp_path / "run" / "step-3" / "data").mkdir(parents=True)  # of a take that was cut off: not a snapshot
    manifest = tmp_path / "run" / "step-10" / ".snapshot_metadata"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    assert main(["verify", str(tmp_path / "run"), "--json"]) == 1
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(each["faults"]) for each in told] == [0, 1, 1]

    assert main(["verify", str(tmp_path / "run"), str(tmp_path / "none")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert "there is no snapshot here" in err
    assert main(["verify", "--resume", str(tmp_path / "note"), str(tmp_path / "run")]) == 2
    assert "is a folder of 3" in capsys.readouterr().err


SECRET = "hunter2-my-token"


@pytest.mark.parametrize(
    "content",
    [
        SECRET.encode(),
        b"{" + SECRET.encode() + b"}",
        b"PK\3\4" + SECRET.encode() * 9,
        (40).to_bytes(8, "little") + b"{" + SECRET.encode() * 9,
        b"\x80\x04" + SECRET.encode(),
        f"key: {SECRET}\n- {SECRET}".encode(),
    ],
    ids=["text", "json", "zip", "safetensors", "pickle", "yaml"],
)
@pytest.mark.parametrize("name", ["file.txt", "file.pt", "s/.snapshot_metadata", "s/.metadata", "s/model.safetensors"])
def test_cli_errors_never_quote_a_file_that_is_not_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    place = file if "/" not in name else file.parent
    for verb in (["verify"], ["ls"], ["show", "x"], ["diff", str(place)], ["cp", str(tmp_path / "copy")]):
        assert main([verb[0], str(place), *verb[1:]]) in (1, 2)
        out, err = capsys.readouterr()
        assert out + err
        assert SECRET not in out + err
        assert SECRET[:7] not in out + err
