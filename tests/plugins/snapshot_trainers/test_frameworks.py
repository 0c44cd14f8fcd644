"""Trainers that need many other packages: `.ci/install --all` installs them apart.

Each script runs in a process of its own. `tests/soak/test_frameworks.py` runs its slow tests, too.
"""

import pytest

from tests.helpers.framework_scripts import run_script

pytestmark = pytest.mark.libraries
SCRIPTS = [
    "on_ray.py",
    "on_automodel.py",
    "on_composer.py",
    "on_transformers_fsdp.py",
    "on_accelerate.py",
    "on_grain.py",
    "on_litdata.py",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.timeout(900)
def test_interop_frameworks_save_and_resume_with_snapshots(script):
    run_script(script, "not slow")


@pytest.mark.parametrize(("adapter", "package"), [("ray", "ray"), ("automodel", "nemo_automodel")])
def test_interop_adapter_does_not_import_its_framework(warm, adapter, package):
    shown = warm.run(f"""
import sys
import snapshot_trainers.{adapter}
print([name for name in sys.modules if name.partition(".")[0] == {package!r}])
""")
    assert shown == "[]\n"
