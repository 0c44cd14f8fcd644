"""The arguments of a take are checked once, when they are given."""

import dataclasses
import json

import pytest

from snapshot.io.url import URL
from snapshot.save.take_request import TakeOptions, TakeRequest


@pytest.mark.parametrize(
    ("name", "wrong"), [("staging", "later"), ("worker", "fork"), ("when_busy", "drop"), ("read_back", 1.5)]
)
def test_take_options_error_names_the_invalid_argument_and_its_choices(name, wrong):
    with pytest.raises(ValueError, match=rf"{name} must be .*got {wrong!r}"):
        TakeOptions(**{name: wrong})


def test_take_options_are_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TakeOptions().durable = False


@pytest.mark.parametrize(("given", "share"), [(True, 1.0), (False, 0.0), (0.25, 0.25)])
def test_take_options_read_back_is_a_share(given, share):
    assert TakeOptions(read_back=given).read_back_share == share


@pytest.mark.parametrize("metadata", [[], ["a"], [("step", 3)], "ab", 3, ()])
def test_take_metadata_must_be_a_mapping(metadata):
    with pytest.raises(TypeError, match=f"metadata must be a mapping, got {type(metadata).__name__}"):
        TakeRequest(metadata=metadata)


def test_take_metadata_is_encoded_at_once_or_refused():
    assert json.loads(bytes(TakeRequest(metadata={"step": 3}).metadata_json)) == {"step": 3}
    with pytest.raises((TypeError, ValueError)):
        TakeRequest(metadata={"model": object()})


def test_take_options_base_is_a_path_or_a_snapshot():
    with pytest.raises(TypeError, match=r"base must be .* got URL"):
        TakeOptions(base=URL.parse("memory://base"))
