"""DeepSpeed itself, in a process of its own: `.ci/install --all` installs it apart."""

import pytest

from tests.helpers.framework_scripts import run_script

pytestmark = pytest.mark.libraries


@pytest.mark.timeout(900)
def test_deepspeed_saves_and_resumes_with_snapshots():
    run_script("on_deepspeed.py", "not slow")


def test_deepspeed_adapter_does_not_import_its_framework(warm):
    shown = warm.run("""
import sys
import snapshot_deepspeed.adapter
print([name for name in sys.modules if name.partition(".")[0] == "deepspeed"])
""")
    assert shown == "[]\n"
