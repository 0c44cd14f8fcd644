"""The package's public names, each of which is imported when it is first used."""

import subprocess
import sys
from importlib import import_module

import pytest

import snapshot


def test_every_public_name_is_in_all_and_comes_from_its_module():
    assert set(snapshot.__all__) == set(snapshot._HOMES)
    assert set(snapshot.__all__) <= set(dir(snapshot))
    for name, home in snapshot._HOMES.items():
        assert getattr(snapshot, name) is getattr(import_module(home), name)


def test_type_checking_imports_hold_the_public_names():
    with open(snapshot.__file__) as file:
        block = file.read().partition("if TYPE_CHECKING:\n")[2].partition("\n\n")[0]
    held = {}
    exec("\n".join(line.removeprefix("    ") for line in block.splitlines()), held)
    assert {name for name in held if not name.startswith("__")} == set(snapshot.__all__)


def test_star_import_brings_all_public_names():
    held = {}
    exec("from snapshot import *", held)
    assert set(snapshot.__all__) <= set(held)


def test_unknown_public_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'snapshot' has no attribute 'Snapshots'"):
        _ = snapshot.Snapshots
    with pytest.raises(ImportError, match="cannot import name 'Snapshots'"):
        exec("from snapshot import Snapshots")


def test_import_snapshot_does_not_import_torch():
    work = "import sys, snapshot; print('torch' in sys.modules); snapshot.Snapshot; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", work], check=True, capture_output=True, text=True, timeout=300)
    assert found.stdout.split() == ["False", "True"]
