"""Killed at every operation and at every system call, of every verb, and with a writer process."""

import pytest

from tests.faults.forked_jobs import Forker
from tests.faults.killed_jobs import (
    VERBS,
    kill_at_operations,
    kill_at_system_calls,
    kill_while_pruning,
    kill_with_worker,
)
from tests.helpers.servers import tool


@pytest.fixture(scope="module")
def forker():
    with Forker() as made:
        yield made


@pytest.mark.timeout(600)
@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("verb", VERBS)
def test_soak_kill_at_every_storage_operation(forker, tmp_path, verb, foreign):
    kills, new = kill_at_operations(forker, tmp_path, verb, foreign=foreign)
    print(f"{verb}: {kills} kills at operations, the new state stood after {new}")


@pytest.mark.timeout(600)
def test_soak_kill_at_every_operation_of_prune(forker, tmp_path):
    print(f"prune: {kill_while_pruning(forker, tmp_path)} kills at operations")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
def test_soak_kill_at_every_system_call(forker, tmp_path, verb):
    tool("strace", "apt-get install strace")
    kills, calls = kill_at_system_calls(forker, tmp_path / "here", verb, tmp_path / "log")
    print(f"{verb}: {kills} kills at {calls} system calls")
    assert kills > calls * 0.8


@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["parent", "writer"])
def test_soak_kill_at_every_operation_of_a_writer_process_and_its_parent(forker, tmp_path, who):
    print(f"{who}: {kill_with_worker(forker, tmp_path, who)} kills with a writer process")
