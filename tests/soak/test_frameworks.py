"""All tests of the adapters for frameworks of their own: `python -m pytest tests/soak/test_frameworks.py`."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.conftest import preloaded  # noqa: F401 - a fixture
from tests.helpers.framework_scripts import CACHE, NEEDED, is_installed, run_script
from tests.helpers.servers import tool

SECONDS = 300
"""Time for the kills of one training."""
KILLED = {
    # name in killed_trainings.py -> the script whose framework it needs
    "lightning-callback": None,
    "lightning-sync": None,
    "lightning-async": None,
    "composer-sync": "on_composer.py",
    "composer-async": "on_composer.py",
    "deepspeed-sync": "on_deepspeed.py",
    "deepspeed-async": "on_deepspeed.py",
}


@pytest.mark.parametrize("script", NEEDED)
@pytest.mark.timeout(900)
def test_soak_interop_adapter_passes_all_tests(script):
    run_script(script, "slow or not slow")


@pytest.mark.parametrize("name", KILLED)
@pytest.mark.timeout(900)
def test_soak_killed_training_resumes_exactly(preloaded, tmp_path, name):  # noqa: F811
    tool("cc", "apt-get install gcc")
    module, folder = NEEDED.get(KILLED[name], ("lightning", None))
    place = CACHE / folder if folder else None
    if not is_installed(module) and not (place and place.is_dir()):
        pytest.skip(f"{module} is neither installed nor in {place}")
    path = os.pathsep.join(map(str, filter(None, [*sys.path, place])))
    ended = subprocess.run(
        [sys.executable, "-m", "tests.soak.killed_trainings", name, tmp_path, "3", str(SECONDS)],
        env={**os.environ, **preloaded, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout[ended.stdout.rindex('{\n "job"') :])
    print({key: value for key, value in told.items() if key != "faults"})
    assert told["faults"] == []
    assert told["call"] > 5
