"""Checkpoints of Orbax in an archive, and what they hold."""

import json
from pathlib import Path

import torch

from snapshot_orbax.zarr import V2

ARCHIVE = Path(__file__).with_name("orbax_files.zip")


def tree():
    return {
        "params": {
            "dense": {"kernel": torch.arange(32, dtype=torch.bfloat16).view(8, 4), "bias": torch.arange(4.0)},
        },
        "opt": [torch.arange(64.0).view(16, 4) / 8, {"count": torch.tensor(7, dtype=torch.int32)}, (), None],
        "step": 5,
        "lr": 0.5,
        "flag": True,
        "name": "hello",
        "none": None,
        "empty": {},
        "array": torch.arange(6).view(2, 3),
        "zero": torch.zeros(8, 8),
        "narrow": torch.arange(4.0).to(torch.float8_e4m3fn),
        "complex": torch.ones(2, dtype=torch.complex64),
        "a.b/c": torch.ones(3),
        "long": torch.arange(3000.0).view(30, 100),
    }


def item(folder, arrays, leaves=None, **more):
    """Write an item of plain folders: name -> (metadata, chunks)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (metadata, chunks) in arrays.items():
        (folder / name).mkdir()
        (folder / name / V2).write_text(metadata if isinstance(metadata, str) else json.dumps(metadata))
        for key, content in chunks.items():
            (folder / name / key).write_bytes(content)
    leaves = leaves or {name: {"key_metadata": [{"key": name}]} for name in arrays}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": leaves, "use_ocdbt": False, **more}))
    return folder
