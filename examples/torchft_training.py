"""Replicas under torchft: one that fails and restarts gets the others' state as a verified snapshot, in memory.

Start the lighthouse, and then each replica in a shell of its own. Kill one, and start it again:

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/torchft_training.py 0
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/torchft_training.py 1
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, Optimizer, ProcessGroupGloo

from snapshot_trainers.torchft import SnapshotTransport


def main(replica: int, steps: int = 1000, address: str | None = None) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # of the ranks of this replica
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,  # by default, TORCHFT_LIGHTHOUSE
        checkpoint_transport=SnapshotTransport(host="127.0.0.1"),
    )
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < steps:
        step = manager.current_step()
        inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(step * 10 + replica))
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        for work in [manager.allreduce(each.grad) for each in model.parameters()]:
            work.wait()  # torchft 0.2's own DistributedDataParallel ends the process if a replica dies meanwhile
        optimizer.step()
        weights = sum(each.double().sum().item() for each in model.parameters())
        print(f"step {manager.current_step()} of {manager.num_participants()}: weights {weights:.17g}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
