"""Parallelisms as people use them: FSDP2 with its optimizer, tensor parallelism, pipelines; into each other."""

import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import ModelState, Sharded, Snapshot, SnapshotError, StateDict, TakeOptions
from tests.helpers.states import expect_equal

FSDP_ON_CPU = hasattr(torch.cpu.Stream, "record_event")
needs_fsdp = pytest.mark.skipif(not FSDP_ON_CPU, reason="FSDP2 of this torch needs an accelerator")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.second = nn.Linear(24, 12)
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(self.second(torch.relu(self.first(x))))


def trained(kind, steps=2, seed=0):
    """A model, parallelised in some way, and its optimizer, after some steps."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(seed)
    model = Net()
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for module in (model.first, model.second, model):
            fully_shard(module, mesh=mesh)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard"))
        fully_shard(model, mesh=mesh)
    elif kind == "tp+fsdp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 12)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def flat(model, optimizer):
    state = ModelState(model, optimizer).state_dict()
    found = {f"model.{name}": full(value).clone() for name, value in state["model"].items()}
    for name, values in state["optim"]["state"].items():
        found |= {f"optim.{name}.{key}": full(value).clone() for key, value in values.items()}
    return found


def _save(path, kind):
    model, optimizer = trained(kind)
    Snapshot.take(
        path, {"state": ModelState(model, optimizer)}, replicated=["**"] if kind in ("plain", "ddp") else None
    )
    return flat(model, optimizer)


def _load(path, kind):
    model, optimizer = trained(kind, steps=0, seed=5)
    Snapshot(path).restore({"state": ModelState(model, optimizer)})
    return flat(model, optimizer)


@needs_fsdp
@pytest.mark.parametrize(
    ("was", "to"), [("fsdp", "tp+fsdp"), ("tp+fsdp", "fsdp"), ("hsdp", "ddp"), ("ddp", "hsdp"), ("tp+fsdp", "tp+fsdp")]
)
def test_model_state_restores_into_another_parallelism(four, two, folder, was, to):
    saved = four.run(_save, f"{folder}/s", was)
    for restored in [*four.run(_load, f"{folder}/s", to), *two.run(_load, f"{folder}/s", "fsdp")]:
        expect_equal(saved[0], restored, ordered=False)
    expect_equal(saved[0], _load(f"{folder}/s", "plain"), ordered=False)


def _save_apart(path):
    model, optimizer = trained("fsdp")
    Snapshot.take(path, {"model": model, "optim": optimizer})
    return flat(model, optimizer)


def _load_apart(path):
    model, optimizer = trained("fsdp", steps=0, seed=9)
    Snapshot(path).restore({"model": model, "optim": optimizer})
    return flat(model, optimizer)


@needs_fsdp
def test_fsdp2_with_its_optimizer_restores_into_another_number_of_ranks(four, two, folder):
    saved = four.run(_save_apart, f"{folder}/s")
    for restored in [*two.run(_load_apart, f"{folder}/s"), *four.run(_load_apart, f"{folder}/s")]:
        expect_equal(saved[0], restored, ordered=False)


def _pipeline(path, layers, restore):
    rank, world = dist.get_rank(), dist.get_world_size()
    each = layers // world
    weights = {i: torch.full((3, 5), float(i)) for i in range(rank * each, rank * each + each)}
    if restore:
        weights = {i: torch.zeros(3, 5) for i in weights}
    one = StateDict(w=Sharded(torch.stack(list(weights.values())), (layers, 3, 5), (rank * each, 0, 0)))
    if restore:
        Snapshot(path).restore({"one": one})
        return one["w"].tensor[:, 0, 0].tolist()
    Snapshot.take(path, {"one": one})
    return None


def test_pipeline_layers_restore_into_another_number_of_stages(four, two, folder):
    four.run(_pipeline, f"{folder}/s", 8, False)
    assert two.run(_pipeline, f"{folder}/s", 8, True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert Snapshot(f"{folder}/s").read_object("0/one/w")[:, 2, 4].tolist() == list(range(8))


def _sharded_tensor(path, layout, restore):
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(40.0).view(10, 4)
    rows = [slice(0, 5), slice(5, 10)] if layout == "even" else [slice(0, 2), slice(2, 4), slice(4, 9), slice(9, 10)]
    shards = []
    for number, part in enumerate(rows):
        if number % world == rank:
            held = whole[part].clone() if not restore else torch.zeros_like(whole[part])
            shards.append(Shard.from_tensor_and_offsets(held, [part.start, 0], rank))
    tensor = init_from_local_shards(shards, 10, 4)
    state = StateDict(t=tensor)
    if not restore:
        Snapshot.take(path, {"s": state})
        return None
    report = Snapshot(path).restore({"s": state})
    for shard in tensor.local_shards():
        begin, size = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        assert shard.tensor.equal(whole[begin : begin + size])
    return len(report.resharded)


def test_sharded_tensors_restore_into_other_shards(two, folder):
    two.run(_sharded_tensor, f"{folder}/s", "even", False)
    assert two.run(_sharded_tensor, f"{folder}/s", "uneven", True) == [1, 1]
    assert two.run(_sharded_tensor, f"{folder}/s", "even", True) == [0, 0]
    assert Snapshot(f"{folder}/s").read_object("0/s/t").equal(torch.arange(40.0).view(10, 4))


class Blocks:
    """Implements torch's checkpointable protocol: several boxes a rank, and no class of torch's."""

    def __init__(self, boxes, shape):
        self.boxes, self.shape = boxes, torch.Size(shape)

    def size(self):
        return self.shape

    def __create_chunk_list__(self):
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(at), tensor.shape) for at, tensor in self.boxes.items()]

    def __create_write_items__(self, fqn, value):
        raise NotImplementedError("asked for by torch's own checkpoints only")

    def __get_tensor_shard__(self, index):
        return self.boxes[tuple(index.offset)]


def _blocks(path, restore):
    rank = dist.get_rank()
    whole = torch.arange(48.0).view(6, 8)
    corners = [(r, c) for r in (0, 3) for c in (0, 4)][rank::2]
    held = {at: whole[at[0] : at[0] + 3, at[1] : at[1] + 4].clone() for at in corners}
    if restore:
        held = {at: torch.zeros(3, 4) for at in held}
    else:
        Snapshot.take(path, {"s": StateDict(b=Blocks(held, (6, 8)))})
    Snapshot(path).restore({"s": StateDict(b=Blocks(held, (6, 8)))})
    for (row, column), tensor in held.items():
        assert tensor.equal(whole[row : row + 3, column : column + 4])


def test_checkpointable_protocol_tensor_is_sharded(two, folder):
    two.run(_blocks, f"{folder}/s", False)
    two.run(_blocks, f"{folder}/s", True)
    assert Snapshot(f"{folder}/s").read_object("0/s/b").equal(torch.arange(48.0).view(6, 8))


def _wrong(path, kind):
    rank = dist.get_rank()
    offsets = {"overlap": rank, "hole": rank * 3, "shape": rank * 2, "replica": rank * 2}[kind]
    shape = (5 if kind == "shape" and rank else 4, 3) if kind != "hole" else (5, 3)
    part = Sharded(torch.ones(2, 3), shape, (offsets, 0), replica=int(kind == "replica" and rank == 1))
    Snapshot.take(path, {"s": StateDict(w=part)})


@pytest.mark.parametrize(
    ("kind", "text"),
    [("overlap", "overlap"), ("hole", "12 of 15"), ("shape", r"\[5, 3\] on rank 1"), ("replica", "6 of 12")],
)
def test_boxes_that_do_not_form_a_tensor_are_refused_before_writing(two, folder, kind, text):
    for error in two.outcomes(_wrong, f"{folder}/s", kind):
        assert isinstance(error, SnapshotError)
        assert re.search(text, str(error))


def _replicas(path):
    rank = dist.get_rank()
    part = Sharded(torch.full((2, 3), float(rank // 2)), (4, 3), (rank // 2 * 2, 0), replica=rank % 2)
    twice = Sharded(torch.ones(4, 3), (4, 3), (0, 0))  # all hold it, nobody says so
    Snapshot.take(path, {"s": StateDict(w=part, twice=twice)})


def test_replicas_of_boxes_are_written_once(four, folder):
    four.run(_replicas, f"{folder}/s")
    snapshot = Snapshot(f"{folder}/s")
    assert snapshot.read_object("0/s/w")[:, 0].tolist() == [0, 0, 1, 1]
    assert [len(snapshot.get_manifest()[f"0/s/{name}"].shards) for name in ("w", "twice")] == [2, 1]


def _partial(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    Snapshot.take(path, {"s": StateDict(w=DTensor.from_local(torch.ones(2), mesh, [Partial()]))})


def test_partial_dtensor_is_refused(two, folder):
    for error in two.outcomes(_partial, f"{folder}/s"):
        assert "not reduced" in str(error)


def _submesh(path, restore):
    """Tensor parallelism inside, two data-parallel replicas outside, and no one says that they are replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    whole = torch.arange(12.0).view(4, 3) + 100 * (rank // 2)
    tensor = distribute_tensor(whole if not restore else torch.zeros(4, 3), mesh, [Shard(0)])
    if not restore:
        Snapshot.take(path, {"s": StateDict(w=tensor)})
    else:
        Snapshot(path).restore({"s": StateDict(w=tensor)})
    assert tensor.to_local().equal(whole[rank % 2 * 2 : rank % 2 * 2 + 2])


def test_dtensors_of_one_name_on_several_meshes_are_kept_apart(four, two, folder):
    four.run(_submesh, f"{folder}/s", False)
    four.run(_submesh, f"{folder}/s", True)
    snapshot = Snapshot(f"{folder}/s")
    assert snapshot.read_object("0/s/w").equal(torch.arange(12.0).view(4, 3))
    assert snapshot.read_object("2/s/w").equal(torch.arange(12.0).view(4, 3) + 100)


def _fsdp1(path, restore):
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import ShardedStateDictConfig, StateDictType

    torch.manual_seed(0 if not restore else 5)
    model = FSDP(Net(), device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)):
        if restore:
            Snapshot(path).restore({"model": model})
        else:
            Snapshot.take(path, {"model": model})
    with FSDP.summon_full_params(model):
        return {name: value.detach().clone() for name, value in model.module.named_parameters()}


def test_fsdp1_sharded_state_dict_is_restored(two, folder):
    saved = two.run(_fsdp1, f"{folder}/s", False)[0]
    for restored in two.run(_fsdp1, f"{folder}/s", True):
        expect_equal(saved, restored, ordered=False)


def _async(path):
    model, optimizer = trained("fsdp")
    before = flat(model, optimizer)
    pending = Snapshot.async_take(path, {"state": ModelState(model, optimizer)})
    second = Snapshot.async_take(f"{path}-2", {"state": ModelState(model)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    pending.wait().restore({"state": ModelState(model, optimizer)})
    second.wait()
    expect_equal(before, flat(model, optimizer), ordered=False)


@needs_fsdp
def test_async_take_saves_the_moment_of_the_call_on_all_ranks(four, folder):
    four.run(_async, f"{folder}/s")
    assert Snapshot(f"{folder}/s-2").verify()


class Wide(nn.Module):
    """With a buffer that each forward pass changes, and parameters that are cut between ranks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 512)
        self.norm = nn.BatchNorm1d(512)
        self.second = nn.Linear(512, 256)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def _overlapped(path, kind, worker):
    """A snapshot that is held up until a step waits for it; and whether the next one of the same structure is exact."""
    from torch.distributed.fsdp import fully_shard

    from snapshot.testing import stalling

    torch.manual_seed(0)
    model = Wide()
    if kind == "fsdp":
        for module in (model.first, model.second, model):
            fully_shard(module)
    elif kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(number):
        torch.manual_seed(number)
        model(torch.randn(4, 256)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    state = ModelState(model, optimizer) if kind == "fsdp" else None
    app = {"train": state} if state else {"model": model, "optim": optimizer}
    replicated = ["optim"] if kind == "ddp" else []
    waited = []
    for number in range(3):
        Snapshot.take(f"{path}/{number}-expected", app, replicated=replicated)
        with stalling(on="write", times=None) as stall:
            pending = Snapshot.async_take(
                f"stalling+file://{path}/{number}" if worker == "thread" else f"{path}/{number}",
                app,
                replicated=replicated,
                options=TakeOptions(staging="overlapped", worker=worker, memory_budget_bytes=2 << 20),
            )
            was_staged = pending.staged()
            timer = threading.Timer(0.2, stall.release)
            timer.start()
            step(number + 1)
            waited.append(not was_staged and pending.staged())
            timer.join()
        pending.wait(60)
    return all(waited) or worker == "process"


@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=needs_fsdp)])
def test_overlapped_staging_saves_the_moment_of_the_call_on_all_ranks(two, folder, kind, worker):
    assert two.run(_overlapped, folder, kind, worker) == [True, True]
    for number in range(3):
        taken, expected = (Snapshot(f"{folder}/{number}{text}") for text in ("", "-expected"))
        assert taken.verify()
        names = [path for path, entry in expected.get_manifest().items() if "Tensor" in type(entry).__name__]
        assert names
        for name in names:
            assert torch.equal(taken.read_object(name), expected.read_object(name)), name


OPTIMIZERS = {
    **{f"sgd {loop}": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9, "foreach": loop}) for loop in (True, False)},
    **{f"adamw {loop}": (torch.optim.AdamW, {"lr": 1e-4, "foreach": loop}) for loop in (True, False)},
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-4, "fused": True}),
    "adam amsgrad": (torch.optim.Adam, {"lr": 1e-4, "amsgrad": True}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-4}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-4}),
    "radam": (torch.optim.RAdam, {"lr": 1e-4}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-4, "centered": True, "momentum": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1e-4}),
}


def _sharded(name):
    """A sharded model and its optimizer after a step, and a function that makes the next one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    model = Wide()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.first, model.second, model) if FSDP_ON_CPU else ():
        fully_shard(module, mesh=mesh)
    for module in model.modules() if not FSDP_ON_CPU else ():
        for each, value in list(module.named_parameters(recurse=False)):
            setattr(module, each, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), **options)

    def step(number):
        torch.manual_seed(number)
        if FSDP_ON_CPU:
            model(torch.randn(4, 256)).square().sum().backward()
        else:
            for each in model.parameters():
                each.grad = distribute_tensor(torch.randn(each.shape), mesh, [Shard(0)])
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    return {"train": ModelState(model, optimizer)}, step


def _local(value):
    return getattr(value, "_local_tensor", value).clone() if isinstance(value, torch.Tensor) else value


def _copied(app):
    held = app["train"].state_dict()
    states = ({f"{name} {key}": each for key, each in of.items()} for name, of in held["optim"]["state"].items())
    return {name: _local(each) for of in (held["model"], *states) for name, each in of.items()}


def _steps_beside_copies(path, name):
    """Whether each of several snapshots has the state of its call, while steps go on as they may."""
    app, step = _sharded(name)
    for number in range(3):
        expected = _copied(app)
        pending = Snapshot.async_take(
            f"{path}/{name}-{number}",
            app,
            options=TakeOptions(staging="overlapped", memory_budget_bytes=(1 + number) << 19),
        )
        step(2 * number + 1)
        pending.wait(60)
        step(2 * number + 2)
        other, _ = _sharded(name)
        Snapshot(f"{path}/{name}-{number}").restore(other)
        found = _copied(other)
        assert list(found) == list(expected)
        for path_of, each in expected.items():
            assert not isinstance(each, torch.Tensor) or torch.equal(found[path_of], each), (name, path_of)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overlapped_staging_of_sharded_state_is_consistent_with_any_optimizer(two, folder, name):
    two.run(_steps_beside_copies, folder, name)


def _changed_uncounted(path, change):
    """The error of a snapshot whose `DTensor`s were changed outside a step, counted by torch or not."""
    from snapshot.testing import stalling

    app, _ = _sharded("adamw True")
    parameters = list(app["train"].model.parameters())
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take(
            f"stalling+file://{path}/s", app, options=TakeOptions(staging="overlapped", memory_budget_bytes=1 << 19)
        )
        assert not pending.staged()
        with torch.no_grad():
            if change == "foreach":
                torch._foreach_add_(parameters, 1.0)
            elif change == "data":
                parameters[0].data.mul_(0.5)
            elif change == "local":
                parameters[0].to_local().mul_(0.5)
            else:
                parameters[0].mul_(0.5)
        stall.release()
        try:
            pending.wait(60)
        except SnapshotError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("change", ["foreach", "data", "local", "counted"])
def test_overlapped_staging_detects_a_sharded_tensor_changed_outside_a_step(two, folder, change):
    found = two.run(_changed_uncounted, folder, change)
    assert all("wait_staged" in each for each in found), found
    assert not [each for each in Path(folder).rglob("*") if each.is_file()]


def _broken_shard(path):
    """The findings of each rank, if one rank's shard has NaN."""
    app, _ = _sharded("adamw True")
    parameter = app["train"].model.first.weight
    if dist.get_rank() == 1:
        with torch.no_grad():
            parameter.to_local().fill_(float("nan"))
    return [str(each) for each in Snapshot.take(path, app).report.findings]


def test_guard_checks_the_shards_of_each_rank(two, folder):
    first, second = two.run(_broken_shard, f"{folder}/s")
    assert first == []
    assert second[0].startswith("nonfinite: NaN or infinity in train/model/first.weight (")
