"""The kernel in Triton's interpreter; run by `test_device_digest.py`, in a process with TRITON_INTERPRET=1."""

import ctypes
import logging
import mmap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.tensors import device_digest, digest
from snapshot.tensors.device_digest import DeviceDigests, is_usable, scratch_bytes
from snapshot.tensors.digest import BLOCK, RunningDigest

CPU = torch.device("cpu")
DATA = np.random.default_rng(1).integers(0, 256, 2 * BLOCK, dtype=np.uint8)


def address_of(array):
    return array.__array_interface__["data"][0]


def on_device(arrays, scratch=None):
    lengths = [len(array) for array in arrays]
    if scratch is None:
        scratch = torch.empty(scratch_bytes(lengths), dtype=torch.uint8)
    digests = DeviceDigests([address_of(array) for array in arrays], lengths, scratch, CPU)
    digests.launch()
    return digests.finish()


def on_host(array):
    running = RunningDigest()
    running.update(memoryview(array))
    return running.finish()


def check(*arrays):
    found = on_device(arrays)
    wrong = [len(array) for array, pair in zip(arrays, found, strict=True) if pair != on_host(array)]
    assert wrong == []


def test_device_digest_kernel_every_residue_of_the_last_stripe():
    check(*[DATA[8 * n :][: 241 + n] for n in range(64)])


def test_device_digest_kernel_every_number_of_whole_stripes():
    check(*[DATA[: 1024 + 64 * stripes + more] for stripes in range(16) for more in (0, 1)])


def test_device_digest_kernel_every_number_of_groups():
    check(*[DATA[: 1024 * groups + more] for groups in range(1, 10) for more in (-1, 0, 1)])


def test_device_digest_kernel_short_ranges_at_any_address():
    check(*[DATA[n:][:n] for n in (0, 1, 3, 8, 9, 16, 17, 128, 129, 239, 240)])


def test_device_digest_kernel_words_of_all_ones_and_zeros():
    """Sums and products wrap around, and their highest bits are not signs."""
    check(np.full(5000, 255, np.uint8), np.zeros(5000, np.uint8), np.full(5000, 128, np.uint8))


def test_device_digest_kernel_lengths_around_a_block():
    check(DATA[: BLOCK - 1], DATA[8:][:BLOCK], DATA[: BLOCK + 241])


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 500)), max_size=4), st.integers(0, 40), st.data())
def test_device_digest_kernel_lists_of_ranges(ranges, offset, data):
    """Ranges of several blocks are cheap to interpret if blocks are small."""
    block = data.draw(st.sampled_from([256, 1024, 4096]))
    arrays = [DATA[8 * begin :][:length] for length, begin in ranges]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "BLOCK", block)
        patch.setattr(device_digest, "BLOCK", block)
        needed = scratch_bytes([len(array) for array in arrays])
        whole = torch.full((offset + needed + 64,), 7, dtype=torch.uint8)
        found = on_device(arrays, whole[offset : offset + needed])
        assert found == [on_host(array) for array in arrays]
    assert set(whole[:offset].tolist()) | set(whole[offset + needed :].tolist()) == {7}


def test_device_digest_kernel_reads_no_byte_outside_of_a_range():
    """A range may end where its mapping ends: the next page cannot be read."""
    page, size = mmap.PAGESIZE, 2 * mmap.PAGESIZE
    with mmap.mmap(-1, size + page) as memory:
        array = np.frombuffer(memory, np.uint8)
        begin = address_of(array)
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(page), 0) == 0
        array[:size] = DATA[:size]
        try:
            check(*[array[size - length : size] for length in (1, 239, 240, 248, 256, 1024, 1032, 2048, 4096, 5120)])
        finally:
            assert libc.mprotect(ctypes.c_void_p(begin + size), ctypes.c_size_t(page), 3) == 0
            del array


def test_device_digest_is_usable_in_the_triton_interpreter():
    assert is_usable(CPU)


def test_device_digest_is_usable_is_false_for_a_wrong_kernel(monkeypatch, caplog):
    """One warning says so, however often it is asked."""

    class Wrong:
        def __getitem__(self, grid):
            return lambda table, digests, copies, **options: digests.fill_(1)

    device_digest._verdicts.reset()
    monkeypatch.setattr(device_digest, "_load_kernel", Wrong)
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert [is_usable(CPU) for _ in range(3)] == [False] * 3
    assert [record.getMessage().partition(" must be ")[0] for record in caplog.records] == [
        "cpu cannot compute digests, so the host computes them: a digest"
    ]
    device_digest._verdicts.reset()
