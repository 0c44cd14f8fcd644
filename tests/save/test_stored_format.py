"""What lies on storage: plain safetensors, plain JSON, no file of anybody else's naming, and nothing wasted."""

import itertools
import json
import os
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from snapshot import CorruptSnapshotError, Snapshot, StateDict
from snapshot.manifest import document as documents
from snapshot.tensors.memory import BY_NAME, SAFETENSORS

ALL_FILES = re.compile(r"\.snapshot_metadata|data/[0-9a-z]+-\d+-\d+\.(safetensors|bin)|data/[0-9a-z]+-\d+\.json")


def files(path):
    return sorted(os.path.relpath(os.path.join(f, n), path) for f, _, names in os.walk(path) for n in names)


def test_data_files_are_plain_safetensors(tmp_path):
    tensors = {
        f"{name}": torch.zeros(3, 5, dtype=torch.uint8).view(-1)[: 3 * BY_NAME[name].itemsize].view(BY_NAME[name])
        if name != "float64"
        else torch.randn(7, 3, dtype=torch.float64).t()
        for name in SAFETENSORS
        if BY_NAME[name].itemsize <= 4 or name == "float64"
    }
    tensors |= {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    tensors |= {
        "complex": torch.randn(3, dtype=torch.complex128),
        "with [bracket]": torch.ones(2),
        "__metadata__": torch.ones(1),
    }
    Snapshot.take(tmp_path, {"s": StateDict(**tensors), "__metadata__": StateDict()})
    (location,) = [name for name in files(tmp_path) if name.endswith(".safetensors")]
    loaded = load_file(tmp_path / location)
    for name, tensor in tensors.items():
        if name == "complex":
            assert loaded["s/complex"].dtype == torch.uint8
            assert loaded["s/complex"].view(-1).view(torch.complex128).equal(tensor)
            continue
        stored = loaded["s/" + name.replace("[", "%5B")]
        assert stored.dtype == tensor.dtype
        assert stored.shape == tensor.shape
        if stored.numel() and stored.dtype.itemsize > 1:
            assert torch.equal(stored.contiguous(), tensor.contiguous())
    with open(tmp_path / location, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert (8 + length) % 4096 == 0
    ranges = sorted(item["data_offsets"] for name, item in header.items() if name != "__metadata__")
    assert ranges[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    assert 8 + length + ranges[-1][1] == os.path.getsize(tmp_path / location)


def test_data_files_align_every_tensor_to_its_dtype(tmp_path):
    tensors = {f"{name}{i}": torch.zeros(i, dtype=BY_NAME[name]) for name in SAFETENSORS for i in (1, 3)}
    Snapshot.take(tmp_path, {"s": StateDict(**tensors)})
    for entry in Snapshot(tmp_path).get_manifest().values():
        if hasattr(entry, "byte_range"):
            assert entry.byte_range[0] % BY_NAME[entry.dtype].itemsize == 0


def test_data_files_of_a_split_tensor_are_read_by_the_safetensors_library(tmp_path, monkeypatch):
    from snapshot.plan import layout

    monkeypatch.setattr(layout, "LARGEST_FILE", 4000)
    tensor = torch.randn(50, 40)
    Snapshot.take(tmp_path, {"s": StateDict(w=tensor)})
    found = {}
    for name in files(tmp_path):
        if name.endswith(".safetensors"):
            with safe_open(tmp_path / name, "pt") as file:
                found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    assert len(found) > 1
    for name, box in found.items():
        path, rows, columns = re.fullmatch(r"(.*)\[(\d+:\d+),(\d+:\d+)\]", name).groups()
        assert path == "s/w"
        rows, columns = (slice(*map(int, each.split(":"))) for each in (rows, columns))
        assert torch.equal(box, tensor[rows, columns])


hostile = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    [
        "..",
        "../../etc/passwd",
        "/",
        "a" * 300,
        "🎉" * 100,
        "²",
        "con",
        "a\0b",
        "data",
        ".snapshot_metadata",
        "w[0:1]",
        "",
    ]
)


@pytest.mark.filterwarnings("ignore:app_state is empty")
@settings(max_examples=40, deadline=None)
@given(st.dictionaries(hostile, st.dictionaries(hostile, st.just(torch.ones(2)), max_size=3), max_size=3))
def test_data_file_names_do_not_depend_on_keys(tmp_path_factory, app):
    path = tmp_path_factory.mktemp("names")
    state = {key: StateDict(value) for key, value in app.items()}
    Snapshot.take(path / "s", state)
    assert all(ALL_FILES.fullmatch(name) and len(name) < 100 for name in files(path / "s"))
    assert files(path) == [f"s/{name}" for name in files(path / "s")]
    live = {key: StateDict() for key in app}
    Snapshot(path / "s").restore(live)
    assert {key: sorted(value) for key, value in live.items()} == {key: sorted(value) for key, value in app.items()}


def test_manifest_stores_none_tuples_and_ints_without_data_files(tmp_path):
    Snapshot.take(tmp_path, {"s": StateDict(**{f"k{i}": (i, None, True) for i in range(1000)})})
    assert files(tmp_path) == [".snapshot_metadata"]
    assert os.path.getsize(tmp_path / ".snapshot_metadata") < 1000 * 4 * 100


def test_manifest_size_per_entry_is_bounded(tmp_path):
    def size(count, numel):
        path = tmp_path / f"{count}-{numel}"
        name = "layers.{}.attention.weight"
        Snapshot.take(path, {"model": StateDict(**{name.format(i): torch.zeros(numel, 1) for i in range(count)})})
        return os.path.getsize(path / ".snapshot_metadata")

    assert (size(300, 1000) - size(100, 1000)) / 200 <= 250
    assert (size(30, 70_000) - size(10, 70_000)) / 20 <= 330


def test_manifest_that_is_large_is_stored_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "IN_ONE", 50)
    state = {"s": StateDict(**{f"k{i}": torch.full((2,), i) for i in range(100)})}
    snapshot = Snapshot.take(tmp_path, state, replicated=["s/k7"])
    (part,) = [name for name in files(tmp_path) if name.endswith(".json")]
    root = json.loads((tmp_path / ".snapshot_metadata").read_bytes())
    assert list(root["manifest"]) == ["0/s/k7"]
    assert len(snapshot.get_manifest()) == 101
    live = {"s": StateDict(**{f"k{i}": torch.zeros(2, dtype=torch.int64) for i in range(100)})}
    snapshot.restore(live)
    assert all(live["s"][f"k{i}"].eq(i).all() for i in range(100))
    content = (tmp_path / part).read_bytes()
    for damaged in (content[:-1], content.replace(b"k5", b"k6"), b""):
        (tmp_path / part).write_bytes(damaged)
        with pytest.raises(ValueError, match=part):
            Snapshot(tmp_path).get_manifest()
    (tmp_path / part).unlink()
    with pytest.raises(ValueError, match="part of the manifest is missing"):
        Snapshot(tmp_path).restore(live)


def test_torchsnapshot_manifest_is_distinguished_from_damage(tmp_path):
    written = json.dumps({"version": "0.1.0", "world_size": 1, "manifest": {}}, indent=2)
    (tmp_path / ".snapshot_metadata").write_text(written)
    assert Snapshot(tmp_path).get_manifest() == {}
    (tmp_path / ".snapshot_metadata").write_text(written[:-2])
    with pytest.raises(CorruptSnapshotError, match="not a manifest"):
        Snapshot(tmp_path).get_manifest()


def test_take_files_have_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3), t="é" * 20_000)})
    finally:
        os.umask(old)
    for name in files(tmp_path / "s"):
        assert (tmp_path / "s" / name).stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o750


def test_data_files_of_numpy_arrays_are_readable_safetensors(tmp_path):
    Snapshot.take(tmp_path, {"s": StateDict(a=np.arange(6.0).reshape(2, 3))})
    (location,) = [name for name in files(tmp_path) if name.endswith(".safetensors")]
    assert torch.equal(load_file(tmp_path / location)["s/a"], torch.arange(6.0, dtype=torch.float64).view(2, 3))
