"""`snapshot bench --device` with the fake accelerator, which each process of the benchmark loads by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import fakedev

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(bool(fakedev.missing()), reason=f"the fake accelerator cannot be built: {fakedev.missing()}"),
    pytest.mark.timeout(600),  # a compiler may have to read all of torch's headers first
]

ROOT = Path(__file__).parents[3]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, env=variables
    )


@pytest.fixture
def path_of_imports(tmp_path: Path) -> str:
    """The value of PYTHONPATH with which `import torch` finds the device, as it finds that of an installed package."""
    package = tmp_path / "packages" / "fakedev-0.dist-info"
    package.mkdir(parents=True)
    (package / "entry_points.txt").write_text("[torch.backends]\nfakedev = tests.device.fakedev:load\n")
    return os.pathsep.join([str(ROOT), str(package.parent)])


def test_bench_systems_on_an_accelerator() -> None:
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).with_name("on_fakedev_bench.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_cli_bench_device_measures_on_an_accelerator(tmp_path: Path, path_of_imports: str) -> None:
    report = tmp_path / "bench.html"
    place = tmp_path / "place"
    small = ["--case", "small", "--scale", "0.001", "--rounds", "1", "--only", "restore", "--peers", "none"]
    options = ["--device", "fakedev:1", "--json", "--report", str(report)]
    done = run("-m", "snapshot", "bench", str(place), *small, *options, PYTHONPATH=path_of_imports)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    device = result["host"]["device"]
    assert (device["device"], device["name"], device["pinned"]) == ("fakedev:1", "fakedev", True)
    (table,) = result["tables"]
    assert table["failed"] == []
    assert {row["system"] for row in table["rows"]} == {"raw", "snapshot"}
    assert "fakedev:1 (fakedev), pinned copies: " in report.read_text()
    assert not place.exists()
