"""Takes of a few values: they pass few times from thread to thread, which would cost more than their bytes."""

import threading

import torch

from snapshot import Snapshot, StateDict
from snapshot.io import loop


def test_small_take_and_restore_switch_threads_few_times(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_DIRECT_IO", "never")  # otherwise it depends on the file system
    state = {"s": StateDict(a=torch.ones(4, 4), b=torch.ones(8), step=3)}
    Snapshot.take(tmp_path / "first", state)
    pool, calls, started = loop._loop.get().pool, [], []
    submit, start = pool.submit, threading.Thread.start
    monkeypatch.setattr(pool, "submit", lambda *args, **kwargs: (calls.append(args[0]), submit(*args, **kwargs))[1])
    monkeypatch.setattr(threading.Thread, "start", lambda self: (started.append(self), start(self))[1])
    Snapshot.take(tmp_path / "s", state)
    assert len(calls) == 4  # look at the folder, claim, data file, commit
    assert not started
    calls.clear()
    state["s"]["a"].zero_()
    Snapshot(tmp_path / "s").restore(state)
    assert state["s"]["a"].eq(1).all()
    assert len(calls) == 3  # manifest, look at the data file, data
    assert not started


def test_small_take_digests_a_large_object_in_another_thread(tmp_path, monkeypatch):
    pool, calls = loop._loop.get().pool, []
    submit = pool.submit
    state = {"s": StateDict(text="x" * (1 << 20))}
    monkeypatch.setattr(pool, "submit", lambda *args, **kwargs: (calls.append(args[0]), submit(*args, **kwargs))[1])
    Snapshot.take(tmp_path, state)
    assert any("_describe" in repr(each) for each in calls)
    assert Snapshot(tmp_path).read_object("0/s/text") == "x" * (1 << 20)
