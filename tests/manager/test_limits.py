"""Limits of a run: what its steps have on the disk, and how long each is kept."""

import json
import os
import re
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from snapshot import (
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepSpread,
    KeepWithin,
    Snapshot,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.cli import main
from snapshot.io.url import URL
from snapshot.manager.policies import Policy
from snapshot.manager.retention import remove_unkept
from snapshot.manager.root import Root
from tests.save.frozen_training import Run

KB = 1000


def state(step, nbytes=100 * KB):
    return {"s": StateDict(x=torch.full((nbytes // 4,), float(step)))}


def take(manager, *steps, nbytes=100 * KB, **given):
    for step in steps:
        manager.take(step, state(step, nbytes), **given)
        if manager._steps.cleaner is not None:
            manager._steps.cleaner.close()


def manager_of(root, keep=None, **options):
    return SnapshotManager(root, keep=keep, signals=(), **options)


def steps_in(root):
    return sorted(int(path.name.removeprefix("step-")) for path in Path(root).glob("step-*"))


def on_disk(root):
    """The bytes of all files, each physical one once."""
    found = [path.stat() for path in Path(root).rglob("*") if path.is_file()]
    return sum({each.st_ino: each.st_size for each in found}.values())


def warned(caplog):
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def suspect(manager, step):
    """Take a step with NaN, which is suspect."""
    model = torch.nn.Linear(160, 160)
    torch.nn.init.constant_(model.weight, float("nan"))
    app = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    manager.take(step, app, options=TakeOptions(guards="suspect"))
    manager._steps.cleaner.close()


# KeepWithin


def test_keep_within_keeps_the_newest_steps_that_fit_on_the_disk(tmp_path):
    with manager_of(tmp_path, KeepWithin("450kB")) as manager:
        for step, kilobytes in enumerate((100, 100, 200, 50, 50, 300, 100, 400, 10), 1):
            take(manager, step, nbytes=kilobytes * KB)
            assert on_disk(tmp_path) <= 450 * KB
            if kilobytes == 300:
                assert steps_in(tmp_path) == [4, 5, 6]
    assert steps_in(tmp_path) == [8, 9]


@pytest.mark.parametrize(
    "among", [None, KeepLatest(6), KeepLatest(3) | KeepEvery(4), KeepBest("loss", 3), KeepEvery(2)]
)
def test_keep_within_counts_shared_files_once_and_stays_below_the_limit(tmp_path, among):
    limit = 3_300 * KB
    with manager_of(tmp_path, KeepWithin(limit, among), incremental=True) as manager:
        run, most = Run(), 0
        for step in range(1, 13):
            run.step()
            manager.take(step, run.state, {"loss": abs(step - 5.0)})
            manager._steps.cleaner.close()
            assert on_disk(tmp_path) <= limit
            most = max(most, len(manager.steps()))
    apparent = sum(Snapshot(tmp_path / f"step-{step}").metadata.nbytes for step in steps_in(tmp_path))
    assert most >= 3
    assert apparent > limit or among is not None
    with manager_of(tmp_path, KeepWithin(2_000 * KB, among), incremental=True) as manager:
        for step in (13, 14):
            run.step()
            manager.take(step, run.state, {"loss": 9.0})
            manager._steps.cleaner.close()
            assert on_disk(tmp_path) <= 2_000 * KB
    assert all(Snapshot(tmp_path / f"step-{step}").verify() for step in steps_in(tmp_path))


def test_keep_within_counts_the_second_copy_of_what_kept_steps_share(tmp_path):
    """Every other step has the same copy, so a step between them is needed, too, and has a place in the limit."""
    run = Run()
    with manager_of(tmp_path, incremental=True) as manager:
        for step in range(1, 9):
            run.step()
            manager.take(step, run.state)
    assert main(["prune", str(tmp_path), "--keep-every", "2", "--within", "1GB", "--yes"]) == 0
    assert steps_in(tmp_path) == [2, 4, 6, 7, 8]
    one_copy = on_disk(tmp_path) - 1_000 * KB  # the frozen layers have 1,052 kB
    assert main(["prune", str(tmp_path), "--keep-every", "2", "--within", str(one_copy), "--yes"]) == 0
    assert steps_in(tmp_path) == [8]
    assert on_disk(tmp_path) <= one_copy


def test_keep_within_counts_the_base_of_a_kept_step(tmp_path):
    run = Run()
    with manager_of(tmp_path) as manager:
        manager.take(1, run.state)
        run.step()
        base = str(tmp_path / "step-1")
        manager.take(2, run.state, options=TakeOptions(base=base, only="trainable"))
        manager.take(3, state(3, 400 * KB))
    assert main(["prune", str(tmp_path), "--within", "2MB", "--yes"]) == 0
    assert steps_in(tmp_path) == [1, 2, 3]
    assert on_disk(tmp_path) > 1_000 * KB
    assert main(["prune", str(tmp_path), "--within", "1MB", "--yes"]) == 0  # step 2 alone would fit
    assert steps_in(tmp_path) == [3]


def test_keep_within_keeps_pinned_steps_and_gives_others_what_they_leave(tmp_path):
    with manager_of(tmp_path, KeepWithin("450kB")) as manager:
        take(manager, 1, 2)
        manager.pin(1)
        take(manager, *range(3, 8))
    assert steps_in(tmp_path) == [1, 5, 6, 7]


def test_keep_within_warns_once_until_what_must_stay_fits(tmp_path, caplog):
    with manager_of(tmp_path, KeepWithin("150kB", 5)) as manager:
        take(manager, 1, 2)
        assert warned(caplog) == []
        take(manager, 3, 4, 5, nbytes=200 * KB)
        assert steps_in(tmp_path) == [5]
        assert len(warned(caplog)) == 1
        assert all(word in warned(caplog)[0] for word in (str(tmp_path), "150kB", "KiB"))
        take(manager, 6)
        take(manager, 7, nbytes=200 * KB)
        assert len(warned(caplog)) == 2
        take(manager, 8)
        manager.pin(8)
        take(manager, 9, 10)
        assert steps_in(tmp_path) == [8, 10]
        assert len(warned(caplog)) == 3


def test_keep_within_gives_suspect_steps_only_what_good_ones_leave(tmp_path):
    pytest.importorskip("snapshot_health")  # which finds suspect states
    with manager_of(tmp_path, KeepWithin("350kB")) as manager:
        take(manager, 1)
        suspect(manager, 2)
        suspect(manager, 3)
        assert steps_in(tmp_path) == [1, 2, 3]
        take(manager, 4)
        assert steps_in(tmp_path) == [1, 3, 4]
        take(manager, 5)
        assert steps_in(tmp_path) == [1, 4, 5]
        suspect(manager, 6)
        assert steps_in(tmp_path) == [1, 4, 5]


def test_keep_within_in_a_union_limits_its_own_choice(tmp_path):
    with manager_of(tmp_path, KeepWithin("150kB") | KeepLatest(3)) as manager:
        take(manager, *range(1, 6))
    assert steps_in(tmp_path) == [3, 4, 5]


def test_keep_within_counts_damaged_steps_that_stay(tmp_path):
    with manager_of(tmp_path) as manager:
        take(manager, 1, 2, 3, 4)
    next((tmp_path / "step-3" / "data").iterdir()).unlink()
    with manager_of(tmp_path, KeepWithin("350kB")) as manager:
        take(manager, 5)
    assert steps_in(tmp_path) == [3, 4, 5]  # by its manifest, step 3 has 100 kB


def test_keep_within_with_an_unknown_metric_removes_nothing(tmp_path, caplog):
    with manager_of(tmp_path, KeepWithin("150kB", KeepBest("los"))) as manager:
        take(manager, 1, 2, 3)
    assert steps_in(tmp_path) == [1, 2, 3]
    assert "'los'" in caplog.text


def test_manager_best_finds_the_metric_inside_keep_within(tmp_path):
    with manager_of(tmp_path, KeepWithin("10MB", KeepLatest(1) | KeepBest("loss"))) as manager:
        for step in range(1, 5):
            take(manager, step, metrics={"loss": (step - 2) ** 2})
        assert manager.best() == 2
    assert steps_in(tmp_path) == [2, 4]


def test_remove_unkept_accepts_keep_within(tmp_path):
    with manager_of(tmp_path) as manager:
        take(manager, 1, 2, 3)
    assert remove_unkept(Root(URL.parse(str(tmp_path)), None), KeepWithin("250kB"), [1, 2, 3]) == {2, 3}


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (("much",), ValueError, "'much'"),
        (("0 GiB",), ValueError, "'0 GiB'"),
        ((0,), ValueError, "got 0"),
        ((-1,), ValueError, "got -1"),
        ((True,), TypeError, "True"),
        ((1.5,), TypeError, "1.5"),
        ((None,), TypeError, "None"),
        (("1TB", 0), ValueError, "got 0"),
        (("1TB", "all"), TypeError, "'all'"),
    ],
)
def test_keep_within_refuses_invalid_arguments(arguments, error, named):
    with pytest.raises(error, match=re.escape(named)):
        KeepWithin(*arguments)


def test_policies_of_applications_get_sizes_and_pins_if_they_ask(tmp_path):
    seen = {}

    class Ask(Policy):
        needs_sizes = True

        def keep(self, taken, now):
            seen.update({each.step: (sum(each.sizes.values()), each.pinned) for each in taken})
            return {each.step for each in taken}

    with manager_of(tmp_path, KeepLatest(1) | Ask()) as manager:
        take(manager, 1)
        manager.pin(1)
        take(manager, 2)
    assert seen.keys() == {1, 2}
    assert [pinned for _, pinned in seen.values()] == [True, False]
    assert sum(size for size, _ in seen.values()) == on_disk(tmp_path)


# KeepSpread


def test_keep_spread_in_a_manager_keeps_steps_of_all_ages(tmp_path):
    with manager_of(tmp_path, KeepSpread()) as manager:
        take(manager, *range(0, 400, 10), nbytes=400)
    assert steps_in(tmp_path) == [0, 260, 320, 360, 370, 380, 390]


# Lifetimes: one of a millisecond is over at once, since the time is stored in whole seconds


def test_take_lifetime_keeps_a_step_until_it_is_over(tmp_path):
    with manager_of(tmp_path, KeepLatest(1)) as manager:
        take(manager, 1, lifetime="7d")
        manager.async_take(2, state(2), lifetime=timedelta(hours=1)).wait()
        take(manager, 3, lifetime=0.001)
        take(manager, 4, 5)
    assert steps_in(tmp_path) == [1, 2, 5]


def test_take_lifetime_without_keep_removes_expired_steps_and_nothing_else(tmp_path):
    old = tmp_path / "step-0" / "data" / "0123456789ab-0-0.bin"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    with manager_of(tmp_path) as manager:
        take(manager, 1)
        take(manager, 2, lifetime=0.001)
        take(manager, 3, lifetime="1h")
        take(manager, 4, lifetime=0.001)
        assert steps_in(tmp_path) == [0, 1, 3, 4]  # the newest good step stays
        take(manager, 5)
    assert steps_in(tmp_path) == [0, 1, 3, 5]
    assert old.exists()


def test_take_lifetime_without_keep_removes_no_step_that_a_restore_passed_over(tmp_path):
    with manager_of(tmp_path) as manager:
        take(manager, 1, 2)
    [data] = (tmp_path / "step-2" / "data").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with manager_of(tmp_path) as manager:
        assert manager.restore_latest(state(0)) == 1
        manager.take(3, state(3), lifetime="1h")
    assert steps_in(tmp_path) == [1, 2, 3]


def test_take_lifetime_that_is_over_spares_pinned_steps_and_bases(tmp_path):
    run = Run()
    with manager_of(tmp_path) as manager:
        manager.take(1, run.state, lifetime=0.001)
        base = str(tmp_path / "step-1")
        manager.take(2, run.state, options=TakeOptions(base=base, only="trainable"))
        take(manager, 3, lifetime="1h")
        manager.take(4, state(4), lifetime=0.001)
        manager.pin(4)
        take(manager, 5, 6)
        assert steps_in(tmp_path) == [1, 2, 3, 4, 5, 6]
        manager.unpin(4)
        take(manager, 7)
    assert steps_in(tmp_path) == [1, 2, 3, 5, 6, 7]


def test_take_lifetime_that_is_over_is_in_no_policy(tmp_path):
    with manager_of(tmp_path, KeepBest("loss", 2)) as manager:
        take(manager, 1, metrics={"loss": 0.1}, lifetime=0.001)
        for step in (2, 3, 4):
            take(manager, step, metrics={"loss": float(step)})
    assert steps_in(tmp_path) == [2, 3, 4]


def test_take_lifetime_of_the_newest_suspect_step_ends(tmp_path):
    with manager_of(tmp_path, KeepLatest(2)) as manager:
        take(manager, 1)
        model = torch.nn.Linear(2, 1)
        torch.nn.init.constant_(model.weight, float("nan"))
        app = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        manager.take(2, app, options=TakeOptions(guards="suspect"), lifetime=0.001)
        take(manager, 3)
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize(
    ("lifetime", "error"), [("soon", ValueError), (0, ValueError), (-1, ValueError), (float("nan"), ValueError),
                            (True, TypeError), ([7], TypeError), ("999999999w", ValueError), (1e300, ValueError)],
)  # fmt: skip
def test_take_lifetime_that_is_invalid_is_named_and_nothing_is_written(tmp_path, verb, lifetime, error):
    with manager_of(tmp_path / "run") as manager, pytest.raises(error, match=f"lifetime .*{re.escape(repr(lifetime))}"):
        getattr(manager, verb)(1, state(1), lifetime=lifetime)
    assert not (tmp_path / "run").exists()


def _invalid_on_one_rank(root):
    import torch.distributed as dist

    with SnapshotManager(root, signals=(), timeout=60) as manager:
        try:
            manager.take(1, state(1), lifetime="soon" if dist.get_rank() else "7d")
        except Exception as error:  # noqa: BLE001 - its text is compared
            return str(error)
    return ""


def test_take_lifetime_that_is_invalid_on_one_rank_raises_on_all(two, folder):
    texts = two.run(_invalid_on_one_rank, folder)
    assert all("lifetime must be" in text and "'soon'" in text for text in texts)
    assert not Path(folder, "step-1").exists()


def test_lifetime_is_stored_in_the_note_and_shown_by_ls(tmp_path, capsys):
    with manager_of(tmp_path) as manager:
        take(manager, 1, metrics={"loss": 1.0}, lifetime="7d")
        take(manager, 2)
    note = Snapshot(tmp_path / "step-1").metadata.metadata["snapshot.manager"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", note["expires"])
    assert "expires" not in Snapshot(tmp_path / "step-2").metadata.metadata["snapshot.manager"]
    until = note["expires"][:16].replace("T", " ")
    assert main(["ls", str(tmp_path)]) == 0
    head, second, first = capsys.readouterr().out.splitlines()
    assert "expires (UTC)" in head
    assert first.count(until) == 1
    assert "loss 1" in first
    assert until not in second
    assert main(["ls", str(tmp_path / "step-1")]) == 0
    assert f"expires {until} UTC" in capsys.readouterr().out
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert note["expires"] in capsys.readouterr().out
    assert main(["ls", str(tmp_path), "step-2"]) == 0
    assert "expires" not in capsys.readouterr().out


def test_lifetime_that_another_program_wrote_is_ignored_if_invalid(tmp_path):
    for number, value in enumerate(("soon", 7, None, [], "0000-00-00")):
        Snapshot.take(tmp_path / f"step-{number}", state(1), metadata={"snapshot.manager": {"expires": value}})
    with manager_of(tmp_path) as manager:
        take(manager, 9, lifetime="1h")
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 9]
    assert main(["ls", str(tmp_path)]) == 0


# snapshot prune


def plan_of(capsys, *argv):
    assert main(["prune", *map(str, argv), "--json", "--dry-run"]) == 0
    found = json.loads(capsys.readouterr().out)["steps"]
    return {each["step"]: (each["goes"], each["why"]) for each in found}


def test_cli_prune_within_limits_what_the_other_options_keep(tmp_path, capsys):
    with manager_of(tmp_path) as manager:
        take(manager, *range(10, 60, 10))
    kept = "within 244.1 KiB"
    gone = (True, "no policy keeps it")
    assert plan_of(capsys, tmp_path, "--within", "250kB") == {
        10: gone, 20: gone, 30: gone, 40: (False, kept), 50: (False, kept),
    }  # fmt: skip
    assert [step for step, (goes, _) in plan_of(capsys, tmp_path, "--within", "350kB", "--keep-every", 20).items()
            if not goes] == [20, 40, 50]  # fmt: skip
    assert [step for step, (goes, _) in plan_of(capsys, tmp_path, "--within", "250kB", "--keep-every", 20).items()
            if not goes] == [40, 50]  # fmt: skip


def test_cli_prune_keep_spread(tmp_path, capsys):
    with manager_of(tmp_path) as manager:
        take(manager, *range(16), nbytes=400)
    left = [step for step, (goes, _) in plan_of(capsys, tmp_path, "--keep-spread").items() if not goes]
    assert left == [0, 8, 12, 14, 15]


def test_cli_prune_removes_what_has_expired_without_a_policy(tmp_path, capsys):
    with manager_of(tmp_path) as manager:
        take(manager, 1, lifetime="7d")
        take(manager, 2, lifetime=0.001)
    with manager_of(tmp_path) as manager:
        take(manager, 3)
    found = plan_of(capsys, tmp_path)
    assert [goes for goes, _ in found.values()] == [False, True, False]
    assert "until" in found[1][1]
    assert "lifetime" in found[2][1]
    assert main(["prune", str(tmp_path), "--yes"]) == 0
    assert steps_in(tmp_path) == [1, 3]


@pytest.mark.parametrize("argv", [["--within", "much"], ["--within", "0"], ["--within"], ["--keep-spread", "3"]])
def test_cli_prune_within_exits_2_if_invalid(tmp_path, capsys, argv):
    assert main(["prune", str(tmp_path), *argv]) == 2
