"""Ranks that call `publish` differently: an error on all of them, never a version of mixed steps."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import RankError, RestoreError, Sharded, SnapshotError, TensorMap
from snapshot_publish import Publisher, Subscriber, shares
from tests.plugins.snapshot_publish import engine

pytestmark = pytest.mark.ranks


def halves(value, names="ab"):
    """Tensors that two ranks have by halves."""
    rank = dist.get_rank()
    return {name: Sharded(torch.full((500,), float(value)), (1000,), (500 * rank,)) for name in names}


def attempt(publisher, step, state):
    try:
        return publisher.publish(step, state).wait()[:]
    except (SnapshotError, ValueError, TypeError, MemoryError) as error:
        return type(error), str(error)


def call_differently(url, kind):
    rank = dist.get_rank()
    options = {"timeout": 20}
    step, state = 1, halves(1, "ac")
    if kind == "step":
        step += rank
    elif kind == "url":
        url += str(rank)
    elif kind == "full_every":
        options["full_every"] = 5 + rank
    elif kind == "names":
        options["names"] = TensorMap(["a -> b", "c -> d"]) if rank else None
    elif kind == "bad step":
        step = -rank
    elif kind == "state":
        state = [torch.zeros(1)] if rank else state
    elif kind == "meta":
        state["plain"] = torch.ones(5, device="meta" if rank else "cpu")
    publisher = Publisher(url, **options)
    return attempt(publisher, step, state), attempt(publisher, 7, halves(7) if kind in ("state", "meta") else state)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("step", "step: 1 on rank 0, 2 on rank 1"),
        ("url", r"url: .*0 on rank 0, .*1 on rank 1"),
        ("full_every", "full_every: 5 on rank 0, 6 on rank 1"),
        ("names", "must be the same map on all ranks, got another one on rank 1"),
        ("bad step", "step must be an int of at least 0"),
        ("state", "must be a module or a state dict"),
        ("meta", "plain: a published tensor must have values, got a tensor on the meta device"),
    ],
)
def test_publish_calls_that_differ_between_ranks_raise_on_all(two, tmp_path, kind, message):
    found = two.run(call_differently, str(tmp_path), kind)
    for rank, (first, second) in enumerate(found):
        with pytest.raises(SnapshotError if rank == 0 else (SnapshotError, ValueError, TypeError), match=message):
            raise first[0](first[1]) if first[0] is not RankError else RankError(first[1], rank=1, kind="")
        if kind in ("url", "full_every", "names"):  # the second call is as wrong
            assert second[0] is SnapshotError
        else:
            assert second == (1, 7, None)
    assert sorted(engine.versions(tmp_path)) == ([] if kind in ("url", "full_every", "names") else [1])


def publish_late(url, late):
    publisher = Publisher(url, timeout=4)
    if dist.get_rank() == late:
        time.sleep(6)
    return [attempt(publisher, step, halves(step)) for step in (1, 2, 3, 4)]


@pytest.mark.parametrize("late", [0, 1])
def test_publish_with_a_late_rank_never_mixes_steps(two, tmp_path, late):
    for outcomes in two.run(publish_late, str(tmp_path), late):
        assert [each[0] for each in outcomes[2:]] == [1, 2]
        assert all(issubclass(each[0], SnapshotError) for each in outcomes[:2])
    for version, step in ((1, 3.0), (2, 4.0)):
        for _, _, content in engine.read(tmp_path, version).values():
            assert set(content.view("float32")) == {step}


def publish_after_failed_gather(url, victim):
    publisher = Publisher(url, timeout=20)
    exchange = shares._Link._operation
    if dist.get_rank() == victim:

        def fail(*_):
            raise MemoryError("no memory")

        shares._Link._operation = fail
    try:
        found = [attempt(publisher, 1, halves(1))]
    finally:
        shares._Link._operation = exchange
    return [*found, attempt(publisher, 2, halves(2)), attempt(publisher, 3, halves(3))]


@pytest.mark.parametrize("victim", [0, 1])
def test_publish_after_a_failed_gather_works(two, tmp_path, victim):
    for rank, (first, *others) in enumerate(two.run(publish_after_failed_gather, str(tmp_path), victim)):
        assert first[0] is (MemoryError if rank == victim else RankError)
        assert others == [(1, 2, None), (2, 3, 1)]
    for version in (1, 2):
        for _, _, content in engine.read(tmp_path, version).values():
            assert set(content.view("float32")) == {version + 1.0}


TIES = TensorMap(["embed -> embed, lm_head", "tok, out -> both"])


def publish_ties(url, other, sharded):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"embed": torch.arange(40.0).view(8, 5), "tok": torch.ones(6, 4), "out": torch.full((6, 4), other)}
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    if not sharded:
        state["out"] = whole["out"]
    return attempt(Publisher(url, names=TIES, timeout=20), 1, state)


@pytest.mark.parametrize("sharded", [True, False])
def test_publish_of_tensor_map_ties_needs_equal_tensors(two, tmp_path, sharded):
    assert two.run(publish_ties, str(tmp_path), 1.0, sharded) == [(1, 1, None)] * 2
    found = engine.read(tmp_path, 1)
    assert found.keys() == {"embed", "lm_head", "both"}
    assert found["lm_head"][2].view("float32").tolist() == list(range(40))
    assert found["embed"][2].tobytes() == found["lm_head"][2].tobytes()
    for kind, text in two.run(publish_ties, str(tmp_path), 2.0, sharded):
        assert kind is RestoreError
        assert "out must equal tok" in text
    assert sorted(engine.versions(tmp_path)) == [1]
    assert Subscriber(tmp_path, str(tmp_path) + "-local").pull().name == "weight_v000001"


def test_publish_of_ties_on_one_rank(tmp_path):
    state = {"embed": torch.ones(3), "tok": torch.zeros(3), "out": torch.zeros(3)}
    publisher = Publisher(tmp_path, names=TIES)
    publisher.publish(1, state).wait()
    state["embed"][1] = 5
    assert publisher.publish(2, state).wait().base == 1
    assert engine.read(tmp_path, 2)["lm_head"][2].view("float32").tolist() == [1, 5, 1]
    state["out"][0] = float("nan")
    with pytest.raises(RestoreError, match="out must equal tok"):
        publisher.publish(3, state)


@pytest.mark.deadly
def test_publish_in_a_forked_child(tmp_path):
    publisher = Publisher(tmp_path)
    pending = publisher.publish(1, {"a": torch.randn(8 << 20)})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if not pending.done():
                with pytest.raises(SnapshotError, match="a forked child cannot wait"):
                    pending.wait()
            if publisher.publish(2, {"a": torch.ones(2)}).wait(60).base is None:
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    pending.wait()
    assert len(engine.versions(tmp_path)) == 2
