"""Directories that Megatron-core 0.16.1 wrote, in `megatron_files.zip`, read without it. `write_megatron_files.py` made
the archive."""

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import snapshot
from snapshot import CorruptSnapshotError, Snapshot
from snapshot.errors import UnsupportedFormatError

ARCHIVE = Path(__file__).with_name("megatron_files.zip")
NAMES = ["buckets", "tied", "experts", "both"]
WRONG = {"buckets": 14, "tied": 15}
"""Directories whose `fully_reshardable` layout is wrong, and the number of main parameters that are."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    return folder


def _open(files, name, layout):
    return Snapshot(files / name / layout / "iter_0000003")


def _truth(files, name):
    """The state of the optimizer by the names of the checkpoint."""
    found = load_file(files / name / "truth.safetensors")
    return {f"optimizer.state.{key.replace('/', '.', 1)}": tensor for key, tensor in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_megatron_files_of_dp_reshardable_have_the_bits_of_the_optimizer(files, name):
    opened, truth = _open(files, name, "dp_reshardable"), _truth(files, name)
    paths = {path.removeprefix("0/") for path in opened.get_manifest()}
    steps = {path for path in paths if path.startswith("optimizer.state.step.")}
    assert {path for path in paths if path.startswith("optimizer.")} - steps == truth.keys()
    assert {path.replace("step", "param", 1) for path in steps} == {path for path in truth if ".state.param." in path}
    for path in steps:  # one for each layer and expert
        shape = truth[path.replace("step", "param", 1)].shape[: path.count(".layers.") + path.count(".experts.")]
        assert torch.equal(opened.read_object(path), torch.full(shape, 3.0))
    assert all(torch.equal(opened.read_object(path), tensor) for path, tensor in truth.items())
    report = opened.verify()
    assert report.ok
    assert report.unverifiable == 0
    groups = snapshot.load(opened.path, select=["optimizer/**"])
    assert groups == {}  # they have no tensors
    chain = "optimizer/0" if name == "experts" else "optimizer"
    assert opened.read_object(f"{chain}/optimizer/param_groups/0/step") == 3.0
    assert len(opened.read_object(f"{chain}/optimizer/param_groups")) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRONG])
def test_megatron_files_of_both_layouts_are_equal(files, name):
    opened, truth = _open(files, name, "fully_reshardable"), _truth(files, name)
    assert all(torch.equal(opened.read_object(path), tensor) for path, tensor in truth.items())
    assert opened.verify().ok
    found = Snapshot.diff(opened.path, _open(files, name, "dp_reshardable").path)
    kinds = ("content_metadata/distrib_optim_sharding_type", "param_state_sharding_type")
    assert [each.path for each in found.changes if not each.path.endswith(kinds)] == []


@pytest.mark.parametrize("name", WRONG)
def test_megatron_files_of_fully_reshardable_with_shifted_parameters_are_refused(files, name):
    opened, truth = _open(files, name, "fully_reshardable"), _truth(files, name)
    words = f"must not be used, since {WRONG[name]} of .* main parameters"
    for path in list(truth)[::10]:
        with pytest.raises(CorruptSnapshotError, match=words):
            opened.read_object(path)
    report = opened.verify()
    assert len(report.faults) == 1 + WRONG[name]
    mains = {path: tensor for path, tensor in truth.items() if path.startswith("optimizer.state.param.")}
    for path, tensor in mains.items():
        assert torch.equal(opened.read_object(path.removeprefix("optimizer.state.param.")), tensor.bfloat16())


def test_megatron_files_whose_metadata_lacks_parts_are_read_without_the_optimizer(files, tmp_path):
    shutil.copytree(files / "both" / "dp_reshardable" / "iter_0000003", tmp_path / "d")
    metadata = tmp_path / "d" / ".metadata"
    held = pickle.loads(metadata.read_bytes())
    bucket = next(name for name in held.state_dict_metadata if "bucket_idx" in name and name.endswith(".param"))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        entry = held.state_dict_metadata[bucket.removesuffix("param") + kind]
        entry.chunks = [each for each in entry.chunks if each.offsets[0] != 64]
    metadata.write_bytes(pickle.dumps(held))
    opened, truth = Snapshot(tmp_path / "d"), _truth(files, "both")
    path = "optimizer.state.param.output_layer.weight"
    with pytest.raises(UnsupportedFormatError, match="no part of param begins at 64, where decoder"):
        opened.read_object(path)
    assert torch.equal(opened.read_object("output_layer.weight"), truth[path].bfloat16())
