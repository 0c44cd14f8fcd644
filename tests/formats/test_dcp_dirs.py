"""Directories of torch.distributed.checkpoint, as torch's own writer leaves them: read as `dcp.load` reads them."""

import io
import itertools
import math
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from snapshot import CorruptSnapshotError, ModelState, RestoreOptions, Snapshot, StateDict, Target
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.testing import recording
from snapshot.transform.to_dcp import archive_object
from tests.helpers.foreign_states import DTYPES, of_dtype
from tests.helpers.states import bits, expect_equal
from tests.helpers.versions import ALONE


def save(state, folder, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), **options)


def load(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), **({} if dist.is_initialized() else ALONE))
    return state


def tensors():
    """Every dtype and layout that DCP can hold; short ones, and ones of more than a MiB."""
    torch.manual_seed(0)
    base, tied = torch.arange(700 * 600.0).view(700, 600), torch.randn(40, 3)
    return {
        "dtypes": {str(dtype): of_dtype(dtype, 3, 5) for dtype in DTYPES},
        "long": {str(dtype): of_dtype(dtype, 1100, 1024) for dtype in DTYPES[:4]},
        "views": {
            "turned": base.t(),
            "rows": base[10:500],
            "columns": base[:, 3:500],
            "steps": base[::3, ::2],
            "short": torch.arange(12.0).view(3, 4).t(),
            "expanded": torch.tensor([1.5, 2.5]).view(2, 1).expand(2, 6),
            "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "long_channels": torch.randn(8, 64, 32, 32).to(memory_format=torch.channels_last),
            "three": torch.randn(80, 70, 60).permute(2, 0, 1),
        },
        "tied": {"a": tied, "b": tied},
        "empty": torch.empty(0),
        "wide": torch.empty(3, 0, 2),
        "scalar": torch.tensor(2.5),
        "parameter": nn.Parameter(torch.randn(3)),
    }


def plain(value):
    """What DCP does not keep: whether a tensor needs a gradient, and is a parameter."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return value.detach() if isinstance(value, torch.Tensor) else value


OBJECTS = {
    "int": 7,
    "big": 1 << 80,
    "text": "é",
    "none": None,
    "tuple": (1, (2, "x")),
    "float": 2.5,
    "bytes": b"\0\xff",
    "flag": True,
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "scalar": np.float32(1.5),
    "rng": torch.get_rng_state(),
    "numpy": ("MT19937", np.random.RandomState(3).get_state()[1], 624, 0, 0.0),
    "set": {1, 2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dcp") / "c"
    save({"t": tensors(), "o": OBJECTS, "l": [1, {"x": torch.ones(2)}, [3]]}, folder, **ALONE)
    return folder


def test_dcp_tensors_of_every_dtype_and_layout_are_read(saved):
    snapshot = Snapshot(saved)
    expected = plain(tensors())
    found = snapshot.read_object("0/t")
    expect_equal(found, expected)
    assert snapshot.metadata.format == "dcp"
    other = load({"t": {"views": {name: torch.zeros(each.shape) for name, each in expected["views"].items()}}}, saved)
    for name, view in other["t"]["views"].items():
        assert torch.equal(view, found["views"][name]), name
    live = StateDict(load_like(expected))
    snapshot.restore({"t": live, "o": StateDict(), "l": StateDict()}, select=["t/**"])
    expect_equal(dict(live), expected)
    assert snapshot.verify()


def load_like(value):
    if isinstance(value, dict):
        return {key: load_like(each) for key, each in value.items()}
    return torch.zeros_like(value)


def test_dcp_read_object_box_reads_a_part(saved):
    snapshot = Snapshot(saved)
    for name, view in tensors()["views"].items():
        box = [slice(size // 3, size - size // 4) for size in view.shape]
        assert bits(snapshot.read_object(f"0/t/views/{name}", box=box)) == bits(view[tuple(box)]), name
    out = torch.zeros(1024, 1100).t()
    expect_equal(snapshot.read_object("0/t/long/torch.float32", out), tensors()["long"]["torch.float32"])


def test_dcp_objects_are_read_without_running_a_pickle(saved):
    snapshot = Snapshot(saved)
    expect_equal(snapshot.read_object("0/o"), OBJECTS)
    live = StateDict(dict.fromkeys(OBJECTS) | {"set": OBJECTS["set"]})
    snapshot.restore({"o": live})
    expect_equal(dict(live), OBJECTS)
    expect_equal(snapshot.read_object("0/l"), [1, {"x": torch.ones(2)}, [3]])


class Odd:
    pass


def test_dcp_objects_that_need_a_pickle_are_refused_before_restore_changes_anything(tmp_path):
    save({"m": {"w": torch.ones(2), "odd": Odd()}}, tmp_path / "c", **ALONE)
    live = StateDict(w=torch.zeros(2), odd=None)
    with pytest.raises(UnsafeObjectError):
        Snapshot(tmp_path / "c").restore({"m": live})
    assert not live["w"].any()
    Snapshot(tmp_path / "c").restore({"m": live}, options=RestoreOptions(exclude=["m/odd"]))
    assert live["w"].all()


def test_dcp_names_with_dots_slashes_and_empty_keys(tmp_path):
    state = {"a": {"x.y": torch.ones(1), "p/q": torch.zeros(1), "%": 3, "é": 4, "": 5}, "b.c": torch.full((2,), 7.0)}
    save(state, tmp_path / "c", **ALONE)
    expect_equal(Snapshot(tmp_path / "c").read_object("0"), state)


@pytest.mark.parametrize("planner", [{}, None], ids=["empty", "none"])
def test_dcp_without_planner_data_has_flat_names(tmp_path, planner):
    save({"model": {"w": torch.ones(2)}, "step": 3, "l": [4, torch.zeros(1)]}, tmp_path / "c", **ALONE)
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = planner
    file.write_bytes(pickle.dumps(metadata))
    snapshot = Snapshot(tmp_path / "c")
    flat = {"model.w": torch.ones(2), "step": 3, "l.0": 4, "l.1": torch.zeros(1)}
    expect_equal(snapshot.read_object("0"), {name: flat[name] for name in metadata.state_dict_metadata})
    live = StateDict({"model.w": torch.zeros(2), "step": 0, "l.0": 0, "l.1": torch.ones(1)})
    snapshot.restore({"all": live})
    assert live["model.w"].all()


def trained(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_dcp_restores_into_modules_and_model_state(tmp_path):
    model, optimizer = trained()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "plain", **ALONE)
    fresh, again = trained(1)
    Snapshot(tmp_path / "plain").restore({"model": fresh, "optimizer": again})
    expect_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    expect_equal(again.state_dict(), optimizer.state_dict())
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    save({"train": states}, tmp_path / "names", **ALONE)
    fresh, again = trained(1)
    Snapshot(tmp_path / "names").restore({"train": ModelState(fresh, again)})
    expect_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    expect_equal(again.state_dict()["state"], optimizer.state_dict()["state"])


def compressed(state, folder):
    ZStandard = pytest.importorskip("torch.distributed.checkpoint._extension").ZStandard  # since torch 2.7

    save(state, folder, **ALONE, storage_writer=dcp.FileSystemWriter(str(folder), _extensions=[ZStandard()]))


def test_dcp_compressed_items_are_read(tmp_path):
    pytest.importorskip("zstandard")
    torch.manual_seed(0)
    state = {
        "m": {
            "short": torch.ones(10),
            "long": torch.randint(0, 9, (600, 700)),
            "turned": torch.randint(0, 9, (600, 700)).t(),
            "zeros": torch.zeros(1 << 20),
            "scalar": torch.tensor(3),
            "n": 3,
            "text": "x" * 1000,
        }
    }
    compressed(state, tmp_path / "c")
    snapshot = Snapshot(tmp_path / "c")
    assert "zstd" in snapshot.get_manifest()["0/m/long"].serializer
    expect_equal(snapshot.read_object("0/m"), state["m"])
    assert torch.equal(snapshot.read_object("0/m/turned", box=[slice(3, 9), 599]), state["m"]["turned"][3:9, 599])
    live = StateDict(load_like({name: each for name, each in state["m"].items() if isinstance(each, torch.Tensor)}))
    snapshot.restore({"m": live}, strict=False, options=RestoreOptions(memory_budget_bytes=4 << 20))
    expect_equal(dict(live), {name: state["m"][name] for name in live})
    assert snapshot.verify()


WITHOUT = """
import sys
sys.modules["zstandard"] = None
from snapshot import Snapshot
from snapshot.errors import MissingExtraError
try:
    Snapshot(sys.argv[1]).read_object("0/m/w")
except MissingExtraError as error:
    assert "install the extra" in str(error), error
    print("missing")
"""


def test_dcp_compressed_without_zstandard_names_what_to_install(tmp_path, warm):
    pytest.importorskip("zstandard")
    compressed({"m": {"w": torch.ones(10)}}, tmp_path / "c")
    assert "missing" in warm.run(WITHOUT, tmp_path / "c")


def test_dcp_common_pt_of_older_megatron_is_read(tmp_path):
    save({"model.w": torch.ones(4)}, tmp_path / "c", **ALONE)
    torch.save({"iteration": 7, "args": {"lr": 0.5}, "rng": torch.arange(3)}, tmp_path / "c" / "common.pt")
    expect_equal(
        Snapshot(tmp_path / "c").read_object("0"),
        {"model.w": torch.ones(4), "iteration": 7, "args": {"lr": 0.5}, "rng": torch.arange(3)},
    )


def test_dcp_listing_and_a_row_read_few_bytes(tmp_path):
    big = torch.arange(16 << 20, dtype=torch.float32).view(4096, 4096)
    save({"m": {"w": big, "v": torch.ones(1000), "n": 3}}, tmp_path / "c", **ALONE)
    torch.save({"m": {"w": big, "v": torch.ones(1000)}}, tmp_path / "x.pt")
    for path, metadata in ((tmp_path / "c", (tmp_path / "c" / ".metadata").stat().st_size), (tmp_path / "x.pt", 0)):
        with recording() as log:
            snapshot = Snapshot(f"recording+file://{path}")
            assert snapshot.get_manifest()["0/m/w"].shape == (4096, 4096)
        assert sum(map(log.nbytes, ("read_into", "get"))) < metadata + (1 << 20)
        with recording() as log:
            assert torch.equal(Snapshot(f"recording+file://{path}").read_object("0/m/w", box=[77]), big[77])
        assert sum(map(log.nbytes, ("read_into", "get"))) < metadata + (1 << 20)
        with recording() as log:
            assert Snapshot(f"recording+file://{path}").verify()
        assert sum(map(log.nbytes, ("read_into", "get"))) > 64 << 20


# Ranks


def spread(tensor, placements, mesh=(2,)):
    return distribute_tensor(tensor, init_device_mesh("cpu", mesh, mesh_dim_names=("x", "y")[: len(mesh)]), placements)


def wholes():
    torch.manual_seed(0)
    return {"rows": torch.randn(7, 6), "columns": torch.randn(5, 9), "both": torch.randn(6, 8), "same": torch.randn(4),
            "long": torch.randn(900, 1000), "tall": torch.randn(1, 3)}  # fmt: skip


def layouts(blank=False, other=False):
    held = {name: torch.zeros_like(each) if blank else each for name, each in wholes().items()}
    a, b = ([Shard(1)], [Shard(0)]) if other else ([Shard(0)], [Shard(1)])
    return {
        "rows": spread(held["rows"], a),
        "columns": spread(held["columns"], b),
        "both": spread(held["both"], [Shard(1), Shard(0)] if other else [Shard(0), Shard(1)], (1, 2)),
        "same": spread(held["same"], [Replicate()]),
        "long": spread(held["long"], a),
        "tall": spread(held["tall"], a),
    }


def _write(folder):
    model, optimizer = trained()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    train = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    save({"s": layouts(), "train": train, "own": {f"rank{dist.get_rank()}": dist.get_rank()}}, folder)
    full = {name: each.full_tensor() for name, each in model.state_dict().items()}
    return full, {name: each.full_tensor() for name, each in ((n, p) for n, p in model.named_parameters())}


def _read(folder):
    live = StateDict(layouts(blank=True, other=True))
    Snapshot(folder).restore({"s": live})
    for name, whole in wholes().items():
        assert torch.equal(live[name].full_tensor(), whole), name
    model, _ = trained(1)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    Snapshot(folder).restore({"train": ModelState(model, optimizer)})
    assert optimizer.param_groups[0]["lr"] == 0.1
    return {name: each.full_tensor() for name, each in model.state_dict().items()}


def test_dcp_shards_of_two_ranks_restore_into_another_placement(two, tmp_path):
    folder = str(tmp_path / "c")
    expected, _ = two.run(_write, folder)[0]
    assert any(name.startswith("__1_") for name in os.listdir(folder))
    for found in two.run(_read, folder):
        expect_equal(found, expected)
    snapshot = Snapshot(folder)
    assert len(snapshot.get_manifest()["0/s/rows"].pieces()) == 2
    expect_equal(dict(sorted(snapshot.read_object("0/s").items())), dict(sorted(wholes().items())))
    assert torch.equal(snapshot.read_object("0/s/both", box=[slice(2, 5), slice(3, 6)]), wholes()["both"][2:5, 3:6])
    assert torch.equal(snapshot.read_object("0/s/long", box=[slice(440, 460)]), wholes()["long"][440:460])
    assert snapshot.read_object("0/own") == {"rank0": 0, "rank1": 1}
    model, optimizer = trained(1)
    snapshot.restore({"train": ModelState(model, optimizer)})
    expect_equal({name: each.detach() for name, each in model.state_dict().items()}, expected)
    live = StateDict({name: torch.zeros_like(each) for name, each in wholes().items()})
    snapshot.restore({"s": live})
    expect_equal(dict(sorted(live.items())), dict(sorted(wholes().items())))
    assert snapshot.verify()


def test_dcp_directory_of_megatron_is_read(two, tmp_path):
    pytest.importorskip("megatron")
    from tests.helpers.megatron_dirs import write_directory

    assert ".metadata" in two.run(write_directory, str(tmp_path / "m"), timeout=300)[0]
    snapshot = Snapshot(tmp_path / "m")
    found = snapshot.get_manifest()
    assert snapshot.metadata.format == "dcp"
    assert any("embedding.weight" in path for path in found)
    assert snapshot.verify()


def test_dcp_archive_of_an_older_torch_without_alignment_is_read(tmp_path):
    """Headers of other lengths than today's: where the bytes begin is looked up, and not known."""
    import zipfile

    save({"m": {"w": torch.arange(400_000.0), "v": torch.arange(5.0)}}, tmp_path / "c", **ALONE)
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    content, made = (tmp_path / "c" / "__0_0.distcp").read_bytes(), io.BytesIO()
    for info in metadata.storage_data.values():
        archive = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(content[info.offset : info.offset + info.length])) as old,
            zipfile.ZipFile(archive, "w") as new,
        ):
            for member in old.infolist():
                new.writestr(member.filename, old.read(member))
        info.offset, info.length = made.tell(), len(archive.getvalue())
        made.write(archive.getvalue())
    file.write_bytes(pickle.dumps(metadata))
    (tmp_path / "c" / "__0_0.distcp").write_bytes(made.getvalue())
    expect_equal(Snapshot(tmp_path / "c").read_object("0/m"), {"w": torch.arange(400_000.0), "v": torch.arange(5.0)})


def _write_flat_ranges(folder, tensors, transform=lambda data: data, descriptors=None):
    """Write a directory as Megatron-core did with its distributed optimizer, until version 0.15.

    `tensors`: name -> (tensor, parts of each dimension, ends of the runs in each part).
    """
    described, stored, shapes, written = {}, {}, {}, bytearray()
    for name, (whole, parts, ends) in tensors.items():
        sizes = [size // part for size, part in zip(whole.shape, parts, strict=True)]
        chunks = []
        for place in itertools.product(*map(range, parts)):
            index = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, sizes, strict=True))
            flat = whole[index].reshape(-1)
            for begin, end in itertools.pairwise([0, *ends, flat.numel()]):
                run = flat[begin:end].clone().view(*[1] * len(parts), -1)
                data = transform(archive_object(run))
                offsets = torch.Size([*place, begin])
                chunks.append(m.ChunkStorageMetadata(offsets=offsets, sizes=run.shape))
                where = _StorageInfo("__0_0.distcp", len(written), len(data))
                if descriptors:
                    where.transform_descriptors = descriptors
                stored[m.MetadataIndex(name, offsets)] = where
                written += data
        size = torch.Size([*parts, math.prod(sizes)])
        properties = m.TensorProperties(dtype=whole.dtype)
        described[name] = m.TensorStorageMetadata(properties=properties, size=size, chunks=chunks)
        shapes[name] = {"nd_reformulated_orig_global_shape": tuple(whole.shape)}
    metadata = m.Metadata(described, planner_data={name: (name,) for name in tensors}, storage_data=stored)
    metadata.mcore_data = shapes
    (folder / "__0_0.distcp").write_bytes(written)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("packed", [False, True])
def test_dcp_flat_ranges_of_the_megatron_optimizer_form_a_shaped_tensor(tmp_path, packed):
    transform, descriptors = (lambda data: data), None
    if packed:
        zstandard = pytest.importorskip("zstandard")
        transform, descriptors = zstandard.ZstdCompressor().compress, ["stream.zstd"]
    tensors = {
        "exp_avg": (torch.arange(48.0).view(4, 12), (2, 3), [3, 5]),
        "layers": (torch.arange(60, dtype=torch.bfloat16).view(2, 5, 6), (2, 1, 2), [1, 14]),
        "bias": (torch.arange(7.0), (1,), [2]),
    }
    _write_flat_ranges(tmp_path, tensors, transform, descriptors)
    snapshot = Snapshot(tmp_path)
    for name, (whole, *_) in tensors.items():
        assert snapshot.get_manifest()[f"0/{name}"].shape == tuple(whole.shape)
        assert torch.equal(snapshot.read_object(f"0/{name}"), whole)
    assert torch.equal(
        snapshot.read_object("0/exp_avg", box=[slice(1, 3), slice(3, 9)]), tensors["exp_avg"][0][1:3, 3:9]
    )
    live = StateDict({name: torch.full_like(whole, -1) for name, (whole, *_) in tensors.items()})
    snapshot.restore({"all": live})
    assert all(torch.equal(live[name], whole) for name, (whole, *_) in tensors.items())
    assert snapshot.verify()
    snapshot.convert(tmp_path / "x.safetensors")
    assert torch.equal(Snapshot(tmp_path / "x.safetensors").read_object("0/layers"), tensors["layers"][0])


@pytest.mark.parametrize("shape", [(4, 13), (4,), (4, 6), (0, 12)])
def test_dcp_flat_ranges_of_another_shape_are_refused(tmp_path, shape):
    _write_flat_ranges(tmp_path, {"x": (torch.arange(48.0).view(4, 12), (2, 3), [3])})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.mcore_data["x"]["nd_reformulated_orig_global_shape"] = shape
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptSnapshotError, match="flat ranges of"):
        Snapshot(tmp_path).get_manifest()


@pytest.mark.parametrize("count", [1, 3])
def test_dcp_safetensors_serialization_is_unsupported_and_not_corrupt(tmp_path, count):
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    state = {f"t{at}": torch.arange(6.0) + at for at in range(count)}
    writer = dcp.FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=writer, no_dist=True)
    with pytest.raises(UnsupportedFormatError, match=r"SAFETENSORS, .* __0_0\.distcp is a file of safetensors"):
        Snapshot(tmp_path).get_manifest()


class _SixFields(m.TensorProperties):
    """The properties of torch 2.15, which pickles the strides, too."""

    def __getstate__(self):
        return (*super().__getstate__()[:5], (1,))


def test_dcp_metadata_has_the_fields_that_every_torch_reads(tmp_path, monkeypatch):
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.arange(6.0))})
    monkeypatch.setattr(m, "TensorProperties", _SixFields)
    Snapshot(tmp_path / "s").convert(Target(tmp_path / "dcp", "dcp"))
    monkeypatch.undo()
    data = (tmp_path / "dcp" / ".metadata").read_bytes()
    states = []

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            if name != "_SixFields":
                return super().find_class(module, name)
            return type("Properties", (), {"__setstate__": lambda self, state: states.append(state)})

    Reader(io.BytesIO(data)).load()
    assert [len(state) for state in states] == [5]
