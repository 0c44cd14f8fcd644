"""The numbers of a diff, against NumPy and Python's own integers."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot.transform.diff_bytes import Numbers, NumbersState, are_comparable, common_dtype

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def raw(array):
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)


@given(st.sampled_from(INTEGERS), st.data())
def test_diff_numbers_subtract_integers_without_wrapping(dtype, data):
    info = np.iinfo(dtype)
    values = st.lists(st.integers(int(info.min), int(info.max)), min_size=4, max_size=4)
    a, b = data.draw(values), data.draw(values)
    numbers = Numbers(dtype)
    numbers.update(raw(np.array(a, dtype)), raw(np.array(b, dtype)))
    found = numbers.values()
    assert found.elements == 4
    assert found.differing == sum(x != y for x, y in zip(a, b, strict=True))
    assert found.largest == max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_diff_numbers_of_pieces_add_up():
    a, b = (np.random.default_rng(seed).standard_normal(1000).astype("float32") for seed in (1, 2))
    whole, parts = Numbers("float32"), Numbers("float32")
    whole.update(raw(a), raw(b))
    for begin in range(0, 1000, 300):
        parts.update(raw(a[begin : begin + 300]), raw(b[begin : begin + 300]))
    assert parts.values().differing == whole.values().differing
    assert math.isclose(parts.values().norm, whole.values().norm)
    assert math.isclose(whole.values().norm, float(np.linalg.norm(a.astype(float) - b.astype(float))))


def test_diff_numbers_treat_two_nans_as_equal():
    a, b = np.array([np.nan, np.nan, 1.0]), np.array([np.nan, 2.0, 1.0])
    numbers = Numbers("float64")
    numbers.update(raw(a), raw(b))
    assert (numbers.values().differing, numbers.values().not_numbers) == (1, 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("float16", "float16", "float16"),
        ("int8", "uint64", "int64"),
        ("uint8", "bool", "uint64"),
        ("int8", "float32", "float64"),
        ("complex64", "float32", "complex128"),
    ],
)
def test_diff_common_dtype_holds_both(a, b, expected):
    assert common_dtype(a, b) == common_dtype(b, a) == expected


def test_diff_are_comparable_excludes_quantised_dtypes():
    assert are_comparable("bfloat16")
    assert not are_comparable("quint8")


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_diff_numbers_updated_by_several_threads_all_count(dtype):
    a, b = np.full(64, 1, dtype), np.full(64, 3, dtype)
    numbers, times, threads = Numbers(dtype), 50, 8
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(numbers.update, raw(a), raw(b)) for _ in range(times * threads)]:
                each.result()
    finally:
        sys.setswitchinterval(before)
    found, count = numbers.values(), 64 * times * threads
    assert (found.elements, found.differing, found.largest) == (count, count, 2)
    assert found.norm == pytest.approx(2 * math.sqrt(count))
    assert found.relative == pytest.approx(2.0)


def test_diff_numbers_of_another_rank_are_merged():
    for dtype, a, b in (("uint64", [0, 2**64 - 1], [2**64 - 1, 0]), ("float64", [0.0, 1.0], [math.inf, 1.5])):
        numbers, other = Numbers(dtype), Numbers(dtype)
        numbers.update(raw(np.array(a, dtype)), raw(np.array(b, dtype)))
        other.state = msgspec.msgpack.decode(msgspec.msgpack.encode(numbers.state), type=NumbersState)
        assert other.values() == numbers.values()
