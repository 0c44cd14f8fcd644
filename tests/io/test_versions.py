"""Behaviour that depends on the version of torch."""

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.io.accelerators import current_device_index


def test_take_works_if_torch_raises_without_an_accelerator(monkeypatch):
    def raises():
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", raises)  # as torch 2.6 does
    saved = Snapshot.take("memory://no-accelerator", {"s": StateDict(x=torch.arange(3.0))})
    assert saved.read_object("0/s/x").tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("name", ["current_device_idx", "current_device_index"])  # before torch 2.7, and after
def test_current_device_index_supports_both_torch_names(monkeypatch, name):
    for each in ("current_device_idx", "current_device_index"):
        monkeypatch.delattr(torch.accelerator, each, raising=False)
    monkeypatch.setattr(torch.accelerator, name, lambda: 3, raising=False)
    assert current_device_index() == 3
