"""The requests of each call on S3, as docs/performance.md has them."""

import re
from pathlib import Path

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotManager, StateDict
from tests.helpers.fault_proxy import FaultProxy
from tests.helpers.storage_calls import PATIENT, use

pytestmark = pytest.mark.servers

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"


def documented():
    text = PAGE.read_text().partition("### Requests on S3")[2].partition("## ")[0]
    rows = re.findall(r"^\| (.*?) \| (\d+) \|", text, re.MULTILINE)
    return {name.replace("`", ""): int(count) for name, count in rows}


@pytest.fixture
def proxy(moto):
    with FaultProxy(moto.url) as proxy:
        yield proxy


def test_each_call_sends_the_documented_requests(moto, proxy):
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
    count("take(overwrite=True)", lambda: Snapshot.take(f"{root}/a", state, **again))
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


@pytest.mark.parametrize("engine", ["s3fs", None])
@pytest.mark.parametrize(
    ("change", "message"),
    [("delete", "is missing"), ("shorten", "must have .* bytes, got"), ("lengthen", "must have .* bytes, got")],
)
def test_a_file_that_was_not_looked_at_is_checked_before_a_live_tensor_changes(moto, engine, change, message):
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
