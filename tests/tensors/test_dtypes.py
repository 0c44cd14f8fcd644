"""Sizes of dtypes, which are known without torch."""

import pytest
import torch

from snapshot.tensors.dtypes import SIZES, find_itemsize
from snapshot.tensors.memory import ITEMSIZE


def test_sizes_of_dtypes_are_those_of_torch():
    assert {name: SIZES.get(name) for name in ITEMSIZE} == ITEMSIZE


@pytest.mark.parametrize("name", ["float128", "qint8", "", "__doc__"])
def test_sizes_of_other_names_are_unknown(name):
    assert find_itemsize(name) is None
    assert name not in SIZES


def test_itemsize_is_that_of_the_torch_that_is_here():
    assert find_itemsize("bfloat16") == torch.bfloat16.itemsize
