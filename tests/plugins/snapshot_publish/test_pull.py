"""Pulling: verified, atomic, from the nearest version, and the newest usable one whatever is damaged."""

import errno
import json
import multiprocessing
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
import torch

from snapshot import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError, StorageError
from snapshot.io.loop import _unfinished, in_own_thread
from snapshot.testing.storages import faulty
from snapshot_publish import Publisher, PublishOptions, Subscriber
from snapshot_publish.store import VersionStore
from snapshot_publish.subscriber import MARKER
from tests.helpers.states import flip
from tests.plugins.snapshot_publish.models import model
from tests.plugins.snapshot_publish.published_runs import Run, expect_loaded, loaded, names_of


def test_pull_applies_the_delta_of_each_version(tmp_path, told):
    run = Run(tmp_path, 1, full_every=10)
    subscriber = Subscriber(run.store, tmp_path / "local")
    assert subscriber.current is None
    for version in range(1, 6):
        folder = subscriber.pull()
        assert folder == tmp_path / "local" / f"weight_v{version:06d}"
        assert subscriber.current == folder
        expect_loaded(tmp_path / "local" / "current", run.states[version])
        assert (folder / "config.json").read_bytes() == b'{"x": 1}'
        run.publish()
    pulled = [event.fields for event in told if event.name == "pulled"]
    assert [each["base"] for each in pulled] == [None, 1, 2, 3, 4]
    assert pulled[1]["received"] < pulled[0]["received"] / 10


def test_pull_applies_a_delta_chain_at_once(tmp_path, told):
    run = Run(tmp_path, 2, full_every=10)
    subscriber = Subscriber(run.store, tmp_path / "local")
    subscriber.pull()
    run.publish(4)
    expect_loaded(subscriber.pull(), run.states[6])
    expect_loaded(Subscriber(run.store, tmp_path / "other").pull(), run.states[6])
    assert [(e.fields["base"], e.fields["versions"]) for e in told if e.name == "pulled"] == [
        (None, 2),
        (2, 4),
        (None, 6),
    ]


def test_pull_by_step_and_by_version(tmp_path):
    run = Run(tmp_path, 3)
    restarted = Publisher(run.store)
    again = restarted.publish(20, run.net).wait().version  # the trainer was rolled back
    subscriber = Subscriber(run.store, tmp_path / "local")
    assert subscriber.pull(10).name == "weight_v000001"
    assert subscriber.pull(20).name == f"weight_v{again:06d}"
    assert subscriber.pull(version=2).name == "weight_v000002"
    assert subscriber.pull("latest").name == f"weight_v{again:06d}"
    with pytest.raises(SnapshotNotFoundError, match="no version of step 77 is published"):
        subscriber.pull(77)
    with pytest.raises(SnapshotNotFoundError, match="no version 77 is published"):
        subscriber.pull(version=77)
    with pytest.raises(ValueError, match="not both"):
        subscriber.pull(10, version=1)
    with pytest.raises(ValueError, match="must be an int or 'latest'"):
        subscriber.pull("newest")
    assert subscriber.current.name == f"weight_v{again:06d}"


def test_pull_without_versions_raises_not_found(tmp_path):
    with pytest.raises(SnapshotNotFoundError, match="no version is published"):
        Subscriber(tmp_path / "store", tmp_path / "local").pull()


def test_pull_never_changes_files_that_are_memory_mapped(tmp_path):
    run = Run(tmp_path, 1)
    subscriber = Subscriber(run.store, tmp_path / "local", keep=1)
    subscriber.pull()
    mapped = loaded(tmp_path / "local" / "current")
    for _ in range(3):
        run.publish()
        subscriber.pull()
    assert all(torch.equal(mapped[name], run.states[1][name]) for name in mapped)
    assert sorted(each.name for each in (tmp_path / "local").glob("weight*")) == ["weight_v000004"]


def test_pull_links_unchanged_files(tmp_path):
    publisher = Publisher(tmp_path / "store")
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    publisher.publish(1, state).wait()
    subscriber = Subscriber(tmp_path / "store", tmp_path / "local")
    first = subscriber.pull()
    publisher.publish(2, state).wait()
    second = subscriber.pull()
    [one], [two] = first.glob("*.safetensors"), second.glob("*.safetensors")
    assert one.samefile(two)
    assert (first / "model.safetensors.index.json").stat().st_ino != (
        second / "model.safetensors.index.json"
    ).stat().st_ino


@pytest.mark.parametrize("damage", ["shard", "index", "gone"])
def test_pull_of_a_damaged_newest_version_falls_back(tmp_path, told, damage):
    run = Run(tmp_path, 4)
    if damage == "shard":
        flip(run.shard(4))
    elif damage == "index":
        run.index(4).write_bytes(run.index(4).read_bytes()[:-10])
    else:
        run.shard(4).unlink()
    subscriber = Subscriber(run.store, tmp_path / "local")
    expect_loaded(subscriber.pull(), run.states[3])
    assert names_of(told, "fell_back", "pulled") == ["fell_back", "pulled"]
    with pytest.raises(CorruptSnapshotError, match="no usable version 4"):
        subscriber.pull(version=4)
    with pytest.raises(CorruptSnapshotError, match="no usable version of step 40"):
        subscriber.pull(40)
    assert subscriber.current.name == "weight_v000003"


def test_pull_with_a_missing_delta_falls_back_to_the_version_below_it(tmp_path, told):
    run = Run(tmp_path, 6)
    run.shard(3).unlink()
    run.index(3).unlink()
    expect_loaded(Subscriber(run.store, tmp_path / "local").pull(), run.states[2])
    assert names_of(told, "fell_back") == ["fell_back"] * 3


def test_pull_with_a_damaged_chain_falls_back_to_the_last_complete_version(tmp_path):
    run = Run(tmp_path, 8, full_every=3, keep=5)  # 1, 4 and 7 are full
    flip(run.shard(8))
    expect_loaded(Subscriber(run.store, tmp_path / "a").pull(), run.states[7])
    flip(run.shard(7))
    expect_loaded(Subscriber(run.store, tmp_path / "b").pull(), run.states[6])
    flip(run.shard(4))
    expect_loaded(Subscriber(run.store, tmp_path / "c").pull(), run.states[3])


def test_pull_with_all_versions_damaged_raises(tmp_path):
    run = Run(tmp_path, 2)
    flip(run.shard(1))
    with pytest.raises(CorruptSnapshotError, match="no usable version") as caught:
        Subscriber(run.store, tmp_path / "local").pull()
    assert len(caught.value.faults) == 2
    assert sorted(os.listdir(tmp_path / "local")) == [".snapshot-pull.lock"]


def test_pull_replaces_a_damaged_local_version_by_the_complete_one(tmp_path):
    run = Run(tmp_path, 2)
    subscriber = Subscriber(run.store, tmp_path / "local")
    [file] = subscriber.pull().glob("*.safetensors")
    flip(file)
    run.publish()
    expect_loaded(subscriber.pull(), run.states[3])


def test_pull_after_a_reboot_verifies_local_versions(tmp_path, told):
    run = Run(tmp_path, 2)
    subscriber = Subscriber(run.store, tmp_path / "local")
    folder = subscriber.pull()

    def reboot():
        marker = json.loads((folder / MARKER).read_text())
        (folder / MARKER).write_text(json.dumps({**marker, "boot": "another"}))

    reboot()
    subscriber.pull()
    assert names_of(told, "damaged", "pulled") == ["pulled"]
    reboot()
    [file] = folder.glob("*.safetensors")
    flip(file)
    expect_loaded(subscriber.pull(), run.states[2])
    assert names_of(told, "damaged", "pulled") == ["pulled", "damaged", "pulled"]


def test_pull_into_the_folder_of_another_store_is_refused(tmp_path):
    run, other = Run(tmp_path / "one", 2), Run(tmp_path / "two", 3)
    folder = Subscriber(run.store, tmp_path / "local").pull()
    with pytest.raises(SnapshotError, match=f"has versions of {run.store}, got {other.store}; use another folder"):
        Subscriber(other.store, tmp_path / "local").pull()
    assert Subscriber(run.store, tmp_path / "local").current == folder
    expect_loaded(folder, run.states[2])


def test_pull_from_a_recreated_store_replaces_local_versions(tmp_path):
    run = Run(tmp_path, 2)
    subscriber = Subscriber(run.store, tmp_path / "local")
    subscriber.pull()
    os.rename(run.store, tmp_path / "old")
    anew = Run(tmp_path, 3)
    expect_loaded(subscriber.pull(version=2), anew.states[2])
    expect_loaded(subscriber.pull(), anew.states[3])


def test_pull_from_an_unreachable_store_changes_nothing(tmp_path):
    run = Run(tmp_path, 2)
    local = tmp_path / "local"
    before = Subscriber(run.store, local).pull()
    for operation in ("list", "get", "read_into", "stat"):
        run.publish()
        down = faulty(on=operation, times=1000, error=OSError(111, "Connection refused"))
        with down, pytest.raises(StorageError, match="Connection refused"):
            Subscriber(f"faulty+file://{run.store}", tmp_path / f"fresh-{operation}").pull()
    assert Subscriber(run.store, local).current == before


def test_pull_removes_leftovers_of_killed_pulls(tmp_path):
    run = Run(tmp_path, 1)
    local = tmp_path / "local"
    (local / ".pull-0123" / "sub").mkdir(parents=True)
    (local / ".pull-link").symlink_to("nothing")
    Subscriber(run.store, local).pull()
    assert sorted(each.name for each in local.iterdir()) == [".snapshot-pull.lock", "current", "weight_v000001"]


def test_pull_into_an_unwritable_folder_raises(tmp_path):
    run = Run(tmp_path, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Not a directory"):
        Subscriber(run.store, tmp_path / "file" / "local").pull()


def test_pull_on_a_full_disk_raises_and_keeps_the_last_version(tmp_path, monkeypatch):
    run = Run(tmp_path, 1)
    local = tmp_path / "local"
    before = Subscriber(run.store, local).pull()
    run.publish()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left on device") as caught:
            Subscriber(run.store, local).pull()
        assert caught.value.errno == errno.ENOSPC
    assert sorted(each.name for each in local.iterdir()) == [".snapshot-pull.lock", "current", "weight_v000001"]
    assert Subscriber(run.store, local).current == before
    expect_loaded(before, run.states[1])
    expect_loaded(Subscriber(run.store, local).pull(), run.states[2])


def _pull(store, local, ready, found):
    ready.wait()
    found.put(str(Subscriber(store, local).pull()))


def test_pull_by_several_processes_of_a_host_downloads_once(tmp_path):
    run = Run(tmp_path, 3)
    context = multiprocessing.get_context("forkserver")
    ready, found = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_pull, args=(run.store, tmp_path / "local", ready, found)) for _ in range(4)]
    for each in processes:
        each.start()
    assert {found.get(timeout=300) for _ in processes} == {str(tmp_path / "local" / "weight_v000003")}
    for each in processes:
        each.join()
    expect_loaded(tmp_path / "local" / "current", run.states[3])


def test_pull_gets_a_newer_version_if_retention_deletes_the_one_being_read(tmp_path, monkeypatch, told):
    """Versions that disappear while they are read are not an error: a newer one replaced them."""
    run = Run(tmp_path, 2, full_every=2, keep=1)
    chain = VersionStore.chain

    async def publish_first(store, *arguments):
        if len(run.states) == 2:
            await in_own_thread(run.publish, 2)  # which deletes the versions 1 and 2
        return await chain(store, *arguments)

    monkeypatch.setattr(VersionStore, "chain", publish_first)
    expect_loaded(Subscriber(run.store, tmp_path / "local").pull(), run.states[4])
    assert not run.index(2).exists()
    assert names_of(told, "fell_back", "pulled") == ["fell_back", "pulled"]


class Engine(BaseHTTPRequestHandler):
    got: ClassVar = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.got.append((self.path, body))
        self.send_response(500 if self.path.startswith("/broken") else 200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def engine_server():
    Engine.got = []
    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_publish_notify_calls_engines_and_never_fails(tmp_path, engine_server, told, caplog):
    urls = [f"{engine_server}/pull_weights", f"{engine_server}/broken?token=secret", "http://127.0.0.1:9/gone"]
    publisher = Publisher(tmp_path / "store", options=PublishOptions(notify=urls))
    assert publisher.publish(7, model()).wait().version == 1
    folder = Subscriber(tmp_path / "store", tmp_path / "local", notify=urls).pull()
    for work in list(_unfinished.get()):
        work.settled(60)
    bodies = {body["target_version"]: body for path, body in Engine.got if path == "/pull_weights"}
    assert bodies[1]["source_dir"] == str(tmp_path / "store")
    assert [b["local_checkpoint_dir"] for _, b in Engine.got if "local_checkpoint_dir" in b] == [str(folder)] * 2
    assert names_of(told, "notify_failed") == ["notify_failed"] * 4
    assert "secret" not in caplog.text
