"""An engine's reader of published versions, from the description of their format alone. It shares no code with us."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import zstandard
from safetensors import safe_open

KEYS = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}


def versions(folder):
    """The committed versions: those with an index."""
    found = {}
    for each in Path(folder).iterdir():
        match = re.fullmatch(r"weight_v(\d{6})", each.name)
        if match and (each / "model.safetensors.index.json").exists():
            found[int(match[1])] = each
    return found


def read(folder, version):
    """Dtype, shape and bytes of each tensor of a version: the newest full one before it, and all deltas after that."""
    found = versions(folder)
    index = json.loads((found[version] / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    if "delta_encoding" not in metadata:
        return _read_full(found[version], index)
    assert {key: metadata[key] for key in KEYS} == KEYS
    assert metadata["version"] == f"{version:06d}"
    assert metadata["base_version"] == f"{version - 1:06d}"  # engines apply them one by one
    state = read(folder, version - 1)
    for name, file in index["weight_map"].items():
        with safe_open(found[version] / file, "np") as shard:
            compressed = shard.get_tensor(name)
            assert compressed.dtype == np.uint8
            change = np.frombuffer(zstandard.ZstdDecompressor().decompress(compressed.tobytes()), np.uint8)
            dtype, shape, base = state[name]
            assert len(change) == len(base)
            state[name] = dtype, shape, base ^ change
            assert f"{zlib.adler32(state[name][2].tobytes()):08x}" == shard.metadata()[name]
    return state


def _read_full(folder, index):
    state = {}
    for file in sorted(set(index["weight_map"].values())):
        data = (folder / file).read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        for name, item in header.items():
            assert index["weight_map"][name] == file
            begin, end = item["data_offsets"]
            content = np.frombuffer(data[8 + length + begin : 8 + length + end], np.uint8)
            state[name] = item["dtype"], tuple(item["shape"]), content
    assert state.keys() == index["weight_map"].keys()
    return state
