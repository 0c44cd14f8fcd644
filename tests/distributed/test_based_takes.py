"""Several ranks that share files with earlier snapshots: each its own, in every parallelism."""

import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import (
    ModelState,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.manifest import document
from tests.helpers.weight_folders import write_folder

WIDTH = 512


class Net(nn.Module):
    """Frozen layers and a trained head."""

    def __init__(self, seed=3):
        torch.manual_seed(seed)
        super().__init__()
        self.frozen = nn.Sequential(*[nn.Linear(WIDTH, WIDTH).requires_grad_(False) for i in range(4)])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        return self.head(self.frozen(x))


def own_state(net):
    return StateDict(**{f"of{dist.get_rank()}": torch.full((WIDTH, 80), dist.get_rank() + 1.0)})


def wrap(kind, net):
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        return fully_shard(net)
    return net


def change(net, number=1):
    head = (net.module if hasattr(net, "module") else net).head.weight
    with torch.no_grad():
        getattr(head, "_local_tensor", head).fill_(number)


def whole(path):
    """The model's tensors that a snapshot has, by name."""
    return {name: value.clone() for name, value in Snapshot(path).read_object("model/model").items()}


def _chain(path, kind, takes, verb):
    net = wrap(kind, Net())
    reports, base = [], None
    for number in range(takes):
        change(net, number)
        state = {"model": ModelState(net), "own": own_state(net)}
        made = getattr(Snapshot, verb)(f"{path}/{number}", state, base=base)
        base = made if verb == "take" else made.wait()
        reports.append((base.report.shared_bytes, base.report.written_bytes))
    return reports


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_base_lets_each_rank_share_its_own_files(two, folder, kind, verb):
    told = two.run(_chain, folder, kind, 3, verb)
    frozen = 4 * (WIDTH * WIDTH + WIDTH) * 4
    for number in (1, 2):
        shared = sum(each[number][0] for each in told)
        written = sum(each[number][1] for each in told)
        assert frozen <= shared, told
        if kind == "ddp":
            assert all(each[number][0] > frozen // 3 for each in told), "the ranks divide what they share"
        assert written < frozen // 4, told
    first = whole(f"{folder}/0")
    for number in range(3):
        assert Snapshot(f"{folder}/{number}").verify()
        found = whole(f"{folder}/{number}")
        for name in Net().state_dict():
            if name == "head.weight":
                assert found[name].eq(number).all()
            else:
                assert found[name].equal(first[name])
    Snapshot(f"{folder}/0").delete()
    assert Snapshot(f"{folder}/1").verify()


def _other_world(path):
    net = wrap("ddp", Net())
    made = Snapshot.take(f"{path}/later", {"model": ModelState(net)}, base=f"{path}/base")
    return made.report.shared_bytes, made.report.notes


def test_base_of_another_world_size_is_not_shared_and_a_note_says_so(two, folder):
    Snapshot.take(f"{folder}/base", {"model": ModelState(Net())})
    for shared, notes in two.run(_other_world, folder):
        assert shared == 0
        assert "was taken by 1 ranks, and this take has 2" in notes[0]
    assert Snapshot(f"{folder}/later").verify()


def _adapter(path, kind):
    net = wrap(kind, Net())
    Snapshot.take(f"{path}/base", {"model": ModelState(net)})
    change(net)
    made = Snapshot.take(
        f"{path}/adapter", {"model": ModelState(net)}, base=f"{path}/base", options=TakeOptions(only="trainable")
    )
    made.restore({"model": ModelState(net)})
    return made.report.omitted_bytes


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_only_trainable_omits_frozen_shards_and_restores_on_other_world_sizes(two, folder, kind):
    assert sum(two.run(_adapter, folder, kind)) == 4 * (WIDTH * WIDTH + WIDTH) * 4
    net = Net(seed=9)
    state = {"model": ModelState(net)}
    with pytest.raises(RestoreError, match="base"):
        Snapshot(f"{folder}/adapter").restore(state)
    Snapshot(f"{folder}/adapter").restore(state, options=RestoreOptions(base=f"{folder}/base"))
    for name, value in Net().state_dict().items():
        assert net.state_dict()[name].equal(value if name != "head.weight" else torch.ones_like(value))
    if kind == "ddp":
        Snapshot(f"{folder}/adapter").restore(state)


def _on_weights(path, kind, rolling):
    net = wrap(kind, Net())
    if dist.get_rank() == 0:
        write_folder(Path(path, "weights"), Net().state_dict(prefix="encoder."), 3)
    dist.barrier()
    reports, base = [], f"{path}/weights"
    for number in range(3):
        change(net, number + 1)
        options = TakeOptions(base=base, only="trainable")
        made = Snapshot.take(f"{path}/{number}", {"model": ModelState(net)}, options=options)
        reports.append(made.report.omitted_bytes)
        base = made if rolling else base
    net = wrap(kind, Net(seed=9))
    state = {"model": ModelState(net)}
    weight = _local(net).clone()
    with pytest.raises(RestoreError, match="had not changed from its base"):
        made.restore(state)
    assert _local(net).equal(weight)
    dist.barrier()
    made.restore(state, options=RestoreOptions(base=f"{path}/weights"))
    return reports, _local(net).equal(_local(wrap(kind, Net())))


def _local(net):
    """This rank's part of a frozen weight."""
    weight = (net.module if hasattr(net, "module") else net).frozen[1].weight.detach()
    return getattr(weight, "_local_tensor", weight)


@pytest.mark.parametrize("rolling", [False, True], ids=["folder", "rolling"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_only_trainable_leaves_replicas_and_shards_to_a_folder_of_weights(two, folder, kind, rolling):
    told = two.run(_on_weights, folder, kind, rolling)
    for number in range(3):
        assert sum(each[0][number] for each in told) == 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert all(equal for _, equal in told)
    if rolling:
        for number in (0, 1):
            shutil.rmtree(f"{folder}/{number}")
    assert Snapshot(f"{folder}/2").verify()
    net = Net(seed=9)  # alone, and not sharded
    state = {"model": ModelState(net)}
    with pytest.raises(RestoreError, match="base"):
        Snapshot(f"{folder}/2").restore(state)
    Snapshot(f"{folder}/2").restore(state, options=RestoreOptions(base=f"{folder}/weights"))
    for name, value in Net().state_dict().items():
        assert net.state_dict()[name].equal(value if name != "head.weight" else torch.full_like(value, 3))


def _on_changed_weights(path):
    net = wrap("fsdp", Net())
    if dist.get_rank() == 0:
        write_folder(Path(path, "weights"), Net().state_dict(), 1)
    dist.barrier()
    options = TakeOptions(base=f"{path}/weights", only="trainable")
    made = Snapshot.take(f"{path}/s", {"model": ModelState(net)}, options=options)
    dist.barrier()
    if dist.get_rank() == 0:  # the first rows of a weight, which only the first rank needs
        weights = Net()
        weights.frozen[2].weight.data[0] += 1
        write_folder(Path(path, "weights"), weights.state_dict(), 1)
    dist.barrier()
    net = wrap("fsdp", Net(seed=9))
    before = _local(net).clone()
    with pytest.raises(SnapshotError, match="other values than at the take"):
        made.restore({"model": ModelState(net)}, options=RestoreOptions(base=f"{path}/weights"))
    return _local(net).equal(before)


def test_restore_on_all_ranks_refuses_a_folder_of_weights_that_has_changed(two, folder):
    assert two.run(_on_changed_weights, folder) == [True, True]


class Experts(nn.Module):
    """Frozen experts in one tensor, which a folder has one by one."""

    def __init__(self, seed=3):
        torch.manual_seed(seed)
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 40, 30), requires_grad=False)
        self.head = nn.Linear(30, 8)


def _on_experts(path, kind):
    net = wrap(kind, Experts())
    if dist.get_rank() == 0:
        write_folder(Path(path, "weights"), {f"e.{n}.w": each for n, each in enumerate(Experts().experts)}, 2)
    dist.barrier()
    options = TakeOptions(base=f"{path}/weights", only="trainable")
    made = Snapshot.take(f"{path}/s", {"model": ModelState(net)}, options=options)
    net = wrap(kind, Experts(seed=9))
    made.restore({"model": ModelState(net)}, options=RestoreOptions(base=f"{path}/weights"))
    experts = (net.module if hasattr(net, "module") else net).experts
    whole = experts.full_tensor() if hasattr(experts, "full_tensor") else experts
    return made.report.omitted_bytes, whole.equal(Experts().experts)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_only_trainable_leaves_shards_of_stacked_experts_to_a_folder_of_weights(two, folder, kind):
    told = two.run(_on_experts, folder, kind)
    assert sum(omitted for omitted, _ in told) == 4 * 40 * 30 * 4
    assert all(equal for _, equal in told)
    assert Snapshot(f"{folder}/s").verify()


def _on_own_weights(path, other):
    """A take whose ranks have a folder each; that of rank 1 is missing, a copy, or has another tensor."""
    rank, net = dist.get_rank(), wrap("ddp", Net())
    folder = Path(path, f"weights-{rank}")
    more = {"more": torch.ones(3)} if other == "changed" and rank else {}
    if other != "missing" or not rank:
        write_folder(folder, Net().state_dict() | more)
    dist.barrier()
    options = TakeOptions(base=str(folder), only="trainable")
    try:
        made = Snapshot.take(f"{path}/s", {"model": ModelState(net)}, options=options)
    except SnapshotError as error:
        return str(error)
    return made.report.omitted_bytes


@pytest.mark.parametrize("other", ["copy", "missing", "changed"])
def test_only_trainable_ranks_may_have_copies_of_a_folder_of_weights(two, folder, other):
    told = two.run(_on_own_weights, folder, other)
    if other == "changed":
        assert all("base: must be the same on all ranks" in each for each in told)
        assert not Snapshot(f"{folder}/s").exists()
        return
    frozen = 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert sum(told) == frozen if other == "copy" else 0 < told[0] < frozen and told[1] == 0
    net = Net(seed=9)
    Snapshot(f"{folder}/s").restore({"model": ModelState(net)}, options=RestoreOptions(base=f"{folder}/weights-0"))
    assert all(net.state_dict()[name].equal(value) for name, value in Net().state_dict().items())


def _on_large_weights(path):
    with mock.patch.object(document, "IN_ONE", 3):
        return _on_weights(path, "fsdp", False)


def test_only_trainable_leaves_shards_to_a_folder_of_weights_with_a_manifest_in_parts(two, folder):
    assert all(equal for _, equal in two.run(_on_large_weights, folder))
    assert list(Path(folder, "2", "data").glob("*.json"))
    assert Snapshot(f"{folder}/2").verify().in_base == 8


def _vanishes(path):
    net = wrap("ddp", Net())
    Snapshot.take(f"{path}/base", {"model": ModelState(net)})
    if dist.get_rank() == 0:
        for each in Path(path, "base", "data").glob("*-1-*"):
            each.unlink()
    dist.barrier()
    made = Snapshot.take(f"{path}/later", {"model": ModelState(net)}, base=f"{path}/base")
    return made.report.shared_bytes


def test_base_with_missing_files_of_one_rank_is_shared_by_the_other(two, folder):
    first, second = two.run(_vanishes, folder)
    assert first > 0
    assert second == 0
    assert Snapshot(f"{folder}/later").verify()


def _managed(path):
    net = wrap("ddp", Net())
    with SnapshotManager(path, incremental=True, signals=()) as manager:
        for step in (1, 2, 3):
            change(net)
            made = manager.take(step, {"model": ModelState(net)})
    return made.report.shared_bytes


def test_snapshot_manager_incremental_shares_files_of_several_ranks(two, folder):
    assert sum(two.run(_managed, folder)) > 4 * WIDTH * WIDTH * 4
    for step in (1, 2, 3):
        assert Snapshot(f"{folder}/step-{step}").verify()
    shutil.rmtree(f"{folder}/step-1")
    assert Snapshot(f"{folder}/step-3").verify()
