"""Verification, copies, conversions and comparisons of snapshots that share files, or leave tensors to a base."""

import json
import shutil

import pytest
import torch

from snapshot import Snapshot, SnapshotError, Target
from snapshot.cli import main
from snapshot.manifest.document import decode_document
from tests.helpers.incremental import take_steps

FROZEN, TRAINED = "0/model/frozen.weight", "0/model/trained.weight"


def document(snapshot):
    with open(f"{snapshot.path}/.snapshot_metadata", "rb") as file:
        return decode_document(file.read(), snapshot.path)


@pytest.fixture
def lean(tmp_path):
    """A snapshot that leaves the frozen layer to the base before it."""
    (base, snapshot), _ = take_steps(tmp_path, 2, only="trainable")
    assert snapshot.report.omitted_bytes == 256 << 10
    return base, snapshot


def test_copy_of_a_snapshot_that_shares_files_has_its_own_bytes(tmp_path):
    (_, _, snapshot), model = take_steps(tmp_path)
    origins = {file.origin for file in document(snapshot).files.values()}
    assert origins > {None}
    report = snapshot.copy(tmp_path / "copy")
    assert report.nbytes == snapshot.metadata.nbytes
    copied = document(Snapshot(tmp_path / "copy"))
    assert {(file.origin, file.age) for file in copied.files.values()} == {(None, 0)}
    contents = [sorted(file.content for file in each.files.values()) for each in (document(snapshot), copied)]
    assert contents[0] == contents[1] != []
    for step in range(3):
        shutil.rmtree(tmp_path / f"step-{step}")
    assert Snapshot(tmp_path / "copy").verify()
    restored = Snapshot(tmp_path / "copy").read_object("model/frozen.weight")
    assert torch.equal(restored, model["frozen"].weight)


def test_base_that_is_a_copy_shares_files_with_later_takes(tmp_path):
    (_, snapshot), model = take_steps(tmp_path, 2)
    snapshot.copy(tmp_path / "copy")
    later = Snapshot.take(tmp_path / "later", {"model": model}, base=tmp_path / "copy")
    assert later.report.shared_bytes > 256 << 10
    ages = {file.origin: file.age for file in document(later).files.values()}
    assert any(origin and origin in document(Snapshot(tmp_path / "copy")).files for origin in ages)
    assert max(ages.values()) == 1


def test_copy_of_an_only_trainable_snapshot_leaves_tensors_to_the_base(lean, tmp_path):
    base, snapshot = lean
    report = snapshot.copy(tmp_path / "copy")
    assert (report.nbytes, report.files) == (snapshot.metadata.nbytes, len(snapshot.metadata.files))
    ours, theirs = document(snapshot), document(Snapshot(tmp_path / "copy"))
    assert theirs.base == ours.base
    assert theirs.manifest[FROZEN] == ours.manifest[FROZEN] == document(base).manifest[FROZEN]
    assert theirs.manifest[TRAINED].location.startswith(f"data/{theirs.save_id}-")
    assert {name for name, file in theirs.files.items() if file.in_base} == {
        name for name, file in ours.files.items() if file.in_base
    }
    assert torch.equal(
        Snapshot(tmp_path / "copy").read_object("model/trained.weight"), snapshot.read_object("model/trained.weight")
    )


def test_copy_of_an_only_trainable_snapshot_finds_damage(lean, tmp_path):
    _, snapshot = lean
    entry = document(snapshot).manifest[TRAINED]
    with open(f"{snapshot.path}/{entry.location}", "r+b") as file:
        file.seek(entry.byte_range[0])
        file.write(b"\xff\xff")
    with pytest.raises(SnapshotError, match="digest must be"):
        snapshot.copy(tmp_path / "copy")
    assert not Snapshot(tmp_path / "copy").exists()


def test_copy_and_convert_select_of_an_only_trainable_snapshot(lean, tmp_path):
    _, snapshot = lean
    snapshot.copy(tmp_path / "part", select=["model/trained.*"])
    assert Snapshot(tmp_path / "part").verify()
    snapshot.convert(Target(tmp_path / "adapter.safetensors", "safetensors"), select=["model/trained.*"])
    for verb in (
        lambda: snapshot.copy(tmp_path / "other", select=["model/*"]),
        lambda: snapshot.convert(Target(tmp_path / "all.safetensors", "safetensors")),
        lambda: snapshot.convert(tmp_path / "all"),
    ):
        with pytest.raises(SnapshotError, match=r"has only what differs from .*step-0 \(save id [0-9a-f]{12}\)"):
            verb()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter.safetensors", "part", "step-0", "step-1"]


@pytest.mark.parametrize("quick", [False, True])
def test_verify_of_an_only_trainable_snapshot_skips_the_base_and_says_so(lean, quick, capsys):
    base, snapshot = lean
    shutil.rmtree(base.path)  # which is not needed for it
    report = snapshot.verify(quick=quick)
    assert report.ok, str(report)
    assert (report.in_base, report.unverifiable) == (1, 0)
    assert "2 entries, 1 of them left to the base, " in str(report)
    assert report.files == len(snapshot.metadata.files)
    assert main(["verify", snapshot.path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["in_base"] == 1


def test_verify_of_an_only_trainable_snapshot_finds_damage(lean, tmp_path):
    _, snapshot = lean
    (file,) = {document(snapshot).manifest[TRAINED].location}
    with open(f"{snapshot.path}/{file}", "r+b") as held:
        held.seek(-3, 2)
        held.write(b"\xff")
    (fault,) = snapshot.verify().faults
    assert fault.startswith(TRAINED)
    assert snapshot.verify(resume=tmp_path / "journal").faults == (fault,)


def test_diff_of_an_only_trainable_snapshot_compares_digests_of_the_base(lean):
    base, snapshot = lean
    shutil.rmtree(f"{base.path}/data")
    found = Snapshot.diff(base, snapshot)
    assert [(change.kind, change.path) for change in found] == [("changed", "model/trained.weight")]
    assert (found.entries_read, found.equal) == (0, 1)


def test_diff_of_an_only_trainable_snapshot_that_must_read_the_base_names_it(lean, tmp_path):
    base, snapshot = lean
    _, model = take_steps(tmp_path / "other", 1)
    torch.nn.init.zeros_(model["frozen"].weight)
    torch.nn.init.zeros_(model["trained"].weight)
    other = Snapshot.take(tmp_path / "zeros", {"model": model})
    assert {change.path for change in Snapshot.diff(snapshot, other)} >= {"model/frozen.weight"}
    with pytest.raises(SnapshotError) as raised:
        Snapshot.diff(snapshot, other, values=True)
    assert f"model/frozen.weight cannot be read: it was left out, and is in the base {base.path}" in str(raised.value)
    assert Snapshot.diff(snapshot, other, values=True, exclude=["model/frozen.*"]).entries_read == 1
