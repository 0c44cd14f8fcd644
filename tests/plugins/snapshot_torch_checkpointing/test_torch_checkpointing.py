"""Checkpoints of torch_checkpointing, in `torch_checkpointing_files.zip`: equal to the model that was saved.

`write_torch_checkpointing_files.py` wrote them: two ranks saved a model with FSDP2 in the default layout, and in
one with safetensors, JSON and raw bytes.
"""

import itertools
import math
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from snapshot import CorruptSnapshotError, ModelState, Snapshot, SnapshotError
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.tensors.geometry import Copy, Split
from tests.formats.remote_copies import on_s3
from tests.plugins.snapshot_torch_checkpointing.torch_checkpointing_metadata import write_metadata
from tests.plugins.snapshot_torch_checkpointing.write_torch_checkpointing_files import make_model

ARCHIVE = Path(__file__).with_name("torch_checkpointing_files.zip")
LAYOUTS = ["torch", "layouts"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torch_checkpointing")
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    return folder


def _restore(path, kind):
    model = make_model()
    with torch.no_grad():
        for each in itertools.chain(model.parameters(), model.buffers()):
            each.fill_(9)
    if kind == "fsdp2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    Snapshot(path).restore({"train": ModelState(model, optimizer)}, unused="ignore")
    state = {name: _whole(each) for name, each in model.state_dict().items()}
    return state, [{key: _whole(each) for key, each in optimizer.state[p].items()} for p in model.parameters()]


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _expect_state(got, expected):
    state, moments = got
    assert all(torch.equal(state[name], each) for name, each in expected["model"].items())
    for mine, theirs in zip(moments, expected["moments"], strict=True):
        assert all(torch.equal(mine[key], each) for key, each in theirs.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_checkpointing_restores_in_one_process(files, layout):
    _expect_state(_restore(files / layout, "plain"), torch.load(files / "expected.pt"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_checkpointing_restores_on_any_world_size(files, two, three, layout):
    for pool in (two, three):
        for got in pool.run(_restore, str(files / layout), "fsdp2"):
            _expect_state(got, torch.load(files / "expected.pt"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_checkpointing_verify_read_load_and_convert(files, layout, tmp_path):
    snapshot, expected = Snapshot(files / layout), torch.load(files / "expected.pt")["model"]
    report = snapshot.verify()
    assert report
    assert bool(report.unverifiable) == (layout == "layouts")  # safetensors has no checksums
    assert snapshot.metadata.world_size == 2
    box = snapshot.read_object("0/model/0.weight", box=[slice(2, 4), slice(1, 5)])
    assert torch.equal(box, expected["0.weight"][2:4, 1:5])
    for target in ("x.safetensors", "x.pt", "again"):
        snapshot.convert(tmp_path / target, select=["model/**", "optim/**"])
        again = Snapshot(tmp_path / target)
        assert again.verify()
        path = next(each for each in again.get_manifest() if each.endswith("2.weight") and "state" not in each)
        assert torch.equal(again.read_object(path), expected["2.weight"])
    snapshot.copy(tmp_path / "copy")
    assert not Snapshot.diff(files / layout, tmp_path / "copy", values=True)


def test_torch_checkpointing_rank_specific_and_replicated_values(files):
    torch_files, layouts = Snapshot(files / "torch"), Snapshot(files / "layouts")
    assert [torch_files.read_object(f"{rank}/own/rng").tolist() for rank in range(2)] == [[0] * 3, [1] * 3]
    assert torch_files.read_object("own/epoch") == 2
    config = {"step": 3, "names": ["a", "b"], "rate": 0.5}
    assert [layouts.read_object(f"{rank}/config") for rank in range(2)] == [
        config | {"rank": rank} for rank in range(2)
    ]
    assert layouts.read_object("1/raw") == b"bytes"


def test_torch_checkpointing_in_a_bucket(files, moto):
    with on_s3(files / "torch", moto) as (_, url, options):
        snapshot = Snapshot(url, storage_options=options)
        weight = torch.load(files / "expected.pt")["model"]["0.weight"]
        assert torch.equal(snapshot.read_object("0/model/0.weight"), weight)


def test_torch_checkpointing_missing_file_is_named(files, tmp_path):
    shutil.copytree(files / "torch", tmp_path / "x")
    (tmp_path / "x" / "model_1.pt").unlink()
    with pytest.raises(SnapshotError, match=r"model_1\.pt"):
        Snapshot(tmp_path / "x").get_manifest()


# Metadata, as the package writes it.


@given(data=st.data())
def test_torch_checkpointing_local_parts_of_any_mesh_form_the_whole_tensor(tmp_path_factory, data):
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    tensors = {}
    for name in ("a", "b.c"):
        shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
        splits = st.builds(Split, st.integers(0, len(shape) - 1))
        placements = tuple(data.draw(st.one_of(st.builds(Copy), splits)) for _ in mesh_shape)
        tensors[name] = torch.arange(math.prod(shape)).view(shape), mesh_shape, placements
    folder = tmp_path_factory.mktemp("mesh")
    write_metadata(folder, tensors)
    found = Snapshot(folder).read_object("0/optim")["state"]
    assert all(torch.equal(found[name], whole) for name, (whole, *_) in tensors.items())


WHOLE = {"w": (torch.arange(12).view(4, 3), (2,), (Split(0),))}


def _change(metadata, item, path, value):
    *above, last = path
    held = metadata if path[0] in metadata else item
    for key in above:
        held = held[key]
    held[last] = value


GROUP = ("nested_path_to_metadata", '["state","w"]', 0)
DATA = (*GROUP, "sharding_metadata", "data")
LIES = {
    "world": (("world_size",), -1),
    "huge world": (("world_size",), 1 << 40),
    "shape": ((*DATA, "global_shape"), [5, 3]),
    "negative shape": ((*DATA, "global_shape"), [-4, 3]),
    "mesh": ((*DATA, "mesh_spec", "mesh_shape"), (1 << 40,)),
    "ranks of the mesh": ((*DATA, "mesh_spec", "mesh_data"), (5, 6)),
    "dimension": ((*DATA, "placements"), [{"type": "Shard", "dim": 9}]),
    "placements": ((*DATA, "placements"), []),
    "path": (("nested_path_to_metadata", "["), []),
    "layouts": (("rank_to_layout_info",), 3),
    "rank": (("rank_to_layout_info", 7), None),
    "file": (("rank_to_layout_info", 0, "file_path"), "../x"),
    "absolute file": (("rank_to_layout_info", 0, "file_path"), "/etc/passwd"),
}


@pytest.mark.parametrize("what", LIES)
def test_torch_checkpointing_inconsistent_metadata_is_refused(tmp_path, what):
    path, value = LIES[what]
    (tmp_path / "x").mkdir()
    write_metadata(tmp_path / "x", WHOLE, change=lambda metadata, item: _change(metadata, item, path, value))
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "x").get_manifest()


UNKNOWN = {
    "version": (("version",), "3.0", "the version must be 1.0 or 2.0, got '3.0'"),
    "file": (("rank_to_layout_info", 0, "serialization_format"), {"type": "Other"}, "unknown kind of file: 'Other'"),
    "placement": ((*DATA, "placements"), [{"type": "Partial"}], "unknown placement 'Partial'"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_torch_checkpointing_unknown_values_are_named(tmp_path, what):
    path, value, expected = UNKNOWN[what]
    write_metadata(tmp_path, WHOLE, change=lambda metadata, item: _change(metadata, item, path, value))
    with pytest.raises(UnsupportedFormatError, match=expected):
        Snapshot(tmp_path).get_manifest()


def test_torch_checkpointing_class_named_in_a_layout_is_not_imported(tmp_path):
    (tmp_path / "optim_0.json").write_text('{"a": [1, null, {"b": true}]}')
    kind = {"type": "JsonSerialization", "cls": "antigravity.X"}
    layout = {0: {"file_path": "optim_0.json", "serialization_format": kind}}
    item = {"nested_path_to_metadata": {}, "rank_to_layout_info": layout}
    metadata = {"metadata": {"optim": item}, "world_size": 1, "version": "1.0"}
    (tmp_path / "metadata.pkl").write_bytes(pickle.dumps(metadata))
    assert Snapshot(tmp_path).read_object("0/optim") == {"a": [1, None, {"b": True}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda item: item.pop("sharding_metadata"),
        lambda item: item.pop("ranks"),
        lambda item: item["sharding_metadata"]["data"].pop("placements"),
        lambda item: item["sharding_metadata"]["data"]["mesh_spec"].update(mesh_shape=(3,)),
        lambda item: item["sharding_metadata"]["data"].update(placements=[{"type": "Shard", "dim": 9}]),
    ],
)
def test_torch_checkpointing_damaged_shard_metadata_is_named(files, tmp_path, change):
    shutil.copytree(files / "torch", tmp_path / "c")
    where = tmp_path / "c/metadata.pkl"
    metadata = pickle.loads(where.read_bytes())
    change(next(iter(metadata["metadata"]["model"]["nested_path_to_metadata"].values()))[0])
    where.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptSnapshotError, match=r"metadata\.pkl"):
        Snapshot(tmp_path / "c").get_manifest()


@pytest.mark.parametrize(
    ("layout", "name", "read"), [("layouts", "raw_0.bin", "0/raw"), ("torch", "own_0.pt", "0/own")]
)
def test_torch_checkpointing_link_out_of_the_folder_is_not_followed(files, tmp_path, layout, name, read):
    shutil.copytree(files / layout, tmp_path / "c")
    (tmp_path / "c" / name).rename(tmp_path / name)
    (tmp_path / "c" / name).symlink_to(tmp_path / name)
    with pytest.raises(UnsafeObjectError, match="link out of the folder"):
        Snapshot(tmp_path / "c").read_object(read)


def test_rank_files_that_are_links_are_refused(tmp_path):
    (tmp_path / "c").mkdir()
    torch.save({"w": torch.arange(3)}, tmp_path / "elsewhere.pt")
    for rank in range(2):
        (tmp_path / f"c/rank{rank}.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(UnsafeObjectError, match="link out of the folder"):
        Snapshot(tmp_path / "c").get_manifest()
