"""Ranks that differ a little: what is not the same is never taken for the same, and arguments are judged for all."""

import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import ModelState, RestoreError, RestoreOptions, Sharded, Snapshot, SnapshotError, StateDict, TakeOptions
from tests.helpers.arguments import for_restore


def _off_the_mesh(path):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0, 1])
    tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
    Snapshot.take(path, {"s": StateDict(d=tensor)}, timeout=20)
    live = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    Snapshot(path).restore({"s": StateDict(d=live)})
    assert live.to_local().equal(tensor.to_local())


def test_dtensor_of_a_mesh_without_this_rank_is_saved(four, folder):
    four.run(_off_the_mesh, f"{folder}/s")
    assert Snapshot(f"{folder}/s").read_object("0/s/d").equal(torch.arange(8.0))


def unlike(kind, rank):
    """Values of the same bytes that are not the same."""
    if kind == "quantised":
        return torch.quantize_per_tensor(torch.tensor([1.0, 2.0]) * (1 + rank), 0.5 * (1 + rank), 0, torch.qint8)
    if kind == "sparse":
        return torch.sparse_coo_tensor([[0]], [1.0], (3 + rank,), check_invariants=True).coalesce()
    plain = torch.ones(4)
    return {
        "array": (plain, plain.numpy()),
        "scalar": (np.int64(3), np.array(3)),
        "parameter": (nn.Parameter(plain), plain),
        "gradient": (plain.clone().requires_grad_(), plain),
        "order": (torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)),
        "fields": tuple(np.zeros(2, [(name, "<i4")]) for name in "ab"),
    }[kind][rank]


KINDS = ["quantised", "sparse", "array", "scalar", "parameter", "gradient", "order", "fields"]


def _unlike(path, globs):
    rank = dist.get_rank()
    made = {kind: unlike(kind, rank) for kind in KINDS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Snapshot.take(path, {"s": StateDict(made)}, replicated=globs)
    live = StateDict(dict.fromkeys(KINDS))
    Snapshot(path).restore({"s": live})
    for kind, value in live.items():
        expected = made[kind]
        assert type(value) is type(expected), kind
        if kind == "quantised":
            assert value.q_scale() == expected.q_scale()
            assert value.dequantize().equal(expected.dequantize())
        elif kind == "sparse":
            assert value.shape == expected.shape
        elif isinstance(value, np.ndarray):
            assert value.dtype == expected.dtype, kind
        elif isinstance(value, torch.Tensor):
            assert value.requires_grad == expected.requires_grad
            assert value.stride() == expected.stride()


@pytest.mark.parametrize("globs", [None, ["s/**"]])
def test_replicated_values_of_equal_bytes_but_other_types_are_kept_apart(two, folder, globs):
    two.run(_unlike, f"{folder}/s", globs)


def _gathered_on_one(path):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    Snapshot.take(path, {"m": ModelState(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))})


def test_model_state_options_that_give_state_to_rank_0_alone_are_refused(two, folder):
    for error in two.outcomes(_gathered_on_one, f"{folder}/s"):
        assert "full_state_dict with cpu_offload" in str(error)


def _not_strict(path, strict):
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    Snapshot.take(path, {"m": model}, replicated=["m"], overwrite=True)
    smaller = nn.Sequential(nn.Linear(30, 30))
    return [line.path for line in Snapshot(path).restore({"m": smaller}, strict=strict).unexpected]


def test_restore_strict_reports_names_unused_on_all_ranks(two, folder):
    assert two.run(_not_strict, f"{folder}/s", False) == [["m/1.weight", "m/1.bias"]] * 2
    for error in two.outcomes(_not_strict, f"{folder}/s", True):
        assert isinstance(error, RestoreError)
        assert "m/1.weight" in str(error)
        assert f"{folder}/s" in str(error)
        assert str(error).endswith("strict=False)")


def _comes_and_goes(path):
    rank, shared = dist.get_rank(), []
    for number, equal in enumerate([True, False, True, True, False]):
        Snapshot.take(f"{path}-{number}", {"s": StateDict(v=5 if equal else rank, mine=10 + rank)})
        dist.barrier()
        shared.append("1/s/v" not in Snapshot(f"{path}-{number}").get_manifest())
        live = StateDict()
        Snapshot(f"{path}-{number}").restore({"s": live})
        assert dict(live) == {"v": 5 if equal else rank, "mine": 10 + rank}
    return shared


def test_replicated_values_that_become_equal_again_are_shared_again(two, folder):
    assert two.run(_comes_and_goes, f"{folder}/s") == [[True, False, True, True, False]] * 2


def _check(path, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    value = torch.full((900,), float(dist.get_rank()))
    if kind == "tied":
        state = StateDict(a=value, b=value)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        state = StateDict(b=DTensor.from_local(value, mesh, [Replicate()], run_check=False))
    globs = ["s/b"] if kind == "tied" else None
    Snapshot.take(path, {"s": state}, replicated=globs, options=TakeOptions(check_replicated=True))


@pytest.mark.parametrize("kind", ["tied", "dtensor"])
def test_check_replicated_compares_tied_tensors_and_dtensor_boxes(two, folder, kind):
    for error in two.outcomes(_check, f"{folder}/s", kind):
        assert isinstance(error, SnapshotError)
        assert "s/b" in str(error)
        assert "rank 1 and rank 0 have different values" in str(error)


def _for_all(path, arguments, take):
    rank = dist.get_rank()
    state = {f"k{rank}": StateDict(x=torch.zeros(3) if not take else torch.ones(3), y=1)}
    if take:
        return Snapshot.take(path, state) and None
    Snapshot(path).restore(state, **for_restore(**arguments))
    return float(state[f"k{rank}"]["x"].sum())


def test_select_and_rename_are_checked_for_all_ranks(two, folder):
    two.run(_for_all, f"{folder}/s", {}, True)
    assert two.run(_for_all, f"{folder}/s", {"select": ["k0"]}, False) == [3, 0]
    assert two.run(_for_all, f"{folder}/s", {"rename": {"k0/y": "k0/z"}}, False) == [3, 3]
    for arguments in ({"select": ["nowhere"]}, {"rename": {"nowhere": "k0/x"}}):
        for error in two.outcomes(_for_all, f"{folder}/s", arguments, False):
            assert isinstance(error, RestoreError)
            assert "nowhere" in str(error)


def _private(path, arguments, take):
    rank = dist.get_rank()
    state = StateDict(a=torch.ones(2), l=[rank, 5], o={"z": torch.full((900,), float(rank)), "p": 3})
    if take:
        return Snapshot.take(path, {"s": state}) and None
    live = StateDict(a=torch.zeros(2), l=[7, 7], o={"p": 0})
    Snapshot(path).restore({"s": live}, **for_restore(**arguments))
    return float(live["a"].sum()), live["l"], live["o"]["p"]


def test_select_and_exclude_leave_out_rank_specific_values_on_new_ranks(two, four, folder):
    two.run(_private, f"{folder}/s", {}, True)
    assert any(isinstance(each, RestoreError) for each in four.outcomes(_private, f"{folder}/s", {}, False))
    for arguments in ({"exclude": ["s/l"]}, {"select": ["s/a", "s/o/p"]}):
        assert four.run(_private, f"{folder}/s", arguments, False) == [(2, [7, 7], 3)] * 4


def _other_shape(path, change):
    rank = dist.get_rank()
    for number in range(2):
        shape = (4, 3) if number == 0 or change != "shape" else (6, 3)
        dtype = torch.float64 if number and change == "dtype" and rank else torch.float32
        part = Sharded(torch.ones(2, 3, dtype=dtype), shape, (rank * 2, 0))
        try:
            Snapshot.take(f"{path}-{number}", {"s": StateDict(w=part)})
        except SnapshotError as error:
            return number, type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_boxes_that_no_longer_fit_are_found_with_a_cached_plan(two, folder, change):
    for number, kind, text in two.run(_other_shape, f"{folder}/s", change):
        assert number == 1
        assert kind == "SnapshotError"
        assert "must form whole tensors" in text


def _prepared(path):
    rank = dist.get_rank()
    part = Sharded(torch.full((2, 3), 1.5), (4, 3), (rank * 2, 0))
    Snapshot.take(path, {"s": StateDict(w=part)}, None, None, None, lambda name, tensor, tracing: tensor.half())


def test_prepare_function_receives_boxes(two, folder):
    two.run(_prepared, f"{folder}/s")
    read = Snapshot(f"{folder}/s").read_object("0/s/w")
    assert read.dtype == torch.float16
    assert read.eq(1.5).all()


def _objects(path, take):
    state = StateDict(data=b"x" * 3_000_000, text="y" * 2_000_000, w=torch.ones(1 << 19))
    if take:
        return Snapshot.take(path, {"s": state}, replicated=["s"]) and None
    live = StateDict(w=torch.zeros(1 << 19))
    report = Snapshot(path).restore({"s": live}, options=RestoreOptions(read_once=True))
    assert live["data"] == state["data"]
    assert live["text"] == state["text"]
    assert live["w"].eq(1).all()
    return report.bytes_read


def test_read_once_reads_long_objects_once(four, folder):
    four.run(_objects, f"{folder}/s", True)
    assert sum(four.run(_objects, f"{folder}/s", False)) < 1.01 * (5_000_000 + (4 << 19)) + 10_000


def _for_key(path, take):
    rank = dist.get_rank()
    if take:
        return Snapshot.take(path, {"s": StateDict(mine=rank, both=3), "all": StateDict(x=1)}) and None
    snapshot = Snapshot(path)
    assert snapshot.get_state_dict_for_key("s", replicate_from_rank0=True) == {"mine": 0, "both": 3}
    assert snapshot.get_state_dict_for_key("all") == {"x": 1}
    if rank < 2:
        assert snapshot.get_state_dict_for_key("s") == {"mine": rank, "both": 3}
    else:
        with pytest.raises(RestoreError, match="s/mine belongs to rank 0 alone"):
            snapshot.get_state_dict_for_key("s")
    return None


def test_get_state_dict_for_key_returns_the_state_of_this_rank(two, four, folder):
    two.run(_for_key, f"{folder}/s", True)
    four.run(_for_key, f"{folder}/s", False)


def _too_large(path, take):
    rank = dist.get_rank()
    shape = (4, 3) if take else (8, 3)
    state = StateDict(w=Sharded(torch.ones(shape[0] // 2, 3), shape, (rank * shape[0] // 2, 0)))
    if take:
        Snapshot.take(path, {"s": state})
    else:
        Snapshot(path).restore({"s": state})


def test_restore_of_a_sharded_tensor_with_another_shape_raises(two, folder):
    two.run(_too_large, f"{folder}/s", True)
    assert any(isinstance(error, RestoreError) for error in two.outcomes(_too_large, f"{folder}/s", False))


def _cut(path, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    from snapshot.manifest import document

    rank = dist.get_rank()
    usual, document.IN_ONE = document.IN_ONE, 3
    try:
        if kind == "replicated":  # each is written by one rank, and stands in that rank's part
            mesh = init_device_mesh("cpu", (2,))
            made = {f"w{i}": distribute_tensor(torch.full((50,), float(i)), mesh, [Replicate()]) for i in range(6)}
            Snapshot.take(path, {"s": StateDict(made)})
            live = StateDict({name: torch.full((50,), -1.0) for name in made})
            Snapshot(path).restore({"s": live})
            return [float(value.mean()) for value in live.values()]
        layers = {f"l{i}": nn.Linear(2, 2, bias=False) for i in (0, 1) if i == rank}
        for i, layer in enumerate(layers.values(), 2):
            nn.init.constant_(layer.weight, float(i + rank))
        state = {f"{name}.weight": Sharded(layer.weight.detach(), (2, 2), (0, 0)) for name, layer in layers.items()}
        Snapshot.take(path, {"m": StateDict(state)})
        both = nn.ModuleDict({f"l{i}": nn.Linear(2, 2, bias=False) for i in (0, 1)})
        Snapshot(path).restore({"m": both}, strict=False)
        return [float(layer.weight.mean()) for layer in both.values()]
    finally:
        document.IN_ONE = usual


@pytest.mark.parametrize(("kind", "expected"), [("replicated", [0, 1, 2, 3, 4, 5]), ("stages", [2, 3])])
def test_manifest_parts_of_other_ranks_are_searched(two, folder, kind, expected):
    assert two.run(_cut, f"{folder}/s", kind) == [expected] * 2


def _again(path):
    rank = dist.get_rank()
    for number in range(3):
        twice = Sharded(torch.full((4,), float(number)), (4,), (0,))
        Snapshot.take(f"{path}-{number}", {"s": StateDict(w=twice, v=rank if number == 0 else 1)})
        dist.barrier()
        assert Snapshot(f"{path}-{number}").read_object("0/s/w").eq(number).all()


def test_boxes_held_by_two_ranks_are_planned_again_if_other_tensors_change(two, folder):
    two.run(_again, f"{folder}/s")


def _tied_boxes(path):
    rank = dist.get_rank()
    shared = torch.full((4,), 7.0)
    state = StateDict(embed=Sharded(shared, (4,), (0,), replica=rank))
    if rank:
        state["head"] = Sharded(shared, (4,), (0,))
    Snapshot.take(path, {"s": state})


def test_box_tied_to_a_replica_is_written(two, folder):
    two.run(_tied_boxes, f"{folder}/s")
    for name in ("embed", "head"):
        assert Snapshot(f"{folder}/s").read_object(f"0/s/{name}").eq(7).all()


def _stages_of_one_name(path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    tensor = distribute_tensor(torch.full((50,), float(rank // 2)), mesh, [Replicate()])
    Snapshot.take(path, {"s": StateDict(w=tensor)}, options=TakeOptions(check_replicated=True))


def test_pipeline_stages_with_one_name_are_not_compared(four, folder):
    four.run(_stages_of_one_name, f"{folder}/s")
    assert [float(Snapshot(f"{folder}/s").read_object(f"{rank}/s/w").mean()) for rank in (0, 2)] == [0, 1]


def _stages_from_one(path):
    rank = dist.get_rank()
    stage = nn.ModuleDict({f"l{rank}": nn.Linear(2, 2)})
    Snapshot(path).restore({"m": stage})
    return stage[f"l{rank}"].weight.detach().clone()


def test_pipeline_stages_are_restored_from_a_one_rank_snapshot(two, folder):
    whole = nn.ModuleDict({f"l{i}": nn.Linear(2, 2) for i in (0, 1)})
    Snapshot.take(f"{folder}/s", {"m": whole})
    for rank, weight in enumerate(two.run(_stages_from_one, f"{folder}/s")):
        assert weight.equal(whole[f"l{rank}"].weight)


def _empty_objects(path):
    state = StateDict(data=bytearray(b""), w=torch.ones(1 << 19))
    Snapshot.take(path, {"s": state}, replicated=["s"])
    live = StateDict(w=torch.zeros(1 << 19))
    Snapshot(path).restore({"s": live}, options=RestoreOptions(read_once=True))
    return live["data"], float(live["w"].mean())


def test_read_once_reads_empty_objects_with_the_rest(two, folder):
    assert two.run(_empty_objects, f"{folder}/s") == [(bytearray(b""), 1.0)] * 2
