"""All tests of the adapters for frameworks of their own: `python -m pytest tests/soak/test_frameworks.py`."""

import pytest

from tests.interop.test_frameworks import NEEDED, run_script


@pytest.mark.parametrize("script", NEEDED)
@pytest.mark.timeout(900)
def test_an_adapter_passes_all_of_its_tests(script):
    run_script(script, "slow or not slow")
