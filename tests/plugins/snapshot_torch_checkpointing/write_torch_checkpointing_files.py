"""Writes small checkpoints with torch_checkpointing on two ranks: `python .../write_torch_checkpointing_files.py DIR`.

`torch_checkpointing_files.zip` has its output. Run it only to add files. Those that exist are never written again,
since later versions must read them, too. It needs torch_checkpointing (0.1.1), whose gathering of metadata needs a
small change to run on a CPU.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

WORLD = 2


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def train(rank, folder, port):
    """Train with FSDP2 on one rank, and save in each layout."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch_checkpointing.builder import make_sync_checkpoint_saver
    from torch_checkpointing.checkpoint_base import CheckpointBase, CheckpointItem
    from torch_checkpointing.checkpoint_layout import (
        JsonSerialization,
        LayoutInfo,
        RawSerialization,
        SafetensorsSerialization,
    )
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    from torch_checkpointing.types import RankInfo

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo")
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    torch.manual_seed(1)
    model(torch.randn(4, 7)).square().sum().backward()
    optimizer.step()
    full = {
        name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in model.state_dict().items()
    }
    moments = [
        {key: each.full_tensor() if hasattr(each, "full_tensor") else each for key, each in state.items()}
        for state in optimizer.state_dict()["state"].values()
    ]
    if rank == 0:
        torch.save({"model": full, "moments": moments}, Path(folder, "expected.pt"))

    class Saved(CheckpointBase):
        def __init__(self, items):
            self.items = items

        def get_items(self):
            return self.items

        def load_state_dict(self, state_dict):
            raise NotImplementedError

    optim = get_optimizer_state_dict(model, optimizer)
    config = {"step": 3, "names": ["a", "b"], "rate": 0.5, "rank": rank}
    layouts = {
        "torch": {
            "model": CheckpointItem(model.state_dict(), resharder=DefaultResharder()),
            "optim": CheckpointItem(optim, resharder=DefaultResharder()),
            "own": CheckpointItem({"rng": torch.full((3,), rank), "epoch": 2}),
        },
        "layouts": {
            "model": CheckpointItem(
                model.state_dict(), resharder=DefaultResharder(),
                layout=LayoutInfo(f"weights/model-{rank}.safetensors", SafetensorsSerialization()),
            ),
            "optim": CheckpointItem(optim, resharder=DefaultResharder()),
            "config": CheckpointItem(config, layout=LayoutInfo(f"config_{rank}.json", JsonSerialization(dict))),
            "raw": CheckpointItem(b"bytes", layout=LayoutInfo(f"raw_{rank}.bin", RawSerialization())),
        },
    }  # fmt: skip
    make = torch.tensor

    def on_cpu(*values, device=None, **more):
        return make(*values, **more)

    for name, items in layouts.items():
        with mock.patch("torch.tensor", on_cpu), mock.patch("torch.Tensor.cuda", lambda tensor: tensor):
            saver = make_sync_checkpoint_saver(
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                checkpoint_metadata_manager=DefaultMetadataManager(RankInfo(rank, WORLD, rank, WORLD)),
            )
            saver.save(str(Path(folder, name)), Saved(items))
            saver.close()
    dist.barrier()
    dist.destroy_process_group()


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    torch.multiprocessing.spawn(train, (str(folder), 29650), nprocs=WORLD)


if __name__ == "__main__":
    main()
