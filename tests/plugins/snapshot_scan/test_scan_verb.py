"""`snapshot scan`: folders, links, what it prints, its exit status, and the report for code-scanning services."""

import argparse
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import urllib.parse
import warnings

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from snapshot import Snapshot, StateDict
from snapshot.cli import main
from tests.helpers.trees import PYTHONPATH, ROOT
from tests.plugins.snapshot_scan.hostile_files import EVIL, HIDDEN, PLAIN, SAFE, SUSPICIOUS, zipped
from tests.plugins.snapshot_scan.hostile_pickles import MARKER, NAMES, TRICKS, called, headed, named


def scan(capsys, *argv, status=1):
    """The findings, each as its verdict, file, member and text."""
    assert main(["scan", *map(str, argv), "--json"]) == status
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] == (status == 0)
    return {(each["verdict"], each["file"], each["member"], each["text"]) for each in content["findings"]}


def fill(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_scan_of_a_file_and_of_a_folder(tmp_path, capsys, scheme):
    fill(tmp_path, {"a/model.pt": zipped([("m/data.pkl", EVIL)]), "README.md": b"text", "b.pkl": PLAIN})
    for path, name in (("", "a/model.pt"), ("/a/model.pt", "model.pt")):
        found = {("runs code", name, "m/data.pkl", "calls posix.system")}
        assert scan(capsys, f"{scheme}{tmp_path}{path}") == found
    assert scan(capsys, f"{scheme}{tmp_path}/b.pkl", status=0) == set()


def test_scan_of_a_remote_folder_and_a_remote_file(capsys):
    files = {"a/model.pt": zipped([("m/data.pkl", EVIL), ("m/data/0", bytes(100_000))]), "b.pkl": PLAIN}
    system = fsspec.filesystem("memory")
    for name, data in files.items():
        system.pipe(f"/scanned/{name}", data)
    for path, name in (("", "a/model.pt"), ("/a/model.pt", "model.pt")):
        found = {("runs code", name, "m/data.pkl", "calls posix.system")}
        assert scan(capsys, f"fsspec+memory://scanned{path}") == found
    assert scan(capsys, "fsspec+memory://scanned/b.pkl", status=0) == set()


def test_scan_prints_a_table_and_exits_1_for_each_finding(tmp_path, capsys):
    data = headed(named("my.module", "Class") + named("torch", "Tensor") + b"\x86.")
    fill(tmp_path, {"a.pkl": data, "b.pkl": EVIL, "c.7z": b"7z\xbc\xaf\x27\x1c"})
    assert main(["scan", str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out[2:]] == ["runs code", "unknown", "not examined"]
    assert "3 files" in out[0]
    assert main(["scan", str(tmp_path / "a.pkl"), "--all"]) == 1
    assert "harmless  names torch.Tensor" in capsys.readouterr().out.replace("   ", "  ")
    assert main(["scan", str(tmp_path / "a.pkl"), "--allow", "my.*"]) == 0
    assert "harmless" not in capsys.readouterr().out


def test_scan_of_what_is_not_there_exits_2(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for argv in ([tmp_path / "none"], [tmp_path / "empty"], []):
        assert main(["scan", *map(str, argv)]) == 2
        assert capsys.readouterr().err


def test_scan_escapes_names_that_move_the_cursor(tmp_path, capsys):
    fill(tmp_path, {"a.pkl": called(headed(named("x\x1b[2J", "y")))})
    assert main(["scan", str(tmp_path)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_scan_names_links_out_of_the_folder(tmp_path, capsys):
    fill(tmp_path, {"outside.pkl": EVIL, "elsewhere/x.pkl": EVIL, "root/inner/a.pkl": PLAIN, "rootless/b": b""})
    root = tmp_path / "root"
    (root / "linked.pkl").symlink_to(tmp_path / "outside.pkl")
    (root / "folder").symlink_to(tmp_path / "elsewhere")
    (root / "beside").symlink_to(tmp_path / "rootless" / "b")
    (root / "gone").symlink_to(tmp_path / "gone")
    (root / "fine.pkl").symlink_to("inner/a.pkl")
    (root / "fine").symlink_to("inner")
    os.mkfifo(root / "pipe")
    found = scan(capsys, root)
    links = {file for verdict, file, _, text in found if "outside the folder" in text}
    assert links == {"linked.pkl", "folder", "beside", "gone"}
    assert ("runs code", "linked.pkl", "", "calls posix.system") in found
    assert {file for verdict, file, *_ in found if verdict == "not examined"} == {"gone", "pipe"}


def test_scan_of_a_version_in_the_cache_of_hugging_face_accepts_its_links(tmp_path, capsys):
    fill(tmp_path, {"models--a/blobs/0123": PLAIN, "models--a/snapshots/1/x.md": b"text"})
    version = tmp_path / "models--a" / "snapshots" / "1"
    (version / "model.pkl").symlink_to("../../blobs/0123")
    assert scan(capsys, version, status=0) == set()
    (tmp_path / "models--a" / "blobs" / "0123").write_bytes(EVIL)
    assert scan(capsys, version) == {("runs code", "model.pkl", "", "calls posix.system")}


class Unknown:
    def __init__(self):
        self.value = 1


def test_scan_of_snapshots_and_dcp_checkpoints(tmp_path, capsys):
    plain = {"s": StateDict(w=torch.ones(300), args=argparse.Namespace(a=1), raw=b"\0" * 100)}
    Snapshot.take(tmp_path / "plain", plain)
    assert scan(capsys, tmp_path / "plain", status=0) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {"s": StateDict(w=torch.ones(300), first=Unknown(), raw=b"\0" * 100, second=Unknown())}
        Snapshot.take(tmp_path / "run" / "step-1", state)
        dcp.save({"w": torch.ones(4), "n": 3, "l": [1]}, checkpoint_id=tmp_path / "dcp")
    texts = {(verdict, text) for verdict, _, _, text in scan(capsys, tmp_path / "run")}
    assert ("unknown", f"names {__name__}.Unknown") in texts
    assert {verdict for verdict, *_ in scan(capsys, tmp_path / "dcp", status=0)} == {"harmless"}


def test_scan_of_the_corpus_finds_only_pickled_objects(capsys):
    """Snapshots with each feature of the format; those in one are pickles of other classes."""
    found = scan(capsys, ROOT / "tests" / "corpus")
    assert {file.split("/")[1] for verdict, file, *_ in found if verdict != "harmless"} == {"pickles"}
    assert "not examined" not in {verdict for verdict, *_ in found}


def test_scan_finds_a_pickled_object_that_only_the_manifest_locates(tmp_path, capsys):
    """Other bytes around an archive hide it from a reader of the whole file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(tmp_path / "step", {"s": StateDict(o=Unknown())})
    (file,) = (tmp_path / "step" / "data").glob("*.bin")
    manifest = tmp_path / "step" / ".snapshot_metadata"
    data = file.read_bytes()
    file.write_bytes(data + b"\0" * 100_000)
    manifest.write_text(manifest.read_text().replace(f'"size":{len(data)}', f'"size":{len(data) + 100_000}'))
    assert any(f"names {__name__}.Unknown" == text for *_, text in scan(capsys, tmp_path / "step"))


def test_scan_sarif_is_a_log_of_version_2_1(tmp_path, capsys):
    fill(
        tmp_path / "root", {"a b/ü#.pt": zipped([("m/data.pkl", EVIL)]), "c.7z": b"7z\xbc\xaf\x27\x1c", "d.pkl": PLAIN}
    )
    report = tmp_path / "scan.sarif"
    assert main(["scan", str(tmp_path / "root"), "--sarif", str(report)]) == 1
    log = json.loads(report.read_text())
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "snapshot scan"
    assert len({rule["id"] for rule in rules}) == len(rules)
    assert all(rule["shortDescription"]["text"] for rule in rules)
    found = {}
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        (location,) = result["locations"]
        artifact = location["physicalLocation"]["artifactLocation"]
        assert artifact["uriBaseId"] in run["originalUriBaseIds"]
        assert artifact["uri"].isascii()
        found[urllib.parse.unquote(artifact["uri"])] = (result["level"], result["message"]["text"])
    assert found["a b/ü#.pt"] == ("error", "runs code: calls posix.system (m/data.pkl)")
    assert found["c.7z"][0] == "warning"
    assert set(found) == {"a b/ü#.pt", "c.7z"}
    assert main(["scan", str(tmp_path / "root" / "d.pkl"), "--sarif", str(report)]) == 0
    assert json.loads(report.read_text())["runs"][0]["results"] == []


CHILD = """
import os, sys, zlib, bz2, lzma, json
import encodings.utf_8_sig, encodings.utf_16, encodings.utf_16_le, encodings.utf_32, encodings.latin_1
import snapshot.formats.detect, snapshot.io.accelerators
from snapshot.cli import main
folder, warm = sys.argv[1:]
main(["scan", warm])  # what the scan itself needs is imported now
seen = []
def hook(event, args):
    is_parse = event == "compile" and args[1] == "<unknown>"  # ast.literal_eval, which runs nothing
    if event in FORBIDDEN and watching and not is_parse:
        seen.append((event, str(args)[:200]))
FORBIDDEN = {"exec", "compile", "import", "pickle.find_class", "os.system", "os.exec", "os.posix_spawn",
    "subprocess.Popen", "ctypes.dlopen", "socket.connect", "os.remove", "os.rename", "os.mkdir", "cpython.run_command"}
watching = True
sys.addaudithook(hook)
status = main(["scan", folder, "--json"])
watching = False
print()
print(repr((int(status), seen)))
"""


def test_scan_names_linked_folders_of_a_cache(tmp_path, capsys):
    version = tmp_path / "models--a" / "snapshots" / "r1"
    fill(tmp_path / "models--a" / "blobs", {"1": PLAIN, "folder/m.pkl": EVIL})
    fill(version, {"README.md": b"text"})
    (version / "a.pkl").symlink_to("../../blobs/1")
    assert not scan(capsys, version, status=0)
    (version / "inner").symlink_to("../../blobs/folder")
    (version / "loop").symlink_to(".")
    assert [file for _, file, _, text in scan(capsys, version) if "outside the folder" in text] == ["inner"]


def test_scan_examines_what_metadata_locates_among_other_bytes(tmp_path, capsys):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert "runs code" not in {verdict for verdict, *_ in scan(capsys, tmp_path / "dcp", status=0)}
    described = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    (data,) = (tmp_path / "dcp").glob("*.distcp")
    for index, place in described.storage_data.items():
        if index.fqn == "w":  # in its numbers
            begin = data.read_bytes().index(torch.ones(4).numpy().tobytes(), place.offset)
            described.storage_data[index] = dataclasses.replace(place, offset=begin, length=len(SHORT))
    data.write_bytes(data.read_bytes()[:begin] + SHORT + data.read_bytes()[begin + len(SHORT) :])
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(described))
    assert ("runs code", data.name, "", "names os.system") in scan(capsys, tmp_path / "dcp")


def test_scan_examines_pickles_in_the_chunks_of_torchsnapshot(tmp_path, capsys):
    tensor = {
        "type": "Tensor", "location": "0/w", "serializer": "torch_save", "dtype": "torch.float32", "shape": [4],
        "replicated": False, "byte_range": [100, 100 + len(EVIL)],
    }  # fmt: skip
    chunks = [{"offsets": [0], "sizes": [4], "tensor": tensor}]
    chunked = {"type": "ChunkedTensor", "dtype": "torch.float32", "shape": [4], "chunks": chunks, "replicated": False}
    manifest = {"version": "0.1.0", "world_size": 1}
    manifest["manifest"] = {"0/m": {"type": "dict", "keys": ["w"]}, "0/m/w": chunked}
    fill(tmp_path, {".snapshot_metadata": json.dumps(manifest).encode(), "0/w": b"\0" * 100 + EVIL})
    assert ("runs code", "0/w", "", "calls posix.system") in scan(capsys, tmp_path)


SHORT = b"cos\nsystem\n.   "


def test_scan_runs_nothing(tmp_path):
    """No sample is imported, looked up, compiled or run; each would leave a file."""
    samples = {f"tricks/{number}.pkl": data for number, data in enumerate(TRICKS.values())}
    samples |= {f"names/{number}.pkl": called(headed(named(*each))) for number, each in enumerate(NAMES)}
    samples |= {f"hidden/{name}": data for name, data in HIDDEN.items()}
    samples |= {f"suspicious/{name}": data for name, (data, _) in SUSPICIOUS.items()}
    fill(tmp_path / "samples", samples)
    warm = {
        "a.gz": HIDDEN["model.tar.gz"],
        "b.zip": HIDDEN["names.zip"],
        "c.h5": SUSPICIOUS["model.h5"][0],
        "e/.metadata": PLAIN,
    }
    fill(tmp_path / "warm", {**SAFE, **warm, "d.pkl": b"Vx\n."})
    (tmp_path / "here").mkdir()
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    child = [sys.executable, "-c", CHILD, str(tmp_path / "samples"), str(tmp_path / "warm")]
    done = subprocess.run(child, cwd=tmp_path / "here", env=environment, capture_output=True, check=True, timeout=300)
    assert done.stdout.decode().splitlines()[-1] == repr((1, []))
    assert list((tmp_path / "here").iterdir()) == []
    assert not list(tmp_path.rglob(MARKER))
