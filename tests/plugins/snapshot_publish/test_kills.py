"""A publisher or subscriber that is killed at any step leaves the last version usable, and nothing in the way."""

import multiprocessing
import os
import signal

import pytest
import torch

from snapshot.io.registry import open_storage, register
from snapshot.io.storage import URL
from snapshot.testing.storages import TappedStorage
from snapshot_publish import Publisher, PublishOptions, Subscriber
from tests.faults.killed_jobs import Kill
from tests.plugins.snapshot_publish import engine
from tests.plugins.snapshot_publish.published_runs import expect_loaded

pytestmark = pytest.mark.deadly
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "snapshot", "snapshot_publish.publisher", "snapshot_publish.subscriber"])
CALLS = ("pwrite", "rename", "replace", "symlink", "link", "ftruncate", "mkdir", "unlink", "rmdir")


def state(version):
    torch.manual_seed(0)
    made = {name: torch.randn(5000) for name in ("a", "b")}
    made["a"][version] = version
    return made


def publish(store, nth, full_every):
    """Publish versions 2 and 3, and die before an operation of the last one."""
    kill = Kill(0)

    class Killing(TappedStorage):
        def __init__(self, url, options, context):
            super().__init__(open_storage(URL.parse(url.reveal().partition("+")[2]), options, context), kill)

    register("killing+", Killing)
    publisher = Publisher(
        f"killing+file://{store}", full_every=full_every, keep=1, options=PublishOptions(files={"config.json": b"{}"})
    )
    publisher.publish(1, state(1)).wait()
    publisher.publish(2, state(2)).wait()
    kill.nth = kill.met + nth
    publisher.publish(3, state(3)).wait()


def pull(store, local, nth):
    """Pull, and die before a call to the file system."""
    left = [nth]

    def counting(call):
        def counted(*args, **options):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted

    for name in CALLS:
        setattr(os, name, counting(getattr(os, name)))
    Subscriber(store, local, keep=1).pull()


def died(function, *args):
    process = CONTEXT.Process(target=function, args=args)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


@pytest.mark.parametrize("full_every", [50, 2])
def test_publish_killed_at_any_step_leaves_the_last_version(tmp_path, full_every):
    """With `full_every=2`, the version is complete, and older ones are deleted after it."""
    kills, last = 0, set()
    while True:
        store, local = tmp_path / f"store-{kills}", tmp_path / f"local-{kills}"
        if not died(publish, str(store), kills + 1, full_every):
            break
        kills += 1
        newest = max(engine.versions(store))
        last.add(newest)
        folder = Subscriber(store, local).pull()
        assert folder.name == f"weight_v{newest:06d}"
        expect_loaded(folder, state(newest))
        restarted = Publisher(store, keep=1)
        published = restarted.publish(9, state(9)).wait()
        assert published.base is None
        assert published.version > newest
        expect_loaded(Subscriber(store, local).pull(), state(9))
        assert sorted(engine.versions(store)) == [published.version]
    assert last == {2, 3}
    assert kills >= 6


def test_pull_killed_at_any_step_leaves_the_last_version(tmp_path):
    store = tmp_path / "store"
    publisher = Publisher(store, options=PublishOptions(files={"config.json": b"{}"}))
    for version in (1, 2, 3):
        publisher.publish(version, state(version)).wait()
    for first, last in ((None, 3), (1, 3)):
        kills, ends = 0, set()
        while True:
            local = tmp_path / f"local-{first}-{kills}"
            subscriber = Subscriber(store, local, keep=1)
            if first is not None:
                subscriber.pull(version=first)
            if not died(pull, str(store), str(local), kills + 1):
                break
            kills += 1
            current = subscriber.current
            if current is not None:
                number = int(current.name[-6:])
                ends.add(number)
                expect_loaded(current, state(number))
            expect_loaded(subscriber.pull(), state(last))
            assert sorted(each.name for each in local.iterdir()) == [".snapshot-pull.lock", "current", "weight_v000003"]
        assert ends == (set() if first is None else {1, 3})  # the first link is the last step
        assert kills >= 6
