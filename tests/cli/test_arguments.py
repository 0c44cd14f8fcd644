"""Options of storages, sizes and durations as a shell gives them."""

import argparse
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.cli.arguments import add_storage, assignment, count, duration, options_of, size


def parsed(*argv, prefixes=()):
    parser = argparse.ArgumentParser()
    add_storage(parser, *prefixes)
    return parser.parse_args(argv)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.delenv("SNAPSHOT_STORAGE_OPTIONS", raising=False)


def test_storage_options_from_environment_file_and_arguments_override_in_that_order(tmp_path, monkeypatch):
    file = tmp_path / "options.yaml"
    file.write_text("region: eu\nclient:\n  retries: 3\n  proxy: null\n")
    monkeypatch.setenv("SNAPSHOT_STORAGE_OPTIONS", '{"region": "us", "token": "t", "client": {"trace": true}}')
    found = options_of(parsed("--options", str(file), "-o", "client.retries=5", "-o", "name=x=y"))
    assert found == {
        "region": "eu",
        "token": "t",
        "client": {"trace": True, "retries": 5, "proxy": None},
        "name": "x=y",
    }


def test_storage_options_environment_variable_may_name_a_file(tmp_path, monkeypatch):
    file = tmp_path / "options.json"
    file.write_text('{"region": "eu"}')
    monkeypatch.setenv("SNAPSHOT_STORAGE_OPTIONS", str(file))
    assert options_of(parsed()) == {"region": "eu"}
    file.unlink()
    with pytest.raises(ValueError, match=r"SNAPSHOT_STORAGE_OPTIONS: .*No such file"):
        options_of(parsed())


def test_src_o_and_dst_o_storage_options_override_o():
    arguments = parsed("-o", "a=1", "-o", "b=1", "--src-o", "a=2", "--dst-o", "b=3", prefixes=("src", "dst"))
    assert options_of(arguments, "src") == {"a": 2, "b": 1}
    assert options_of(arguments, "dst") == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("1.5", 1.5), ("true", True), ("null", None), ("eu-1", "eu-1"), ("", ""), ("007", "007"),
        ('"1"', "1"), ("[1, 2]", [1, 2]), ("NaN", "NaN"), ("Infinity", "Infinity"), ("{", "{"),
    ],
)  # fmt: skip
def test_storage_option_value_is_parsed_as_json_if_it_is_json(text, value):
    assert assignment(f"k={text}") == (["k"], value)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_storage_option_value_may_be_any_json(value):
    assert assignment(f"a.b={json.dumps(value)}") == (["a", "b"], value)


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1", ""])
def test_invalid_storage_option_is_refused_without_printing_it(text):
    with pytest.raises(argparse.ArgumentTypeError, match="KEY=VALUE"):
        assignment(text)


def test_storage_option_below_a_scalar_replaces_the_scalar():
    assert options_of(parsed("-o", "a=1", "-o", "a.b=2")) == {"a": {"b": 2}}
    assert options_of(parsed("-o", "a.b=2", "-o", "a=1")) == {"a": 1}


@pytest.mark.parametrize("text", ["0", "-1", "1x", "MiB", "", "1 2", "nan", "1e3", "0.0001"])
def test_invalid_size_argument_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="invalid size"):
        size(text)


def test_size_duration_and_count_arguments_are_parsed():
    assert [size(text) for text in ("1", "1B", "2k", "2KB", "2KiB", "1.5 MiB", "1T")] == [
        1, 1, 2048, 2000, 2048, 3 << 19, 1 << 40
    ]  # fmt: skip
    assert [duration(text) for text in ("0", "1.5m", "2h", "1w")] == [0, 90, 7200, 604800]
    assert count("12") == 12
    for wrong in ("0", "-1", "1.5", "\u0661", ""):
        with pytest.raises(argparse.ArgumentTypeError):
            count(wrong)
    for wrong in ("-1s", "1y", "", "s"):
        with pytest.raises(argparse.ArgumentTypeError):
            duration(wrong)
