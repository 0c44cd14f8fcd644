"""Takes, deletes and cancellations at the worst moment: a snapshot that is there is whole."""

import os
import threading

import pytest
import torch

from snapshot import RestoreOptions, Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.save import transaction
from snapshot.testing import stalling


def state(value):
    return {"s": StateDict(x=torch.full((1000,), float(value)))}


def value_of(path):
    return Snapshot(path).read_object("0/s/x")[0].item()


def whole(path):
    assert Snapshot(path).verify().ok


@pytest.mark.parametrize("operation", ["commit", "list", "delete"])
def test_cancel_during_or_after_the_commit_undoes_nothing(tmp_path, operation):
    Snapshot.take(tmp_path, state(1))
    with stalling(on=operation) as stall:
        pending = Snapshot.async_take(f"stalling+file://{tmp_path}", state(2), overwrite=True)
        stall.wait_reached()
        cancelled = []
        thread = threading.Thread(target=lambda: cancelled.append(pending.cancel()))
        thread.start()
        thread.join(0.1)
        stall.release()
        thread.join(30)
    assert cancelled == [False]
    pending.wait(30)
    assert value_of(tmp_path) == 2
    whole(tmp_path)


def test_take_cleaning_keeps_what_another_take_committed(tmp_path, monkeypatch):
    real, other = transaction.list_save_files, []

    async def slow(storage):
        found = await real(storage)
        if not other:
            other.append(True)
            thread = threading.Thread(target=lambda: Snapshot.take(tmp_path, state(2), overwrite=True))
            import asyncio

            await asyncio.get_running_loop().run_in_executor(None, lambda: (thread.start(), thread.join()))
            found = await real(storage)
        return found

    Snapshot.take(tmp_path, state(0))  # otherwise there is nothing to clean
    monkeypatch.setattr(transaction, "list_save_files", slow)
    Snapshot.take(tmp_path, state(1), overwrite=True)
    whole(tmp_path)
    assert value_of(tmp_path) == 2


def test_delete_during_a_commit_leaves_no_manifest_without_its_data(tmp_path, warm):
    path = f"stalling+file://{tmp_path}/s"
    Snapshot.take(tmp_path / "s", state(1))
    script = f"""
import torch
from snapshot import Snapshot
Snapshot({str(tmp_path / "s")!r}).delete()
"""
    with stalling(on="commit") as stall:
        pending = Snapshot.async_take(path, state(2), overwrite=True)
        stall.wait_reached()
        warm.run(script)
        stall.release()
        with pytest.raises(SnapshotError, match="deleted this one's files"):
            pending.wait(30)
    assert not Snapshot(tmp_path / "s").exists()
    assert not (tmp_path / "s").exists()


def test_take_removes_claim_files_left_by_a_crash(tmp_path):
    Snapshot.take(tmp_path, state(1))
    for name in (".take-0123456789ab", ".take-0123456789ab.00ff00.tmp"):
        (tmp_path / name).touch()
    Snapshot.take(tmp_path, state(2), overwrite=True)
    assert sorted(os.listdir(tmp_path)) == [".snapshot_metadata", "data"]


def test_snapshot_object_reads_on_after_its_path_was_overwritten(tmp_path):
    Snapshot.take(tmp_path, state(1))
    snapshot = Snapshot(tmp_path)
    snapshot.get_manifest()
    Snapshot.take(tmp_path, state(2), overwrite=True)
    assert snapshot.read_object("0/s/x")[0] == 2
    assert snapshot.get_state_dict_for_key("s")["x"][0] == 2


def test_async_take_resolves_a_relative_path_at_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pending = Snapshot.async_take("rel", state(1))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    assert pending.wait().exists()
    with pytest.raises(ValueError, match="path must not be empty"):
        Snapshot("")


def test_cancel_and_wait_from_a_progress_callback():
    box, seen = [], []

    def progress(now):
        if box and not seen:
            with pytest.raises(RuntimeError, match="progress callback"):
                box[0].wait()
            seen.append(box[0].cancel())

    with stalling(on="create") as stall:
        live = {"s": StateDict(x=torch.ones(5_000_000))}
        box.append(Snapshot.async_take("stalling+memory://callback", live, progress=progress))
        stall.release()
        with pytest.raises(SnapshotError, match="cancelled"):
            box[0].wait(30)
    assert seen == [True]


def test_pending_snapshot_wait_raises_in_a_forked_child(tmp_path, warm):
    script = f"""
import os, torch
from snapshot import Snapshot, SnapshotError, StateDict
pending = Snapshot.async_take({str(tmp_path / "s")!r}, {{"s": StateDict(x=torch.ones(4_000_000))}})
child = os.fork()
if child == 0:
    try:
        pending.wait()
    except SnapshotError as error:
        os._exit(0 if "fork" in str(error) else 1)
    os._exit(2)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
pending.wait()
raise SystemExit(code)
"""
    warm.run(script)


@pytest.mark.parametrize("budget", [1, 64, 100_000, 1_000_000, 33_333_333])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_memory_budget_bytes_of_any_size_works_with_any_element(budget, dtype):
    tensor = torch.arange(600_000).to(dtype).view(300_000, 2)[:, 0]
    for take in (Snapshot.take, lambda *a, **k: Snapshot.async_take(*a, **k).wait()):
        take(
            "memory://budget",
            {"s": StateDict(t=tensor)},
            overwrite=True,
            options=TakeOptions(memory_budget_bytes=budget),
        )
        live = StateDict(t=torch.zeros(300_000, 2, dtype=dtype)[:, 1])
        Snapshot("memory://budget").restore({"s": live}, options=RestoreOptions(memory_budget_bytes=budget))
        assert torch.equal(live["t"], tensor)
