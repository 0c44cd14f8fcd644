"""Signals that ask the job to stop: really sent, to this process and to children of it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch

from snapshot import SnapshotManager, StateDict
from snapshot.manager.schedule import Signals
from snapshot.testing import stalling


@pytest.fixture(autouse=True)
def handlers():
    """Each test leaves the handlers as it found them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_should_stop_after_a_signal_and_the_previous_handler_is_called(number, tmp_path):
    seen = []
    before = signal.signal(number, lambda got, frame: seen.append(got))
    with SnapshotManager(tmp_path) as manager:
        assert not manager.should_stop()
        os.kill(os.getpid(), number)
        assert manager.should_stop()
        assert manager.should_stop()
    assert seen == [number]
    os.kill(os.getpid(), number)
    assert seen == [number] * 2  # it is theirs again
    signal.signal(number, before)


def test_should_stop_counts_signals_within_a_second_as_one(tmp_path):
    """A launcher and its ranks are both signalled, and the launcher passes it on."""
    with SnapshotManager(tmp_path) as manager:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()


def test_manager_close_keeps_a_signal_handler_set_later(tmp_path):
    manager = SnapshotManager(tmp_path)
    ours = signal.getsignal(signal.SIGTERM)
    seen = []

    def theirs(number, frame):
        seen.append(number)
        ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is theirs
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_should_stop_of_several_managers_sees_the_same_signal(tmp_path):
    with SnapshotManager(tmp_path / "a") as first, SnapshotManager(tmp_path / "b") as second:
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.should_stop()
        assert second.should_stop()


def test_manager_that_is_garbage_collected_restores_the_signal_handler():
    SnapshotManager("memory://forgotten")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_manager_outside_of_the_main_thread_warns_that_signals_are_not_seen(tmp_path, caplog):
    made = []
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=lambda: made.append(SnapshotManager(tmp_path)))
        thread.start()
        thread.join()
    assert "SIGTERM, SIGUSR1 will not be noticed" in caplog.text
    assert not made[0].should_stop()
    made[0].close()


def test_manager_with_signals_empty_sets_no_handler(tmp_path):
    with SnapshotManager(tmp_path, signals=()):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_manager_closed_before_a_later_one_does_not_end_the_process_on_a_signal(tmp_path):
    first = SnapshotManager(tmp_path / "a")
    second = SnapshotManager(tmp_path / "b")
    first.close()
    with SnapshotManager(tmp_path / "c") as third:
        second.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert third.should_stop()
        assert not second.should_stop()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_manager_closed_but_called_by_another_handler_does_not_end_the_process(tmp_path):
    first = SnapshotManager(tmp_path / "a")
    ours = signal.getsignal(signal.SIGTERM)

    def theirs(number, frame):
        ours(number, frame)

    signal.signal(signal.SIGTERM, theirs)
    first.close()
    with SnapshotManager(tmp_path / "b") as second:
        os.kill(os.getpid(), signal.SIGTERM)
        assert second.should_stop()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _pass_on(handler, number, frame):
    handler(number, frame)


def test_manager_closed_before_a_signal_leaves_it_to_the_default_handler():
    """It was saved by another handler, which calls it later. The default action of this signal is none."""
    number = signal.SIGURG
    before = signal.signal(number, signal.SIG_DFL)
    try:
        first = Signals([number])
        ours = signal.getsignal(number)
        signal.signal(number, partial(_pass_on, ours))
        first.close()
        assert signal.getsignal(number) != signal.SIG_DFL  # it was set later
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) == signal.SIG_DFL
        assert first.number is None
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("later", [0.5, 1.5])
def test_second_signal_after_a_second_is_left_to_the_earlier_handler(monkeypatch, later):
    number, now, seen = signal.SIGURG, [100.0], []
    before = signal.signal(number, lambda got, _: seen.append(got))
    monkeypatch.setattr("snapshot.manager.schedule.time.monotonic", lambda: now[0])
    try:
        signals = Signals([number])
        os.kill(os.getpid(), number)
        assert (signals.number, seen) == (number, [number])
        now[0] += later
        os.kill(os.getpid(), number)
        assert seen == [number] * (1 if later < 1 else 2)
        assert (signal.getsignal(number) == signal.SIG_DFL) == (later > 1)
        signals.close()
    finally:
        signal.signal(number, before)


def test_manager_close_finishes_the_last_snapshot_if_a_signal_arrives(tmp_path):
    with stalling(on="write", path="*data/*", nth=1, times=1) as stall:
        with SnapshotManager(f"stalling+file://{tmp_path}") as manager:
            manager.async_take(1, {"s": StateDict(x=torch.zeros(8))})
            stall.wait_reached()

            def signalled():
                os.kill(os.getpid(), signal.SIGTERM)
                while manager._signals.number is None:
                    time.sleep(0.002)
                stall.release()

            thread = threading.Timer(0.05, signalled)
            thread.start()
        thread.join()
        assert manager.should_stop()
        assert manager.steps() == [1]


WORKERS = """
import os, subprocess, sys
from torch.utils.data import DataLoader
from snapshot import SnapshotManager, StateDict
from snapshot.manager.schedule import ignore_stop_signals
os.setpgrp()
with SnapshotManager(sys.argv[1]) as manager:
    # Python 3.14 would start a fork server, which ends on the signal
    loader = DataLoader(
        range(300), num_workers=1, worker_init_fn=ignore_stop_signals, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    subprocess.run(["sh", "-c", f"trap '' TERM; kill -TERM -{os.getpid()}"], check=True)
    for _ in range(200):  # more than is there already: a worker that is gone is noticed
        next(batches)
    assert manager.should_stop()
    manager.take(1, {"s": StateDict(step=1)})
    for _ in batches:
        pass
"""


def test_ignore_stop_signals_keeps_data_loader_workers_alive(tmp_path, warm):
    assert warm.run(WORKERS, tmp_path) == ""
    assert (tmp_path / "step-1").exists()


ENDED = """
import multiprocessing, sys, time
from snapshot.manager.schedule import ignore_stop_signals

def work(ready):
    ignore_stop_signals()
    ready.set()
    time.sleep(100)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    ready = context.Event()
    worker = context.Process(target=work, args=(ready,))
    worker.start()
    assert ready.wait(60)
    worker.terminate()
    worker.join(60)
    print("ready", worker.exitcode)
"""


@pytest.mark.slow  # a fork server imports torch
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ignore_stop_signals_workers_end_if_their_parent_ends_them(method, tmp_path):
    (tmp_path / "script.py").write_text(ENDED)
    found = subprocess.run(
        [sys.executable, tmp_path / "script.py", method], capture_output=True, text=True, check=False
    )
    assert found.stdout == "ready 0\n", found.stderr


CHILD = """
import os, signal, sys, time
from snapshot.manager import schedule
from snapshot.manager.schedule import Signals
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, lambda number, frame: print("theirs", flush=True))
one = Signals([signal.SIGTERM, signal.SIGUSR1])
schedule.SAME = 0.0
if len(sys.argv) == 1:
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:  # as a data loader's worker: who ends it means it
        os.write(here, b"!")
        while True:  # Python misses a signal that comes just before it begins to sleep
            time.sleep(0.05)
    os.read(there, 1)  # before that, Python would forget the signal
    os.kill(pid, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGTERM
os.kill(os.getpid(), signal.SIGTERM)
assert one.number == signal.SIGTERM
print("goes on", flush=True)
os.kill(os.getpid(), signal.SIGUSR1 if len(sys.argv) == 1 else signal.SIGTERM)
print("never", flush=True)
"""


def test_second_signal_ends_the_process_at_once_but_not_a_forked_child(warm):
    started = warm.start(CHILD)
    with pytest.raises(Exception, match=r"exit status -10:\ngoes on\n$"):  # SIGUSR1
        warm.finish(started)


def test_second_signal_ends_the_process_even_if_the_previous_handler_returns(warm):
    started = warm.start(CHILD, "handler")
    with pytest.raises(Exception, match=r"exit status -15:\ntheirs\ngoes on\ntheirs\n$"):
        warm.finish(started)
