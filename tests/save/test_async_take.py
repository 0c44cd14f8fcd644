"""async_take: of the moment of the call, whatever happens afterwards; and the life of what is pending."""

import contextlib
import gc
import itertools
import json
import logging
import os
import threading
from collections import deque

import pytest
import torch

from snapshot import Snapshot, SnapshotError, SnapshotExistsError, StateDict, StorageError, TakeOptions
from snapshot.errors import CancelledError, SnapshotBusyError
from snapshot.events import add_handler, remove_handler
from snapshot.io.arena import arena, release_memory
from snapshot.io.budget import HeldSlot
from snapshot.save.background_take import StagingAhead
from snapshot.save.planned_take import Take
from snapshot.save.take_slots import take_slots
from snapshot.testing import faulty, stalling
from tests.helpers.warm_interpreter import Failed


def state(value=1.0):
    return {"s": StateDict(big=torch.full((300_000,), value), small=torch.full((3,), value), n=int(value))}


def test_async_take_does_not_include_changes_after_the_call():
    live = state(1.0)
    with stalling(on="write") as stall:
        pending = Snapshot.async_take("stalling+memory://async", live, overwrite=True)
        live["s"]["big"].fill_(7)
        live["s"]["small"].fill_(7)
        live["s"]["n"] = 7
        del live["s"]["big"]
        gc.collect()
        stall.wait_reached()
        assert not pending.done()
        assert pending.staged()
        pending.wait_staged()
        stall.release()
        snapshot = pending.wait(30)
    assert pending.done()
    back = Snapshot("memory://async").get_state_dict_for_key("s")
    assert back["big"].eq(1).all()
    assert back["small"].eq(1).all()
    assert back["n"] == 1
    assert snapshot.exists is not None


def test_async_take_copies_strided_numpy_and_scalar_values_at_the_call():
    import numpy as np

    base, array, inner = torch.zeros(10, 10), np.zeros(5), {"list": [1, 2]}
    with stalling(on="put") as stall:
        pending = Snapshot.async_take(
            "stalling+memory://odd", {"s": StateDict(t=base.t()[2:], a=array, d=inner)}, overwrite=True
        )
        base.fill_(1)
        array[:] = 1
        inner["list"].append(3)
        stall.release()
        pending.wait(30)
    back = Snapshot("memory://odd").get_state_dict_for_key("s")
    assert back["t"].eq(0).all()
    assert (back["a"] == 0).all()
    assert back["d"] == {"list": [1, 2]}


def test_async_take_several_at_once_and_at_repeated_paths(tmp_path):
    live = state()
    pending = []
    for i in range(5):
        live["s"]["big"].fill_(float(i))
        pending.append(Snapshot.async_take(tmp_path / str(i), live))
    for i, each in enumerate(pending):
        snapshot = each.wait(60)
        assert snapshot.get_state_dict_for_key("s")["big"].eq(i).all()
    for i in range(3):
        live["s"]["big"].fill_(float(i))
        Snapshot.async_take(tmp_path / "same", live, overwrite=True).wait()
        assert Snapshot(tmp_path / "same").get_state_dict_for_key("s")["big"].eq(i).all()


@pytest.mark.parametrize("durable", [True, False])
def test_async_take_with_memory_budget_bytes_smaller_than_the_state(tmp_path, durable):
    live = {"s": StateDict(**{f"t{i}": torch.full((1 << 20,), float(i)) for i in range(20)})}
    for name, one in (("many", False), ("one", True)):
        if one:
            live = {"s": StateDict(t=torch.arange(20.0 * (1 << 20)))}
        pending = Snapshot.async_take(
            tmp_path / name, live, options=TakeOptions(memory_budget_bytes=16 << 20, durable=durable)
        )
        for value in live["s"].values():
            value.zero_()
        pending.wait(60)
        back = Snapshot(tmp_path / name).get_state_dict_for_key("s")
        if one:
            assert torch.equal(back["t"], torch.arange(20.0 * (1 << 20)))
        else:
            assert all(back[f"t{i}"].eq(i).all() for i in range(20))


def test_async_take_failure_with_a_small_memory_budget_bytes_is_raised(tmp_path):
    live = {"s": StateDict(t=torch.ones(20 << 20))}
    with faulty(on="write", nth=2, error=StorageError("broken")), pytest.raises(StorageError, match="broken"):
        Snapshot.async_take(
            f"faulty+file://{tmp_path}/s", live, options=TakeOptions(memory_budget_bytes=16 << 20)
        ).wait()
    assert not (tmp_path / "s").exists()


def test_async_take_failure_is_raised_by_wait_logged_and_leaves_no_files(tmp_path, caplog):
    with caplog.at_level(logging.ERROR, "snapshot"), faulty(on="finish", error=StorageError("broken")):
        pending = Snapshot.async_take(f"faulty+file://{tmp_path}/s", state())
        called = threading.Event()
        pending.add_done_callback(lambda done: called.set())
        assert called.wait(30)
    with pytest.raises(StorageError, match="broken"):
        pending.wait()
    with pytest.raises(StorageError, match="broken"):
        pending.wait()
    assert "broken" in caplog.text
    assert "broken" in repr(pending)
    assert not (tmp_path / "s").exists()
    Snapshot.async_take(tmp_path / "s", state()).wait()
    assert Snapshot(tmp_path / "s").verify().ok


class OwnError(Exception):
    """What a plugin may raise, though it should not."""


@pytest.mark.parametrize("error", [OwnError("mine"), TimeoutError("too late"), MemoryError("no room")])
@pytest.mark.parametrize("on", ["write", "finish", "put"])
def test_async_take_wraps_an_error_of_a_storage_plugin_in_snapshot_error(tmp_path, error, on):
    with faulty(on=on, error=error):
        pending = Snapshot.async_take(f"faulty+file://{tmp_path}/s", state())
        with pytest.raises(SnapshotError, match=str(error)) as caught:
            pending.wait(30)
    assert isinstance(caught.value.__cause__, BaseException)
    assert not (tmp_path / "s").exists()


def test_async_take_cancel_leaves_no_files(tmp_path):
    with stalling(on="finish") as stall:
        pending = Snapshot.async_take(f"stalling+file://{tmp_path}/s", state())
        stall.wait_reached()
        assert pending.cancel()
        with pytest.raises(CancelledError, match="cancelled"):
            pending.wait(30)
    assert pending.done()
    assert "cancelled" in repr(pending)
    Snapshot.take(tmp_path / "s", state())
    assert Snapshot(tmp_path / "s").verify().ok
    done = Snapshot.async_take(tmp_path / "t", state())
    done.wait()
    assert not done.cancel()
    assert Snapshot(tmp_path / "t").exists()


def test_async_take_wait_with_a_timeout_can_be_repeated():
    with stalling(on="commit") as stall:
        pending = Snapshot.async_take("stalling+memory://slow", state(), overwrite=True)
        with pytest.raises(TimeoutError, match=r"not committed after 0\.01"):
            pending.wait(0.01)
        progress = pending.progress()
        assert 0 <= progress.done <= progress.total
        assert progress.staged == progress.total
        stall.release()
        pending.wait(30)
    assert pending.progress().done == pending.progress().total
    assert "committed" in repr(pending)


def test_progress_speed_is_of_the_last_seconds_and_of_all(monkeypatch):
    from snapshot import progress

    clock = iter([0.0, 1.0, 2.0, 6.0, 6.5, 8.0, 100.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    meter = progress.Meter("take", None)
    meter.begin(1000)
    meter.staged(500)
    meter.wrote(100)  # at 1
    assert meter.now().rate == 50  # at 2
    meter.wrote(300)  # at 6
    now = meter.now()  # at 6.5: since 1, when the last bytes before these were done
    assert (now.done, now.total, now.staged, now.seconds) == (400, 1000, 500, 6.5)
    assert now.rate == pytest.approx(300 / 5.5)
    assert now.mean_rate == pytest.approx(400 / 6.5)
    meter.close()  # at 8
    assert (meter.now().rate, meter.now().seconds) == (0, 8)


def test_async_take_when_busy_waits_or_raises_snapshot_busy_error(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_PENDING", "2")
    with stalling(on="commit", times=None) as stall:
        first = [Snapshot.async_take(f"stalling+memory://busy-{i}", state(), overwrite=True) for i in range(2)]
        with pytest.raises(SnapshotBusyError, match=r"2 snapshots.*SNAPSHOT_PENDING"):
            Snapshot.async_take("memory://busy-2", state(), overwrite=True, options=TakeOptions(when_busy="raise"))
        with pytest.raises(ValueError, match="when_busy must be 'wait' or 'raise', got 'perhaps'"):
            Snapshot.async_take("memory://busy-2", state(), options=TakeOptions(when_busy="perhaps"))
        threading.Timer(0.2, stall.release).start()
        third = Snapshot.async_take("memory://busy-2", state(3.0), overwrite=True)  # waits
        assert any(each.done() for each in first)
    for each in (*first, third):
        each.wait(30)
    Snapshot.async_take("memory://busy-2", state(), overwrite=True, options=TakeOptions(when_busy="raise")).wait(30)


def test_async_take_with_snapshot_pending_zero_is_refused(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_PENDING", "0")
    with pytest.raises(ValueError, match="SNAPSHOT_PENDING must be at least 1, got 0"):
        Snapshot.async_take("memory://never", state())


def test_async_take_in_an_event_handler_that_would_wait_for_itself_is_refused(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_PENDING", "1")
    raised = []

    def again(event):
        if event.name == "committed" and "again" in event.path:
            try:
                Snapshot.async_take("memory://other", state())
            except RuntimeError as error:
                raised.append(error)

    add_handler(again)
    try:
        Snapshot.async_take("memory://again", state(), overwrite=True).wait(30)
    finally:
        remove_handler(again)
    assert raised


def test_async_take_interrupted_in_the_call_leaves_nothing_pending(tmp_path, monkeypatch):
    """Wherever it was: also when all was begun, and only the answer was not yet given."""
    live = state()
    for name in ("PendingSnapshot", "Meter"):
        with monkeypatch.context() as patch:

            def interrupted(*_, **__):
                raise KeyboardInterrupt

            if name == "Meter":
                patch.setattr(StagingAhead, "_stage_files", interrupted)
            else:
                patch.setattr("snapshot.snapshot.PendingSnapshot", interrupted)
            with pytest.raises(KeyboardInterrupt):
                Snapshot.async_take(tmp_path / name, live)
        # A take that has begun in full may have committed before the call was interrupted.
        committed = name == "PendingSnapshot" and (tmp_path / name).exists()
        assert not (tmp_path / name).exists() or (committed and Snapshot(tmp_path / name).verify().ok)
        assert " 0 in use" in repr(arena())
    Snapshot.async_take(tmp_path / "next", live, options=TakeOptions(when_busy="raise")).wait(30)


@pytest.mark.parametrize("live", [{"s": StateDict(step=1)}, {"s": StateDict(w=torch.ones(1 << 20))}])
def test_async_take_interrupted_just_after_writing_began_ends_it_before_it_raises(tmp_path, monkeypatch, live):
    real, begun = Take._start_to_write, []

    def interrupted(self):
        begun.append(real(self))
        raise KeyboardInterrupt  # as by a signal at this return

    monkeypatch.setattr(Take, "_start_to_write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Snapshot.async_take(tmp_path / "s", live)
    assert begun[0].done()
    assert begun[0].cancelled()
    assert not (tmp_path / "s").exists()


def test_async_take_interrupted_in_the_call_returns_its_memory_budget(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HeldSlot, "__init__", interrupted)  # its bytes are acquired
        with pytest.raises(KeyboardInterrupt):
            Snapshot.async_take("memory://interrupted", state(), options=TakeOptions(memory_budget_bytes=4 << 20))
    assert take_slots().pool(4 << 20).used == 0
    Snapshot.async_take("memory://next", state(), overwrite=True, options=TakeOptions(memory_budget_bytes=1)).wait(30)


def test_async_take_interrupted_while_handing_over_a_part_releases_its_memory(monkeypatch):
    class Interrupted(deque):
        def popleft(self):
            super().popleft()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("snapshot.save.background_take.deque", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            Snapshot.async_take("memory://interrupted", state())
    assert " 0 in use" in repr(arena())


def test_async_take_that_fails_in_the_call_does_not_count_as_pending(monkeypatch):
    monkeypatch.setenv("SNAPSHOT_PENDING", "1")
    Snapshot.take("memory://there", state(), overwrite=True)
    for _ in range(3):
        with pytest.raises(SnapshotExistsError):
            Snapshot.async_take("memory://there", state(), options=TakeOptions(when_busy="raise"))
        with pytest.raises(TypeError):
            Snapshot.async_take("memory://there", {"s": 3}, overwrite=True, options=TakeOptions(when_busy="raise"))
    Snapshot.async_take("memory://there", state(), overwrite=True, options=TakeOptions(when_busy="raise")).wait(30)


def test_async_takes_at_once_share_one_memory_budget():
    live = {"s": StateDict(**{f"t{i}": torch.full((1 << 20,), float(i)) for i in range(8)})}
    budget = 24 << 20
    with stalling(on="write", times=None) as stall:
        one = Snapshot.async_take(
            "stalling+memory://one", live, overwrite=True, options=TakeOptions(memory_budget_bytes=128 << 20)
        )
        assert one.progress().staged >= 32 << 20
        done = threading.Event()

        def second():
            pending = Snapshot.async_take(
                "stalling+memory://two", live, overwrite=True, options=TakeOptions(memory_budget_bytes=budget)
            )
            done.set()
            pending.wait(30)

        thread = threading.Thread(target=second)
        thread.start()
        assert not done.wait(0.3)  # the first one holds more than the budget of both
        stall.release()
        thread.join(30)
        one.wait(30)
    assert done.is_set()
    assert all(Snapshot("memory://two").get_state_dict_for_key("s")[f"t{i}"].eq(i).all() for i in range(8))


def test_release_memory_frees_staging_memory_kept_by_async_take():
    release_memory()
    Snapshot.async_take("memory://kept", state(), overwrite=True).wait(30)
    assert release_memory() >= 1 << 20
    assert release_memory() == 0


def test_snapshot_trace_writes_a_timeline(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_TRACE", str(tmp_path / "trace.json"))
    Snapshot.async_take(tmp_path / "a", state()).wait(30)
    Snapshot.take(tmp_path / "b", state())
    monkeypatch.delenv("SNAPSHOT_TRACE")
    Snapshot.take(tmp_path / "c", state())
    text = (tmp_path / "trace.json").read_text()
    spans = json.loads(text.rstrip().rstrip(",") + "]")
    assert {span["name"] for span in spans} == {"stage", "digest", "write", "commit"}
    assert sum(span["name"] == "commit" for span in spans) == 2
    assert all(span["ph"] == "X" and span["dur"] >= 0 and span["pid"] for span in spans)
    by_row = {}
    for span in spans:
        by_row.setdefault(span["tid"], []).append((span["ts"], span["ts"] + span["dur"]))
    for row in by_row.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(row)))


def test_add_done_callback_receives_the_pending_snapshot_and_may_fail(caplog):
    seen, both = [], threading.Semaphore(0)

    def bad(_):
        both.release()
        raise RuntimeError("mine")

    def good(pending):
        seen.append((pending, pending.wait().metadata.world_size))
        both.release()

    pending = Snapshot.async_take("memory://callbacks", state(), overwrite=True)
    pending.add_done_callback(bad)
    pending.add_done_callback(good)
    assert both.acquire(timeout=30)
    assert both.acquire(timeout=30)
    assert seen == [(pending, 1)]
    pending.wait()


def test_async_take_raises_snapshot_exists_error_in_the_call():
    Snapshot.take("memory://there", state(), overwrite=True)
    with pytest.raises(SnapshotExistsError):
        Snapshot.async_take("memory://there", state())


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "raise RuntimeError('mine')"])
def test_async_take_without_wait_is_finished_at_exit(tmp_path, warm, end):
    script = f"""
import torch
from snapshot import Snapshot, StateDict
Snapshot.async_take({str(tmp_path / "s")!r}, {{"s": StateDict(x=torch.arange(8_000_000))}})
{end}
"""
    with pytest.raises(Failed, match="mine") if "mine" in end else contextlib.nullcontext():
        warm.run(script)
    assert Snapshot(tmp_path / "s").verify().ok


def test_async_take_failure_at_exit_is_logged(tmp_path, warm):
    script = f"""
import torch, os
from snapshot import Snapshot, StateDict, StorageError
from snapshot.testing import Fault, tapped
with tapped("faulty", Fault(on="finish", error=StorageError("broken at the end"))):
    pending = Snapshot.async_take("faulty+file://{tmp_path}/s", {{"s": StateDict(x=torch.arange(100_000))}})
"""
    assert "broken at the end" in warm.run(script)
    assert not (tmp_path / "s").exists()


def test_async_take_refuses_unknown_staging_and_worker():
    with pytest.raises(ValueError, match=r"staging must be .* got 'overlaped'"):
        Snapshot.async_take("memory://x", state(), options=TakeOptions(staging="overlaped"))
    with pytest.raises(ValueError, match="worker"):
        Snapshot.async_take("memory://x", state(), options=TakeOptions(worker="fork"))


def test_async_take_inside_a_running_event_loop():
    import asyncio

    async def main():
        pending = Snapshot.async_take("memory://loop", state(), overwrite=True)
        snapshot = pending.wait()
        Snapshot.take("memory://loop2", state(), overwrite=True)
        return snapshot.metadata.entries

    assert asyncio.run(main()) == 3


def test_take_and_restore_in_several_threads():
    errors = []

    def work(i):
        try:
            live = state(float(i))
            for _ in range(5):
                Snapshot.take(f"memory://thread{i}", live, overwrite=True)
                live["s"]["big"].zero_()
                Snapshot(f"memory://thread{i}").restore(live)
                assert live["s"]["big"].eq(i).all()
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


def test_take_and_async_take_in_a_forked_child(tmp_path, warm):
    script = f"""
import os, torch
from snapshot import Snapshot, StateDict
torch.set_num_threads(1)
Snapshot.take({str(tmp_path / "parent")!r}, {{"s": StateDict(x=torch.ones(1000))}})
pending = Snapshot.async_take({str(tmp_path / "pending")!r}, {{"s": StateDict(x=torch.ones(4_000_000))}})
child = os.fork()
if child == 0:
    Snapshot.take({str(tmp_path / "child")!r}, {{"s": StateDict(x=torch.ones(1000))}})
    os._exit(0 if Snapshot({str(tmp_path / "child")!r}).verify() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
pending.wait()
"""
    warm.run(script)
    for name in ("parent", "pending", "child"):
        assert Snapshot(tmp_path / name).verify().ok


def test_async_take_interrupted_while_it_looks_at_the_path_leaks_no_descriptor(tmp_path, monkeypatch):
    Snapshot.take(tmp_path / "s", state())

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("snapshot.save.take.collect_rank_share", interrupted)
        for _ in range(100):
            with pytest.raises(KeyboardInterrupt):
                Snapshot.async_take(tmp_path / "s", state(), overwrite=True)
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # the loop's own, where it is the first
    assert Snapshot(tmp_path / "s").verify()
