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
from snapshot.io import loop as loop_module
from snapshot.io.aio import in_thread, run_inline, shielded
from snapshot.io.loop import run, start
from snapshot.io.system import PerProcess, gc_paused


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


# The pool and the loop themselves


def test_pool_runs_work_in_its_threads_or_in_the_caller():
    for count, name in ((2, "snapshot-io_"), (0, threading.current_thread().name)):
        pool = loop_module._Pool(count)
        try:
            assert len(pool._workers) == count
            assert pool.submit(lambda: threading.current_thread().name).result(60).startswith(name)
            assert pool.submit(lambda *args, **more: (args, more), 1, x=2).result(60) == ((1,), {"x": 2})
            error = pool.submit(int, "x").exception(60)
            assert isinstance(error, ValueError)
        finally:
            pool.shutdown()
        assert not [each for each in pool._workers if each.is_alive()]


def test_pool_skips_work_that_was_cancelled():
    future, done = concurrent.futures.Future(), []
    assert future.cancel()
    loop_module._perform(future, lambda: done.append(1))
    assert done == []


def test_done_callbacks_are_called_once_in_order_and_their_faults_are_logged(caplog):
    begun, called = threading.Event(), []

    async def work():
        while not begun.is_set():
            await asyncio.sleep(0.001)
        return 5

    future = start(work())
    future.add_done_callback(lambda each: called.append(("first", each.result())))
    future.add_done_callback(lambda _: 1 / 0)
    last = threading.Event()
    future.add_done_callback(lambda _: (called.append("last"), last.set()))
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert not future.settled(0.001)
    begun.set()
    assert future.result(60) == 5
    assert last.wait(60)
    assert future.done()
    assert not future.cancelled()
    assert not future.cancel()
    future.add_done_callback(lambda _: called.append("late"))
    assert called == [("first", 5), "last", "late"]
    assert [record.getMessage() for record in caplog.records] == ["a done callback failed"]


def test_work_that_raises_gives_its_error():
    async def work():
        raise KeyError("x")

    future = start(work())
    assert isinstance(future.exception(60), KeyError)
    assert not future.cancelled()
    with pytest.raises(KeyError):
        run(work())


def test_work_on_is_not_started_and_can_be_cancelled():
    done = []

    async def work():
        done.append(1)

    future = loop_module.work_on(work())
    assert not future.done()
    assert future.cancel()
    assert future.settled(60)
    assert future.cancelled()
    with pytest.raises(concurrent.futures.CancelledError):
        future.exception(60)
    assert done == []


@pytest.fixture
def own_loop(monkeypatch):
    """A loop for one test."""
    loops = PerProcess(loop_module._Loop)
    monkeypatch.setattr(loop_module, "_loop", loops)
    return loops


class Clients:
    closed = 0

    async def close(self):
        self.closed += 1


def test_end_threads_ends_idle_threads_and_refuses_while_they_work(own_loop):
    loop_module.end_threads()
    assert own_loop.made() is None
    assert run(asyncio.sleep(0, "x")) == "x"
    made = own_loop.get()
    made.clients = Clients()
    begun, over = threading.Event(), threading.Event()

    async def work():
        begun.set()
        while not over.is_set():
            await asyncio.sleep(0.001)

    future = start(work())
    assert begun.wait(60)
    with pytest.raises(RuntimeError, match=r"still at work \(1 task\)"):
        loop_module.end_threads()
    assert made.clients.closed == 0
    assert made.thread.is_alive()
    over.set()
    future.result(60)

    async def inside():
        with pytest.raises(RuntimeError, match="callback"):
            loop_module.end_threads()
        with pytest.raises(RuntimeError, match="callback"):
            loop_module.refuse_on_loop()

    run(inside())
    loop_module.end_threads()
    assert made.clients.closed == 1
    assert not made.thread.is_alive()
    assert made.loop.is_closed()
    assert not [each for each in made.pool._workers if each.is_alive()]
    assert own_loop.made() is None
    assert run(asyncio.sleep(0, "again")) == "again"
    assert own_loop.get() is not made
    loop_module.end_threads()


def test_loop_without_a_thread_works_in_the_caller(own_loop, monkeypatch):
    """As while the interpreter exits, when no thread can be started any more."""

    def refuse(_):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert loop_module.can_start_threads()
        for kind in ("loop", "thread"):
            with pytest.raises((RuntimeError, SnapshotError), match="thread"):
                own_loop.get() if kind == "loop" else loop_module.start_in_thread(int, "x")
        patch.setattr(loop_module, "is_exiting", lambda: True)
        assert not loop_module.can_start_threads()
        assert loop_module.works_here()
        assert loop_module.start_in_thread(lambda: 3, "x").result(0) == 3
    here = threading.get_ident()

    async def work(seconds=0.0):
        await asyncio.sleep(seconds)
        return threading.get_ident(), await in_thread(threading.get_ident)

    assert run(work()) == (here, here)
    future = start(work(1000))
    assert not future.done()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    assert future.cancel()
    assert future.settled(60)
    assert future.cancelled()

    async def outer():
        assert run(work()) == (here, here)
        return asyncio.get_running_loop()

    assert asyncio.run(outer()) is not own_loop.get().loop
    own_loop.get().loop.close()


def test_works_here_only_without_a_thread(own_loop):
    assert not loop_module.works_here()
    assert loop_module.can_start_threads()
    loop_module.end_threads()


def test_finish_before_exit_keeps_background_work_until_it_is_over(monkeypatch):
    over = threading.Event()

    async def work():
        while not over.is_set():
            await asyncio.sleep(0.001)

    future = start(work())
    loop_module.finish_before_exit(future)
    assert future in loop_module._unfinished.get()
    over.set()
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    assert done.wait(60)
    assert future not in loop_module._unfinished.get()
    monkeypatch.setattr(loop_module, "is_exiting", lambda: True)
    future = start(asyncio.sleep(0.001))
    loop_module.finish_before_exit(future)
    assert future.done(), "it waits if the interpreter exits already"
    assert future not in loop_module._unfinished.get()


def in_daemon(name, function):
    found = []

    def call():
        try:
            found.append(function())
        except Exception as error:  # noqa: BLE001 - it is the outcome
            found.append(error)

    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    thread.join(60)
    return found[0]


def test_daemons_of_the_application_may_not_begin_work_during_the_exit(monkeypatch):
    def enter():
        with loop_module.at_work():
            return len(loop_module._at_work.get()), loop_module.ends_at_exit()

    assert enter() == (0, False)
    assert in_daemon("mine", enter) == (1, True)
    assert in_daemon("snapshot-x", enter) == (0, False)
    assert not loop_module._at_work.get()
    assert in_daemon("mine", lambda: run(asyncio.sleep(0, len(loop_module._abandoned.get())))) == 0
    monkeypatch.setattr(loop_module, "is_exiting", lambda: True)
    assert enter() == (0, False)
    for function in (enter, loop_module.expect_time, lambda: run(asyncio.sleep(0))):
        assert "daemon thread" in str(in_daemon("mine", function))
    assert in_daemon("snapshot-x", lambda: run(asyncio.sleep(0, "done"))) == "done"
    assert not loop_module._at_work.get()
    assert not loop_module._abandoned.get()


def test_wait_at_exit_ends_the_work_of_daemons(own_loop):
    own_loop.get().clients = Clients()
    begun, ended = threading.Event(), []

    async def work():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cleaned")

    def call():
        with pytest.raises(concurrent.futures.CancelledError), loop_module.at_work():
            run(work())
        ended.append("left")

    thread = threading.Thread(target=call, name="mine", daemon=True)
    thread.start()
    assert begun.wait(60)
    unfinished = start(asyncio.sleep(0.002))
    loop_module.finish_before_exit(unfinished)
    loop_module._wait_at_exit()
    assert unfinished.done()
    thread.join(60)
    assert ended == ["cleaned", "left"]
    assert own_loop.get().clients.closed == 1
    loop_module.end_threads()
    loop_module._close_clients()
    assert own_loop.made() is None


def test_cancel_all_waits_for_the_clean_up_of_each():
    async def main():
        ended = []

        async def work(number):
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended.append(number)
                raise ValueError

        tasks = [asyncio.ensure_future(work(number)) for number in range(3)]
        await asyncio.sleep(0)
        await loop_module.cancel_all(tasks)
        assert sorted(ended) == [0, 1, 2]

    asyncio.run(main())


def test_in_own_thread_gives_the_result_of_another_thread():
    async def main():
        name = await loop_module.in_own_thread(lambda text: (text, threading.current_thread().name), "x")
        assert name == ("x", "snapshot-io-wait")
        with pytest.raises(ValueError, match="invalid"):
            await loop_module.in_own_thread(int, "x")

    asyncio.run(main())


def test_loop_whose_thread_cannot_start_leaves_no_threads(monkeypatch):
    pools, begin = [], threading.Thread.start
    make = loop_module._Pool

    def refuse(thread):
        if thread.name == "snapshot-loop":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(loop_module, "_Pool", lambda count: pools.append(make(count)) or pools[0])
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises((RuntimeError, SnapshotError), match="thread"):
        loop_module._Loop()
    [pool] = pools
    assert pool._workers
    for worker in pool._workers:
        worker.join(60)
        assert not worker.is_alive()
