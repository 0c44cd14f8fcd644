"""One rank takes snapshots as if there were no process group; several are refused, not mixed up."""

import subprocess
import sys

SCRIPT = """
import sys, torch, torch.distributed as dist
from snapshot import Snapshot, SnapshotError, StateDict
rank, size = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
state = {"s": StateDict(x=torch.ones(3) * rank)}
if size == 1:
    Snapshot.take(sys.argv[4], state)
    Snapshot(sys.argv[4]).restore(state)
else:
    try:
        Snapshot.take(sys.argv[4], state)
    except SnapshotError as error:
        assert "2 ranks" in str(error), error
    else:
        sys.exit("no error")
    mine, _ = dist.new_subgroups(1)
    Snapshot.take(f"{sys.argv[4]}-{rank}", state, mine)
    state["s"]["x"].zero_()
    Snapshot(f"{sys.argv[4]}-{rank}", mine).restore(state)
    assert state["s"]["x"].eq(rank).all()
dist.destroy_process_group()
"""


def run(size, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    ranks = [
        subprocess.Popen([*command, str(rank), str(size), tmp_path / "store", tmp_path / "s"]) for rank in range(size)
    ]
    assert [rank.wait(90) for rank in ranks] == [0] * size


def test_a_group_of_one(tmp_path):
    run(1, tmp_path)


def test_a_group_of_two(tmp_path):
    run(2, tmp_path)
