"""Exports of several ranks whose leader stops, is killed or is interrupted while it publishes."""

import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from snapshot import (
    CommitUnknown,
    RankError,
    Snapshot,
    SnapshotExistsError,
    StateDict,
    StorageError,
    TakeOptions,
    Target,
    load,
)
from tests.distributed import bulk_verbs as ranks
from tests.helpers.rank_pool import Died

MiB = 1 << 20


@pytest.fixture
def source(tmp_path):
    """A snapshot of ones. At the destination, there is an export of zeros."""
    for value, name in enumerate(("old", "new")):
        state = {f"w{n}": torch.full((200_000,), float(value)) for n in range(5)}
        Snapshot.take(tmp_path / name, {"m": StateDict(**state)}, options=TakeOptions(durable=False))
    Snapshot(tmp_path / "old").convert(Target(tmp_path / "made", "safetensors", shard_bytes=MiB, durable=False))
    return tmp_path / "new"


def values(path):
    """The values of a checkpoint of these tensors."""
    found = load(path)
    assert len(found) == 5
    return {value for each in found.values() for value in each.unique().tolist()}


def export(source, notes, **options):
    arguments = {"to": "safetensors", "shard_bytes": MiB, "overwrite": True, "notes": str(notes)} | options
    place = f"tapped+file://{notes}/made"
    return partial(ranks.call_with_signal, **arguments), "convert", str(source), place


def staged(path):
    return list(Path(path).glob(".convert-*"))


@pytest.mark.parametrize(("on", "nth", "published"), [("rename", 1, True), ("rename", 3, True), ("stat", 8, False)])
def test_convert_whose_leader_stops_while_publishing_loses_no_checkpoint(
    fresh_pool, tmp_path, source, on, nth, published
):
    call, *arguments = export(source, tmp_path, which=0, number=signal.SIGSTOP, on=on, nth=nth, timeout=4.0)
    with fresh_pool(2) as pool:
        pool.start(call, *arguments)
        while not Path(tmp_path, "ended-1").exists():  # it gives up
            time.sleep(0.01)
        assert Path(tmp_path, "sent").exists()
        pool.cont(0)
        outcomes = pool.finish()
    if published:
        assert not isinstance(outcomes[0], BaseException), outcomes
        assert isinstance(outcomes[1], CommitUnknown), outcomes
    else:
        assert all(isinstance(each, RankError) and each.rank == 0 for each in outcomes), outcomes
    assert values(tmp_path / "made") == {float(published)}
    assert not staged(tmp_path / "made")


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_convert_whose_leader_is_killed_after_the_last_file_has_published(fresh_pool, tmp_path, source, to, overwrite):
    options = {"to": to}
    call, verb, origin, place = export(source, tmp_path, which=0, number=signal.SIGKILL, on="list", **options)
    if to == "torch":
        place += "/one.pt"
    if overwrite and to == "torch":
        Snapshot(tmp_path / "old").convert(Target(tmp_path / "made" / "one.pt", "torch", durable=False))
    if not overwrite:
        for each in (tmp_path / "made").iterdir():
            each.unlink()
    with fresh_pool(2) as pool:
        outcomes = pool.outcomes(partial(call, overwrite=overwrite), verb, origin, place)
        assert isinstance(outcomes[0], Died)
        assert not isinstance(outcomes[1], BaseException), outcomes
        assert outcomes[1].tensors == 5
        assert "but the snapshot is committed" in pool.output(1)
    assert values(place.removeprefix("tapped+file://")) == {1.0}


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_convert_whose_leader_is_killed_before_the_rename_has_not_published(fresh_pool, tmp_path, source, to):
    call, verb, origin, place = export(source, tmp_path, which=0, number=signal.SIGKILL, on="rename", to=to)
    if to == "torch":
        place += "/one.pt"
        Snapshot(tmp_path / "old").convert(Target(tmp_path / "made" / "one.pt", "torch", durable=False))
    with fresh_pool(2) as pool:
        outcomes = pool.outcomes(call, verb, origin, place)
        assert isinstance(outcomes[0], Died)
        assert isinstance(outcomes[1], CommitUnknown), outcomes


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_convert_whose_leader_is_interrupted_publishes_what_it_began(fresh_pool, tmp_path, source, nth):
    call, *arguments = export(
        source, tmp_path, which=0, number=signal.SIGINT, on="rename", nth=nth, then=0.5, timeout=30.0
    )
    with fresh_pool(2) as pool:
        outcomes = pool.outcomes(call, *arguments)
    assert outcomes[0] == "interrupted"
    assert outcomes[1].tensors == 5
    assert values(tmp_path / "made") == {1.0}
    assert not staged(tmp_path / "made")


@pytest.mark.parametrize(("verb", "path"), [("copy", "data/*.safetensors"), ("convert", "data/*-0.json")])
def test_copy_and_convert_that_lose_to_another_job_name_the_cause(fresh_pool, tmp_path, source, verb, path):
    on = {"copy": "stat", "convert": "get"}[verb]
    call = partial(ranks.call_with_signal, which=0, number=signal.SIGSTOP, on=on, path=path, notes=str(tmp_path))
    with fresh_pool(2) as pool:
        four = {f"w{n}": torch.rand(90_000) for n in range(4)}
        pool.run(ranks.save_apart, str(tmp_path / "apart"), four)
        pool.start(partial(call, timeout=60.0), verb, str(tmp_path / "apart"), f"tapped+file://{tmp_path}/lost")
        while not Path(tmp_path, "sent").exists():  # both ranks have written
            time.sleep(0.01)
        Snapshot.take(tmp_path / "lost", {"m": StateDict(w=torch.ones(9))}, options=TakeOptions(durable=False))
        pool.cont(0)
        outcomes = pool.finish()
    for each in outcomes:
        assert "another take" in str(each), outcomes
        assert "share one storage" not in str(each)
    assert isinstance(outcomes[0], SnapshotExistsError)
    assert Snapshot(tmp_path / "lost").verify()


def test_convert_names_the_failure_of_the_leader_on_other_ranks(two, tmp_path, source):
    outcomes = two.outcomes(ranks.export_while_the_leader_fails, str(source), str(tmp_path / "other"))
    assert isinstance(outcomes[0], StorageError)
    assert "No space left" in str(outcomes[0])
    assert isinstance(outcomes[1], RankError), outcomes
    assert "No space left" in str(outcomes[1])
    assert not staged(tmp_path / "other")
