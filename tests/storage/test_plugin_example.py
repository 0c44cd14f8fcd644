"""The example of a plugin is installed as a stranger's package is, and passes its own tests through its entry point."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[2]
PYTEST = """
import os, sys
import pytest

site, folder, root = sys.argv[1:]
sys.path[:] = [site, *(path for path in sys.path if path != root)]
os.chdir(folder)
raise SystemExit(pytest.main(["-q", "-W", "error", "-p", "no:cacheprovider", "test_snapshot_sqlite.py"]))
"""


def test_plugin_example_passes_the_conformance_tests_through_its_entry_point(tmp_path, warm):
    source = tmp_path / "source"
    source.mkdir()
    for file in (ROOT / "examples" / "plugin").iterdir():  # building leaves files behind: not in this tree
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", site, source], check=True, timeout=300)
    assert (site / "snapshot_sqlite.py").is_file()
    tests = tmp_path / "elsewhere"
    tests.mkdir()
    (source / "test_snapshot_sqlite.py").rename(tests / "test_snapshot_sqlite.py")
    assert " passed" in warm.run(PYTEST, site, tests, ROOT)
