"""Loops over loaders that accelerate has prepared for several replicas, which all run here, one after another."""

import copy
import itertools
import random
import warnings
from collections import Counter

import numpy as np
import torch
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.data_loader import prepare_data_loader
    from accelerate.state import GradientState, PartialState
    from torchdata.stateful_dataloader import StatefulDataLoader

from snapshot_trainers.ledger import Sum, hash_ids
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers.orders import Grouped, Numbers, ids_of, make, seed_all


class Buckets(Grouped):
    """A batch sampler of an application, whose batches have several lengths, and all samples once."""

    def cut(self, order):
        sizes = itertools.cycle((1, 3, 2, 4))
        left = iter(order)
        return list(iter(lambda: list(itertools.islice(left, next(sizes))), []))


KINDS = ("in order", "shuffled", "own generator", "its generator", "application", "buckets", "batches", "stateful")


def prepare(kind, length, batch, seed, place, workers=0, **options):
    """Return a loader as `accelerator.prepare` makes it on one rank of several."""
    PartialState(cpu=True)
    GradientState()
    seed_all(seed)
    if kind == "buckets":
        loader = DataLoader(Numbers(length), batch_sampler=Buckets(length, np.random.default_rng(seed)))
    elif kind == "stateful":
        loader = StatefulDataLoader(Numbers(length), batch_size=batch, shuffle=True, num_workers=workers)
    else:
        loader = make(kind, length, batch, seed, workers)
    return prepare_data_loader(
        loader,
        process_index=place[0],
        num_processes=place[1],
        even_batches=kind != "buckets" and options.pop("even", True),
        use_stateful_dataloader=kind == "stateful" or options.pop("stateful", False),
        **options,
    )


def draw_options(draw, kind):
    return {
        "split_batches": kind != "buckets" and draw.random() < 0.3,
        "use_seedable_sampler": draw.random() < 0.5,
        "data_seed": draw.randint(0, 99),
    }


def loop(loader, steps):
    """Yield (batch, a random number) for some steps, over as many epochs as needed."""
    while True:
        for batch in loader:
            yield ids_of(batch), torch.rand(1).item()
            steps -= 1
            if not steps:
                return
        yield "end", torch.rand(1).item()


def check_same(number, workers=0):
    """Interrupt the loops of all replicas several times: each goes on exactly as without an interruption."""
    draw = random.Random(number)
    kind, replicas = draw.choice(KINDS), draw.randint(1, 4)
    options = draw_options(draw, kind)
    batch = draw.randint(1, 4) * (replicas if options["split_batches"] else 1)
    length = draw.randint(10, 20) * replicas if kind == "buckets" else replicas * batch + draw.randint(0, 50)
    cuts = [draw.randint(0, 9) for _ in range(draw.randint(1, 3))]
    after = draw.randint(1, 12)
    told = (number, kind, replicas, length, batch, options, cuts, after)
    epochs = Counter()
    for replica in range(replicas):
        made = (kind, length, batch, number, (replica, replicas), workers)
        loader = prepare(*made, **options)
        LoaderState(loader)
        seed_all(number)
        whole = list(loop(loader, sum(cuts) + after))
        found, saved = [], None
        for steps in [*cuts, after]:
            loader = prepare(*made, **options)
            state = LoaderState(loader)
            if saved is None:
                seed_all(number)
            else:
                seed_all(number + 1)
                state.load_state_dict(saved[0])
                torch.set_rng_state(saved[1])
            found += list(loop(loader, steps)) if steps else []
            saved = copy.deepcopy(state.state_dict()), torch.get_rng_state()
        assert found == whole, (told, replica)
        for at, each in enumerate(state._order.epochs):
            epochs[at] += each.samples
    dropped = kind == "buckets" or (number % 2 and kind in ("application", "batches"))
    assert dropped or set(list(epochs.values())[:-1]) <= {length}, told


def check_other(number, workers=0):
    """Interrupt an epoch several times, with other replicas and batch sizes: each sample is seen once."""
    draw = random.Random(number)
    kind = draw.choice(KINDS)
    options = draw_options(draw, kind)
    dropped = bool(number % 2) and kind in ("application", "batches")
    length = draw.randint(1, 80)
    parts = [(draw.randint(1, 4), draw.randint(1, 4), draw.randint(0, 4)) for _ in range(draw.randint(1, 4))]
    if kind in ("buckets", "batches"):  # a batch sampler has one size
        parts = [(replicas, 4 * (parts[0][1] if kind == "batches" else 1), steps) for replicas, _, steps in parts]
    told = (number, kind, length, options, parts)
    seen, states = Counter(), None
    for place, (replicas, batch, steps) in enumerate(parts):
        size = batch * replicas if options["split_batches"] and kind != "batches" else batch
        if options["split_batches"] and size % replicas:
            options = {**options, "split_batches": False}
        states_before, orders = states, []
        for replica in range(replicas):
            loader = prepare(kind, length, size, number, (replica, replicas), workers, **options)
            order = LoaderState(loader)
            if states_before is not None:
                same = len(states_before) == replicas
                given = states_before[replica] if same else order.reshard_state_dict(states_before, replica, replicas)
                order.load_state_dict(copy.deepcopy(given))
            orders.append(order)
        last = place == len(parts) - 1
        for order in orders:
            seed_all(number)
            for each in itertools.islice(order.loader, None if last else steps):
                seen.update(ids_of(each))
        states = copy.deepcopy([order.state_dict() for order in orders])
        if any(state["order"]["epoch"] for state in states) or len({s["order"]["batches"] for s in states}) > 1:
            break
    if len({each["order"]["epoch"] for each in states}) > 1 or not states[0]["order"]["epoch"]:
        return  # the loop ended on some replicas only
    counted = sum((order._order.epochs[0] for order in orders), Sum())
    evened = sum((order._order.evened[0] for order in orders), Sum())
    assert counted == hash_ids(sorted(seen)), told
    assert evened == hash_ids(sorted((seen - Counter(set(seen))).elements())), told
    if not dropped:
        assert sorted(seen) == list(range(length)), told
