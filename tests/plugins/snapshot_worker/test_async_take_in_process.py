"""async_take(worker="process"): the same snapshots, by a process of their own, whatever becomes of either process."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot, SnapshotError, SnapshotExistsError, StateDict, StorageError, TakeOptions
from snapshot.errors import CancelledError
from snapshot.events import add_handler, remove_handler
from snapshot.io.arena import arena
from snapshot.testing import stalling
from snapshot_worker.client import writer_process
from tests.helpers.arguments import for_take
from tests.helpers.held_storage import held, is_running, until

ROOT = Path(__file__).parents[3]
PATIENCE = 300


def state(value=0.0):
    torch.manual_seed(int(value))
    return {
        "s": StateDict(
            big=torch.randn(5_000_001), strided=torch.randn(70, 50).t()[3:], half=torch.randn(7).to(torch.bfloat16),
            empty=torch.empty(0, 3), one=torch.tensor(value), n=int(value), nested=[torch.ones(2), {"x": b"bytes"}],
        )
    }  # fmt: skip


def take(path, live, **options):
    return Snapshot.async_take(path, live, **for_take(worker="process", **options))


def data(path):
    return sorted(file.read_bytes() for file in Path(path).glob("data/*"))


def left(path):
    return [str(file) for file in Path(path).rglob("*")] if Path(path).exists() else []


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory):
    """The process, and the memory that it shares, are there before descriptors are counted."""
    take(tmp_path_factory.mktemp("warm") / "x", state()).wait(PATIENCE)


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    yield
    assert " 0 in use" in repr(arena())


@pytest.mark.parametrize("durable", [True, False])
def test_worker_process_writes_the_same_files_as_a_thread(tmp_path, durable):
    live = state(3)
    seen = []
    pending = take(tmp_path / "process", live, durable=durable, progress=seen.append)
    for tensor in (live["s"]["big"], live["s"]["strided"], live["s"]["one"]):
        tensor.fill_(7)  # what comes after the call does not reach the snapshot
    snapshot = pending.wait(PATIENCE)
    Snapshot.async_take(tmp_path / "thread", state(3), options=TakeOptions(durable=durable)).wait(PATIENCE)
    assert data(tmp_path / "process") == data(tmp_path / "thread")
    assert snapshot.verify().ok
    assert snapshot.get_state_dict_for_key("s")["one"] == 3
    done = pending.progress()
    assert done.done == done.total == seen[-1].done


def test_worker_process_several_takes_at_once(tmp_path):
    pending = [take(tmp_path / str(i), state(i)) for i in range(5)]
    for i, each in enumerate(pending):
        snapshot = each.wait(PATIENCE)
        assert snapshot.verify().ok
        assert snapshot.get_state_dict_for_key("s")["big"].equal(state(i)["s"]["big"])


def test_worker_process_with_a_memory_budget_bytes_smaller_than_the_state(tmp_path):
    live = {"s": StateDict(**{f"t{i}": torch.full((1 << 20,), float(i)) for i in range(20)})}
    for durable in (True, False):
        snapshot = take(tmp_path / str(durable), live, memory_budget_bytes=16 << 20, durable=durable).wait(PATIENCE)
        assert snapshot.verify().ok
        back = snapshot.get_state_dict_for_key("s")
        assert all(back[f"t{i}"].eq(i).all() for i in range(20))


def test_worker_process_keeps_the_number_of_file_descriptors(tmp_path):
    def count(pid):
        return len(os.listdir(f"/proc/{pid}/fd"))

    for number in range(3):
        take(tmp_path / "x", state(number), overwrite=True).wait(PATIENCE)
    pid = writer_process().pid
    gc.collect()  # of earlier tests
    before = count("self"), count(pid)
    for number in range(20):
        take(tmp_path / "x", {"s": StateDict(t=torch.randn(300_000), n=number)}, overwrite=True).wait(PATIENCE)
    assert count("self") <= before[0]
    assert count(pid) <= before[1]
    assert writer_process().pid == pid


def test_worker_process_does_not_overwrite_an_existing_snapshot(tmp_path):
    take(tmp_path / "x", state(1)).wait(PATIENCE)
    with pytest.raises(SnapshotExistsError):
        take(tmp_path / "x", state(2)).wait(PATIENCE)
    assert Snapshot(tmp_path / "x").get_state_dict_for_key("s")["n"] == 1


def test_worker_process_cancel_leaves_no_files(tmp_path):
    with held(tmp_path / "x") as folder:
        pending = take(folder.url, state())
        folder.wait_reached()
        assert any(name.startswith("data/") for name in folder.files())
        assert pending.cancel()
        with pytest.raises(CancelledError):
            pending.wait(PATIENCE)
        assert left(folder.root) == []


def test_worker_process_interrupted_staging_leaves_no_files(tmp_path):
    with held(tmp_path / "x") as folder:
        live = {"s": StateDict(**{f"t{i}": torch.full((1 << 20,), float(i)) for i in range(12)})}

        def interrupt(number, frame):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                take(folder.url, live, memory_budget_bytes=16 << 20)  # waits for writes that are held
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert left(folder.root) == []


def test_worker_process_that_is_killed_is_reported_and_replaced(tmp_path):
    with held(tmp_path / "x") as folder:
        pid = writer_process().pid
        pending = take(folder.url, state())
        folder.wait_reached()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SnapshotError, match=r"writer process ended with signal SIGKILL"):
            pending.wait(PATIENCE)
        assert left(folder.root) == []
        again = take(folder.url, state(5))
        folder.release()
        assert again.wait(PATIENCE).get_state_dict_for_key("s")["n"] == 5
        assert writer_process().pid != pid


def test_worker_process_raises_the_storage_errors_of_a_thread(tmp_path):
    errors = []
    for worker in ("process", "thread"):
        (tmp_path / worker).mkdir()
        (tmp_path / worker / "data").write_text("in the way")
        with pytest.raises(StorageError) as raised:
            Snapshot.async_take(tmp_path / worker, state(), options=TakeOptions(worker=worker)).wait(PATIENCE)
        errors.append(raised.value)
        assert left(tmp_path / worker) == [str(tmp_path / worker / "data")]
    assert type(errors[0]) is type(errors[1])
    assert all(": Not a directory" in str(error) for error in errors)
    assert errors[0].errno == errors[1].errno
    assert "in the writer process" in str(errors[0].__cause__)


def test_worker_process_retries_are_reported_as_events(tmp_path):
    events = []
    add_handler(events.append)
    try:
        with held(tmp_path / "x") as folder:
            folder.release()
            take(folder.url, state()).wait(PATIENCE)
    finally:
        remove_handler(events.append)
    assert [event.fields["error"] for event in events if event.name == "retry"][:1] == ["held"]
    assert {event.name for event in events if event.verb == "async_take"} == {"start", "staged", "blocked", "committed"}


def test_worker_process_refuses_storages_it_cannot_open(tmp_path):
    with pytest.raises(ValueError, match="memory"):
        take("memory://process", state())
    assert not Snapshot("memory://process").exists()
    with stalling(), pytest.raises(ValueError, match="cannot import"):
        take(f"stalling+file://{tmp_path}/x", state())
    with pytest.raises(ValueError, match="worker must be 'thread', 'process' or a plugin's name, got 'fork'"):
        Snapshot.async_take(tmp_path / "x", state(), options=TakeOptions(worker="fork"))
    assert left(tmp_path) == []


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])  # not in the environment: the process must be told
import torch
from snapshot import Snapshot, StateDict, TakeOptions
from snapshot_worker.client import writer_process

print("main", flush=True)
from tests.helpers.held_storage import HeldStorage
from snapshot.io.registry import register

register("held", HeldStorage)
Snapshot.async_take(sys.argv[2], {"s": StateDict(t=torch.ones(5_000_000))}, options=TakeOptions(worker="process"))
print(writer_process().pid, flush=True)
if sys.argv[3] == "stay":
    sys.stdin.read()
"""


def script(tmp_path, url, what):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = [sys.executable, str(tmp_path / "script.py"), str(ROOT), url, what]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
    )


@pytest.mark.slow
def test_worker_process_finishes_the_take_when_a_script_ends(tmp_path):
    with script(tmp_path, str(tmp_path / "x"), "end") as parent:
        assert parent.stdout.readline() == "main\n"
        pid = int(parent.stdout.readline())
        assert parent.stdout.read() == ""  # the process did not run the script, and nobody holds the pipe
        assert parent.wait(PATIENCE) == 0
    assert not is_running(pid)
    assert Snapshot(tmp_path / "x").verify().ok


@pytest.mark.slow
def test_worker_process_ends_and_leaves_no_data_if_its_parent_is_killed(tmp_path):
    with held(tmp_path / "x") as folder, script(tmp_path, folder.url, "stay") as parent:
        parent.stdout.readline()
        pid = int(parent.stdout.readline())
        folder.wait_reached()
        assert is_running(pid)
        parent.kill()
        until(lambda: not is_running(pid))
    assert [name for name in folder.files() if not name.startswith(".take-")] == []
