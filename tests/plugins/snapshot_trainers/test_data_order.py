"""Loops over torch's `DataLoader` that go on after a restore: the order of the samples, and the ledger of them."""

import copy
import gc
import itertools
import os
import pickle
import random
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from snapshot import RestoreError, RNGState, Snapshot, SnapshotError, StateDict
from snapshot_trainers.ledger import Ledger, Sum, hash_ids, pack_ids
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers import orders
from tests.plugins.snapshot_trainers.orders import Numbers, ids_of


@pytest.mark.parametrize("number", range(50))
def test_data_order_goes_on_as_without_an_interruption(number):
    orders.check_one(number)


@pytest.mark.parametrize("number", range(50))
def test_data_order_on_other_replicas_gives_each_sample_once(number):
    orders.check_replicas(number)


@pytest.mark.slow
@pytest.mark.parametrize("check", [orders.check_one, orders.check_replicas])
def test_data_order_of_1000_drawn_loops(check):
    for number in range(50, 1050):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(40))
def test_data_order_with_worker_processes(number):
    check = orders.check_replicas if number % 4 == 0 else orders.check_one
    check(2000 + number, workers=1 + number % 2)


def shuffled(length=48, batch=4, **options):
    return DataLoader(Numbers(length), batch_size=batch, shuffle=True, **options)


def begin(loader, batches):
    """Return the state of a loader after some batches, and their ids."""
    state = LoaderState(loader)
    found = []
    for batch in loader:
        found += ids_of(batch)
        if len(found) == 4 * batches:
            break
    return copy.deepcopy(state.state_dict()), found


def test_data_order_in_a_snapshot(tmp_path):
    """The loop of a training as users write it: all epochs have each sample once."""
    torch.manual_seed(1)
    loader = shuffled()
    app = {"loader": LoaderState(loader), "rng": RNGState(), "progress": StateDict(epoch=1)}
    seen, noise = [], []
    for _ in loader:
        pass
    for batch in loader:
        seen += ids_of(batch)
        noise.append(torch.rand(1).item())
        if len(seen) == 20:
            Snapshot.take(tmp_path / "s", app)
    torch.manual_seed(2)
    again = shuffled()
    app = {"loader": LoaderState(again), "rng": RNGState(), "progress": StateDict(epoch=0)}
    report = Snapshot(tmp_path / "s").restore(app)
    assert not report.skipped
    assert not [entry for entry in Snapshot(tmp_path / "s").get_manifest().values() if entry.type == "object"]
    rest, more = [], []
    for batch in again:
        rest += ids_of(batch)
        more.append(torch.rand(1).item())
    assert seen[20:] == rest
    assert noise[5:] == more
    following = []
    for each in (loader, again):
        torch.manual_seed(3)
        following.append([ids_of(batch) for batch in each])
    assert following[0] == following[1]


def test_data_order_leaves_the_loader_as_it_was():
    plain, tracked = shuffled(num_workers=0), shuffled()
    state = LoaderState(tracked)
    assert isinstance(tracked, DataLoader)
    assert type(tracked).__name__ == "DataLoader"
    assert len(tracked) == len(plain) == 12
    assert len(iter(tracked)) == 12
    assert isinstance(tracked.batch_sampler, BatchSampler)
    torch.manual_seed(3)
    expected = [each.tolist() for each in plain], torch.rand(3).tolist()
    torch.manual_seed(3)
    assert ([each.tolist() for each in tracked], torch.rand(3).tolist()) == expected
    for copied in (copy.copy(tracked), pickle.loads(pickle.dumps(tracked))):
        assert type(copied) is DataLoader
        assert len(list(copied)) == 12
    assert state.state_dict()["order"]["epoch"] == 1
    assert LoaderState(tracked).state_dict() == state.state_dict()  # there is one place


def test_data_order_of_a_loader_that_was_made_anew_is_not_lost_in_silence():
    """As trainers do, which put a sampler of theirs into it."""
    tracked = shuffled()
    LoaderState(tracked)
    anew = type(tracked)(tracked.dataset, batch_size=4)
    with pytest.raises(SnapshotError, match="a DataLoader was made anew from one that a LoaderState tracks"):
        list(anew)


@pytest.mark.parametrize("own", [False, True])
def test_data_order_at_the_end_of_an_epoch_starts_workers_that_persist_without_a_draw(own):
    def make():
        generator = torch.Generator().manual_seed(3) if own else None
        return shuffled(num_workers=1, persistent_workers=True, generator=generator)

    torch.manual_seed(0)
    loader, again = make(), make()
    state, rng = LoaderState(loader), RNGState()
    list(loader)
    saved, drawn = copy.deepcopy((state.state_dict(), rng.state_dict()))
    whole = [[each.tolist() for each in loader] for _ in range(2)], torch.rand(()).item()
    LoaderState(again).load_state_dict(saved)
    rng.load_state_dict(drawn)
    assert ([[each.tolist() for each in again] for _ in range(2)], torch.rand(()).item()) == whole


def test_data_order_goes_on_with_another_global_generator_of_numpy():
    """Whose state is of another form than the default one's."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        saved, seen = begin(shuffled(), 3)
        again = LoaderState(shuffled())
        again.load_state_dict(saved)
        rest = [one for each in again.loader for one in ids_of(each)]
    finally:
        np.random.set_bit_generator(before)
    assert sorted(seen + rest) == list(range(48))


def test_data_order_releases_the_loader():
    loader = shuffled(num_workers=1, persistent_workers=True)
    state = LoaderState(loader)
    next(iter(loader))
    found = weakref.ref(loader)
    gc.disable()
    try:
        del loader, state
        assert found() is None
    finally:
        gc.enable()


def test_data_order_of_loops_that_ended_early_and_of_peeks():
    loader = shuffled()
    state = LoaderState(loader)
    next(iter(loader))  # a look at one batch
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert state.state_dict()["order"]["batches"] == 3
    iter(loader)  # nothing is drawn
    list(loader)
    assert [each.samples for each in state._order.epochs] == [4, 12, 48]


def test_data_order_is_saved_before_and_after_the_first_loop():
    loader = shuffled(generator=torch.Generator().manual_seed(5))
    state = LoaderState(loader)
    before = copy.deepcopy(state.state_dict())
    first = [each.tolist() for each in loader]
    after = copy.deepcopy(state.state_dict())
    second = [each.tolist() for each in loader]
    for saved, expected in ((before, first), (after, second)):
        again = shuffled(generator=torch.Generator())
        LoaderState(again).load_state_dict(saved)
        assert [each.tolist() for each in again] == expected


def test_data_order_that_was_restored_is_saved_again_at_once():
    saved, _ = begin(shuffled(), 3)
    again = LoaderState(shuffled())
    again.load_state_dict(saved)
    iter(again.loader)  # nothing is drawn from it
    assert again.state_dict() == saved


def test_data_order_is_restored_into_a_loader_that_is_in_a_loop():
    loader = shuffled()
    saved, seen = begin(loader, 3)
    state = LoaderState(loader)
    running = iter(loader)
    next(running)
    state.load_state_dict(saved)
    next(running)  # the old loop goes on, and no longer counts
    rest = [one for each in loader for one in ids_of(each)]
    assert sorted(seen + rest) == list(range(48))


class Stream(IterableDataset):
    def __init__(self, length, skip=0):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_data_order_of_an_iterable_dataset_is_read_again(workers):
    def make(length=20):
        return DataLoader(Stream(length), batch_size=4, num_workers=workers)

    whole = [each.tolist() for each in make()]
    saved, _ = begin(make(), 3)
    again = make()
    LoaderState(again).load_state_dict(saved)
    assert [each.tolist() for each in again] == whole[3:]
    assert [each.tolist() for each in again] == whole
    shorter = make(4)
    LoaderState(shorter).load_state_dict(saved)
    with pytest.raises(SnapshotError, match="ended after"):
        list(shorter)


class Bulk(SequentialSampler):
    """Gives the ids of whole batches, for a loader without a batch size."""

    def __iter__(self):
        return iter([[3, 1], [2], [0, 4, 5]])


def test_data_order_of_a_sampler_that_gives_whole_batches():
    class Lists(Numbers):
        def __getitem__(self, index):
            return index

    loader = DataLoader(Lists(6), batch_size=None, sampler=Bulk(Numbers(6)))
    state = LoaderState(loader)
    seen = next(iter(loader))
    again = DataLoader(Lists(6), batch_size=None, sampler=Bulk(Numbers(6)))
    LoaderState(again).load_state_dict(copy.deepcopy(state.state_dict()))
    assert [seen, *again] == [[3, 1], [2], [0, 4, 5]]


class Counted(RandomSampler):
    """A sampler whose counters are of several kinds, and one of whose integers is a setting."""

    __slots__ = ("slot",)

    def __init__(self, length, limit):
        self.slot, self.number, self.limit, self.length = 0, np.int64(0), limit, length

    def __iter__(self):
        order = list(range(self.length))
        random.Random(self.slot * 7 + int(self.number)).shuffle(order)
        self.slot += 1
        self.number += 1
        return iter(order[: self.limit])

    def __len__(self):
        return self.limit


class Wrapping(SequentialSampler):
    def __init__(self, base):
        self.base = base

    def __iter__(self):
        return iter(self.base)

    def __len__(self):
        return len(self.base)


@pytest.mark.parametrize("steps", [3, 6])
def test_data_order_saves_counters_and_leaves_settings(steps):
    def make(limit):
        return DataLoader(Numbers(24), batch_size=4, sampler=Wrapping(Counted(24, limit)))

    loader = make(12)
    state = LoaderState(loader)
    found = [ids_of(each) for each in itertools.islice(itertools.chain(loader, loader), steps)]
    whole = [ids_of(each) for each in make(12)]
    assert found[:3] == whole
    if steps == 6:
        assert [ids_of(each) for each in loader] != whole
    again = make(20)
    LoaderState(again).load_state_dict(copy.deepcopy(state.state_dict()))
    list(again)
    assert again.sampler.base.limit == 20
    assert len(list(again)) == 5
    assert type(again.sampler.base.number) is np.int64


def test_data_order_is_restored_to_a_counter_that_had_not_counted():
    loader = DataLoader(Numbers(24), batch_size=4, sampler=Counted(24, 24))
    state = LoaderState(loader)
    saved = copy.deepcopy(state.state_dict())
    first = [ids_of(each) for each in loader]
    list(loader)
    state.load_state_dict(saved)  # in the same process
    assert [ids_of(each) for each in loader] == first


# Refusals


class Early(DataLoader):
    """A loader that makes its iterator itself, once and early."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made = super().__iter__()

    def __iter__(self):
        return self.made


def test_data_order_refuses_to_save_a_place_that_it_does_not_know():
    early = Early(Numbers(20), batch_size=4)
    state = LoaderState(early)
    next(iter(early))
    with pytest.raises(SnapshotError, match="its iterator was made before the LoaderState"):
        state.state_dict()
    loader = shuffled()
    state = LoaderState(loader)
    outer = iter(loader)
    next(outer)
    list(loader)
    state.state_dict()  # the outer loop may have ended
    next(outer)
    with pytest.raises(SnapshotError, match="two loops read it at once"):
        state.state_dict()
    next(iter(loader))
    state.state_dict()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("seen", None), ("seen", b"12"), ("epoch", -3), ("epoch", "x"), ("start", None), ("start", {"iter": 1}),
        ("between", True), ("now", [{}]), ("past", b"1"), ("evened", {"a": b""}), ("batches", 1.5), ("moved", 1),
        ("shape", 3), ("units", -1), ("iteration", "1"),
    ],
)  # fmt: skip
def test_data_order_refuses_a_damaged_state(part, value):
    saved, _ = begin(shuffled(), 3)
    saved["order"][part] = value
    for damaged in (saved, {**saved, "order": {name: each for name, each in saved["order"].items() if name != part}}):
        again = shuffled()
        state = LoaderState(again)
        before = copy.deepcopy(state.state_dict())
        with pytest.raises(ValueError, match="exclude the loader to begin a new epoch"):
            state.load_state_dict(damaged)
        assert state.state_dict() == before
        assert len(list(again)) == 12


def test_data_order_writes_no_attribute_that_is_no_counter():
    saved, _ = begin(shuffled(), 3)
    for held in saved["order"]["start"]["iter"]["samplers"]:
        held |= {"sampler": 1, "data_source": 2, "batch_size": 7}
    again = shuffled()
    LoaderState(again).load_state_dict(saved)
    list(again)
    assert again.batch_size == again.batch_sampler.batch_size == 4
    assert isinstance(again.batch_sampler.sampler, RandomSampler)


class Unsteady(RandomSampler):
    """A sampler whose order comes from nowhere."""

    def __iter__(self):
        return iter(np.random.default_rng(int.from_bytes(os.urandom(4), "little")).permutation(48).tolist())


class Drawing(SequentialSampler):
    """A sampler that draws from the global random numbers again and again."""

    def __iter__(self):
        for each in range(48):
            yield (each + random.randrange(2)) % 48


@pytest.mark.parametrize(
    ("sampler", "match"),
    [
        (Unsteady, "BatchSampler/Unsteady: began the epoch again with"),
        (Drawing, "Drawing: draws from the global random"),
    ],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_data_order_refuses_a_sampler_that_does_not_begin_again(sampler, match, workers):
    def make():
        return DataLoader(Numbers(48), batch_size=4, sampler=sampler(Numbers(48)), num_workers=workers)

    saved, _ = begin(make(), 3)
    again = LoaderState(make())
    again.load_state_dict(saved)
    for _ in range(2):  # the state is not lost, and no other order begins
        with pytest.raises(SnapshotError, match=match):
            list(again.loader)
    assert again.state_dict() == saved


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (lambda: shuffled(length=47), "length was 48, now 47"),
        (lambda: DataLoader(Numbers(48), batch_size=4), "samplers was .*RandomSampler.*, now .*SequentialSampler"),
        (lambda: shuffled(batch=None), "samplers was"),
        (lambda: DataLoader(Stream(48), batch_size=4), "by was samples, now batches of the dataset"),
    ],
)
def test_data_order_refuses_another_order(tmp_path, other, match):
    loader = shuffled()
    state = LoaderState(loader)
    next(iter(loader))
    Snapshot.take(tmp_path / "s", {"loader": state, "x": StateDict(x=1)})
    live = StateDict(x=0)
    with pytest.raises((ValueError, RestoreError), match=match):
        Snapshot(tmp_path / "s").restore({"loader": LoaderState(other()), "x": live})


def test_data_order_refuses_batches_in_any_order():
    with pytest.raises(ValueError, match="in_order=True"):
        LoaderState(shuffled(num_workers=1, in_order=False))


def test_data_order_refuses_what_is_no_loader():
    with pytest.raises(TypeError, match=r"loader must be a DataLoader, a StatefulDataLoader, .* got list"):
        LoaderState([1, 2])


def test_data_order_refuses_other_replicas_with_orders_of_their_own():
    saved = [begin(shuffled(), 2)[0] for _ in range(2)]
    for number, each in enumerate(saved):
        each |= {"replica": number, "replicas": 2}
    with pytest.raises(ValueError, match="each of 2 replicas has an order of its own, which 1 cannot go on with"):
        LoaderState(shuffled()).reshard_state_dict(saved, 0, 1)


def replica_loader(replica, replicas, batch=4, **options):
    sampler = DistributedSampler(Numbers(48), replicas, replica, seed=7, **options)
    return DataLoader(Numbers(48), batch_size=batch, sampler=sampler)


def test_data_order_refuses_replicas_at_different_batches():
    saved = [begin(replica_loader(number, 2), 1 + number)[0] for number in range(2)]
    with pytest.raises(ValueError, match="must be at the same batch, got batch 1 of epoch 0 and batch 2 of epoch 0"):
        LoaderState(replica_loader(0, 1)).reshard_state_dict(saved, 0, 1)


def test_data_order_refuses_another_order_of_the_replicas():
    saved = [begin(replica_loader(number, 2), 1)[0] for number in range(2)]
    with pytest.raises(ValueError, match="shuffle was True, now False"):
        LoaderState(replica_loader(0, 1, shuffle=False)).reshard_state_dict(saved, 0, 1)


# Real ranks


def _begin_on_ranks(path, batches, batch):
    loader = replica_loader(dist.get_rank(), dist.get_world_size(), batch)
    state, found = LoaderState(loader), []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, each in enumerate(loader, 1):
            found += ids_of(each) if epoch else []
            if epoch and number == batches:
                break
    Snapshot.take(path, {"loader": state})
    return found


def _go_on_on_ranks(path, batch, then, batches):
    loader = replica_loader(dist.get_rank(), dist.get_world_size(), batch)
    state, found = LoaderState(loader), []
    Snapshot(path).restore({"loader": state})
    assert loader.sampler.epoch in (0, 1)
    for number, each in enumerate(loader, 1):
        found += ids_of(each)
        if number == batches:
            Snapshot.take(then, {"loader": state})
            break
    return found, [(each.samples, each.total) for each in state._order.epochs]


def test_data_order_goes_on_on_other_ranks_and_again(four, two, folder):
    seen = two.run(_begin_on_ranks, f"{folder}/a", 3, 4)  # 24 of 48
    more = four.run(_go_on_on_ranks, f"{folder}/a", 2, f"{folder}/b", 2)
    last = two.run(_go_on_on_ranks, f"{folder}/b", 3, f"{folder}/c", 0)
    ids = [one for each in seen for one in each] + [one for each, _ in (*more, *last) for one in each]
    assert sorted(ids) == list(range(48))
    whole = hash_ids(list(range(48)))
    epochs = [sum((Sum(*each[number]) for _, each in last), Sum()) for number in range(2)]
    assert epochs == [whole, whole]  # the epoch before, too, over all ranks of three jobs


# The ledger


def test_ledger_is_the_same_in_any_order_and_in_any_parts():
    draw = random.Random(4)
    for _ in range(30):
        ids = [draw.getrandbits(63) - (1 << 62) for _ in range(draw.randint(0, 9000))]
        whole, mixed = hash_ids(ids), draw.sample(ids, len(ids))
        cut = draw.randint(0, len(ids))
        assert hash_ids(mixed[:cut]) + hash_ids(mixed[cut:]) == whole
        ledger = Ledger(hash_ids(mixed[:cut]))
        for at in range(cut, len(ids), 37):
            ledger.add(pack_ids(mixed[at : at + 37]))
        assert ledger.sum == whole
        assert Sum.decode(whole.encode()) == whole
        assert len(whole.encode()) == 24
        if ids:
            assert hash_ids([*ids[1:], ids[0] + 1]) != whole
            assert hash_ids([*ids, ids[0]]) != whole


@pytest.mark.parametrize("kind", [int, np.int32, np.uint8, torch.tensor, np.int64])
def test_ledger_takes_integers_by_their_values(kind):
    assert hash_ids([kind(each) for each in (3, 1, 2)]) == hash_ids([1, 2, 3])


def test_ledger_takes_ids_of_other_kinds():
    found = [hash_ids(each) for each in (["1"], [1], [(1, 2)], [(1,)], [1.5], [1.25], [1 << 70], [None], [b"1"])]
    assert len(set(found)) == len(found)
    assert hash_ids([("a", 1), 2]) == hash_ids([("a", 1)]) + hash_ids([2])
    with pytest.raises(ValueError, match="must have 24 bytes, got 3"):
        Sum.decode(b"123")
