"""Scripts that run with frameworks, and where those are installed."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[1] / "plugins"
CACHE = Path.home() / ".cache" / "snapshot-tests"
NEEDED = {
    "on_deepspeed.py": ("deepspeed", "deepspeed-0.19.8"),
    "on_ray.py": ("ray", "ray-2.60.0"),
    "on_megatron_bridge.py": ("megatron.bridge", "megatron-bridge-0.4.2"),
    "on_automodel.py": ("nemo_automodel", "nemo-automodel-0.7.0"),
    "on_composer.py": ("composer", "mosaicml-0.32.1"),
    "on_transformers_fsdp.py": ("transformers", None),
    "on_accelerate.py": ("accelerate", None),
    "on_grain.py": ("grain", "grain-0.2.18"),
    "on_litdata.py": ("litdata", "litdata-0.2.76"),
    "on_mlflow.py": ("mlflow", "mlflow-3.17.2"),
}
"""Script -> the module that it needs, and the folder with it in the cache, if it is not one of the usual packages."""


def is_installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor is its parent
        return False


def find_script(script):
    """Return where a script is: in the tests of the plugin with the framework's adapter."""
    (found,) = PLUGINS.glob(f"*/{script}")
    return found


def run_script(script, marks):
    """Run the tests of a script that have these marks. Skip it if its framework is not there."""
    module, folder = NEEDED[script]
    place = CACHE / folder if folder else None
    if not is_installed(module) and not (place and place.is_dir()):
        pytest.skip(f"{module} is neither installed nor in {place}")
    path = os.pathsep.join(map(str, filter(None, [*sys.path, place])))
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", marks, find_script(script)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-8000:]
    assert re.search(r"\d+ passed", ended.stdout)


def run_in(package, script, *arguments):
    """Run a script with a package that `.ci/install --all` installs without its dependencies. Skip it if it lacks."""
    place = CACHE / package
    if not place.is_dir():
        pytest.skip(f"{package} is not installed in {CACHE}")
    path = os.pathsep.join([*filter(None, sys.path), str(place)])
    return subprocess.run(
        [sys.executable, find_script(script), *map(str, arguments)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
