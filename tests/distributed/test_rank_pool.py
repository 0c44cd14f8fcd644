"""The pool of ranks that the other tests here stand on: what it brings back, and that it always ends."""

import functools
import logging
import os
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

from snapshot import RankError
from tests.helpers.rank_pool import Died, Hang, Remote, Traces


class Unsendable(Exception):
    def __init__(self, rank):
        super().__init__(f"no pickle of rank {rank}")
        self.rank, self.faults, self.lock = rank, ("a", "b"), open(os.devnull)  # noqa: SIM115 - files have no pickle


def ranks(offset=0):
    mine = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(mine)
    return dist.get_rank(), mine


def surroundings():
    names = os.listdir(f"/proc/{os.getppid()}/task")
    return os.getpid(), len(names), torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")


def fails(where):
    if dist.get_rank() in where:
        print("the printer was on fire")
        logging.getLogger("pool").warning("and it was logged")
        expected = f"rank {dist.get_rank()} is fine"
        assert not expected
    return "fine"


def raises(kind):
    if kind == "library":
        try:
            raise FileNotFoundError(2, "gone", "/some/file")
        except FileNotFoundError as error:
            raise RankError("rank 1 failed", rank=1) from error
    raise Unsendable(dist.get_rank())


def warns():
    if dist.get_rank() == 1:
        for _ in range(2):
            warnings.warn("mind the gap", ResourceWarning, stacklevel=1)


def ends(how):
    if dist.get_rank() == 1:
        how()
    return "alive"


def meets(rank):
    """All but one rank wait for it."""
    if dist.get_rank() != rank:
        dist.barrier()


def disagrees():
    """As when one rank failed before it made a group that the others made."""
    dist.distributed_c10d._world.group_count += dist.get_rank()


def test_rank_pool_returns_values_in_rank_order(four):
    assert four.run(ranks) == [(rank, torch.tensor([6])) for rank in range(4)]
    assert four.run(functools.partial(ranks, offset=1)) == [(rank, torch.tensor([10])) for rank in range(4)]
    assert len(four.seconds) == 4


def test_rank_pool_workers_are_forked_by_a_single_threaded_process(two):
    (first, *same), (second, *others) = two.run(surroundings)
    assert [first, second] == two.pids
    assert same == others == [1, 1, "lo"]


def test_rank_pool_run_raises_with_the_traces_of_all_ranks(four):
    with pytest.raises(AssertionError) as caught:
        four.run(fails, (1, 3))
    assert isinstance(caught.value.__cause__, Traces)
    text = str(caught.value.__cause__)
    for rank in (1, 3):
        assert f"rank {rank}:\n" in text
        assert f"expected = 'rank {rank} is fine'" in text
    assert text.count("assert not expected") == 2
    assert text.count("the printer was on fire") == text.count("and it was logged") == 2
    assert "rank 0" not in text
    assert four.run(fails, ()) == ["fine"] * 4
    assert four.output(1) == ""


def test_rank_pool_outcomes_separates_values_and_exceptions(two):
    fine, failed = two.outcomes(fails, (1,))
    assert fine == "fine"
    assert isinstance(failed, AssertionError)


def test_rank_pool_exceptions_keep_class_attributes_and_causes(two):
    for error in two.outcomes(raises, "library"):
        assert type(error) is RankError
        assert (str(error), error.rank) == ("rank 1 failed", 1)
        assert type(error.__cause__) is FileNotFoundError
        assert error.__cause__.filename == "/some/file"


def test_rank_pool_replaces_an_exception_that_cannot_be_pickled(two):
    for rank, error in enumerate(two.outcomes(raises, "own")):
        assert type(error) is Remote
        assert (error.type_name, error.text) == ("Unsendable", f"no pickle of rank {rank}")
        assert (error.rank, error.faults) == (rank, ("a", "b"))


def test_rank_pool_lists_warnings_per_rank(two):
    two.run(warns)
    assert two.warnings == [[], ["ResourceWarning: mind the gap"] * 2]
    two.run(ranks)
    assert two.warnings == [[], []]


@pytest.mark.parametrize("store", ["file", "tcp"])
def test_rank_pool_notices_a_killed_rank_at_once(fresh_pool, store):
    pool = fresh_pool(2, store=store)
    alive, died = pool.outcomes(ends, functools.partial(os.kill, pool.pids[1], signal.SIGKILL), timeout=10)
    assert alive == "alive"
    assert isinstance(died, Died)
    assert (died.rank, died.signal) == (1, signal.SIGKILL)
    assert not pool.healthy()
    with pytest.raises(Died, match="rank 1 died: SIGKILL"):
        pool.run(surroundings)
    pool.restart()
    assert pool.healthy()


def test_rank_pool_distinguishes_exited_and_killed_ranks(fresh_pool):
    died = fresh_pool(2).outcomes(ends, functools.partial(os._exit, 3))[1]
    assert (died.signal, died.code) == (None, 3)


def test_rank_pool_can_kill_a_rank_during_a_run(fresh_pool):
    pool = fresh_pool(3)
    pool.start(meets, 2)
    assert pool.finish(ranks=[2]) == [None]
    pool.kill(2)
    first, second, third = pool.finish()
    assert third is None
    assert isinstance(first, RuntimeError)
    assert isinstance(second, RuntimeError)


def test_rank_pool_stopped_rank_continues_after_cont(fresh_pool):
    pool = fresh_pool(2)
    pool.stop(1)
    assert not pool.healthy()
    pool.start(fails, ())
    assert pool.finish(ranks=[0]) == ["fine"]
    with pytest.raises(RuntimeError, match=r"not ended on ranks \[1\]"):
        pool.run(ranks)
    pool.cont(1)
    assert pool.finish() == ["fine", "fine"]
    assert pool.healthy()


@pytest.mark.timeout(10, func_only=True)
def test_rank_pool_hang_shows_the_stacks_of_the_ranks(fresh_pool):
    pool = fresh_pool(2)
    with pytest.raises(Hang) as caught:
        pool.run(meets, 1, timeout=0.5)
    text = str(caught.value)
    assert "ranks [0] of 2 gave no answer within 0.5 s" in text
    assert "in meets" in text
    assert "rank 1 was done after" in text
    assert not pool.healthy()


def test_rank_pool_reports_a_stopped_rank_as_a_hang(fresh_pool):
    pool = fresh_pool(2)
    pool.stop(1)
    with pytest.raises(Hang, match=r"ranks \[1\] of 2"):
        pool.outcomes(fails, (), timeout=0.2)


def test_rank_pool_outcomes_of_a_killed_rank_is_died(two):
    two.kill(0)
    assert isinstance(two.outcomes(ranks)[0], Died)


def test_rank_pool_is_repaired_for_the_next_test(two):
    assert two.run(fails, ()) == ["fine", "fine"]


def test_rank_pool_healthy_is_false_if_ranks_disagree(fresh_pool):
    pool = fresh_pool(2)
    assert pool.healthy()
    pool.run(disagrees)
    assert not pool.healthy()


def test_rank_pool_spawned_ranks_have_different_hash_seeds(fresh_pool):
    one, other = fresh_pool(2, method="spawn").run(hash, "name")
    assert one != other
