"""Inference engines and their trainers, each in a process of its own."""

import pytest

from tests.helpers.framework_scripts import find_script, run_in

pytestmark = pytest.mark.libraries


def test_verl_workers_receive_published_weights():
    ended = run_in("verl-0.9.1", "on_verl.py")
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_vllm_workers_load_published_weights(warm):
    """With the contract that `vllm_contract` has: vLLM itself needs an accelerator."""
    arguments = ["-q", "-p", "no:cacheprovider", str(find_script("on_vllm.py"))]
    assert " passed" in warm.run(f"import pytest, sys\nsys.exit(pytest.main({arguments!r}))")
