"""Tensors of any checkpoint, loaded by name: equal to the bit, whole, in parts, or as this rank's shards."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import snapshot
from snapshot import CorruptSnapshotError, RestoreError, Snapshot, SnapshotNotFoundError, StateDict, Target
from snapshot.events import add_handler, remove_handler
from tests.helpers.states import expect_equal
from tests.helpers.versions import ALONE, clear_sharding_cache, distribute

WEIGHTS = {
    "model.embed.weight": torch.arange(700 * 90, dtype=torch.float32).view(700, 90),
    "model.norm.weight": torch.linspace(0, 1, 90).bfloat16(),
    "model.experts.w1": torch.arange(6 * 8 * 10).view(6, 8, 10),
    "model.scale": torch.tensor(2.5, dtype=torch.float64),
    "model.mask": torch.tensor([True, False, True]),
    "model.empty": torch.empty(0, 4),
}


def nested():
    made = {}
    for name, tensor in WEIGHTS.items():
        *above, last = name.split(".")[1:]
        held = made
        for each in above:
            held = held.setdefault(each, {})
        held[last] = tensor
    return made


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same weights in every format."""
    folder = tmp_path_factory.mktemp("sources")
    save_file(WEIGHTS, folder / "alone.safetensors")
    Snapshot(folder / "alone.safetensors").convert(Target(folder / "several", "safetensors", shard_bytes=100_000))
    torch.save(WEIGHTS, folder / "torch.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save(dict(WEIGHTS), checkpoint_id=folder / "dcp", **ALONE)
    Snapshot.take(folder / "taken", {"model": StateDict({"model": nested()})})
    return folder


FORMATS = ["alone.safetensors", "several", "torch.pt", "dcp", "taken"]


@pytest.mark.parametrize("name", FORMATS)
def test_load_returns_equal_tensors_from_all_formats(sources, name):
    expect_equal(snapshot.load(sources / name), WEIGHTS, ordered=False)


@pytest.mark.parametrize("name", FORMATS)
def test_load_parts_from_all_formats(sources, name):
    plan = {"model.embed.*": (slice(100, 300), slice(7, 11)), "**.w1": 2, "model.norm.weight": [slice(-5, None)]}
    expected = dict(WEIGHTS)
    expected["model.embed.weight"] = WEIGHTS["model.embed.weight"][100:300, 7:11]
    expected["model.experts.w1"] = WEIGHTS["model.experts.w1"][2]
    expected["model.norm.weight"] = WEIGHTS["model.norm.weight"][-5:]
    expect_equal(snapshot.load(sources / name, parts=plan), expected, ordered=False)


def test_load_names_are_those_of_convert(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    more = StateDict({"a/b": torch.ones(2), "number": 3, "list": [torch.zeros(1), "text"]})
    for number, app in enumerate([{"model": model}, {"model": model, "more": more}]):
        Snapshot.take(tmp_path / f"{number}", app)
        Snapshot(tmp_path / f"{number}").convert(Target(tmp_path / f"{number}.safetensors", "safetensors"))
        expect_equal(
            snapshot.load(tmp_path / f"{number}"), load_file(tmp_path / f"{number}.safetensors"), ordered=False
        )
    got = snapshot.load(tmp_path / "1", select=["more/**"], exclude=["more/list/**"], rename={"more/a%2Fb": "more/c"})
    expect_equal(got, {"c": torch.ones(2)}, ordered=False)


def test_load_dtype_casts_only_floating_point_tensors(sources):
    got = snapshot.load(sources / "taken", dtype=torch.float16)
    expect_equal(
        got, {name: each.half() if each.is_floating_point() else each for name, each in WEIGHTS.items()}, ordered=False
    )
    with pytest.raises(TypeError, match="dtype must be a floating-point dtype"):
        snapshot.load(sources / "taken", dtype=torch.int8)


def test_load_tied_weights_share_memory(tmp_path):
    weight = nn.Parameter(torch.randn(50, 60))
    Snapshot.take(tmp_path / "tied", {"model": StateDict(a=weight, b=weight, c=weight.detach().clone())})
    got = snapshot.load(tmp_path / "tied")
    assert got["a"] is got["b"]
    assert got["c"].data_ptr() != got["a"].data_ptr()
    apart = snapshot.load(tmp_path / "tied", parts={"a": 1})
    assert torch.equal(apart["a"], weight[1])
    assert torch.equal(apart["b"], weight)


def test_load_keeps_the_memory_format_of_whole_tensors(tmp_path):
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    Snapshot.take(tmp_path / "image", {"model": StateDict(image=image)})
    assert snapshot.load(tmp_path / "image")["image"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(snapshot.load(tmp_path / "image", parts={"image": [1, slice(1, 3)]})["image"], image[1, 1:3])


def test_load_to_the_meta_device_reads_no_data(sources, tmp_path):
    (tmp_path / "w.safetensors").write_bytes((sources / "alone.safetensors").read_bytes())
    got = snapshot.load(tmp_path / "w.safetensors", device="meta")
    assert {name: (each.shape, each.dtype) for name, each in got.items()} == {
        name: (each.shape, each.dtype) for name, each in WEIGHTS.items()
    }
    assert {each.device.type for each in got.values()} == {"meta"}


def test_load_raises_all_mismatches_before_reading_data(sources):
    seen = []
    add_handler(seen.append)
    try:
        with pytest.raises(RestoreError) as raised:
            snapshot.load(sources / "taken", parts={"**.weight": slice(0, 8, 2), "model.scale": 0, "model.mask": [7]})
    finally:
        remove_handler(seen.append)
    assert len(raised.value.mismatches) == 4
    for text in ("step 1", "at most 0 dimensions", "index 7 is out of range"):
        assert text in str(raised.value)
    assert [event.name for event in seen] == ["failed"]
    for bad, error, text in [
        ({"nothing": 1}, RestoreError, "'nothing' matches no tensor"),
        ({"model.mask": "abc"}, RestoreError, "must be given by slices and ints, got 'abc'"),
        ({"model.mask": True}, RestoreError, "must be given by slices and ints, got True"),
        ("text", TypeError, "parts must be a dict of slices"),
        ((1, {}), TypeError, "DeviceMesh"),
    ]:
        with pytest.raises(error, match=text):
            snapshot.load(sources / "taken", parts=bad)
    with pytest.raises(RestoreError, match="matches nothing"):
        snapshot.load(sources / "taken", select=["absent/**"])
    with pytest.raises(SnapshotNotFoundError):
        snapshot.load(sources / "absent")


def test_load_parts_function_error_is_raised(sources):
    def plan(name, shape):
        raise ZeroDivisionError(name)

    with pytest.raises(ZeroDivisionError):
        snapshot.load(sources / "taken", parts=plan)


def test_load_refuses_two_paths_with_one_name(tmp_path):
    Snapshot.take(tmp_path / "twice", {"model": StateDict({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})})
    with pytest.raises(RestoreError, match=r"would both be named 'a\.b'"):
        snapshot.load(tmp_path / "twice")


def test_load_finds_damage_unless_verify_is_false(tmp_path):
    Snapshot.take(tmp_path / "taken", {"model": StateDict(w=torch.zeros(300_000))})
    (file,) = (tmp_path / "taken" / "data").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match="digest"):
        snapshot.load(tmp_path / "taken")
    assert snapshot.load(tmp_path / "taken", parts={"w": slice(0, 10)})["w"].eq(0).all()
    assert snapshot.load(tmp_path / "taken", verify=False)["w"].count_nonzero() == 1
    file.write_bytes(content[:-4])
    with pytest.raises(CorruptSnapshotError):
        snapshot.load(tmp_path / "taken", verify=False)


class Odd:
    pass


def test_load_of_objects_needs_allow_pickle(tmp_path):
    torch.save({"w": torch.ones(3), "odd": Odd()}, tmp_path / "w.pt")
    expect_equal(snapshot.load(tmp_path / "w.pt"), {"w": torch.ones(3)}, ordered=False)
    expect_equal(snapshot.load(Snapshot(tmp_path / "w.pt", allow_pickle=True)), {"w": torch.ones(3)}, ordered=False)


def test_load_progress_counts_all_bytes(sources):
    seen = []
    snapshot.load(sources / "taken", progress=seen.append)
    assert seen[-1].done == seen[-1].total > 0


def slices(size):
    return st.integers(0, size).flatmap(lambda low: st.integers(low, size).map(lambda high: slice(low, high)))


@given(st.data())
def test_load_any_box_of_any_format_equals_indexing(sources, data):
    name = data.draw(st.sampled_from(FORMATS))
    plan = {}
    for tensor, held in WEIGHTS.items():
        count = data.draw(st.integers(0, held.ndim))
        plan[tensor] = tuple(
            data.draw(slices(size) if size == 0 else st.one_of(slices(size), st.integers(-size, size - 1)))
            for size in held.shape[:count]
        )
    dtype = data.draw(st.sampled_from([None, torch.float64]))
    expected = {
        tensor: held[plan[tensor]].to(dtype if dtype and held.is_floating_point() else held.dtype)
        for tensor, held in WEIGHTS.items()
    }
    given = plan if data.draw(st.booleans()) else lambda tensor, shape: plan[tensor]
    expect_equal(
        snapshot.load(sources / name, parts=given, dtype=dtype, memory_budget_bytes=1 << 20), expected, ordered=False
    )


# Meshes


@pytest.fixture
def world():
    def start(rank, size):
        if dist.is_initialized():
            dist.destroy_process_group()
            clear_sharding_cache()
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()
        clear_sharding_cache()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("shape", "placed"),
    [
        ((8,), {"**.embed.*": Shard(0), "**.w1": [Shard(-1)]}),
        ((2, 4), {"**.embed.*": [Shard(1), Shard(0)], "**.w1": [Shard(0), Replicate()]}),
        ((4, 2), {"**.embed.*": [_StridedShard(0, split_factor=2), Shard(0)], "**.w1": [Shard(1), Shard(1)]}),
    ],
)
def test_load_on_a_mesh_reads_the_shards_of_each_rank(sources, world, name, shape, placed):
    weights = {each: WEIGHTS[each] for each in ("model.embed.weight", "model.experts.w1", "model.norm.weight")}
    if isinstance(placed["**.embed.*"], list) and type(placed["**.embed.*"][0]) is _StridedShard:
        plan_rows = slice(0, 696)  # divides evenly
        weights["model.embed.weight"] = weights["model.embed.weight"][plan_rows]
        save_file(weights, sources / "even.safetensors")
        name = "even.safetensors"
    for rank in range(8):
        world(rank, 8)
        mesh = init_device_mesh("cpu", shape)
        exclude = ["**/*scale", "**/*mask", "**/*empty"] if name != "even.safetensors" else []
        got = snapshot.load(sources / name, parts=(mesh, placed), exclude=exclude)
        assert got.keys() == weights.keys()
        for key, value in got.items():
            found = next((each for glob, each in placed.items() if glob.strip("*") in f".{key}"), None)
            given = [Replicate()] * mesh.ndim if found is None else [found] if isinstance(found, Shard) else found
            expected = distribute(weights[key], mesh, given)
            assert isinstance(value, DTensor)
            assert value.placements == expected.placements
            assert value.shape == expected.shape
            assert value.stride() == expected.stride()
            assert torch.equal(value.to_local(), expected.to_local()), (rank, key)


def test_load_placements_that_do_not_fit_raise(sources, world):
    world(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    with pytest.raises(RestoreError) as raised:
        snapshot.load(
            sources / "taken",
            parts=(mesh, {"model.scale": [Shard(0), Shard(0)], "model.mask": Shard(0), "**": [Shard(5)] * 2}),
        )
    assert len(raised.value.mismatches) == len(WEIGHTS)
    with pytest.raises(RestoreError, match="'none' matches no tensor"):
        snapshot.load(sources / "taken", parts=(mesh, {"none": Shard(0)}))
    with pytest.raises(ValueError, match="device must be of the mesh's type 'cpu', got 'meta'"):
        snapshot.load(sources / "taken", device="meta", parts=(mesh, {}))
    world(0, 6)
    mesh = init_device_mesh("cpu", (3, 2))
    save_file({"w": torch.arange(7)}, sources / "uneven.safetensors")
    with pytest.raises(RestoreError, match="ambiguous"):
        snapshot.load(sources / "uneven.safetensors", parts=(mesh, {"w": [_StridedShard(0, split_factor=2), Shard(0)]}))


def test_load_on_a_rank_outside_the_mesh_returns_no_data(sources, world):
    world(3, 4)
    mesh = DeviceMesh("cpu", [0, 1])
    got = snapshot.load(sources / "taken", parts=(mesh, {"**.weight": Shard(0)}))
    assert {each.to_local().numel() for each in got.values()} == {0}
    assert got["model.embed.weight"].shape == (700, 90)
