"""A save through DCP's API, and a copy, are pending in their process like a take: others there spare their claims."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from snapshot import Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.interop.dcp import SnapshotWriter
from snapshot.interop.dcp import writer as snapshot_writer
from snapshot.save.transaction import pending_saves
from snapshot.testing import stalling
from tests.interop.dcp_states import save


class Between(DefaultSavePlanner):
    """Does something once, in the middle of a save."""

    def __init__(self, do):
        super().__init__()
        self.do = do

    def resolve_data(self, write_item):
        do, self.do = self.do, lambda: None
        do()
        return super().resolve_data(write_item)


def claims(folder):
    return [name for name in os.listdir(folder) if name.startswith(".take-")]


def take(folder, value):
    Snapshot.take(folder, {"m": StateDict(w=torch.full((3,), float(value)))}, overwrite=True)


def replace(verb, folder, other):
    if verb == "take":
        take(folder, 1)
    elif verb == "dcp.save":
        save({"m": {"w": torch.ones(3)}}, SnapshotWriter(folder))
    else:
        getattr(Snapshot(other), verb)(Target(folder, overwrite=True))


def expect_one(folder, value):
    """Nothing is there but one whole snapshot."""
    assert not claims(folder)
    assert Snapshot(folder).verify()
    assert Snapshot(folder).read_object("0/m/w").eq(value).all()
    assert len({name[:12] for name in os.listdir(folder / "data")}) == 1


@pytest.mark.parametrize("verb", ["take", "convert", "copy"])
def test_dcp_save_pending_is_kept_by_another_take_convert_or_copy(tmp_path, verb):
    folder = tmp_path / "s"
    take(folder, 0)
    take(tmp_path / "other", 1)
    seen = []

    def between():
        seen.append(claims(folder))
        replace(verb, folder, tmp_path / "other")
        seen.append(claims(folder))

    with pytest.raises(CheckpointException) as raised:
        save({"m": {"w": torch.full((3,), 2.0)}}, SnapshotWriter(folder), planner=Between(between))
    error = raised.value.failures[0][0]
    assert isinstance(error, SnapshotExistsError)
    assert "another take committed first" in str(error)
    assert len(seen[0]) == 1
    assert seen[0] == seen[1]
    expect_one(folder, 1)
    assert not pending_saves()


def test_dcp_save_replaces_one_that_may_have_ended(tmp_path):
    """DCP tells a writer nothing when another rank has failed: its claim would stay."""
    folder = tmp_path / "s"
    with pytest.raises(CheckpointException) as raised:
        save(
            {"m": {"w": torch.full((3,), 2.0)}},
            SnapshotWriter(folder),
            planner=Between(lambda: replace("dcp.save", folder, None)),
        )
    assert "the claim of this save is missing" in str(raised.value.failures[0][0])
    expect_one(folder, 1)
    assert not pending_saves()
    assert not snapshot_writer._newest.get()


@pytest.mark.parametrize("verb", ["convert", "copy"])
def test_pending_copy_and_convert_are_kept_by_a_dcp_save(tmp_path, verb):
    folder = tmp_path / "s"
    take(folder, 0)
    take(tmp_path / "other", 2)
    with stalling(on="commit") as stall:
        other = getattr(Snapshot(tmp_path / "other"), verb)
        work = ThreadPoolExecutor(1).submit(other, Target(f"stalling+file://{folder}", overwrite=True))
        stall.wait_reached()
        before = claims(folder)
        replace("dcp.save", folder, None)
        assert claims(folder) == before != []
        stall.release()
        with pytest.raises(SnapshotExistsError, match="another take committed first"):
            work.result(30)
    expect_one(folder, 1)


def test_dcp_save_that_was_abandoned_is_no_longer_kept(tmp_path):
    class Late(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            raise OSError("planned")

    writer = SnapshotWriter(tmp_path / "s")
    with pytest.raises(CheckpointException):
        save({"m": {"w": torch.zeros(3)}}, writer, planner=Late())
    assert len(claims(tmp_path / "s")) == 1
    take(tmp_path / "s", 1)
    assert len(claims(tmp_path / "s")) == 1
    writer.reset()
    assert not pending_saves()
    expect_one(tmp_path / "s", 1)
