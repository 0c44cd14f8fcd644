"""Live tensors as targets of a restore: which can be written in place, and how elements get there."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import RestoreError, Snapshot, StateDict
from snapshot.loading import read_plan
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


ODD = {
    "equal": torch.clone,
    "trained": lambda t: t.clone().requires_grad_(),
    "attribute": lambda t: setattr(made := t.clone(), "note", 1) or made,
    "strided": lambda t: torch.zeros(2, len(t)).t()[:, 0],
    "negative": lambda t: torch.complex(t, t).conj().imag,
    "other dtype": lambda t: t.double(),
    "other shape": lambda t: torch.zeros(len(t) + 1),
    "sparse": lambda t: t.to_sparse(),
    "no tensor": lambda t: 5,
}


@given(
    st.lists(st.sampled_from(sorted(ODD)), min_size=1, max_size=12),
    st.lists(st.integers(0, 11), max_size=3),
)
def test_restore_fills_equal_live_tensors_in_place_and_replaces_or_copies_to_others(kinds, tied):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_plan, "_AT_ONCE", 4)
        saved = {f"k{number}": torch.arange(1.0, 4.0) + number for number in range(len(kinds))}
        for number in tied:
            saved[f"tied{number}"] = saved[f"k{number % len(kinds)}"]
        Snapshot.take("memory://equal", {"s": StateDict(saved)}, overwrite=True)
        live = {
            name: ODD[kind](torch.zeros(3)) for name, kind in zip(saved, kinds + ["equal"] * len(tied), strict=False)
        }
        target = StateDict(live)
        Snapshot("memory://equal").restore({"s": target})
    for (name, value), kind in zip(saved.items(), kinds + ["equal"] * len(tied), strict=False):
        assert torch.equal(target[name].detach(), value)
        assert target[name].dtype == value.dtype
        if kind in ("equal", "trained", "attribute", "strided"):
            assert target[name] is live[name]


@pytest.mark.parametrize("count", [3, 600])
def test_restore_refuses_a_shrunk_tensor_among_many(count):
    saved = {f"k{number}": torch.ones(4) for number in range(count)}
    Snapshot.take("memory://shrunk", {"s": torch.nn.ParameterDict(saved)}, overwrite=True)
    live = torch.nn.ParameterDict({name: torch.zeros(4) for name in saved})
    live["k1"].untyped_storage().resize_(8)
    with pytest.raises(RestoreError, match="k1"):
        Snapshot("memory://shrunk").restore({"s": live})
    assert not live["k0"].any()
