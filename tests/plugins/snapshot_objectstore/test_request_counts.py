"""The requests of each call on S3, as docs/guides/performance.md has them."""

import re
from pathlib import Path

import pytest
import torch

from snapshot import (
    CorruptSnapshotError,
    KeepLatest,
    KeepSpread,
    KeepWithin,
    Snapshot,
    SnapshotExistsError,
    SnapshotManager,
    StateDict,
)
from snapshot.save.transaction import read_beginning
from tests.helpers.arguments import for_take
from tests.helpers.storage_calls import PATIENT, use

pytestmark = pytest.mark.servers

PAGE = Path(__file__).parents[3] / "docs/guides/performance.md"


def documented():
    text = PAGE.read_text().partition("### Requests on S3")[2].partition("## ")[0]
    rows = re.findall(r"^\| (.*?) \| (\d+) \|", text, re.MULTILINE)
    return {name.replace("`", ""): int(count) for name, count in rows}


def test_s3_request_counts_equal_those_in_performance_md(moto, proxy):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    root = f"s3://{moto.bucket()}/run"
    state = {"s": StateDict({f"w{i}": torch.full((64,), float(i)) for i in range(20)})}
    found = {}

    def count(name, call):
        before = len(proxy.requests)
        result = call()
        found[name] = len(proxy.requests) - before
        return result

    def snapshot():
        return Snapshot(f"{root}/a", storage_options=options)

    def manager():
        return SnapshotManager(f"{root}/steps", storage_options=options)

    Snapshot.take(f"{root}/first", state, storage_options=options)  # from now on, the bucket is known
    count("take", lambda: Snapshot.take(f"{root}/a", state, storage_options=options))
    count("async_take", lambda: Snapshot.async_take(f"{root}/b", state, storage_options=options).wait())
    again = {"storage_options": options, "overwrite": True}
    count("take(overwrite=True)", lambda: Snapshot.take(f"{root}/a", state, **for_take(**again)))
    count("restore", lambda: snapshot().restore(state))
    assert count("read_object", lambda: snapshot().read_object("0/s/w3")).eq(3).all()
    count("get_manifest", lambda: snapshot().get_manifest())
    assert count("verify", lambda: snapshot().verify())
    count("delete", lambda: snapshot().delete())
    with manager() as run:
        for step in range(9):
            run.take(step, state)
        count("SnapshotManager.take", lambda: run.take(9, state))
    assert count("steps(), 10 steps", lambda: manager().steps()) == list(range(10))
    assert count("restore_latest, 10 steps", lambda: manager().restore_latest(state)) == 9
    assert found == documented()


def test_s3_manager_looks_for_the_pins_of_kept_steps_only_if_the_policy_needs_sizes(moto, proxy):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    bucket, state = moto.bucket(), {"s": StateDict(x=torch.ones(100))}
    found = {}
    for keep in (KeepLatest(3), KeepLatest(3) | KeepSpread(), KeepWithin("1GB", 3)):
        root = f"s3://{bucket}/{len(found)}"
        with SnapshotManager(root, keep=keep, storage_options=options, signals=()) as run:
            for step in range(3):
                run.take(step, state)
        before = len(proxy.requests)
        with SnapshotManager(root, keep=keep, storage_options=options, signals=()) as run:
            run.take(3, state)
        sent = [f"{each.method} {each.path}" for each in proxy.requests[before:]]
        found[str(keep)] = sum(each.startswith("HEAD") and each.endswith("/.pinned") for each in sent)
        assert run.steps() == ([0, 1, 2, 3] if "spread" in str(keep) else [1, 2, 3])
    alone, spread, within = found.values()
    assert spread <= 1  # of the step that is taken: none goes
    assert alone < within <= alone + 4


@pytest.mark.parametrize("engine", ["s3fs", None])
@pytest.mark.parametrize(
    ("change", "message"),
    [("delete", "is missing"), ("shorten", "must have .* bytes, got"), ("lengthen", "must have .* bytes, got")],
)
def test_s3_restore_checks_unseen_files_before_changing_tensors(moto, engine, change, message):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": moto.url, "engine": engine, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    url = f"s3://{moto.bucket()}/s"
    Snapshot.take(url, {"s": StateDict(x=torch.ones(5000), y=torch.ones(7))}, storage_options=options)

    async def damage(storage):
        [path] = await storage.list("data/")
        data = await storage.get(path)
        if change == "delete":
            await storage.delete([path])
        else:
            await storage.put(path, data[:-4] if change == "shorten" else data + bytes(4))

    use(url, options, damage)
    live = StateDict(x=torch.zeros(5000), y=torch.zeros(7))
    snapshot = Snapshot(url, storage_options=options)
    with pytest.raises(CorruptSnapshotError, match=message):
        snapshot.restore({"s": live})
    assert not live["x"].any()
    assert not live["y"].any()
    with pytest.raises(CorruptSnapshotError, match=message):
        snapshot.read_object("0/s/y")


@pytest.mark.parametrize("engine", ["s3fs", None])
def test_s3_delete_and_prune_read_only_the_ends_of_a_long_manifest(moto, proxy, engine):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, "engine": engine, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    root = f"s3://{moto.bucket()}/run"
    state = {"s": StateDict({f"w{i}": torch.full((1,), float(i)) for i in range(3000)})}
    with SnapshotManager(root, storage_options=options, keep=3) as run:
        for step in range(3):
            run.take(step, state)

    def received():
        found = [each for each in proxy.requests if each.method == "GET" and each.path.endswith(".snapshot_metadata")]
        return len(found), sum(each.response_bytes for each in found)

    long = len(use(f"{root}/step-0", options, lambda storage: storage.get(".snapshot_metadata")))
    assert long > 300_000
    before = received()
    with SnapshotManager(root, storage_options=options, keep=1) as run:
        run.take(3, {"s": StateDict(x=1)})
    assert SnapshotManager(root, storage_options=options).steps() == [3]
    count, nbytes = (now - then for now, then in zip(received(), before, strict=True))
    assert count >= 6
    assert nbytes < 3 * 140_000
    Snapshot.take(f"{root}/other", state, storage_options=options)
    before = received()
    Snapshot(f"{root}/other", storage_options=options).delete()
    assert [now - then for now, then in zip(received(), before, strict=True)] == [1, 200]


@pytest.mark.parametrize("engine", ["s3fs", None])
@pytest.mark.parametrize("length", [0, 1, 199, 5000])
def test_s3_head_of_a_manifest_of_any_length_is_read(moto, engine, length):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": moto.url, "engine": engine, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}

    async def work(storage):
        await storage.put(".snapshot_metadata", b"x" * length)
        return await read_beginning(storage)

    assert use(f"s3://{moto.bucket()}/s", options, work) == b"x" * min(length, 200)


def test_s3_files_beyond_the_first_listing_page_are_found(moto, proxy):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    url = f"s3://{moto.bucket()}/s"
    state = {"s": StateDict(x=torch.ones(5))}
    Snapshot.take(url, state, storage_options=options)
    proxy.fault("GET", "*list-type=2*", status=403)
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state, storage_options=options)

    async def leave(storage):
        await storage.put("data/0123456789ab-0-0.bin", b"")  # of a take that was interrupted
        for number in range(1000):
            await storage.put(f"{number:04}", b"")

    use(url, options, leave)
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state, storage_options=options)
    Snapshot(url, storage_options=options).delete()
    assert use(url, options, lambda storage: storage.list("data/")) == []
