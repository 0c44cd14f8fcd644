"""Output of the verbs for snapshots that share physical bytes, or leave tensors to a base."""

import json
import os
import re
import shutil

import pytest

from snapshot import RestoreOptions, Snapshot, SnapshotError
from snapshot.cli import main
from tests.helpers.incremental import take_steps, tuned
from tests.helpers.weight_folders import Adapted

LAYER = 256 << 10


def told(capsys, *argv, status=0):
    assert main([str(each) for each in argv]) == status
    return capsys.readouterr().out


@pytest.fixture
def steps(tmp_path):
    root = tmp_path / "run"
    return take_steps(root)[0], root


def on_disk(root):
    """The bytes of all data files below a folder, each inode once."""
    stats = [os.stat(path) for path in root.rglob("data/*.*")]
    return sum({(each.st_dev, each.st_ino): each.st_size for each in stats}.values())


def test_cli_ls_du_shows_an_apparent_and_a_physical_size(steps, capsys):
    taken, root = steps
    found = json.loads(told(capsys, "ls", root, "--du", "--json"))
    assert found["bytes"] == sum(each.metadata.nbytes for each in taken)
    assert found["physical_bytes"] == on_disk(root) < found["bytes"]
    for each, snapshot in zip(found["snapshots"], taken, strict=True):
        assert each["own_bytes"] + each["shared_bytes"] == each["bytes"] == snapshot.metadata.nbytes
        assert LAYER <= each["shared_bytes"] < LAYER + 8192


def test_cli_ls_du_of_some_snapshots_counts_bytes_shared_with_all_others(steps, capsys):
    _, root = steps
    found = json.loads(told(capsys, "ls", root, "step-1", "--du", "--json"))
    (one,) = found["snapshots"]
    assert one["shared_bytes"] > LAYER
    assert found["physical_bytes"] == on_disk(root)


def test_cli_ls_du_of_snapshots_that_share_no_bytes(root, tmp_path, capsys):
    found = json.loads(told(capsys, "ls", root, "--du", "--json"))
    assert {each["shared_bytes"] for each in found["snapshots"]} == {0}
    assert found["bytes"] == found["physical_bytes"] == sum(each["bytes"] for each in found["snapshots"])
    assert "shared_bytes" not in json.loads(told(capsys, "ls", root, "--json"))["snapshots"][0]


def test_cli_ls_du_counts_the_bytes_of_a_copy_by_another_tool(steps, tmp_path, capsys):
    _, root = steps
    shutil.copytree(root / "step-2", root / "backup")
    found = json.loads(told(capsys, "ls", root, "--du", "--json"))
    assert found["physical_bytes"] == on_disk(root)


def test_cli_ls_du_lists_an_unreadable_snapshot_beside_the_others(steps, capsys):
    _, root = steps
    (root / "step-1" / ".snapshot_metadata").write_bytes(b'{"format":"snapshot/1",broken')
    assert "cannot be read" in told(capsys, "ls", root, "--du", status=1)


def test_cli_ls_du_computes_shared_bytes_from_manifests_on_other_storages(capsys):
    model = tuned()
    Snapshot.take("memory://sharing/a", {"model": model}, base=[])
    later = Snapshot.take("memory://sharing/b", {"model": model}, base="memory://sharing/a")
    assert later.report.shared_bytes > LAYER
    found = json.loads(told(capsys, "ls", "memory://sharing", "--du", "--json"))
    assert found["physical_bytes"] == found["bytes"] - later.report.shared_bytes
    assert "1.0 MiB in " in told(capsys, "ls", "memory://sharing", "--du")


def test_cli_rm_prints_the_bytes_it_frees(steps, capsys):
    taken, root = steps
    sizes = [each.metadata.nbytes for each in taken]
    rows = [json.loads(line) for line in told(capsys, "rm", *root.iterdir(), "--dry-run", "--json").splitlines()]
    assert sum(row["frees"] for row in rows) == on_disk(root), "the last one frees what all of them share"
    before = on_disk(root)
    (removed,) = map(json.loads, told(capsys, "rm", root / "step-0", "--yes", "--json").splitlines())
    assert removed["bytes"] == sizes[0]
    assert removed["frees"] == before - on_disk(root) < sizes[0]
    text = told(capsys, "rm", root / "step-2", "--yes")
    assert "frees" in text
    assert re.search(r"step-2: \d files, 520\.0 KiB; 2\d\d\.\d KiB are freed", text)
    assert "freed" not in told(capsys, "rm", root / "step-1", "--yes").splitlines()[-1]


def test_cli_ls_header_shows_shared_bytes(steps, capsys):
    taken, root = steps
    assert "shared with earlier" not in told(capsys, "ls", root / "step-0")
    assert re.search(
        r"26\d\.0 KiB shared with earlier snapshots, taken", " ".join(told(capsys, "ls", root / "step-2").split())
    )
    found = json.loads(told(capsys, "ls", root / "step-2", "--json"))
    assert (found["shared_bytes"], found["bytes_in_base"]) == (taken[2].report.shared_bytes, 0)


def test_cli_verbs_show_what_is_left_to_the_base(tmp_path, capsys):
    (base, lean), _ = take_steps(tmp_path, 2, only="trainable")
    said = " ".join(told(capsys, "ls", lean.path).split())
    assert f"256.0 KiB left to the base {base.path}, taken" in said
    found = json.loads(told(capsys, "ls", lean.path, "--json"))
    assert (found["bytes_in_base"], found["shared_bytes"]) == (LAYER, 0)
    shown = told(capsys, "show", lean.path, "model/frozen.weight")
    assert f"base       {base.path}" in shown
    assert "left out of this snapshot; show it in the base" in shown
    assert "values" in told(capsys, "show", lean.path, "model/trained.weight")


def test_cli_verbs_work_with_a_snapshot_whose_base_is_a_folder_of_weights(tmp_path, capsys):
    run = Adapted(tmp_path / "weights", files=2)
    first = run.take(tmp_path / "run/step-1", tmp_path / "weights")
    run.step()
    second = run.take(tmp_path / "run/step-2", first)
    said = " ".join(told(capsys, "ls", second.path).split())
    assert f"1.0 MiB left to the base {tmp_path}/weights, taken" in said
    assert json.loads(told(capsys, "ls", second.path, "--json"))["bytes_in_base"] == run.frozen_bytes
    shown = told(capsys, "show", second.path, "model/pretrained.0.weight")
    assert f"base       {tmp_path}/weights" in shown
    assert "left out of this snapshot; show it in model-00001-of-00002.safetensors" in shown
    assert "6 of them left to the base" in told(capsys, "verify", second.path)
    assert main(["diff", first.path, second.path]) == 1
    changed = capsys.readouterr().out
    assert "head.weight" in changed
    assert "pretrained" not in changed
    run.pretrained[2].weight.data[0, 0] += 1
    third = Snapshot.take(tmp_path / "run/step-3", run.state)
    assert main(["diff", second.path, third.path]) == 1
    assert "pretrained.2.weight" in capsys.readouterr().out
    assert main(["diff", second.path, third.path, "--values"]) == 2
    assert f"is in the base {tmp_path}/weights" in capsys.readouterr().err
    with pytest.raises(SnapshotError, match=rf"has only what differs from {tmp_path}/weights"):
        second.read_object("model/pretrained.0.weight")
    assert second.read_object("model/head.weight").equal(run.head.weight)
    assert main(["convert", second.path, str(tmp_path / "out"), "--to", "safetensors"]) == 2
    assert f"has only what differs from {tmp_path}/weights" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    told(capsys, "cp", second.path, tmp_path / "copy")
    told(capsys, "prune", tmp_path / "run", "--keep-latest", "1", "--yes")
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-3"]
    told(capsys, "rm", third.path, "--yes")
    assert (tmp_path / "weights" / "model-00001-of-00002.safetensors").exists()
    values = run.values()
    run.spoil()
    Snapshot(tmp_path / "copy").restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.head.weight.equal(values["head.weight"])
    assert Snapshot(tmp_path / "copy").verify()


def test_cli_report_page_has_shared_bytes_their_age_and_the_base(steps, tmp_path, capsys):
    taken, root = steps

    def page(path):
        told(capsys, "report", path, "--output", tmp_path / "r.html")
        text = (tmp_path / "r.html").read_text()
        return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])

    first, last = page(root / "step-0"), page(root / "step-2")
    assert (first["shared_bytes"], first["sharing"], first["base"]) == (0, {}, "")
    assert last["shared_bytes"] == taken[2].report.shared_bytes
    ((location, (origin, age)),) = last["sharing"].items()
    assert location in dict(last["files"])
    assert origin in dict(first["files"])
    assert age == 2
    (base, lean), _ = take_steps(tmp_path / "lean", 2, only="trainable")
    data = page(lean.path)
    assert (data["bytes_in_base"], data["base"]) == (LAYER, base.path)
