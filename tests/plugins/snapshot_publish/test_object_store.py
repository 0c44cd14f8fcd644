"""Versions in an object store: conditional commits, large shards in parts, and ranged reads."""

import pytest
import torch

from snapshot import SnapshotError, SnapshotNotFoundError
from snapshot_publish import Publisher, PublishOptions, Subscriber
from snapshot_publish.store import CLAIM, VersionStore, version_name
from tests.plugins.snapshot_objectstore.s3_options import options
from tests.plugins.snapshot_publish.published_runs import expect_loaded


@pytest.fixture
def place(moto):
    return f"s3://{moto.bucket()}/policy", options(moto)


def test_publish_and_pull_versions_on_s3(place, tmp_path):
    url, given = place
    torch.manual_seed(0)
    state = {"large": torch.randn(12 << 20, dtype=torch.float32).to(torch.bfloat16), "small": torch.ones(5)}
    publisher = Publisher(
        url, storage_options=given, full_every=3, keep=1, options=PublishOptions(files={"config.json": b"{}"})
    )
    subscriber = Subscriber(url, tmp_path / "local", storage_options=given)
    with pytest.raises(SnapshotNotFoundError):
        subscriber.pull()
    for step in range(5):
        assert publisher.publish(step, state).wait().base == (None if step % 3 == 0 else step)
        expect_loaded(subscriber.pull(), state)
        state["large"][step::1000] += 1
    with pytest.raises(SnapshotNotFoundError, match="no version 3 is published"):
        subscriber.pull(version=3)
    fresh = Subscriber(url, tmp_path / "fresh", storage_options=given)
    assert fresh.pull().name == "weight_v000005"


def test_publish_by_two_publishers_at_one_s3_url(place, tmp_path):
    url, given = place
    one, two = (Publisher(url, storage_options=given) for _ in range(2))
    pending = [publisher.publish(turn, {"a": torch.full((9,), turn)}) for turn in range(3) for publisher in (one, two)]
    versions = sorted(each.wait().version for each in pending)
    assert versions == [1, 2, 3, 4, 5, 6]
    folder = Subscriber(url, tmp_path / "local", storage_options=given).pull(2)
    expect_loaded(folder, {"a": torch.full((9,), 2)})


def test_publish_whose_claim_was_removed_is_not_committed(place, tmp_path, monkeypatch):
    url, given = place
    expect = VersionStore._expect_claim

    async def remove_first(store, version):
        await store.storage.delete([f"{version_name(version)}/{CLAIM}"])  # as another publisher does after a day
        await expect(store, version)

    publisher = Publisher(url, storage_options=given)
    with monkeypatch.context() as patch:
        patch.setattr(VersionStore, "_expect_claim", remove_first)
        with pytest.raises(SnapshotError, match="was removed by another publisher; publish again"):
            publisher.publish(1, {"a": torch.ones(9)}).wait()
    publisher.publish(1, {"a": torch.ones(9)}).wait()
    expect_loaded(Subscriber(url, tmp_path / "local", storage_options=given).pull(1), {"a": torch.ones(9)})
