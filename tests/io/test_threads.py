"""State that threads share. Most of these tests can fail only without the GIL."""

import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from snapshot import Snapshot, StateDict, events
from snapshot.io.aio import pop_first
from snapshot.io.system import drop_oldest
from snapshot.save.pace import _Place

THREADS = 4


@pytest.fixture(autouse=True)
def switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work):
    """Run work in several threads that begin together, and return the results."""
    together = threading.Barrier(THREADS)

    def run(number):
        together.wait(60)
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(THREADS)))


def test_pop_first_from_a_shared_queue_returns_each_item_once():
    queue = deque(range(5000))

    def take(_):
        return list(iter(lambda: pop_first(queue), None))

    assert sorted(item for found in in_threads(take) for item in found) == list(range(5000))


def test_drop_oldest_bounds_a_cache_filled_by_several_threads():
    kept = {}

    def fill(number):
        for each in range(2000):
            kept[number, each] = each
            drop_oldest(kept, 16)

    in_threads(fill)
    drop_oldest(kept, 16)
    assert len(kept) == 16


def test_compression_speeds_are_noted_and_read_by_several_threads():
    place = _Place()
    place.note(1.0, 1.0, packed=False)

    def note(number):
        for each in range(500):
            place.note(1.0 + each, 2.0 + each, packed=bool(number % 2))
            assert place.link() > 0
            place.choose()

    in_threads(note)
    assert place.takes == THREADS * 500


def test_event_handlers_of_packages_are_loaded_before_any_thread_continues(monkeypatch):
    heard = deque()

    class Point:
        name, value = "slow", "package:handler"

        def load(self):
            assert not loading.is_set()
            loading.set()
            threading.Event().wait(0.05)  # other threads send events meanwhile
            return heard.append

    loading = threading.Event()
    monkeypatch.setattr(events, "_points", [Point()])
    monkeypatch.setattr(events, "_brought", [])
    in_threads(lambda number: events.emit("blocked", "take", f"memory://{number}"))
    assert sorted(event.path for event in heard) == [f"memory://{number}" for number in range(THREADS)]


def test_restore_in_several_threads_counts_each_read_once(tmp_path):
    state = {f"w{number}": torch.full((1 << 18,), float(number)) for number in range(24)}
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict(**state)})

    def restore(_):
        target = StateDict(**{name: torch.zeros_like(value) for name, value in state.items()})
        report = Snapshot(str(tmp_path / "s")).restore({"s": target})
        assert all(torch.equal(target[name], value) for name, value in state.items())
        return report.bytes_read

    assert len(set(in_threads(restore))) == 1
