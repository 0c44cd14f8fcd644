"""Files of safetensors, alone and in Hugging Face's layout."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from snapshot import CorruptSnapshotError, RestoreError, Snapshot, StateDict
from snapshot.errors import UnsupportedFormatError
from snapshot.tensors.memory import SAFETENSORS
from tests.helpers.foreign_states import DTYPES, of_dtype
from tests.helpers.states import expect_equal

KNOWN = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.") in SAFETENSORS]


def tensors():
    found = {f"layer.{dtype}": of_dtype(dtype, 4, 3) for dtype in KNOWN}
    return found | {
        "a/b%[0]": torch.ones(2),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.0),
        "é": torch.zeros(1),
    }


def test_safetensors_file_is_recognised_by_its_content(tmp_path):
    save_file(tensors(), tmp_path / "weights.bin", metadata={"format": "pt", "note": "x"})
    snapshot = Snapshot(tmp_path / "weights.bin")
    expect_equal(dict(sorted(snapshot.read_object("0").items())), dict(sorted(tensors().items())))
    assert snapshot.metadata.metadata == {"format": "pt", "note": "x"}
    assert snapshot.get_manifest()["0/a%2Fb%25[0]"].shape == (2,)
    report = snapshot.verify()
    assert report
    assert report.unverifiable == len(tensors())
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    assert Snapshot(folder).read_object("0/w").all()


def test_safetensors_files_with_an_index_are_one_checkpoint(tmp_path):
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    state = model.state_dict()
    names = list(state)
    files = {"model-00001-of-00002.safetensors": names[:3], "model-00002-of-00002.safetensors": names[3:]}
    for file, chosen in files.items():
        save_file({name: state[name] for name in chosen}, tmp_path / file)
    index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, chosen in files.items() for n in chosen}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    other = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3))
    for place in (tmp_path, tmp_path / "model.safetensors.index.json"):
        for each in other.parameters():
            each.data.zero_()
        Snapshot(place).restore({"model": other})
        expect_equal(dict(other.state_dict()), dict(state))
    with pytest.raises(RestoreError, match="is in the snapshot, not in the application"):
        Snapshot(tmp_path).restore({"model": nn.Sequential(nn.Linear(6, 5))})
    assert Snapshot(tmp_path).restore({"model": nn.Sequential(nn.Linear(6, 5))}, strict=False).unexpected
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"refers to model-00002.* which is missing"):
        Snapshot(tmp_path).get_manifest()


def test_safetensors_files_with_equal_names_and_no_index_are_refused(tmp_path):
    for name in ("a", "b"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UnsupportedFormatError, match="no index"):
        Snapshot(tmp_path).get_manifest()


def written(header, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BAD = {
    "hole": ({"a": GOOD, "b": {**GOOD, "data_offsets": [12, 20]}}, 20),
    "overlap": ({"a": GOOD, "b": {**GOOD, "data_offsets": [4, 12]}}, 12),
    "behind": ({"a": GOOD}, 12),
    "short": ({"a": GOOD}, 4),
    "shape": ({"a": {**GOOD, "shape": [3]}}, 8),
    "negative": ({"a": {**GOOD, "shape": [-1, -2]}}, 8),
    "backwards": ({"a": {**GOOD, "shape": [0], "data_offsets": [8, 0]}}, 8),
    "huge": ({"a": {**GOOD, "shape": [1 << 40, 1 << 40]}}, 8),
    "float": ({"a": {**GOOD, "shape": [2.0]}}, 8),
    "list": ([GOOD], 8),
    "deep": (b"[" * 100_000, 8),
    "metadata": ({"__metadata__": {"a": 1}, "a": GOOD}, 8),
}


@pytest.mark.parametrize("what", BAD)
def test_safetensors_inconsistent_header_is_refused(tmp_path, what):
    header, length = BAD[what]
    (tmp_path / "x").write_bytes(written(header, bytes(length)))
    with pytest.raises((CorruptSnapshotError, UnsupportedFormatError)):
        Snapshot(tmp_path / "x").get_manifest()


def test_safetensors_unknown_dtype_is_named(tmp_path):
    (tmp_path / "x").write_bytes(written({"a": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}, bytes(3)))
    with pytest.raises(UnsupportedFormatError, match="F3"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/passwd", "a/../b", "s3://b/x", 3])
def test_safetensors_index_cannot_name_files_outside_the_folder(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises((CorruptSnapshotError, FileNotFoundError)):
        Snapshot(tmp_path).get_manifest()


def test_safetensors_every_verb_works_in_memory():
    from safetensors.torch import save

    from snapshot.io.loop import run
    from snapshot.io.registry import open_storage
    from snapshot.io.storage import URL, Context

    storage = open_storage(URL.parse("memory://formats/one"), {}, Context())
    run(storage.put("w.safetensors", save({"w": torch.arange(6.0).view(2, 3)})))
    snapshot = Snapshot("memory://formats/one/w.safetensors")
    assert torch.equal(snapshot.read_object("0/w", box=[1]), torch.tensor([3.0, 4.0, 5.0]))
    live = StateDict(w=torch.zeros(2, 3))
    snapshot.restore({"s": live})
    assert live["w"].sum() == 15


@pytest.mark.parametrize("length", [640, 896, 1152, 1408, 640 + (1 << 16)])
def test_safetensors_header_length_that_looks_like_a_pickle_is_read(length, tmp_path):
    """The first two bytes of such a file are those of a pickle."""
    base = {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "__metadata__": {"x": ""}}
    base["__metadata__"]["x"] = "y" * (length - len(json.dumps(base)))
    header = json.dumps(base).encode()
    assert len(header) == length
    (tmp_path / "s.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert torch.equal(Snapshot(tmp_path / "s.safetensors").read_object("w"), torch.zeros(4))
