"""`snapshot verify`: what a shell, a script and a person learn from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main
from snapshot.testing import faulty

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


def test_a_whole_snapshot_is_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = taken(tmp_path / "s")
    assert main(["verify", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: 4 entries, 11.8 KiB in ")
    assert out.endswith(": every byte is what was written\n")
    assert err == ""


def test_a_damaged_one_is_status_1_and_names_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(taken(tmp_path / "s"))
    entry = Snapshot(path).get_manifest()["0/s/x"]
    assert main(["verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 1 fault")
    assert lines[1].startswith(f"  0/s/x: {entry.location}[{entry.byte_range[0]}:{entry.byte_range[1]}] is xxh3:")
    assert lines[1].endswith(f"and {entry.digest} was written")


def test_a_damaged_manifest_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = taken(tmp_path / "s")
    manifest = path / ".snapshot_metadata"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    assert main(["verify", str(path)]) == 1
    assert "1 fault" in capsys.readouterr().out


def test_one_that_is_not_there_is_status_2_and_the_others_are_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = taken(tmp_path / "good"), damage(taken(tmp_path / "bad"))
    assert main(["verify", str(tmp_path / "none"), str(bad), str(good)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("snapshot: error: ")
    assert "there is no snapshot here" in err
    assert len(err.splitlines()) == 1
    assert [line.partition(":")[0] for line in out.splitlines() if line[0] != " "] == [str(bad), str(good)]


def test_json_is_a_line_for_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = taken(tmp_path / "good"), damage(taken(tmp_path / "bad"))
    assert main(["verify", "--json", str(good), str(bad)]) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["url"], first["ok"], first["faults"]) == (str(good), True, [])
    assert (first["entries"], first["bytes_read"], first["unverifiable"]) == (4, 4096 + 8012, 0)
    assert (second["url"], second["ok"], len(second["faults"])) == (str(bad), False, 1)


def test_it_works_on_every_storage(capsys: pytest.CaptureFixture[str]) -> None:
    Snapshot.take("memory://command/s", {"s": StateDict(x=torch.ones(3))}, overwrite=True)
    assert main(["verify", "memory://command/s", "--memory", "16777216"]) == 0
    with faulty(on="read_into", flip=3, times=None):
        assert main(["verify", "faulty+memory://command/s"]) == 1
    assert "fault" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--memory", "much", "x"], ["--options", "[]", "x"], ["--nonsense", "x"]])
def test_what_it_does_not_understand_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert "usage: snapshot" in capsys.readouterr().err


def test_the_installed_command_gives_the_status_to_its_shell(tmp_path: Path) -> None:
    path = damage(taken(tmp_path / "s"))
    done = subprocess.run(
        [sys.executable, "-m", "snapshot", "verify", path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "1 fault" in done.stdout
