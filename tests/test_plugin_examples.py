"""The examples of plugins are installed as a stranger's packages are, and pass their own tests through entry points."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.trees import PYTHONPATH

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[1]
PLUGINS = ROOT / "examples" / "plugins"


@pytest.mark.parametrize("name", ["storage", "format", "verb"])
def test_plugin_example_passes_its_tests_through_its_entry_point(tmp_path, name):
    source, site, tests = tmp_path / "source", tmp_path / "site", tmp_path / "tests"
    shutil.copytree(PLUGINS / name, source)  # building leaves files behind: not in this tree
    tests.mkdir()
    for file in source.glob("test_*.py"):
        file.rename(tests / file.name)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", site, source], check=True, timeout=300)
    assert sorted(path.name for path in site.glob("*.py")) == sorted(path.name for path in source.glob("*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), PYTHONPATH])}
    shown = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr


def test_plugin_examples_are_all_tested():
    assert sorted(path.name for path in PLUGINS.iterdir() if path.is_dir()) == ["format", "storage", "verb"]
