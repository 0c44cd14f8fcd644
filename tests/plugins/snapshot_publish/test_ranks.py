"""Publishing on several ranks: each tensor is written once, by an owner that gathers its pieces."""

import json

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from snapshot import RankError, Sharded, SnapshotError, StorageError, TensorMap
from snapshot.testing.storages import faulty
from snapshot_publish import Publisher, Subscriber, shares
from tests.helpers.rank_pool import Died
from tests.plugins.snapshot_publish import engine

pytestmark = pytest.mark.ranks


def whole_state(step):
    """The whole tensors, equal on all ranks."""
    torch.manual_seed(1)
    state = {
        "rows": torch.randn(101, 64),
        "columns": torch.randn(64, 102).to(torch.bfloat16),
        "grid": torch.randn(12, 10, 6),
        "copy": torch.randn(50),
        "by_hand": torch.randn(8, 40),
        "scalar": torch.tensor(3.0),
    }
    generator = torch.Generator().manual_seed(step)
    for name in list(state)[: step + 1]:
        flat = state[name].view(-1)
        flat[torch.randint(len(flat), (5,), generator=generator)] += 1
    return state


def shared_state(step):
    """This rank's share of the state."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = whole_state(step)
    mesh = init_device_mesh("cpu", (world,))
    part = 8 // world
    state = {
        "rows": distribute(whole["rows"], mesh, [Shard(0)]),
        "columns": distribute(whole["columns"], mesh, [Shard(1)]),
        "grid": distribute(whole["grid"], mesh, [Shard(1)]),
        "copy": distribute(whole["copy"], mesh, [Replicate()]),
        "by_hand": Sharded(whole["by_hand"][rank * part : (rank + 1) * part], (8, 40), (rank * part, 0)),
        "scalar": whole["scalar"],
    }
    if rank == world - 1:  # a stage of a pipeline
        state["last"] = torch.full((30, 30), float(step))
    return state


def distribute(whole, mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, mesh, placements)


def publish(url, steps):
    publisher = Publisher(url, timeout=20)
    return [publisher.publish(step, shared_state(step)).wait()[:] for step in range(steps)]


def expect_version(store, version, step, folder=None):
    expected = {**whole_state(step), "last": torch.full((30, 30), float(step))}
    found = engine.read(store, version)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name][1] == tuple(tensor.shape)
        assert found[name][2].tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("world", ["two", "four"])
def test_publish_by_ranks_writes_each_tensor_once(request, tmp_path, world):
    pool = request.getfixturevalue(world)
    outcomes = pool.run(publish, str(tmp_path / "store"), 4)
    assert outcomes == [[(1, 0, None), (2, 1, 1), (3, 2, 2), (4, 3, 3)]] * pool.world
    for step in range(4):
        expect_version(tmp_path / "store", step + 1, step)
    index = json.loads((tmp_path / "store" / "weight_v000001" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == pool.world  # each rank owns some
    Subscriber(tmp_path / "store", tmp_path / "local").pull()
    expect_version(tmp_path / "local", 4, 3)


def publish_changed(url):
    """The set of tensors changes on one rank."""
    publisher = Publisher(url, timeout=20)
    rank = dist.get_rank()
    state = {"a": torch.zeros(3), f"of_{rank}": torch.zeros(5)}
    found = [publisher.publish(1, state).wait()[:], publisher.publish(2, state).wait()[:]]
    if rank == 1:
        state["more"] = torch.ones(4)
    return [*found, publisher.publish(3, state).wait()[:], publisher.publish(4, state).wait()[:]]


def test_publish_with_a_change_of_structure_on_one_rank_is_a_complete_version(two, tmp_path):
    expected = [(1, 1, None), (2, 2, 1), (3, 3, None), (4, 4, 3)]
    assert two.run(publish_changed, str(tmp_path)) == [expected] * 2
    assert engine.read(tmp_path, 4).keys() == {"a", "of_0", "of_1", "more"}


def publish_misfit(url):
    rank = dist.get_rank()
    Publisher(url, timeout=20).publish(1, {"a": torch.zeros(3 + rank)})


def publish_hole(url):
    rank = dist.get_rank()
    Publisher(url, timeout=20).publish(1, {"a": Sharded(torch.zeros(2), (5,), (2 * rank,))})


@pytest.mark.parametrize(
    ("function", "message"), [(publish_misfit, r"a: float32\[4\] on rank 1"), (publish_hole, "must form the whole")]
)
def test_publish_of_states_that_do_not_fit_raises_on_all_ranks(two, tmp_path, function, message):
    for outcome in two.outcomes(function, str(tmp_path)):
        with pytest.raises(SnapshotError, match=message):
            raise outcome
    assert list(tmp_path.iterdir()) == []


def publish_failing(folder, failing):
    """One rank cannot write its files of the second version."""
    rank = dist.get_rank()
    error = OSError(28, "No space left on device")
    url = f"faulty+file://{folder}"
    fault = faulty(on="finish", path=f"weight_v000002/*-{failing:05d}-*", error=error, must_happen=rank == failing)
    with fault:  # the path is that of one rank
        publisher = Publisher(url, timeout=20)
        found = [publisher.publish(0, shared_state(0)).wait()[:]]
        try:
            publisher.publish(1, shared_state(1)).wait()
        except (RankError, StorageError) as raised:
            found.append((rank == failing, type(raised).__name__, str(raised)))
        found.append(publisher.publish(2, shared_state(2)).wait()[:])
        found.append(publisher.publish(3, shared_state(3)).wait()[:])
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_publish_failing_on_one_rank_raises_on_all_and_the_next_is_complete(two, tmp_path, failing):
    for rank, (first, error, second, third) in enumerate(two.run(publish_failing, str(tmp_path), failing)):
        assert error[1] == ("StorageError" if rank == failing else "RankError")
        assert "No space left" in error[2]
        assert first == (1, 0, None)
        assert second[1:] == (2, None)
        assert third[1:] == (3, second[0])
        expect_version(tmp_path, third[0], 3)


def die_while_encoding(url, victim):
    rank = dist.get_rank()
    publisher = Publisher(url, timeout=3)
    publisher.publish(0, shared_state(0)).wait()
    if rank == victim:
        import os
        import signal

        shares.ShareUpload.write_delta = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        publisher.publish(1, shared_state(1)).wait()
    except SnapshotError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.deadly
@pytest.mark.parametrize("victim", [0, 1])
def test_publish_with_a_dying_rank_leaves_the_last_version(fresh_pool, tmp_path, victim):
    pool = fresh_pool(2)
    outcomes = pool.outcomes(die_while_encoding, str(tmp_path), victim)
    assert isinstance(outcomes[victim], Died)
    assert outcomes[1 - victim][0] == "RankError"
    assert sorted(engine.versions(tmp_path)) == [1]
    expect_version(tmp_path, 1, 0)
    restarted = Publisher(tmp_path)
    assert restarted.publish(5, {"a": torch.zeros(2)}).wait()[1:] == (5, None)


def fail_in_gather(url, victim):
    """A rank fails while the others wait for its tensors."""
    rank = dist.get_rank()
    publisher = Publisher(url, timeout=20)
    state = shared_state(0)
    if rank == victim:

        def fail(*_):
            raise MemoryError("no memory")

        shares._Link.exchange = fail
    try:
        publisher.publish(1, state)
    except (SnapshotError, MemoryError) as error:
        return type(error).__name__
    return None


@pytest.mark.deadly
def test_publish_with_a_rank_that_fails_to_send_does_not_block_the_others(fresh_pool, tmp_path):
    outcomes = fresh_pool(2).outcomes(fail_in_gather, str(tmp_path), 1)
    assert outcomes == ["RankError", "MemoryError"]
    assert not list(tmp_path.glob("weight*"))


QKV = TensorMap(
    [
        {"names": "{i}.qkv -> {i}.q, {i}.k, {i}.v", "axes": "(h + h + h) c -> h c, h c, h c", "sizes": {"h": 8}},
        {"names": "{i}.down -> {i}.out", "axes": "a b -> b a", "dtype": "bfloat16"},
        "norm -> ln",
    ]
)


def mapped_state(step):
    torch.manual_seed(step)
    return {"0.qkv": torch.randn(24, 10), "0.down": torch.randn(12, 6), "norm": torch.randn(9)}


def publish_mapped(url):
    whole = [mapped_state(step) for step in range(3)]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    publisher = Publisher(url, names=QKV, timeout=20)
    found = []
    for state in whole:
        shared = {name: distribute(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
        found.append(publisher.publish(1, shared).wait().base)
    return found


@pytest.mark.parametrize("world", ["two", "three"])
def test_publish_with_a_tensor_map_of_shards(request, tmp_path, world):
    pool = request.getfixturevalue(world)
    assert pool.run(publish_mapped, str(tmp_path)) == [[None, 1, 2]] * pool.world
    for step in range(3):
        state, found = mapped_state(step), engine.read(tmp_path, step + 1)
        expected = dict(zip(("0.q", "0.k", "0.v"), state["0.qkv"].split(8), strict=True))
        expected |= {"0.out": state["0.down"].t().to(torch.bfloat16), "ln": state["norm"]}
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name][1] == tuple(tensor.shape)
            assert found[name][2].tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), name


def resume(url, folder):
    publisher = Publisher(url, timeout=20)
    publisher.resume_from(folder)
    return publisher.publish(1, shared_state(1)).wait()[:]


def test_publish_by_restarted_ranks_continues_from_a_pulled_version(two, tmp_path):
    store = str(tmp_path / "store")
    two.run(publish, store, 1)
    folder = str(Subscriber(store, tmp_path / "local").pull())
    assert two.run(resume, store, folder) == [(2, 1, 1)] * 2
    expect_version(store, 2, 1)
    assert two.run(resume, store, folder) == [(3, 1, None)] * 2  # it is not the newest version any more
    expect_version(store, 3, 1)


def publish_while_one_cannot_read(url, folder):
    """A rank without the folder makes the version complete, on all ranks."""
    return resume(url, folder if dist.get_rank() else folder + "-missing")


def test_publish_with_a_rank_that_cannot_continue_is_a_complete_version(two, tmp_path):
    store = str(tmp_path / "store")
    two.run(publish, store, 1)
    folder = str(Subscriber(store, tmp_path / "local").pull())
    assert two.run(publish_while_one_cannot_read, store, folder) == [(2, 1, None)] * 2
    expect_version(store, 2, 1)
