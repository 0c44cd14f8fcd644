"""A store that is hostile: nothing is written outside the folder, and nothing grows without a limit."""

import json
import os
import struct
import zlib

import pytest
import torch
import zstandard
from safetensors.torch import load_file

from snapshot import CorruptSnapshotError, StorageError
from snapshot.errors import UnsupportedFormatError
from snapshot_publish import Publisher, Subscriber
from snapshot_publish.build import DeltaDecoder
from snapshot_publish.store import decode_index

CONTRACT = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}


def write_index(store, version, weight_map, metadata):
    folder = store / f"weight_v{version:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def write_delta(store, version, base, payload, *, checksum="00000000", dtype="U8", name="weight", **metadata):
    folder = write_index(
        store,
        version,
        {name: "x.safetensors"},
        {"version": f"{version:06d}", "base_version": f"{base:06d}", **CONTRACT, **metadata},
    )
    header = {"__metadata__": {name: checksum}}
    size = len(payload) // {"U8": 1, "F32": 4}[dtype]
    header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [0, len(payload)]}
    text = json.dumps(header).encode()
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + payload)


@pytest.fixture
def store(tmp_path):
    Publisher(tmp_path / "store").publish(1, {"weight": torch.zeros(100)}).wait()
    return tmp_path / "store"


def pull_all(store, tmp_path, version):
    """Pull a version; nothing else may appear beside the local folder."""
    before = sorted({*os.listdir(tmp_path)} - {"local"})
    local = tmp_path / "local"
    try:
        return Subscriber(store, local).pull(version=version)
    finally:
        assert sorted(set(os.listdir(tmp_path)) - {"local"}) == before
        assert not [name for name in os.listdir(local) if name.startswith(".pull-")]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x", "a/b.safetensors", ".hidden", "", "..", "a\\b", "a\0b", "é" * 150]
)
def test_pull_refuses_file_names_outside_of_the_folder(store, tmp_path, name):
    write_index(store, 2, {"weight": name}, {"total_size": 1})
    with pytest.raises(CorruptSnapshotError, match="must be a plain name inside the folder"):
        pull_all(store, tmp_path, 2)


def test_pull_refuses_names_of_further_files_outside_of_the_folder(store, tmp_path):
    index = json.loads((store / "weight_v000001" / "model.safetensors.index.json").read_text())
    own = json.loads(index["metadata"]["snapshot"])
    for name in ("../../evil", "model.safetensors.index.json", next(iter(index["weight_map"].values()))):
        own["files"] = {name: [1, "xxh3:00"]}
        write_index(store, 1, index["weight_map"], {"snapshot": json.dumps(own)})
        with pytest.raises(CorruptSnapshotError, match=r"plain name|names the file"):
            pull_all(store, tmp_path, 1)


@pytest.mark.parametrize("base", [2, 3, 999999])
def test_pull_refuses_a_delta_chain_that_does_not_go_back(store, tmp_path, base):
    write_delta(store, 2, base, b"")
    with pytest.raises(CorruptSnapshotError, match="base_version must be below 2"):
        pull_all(store, tmp_path, 2)


def test_pull_refuses_a_delta_whose_base_is_missing(store, tmp_path):
    write_delta(store, 9, 7, b"")
    with pytest.raises(CorruptSnapshotError, match="weight_v000007"):
        pull_all(store, tmp_path, 9)


@pytest.mark.parametrize(
    ("payload", "options", "message"),
    [
        (zstandard.compress(bytes(1 << 30)), {}, r"not longer, got uint8|must have 400 bytes"),
        (zstandard.compress(bytes(399)), {}, "must have 400 bytes, got 399"),
        (zstandard.compress(bytes(400)), {"checksum": "12345678"}, "its checksum must be 12345678"),
        (zstandard.compress(bytes(400)), {"checksum": "no number"}, "no valid checksum"),
        (zstandard.compress(bytes(400)), {"name": "other"}, "'other' is missing in the base"),
        (bytes(5000), {}, "must be U8 and not longer"),
        (bytes(400), {"dtype": "F32"}, "must be U8 and not longer"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), {}, r"zstd frame|decompress|ends before"),
    ],
)
def test_pull_refuses_deltas_that_do_not_fit(store, tmp_path, payload, options, message):
    write_delta(store, 2, 1, payload, **options)
    with pytest.raises(CorruptSnapshotError, match=message):
        pull_all(store, tmp_path, 2)


def test_pull_applies_a_delta_of_another_publisher(store, tmp_path):
    """One without our digests, with a checksum alone."""
    new = torch.arange(100.0)
    content = new.view(torch.uint8).numpy().tobytes()
    write_delta(store, 2, 1, zstandard.compress(content, 3), checksum=f"{zlib.adler32(content):08x}")
    folder = pull_all(store, tmp_path, 2)
    [file] = folder.glob("*.safetensors")
    assert torch.equal(load_file(file)["weight"], new)


@pytest.mark.parametrize("key", CONTRACT)
def test_pull_refuses_unknown_delta_encodings(store, tmp_path, key):
    write_delta(store, 2, 1, b"", **{key: "other"})
    with pytest.raises(CorruptSnapshotError, match=f"{key} must be '{CONTRACT[key]}', got 'other'"):
        pull_all(store, tmp_path, 2)
    with pytest.raises(UnsupportedFormatError):
        decode_index((store / "weight_v000002" / "model.safetensors.index.json").read_bytes(), 2, "x")


def test_pull_refuses_a_huge_safetensors_header(store, tmp_path):
    [shard] = (store / "weight_v000001").glob("*.safetensors")
    shard.write_bytes(struct.pack("<Q", 1 << 60) + bytes(100))
    with pytest.raises(CorruptSnapshotError, match="invalid header length"):
        pull_all(store, tmp_path, 1)


def test_pull_refuses_a_huge_index(store, tmp_path):
    path = store / "weight_v000001" / "model.safetensors.index.json"
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises((StorageError, CorruptSnapshotError)):
        pull_all(store, tmp_path, 1)


def test_pull_refuses_tensors_that_differ_from_the_index(store, tmp_path):
    index = json.loads((store / "weight_v000001" / "model.safetensors.index.json").read_text())
    [file] = set(index["weight_map"].values())
    write_index(store, 1, {"weight": file, "more": file}, {})
    with pytest.raises(CorruptSnapshotError, match="its tensors are not those of the index"):
        pull_all(store, tmp_path, 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[" * 100_000, "\xff"]
)
def test_pull_refuses_an_invalid_index(store, tmp_path, text):
    (store / "weight_v000001" / "model.safetensors.index.json").write_text(text, "latin-1")
    with pytest.raises(CorruptSnapshotError, match="not an index of safetensors files"):
        pull_all(store, tmp_path, 1)


def test_pull_applies_a_delta_chain_with_large_zstd_windows(tmp_path, monkeypatch):
    """Each frame asks for more memory than all together may have."""
    size = 20 << 20
    Publisher(tmp_path / "store").publish(1, {"weight": torch.zeros(size, dtype=torch.uint8)}).wait()
    parameters = zstandard.ZstdCompressionParameters(window_log=26, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(bytes(size)) + stream.flush()
    for version in range(2, 8):
        write_delta(tmp_path / "store", version, version - 1, frame, checksum=f"{zlib.adler32(bytes(size)):08x}")
    together = []
    real = DeltaDecoder.apply

    def apply(self, nbytes, read, deltas, *given, **named):
        together.append(len(deltas))
        return real(self, nbytes, read, deltas, *given, **named)

    monkeypatch.setattr(DeltaDecoder, "apply", apply)
    pulled = Subscriber(tmp_path / "store", tmp_path / "local").pull(version=7)
    assert together == [1] * 6
    [path] = list(pulled.glob("*.safetensors"))
    assert load_file(path)["weight"].sum() == 0
