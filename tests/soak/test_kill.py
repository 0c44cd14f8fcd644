"""Killed at every operation and at every system call, of every verb, and with a writer process."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE.parent / "trust", HERE.parent / "storage"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
from forks import Warm  # noqa: E402 - it is found from here on
from killing import VERBS, kill_at_operations, kill_at_system_calls, kill_while_pruning, kill_with_worker  # noqa: E402
from servers import tool  # noqa: E402


@pytest.fixture(scope="module")
def warm():
    with Warm() as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_every_operation(warm, tmp_path, verb, foreign):
    kills, new = kill_at_operations(warm, tmp_path, verb, foreign=foreign)
    print(f"{verb}: {kills} kills at operations, the new state stood after {new}")


@pytest.mark.timeout(600)
def test_killed_at_every_operation_of_pruning(warm, tmp_path):
    print(f"prune: {kill_while_pruning(warm, tmp_path)} kills at operations")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
def test_killed_at_every_system_call(warm, tmp_path, verb):
    tool("strace", "apt-get install strace")
    kills, calls = kill_at_system_calls(warm, tmp_path / "here", verb, tmp_path / "log")
    print(f"{verb}: {kills} kills at {calls} system calls")
    assert kills > calls * 0.8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["parent", "writer"])
def test_killed_at_every_operation_of_a_writer_process_and_its_parent(warm, tmp_path, who):
    print(f"{who}: {kill_with_worker(warm, tmp_path, who)} kills with a writer process")
