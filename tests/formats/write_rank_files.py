"""Writes small files by rank with the torch that runs it: `python tests/formats/write_rank_files.py DIR`.

`rank_files.zip` has the output of several versions, each in a folder with its name. Run it only to add versions. Those
that exist are never written again, since later versions must read them, too. It imports nothing but torch.
"""

import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

WORLD = 2


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def train(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 0.5)
    optimizer.step()
    return optimizer


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def write_dtensors(rank, folder):
    """Write what verl writes: a model of DTensors, and its optimizer, in files of their own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_module, distribute_tensor

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))

    def shard(name, module, mesh):
        for key, each in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(each.data, mesh, [Shard(0)])))

    model = distribute_module(make_model(), mesh, shard)
    optimizer = train(model)
    folder.mkdir(parents=True, exist_ok=True)
    for name, state in (("model", model.state_dict()), ("optim", optimizer.state_dict())):
        torch.save(state, folder / f"{name}_world_size_{WORLD}_rank_{rank}.pt")
    moments = [
        {name: whole(each) for name, each in state.items()} for state in optimizer.state_dict()["state"].values()
    ]
    expected = {"model": {name: whole(each) for name, each in model.state_dict().items()}, "moments": moments}
    if rank == 0:
        torch.save(expected, folder.parent / "dtensors-expected.pt")


def write_sharded_tensors(rank, folder):
    """Write the sharded state dicts of FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import StateDictType

    model = FSDP(make_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = train(model)
    folder.mkdir(parents=True, exist_ok=True)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer), "step": 3}
    torch.save(saved, folder / f"rank{rank}.pt")
    with FSDP.summon_full_params(model):
        full = {name: each.detach().clone() for name, each in model.module.named_parameters()}
    if rank == 0:
        torch.save({"model": full}, folder.parent / "fsdp1-expected.pt")


def run(rank, folder, store):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    write_dtensors(rank, folder / "dtensors")
    try:
        write_sharded_tensors(rank, folder / "fsdp1")
    except Exception as error:  # noqa: BLE001 - some versions have no FSDP1 on a CPU
        print("no FSDP1:", type(error).__name__, error)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    where = Path(sys.argv[1], torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as temporary:
        mp.spawn(run, (where, f"{temporary}/store"), WORLD)
