"""Weights that are copied when a framework writes them, and written later."""

import threading

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file

from snapshot import SnapshotError
from snapshot_trainers.staged_weights import StagedWeights

ORIGINAL = safetensors.torch.save_file


def save(tensors, path):
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def test_staged_weights_write_the_values_of_the_capture(tmp_path):
    weights = StagedWeights()
    live = {"w": torch.zeros(3, requires_grad=True), "half": torch.zeros(2, 2, dtype=torch.bfloat16)}
    for step in range(3):
        with weights.capture():
            save(live, tmp_path / str(step))
        assert not (tmp_path / str(step)).exists()
        with torch.no_grad():
            for each in live.values():
                each.add_(1)
        weights.write()
        read = load_file(tmp_path / str(step))
        assert {name: (each.dtype, each.unique().tolist()) for name, each in read.items()} == {
            "w": (torch.float32, [step]),
            "half": (torch.bfloat16, [step]),
        }
    assert safetensors.torch.save_file is ORIGINAL
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


def test_staged_weights_reuse_memory_by_shape_and_dtype(tmp_path):
    weights = StagedWeights()

    def stage(*tensors):
        with weights.capture():
            for number, each in enumerate(tensors):
                save({"w": each}, tmp_path / str(number))
        held = {number: memory.data_ptr() for (number, _), memory in weights._memory.items()}
        weights.write()
        for number, each in enumerate(tensors):
            assert load_file(tmp_path / str(number))["w"].equal(each)
        return held

    first = stage(torch.ones(5), torch.full((5,), 2.0))  # of one name, in two files
    assert stage(torch.full((5,), 3.0), torch.full((5,), 4.0)) == first
    stage(torch.ones(5, dtype=torch.int32), torch.ones(2, 3))


def test_staged_weights_captured_before_an_error_are_dropped(tmp_path):
    weights = StagedWeights()

    def fail():
        with weights.capture():
            save({"w": torch.ones(1)}, tmp_path / "first")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        fail()
    assert safetensors.torch.save_file is ORIGINAL
    with weights.capture():
        save({"w": torch.ones(1)}, tmp_path / "second")
    weights.write()
    assert [path.name for path in tmp_path.iterdir()] == ["second"]


def test_staged_weights_capture_in_one_thread_at_a_time(tmp_path):
    def capture(name, value):
        weights = StagedWeights()
        for _ in range(50):
            with weights.capture():
                save({"w": torch.full((4,), value)}, tmp_path / name)
            weights.write()

    def write():
        for _ in range(50):
            save({"w": torch.full((4,), 9.0)}, tmp_path / "plain")
            assert (tmp_path / "plain").exists()
            (tmp_path / "plain").unlink()
        done.append(True)

    done = []
    threads = [threading.Thread(target=capture, args=(str(value), float(value))) for value in range(3)]
    threads.append(threading.Thread(target=write))
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert done == [True]
    assert safetensors.torch.save_file is ORIGINAL
    for value in range(3):
        assert load_file(tmp_path / str(value))["w"].eq(value).all()


def test_staged_weights_name_a_file_that_cannot_be_written(tmp_path):
    weights = StagedWeights()
    with weights.capture():
        save({"w": torch.ones(1)}, tmp_path / "folder" / "model.safetensors")
    with pytest.raises(SnapshotError, match=r"folder/model.safetensors: the weights were not written: \w+"):
        weights.write()
