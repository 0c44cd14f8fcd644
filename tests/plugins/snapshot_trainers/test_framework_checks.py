"""The check of a framework's functions, and the geometry and the folder of weights for engines."""

import itertools
import math
import os
import sys
import tomllib
import types
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    Snapshot,
    SnapshotError,
    SnapshotNotFoundError,
)
from snapshot.interop.framework_checks import expect_parameters
from snapshot.interop.handover import TrainableState
from snapshot.interop.objects import build_objects
from snapshot.saved import SavedObject
from snapshot_publish import Publisher, weight_sync
from snapshot_publish.weight_sync import Shares, WeightReader, box_of
from snapshot_trainers import automodel, torchtune


class Engine:
    def save(self, path, step, *, extra=None): ...

    @classmethod
    def build(cls, count): ...

    def run(self, *arguments, **options): ...


def test_expect_parameters_accepts_the_known_parameters():
    expect_parameters(Engine, {"save": ("path", "step"), "build": ("count",), "run": ()}, "engine 1")
    expect_parameters(types.SimpleNamespace(run=lambda path: None, __name__="engine"), {"run": ("path",)}, "engine 1")


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"load": ()}, r"Engine\.load must have the parameters \(\), got no such function"),
        ({"save": ("path",)}, r"Engine\.save must have the parameters \(path\), got \(path, step, extra\)"),
        ({"save": ("path", "number")}, r"Engine\.save must have the parameters \(path, number\), got"),
        (
            {"build": ()},
            r"Engine\.build must have the parameters \(\), got \(count\); this version is not known, use e 1",
        ),
    ],
)
def test_expect_parameters_refuses_other_functions(methods, message):
    with pytest.raises(SnapshotError, match=message):
        expect_parameters(Engine, methods, "e 1")


def test_framework_without_the_replaced_classes_is_refused(monkeypatch):
    with pytest.raises(SnapshotError, match=r"Engine of this version of nemo_automodel has no method _do_save"):
        automodel.use_snapshots(Engine)
    for name in ("torchtune", "torchtune.training", "torchtune.training.checkpointing"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    moved = types.ModuleType("torchtune.training.checkpointing._checkpointer")
    monkeypatch.setattr(sys.modules["torchtune.training.checkpointing"], "_checkpointer", moved, raising=False)
    with pytest.raises(SnapshotError, match=r"_checkpointer has no FileSystemWriter, .* use torchtune 0\.6"):
        torchtune.use_snapshots()


@pytest.mark.parametrize("name", [["save"], {"a": 1}, None, "other"])
def test_build_objects_refuses_an_unknown_enum_member(name):
    saved = SavedObject("Enum", "Stage", {"name": name})
    with pytest.raises(CorruptSnapshotError, match=r"file/x: .* is not an object of a class that is known here"):
        build_objects({"x": saved}, "file", lambda _: Enum("Stage", ["save"]))


def make_adapter(*trained):
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("base", "one", "two")})
    for name, layer in model.items():
        layer.requires_grad_(name in trained)
    return TrainableState(model)


def test_trainable_state_parameter_missing_in_the_snapshot_is_an_error(tmp_path):
    saved, same = make_adapter("one"), make_adapter("one")
    Snapshot.take(tmp_path, {"model": saved})
    Snapshot(tmp_path).restore({"model": same})
    assert [*saved.state_dict()] == ["one.weight", "one.bias"]
    assert torch.equal(saved.state_dict()["one.weight"], same.state_dict()["one.weight"])
    for other in (("one", "two"), ("base", "one")):
        with pytest.raises(RestoreError, match=r"the snapshot has no (two|base)\.weight, .*, which the model trains"):
            Snapshot(tmp_path).restore({"model": make_adapter(*other)}, unused="ignore")


@given(st.data())
def test_framework_boxes_are_those_of_torch_chunk(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    mesh = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = tuple(data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh)
    world = math.prod(mesh)
    owners = tuple(data.draw(st.permutations(range(world))))
    whole = torch.arange(math.prod(shape)).view(shape)
    seen = np.zeros(shape, dtype=int)
    for rank, place in zip(owners, itertools.product(*map(range, mesh)), strict=True):
        piece, copy = whole, False
        for at, count, dim in zip(place, mesh, dims, strict=True):
            if dim is None:
                copy = copy or at > 0
            else:
                pieces = piece.chunk(count, dim)
                piece = pieces[at] if at < len(pieces) else piece.narrow(dim, 0, 0)
        box = box_of(rank, shape, owners, mesh, dims)
        if copy or not piece.numel():
            assert box is None
        else:
            assert whole[box.slices()].equal(piece)
            seen[box.slices()] += 1
    assert (seen == 1).all()
    assert box_of(world, shape, owners, mesh, dims) is None


@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 5))
def test_framework_shares_are_balanced(sizes, world):
    shares, loads = Shares(world), [0] * world
    for size in sizes:
        loads[shares.choose(size)] += size
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert Shares(4).choose(1, (2, 3)) == 2


def test_weight_reader_memory_folder_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_sync, "MEMORY", str(tmp_path))
    WeightReader("memory://weights/one").close()
    assert [*tmp_path.iterdir()] == []
    reader = WeightReader("memory://weights/one")
    (folder,) = tmp_path.iterdir()
    reader.close()
    folder.mkdir(mode=0o755)
    os.chmod(folder, 0o755)
    with pytest.raises(SnapshotError, match="only this user"):
        WeightReader("memory://weights/one")
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotError, match="only this user"):
        WeightReader("memory://weights/one")


def test_weight_reader_tensors_outlive_their_version(tmp_path):
    publisher = Publisher(tmp_path / "store", full_every=1)
    reader = WeightReader(str(tmp_path / "store"), str(tmp_path / "local"))
    with pytest.raises(SnapshotNotFoundError, match="no version was pulled yet"):
        reader.current()
    for step in range(2):
        publisher.publish(step, {"a": torch.full((1000,), float(step)), "b": torch.zeros(0, 3)}).wait()
    tensors = reader.open(reader.pull(1))
    reader.pull(2)
    assert not (tmp_path / "local" / "weight_v000001").exists()
    found = dict(tensors)
    assert found["a"].eq(0).all()
    assert found["b"].shape == (0, 3)


def test_vllm_plugin_is_registered_as_an_entry_point():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["snapshot"].partition(":")
    register = getattr(__import__(module, fromlist=[function]), function)
    register()  # without vLLM, it does nothing
