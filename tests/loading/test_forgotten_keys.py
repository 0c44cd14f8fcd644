"""Keys that a restore forgets, and names that it leaves as they are: reported, logged, refused or silenced."""

import logging

import pytest
import torch

from snapshot import ModelState, RestoreError, RestoreOptions, RNGState, Snapshot, SnapshotManager, StateDict
from tests.helpers.arguments import for_restore

URL = "memory://forgotten"


def app_state():
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "rng": RNGState()}


@pytest.fixture
def snapshot():
    return Snapshot.take(URL, app_state(), overwrite=True)


def warned(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_unused_key_is_in_the_report_and_logged_once(snapshot, caplog):
    report = snapshot.restore({"model": torch.nn.Linear(2, 2)})
    assert [line.path for line in report.unused] == ["optimizer", "rng"]
    assert "unused     optimizer" in str(report)
    [line] = warned(caplog)
    assert "optimizer, rng" in line
    assert "unused='ignore'" in line


def test_unused_is_empty_if_all_keys_are_restored(snapshot, caplog):
    assert not snapshot.restore(app_state()).unused
    assert not warned(caplog)


def test_unused_error_raises_before_anything_is_changed(snapshot):
    model = torch.nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(RestoreError, match="optimizer: is in the snapshot, not in app_state") as caught:
        snapshot.restore({"model": model}, unused="error")
    assert len(caught.value.mismatches) == 2
    assert model.weight.equal(before)
    with pytest.raises(RestoreError, match="rng"):
        snapshot.restore({"model": model}, unused="error", strict=False)


def test_unused_ignore_is_silent(snapshot, caplog):
    report = snapshot.restore({"model": torch.nn.Linear(2, 2)}, unused="ignore")
    assert not report.unused
    assert not warned(caplog)


@pytest.mark.parametrize("how", [{"select": ["model/**"]}, {"exclude": ["optimizer/**", "rng/**"]}])
def test_unused_does_not_report_keys_left_out_with_select_or_exclude(snapshot, caplog, how):
    assert not snapshot.restore({"model": torch.nn.Linear(2, 2)}, **for_restore(unused="error", **how)).unused
    assert not warned(caplog)


def test_unused_reports_the_optimizer_of_a_model_state(caplog):
    model = torch.nn.Linear(2, 2)
    state = ModelState(model, torch.optim.AdamW(model.parameters()))
    snapshot = Snapshot.take(URL, {"train": state}, overwrite=True)
    report = snapshot.restore({"train": ModelState(model)})
    assert [line.path for line in report.unused] == ["train/optim"]
    assert "train/optim" in warned(caplog)[-1]
    with pytest.raises(RestoreError, match="train/optim: app_state has no optimizer"):
        snapshot.restore({"train": ModelState(model)}, unused="error")
    assert not snapshot.restore({"train": ModelState(model)}, unused="ignore").unused


def test_unused_reports_renamed_keys_under_their_new_name(snapshot):
    report = snapshot.restore({"net": torch.nn.Linear(2, 2)}, rename={"model": "net"})
    assert [line.path for line in report.unused] == ["optimizer", "rng"]


def test_unused_with_an_invalid_value_raises(snapshot):
    with pytest.raises(ValueError, match="unused must be 'warn', 'error' or 'ignore', got 'no'"):
        snapshot.restore({"model": torch.nn.Linear(2, 2)}, unused="no")


def test_unused_keys_are_reported_by_restore_latest(tmp_path, caplog):
    with SnapshotManager(str(tmp_path), signals=()) as manager:
        manager.take(1, app_state())
        assert manager.restore_latest({"model": torch.nn.Linear(2, 2)}) == 1
        assert [line.path for line in manager.report.unused] == ["optimizer", "rng"]
        assert any("optimizer, rng" in line for line in warned(caplog))
        with pytest.raises(RestoreError, match="optimizer"):
            manager.restore_latest({"model": torch.nn.Linear(2, 2)}, options=RestoreOptions(unused="error"))


def test_unused_keys_of_other_formats_are_reported(tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    torch.save({"model": model.state_dict(), "epoch": 3}, tmp_path / "old.pt")
    report = Snapshot(tmp_path / "old.pt").restore({"model": model})
    assert [line.path for line in report.unused] == ["epoch"]
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    caplog.clear()
    assert not Snapshot(tmp_path / "bare.pt").restore({"model": model}).unused
    assert not warned(caplog)


def test_restore_logs_an_average_that_keeps_its_initial_values(caplog):
    model = torch.nn.Linear(2, 2)
    snapshot = Snapshot.take(f"{URL}/average", {"model": model}, overwrite=True)
    live = torch.nn.ModuleDict({"ema": torch.nn.Linear(2, 2)})
    live.weight, live.bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    report = snapshot.restore({"model": live}, strict=False)
    assert len(report.missing) == 2
    [line] = warned(caplog)
    assert "model/ema.weight" in line
    assert "they keep their values" in line
    report = snapshot.restore({"model": model, "average": StateDict(x=1)}, strict=False)
    assert "average" in warned(caplog)[-1]


def _restore_part(folder):
    import torch.distributed as dist

    rank = dist.get_rank()
    Snapshot.take(folder, {"a": StateDict(x=1), "b": StateDict(y=rank)}, replicated=["a/**"])
    report = Snapshot(folder).restore({"a": StateDict(x=0)})
    try:
        Snapshot(folder).restore({"a": StateDict(x=0)}, unused="error")
    except RestoreError as error:
        return [line.path for line in report.unused], str(error)


def _take_more(folder):
    import torch.distributed as dist

    rank = dist.get_rank()
    Snapshot.take(folder, {"a": StateDict(x=1), f"only{rank}": StateDict(y=rank)}, replicated=["a/**"])


def test_unused_reports_keys_of_ranks_that_no_longer_exist(two, folder, caplog):
    two.run(_take_more, folder)
    report = Snapshot(folder).restore({"a": StateDict(x=0)}, strict=False)
    assert [line.path for line in report.unused] == ["only0", "only1"]
    assert "only0, only1" in warned(caplog)[-1]
    with pytest.raises(RestoreError, match="only1"):
        Snapshot(folder).restore({"a": StateDict(x=0)}, unused="error")


def test_unused_is_reported_by_each_rank_and_refused_by_all(two, folder):
    for paths, text in two.run(_restore_part, folder):
        assert paths == ["b"]
        assert "b: is in the snapshot" in text
