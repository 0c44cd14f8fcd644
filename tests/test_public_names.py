"""The names that users may import: no more, no fewer, and each documented."""

import importlib
import re
import types
from pathlib import Path

import pytest

import snapshot
from snapshot import extensions
from tests.helpers import signatures

ROOT = Path(__file__).parents[1]
NAMES = [
    "Snapshot",
    "PendingSnapshot",
    "Target",
    "SnapshotManager",
    "TakeOptions",
    "RestoreOptions",
    "Tolerate",
    "KeepLatest",
    "KeepBest",
    "KeepEvery",
    "KeepFor",
    "KeepWithin",
    "KeepSpread",
    "Stateful",
    "StateDict",
    "RNGState",
    "Sharded",
    "TensorMap",
    "ModelState",
    "SnapshotError",
    "SnapshotNotFoundError",
    "SnapshotExistsError",
    "CorruptSnapshotError",
    "RestoreError",
    "CommitUnknown",
    "RankError",
    "StorageError",
    "load",
]


def test_public_names_of_the_package_are_these():
    assert sorted(snapshot.__all__) == sorted(NAMES)
    assert all(getattr(snapshot, name) is not None for name in NAMES)


@pytest.mark.parametrize("name", extensions.NAMES)
def test_public_names_of_other_modules_are_found_there_and_named_by_the_error(name):
    home = extensions.NAMES[name]
    assert getattr(importlib.import_module(home), name).__name__ == name
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; import it from {home}"):
        getattr(snapshot, name)
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from 'snapshot'; import it from {home}"):
        exec(f"from snapshot import {name}")
    assert not hasattr(snapshot, name)


def test_public_names_that_never_were_are_plain_errors():
    with pytest.raises(ImportError, match="cannot import name 'Nothing' from 'snapshot'"):
        exec("from snapshot import Nothing")
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'$"):
        _ = snapshot.Nothing


def test_homes_of_public_names_are_public_modules():
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    assert [home for home in sorted(set(extensions.NAMES.values())) if f"`{home}`" not in text] == []


def test_parameters_and_defaults_of_public_names_are_those_of_signatures_txt():
    """A changed default changes what users get: change the file, too, and the changelog."""
    assert list(signatures.find_signatures()) == signatures.FILE.read_text().splitlines()


def test_public_names_are_the_only_public_attributes_of_the_package():
    extra = {
        name
        for name, value in vars(snapshot).items()
        if not name.startswith("_") and name not in NAMES and not isinstance(value, types.ModuleType)
    }
    assert extra - {"annotations", "TYPE_CHECKING", "Any", "import_module"} == set()


def test_public_modules_exist():
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    modules = {
        name for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`([\w.]+)`", line)
    }
    assert "snapshot.testing" in modules
    for name in modules:
        assert importlib.util.find_spec(name) is not None, name


def test_public_names_are_all_in_the_reference():
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    errors = set(vars(importlib.import_module("snapshot.errors")))  # whose page lists all
    assert [
        name for name in NAMES if name not in errors and not re.search(rf":: ([\w.]+\.)?{name}$", pages, re.MULTILINE)
    ] == []
