"""The tests of the plugin, which is installed."""

import numpy as np
import pytest
import torch

import snapshot
from snapshot import CorruptSnapshotError, Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.errors import UnsupportedFormatError


def test_arrays_that_numpy_wrote_are_read(tmp_path):
    arrays = {"weight": np.arange(6.0).reshape(2, 3), "bias": np.array([1, 2], "int32"), "empty": np.empty((0, 3))}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    loaded = snapshot.load(tmp_path)
    assert loaded.keys() == arrays.keys()
    assert all(np.array_equal(loaded[name].numpy(), array) for name, array in arrays.items())
    assert snapshot.load(tmp_path / "bias.npy")["bias"].tolist() == [1, 2]


def test_written_arrays_are_those_that_numpy_reads(tmp_path):
    state = {"model": StateDict({"a/b: c%": torch.randn(3, 4), "c": torch.tensor(2.5), "empty": torch.zeros(0)})}
    taken = Snapshot.take(tmp_path / "s", state)
    for _ in range(2):  # the second one replaces the first
        taken.convert(Target(tmp_path / "arrays", "npy", overwrite=True))
    assert torch.equal(torch.from_numpy(np.load(tmp_path / "arrays/a%2Fb%3A%20c%25.npy")), state["model"]["a/b: c%"])
    assert np.load(tmp_path / "arrays/c.npy") == 2.5
    assert not Snapshot.diff(taken, tmp_path / "arrays", rename={"model/*": "*"})


@pytest.mark.parametrize(
    ("array", "error"),
    [(np.asfortranarray(np.ones((2, 3))), UnsupportedFormatError), (np.ones(2, ">f4"), UnsupportedFormatError)],
)
def test_arrays_of_other_layouts_are_refused(tmp_path, array, error):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(error, match="must be in C order"):
        Snapshot(tmp_path).get_manifest()


def test_a_cut_array_is_corrupt(tmp_path):
    np.save(tmp_path / "x.npy", np.ones(100))
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(500)
    with pytest.raises(CorruptSnapshotError, match="must have 928 bytes, got 500"):
        Snapshot(tmp_path).get_manifest()


def test_a_dtype_that_numpy_lacks_is_refused(tmp_path):
    taken = Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.zeros(2, dtype=torch.bfloat16))})
    with pytest.raises(UnsupportedFormatError, match=r"npy does not support these dtypes.*\n.*bfloat16"):
        taken.convert(Target(tmp_path / "arrays", "npy"))
    assert not (tmp_path / "arrays").exists()


def test_a_checkpoint_that_would_hide_the_arrays_is_not_written_over(tmp_path):
    taken = Snapshot.take(tmp_path / "s", {"model": StateDict(w=torch.ones(2))})
    Snapshot.take(tmp_path / "arrays", {"model": StateDict(w=torch.zeros(2))})
    with pytest.raises(SnapshotExistsError, match="belongs to a checkpoint of another format"):
        taken.convert(Target(tmp_path / "arrays", "npy", overwrite=True))
