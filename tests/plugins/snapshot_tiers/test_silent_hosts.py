"""Hosts that do not answer: what they have is not damaged, so no older step is restored instead of it."""

import contextlib
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from snapshot import Snapshot, SnapshotManager, TakeOptions
from snapshot.errors import CorruptSnapshotError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.storage import Context
from snapshot.io.url import URL
from snapshot.runs.timeline import NO_ORIGIN
from snapshot_tiers import tier_set, uploader_process
from snapshot_tiers.control import Host, UploaderLink, pid_in
from snapshot_tiers.near_steps import CensusStep, NearFolder
from snapshot_tiers.tier_set import TierSet
from tests.plugins.snapshot_tiers.jobs import ask, manager_of, rank, runs_in, state, until

NAME = "data/0123456789ab-0-0.safetensors"


class Place:
    """A place of a file, which answers with an error."""

    def __init__(self, error):
        self.error, self.url = error, "peer://x"

    async def read_into(self, *_, **__):
        raise self.error

    get = stat = read_into


class Sources:
    save_id, remote = "0123456789ab", False

    def __init__(self, *errors):
        self.found = [Place(each) for each in errors]

    def places(self, path):
        return self.found

    def size(self, path):
        return None

    def passed(self, *_):
        pass


ABSENT = StorageNotFoundError("there is no such key")
SILENT = StorageError("timed out")


@pytest.mark.parametrize("read", ["read_into", "get", "stat"])
@pytest.mark.parametrize(
    ("errors", "is_damage"),
    [((ABSENT, ABSENT), True), ((SILENT, ABSENT), False), ((ABSENT, SILENT), False), ((ABSENT,), True)],
)
def test_silent_host_is_not_damage(tmp_path, read, errors, is_damage):
    """A restore would take an older step for the newest good one, and abandon those after it."""
    storage = open_storage(URL("near", str(tmp_path)), {"sources": Sources(*errors)}, Context())
    works = {
        "read_into": lambda: storage.read_into(NAME, 0, [bytearray(1)]),
        "get": lambda: storage.get(NAME),
        "stat": lambda: storage.stat(NAME),
    }
    with pytest.raises(StorageError) as caught:
        run(works[read]())
    assert isinstance(caught.value, StorageNotFoundError) == is_damage


def test_silent_host_beside_damage_elsewhere_is_not_damage(tmp_path):
    sources = Sources(SILENT, CorruptSnapshotError("its digest is wrong"))
    storage = open_storage(URL("near", str(tmp_path)), {"sources": sources}, Context())
    with pytest.raises(StorageError, match="timed out"):
        run(storage.read_into(NAME, 0, [bytearray(1)]))


@pytest.mark.parametrize(("error", "is_raised"), [(SILENT, True), (ABSENT, False), (CorruptSnapshotError("x"), False)])
def test_silent_host_manifest_is_not_missing(tmp_path, monkeypatch, error, is_raised):
    def read(*_):
        raise error

    monkeypatch.setattr(tier_set, "read_manifest", read)
    tiers = SimpleNamespace(member=SimpleNamespace(index=0), folder=NearFolder(str(tmp_path)))
    step = CensusStep(10, "s", NO_ORIGIN, {1})
    if is_raised:
        with pytest.raises(StorageError, match="timed out"):
            TierSet._sizes_of(tiers, step)
    else:
        assert TierSet._sizes_of(tiers, step) == {}


def _take(far, near):
    with manager_of(far, f"{near}/{'ab'[rank()]}", upload=None, grace=0, keep_near=None) as manager:
        for step in (10, 20):
            manager.take(step, state(step), options=TakeOptions(replicated=["same/**"]))
        dist.barrier()
        link = manager._steps.joined.link
        link.await_registration()
        link._say_goodbye = lambda _: link._drop()  # the uploader stays, as after a crash
        link._closed.set()
        link._drop()
        manager._steps._set = None


def _restore(far, near):
    live = {"same": state(-1)["same"]}
    with manager_of(far, f"{near}/{'ab'[rank()]}", upload=None, grace=0, keep_near=None) as manager:
        try:
            return manager.restore_latest(live), float(live["same"]["tensor"][0])
        except SnapshotError as error:
            return str(error)


def test_silent_uploader_does_not_make_restore_skip_a_step(two, tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a").parent
    hosts("b")
    two.run(_take, far, near, timeout=300)
    [folder] = runs_in(hosts("a"))
    pid = until(lambda: _pid_of(folder))
    os.kill(pid, signal.SIGSTOP)
    try:
        assert two.run(_restore, far, near, timeout=300) == [(20, 20.0)] * 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _pid_of(folder):
    try:
        return ask(folder).pid
    except SnapshotError:
        return None


def test_close_waits_for_a_silent_uploader_no_longer_than_grace(tmp_path, hosts, monkeypatch):
    """The flush, the removal of old near steps, and the goodbye each asked it, and waited."""
    manager = manager_of(tmp_path / "far", hosts("a"), upload=None, grace=0)
    manager.take(10, state(10))
    [folder] = runs_in(hosts("a"))
    pid = until(lambda: _pid_of(folder))
    os.kill(pid, signal.SIGSTOP)
    patience = []
    right = UploaderLink._ask

    def ask(self, request, seconds, end):
        patience.append(seconds)  # also while another thread asks
        return right(self, request, seconds, end)

    monkeypatch.setattr(UploaderLink, "_ask", ask)
    try:
        manager.close()
        assert 0 < sum(patience) < 8
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("is_left", [False, True])
def test_uploader_that_answers_during_close_or_later_is_told_of_the_end(tmp_path, hosts, is_left):
    """It would stay for an hour, as after a crash."""
    manager = manager_of(tmp_path / "far", hosts("a"), grace=0 if is_left else 30)
    assert manager.restore_latest(state(-1)) is None
    [folder] = runs_in(hosts("a"))
    pid = until(lambda: _pid_of(folder))
    link = manager._steps.joined.link
    os.kill(pid, signal.SIGSTOP)
    try:
        link.register()  # as when the ranks go on with a line
        closing = threading.Thread(target=manager.close)
        closing.start()
        until(link._closed.is_set)
        if is_left:
            closing.join()
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: pid_in(folder) is None)
    closing.join()


# The timeout of a manager


def _lose_a_rank(root, verb):
    """Rank 1 dies after the ranks have agreed on the step."""
    with SnapshotManager(root, signals=(), timeout=8) as manager:
        manager.take(1, state(1))
        if rank() == 1:

            def die(*_, **__):
                os.kill(os.getpid(), signal.SIGKILL)

            Snapshot.take = Snapshot.async_take = Snapshot.restore_with = die
        began = time.monotonic()
        try:
            if verb == "restore":
                manager.restore_latest(state(-1))
            else:
                getattr(manager, verb)(2, state(2))
        except SnapshotError:
            return time.monotonic() - began
    return None


@pytest.mark.parametrize("verb", ["take", "async_take", "restore"])
def test_manager_timeout_applies_to_takes_and_restores(fresh_pool, tmp_path, verb):
    pool = fresh_pool(2)
    pool.start(_lose_a_rank, str(tmp_path / "run"), verb)
    [seconds] = pool.finish(timeout=300, ranks=[0])
    assert seconds is not None  # and it has waited less than the default of 600


# The address on which a host offers files


def test_uploader_started_without_a_network_offers_files_at_the_known_address(tmp_path, monkeypatch):
    given = []

    def ensure(folder, address, seconds):
        given.append(address)
        return None, f"{address}:2"

    monkeypatch.setattr(tier_set, "ensure_uploader", ensure)
    monkeypatch.setattr(tier_set, "job_address", lambda: "127.0.0.1")
    hosts = [Host("a", "a", [0], "10.1.2.3:1"), Host("b", "b", [1], "")]
    for index in (0, 1):
        TierSet._connect(SimpleNamespace(member=SimpleNamespace(hosts=hosts, index=index, folder="")), 1.0)
    assert given == ["10.1.2.3", "127.0.0.1"]


@pytest.mark.parametrize(
    ("offered", "address", "is_kept"),
    [
        ("", "127.0.0.1", False),
        ("127.0.0.1:5", "127.0.0.1", True),
        ("127.0.0.1:5", "localhost", True),
        ("127.0.0.1:5", "10.1.2.3", False),
        ("10.1.2.3:5", "10.1.2.3", True),
        ("10.1.2.3:5", "10.1.2.4", True),
    ],
)
def test_uploader_that_others_cannot_reach_is_not_adopted(offered, address, is_kept):
    """It was started for a job on one host, or while the host had no network."""
    assert uploader_process._is_reached_by_others(offered, address) == is_kept
