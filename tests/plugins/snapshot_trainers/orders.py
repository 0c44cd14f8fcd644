"""Loops over loaders that are interrupted at drawn places and go on, beside loops that are not interrupted."""

import copy
import itertools
import random
from collections import Counter

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from snapshot import RNGState
from snapshot_trainers.ledger import Sum, hash_ids
from snapshot_trainers.torchdata import LoaderState


class Numbers(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


class Shuffled(Sampler):
    """A sampler of an application, with random numbers of Python and a counter of its own."""

    def __init__(self, length, source):
        self.length, self.random, self.passes = length, source, 0

    def __len__(self):
        return self.length

    def __iter__(self):
        order = list(range(self.length))
        self.random.shuffle(order)
        self.passes += 1
        return iter(order[self.passes % max(1, self.length) :] + order[: self.passes % max(1, self.length)])


class Grouped:
    """A batch sampler of an application, with batches of several lengths and random numbers of NumPy."""

    def __init__(self, length, generator):
        self.length, self.generator = length, generator

    def __len__(self):
        return len(self.cut(range(self.length)))

    def cut(self, order):
        return [list(order[at : at + 1 + at % 4]) for at in range(0, len(order), 4)]

    def __iter__(self):
        yield from self.cut(self.generator.permutation(self.length).tolist())


KINDS = {
    "in order": lambda data, batch, seed: {"batch_size": batch},
    "shuffled": lambda data, batch, seed: {"batch_size": batch, "shuffle": True},
    "one by one": lambda data, batch, seed: {"batch_size": None, "shuffle": True},
    "own generator": lambda data, batch, seed: {
        "batch_size": batch, "shuffle": True, "generator": torch.Generator().manual_seed(seed)
    },
    "its generator": lambda data, batch, seed: {
        "batch_size": batch, "sampler": RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    },
    "repeated": lambda data, batch, seed: {
        "batch_size": batch, "sampler": RandomSampler(data, replacement=True, num_samples=len(data) + 3)
    },
    "weighted": lambda data, batch, seed: {
        "batch_size": batch, "sampler": WeightedRandomSampler([1.0 + each for each in range(len(data))], len(data))
    },
    "part": lambda data, batch, seed: {"batch_size": batch, "sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "batches": lambda data, batch, seed: {
        "batch_sampler": BatchSampler(SequentialSampler(data), batch, drop_last=bool(seed % 2))
    },
    "application": lambda data, batch, seed: {
        "batch_size": batch, "drop_last": bool(seed % 2), "sampler": Shuffled(len(data), random.Random(seed))
    },
    "global": lambda data, batch, seed: {"batch_size": batch, "sampler": Shuffled(len(data), random)},
    "groups": lambda data, batch, seed: {"batch_sampler": Grouped(len(data), np.random.default_rng(seed))},
}  # fmt: skip


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def make(kind, length, batch, seed, workers=0, persistent=False):
    data = Numbers(length)
    options = KINDS[kind](data, batch, seed)
    return DataLoader(data, **options, num_workers=workers, persistent_workers=persistent and workers > 0)


def ids_of(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) and batch.ndim else [int(batch)]


def loop(loader, steps):
    """Yield (batch, random numbers between the batches) for some steps, over as many epochs as needed."""
    while True:
        for batch in loader:
            yield ids_of(batch), torch.rand(1).item(), random.random(), float(np.random.rand())
            steps -= 1
            if not steps:
                return
        yield "end", torch.rand(1).item(), 0, 0


def take_some(loader, steps):
    return list(loop(loader, steps)) if steps else []


def check_one(number, workers=0):
    """Interrupt a loop of one replica several times: it goes on exactly as without an interruption."""
    draw = random.Random(number)
    kind = draw.choice(sorted(KINDS))
    length, batch = draw.randint(7, 40), draw.randint(1, 7)
    persistent = bool(draw.getrandbits(1))
    made = (kind, length, batch, number, workers, persistent)
    cuts = [draw.randint(0, 14) for _ in range(draw.randint(1, 3))]
    after = draw.randint(1, 20)
    seed_all(number)
    loader = make(*made)
    LoaderState(loader)
    whole = take_some(loader, sum(cuts) + after)
    seed_all(number)
    found, saved = [], None
    for steps in [*cuts, after]:
        loader = make(*made)
        state, rng = LoaderState(loader), RNGState()
        if saved is not None:
            seed_all(-1 % (1 << 31))
            state.load_state_dict(saved[0])
            rng.load_state_dict(saved[1])
        found += take_some(loader, steps)
        saved = copy.deepcopy((state.state_dict(), rng.state_dict()))
    assert found == whole, (made, cuts, after)
    samples = sum((hash_ids(each[0]) for each in found if each[0] != "end"), Sum())
    assert sum(state._order.epochs, Sum()) == samples, made


def check_replicas(number, workers=0):
    """Interrupt an epoch several times, with other replicas and batch sizes: each sample is seen once."""
    draw = random.Random(number)
    length, shuffle, drop_last = draw.randint(1, 80), bool(draw.getrandbits(1)), bool(draw.getrandbits(1))
    epoch = draw.randint(0, 3)
    parts = [(draw.randint(1, 5), draw.randint(1, 6), draw.randint(0, 4)) for _ in range(draw.randint(1, 4))]
    told = (number, length, shuffle, drop_last, epoch, parts)
    seen, states = Counter(), None
    for place, (replicas, batch, steps) in enumerate(parts):
        orders = []
        for replica in range(replicas):
            sampler = DistributedSampler(Numbers(length), replicas, replica, shuffle, seed=number, drop_last=drop_last)
            sampler.set_epoch(epoch)
            loader = DataLoader(Numbers(length), batch_size=batch, sampler=sampler, num_workers=workers)
            order = LoaderState(loader)
            if states is not None:
                same = len(states) == replicas
                order.load_state_dict(states[replica] if same else order.reshard_state_dict(states, replica, replicas))
            orders.append(order)
        last = place == len(parts) - 1
        for order in orders:
            for each in itertools.islice(order.loader, None if last else steps):
                seen.update(ids_of(each))
        states = copy.deepcopy([order.state_dict() for order in orders])
        if any(state["order"]["epoch"] for state in states):
            break
    counted = sum((order._order.epochs[0] for order in orders), Sum())
    evened = sum((order._order.evened[0] for order in orders), Sum())
    assert counted == hash_ids(sorted(seen)), told
    assert evened == hash_ids(sorted((seen - Counter(set(seen))).elements())), told
    assert seen.keys() <= set(range(length)), told
    twice = sum(count - 1 for count in seen.values())
    lost = length - len(seen)
    most = max(each for each, _, _ in parts) - 1  # whoever comes to the end evens it out
    assert (lost, twice) <= ((most, 0) if drop_last else (0, most)), (told, lost, twice)
    assert not lost or drop_last, told
    assert not twice or not drop_last, told
