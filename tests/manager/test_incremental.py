"""A manager that shares unchanged files between its steps: two physical copies remain, whatever is removed."""

from pathlib import Path

import pytest
import torch

from snapshot import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    RestoreOptions,
    Snapshot,
    SnapshotManager,
    StateDict,
    StorageError,
    TakeOptions,
)
from snapshot.io.url import URL
from snapshot.manager.retention import IN_USE, Survey, survey_steps
from snapshot.manager.root import Root
from snapshot.testing import stalling
from tests.save.frozen_training import Run, entries, expect_whole, files


def copies(root, steps):
    """The physical files of more than 1 MiB that some steps have."""
    found = (each.stat() for step in steps for each in files(Path(root, f"step-{step}")).values())
    return {stat.st_ino for stat in found if stat.st_size > 1 << 20}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("keep", [KeepLatest(2), KeepLatest(3) | KeepEvery(4), KeepLatest(1) | KeepBest("loss", 1)])
def test_incremental_keeps_every_kept_step_complete_and_two_copies(tmp_path, keep, asynchronous):
    run, kept, shared = Run(), {}, 0
    with SnapshotManager(tmp_path, keep=keep, incremental=True, signals=()) as manager:
        for step in range(1, 11):
            run.step()
            loss = {"loss": abs(step - 5.0)}
            if asynchronous:
                snapshot = manager.async_take(step, run.state, loss).wait()
            else:
                snapshot = manager.take(step, run.state, loss)
            shared += snapshot.report.shared_files
            kept[step] = run.values()
            manager._steps.cleaner.close()
            steps = manager.steps()
            if len(steps) > 1:
                assert len(copies(tmp_path, steps)) >= 2, steps
        assert shared >= (4 if "loss" in str(keep) else step - 3)
    for step in manager.steps():  # after the last removal, which may follow `wait`
        expect_whole(tmp_path / f"step-{step}", kept[step])


def test_incremental_with_one_kept_step_shares_with_it(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, keep=KeepLatest(1), incremental=True, signals=()) as manager:
        for step in range(1, 4):
            snapshot = manager.take(step, run.state)
            manager._steps.cleaner.close()
            assert (snapshot.report.shared_bytes > 0) == (step > 1)
    assert manager.steps() == [3]
    assert len(copies(tmp_path, [3])) == 1
    assert not list(Path(tmp_path).glob("step-1"))


def test_incremental_prune_keeps_the_last_second_copy(tmp_path, capsys):
    """Steps 1, 3 and 5 have one copy, and 2 and 4 the other one: whatever the policy says, both remain."""
    run = Run()
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        for step in range(1, 7):
            manager.take(step, run.state)
    from snapshot.cli import main

    main(["prune", str(tmp_path), "--keep-every", "2", "--keep-latest", "1", "--yes"])
    told = capsys.readouterr().out
    assert manager.steps() == [2, 4, 5, 6], told
    assert len(copies(tmp_path, manager.steps())) == 2
    assert all(Snapshot(tmp_path / f"step-{step}").verify() for step in manager.steps())


def test_prune_keeps_the_base_of_a_kept_step(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, keep=KeepLatest(2), signals=()) as manager:
        manager.take(1, run.state)
        for step in range(2, 6):
            run.step()
            base = manager.snapshot(step - 1)
            snapshot = manager.take(step, run.state, options=TakeOptions(base=base, only="trainable"))
            assert snapshot.report.omitted_bytes
            manager._steps.cleaner.close()
    assert manager.steps() == [1, 4, 5]
    values = run.values()
    for parameter in run.model.parameters():
        parameter.data.zero_()
    manager.restore_latest(run.state, options=RestoreOptions(base=manager.snapshot(1)))
    assert all(value.equal(values[name]) for name, value in run.values().items())


def test_incremental_restore_latest_never_falls_back_to_the_same_damaged_bytes(tmp_path, caplog):
    run = Run()
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        for step in range(1, 6):
            manager.take(step, run.state)
    newest = {name: each for name, each in entries(tmp_path / "step-5").items() if each.get("origin")}
    (name,) = newest
    path = tmp_path / "step-5" / name
    with path.open("r+b") as file:
        file.seek(300_000)
        file.write(b"rot")
    assert manager.restore_latest(run.state) == 4
    Snapshot(tmp_path / "step-4").delete()
    Snapshot(tmp_path / "step-2").delete()
    (tmp_path / "step-5" / name).unlink()
    with pytest.raises(Exception, match="no step can be restored"):
        manager.restore_latest(run.state, options=RestoreOptions(verify=False))
    assert "step-3: shares files with the damaged step-5, so they are verified" in caplog.text
    run.step()
    assert manager.take(6, run.state).report.shared_bytes == 0
    assert manager.restore_latest(run.state) == 6


def test_incremental_overwritten_step_is_not_its_own_base(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        for step in (1, 2, 3):
            manager.take(step, run.state)
        run.step()
        assert manager.take(3, run.state, overwrite=True).report.shared_files == 1
    expect_whole(tmp_path / "step-3", run.values())


def test_prune_keeps_a_base_of_pinned_or_later_steps(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, keep=KeepLatest(2), signals=()) as manager:
        for step in (10, 20, 30):
            base = manager.snapshot(10) if step > 10 else None
            manager.take(step, run.state, options=TakeOptions(base=base, only="trainable" if base else None))
        manager._steps.cleaner.close()
        manager.pin(20)
        assert manager.steps() == [10, 20, 30]
        for step in (11, 12, 13):  # a run that was resumed from an earlier step
            manager.take(step, run.state)
            manager._steps.cleaner.close()
        assert manager.steps() == [10, 12, 13, 20, 30]
        Snapshot(tmp_path / "step-30").delete()
        for step in (40, 50, 60):
            manager.take(step, run.state)
            manager._steps.cleaner.close()
    assert manager.steps() == [10, 20, 50, 60], "20 is pinned, and needs 10"


def test_prune_keeps_a_base_while_a_take_uses_it(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, keep=KeepLatest(1), signals=()) as manager:
        manager.take(10, run.state)
        manager._steps.cleaner.close()  # it reads the save id
        base = manager.snapshot(10)
        pending = manager.async_take(30, run.state, options=TakeOptions(base=base, only="trainable"))
        assert pending.report.base == base.metadata.save_id
        assert manager._steps.is_spared(10, base.metadata.save_id) or pending.done()
        pending.wait()
        manager._steps.cleaner.close()
    assert manager.steps() == [10, 30]


def test_prune_spares_a_base_by_the_id_that_is_there_now(tmp_path):
    """The first manager has read the step that another one then overwrites, and that a take of the first relies on."""
    run = Run()
    with (
        stalling(on="commit", nth=3, times=1) as stall,
        SnapshotManager(f"stalling+file://{tmp_path}", signals=()) as first,
    ):
        for step in (10, 20):
            first.take(step, run.state, metrics={"loss": step})
        assert first.best("loss") == 10
        before = first.snapshot(10).metadata.save_id
        with SnapshotManager(tmp_path, signals=()) as second:
            second.take(10, run.state, metrics={"loss": 99}, overwrite=True)
        now = first.snapshot(10).metadata.save_id
        assert (first.metrics(10), now != before) == ({"loss": 99}, True)
        assert first.best("loss") == 20
        options = TakeOptions(base=str(tmp_path / "step-10"), only="trainable")
        pending = first.async_take(30, run.state, options=options)
        stall.wait_reached()
        survey = Survey(policy=KeepLatest(1), spared=first._steps.is_spared)
        fates = survey_steps(Root(URL.parse(str(tmp_path)), None), survey)
        assert [(each.step, each.goes, each.why) for each in fates] == [(10, False, IN_USE), (20, False, "latest")]
        assert not first._steps.is_spared(10, before)
        stall.release()
        pending.wait()
        assert first.steps() == [10, 20, 30]


def test_incremental_does_not_share_damaged_bytes_after_a_fallback(tmp_path):
    """Steps 1, 3 and 5 have one physical copy, which is damaged: step 6 must not be based on 3."""
    run = Run()
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        for step in range(1, 6):
            manager.take(step, run.state)
        (name,) = (name for name, each in entries(tmp_path / "step-5").items() if each.get("origin"))
        with (tmp_path / "step-5" / name).open("r+b") as file:
            file.seek(900_000)
            file.write(b"rot")
        assert manager.restore_latest(run.state) == 4
        for step in (6, 7, 8):
            run.step()
            assert manager.take(step, run.state).verify()


def test_incremental_pinned_steps_have_two_copies_even_if_one_step_is_kept(tmp_path):
    run = Run()
    with SnapshotManager(tmp_path, keep=KeepLatest(1), incremental=True, signals=()) as manager:
        for step in range(1, 6):
            manager.take(step, run.state)
            if step in (1, 3):
                manager.pin(step)
            manager._steps.cleaner.close()
    assert {1, 3, 5} <= set(manager.steps())
    assert len(copies(tmp_path, manager.steps())) >= 2


def test_incremental_take_works_if_the_root_cannot_be_listed(tmp_path, caplog):
    run = Run()
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        manager.take(1, run.state)
        with pytest.MonkeyPatch.context() as patch:

            async def fail(self):
                raise StorageError("the listing failed")

            patch.setattr(type(manager._steps.root), "folders", fail)
            manager.take(2, run.state)
    assert "nothing is shared with earlier steps: the listing failed" in caplog.text
    expect_whole(tmp_path / "step-2", run.values())


def test_incremental_second_copy_with_omitted_tensors_keeps_its_base(tmp_path):
    run = Run()
    other = StateDict(still=torch.randn(300, 300))
    state = {**run.state, "other": other}
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        manager.take(1, state)
        for step in range(2, 9):
            manager.take(step, state, options=TakeOptions(only="trainable"))
    from snapshot.cli import main

    main(["prune", str(tmp_path), "--keep-every", "2", "--keep-latest", "1", "--yes"])
    for step in manager.steps():
        run.frozen[0].weight.data.zero_()
        base = manager.snapshot(1)
        manager.snapshot(step).restore(state, options=RestoreOptions(base=base))
        assert run.frozen[0].weight.any()
