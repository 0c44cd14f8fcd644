"""Groups of ranks as people make them: of one, of all, of some; and processes that were started as any job's are."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import Ranks
from snapshot.manager.agreement import StepVote

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, torch, torch.distributed as dist
from snapshot import Snapshot, StateDict
rank, size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
state = {"s": StateDict(x=torch.ones(3) * rank, both=torch.ones(900))}
Snapshot.async_take(sys.argv[4], state, replicated=["s/both"]).wait()
state["s"]["x"].zero_(), state["s"]["both"].zero_()
Snapshot(sys.argv[4]).restore(state)
assert state["s"]["x"].eq(rank).all() and state["s"]["both"].eq(1).all()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("size", [1, 2])
def test_take_and_restore_in_processes_started_separately(tmp_path, size):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), tmp_path / "store", tmp_path / "s"]) for rank in range(size)
    ]
    assert [rank.wait(300) for rank in ranks] == [0] * size


def _apart(path):
    mine, _ = dist.new_subgroups(1)
    rank = dist.get_rank()
    state = {"s": StateDict(x=torch.ones(300) * rank)}
    Snapshot.take(f"{path}-{rank}", state, mine)
    state["s"]["x"].zero_()
    Snapshot(f"{path}-{rank}", mine).restore(state)
    assert state["s"]["x"].eq(rank).all()
    return Snapshot(f"{path}-{rank}", mine).metadata.world_size


def test_process_group_of_each_rank_alone_takes_a_snapshot_each(two, folder):
    assert two.run(_apart, f"{folder}/s") == [1, 1]


def _some(path):
    members = dist.new_group([1, 2, 3])
    rank = dist.get_rank()
    state = {"s": StateDict(x=torch.full((300,), float(rank)), same=torch.ones(5000))}
    if rank == 0:
        with pytest.raises(SnapshotError, match="member"):
            Snapshot.take(path, state, members)
        return None
    Snapshot.take(path, state, members, replicated=["s/same"])
    state["s"]["x"].zero_()
    Snapshot(path, members).restore(state)
    assert state["s"]["x"].eq(rank).all()
    return sorted(Snapshot(path).get_manifest())


def test_process_group_without_the_first_rank(four, folder):
    _, *entries = four.run(_some, f"{folder}/s")
    assert entries[0] == ["0/s", "0/s/same", "0/s/x", "1/s/x", "2/s/x"]


def test_process_group_recreated_on_the_same_store_ignores_old_keys():
    """Torch's own second meeting on one store may hang, so these ranks are ours alone."""
    store = dist.HashStore()

    def session(rank):
        ranks = Ranks(rank, (0, 1), store)
        for number in range(3):
            exchange = Exchange(ranks, "take", 20)
            with exchange:
                assert exchange.agree(rank + number, sum, int, int) == 1 + 2 * number
            exchange.close()
        agreement = StepVote(ranks.connected()[0], "stop", rank, 2, 20)
        first = [agreement.ask(False) for _ in range(3)]
        later = any(agreement.ask(rank == 1) for _ in range(1_000_000))  # as often as the slower one needs
        ranks.stop()
        return first, later

    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(session, range(2))) == [([False] * 3, True)] * 2


def _late(path):
    """How often a rank looked for an answer while the other one was late."""
    from snapshot.distributed.group import ranks_of

    ranks, looks = ranks_of(None), []
    store, heart = ranks.connected()

    class Counting:
        def __getattr__(self, name):
            return getattr(store, name)

        def check(self, keys):
            looks.append(keys)
            return store.check(keys)

    ranks._connected = Counting(), heart
    try:
        if dist.get_rank():
            time.sleep(4)
        Snapshot.take(path, {"s": StateDict(x=torch.ones(3))})
    finally:
        ranks._connected = store, heart
    return len(looks)


def test_rank_that_waits_polls_the_store_less_and_less_often(two, folder):
    waited, _ = two.run(_late, f"{folder}/s")
    assert waited < 400  # one look in 4 ms would be 2,000
