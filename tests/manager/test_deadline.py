"""What a manager saves before it is killed: its deadline just below and just above each choice."""

import logging
import os
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
import torch
import torch.distributed as dist

from snapshot import KeepBest, KeepLatest, RestoreError, RestoreOptions, Snapshot, SnapshotManager, StateDict
from snapshot.errors import CorruptSnapshotError, RankError, SnapshotError
from snapshot.manager import preemption
from snapshot.manager.preemption import Deadline
from snapshot.state.model_state import ModelState
from snapshot.testing import stalling


@pytest.fixture
def left(monkeypatch):
    """Set the seconds that are left, instead of the clock."""

    def set_left(seconds):
        monkeypatch.setattr(Deadline, "left", lambda self, signalled: seconds)

    return set_left


def training(joined=False):
    """A model with the state of AdamW: two thirds of the bytes are the optimizer's."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    progress = StateDict(step=1)
    if joined:
        return {"train": ModelState(model, optimizer), "progress": progress}
    return {"model": model, "optim/zer*": optimizer, "progress": progress}


def stop(manager):
    os.kill(os.getpid(), signal.SIGTERM)
    assert manager.should_stop()


SHARE = 1 / 3
CASES = [(None, "whole"), (11, "whole"), (10.99, "parameters"), (10 * SHARE + 1.01, "parameters")]
CASES += [(10 * SHARE + 0.9, "none"), (0.5, "none"), (-3, "none")]


@pytest.mark.parametrize(("verb", "joined"), [("take", False), ("async_take", True)])
@pytest.mark.parametrize(("seconds", "saved"), CASES)
def test_take_saves_what_fits_before_the_deadline(seconds, saved, joined, verb, tmp_path, left, told, caplog):
    caplog.set_level(logging.INFO)
    state = training(joined)
    with SnapshotManager(tmp_path) as manager:
        manager.take(10, state, metrics={"loss": 0.5})
        manager._measured.slowest = lambda: 10.0
        left(seconds)
        stop(manager)
        taken = getattr(manager, verb)(20, state, metrics={"loss": 0.1})
        if verb == "async_take":
            taken.wait()
        assert taken.report.saved == saved
        [event] = [each for each in told if each.name == "preempted"]
        assert (event.fields["step"], event.fields["saved"], event.fields["left"]) == (20, saved, seconds)
        assert manager.steps() == ([10] if saved == "none" else [10, 20])
        good = 20 if saved == "whole" else 10
        assert manager.last_good() == manager.best("loss") == good
        caplog.clear()
    end = f"the last good step is {good}"
    assert end in caplog.text
    assert ("not saved" in caplog.text) == (saved == "none")
    assert SnapshotManager(tmp_path, signals=()).restore_latest(state) == good
    names = {path.split("/")[1] for path in Snapshot(f"{tmp_path}/step-{good}").get_manifest()}
    if saved == "parameters":
        found = Snapshot(tmp_path / "step-20")
        assert "parameters only" in found.metadata.metadata["snapshot.partial"]
        kept = [path for path in found.get_manifest() if "exp_avg" in path]
        assert not kept
        assert {path.split("/")[1] for path in found.get_manifest()} >= names - {"optim%2Fzer*", "optim%2Fzer%2A"}
        for tensor in (state["train"].model if joined else state["model"]).parameters():
            name = "train/model/weight" if joined else "model/weight"
            assert torch.equal(found.read_object(name), tensor)


def test_restore_latest_takes_a_step_of_parameters_only_if_asked(tmp_path, left):
    state = training()
    with SnapshotManager(tmp_path) as manager:
        manager._measured.slowest = lambda: 10.0
        left(5)
        stop(manager)
        manager.take(20, state)
    fresh = SnapshotManager(tmp_path, signals=())
    with pytest.raises(CorruptSnapshotError, match=r"parameters only: .* good=False restores it"):
        fresh.restore_latest(state)
    with pytest.raises(RestoreError, match="optim"):
        fresh.restore_latest(state, good=False)
    assert fresh.restore_latest(state, good=False, options=RestoreOptions(strict=False)) == 20


def test_step_of_parameters_only_removes_no_whole_step(tmp_path, left):
    state = training()
    keep = KeepLatest(1) | KeepBest("loss")
    with SnapshotManager(tmp_path, keep=keep) as manager:
        manager.take(10, state, metrics={"loss": 0.9})
        manager._measured.slowest = lambda: 10.0
        left(5)
        stop(manager)
        manager.take(20, state, metrics={"loss": 0.1})
    assert SnapshotManager(tmp_path, keep=keep, signals=()).steps() == [10, 20]


def test_exit_line_names_a_step_that_is_not_suspect(tmp_path, caplog):
    pytest.importorskip("snapshot_health")  # which guards takes
    state = training()
    with SnapshotManager(tmp_path, deadline="60s") as manager:
        manager.take(10, state)
        with torch.no_grad():
            next(iter(state["model"].parameters())).fill_(torch.nan)
        stop(manager)
        manager.take(20, state)
    assert manager.last_good() == 10
    assert "the last good step is 10" in caplog.text


def test_deadline_that_is_long_over_does_not_count(tmp_path):
    """The scheduler has not killed the job, so there is time to save all of it."""
    deadline = Deadline("10s")
    assert -51 < deadline.left(time.monotonic() - 60) < -49
    assert deadline.left(time.monotonic() - 80) is None


def test_take_without_a_measured_save_saves_all(tmp_path, left):
    with SnapshotManager(tmp_path) as manager:
        left(1.5)
        stop(manager)
        assert manager.take(1, training()).report.saved == "whole"


@pytest.mark.parametrize("where", ["buffer", "dictionary"])
def test_step_of_parameters_counts_what_it_saves_besides(where, tmp_path, left):
    state, other = training(), torch.zeros(100, 64, 64)
    if where == "buffer":
        state["model"].register_buffer("cache", other)
    else:
        state["ema"] = StateDict(tensors=[{"x": other}])
    with SnapshotManager(tmp_path) as manager:
        manager._measured.slowest = lambda: 10.0
        left(9)
        stop(manager)
        assert manager.take(20, state).report.saved == "none"


def test_take_that_runs_with_another_counts_twice(tmp_path, left):
    state = training()
    url = f"stalling+file://{tmp_path}"
    with stalling(on="write", path="*data/*", nth=1, times=1) as stall, SnapshotManager(url) as manager:
        manager.async_take(1, state)
        stall.wait_reached()
        manager._measured.slowest = lambda: 10.0
        left(11)
        stop(manager)
        assert manager.take(2, state).report.saved == "parameters"
        stall.release()


def test_close_says_what_is_good_before_the_deadline_if_a_take_does_not_end(tmp_path, caplog):
    with stalling(on="write", path="*data/*.safetensors", nth=2, times=1) as stall:
        manager = SnapshotManager(f"stalling+file://{tmp_path}", deadline="1.2s")
        manager.take(10, training())
        manager.async_take(20, training())
        stall.wait_reached()
        stop(manager)
        with pytest.raises(SnapshotError, match="the deadline is near"):
            manager.take(20, training())
        closing = threading.Thread(target=manager.close)
        closing.start()
        end = time.monotonic() + 30
        while "step 20 is still being saved; the last good step is 10" not in caplog.text:
            assert time.monotonic() < end
            time.sleep(0.005)
        stall.release()
        closing.join()
        assert manager.steps() == [10, 20]
    assert "the last good step is 20" in caplog.text


def test_deadline_begins_with_the_signal(tmp_path, monkeypatch, caplog, told):
    monkeypatch.setenv("SNAPSHOT_DEADLINE", "90s")
    with caplog.at_level(logging.INFO), SnapshotManager(tmp_path) as manager:
        assert manager._deadline.left(None) is None
        stop(manager)
        [event] = [each for each in told if each.name == "stopping"]
        assert 0 < event.fields["left"] <= 90
        assert "s are left" in caplog.text
        assert 0 < manager._deadline.left(manager._signals.at) <= event.fields["left"]
    with SnapshotManager(tmp_path, deadline=timedelta(minutes=5)) as manager:  # an argument is for this manager
        assert 200 < manager._deadline.left(time.monotonic()) <= 300


@pytest.mark.parametrize("kind", [float, lambda seconds: datetime.fromtimestamp(seconds, UTC)])
def test_should_stop_by_a_source_of_the_deadline(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "PERIOD", 0.01)
    at = [None]
    asked = threading.Semaphore(0)

    def source():
        asked.release()
        return at[0]

    with SnapshotManager(tmp_path, deadline=[source, "10s"], signals=()) as manager:
        assert not manager.should_stop()
        at[0] = kind(time.time() + 3600)
        for _ in range(3):
            asked.acquire()
        assert not manager.should_stop()  # there is time to train
        at[0] = kind(time.time() + 30)
        for _ in range(3):
            asked.acquire()
        assert manager.should_stop()
        assert manager.should_stop()
        assert 0 < manager._deadline.left(None) <= 30
    [thread] = manager._deadline._threads
    thread.join(30)
    assert not thread.is_alive()


def test_time_from_a_signal_does_not_count_if_only_a_source_tells_the_end(tmp_path):
    with SnapshotManager(tmp_path, deadline=["5s", lambda: time.time() + 50]) as manager:
        manager.take(10, training())
        manager._measured.slowest = lambda: 20.0
        assert manager.should_stop()
        assert manager.take(20, training()).report.saved == "whole"


def test_source_that_does_not_answer_stops_neither_the_loop_nor_another_source(tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "PERIOD", 0.01)
    answered, asked = threading.Event(), threading.Semaphore(0)
    at = [None]

    def other():
        asked.release()
        return at[0]

    with SnapshotManager(tmp_path, deadline=[answered.wait, other], signals=()) as manager:
        assert not manager.should_stop()
        at[0] = time.time() + 30
        for _ in range(3):
            asked.acquire()
        assert manager.should_stop()
        answered.set()


@pytest.mark.parametrize("told", [float("inf"), float("nan")])
def test_source_that_tells_no_finite_time_is_as_one_that_fails(told, tmp_path, caplog):
    with SnapshotManager(tmp_path, deadline=lambda: told) as manager:
        stop(manager)
        assert manager.take(10, training()).report.saved == "whole"
    assert caplog.text.count("the time must be finite") == 1


def test_source_that_fails_is_logged_once_and_asked_again(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(preemption, "PERIOD", 0.01)
    calls = threading.Semaphore(0)

    def source():
        calls.release()
        raise OSError("no metadata server")

    with SnapshotManager(tmp_path, deadline=source, signals=()) as manager:
        for _ in range(5):
            assert not manager.should_stop()
            calls.acquire()
    assert caplog.text.count("no metadata server") == 1


@pytest.mark.parametrize("given", [0, -1, "soon", True, b"30s", [30, "soon"], object()])
def test_manager_refuses_a_wrong_deadline(given, tmp_path):
    with pytest.raises((TypeError, ValueError), match="deadline must be"):
        SnapshotManager(tmp_path, deadline=given)


def test_poll_notices_a_signal_and_counts_no_step(tmp_path):
    with SnapshotManager(tmp_path) as manager:
        assert not manager.poll()
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.poll()
        assert manager.should_stop()
        assert manager._measured.step_seconds() is None


# Ranks


def _evaluates(folder):
    rank, polls = dist.get_rank(), 0
    with SnapshotManager(folder, timeout=30, deadline="60s") as manager:
        for _ in range(20):
            assert not manager.should_stop()
        while not manager.poll():
            polls += 1
            if rank == 1 and polls == 5:
                os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_stop()
        saved = manager.take(20, {"s": StateDict(x=torch.ones(4))}).report.saved
    return polls, saved


def test_poll_stops_all_ranks_at_the_same_call(three, folder):
    found = three.run(_evaluates, folder)
    assert len({polls for polls, _ in found}) == 1
    assert [saved for _, saved in found] == ["whole"] * 3


def _differs(folder):
    """Only rank 2 knows that the time is short, and only rank 0 knows what a save needs."""
    rank, state = dist.get_rank(), training()
    with SnapshotManager(folder, timeout=30) as manager:
        manager._measured.slowest = lambda: 10.0 if rank == 0 else 1e6
        manager._deadline.left = lambda signalled: {0: None, 1: 50.0, 2: 6.0}[rank]
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        while not manager.should_stop():
            pass
        return manager.take(20, state).report.saved, manager.last_good()


def test_ranks_save_the_same_by_the_least_time_that_is_left(three, folder):
    assert three.run(_differs, folder) == [("parameters", None)] * 3


def _hears_of_a_source(folder):
    """A source tells the end, to rank 1 later than to rank 0, and no rank got a signal."""
    deadline = ["5s", lambda: time.time() + (70 if dist.get_rank() == 1 else 50)]
    with SnapshotManager(folder, timeout=30, deadline=deadline) as manager:
        manager._measured.slowest = lambda: 20.0
        while not manager.should_stop():
            pass
        return manager.take(20, training()).report.saved


def test_ranks_use_the_time_that_a_source_tells_also_if_they_stop_for_another_rank(three, folder):
    assert three.run(_hears_of_a_source, folder) == ["whole"] * 3


def _loses_a_rank(folder):
    rank, state = dist.get_rank(), {"s": StateDict(x=torch.ones(1 << 12), rank=dist.get_rank())}
    manager = SnapshotManager(folder, timeout=600, deadline="4s")
    manager.take(10, state)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    while not manager.should_stop():
        pass
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("snapshot").addHandler(handler)
    try:
        manager.take(20, state)
    except RankError as error:
        text = str(error)
    manager.close()
    logging.getLogger("snapshot").removeHandler(handler)
    return text, [line for line in heard if "stopped" in line], manager.steps()


def test_take_gives_up_within_the_deadline_if_a_rank_dies(fresh_pool, folder):
    pool = fresh_pool(3)
    alive, died, other = pool.outcomes(_loses_a_rank, folder)
    assert died.signal == signal.SIGKILL
    for text, [line], steps in (alive, other):
        assert "rank 1" in text
        assert steps == [10]
        assert "step 20 was not saved" in line
        assert "the last good step is 10" in line
