"""The system below: flushes, locks, signals, and values of a process, also as other platforms have them."""

import errno
import gc
import os
import signal
import threading
from types import SimpleNamespace

import pytest

from snapshot.errors import SnapshotError
from snapshot.io import system


@pytest.mark.parametrize(
    ("windows", "failures", "calls", "raised"),
    [(True, 2, 3, False), (True, 10**6, None, True), (False, 1, 1, True), (False, 0, 1, False)],
)
def test_calls_that_windows_refuses_while_a_file_is_open_are_repeated(windows, failures, calls, raised, monkeypatch):
    monkeypatch.setattr(system, "WINDOWS", windows)
    monkeypatch.setattr(system, "_POLL", 0)
    made = []

    def call():
        made.append(1)
        if len(made) <= failures:
            raise PermissionError

    if raised:
        with pytest.raises(PermissionError):
            system._patiently(call)
    else:
        system._patiently(call)
    assert len(made) == (system.TRIES if calls is None else calls)


def test_store_file_replaces_a_file_whole_or_leaves_nothing(tmp_path, monkeypatch):
    path, synced = tmp_path / "x", []
    monkeypatch.setattr(system, "sync_file", synced.append)
    system.store_file(str(path), b"first")
    assert (path.read_bytes(), synced) == (b"first", [])
    system.store_file(str(path), b"second", durable=True)
    assert path.read_bytes() == b"second"
    assert len(synced) == 1

    def fail(*_):
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(system, "replace_file", fail)
    with pytest.raises(OSError, match="no space"):
        system.store_file(str(path), b"third")
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert path.read_bytes() == b"second"
    system.remove_file(str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    ("full", "error", "raised"),
    [
        (None, None, None),
        (51, None, None),
        (51, errno.ENOTSUP, None),
        (51, errno.EIO, errno.EIO),
    ],
)
def test_sync_file_empties_the_cache_of_the_disk_where_it_can(full, error, raised, monkeypatch):
    calls = []

    def control(descriptor, command):
        calls.append(("full", descriptor, command))
        if error is not None:
            raise OSError(error, "x")

    held = {} if full is None else {"F_FULLFSYNC": full}
    monkeypatch.setattr(system, "fcntl", SimpleNamespace(fcntl=control, **held))
    monkeypatch.setattr(system.os, "fsync", lambda descriptor: calls.append(("plain", descriptor)))
    if raised:
        with pytest.raises(OSError, match="x"):
            system.sync_file(7)
    else:
        system.sync_file(7)
    expected = [] if full is None else [("full", 7, 51)]
    assert calls == expected + ([("plain", 7)] if full is None or error == errno.ENOTSUP else [])


def test_sync_folder_passes_over_file_systems_that_cannot(tmp_path, monkeypatch):
    def fail(number):
        def sync(_):
            raise OSError(number, "x")

        monkeypatch.setattr(system, "sync_file", sync)

    before = len(os.listdir("/proc/self/fd"))
    system.sync_folder(str(tmp_path))
    fail(errno.EINVAL)
    system.sync_folder(str(tmp_path))
    fail(errno.EIO)
    for call in (system.sync_folder, system.sync_path):
        with pytest.raises(OSError, match="x"):
            call(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        system.sync_folder(str(tmp_path / "none"))
    monkeypatch.setattr(system, "WINDOWS", True)
    system.sync_folder(str(tmp_path))
    with pytest.raises(FileNotFoundError):
        system.sync_folder(str(tmp_path / "none"))


@pytest.mark.parametrize("nbytes", [0, 1, (1 << 20) + 3])
@pytest.mark.parametrize("kind", ["posix", "plain"])
def test_allocate_gives_a_file_its_length(kind, nbytes, tmp_path, monkeypatch):
    if kind == "plain":
        monkeypatch.delattr(os, "posix_fallocate")
    if not nbytes and kind == "posix":
        return
    with (tmp_path / "x").open("w+b", buffering=0) as file:
        file.write(b"ab")
        system.allocate(file.fileno(), nbytes)
        assert os.fstat(file.fileno()).st_size == max(nbytes, 2)
        assert (os.fstat(file.fileno()).st_blocks > 0) is (nbytes > 0) or nbytes == 0


def test_try_lock_folder_yields_whether_the_lock_was_free(tmp_path, monkeypatch):
    with system.try_lock_folder(str(tmp_path), 0) as first:
        assert first
        with system.try_lock_folder(str(tmp_path), 0.01) as second:
            assert not second
    with system.try_lock_folder(str(tmp_path), 0) as again:
        assert again

    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(system.fcntl, "flock", refuse)
    with system.try_lock_folder(str(tmp_path), 0) as free:
        assert free, "a file system without locks"


def test_lower_priority_never_raises_it(monkeypatch):
    made = []
    monkeypatch.setattr(system.os, "setpriority", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(system.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(system, "libc", SimpleNamespace(syscall=lambda *arguments: made.append(arguments)))
    for held, nice in ((0, 10), (15, 15)):
        monkeypatch.setattr(system.os, "getpriority", lambda *_, held=held: held)
        system.lower_priority(10, 3)
        assert made == [(os.PRIO_PROCESS, 0, nice), (251, 1, 0, 3)]
        made.clear()
    monkeypatch.setattr(system.platform, "machine", lambda: "other")
    system.lower_priority(10, 3)
    assert len(made) == 1
    monkeypatch.setattr(system.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(system, "libc", None)
    system.lower_priority(10, 3)


def test_expect_linux_names_the_platform(monkeypatch):
    for name in ("linux", "linux2"):
        monkeypatch.setattr(system, "PLATFORM", name)
        system.expect_linux("direct I/O")
    monkeypatch.setattr(system, "PLATFORM", "darwin")
    with pytest.raises(SnapshotError, match="direct I/O: needs Linux, got darwin"):
        system.expect_linux("direct I/O")
    assert system._open_libc() == system.Libc(None, None, None, None, None, None)


def test_find_signals_leaves_out_those_of_other_platforms():
    assert system.find_signals("SIGINT", "SIGNONE", "SIGTERM") == (signal.SIGINT, signal.SIGTERM)


def test_signals_are_held_back_and_only_the_first_counts():
    with system.unwind_on_signals():
        before = []
        with pytest.raises(SystemExit) as caught, system.hold_signals():  # noqa: PT012 - it raises at its end
            with system.hold_signals():
                signal.raise_signal(signal.SIGTERM)
                before.append("inner")
            before.append("outer")
        assert caught.value.code == 128 + signal.SIGTERM
        assert before == ["inner", "outer"]
        signal.raise_signal(signal.SIGINT)  # a second one does not interrupt the clean-up
        with system.hold_signals():
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), system.unwind_on_signals():
        signal.raise_signal(signal.SIGINT)
    with system.unwind_on_signals():
        assert signal.getsignal(signal.SIGTERM) == system._state.handle
        with system.hold_signals():
            pass
    assert signal.getsignal(signal.SIGTERM) != system._state.handle
    seen = []

    def other():
        with system.unwind_on_signals():
            seen.append(signal.getsignal(signal.SIGTERM) == system._state.handle)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(60)
    assert seen == [False]


def test_gc_paused_may_be_nested_and_leaves_a_disabled_collector_alone():
    assert gc.isenabled()
    with system.gc_paused():
        with system.gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        pauses = system._pauses.get()
        pauses.forked()
        assert gc.isenabled(), "a child has none of the threads that pause"
        gc.disable()
    assert gc.isenabled()
    gc.disable()
    try:
        with system.gc_paused():
            system._pauses.get().forked()
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    system._pauses.get().leave()
    assert system._pauses.get()._inside == 0


def test_per_process_values_are_made_once_and_renewed_in_a_child():
    made, released = [], []
    plain = system.PerProcess(lambda: made.append(1) or len(made))
    kept = system.PerProcess(list, lambda value: released.append(value) or [*value, "child"])
    assert plain.made() is None
    assert (plain.get(), plain.get(), plain.made()) == (1, 1, 1)
    kept.renew()
    assert kept.made() is None
    kept.get().append("parent")
    for each in (plain, kept):
        each.renew()
    assert plain.made() is None
    assert plain.get() == 2
    assert kept.get() == ["parent", "child"]
    assert released == [["parent"]]
    plain.reset()
    assert plain.get() == 3
    system._all.remove(plain)
    system._all.remove(kept)
