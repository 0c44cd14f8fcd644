"""Snapshots whose base is a folder of weights: what they refer to, and what a restore accepts there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotManager,
    StateDict,
    StorageError,
    TakeOptions,
)
from snapshot.io.loop import run as run_on_loop
from snapshot.io.registry import open_storage
from snapshot.io.url import URL
from snapshot.loading import base_folder
from snapshot.manifest.document import METADATA
from snapshot.tensors.digest import digest_bytes
from snapshot.testing import Log, recording, tapped
from tests.helpers.weight_folders import Adapted, write_folder


@pytest.fixture(params=[1, 3], ids=["one file", "three files"])
def run(request, tmp_path):
    """A run on the weights in `weights`, with a snapshot `adapter` of what it trains."""
    run = Adapted(tmp_path / "weights", request.param)
    run.step()
    run.report = run.take(tmp_path / "adapter", tmp_path / "weights").report
    return run


def document_of(path):
    return json.loads((path / METADATA).read_bytes())


def flip(path, at):
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_only_trainable_refers_to_the_files_of_a_folder_of_weights(run, tmp_path):
    assert run.report.omitted_bytes == run.frozen_bytes
    assert run.report.written_bytes < 20_000
    assert not run.report.notes
    document = document_of(tmp_path / "adapter")
    assert document["format"] == "snapshot/3"
    assert document["base"]["url"] == str(tmp_path / "weights")
    assert document["base"]["format"] == "safetensors"
    held = {file["name"]: file for file in document["files"].values() if file.get("in_base")}
    assert held.keys() == {path.name for path in (tmp_path / "weights").glob("*.safetensors")}
    for name, file in held.items():
        assert file["size"] == (tmp_path / "weights" / name).stat().st_size
    stored = load_file(tmp_path / "weights" / next(iter(held)))
    for number in range(3):
        entry = document["manifest"][f"0/model/pretrained.{number}.weight"]
        name, (begin, end) = document["files"][entry["location"]]["name"], entry["byte_range"]
        data = (tmp_path / "weights" / name).read_bytes()[begin:end]
        assert data == run.pretrained[number].weight.numpy().tobytes()
        assert entry["blocks"][0] in {each for each, file in document["files"].items() if not file.get("in_base")}
    assert stored


def test_only_trainable_restores_without_the_folder_if_the_frozen_values_are_there(run, tmp_path):
    values = run.values()
    shutil.rmtree(tmp_path / "weights")
    run.step()
    Snapshot(tmp_path / "adapter").restore(run.state)
    assert run.has(values)
    run.pretrained[1].bias.data[7] += 1
    head = run.head.weight.clone()
    run.head.weight.data.zero_()
    with pytest.raises(RestoreError, match=r"pretrained\.1\.bias.*had not changed from its base, .*weights;"):
        Snapshot(tmp_path / "adapter").restore(run.state)
    assert not run.head.weight.any()
    assert head.any()


@pytest.mark.parametrize("place", ["weights", "moved"])
def test_restore_with_a_folder_of_weights_as_base_reads_what_was_left_out(run, tmp_path, place):
    values = run.values()
    if place == "moved":
        (tmp_path / "weights").rename(tmp_path / "moved")
    for options in ({}, {"verify": False}, {"atomic": True}):
        run.spoil()
        Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / place, **options))
        assert run.has(values), options


def test_restore_with_a_folder_of_weights_as_base_creates_new_tensors_that_share_no_memory(tmp_path):
    """Two parameters with equal bytes stay two: one range of the folder is used for one of them."""
    model = nn.ModuleDict({"a": nn.Linear(50, 50), "b": nn.Linear(50, 50)}).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.fill_(1)
    write_folder(tmp_path / "weights", {f"x.{name}": value for name, value in model.a.state_dict().items()})
    made = Snapshot.take(
        tmp_path / "s", {"model": model}, options=TakeOptions(base=tmp_path / "weights", only="trainable")
    )
    assert made.report.omitted_bytes == sum(each.nbytes for each in model.a.parameters())
    assert "its bytes are left out for another parameter" in made.report.notes[0]
    live = {"model": StateDict()}
    made.restore(live, strict=False, options=RestoreOptions(base=tmp_path / "weights", exact=False))
    assert live["model"]["a.weight"].equal(model.b.weight)
    assert live["model"]["a.weight"].data_ptr() != live["model"]["b.weight"].data_ptr()


CHANGES = {
    "a value": lambda path: flip(path, -3),
    "a name": lambda path: flip(path, path.read_bytes().index(b"encoder")),
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-4]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"more"),
    "deleted": Path.unlink,
    "other weights": lambda path: save_file({"encoder.0.weight": torch.ones(3)}, path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_restore_refuses_a_folder_of_weights_that_has_changed(run, tmp_path, change):
    file = max((tmp_path / "weights").glob("*.safetensors"))
    run.spoil()
    CHANGES[change](file)
    for options in ({}, {"verify": False}, {"atomic": True}, {"strict": False}):
        given = {name: value for name, value in options.items() if name != "strict"}
        with pytest.raises(SnapshotError) as raised:
            Snapshot(tmp_path / "adapter").restore(
                run.state,
                strict=options.get("strict", True),
                options=RestoreOptions(base=tmp_path / "weights", **given),
            )
        assert str(tmp_path / "weights") in str(raised.value)
        assert run.is_spoilt()
        if change == "a value":
            assert "model/pretrained." in str(raised.value)
        if list((tmp_path / "weights").iterdir()):
            assert file.name in str(raised.value)


def test_restore_refuses_a_folder_of_weights_that_is_gone(run, tmp_path):
    shutil.rmtree(tmp_path / "weights")
    run.spoil()
    with pytest.raises(SnapshotError, match="weights"):
        Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.is_spoilt()


def test_restore_refuses_a_snapshot_in_place_of_a_folder_of_weights(run, tmp_path):
    Snapshot.take(tmp_path / "whole", run.state)
    run.spoil()
    with pytest.raises(RestoreError, match=r"(?s)base must be .*weights .*whole.*is a snapshot"):
        Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / "whole"))
    assert run.is_spoilt()


def test_only_trainable_accepts_a_single_file_of_weights(tmp_path):
    run = Adapted(tmp_path / "weights")
    save_file({"other": torch.ones(3)}, tmp_path / "weights" / "other.safetensors")
    file = tmp_path / "weights" / "model.safetensors"
    first = run.take(tmp_path / "s", file)
    assert first.report.omitted_bytes == run.frozen_bytes
    second = run.take(tmp_path / "t", first)
    assert second.report.omitted_bytes == run.frozen_bytes
    values = run.values()
    for made in (first, second):
        run.spoil()
        made.restore(run.state, options=RestoreOptions(base=file))
        assert run.has(values)


def test_restore_with_a_folder_of_weights_whose_index_lacks_the_file_reads_it(tmp_path):
    run = Adapted(tmp_path / "weights")
    file = tmp_path / "weights" / "model.safetensors"
    made = run.take(tmp_path / "s", file)
    save_file({"other": torch.ones(3)}, tmp_path / "weights" / "more.safetensors")
    index = {"metadata": {}, "weight_map": {"other": "more.safetensors"}}
    (tmp_path / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    values = run.values()
    run.spoil()
    made.restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.has(values)


def test_only_trainable_take_based_on_a_snapshot_refers_to_the_same_folder_of_weights(run, tmp_path):
    before = "adapter"
    for name in ("second", "third"):
        run.step()
        values = run.values()
        made = run.take(tmp_path / name, tmp_path / before, read_back=True)
        assert made.report.omitted_bytes == run.frozen_bytes
        first, later = (document_of(tmp_path / each) for each in (before, name))
        assert later["base"] == first["base"]
        assert {each for each in later["files"] if later["files"][each].get("in_base")} == {
            each for each in first["files"] if first["files"][each].get("in_base")
        }
        shutil.rmtree(tmp_path / before)
        before = name
        assert made.verify()
        assert made.verify().in_base == 6
        run.spoil()
        made.restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
        assert run.has(values)


@pytest.mark.parametrize("change", ["a value", "a name", "deleted"])
def test_only_trainable_take_based_on_a_snapshot_writes_what_its_folder_of_weights_has_lost(run, tmp_path, change):
    CHANGES[change](max((tmp_path / "weights").glob("*.safetensors")))
    made = run.take(tmp_path / "later", tmp_path / "adapter", read_back=True)  # which reads the folder whole
    assert made.report.omitted_bytes < run.frozen_bytes
    assert str(tmp_path / "weights") in made.report.notes[0]
    values = run.values()
    run.spoil()
    base = tmp_path / "weights" if made.report.omitted_bytes else None
    made.restore(run.state, options=RestoreOptions(base=base))
    assert run.has(values)


def test_only_trainable_take_after_a_folder_of_weights_has_changed_writes_what_differs(run, tmp_path):
    flip(max((tmp_path / "weights").glob("*.safetensors")), -2)
    made = run.take(tmp_path / "second", tmp_path / "weights")
    assert 0 < made.report.omitted_bytes < run.frozen_bytes
    assert "has other values" in made.report.notes[0]
    values = run.values()
    run.spoil()
    made.restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.has(values)


def test_base_folder_is_read_once_per_process(tmp_path):
    run = Adapted(tmp_path / "weights", files=2)
    size = sum(path.stat().st_size for path in (tmp_path / "weights").glob("*.safetensors"))
    base = f"recording+file://{tmp_path}/weights"
    read = []
    with recording() as log:
        for number in range(3):
            made = run.take(tmp_path / str(number), base)
            assert made.report.omitted_bytes == run.frozen_bytes
            read.append(log.nbytes("read_into"))
            log.clear()
        flip(tmp_path / "weights" / "model-00001-of-00002.safetensors", -1)
        made = run.take(tmp_path / "changed", base)
        read.append(log.nbytes("read_into"))
    assert read[0] >= run.frozen_bytes
    assert read[1] == read[2] < size // 20
    assert size // 3 < read[3] < size
    assert 0 < made.report.omitted_bytes < run.frozen_bytes


def test_base_folder_digests_are_those_of_any_ranges(tmp_path, monkeypatch):
    """Ranges that are cut in pieces, or read together, have the digests that a take computes."""
    monkeypatch.setattr(base_folder, "PIECE", 1 << 12)
    run = Adapted(tmp_path / "weights", files=2)
    made = run.take(tmp_path / "s", tmp_path / "weights")
    assert made.report.omitted_bytes == run.frozen_bytes


def test_base_folder_must_be_of_safetensors(tmp_path):
    run = Adapted()
    (tmp_path / "weights").mkdir()
    torch.save(run.pretrained.state_dict(), tmp_path / "weights" / "pytorch_model.bin")
    made = run.take(tmp_path / "s", tmp_path / "weights")
    assert made.report.omitted_bytes == 0
    assert "must be a snapshot, or a folder of safetensors files, got" in made.report.notes[0]
    made = Snapshot.take(tmp_path / "t", run.state, base=write_folder(tmp_path / "more", run.model.state_dict()))
    assert "not a snapshot" in made.report.notes[0]


@pytest.mark.parametrize("verb", ["take", "async_take"])
def test_only_trainable_take_on_a_folder_of_weights_of_another_storage(tmp_path, verb):
    run = Adapted(tmp_path / "weights", files=2)
    for path in (tmp_path / "weights").iterdir():
        run_on_loop(open_storage(URL.parse("memory://base-folder/weights")).put(path.name, path.read_bytes()))
    options = TakeOptions(base="memory://base-folder/weights", only="trainable")
    made = getattr(Snapshot, verb)(tmp_path / "s", run.state, options=options)
    values = run.values()
    run.step()
    made = made if verb == "take" else made.wait()
    assert made.report.omitted_bytes == run.frozen_bytes
    run.spoil()
    made.restore(run.state, options=RestoreOptions(base="memory://base-folder/weights"))
    assert run.has(values)


def test_only_trainable_take_fails_if_its_folder_of_weights_is_deleted(tmp_path):
    run = Adapted(tmp_path / "weights")

    class Remove(Log):
        async def before(self, operation):
            if operation.name == "finish":
                shutil.rmtree(tmp_path / "weights", ignore_errors=True)

    with tapped("gone", Remove()), pytest.raises(SnapshotError, match="removed or replaced"):
        run.take(f"gone+file://{tmp_path}/s", tmp_path / "weights")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["get", "stat", "read_into", "list"])
@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_only_trainable_take_does_not_fail_if_its_folder_of_weights_cannot_be_read(tmp_path, name, nth):
    run = Adapted(tmp_path / "weights", files=2)
    values = run.values()

    class Break(Log):
        async def before(self, operation):
            await super().before(operation)
            if operation.name == name and [each.name for each in self.operations].count(name) >= nth:
                raise StorageError("the disk is broken")

    with tapped("sick", Break()):
        made = run.take(tmp_path / "s", f"sick+file://{tmp_path}/weights")
    assert made.report.omitted_bytes in (0, run.frozen_bytes)
    assert made.verify()
    run.spoil()
    if made.report.omitted_bytes:
        made.restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    else:
        made.restore(run.state)
    assert run.has(values)


@pytest.mark.parametrize("name", ["get", "stat", "read_into"])
@pytest.mark.parametrize("nth", [1, 2, 4, 6, 8])
def test_restore_changes_nothing_if_its_folder_of_weights_cannot_be_read(tmp_path, name, nth):
    """Until all of it has been compared, any failure leaves the live tensors as they are."""
    run = Adapted(tmp_path / "weights", files=2)
    made = run.take(tmp_path / "s", tmp_path / "weights")
    values = run.values()
    run.spoil()
    compared = []

    class Break(Log):
        async def before(self, operation):
            await super().before(operation)
            if [each.name for each in self.operations].count(name) >= nth and operation.name == name:
                compared.append(self.nbytes("read_into") > run.frozen_bytes)
                raise StorageError("the disk is broken")

    options = RestoreOptions(base=f"sick+file://{tmp_path}/weights")
    with tapped("sick", Break()):
        try:
            made.restore(run.state, options=options)
        except SnapshotError:
            assert run.is_spoilt() or compared[0]
        else:
            assert not compared
            assert run.has(values)
    made.restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert run.has(values)


def test_only_trainable_of_other_dtypes_needs_the_folder_of_weights(run, tmp_path):
    values = run.values()
    snapshot = Snapshot(tmp_path / "adapter")
    run.pretrained.to(torch.float64)
    with pytest.raises(RestoreError, match=r"pass RestoreOptions\(base="):
        snapshot.restore(run.state, options=RestoreOptions(cast="any"))
    run.pretrained[0].weight.data.zero_()
    snapshot.restore(run.state, options=RestoreOptions(cast="any", base=tmp_path / "weights"))
    assert run.pretrained[0].weight.equal(values["pretrained.0.weight"].double())


def test_manager_leaves_frozen_parameters_to_a_folder_of_weights(tmp_path):
    run = Adapted(tmp_path / "weights")
    options = TakeOptions(base=tmp_path / "weights", only="trainable")
    with SnapshotManager(tmp_path / "run", take_options=options, signals=()) as manager:
        for step in (1, 2, 3):
            run.step()
            values = run.values()
            verb = manager.take if step < 3 else lambda *given: manager.async_take(*given).wait()
            assert verb(step, run.state).report.omitted_bytes == run.frozen_bytes
        run.step()
        assert manager.restore_latest(run.state) == 3
        assert run.has(values)
        run.spoil()
        with pytest.raises(SnapshotError):
            manager.restore_latest(run.state)
        assert run.is_spoilt()
        assert manager.restore_latest(run.state, options=RestoreOptions(base=tmp_path / "weights")) == 3
        assert run.has(values)


def test_a_folder_with_other_values_of_the_same_shapes_during_a_take_is_an_error(tmp_path):
    run = Adapted(tmp_path / "weights")

    class Replace(Log):
        async def before(self, operation):
            await super().before(operation)
            if operation.name == "finish":
                other = {name: value + 1 for name, value in run.pretrained.state_dict(prefix="encoder.").items()}
                write_folder(tmp_path / "weights", other)

    with tapped("other", Replace()), pytest.raises(SnapshotError, match="removed or replaced"):
        run.take(f"other+file://{tmp_path}/s", tmp_path / "weights")
    assert not (tmp_path / "s").exists()


def test_a_take_into_the_folder_that_it_is_based_on_writes_everything(tmp_path):
    run = Adapted(tmp_path / "weights")
    report = run.take(tmp_path / "weights", tmp_path / "weights").report
    assert report.omitted_bytes == 0
    assert "this take makes a snapshot of the folder" in report.notes[0]
    values = run.values()
    run.step()
    Snapshot(tmp_path / "weights").restore(run.state)
    assert run.has(values)


def test_a_restore_refuses_tensors_of_a_folder_that_have_no_digest(tmp_path):
    run = Adapted(tmp_path / "weights")
    run.take(tmp_path / "adapter", tmp_path / "weights")
    document = document_of(tmp_path / "adapter")
    del document["digest"]
    for entry in document["manifest"].values():
        if document["files"].get(entry.get("location"), {}).get("in_base"):
            entry.pop("digest")
            entry.pop("blocks", None)
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    (tmp_path / "adapter" / METADATA).write_bytes(data + b',"digest":"' + digest_bytes(data).encode() + b'"}')
    for parameter in run.pretrained.parameters():
        parameter.data.zero_()
    with pytest.raises(CorruptSnapshotError, match="must have digests of what is in"):
        Snapshot(tmp_path / "adapter").restore(run.state, options=RestoreOptions(base=tmp_path / "weights"))
    assert not any(parameter.any() for parameter in run.pretrained.parameters())
