"""Tensors that describe themselves as parts of larger ones, by the protocols of other libraries."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import ModelState, Snapshot, SnapshotError, StateDict
from snapshot.state.sharded import find_shards

FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def described(tensor, shape, *parts):
    """A tensor with parts of one of a shape. Each part: its offsets there, its offsets in the tensor, and its sizes."""
    for name, value in zip(FIELDS, (shape, *map(tuple, zip(*parts, strict=True))), strict=True):
        setattr(tensor, name, value)
    return tensor


class WithProperties(torch.Tensor):
    """A subclass that computes the fields."""

    @property
    def global_shape(self):
        return (4, 3)

    @property
    def global_offsets(self):
        return ((2 * dist.get_rank(), 0),)

    @property
    def local_offsets(self):
        return ((0, 0),)

    @property
    def local_sizes(self):
        return ((2, 3),)


WHOLE = torch.arange(12.0).view(4, 3)


def rows(rank, world):
    """This rank's rows of WHOLE: a plain tensor."""
    begin, count = 4 * rank // world, 4 // world
    return described(WHOLE[begin : begin + count].clone(), (4, 3), ((begin, 0), (0, 0), (count, 3)))


def padded(rank, world):
    """This rank's columns of WHOLE, in two chunks within a longer tensor with padding."""
    held = torch.full((6, 5), -1.0)
    columns = [0, 2] if rank == 0 else [1]
    parts = []
    for at, column in enumerate(columns):
        held[1:5, 2 * at + 1] = WHOLE[:, column]
        parts.append(((0, column), (1, 2 * at + 1), (4, 1)))
    return described(held, (4, 3), *parts)


def parameter(rank, world):
    return described(nn.Parameter(rows(rank, world).detach()), (4, 3), ((2 * rank, 0), (0, 0), (2, 3)))


def subclass(rank, world):
    return rows(rank, world).as_subclass(WithProperties)


MAKERS = (rows, padded, parameter, subclass)


def _save(folder, maker, replicated):
    value = maker(dist.get_rank(), 2)
    Snapshot.take(folder, {"s": StateDict(w=value, n=1)}, replicated=replicated)
    return value.detach().as_subclass(torch.Tensor).clone()


def _restore(folder, maker):
    value = maker(dist.get_rank(), 2)
    expected = value.detach().as_subclass(torch.Tensor).clone()
    with torch.no_grad():
        for at, size in zip(value.local_offsets, value.local_sizes, strict=True):
            value.as_subclass(torch.Tensor)[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] = 7.0
    state = StateDict(w=value, n=0)
    Snapshot(folder).restore({"s": state})
    assert state["w"] is value
    return value.detach().as_subclass(torch.Tensor).equal(expected)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("replicated", [None, ["**"]])
def test_described_parts_of_all_ranks_form_one_tensor(two, tmp_path, maker, replicated):
    folder = str(tmp_path / "s")
    two.run(_save, folder, maker, replicated)
    assert Snapshot(folder).get_manifest()["0/s/w"].shape == (4, 3)
    assert Snapshot(folder).read_object("s/w").equal(WHOLE)
    assert Snapshot(folder).verify()
    for other in (rows, padded):
        assert all(two.run(_restore, folder, other))
    whole = StateDict(w=torch.zeros(4, 3), n=0)
    Snapshot(folder).restore({"s": whole})
    assert whole["w"].equal(WHOLE)


def test_described_parts_are_restored_from_a_whole_tensor(tmp_path, two):
    folder = str(tmp_path / "s")
    Snapshot.take(folder, {"s": StateDict(w=WHOLE, n=1)})
    for maker in MAKERS:
        assert all(two.run(_restore, folder, maker))


class Part(nn.Module):
    """A module whose parameter is this rank's rows, and an optimizer of it."""

    def __init__(self, world, rank):
        super().__init__()
        count = 4 // world
        self.weight = nn.Parameter(torch.zeros(count, 3))
        described(self.weight, (4, 3), ((rank * count, 0), (0, 0), (count, 3)))


def _train(folder, world, restore=False):
    model = Part(world, dist.get_rank() if world > 1 else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    app = {"m": model, "o": optimizer}
    if restore:
        Snapshot(folder).restore(app)
    else:
        begin = model.weight.global_offsets[0][0]
        model.weight.grad = WHOLE[begin : begin + len(model.weight)] - 5
        optimizer.step()
        Snapshot.take(folder, app, replicated=["**"])
    state = optimizer.state[model.weight]
    return [each.detach().clone() for each in (model.weight, state["exp_avg"], state["exp_avg_sq"])]


def test_described_parts_of_module_parameters_and_their_optimizer_state(two, tmp_path):
    folder = str(tmp_path / "s")
    saved = two.run(_train, folder, 2)
    held = Snapshot(folder).get_manifest()
    assert [held[f"0/{name}"].shape for name in ("m/weight", "o/state/0/exp_avg")] == [(4, 3), (4, 3)]
    restored = two.run(_train, folder, 2, True)
    for a, b in zip(saved, restored, strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))
    alone = _train(folder, 1, True)
    for at, each in enumerate(alone):
        assert each.equal(torch.cat([saved[0][at], saved[1][at]]))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"local_sizes": None}, "w: has global_offsets, .* lacks local_sizes"),
        ({"local_sizes": ((9, 3),)}, "w: the part of sizes .* at .* is not within a tensor of shape"),
        (
            {"global_offsets": ((3, 0),)},
            r"w: the part of sizes .* at \(3, 0\) is not within",
        ),
        ({"local_offsets": ((1, 0),)}, r"w: the part of sizes .* at \(1, 0\) is not within"),
        ({"global_offsets": ((0,),)}, "w: the part of sizes"),
        ({"global_offsets": ((0, 0), (2, 0))}, "w: .* must have equal lengths"),
        ({"global_shape": "x"}, "w: .* must have equal lengths, and consist of integers"),
    ],
)
def test_described_part_with_invalid_attributes_is_refused(tmp_path, change, fault):
    value = described(torch.zeros(2, 3), (4, 3), ((0, 0), (0, 0), (2, 3)))
    for name, each in change.items():
        setattr(value, name, each)
    with pytest.raises(SnapshotError, match=fault):
        Snapshot.take(tmp_path / "s", {"s": StateDict(w=value)})
    assert not (tmp_path / "s").exists() or not [each for each in (tmp_path / "s").rglob("*") if each.is_file()]


def test_described_part_attributes_added_after_a_take_are_read():
    state = {f"t{at}": torch.zeros(2, 3) for at in range(200)}
    for _ in range(3):
        Snapshot.take("memory://described/s", {"s": StateDict(**state)}, overwrite=True)
    described(state["t7"], (2, 3), ((0, 0), (0, 0), (2, 3)))
    Snapshot.take("memory://described/s", {"s": StateDict(**state)}, overwrite=True)
    assert Snapshot("memory://described/s").get_manifest()["0/s/t7"].type == "ShardedTensor"


def test_zero_3_empty_parameter_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    model.weight.ds_id, model.weight.ds_numel = 0, 6
    model.weight.data = torch.empty(0)
    for app in ({"m": model}, {"s": StateDict(w=model.weight)}):
        with pytest.raises(SnapshotError, match=r"(weight|w): is a parameter of DeepSpeed's ZeRO-3, which is empty"):
            Snapshot.take(tmp_path / "s", app)


def _in_strange_order(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    class Strided(Shard):
        """Cuts rows in turn."""

    value = DTensor.from_local(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Strided(0)], run_check=False)
    with pytest.raises(SnapshotError, match=r"unknown placement .* of the class .*Strided"):
        find_shards("w", value)
    with pytest.raises(SnapshotError, match="unknown placement"):
        Snapshot.take(folder, {"s": StateDict(w=value)})


def test_placement_of_an_unknown_class_is_refused(two, tmp_path):
    two.run(_in_strange_order, str(tmp_path / "s"))


def _split_by_megatron(folder, parallel):
    torch.manual_seed(0)
    model = nn.Linear(3, 400)
    model.weight.tensor_model_parallel = True
    if parallel:
        with torch.no_grad():
            model.weight.add_(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()
    app = {"m": model, "o": optimizer, "s": StateDict(w=model.weight)}
    if not parallel:
        Snapshot.take(folder, app, replicated=["**"])
        return Snapshot(folder).read_object("m/weight").equal(model.weight)
    with pytest.raises(SnapshotError, match=r"not equal on all ranks:\n.*m/weight \(a part, by its attribute"):
        Snapshot.take(folder, app, replicated=["**"])
    with torch.no_grad():
        model.weight.add_(-dist.get_rank())
    optimizer.state[model.weight]["momentum_buffer"].add_(dist.get_rank())
    with pytest.raises(SnapshotError, match="o/state/0/momentum_buffer"):
        Snapshot.take(folder, app, replicated=["**"])
    Snapshot.take(folder, app, replicated=["m/bias"])
    return True


@pytest.mark.parametrize("parallel", [True, False])
def test_megatron_tensor_parallel_parameters_are_not_replicated(two, tmp_path, parallel):
    assert two.run(_split_by_megatron, str(tmp_path / "s"), parallel) == [True, True]


class Wrapper:
    """A stateful that nests the states of its attributes, as in torch's tutorials."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _wrapped(folder, maker, restore=False):
    rank = dist.get_rank()
    model = Part(2, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.full((2, 3), float(restore)) if restore else WHOLE[2 * rank : 2 * rank + 2]
    optimizer.step()
    app = {"a": maker(model, optimizer)}
    if restore:
        Snapshot(folder).restore(app)
    else:
        Snapshot.take(folder, app, replicated=["**"])
    return model.weight.detach().clone(), optimizer.state[model.weight]["momentum_buffer"].clone()


@pytest.mark.parametrize(
    ("maker", "moment"),
    [(Wrapper, "optimizer/state/0/momentum_buffer"), (ModelState, "optim/state/weight/momentum_buffer")],
)
def test_described_parts_of_a_stateful_around_a_module(two, tmp_path, maker, moment):
    folder = str(tmp_path / "s")
    saved = two.run(_wrapped, folder, maker)
    held = Snapshot(folder).get_manifest()
    assert [held[f"0/a/{name}"].shape for name in ("model/weight", moment)] == [(4, 3)] * 2
    restored = two.run(_wrapped, folder, maker, True)
    for a, b in zip(saved, restored, strict=True):
        assert all(x.equal(y) for x, y in zip(a, b, strict=True))


def test_described_part_attributes_added_to_a_module_after_a_take_are_read(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    app = {"m": model}
    Snapshot.take(tmp_path / "s", app, overwrite=True)
    described(model[0].weight, (4, 3), ((0, 0), (0, 0), (4, 3)))
    model[2].weight = nn.Parameter(described(torch.zeros(2, 4), (2, 4), ((0, 0), (0, 0), (2, 4))))
    described(model[2].weight, (2, 4), ((0, 0), (0, 0), (2, 4)))
    described(model[1].running_mean, (4,), ((0,), (0,), (4,)))
    Snapshot.take(tmp_path / "s", app, overwrite=True)
    held = Snapshot(tmp_path / "s").get_manifest()
    for name in ("0.weight", "2.weight", "1.running_mean"):
        assert held[f"0/m/{name}"].type == "ShardedTensor"
    model[2].bias.ds_id, model[2].bias.ds_numel = 0, 2
    model[2].bias.data = torch.empty(0)
    for each in (app, {"a": Wrapper(model, torch.optim.SGD(model.parameters()))}):
        with pytest.raises(SnapshotError, match="bias: is a parameter of DeepSpeed's ZeRO-3"):
            Snapshot.take(tmp_path / "s", each, overwrite=True)


class Failing(WithProperties):
    """A subclass whose description cannot be computed."""

    @property
    def local_sizes(self):
        raise RuntimeError("no mesh")


class FailingAtOnce(WithProperties):
    """A subclass whose first field cannot be computed."""

    @property
    def global_offsets(self):
        raise RuntimeError("no mesh")


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (described(torch.zeros(4), (4,), ((0.5,), (0,), (4,))), "w: .* consist of integers: 'float' object"),
        (described(torch.zeros(4), (4.9,), ((0,), (0,), (4,))), "w: .* consist of integers: 'float' object"),
        (described(torch.zeros(4), ("4",), ((0,), (0,), (4,))), "w: .* consist of integers: 'str' object"),
        (described(torch.zeros(4), (4,), ((False,), (0,), (4,))), "w: .* consist of integers: .*a bool"),
        (described(torch.zeros(4), (8,), ((0,), (0,), (4,)), ((4,), (0,), (4,))), "w: its parts must be apart"),
        (torch.zeros(2, 3).as_subclass(Failing), r"w: a property .* has failed: RuntimeError\('no mesh'\)"),
        (torch.zeros(2, 3).as_subclass(FailingAtOnce), r"w: a property .* has failed: RuntimeError\('no mesh'\)"),
    ],
)
def test_described_part_with_inconsistent_values_is_refused(tmp_path, monkeypatch, value, fault):
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(SnapshotError, match=fault):
        Snapshot.take(tmp_path / "s", {"s": StateDict(w=value)})


def test_described_part_attributes_may_be_numpy_integers(tmp_path):
    value = torch.arange(4.0)
    for name, each in zip(FIELDS, ([4], [[0]], [[0]], [[4]]), strict=True):
        setattr(value, name, np.array(each))
    Snapshot.take(tmp_path / "s", {"s": StateDict(w=value)})
    assert Snapshot(tmp_path / "s").read_object("0/s/w").equal(torch.arange(4.0))


def test_described_part_with_local_offsets_alone_is_refused(tmp_path):
    value = torch.zeros(4)
    value.global_shape, value.local_offsets = (8,), ((0,),)
    with pytest.raises(SnapshotError, match=r"w: has local_offsets, .* lacks global_offsets, local_sizes"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(w=value)})
