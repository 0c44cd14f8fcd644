"""The environment variables that torchrun sets for each rank, for processes that a test starts by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def rank_environments(world: int) -> Iterator[list[dict[str, str]]]:
    """Serve the ranks' store, and yield the environment of each rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    yield [common | {"RANK": str(rank)} for rank in range(world)]
