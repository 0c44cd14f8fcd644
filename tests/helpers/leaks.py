"""What a test must not leave behind in this process."""

import contextlib
import os
import sys
import threading
import time

import pytest


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a file descriptor open, or a thread that was not there.

    A room's conftest.py imports it for all tests of the room.
    """
    with no_leak():
        yield


@contextlib.contextmanager
def no_leak():
    """No file descriptor stays open, nor a thread that was not there (the library's own are kept)."""
    from snapshot import Snapshot, StateDict
    from snapshot.io.arena import release_memory

    Snapshot.take("memory://warm", {"s": StateDict(x=1)}, overwrite=True)
    release_memory()  # what is kept depends on the tests before; memory in use stays
    before = open_files()
    threads = set(threading.enumerate())
    yield
    left = set(threading.enumerate()) - threads - _compiler_threads()
    left = {each for each in left if not each.name.startswith(("snapshot-io", "tqdm"))}  # these are kept
    for thread in left:
        thread.join(10)  # it may be about to end
    left = {each for each in left if each.is_alive()}
    assert not left, left
    release_memory()
    after = open_files()
    for _ in range(100):  # a thread of an earlier test may start a process at this moment
        if len(after) <= len(before):
            break
        time.sleep(0.02)
        after = open_files()
    assert len(after) <= len(before), set(after.items()) - set(before.items())


def _compiler_threads():
    """Return the threads that torch's compiler keeps as long as the process lives."""
    module = sys.modules.get("torch._inductor.async_compile")
    pool = module and module.AsyncCompile.pool
    return pool()._threads if pool and pool.cache_info().currsize else set()


def open_files():
    """Return what each descriptor of this process refers to."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[descriptor] = os.readlink(f"/proc/self/fd/{descriptor}")
    return found
