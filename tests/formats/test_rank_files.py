"""Files of torch.save by rank, with DTensors and ShardedTensors: all files are one checkpoint, and one has its boxes.

torch itself writes them, on two to four ranks. `rank_files.zip` has files of other versions, by `write_rank_files.py`.
Further layouts are pickled by stand-ins, from torch's sources.
"""

import itertools
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from snapshot import CorruptSnapshotError, ModelState, Snapshot, SnapshotError, StateDict
from snapshot import load as load_weights
from snapshot.errors import UnsupportedFormatError
from snapshot.tensors.geometry import Copy, Split, find_held_shards
from tests.formats.remote_copies import on_s3
from tests.helpers.stand_in_pickles import Call, Name, New, dtensor, layout_mesh, placement, save, tensor_mesh
from tests.hostile.hostile_snapshots import store


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _train(model, optimizer):
    torch.manual_seed(1)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _other(model):
    """Change everything, so that a restore has to bring it back."""
    with torch.no_grad():
        for each in itertools.chain(model.parameters(), model.buffers()):
            each.fill_(9)
    return model


def _wrap(kind, model):
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return DistributedDataParallel(model) if kind == "ddp" else model


def _write_verl(path):
    """Write what verl writes, with the names of its files."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = _wrap("fsdp2", _model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    _train(model, optimizer)
    extra = {"lr_scheduler": {"last_epoch": 1}, "rng": {"cpu": torch.full((5,), rank), "random": (3, (1, 2, rank))}}
    for name, state in (("model", model.state_dict()), ("optim", optimizer.state_dict()), ("extra_state", extra)):
        torch.save(state, Path(path, f"{name}_world_size_{world}_rank_{rank}.pt"))
    Path(path, "fsdp_config.json").write_text("{}")
    full = {name: _whole(each) for name, each in model.state_dict().items()}
    moments = [
        {name: _whole(each) for name, each in state.items()} for state in optimizer.state_dict()["state"].values()
    ]
    return full, moments


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _restore(path, kind, by):
    model = _wrap(kind, _other(_model()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    if by == "ModelState":
        Snapshot(path).restore({"train": ModelState(model, optimizer)}, unused="ignore")
    else:
        Snapshot(path).restore({"model": model, "optim": optimizer}, unused="ignore")
    assert optimizer.param_groups[0]["lr"] == 0.25
    found = {name.removeprefix("module."): _whole(each) for name, each in model.state_dict().items()}
    moments = [
        {name: _whole(each) for name, each in state.items()} for state in optimizer.state_dict()["state"].values()
    ]
    return found, moments


def _expect_state(got, expected):
    for mine, theirs in zip(got, expected, strict=True):
        if isinstance(theirs, list):
            assert len(mine) == len(theirs)
        pairs = zip(mine, theirs, strict=True) if isinstance(theirs, list) else [(mine, theirs)]
        for a, b in pairs:
            assert a.keys() == b.keys()
            assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("by", ["objects", "ModelState"])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_rank_files_of_verl_restore_on_any_world_size(two, three, folder, kind, by):
    expected = two.run(_write_verl, folder)[0]
    _expect_state(_restore(folder, "plain", by), expected)
    for pool in (two, three):
        for got in pool.run(_restore, folder, kind, by):
            _expect_state(got, expected)


def test_rank_files_are_all_read_by_every_verb(two, folder, tmp_path):
    full, moments = two.run(_write_verl, folder)[0]
    snapshot = Snapshot(folder)
    assert snapshot.metadata.world_size == 2
    report = snapshot.verify()
    assert report
    assert not report.unverifiable
    assert torch.equal(snapshot.read_object("0/model/0.weight", box=[slice(2, 5), 3]), full["0.weight"][2:5, 3])
    assert snapshot.read_object("1/extra_state/rng/random") == (3, (1, 2, 1))
    assert torch.equal(snapshot.read_object("1/extra_state/rng/cpu"), torch.full((5,), 1))
    weights = load_weights(folder, select=["model/**"])
    assert torch.equal(weights["2.weight"], full["2.weight"])
    for name in ("x.safetensors", "x.pt", "again"):
        target = tmp_path.parent / f"{tmp_path.name}-{name}"
        snapshot.convert(target, select=["model/**", "optim/**"])
        again = Snapshot(target)
        assert again.verify()
        tree = again.get_manifest()
        path = next(each for each in tree if each.endswith("0.weight") and "model" in each)
        assert torch.equal(again.read_object(path), full["0.weight"])
        if name == "again":
            assert not Snapshot.diff(folder, target, values=True, select=["model/**", "optim/**"])
    copy = Snapshot(target)
    assert torch.equal(copy.read_object("0/optim/state/0/exp_avg_sq"), moments[0]["exp_avg_sq"])


def _write_fsdp1(path):
    rank = dist.get_rank()
    model = FSDP(_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    _train(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer), "step": 3}
            torch.save(saved, Path(path, f"ckpt-rank{rank}.pt"))
        with FSDP.summon_full_params(model):
            return {name: each.detach().clone() for name, each in model.module.named_parameters()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rank_files_of_fsdp1_sharded_state_are_read(two, folder):
    full = two.run(_write_fsdp1, folder)[0]
    names, live = list(full), StateDict(model={}, optim={}, step=0)
    Snapshot(folder).restore({"all": live})
    assert live["step"] == 3
    assert all(torch.equal(live["model"][name], full[name]) for name in names)
    model = _other(_model())
    optimizer = torch.optim.AdamW(model.parameters())
    Snapshot(folder).restore({"t": ModelState(model, optimizer)}, unused="ignore")
    assert all(torch.equal(each, full[name]) for name, each in model.named_parameters())
    moment = optimizer.state[model[2].weight]["exp_avg"]
    assert torch.equal(moment, live["optim"]["state"]["2.weight"]["exp_avg"])
    assert moment.abs().sum() > 0


@pytest.mark.parametrize("write", [_write_verl, _write_fsdp1])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rank_file_opened_alone_has_its_boxes(two, folder, write):
    full = two.run(write, folder)[0]
    full = full[0] if isinstance(full, tuple) else full
    file = max(Path(folder).glob("*rank*1.pt"), key=lambda each: "model" in each.name)
    prefix = "0/" if "model" in file.name else "0/model/"
    snapshot = Snapshot(file)
    entry = snapshot.get_manifest()[f"{prefix}0.weight"]
    assert (entry.shape, [(each.offsets, each.sizes) for each in entry.shards]) == ((5, 7), [((3, 0), (2, 7))])
    assert snapshot.verify()
    assert torch.equal(snapshot.read_object(f"{prefix}0.weight", box=[slice(3, 5)]), full["0.weight"][3:])
    with pytest.raises(UnsupportedFormatError, match=r"only the boxes of one rank; .*folder.*there are:\s+3:5,0:7"):
        snapshot.read_object(f"{prefix}0.weight")
    with pytest.raises(UnsupportedFormatError, match="only the boxes of one rank"):
        snapshot.read_object(f"{prefix}0.weight", box=[slice(2, 4)])
    live = _other(_model())
    with pytest.raises(UnsupportedFormatError, match="only the boxes of one rank"):
        snapshot.restore({"model": live}, unused="ignore")
    assert (live[0].weight == 9).all()


def _write_mixed(path):
    """Write tensors with several dimensions of a mesh, and one of a part of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {
        "both": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(0), Shard(0)]),
        "cross": distribute_tensor(torch.arange(35.0).view(7, 5), mesh, [Shard(1), Shard(0)]),
        "copies": distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Shard(0)]),
        "own": distribute_tensor(torch.arange(5.0) + 100 * (dist.get_rank() // 2), mesh["tp"], [Shard(0)]),
        "rank": dist.get_rank(),
    }
    torch.save(state, Path(path, f"{dist.get_rank()}_rank_{dist.get_rank()}.pt".partition("_")[2]))


def test_rank_files_with_several_mesh_dimensions_and_submeshes(four, folder):
    four.run(_write_mixed, folder)
    snapshot = Snapshot(folder)
    for name, expected in (("both", torch.arange(35.0).view(7, 5)), ("cross", torch.arange(35.0).view(7, 5))):
        assert torch.equal(snapshot.read_object(name), expected)
    assert torch.equal(snapshot.read_object("copies"), torch.arange(6.0))
    assert torch.equal(snapshot.read_object("1/own"), torch.arange(5.0))
    assert torch.equal(snapshot.read_object("3/own"), torch.arange(5.0) + 100)
    assert snapshot.read_object("2/rank") == 2


VERSIONS = Path(__file__).with_name("rank_files.zip")


@pytest.fixture(scope="module")
def versions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    zipfile.ZipFile(VERSIONS).extractall(folder)
    return folder


@pytest.mark.parametrize("version", ["2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0"])
def test_rank_files_of_other_torch_versions_are_read(versions, version, tmp_path):
    expected = torch.load(versions / version / "dtensors-expected.pt")
    path = versions / version / "dtensors"
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    Snapshot(path).restore({"train": ModelState(_other(model), optimizer)})
    moments = list(optimizer.state_dict()["state"].values())
    _expect_state((dict(model.state_dict()), moments), (expected["model"], expected["moments"]))
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert Snapshot(path).verify()

    full = torch.load(versions / version / "fsdp1-expected.pt")["model"]
    model, path = _other(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))), versions / version / "fsdp1"
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    Snapshot(path).restore({"train": ModelState(model, optimizer)}, unused="ignore")
    assert all(torch.equal(each, full[name]) for name, each in model.named_parameters())
    assert all(state["exp_avg"].abs().sum() > 0 for state in optimizer.state.values())
    Snapshot(path).convert(tmp_path / "again")
    assert torch.equal(Snapshot(tmp_path / "again").read_object("0/model/0.weight"), full["0.weight"])


# Further layouts, as stand-ins.


@given(data=st.data())
def test_rank_files_boxes_of_any_mesh_form_the_whole_tensor(tmp_path_factory, data):
    mesh_shape = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    make = data.draw(st.sampled_from([tensor_mesh, layout_mesh]))
    splits = st.builds(Split, st.integers(0, len(shape) - 1))
    placements = tuple(data.draw(st.one_of(st.builds(Copy), splits)) for _ in mesh_shape)
    ranks = torch.arange(torch.Size(mesh_shape).numel()).view(mesh_shape)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    folder = tmp_path_factory.mktemp("mesh")
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        held = find_held_shards(shape, mesh_shape, placements, coordinate)
        local = torch.empty(held.shape, dtype=whole.dtype)
        for box, inner in held.boxes:
            local[inner.slices()] = whole[box.slices()]
        mesh = make(ranks.tolist(), list(coordinate))
        value = dtensor(local, shape, tuple(map(placement, placements)), mesh)
        save({"w": value, "same": 3}, folder / f"model_world_size_{ranks.numel()}_rank_{rank}.pt")
    snapshot = Snapshot(folder)
    assert torch.equal(snapshot.read_object("0/model/w"), whole)
    assert snapshot.verify()


def test_rank_files_names_of_torch_2_0_are_known(tmp_path):
    mesh = tensor_mesh([0], [0])
    save(
        {"w": dtensor(torch.ones(2), (2,), (placement(Copy()),), mesh, "torch.distributed._tensor")},
        tmp_path / "x.pt",
    )
    assert torch.equal(Snapshot(tmp_path / "x.pt").read_object("0/w"), torch.ones(2))


def test_rank_files_unknown_placements_and_classes_are_named(tmp_path):
    partial = New("torch.distributed.tensor.placement_types Partial", state={"reduce_op": "sum"})
    other = New("some.library PackedTensor")
    saved = {
        "partial": dtensor(torch.ones(2), (2,), (partial,), tensor_mesh([0], [0])),
        "inner": dtensor(torch.ones(2), (2,), (placement(Copy()),), tensor_mesh([0], [0])),
        "other": Call("torch._tensor _rebuild_from_type_v2", Name("x f"), Name("some.library Quantised"), (), {}),
        "good": torch.ones(3),
    }
    saved["inner"].arguments[3][1]["_local_tensor"] = other
    save(saved, tmp_path / "x.pt")
    snapshot = Snapshot(tmp_path / "x.pt")
    assert torch.equal(snapshot.read_object("0/good"), torch.ones(3))
    for name, what in (("partial", "Partial"), ("inner", "PackedTensor"), ("other", "some.library.Quantised")):
        with pytest.raises(SnapshotError, match=what) as caught:
            snapshot.read_object(f"0/{name}")
        assert not isinstance(caught.value, CorruptSnapshotError)


@pytest.mark.parametrize("change", ["coordinate", "placement", "mesh", "strides", "local", "order"])
def test_rank_files_tensors_with_inconsistent_boxes_are_refused(tmp_path, change):
    mesh, placements, local = tensor_mesh([0, 1], [0]), [placement(Split(0))], torch.ones(2, 3)
    value = dtensor(local, (4, 3), tuple(placements), mesh)
    spec = value.arguments[3][1]["_spec"]
    if change == "coordinate":
        mesh.state["_coordinate_on_dim"] = [7]
    elif change == "placement":
        spec.state["placements"] = (placement(Split(5)),)
    elif change == "mesh":
        mesh.state["mesh"] = torch.zeros(1, dtype=torch.int).expand(1 << 30)
    elif change == "strides":
        spec.state["placements"] = (placement(Split(0, 1 << 40)),)
    elif change == "local":
        value.arguments[3][1]["_local_tensor"] = torch.ones(3, 3)
    else:
        spec.state["shard_order"] = (New("x ShardOrderEntry", 0, (9,)),)
    save({"w": value}, tmp_path / "x.pt")
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "x.pt").get_manifest()


def test_rank_files_box_without_its_storage_is_corrupt(tmp_path):
    local = torch.ones(2, 3)
    save({"w": dtensor(local, (4, 3), (placement(Split(0)),), tensor_mesh([0, 1], [0]))}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive, zipfile.ZipFile(tmp_path / "x.pt", "w") as damaged:
        for each in archive.infolist():
            if each.file_size != local.nbytes:
                damaged.writestr(each, archive.read(each))
    with pytest.raises(CorruptSnapshotError, match=r"x\.pt: .*w: the storage data/\d+ is missing"):
        Snapshot(tmp_path / "x.pt").get_manifest()


# Folders.


def _part(rank, world, folder, name="model", suffix="pt"):
    value = dtensor(
        torch.full((2,), float(rank)), (2 * world,), (placement(Split(0)),), tensor_mesh(list(range(world)), [rank])
    )
    save({"w": value, "all": torch.arange(3), "own": rank}, folder / f"{name}_world_size_{world}_rank_{rank}.{suffix}")


def test_rank_files_missing_file_is_named(tmp_path):
    _part(0, 3, tmp_path)
    _part(2, 3, tmp_path)
    with pytest.raises(CorruptSnapshotError, match=r"model_world_size_3_rank_1\.pt is missing$"):
        Snapshot(tmp_path).get_manifest()


def test_rank_files_of_two_world_sizes_are_refused(tmp_path):
    for rank in range(2):
        _part(rank, 2, tmp_path)
    _part(0, 1, tmp_path)
    with pytest.raises(UnsupportedFormatError, match="files of 1 and 2 ranks"):
        Snapshot(tmp_path).get_manifest()


def test_rank_files_boxes_of_absent_ranks_are_missing_and_not_corrupt(tmp_path):
    for rank in range(2):
        _part(rank, 4, tmp_path)
        (tmp_path / f"model_world_size_4_rank_{rank}.pt").rename(tmp_path / f"rank_{rank}.pt")
    snapshot = Snapshot(tmp_path)
    assert snapshot.read_object("0/w", box=[slice(1, 3)]).tolist() == [0, 1]
    with pytest.raises(UnsupportedFormatError, match=r"do not have all boxes of it; .*there are:\s+0:2\s+2:4$"):
        snapshot.read_object("0/w")


def test_rank_files_beside_another_file_are_not_opened(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"rng": torch.ones(2)}, tmp_path / "rng_rank0.pt")
    with pytest.raises(SnapshotError, match="has the files"):
        Snapshot(tmp_path).get_manifest()


def test_rank_files_equal_values_are_replicated_and_others_rank_specific(tmp_path):
    for rank in range(2):
        _part(rank, 2, tmp_path)
    snapshot = Snapshot(tmp_path)
    manifest = snapshot.get_manifest()
    assert manifest["0/model/all"].replicated
    assert "1/model/all" not in manifest
    assert [snapshot.read_object(f"{rank}/model/own") for rank in range(2)] == [0, 1]
    assert snapshot.read_object("0/model/w").tolist() == [0, 0, 1, 1]


def test_rank_files_in_memory_and_in_a_bucket(tmp_path, moto):
    folder = tmp_path / "f"
    folder.mkdir()
    for rank in range(2):
        _part(rank, 2, folder)
        for file in folder.iterdir():
            store(f"/ranks/{file.name}".lstrip("/"), file.read_bytes())
    assert Snapshot("memory://ranks").read_object("0/model/w").tolist() == [0, 0, 1, 1]
    with on_s3(folder, moto) as (_, url, options):
        snapshot = Snapshot(url, storage_options=options)
        assert snapshot.read_object("0/model/w").tolist() == [0, 0, 1, 1]
        assert snapshot.verify()
