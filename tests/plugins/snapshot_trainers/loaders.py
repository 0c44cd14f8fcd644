"""Data, loaders and ranks for the tests of LoaderState."""

import multiprocessing

import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from snapshot import RestoreError, Snapshot, StateDict
from snapshot_trainers.torchdata import LoaderState
from tests.helpers.arguments import for_restore
from tests.plugins.snapshot_trainers.orders import Numbers


class Counted(Numbers):
    """A map-style dataset with a state."""

    def state_dict(self):
        return {"length": self.length}

    def load_state_dict(self, state):
        assert state == {"length": self.length}


class Stripes(IterableDataset):
    """Several streams of numbers. A shard reads some of them, one number of each in turn."""

    def __init__(self, streams, length):
        self.streams, self.length = streams, length
        self.place = rank_and_world()
        self.at = None

    def __iter__(self):
        if self.at is None:
            shard, shards = shard_of_worker(*self.place)
            self.at = [(stream, 0) for stream in range(shard, self.streams, shards)]
        while self.at:
            stream, position = self.at.pop(0)
            if position + 1 < self.length:
                self.at.append((stream, position + 1))
            yield stream * 1000 + position

    def state_dict(self):
        return {"at": list(self.at) if self.at is not None else None}

    def load_state_dict(self, state):
        self.at = [tuple(each) for each in state["at"]] if state["at"] is not None else None

    def reshard_state_dict(self, states, rank, world):
        return {"at": sorted(each for state in states for each in state["at"])[rank::world]}


class Fixed(Stripes):
    reshard_state_dict = None

    def __getattribute__(self, name):
        if name == "reshard_state_dict":
            raise AttributeError(name)
        return super().__getattribute__(name)


def rank_and_world():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def shard_of_worker(rank, world):
    info = get_worker_info()
    return (rank * info.num_workers + info.id, world * info.num_workers) if info else (rank, world)


class Chunked(DistributedSampler):
    """Each replica reads one part of the data."""

    def __iter__(self):
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


def make_loader(data, **options):
    multiprocessing.current_process()._config["daemon"] = False  # a rank of the pool may not have workers otherwise
    return StatefulDataLoader(data, **options)


def map_loader(
    length, batch, workers=0, *, stateful=True, dataset=Numbers, replica=None, shuffle=True, seed=5, kind=None
):
    data = dataset(length)
    rank, world = replica or rank_and_world()
    kind = kind or (StatefulDistributedSampler if stateful else DistributedSampler)
    sampler = kind(data, num_replicas=world, rank=rank, shuffle=shuffle, seed=seed)
    return make_loader(data, batch_size=batch, sampler=sampler, num_workers=workers)


def numbers(batches):
    return [int(each) for batch in batches for each in (batch if getattr(batch, "ndim", 0) else [batch])]


def gathered(value):
    held = [None] * dist.get_world_size()
    dist.all_gather_object(held, value)
    return held


def begin_map(path, steps, length, batch, workers, options):
    """Read some batches, save, and return what all ranks have read."""
    loader = map_loader(length, batch, workers, **options)
    loader.sampler.set_epoch(3)
    it = iter(loader)
    read = numbers([next(it) for _ in range(steps)])
    Snapshot.take(path, {"loader": LoaderState(loader), "s": StateDict(x=steps)}, replicated=["s/**"])
    return gathered(read)


def continue_map(path, length, batch, workers, remainder, options):
    """Restore, and return what all ranks read until the end of the epoch, or the error."""
    loader = map_loader(length, batch, workers, **options)
    state = StateDict(x=0)
    try:
        Snapshot(path).restore({"loader": LoaderState(loader, remainder=remainder), "s": state})
    except (ValueError, RestoreError) as error:
        return str(error), error.__notes__, state["x"]
    return gathered(numbers(loader)), loader.sampler.epoch, state["x"]


def begin_stripes(path, steps, streams, length, batch, workers):
    loader = make_loader(Stripes(streams, length), batch_size=batch, num_workers=workers)
    it = iter(loader)
    read = numbers([next(it) for _ in range(steps)])
    Snapshot.take(path, {"loader": LoaderState(loader)})
    return gathered(read)


def continue_stripes(path, streams, length, batch, workers, dataset=Stripes):
    loader = make_loader(dataset(streams, length), batch_size=batch, num_workers=workers)
    try:
        Snapshot(path).restore({"loader": LoaderState(loader)})
    except ValueError as error:
        return str(error)
    return gathered(numbers(loader))


def save_bare(path):
    loader = map_loader(40, 2)
    next(iter(loader))
    Snapshot.take(path, {"loader": loader})


def restore_bare(path, wrapped=False):
    loader, state = map_loader(40, 2), StateDict(x=0)
    try:
        Snapshot(path).restore({"loader": LoaderState(loader) if wrapped else loader})
    except (ValueError, RestoreError) as error:
        return str(error)
    return state["x"]


def save_groups(path):
    """Two ranks of each replica read the same data."""
    rank = dist.get_rank()
    loader = map_loader(48, 3, replica=(rank // 2, 2))
    it = iter(loader)
    read = numbers([next(it) for _ in range(4)])
    Snapshot.take(path, {"loader": LoaderState(loader)})
    return gathered(read)


def continue_groups(path):
    loader = map_loader(48, 3)
    Snapshot(path).restore({"loader": LoaderState(loader)})
    return gathered(numbers(loader))


class Own:
    """A stateful of its own that redistributes numbers."""

    def __init__(self):
        self.mine = list(range(10 * rank_and_world()[0], 10 * rank_and_world()[0] + 3))
        self.calls = []

    def state_dict(self):
        return {"mine": self.mine}

    def load_state_dict(self, state):
        self.mine = state["mine"]

    def reshard_state_dict(self, states, rank, world):
        self.calls.append((rank, world, len(states)))
        if any(state is None for state in states):
            raise ValueError("one is missing")
        everything = sorted(each for state in states for each in state["mine"])
        return {"mine": everything[rank::world]}


def save_own(path, only=None):
    app = {"own": Own(), "s": StateDict(x=1)} if only is None or dist.get_rank() in only else {"s": StateDict(x=1)}
    Snapshot.take(path, app, replicated=["s/**"])


def restore_own(path, options):
    own, state = Own(), StateDict(x=0)
    key = options.pop("key", "own")
    try:
        Snapshot(path).restore({key: own, "s": state}, **for_restore(**options))
    except (ValueError, RestoreError) as error:
        return str(error), state["x"], own.mine, own.calls
    return own.mine, own.calls, state["x"]
