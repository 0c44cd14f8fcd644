"""Checkpoints of DeepSpeed, in `deepspeed_files.zip`: equal to what DeepSpeed's own tools make of them.

`write_deepspeed_files.py` wrote them with DeepSpeed on two ranks, which is not needed here.
"""

import math
import pickle
import shutil
import zipfile

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from snapshot import CorruptSnapshotError, ModelState, RestoreOptions, Snapshot, SnapshotError
from snapshot import load as load_weights
from snapshot.errors import UnsupportedFormatError
from snapshot.formats.flat_ranges import join_runs
from snapshot.manifest.entries import ShardedTensorEntry, TensorEntry
from snapshot_deepspeed.groups import FlatGroup, cut_parameter
from snapshot_deepspeed.parts import JoinRules
from tests.formats.remote_copies import on_s3
from tests.helpers.stand_in_pickles import New, save
from tests.hostile.hostile_snapshots import store
from tests.plugins.snapshot_deepspeed.deepspeed_archive import ARCHIVE, READ, expected_of, write_stand_in
from tests.plugins.snapshot_deepspeed.write_deepspeed_files import Model, make_groups


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepspeed")
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    return folder


@pytest.mark.parametrize("name", READ)
def test_deepspeed_weights_and_optimizer_state_equal_those_of_its_own_tools(files, name):
    expected, found = expected_of(files, name), Snapshot(files / name).read_object("0")
    assert list(found["model"]) == list(Model().state_dict())
    for key, weight in expected["weights"].items():
        assert torch.equal(found["model"][key].float(), weight.float())
    assert found["model"]["count"].dtype == torch.int64
    assert found["model"]["frozen.weight"].dtype == (torch.float32 if "float32" in name else torch.bfloat16)
    assert found["model"]["head.weight"] is found["model"]["embed.weight"]
    states = found["optim"]["state"]
    assert sorted(states) == ["embed.weight", "norm.bias", "norm.weight", "out.weight"]
    for key, state in states.items():
        assert found["model"][key].dtype == torch.float32
        for what in ("exp_avg", "exp_avg_sq"):
            assert state[what].shape == found["model"][key].shape
            assert torch.equal(state[what].flatten(), expected["states"][key][what].flatten())
        assert state["step"] == 2
    assert len({state["step"].data_ptr() for state in states.values()}) == 4
    groups = found["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [["embed.weight", "out.weight"], ["norm.weight", "norm.bias"]]
    assert [group["weight_decay"] for group in groups] == [0.01, 0]
    assert (found["epoch"], found["note"], found["global_steps"]) == (3, "x", 2)
    assert found["lr_scheduler"]["last_epoch"] == 2
    assert found["zero"]["loss_scaler"] == {"cur_scale": 1.0, "dynamic": False}
    if "module" in found:
        for key, weight in found["module"].items():
            assert torch.equal(found["model"][key].to(weight.dtype), weight)
    assert ("module" in found) == ("stage3" not in name)


class _Inert:
    """A module like pickle that creates plain objects instead of those of DeepSpeed, which is not here."""

    load, dumps = pickle.load, pickle.dumps

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            return _Anything if module.startswith("deepspeed.") else super().find_class(module, name)


class _Anything:
    def __init__(self, *arguments):
        pass


@pytest.mark.parametrize("name", ["tensor-parallel", "pipeline", "experts"])
def test_deepspeed_model_parallel_parts_and_experts_are_joined(files, name):
    snapshot = Snapshot(files / name)
    found = snapshot.read_object("0")
    assert snapshot.verify()
    assert list(found["model"]) == list(found["module"])
    for key, weight in found["module"].items():  # of all parts: DeepSpeed casts the one to the other
        assert found["model"][key].dtype == torch.float32
        assert torch.equal(found["model"][key].bfloat16(), weight)
    states = found["optim"]["state"]
    named = [key for group in found["optim"]["param_groups"] for key in group["params"]]
    assert sorted(named) == sorted(states) == sorted(found["model"])
    assert all(state["step"] == 2 for state in states.values())
    if name == "experts":
        experts = [key for key in named if "deepspeed_experts" in key]
        assert [key.split("deepspeed_experts.")[1] for key in experts if key.endswith("bias")] == [
            f"{number}.bias" for number in range(4)
        ]
        file = files / name / "step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        flat = torch.load(file, pickle_module=_Inert, weights_only=False)["optimizer_state_dict"]
        moments = flat["base_optimizer_state"]["state"][1]["exp_avg"]  # of the experts 2 and 3
        found = [states[key]["exp_avg"].flatten() for key in experts if "experts.2." in key or "experts.3." in key]
        assert torch.equal(torch.cat(found), moments)
        assert moments.abs().sum() > 0
        return
    expected = expected_of(files, name)["states"]
    assert expected.keys() == states.keys()
    for key, state in expected.items():
        assert torch.equal(found["model"][key], state["fp32"])
        assert all(torch.equal(states[key][what], state[what]) for what in ("exp_avg", "exp_avg_sq"))


def _restore(path, kind, by):
    model = Model()
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            each.fill_(9)
    if kind == "fsdp2":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.AdamW(make_groups(model), lr=7.0)
    app_state = {"t": ModelState(wrapped, optimizer)} if by == "ModelState" else {"model": wrapped, "optim": optimizer}
    Snapshot(path).restore(app_state, unused="ignore", options=RestoreOptions(cast="same_kind"))
    assert optimizer.param_groups[1]["weight_decay"] == 0
    state = {name: _whole(each) for name, each in model.state_dict().items()}
    moments = {
        name: _whole(optimizer.state[each]["exp_avg"])
        for name, each in model.named_parameters()
        if each in optimizer.state
    }
    return state, moments


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _expect_state(got, expected):
    state, moments = got
    for key, weight in expected["weights"].items():
        assert torch.equal(state[key].float(), weight.float())
    assert len(moments) == 4
    for key, moment in moments.items():
        assert torch.equal(moment.flatten(), expected["states"][key]["exp_avg"].flatten())


@pytest.mark.parametrize("by", ["objects", "ModelState"])
@pytest.mark.parametrize("name", READ)
def test_deepspeed_restores_in_one_process(files, name, by):
    _expect_state(_restore(files / name, "plain", by), expected_of(files, name))


@pytest.mark.parametrize("name", ["stage2", "stage3", "stage3-universal"])
@pytest.mark.parametrize(("kind", "by"), [("fsdp2", "ModelState"), ("fsdp2", "objects"), ("ddp", "ModelState")])
def test_deepspeed_restores_on_any_world_size(files, two, three, name, kind, by):
    for pool in (two, three):
        for got in pool.run(_restore, str(files / name), kind, by):
            _expect_state(got, expected_of(files, name))


@pytest.mark.parametrize("name", ["stage2", "stage3", "stage3-universal"])
def test_deepspeed_verify_read_load_convert_and_copy(files, name, tmp_path):
    snapshot, expected = Snapshot(files / name), expected_of(files, name)
    report = snapshot.verify()
    assert report
    assert not report.unverifiable
    weight = expected["weights"]["out.weight"]
    assert torch.equal(snapshot.read_object("0/model/out.weight", box=[slice(1, 4), 5]), weight[1:4, 5])
    assert torch.equal(load_weights(files / name, select=["model/**"])["out.weight"], weight)
    for target in ("x.safetensors", "x.pt", "again"):
        snapshot.convert(tmp_path / target, select=["model/**", "optim/**", "epoch"])
        again = Snapshot(tmp_path / target)
        assert again.verify()
        path = next(each for each in again.get_manifest() if each.endswith("out.weight") and "state" not in each)
        assert torch.equal(again.read_object(path), weight)
    same = Snapshot.diff(files / name, tmp_path / "again", values=True, select=["model/**", "optim/**"])
    assert not same
    assert Snapshot(tmp_path / "again").read_object("0/epoch") == 3


def test_deepspeed_without_zero_restores_the_optimizer(files):
    model = Model()
    optimizer = torch.optim.AdamW(make_groups(model))
    Snapshot(files / "stage0").restore({"t": ModelState(model, optimizer)}, unused="ignore")
    saved = torch.load(files / "stage0" / "step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert torch.equal(model.out.weight, saved["module"]["out.weight"])
    assert torch.equal(optimizer.state[model.norm.bias]["exp_avg"], saved["optimizer"]["state"][3]["exp_avg"])


def test_deepspeed_tag_folder_can_be_opened(files):
    assert Snapshot(files / "stage3" / "step2").read_object("0/epoch") == 3
    assert Snapshot(files / "stage3-universal" / "step2_universal").read_object("0/epoch") == 3


def test_deepspeed_in_memory_and_in_a_bucket(files, moto):
    folder = files / "stage2"
    for file in folder.rglob("*"):
        if file.is_file():
            store(f"ds/{file.relative_to(folder)}", file.read_bytes())
    weight = expected_of(files, "stage2")["weights"]["out.weight"]
    assert torch.equal(Snapshot("memory://ds").read_object("0/model/out.weight"), weight)
    with on_s3(folder / "step2", moto) as (_, url, options):
        snapshot = Snapshot(url, storage_options=options)
        assert torch.equal(snapshot.read_object("0/model/out.weight"), weight)


@pytest.mark.parametrize("name", ["stage2", "stage3", "stage2-universal"])
def test_deepspeed_damage_is_found_by_verify(files, name, tmp_path):
    shutil.copytree(files / name, tmp_path / "x")
    file = max((tmp_path / "x").rglob("*out.weight/fp32.pt" if "universal" in name else "*optim_states.pt"))
    last = expected_of(files, name)["weights"]["out.weight"].detach().flatten()[-2:].numpy().tobytes()
    data = bytearray(file.read_bytes())
    data[data.index(last)] ^= 1
    file.write_bytes(data)
    report = Snapshot(tmp_path / "x").verify()
    assert [file.name in fault for fault in report.faults] == [True]
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "x").convert(tmp_path / "y")


def test_deepspeed_missing_rank_file_is_named(files, tmp_path):
    shutil.copytree(files / "stage2" / "step2", tmp_path / "x")
    (tmp_path / "x" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"zero_pp_rank_0_mp_rank_00_optim_states\.pt is missing$"):
        Snapshot(tmp_path / "x").get_manifest()


def test_deepspeed_missing_last_rank_is_corrupt(files, tmp_path):
    shutil.copytree(files / "stage2" / "step2", tmp_path / "x")
    (tmp_path / "x" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"out\.weight: the partitions have 4 of 35 elements"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("tag", ["", "..", "../x", "/etc", "x"])
def test_deepspeed_latest_file_cannot_point_outside_the_folder(tmp_path, tag):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest").write_text(tag)
    with pytest.raises(SnapshotError, match="no snapshot found"):
        Snapshot(tmp_path / "run").get_manifest()


# Values that DeepSpeed does not write.


def test_deepspeed_synthetic_checkpoint_is_read(tmp_path):
    write_stand_in(tmp_path, more={"model": "of the client", "optim": 3})
    found = Snapshot(tmp_path).read_object("0")
    assert torch.equal(found["model"]["w"], torch.arange(6.0).view(2, 3))
    assert found["optim"]["state"]["w"]["step"] == 4
    assert found["client_state"] == {"model": "of the client", "optim": 3}


LIES = {
    "shape": {"shapes": [{"w": torch.Size([2, 4])}]},
    "negative shape": {"shapes": [{"w": (-2, -3)}]},
    "huge shape": {"shapes": [{"w": (1 << 40, 1 << 40)}]},
    "no shape": {"shapes": [{"w": 6}]},
    "no names": {"shapes": [{3: torch.Size([6])}]},
    "groups": {"groups": []},
    "paddings": {"paddings": [[1 << 70]]},
    "too many paddings": {"paddings": [[0, 0]]},
    "module": {"module": 3},
    "shapes": {"shapes": {"w": 3}},
}


@pytest.mark.parametrize("what", LIES)
def test_deepspeed_inconsistent_values_are_refused(tmp_path, what):
    write_stand_in(tmp_path, **LIES[what])
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path).get_manifest()


UNKNOWN = {
    "stage": ({"stage": 7}, "ZeRO 1 to 3, got 7"),
    "flat": ({"flat": torch.zeros(2, 3)}, r"with one dimension, got \[2, 3\]"),
    "state": ({"state": {0: {"what": torch.zeros(2, 3)}}}, r"shape \[2, 3\]"),
    "object": ({"state": {0: {"what": New("some Thing")}}}, "got a Thing"),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_deepspeed_unknown_values_are_named(tmp_path, what):
    changes, expected = UNKNOWN[what]
    write_stand_in(tmp_path, **changes)
    with pytest.raises(UnsupportedFormatError, match=expected):
        Snapshot(tmp_path).get_manifest()


def write_stage_3(folder, partitions, *, count=None, world=4):
    """Write a checkpoint of ZeRO 3: a rank of each partition. MiCS has several ranks of each."""
    whole = {"w": torch.arange(15.0).view(5, 3), "b": torch.arange(4.0) + 100}
    for rank in range(partitions):
        parts = []
        for each in whole.values():
            step = -(-each.numel() // partitions)
            padded = torch.nn.functional.pad(each.flatten(), (0, step * partitions - each.numel()))
            parts.append(padded[rank * step : (rank + 1) * step])
        flat = torch.cat(parts)
        shapes = [{name: each.shape for name, each in whole.items()}]
        head = {"module": {name: torch.zeros(0) for name in whole}, "param_shapes": shapes, "dp_world_size": world}
        held = {"zero_stage": 3, "fp32_flat_groups": [flat], "partition_count": partitions if count is None else count}
        inner = {"state": {0: {"exp_avg": flat * 2, "step": 4}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
        held["optimizer_state_dict"] = inner
        save(head, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        save({"optimizer_state_dict": held}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return whole


@pytest.mark.parametrize("partitions", [1, 2, 3, 4])
def test_deepspeed_mics_partitions_of_one_replica_are_complete(tmp_path, partitions):
    whole = write_stage_3(tmp_path, partitions, world=12)
    found = Snapshot(tmp_path).read_object("0")
    for name, each in whole.items():
        assert torch.equal(found["model"][name], each)
        assert torch.equal(found["optim"]["state"][name]["exp_avg"], each * 2)


def test_deepspeed_incomplete_partitions_are_refused(tmp_path):
    write_stage_3(tmp_path, 2, count=4)
    with pytest.raises(UnsupportedFormatError, match="cut into 4 parts on 2 ranks is not read"):
        Snapshot(tmp_path).get_manifest()


@pytest.mark.parametrize("key", ["ds_autoep_layers", "autoep_layers"])
def test_deepspeed_autoep_is_refused(tmp_path, key):
    write_stand_in(tmp_path, more={key: [{"moe_layer_id": 0}]})
    with pytest.raises(UnsupportedFormatError, match="with AutoEP is not read"):
        Snapshot(tmp_path).get_manifest()


def test_deepspeed_experts_with_tensor_parallelism_are_refused(tmp_path):
    write_stand_in(tmp_path)
    for rank in range(2):
        save({"m": torch.zeros(2)}, tmp_path / f"layer_0_expert_0_mp_rank_{rank:02d}_model_states.pt")
    with pytest.raises(UnsupportedFormatError, match="experts of several tensor-parallel ranks is not read"):
        Snapshot(tmp_path).get_manifest()


def test_deepspeed_repeated_shapes_are_refused_without_much_memory(tmp_path):
    names = {f"{number}": torch.Size([0]) for number in range(1000)}
    write_stand_in(
        tmp_path,
        shapes=[names] * 1000,
        groups=[torch.zeros(0)] * 1000,
        paddings=None,
        state={},
        module={"w": torch.ones(2)},
    )
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        Snapshot(tmp_path).get_manifest()


# Flat ranges: parts that are no boxes.


@given(data=st.data())
def test_deepspeed_slices_of_a_group_form_its_parameters(data):
    sizes = data.draw(st.lists(st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1, max_size=5))
    paddings = [data.draw(st.integers(0, 3)) for _ in sizes]
    ranks = data.draw(st.integers(1, 4))
    count = ranks if data.draw(st.booleans()) else 0
    shapes = {str(number): shape for number, shape in enumerate(sizes)}
    whole = {name: torch.arange(math.prod(shape)).view(shape) + 1000 * int(name) for name, shape in shapes.items()}
    if count:
        parts = [[] for _ in range(ranks)]
        for each in whole.values():
            step = -(-each.numel() // ranks)
            padded = torch.cat([each.flatten(), torch.full((step * ranks - each.numel(),), -1)])
            for rank in range(ranks):
                parts[rank].append(padded[rank * step : (rank + 1) * step])
        flats = [torch.cat(each) for each in parts]
    else:
        pieces = [
            torch.cat([each.flatten(), torch.full((padding,), -1)])
            for each, padding in zip(whole.values(), paddings, strict=True)
        ]
        every = torch.cat(pieces)
        step = -(-every.numel() // ranks)
        flats = list(every.split(step)) + [every[:0]] * (ranks - len(every.split(step)))
    entries = [
        TensorEntry(str(rank), (0, 8 * each.numel()), "int64", (each.numel(),)) for rank, each in enumerate(flats)
    ]
    group = FlatGroup(0, shapes, {"fp32": entries}, {}, paddings, count)
    for name, slices in group.find_slices("fp32").items():
        joined = torch.cat([flats[each.rank][each.at : each.at + each.numel] for each in slices])
        assert torch.equal(joined, whole[name].flatten())
        runs = [
            (each.begin, TensorEntry(f"{each.rank}", (8 * each.at, 8 * (each.at + each.numel)), "int64", (each.numel,)))
            for each in slices
        ]
        entry = join_runs("int64", shapes[name], runs)
        made = torch.full(shapes[name], -1)
        shards = (
            [(shard.offsets, shard.tensor) for shard in entry.shards]
            if isinstance(entry, ShardedTensorEntry)
            else [((0,) * len(shapes[name]), entry)]
        )
        for offsets, stored in shards:
            begin, end = (each // 8 for each in stored.byte_range)
            index = tuple(slice(at, at + size) for at, size in zip(offsets, stored.shape, strict=True))
            made[index] = flats[int(stored.location)][begin:end].view(stored.shape)
        assert torch.equal(made, whole[name])


@given(numel=st.integers(0, 50), count=st.integers(1, 8))
def test_deepspeed_cut_parameter_covers_it_once(numel, count):
    slices, step = cut_parameter(numel, count)
    assert [index for each in slices for index in range(each.begin, each.begin + each.numel)] == list(range(numel))
    assert all(each.at == 0 and each.numel <= step for each in slices)


def test_torch_file_tensors_with_attributes_are_read(tmp_path):
    weight = torch.arange(4.0)
    weight.tensor_model_parallel = True
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.partition_dim = 0
    torch.save({"w": weight, "p": parameter}, tmp_path / "x.pt")
    assert b"tensor_model_parallel" in zipfile.ZipFile(tmp_path / "x.pt").read("x/data.pkl")
    found = Snapshot(tmp_path / "x.pt").read_object("0")
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["p"], parameter)
    assert isinstance(found["p"], torch.nn.Parameter)


# Tensor-parallel parts, joined by patterns.

PATTERNS = {
    "tp_replicated_parameter_patterns": [r".*norm\.weight$"],
    "parameter_with_row_parallelism_patterns": [r"layers\.\d+\.down"],
    "vocabulary_parameter_patterns": ["^words"],
    "parameter_with_2_sub_params_cat_dim_0": [r"^gated"],
    "parameter_with_sub_params": [
        {"patterns": ["^qkv"], "shape": (3, -1), "partition_dim": 0},
        {"patterns": ["^uneven"], "shape": ((8, 2), 3), "partition_dim": 0},
        {"patterns": ["^columns"], "shape": (3, (4, 2)), "partition_dim": 1},
    ],
    "sub_param_shard_widths": {"^uneven": [[3, 5], [2, 0]], "^columns": [[2, 2], [1, 1]]},
    "original_vocab_size": 5,
}


def _pieces(path, tensors):
    """Store tensors in files of their own, in runs; return their entries, and the bytes of all files."""
    entries, held = [], {}
    for number, tensor in enumerate(tensors):
        location = f"{path}-{number}"
        held[location] = tensor.flatten()
        middle = tensor.numel() // 2
        runs = [(0, middle), (middle, tensor.numel())]
        stored = [
            (begin, TensorEntry(location, (8 * begin, 8 * end), "int64", (end - begin,)))
            for begin, end in runs
            if begin < end
        ]
        entries.append(join_runs("int64", tuple(tensor.shape), stored))
    return entries, held


def _read_pieces(entry, held):
    made = torch.full(tuple(entry.shape), -1)
    for box, stored in entry.pieces():
        begin, end = (each // 8 for each in stored.byte_range)
        assert (made[box.slices()] == -1).all()
        made[box.slices()] = held[stored.location][begin:end].view(box.sizes)
    return made


CUTS = {
    "layers.3.down.weight": lambda w: w.chunk(2, 1),
    "layers.3.up.weight": lambda w: w.chunk(2, 0),
    "layers.3.norm.weight": lambda w: (w, w),
    "words": lambda w: w.chunk(2, 0),
    "gated": lambda w: [torch.cat([half.chunk(2, 0)[rank] for half in w.chunk(2, 0)]) for rank in range(2)],
    "qkv": lambda w: [torch.cat([part.chunk(2, 0)[rank] for part in w.chunk(3, 0)]) for rank in range(2)],
    "uneven": lambda w: [torch.cat([w[0:3], w[8:10]]), w[3:8]],
    "columns": lambda w: [torch.cat([w[:, 0:2], w[:, 4:5]], 1), torch.cat([w[:, 2:4], w[:, 5:6]], 1)],
}
SHAPES = {
    "layers.3.norm.weight": (6,),
    "words": (8, 3),
    "gated": (8, 3),
    "qkv": (12, 2),
    "uneven": (10, 3),
    "columns": (3, 6),
}


@pytest.mark.parametrize("name", CUTS)
def test_deepspeed_tensor_parallel_parts_are_joined(name):
    whole = torch.arange(math.prod(SHAPES.get(name, (4, 6)))).view(SHAPES.get(name, (4, 6)))
    entries, held = _pieces("f", CUTS[name](whole))
    joined = JoinRules("x", PATTERNS, 2).join(name, entries)
    assert torch.equal(_read_pieces(joined, held), whole[:5] if name == "words" else whole)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)*", "a.*b.*c.*d", "[a-z]*", "a{1000}", "x" * 2000])
def test_deepspeed_parameter_patterns_that_could_be_slow_are_refused(pattern):
    with pytest.raises(UnsupportedFormatError, match="must have simple patterns"):
        JoinRules("x", {"tp_replicated_parameter_patterns": [pattern]}, 2)


def test_deepspeed_parts_that_do_not_fit_are_refused():
    rules = JoinRules("x", PATTERNS, 2)
    entries, _ = _pieces("f", [torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)])
    with pytest.raises(ValueError, match="do not fit each other"):
        rules.join("up", entries)
    entries, _ = _pieces("f", [torch.ones(3, dtype=torch.int64)] * 2)
    with pytest.raises(UnsupportedFormatError, match="has no dimension 1"):
        rules.join("layers.1.down.bias", entries)


def test_deepspeed_tensor_parallel_ranks_without_rules_are_refused(files, tmp_path):
    shutil.copytree(files / "tensor-parallel" / "step2", tmp_path / "x")
    for rank in range(2):
        path = tmp_path / "x" / f"mp_rank_0{rank}_model_states.pt"
        state = torch.load(path, weights_only=False)
        del state["universal_checkpoint_info"]
        torch.save(state, path)
    with pytest.raises(UnsupportedFormatError, match="2 tensor-parallel ranks must have universal_checkpoint_info"):
        Snapshot(tmp_path / "x").get_manifest()


def test_deepspeed_missing_model_parallel_file_is_named(files, tmp_path):
    shutil.copytree(files / "pipeline" / "step2", tmp_path / "x")
    (tmp_path / "x" / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"mp_rank_00_model_states\.pt is missing$"):
        Snapshot(tmp_path / "x").get_manifest()
