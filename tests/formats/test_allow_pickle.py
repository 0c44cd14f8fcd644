"""Objects in files of torch.save that only running a pickle makes: refused with advice, or made where allowed."""

import collections

import pytest
import torch
from torch import nn

from snapshot import RestoreError, Snapshot, SnapshotManager, StateDict
from snapshot.errors import UnsafeObjectError

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


class Config:
    """Any class of somebody's."""

    def __init__(self, width=3):
        self.width = width
        self.weight = torch.arange(float(width))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 2)


@pytest.fixture
def saved(tmp_path):
    state = {
        "model": {"w": torch.arange(6.0)},
        "config": Config(),
        "list": [1, (2, Config(5))],
        1: {"1": Config(4), 1: Config(6)},
        "a/b": Config(7),
        "quantised": torch.quantize_per_tensor(torch.rand(4), 0.1, 3, torch.qint8),
        "default": collections.defaultdict(Config, x=Config(8)),
        "twice": [Config(9)] * 2,
    }
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def test_unsafe_object_error_names_the_class_and_allow_pickle(saved):
    assert Snapshot(saved).read_object("0/model/w").equal(torch.arange(6.0))
    for path in ("0", "0/config", "0/list"):
        with pytest.raises(UnsafeObjectError, match=r"Config.*Snapshot\(path, allow_pickle=True\)"):
            Snapshot(saved).read_object(path)
    with pytest.raises(UnsafeObjectError, match="allow_pickle=True"):
        Snapshot(saved).restore({"all": StateDict()})
    with pytest.raises(UnsafeObjectError, match="allow_pickle=True"):
        Snapshot(saved).convert(saved.with_name("s"))


def test_allow_pickle_creates_all_objects_of_a_torch_file(saved):
    snapshot = Snapshot(saved, allow_pickle=True)
    found = snapshot.read_object("0")
    assert found["config"].width == 3
    assert found["config"].weight.equal(torch.arange(3.0))
    assert found["list"][1][1].width == 5
    assert [each.width for each in found[1].values()] == [4, 6]
    assert found["a/b"].width == 7
    assert found["quantised"].is_quantized
    assert found["default"].default_factory is Config
    assert found["default"]["x"].width == 8
    assert found["twice"][0] is found["twice"][1]
    assert found["model"]["w"].equal(torch.arange(6.0))
    assert snapshot.read_object("0/list/1/1").width == 5
    assert snapshot.get_manifest().keys() == Snapshot(saved).get_manifest().keys()
    assert snapshot.verify()
    live = StateDict(model={"w": torch.zeros(6)})
    w = live["model"]["w"]
    snapshot.restore({"all": live}, strict=False)
    assert live["config"].width == 3
    assert live["model"]["w"] is w
    assert w.equal(torch.arange(6.0))


def test_allow_pickle_lets_convert_store_objects(saved, tmp_path):
    with pytest.raises(UnsafeObjectError):
        Snapshot(saved).convert(tmp_path / "s")
    Snapshot(saved, allow_pickle=True).convert(tmp_path / "s", exclude=["default", "twice"])
    with pytest.raises(UnsafeObjectError, match=r"SnapshotManager\(root, allow_pickle=True\)"):
        Snapshot(tmp_path / "s").read_object("0/config")
    assert Snapshot(tmp_path / "s", allow_pickle=True).read_object("0/list")[1][1].width == 5


def test_unsafe_object_error_names_a_pickled_module(tmp_path):
    model = Model()
    torch.save(model, tmp_path / "m.pt")
    torch.save({"model": model, "epoch": 3}, tmp_path / "n.pt")
    for name, key in (("m.pt", "0/value"), ("n.pt", "0/model")):
        with pytest.raises(UnsafeObjectError, match=r"pickled module .*Model.*model\.state_dict\(\)"):
            Snapshot(tmp_path / name).read_object(key)
        found = Snapshot(tmp_path / name, allow_pickle=True).read_object(key)
        assert found.body.weight.equal(model.body.weight)
    for name in ("m.pt", "n.pt"):
        for verb in (
            lambda snapshot: snapshot.restore({"model": Model()}),
            lambda snapshot: snapshot.convert(tmp_path / "out"),
        ):
            with pytest.raises(UnsafeObjectError, match=r"pickled module .*Model"):
                verb(Snapshot(tmp_path / name))
    with pytest.raises(RestoreError, match=r"read_object\('0/value'\)\.state_dict\(\)"):
        Snapshot(tmp_path / "m.pt", allow_pickle=True).restore({"model": Model()})


def test_allow_pickle_of_snapshot_manager_is_passed_on(tmp_path):
    with pytest.warns(UserWarning, match="pickle"):
        SnapshotManager(tmp_path, signals=()).take(1, {"s": StateDict(config=Config(4))})
    with pytest.raises(UnsafeObjectError, match=r"SnapshotManager\(root, allow_pickle=True\)"):
        SnapshotManager(tmp_path, signals=()).restore_latest({"s": StateDict(config=None)})
    live = StateDict(config=None)
    manager = SnapshotManager(tmp_path, signals=(), allow_pickle=True)
    assert manager.restore_latest({"s": live}) == 1
    assert live["config"].width == 4
    assert manager.snapshot(1).read_object("0/s/config").width == 4
