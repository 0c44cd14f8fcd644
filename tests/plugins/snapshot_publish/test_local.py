"""The subscriber's folder: damaged, foreign, shared or in the way. A pull mends it or raises, and deletes nothing."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict
from snapshot.io.loop import _unfinished
from snapshot.testing.storages import recording
from snapshot_publish import Publisher, PublishOptions, Subscriber, build
from snapshot_publish import subscriber as local
from snapshot_publish import subscriber as notify
from snapshot_publish.store import VersionStore
from snapshot_publish.subscriber import MARKER
from tests.helpers.states import flip
from tests.plugins.snapshot_publish import engine
from tests.plugins.snapshot_publish.published_runs import Run, expect_loaded, names_of


@pytest.mark.parametrize("place", [".", "inside/local", "..", "link"])
def test_subscriber_folder_in_or_around_the_store_is_refused(tmp_path, place):
    store = tmp_path / "a" / "store"
    publisher = Publisher(store)
    publisher.publish(1, {"a": torch.ones(2)}).wait()
    Snapshot.take(tmp_path / "s", {"m": StateDict(a=torch.ones(2))})
    (tmp_path / "a" / "store" / "link").symlink_to(store)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="must not contain each other"):
        Subscriber(store, store / place)
    command = [sys.executable, "-m", "snapshot", "publish", tmp_path / "s", store, "--step", "3"]
    found = subprocess.run([*command, "--delta", store / place], check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert "must not contain each other" in found.stderr
    assert "Traceback" not in found.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("lost", ["shard", "index", "config.json", "size"])
def test_pull_rebuilds_a_local_version_that_lost_a_file(tmp_path, told, lost):
    run = Run(tmp_path, 1)
    subscriber = Subscriber(run.store, tmp_path / "local")

    def damage(folder):
        [shard] = folder.glob("*.safetensors")
        if lost == "size":
            os.truncate(shard, 100)
        else:
            {"shard": shard, "index": folder / "model.safetensors.index.json"}.get(lost, folder / lost).unlink()

    damage(subscriber.pull())
    expect_loaded(subscriber.pull(), run.states[1])  # the same version
    damage(subscriber.current)
    run.publish()
    folder = subscriber.pull()  # the next one
    expect_loaded(folder, run.states[2])
    assert (folder / "config.json").is_file()
    assert names_of(told, "damaged", "fell_back") == ["damaged"] * 2
    assert sorted(each.name for each in (tmp_path / "local").glob("weight*")) == ["weight_v000002"]


def test_pull_keeps_a_folder_of_others(tmp_path):
    run = Run(tmp_path, 1)
    precious = tmp_path / "local" / "weight_v000001" / "precious.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("x")
    with pytest.raises(SnapshotError, match="must be a version that was pulled"):
        Subscriber(run.store, tmp_path / "local").pull()
    assert precious.read_text() == "x"


def test_pull_with_a_folder_named_current_raises_before_the_download(tmp_path):
    run = Run(tmp_path, 1)
    (tmp_path / "local" / "current").mkdir(parents=True)
    with (
        recording() as log,
        pytest.raises(SnapshotError, match="current: must be a link of a subscriber"),
    ):
        Subscriber(f"recording+file://{run.store}", tmp_path / "local").pull()
    assert not log.operations


def _die_in_exchange(store, folder, after):
    exchange = local.exchange_paths

    def dying(*paths):
        if after:
            exchange(*paths)
        os.kill(os.getpid(), signal.SIGKILL)

    local.exchange_paths = dying
    Subscriber(store, folder).pull()


@pytest.mark.deadly
@pytest.mark.parametrize("after", [False, True])
def test_pull_killed_while_a_version_is_replaced_leaves_a_usable_link(tmp_path, after):
    run = Run(tmp_path, 1)
    subscriber = Subscriber(run.store, tmp_path / "local")
    subscriber.pull()
    shutil.rmtree(run.store)
    anew = Run(tmp_path, 1)
    anew.publish()
    shutil.rmtree(anew.store / "weight_v000002")
    child = os.fork()
    if child == 0:
        _die_in_exchange(anew.store, tmp_path / "local", after)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    expect_loaded(subscriber.current, (anew if after else run).states[1])
    expect_loaded(subscriber.pull(), anew.states[1])
    assert sorted(os.listdir(tmp_path / "local")) == [".snapshot-pull.lock", "current", "weight_v000001"]


def test_pull_without_an_atomic_exchange_renames_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "exchange_paths", lambda *_: False)
    run = Run(tmp_path, 1)
    Subscriber(run.store, tmp_path / "local").pull()
    shutil.rmtree(run.store)
    anew = Run(tmp_path, 1)
    expect_loaded(Subscriber(run.store, tmp_path / "local").pull(), anew.states[1])
    assert sorted(os.listdir(tmp_path / "local")) == [".snapshot-pull.lock", "current", "weight_v000001"]


def test_pull_with_local_damage_and_an_unusable_store_keeps_the_link(tmp_path, told):
    run = Run(tmp_path, 1)
    subscriber = Subscriber(run.store, tmp_path / "local")
    folder = subscriber.pull()
    marker = json.loads((folder / MARKER).read_text())
    (folder / MARKER).write_text(json.dumps({**marker, "boot": "another"}))
    [file] = folder.glob("*.safetensors")
    flip(file)
    content = run.shard(1).read_bytes()
    flip(run.shard(1))
    with pytest.raises(CorruptSnapshotError):
        subscriber.pull()
    assert subscriber.current == folder
    assert file.exists()
    run.shard(1).write_bytes(content)
    expect_loaded(Subscriber(run.store, tmp_path / "local").pull(), run.states[1])
    assert names_of(told, "damaged") == ["damaged"] * 2


def test_pull_does_not_download_a_damaged_version_again_at_once(tmp_path, told, monkeypatch):
    run = Run(tmp_path, 2, full_every=1)
    content = run.shard(2).read_bytes()
    flip(run.shard(2))
    with recording() as log:
        subscriber = Subscriber(f"recording+file://{run.store}", tmp_path / "local")
        expect_loaded(subscriber.pull(), run.states[1])
        first = len(log.of(path="*.safetensors"))
        for _ in range(3):
            expect_loaded(subscriber.pull(), run.states[1])
        assert first == len(log.of(path="*.safetensors")) > 0
        assert names_of(told, "fell_back") == ["fell_back"]
        run.shard(2).write_bytes(content)
        monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
        expect_loaded(subscriber.pull(), run.states[2])


def test_pull_versions_of_other_publishers_with_one_file(tmp_path):
    store = tmp_path / "store"
    foreign = store / "weight_v000001"
    foreign.mkdir(parents=True)
    state = {"a": torch.ones(5), "b": torch.arange(3)}
    save_file(state, foreign / "model.safetensors")
    (foreign / "config.json").write_text("{}")
    subscriber = Subscriber(store, tmp_path / "local")
    folder = subscriber.pull()
    expect_loaded(folder, state)
    assert (folder / "config.json").read_text() == "{}"
    old = time.time() - 90_000
    for each in foreign.iterdir():
        os.utime(each, (old, old))
    upload = store / "weight_v000002"
    upload.mkdir()
    (upload / "part-1.safetensors").write_bytes(b"x")
    os.utime(upload / "part-1.safetensors", (old, old))
    publisher = Publisher(store, keep=1)
    for step in (1, 2):
        publisher.publish(step, state).wait()
    assert {each.name for each in foreign.iterdir()} == {"model.safetensors", "config.json"}
    assert list(upload.iterdir())
    assert Subscriber(store, tmp_path / "local").pull(version=1) == folder
    assert subscriber.pull().name == "weight_v000004"


def test_publish_deletes_leftovers_of_a_killed_publisher(tmp_path):
    dead = tmp_path / "weight_v000001"
    dead.mkdir()
    old = time.time() - 90_000
    for name in ("model-0123456789ab-00000-00000.safetensors", "config.json"):
        (dead / name).write_bytes(b"x")
        os.utime(dead / name, (old, old))
    Publisher(tmp_path).publish(1, {"a": torch.ones(2)}).wait()
    assert not [path for path in dead.rglob("*") if path.is_file()]
    assert sorted(engine.versions(tmp_path)) == [2]


def test_pull_leaves_out_foreign_weights_beside_the_index(tmp_path, told):
    run = Run(tmp_path, 1)
    document = json.loads(run.index(1).read_text())
    del document["metadata"]["snapshot"]
    run.index(1).write_text(json.dumps(document))
    with (run.store / "weight_v000001" / "consolidated.00.pth").open("wb") as file:
        file.truncate(300 << 20)
    with (run.store / "weight_v000001" / "notes.txt").open("wb") as file:
        file.truncate(300 << 20)
    folder = Subscriber(run.store, tmp_path / "local").pull()
    expect_loaded(folder, run.states[1])
    assert sorted(each.name for each in folder.glob("[!.]*") if each.suffix != ".safetensors") == [
        "config.json",
        "model.safetensors.index.json",
    ]
    assert names_of(told, "left_out") == ["left_out"] * 2


def test_pull_applies_a_long_delta_chain_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "RUN", 20_000)
    run = Run(tmp_path, 9)
    held = []
    process = build.VersionBuilder._process

    def watching(builder, name, source, target, deltas, **options):
        held.append(sum(map(len, deltas)))
        return process(builder, name, source, target, deltas, **options)

    monkeypatch.setattr(build.VersionBuilder, "_process", watching)
    expect_loaded(Subscriber(run.store, tmp_path / "local").pull(), run.states[9])
    assert len(held) > 4
    assert max(held) <= 20_000
    other = Subscriber(run.store, tmp_path / "other")
    other.pull(version=1)
    expect_loaded(other.pull(), run.states[9])


def test_publish_ends_a_delta_chain_longer_than_the_weights(tmp_path):
    publisher = Publisher(tmp_path)
    state = {"a": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)}
    found = []
    for step in range(8):
        found.append(publisher.publish(step, state).wait().base)
        state["a"].random_(0, 256)
    assert found == [None, 1, 2, None, 4, 5, None, 7]


def test_pull_lock_is_not_kept_by_a_forked_child(tmp_path, monkeypatch):
    run = Run(tmp_path, 1)
    children = []
    chain = VersionStore.chain

    async def forking(*arguments):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        children.append(child)
        return await chain(*arguments)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(VersionStore, "chain", forking)
            Subscriber(run.store, tmp_path / "local").pull()
        done = threading.Event()
        threading.Thread(target=lambda: (Subscriber(run.store, tmp_path / "local").pull(), done.set())).start()
        assert done.wait(30)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@pytest.fixture
def receiver():
    """A function that serves a raw response on a new port: one chunk after the other."""
    sockets = []

    def serve(*chunks, pause=0.0):
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def answer():
            try:
                while True:
                    connection, _ = listener.accept()
                    sockets.append(connection)
                    connection.recv(65536)
                    for chunk in chunks:
                        connection.sendall(chunk)
                        time.sleep(pause)
                    connection.close()
            except OSError:
                pass

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/hook"

    yield serve
    for each in sockets:
        each.close()


def test_publish_notify_reports_bad_responses_as_events(tmp_path, told, receiver, monkeypatch):
    monkeypatch.setattr(notify, "DEADLINE", 1.0)
    urls = [
        receiver(b"garbage\r\n\r\n"),
        receiver(b""),
        receiver(*[b"H"] * 100, pause=0.2),
        receiver(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", *[b"x"] * 100, pause=0.2),
        receiver(b"HTTP/1.1 500 no\r\n\r\n"),
        receiver(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
    ]
    Publisher(tmp_path, options=PublishOptions(notify=urls)).publish(1, {"a": torch.ones(2)}).wait()
    for work in list(_unfinished.get()):
        assert work.settled(30)
    failed = {event.path for event in told if event.name == "notify_failed"}
    assert failed == {urls[0], urls[1], urls[2], urls[4]}


@pytest.mark.parametrize("url", ["http://user:pw@host/x", "http://host:99999/x", "http://host/a b", "ftp://host", "x"])
def test_publish_notify_urls_are_checked(tmp_path, url):
    with pytest.raises(ValueError, match="notify") as caught:
        Publisher(tmp_path, options=PublishOptions(notify=[url]))
    assert "pw" not in str(caught.value)


def test_cli_publish_delta_without_a_usable_version_is_complete(tmp_path):
    store = tmp_path / "store"
    Publisher(store).publish(1, {"a": torch.ones(5)}).wait()
    for file in (store / "weight_v000001").glob("*.safetensors"):
        file.write_bytes(b"")
    (tmp_path / "step-5").mkdir()
    save_file({"a": torch.ones(5)}, tmp_path / "step-5" / "model.safetensors")
    command = [sys.executable, "-m", "snapshot", "publish", tmp_path / "step-5", store, "--delta", tmp_path / "base"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "version 2, step 5, complete" in found.stdout
