"""A writer process compresses what it writes."""

import os

import pytest
import torch

from snapshot import Snapshot, StateDict, StorageError, TakeOptions

MiB = 1 << 20


def state():
    generator = torch.Generator().manual_seed(3)
    weight = (torch.randn(3000, 1024, generator=generator) * 0.02).bfloat16()
    return {"s": StateDict(weight=weight, moment=torch.randn(1000, 1024, generator=generator), step=7)}


@pytest.mark.parametrize("budget", [None, 16 * MiB])
def test_worker_process_compression(tmp_path, budget):
    app = state()
    pending = Snapshot.async_take(
        tmp_path / "s",
        app,
        options=TakeOptions(worker="process", compression="zstd", memory_budget_bytes=budget, read_back=True),
    )
    snapshot = pending.wait()
    assert snapshot.metadata.format == "snapshot/2"
    assert snapshot.metadata.nbytes < 0.9 * sum(each.nbytes for each in app["s"].values() if hasattr(each, "nbytes"))
    live = {
        "s": StateDict(weight=torch.zeros(3000, 1024, dtype=torch.bfloat16), moment=torch.zeros(1000, 1024), step=0)
    }
    snapshot.restore(live)
    assert torch.equal(live["s"]["weight"], app["s"]["weight"])
    assert torch.equal(live["s"]["moment"], app["s"]["moment"])
    assert snapshot.verify()
    Snapshot.take(tmp_path / "here", app, options=TakeOptions(compression="zstd"))
    assert not Snapshot.diff(tmp_path / "s", tmp_path / "here")


def test_worker_process_compression_that_cannot_write_leaves_no_files(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "data").write_bytes(b"in the way")
    with pytest.raises(StorageError):
        Snapshot.async_take(tmp_path / "s", state(), options=TakeOptions(worker="process", compression="zstd")).wait()
    assert os.listdir(tmp_path / "s") == ["data"]
