"""Loops over loaders that accelerate has prepared, and that go on after a restore."""

import copy
import itertools
import warnings

import pytest
import torch
from torch.utils.data import IterableDataset

from snapshot import SnapshotError
from snapshot_trainers.ledger import hash_ids
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers import prepared_orders
from tests.plugins.snapshot_trainers.orders import ids_of
from tests.plugins.snapshot_trainers.prepared_orders import prepare

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.data_loader import DataLoaderShard, prepare_data_loader, skip_first_batches

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("check", [prepared_orders.check_same, prepared_orders.check_other])
def test_prepared_order_of_drawn_loops(check):
    for number in range(120):
        check(number)


@pytest.mark.parametrize("number", range(6))
def test_prepared_order_with_worker_processes(number):
    check = prepared_orders.check_same if number % 2 else prepared_orders.check_other
    check(2000 + number, workers=1)


def begin(loader, batches):
    """Return the state of a loader after some batches, and their ids."""
    state = LoaderState(loader)
    found = [one for each in itertools.islice(loader, batches) for one in ids_of(each)]
    return copy.deepcopy(state.state_dict()), found


def shuffled(place=(0, 1), length=48, **options):
    return prepare("shuffled", length, 4, 1, place, **options)


def test_prepared_order_leaves_the_loader_as_it_was():
    loader = shuffled((0, 2))
    LoaderState(loader)
    assert isinstance(loader, DataLoaderShard)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (6, 8, 48)
    assert loader.batch_sampler.num_processes == 2
    for each in loader:
        assert loader.end_of_dataloader in (True, False)
        assert len(each) == 4
    assert loader.end_of_dataloader
    assert loader.iteration == 1
    assert type(copy.copy(loader)).__name__ == "DataLoaderShard"


def test_prepared_order_counts_the_epoch_of_which_nothing_was_left():
    """Saved within the loop at the last batch: the next epoch is another one, and not the same again."""
    options = {"use_seedable_sampler": True, "data_seed": 3}
    saved, _ = begin(shuffled(**options), 12)
    whole = shuffled(**options)
    expected = [[ids_of(each) for each in whole] for _ in range(2)]
    again = shuffled(**options)
    state = LoaderState(again)
    state.load_state_dict(saved)
    assert list(again) == []
    assert again.iteration == 1
    assert [ids_of(each) for each in again] == expected[1]
    assert [each.samples for each in state._order.epochs] == [48, 48]


def test_prepared_order_of_the_remainder_follows_what_is_left():
    """accelerate drops the samples that even out the last batch when it gathers, and counts them by this."""
    saved = [begin(shuffled((replica, 2), 50), 3)[0] for replica in range(2)]
    again = shuffled((0, 3), 50)
    LoaderState(again).load_state_dict(LoaderState(again).reshard_state_dict(saved, 0, 3))
    iterator = iter(again)
    next(iterator)
    assert again.remainder == (50 - 24) % 12


def test_prepared_order_counts_what_evens_out_the_last_batches():
    seen, orders = [], []
    for replica in range(4):
        loader = shuffled((replica, 4), 50)
        orders.append(LoaderState(loader)._order)
        seen += [one for each in loader for one in ids_of(each)]
    assert len(seen) == 64
    whole = sum((each.epochs[0] for each in orders[1:]), orders[0].epochs[0])
    assert whole == hash_ids(list(range(50)))
    assert sum(each.evened[0].samples for each in orders) == 14


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def streamed(place):
    return prepare_data_loader(
        torch.utils.data.DataLoader(Stream(20), batch_size=2), process_index=place[0], num_processes=place[1]
    )


def test_prepared_order_of_an_iterable_dataset_is_read_again_and_not_divided():
    whole = [ids_of(each) for each in streamed((1, 2))]
    saved, _ = begin(streamed((1, 2)), 2)
    again = streamed((1, 2))
    LoaderState(again).load_state_dict(saved)
    assert [ids_of(each) for each in again] == whole[2:]
    assert [ids_of(each) for each in again] == whole
    states = [begin(streamed((replica, 2)), 2)[0] for replica in range(2)]
    with pytest.raises(ValueError, match="iterable dataset cannot be divided"):
        LoaderState(streamed((0, 1))).reshard_state_dict(states, 0, 1)


# Refusals


def test_prepared_order_refuses_to_skip_twice():
    saved, _ = begin(shuffled((0, 2)), 3)
    for place in ((0, 2), (0, 1)):
        again = shuffled(place)
        state = LoaderState(again)
        state.load_state_dict(saved if place == (0, 2) else begin(shuffled(place), 3)[0])
        skipped = skip_first_batches(again, 3)
        for _ in range(2):  # nothing is lost by that
            with pytest.raises(SnapshotError, match="loop over the prepared loader"):
                list(skipped)
        rest = [one for each in again for one in ids_of(each)]
        assert len(rest) == (12 if place == (0, 2) else 36)
        assert len(list(skip_first_batches(again, 3))) == len(again) - 3  # later it skips as ever


def test_prepared_order_refuses_a_loader_that_skips():
    with pytest.raises(ValueError, match="the prepared one itself, got one that skip_first_batches made"):
        LoaderState(skip_first_batches(shuffled(), 3))


def test_prepared_order_refuses_the_state_of_another_kind_of_loader():
    plain, _ = begin(torch.utils.data.DataLoader(range(48), batch_size=4, shuffle=True), 3)
    with pytest.raises(ValueError, match="prepared was None, now by accelerate"):
        LoaderState(shuffled()).load_state_dict(plain)
    seedable, _ = begin(shuffled(use_seedable_sampler=True), 3)
    with pytest.raises(ValueError, match=r"samplers was .*SeedableRandomSampler"):
        LoaderState(shuffled()).load_state_dict(seedable)


def test_prepared_order_refuses_replicas_at_different_batches():
    saved = [begin(shuffled((replica, 2)), 1 + replica)[0] for replica in range(2)]
    with pytest.raises(ValueError, match="must be at the same batch"):
        LoaderState(shuffled()).reshard_state_dict(saved, 0, 1)
