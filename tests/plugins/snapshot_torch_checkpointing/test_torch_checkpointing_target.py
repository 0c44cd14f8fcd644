"""Folders of torch_checkpointing as a target: read by this library, and by the package's own manager."""

import io
import os
import pickle
import zipfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from snapshot import ModelState, Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.cli import main
from snapshot.errors import UnsupportedFormatError
from tests.helpers.states import expect_equal

TO = "torch_checkpointing"


def make(seed=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps, seed=7):
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(4, 6, generator=source)).square().mean().backward()
        optimizer.step()


def state_of(model, optimizer):
    def whole(value):
        return value.full_tensor() if hasattr(value, "full_tensor") else value

    found = {name: whole(each).clone() for name, each in model.state_dict().items()}
    moments = [
        {key: whole(each).clone() for key, each in optimizer.state[parameter].items()}
        for parameter in model.parameters()
    ]
    return found, moments


def expect_equal_in_any_order(got, expected):
    expect_equal(list(got), list(expected))


@pytest.fixture
def written(tmp_path):
    """A conversion of a trained model, and its state."""
    model, optimizer = make()
    train(model, optimizer, 3)
    more = StateDict(
        step=3, names=["a", ("b", 2.5)], channels=torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    )
    Snapshot.take(tmp_path / "taken", {"more": more, "train": ModelState(model, optimizer)})
    report = Snapshot(tmp_path / "taken").convert(Target(tmp_path / "out", TO))
    assert set(report.files) == {"more_0.pt", "train_0.pt", "metadata.pkl"}
    assert not report.left_out
    return tmp_path / "out", state_of(model, optimizer), dict(more)


class OnlyPlain(pickle.Unpickler):
    def find_class(self, module, name):
        raise AssertionError(f"{module}.{name} in the metadata")


def test_convert_to_torch_checkpointing_has_plain_metadata_and_is_read_back(written, tmp_path):
    folder, state, more = written
    metadata = OnlyPlain(io.BytesIO((folder / "metadata.pkl").read_bytes())).load()
    assert metadata["world_size"] == 1
    assert metadata["metadata"].keys() == {"more", "train"}
    assert '["model","0.weight"]' in metadata["metadata"]["train"]["nested_path_to_metadata"]
    snapshot = Snapshot(folder)
    assert snapshot.verify()
    expect_equal(snapshot.read_object("0/more"), more)
    model, optimizer = make(5)
    snapshot.restore({"train": ModelState(model, optimizer)}, select=["train/**"])
    expect_equal_in_any_order(state_of(model, optimizer), state)
    assert not Snapshot.diff(folder, tmp_path / "taken", values=True, exclude=["**/channels"])


def _restore(folder):
    model, _ = make(5)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    Snapshot(folder).restore({"train": ModelState(model, optimizer)}, select=["train/**"])
    return state_of(model, optimizer)


def test_convert_to_torch_checkpointing_restores_on_other_world_sizes(written, two, three):
    for pool in (two, three):
        for got in pool.run(_restore, str(written[0])):
            expect_equal_in_any_order(got, written[1])


def _manager(*items):
    from torch_checkpointing.checkpoint_manager import CheckpointManager
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.schema import ItemSpec
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {name: ItemSpec(resharder=DefaultResharder()) for name in items}
    return config.build()


@pytest.mark.libraries
def test_convert_to_torch_checkpointing_is_loaded_by_its_manager(written):
    pytest.importorskip("torch_checkpointing")
    folder, (weights, _), more = written
    model, _ = make(5)
    got = _manager("train").load(folder, into={"train": {"model": model.state_dict()}, "more": None})
    expect_equal(dict(got["train"]["model"]), weights)
    expect_equal(dict(model.state_dict()), weights)
    expect_equal(got["more"], more)


def _load_onto_ranks(folder):
    model, _ = make(5)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1)  # its moments are there, and are replaced
    held = ModelState(model, optimizer)
    held.load_state_dict(_manager("train").load(folder, into={"train": held.state_dict()})["train"])
    return state_of(model, optimizer)


@pytest.mark.libraries
def test_convert_to_torch_checkpointing_is_loaded_by_its_manager_on_ranks(written, two, three):
    pytest.importorskip("torch_checkpointing")
    for pool in (two, three):
        for got in pool.run(_load_onto_ranks, str(written[0])):
            expect_equal_in_any_order(got, written[1])


def test_convert_to_torch_checkpointing_overwrite_replaces_an_older_conversion(written, tmp_path):
    folder = written[0]
    (folder / "notes.txt").write_text("mine")
    Snapshot.take(tmp_path / "other", {"only": StateDict(x=torch.ones(3))})
    with pytest.raises(SnapshotExistsError, match=r"metadata\.pkl"):
        Snapshot(tmp_path / "other").convert(Target(folder, TO))
    assert Snapshot(folder).verify()
    Snapshot(tmp_path / "other").convert(Target(folder, TO, overwrite=True))
    assert sorted(os.listdir(folder)) == ["metadata.pkl", "notes.txt", "only_0.pt"]
    assert list(Snapshot(folder).read_object("0")) == ["only"]
    with pytest.raises(SnapshotExistsError, match="another format"):
        Snapshot(tmp_path / "other").convert(Target(tmp_path / "taken", TO))


@pytest.mark.parametrize("key", ["a b", "a.b", "é", "a/b"])
def test_convert_to_torch_checkpointing_refuses_invalid_keys(tmp_path, key):
    Snapshot.take(tmp_path / "s", {key: StateDict(x=torch.ones(3)), "good": StateDict(y=torch.ones(2))})
    with pytest.raises(UnsupportedFormatError, match="letters, digits"):
        Snapshot(tmp_path / "s").convert(Target(tmp_path / "out", TO))
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "out", TO), select=["good/**"])
    assert zipfile.ZipFile(tmp_path / "out" / "good_0.pt").testzip() is None


def test_convert_to_torch_checkpointing_of_a_bare_tensor(tmp_path):
    torch.save(torch.arange(5), tmp_path / "x.pt")
    Snapshot(tmp_path / "x.pt").convert(Target(tmp_path / "out", TO))
    assert Snapshot(tmp_path / "out").read_object("0/value").tolist() == [0, 1, 2, 3, 4]


def test_cli_convert_to_torch_checkpointing(written, tmp_path, capsys):
    arguments = ["convert", str(tmp_path / "taken"), str(tmp_path / "again"), "--to", TO, "--dtype", "float64"]
    assert main(arguments) == 0
    assert Snapshot(tmp_path / "again").read_object("0/train/model/0.weight").dtype == torch.float64
