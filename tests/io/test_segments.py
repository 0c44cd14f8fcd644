"""Segments of staging memory: the pages of long ones are allocated by several threads."""

import ctypes
import mmap
import threading

import pytest

from snapshot.io import arena
from snapshot.io.arena import GRAIN, Segment
from snapshot.tensors.buffers import populate_pages

LIBC = ctypes.CDLL(None, use_errno=True)
MiB = 1 << 20


def resident(segment):
    """Return how many bytes of a segment have pages."""
    pages = (ctypes.c_ubyte * (segment.size // mmap.PAGESIZE))()
    assert LIBC.mincore(ctypes.c_void_p(segment._address), ctypes.c_size_t(segment.size), pages) == 0
    return sum(each & 1 for each in pages) * mmap.PAGESIZE


@pytest.fixture(autouse=True)
def supported():
    probe = Segment(MiB, GRAIN, shared=False)
    if not populate_pages(probe._address, MiB):
        pytest.skip("this kernel cannot allocate pages ahead")


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("size", [GRAIN, 9 * MiB, 25 * MiB + GRAIN])
def test_segment_allocates_all_pages(monkeypatch, size, lanes, shared):
    monkeypatch.setattr(arena, "_POPULATED", 8 * MiB)
    monkeypatch.setenv("SNAPSHOT_LANES", str(lanes))
    segment = Segment(size + GRAIN, GRAIN, shared=shared)
    began, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: (began.append(self), start(self))[1])
    segment.populate(0, size)
    assert len(began) == min(lanes, max(1, size // (8 * MiB))) - 1
    assert size <= resident(segment) <= size + GRAIN + 2 * MiB
    segment.close()


def test_segment_allocation_error_is_raised_after_all_threads_ended(monkeypatch):
    monkeypatch.setattr(arena, "_POPULATED", 4 * MiB)
    monkeypatch.setenv("SNAPSHOT_LANES", "4")
    calls = []

    def fail(address, nbytes):
        calls.append(nbytes)
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError("none is left")
        return True

    monkeypatch.setattr(arena, "populate_pages", fail)
    segment = Segment(16 * MiB, GRAIN, shared=False)
    with pytest.raises(MemoryError, match="none is left"):
        segment.populate(0, 16 * MiB)
    assert calls == [4 * MiB] * 4


def test_segment_allocation_interrupt_is_raised_after_all_threads_ended(monkeypatch):
    monkeypatch.setattr(arena, "_POPULATED", 8 * MiB)
    monkeypatch.setenv("SNAPSHOT_LANES", "2")
    interrupted, ended, join = threading.Event(), [], threading.Thread.join

    def populate(address, nbytes):
        if threading.current_thread() is not threading.main_thread():
            assert interrupted.wait(60)
            ended.append(nbytes)
        return True

    def interrupt(thread):
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        join(thread)

    monkeypatch.setattr(arena, "populate_pages", populate)
    segment = Segment(16 * MiB, GRAIN, shared=False)
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        segment.populate(0, 16 * MiB)
    assert ended == [8 * MiB]


def test_segment_allocation_works_if_no_thread_can_be_started(monkeypatch):
    monkeypatch.setattr(arena, "_POPULATED", 4 * MiB)
    monkeypatch.setenv("SNAPSHOT_LANES", "4")

    def refuse(self):
        raise RuntimeError("can't start new thread")

    segment = Segment(16 * MiB, GRAIN, shared=False)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    segment.populate(0, 16 * MiB)
    assert resident(segment) == 16 * MiB
