"""Copies into a bucket, from one to another, and out of it: in parts of the sizes that the storage wants."""

import pytest
import torch

from snapshot import Snapshot, StateDict, Target

MiB = 1 << 20


@pytest.mark.parametrize("engine", ["s3fs", pytest.param(None, id="obstore")])
def test_copy_between_buckets(tmp_path, moto, engine):
    options = {
        "key": moto.key, "secret": moto.secret, "endpoint_url": moto.url, "engine": engine,
        "client_kwargs": {"region_name": moto.region},
    }  # fmt: skip
    one, two = moto.bucket(), moto.bucket()
    state = {"w": torch.arange(3 * MiB + 7.0), "b": torch.ones(3), "blob": b"x" * 300_000, "step": 1}
    snapshot = Snapshot.take(tmp_path / "a", {"m": StateDict(**state)}, metadata={"run": 1})
    budget = {"memory_budget_bytes": 24 * MiB}
    snapshot.copy(Target(f"s3://{one}/a", storage_options=options), **budget)
    there = Snapshot(f"s3://{one}/a", storage_options=options)
    assert there.verify()
    assert there.metadata.created == snapshot.metadata.created
    there.copy(Target(f"s3://{two}/b", storage_options=options), **budget)
    again = Snapshot(f"s3://{two}/b", storage_options=options)
    again.copy(tmp_path / "back", **budget)
    assert Snapshot.diff(tmp_path / "a", tmp_path / "back").same
    assert Snapshot(tmp_path / "back").verify()
    assert Snapshot.diff(there, again).same
    with pytest.raises(ValueError, match="the destination is the source"):
        there.copy(Target(f"s3://{one}/a", storage_options=options, overwrite=True))
    snapshot.convert(Target(tmp_path / "hf", "safetensors", shard_bytes=MiB), select=["m/w", "m/b"])
    Snapshot(tmp_path / "hf").copy(Target(f"s3://{one}/hf", storage_options=options))
    assert Snapshot.diff(tmp_path / "hf", Snapshot(f"s3://{one}/hf", storage_options=options)).same
