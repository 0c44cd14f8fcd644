"""The private loop: work ends before its future does, and what is interrupted is cleaned."""

import asyncio
import concurrent.futures
import gc
import logging
import os
import threading

import pytest
import torch

from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.events import Event, add_handler, remove_handler
from snapshot.io.aio import in_thread, run_inline, shielded
from snapshot.io.loop import run, start
from snapshot.io.system import gc_paused


def test_loop_start_future_ends_after_the_cleanup_of_cancelled_work():
    began, cleaned = threading.Event(), []

    async def work():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    future = start(work())
    assert began.wait(10)
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)
    assert cleaned == [True]
    assert future.cancelled()
    assert not future.cancel()


def test_loop_shielded_work_is_not_interrupted():
    async def main():
        ended = []

        async def cleaning():
            for _ in range(3):
                await asyncio.sleep(0)
            ended.append(True)

        task = asyncio.create_task(shielded(cleaning()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ended == [True]

    asyncio.run(main())


def test_loop_in_thread_waits_for_a_cancelled_thread():
    async def main():
        inside, go, ended = threading.Event(), threading.Event(), []

        def function():
            inside.set()
            go.wait(10)
            ended.append(True)

        task = asyncio.create_task(in_thread(function))
        while not inside.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        await asyncio.gather(task, return_exceptions=True)
        assert ended == [True]
        assert task.cancelled()

    asyncio.run(main())


def test_loop_run_inline_drives_a_coroutine_without_a_loop():
    async def fine(x):
        return await in_thread(lambda: x + 1)

    async def waits():
        await asyncio.sleep(1)

    assert run_inline(fine, 2) == 3
    with pytest.raises(RuntimeError):
        run_inline(waits)
    assert run_inline(fine, 2) == 3


def test_take_on_the_io_loop_is_refused():
    async def inside():
        Snapshot.take("memory://inside", {"s": StateDict(x=1)}, overwrite=True)

    with pytest.raises(RuntimeError, match="I/O loop"):
        run(inside())


def test_gc_paused_disables_and_restores_the_garbage_collector():
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(SnapshotError):
        Snapshot("memory://none").restore({"s": StateDict()})
    assert gc.isenabled()


def test_add_handler_receives_events_and_its_errors_are_ignored(caplog):
    seen = []

    def bad(event):
        raise RuntimeError("mine")

    add_handler(bad)
    add_handler(seen.append)
    try:
        with caplog.at_level(logging.INFO, "snapshot"):
            snapshot = Snapshot.take("memory://events", {"s": StateDict(x=torch.ones(3))}, overwrite=True)
            snapshot.restore({"s": StateDict()})
            with pytest.raises(SnapshotError):
                snapshot.restore({"t": StateDict()})
    finally:
        remove_handler(bad)
        remove_handler(seen.append)
    assert [event.name for event in seen if isinstance(event, Event)] == [
        *("start", "committed", "blocked", "restored", "failed")
    ]
    assert "take memory://events" in caplog.text


def test_progress_bar_and_a_failing_progress_callback(capsys):
    def bad(progress):
        raise RuntimeError("mine")

    state = {"s": StateDict(x=torch.ones(1000))}
    snapshot = Snapshot.take("memory://bar", state, overwrite=True, progress=True)
    snapshot.restore(state, progress=bad)
    assert "take" in capsys.readouterr().err


def test_loop_start_cancelled_before_its_first_step_cleans_up():
    cleaned = []

    async def work():
        try:
            await asyncio.sleep(30)
        finally:
            cleaned.append(True)

    for _ in range(50):
        future = start(work())
        future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(10)
    assert len(cleaned) == 50


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_take_in_a_child_forked_during_a_take_works_with_garbage_collection(tmp_path):
    class Forks(StateDict):
        def state_dict(self):
            self.child = os.fork()
            if not self.child:
                gc.collect()
                Snapshot.take(tmp_path / "child", {"s": StateDict(x=1)})
                os._exit(0 if gc.isenabled() and Snapshot(tmp_path / "child").verify() else 1)
            return super().state_dict()

    state = Forks(x=1)
    Snapshot.take(tmp_path / "s", {"s": state})
    assert os.waitstatus_to_exitcode(os.waitpid(state.child, 0)[1]) == 0
    assert gc.isenabled()


ENDED = """
import asyncio, threading
import torch
from snapshot import Snapshot, StateDict
from snapshot.io.loop import run, start
from snapshot.testing import end_threads

before = set(threading.enumerate())
end_threads()  # there are none yet
for number in range(3):
    Snapshot.take("PLACE", {"s": StateDict(a=torch.full((3,), number))}, overwrite=True)
    assert set(threading.enumerate()) - before
    end_threads()
    assert set(threading.enumerate()) == before
    end_threads()
assert Snapshot("PLACE").read_object("0/s/a").tolist() == [2, 2, 2]

release = asyncio.Event()
busy = start(release.wait())
for attempt, why in ((end_threads, "still at work (1 task); wait for it first"), (None, "on its own I/O loop")):
    async def call():
        end_threads()
    try:
        attempt() if attempt else run(call())
    except RuntimeError as error:
        assert why in str(error), error
    else:
        raise AssertionError(why)
async def free():
    release.set()
run(free())
assert busy.result(10)
end_threads()
assert set(threading.enumerate()) == before
print("all ended")
"""


@pytest.mark.parametrize("scheme", ["file", "memory", "fsspec+memory"])
def test_end_threads_ends_idle_threads_and_they_start_again(tmp_path, warm, scheme):
    place = tmp_path if scheme == "file" else f"{scheme}://ended/s"
    assert warm.run(ENDED.replace("PLACE", str(place))) == "all ended\n"
