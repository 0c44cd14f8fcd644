"""Whatever one rank meets, all others are told in time, nothing is committed, and the next take works."""

import subprocess
import sys
from pathlib import Path

import pytest

from snapshot import (
    RankError,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateDict,
    StorageError,
)
from snapshot.errors import CancelledError
from tests.distributed import failing_ranks as ranks

SOON = 8
"""Seconds in which a rank that lives is heard of, on a busy machine."""
SHORT = 0.6
"""Seconds without a sign of life, in the tests of those that give none."""

either_rank = pytest.mark.parametrize("which", [0, 1])
either_verb = pytest.mark.parametrize("verb", ["take", "async_take"])


def files(path):
    return sorted(str(each.relative_to(path)) for each in Path(path).rglob("*") if each.is_file())


def save_id(path):
    return Snapshot(path).metadata.save_id


def others_name(outcomes, which, cause):
    for rank, outcome in enumerate(outcomes):
        if rank != which:
            assert isinstance(outcome, RankError), repr(outcome)
            assert outcome.rank == which
            assert f"rank {which}" in str(outcome)
            assert cause in str(outcome)


def works(pool, path, verb="take", **options):
    """All ranks take there, and get it back; nothing of an earlier take is left."""
    assert pool.run(_round_trip, verb, path, {"timeout": SOON, **options}) == [[]] * pool.world
    assert Snapshot(path).verify().ok
    assert all(save_id(path) in name for name in files(path) if name != ".snapshot_metadata")


def _round_trip(verb, path, options):
    return ranks.round_trip(verb, path, **options)


# Errors


@pytest.mark.parametrize("what", [what for what in ranks.TAKES if "text" not in what])
@either_verb
@either_rank
def test_take_error_on_one_rank_before_writing_is_reported_on_all(two, folder, which, verb, what):
    path = f"{folder}/s"
    _, error, cause = ranks.TAKES[what]
    outcomes = two.outcomes(ranks.take_where, which, what, verb, path, SOON, timeout=SOON)
    assert type(outcomes[which]) is error, repr(outcomes[which])
    others_name(outcomes, which, cause)
    assert not Path(path).exists() or files(path) == []
    works(two, path, verb)


@pytest.mark.parametrize("what", [what for what in ranks.TAKES if "text" in what])
@either_rank
def test_take_error_whose_text_cannot_be_sent_is_reported_on_all_ranks(two, folder, which, what):
    _, error, cause = ranks.TAKES[what]
    outcomes = two.outcomes(ranks.take_where, which, what, "take", f"{folder}/s", 3, timeout=SOON)
    assert type(outcomes[which]) is error, repr(outcomes[which])
    others_name(outcomes, which, cause)
    works(two, f"{folder}/s")


@pytest.mark.parametrize(
    ("which", "on"),
    [
        *((0, on) for on in ("stat", "put", "create", "write", "finish", "commit")),
        (1, "create"),
        (1, "write"),
        (1, "finish"),
    ],
)
@either_verb
def test_take_with_a_full_disk_on_one_rank_fails_on_all_and_leaves_no_files(two, folder, which, verb, on):
    path = f"{folder}/s"
    outcomes = two.outcomes(ranks.take_with_fault, which, on, verb, path, timeout=SOON)
    assert isinstance(outcomes[which], StorageError), repr(outcomes[which])
    assert "No space left" in str(outcomes[which])
    others_name(outcomes, which, "No space left")
    assert files(path) == []
    works(two, path, verb)


def test_take_whose_folder_is_removed_by_a_failed_leader_names_the_leader(two, folder):
    path = f"{folder}/s"
    outcomes = two.outcomes(ranks.take_bereft, path)
    assert isinstance(outcomes[0], StorageError), repr(outcomes[0])
    others_name(outcomes, 0, "No space left")
    assert files(path) == []


@either_rank
def test_take_interrupted_on_one_rank_names_that_rank(two, folder, which):
    path = f"{folder}/s"
    outcomes = two.outcomes(ranks.take_and_act, which, "finish", "interrupt", "take", path, SOON, timeout=SOON)
    assert isinstance(outcomes[which], KeyboardInterrupt), repr(outcomes[which])
    others_name(outcomes, which, "Cancelled")
    assert files(path) == []
    works(two, path)


@either_rank
def test_async_take_failing_on_one_of_four_ranks_is_named_by_the_others(four, folder, which):
    path = f"{folder}/s"
    outcomes = four.outcomes(ranks.take_with_fault, which, "finish", "async_take", path)
    assert isinstance(outcomes[which], StorageError)
    others_name(outcomes, which, "No space left")
    assert files(path) == []
    works(four, path)


# Restores


@pytest.fixture
def taken(two, folder):
    path = f"{folder}/s"
    two.run(ranks.take_all, path)
    return path


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("its state_dict raises", "RuntimeError"),
        ("a value is not stateful", "TypeError"),
        ("a shape differs", "RestoreError"),
        ("it has a key too many", "RestoreError"),
        ("its budget is nothing", "ValueError"),
        ("it wants to cast somehow", "ValueError"),
        ("its options are those of a take", "TypeError"),
    ],
)
@either_rank
def test_restore_error_on_one_rank_changes_no_tensors_on_any(two, taken, which, what, error):
    outcomes = two.run(ranks.restore_where, which, what, taken, timeout=SOON)
    kinds = [outcome and outcome[:2] for outcome in outcomes]
    assert kinds[which] == (error, None)
    assert kinds[1 - which] == ("RankError", which)
    assert f"rank {which} failed: {error}" in outcomes[1 - which][2]
    assert [outcome[3:] for outcome in outcomes] == [([], False)] * 2
    assert two.run(ranks.collective, timeout=SOON) == [2, 2]


def test_rank_error_repeats_the_first_lines_of_the_cause_in_a_short_traceback(two, tmp_path):
    outcomes = two.run(ranks.restore_unfit, tmp_path / "s", 20, timeout=SOON)
    (kind, text, _), (other, short, frames) = outcomes
    assert (kind, text.count("\n")) == ("RestoreError", 41)
    assert (other, short.count("\n")) == ("RankError", 6)
    assert short.startswith(f"rank 0 failed: RestoreError: {tmp_path}/s: does not fit the application")
    assert short.endswith("(36 lines more, which rank 0 shows)")
    assert frames <= 4


@either_rank
def test_restore_error_in_load_state_dict_is_reported_on_all_ranks(two, taken, which):
    outcomes = two.run(ranks.restore_where, which, "its load_state_dict raises", taken)
    assert outcomes[which][:2] == ("RuntimeError", None)
    assert outcomes[1 - which][:2] == ("RankError", which)
    assert "RuntimeError: mine" in outcomes[1 - which][2]
    assert "load_state_dict" in outcomes[1 - which][2]


@pytest.mark.parametrize("read_once", [False, True])
@either_rank
def test_restore_of_a_damaged_file_that_one_rank_reads_calls_no_load_state_dict(two, taken, which, read_once):
    entry = Snapshot(taken).get_manifest()[f"{which}/s/own"]
    with open(f"{taken}/{entry.location}", "r+b") as file:
        file.seek(entry.byte_range[0])
        file.write(b"\xff\xff\xff")
    outcomes = two.run(
        _restore, which, "its data is damaged", taken, {"read_once": read_once, "timeout": 3}, timeout=SOON
    )
    assert outcomes[which][:2] == ("CorruptSnapshotError", None)
    assert outcomes[1 - which][:2] == ("RankError", which)
    assert "s/own" in outcomes[1 - which][2]
    assert [outcome[4] for outcome in outcomes] == [False, False]
    assert two.run(ranks.collective, timeout=SOON) == [2, 2]


@pytest.mark.parametrize("read_once", [False, True])
@either_rank
def test_restore_with_a_disk_error_on_one_rank_fails_on_all(two, taken, which, read_once):
    outcomes = two.run(_restore, which, "its disk fails", taken, {"read_once": read_once, "timeout": 3}, timeout=SOON)
    assert outcomes[which][:2] == ("StorageError", None)
    assert outcomes[1 - which][:2] == ("RankError", which)
    assert "Input/output" in outcomes[1 - which][2]
    assert [outcome[4] for outcome in outcomes] == [False, False]
    assert two.run(ranks.collective, timeout=SOON) == [2, 2]


def _restore(which, what, path, options):
    return ranks.restore_where(which, what, path, **options)


def test_restore_of_a_missing_snapshot_raises_not_found_on_all_ranks(two, folder):
    outcomes = two.outcomes(ranks.different_verbs, ("restore", "restore"), f"{folder}/none")
    assert [type(outcome) for outcome in outcomes] == [SnapshotNotFoundError] * 2


# Death


def test_take_by_restarted_ranks_at_the_same_path_after_a_rank_died(fresh_pool, folder):
    path = f"{folder}/s"
    pool = fresh_pool(2)
    works(pool, path)
    before = save_id(path)
    outcomes = pool.outcomes(_overwrite_and_die, 1, path)
    others_name(outcomes, 1, "no heartbeat")
    assert save_id(path) == before
    assert Snapshot(path).verify().ok
    pool.restart()
    works(pool, path, overwrite=True)
    assert save_id(path) != before


def _overwrite_and_die(which, path):
    return ranks.take_and_act(which, "finish", "die", "take", path, SHORT, overwrite=True)


@pytest.mark.parametrize(("which", "point"), [(0, "calling"), (1, "write")])
def test_take_works_again_after_one_rank_was_stopped(two, folder, which, point):
    path = f"{folder}/s"
    verb = "take" if point == "write" else "async_take"
    two.start(ranks.take_and_act, which, point, "stop", verb, path, SHORT)
    outcomes = [None, None]
    [outcomes[1 - which]] = two.finish(30, ranks=[1 - which])
    others_name(outcomes, which, "did not call" if point == "calling" else "no heartbeat")
    two.cont(which)
    [late] = two.finish(30, ranks=[which])
    assert isinstance(late, RankError), repr(late)
    assert files(path) == []
    works(two, path, verb)


# Absence


@pytest.mark.parametrize(("which", "verb"), [(0, "take"), (1, "async_take")])
def test_take_names_a_rank_that_does_not_call_and_the_rank_can_call_later(two, folder, which, verb):
    path = f"{folder}/s"
    outcomes = two.outcomes(ranks.take_if_called, [which], verb, path, SHORT, timeout=SHORT + SOON)
    assert outcomes[which] is None
    others_name(outcomes, which, f"did not call within {SHORT:g} s")
    assert not Path(path).exists()
    works(two, path, verb)


@pytest.mark.parametrize("absent", [[3], [0, 1], [1, 3]], ids=str)
def test_take_that_several_ranks_did_not_call_works_when_all_call_later(four, folder, absent):
    path = f"{folder}/s"
    outcomes = four.outcomes(ranks.take_if_called, absent, "take", path, SHORT)
    for rank, outcome in enumerate(outcomes):
        if rank not in absent:
            assert isinstance(outcome, RankError)
            assert outcome.rank in absent
    works(four, path, timeout=3)


def test_take_missed_by_each_rank_in_turn_works_afterwards(two, folder):
    path = f"{folder}/s"
    for absent in (0, 1, 1, 0):
        outcomes = two.outcomes(ranks.take_if_called, [absent], "take", path, 0.4)
        others_name(outcomes, absent, "did not call")
    works(two, path)


def test_take_refuses_an_invalid_timeout(two, folder):
    path = f"{folder}/s"
    for timeout in (0, -1, float("nan")):
        assert [type(each) for each in two.outcomes(ranks.bad_timeout, timeout, path)] == [ValueError] * 2
        with pytest.raises(ValueError, match="timeout"):
            Snapshot.take(path, {"s": StateDict(x=1)}, timeout=timeout)
    outcomes = two.outcomes(ranks.no_timeout_on, 1, path, SHORT)
    assert isinstance(outcomes[1], ValueError)
    others_name(outcomes, 1, "")
    works(two, path)


# The leader's end


def test_take_whose_leader_is_stopped_before_the_manifest_commits_nothing_later(two, folder):
    path = f"{folder}/s"
    two.start(ranks.take_and_act, 0, "commit", "stop", "async_take", path, SHORT)
    [other] = two.finish(30, ranks=[1])
    assert isinstance(other, RankError), repr(other)
    assert other.rank == 0
    assert not Snapshot(path).exists()
    two.cont(0)
    [late] = two.finish(30, ranks=[0])
    assert isinstance(late, SnapshotExistsError | RankError), repr(late)
    assert files(path) == []
    works(two, path)


# Slowness


@pytest.mark.parametrize(("which", "verb"), [(0, "async_take")])
def test_take_waits_for_a_slow_rank_and_commits_nothing_early(two, folder, which, verb):
    path = f"{folder}/s"
    works(two, path)
    before = save_id(path)
    seen = two.run(_slow_overwrite, which, verb, path)
    assert seen[which] == [before]
    assert seen[1 - which] == [save_id(path)], "it returned before the commit"
    assert save_id(path) != before
    assert Snapshot(path).verify().ok


def _slow_overwrite(which, verb, path):
    return ranks.slow_take(which, verb, path, SHORT, overwrite=True)


@either_verb
def test_take_returns_on_all_ranks_after_the_commit(two, folder, verb):
    assert two.run(ranks.slow_commit, verb, f"{folder}/s") == [True, True]


# In the background


def test_async_take_twice_at_once_on_two_ranks(two, folder):
    first, second = f"{folder}/first", f"{folder}/second"
    assert two.run(ranks.two_at_once, first, second) == [(False, True)] * 2
    for path, value in ((first, 1), (second, 2)):
        assert Snapshot(path).verify().ok
        assert Snapshot(path).read_object("1/s/own")[0] == value + 1


@pytest.mark.parametrize("run", [ranks.cancel_on, ranks.cancel_while_waiting])
@either_rank
def test_cancel_on_one_rank_fails_the_take_of_all(two, folder, which, run):
    path = f"{folder}/s"
    outcomes = two.outcomes(run, which, path)
    assert isinstance(outcomes[which], CancelledError), repr(outcomes[which])
    others_name(outcomes, which, "Cancelled")
    assert files(path) == []
    works(two, path, "async_take")


EXIT = """
import sys, torch, torch.distributed as dist
from snapshot import Snapshot, StateDict
from snapshot.testing import Stall, tapped
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
tap = tapped("stalled", Stall("finish", "*.safetensors", seconds=0.3 if rank else 0.01))
tap.__enter__()
state = StateDict(x=torch.full((100_000,), float(rank)))
pending = Snapshot.async_take(f"stalled+file://{sys.argv[3]}", {"s": state}, timeout=20)
state["x"].zero_()
assert not pending.done() or not rank
"""


@pytest.mark.ranks
def test_async_take_pending_at_exit_is_finished(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", EXIT]
    jobs = [
        subprocess.Popen([*command, str(rank), tmp_path / "store", tmp_path / "s"], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    told = [job.communicate(timeout=300)[1].decode() for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], told
    assert Snapshot(tmp_path / "s").verify().ok
    assert Snapshot(tmp_path / "s").read_object("1/s/x").eq(1).all()


# Ranks that do not agree


@either_verb
def test_take_to_an_existing_snapshot_is_refused_by_all_ranks_and_writes_nothing(two, taken, verb):
    before = files(taken)
    outcomes = two.outcomes(ranks.exists_already, taken, verb)
    assert [type(outcome) for outcome in outcomes] == [SnapshotExistsError] * 2
    assert all(taken in str(outcome) for outcome in outcomes)
    assert files(taken) == before
    works(two, taken, verb, overwrite=True)


@either_verb
def test_take_raises_on_all_ranks_if_another_take_committed_first(two, taken, folder, verb):
    path, manifest = f"{folder}/other", Path(taken, ".snapshot_metadata").read_bytes()
    outcomes = two.outcomes(ranks.overtaken, verb, path, manifest)
    assert [type(outcome) for outcome in outcomes] == [SnapshotExistsError] * 2
    assert all("committed first" in str(outcome) for outcome in outcomes)
    assert files(path) == [".snapshot_metadata"]
    assert Path(path, ".snapshot_metadata").read_bytes() == manifest


@pytest.mark.parametrize(
    "verbs", [("take", "restore"), ("restore", "take"), ("take", "async_take"), ("async_take", "take")], ids=str
)
def test_ranks_that_call_different_methods_raise(two, folder, verbs):
    path = f"{folder}/s"
    outcomes = two.outcomes(ranks.different_verbs, verbs, path, timeout=SOON)
    for outcome in outcomes:
        assert isinstance(outcome, SnapshotError)
        assert all(f"{verb} on rank {rank}" in str(outcome) for rank, verb in enumerate(verbs))
    assert not Path(path).exists()
    works(two, path)


@either_verb
def test_take_uses_the_path_of_rank_0_and_warns_the_others(two, folder, verb):
    assert two.run(ranks.paths_of_their_own, verb, folder) == [(f"{folder}/0", 2)] * 2
    assert [len(warned) for warned in two.warnings] == [0, 1]
    assert f"{folder}/0" in two.warnings[1][0]
    assert f"{folder}/1" in two.warnings[1][0]
    assert not Path(f"{folder}/1").exists()


def test_take_and_async_take_of_ranks_reuse_a_path(two, folder):
    path = f"{folder}/s"
    works(two, path, "async_take")
    first = save_id(path)
    works(two, path, "take", overwrite=True)
    Snapshot(path).delete()
    works(two, path, "take")
    works(two, path, "async_take", overwrite=True)
    assert save_id(path) != first


# Groups


def test_process_group_without_global_rank_0_takes_and_fails(four, folder):
    path = f"{folder}/s"
    assert four.run(ranks.in_group, (1, 2, 3), path) == [None, ([], 3), ([], 3), ([], 3)]
    outcomes = four.outcomes(ranks.fails_in_group, (1, 2, 3), 2, f"{folder}/t")
    assert isinstance(outcomes[2], RuntimeError)
    for member in (1, 3):
        assert isinstance(outcomes[member], RankError)
        assert outcomes[member].rank == 1  # its number in the group
    assert not Path(f"{folder}/t").exists()


def test_process_group_that_does_not_contain_the_rank_is_refused(four, folder):
    path = f"{folder}/s"
    outcomes = four.outcomes(ranks.everyone_calls, (1, 2, 3), path)
    assert isinstance(outcomes[0], SnapshotError)
    assert "not a member" in str(outcomes[0])
    assert outcomes[1:] == [None] * 3
    assert Snapshot(path).metadata.world_size == 3


def test_process_group_of_one_rank_takes_alone(two, folder):
    assert two.run(ranks.alone_each, folder) == [([], 1)] * 2


# The store


@pytest.mark.parametrize("failing", [False, True])
def test_store_keys_do_not_pile_up(fresh_pool, folder, failing):
    pool = fresh_pool(2, store="tcp")
    [before, _] = pool.run(_count, f"{folder}/s", 10, failing)
    [after, _] = pool.run(_count, f"{folder}/s", 30, failing)
    assert after - before <= 5, f"{before} keys, and {after} after 30 takes more"


def _count(path, takes, failing):
    return ranks.count_keys(path, takes, failing=failing)
