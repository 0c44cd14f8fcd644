"""Trainers that `.ci/install --all` installs without their dependencies.

Their own checkpointing runs over snapshots, each in a process of its own.
"""

import re

import pytest

from snapshot import Snapshot
from tests.helpers.framework_scripts import run_in

pytestmark = pytest.mark.libraries


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem", "dcp"])
@pytest.mark.parametrize("version", ["0.2.0", "0.3.0"])
def test_torchtitan_checkpoint_manager_finds_and_resumes_snapshots(tmp_path, version, mode):
    ended = run_in(f"torchtitan-{version}", "on_torchtitan.py", tmp_path, mode)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.parametrize("mode", ["manager-disabled", "manager-async", "manager-async_with_pinned_mem"])
def test_torchtitan_configuration_accepts_the_manager(tmp_path, mode):
    ended = run_in("torchtitan-0.3.0", "on_torchtitan.py", tmp_path, mode)
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_torchft_s_own_test_of_transports_passes():
    ended = run_in("torchft-0.2.0", "on_torchft.py")
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_verl_checkpoint_manager_saves_and_resumes_snapshots():
    ended = run_in("verl-0.9.1", "on_verl_manager.py")
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.parametrize("version", ["0.3.0", "0.4.0"])
def test_skyrl_strategy_saves_and_resumes_snapshots(version):
    ended = run_in(f"skyrl-{version}", "on_skyrl.py")
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.timeout(900)
def test_trl_trainers_save_and_resume_snapshots():
    ended = run_in("trl-1.16.0/site-packages", "on_trl.py")
    assert ended.returncode == 0, ended.stderr[-4000:]


def test_torchtune_checkpointer_finds_and_loads_snapshots(tmp_path):
    ended = run_in("torchtune-0.6.1", "on_torchtune.py", tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]


@pytest.mark.timeout(900)
def test_torchtune_recipe_resumes_as_documented(tmp_path):
    losses = []
    for changes in ([], ["resume_from_checkpoint=True"]):
        ended = run_in("torchtune-0.6.1", "on_torchtune_recipe.py", tmp_path, *changes)
        assert ended.returncode == 0, ended.stderr[-4000:]
        newest = max((tmp_path / "out" / "logs").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        losses.append(dict(re.findall(r"Step (\d+) \| loss:(\S+)", newest.read_text())))
    assert [*losses[0]] == [str(step) for step in range(1, 25)]
    assert losses[1] == {str(step): losses[0][str(step)] for step in range(17, 25)}
    for epoch in (0, 1):
        assert Snapshot(tmp_path / "out" / f"dist_epoch_{epoch}").verify().ok
