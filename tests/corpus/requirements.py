"""What a snapshot of the corpus needs to be read."""

import pytest

from tests.helpers.versions import VERSION


def skip_if_older(name):
    if name == "configs":
        pytest.importorskip("omegaconf")
    if name == "newer_dtypes" and VERSION < (2, 13):
        pytest.skip("this torch lacks a dtype of the snapshot")
