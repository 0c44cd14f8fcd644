"""Live tensors as targets of a restore: which can be written in place, and how elements get there."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import RestoreError, Snapshot, StateDict
from snapshot.loading.live import is_writable
from snapshot.loading.read_requests import copy_into
from snapshot.testing import stalling

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)
STRIDES = st.lists(st.integers(0, 9), min_size=3, max_size=3)


@given(SIZES, STRIDES)
def test_is_writable_tensors_have_no_two_elements_in_one_place(sizes, strides):
    strides = strides[: len(sizes)]
    tensor = torch.zeros(100).as_strided(sizes, strides)
    places = {int(np.dot(index, strides)) for index in np.ndindex(*sizes)}
    if is_writable(tensor):
        assert len(places) == tensor.numel()


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 1:3], lambda t: t[:0]])
def test_is_writable_accepts_plain_views(make):
    assert is_writable(make(torch.zeros(6, 4)))


@pytest.mark.parametrize(
    "tensor", [torch.zeros(1, 3).expand(4, 3), torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta")]
)
def test_is_writable_refuses_expanded_sparse_and_meta_tensors(tensor):
    assert not is_writable(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.complex64])
def test_copy_into_is_exact_even_with_requires_grad(dtype):
    source = torch.arange(48, dtype=torch.uint8).view(dtype)
    target = torch.zeros(len(source), dtype=dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        target.requires_grad_()
    copy_into(target, source)
    assert torch.equal(target.detach().view(torch.uint8), source.view(torch.uint8))
    assert not target.grad_fn


@pytest.mark.parametrize("length", [1 << 10, 1 << 20])
def test_restore_raises_if_live_memory_is_replaced_during_it(length):
    """The bytes were read into the old memory, which must not be anything else's by then."""
    Snapshot.take("memory://replaced", {"s": StateDict(a=torch.ones(length), b=torch.ones(3))}, overwrite=True)
    live = StateDict(a=torch.zeros(length), b=torch.zeros(3))
    with stalling(on="read_into", path="*.safetensors") as stall, ThreadPoolExecutor(1) as pool:
        restored = pool.submit(Snapshot("stalling+memory://replaced").restore, {"s": live})
        stall.wait_reached()
        live["a"].data = torch.full((length,), 2.0)
        others = [torch.full((length,), 3.0) for _ in range(8)]
        stall.release()
        with pytest.raises(RestoreError, match="s/a: its memory was replaced during the restore"):
            restored.result(30)
    assert all(each.eq(3).all() for each in others)
    assert live["a"].eq(2).all()
